"""Caches: evaluated positions, equality with decoding without a cache, refused combinations, and cost."""

import copy
import dataclasses
import gc
import itertools
import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from decoding import fits, refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import MASK, tiny

import paradec
from paradec import Suffix, caches, samplers
from paradec.caches.cost import why_not_worthwhile
from paradec.caches.dkv_decode import DkvDecode
from paradec.caches.dkv_greedy import DkvGreedy
from paradec.caches.stored import ChangeLog
from paradec.caches.table import MODELS as TABLE_MODELS
from paradec.caches.table import REFUSED, table
from paradec.core.memory import check_memory
from paradec.core.query import Query
from paradec.models.adapter import Model

pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:delimiters=")

ROWS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13], [14]]
NEW = 12
STORED = [name for name in caches.names() if caches.get(name).facts.uses_store]


def score_differences(model: Model, cache: Any, rows: Any = ROWS, sampler: Any = "low_confidence", **request: Any):
    """Yield each step's largest score difference to decoding without a cache. If tokens differ, yield inf and stop."""
    sampler = samplers.create(sampler) if isinstance(sampler, str) else sampler
    request = {"max_new_tokens": NEW, "block_length": 4, "eos_early_stop": False, "seed": 1} | request
    cached = sampler.start(model, rows, cache=cache, **request)
    plain = sampler.start(model, rows, cache="none", **request)
    with torch.inference_mode():
        while not cached.done:
            proposal, expected = sampler.step(model, cached), sampler.step(model, plain)
            available = proposal.available
            assert torch.equal(available & expected.available, available)
            yield float((proposal.scores - expected.scores)[available].abs().max())
            sampler.commit(cached, proposal)
            sampler.commit(plain, expected)
            if not torch.equal(cached.canvas, plain.canvas):
                yield float("inf")
                return


def supported_sampler(cache: Any) -> str:
    name = cache if isinstance(cache, str) else cache.name
    return {"picks": "random", "targets": "recap"}.get(caches.get(name).facts.evaluates, "low_confidence")


EVERY_STEP = [
    caches.create("dkv_decode", refresh_interval=1),
    caches.create("dkv_greedy", refresh_interval=1),
    caches.create("vicinity", cache_update_freq=1),
    caches.create("vicinity", warmup_steps=NEW),
]


@pytest.mark.thinned
@pytest.mark.parametrize("cache", EVERY_STEP, ids=str)
@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_refreshing_at_every_step_equals_no_cache_bit_for_bit(cache: Any, prediction: str) -> None:
    if prediction not in cache.facts.predictions:
        pytest.skip("refused")
    assert max(score_differences(tiny(3, prediction=prediction), cache, sampler=supported_sampler(cache))) == 0.0


def count_evaluated(cache: Any, prediction: str) -> list[list[int]]:
    """Count each row's evaluated positions in each step. Every step commits one token per row."""
    request = {"max_new_tokens": NEW, "block_length": 4, "eos_early_stop": False, "sampler": "low_confidence"}
    out = paradec.generate(tiny(1, prediction=prediction), ROWS, cache=cache, trace=True, **request)
    return [step.forwarded for step in out.trace.steps]


@pytest.mark.thinned
@pytest.mark.parametrize("warmup", [0, 1, 2, 6])
@pytest.mark.parametrize(("interval", "prediction"), [(None, "same"), (3, "same"), (None, "shifted")])
def test_vicinity_evaluates_full_rows_only_in_warmup_and_refreshes(warmup: int, interval: Any, prediction: str) -> None:
    """Other steps evaluate the block and its vicinity, and for shifted logits one more position on the left."""
    cache = caches.create("vicinity", prefix_look=0, after_look=2, warmup_steps=warmup, cache_update_freq=interval)
    counts = count_evaluated(cache, prediction)
    for step, step_counts in enumerate(counts):
        is_full = step <= warmup or step % 4 == 0 or interval is not None and step % 4 % interval == 0
        for row, prompt in enumerate(ROWS):
            length, start = len(prompt) + NEW, len(prompt) + step // 4 * 4
            num_near = min(start + 4 + 2, length) - (start - (prediction == "shifted"))
            assert step_counts[row] == (length if is_full else num_near), (step, row)
    assert len(counts) == NEW


@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_dkv_prefill_evaluates_the_prompt_once(prediction: str) -> None:
    first, *later = count_evaluated("dkv_prefill", prediction)
    assert first == [len(prompt) + NEW for prompt in ROWS]
    assert later == [[NEW + (prediction == "shifted")] * len(ROWS)] * (NEW - 1)


def test_a_vicinity_that_covers_the_row_equals_no_cache() -> None:
    cache = caches.create("vicinity", prefix_look=64, after_look=64, warmup_steps=0)
    assert max(score_differences(tiny(3), cache)) < 1e-12


def cache_with_rare_refreshes(name: str, topology: str, prediction: str) -> Any:
    """Create a cache that refreshes every 99 steps if it can; skip the test if it does not support the model."""
    cache = caches.create(name)
    if topology not in cache.facts.topologies or prediction not in cache.facts.predictions:
        pytest.skip("refused")
    return dataclasses.replace(cache, refresh_interval=99) if "refresh_interval" in cache.settings() else cache


@pytest.mark.thinned
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("topology", ["bidirectional", "block_causal"])
@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_caches_are_exact_with_one_layer(name: str, topology: str, prediction: str) -> None:
    """Keys and values of one layer depend only on their token. So only changed tokens need a refresh."""
    cache = cache_with_rare_refreshes(name, topology, prediction)
    # steps commit different numbers of tokens per row
    request: dict[str, Any] = {"sampler": samplers.create("threshold", threshold=0.3)}
    if cache.facts.evaluates in ("picks", "targets"):
        request = {"sampler": supported_sampler(cache), "steps": 6}
    model = tiny(1, topology, prediction)
    assert max(score_differences(model, cache, **request)) < 1e-12
    for block_length, new in ((4, 0), (2, 6)):
        changes = {"block_length": block_length, "max_new_tokens": new}
        assert max(score_differences(model, cache, HOLES, supported_sampler(cache), **changes)) < 1e-12


@dataclass(frozen=True)
class WithoutDelay(DkvDecode):
    """A cache that wrongly reuses keys and values of the step that decided a token, when it was still a mask."""

    def is_stable(self, state: Any, rows: np.ndarray) -> np.ndarray:
        return state.cache_state.is_stable(state, rows, delay=0)


@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_without_its_delay_dkv_is_wrong_even_with_one_layer(prediction: str) -> None:
    assert max(score_differences(tiny(1, prediction=prediction), WithoutDelay(refresh_interval=99))) > 1e-3


EXACT_IF_BLOCK_CAUSAL = [n for n in STORED if "block_causal" in caches.get(n).facts.exact_on]
HOLES = [[1, 2, MASK, 3, 4, MASK, MASK, 5, 6, 7, 8, 9, MASK, 10], [MASK, 6, 7, MASK], [8] * 9 + [MASK, 11, MASK, MASK]]
"""Prompts with masks at both ends and in the middle, and with blocks without masks between blocks with masks."""


@pytest.mark.thinned
@pytest.mark.parametrize("name", EXACT_IF_BLOCK_CAUSAL)
@pytest.mark.parametrize(
    ("rows", "new", "prediction", "block_length"),
    [
        *((ROWS, NEW, "same", 2), (ROWS, NEW, "same", 8), (ROWS, NEW, "shifted", 4)),
        *((HOLES, 0, prediction, length) for prediction in ("same", "shifted") for length in (2, 8)),
    ],
)
def test_some_caches_are_exact_on_block_causal_models(
    name: str, rows: Any, new: int, prediction: str, block_length: int
) -> None:
    model = tiny(2, "block_causal", prediction)
    assert max(score_differences(model, name, rows, block_length=block_length, max_new_tokens=new)) < 1e-12


def test_hierarchical_is_exact_with_the_models_block_length_but_not_with_a_shorter_one() -> None:
    model = tiny(3, "block_causal")
    assert max(score_differences(model, "hierarchical", block_length=4)) < 1e-12
    assert max(score_differences(model, "hierarchical", block_length=2)) > 1e-6


@pytest.mark.parametrize("name", [n for n in STORED if "bidirectional" in caches.get(n).facts.topologies])
def test_caches_change_scores_of_deep_bidirectional_models(name: str) -> None:
    cache = caches.create(name)
    if name == "vicinity":  # with its defaults it covers these rows
        cache = dataclasses.replace(cache, prefix_look=1, after_look=1, warmup_steps=0)
    assert max(score_differences(tiny(3), cache, sampler=supported_sampler(name), block_length=6)) > 1e-6


def test_the_block_cache_evaluates_the_prompt_and_each_finished_block_once() -> None:
    request = {"sampler": "low_confidence", "cache": "block", "max_new_tokens": 8, "eos_early_stop": False}
    out = paradec.generate(tiny(2, "block_causal"), [[1] * 8], trace=True, **request)
    # first the prompt and the first block, then the block alone; 8 = the finished block and the next block
    assert [step.forwarded for step in out.trace.steps] == [[12], [4], [4], [4], [8], [4], [4], [4]]
    assert out.cost.full_forwards == [0] and out.cost.partial_forwards == [8]


@pytest.mark.thinned
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("topology", ["bidirectional", "block_causal"])
def test_filled_masks_of_a_row_do_not_depend_on_other_rows(name: str, topology: str) -> None:
    cache, model = cache_with_rare_refreshes(name, topology, "same"), tiny(2, topology)
    request = {"sampler": supported_sampler(cache), "cache": cache, "temperature": 0.7, "seed": 5, "block_length": 4}
    together = paradec.infill(model, HOLES, **request)
    for index, row in enumerate(HOLES):
        expected = paradec.infill(model, row, **request)
        filled = together.sequences[index, -len(row) :].tolist()
        assert expected.sequences[0].tolist() == filled and expected.nfe == together.row_nfe[index]
        assert [a for a, b in zip(filled, row, strict=True) if b != MASK] == [b for b in row if b != MASK]
        assert MASK not in filled


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_window_of_dkv_greedy_equals_a_plain_loop(data: st.DataObject) -> None:
    length = data.draw(st.integers(4, 20))
    undecided = np.array(data.draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    undecided[data.draw(st.integers(0, length - 1))] = True
    window = data.draw(st.integers(0, 6))
    picks = data.draw(st.permutations(np.flatnonzero(undecided).tolist()))[: data.draw(st.integers(1, 3))]
    fresh = [p for p in range(length) if not undecided[p]][:2]

    expected = {*picks, *fresh}
    for pick in picks:
        num_added = 0
        for distance in range(1, length):
            for position in (pick - distance, pick + distance):
                if num_added < window and 0 <= position < length and undecided[position] and position not in expected:
                    expected.add(position)
                    num_added += 1

    # a state after five steps, whose last step decided the positions `fresh`
    state = type("State", (), {})()
    state.canvas = torch.where(torch.as_tensor(undecided), MASK, 1)[None]
    state.facts = type("Facts", (), {"mask_token_id": MASK})
    state.row_step, state.length = np.array([5]), np.array([len(undecided)])
    state.cache_state = ChangeLog(state)
    state.cache_state.changed_at[0, fresh] = 4
    needed = DkvGreedy(window=window).positions_to_evaluate(state, np.array([0]), np.array([picks]))[0]
    assert set(np.flatnonzero(needed)) == expected


class CountsPositions:
    """A model that counts evaluated positions, padding included, and records input shapes."""

    def __init__(self, model: Model):
        self.model, self.positions, self.shapes = model, 0, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, query: Query, store: Any = None) -> torch.Tensor:
        self.positions += query.tokens.numel()
        self.shapes.append(tuple(query.tokens.shape))
        return self.model(query, store)


@pytest.mark.thinned
@pytest.mark.parametrize("cache", ["prefix", "dual", "vicinity", "dkv_decode", "dkv_prefill", "dkv_pd"])
def test_rows_in_different_blocks_cost_little_more_than_separate_rows(cache: str) -> None:
    model = CountsPositions(tiny(1))
    rows = [[index + 1] * length for index, length in enumerate([2, 5, 9, 14, 20, 27, 35, 44])]
    sampler = samplers.create("threshold", threshold=0.35)
    request = {"sampler": sampler, "cache": cache, "max_new_tokens": 24, "block_length": 8, "eos_early_stop": False}
    together = paradec.generate(model, rows, **request)
    batched, model.positions = model.positions, 0
    separate = [paradec.generate(model, [row], **request) for row in rows]
    assert together.row_nfe == [out.nfe for out in separate] and len(set(together.row_nfe)) > 2
    assert model.positions == sum(out.forwarded_tokens for out in separate)
    assert batched <= 1.2 * model.positions


def test_shape_multiple_rounds_widths_and_changes_no_token() -> None:
    model = CountsPositions(tiny(1))
    request = {"steps": 6, "max_new_tokens": 24, "block_length": 8, "seed": 3, "eos_early_stop": False}
    for name in STORED:
        if "bidirectional" not in caches.get(name).facts.topologies:
            continue
        request["sampler"] = "recap" if name == "recap" else "random"
        plain = paradec.generate(model, ROWS, cache=name, **request)
        model.shapes = []
        rounded = paradec.generate(model, ROWS, cache=caches.create(name, shape_multiple=8), **request)
        assert torch.equal(plain.sequences, rounded.sequences)
        assert plain.forwarded_tokens == rounded.forwarded_tokens  # padding is not counted
        assert {width for _, width in model.shapes} <= {8, 16, 24, 32}


ENTRIES = [entry for entry in table(samplers.registry, caches.registry) if samplers.get(entry[0]).family == "masked"]


@pytest.fixture(scope="module")
def models() -> dict[tuple[str, str], Model]:
    return {key: tiny(2, *key) for key in TABLE_MODELS}


def mark_entries(entries: list) -> list:
    """Mark entries `full`, except every 37th supported entry and one refused entry per reason and cache."""
    allowed = [entry[:4] for entry in entries if entry[4].status != REFUSED]
    refused = {(entry[1], entry[4].why): entry[:4] for entry in entries if entry[4].status == REFUSED}
    quick = {*allowed[::37], *refused.values()}
    marks = [[] if entry[:4] in quick else [pytest.mark.full] for entry in entries]
    return [pytest.param(e, id="-".join(e[:4]), marks=m) for e, m in zip(entries, marks, strict=True)]


@pytest.mark.thinned
@pytest.mark.parametrize("entry", mark_entries(ENTRIES))
def test_combinations_decode_or_are_refused_as_the_table_says(entry: Any, models: dict) -> None:
    sampler, cache, topology, prediction, verdict = entry
    model = models[topology, prediction]
    request = {"sampler": sampler, "cache": cache, "max_new_tokens": 8, "block_length": 4, "seed": 2}
    if verdict.status == REFUSED:
        message = f"cache='{cache}' does not work with sampler '{sampler}'"
        if not fits(sampler, model):
            message = f"sampler '{sampler}' (evaluates masks|does not work here)"  # with every cache
        elif topology == "causal_context" and cache == "none":
            message = f"sampler '{sampler}' does not work here"
        refuses(lambda: paradec.generate(model, ROWS, **request), message)
        return
    together = paradec.generate(model, ROWS, **request)
    expected = paradec.generate(model, ROWS[:1], **request)
    assert not (together.new_tokens == MASK).any()
    assert together.new_tokens[0].tolist() == expected.new_tokens[0].tolist()
    assert together.row_nfe[0] == expected.nfe


def test_caches_survive_a_round_trip_through_to_dict() -> None:
    for name in caches.names():
        cache = caches.create(name)
        data = cache.to_dict()
        assert data.pop("cache") == name and caches.create(name, **data) == cache


def test_cost_counts_forwards_tokens_and_bytes() -> None:
    model = tiny(2)
    for name in ("none", "dual", "dkv_decode"):
        out = paradec.generate(model, ROWS, cache=name, max_new_tokens=NEW, block_length=8, eos_early_stop=False)
        full, partial = out.cost.full_forwards, out.cost.partial_forwards
        assert [a + b for a, b in zip(full, partial, strict=True)] == out.row_nfe
        assert sum(out.cost.forwarded_tokens) == out.forwarded_tokens
        # float64, keys and values, 2 layers, 2 heads of width 8, 3 rows, one slot more than the longest row
        assert out.cost.store_bytes == (0 if name == "none" else 8 * 2 * 2 * 2 * 8 * 3 * (8 + NEW + 1))
        assert (sum(partial) > 0) == (name != "none")


def test_too_little_memory_raises_an_error_before_any_work() -> None:
    model = CountsPositions(tiny(2))
    assert caches.create("dual", max_memory="2GB").max_memory == 2 * 10**9
    cache = caches.create("dual", max_memory=1000)
    message = r"3 x 20 positions would take 31.5 KiB, more than max_memory \(1000 bytes\)"
    refuses(lambda: paradec.generate(model, ROWS, cache=cache, max_new_tokens=NEW), message)
    assert model.shapes == []


def test_a_float32_store_takes_half_the_memory_and_changes_scores_little() -> None:
    model = tiny(2)
    request = {"max_new_tokens": NEW, "block_length": 8, "eos_early_stop": False}
    wide = paradec.generate(model, ROWS, cache="dual", **request)
    narrow = paradec.generate(model, ROWS, cache=caches.create("dual", store_dtype="float32"), **request)
    assert 2 * narrow.cost.store_bytes == wide.cost.store_bytes
    assert (narrow.new_tokens == wide.new_tokens).float().mean() > 0.9
    gaps = list(score_differences(model, caches.create("dkv_decode", store_dtype="float32", refresh_interval=1)))
    assert 0 < gaps[0] < 1e-5


@pytest.mark.parametrize("error", [None, RuntimeError("from the callback"), KeyboardInterrupt()], ids=repr)
def test_the_store_is_freed_after_success_errors_and_interrupts(error: BaseException | None) -> None:
    model, stores = tiny(2), []

    def callback(state: Any, commit: Any) -> None:
        stores.append((state.store, state.store.nbytes))
        if error is not None:
            raise error

    request = {"cache": "dual", "max_new_tokens": NEW, "block_length": 8, "callback": callback}
    if error is None:
        paradec.generate(model, ROWS, **request)
    else:
        with pytest.raises(RuntimeError if isinstance(error, RuntimeError) else paradec.Interrupted) as caught:
            paradec.generate(model, ROWS, **request)
        assert caught.value.__traceback__ is not None
    store, num_bytes = stores[0]
    assert num_bytes > 0 and store.nbytes == 0
    gc.collect()


def test_a_cache_that_cannot_save_time_warns_once() -> None:
    dkv_decode = caches.create("dkv_decode")
    assert why_not_worthwhile(dkv_decode, 1, 40) and why_not_worthwhile(dkv_decode, 1, 512, "cuda")
    assert why_not_worthwhile(caches.create("none"), 1, 16) is None
    assert why_not_worthwhile(dkv_decode, 8, 40) is None and why_not_worthwhile(dkv_decode, 1, 512) is None
    model = tiny(1)
    # with one block a prefix cache stores only the short prompt
    with pytest.warns(UserWarning, match="cache='prefix' still evaluates 9") as caught:
        out = paradec.generate(model, [[1, 2]], cache="prefix", max_new_tokens=24, block_length=24)
    assert len(caught) == 1 and out.cost.share == out.forwarded_tokens / (26 * out.nfe)
    # with one step per block every step evaluates whole rows
    request = {"sampler": "low_confidence", "steps": 4, "max_new_tokens": 16, "block_length": 4}
    with pytest.warns(UserWarning, match="cache='dual' still evaluates 100% .* use cache='none'"):
        paradec.generate(model, [[1] * 8], cache="dual", **request)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paradec.generate(model, [[1] * 40], cache="dual", max_new_tokens=16, block_length=4)
        paradec.generate(model, [[1] * 8], cache="none", max_new_tokens=16, block_length=4)


def test_a_store_larger_than_memory_is_refused_before_it_is_allocated() -> None:
    message = r"would take .* more than this machine's memory .* narrower store_dtype"
    refuses(lambda: tiny(1).make_store(10**6, 10**6), message)
    refuses(lambda: check_memory(2048, torch.device("cpu"), 2047, "a store"), "more than max_memory")
    check_memory(2048, torch.device("cpu"), 2048, "a store")


NEW_SMALL = 10
SUFFIX_CACHES = [name for name in caches.names() if caches.get(name).facts.supports_suffix]
WINDOWS = [None, Suffix(0), Suffix(5), Suffix(7, "gaussian"), Suffix(8, "uniform", count=3)]
CACHES_AND_WINDOWS = [
    pytest.param(*pair, marks=() if index % 4 == 0 else pytest.mark.full, id=f"{pair[0]}-{pair[1]}")
    for index, pair in enumerate(itertools.product(SUFFIX_CACHES, WINDOWS))
]
"""The pairs that run by default contain every cache and every window."""
UNEQUAL_ROWS = [[1], [2, 3], [4] * 13, [5, 6, 7]]
UNEQUAL_HOLES = [[1, 2, *[MASK] * 8, 5, 6, *[MASK] * 8, 7, 8], [*[MASK] * 6, 3], [4, MASK]]
UNEQUAL_HOLES += [[9, *[MASK] * 11, 2, 2, MASK, 3]]
REQUEST: dict[str, Any] = {"max_new_tokens": NEW_SMALL, "block_length": 4, "eos_early_stop": False, "seed": 3}


def rows_of(out: Any) -> list[list[int]]:
    """Return the ids of each row without padding."""
    return [ids[mask.bool()].tolist() for ids, mask in zip(out.sequences, out.attention_mask, strict=True)]


def assert_equals_separate_rows(out: Any, model: Any, prompts: list[list[int]], request: dict[str, Any]) -> None:
    for row, prompt in enumerate(prompts):
        expected = paradec.generate(model, [prompt], **request)
        assert rows_of(expected) == [rows_of(out)[row]]
        assert expected.cost.forwarded_tokens == [out.cost.forwarded_tokens[row]] and expected.nfe == out.row_nfe[row]


@pytest.mark.thinned
@pytest.mark.parametrize("new", [1, 3, NEW_SMALL])
@pytest.mark.parametrize(("cache", "window"), CACHES_AND_WINDOWS)
def test_rows_of_unequal_lengths_do_not_depend_on_the_batch(cache: str, window: Any, new: int) -> None:
    request = REQUEST | {"cache": cache, "suffix": window, "temperature": 0.1, "max_new_tokens": new}
    model = tiny(2)
    assert_equals_separate_rows(paradec.generate(model, UNEQUAL_ROWS, **request), model, UNEQUAL_ROWS, request)


@pytest.mark.thinned
@pytest.mark.parametrize(("cache", "window"), CACHES_AND_WINDOWS)
def test_rows_with_holes_do_not_depend_on_the_batch(cache: str, window: Any) -> None:
    model = tiny(2, prediction="shifted")
    for new in (0, 9):
        request = REQUEST | {"cache": cache, "suffix": window, "temperature": 0.1, "max_new_tokens": new}
        out = paradec.generate(model, UNEQUAL_HOLES, **request)
        assert_equals_separate_rows(out, model, UNEQUAL_HOLES, request)
        for before, row in zip(UNEQUAL_HOLES, rows_of(out), strict=True):
            assert MASK not in row and len(row) == len(before) + new
            assert all(old in (MASK, token) for token, old in zip(row, before, strict=False))


@pytest.mark.thinned
@pytest.mark.parametrize(("cache", "window"), CACHES_AND_WINDOWS)
def test_rows_do_not_depend_on_a_refilled_batch(cache: str, window: Any) -> None:
    model = tiny(2, prediction="shifted")
    request = {name: value for name, value in REQUEST.items() if name != "max_new_tokens"}
    request |= {"cache": cache, "suffix": window, "temperature": 0.1}
    rows = [
        ([1, 2, 3], 5), ([4], 20), ([5] * 9, 1), (UNEQUAL_HOLES[0], 0), ([6, 7], 13), (UNEQUAL_HOLES[1], 4), ([8], 30),
    ]  # fmt: skip
    prompts = [{"prompt": ids, "max_new_tokens": new} for ids, new in rows]
    outs = list(paradec.generate_many(model, prompts, batch_size=2, errors="raise", **request))
    assert len({out.index for out in outs}) == len(rows)
    for out in outs:
        ids, new = rows[out.index]
        assert_equals_separate_rows(out, model, [ids], request | {"max_new_tokens": new})


@pytest.mark.thinned
@pytest.mark.parametrize("prediction", ["same", "shifted"])
@pytest.mark.parametrize(("cache", "window"), [pair for pair in CACHES_AND_WINDOWS if pair.values[0] != "none"])
def test_shared_and_kept_prefixes_change_only_the_cost(cache: str, window: Any, prediction: str) -> None:
    """This holds in a one-layer model, whose keys and values depend only on their token."""
    model = tiny(1, prediction=prediction)
    request = REQUEST | {"cache": cache, "suffix": window, "sampler": "low_confidence"}
    rows = [[*range(1, 11), 11], [*range(1, 11), 12, 13], [*range(1, 11), 14, 15, 16]]
    shared = paradec.generate(model, rows, share_prefix=True, **request)
    plain = paradec.generate(model, rows, **request)
    assert rows_of(shared) == rows_of(plain)
    assert sum(shared.cost.forwarded_tokens) < sum(plain.cost.forwarded_tokens)
    first = paradec.generate(model, rows, keep_prefix=True, **request)
    next_prompts = [[*row, 7, 8] for row in rows_of(first)]
    second = paradec.generate(model, next_prompts, prefix=first.prefix, **request)
    plain = paradec.generate(model, next_prompts, **request)
    assert rows_of(second) == rows_of(plain)
    assert sum(second.cost.forwarded_tokens) < sum(plain.cost.forwarded_tokens)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_copies_of_a_state_with_d2_cache_decode_alike(window: Any) -> None:
    model, sampler = tiny(2), samplers.create("threshold", threshold=0.4)
    state = sampler.start(model, UNEQUAL_ROWS, cache=caches.create("d2", current_k=3), suffix=window, **REQUEST)
    for _ in range(3):
        sampler.commit(state, sampler.step(model, state))
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    evaluated = []
    for copy_ in (state, *copies):
        count = 0
        while not copy_.done:
            proposal = sampler.step(model, copy_)
            count += sum(len(query.rows) * query.positions.shape[1] for query in proposal.cost.queries)
            sampler.commit(copy_, proposal)
        evaluated.append(count)
    assert all(torch.equal(copy_.canvas, state.canvas) for copy_ in copies)
    assert len(set(evaluated)) == 1

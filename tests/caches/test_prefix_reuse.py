"""Keys and values of prompts that are kept for the next turn or shared by the rows of a batch; the prefix tree."""

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from hypothesis import given
from hypothesis import strategies as st
from small_models import MASK, tiny

import paradec
from paradec import caches, samplers
from paradec.attention import shared_prefix
from paradec.caches.kept_prefix import KeptPrefix, prefill
from paradec.caches.prefix_tree import Layers, PrefixTree
from paradec.models.adapter import Model

pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:delimiters=")

EXACT_CACHES = ["block", "prefix", "dual", "vicinity", "delayed", "dkv_prefill"]
PREDICTIONS = ["same", "shifted"]
MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
DEFAULT = ["low_confidence", "credit", "wino", "freedave", "prophet_rows", "learn2pd", "s2d2"]
EXACT_PAIRS = [(name, PREDICTIONS[index % 2]) for index, name in enumerate(EXACT_CACHES)] + [("block", "shifted")]
"""Every exact cache with one prediction, and the block cache with both."""
ROWS = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10] * 11]
SYSTEM = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]
"""A common prefix of two and a half blocks of 4."""
ENDS = tuple(range(20, 40))
"""Many end tokens, so that rows of random models end early."""


def request(**changes: Any) -> dict[str, Any]:
    return {"sampler": "low_confidence", "max_new_tokens": 10, "eos_early_stop": False, "seed": 1} | changes


def largest_gap(model: Model, rows: list[list[int]], cache: Any, new: int = 10, **reuse: Any) -> float:
    """Return the largest score difference of any step to decoding without cache and prefix; inf if tokens differ."""
    method = samplers.create("low_confidence")
    settings = {"max_new_tokens": new, "eos_early_stop": False, "seed": 1}
    cached, plain = method.start(model, rows, cache=cache, **settings, **reuse), method.start(model, rows, **settings)
    assert cached.reuses
    gap = 0.0
    with torch.inference_mode():
        while not cached.done:
            proposal, expected = method.step(model, cached), method.step(model, plain)
            gap = max(gap, float((proposal.scores - expected.scores)[proposal.available].abs().max()))
            method.commit(cached, proposal)
            method.commit(plain, expected)
            if not torch.equal(cached.canvas, plain.canvas):
                return float("inf")
    return gap


def assert_equals_separate_rows(
    together: Any, model: Model, rows: list[list[int]], extra: int = 0, **request: Any
) -> None:
    """Assert that a batch gives the same rows as separate decoding. extra: how many more forwards a batched row has."""
    for index, row in enumerate(rows):
        expected = paradec.generate(model, [row], **request)
        assert together.new_tokens[index].tolist() == expected.new_tokens[0].tolist()
        assert together.finished[index] == expected.finished[0]
        assert together.row_nfe[index] == expected.nfe + extra


def run_conversation(model: Model, cache: Any, prefix: KeptPrefix | None = None, **changes: Any) -> list[Any]:
    """Decode three turns of three rows. Assert that each equals decoding without cache and prefix."""
    rows, outputs = ROWS, []
    for turn in range(3):
        out = paradec.generate(model, rows, cache=cache, prefix=prefix, keep_prefix=True, **request(**changes))
        plain = paradec.generate(model, rows, **request(**changes))
        assert torch.equal(out.sequences, plain.sequences)
        outputs.append(out)
        prefix = out.prefix
        texts = [ids[mask.bool()].tolist() for ids, mask in zip(out.sequences, out.attention_mask)]
        # the next questions have different lengths
        rows = [text + [30 + i] * (i + turn + 1) for i, text in enumerate(texts)]
    return outputs


@pytest.mark.thinned
@pytest.mark.parametrize(("cache", "prediction"), EXACT_PAIRS)
def test_three_turns_with_a_kept_prefix_equal_turns_without_it(cache: str, prediction: str) -> None:
    model = tiny(2, "block_causal", prediction)
    outputs = run_conversation(model, cache)
    assert outputs[0].cost.reused_tokens == [0, 0, 0]
    for previous, output in zip(outputs, outputs[1:], strict=False):
        assert output.cost.reused_tokens == list(map(len, previous.prefix.tokens))
        assert all(count % 4 == 0 and count >= 8 for count in output.cost.reused_tokens)
        assert output.prefix.exact
    rows = [row + [5, 5] for row in outputs[-1].prefix.tokens]
    assert largest_gap(model, rows, cache, prefix=outputs[-1].prefix) < 1e-12


@pytest.mark.parametrize("first_cache", ["hierarchical", "dkv_decode", "block"])
def test_a_prefix_is_exact_if_all_its_turns_used_exact_caches(first_cache: str) -> None:
    model, rows = tiny(2, "block_causal"), ROWS
    prefix = None
    for cache in (first_cache, "block", "prefix"):
        out = paradec.generate(model, rows, cache=cache, prefix=prefix, keep_prefix=True, **request())
        assert all(out.cost.reused_tokens) == (prefix is not None)
        assert out.prefix.exact == (first_cache == "block")
        prefix, rows = out.prefix, [[*row, 5, 5] for row in out.prefix.tokens]


def test_keys_from_causal_calls_are_reused_only_by_causal_calls() -> None:
    model, causal, noncausal = tiny(2, "block_causal"), samplers.create("s2d2"), samplers.create("s2d2", causal=False)
    outputs = run_conversation(model, "block", sampler=causal)
    assert outputs[-1].prefix.exact and outputs[-1].prefix.causal_keys
    for first, second in ((causal, "threshold"), ("threshold", causal), (causal, noncausal)):
        prefix = paradec.generate(model, ROWS, cache="block", keep_prefix=True, **request(sampler=first)).prefix
        with pytest.raises(ValueError, match="^prefix=KeptPrefix.* keys and values of .*causal attention"):
            paradec.generate(model, ROWS, cache="block", prefix=prefix, **request(sampler=second))
    rows = [[*SYSTEM, token] for token in range(3)]
    arguments = request(sampler=causal, cache="block")
    shared = paradec.generate(model, rows, share_prefix=True, **arguments)
    assert shared.cost.reused_tokens == [8, 8, 8]
    assert torch.equal(shared.sequences, paradec.generate(model, rows, **arguments).sequences)
    first = paradec.generate(model, ROWS, keep_prefix=True, cache="block", **request())
    run_conversation(model, "block", first.prefix, sampler=noncausal)


def test_reused_tokens_are_not_evaluated() -> None:
    model = tiny(2, "block_causal")
    first = paradec.generate(model, [[1] * 13], cache="block", keep_prefix=True, **request())
    rows = [first.sequences[0].tolist() + [2, 3]]
    plain = paradec.generate(model, rows, cache="block", trace=True, **request())
    reused = paradec.generate(model, rows, cache="block", prefix=first.prefix, trace=True, **request())
    (count,) = reused.cost.reused_tokens
    assert count == len(first.prefix.tokens[0]) == 20
    assert plain.forwarded_tokens - reused.forwarded_tokens == count
    assert reused.nfe == plain.nfe and plain.cost.reused_tokens == [0]
    assert [s.forwarded for s in reused.trace.steps][1:] == [s.forwarded for s in plain.trace.steps][1:]


@pytest.mark.thinned
@pytest.mark.parametrize(
    "sampler", DEFAULT + [pytest.param(n, marks=pytest.mark.full) for n in MASKED if n not in DEFAULT]
)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_kept_keys_and_values_equal_those_of_a_forward(sampler: str, prediction: str) -> None:
    if prediction == "shifted" and sampler in MASKED and samplers.get(sampler).needs.mask_probes:
        pytest.skip("refused")
    model = tiny(3, "block_causal", prediction, ends=ENDS)
    changes: dict[str, Any] = {
        "sampler": sampler, "eos_early_stop": True, "temperature": 1.0, "max_new_tokens": 17, "seed": 7,
    }  # fmt: skip
    if sampler == "prophet_rows":
        changes |= {"sampler": "threshold", "stop": paradec.Prophet()}
    elif "temperature" in samplers.get(sampler).unsupported:
        del changes["temperature"]
    for cache in ("block", "dual") if sampler == "low_confidence" else ("block",):
        out = paradec.generate(model, ROWS, cache=cache, keep_prefix=True, **request(**changes))
        longest = 0
        for index, tokens in enumerate(out.prefix.tokens):
            row = out.sequences[index][out.attention_mask[index].bool()].tolist()
            assert len(tokens) % 4 == 0 and tokens == row[: len(tokens)] and MASK not in tokens
            longest = max(longest, len(tokens))
            if not tokens:
                continue
            expected = prefill(model, tokens, caches.create(cache), out.prefix.causal_keys)
            for layer, pair in expected.layers.items():
                for actual, tensor in zip(out.prefix.layers[layer], pair, strict=True):
                    torch.testing.assert_close(actual[index, : len(tokens)], tensor[0], rtol=0, atol=1e-12)
        assert longest >= (12 if sampler in DEFAULT else 8)  # 8 tokens of the prompt, and for some samplers a block
        assert out.prefix.nbytes == 2 * 3 * 3 * longest * 2 * 8 * 8


def test_only_blocks_in_common_with_the_prefix_are_reused() -> None:
    model = tiny(2, "block_causal")
    prefix = paradec.generate(model, [list(range(1, 19))], cache="block", keep_prefix=True, **request()).prefix
    assert len(prefix.tokens[0]) == 24
    rows = [list(range(1, 11)) + [30] * 9, [31] * 12, list(range(1, 9)), list(range(1, 19))]
    out = paradec.generate(model, rows, cache="block", prefix=prefix, **request())
    assert out.cost.reused_tokens == [8, 0, 8, 16]
    assert torch.equal(out.sequences, paradec.generate(model, rows, **request()).sequences)


def count_reusable(prediction: str, num_common: int, prompt_length: int) -> int:
    """Count reusable leading positions: common blocks of 4 before the position that predicts the first new token."""
    first_predicting = prompt_length - (prediction == "shifted")
    return sum(4 for end in range(4, 200, 4) if end <= num_common and end <= first_predicting)


def count_reused(model: Model, rows: list[list[int]], **reuse: Any) -> list[int]:
    """Count the reused leading positions of each row."""
    return samplers.create("low_confidence").start(model, rows, cache="block", **reuse).reused.tolist()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_kept_prefixes_with_prompts_of_every_length(prediction: str) -> None:
    model = tiny(2, "block_causal", prediction)
    first = paradec.generate(model, [SYSTEM], cache="block", keep_prefix=True, **request()).prefix
    tokens = first.tokens[0]
    assert len(tokens) >= 16
    rows = [tokens[:size] for size in range(1, len(tokens))]
    expected = [count_reusable(prediction, size, size) for size in range(1, len(tokens))]
    assert count_reused(model, rows, prefix=first) == expected and {0, 4, 8, 12} <= set(expected)
    assert largest_gap(model, rows, "block", new=4, prefix=first) < 1e-12
    # a single row copies the kept keys; two rows with the same prefix read them in place
    for num_new in (0, 1, 3, 4):
        rows = [tokens + [31] * num_new, tokens + [32] * num_new][: 1 + num_new % 2]
        count = count_reusable(prediction, len(tokens), len(tokens) + num_new)
        assert count_reused(model, rows, prefix=first) == [count] * len(rows)
        assert largest_gap(model, rows, "block", new=4, prefix=first) < 1e-12


@pytest.mark.thinned
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("num_rest", range(4))
def test_shared_prefixes_of_two_blocks_and_up_to_three_tokens(prediction: str, num_rest: int) -> None:
    model, common = tiny(2, "block_causal", prediction), list(range(1, 9 + num_rest))
    for rows in ([common, common + [20, 21, 22]], [common + [20], common, common + [21] * 6]):
        count = count_reusable(prediction, len(common), len(common))
        assert count_reused(model, rows, share_prefix=True) == [count] * len(rows)
        assert largest_gap(model, rows, "block", new=4, share_prefix=True) < 1e-12


def test_rows_find_their_prefix_in_any_order() -> None:
    model = tiny(2, "block_causal")
    prefix = paradec.generate(model, ROWS, cache="block", keep_prefix=True, **request()).prefix
    rows = [prefix.tokens[i] + [3] for i in (2, 0, 1, 0)]
    out = paradec.generate(model, rows, cache="block", prefix=prefix, **request())
    assert out.cost.reused_tokens == [len(prefix.tokens[i]) for i in (2, 0, 1, 0)]
    assert torch.equal(out.sequences, paradec.generate(model, rows, **request()).sequences)
    second = paradec.generate(model, rows[1:2], cache="block", prefix=prefix.row(0), **request())
    assert second.cost.reused_tokens == [len(prefix.tokens[0])]
    assert torch.equal(second.new_tokens, out.new_tokens[1:2])


@pytest.mark.thinned
@pytest.mark.parametrize(("cache", "prediction"), EXACT_PAIRS)
def test_a_shared_prefix_changes_neither_tokens_nor_scores(cache: str, prediction: str) -> None:
    model = tiny(2, "block_causal", prediction)
    rows = [SYSTEM + row for row in ROWS]
    together = paradec.generate(model, rows, cache=cache, share_prefix=True, **request())
    assert together.cost.reused_tokens == [8, 8, 8]
    assert_equals_separate_rows(together, model, rows, 1, cache=cache, **request())
    assert largest_gap(model, rows, cache, share_prefix=True) < 1e-12


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ["wino", "credit", "random", "freedave", "tree"])
def test_samplers_decode_alike_with_a_shared_prefix(sampler: str) -> None:
    model = tiny(2, "block_causal", ends=ENDS)
    rows = [SYSTEM + [index] * (index % 3 + 1) for index in range(8)]
    method = samplers.create("freedave", draft_mode="tree") if sampler == "tree" else samplers.create(sampler)
    changes = request(sampler=method, eos_early_stop=True, temperature=1.0, max_new_tokens=16)
    together = paradec.generate(model, rows, cache="block", share_prefix=True, **changes)
    assert len(set(together.row_nfe)) > 1
    assert_equals_separate_rows(together, model, rows, 1, cache="block", **changes)


def test_a_shared_prefix_is_stored_and_counted_once() -> None:
    model = tiny(2, "block_causal")
    rows = [SYSTEM * 4 + [index] * 3 for index in range(8)]
    plain = paradec.generate(model, rows, cache="block", **request())
    shared = paradec.generate(model, rows, cache="block", share_prefix=True, trace=True, **request())
    position_bytes = 8 * 2 * 2 * 2 * 8  # float64, keys and values, 2 layers of 2 heads of 8
    assert plain.cost.store_bytes == position_bytes * 8 * (56 + 1)
    assert shared.cost.store_bytes == position_bytes * (40 + 8 * (16 + 1))
    assert shared.forwarded_tokens == plain.forwarded_tokens - 7 * 40
    assert shared.row_forwards == plain.row_forwards + 1 and shared.nfe == plain.nfe + 1
    assert shared.trace.steps[0].kind == "prefix" and shared.trace.steps[0].forwarded == [40, 0, 0, 0, 0, 0, 0, 0]
    assert np.sum([s.forwarded for s in shared.trace.steps], 0).tolist() == shared.cost.forwarded_tokens
    enough, too_small = (caches.create("block", max_memory=shared.cost.store_bytes - n) for n in (0, 1))
    paradec.generate(model, rows, cache=enough, share_prefix=True, **request())
    with pytest.raises(ValueError, match=r"8 x 16 positions and 40 that all rows share would take .* max_memory"):
        paradec.generate(model, rows, cache=too_small, share_prefix=True, **request())


def test_a_prefix_of_all_rows_is_read_in_place() -> None:
    model = tiny(2, "block_causal")
    prefix = paradec.generate(model, [SYSTEM * 4], cache="block", keep_prefix=True, **request()).prefix
    rows = [SYSTEM * 4 + [index] * (index + 1) for index in range(5)]
    out = paradec.generate(model, rows, cache="block", prefix=prefix, keep_prefix=True, **request())
    assert out.cost.reused_tokens == [40] * 5
    assert out.cost.store_bytes == 8 * 2 * 2 * 2 * 8 * (40 + 5 * (16 + 1))
    assert torch.equal(out.sequences, paradec.generate(model, rows, **request()).sequences)
    # in the next turn each row has a different prefix
    rows = [row + [6] for row in out.prefix.tokens]
    assert largest_gap(model, rows, "block", prefix=out.prefix) < 1e-12


def test_rows_without_a_common_block_reuse_no_token() -> None:
    model = tiny(1, "block_causal")
    for rows in ([SYSTEM], [[1, 2, 3, 4], [1, 2, 3, 5]]):
        out = paradec.generate(model, rows, cache="block", share_prefix=True, **request())
        assert out.cost.reused_tokens == [0] * len(rows)
        plain = paradec.generate(model, rows, cache="block", **request())
        assert out.nfe == plain.nfe and torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("mask_kind", ["per query", "common", "none"])
@pytest.mark.parametrize("max_scores", [2**24, 50])
def test_attention_with_a_shared_prefix_equals_attention_to_all_keys(
    mask_kind: str, max_scores: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(shared_prefix, "MAX_SCORES", max_scores)
    torch.manual_seed(0)
    query = torch.randn(3, 6, 5, 8, dtype=torch.float64)
    keys, values = torch.randn(2, 3, 2, 7, 8, dtype=torch.float64)
    prefix_keys, prefix_values = torch.randn(2, 4, 2, 8, dtype=torch.float64)
    masks = {"none": None, "common": torch.rand(3, 1, 1, 7) > 0.4, "per query": torch.rand(3, 1, 5, 7) > 0.4}
    mask = masks[mask_kind]
    if mask_kind == "per query":
        mask[1, :, 2] = False  # a query that attends only to the prefix
    output = shared_prefix.attend_shared(query, keys, values, mask, (prefix_keys, prefix_values), 0.3)
    all_keys, all_values = (
        torch.cat((common.transpose(0, 1).expand(3, -1, -1, -1), suffix), 2)
        for common, suffix in ((prefix_keys, keys), (prefix_values, values))
    )
    options = {"attn_mask": None, "scale": 0.3, "enable_gqa": True}
    if mask is not None:
        options["attn_mask"] = torch.cat((torch.ones(*mask.shape[:3], 4, dtype=torch.bool), mask), -1)
    expected = torch.nn.functional.scaled_dot_product_attention(query, all_keys, all_values, **options)
    torch.testing.assert_close(output, expected.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.mark.thinned
@pytest.mark.parametrize("cache", ["prefix", "dual", "dkv_decode", "dkv_pd"])
def test_bidirectional_models_are_exact_only_with_one_layer(cache: str) -> None:
    prediction = "shifted" if cache in ("dual", "dkv_decode") else "same"
    # tokens after the prefix change its keys from the second layer on, which changes scores from the third layer on
    for layers in (1, 3):
        model = tiny(layers, prediction=prediction)
        prefix = paradec.generate(model, ROWS, cache=cache, keep_prefix=True, **request()).prefix
        rows = [tokens + [5, 6] for tokens in prefix.tokens]
        gaps = [largest_gap(model, rows, caches.create(cache), prefix=prefix)]
        gaps.append(largest_gap(model, [SYSTEM + row for row in ROWS], cache, share_prefix=True))
        assert max(gaps) < 1e-12 if layers == 1 else min(gaps) > 1e-6
        assert not prefix.exact


def test_rows_with_a_kept_prefix_do_not_depend_on_each_other() -> None:
    model = tiny(3)
    prefix = paradec.generate(model, [SYSTEM], cache="dual", keep_prefix=True, **request(block_length=5)).prefix
    rows = [SYSTEM + row for row in ROWS]
    for cache in ("dual", "prefix", "dkv_decode"):
        changes = request(block_length=5, cache=cache, prefix=prefix)
        together = paradec.generate(model, rows, **changes)
        assert together.cost.reused_tokens == [10, 10, 10]
        assert_equals_separate_rows(together, model, rows, **changes)


@pytest.fixture(scope="module")
def model_and_prefix() -> tuple[Model, KeptPrefix]:
    model = tiny(1, "block_causal")
    return model, paradec.generate(model, [SYSTEM], cache="block", keep_prefix=True, **request()).prefix


def test_a_prefix_of_another_model_or_dtype_is_refused(model_and_prefix: Any) -> None:
    model, prefix = model_and_prefix
    other, narrow = tiny(1, "block_causal", seed=1), caches.create("block", store_dtype="float32")
    for model_, cache, options, message in (
        (model, "block", {"share_prefix": True}, "prefix and share_prefix=True both choose the rows' prefix"),
        (other, "block", {}, r"KeptPrefix\(1 rows of .* was kept with another model than this Llama"),
        (model, narrow, {}, "kept in torch.float64 and cache='block' would store torch.float32"),
    ):
        refuses(partial(paradec.generate, model_, [SYSTEM], cache=cache, prefix=prefix, **options), message)
    narrow_prefix = paradec.generate(model, [SYSTEM], cache=narrow, keep_prefix=True, **request()).prefix
    assert narrow_prefix.dtype == torch.float32
    assert paradec.generate(model, [SYSTEM], cache=narrow, prefix=narrow_prefix, **request()).cost.reused_tokens == [8]


def test_a_prefix_is_refused_after_the_weights_change() -> None:
    model = tiny(1, "block_causal")
    prefix = paradec.generate(model, [SYSTEM], cache="block", keep_prefix=True, **request()).prefix
    with torch.no_grad():
        model.module.lm_head.weight.mul_(2)
    with pytest.raises(ValueError, match="kept before the weights of LlamaForCausalLM changed or moved"):
        paradec.generate(model, [SYSTEM], cache="block", prefix=prefix)


def test_release_frees_the_memory() -> None:
    model = tiny(2, "block_causal")
    out = paradec.generate(model, [SYSTEM] * 2, cache="block", keep_prefix=True, **request())
    assert out.prefix.nbytes == 8 * 2 * 2 * 2 * 8 * 2 * len(out.prefix.tokens[0]) and out.prefix.dtype == torch.float64
    out.prefix.release()
    assert out.prefix.nbytes == 0 and out.prefix.dtype is None and "released" in repr(out.prefix)
    refuses(lambda: paradec.generate(model, [SYSTEM], cache="block", prefix=out.prefix), "prefix was released")
    assert paradec.generate(model, [SYSTEM], cache="block", **request()).prefix is None


BLOCK = 3
TOKEN_BYTES = 2 * 2 * 4  # a key and a value of two float32 numbers


def make_layers(tokens: list[int], salt: int = 0) -> Layers:
    """Return keys and values, each of which depends on the tokens up to its position."""
    sums = [hash((salt, *tokens[: end + 1])) % 1000 for end in range(len(tokens))]
    values = torch.tensor(sums, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
    return {0: (values, -values)}


CALL = st.tuples(st.sampled_from(("add", "find", "clear")), st.lists(st.integers(0, 1), max_size=14), st.integers(0, 1))


@given(calls=st.lists(CALL, max_size=40), max_blocks=st.integers(0, 12))
def test_the_prefix_tree_equals_a_dictionary_with_least_recently_used_eviction(calls: Any, max_blocks: int) -> None:
    tree = PrefixTree(BLOCK, max_blocks * BLOCK * TOKEN_BYTES)
    last_use: dict[tuple[int, tuple[int, ...]], int] = {}  # (salt, prefix) -> time
    clock = 0

    def stored_prefixes(tokens: list[int], salt: int) -> list[tuple[int, tuple[int, ...]]]:
        prefixes = [(salt, tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        return list(itertools.takewhile(last_use.__contains__, prefixes))

    for name, tokens, salt in calls:
        if name == "clear":
            tree.clear()
            last_use.clear()
            continue
        stored = len(stored_prefixes(tokens, salt)) * BLOCK
        assert tree.count(tokens, salt) == stored
        if name == "find":
            count, found_layers = tree.find(tokens, salt)
            assert count == stored
            for layer, (keys, values) in found_layers.items():
                expected = make_layers(tokens, salt)[layer]
                assert torch.equal(keys, expected[0][:count]) and torch.equal(values, expected[1][:count])
        else:
            length = len(tokens) // BLOCK * BLOCK
            new_layers = {layer: (k[stored:], v[stored:]) for layer, (k, v) in make_layers(tokens, salt).items()}
            assert tree.add(tokens, new_layers, stored, salt) == max(min(length, max_blocks * BLOCK) - stored, 0)
            last_use |= {(salt, tuple(tokens[:end])): 0 for end in range(BLOCK, length + 1, BLOCK) if end > stored}
        for prefix in reversed(stored_prefixes(tokens, salt)):
            clock += 1
            last_use[prefix] = clock
        while len(last_use) > max_blocks:
            parents = {(salt, prefix[:-BLOCK]) for salt, prefix in last_use}
            del last_use[min(last_use.keys() - parents, key=last_use.__getitem__)]
        assert len(tree) == len(last_use) * BLOCK and tree.nbytes == len(last_use) * BLOCK * TOKEN_BYTES


def test_blocks_with_nan_keys_are_not_stored() -> None:
    tree = PrefixTree(BLOCK, 10_000)
    keys = torch.zeros(9, 1, 2)
    keys[4, 0, 1] = float("nan")
    assert tree.add([1] * 9, {0: (keys, torch.zeros(9, 1, 2))}) == BLOCK and len(tree) == BLOCK

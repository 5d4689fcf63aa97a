"""Kept and shared prefixes, and the prefix tree."""

from typing import Any

import numpy as np
import pytest
import torch
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
OFTEN = ["low_confidence", "credit", "wino", "freedave", "prophet_rows", "learn2pd", "s2d2"]
EXACT_PAIRS = [(name, PREDICTIONS[index % 2]) for index, name in enumerate(EXACT_CACHES)] + [("block", "shifted")]
"""Every exact cache with one prediction, and the block cache with both."""
ROWS = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [10] * 11]
SYSTEM = [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]
"""Two and a half blocks of 4."""
ENDS = tuple(range(20, 40))
"""Many end tokens, so that rows of random models end early."""


def request(**changes: Any) -> dict[str, Any]:
    return {"sampler": "low_confidence", "max_new_tokens": 10, "eos_early_stop": False, "seed": 1} | changes


def largest_gap(
    model: Model, rows: list[list[int]], cache: Any, sampler: str = "low_confidence", new: int = 10, **reuse: Any
) -> float:
    """Largest score difference over all steps between decoding with cache and prefix and without; inf if tokens
    differ."""
    method = samplers.create(sampler)
    settings = {"max_new_tokens": new, "eos_early_stop": False, "seed": 1}
    ours, theirs = method.start(model, rows, cache=cache, **settings, **reuse), method.start(model, rows, **settings)
    assert ours.reuses
    gap = 0.0
    with torch.inference_mode():
        while not ours.done:
            proposal, expected = method.step(model, ours), method.step(model, theirs)
            gap = max(gap, float((proposal.scores - expected.scores)[proposal.available].abs().max()))
            method.commit(ours, proposal)
            method.commit(theirs, expected)
            if not torch.equal(ours.canvas, theirs.canvas):
                return float("inf")
    return gap


def assert_rows_alone(together: Any, model: Model, rows: list[list[int]], extra: int = 0, **request: Any) -> None:
    """Assert that rows do not depend on the batch, except for `extra` additional forwards in it."""
    for index, row in enumerate(rows):
        alone = paradec.generate(model, [row], **request)
        assert together.new_tokens[index].tolist() == alone.new_tokens[0].tolist()
        assert together.finished[index] == alone.finished[0]
        assert together.row_nfe[index] == alone.nfe + extra


def conversation(model: Model, cache: Any, prefix: KeptPrefix | None = None, **changes: Any) -> list[Any]:
    """Decode three turns of three rows; assert that each equals decoding without cache and prefix."""
    rows, outputs = ROWS, []
    for turn in range(3):
        out = paradec.generate(model, rows, cache=cache, prefix=prefix, keep_prefix=True, **request(**changes))
        plain = paradec.generate(model, rows, **request(**changes))
        assert torch.equal(out.sequences, plain.sequences)
        outputs.append(out)
        prefix = out.prefix
        kept = out.attention_mask.bool()
        # the next question of each row has its own length
        rows = [
            ids[keep].tolist() + [30 + i] * (i + turn + 1) for i, (ids, keep) in enumerate(zip(out.sequences, kept))
        ]
    return outputs


@pytest.mark.thinned
@pytest.mark.parametrize(("cache", "prediction"), EXACT_PAIRS)
def test_three_turns_equal_those_without_reuse(cache: str, prediction: str) -> None:
    model = tiny(2, "block_causal", prediction)
    outputs = conversation(model, cache)
    assert outputs[0].cost.reused_tokens == [0, 0, 0]
    for before, after in zip(outputs, outputs[1:], strict=False):
        assert after.cost.reused_tokens == list(map(len, before.prefix.tokens))
        assert all(count % 4 == 0 and count >= 8 for count in after.cost.reused_tokens)
        assert after.prefix.exact
    rows = [row + [5, 5] for row in outputs[-1].prefix.tokens]
    assert largest_gap(model, rows, cache, prefix=outputs[-1].prefix) < 1e-12


@pytest.mark.parametrize("first", ["hierarchical", "dkv_decode", "block"])
def test_a_prefix_is_exact_if_its_cache_is(first: str) -> None:
    model, rows = tiny(2, "block_causal"), ROWS
    prefix = None
    for cache in (first, "block", "prefix"):
        out = paradec.generate(model, rows, cache=cache, prefix=prefix, keep_prefix=True, **request())
        assert all(out.cost.reused_tokens) == (prefix is not None)
        assert out.prefix.exact == (first == "block")
        prefix, rows = out.prefix, [[*row, 5, 5] for row in out.prefix.tokens]


def test_keys_of_causal_calls_are_shared_only_with_causal_calls() -> None:
    model, causal, other = tiny(2, "block_causal"), samplers.create("s2d2"), samplers.create("s2d2", causal=False)
    outputs = conversation(model, "block", sampler=causal)
    assert outputs[-1].prefix.exact and outputs[-1].prefix.causal_keys
    for first, second in ((causal, "threshold"), ("threshold", causal), (causal, other)):
        kept = paradec.generate(model, ROWS, cache="block", keep_prefix=True, **request(sampler=first)).prefix
        with pytest.raises(ValueError, match="^prefix=KeptPrefix.* keys and values of .*causal attention"):
            paradec.generate(model, ROWS, cache="block", prefix=kept, **request(sampler=second))
    rows = [[*SYSTEM, at] for at in range(3)]
    arguments = request(sampler=causal, cache="block")
    shared = paradec.generate(model, rows, share_prefix=True, **arguments)
    assert shared.cost.reused_tokens == [8, 8, 8]
    assert torch.equal(shared.sequences, paradec.generate(model, rows, **arguments).sequences)
    conversation(
        model,
        "block",
        paradec.generate(model, ROWS, keep_prefix=True, cache="block", **request()).prefix,
        sampler=other,
    )


def test_forwarded_tokens_drop_by_what_was_reused() -> None:
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
    "sampler", [*OFTEN, *(pytest.param(name, marks=pytest.mark.full) for name in MASKED if name not in OFTEN)]
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
                for ours, theirs in zip(out.prefix.layers[layer], pair, strict=True):
                    torch.testing.assert_close(ours[index, : len(tokens)], theirs[0], rtol=0, atol=1e-12)
        assert longest >= (12 if sampler in OFTEN else 8)  # the prompt's blocks and one more
        assert out.prefix.nbytes == 2 * 3 * 3 * longest * 2 * 8 * 8


def test_only_what_is_common_is_reused() -> None:
    model = tiny(2, "block_causal")
    kept = paradec.generate(model, [list(range(1, 19))], cache="block", keep_prefix=True, **request()).prefix
    assert len(kept.tokens[0]) == 24
    rows = [list(range(1, 11)) + [30] * 9, [31] * 12, list(range(1, 9)), list(range(1, 19))]
    out = paradec.generate(model, rows, cache="block", prefix=kept, **request())
    assert out.cost.reused_tokens == [8, 0, 8, 16]
    assert torch.equal(out.sequences, paradec.generate(model, rows, **request()).sequences)


def whole_blocks(prediction: str, common: int, prompt: int) -> int:
    """Number of reusable leading positions: whole common blocks of 4 before the logits of the first mask."""
    logits_at = prompt - (prediction == "shifted")
    return sum(4 for end in range(4, 200, 4) if end <= common and end <= logits_at)


def reused(model: Model, rows: list[list[int]], **reuse: Any) -> list[int]:
    """Number of reused leading positions of each row."""
    return samplers.create("low_confidence").start(model, rows, cache="block", **reuse).reused.tolist()


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_prompts_of_every_length_beyond_whole_blocks(prediction: str) -> None:
    model = tiny(2, "block_causal", prediction)
    first = paradec.generate(model, [SYSTEM], cache="block", keep_prefix=True, **request()).prefix
    kept = first.tokens[0]
    assert len(kept) >= 16
    rows = [kept[:size] for size in range(1, len(kept))]
    expected = [whole_blocks(prediction, size, size) for size in range(1, len(kept))]
    assert reused(model, rows, prefix=first) == expected and {0, 4, 8, 12} <= set(expected)
    assert largest_gap(model, rows, "block", new=4, prefix=first) < 1e-12
    # tokens after the kept ones are new; one row copies the kept keys, two rows read them in place
    for beyond in (0, 1, 3, 4):
        rows = [kept + [31] * beyond, kept + [32] * beyond][: 1 + beyond % 2]
        count = whole_blocks(prediction, len(kept), len(kept) + beyond)
        assert reused(model, rows, prefix=first) == [count] * len(rows)
        assert largest_gap(model, rows, "block", new=4, prefix=first) < 1e-12


@pytest.mark.thinned
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("beyond", range(4))
def test_shared_prompts_of_every_length_beyond_whole_blocks(prediction: str, beyond: int) -> None:
    model, common = tiny(2, "block_causal", prediction), list(range(1, 9 + beyond))
    for rows in ([common, common + [20, 21, 22]], [common + [20], common, common + [21] * 6]):
        count = whole_blocks(prediction, len(common), len(common))
        assert reused(model, rows, share_prefix=True) == [count] * len(rows)
        assert largest_gap(model, rows, "block", new=4, share_prefix=True) < 1e-12


def test_rows_find_their_own_prefix_in_any_order() -> None:
    model = tiny(2, "block_causal")
    kept = paradec.generate(model, ROWS, cache="block", keep_prefix=True, **request()).prefix
    rows = [kept.tokens[i] + [3] for i in (2, 0, 1, 0)]
    out = paradec.generate(model, rows, cache="block", prefix=kept, **request())
    assert out.cost.reused_tokens == [len(kept.tokens[i]) for i in (2, 0, 1, 0)]
    assert torch.equal(out.sequences, paradec.generate(model, rows, **request()).sequences)
    one = paradec.generate(model, rows[1:2], cache="block", prefix=kept.row(0), **request())
    assert one.cost.reused_tokens == [len(kept.tokens[0])] and one.new_tokens.tolist() == out.new_tokens[1:2].tolist()


@pytest.mark.thinned
@pytest.mark.parametrize(("cache", "prediction"), EXACT_PAIRS)
def test_a_shared_prefix_changes_nothing(cache: str, prediction: str) -> None:
    model = tiny(2, "block_causal", prediction)
    rows = [SYSTEM + row for row in ROWS]
    together = paradec.generate(model, rows, cache=cache, share_prefix=True, **request())
    assert together.cost.reused_tokens == [8, 8, 8]
    assert_rows_alone(together, model, rows, 1, cache=cache, **request())
    assert largest_gap(model, rows, cache, share_prefix=True) < 1e-12


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ["wino", "credit", "random", "freedave", "tree"])
def test_samplers_over_a_shared_prefix(sampler: str) -> None:
    model = tiny(2, "block_causal", ends=ENDS)
    rows = [SYSTEM + [index] * (index % 3 + 1) for index in range(8)]
    method = samplers.create("freedave", draft_mode="tree") if sampler == "tree" else samplers.create(sampler)
    changes = request(sampler=method, eos_early_stop=True, temperature=1.0, max_new_tokens=16)
    together = paradec.generate(model, rows, cache="block", share_prefix=True, **changes)
    assert len(set(together.row_nfe)) > 1
    assert_rows_alone(together, model, rows, 1, cache="block", **changes)


def test_a_shared_prefix_is_stored_and_counted_once() -> None:
    model = tiny(2, "block_causal")
    rows = [SYSTEM * 4 + [index] * 3 for index in range(8)]
    plain = paradec.generate(model, rows, cache="block", **request())
    shared = paradec.generate(model, rows, cache="block", share_prefix=True, trace=True, **request())
    position = 8 * 2 * 2 * 2 * 8  # float64, keys and values, 2 layers of 2 heads of 8
    assert plain.cost.store_bytes == position * 8 * (56 + 1)
    assert shared.cost.store_bytes == position * (40 + 8 * (16 + 1))
    assert shared.forwarded_tokens == plain.forwarded_tokens - 7 * 40
    assert shared.row_forwards == plain.row_forwards + 1 and shared.nfe == plain.nfe + 1
    assert shared.trace.steps[0].kind == "prefix" and shared.trace.steps[0].forwarded == [40, 0, 0, 0, 0, 0, 0, 0]
    assert np.sum([s.forwarded for s in shared.trace.steps], 0).tolist() == shared.cost.forwarded_tokens
    needed = shared.cost.store_bytes
    fits = caches.create("block", max_memory=needed)
    paradec.generate(model, rows, cache=fits, share_prefix=True, **request())
    with pytest.raises(ValueError, match=r"8 x 16 positions and 40 that all rows share would take .* max_memory"):
        paradec.generate(
            model, rows, cache=caches.create("block", max_memory=needed - 1), share_prefix=True, **request()
        )


def test_a_kept_prefix_that_all_rows_begin_with_is_read_in_place() -> None:
    model = tiny(2, "block_causal")
    kept = paradec.generate(model, [SYSTEM * 4], cache="block", keep_prefix=True, **request()).prefix
    rows = [SYSTEM * 4 + [index] * (index + 1) for index in range(5)]
    out = paradec.generate(model, rows, cache="block", prefix=kept, keep_prefix=True, **request())
    assert out.cost.reused_tokens == [40] * 5
    assert out.cost.store_bytes == 8 * 2 * 2 * 2 * 8 * (40 + 5 * (16 + 1))
    assert torch.equal(out.sequences, paradec.generate(model, rows, **request()).sequences)
    # the next turn, each row with its own
    rows = [row + [6] for row in out.prefix.tokens]
    assert largest_gap(model, rows, "block", prefix=out.prefix) < 1e-12


def test_rows_without_a_common_block_share_nothing() -> None:
    model = tiny(1, "block_causal")
    for rows in ([SYSTEM], [[1, 2, 3, 4], [1, 2, 3, 5]]):
        out = paradec.generate(model, rows, cache="block", share_prefix=True, **request())
        assert out.cost.reused_tokens == [0] * len(rows)
        plain = paradec.generate(model, rows, cache="block", **request())
        assert out.nfe == plain.nfe and torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("columns", ["each", "all", "none"])
@pytest.mark.parametrize("most", [2**24, 50])
def test_attention_over_a_shared_prefix_is_attention_over_both(
    columns: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix, "MAX_SCORES", most)
    torch.manual_seed(0)
    query = torch.randn(3, 6, 5, 8, dtype=torch.float64)
    keys, values = torch.randn(2, 3, 2, 7, 8, dtype=torch.float64)
    prefix_keys, prefix_values = torch.randn(2, 4, 2, 8, dtype=torch.float64)
    mask = {"none": None, "all": torch.rand(3, 1, 1, 7) > 0.4, "each": torch.rand(3, 1, 5, 7) > 0.4}[columns]
    if columns == "each":
        mask[1, :, 2] = False  # a column that sees only the prefix
    output = shared_prefix.attend_shared(query, keys, values, mask, (prefix_keys, prefix_values), 0.3)
    both = [
        torch.cat((common.transpose(0, 1).expand(3, -1, -1, -1), suffix), 2)
        for common, suffix in ((prefix_keys, keys), (prefix_values, values))
    ]
    wide = None if mask is None else torch.cat((torch.ones(*mask.shape[:3], 4, dtype=torch.bool), mask), -1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, *both, attn_mask=wide, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(output, expected.transpose(1, 2), rtol=0, atol=1e-12)


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("cache", "prediction"), [("prefix", "same"), ("dual", "shifted"), ("dkv_decode", "shifted"), ("dkv_pd", "same")]
)
def test_bidirectional_models_are_exact_with_one_layer_alone(cache: str, prediction: str) -> None:
    # later tokens change the prefix's keys from the second layer on, and scores from the third
    for layers in (1, 3):
        model = tiny(layers, prediction=prediction)
        kept = paradec.generate(model, ROWS, cache=cache, keep_prefix=True, **request()).prefix
        rows = [tokens + [5, 6] for tokens in kept.tokens]
        gaps = [largest_gap(model, rows, caches.create(cache), prefix=kept)]
        gaps.append(largest_gap(model, [SYSTEM + row for row in ROWS], cache, share_prefix=True))
        assert max(gaps) < 1e-12 if layers == 1 else min(gaps) > 1e-6
        assert not kept.exact


def test_rows_over_a_kept_prefix_do_not_depend_on_each_other() -> None:
    model = tiny(3)
    kept = paradec.generate(model, [SYSTEM], cache="dual", keep_prefix=True, **request(block_length=5)).prefix
    rows = [SYSTEM + row for row in ROWS]
    for cache in ("dual", "prefix", "dkv_decode"):
        changes = request(block_length=5, cache=cache, prefix=kept)
        together = paradec.generate(model, rows, **changes)
        assert together.cost.reused_tokens == [10, 10, 10]
        assert_rows_alone(together, model, rows, **changes)


@pytest.fixture(scope="module")
def kept() -> tuple[Model, KeptPrefix]:
    model = tiny(1, "block_causal")
    return model, paradec.generate(model, [SYSTEM], cache="block", keep_prefix=True, **request()).prefix


def test_a_prefix_of_another_model_or_dtype_is_refused(kept: Any) -> None:
    model, prefix = kept
    with pytest.raises(ValueError, match="prefix and share_prefix=True both choose the rows' prefix"):
        paradec.generate(model, [SYSTEM], cache="block", prefix=prefix, share_prefix=True)
    other = tiny(1, "block_causal", seed=1)
    with pytest.raises(ValueError, match=r"KeptPrefix\(1 rows of .* was kept with another model than this Llama"):
        paradec.generate(other, [SYSTEM], cache="block", prefix=prefix)
    narrow = caches.create("block", store_dtype="float32")
    with pytest.raises(ValueError, match="kept in torch.float64 and cache='block' would store torch.float32"):
        paradec.generate(model, [SYSTEM], cache=narrow, prefix=prefix)
    narrow_prefix = paradec.generate(model, [SYSTEM], cache=narrow, keep_prefix=True, **request()).prefix
    assert narrow_prefix.dtype == torch.float32
    assert paradec.generate(model, [SYSTEM], cache=narrow, prefix=narrow_prefix, **request()).cost.reused_tokens == [8]


def test_a_prefix_is_refused_once_weights_have_changed() -> None:
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
    with pytest.raises(ValueError, match="prefix was released"):
        paradec.generate(model, [SYSTEM], cache="block", prefix=out.prefix)
    assert paradec.generate(model, [SYSTEM], cache="block", **request()).prefix is None


BLOCK = 3
ROW = 2 * 2 * 4  # bytes of a token: keys and values of two float32 each


def layers(tokens: list[int], salt: int = 0) -> Layers:
    """Keys and values that depend on all tokens up to theirs."""
    sums = [hash((salt, *tokens[: at + 1])) % 1000 for at in range(len(tokens))]
    values = torch.tensor(sums, dtype=torch.float32)[:, None, None].expand(-1, 1, 2)
    return {0: (values, -values)}


WORDS = st.lists(st.integers(0, 1), max_size=14)


@given(
    st.lists(st.tuples(st.sampled_from(("add", "find", "clear")), WORDS, st.integers(0, 1)), max_size=40),
    st.integers(0, 12),
)
def test_the_prefix_tree_equals_a_dictionary_with_least_recently_used_eviction(
    calls: list[tuple[str, list[int], int]], most: int
) -> None:
    tree, budget = PrefixTree(BLOCK, most * BLOCK * ROW), most
    known: dict[tuple[int, tuple[int, ...]], int] = {}  # beginning -> time of last use
    clock = 0

    def path(tokens: list[int], salt: int) -> list[tuple[int, tuple[int, ...]]]:
        found = [(salt, tuple(tokens[:at])) for at in range(BLOCK, len(tokens) + 1, BLOCK)]
        return found[: next((at for at, beginning in enumerate(found) if beginning not in known), len(found))]

    for what, tokens, salt in calls:
        if what == "clear":
            tree.clear()
            known.clear()
            continue
        before = len(path(tokens, salt)) * BLOCK
        assert tree.count(tokens, salt) == before
        if what == "find":
            count, found = tree.find(tokens, salt)
            assert count == before
            for layer, (keys, values) in found.items():
                expected = layers(tokens, salt)[layer]
                assert torch.equal(keys, expected[0][:count]) and torch.equal(values, expected[1][:count])
        else:
            whole = len(tokens) // BLOCK * BLOCK
            new_layers = {at: (k[before:], v[before:]) for at, (k, v) in layers(tokens, salt).items()}
            assert tree.add(tokens, new_layers, before, salt) == max(min(whole, budget * BLOCK) - before, 0)
            known |= {(salt, tuple(tokens[:at])): 0 for at in range(BLOCK, whole + 1, BLOCK) if at > before}
        for beginning in reversed(path(tokens, salt)):
            clock += 1
            known[beginning] = clock
        while len(known) > budget:
            leaves = [
                (s, t) for s, t in known if not any(o == s and len(u) > len(t) and u[: len(t)] == t for o, u in known)
            ]
            del known[min(leaves, key=known.__getitem__)]
        assert len(tree) == len(known) * BLOCK and tree.nbytes == len(known) * BLOCK * ROW


def test_nonfinite_keys_are_not_kept() -> None:
    tree = PrefixTree(BLOCK, 10_000)
    keys = torch.zeros(9, 1, 2)
    keys[4, 0, 1] = float("nan")
    assert tree.add([1] * 9, {0: (keys, torch.zeros(9, 1, 2))}) == BLOCK and len(tree) == BLOCK

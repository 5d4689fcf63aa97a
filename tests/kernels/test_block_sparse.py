"""SparseD: estimation, selection and attention against their definitions, and decoding with them."""

import functools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from decoding import refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GOLDEN
from small_models import MASK, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import paradec
from paradec import samplers
from paradec.attention.sparsed import ESTIMATE, SPARSE, SparseD
from paradec.kernels import has_triton, interpreting
from paradec.kernels.block_sparse import (
    BlockIndex,
    QueryTiles,
    block_means,
    generation_block,
    portable,
    select_blocks,
    sparse_attention,
)
from paradec.kernels.block_sparse.reference import (
    reference_attention,
    reference_means,
    reference_selection,
    scores_of,
    visible_keys,
)
from paradec.models.adapter import Model

pytestmark = pytest.mark.filterwarnings("ignore:cache=", "ignore:delimiters=")

ROWS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12] * 5, list(range(13, 37))]
interpreted = pytest.mark.skipif(
    not has_triton() or torch.cuda.is_available() or not interpreting(),
    reason="needs triton with TRITON_INTERPRET=1, which conftest.py sets where there is no GPU",
)


def random_tensors(
    rows: int, heads: int, groups: int, length: int, width: int = 8, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw queries [B, H, L, D], keys and values [B, G, L, D], whose attention is concentrated."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, count, length, width) for count in (heads, groups, groups)]
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return (2 * query).to(dtype), key.to(dtype), value.to(dtype)


@pytest.mark.parametrize(
    ("length", "size", "heads", "groups", "width"),
    [(115, 16, 4, 2, 8), (64, 16, 2, 2, 4), (37, 128, 2, 1, 8), (40, 1, 1, 1, 4), (96, 24, 3, 1, 8)],
)
def test_means_equal_materialised_pooling(length: int, size: int, heads: int, groups: int, width: int) -> None:
    query, key, _ = random_tensors(2, heads, groups, length, width)
    lengths, new = [length, length // 2 + 1], [length // 3, 5]
    for split in (generation_block(np.array(lengths), np.array(new), size).tolist(), None):
        expected = reference_means(query, key, size, lengths, split)
        assert (block_means(query, key, size, lengths=lengths, first=split) - expected).abs().max() < 1e-14
        sums = torch.full(query.shape[:3], torch.nan, dtype=torch.float64)
        for row, real in enumerate(lengths):
            sums[row, :, :real] = scores_of(query, key)[row, :, :real, :real].logsumexp(-1)
        means = block_means(query, key, size, lengths=lengths, first=split, logsumexp=sums)
        assert (means - expected).abs().max() < 1e-14
    # a block's mean times its number of keys is its probability; the probabilities sum to 1
    extent = torch.tensor([min(size, length - j * size) for j in range(expected.shape[-1])])
    assert ((expected[0] * extent).sum(-1) - 1).abs().max() < 1e-12


def test_small_weights_next_to_large_ones_do_not_vanish() -> None:
    query, key, _ = random_tensors(1, 1, 1, 32, dtype=torch.float32)
    key[:, :, :16] += 60 * query[0, 0].mean(0) / query[0, 0].mean(0).norm()
    query = query[:, :, :1].expand(-1, -1, 32, -1).clone() + 20 * query[0, 0].mean(0)
    expected = reference_means(query, key, 8, [32], [2])
    output = block_means(query, key, 8, first=[2])
    assert scores_of(query, key)[..., :16].max() - scores_of(query, key)[..., 16:].max() > 100
    assert (output.double() - expected).abs().max() < 1e-6 and expected[0, 0, 0, 2:].sum() > 0.1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_selection_equals_the_rule(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 4, 16]))
    lengths = data.draw(st.lists(st.integers(1, 9 * size), min_size=1, max_size=3))
    new = [data.draw(st.integers(1, length)) for length in lengths]
    select = data.draw(st.sampled_from([0.05, 0.1, 0.29, 0.3, 0.5, 0.7, 1.0]))
    blocks = math.ceil(max(lengths) / size)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    means, joint = torch.randint(0, 6, (2, len(lengths), 2, blocks, blocks), generator=generator).double()
    first = generation_block(np.array(lengths), np.array(new), size)
    for ranked in (None, joint):
        index = select_blocks(means, select, size, lengths=lengths, first=first, joint=ranked)
        assert torch.equal(index.to_mask(blocks), reference_selection(means, select, size, lengths, new, ranked))


def random_lists(rows: int, heads: int, blocks: int, size: int, share: float = 0.4, seed: int = 0) -> BlockIndex:
    mask = torch.rand(rows, heads, blocks, blocks, generator=torch.Generator().manual_seed(seed)) < share
    mask[0, 0, 0] = False  # an empty list
    return BlockIndex.from_mask(mask, size)


# large for bfloat16, because triton's interpreter truncates where hardware rounds
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2}
SIZES = [(115, 16, 4, 2), (64, 16, 2, 2), (37, 128, 2, 1), (1, 4, 2, 1), (50, 7, 6, 3)]
"""(length, block size, query heads, key heads)."""
LISTS = [
    *(("torch", torch.float64, 1e-13, *sizes) for sizes in SIZES),
    *(("torch", dtype, 8 * torch.finfo(dtype).eps, 61, 16, 4, 2) for dtype in TOLERANCE),
    *(("flex", torch.float32, 2e-6, *sizes) for sizes in SIZES[:2]),
    *(("flex", torch.float64, 1e-13, *sizes) for sizes in (SIZES[2], SIZES[4])),
    *(pytest.param("triton", dtype, limit, 37, 16, 2, 1, marks=interpreted) for dtype, limit in TOLERANCE.items()),
]


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run flex_attention without torch.compile, which would trace every call anew."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


@pytest.mark.thinned
@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(("backend", "dtype", "tolerance", "length", "size", "heads", "groups"), LISTS)
def test_random_lists_equal_reference_attention(
    backend: str, dtype: torch.dtype, tolerance: float, length: int, size: int, heads: int, groups: int
) -> None:
    query, key, value = random_tensors(2, heads, groups, length, 24 if backend == "triton" else 8, dtype)
    lengths, blocks = [length, max(1, length - 17)], math.ceil(length / size)
    index = random_lists(2, heads, blocks, size, 0.6 if backend == "triton" else 0.4)
    visible = visible_keys(index.to_mask(blocks), size, torch.arange(length).expand(2, -1), length)
    expected, sums = reference_attention(query, key, value, visible, lengths)
    options = {"lengths": lengths, "return_logsumexp": True, "backend": backend}
    output, logsumexp = sparse_attention(query, key, value, index, **options)
    assert output.dtype == dtype and (output.double() - expected).abs().max() < tolerance
    assert (output[0, 0, : min(size, length)] == 0).all()
    limit = {"torch": 1e-13 if dtype == torch.float64 else 1e-5, "flex": 10 * tolerance, "triton": 1e-5}[backend]
    assert torch.allclose(logsumexp.double(), sums, atol=limit, rtol=0)


@pytest.mark.usefixtures("untraced")
def test_full_lists_are_dense_and_their_order_does_not_matter() -> None:
    query, key, value = random_tensors(2, 4, 2, 75)
    dense = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    all_blocks = BlockIndex.from_mask(torch.ones(2, 4, 5, 5, dtype=torch.bool), 16)
    for backend in ("torch", "flex"):
        for index in (all_blocks, BlockIndex(all_blocks.count, all_blocks.blocks.flip(-1), 16), None):
            output = sparse_attention(query, key, value, index, block_size=16, backend=backend)
            assert (output - dense).abs().max() < 1e-13


@pytest.mark.parametrize("chunk", [1, 2**22])
def test_queries_at_any_positions_of_any_rows(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(portable, "KEYS_PER_CHUNK", chunk)
    size, length, lengths = 8, 45, [45, 38, 20]
    query, key, value = random_tensors(3, 2, 1, length)
    index = random_lists(5, 2, 6, size, seed=1)
    rows = [4, 0, 2]
    chosen = [[0, 1, 7, 8, 9, 30, 44], [16, 17, 18, 19, 20], [3, 19]]
    width = max(map(len, chosen))
    positions = np.array([row + [row[-1]] * (width - len(row)) for row in chosen])
    valid = np.array([[column < len(row) for column in range(width)] for row in chosen])
    columns = torch.as_tensor(positions)
    window = query.gather(2, columns[:, None, :, None].expand(-1, 2, -1, query.shape[-1]))
    visible = visible_keys(index.to_mask(6)[rows], size, columns, length)
    expected, sums = reference_attention(window, key, value, visible, lengths)
    tiles = QueryTiles.from_positions(positions, valid, size)
    options = {"tiles": tiles, "lengths": lengths, "rows": rows, "return_logsumexp": True}
    output, output_sums = sparse_attention(window, key, value, index, **options)
    real = torch.as_tensor(valid)[:, None].expand(-1, 2, -1)
    assert (output - expected)[real].abs().max() < 1e-13 and torch.isfinite(output).all()
    assert torch.allclose(output_sums[real], sums[real], atol=1e-13, rtol=0)


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result._is_view():
            self.elements = max(self.elements, result.numel())
        return result


def test_no_tensor_has_queries_times_keys_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    length, size = 2048, 32
    query, key, value = random_tensors(1, 2, 1, length, dtype=torch.float32)
    monkeypatch.setattr(portable, "KEYS_PER_CHUNK", 2**16)
    monkeypatch.setattr(portable, "SCORES_PER_CHUNK", 2**16)
    first = generation_block(np.array([length]), np.array([256]), size)
    with LargestTensor() as largest:
        means = block_means(query, key, size, first=first)
        index = select_blocks(means, 0.2, size, lengths=[length], first=first)
        sparse_attention(query, key, value, index)
    # the largest tensor has the scores, or the gathered keys, of one block of queries
    assert largest.elements <= max(size * length, index.blocks.shape[-1] * size * 8 * 2) < length * length / 8
    assert index.nbytes < 2 * 2 * (length // size) * (16 + 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [33]}, "from 1 to 32"),
        ({"lengths": [4, 4]}, "1 integers"),
        ({"index": None, "block_size": 0}, "block_size=0"),
        ({"rows": [1]}, "rows"),
        ({"index": random_lists(1, 1, 4, 8)}, "index has 1 heads"),
        ({"index": random_lists(1, 2, 3, 8)}, "3 blocks of queries.*block 3"),
        ({"tiles": QueryTiles.from_lengths(np.array([30]), 30, 8)}, "1 x 32 columns"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    query, key, value = random_tensors(1, 2, 1, 32)
    arguments = {"index": random_lists(1, 2, 4, 8)} | change
    refuses(lambda: sparse_attention(query, key, value, **arguments), message)


def test_shapes_that_do_not_fit_are_refused() -> None:
    query, key, value = random_tensors(1, 3, 1, 32)
    refuses(lambda: block_means(query, key.repeat(1, 2, 1, 1), 8), "query has 3 heads; must be a multiple of the 2")
    refuses(lambda: block_means(query[:, :, :8], key, 8), "whole rows")
    refuses(lambda: sparse_attention(query, key, value[:, :, :9], None), "must have the same")
    with pytest.raises(ValueError, match="backend='triton' is not available: .*(float64|not installed)"):
        sparse_attention(query, key, value, None, backend="triton")
    if has_triton():
        with pytest.raises(ValueError, match="a block of 512 queries of width 64 in torch.float32 is too large for it"):
            wide = query.float().repeat(1, 1, 1, 8)
            sparse_attention(wide, wide, wide, None, backend="triton", block_size=512)


@interpreted
def test_kernel_attends_to_everything() -> None:
    query, key, value = random_tensors(1, 1, 1, 300, 12, torch.float32)
    expected, sums = reference_attention(query, key, value, torch.ones(1, 1, 300, 300, dtype=torch.bool), [300])
    options = {"return_logsumexp": True, "backend": "triton", "block_size": 256}
    output, output_sums = sparse_attention(query, key, value, None, **options)
    assert (output - expected).abs().max() < 1e-5 and (output_sums - sums).abs().max() < 1e-5
    single = sparse_attention(query[:, :, :1], key[:, :, :1], value[:, :, :1], None, backend="triton", block_size=32)
    assert (single - value[:, :, :1]).abs().max() < 1e-6


@interpreted
@pytest.mark.parametrize("shares", [1, 2])
def test_kernel_attends_from_a_window(monkeypatch: pytest.MonkeyPatch, shares: int) -> None:
    from paradec.kernels.block_sparse import triton as kernels

    monkeypatch.setattr(kernels, "_num_shares", lambda *_: shares)
    query, key, value = random_tensors(2, 2, 1, 40, 16, torch.float32)
    index, rows, lengths = random_lists(3, 2, 3, 16, 0.6, seed=2), [2, 0], [40, 33]
    positions = np.array([[2, 3, 15, 16, 17], [32, 32, 32, 32, 32]])
    valid = np.array([[True] * 5, [True] + [False] * 4])
    columns = torch.as_tensor(positions)
    window = query.gather(2, columns[:, None, :, None].expand(-1, 2, -1, 16))
    visible = visible_keys(index.to_mask(3)[rows], 16, columns, 40)
    expected, _ = reference_attention(window, key, value, visible, lengths)
    if shares > 1:
        key, value = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (key, value))
    tiles = QueryTiles.from_positions(positions, valid, 16)
    options = {"tiles": tiles, "lengths": lengths, "rows": rows, "backend": "triton"}
    output = sparse_attention(window, key, value, index, **options)
    assert (output - expected).abs()[torch.as_tensor(valid)[:, None].expand(-1, 2, -1)].max() < 2e-6
    assert torch.isfinite(output).all()


@pytest.mark.thinned
@interpreted
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_kernel_finds_the_means(dtype: torch.dtype) -> None:
    query, key, _ = random_tensors(2, 2, 1, 37, 24, dtype)
    lengths, first = [37, 20], [1, 1]
    expected = reference_means(query, key, 16, lengths, first)
    output = block_means(query, key, 16, lengths=lengths, first=first, backend="triton")
    assert (output - expected).abs().max() < 1e-6
    if dtype == torch.float32:
        sums = scores_of(query, key)[1:, :, :20, :20].logsumexp(-1)
        query, key = query[1:, :, :20], key[1:, :, :20]
        means = block_means(query, key, 16, first=[2], logsumexp=sums.float(), backend="triton")
        assert (means - reference_means(query, key, 16, [20], None)).abs().max() < 1e-6


EVERYTHING = SparseD(select=1.0, block_size=8)
SOME = SparseD(select=0.3, block_size=8)
REQUEST = {"max_new_tokens": 24, "block_length": 8, "sampler": "low_confidence", "eos_early_stop": False}


@functools.cache
def checkpoint() -> Model:
    return paradec.load(GOLDEN / "llada-tiny", dtype="float64")


def decode(**request: Any) -> Any:
    return paradec.generate(checkpoint(), request.pop("rows", ROWS), **(REQUEST | request))


@pytest.mark.thinned
@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
def test_lists_of_all_blocks_decode_like_dense_attention(cache: str) -> None:
    dense, listed = decode(cache=cache), decode(cache=cache, attention=EVERYTHING)
    assert torch.equal(dense.sequences, listed.sequences)
    assert dense.attention is None and min(listed.attention.sparse_calls) > 5
    assert listed.attention.density == [1.0] * 3


@pytest.mark.thinned
@pytest.mark.parametrize("cache", ["none", "prefix", "dual", "vicinity", "dkv_decode"])
def test_a_row_does_not_depend_on_its_neighbours(cache: str) -> None:
    sampler = samplers.create("threshold", threshold=0.6)  # rows progress at different speeds
    together = decode(cache=cache, attention=SOME, sampler=sampler)
    alone = [decode(rows=[row], cache=cache, attention=SOME, sampler=sampler) for row in ROWS]
    assert together.new_tokens.tolist() == [out.new_tokens[0].tolist() for out in alone]
    assert together.attention.sparse_calls == [out.attention.sparse_calls[0] for out in alone]
    assert together.attention.pattern_calls == [1] * 3


def test_the_report_says_what_was_computed() -> None:
    """The first int(T skip) + 2 steps are dense, and the last of them selects the blocks; later steps are sparse."""
    out = decode(attention=SOME)
    assert out.attention.dense_calls == [5] * 3 and out.attention.pattern_calls == [1] * 3
    assert out.attention.sparse_calls == [18] * 3 and out.nfe == 24
    sizes = [math.ceil((len(row) + 24) / 8) for row in ROWS]
    firsts = [math.ceil(len(row) / 8) for row in ROWS]
    counts = [min(p, int(p * 0.3) + 1) + min(n - p, int((n - p) * 0.3) + 1) for n, p in zip(sizes, firsts, strict=True)]
    assert out.attention.density == pytest.approx([count / n for count, n in zip(counts, sizes, strict=True)])
    assert out.attention.pattern_bytes > 0
    assert not torch.equal(out.sequences, decode().sequences)  # sparse attention changes the answer


def step_counts(out: Any) -> tuple[int, int, int]:
    cost = out.attention
    return cost.dense_calls[0], cost.pattern_calls[0], cost.sparse_calls[0]


DUAL = {"cache": "dual"}


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("settings", "request_", "expected"),
    [
        ({"skip": 0.0}, {}, (1, 1, 22)),
        ({"skip": 0.5}, {"steps": 12}, (7, 1, 4)),
        ({"skip": 1.0}, {}, (24, 0, 0)),
        ({"dense_steps": 1}, {}, (0, 1, 23)),
        ({"dense_steps": 9}, {}, (8, 1, 15)),
        ({"dense_steps": 3, "refresh_pattern_every": 5}, {}, (2, 5, 17)),
        # with a dual cache, lists are made when a call evaluates the whole row
        ({"select": 0.3}, DUAL, (8, 1, 15)),
        ({"select": 0.3, "refresh_pattern_every": 2}, DUAL, (8, 2, 14)),
        # without a schedule, dense steps are counted in tokens: 1 or 8 of the 24 in each step
        ({"select": 0.3}, {"sampler": samplers.create("threshold", threshold=1.0)}, (5, 1, 18)),
        ({"select": 0.3}, {"sampler": samplers.create("threshold", threshold=0.0)}, (1, 1, 1)),
    ],
)
def test_numbers_of_dense_steps(settings: dict[str, Any], request_: dict[str, Any], expected: tuple) -> None:
    attention = SparseD(**{"select": 0.5, "block_size": 8} | settings)
    assert step_counts(decode(rows=ROWS[:1], attention=attention, **request_)) == expected


class Oracle:
    """A replacement for a plan: attention with explicit softmax matrices and masks from the paper's rule."""

    def __init__(self, plan: Any, positions: np.ndarray, settings: SparseD, lists: dict[Any, Tensor], new: int):
        self.plan, self.positions, self.settings, self.lists, self.new = plan, positions, settings, lists, new
        self.modes, self.attended = plan.modes, False

    def attend(self, dense: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: Any) -> Any:
        self.attended, plan, size, select = True, self.plan, self.settings.block_size, self.settings.select
        visible = torch.ones(*query.shape[:3], key.shape[2], dtype=torch.bool)
        for index, (row, mode) in enumerate(zip(plan.rows.tolist(), plan.modes.tolist(), strict=True)):
            length = len(ROWS[row % len(ROWS)]) + self.new
            if mode == ESTIMATE:
                query_and_key = (query[index : index + 1, :, :length], key[index : index + 1, :, :length])
                first = generation_block(np.array([length]), np.array([self.new]), size).tolist()
                means = reference_means(*query_and_key, size, [length], first)
                joint = reference_means(*query_and_key, size, [length], None)
                joint = joint if self.settings.selection == "reference" else None
                self.lists[layer, row] = reference_selection(means, select, size, [length], [self.new], joint)
            if mode == SPARSE:
                blocks = self.lists[layer, row].repeat_interleave(size, 3)
                wide = F.pad(blocks, (0, max(0, key.shape[2] - blocks.shape[3])))[0, :, :, : key.shape[2]]
                visible[index] = wide[:, torch.as_tensor(self.positions[index]) // size]
        lengths = [len(ROWS[row % len(ROWS)]) + self.new for row in plan.rows]
        return reference_attention(query, key, value, visible, lengths)[0].transpose(1, 2)


@pytest.mark.thinned
@pytest.mark.parametrize("selection", ["isolated", "reference"])
@pytest.mark.parametrize(
    ("cache", "guidance_scale"), [("none", 1.0), ("dual", 1.0), ("dkv_decode", 1.0), ("none", 1.5)]
)
def test_logits_of_every_step_equal_the_rule(cache: str, selection: str, guidance_scale: float) -> None:
    """In every step, logits equal those of the paper's rule with explicit softmax matrices."""
    model, attention = tiny(2), SparseD(select=0.2, block_size=4, selection=selection, refresh_pattern_every=4)
    sampler = samplers.create("threshold", threshold=0.4)
    request = {"max_new_tokens": 16, "block_length": 8, "cache": cache, "guidance_scale": guidance_scale}
    state = sampler.start(model, ROWS, attention=attention, eos_early_stop=False, **request)
    lists: dict[Any, Tensor] = {}
    seen = set()
    with torch.inference_mode():
        while not state.done:
            queries = sampler.query(state)
            outputs = [model(query, state.store) for query in queries]
            for query, output in zip(queries, outputs, strict=True):
                if query.attention is None:
                    continue
                seen |= set(query.attention.modes.tolist())
                oracle = Oracle(query.attention, query.positions.numpy(), attention, lists, new=16)
                expected = model(query.with_fields(attention=oracle), state.store)
                assert torch.isfinite(output).all() and (output - expected).abs().max() < 1e-10
                query.attention.attended = True
            sampler.commit(state, sampler.propose(state, outputs, queries))
    assert seen >= {ESTIMATE, SPARSE} and min(state.attention_state.calls[SPARSE]) > 0


def test_steps_have_no_side_effects_and_requests_are_independent() -> None:
    model, sampler = tiny(2), samplers.create("low_confidence")
    request = {"max_new_tokens": 12, "block_length": 6, "eos_early_stop": False, "cache": "prefix"}
    settings = [SparseD(select=0.3, block_size=4), SparseD(select=0.6, block_size=8, skip=0.4), None]
    alone = [paradec.generate(model, ROWS[:2], sampler=sampler, attention=sparse, **request) for sparse in settings]
    states = [sampler.start(model, ROWS[:2], attention=sparse, **request) for sparse in settings]
    with torch.inference_mode():
        while not states[0].done:
            for state in states:
                first, second = sampler.step(model, state), sampler.step(model, state)
                assert torch.equal(first.scores, second.scores) and torch.equal(first.values, second.values)
                sampler.commit(state, second)
    for state, out in zip(states, alone, strict=True):
        rows = [state.canvas[row, : state.length[row]].tolist()[-12:] for row in range(2)]
        assert rows == out.new_tokens.tolist()


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_models_with_shifted_predictions(dream64: Model, cache: str) -> None:
    request = {"sampler": "entropy", "steps": 8, "max_new_tokens": 16, "block_length": 8, "cache": cache}
    request |= {"eos_early_stop": False}
    outs = [paradec.generate(dream64, ROWS[:2], attention=value, **request) for value in ("dense", EVERYTHING)]
    assert torch.equal(outs[0].sequences, outs[1].sequences)
    assert outs[1].attention.sparse_calls == [3 if cache == "dual" else 5] * 2


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", ["random", "factor", "credit", "klass", "editing", "saber", "learn2pd", "adablock"])
def test_samplers_of_every_kind(sampler: str) -> None:
    model = tiny(2)
    request = {"sampler": sampler, "max_new_tokens": 12, "seed": 3, "attention": SparseD(select=0.4, block_size=4)}
    request |= {} if sampler == "adablock" else {"block_length": 6}
    together = paradec.generate(model, ROWS, **request)
    alone = [paradec.generate(model, [row], **request) for row in ROWS]
    assert together.new_tokens.tolist() == [out.new_tokens[0].tolist() for out in alone]
    assert not (together.new_tokens == MASK).any()
    calls = np.array([step_counts(out) for out in alone]).T
    cost = together.attention
    assert calls.tolist() == [cost.dense_calls, cost.pattern_calls, cost.sparse_calls]
    assert calls.sum(0).tolist() == together.row_nfe


@pytest.mark.usefixtures("untraced")
def test_decoding_through_flex_attention() -> None:
    request = {"rows": ROWS[:2], "cache": "dual"}
    outs = [decode(attention=SparseD(select=0.3, block_size=8, backend=name), **request) for name in ("torch", "flex")]
    assert torch.equal(outs[0].sequences, outs[1].sequences) and outs[0].attention == outs[1].attention


@interpreted
def test_decoding_through_the_kernels() -> None:
    model = tiny(1)
    model.module.float()
    request = {"max_new_tokens": 3, "block_length": 3, "sampler": "low_confidence", "eos_early_stop": False}
    outs = []
    for backend in ("torch", "triton"):
        settings = SparseD(select=0.4, block_size=8, dense_steps=1, backend=backend)
        outs.append(paradec.generate(model, [[7] * 21], attention=settings, **request))
    assert torch.equal(outs[0].sequences, outs[1].sequences) and step_counts(outs[1]) == (0, 1, 2)
    assert outs[0].attention == outs[1].attention and outs[1].attention.density[0] < 1


def test_a_model_can_be_loaded_with_sparse_attention() -> None:
    model = paradec.load(GOLDEN / "llada-tiny", attn_implementation="sparsed")
    assert model.module.config._attn_implementation == "paradec_sparsed"
    request = REQUEST | {"max_new_tokens": 8}
    by_default = paradec.generate(model, ROWS[:1], **request)
    assert by_default.attention.sparse_calls[0] > 0
    assert paradec.generate(checkpoint(), ROWS[:1], attention="sparsed", **request).attention == by_default.attention
    assert paradec.generate(model, ROWS[:1], attention="dense", **request).attention is None
    with pytest.warns(UserWarning, match="does not work with sampler 'wino' here: .*attention is dense"):
        out = paradec.generate(model, ROWS[:1], max_new_tokens=8, block_length=8, sampler="wino")
    assert out.attention is None


def test_a_wrapped_model_can_have_sparse_attention() -> None:
    plain = tiny(1)
    module, options = plain.unwrap(), {"mask_token_id": MASK, "prediction": "same", "attn_implementation": "sparsed"}
    with pytest.raises(ValueError, match="attn_implementation='sparsed' needs a bidirectional .* block-causal"):
        paradec.wrap(module, topology="block_causal", block_length=4, **options)
    model = paradec.wrap(module, topology="bidirectional", **options)
    assert model.default_attention == SparseD()
    out = paradec.generate(model, ROWS, max_new_tokens=8, sampler="low_confidence")
    assert min(out.attention.sparse_calls) > 0
    assert model.unwrap().config._attn_implementation != "paradec_sparsed"


def test_a_mask_per_position_is_dense_with_one_warning() -> None:
    model, sampler = tiny(1), samplers.create("low_confidence")
    settings = SparseD(select=0.2, block_size=4, dense_steps=1)
    state = sampler.start(model, ROWS[:1], attention=settings, max_new_tokens=8)
    with torch.inference_mode():
        query = sampler.query(state)[0]
        columns = query.positions.shape[1]
        trees = query.with_fields(visible=torch.ones(1, columns, columns, dtype=torch.bool))
        with pytest.warns(UserWarning, match="no effect in calls with a mask per position"):
            output = model(trees)
        assert torch.allclose(output, model(query.with_fields(attention=None)), atol=1e-12)
        sampler.commit(state, sampler.propose(state, [output], [trees]))
    assert state.attention_state.listed_at.tolist() == [-1]  # no lists were made


def test_modules_that_ignore_the_plan_are_refused() -> None:
    model, sampler = tiny(1), samplers.create("low_confidence")
    state = sampler.start(model, ROWS[:1], attention=SparseD(dense_steps=1), max_new_tokens=4)
    layer = model.module.model.layers[0].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **{k: v for k, v in kwargs.items() if k != "attention_plan"})
    refuses(lambda: sampler.step(model, state), "does not pass keyword arguments on", RuntimeError)

"""Block-sparse attention over lists of key blocks, one list per head and block of queries, and how the lists are found.

Wang et al., "SparseD: Sparse Attention for Diffusion Language Models", arXiv 2509.24014. Attention is bidirectional; a
block is `block_size` neighbouring positions, the last one of a row may be shorter. Three steps:

1. `block_means`: how much each block of queries attends to each block of keys, the mean of the probabilities in that
   tile. Softmax rows are never kept: one pass over the keys finds their log-sum-exp (a dense step that returns it saves
   that pass), a second one sums probabilities tile by tile.
2. `select_blocks`: which key blocks each query block keeps, as a `BlockIndex`.
3. `sparse_attention`: softmax attention over those alone.

Each has a Triton kernel for NVIDIA GPUs and a path of plain PyTorch operations, which is the CPU's and the kernels'
reference; the third one can be had from PyTorch's flex_attention as well. Nothing here holds a tensor of queries x keys
for more than a few blocks of queries.

Shapes: `B` rows, `H` heads, `G` key/value heads (H a multiple of it), `Q` queries, `K` keys, `D` head dimension, `n`
blocks. A key's index is its position. Products are accumulated in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paradec.checks import check_choice, check_int, check_number, shown

try:
    import triton
    import triton.language as tl
except ImportError:  # no build for this machine: the portable path serves
    triton = None

BACKENDS = ("auto", "torch", "triton", "flex")
FLEX_BLOCK = 128
"""flex_attention's kernels take blocks of multiples of this, whatever tiles they choose."""
CHUNK = 2**20
"""Elements of keys that the portable path gathers at a time, beyond what one block of queries needs."""
MOST_SHARED = 2**16
"""Bytes of one block of queries that the kernels keep in a multiprocessor's shared memory."""
TILES = 2**19
"""Scores that it computes at a time, likewise: they should stay in a core's cache."""


@dataclass(frozen=True)
class BlockIndex:
    """Which key blocks each block of queries attends to, per row and head (ELL lists)."""

    count: Tensor
    """[B, H, n] int32: how many."""
    blocks: Tensor
    """[B, H, n, most] integer: which, ascending; entries from `count` on are block 0 and are not read."""
    block_size: int

    @property
    def nbytes(self) -> int:
        return self.count.nbytes + self.blocks.nbytes

    @classmethod
    def from_mask(cls, mask: Tensor, block_size: int, most: int | None = None) -> BlockIndex:
        """From mask [B, H, n, key blocks] bool. most: width of the lists; None: the longest (waits for the device)."""
        count = mask.sum(-1)
        most = max(int(count.max()), 1) if most is None else most
        blocks = (~mask).int().argsort(dim=-1, stable=True)[..., :most]
        blocks = blocks.masked_fill(torch.arange(most, device=mask.device) >= count.unsqueeze(-1), 0)
        # int16 halves what a long request keeps
        kind = torch.int16 if mask.shape[-1] < 2**15 else torch.int32
        return cls(count.int(), blocks.to(kind), block_size)

    def to_mask(self, key_blocks: int) -> Tensor:
        """[B, H, n, key_blocks] bool."""
        listed = torch.arange(self.blocks.shape[-1], device=self.blocks.device) < self.count.unsqueeze(-1)
        chosen = torch.zeros((*self.count.shape, key_blocks + 1), dtype=torch.bool, device=self.blocks.device)
        return chosen.scatter_(-1, self.blocks.long().masked_fill(~listed, key_blocks), True)[..., :key_blocks]


@dataclass(frozen=True)
class QueryTiles:
    """Where the queries of each block stand among the columns of a call, which may hold any ascending positions.

    Shapes: `T` tiles per row, at most one per block.
    """

    block: Tensor
    """[B, T] int32: the block of queries."""
    first: Tensor
    """[B, T] int32: its first column in the call."""
    count: Tensor
    """[B, T] int32: how many columns follow; 0 where a row has fewer tiles."""
    place: Tensor
    """[B, Q] int64: each column's place among T x block_size."""
    largest: int
    """The largest count."""
    last: int
    """The largest block."""
    aligned: bool
    """Whether column and position are the same, padding aside, and the tiles reach over all columns."""

    @classmethod
    def of(
        cls, positions: np.ndarray, valid: np.ndarray | None, block_size: int, device: torch.device | str = "cpu"
    ) -> QueryTiles:
        """positions [B, Q] int64 ascending, padding repeating the last one; valid [B, Q] bool, None if all are."""
        rows, columns = positions.shape
        block = positions // block_size
        opens = np.ones_like(block, bool)
        opens[:, 1:] = block[:, 1:] != block[:, :-1]
        tile = opens.cumsum(1) - 1
        shape = (rows, int(tile.max()) + 1)
        found = np.zeros((3, *shape), np.int32)
        row, at = opens.nonzero()
        found[0, row, tile[row, at]], found[1, row, tile[row, at]] = block[row, at], at
        here = np.ones_like(opens) if valid is None else valid
        aligned = shape[1] * block_size >= columns and bool(((positions == np.arange(columns)) | ~here).all())
        np.add.at(found[2], (np.repeat(np.arange(rows), columns), tile.ravel()), here.ravel())
        offset = np.arange(columns) - np.take_along_axis(found[1], tile, 1)
        offset = np.minimum(offset, np.take_along_axis(found[2], tile, 1) - 1)  # padding answers as the last column
        tensors = torch.as_tensor(found, device=device)
        place = torch.as_tensor(tile * block_size + offset, device=device)
        return cls(tensors[0], tensors[1], tensors[2], place, int(found[2].max()), int(block.max()), aligned)

    def to(self, device: torch.device) -> QueryTiles:
        """The same on another device."""
        if self.block.device == device:
            return self
        block, first, count, place = (part.to(device) for part in (self.block, self.first, self.count, self.place))
        return QueryTiles(block, first, count, place, self.largest, self.last, self.aligned)

    @classmethod
    def whole(
        cls, lengths: np.ndarray, columns: int, block_size: int, device: torch.device | str = "cpu"
    ) -> QueryTiles:
        """Rows from position 0 to `lengths` [B], in calls of so many columns."""
        column = np.arange(columns)
        return cls.of(
            np.minimum(column, lengths[:, None] - 1), column < lengths[:, None], block_size=block_size, device=device
        )


# ---- which blocks ---------------------------------------------------------------------------------------------------


def generation_block(lengths: np.ndarray, new: np.ndarray, block_size: int) -> np.ndarray:
    """[B] int64: the first block that lies wholly in the last `new` [B] of `lengths` [B] positions, else the last one.

    A block that holds both prompt and answer counts as prompt.
    """
    return np.clip(-(-(lengths - new) // block_size), 0, _blocks(lengths, block_size) - 1)


def block_means(
    query: Tensor,
    key: Tensor,
    block_size: int,
    *,
    lengths: np.ndarray | Sequence[int] | None = None,
    first: np.ndarray | Sequence[int] | None = None,
    logsumexp: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """The mean attention probability of every tile.

    Args:
        query: [B, H, L, D], after the rotary embedding.
        key: [B, G, L, D].
        lengths: [B] real positions of each row, on the host; None is L.
        first: [B] on the host: key blocks from here on share a softmax of their own, over themselves alone; those
            before are taken from the softmax over all keys. None takes all from that.
        logsumexp: [B, H, L] natural log of the sum of exp(score) over all keys, where the caller has it.
        scale: of the scores; None is D ** -0.5 (the public LLaDA code divides by the root of the number of heads here).
        backend: one of `BACKENDS`; "flex" has no means, and takes what "auto" does.

    Returns:
        [B, H, n, n] float32 (float64 for float64 inputs): [b, h, i, j] is the mean over the real queries of block i and
        the real keys of block j; 0 beyond a row's end.

    Raises:
        ValueError: shapes that do not fit, or a backend that is not there.
    """
    check_int("block_size", block_size, low=1)
    _check_heads(query, key)
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"query and key have {query.shape[2]} and {key.shape[2]} positions; patterns need whole rows")
    lengths = _host(lengths, query.shape[0], query.shape[2])
    starts = _blocks(lengths, block_size) if first is None else np.asarray(first, np.int64)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if runs_on("auto" if backend == "flex" else backend, query, block_size) == "triton":
        return _means_triton(query, key, block_size, lengths, starts, logsumexp, scale)
    return _means_torch(query, key, block_size, lengths, starts, logsumexp, scale)


def select_blocks(
    means: Tensor,
    select: float,
    block_size: int,
    *,
    lengths: np.ndarray | Sequence[int],
    first: np.ndarray | Sequence[int],
    joint: Tensor | None = None,
) -> BlockIndex:
    """The key blocks that each block of queries keeps.

    Of the n_p blocks before `first` and the n_g from there on, each query block keeps the min(n, max(1, int(n * select)
    + 1)) with the highest mean, ranked apart ("isolated selection"), so that neither part crowds out the other.

    Args:
        means: [B, H, n, n] from `block_means` with the same `first`.
        select: the share kept, in (0, 1].
        lengths: [B] real positions. first: [B] from `generation_block`. Both on the host.
        joint: means [B, H, n, n] of one softmax over all keys. When given, blocks before `first` are kept as the
            public code does ("reference"): those among the highest max(1, int(n * select) + 1) of all n blocks.

    Returns:
        Lists in which a tie goes to the lower block.
    """
    check_number("select", select, low=0, high=1, open_low=True)
    lengths, first = np.asarray(lengths, np.int64), np.asarray(first, np.int64)
    total = _blocks(lengths, block_size)
    device = means.device
    start, stop = torch.as_tensor(np.stack((first, total)), device=device)[:, :, None, None, None]
    column = torch.arange(means.shape[-1], device=device)
    prompt, answer = column < start, (column >= start) & (column < stop)
    kept = [budget(first, select), budget(total - first, select)]
    if joint is None:
        chosen = _highest(means, prompt, kept[0])
    else:
        chosen = _highest(joint, column < stop, budget(total, select)) & prompt
        kept[0] = np.minimum(budget(total, select), first)
    chosen |= _highest(means, answer, kept[1])
    chosen &= column[:, None] < stop  # queries beyond the row's end
    return BlockIndex.from_mask(chosen, block_size, most=int((kept[0] + kept[1]).max()))


def budget(blocks: np.ndarray, select: float) -> np.ndarray:
    """How many of so many blocks are kept: SparseD's max(1, int(n * select) + 1), and never more than there are."""
    return np.minimum(blocks, np.maximum(1, np.floor(blocks * select).astype(np.int64) + 1))


def _highest(values: Tensor, among: Tensor, count: np.ndarray) -> Tensor:
    """[B, H, n, n] bool: the count [B] highest of `values` `among` the allowed; a tie goes to the lower block."""
    order = values.masked_fill(~among, -1.0).argsort(dim=-1, descending=True, stable=True)
    limit = torch.as_tensor(count, device=values.device)[:, None, None, None]
    taken = (torch.arange(values.shape[-1], device=values.device) < limit).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, taken) & among


def _means_torch(
    query: Tensor,
    key: Tensor,
    size: int,
    lengths: np.ndarray,
    first: np.ndarray,
    logsumexp: Tensor | None,
    scale: float,
) -> Tensor:
    rows, heads, length, _ = query.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    groups = heads // key.shape[1]
    means = query.new_zeros((rows, heads, -(-length // size), -(-length // size)), dtype=wide)
    at_once = max(1, TILES // (size * length)) * size  # whole blocks of queries
    for row in range(rows):
        real, split = int(lengths[row]), int(first[row])
        here = -(-real // size)
        extent = torch.full((here,), size, dtype=wide, device=query.device)
        extent[-1] = real - (here - 1) * size
        for head in range(heads):
            keys = F.pad(key[row, head // groups, :real].to(wide) * scale, (0, 0, 0, here * size - real))
            for begin in range(0, real, at_once):
                end = min(begin + at_once, real)
                scores = query[row, head, begin:end].to(wide) @ keys.T
                scores[:, real:] = -torch.inf
                known = None if logsumexp is None else logsumexp[row, head, begin:end, None].to(wide)
                sums = _normed(scores.view(end - begin, here, size), split, known)
                tiles = F.pad(sums, (0, 0, 0, -(end - begin) % size)).view(-1, size, here).sum(1)
                at = slice(begin // size, begin // size + len(tiles))
                means[row, head, at, :here] = tiles / (extent[at, None] * extent)
    return means


def _normed(scores: Tensor, split: int, logsumexp: Tensor | None) -> Tensor:
    """The probability in each block, [m, n], of scores [m, n, size], which are overwritten: blocks before `split` share
    a softmax over all, whose log-sum-exps [m, 1] may be known, those from there on one over themselves."""
    prompt, answer = scores[:, :split], scores[:, split:]
    shift = scores.amax((1, 2)).unsqueeze(1) if logsumexp is None else logsumexp
    total: Tensor | float = 0.0
    parts = []
    if split:
        parts.append(prompt.sub_(shift.unsqueeze(2)).exp_().sum(2))
        total = parts[0].sum(1, keepdim=True)
    if split < scores.shape[1]:
        # its own maximum: beside a strong prompt it could vanish
        top = answer.amax((1, 2)).unsqueeze(1)
        found = answer.sub_(top.unsqueeze(2)).exp_().sum(2)
        mass = found.sum(1, keepdim=True)
        total = total + mass * (top - shift).exp()
        parts.append(found / mass)
    if split and logsumexp is None:
        parts[0] = parts[0] / total
    return torch.cat(parts, 1)


# ---- attention over lists -------------------------------------------------------------------------------------------


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: BlockIndex | None,
    *,
    tiles: QueryTiles | None = None,
    lengths: np.ndarray | Sequence[int] | None = None,
    rows: np.ndarray | Sequence[int] | None = None,
    scale: float | None = None,
    return_logsumexp: bool = False,
    block_size: int = 128,
    backend: str = "auto",
) -> Any:
    """Softmax attention of each query over the key blocks that its block lists.

    Args:
        query: [B, H, Q, D]; columns of a call, see `tiles`.
        key, value: [B, G, K, D] of the positions from 0 on.
        index: the lists; None attends to all keys (and so yields their log-sum-exp), in blocks of `block_size`.
        tiles: where the query blocks stand in the call; None: the queries are positions 0 to Q.
        lengths: [B] keys of each row, on the host; None is K. Keys beyond are not seen.
        rows: [B] rows of `index` that the rows of the call use, on the host; None: as they stand.
        scale: of the scores; None is D ** -0.5.
        backend: one of `BACKENDS`; "auto" takes Triton on an NVIDIA GPU, where the dtype and sizes allow it. "flex" is
            compiled at the first call of every shape on a GPU; elsewhere it is not, and makes all scores.

    Returns:
        [B, H, Q, D] in the dtype of `value`; 0 where a list is empty or holds no real key. With `return_logsumexp`,
        also [B, H, Q] float32 (float64 for float64 inputs) over the keys that were read, -inf where there are none.

    Raises:
        ValueError: shapes that do not fit, or a backend that is not there.
    """
    size = block_size if index is None else index.block_size
    check_int("block_size", size, low=1)
    _check_heads(query, key)
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} are not of the same positions")
    lengths = _host(lengths, query.shape[0], key.shape[2])
    rows = np.arange(len(query)) if rows is None else np.asarray(rows, np.int64)
    if tiles is None:
        tiles = QueryTiles.whole(np.full(len(query), query.shape[2]), query.shape[2], size, query.device)
    _check_lists(query, index, tiles, rows)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    run = {"torch": _attend_torch, "triton": _attend_triton, "flex": _attend_flex}[runs_on(backend, query, size)]
    out, logsumexp = run(query, key, value, index, tiles, lengths, rows, scale, size, return_logsumexp)
    return (out, logsumexp) if return_logsumexp else out


def _attend_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: BlockIndex | None,
    tiles: QueryTiles,
    lengths: np.ndarray,
    rows: np.ndarray,
    scale: float,
    size: int,
    return_logsumexp: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gather the listed key blocks of a few query blocks at a time and attend to them."""
    (batch, heads, _, width), (_, key_heads, keys, _) = query.shape, key.shape
    device, count, total = query.device, tiles.block.shape[1], -(-keys // size)
    listed, number = _lists_of(query, index, tiles, rows, total, size)
    # flattened to one entry per item below
    listed, number = listed.flatten(0, 2).long(), number.flatten()
    owner = (
        torch.arange(batch, device=device)[:, None] * key_heads
        + torch.arange(heads, device=device) * key_heads // heads
    )
    owner = owner[:, :, None].expand(batch, heads, count).reshape(-1, 1)
    limit = torch.as_tensor(lengths, device=device)[:, None].expand(batch, heads * count).reshape(-1, 1)
    key_blocks, value_blocks = (_in_blocks(part, total, size) for part in (key, value))

    queries = _by_tile(query, tiles, size).reshape(-1, 1, size, width).to(key.dtype)
    out = value.new_empty((len(queries), size, value.shape[-1]))
    wide = torch.promote_types(query.dtype, torch.float32)
    sums = query.new_empty((len(queries), size), dtype=wide) if return_logsumexp else None
    most = listed.shape[1]
    at_once = max(1, CHUNK // (most * size * width))
    slot, inside = torch.arange(most, device=device), torch.arange(size, device=device)
    for begin in range(0, len(queries), at_once):
        at = slice(begin, begin + at_once)
        chosen = listed[at]
        seen = (slot < number[at, None])[..., None] & (chosen[..., None] * size + inside < limit[at, None])
        chosen = (owner[at] * total + chosen.clamp(max=total - 1)).view(-1)
        near = key_blocks.index_select(0, chosen).view(-1, 1, most * size, width)
        values = value_blocks.index_select(0, chosen).view(-1, 1, most * size, value.shape[-1])
        seen = seen.view(-1, 1, 1, most * size)
        mask = None if seen.all() else seen
        part = F.scaled_dot_product_attention(queries[at], near, values, attn_mask=mask, scale=scale)
        if mask is not None:  # where nothing is seen, releases of torch differ
            part = part.masked_fill(~seen.any(-1, keepdim=True), 0)
        out[at] = part.squeeze(1)
        if sums is not None:
            scores = (queries[at].to(wide) @ near.to(wide).transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
            sums[at] = scores.logsumexp(-1).squeeze(1)
    out = _by_column(out.view(batch, heads, count * size, -1), tiles)
    return out, None if sums is None else _by_column(sums.view(batch, heads, -1, 1), tiles).squeeze(-1)


def _attend_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: BlockIndex | None,
    tiles: QueryTiles,
    lengths: np.ndarray,
    rows: np.ndarray,
    scale: float,
    size: int,
    return_logsumexp: bool,
) -> tuple[Tensor, Tensor | None]:
    """PyTorch's flex_attention over the same lists. Blocks that lie wholly within a row need no mask there; its last
    one, if it is short, does."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    keys, device = key.shape[2], query.device
    total = -(-keys // size)
    listed, number = _lists_of(query, index, tiles, rows, total, size)
    listed = listed.long()
    limit = torch.as_tensor(lengths, device=device)
    end = limit[:, None, None, None]
    here = torch.arange(listed.shape[-1], device=device) < number.unsqueeze(-1)
    whole, short = here & ((listed + 1) * size <= end), here & (listed * size < end) & ((listed + 1) * size > end)
    seen = torch.zeros((*number.shape, total + 1), dtype=torch.bool, device=device)
    seen.scatter_(-1, torch.where(here, listed, total), True)

    def visible(row: Tensor, head: Tensor, column: Tensor, position: Tensor) -> Tensor:
        # without compilation this alone decides
        return seen[row, head, column // size, position // size] & (position < limit[row])

    count = whole.sum(-1, keepdim=True)  # lists ascend: the short block follows these
    queries = _by_tile(query, tiles, size).to(key.dtype)
    mask = BlockMask.from_kv_blocks(
        short.sum(-1).int(),
        listed.gather(-1, count.clamp(max=listed.shape[-1] - 1)).int(),
        count.squeeze(-1).int(),
        listed.int(),
        BLOCK_SIZE=size,
        mask_mod=visible,
        seq_lengths=(queries.shape[2], keys),
        compute_q_blocks=False,
    )
    out, found = _flex_attention(query.is_cuda)(
        queries,
        key,
        value,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=return_logsumexp),
    )
    sums = _by_column(found.lse.unsqueeze(-1), tiles).squeeze(-1) if return_logsumexp else None
    return _by_column(out, tiles), sums


@functools.cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # in one graph or not at all: beyond torch._dynamo.config.recompile_limit shapes it would quietly make all scores
    return torch.compile(flex_attention, dynamic=False, fullgraph=True) if compiled else flex_attention


def _lists_of(
    query: Tensor, index: BlockIndex | None, tiles: QueryTiles, rows: np.ndarray, total: int, size: int
) -> tuple[Tensor, Tensor]:
    """The lists of the call's tiles [B, H, T, most], of all `total` key blocks without an `index`; and how many entries
    each has [B, H, T]."""
    (batch, heads), device = query.shape[:2], query.device
    if index is None:
        index = _every_block(batch, heads, tiles.last + 1, total, size, device)
        rows = np.arange(batch)
    row = torch.as_tensor(rows, device=device)[:, None, None]
    head = torch.arange(heads, device=device)[:, None]
    block = tiles.block.long()[:, None]
    return index.blocks[row, head, block], index.count[row, head, block]


def _by_tile(query: Tensor, tiles: QueryTiles, size: int) -> Tensor:
    """[B, H, Q, D] -> [B, H, T * size, D]: the queries of each tile, and anything behind them."""
    (batch, heads, columns, width), count = query.shape, tiles.block.shape[1]
    if tiles.aligned:
        return F.pad(query, (0, 0, 0, count * size - columns))
    column = tiles.first.long().unsqueeze(-1) + torch.arange(size, device=query.device)
    column = column.clamp(max=columns - 1).flatten(1)[:, None, :, None]
    return query.gather(2, column.expand(batch, heads, -1, width))


def _by_column(tensor: Tensor, tiles: QueryTiles) -> Tensor:
    """[B, H, T * size, D] -> [B, H, Q, D], the inverse."""
    columns = tiles.place.shape[1]
    if tiles.aligned:
        return tensor[:, :, :columns]
    place = tiles.place[:, None, :, None].expand(*tensor.shape[:2], columns, tensor.shape[3])
    return tensor.gather(2, place)


def _in_blocks(tensor: Tensor, blocks: int, size: int) -> Tensor:
    """[B, G, K, D] -> [B * G * blocks, size, D], padded with zeros; a copy only where it has to be."""
    short = blocks * size - tensor.shape[2]
    return (F.pad(tensor, (0, 0, 0, short)) if short else tensor).reshape(-1, size, tensor.shape[-1])


def _every_block(batch: int, heads: int, count: int, total: int, size: int, device: torch.device) -> BlockIndex:
    """Lists of all key blocks, without memory of their own."""
    every = torch.arange(total, device=device).expand(batch, heads, count, total)
    return BlockIndex(torch.full((1,), total, device=device).expand(batch, heads, count), every, size)


# ---- arguments ------------------------------------------------------------------------------------------------------


def _blocks(lengths: np.ndarray, size: int) -> np.ndarray:
    return -(-lengths // size)


def _host(lengths: Any, rows: int, most: int) -> np.ndarray:
    """[B] int64. Raises ValueError: not one per row, or out of range."""
    found = np.full(rows, most) if lengths is None else np.asarray(lengths, np.int64)
    if found.shape != (rows,) or (found < 1).any() or (found > most).any():
        raise ValueError(f"lengths={shown(lengths)} must be {rows} integers from 1 to {most}")
    return found


def _check_heads(query: Tensor, key: Tensor) -> None:
    if query.dim() != 4 or key.dim() != 4 or len(query) != len(key) or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query {tuple(query.shape)} and key {tuple(key.shape)} must be [B, heads, positions, D] alike"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"{query.shape[1]} heads are no multiple of {key.shape[1]} key/value heads")


def _check_lists(query: Tensor, index: BlockIndex | None, tiles: QueryTiles, rows: np.ndarray) -> None:
    """Raise ValueError where a kernel would read beyond its lists."""
    if tuple(tiles.place.shape) != (len(query), query.shape[2]):
        raise ValueError(
            f"tiles are of calls {tuple(tiles.place.shape)}, not of {len(query)} x {query.shape[2]} columns"
        )
    if index is None:
        return
    held, heads, blocks = index.count.shape
    if heads != query.shape[1] or tiles.last >= blocks:
        raise ValueError(
            f"index has {heads} heads and {blocks} blocks of queries; the call has {query.shape[1]} heads, and "
            f"queries up to block {tiles.last}"
        )
    if rows.shape != (len(query),) or rows.min() < 0 or rows.max() >= held:
        raise ValueError(f"rows={shown(rows.tolist())} must be {len(query)} integers from 0 to {held - 1}")


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 must be set before this module is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def runs_on(backend: str, query: Tensor, size: int) -> str:
    """Which path serves: "torch", "triton" or "flex". Raises ValueError: a backend that is asked for and not there."""
    check_choice("backend", backend, BACKENDS)
    if backend == "torch":
        return backend
    if backend == "flex":
        if query.is_cuda and size % FLEX_BLOCK:
            raise ValueError(
                f"backend='flex' takes blocks of multiples of {FLEX_BLOCK} on a GPU, not block_size={size}; use "
                "backend='auto'"
            )
        return backend
    why = None
    if triton is None:
        why = "the package triton is not installed"
    elif query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        why = f"it has no {query.dtype}"
    elif size * triton.next_power_of_2(query.shape[-1]) * query.itemsize > MOST_SHARED:
        why = f"a block of {size} queries of {query.shape[-1]} in {query.dtype} is too large for it"
    elif not query.is_cuda and not interpreting():
        why = f"it needs an NVIDIA GPU; the tensors are on {query.device}"
    if backend == "triton" and why is not None:
        raise ValueError(f"backend='triton' is not available: {why}; use backend='torch'")
    return "triton" if why is None and (query.is_cuda or backend == "triton") else "torch"


# ---- Triton ---------------------------------------------------------------------------------------------------------


def _means_triton(
    query: Tensor,
    key: Tensor,
    size: int,
    lengths: np.ndarray,
    first: np.ndarray,
    logsumexp: Tensor | None,
    scale: float,
) -> Tensor:
    query, key = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key))
    rows, heads, length, width = query.shape
    blocks = -(-length // size)
    bounds = torch.as_tensor(np.stack((lengths, first)), dtype=torch.int32, device=query.device)
    shapes = _tile_shapes(query, size)
    common = (*query.stride()[:3], *key.stride()[:3], heads, heads // key.shape[1], length, scale)
    # [2, B, H, L]: over all keys, and over those of the answer alone
    sums = torch.empty((2, rows, heads, length), dtype=torch.float32, device=query.device)
    if logsumexp is not None:
        sums[0] = logsumexp
    answer = bool((first < _blocks(lengths, size)).any())
    for part in range(2):
        if (part == 0 and logsumexp is None) or (part == 1 and answer):
            grid = (-(-length // shapes["QUERIES"]), rows * heads)
            _logsumexp_kernel[grid](
                query, key, sums[part], bounds, *common, SIZE=size, AFTER=part, **shapes, **_launch(query, shapes)
            )
    means = torch.empty((rows, heads, blocks, blocks), dtype=torch.float32, device=query.device)
    tall = shapes | {"QUERIES": max(16, triton.next_power_of_2(size))}
    _means_kernel[(blocks, rows * heads)](
        query, key, sums, means, bounds, rows, *common, blocks, SIZE=size, **tall, **_launch(query, tall)
    )
    return means


def _attend_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: BlockIndex | None,
    tiles: QueryTiles,
    lengths: np.ndarray,
    rows: np.ndarray,
    scale: float,
    size: int,
    return_logsumexp: bool,
) -> tuple[Tensor, Tensor | None]:
    query, key, value = (p if p.stride(-1) == 1 else p.contiguous() for p in (query, key, value))
    (batch, heads, columns, width), device = query.shape, query.device
    if value.shape[-1] != width:
        raise ValueError(
            f"backend='triton' takes one head dimension, not {width} for keys and {value.shape[-1]} values"
        )
    shapes = _tile_shapes(query, size, tiles.largest)
    splits = -(-min(size, tiles.largest) // shapes["QUERIES"])
    programs = tiles.block.shape[1] * splits * batch * heads
    shares = _shares(programs, -(-key.shape[2] // size) if index is None else index.blocks.shape[3], device)
    # position by position, as the projection behind wants it; padding columns stay 0
    kind = value.dtype if shares == 1 else torch.float32
    out = torch.zeros((shares, batch, columns, heads, width), dtype=kind, device=device).transpose(2, 3)
    sums = torch.full((shares, batch, heads, columns), -torch.inf, dtype=torch.float32, device=device)
    host = torch.as_tensor(np.stack((lengths, rows)), dtype=torch.int32, device=device)
    # dense: any pointer will do, it is not read
    count, blocks = (host, host) if index is None else (index.count.contiguous(), index.blocks.contiguous())
    _attention_kernel[(tiles.block.shape[1] * splits, batch * heads, shares)](
        query,
        key,
        value,
        out,
        sums,
        count,
        blocks,
        host,
        tiles.block,
        tiles.first,
        tiles.count,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        *out.stride()[:4],
        heads,
        heads // key.shape[1],
        columns,
        batch,
        tiles.block.shape[1],
        1 if index is None else count.shape[2],
        1 if index is None else blocks.shape[3],
        scale,
        SIZE=size,
        SPLITS=splits,
        DENSE=index is None,
        **shapes,
        **_launch(query, shapes),
    )
    if shares == 1:
        return out[0], sums[0] if return_logsumexp else None
    total = sums.logsumexp(0)
    weights = (sums - total).exp().nan_to_num(0.0).unsqueeze(-1)  # an empty list: -inf - -inf
    return (weights * out).sum(0).to(value.dtype), total if return_logsumexp else None


def _shares(programs: int, most: int, device: torch.device) -> int:
    """How many programs share a list of up to `most` blocks, so that a small window keeps the whole device busy."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(-(-wanted // programs), most // 4, 16))


def _tile_shapes(query: Tensor, size: int, queries: int | None = None) -> dict[str, Any]:
    """The kernels' compile-time sizes: queries and keys per tile, the head dimension, and how to compute."""
    width = query.shape[-1]
    padded = max(16, triton.next_power_of_2(width))
    needed = triton.next_power_of_2(size if queries is None else min(size, queries))
    # 16 KiB of keys at a time: with values, and some loaded ahead, that fits beside the queries
    keys = min(64, triton.next_power_of_2(size), 2**14 // (padded * query.itemsize))
    return {
        "QUERIES": max(16, min(128 if width <= 128 else 64, needed)),
        "KEYS": max(16, keys),
        "WIDTH": width,
        "PADDED": padded,
        # the interpreter computes bfloat16 as if it were an integer
        "UPCAST": query.dtype == torch.bfloat16 and interpreting(),
        # float32 stays float32 instead of the tensor cores' 10 bits
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
    }


def _launch(query: Tensor, shapes: dict[str, Any]) -> dict[str, int]:
    """Warps and pipeline stages; no tuning run, which would take the first step of every shape."""
    large = shapes["QUERIES"] * shapes["PADDED"] >= 128 * 128
    return {"num_warps": 8 if large else 4, "num_stages": 2 if query.dtype == torch.float32 else 3}


if triton is not None:

    @triton.jit
    def _load(pointer, rows, stride, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, UPCAST: tl.constexpr):
        """[rows, PADDED] of a matrix with so many elements from row to row, 0 where not `inside` or beyond WIDTH."""
        column = tl.arange(0, PADDED)
        at = pointer + rows[:, None] * stride + column[None, :]
        tile = tl.load(at, mask=inside[:, None] & (column[None, :] < WIDTH), other=0.0)
        if UPCAST:
            tile = tile.to(tl.float32)
        return tile

    @triton.jit
    def _attention_kernel(
        query,
        key,
        value,
        out,
        sums,
        counts,
        blocks,
        host,
        tile_block,
        tile_first,
        tile_count,
        query_row,
        query_head,
        query_step,
        key_row,
        key_head,
        key_step,
        value_row,
        value_head,
        value_step,
        out_share,
        out_row,
        out_head,
        out_step,
        heads,
        groups,
        columns,
        batch,
        tiles,
        query_blocks,
        most,
        scale,
        SIZE: tl.constexpr,
        SPLITS: tl.constexpr,
        DENSE: tl.constexpr,
        QUERIES: tl.constexpr,
        KEYS: tl.constexpr,
        WIDTH: tl.constexpr,
        PADDED: tl.constexpr,
        UPCAST: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """One block of queries (or a part of it) of one row and head, one share of its list; softmax in base 2."""
        tile = tl.program_id(0) // SPLITS
        part = tl.program_id(0) % SPLITS
        row = (tl.program_id(1) // heads).to(tl.int64)
        head = tl.program_id(1) % heads
        count = tl.load(tile_count + row * tiles + tile)
        if part * QUERIES >= count:
            return
        offset = part * QUERIES + tl.arange(0, QUERIES)
        here = offset < count
        column = tl.load(tile_first + row * tiles + tile) + offset
        q = _load(query + row * query_row + head * query_head, column, query_step, here, WIDTH, PADDED, UPCAST)
        key += row * key_row + (head // groups) * key_head
        value += row * value_row + (head // groups) * value_head
        length = tl.load(host + row)
        if DENSE:
            number = (length + SIZE - 1) // SIZE
        else:
            listed = (tl.load(host + batch + row).to(tl.int64) * heads + head) * query_blocks
            listed += tl.load(tile_block + row * tiles + tile)
            number = tl.load(counts + listed)
            blocks += listed * most
        PARTS: tl.constexpr = (SIZE + KEYS - 1) // KEYS
        share = tl.program_id(2)
        shares = tl.num_programs(2)
        to_bits = scale * 1.4426950408889634
        highest = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        mixed = tl.zeros([QUERIES, PADDED], tl.float32)
        for step in range(number * share // shares * PARTS, number * (share + 1) // shares * PARTS):
            if DENSE:
                block = step // PARTS
            else:
                block = tl.load(blocks + step // PARTS).to(tl.int32)
            inner = (step % PARTS) * KEYS + tl.arange(0, KEYS)
            position = block * SIZE + inner
            seen = (inner < SIZE) & (position < length)
            k = _load(key, position, key_step, seen, WIDTH, PADDED, UPCAST)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * to_bits
            scores = tl.where(seen[None, :], scores, float("-inf"))
            above = tl.maximum(highest, tl.max(scores, 1))
            # a tile beyond the row's end leaves -inf - -inf
            base = tl.where(above == float("-inf"), 0.0, above)
            weights = tl.exp2(scores - base[:, None])
            shrink = tl.exp2(highest - base)
            total = total * shrink + tl.sum(weights, 1)
            v = _load(value, position, value_step, seen, WIDTH, PADDED, UPCAST)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
            highest = above
        some = total > 0
        mixed = mixed / tl.where(some, total, 1.0)[:, None]
        width = tl.arange(0, PADDED)
        at = out + share * out_share + row * out_row + head * out_head + column[:, None] * out_step + width[None, :]
        tl.store(at, mixed.to(out.dtype.element_ty), mask=here[:, None] & (width[None, :] < WIDTH))
        found = (highest + tl.log2(tl.where(some, total, 1.0))) * 0.6931471805599453
        at = ((share * batch + row) * heads + head) * columns + column
        tl.store(sums + at, tl.where(some, found, float("-inf")), mask=here)

    @triton.jit
    def _logsumexp_kernel(
        query,
        key,
        sums,
        bounds,
        query_row,
        query_head,
        query_step,
        key_row,
        key_head,
        key_step,
        heads,
        groups,
        columns,
        scale,
        SIZE: tl.constexpr,
        AFTER: tl.constexpr,
        QUERIES: tl.constexpr,
        KEYS: tl.constexpr,
        WIDTH: tl.constexpr,
        PADDED: tl.constexpr,
        UPCAST: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """Log-sum-exp of each query's scores over all keys, or (AFTER) over those from the answer's first block on."""
        row = (tl.program_id(1) // heads).to(tl.int64)
        head = tl.program_id(1) % heads
        length = tl.load(bounds + row)
        column = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
        here = column < length
        q = _load(query + row * query_row + head * query_head, column, query_step, here, WIDTH, PADDED, UPCAST)
        key += row * key_row + (head // groups) * key_head
        begin = 0
        if AFTER:
            begin = tl.load(bounds + tl.num_programs(1) // heads + row) * SIZE
        highest = tl.full([QUERIES], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES], tl.float32)
        for start in range(begin, length, KEYS):
            position = start + tl.arange(0, KEYS)
            seen = position < length
            k = _load(key, position, key_step, seen, WIDTH, PADDED, UPCAST)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * 1.4426950408889634)
            scores = tl.where(seen[None, :], scores, float("-inf"))
            above = tl.maximum(highest, tl.max(scores, 1))
            total = total * tl.exp2(highest - above) + tl.sum(tl.exp2(scores - above[:, None]), 1)
            highest = above
        found = (highest + tl.log2(total)) * 0.6931471805599453
        tl.store(sums + (row * heads + head) * columns + column, found, mask=here)

    @triton.jit
    def _means_kernel(
        query,
        key,
        sums,
        means,
        bounds,
        rows,
        query_row,
        query_head,
        query_step,
        key_row,
        key_head,
        key_step,
        heads,
        groups,
        columns,
        scale,
        blocks,
        SIZE: tl.constexpr,
        QUERIES: tl.constexpr,
        KEYS: tl.constexpr,
        WIDTH: tl.constexpr,
        PADDED: tl.constexpr,
        UPCAST: tl.constexpr,
        PRECISION: tl.constexpr,
    ):
        """One block of queries against every block of keys: probabilities are summed and forgotten."""
        block = tl.program_id(0)
        row = (tl.program_id(1) // heads).to(tl.int64)
        head = tl.program_id(1) % heads
        length = tl.load(bounds + row)
        first = tl.load(bounds + rows + row)
        offset = tl.arange(0, QUERIES)
        column = block * SIZE + offset
        here = (offset < SIZE) & (column < length)
        q = _load(query + row * query_row + head * query_head, column, query_step, here, WIDTH, PADDED, UPCAST)
        key += row * key_row + (head // groups) * key_head
        means += ((row * heads + head) * blocks + block) * blocks
        at = (row * heads + head) * columns + column
        LOG2E: tl.constexpr = 1.4426950408889634
        over_all = tl.load(sums + at, mask=here, other=0.0) * LOG2E
        at = ((row + rows) * heads + head) * columns + column
        over_answer = tl.load(sums + at, mask=here, other=0.0) * LOG2E
        real = tl.minimum(SIZE, length - block * SIZE)
        for other in range(0, blocks):
            norm = tl.where(other < first, over_all, over_answer)
            found = tl.zeros([QUERIES], tl.float32)
            for start in tl.static_range(0, SIZE, KEYS):
                inner = start + tl.arange(0, KEYS)
                position = other * SIZE + inner
                seen = (inner < SIZE) & (position < length)
                k = _load(key, position, key_step, seen, WIDTH, PADDED, UPCAST)
                scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
                weights = tl.exp2(scores - norm[:, None])
                found += tl.sum(tl.where(seen[None, :] & here[:, None], weights, 0.0), 1)
            area = tl.maximum(real, 1) * tl.maximum(tl.minimum(SIZE, length - other * SIZE), 1)
            tl.store(means + other, tl.sum(found, 0) / area.to(tl.float32))

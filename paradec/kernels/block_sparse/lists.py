"""Lists of key blocks, their selection from mean attention probabilities, and the query blocks of a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_number


@dataclass(frozen=True)
class BlockIndex:
    """Lists of key blocks, for each of `B` rows, `H` heads and `n` query blocks (the ELL format)."""

    count: Tensor
    """[B, H, n] int32: lengths of the lists."""
    blocks: Tensor
    """[B, H, n, max_blocks] integer: ascending key blocks; entries from `count` on are 0 and unused."""
    block_size: int

    @property
    def nbytes(self) -> int:
        return self.count.nbytes + self.blocks.nbytes

    @classmethod
    def from_mask(cls, mask: Tensor, block_size: int, max_blocks: int | None = None) -> BlockIndex:
        """Make lists from a mask [B, H, n, key blocks] bool. max_blocks: width of the lists; None: the longest list
        (synchronises)."""
        count = mask.sum(-1)
        max_blocks = max(int(count.max()), 1) if max_blocks is None else max_blocks
        blocks = (~mask).int().argsort(dim=-1, stable=True)[..., :max_blocks]
        blocks = blocks.masked_fill(torch.arange(max_blocks, device=mask.device) >= count.unsqueeze(-1), 0)
        # int16 halves the memory
        dtype = torch.int16 if mask.shape[-1] < 2**15 else torch.int32
        return cls(count.int(), blocks.to(dtype), block_size)

    def to_mask(self, key_blocks: int) -> Tensor:
        is_listed = torch.arange(self.blocks.shape[-1], device=self.blocks.device) < self.count.unsqueeze(-1)
        mask = torch.zeros((*self.count.shape, key_blocks + 1), dtype=torch.bool, device=self.blocks.device)
        return mask.scatter_(-1, self.blocks.long().masked_fill(~is_listed, key_blocks), True)[..., :key_blocks]


@dataclass(frozen=True)
class QueryTiles:
    """Division of the `Q` query columns of `B` rows into tiles: columns in the same block of positions form a tile. A
    row has at most `T` tiles. Columns have ascending positions."""

    block: Tensor
    """[B, T] int32: index of the block of positions."""
    first: Tensor
    """[B, T] int32: first column."""
    count: Tensor
    """[B, T] int32: number of columns; 0 for missing tiles."""
    tile_index: Tensor
    """[B, Q] int64: index of each column in the flattened tiles [T * block_size]."""
    max_columns: int
    max_block: int
    """Largest of `block`."""
    is_aligned: bool
    """Whether column i has position i in all rows (except padding), and the tiles cover all columns."""

    @classmethod
    def from_positions(
        cls, positions: np.ndarray, valid: np.ndarray | None, block_size: int, device: torch.device | str = "cpu"
    ) -> QueryTiles:
        """Make tiles. positions: [B, Q] int64, ascending; padding repeats the last position. valid: [B, Q] bool, False
        at padding; None: no padding."""
        rows, columns = positions.shape
        block = positions // block_size
        is_first = np.ones_like(block, bool)
        is_first[:, 1:] = block[:, 1:] != block[:, :-1]
        tile = is_first.cumsum(1) - 1
        shape = (rows, int(tile.max()) + 1)
        tiles = np.zeros((3, *shape), np.int32)
        row, first_column = is_first.nonzero()
        tiles[:2, row, tile[row, first_column]] = block[row, first_column], first_column
        is_valid = np.ones_like(is_first) if valid is None else valid
        is_aligned = shape[1] * block_size >= columns and bool(((positions == np.arange(columns)) | ~is_valid).all())
        np.add.at(tiles[2], (np.repeat(np.arange(rows), columns), tile.ravel()), is_valid.ravel())
        offset = np.arange(columns) - np.take_along_axis(tiles[1], tile, 1)
        offset = np.minimum(offset, np.take_along_axis(tiles[2], tile, 1) - 1)  # padding repeats the last column
        tensors = torch.as_tensor(tiles, device=device)
        tile_index = torch.as_tensor(tile * block_size + offset, device=device)
        return cls(tensors[0], tensors[1], tensors[2], tile_index, int(tiles[2].max()), int(block.max()), is_aligned)

    def to(self, device: torch.device) -> QueryTiles:
        if self.block.device == device:
            return self
        names = ("block", "first", "count", "tile_index")
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in names})

    @classmethod
    def from_lengths(
        cls, lengths: np.ndarray, columns: int, block_size: int, device: torch.device | str = "cpu"
    ) -> QueryTiles:
        """Make tiles of positions 0 to lengths - 1 of each row. lengths: [B]. columns: Q."""
        column, ends = np.arange(columns), lengths[:, None]
        return cls.from_positions(np.minimum(column, ends - 1), column < ends, block_size, device)


class AttentionCall(NamedTuple):
    """Checked arguments of `sparse_attention`, for a backend's `attend`."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_index: BlockIndex | None
    tiles: QueryTiles
    lengths: np.ndarray
    rows: np.ndarray
    scale: float
    size: int
    return_logsumexp: bool


def generation_block(lengths: np.ndarray, num_new: np.ndarray, block_size: int) -> np.ndarray:
    """[B] int64: the first block whose positions are all in the answer (the last `num_new` [B] of `lengths` [B]
    positions), or the last block if there is none. A block with prompt and answer positions counts as prompt."""
    return np.clip(-(-(lengths - num_new) // block_size), 0, blocks_in(lengths, block_size) - 1)


def select_blocks(
    means: Tensor,
    select: float,
    block_size: int,
    *,
    lengths: np.ndarray | Sequence[int],
    first: np.ndarray | Sequence[int],
    joint: Tensor | None = None,
) -> BlockIndex:
    """Select the key blocks of each query block by highest mean; ties go to the lower block. The blocks before `first`
    and those from `first` on are two groups. Of a group of m blocks, min(m, max(1, int(m * select) + 1)) are selected.

    means: [B, H, n, n] from `block_means` with the same `first`, for n blocks.
    lengths: [B] number of real positions. first: [B] from `generation_block`. `lengths` and `first` are on the host.
    joint: means [B, H, n, n] of one softmax over all keys. With `joint`, a block before `first` is selected if it is
        among the highest max(1, int(n * select) + 1) of all n blocks, as in the public code."""
    check_number("select", select, low=0, high=1, open_low=True)
    lengths, first = np.asarray(lengths, np.int64), np.asarray(first, np.int64)
    total = blocks_in(lengths, block_size)
    device = means.device
    start, stop = torch.as_tensor(np.stack((first, total)), device=device)[:, :, None, None, None]
    column = torch.arange(means.shape[-1], device=device)
    in_prompt, in_answer = column < start, (column >= start) & (column < stop)
    budgets = [budget(first, select), budget(total - first, select)]
    if joint is None:
        selected = _highest(means, in_prompt, budgets[0])
    else:
        selected = _highest(joint, column < stop, budget(total, select)) & in_prompt
        budgets[0] = np.minimum(budget(total, select), first)
    selected |= _highest(means, in_answer, budgets[1])
    selected &= column[:, None] < stop  # queries beyond the row's end
    return BlockIndex.from_mask(selected, block_size, max_blocks=int((budgets[0] + budgets[1]).max()))


def budget(blocks: np.ndarray, select: float) -> np.ndarray:
    """Number of selected blocks of a group of n `blocks`: SparseD's max(1, int(n * select) + 1), at most n."""
    return np.minimum(blocks, np.maximum(1, np.floor(blocks * select).astype(np.int64) + 1))


def _highest(values: Tensor, candidates: Tensor, count: np.ndarray) -> Tensor:
    """[B, H, n, n] bool: the `count` [B] highest of `values` among the `candidates`; ties go to the lower block."""
    order = values.masked_fill(~candidates, -1.0).argsort(dim=-1, descending=True, stable=True)
    limit = torch.as_tensor(count, device=values.device)[:, None, None, None]
    in_budget = (torch.arange(values.shape[-1], device=values.device) < limit).expand_as(order)
    return torch.zeros_like(order, dtype=torch.bool).scatter_(-1, order, in_budget) & candidates


def blocks_in(lengths: np.ndarray, size: int) -> np.ndarray:
    return -(-lengths // size)

"""Lists of key blocks, how they are found from tile means, and where a call's blocks of queries are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_number


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
    """Where the queries of each block are among the columns of a call, which may hold any ascending positions. `T`
    tiles per row, at most one per block."""

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


def generation_block(lengths: np.ndarray, new: np.ndarray, block_size: int) -> np.ndarray:
    """[B] int64: the first block that is wholly in the last `new` [B] of `lengths` [B] positions, else the last one: a
    block that holds both prompt and answer counts as prompt."""
    return np.clip(-(-(lengths - new) // block_size), 0, blocks_in(lengths, block_size) - 1)


def select_blocks(
    means: Tensor,
    select: float,
    block_size: int,
    *,
    lengths: np.ndarray | Sequence[int],
    first: np.ndarray | Sequence[int],
    joint: Tensor | None = None,
) -> BlockIndex:
    """The key blocks that each block of queries keeps; a tie goes to the lower block.

    Of the n_p blocks before `first` and the n_g from there on, each query block keeps the min(n, max(1, int(n * select)
    + 1)) with the highest mean, ranked apart ("isolated selection"), so that neither part crowds out the other.

    Args:
        means: [B, H, n, n] from `block_means` with the same `first`.
        select: the share kept, in (0, 1].
        lengths: [B] real positions. first: [B] from `generation_block`. Both on the host.
        joint: means [B, H, n, n] of one softmax over all keys. When given, blocks before `first` are kept as the public
            code does ("reference"): those among the highest max(1, int(n * select) + 1) of all n blocks.
    """
    check_number("select", select, low=0, high=1, open_low=True)
    lengths, first = np.asarray(lengths, np.int64), np.asarray(first, np.int64)
    total = blocks_in(lengths, block_size)
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


def blocks_in(lengths: np.ndarray, size: int) -> np.ndarray:
    """How many blocks hold so many positions."""
    return -(-lengths // size)

"""The "flex" backend: PyTorch's flex_attention over the same lists."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.block_sparse.lists import BlockIndex, QueryTiles
from paradec.kernels.block_sparse.portable import by_column, by_tile, lists_of

FLEX_BLOCK = 128
"""flex_attention's kernels take blocks of multiples of this, whatever tiles they choose."""


def attend(
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
    """PyTorch's flex_attention over the same lists. Only the short last block of a row needs a mask."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    keys, device = key.shape[2], query.device
    total = -(-keys // size)
    listed, number = lists_of(query, index, tiles, rows, total, size)
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
    queries = by_tile(query, tiles, size).to(key.dtype)
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
    sums = by_column(found.lse.unsqueeze(-1), tiles).squeeze(-1) if return_logsumexp else None
    return by_column(out, tiles), sums


@functools.cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # in one graph or not at all: beyond torch._dynamo.config.recompile_limit shapes it would quietly make all scores
    return torch.compile(flex_attention, dynamic=False, fullgraph=True) if compiled else flex_attention

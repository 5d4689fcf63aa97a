"""The "flex" backend: PyTorch's flex_attention over the lists of key blocks."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from paradec.kernels.block_sparse.lists import AttentionCall
from paradec.kernels.block_sparse.portable import by_column, by_tile, lists_of

FLEX_BLOCK = 128
"""On a GPU, block sizes must be multiples of this."""


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Attend with flex_attention. Only the short last block of a row needs a mask."""
    query, key, value, index, tiles, lengths, rows, scale, size, return_logsumexp = call
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    keys, device = key.shape[2], query.device
    total = -(-keys // size)
    block_lists, counts = lists_of(query, index, tiles, rows, total, size)
    block_lists = block_lists.long()
    limit = torch.as_tensor(lengths, device=device)
    end = limit[:, None, None, None]
    is_listed = torch.arange(block_lists.shape[-1], device=device) < counts.unsqueeze(-1)
    is_full = is_listed & ((block_lists + 1) * size <= end)
    is_partial = is_listed & (block_lists * size < end) & ((block_lists + 1) * size > end)
    listed_blocks = torch.zeros((*counts.shape, total + 1), dtype=torch.bool, device=device)
    listed_blocks.scatter_(-1, torch.where(is_listed, block_lists, total), True)

    def visible(row: Tensor, head: Tensor, column: Tensor, position: Tensor) -> Tensor:
        # uncompiled, flex_attention ignores the block lists: only this function restricts the keys
        return listed_blocks[row, head, column // size, position // size] & (position < limit[row])

    count = is_full.sum(-1, keepdim=True)  # lists ascend, so the short block follows the `count` full blocks
    queries = by_tile(query, tiles, size).to(key.dtype)
    mask = BlockMask.from_kv_blocks(
        is_partial.sum(-1).int(),
        block_lists.gather(-1, count.clamp(max=block_lists.shape[-1] - 1)).int(),
        count.squeeze(-1).int(),
        block_lists.int(),
        BLOCK_SIZE=size,
        mask_mod=visible,
        seq_lengths=(queries.shape[2], keys),
        compute_q_blocks=False,
    )
    output, aux = _flex_attention(query.is_cuda)(
        queries,
        key,
        value,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=return_logsumexp),
    )
    lse = by_column(aux.lse.unsqueeze(-1), tiles).squeeze(-1) if return_logsumexp else None
    return by_column(output, tiles), lse


@functools.cache
def _flex_attention(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # without fullgraph, flex_attention would compute all scores after torch._dynamo.config.recompile_limit shapes
    return torch.compile(flex_attention, dynamic=False, fullgraph=True) if compiled else flex_attention

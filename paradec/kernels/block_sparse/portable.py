"""The "torch" backend: PyTorch operations over a few query blocks at a time."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paradec.kernels.block_sparse.lists import AttentionCall, BlockIndex, QueryTiles

KEYS_PER_CHUNK = 2**20
"""Number of key components gathered at a time."""
SCORES_PER_CHUNK = 2**19
"""Number of scores computed at a time: they fit into a core's cache."""


def means(
    query: Tensor,
    key: Tensor,
    size: int,
    lengths: np.ndarray,
    first: np.ndarray,
    logsumexp: Tensor | None,
    scale: float,
) -> Tensor:
    rows, heads, length, _ = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    group_size = heads // key.shape[1]
    means = query.new_zeros((rows, heads, -(-length // size), -(-length // size)), dtype=dtype)
    chunk = max(1, SCORES_PER_CHUNK // (size * length)) * size  # whole blocks of queries
    for row in range(rows):
        row_length, split = int(lengths[row]), int(first[row])
        num_blocks = -(-row_length // size)
        extent = torch.full((num_blocks,), size, dtype=dtype, device=query.device)
        extent[-1] = row_length - (num_blocks - 1) * size
        for head in range(heads):
            row_keys = key[row, head // group_size, :row_length].to(dtype) * scale
            keys = F.pad(row_keys, (0, 0, 0, num_blocks * size - row_length))
            for begin in range(0, row_length, chunk):
                end = min(begin + chunk, row_length)
                scores = query[row, head, begin:end].to(dtype) @ keys.T
                scores[:, row_length:] = -torch.inf
                known_lse = None if logsumexp is None else logsumexp[row, head, begin:end, None].to(dtype)
                mass = _block_mass(scores.view(end - begin, num_blocks, size), split, known_lse)
                tiles = F.pad(mass, (0, 0, 0, -(end - begin) % size)).view(-1, size, num_blocks).sum(1)
                tile_rows = slice(begin // size, begin // size + len(tiles))
                means[row, head, tile_rows, :num_blocks] = tiles / (extent[tile_rows, None] * extent)
    return means


def _block_mass(scores: Tensor, split: int, logsumexp: Tensor | None) -> Tensor:
    """Return the probability mass per block [m, n] for scores [m queries, n blocks, size]; overwrite the scores. Blocks
    before `split` have a softmax over all keys; blocks from `split` on have a softmax over these blocks alone.
    logsumexp: [m, 1] over all keys, if known."""
    prompt, answer = scores[:, :split], scores[:, split:]
    shift = scores.amax((1, 2)).unsqueeze(1) if logsumexp is None else logsumexp
    total: Tensor | float = 0.0
    normalized = []
    if split:
        normalized.append(prompt.sub_(shift.unsqueeze(2)).exp_().sum(2))
        total = normalized[0].sum(1, keepdim=True)
    if split < scores.shape[1]:
        # subtract the answer's maximum: with a larger maximum of the prompt, the weights could underflow
        top = answer.amax((1, 2)).unsqueeze(1)
        weights = answer.sub_(top.unsqueeze(2)).exp_().sum(2)
        mass = weights.sum(1, keepdim=True)
        total = total + mass * (top - shift).exp()
        normalized.append(weights / mass)
    if split and logsumexp is None:
        normalized[0] = normalized[0] / total
    return torch.cat(normalized, 1)


def attend(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """Gather the listed key blocks of a few query blocks at a time and attend to them."""
    query, key, value, index, tiles, lengths, rows, scale, size, return_logsumexp = call
    (batch, heads, _, width), (_, key_heads, keys, _) = query.shape, key.shape
    device, num_tiles, total = query.device, tiles.block.shape[1], -(-keys // size)
    block_lists, counts = lists_of(query, index, tiles, rows, total, size)
    # from here on, tensors have one entry per row, head and tile
    block_lists, counts = block_lists.flatten(0, 2).long(), counts.flatten()
    key_head = torch.arange(batch, device=device)[:, None] * key_heads
    key_head = key_head + torch.arange(heads, device=device) * key_heads // heads
    key_head = key_head[:, :, None].expand(batch, heads, num_tiles).reshape(-1, 1)
    limit = torch.as_tensor(lengths, device=device)[:, None].expand(batch, heads * num_tiles).reshape(-1, 1)
    if padding := total * size - keys:
        key, value = F.pad(key, (0, 0, 0, padding)), F.pad(value, (0, 0, 0, padding))
    key_blocks, value_blocks = (part.reshape(-1, size, part.shape[-1]) for part in (key, value))

    queries = by_tile(query, tiles, size).reshape(-1, 1, size, width).to(key.dtype)
    output = value.new_empty((len(queries), size, value.shape[-1]))
    dtype = torch.promote_types(query.dtype, torch.float32)
    lse = query.new_empty((len(queries), size), dtype=dtype) if return_logsumexp else None
    max_blocks = block_lists.shape[1]
    chunk_size = max(1, KEYS_PER_CHUNK // (max_blocks * size * width))
    slot, offset = torch.arange(max_blocks, device=device), torch.arange(size, device=device)
    for begin in range(0, len(queries), chunk_size):
        chunk = slice(begin, begin + chunk_size)
        block_index = block_lists[chunk]
        positions = block_index[..., None] * size + offset
        visible = (slot < counts[chunk, None])[..., None] & (positions < limit[chunk, None])
        flat_index = (key_head[chunk] * total + block_index.clamp(max=total - 1)).view(-1)
        chunk_keys = key_blocks.index_select(0, flat_index).view(-1, 1, max_blocks * size, width)
        values = value_blocks.index_select(0, flat_index).view(-1, 1, max_blocks * size, value.shape[-1])
        visible = visible.view(-1, 1, 1, max_blocks * size)
        mask = None if visible.all() else visible
        part = F.scaled_dot_product_attention(queries[chunk], chunk_keys, values, attn_mask=mask, scale=scale)
        if mask is not None:  # for queries without keys, results differ between releases of torch
            part = part.masked_fill(~visible.any(-1, keepdim=True), 0)
        output[chunk] = part.squeeze(1)
        if lse is not None:
            scores = queries[chunk].to(dtype) @ chunk_keys.to(dtype).transpose(-1, -2) * scale
            lse[chunk] = scores.masked_fill(~visible, -torch.inf).logsumexp(-1).squeeze(1)
    output = by_column(output.view(batch, heads, num_tiles * size, -1), tiles)
    return output, None if lse is None else by_column(lse.view(batch, heads, -1, 1), tiles).squeeze(-1)


def lists_of(
    query: Tensor, index: BlockIndex | None, tiles: QueryTiles, rows: np.ndarray, total: int, size: int
) -> tuple[Tensor, Tensor]:
    """Key-block lists [B, H, T, max_blocks] of the call's tiles, and the lists' lengths [B, H, T]. If `index` is None,
    each list has all `total` key blocks."""
    (batch, heads), device = query.shape[:2], query.device
    if index is None:
        shape = (batch, heads, tiles.max_block + 1)
        all_blocks = torch.arange(total, device=device).expand(*shape, total)
        index = BlockIndex(torch.full((1,), total, device=device).expand(shape), all_blocks, size)
        rows = np.arange(batch)
    row = torch.as_tensor(rows, device=device)[:, None, None]
    head = torch.arange(heads, device=device)[:, None]
    block = tiles.block.long()[:, None]
    return index.blocks[row, head, block], index.count[row, head, block]


def by_tile(query: Tensor, tiles: QueryTiles, size: int) -> Tensor:
    """Arrange queries [B, H, Q, D] by tile: [B, H, T * size, D]."""
    (batch, heads, columns, width), num_tiles = query.shape, tiles.block.shape[1]
    if tiles.is_aligned:
        return F.pad(query, (0, 0, 0, num_tiles * size - columns))
    column = tiles.first.long().unsqueeze(-1) + torch.arange(size, device=query.device)
    column = column.clamp(max=columns - 1).flatten(1)[:, None, :, None]
    return query.gather(2, column.expand(batch, heads, -1, width))


def by_column(tensor: Tensor, tiles: QueryTiles) -> Tensor:
    """Arrange tiles [B, H, T * size, D] by column, the inverse of `by_tile`: [B, H, Q, D]."""
    columns = tiles.tile_index.shape[1]
    if tiles.is_aligned:
        return tensor[:, :, :columns]
    index = tiles.tile_index[:, None, :, None].expand(*tensor.shape[:2], columns, tensor.shape[3])
    return tensor.gather(2, index)

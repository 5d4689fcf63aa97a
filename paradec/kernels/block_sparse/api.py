"""Entry points with checked arguments, and the choice of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_int, short_repr
from paradec.kernels import has_triton, interpreting
from paradec.kernels.block_sparse import flex, portable
from paradec.kernels.block_sparse.lists import AttentionCall, BlockIndex, QueryTiles, blocks_in

BACKENDS = ("auto", "torch", "triton", "flex")
MAX_SHARED_BYTES = 2**16
"""Shared-memory limit of one query block in the Triton kernels, in bytes."""


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
    """Compute the mean attention probability of each tile (a query block by a key block): [B, H, n, n] float32, or
    float64 for float64 inputs, for n blocks. Positions beyond a row's end do not count; tiles beyond it are 0.

    Args:
        query: [B, H, L, D], after the rotary embedding. key: [B, G, L, D] for G key/value heads.
        lengths: [B] number of real positions, on the host; None means L.
        first: [B] block indices, on the host. Key blocks from this index on have a softmax over these blocks alone;
            None: one softmax over all keys.
        logsumexp: [B, H, L] natural log-sum-exps of the scores over all keys, if known.
        scale: None means D ** -0.5 (SparseD's public code for LLaDA divides by the root of the number of heads).
        backend: one of `BACKENDS`; "flex" is treated as "auto".

    Raises ValueError for mismatched shapes or an unavailable backend."""
    check_int("block_size", block_size, low=1)
    _check_heads(query, key)
    if query.shape[2] != key.shape[2]:
        raise ValueError(f"query and key have {query.shape[2]} and {key.shape[2]} positions; both must be whole rows")
    lengths = _host(lengths, query.shape[0], query.shape[2])
    first_blocks = blocks_in(lengths, block_size) if first is None else np.asarray(first, np.int64)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    run = _import_backend(choose_backend("auto" if backend == "flex" else backend, query, block_size)).means
    return run(query, key, block_size, lengths, first_blocks, logsumexp, scale)


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
    """Compute softmax attention over the key blocks listed for each query's block: [B, H, Q, D] in the dtype of
    `value`, 0 for queries without keys. With `return_logsumexp`, also return the scores' log-sum-exps [B, H, Q] in
    float32 (float64 for float64 inputs), -inf for queries without keys.

    Args:
        query: [B, H, Q, D]. key, value: [B, G, K, D] for positions 0 to K - 1 and G key/value heads.
        index: the lists; None: attend to all keys, in blocks of `block_size`.
        tiles: the blocks that the queries belong to; None: queries are positions 0 to Q - 1.
        lengths: [B] number of keys of each row, on the host; None means K.
        rows: [B] row of `index` for each row of `query`, on the host; None: the same row.
        scale: None means D ** -0.5.
        backend: one of `BACKENDS`; "auto" uses Triton on an NVIDIA GPU if dtype and sizes allow it. "flex" is compiled
            per shape on a GPU; elsewhere it computes all scores.

    Raises ValueError for mismatched shapes or an unavailable backend."""
    size = block_size if index is None else index.block_size
    check_int("block_size", size, low=1)
    _check_heads(query, key)
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} must have the same [B, G, K]")
    lengths = _host(lengths, query.shape[0], key.shape[2])
    rows = np.arange(len(query)) if rows is None else np.asarray(rows, np.int64)
    if tiles is None:
        tiles = QueryTiles.from_lengths(np.full(len(query), query.shape[2]), query.shape[2], size, query.device)
    _check_lists(query, index, tiles, rows)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    run = _import_backend(choose_backend(backend, query, size)).attend
    call = AttentionCall(query, key, value, index, tiles, lengths, rows, scale, size, return_logsumexp)
    output, logsumexp = run(call)
    return (output, logsumexp) if return_logsumexp else output


def _host(lengths: Any, rows: int, max_length: int) -> np.ndarray:
    """Convert lengths to [B] int64 on the host. Raises ValueError for another shape or values out of range."""
    host_lengths = np.full(rows, max_length) if lengths is None else np.asarray(lengths, np.int64)
    if host_lengths.shape != (rows,) or (host_lengths < 1).any() or (host_lengths > max_length).any():
        raise ValueError(f"lengths={short_repr(lengths)} must be {rows} integers from 1 to {max_length}")
    return host_lengths


def _check_heads(query: Tensor, key: Tensor) -> None:
    if query.dim() != 4 or key.dim() != 4 or len(query) != len(key) or query.shape[3] != key.shape[3]:
        raise ValueError(f"query {tuple(query.shape)} and key {tuple(key.shape)} must both be [B, heads, positions, D]")
    if query.shape[1] % key.shape[1]:
        raise ValueError(f"query has {query.shape[1]} heads; must be a multiple of the {key.shape[1]} heads of key")


def _check_lists(query: Tensor, index: BlockIndex | None, tiles: QueryTiles, rows: np.ndarray) -> None:
    """Raise ValueError if a kernel would read outside its lists."""
    if tuple(tiles.tile_index.shape) != (len(query), query.shape[2]):
        raise ValueError(
            f"tiles are for {tuple(tiles.tile_index.shape)}; the call has {len(query)} x {query.shape[2]} columns"
        )
    if index is None:
        return
    num_rows, heads, blocks = index.count.shape
    if heads != query.shape[1] or tiles.max_block >= blocks:
        raise ValueError(
            f"index has {heads} heads and {blocks} blocks of queries; the call has {query.shape[1]} heads, and "
            f"queries up to block {tiles.max_block}"
        )
    if rows.shape != (len(query),) or rows.min() < 0 or rows.max() >= num_rows:
        raise ValueError(f"rows={short_repr(rows.tolist())} must be {len(query)} integers from 0 to {num_rows - 1}")


def choose_backend(backend: str, query: Tensor, size: int) -> str:
    """Choose "torch", "triton" or "flex" for `backend`, which may be "auto". size: positions per block. Raises
    ValueError for an unavailable backend."""
    check_choice("backend", backend, BACKENDS)
    if backend == "torch":
        return backend
    if backend == "flex":
        if query.is_cuda and size % flex.FLEX_BLOCK:
            raise ValueError(
                f"backend='flex' needs a block_size that is a multiple of {flex.FLEX_BLOCK} on a GPU, not {size}; use "
                "backend='auto'"
            )
        return backend
    why = None
    if not has_triton():
        why = "the package triton is not installed"
    elif query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        why = f"it does not support {query.dtype}"
    elif size * (1 << (query.shape[-1] - 1).bit_length()) * query.itemsize > MAX_SHARED_BYTES:
        why = f"a block of {size} queries of width {query.shape[-1]} in {query.dtype} is too large for it"
    elif not query.is_cuda and not interpreting():
        why = f"it needs an NVIDIA GPU; the tensors are on {query.device}"
    if backend == "triton" and why is not None:
        raise ValueError(f"backend='triton' is not available: {why}; use backend='torch'")
    return "triton" if why is None and (query.is_cuda or backend == "triton") else "torch"


def _import_backend(backend: str) -> ModuleType:
    if backend == "triton":
        # imported here: `import paradec.kernels.block_sparse` must not import triton
        from paradec.kernels.block_sparse import triton

        return triton
    return flex if backend == "flex" else portable

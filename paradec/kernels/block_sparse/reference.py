"""Definitions of tile means, selection and attention in float64: the oracle of all backends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def scores_of(query: Tensor, key: Tensor, scale: float | None = None) -> Tensor:
    """[B, H, Q, K]: query . key * scale. scale: None means D ** -0.5."""
    key = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query.double() @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)


def reference_means(
    query: Tensor, key: Tensor, size: int, lengths: Sequence[int], first: Sequence[int] | None = None
) -> Tensor:
    """Definition of `block_means`: entry [i, j] is the mean of softmax(scores) over the queries of block i and the keys
    of block j. Key blocks from index `first` on have a softmax over these blocks alone."""
    scores, blocks = scores_of(query, key), math.ceil(query.shape[2] / size)
    means = scores.new_zeros(*query.shape[:2], blocks, blocks)
    for row, length in enumerate(lengths):
        p = scores[row, :, :length, :length].softmax(-1)
        if first is not None:
            split = first[row] * size
            p[:, :, split:] = scores[row, :, :length, split:length].softmax(-1)
        for i in range(math.ceil(length / size)):
            for j in range(math.ceil(length / size)):
                tile = p[:, i * size : (i + 1) * size, j * size : (j + 1) * size]
                means[row, :, i, j] = tile.mean((1, 2))
    return means


def reference_selection(
    means: Tensor, select: float, size: int, lengths: Sequence[int], new: Sequence[int], joint: Tensor | None = None
) -> Tensor:
    """Definition of `select_blocks` with `first` from `generation_block`: a mask [B, H, query blocks, key blocks]. new:
    number of answer positions of each row, at its end."""
    selected = torch.zeros_like(means, dtype=torch.bool)
    for row, (length, answer) in enumerate(zip(lengths, new, strict=True)):
        blocks = math.ceil(length / size)
        first_answer = next((j for j in range(blocks) if length - j * size <= answer), blocks - 1)
        for head in range(means.shape[1]):
            for query in range(blocks):
                indices = _best(means[row, head, query], range(first_answer, blocks), select)
                if joint is None:
                    indices += _best(means[row, head, query], range(first_answer), select)
                else:
                    indices += [j for j in _best(joint[row, head, query], range(blocks), select) if j < first_answer]
                selected[row, head, query, indices] = True
    return selected


def _best(values: Tensor, candidates: range, select: float) -> list[int]:
    count = min(len(candidates), max(1, int(len(candidates) * select) + 1))
    return sorted(candidates, key=lambda j: (-float(values[j]), j))[:count]


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Definition of `sparse_attention` over the keys in `visible` [B, H, Q, K] bool. Returns output and log-sum-exps;
    queries without keys have output 0 and log-sum-exp -inf."""
    is_real = torch.arange(key.shape[2], device=key.device) < torch.tensor(lengths, device=key.device)[:, None]
    scores = scores_of(query, key).masked_fill(~(visible & is_real[:, None, None]), -torch.inf)
    value = value.double().repeat_interleave(query.shape[1] // value.shape[1], 1)
    return scores.softmax(-1).nan_to_num(0) @ value, scores.logsumexp(-1)


def visible_keys(mask: Tensor, size: int, positions: Tensor, keys: int) -> Tensor:
    """Expand a block mask [B, H, n, n] to [B, H, Q, K] for queries at positions [B, Q]."""
    expanded = mask.repeat_interleave(size, 3)[..., :keys]
    return torch.stack([expanded[row][:, positions[row] // size] for row in range(len(mask))])

"""LANTERN's verification of the drafts at one node of a tree, in NumPy."""

import numpy as np


def near_tokens(embed: np.ndarray, x: int) -> np.ndarray:
    """Return all tokens except x, nearest embedding first."""
    distance = np.sqrt(((embed - embed[x]) ** 2).sum(-1))
    distance[x] = np.inf
    return np.argsort(distance, kind="stable")[:-1]


def plain_node(
    p: np.ndarray,
    q: np.ndarray,
    token_ids: list[int],
    numbers: list[float],
    embed: np.ndarray,
    k: int,
    limit: float,
    drawn: bool,
) -> tuple[int, np.ndarray]:
    """Verify a node like LANTERN's public code; return the index of the accepted child (-1: none), and the residual p.

    token_ids: the children. numbers: their uniform numbers. k: size of the neighbourhood, 0 for exact verification.
    limit: bound on the probability of a draft's neighbours. Up to 1 it is absolute; above 1 the bound is
    `limit - 1` times the draft's p. drawn: whether the drafts were drawn from q; otherwise they are the top tokens.
    """
    rejected: list[int] = []
    for i, (x, number) in enumerate(zip(token_ids, numbers, strict=True)):
        if x < 0 or x in rejected:
            continue
        num_near = 0
        mass = p[x]
        if k:
            cumulative = p[near_tokens(embed, x)[:k]].cumsum()
            num_near = int((cumulative <= (limit if limit <= 1 else (limit - 1) * p[x])).sum())
            mass += cumulative[num_near - 1] if num_near else 0
        remaining = q.copy()
        remaining[rejected] = 0
        rejected.append(x)
        if drawn and remaining[x] <= 0:
            continue
        remaining = remaining / remaining.sum()
        if number <= (mass / remaining[x] if drawn else mass):
            return i, p
        excluded = near_tokens(embed, x)[: k + 1] if num_near else []
        p = p.copy()
        if drawn:
            remaining[excluded] = 0
            p = np.maximum(p - remaining, 0)
        else:
            p[x], p[excluded] = 0, 0
        p = p / p.sum() if p.sum() > 0 else np.full_like(p, 1 / len(p))
    return -1, p

"""LANTERN's verification of the drafts of one tree node, in NumPy."""

import numpy as np


def near_tokens(embed: np.ndarray, x: int) -> np.ndarray:
    """The other tokens, nearest embedding first."""
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
    """One node by LANTERN's public code: the index of the accepted child (-1: none), and the residual distribution.

    token_ids: the children. numbers: their uniform numbers. k: size of the neighbourhood, 0 for exact verification.
    limit: at most 1: bound on the added probability; above 1: `limit - 1` bounds it relative to p. drawn: whether the
    drafts were drawn from q.
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

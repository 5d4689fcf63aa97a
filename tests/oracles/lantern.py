"""LANTERN's rule for the drafts of one node of a tree, written out."""

import numpy as np


def near_tokens(embed: np.ndarray, x: int) -> np.ndarray:
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
    """LANTERN's public code for one node: which child stands (-1: none), and the distribution that is left. k=0:
    without it."""
    tried: list[int] = []
    for i, (x, number) in enumerate(zip(token_ids, numbers, strict=True)):
        if x < 0 or x in tried:
            continue
        within = 0
        mass = p[x]
        if k:
            cumulative = p[near_tokens(embed, x)[:k]].cumsum()
            within = int((cumulative <= (limit if limit <= 1 else (limit - 1) * p[x])).sum())
            mass += cumulative[within - 1] if within else 0
        left = q.copy()
        left[tried] = 0
        tried.append(x)
        if drawn and left[x] <= 0:
            continue
        left = left / left.sum()
        if number <= (mass / left[x] if drawn else mass):
            return i, p
        gone = near_tokens(embed, x)[: k + 1] if within else []
        p = p.copy()
        if drawn:
            left[gone] = 0
            p = np.maximum(p - left, 0)
        else:
            p[x], p[gone] = 0, 0
        p = p / p.sum() if p.sum() > 0 else np.full_like(p, 1 / len(p))
    return -1, p

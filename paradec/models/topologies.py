"""Which columns of a call a model's topology lets each other see: blocks, causality, and open blocks over either."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paradec.core.facts import ModelFacts
from paradec.core.family_queries import VisibleQuery
from paradec.core.query import Query, WindowQuery


def structure_of(facts: ModelFacts, query: Query, keys: Tensor, store: Any, itself: bool) -> Tensor | None:
    """[R, Q, K] bool: which keys each column sees by the model's topology, or None where that says nothing.

    Args:
        facts: of a model that is not bidirectional. keys: [R or 1, K] int64, the keys' positions.
        store: whose keys they are; None for the call's own. itself: whether a causal module needs no mask to be so.

    Raises:
        ValueError: blocks that are counted from the prompt's end, or over causal context, and a query that does not say
            where that is, or who sees what.
    """
    if store is not None and isinstance(query, VisibleQuery):
        return None
    if facts.topology == "block_causal":
        origin = _origin(facts, query)
        own = facts.block_numbers(query.positions, origin)
        blocks: Tensor = own[:, :, None] >= facts.block_numbers(keys, origin)[:, None, :]
        return blocks
    if facts.topology == "causal_context" and isinstance(query, WindowQuery):
        if query.visible is None:
            raise ValueError(f"{facts.name} has blocks over causal context: the query says in `visible` who sees what")
        return None
    if facts.topology.startswith("causal") and not itself:
        return query.positions[:, :, None] >= keys[:, None, :]
    return None


def _origin(facts: ModelFacts, query: Query) -> Tensor | None:
    """[R, 1] int64: where the rows' blocks are counted from; None is position 0."""
    if not facts.prompt_aligned:
        return None
    if not isinstance(query, WindowQuery) or query.origin is None:
        raise ValueError(f"{facts.name} counts its blocks from the prompt's end: the query needs `origin`")
    return query.origin

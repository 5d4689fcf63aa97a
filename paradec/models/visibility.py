"""The keys that each column (position) of a call sees, by the model's topology, the query and the store."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paradec.core.facts import ModelFacts
from paradec.core.family_queries import VisibleQuery
from paradec.core.query import Query, WindowQuery
from paradec.models.rotary import BY_CALL


def visible_keys(facts: ModelFacts, query: Query, store: Any, makes_causal_mask: bool) -> Tensor | None:
    """[R, 1, Q or 1, K] bool: the keys that each column sees; None if the module needs no mask. Raises ValueError for a
    query without the fields that the topology needs.

    store: has the keys; None for a call over its own columns (K = Q).
    makes_causal_mask: whether a causal module itself makes a causal mask."""
    if store is None:
        mask = None if query.valid is None else query.valid[:, None, None, :]
        keys, structure = query.positions, query.visible
    else:
        mask, keys = store.visible(query)
        structure = None  # the store's mask includes `query.visible`
    if structure is None and facts.topology != "bidirectional":
        module_makes_mask = makes_causal_mask and mask is None and store is None
        structure = topology_mask(facts, query, keys, store, module_makes_mask)
    if structure is None or mask is None:
        return mask if structure is None else structure[:, None]
    visible = structure[:, None] & mask
    if store is None:  # let padding see itself, so that its softmax is defined (a store does so)
        visible |= torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
    return visible


def topology_mask(facts: ModelFacts, query: Query, keys: Tensor, store: Any, module_makes_mask: bool) -> Tensor | None:
    """[R, Q, K] bool: the keys that each column sees by a topology other than "bidirectional"; None if it adds no mask.
    Raises ValueError for a query without `origin` or `visible` where the topology needs it.

    keys: [R or 1, K] int64, the keys' positions. store: has the keys; None if the call's own columns are the keys.
    module_makes_mask: whether a causal module makes the mask of this call."""
    if store is not None and isinstance(query, VisibleQuery):
        return None
    if facts.topology == "block_causal":
        origin = None
        if facts.prompt_aligned:
            if not isinstance(query, WindowQuery) or query.origin is None:
                raise ValueError(f"{facts.name} counts its blocks from the prompt's end: the query needs `origin`")
            origin = query.origin
        block_numbers = facts.block_numbers(query.positions, origin)
        return block_numbers[:, :, None] >= facts.block_numbers(keys, origin)[:, None, :]
    if facts.topology == "causal_context" and isinstance(query, WindowQuery):
        if query.visible is None:
            raise ValueError(f"{facts.name} has blocks over a causal context: the query needs `visible`")
        return None
    if facts.topology.startswith("causal") and not module_makes_mask:
        return query.positions[:, :, None] >= keys[:, None, :]
    return None


def special_attention(module: Any) -> dict[str, Any]:
    """Config fields (name -> value) that make attention differ from plain attention with a mask; {} if there are
    none."""
    config = module.config
    layers = getattr(config, "layer_types", None)
    special: dict[str, Any] = {"layer_types": sorted({*(layers or ())} - {"full_attention"}) or None}
    if layers is None:
        special["sliding_window"] = getattr(config, "sliding_window", None)
    if getattr(module, "_is_stateful", False):
        special["model_type"] = config.model_type
    angles = getattr(config, "rope_parameters", None) or {}
    if angles.get("rope_type") in BY_CALL:  # stored keys would have the angles of another length
        special["rope_parameters"] = angles
    return {field: value for field, value in special.items() if value is not None}

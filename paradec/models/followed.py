"""What a call hands on to attention functions of ours besides its mask: a store, what its rows share, a plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from paradec.core.facts import ModelFacts
from paradec.core.query import Query, WindowQuery
from paradec.models.cache_argument import cache_keyword


def handed_on(module: nn.Module, query: Query, store: Any) -> dict[str, Any]:
    """The module's keyword arguments for a call over a store, or with a plan for its attention."""
    extra: dict[str, Any] = {}
    if store is not None:
        extra = cache_keyword(module, store.bind(query))
        if store.shared is not None:
            extra["shared_prefix"] = store.shared.begin()
    plan = query.attention if isinstance(query, WindowQuery) else None
    if plan is not None:
        plan.attended = False
        if query.visible is None:
            extra["attention_plan"] = plan
        else:
            warnings.warn("a call with a mask per position attends to everything the mask allows", stacklevel=4)
    return extra


def check_followed(name: str, extra: Mapping[str, Any]) -> None:
    """Raise RuntimeError where the model of this name has not passed on what it was handed."""
    shared, plan = extra.get("shared_prefix"), extra.get("attention_plan")
    if shared is not None:
        shared.check_read(name)
    if plan is not None and not plan.attended:
        raise RuntimeError(
            f"{name} does not pass its keyword arguments on to its attention, which a request with attention=... "
            "needs; leave that out"
        )


def unattended(facts: ModelFacts, wrapped: bool) -> str:
    """Why a call has not run through an attention function of ours."""
    if not wrapped:
        return f"{facts.name} was unwrapped, and attends as its module does; wrap the module again"
    return (
        f"{facts.name} does not attend through transformers' AttentionInterface, and cannot be evaluated with "
        f"topology={facts.topology!r}"
    )

"""Calls of a model with gradients, as trainers need them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paradec.core.query import Query
from paradec.models.calls import Calling, ModuleCall, take_columns


def with_gradients(model: Any, query: Query) -> Tensor:
    """What a call of a model answers, in evaluation mode, with gradients where they are enabled."""
    call = ModuleCall(model._wrap, query.wanted)
    with Calling(model.module, call):
        logits: Tensor = model._logits(query, None, call)
    return logits if call.columns is None else take_columns(logits, call.columns)

"""Sparse attention of a request (`paradec.attention`)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec import attention as attentions
from paradec.core.checks import short_repr
from paradec.request import Request
from paradec.samplers.features.feature import Ends, Feature


@dataclass
class SparseAttention(Feature):
    """Link between the loop and the attention method, which plans calls and is notified of committed calls."""

    attention_state: Any
    """The attention method's state of one request: has `plan`, `on_commit`, `report` and `release`."""

    why_rows_fixed = "sparse attention has one pattern for all rows"
    why_host_only = "sparse attention stores its pattern on the host"

    def on_query(self, state: Any, part: Any, query: Any) -> None:
        query.attention = self.attention_state.plan(state, part)

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        self.attention_state.on_commit(state, proposal.cost.queries)
        return False


def find_attention(request: Request, sampler: Any, model: Any) -> Any:
    """Return the attention method of the request or, without one, of the model; None for dense attention. Raises
    ValueError if the request's method does not work with sampler and model; warns if the model's method does not."""
    requested = request.attention
    if isinstance(requested, str) and requested != "dense":
        requested = attentions.create(requested)
    method = getattr(model, "default_attention", None) if requested is None else requested
    if method is None or isinstance(method, str):
        return None
    if isinstance(method, type) or not (hasattr(method, "begin") and hasattr(method, "why_unsupported")):
        raise ValueError(
            f"attention={short_repr(method)} must be 'dense', one of {attentions.names()} or made by "
            "paradec.attention.create, e.g. paradec.SparseD()"
        )
    why = method.why_unsupported(sampler, model)
    if why is None and (request.prefix is not None or request.share_prefix):
        why = "it chooses its blocks in calls over whole rows, which do not evaluate a shared prefix"
    if why is None and request.suffix is not None:
        why = "it chooses its blocks in calls over whole rows, of which suffix=... omits most positions"
    if why is None:
        return method
    text = f"attention={method.name!r} does not work with sampler {sampler.name!r} here: {why}"
    if requested is not None:
        raise ValueError(text)
    warnings.warn(f"{text}; attention is dense", stacklevel=2)
    return None

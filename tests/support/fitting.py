"""Which masked samplers a test of all of them can run on a model, as they come, and the topology that each needs."""

from __future__ import annotations

from typing import Any

import paradec
from paradec.models.adapter import Model
from paradec.samplers.masked.view import Needs

UNREADY = {"learn2pd"}
"""They need something that was trained for the model."""
MASKED = [
    name for name in paradec.samplers.names() if paradec.samplers.get(name).family == "masked" and name not in UNREADY
]


def fits(name: str, model: Model) -> bool:
    """Whether the model can give what the sampler asks for: some evaluate masks beside the row (`mask_probes`), some
    are for some topologies."""
    needs = getattr(paradec.samplers.get(name), "needs", Needs())
    if needs.why_unsupported(model.facts) is not None or needs.moves and model.facts.delete_token_id is None:
        return False
    return not needs.mask_probes or (model.supports_visibility and model.facts.prediction == "same")


def topology_of(name: str) -> str:
    """The topology of models that a sampler is tested with: bidirectional, where it takes these."""
    topologies = paradec.samplers.get(name).needs.topologies
    return "bidirectional" if not topologies or "bidirectional" in topologies else topologies[0]


def facts_of(name: str, block_length: int) -> dict[str, object]:
    """The facts of a model of that topology, beside its defaults."""
    topology = topology_of(name)
    if topology == "bidirectional":
        return {}
    return {"topology": topology, "block_length": block_length, "delete_token_id": 5, "split_token_id": 7}


def taken(sampler: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What of a request the sampler, or the one of that name, takes: some are for temperature 0."""
    method = paradec.samplers.create(sampler) if isinstance(sampler, str) else sampler
    return {key: value for key, value in request.items() if key not in method.unsupported}

"""Which masked samplers a test of all of them can run on a model, as they come."""

from __future__ import annotations

import paradec
from paradec.models.adapter import Model
from paradec.samplers.masked.needs import Needs

UNREADY = {"learn2pd"}
"""They need something that was trained for the model."""
MASKED = [
    name for name in paradec.samplers.names() if paradec.samplers.get(name).family == "masked" and name not in UNREADY
]


def fits(name: str, model: Model) -> bool:
    """Whether the model can give what the sampler asks for: some evaluate masks beside the row (`mask_probes`)."""
    needs = getattr(paradec.samplers.get(name), "needs", Needs())
    return not needs.mask_probes or (model.supports_visibility and model.facts.prediction == "same")

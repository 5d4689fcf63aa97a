"""Recorded decodes with pipelined blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

import paradec
from paradec import PipelinedBlocks
from paradec.models.adapter import Model
from paradec.samplers.masked.loop import Needs, View
from paradec.samplers.masked.rules.threshold import Threshold


def blocks_of(trace: dict, forced: str = "first") -> Any:
    settings = trace["settings"]
    if "block_add_threshold" not in settings:
        return paradec.FixedBlocks(settings["block_size"])
    add, full = settings["block_add_threshold"], settings["decoded_token_threshold"]
    return PipelinedBlocks(settings["block_size"], add=add, full=full, forced=forced)


def d2f_model(trace: dict, inner: Model) -> Model:
    """The same module, with D2F's attention."""
    return paradec.wrap(
        inner.module,
        mask_token_id=trace["mask_id"],
        eos_token_id=trace["eos_id"],
        prediction=inner.facts.prediction,
        topology="block_causal",
        block_length=trace["settings"]["block_size"],
        block_align="prompt",
    )


@dataclass(frozen=True)
class D2FRule(Threshold):
    """What passes by its probability; where something must, the best by the sampling strategy."""

    strategy: str = "confidence"

    name = "d2f_rule"
    needs = Needs(reads=("margin",))

    def select(self, view: View) -> Tensor:
        return (view.scores >= self.threshold) | view.best(view.quantities[self.strategy])

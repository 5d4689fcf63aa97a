"""DiCache: how much the first blocks changed says when to evaluate, and how far along the residual has come.

Bu et al., "DiCache: Let Diffusion Model Determine Its Own Cache", arXiv 2508.17356. Rules and settings are those of the
public code, which has no licence file: nothing is shared with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradec.core.checks import check_choice
from paradec.samplers.forecast.refresh import Probe, RunProgress, integer, number, relative_change

ERRORS = ("delta_y", "delta_minus")
GAIN = (1.0, 1.5)
"""Bounds of g: 1 is the latest evaluated residual, 2 as far again from the one before."""


@dataclass(frozen=True)
class DiCache(Probe):
    """Sum the changes of what the first blocks return, and evaluate when the sum is enough; else align the residual.

    The probe's relative L1 change is taken from step to step, skipped ones included. Where the sum stays below
    `threshold`, the other blocks are skipped, and all blocks, the probe's too, are replaced by a residual on the line
    through the last two that were evaluated: r_before + g (r_latest - r_before), where g is |p - p_before| over
    |p_latest - p_before|, p what the probe adds, within [1, 1.5]. Else the call goes on after the probe.

    That line is TaylorSeer's of order 1 at a measured time: the basis is "taylor", and with another one the same time
    is used. Text streams go along the same line; where the blocks change the shapes of the streams, every segment has
    its own residual.

    Args:
        threshold: of the summed change; 0 always evaluates. 0.4 is the public code's for "delta_y", 0.08 for
            "delta_minus".
        error: what is summed: "delta_y", the probe's change; or "delta_minus", how much it differs from the input's.
        probe_depth: first blocks, evaluated at every step.
        retention_ratio: share of the steps at the start that are all evaluated (0 in the public code for
            "delta_minus"). The last step always is.
        num_inference_steps: solver steps, where no scheduler tells them (a transformer by itself).

    Raises:
        ValueError: a setting out of its range; at the start of a run of an unknown number of steps.
    """

    threshold: float = number(0.4, low=0)
    error: str = "delta_y"
    probe_depth: int = integer(1, low=1)
    retention_ratio: float = number(0.2, low=0, high=1)
    num_inference_steps: int | None = integer(None, low=1, none=True)

    name = "dicache"
    whole = True
    how = "taylor"
    counted = "the first steps and the last one"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("error", self.error, ERRORS)

    @property
    def head(self) -> int:
        return self.probe_depth

    def is_full(self, state: RunProgress, first: Tensor, probe: Tensor | None, forced: bool) -> bool:
        assert probe is not None
        memory, total = state.memory, self.num_inference_steps or state.total or 0
        residual = (probe - first).detach()
        if not forced:
            change = relative_change(probe, memory["probe"])
            if self.error == "delta_minus":
                change = abs(change - relative_change(first, memory["first"]))
            state.change += change
        full = (
            forced
            or state.index < int(self.retention_ratio * total)
            or state.index == total - 1
            or not state.change < self.threshold  # also where it is no number
        )
        if full:
            # the first evaluation is also used as the one before it, so that memory is known from then on
            memory["before"], memory["latest"] = memory.get("latest", residual), residual
        else:
            before, latest = memory["before"], memory["latest"]
            gain = (residual - before).abs().mean() / (latest - before).abs().mean().clamp(min=1e-12)
            state.product = float(gain.clamp(*GAIN))
        memory["probe"] = probe.detach().clone()  # the next block may write into it
        if self.error == "delta_minus":
            memory["first"] = first.detach()
        return full

    def forecast_at(self, state: RunProgress) -> float:
        latest, *before = state.nodes
        return latest + (state.product - 1.0) * (latest - before[0]) if before else latest

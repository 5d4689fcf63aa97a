"""DiCache: how much the first blocks changed says when to evaluate, and how far along the residual has come.

Bu et al., "DiCache: Let Diffusion Model Determine Its Own Cache", arXiv 2508.17356. Rules and settings are those of the
public code, which has no licence file: nothing is shared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paradec.core.checks import check_choice, check_int, check_number
from paradec.samplers.forecast.probes import Probe, ProbeState
from paradec.samplers.forecast.refresh import relative_change

ERRORS = ("delta_y", "delta_minus")
GAIN = (1.0, 1.5)
"""Between these the residual is looked for: 1 is the latest evaluated one, 2 as far again from the one before."""


@dataclass(frozen=True)
class DiCache(Probe):
    """Sum the changes of what the first blocks return, and evaluate when the sum is enough; else align the residual.

    The probe's relative L1 change is taken from step to step, skipped ones included. Where the sum stays below
    `threshold`, the other blocks are skipped, and all of them, the probe's too, are replaced by a residual on the line
    through the last two that were evaluated: r_before + g (r_latest - r_before), where g is |p - p_before| over
    |p_latest - p_before|, p what the probe adds, within [1, 1.5]. Else the call goes on after the probe.

    That line is TaylorSeer's of order 1, at a time that is measured instead of counted: the basis is "taylor", and with
    another one the same time is used. Text streams go along the same line, and where the blocks change the shapes of
    the streams, every segment has a residual of its own.

    Args:
        threshold: of the summed change; 0 always evaluates. 0.4 is the public code's for "delta_y", 0.08 for
            "delta_minus".
        error: what is summed: "delta_y", the probe's change; or "delta_minus", how much it differs from the input's.
        probe_depth: first blocks, evaluated at every step.
        retention_ratio: share of the steps at the start that are all evaluated (0 in the public code for
            "delta_minus"). The last step always is.
        num_inference_steps: solver steps, where no scheduler tells them (a transformer by itself).

    Raises:
        ValueError: a setting out of its range; at the start of a run whose steps nobody tells.
    """

    threshold: float = 0.4
    error: str = "delta_y"
    probe_depth: int = 1
    retention_ratio: float = 0.2
    num_inference_steps: int | None = None

    name = "dicache"
    whole = True

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0)
        check_choice("error", self.error, ERRORS)
        check_int("probe_depth", self.probe_depth, low=1)
        check_number("retention_ratio", self.retention_ratio, low=0, high=1)
        check_int("num_inference_steps", self.num_inference_steps, low=1, none=True)

    @property
    def how(self) -> str:
        return "taylor"

    @property
    def head(self) -> int:
        return self.probe_depth

    def check_run(self, total: int | None, **run: Any) -> None:
        if self.num_inference_steps is None and total is None:
            raise ValueError(
                "num_inference_steps=None: DiCache evaluates the first steps and the last one, and a transformer by "
                "itself does not tell how many there are; give their number"
            )

    def is_full(self, state: ProbeState, first: Tensor, probe: Tensor | None, forced: bool) -> bool:
        assert probe is not None
        kept, total = state.tensors, self.num_inference_steps or state.total or 0
        residual = (probe - first).detach()
        if not forced:
            change = relative_change(probe, kept["probe"])
            if self.error == "delta_minus":
                change = abs(change - relative_change(first, kept["first"]))
            state.error += change
        full = (
            forced
            or state.index < int(self.retention_ratio * total)
            or state.index == total - 1
            or not state.error < self.threshold  # also where it is no number
        )
        if full:
            state.error = 0.0
            # the first evaluation is also used as the one before it, so that memory is known from then on
            kept["before"], kept["latest"] = kept.get("latest", residual), residual
        else:
            state.product = self._gain(residual, kept["latest"], kept["before"])
        kept["probe"] = probe.detach().clone()  # the next block may write into it
        if self.error == "delta_minus":
            kept["first"] = first.detach()
        return full

    def _gain(self, residual: Tensor, latest: Tensor, before: Tensor) -> float:
        """g: how far along the line from the evaluation before the latest one. Waits for the device."""
        low, high = GAIN
        gain = (residual - before).abs().mean() / (latest - before).abs().mean().clamp(min=1e-12)
        return float(gain.clamp(low, high))

    def forecast_at(self, state: ProbeState) -> float:
        latest, *before = state.nodes
        return latest + (state.product - 1.0) * (latest - before[0]) if before else latest

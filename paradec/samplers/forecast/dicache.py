"""DiCache: Bu et al., "DiCache: Let Diffusion Model Determine Its Own Cache", arXiv 2508.17356.

The code has no licence file: this follows its rules and settings, and shares nothing with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradec.checks import check_choice, check_int, check_number
from paradec.samplers.forecast.probes import Probe, ProbeState
from paradec.samplers.forecast.refresh import relative_change

ERRORS = ("delta_y", "delta_minus")


@dataclass(frozen=True)
class DiCache(Probe):
    threshold: float = 0.4
    error_choice: str = "delta_y"
    probe_depth: int = 1
    retention_ratio: float = 0.2

    name = "dicache"
    basis = "aligned"

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0)
        check_choice("error_choice", self.error_choice, ERRORS)
        check_int("probe_depth", self.probe_depth, low=1)
        check_number("retention_ratio", self.retention_ratio, low=0, high=1)

    @property
    def head(self) -> int:
        return self.probe_depth

    def is_full(self, state: ProbeState, first: Tensor, probe: Tensor | None, forced: bool) -> bool:
        assert probe is not None
        kept = state.tensors
        first, probe = first.detach(), probe.detach()
        if not forced:
            change = relative_change(probe, kept["probe"])
            if self.error_choice == "delta_minus":
                change = abs(change - relative_change(first, kept["first"]))
            state.error += change
        total = state.total or 0
        full = (
            forced
            or state.index < int(self.retention_ratio * total)
            or state.index == total - 1
            or not state.error < self.threshold
        )
        kept["first"], kept["probe"] = first, probe
        residual = probe - first
        if full:
            state.error = 0.0
            if "residual" in kept:
                kept["before"] = kept["residual"]
            kept["residual"] = residual
            state.product = 1.0
        elif "before" in kept:
            gain = (residual - kept["before"]).abs().mean() / (kept["residual"] - kept["before"]).abs().mean()
            state.product = float(gain.clamp(1.0, 1.5))
        return full

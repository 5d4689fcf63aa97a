"""MagCache's calibration: magnitude ratios of a model's residual, from plain runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paradec.core.checks import check_int
from paradec.integrations.diffusers.hooks.session import Session, check_every_step
from paradec.samplers.forecast.forecast import Forecast
from paradec.samplers.forecast.refresh import Probe, RunProgress
from paradec.samplers.forecast.rules import MagRatios


@dataclass(frozen=True, eq=False)
class _Magnitudes(Probe):
    ratios: dict[int, list[float]] = field(default_factory=dict)  # by step, of all its calls

    def is_full(self, progress: RunProgress, first: Tensor, probe: Tensor, forced: bool) -> bool:
        return True

    def observe_residual(self, progress: RunProgress, residual: Tensor) -> None:
        size, before = residual.float().norm(dim=-1), progress.memory.get("size")
        ratio = 1.0 if before is None else float((size / (before + 1e-8)).mean())
        self.ratios.setdefault(progress.nodes[0], []).append(ratio)
        progress.memory["size"] = size


def calibrate(pipe: Any, run: Callable[[], Any], *, runs: int = 1) -> MagRatios:
    """Measure the magnitude ratios of a model, for `MagCache(mag_ratios=...)`.

    Args:
        pipe: a diffusers pipeline (of two transformers, each is measured at its steps), or a transformer; restored.
        run: makes one plain run with all steps.
        runs: calls of `run`. Runs, and the calls of a step (guidance), are averaged.

    Raises ValueError for invalid `runs`, no blocks, or runs of unequal lengths; TypeError for another `pipe`.
    """
    check_int("runs", runs, low=1)
    total: list[float] = []
    for _ in range(runs):
        measure = _Magnitudes()
        with Session(pipe, Forecast(when=measure)) as session:
            run()
            steps = sorted(session.report().full_steps)
        check_every_step("no transformer was called", steps, len(total))
        ratios = [sum(measure.ratios[step]) / len(measure.ratios[step]) for step in steps]
        total = [a + b for a, b in zip(total or [0.0] * len(ratios), ratios, strict=True)]
    return MagRatios(tuple(value / runs for value in total))

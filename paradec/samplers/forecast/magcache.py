"""MagCache: which steps may be skipped is read off how much the residual's magnitude changed in a run before.

Ma et al., "MagCache: Fast Video Generation with Magnitude-Aware Cache", arXiv 2506.09045, with the names and defaults
of diffusers (`MagCacheConfig`). `paradec.integrations.diffusers.hooks.magcache.calibrate` measures the ratios.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from paradec.core.checks import check_number, shown
from paradec.samplers.forecast.refresh import Probe, RunProgress, SavedAsJson, integer, number


@dataclass(frozen=True)
class MagRatios(SavedAsJson):
    """Magnitude ratios of one model and solver, one for each step of the run in which they were measured.

    Args:
        values: mean over tokens of |residual of this step| / |residual of the step before|; the first is 1.

    Raises:
        ValueError: no numbers, or numbers that are not positive.
    """

    values: tuple[float, ...]

    setting = "mag_ratios"
    content = "file of ratios"

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("mag_ratios=() must hold a ratio for each step")
        for value in self.values:
            check_number("mag_ratios", value, low=0, open_low=True)

    def at(self, steps: int) -> tuple[float, ...]:
        """Ratios for a run of another length: those of the nearest steps, as diffusers takes them."""
        if steps == len(self.values):
            return self.values
        if steps == 1:
            return self.values[-1:]
        # in float32, as there: it decides what is half-way
        nearest = np.arange(steps, dtype=np.float32) * np.float32((len(self.values) - 1) / (steps - 1))
        return tuple(self.values[int(step)] for step in nearest.round())

    def to_dict(self) -> dict[str, Any]:
        return {"mag_ratios": list(self.values)}

    @classmethod
    def from_dict(cls, data: Any) -> MagRatios:
        """Ratios from themselves, a sequence or tensor [steps], plain data, or a file. Raises ValueError otherwise."""
        if isinstance(data, cls):
            return data
        if isinstance(data, (str, os.PathLike)):
            return cls.load(Path(data))
        if isinstance(data, Mapping) and set(data) == {"mag_ratios"}:
            data = data["mag_ratios"]
        if isinstance(data, (Tensor, np.ndarray)):
            data = data.tolist()
        if not isinstance(data, Sequence) or isinstance(data, (str, bytes)):
            raise ValueError(f"mag_ratios={shown(data)} must be a ratio for each step, or a file of them")
        return cls(tuple(data))


@dataclass(frozen=True)
class MagCache(Probe):
    """Skip while the error that a table of magnitude ratios foresees stays small. Nothing is measured in the run.

    The ratios since the latest evaluation are multiplied; how far each product is from 1 is summed, and the step is
    evaluated when the sum exceeds `threshold`. As in diffusers, all calls of a step use the same table.

    Args:
        mag_ratios: measured by `paradec.integrations.diffusers.hooks.magcache.calibrate` for this model: a `MagRatios`,
            its file, or the numbers (diffusers has `FLUX_MAG_RATIOS`). Runs of other lengths take the nearest;
            image to image, which leaves the first steps of its scheduler out, the last ones.
        threshold: of the summed error.
        max_skip_steps: K: skipped steps in a row.
        retention_ratio: share of the steps at the start that are all evaluated.
        num_inference_steps: solver steps, where no scheduler tells them (a transformer by itself).

    Raises:
        ValueError: a setting out of its range, or no ratios.
    """

    mag_ratios: MagRatios | None = None
    threshold: float = number(0.06, low=0)
    max_skip_steps: int = integer(3, low=0)
    retention_ratio: float = number(0.2, low=0, high=1)
    num_inference_steps: int | None = integer(None, low=1, none=True)

    name = "magcache"

    def __post_init__(self) -> None:
        if self.mag_ratios is None:
            raise ValueError(
                "mag_ratios=None: MagCache needs the ratios of this model; calibrate(pipe, run), of "
                "paradec.integrations.diffusers.hooks.magcache, measures them"
            )
        object.__setattr__(self, "mag_ratios", MagRatios.from_dict(self.mag_ratios))
        super().__post_init__()

    def is_full(self, state: RunProgress, first: Tensor, probe: Tensor | None, forced: bool) -> bool:
        assert self.mag_ratios is not None
        total = self.num_inference_steps or state.total or len(self.mag_ratios.values)
        begin = 0 if self.num_inference_steps else state.first
        if state.index < int(self.retention_ratio * total + 0.5):
            return True
        ratios = self.mag_ratios.at(total + begin)[begin:]
        state.product *= ratios[state.index] if state.index < total else 1.0
        state.change += abs(1.0 - state.product)
        return forced or state.change > self.threshold or state.forecasts >= self.max_skip_steps

    def to_dict(self) -> dict[str, Any]:
        assert self.mag_ratios is not None
        return super().to_dict() | self.mag_ratios.to_dict()

"""Rules that decide by changes during the run: FBCache, DBCache, DiCache, MagCache, SeaCache, EasyCache."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paradec.core.checks import check_number, short_repr
from paradec.samplers.forecast.refresh import (
    Probe,
    RunProgress,
    SavedAsJson,
    StepRule,
    choice,
    integer,
    number,
    relative_change,
)


@dataclass(frozen=True)
class FirstBlock(Probe):
    """FBCache (ParaAttention): evaluate the blocks after the first block if the first block's residual has changed.

    The relative L1 change since the latest evaluation is computed over all rows of the call, in the model's dtype.
    Names and defaults are diffusers' (`FirstBlockCacheConfig`).

    Args:
        threshold: a step is evaluated if the change exceeds it; 0 always evaluates.
        first_enhance: number of evaluated solver steps at the start.
    """

    threshold: float = number(0.05, low=0)
    first_enhance: int = integer(1, low=1)

    name = "first_block"
    head = 1

    def is_full(self, progress: RunProgress, first: Tensor, probe: Tensor, forced: bool) -> bool:
        residual = (probe - first).detach()
        full = forced or progress.index < self.first_enhance or self.threshold == 0
        if not full:
            progress.change = relative_change(residual, progress.memory["residual"])
            full = progress.change > self.threshold
        if full:
            progress.memory["residual"] = residual
        return full


@dataclass(frozen=True)
class DBCache(Probe):
    """cache-dit's DBCache: FBCache with more evaluated blocks and with limits on skipping.

    All blocks form one stack. In cache-dit, some models have several lists of blocks, with a decision for each list.

    Args:
        Fn_compute_blocks, Bn_compute_blocks: number of first and last blocks, which every step evaluates.
        residual_diff_threshold: a step is evaluated if the relative L1 change reaches it; 0: always; from 1 on: never.
        max_warmup_steps: number of evaluated steps at the start.
        max_cached_steps, max_continuous_cached_steps: limits of all and of consecutive skipped steps; -1: no limit.
    """

    Fn_compute_blocks: int = integer(8, low=1)
    Bn_compute_blocks: int = integer(0, low=0)
    residual_diff_threshold: float = number(0.08, low=0)
    max_warmup_steps: int = integer(8, low=0)
    max_cached_steps: int = integer(-1, low=-1)
    max_continuous_cached_steps: int = integer(-1, low=-1)

    name = "dbcache"

    @property
    def head(self) -> int:  # type: ignore[override]
        return self.Fn_compute_blocks

    @property
    def tail(self) -> int:  # type: ignore[override]
        return self.Bn_compute_blocks

    def is_full(self, progress: RunProgress, first: Tensor, probe: Tensor, forced: bool) -> bool:
        residual, threshold = (probe - first).detach(), self.residual_diff_threshold
        full = (
            forced
            or progress.index < self.max_warmup_steps
            or 0 <= self.max_cached_steps <= progress.num_skips
            or 0 <= self.max_continuous_cached_steps <= progress.num_forecasts
            or threshold == 0
        )
        if not full and threshold < 1:
            progress.change = relative_change(residual, progress.memory["residual"])
            full = not progress.change < threshold
        if full:
            progress.memory["residual"] = residual
        return full


@dataclass(frozen=True)
class DiCache(Probe):
    """DiCache (Bu et al., arXiv 2508.17356): sum the changes of the first blocks' output (the probe).

    As in the public code, changes are relative L1 changes from step to step. While the sum is below `threshold`, all
    blocks (also the probe) are replaced by the residual r_before + g (r_latest - r_before) of the last two evaluations.
    Here p is the probe's residual and g = |p - p_before| / |p_latest - p_before|, clipped to [1, 1.5]. This is "taylor"
    of order 1 at a fractional step, at which other bases also forecast. Raises ValueError without a number of steps.

    Args:
        threshold: limit of the sum; 0 always evaluates. The public code has 0.4 for "delta_y", 0.08 for "delta_minus".
        error: "delta_y" sums the probe's changes; "delta_minus" sums |change of the probe - change of the input|.
        probe_depth: number of first blocks, which every step evaluates.
        retention_ratio: share of evaluated steps at the start (the "delta_minus" code: 0); the last is evaluated too.
        num_inference_steps: number of solver steps, for a transformer without a pipeline.
    """

    threshold: float = number(0.4, low=0)
    error: str = choice("delta_y", "delta_y", "delta_minus")
    probe_depth: int = integer(1, low=1)
    retention_ratio: float = number(0.2, low=0, high=1)
    num_inference_steps: int | None = integer(None, low=1, none=True)

    name = "dicache"
    evaluates_last = True
    replaces_probe = True
    how = "taylor"

    @property
    def head(self) -> int:  # type: ignore[override]
        return self.probe_depth

    def is_full(self, progress: RunProgress, first: Tensor, probe: Tensor, forced: bool) -> bool:
        memory, total = progress.memory, self.num_inference_steps or progress.total or 0
        residual = (probe - first).detach()
        full = forced or progress.index < int(self.retention_ratio * total) or progress.index == total - 1
        if not full:
            change = relative_change(probe, memory["probe"])
            if self.error == "delta_minus":
                change = abs(change - relative_change(first, memory["first"]))
            progress.change += change
            full = not progress.change < self.threshold  # also for NaN
        if full:
            # the first evaluation is stored twice, so that the memory has its full size from then on
            memory["before"], memory["latest"] = memory.get("latest", residual), residual
        else:
            before, latest = memory["before"], memory["latest"]
            gain = (residual - before).abs().mean() / (latest - before).abs().mean().clamp(min=1e-12)
            progress.product = float(gain.clamp(1.0, 1.5))
        memory["probe"] = probe.detach().clone()  # the next block may overwrite it
        if self.error == "delta_minus":
            memory["first"] = first.detach()
        return full

    def forecast_at(self, progress: RunProgress) -> float:
        latest, *before = progress.nodes
        return latest + (progress.product - 1.0) * (latest - before[0]) if before else latest


@dataclass(frozen=True)
class MagRatios(SavedAsJson):
    """Magnitude ratios of one model and solver, for the steps of a run.

    values: per step, mean over tokens of |residual of this step| / |residual of the previous step|; the first is 1.
    Raises ValueError unless all are positive numbers.
    """

    values: tuple[float, ...]

    setting = "mag_ratios"
    content = "file of ratios"

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("mag_ratios=() must have a ratio for each step")
        for value in self.values:
            check_number("mag_ratios", value, low=0, open_low=True)

    def resample(self, steps: int) -> tuple[float, ...]:
        """Return the ratios of the nearest steps for a run of another length, as diffusers does."""
        if steps == len(self.values):
            return self.values
        if steps == 1:
            return self.values[-1:]
        # float32, as in diffusers, so that ties are rounded the same way
        nearest = np.arange(steps, dtype=np.float32) * np.float32((len(self.values) - 1) / (steps - 1))
        return tuple(self.values[int(step)] for step in nearest.round())

    def to_dict(self) -> dict[str, Any]:
        return {"mag_ratios": list(self.values)}

    @classmethod
    def from_dict(cls, data: Any) -> MagRatios:
        """Make ratios from a sequence or tensor [steps], plain data or a file. Raises ValueError for anything else."""
        if isinstance(data, cls):
            return data
        if isinstance(data, (str, os.PathLike)):
            return cls.load(Path(data))
        if isinstance(data, Mapping) and set(data) == {"mag_ratios"}:
            data = data["mag_ratios"]
        if isinstance(data, (Tensor, np.ndarray)):
            data = data.tolist()
        if not isinstance(data, Sequence) or isinstance(data, (str, bytes)):
            raise ValueError(
                f"mag_ratios={short_repr(data)} must be a ratio for each step, or a file of them; "
                "paradec.integrations.diffusers.calibration.calibrate_magcache measures them for a model"
            )
        return cls(tuple(data))


@dataclass(frozen=True)
class MagCache(Probe):
    """MagCache (Ma et al., arXiv 2506.09045): skip while a table of magnitude ratios predicts a small error.

    A step is evaluated if sum |1 - product of ratios| since the latest evaluation exceeds `threshold`. Names and
    defaults are diffusers' (`MagCacheConfig`).

    Args:
        mag_ratios: ratios of this model from `paradec.integrations.diffusers.calibration.calibrate_magcache`: a
            `MagRatios`, its file, or the numbers (diffusers has `FLUX_MAG_RATIOS`). Runs of other lengths use the
            nearest ratios, image-to-image runs the last ratios.
        threshold: limit of the sum.
        max_skip_steps: K: limit of consecutive skipped steps.
        retention_ratio: share of evaluated steps at the start.
        num_inference_steps: number of solver steps, for a transformer without a pipeline.
    """

    mag_ratios: Any = None
    threshold: float = number(0.06, low=0)
    max_skip_steps: int = integer(3, low=0)
    retention_ratio: float = number(0.2, low=0, high=1)
    num_inference_steps: int | None = integer(None, low=1, none=True)

    name = "magcache"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mag_ratios", MagRatios.from_dict(self.mag_ratios))
        super().__post_init__()

    def is_full(self, progress: RunProgress, first: Tensor, probe: Tensor, forced: bool) -> bool:
        total = self.num_inference_steps or progress.total or len(self.mag_ratios.values)
        begin = 0 if self.num_inference_steps else progress.first
        if progress.index < int(self.retention_ratio * total + 0.5):
            return True
        ratios = self.mag_ratios.resample(total + begin)[begin:]
        progress.product *= ratios[progress.index] if progress.index < total else 1.0
        progress.change += abs(1.0 - progress.product)
        return forced or progress.change > self.threshold or progress.num_forecasts >= self.max_skip_steps

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | self.mag_ratios.to_dict()


TINY = 1e-16  # added to spectrum and denominator of `SeaCache`'s filter, as in the public code


@dataclass(frozen=True)
class SeaCache(Probe):
    """SeaCache (arXiv 2602.18993): sum the changes of the filtered latent from step to step.

    The filter is a Wiener filter for the step's noise level and images with a spectrum 1 / frequency^`power_exp`. The
    residual of all blocks is extrapolated or reused. Names and defaults are diffusers' (`SeaCacheConfig`). Raises
    ValueError for a scheduler without flow sigmas, more input than output channels, or a latent of unknown layout.

    Args:
        threshold: limit of the sum; 0 always evaluates.
        residual_order: 1 extrapolates (`how="taylor"`), 0 reuses (`how="reuse"`).
        retention_steps, cache_end_steps: number of evaluated steps at the start and at the end.
        max_consecutive_cached: limit of consecutive skipped steps; 0: no limit.
        power_exp: exponent of the spectrum.
    """

    threshold: float = number(0.25, low=0)
    residual_order: int = choice(1, 0, 1)
    retention_steps: int = integer(1, low=0)
    cache_end_steps: int = integer(1, low=0)
    max_consecutive_cached: int = integer(2, low=0)
    power_exp: float = number(3.0, low=0, open_low=True)

    name = "seacache"
    filters = True

    @property
    def how(self) -> str:  # type: ignore[override]
        return "taylor" if self.residual_order else "reuse"

    def check_model(self, module: nn.Module) -> None:
        config = getattr(module, "config", None) or {}
        inputs, outputs, patch = (config.get(key) for key in ("in_channels", "out_channels", "patch_size"))
        is_packed = outputs is not None and isinstance(patch, int) and inputs == outputs * patch**2  # as in Qwen-Image
        if inputs is not None and outputs is not None and inputs > outputs and not is_packed:
            raise ValueError(
                f"when='seacache' filters the latent, but {type(module).__name__} is given {inputs} channels and "
                f"returns {outputs}: its input has conditions too; use another rule"
            )

    def noise_levels(self, scheduler: Any) -> Sequence[float]:
        sigmas = getattr(scheduler, "sigmas", None)
        config = getattr(scheduler, "config", None) or {}
        if sigmas is None or not (config.get("use_flow_sigmas") or float(torch.as_tensor(sigmas).max()) <= 1):
            kind = (
                "a transformer by itself has no scheduler" if scheduler is None else f"not {type(scheduler).__name__}"
            )
            raise ValueError(
                f"when='seacache' needs a scheduler for flow matching with sigmas from 1 to 0, such as "
                f"FlowMatchEulerDiscreteScheduler, or UniPCMultistepScheduler(use_flow_sigmas=True, "
                f"prediction_type='flow_prediction'), {kind}"
            )
        return torch.as_tensor(sigmas).tolist()[getattr(scheduler, "begin_index", None) or 0 :]

    def is_full(self, progress: RunProgress, first: Tensor, probe: Tensor, forced: bool) -> bool:
        assert progress.latent is not None
        memory = progress.memory
        filtered = filter_latent(progress.latent.detach(), progress.level, self.power_exp)
        full = (
            forced
            or "filtered" not in memory
            or progress.index < self.retention_steps
            or progress.index >= (progress.total or 0) - self.cache_end_steps
            or 0 < self.max_consecutive_cached <= progress.num_forecasts
        )
        if not full:
            changes = [relative_change(new, old) for new, old in zip(filtered, memory["filtered"], strict=True)]
            progress.change += sum(changes) / len(changes)
            full = not progress.change < self.threshold  # also for NaN
        memory["filtered"] = filtered
        return full


def filter_latent(latent: Tensor, level: float, power: float) -> Tensor:
    """Filter the noise out of a latent [B, C, ...] = (1 - s) image + s noise, s = `level`, in float32.

    On each axis after C the gain at frequency f is a S / (a^2 S + s^2) with a = 1 - s, S = 1 / |f|^power. The product
    of the gains is divided by its mean. Raises ValueError for a latent that is neither 4- nor 5-dimensional.
    """
    if latent.ndim not in (4, 5):
        raise ValueError(
            f"when='seacache' filters over frames, rows and columns: the transformer's input must be [B, C, rows, "
            f"columns] or [B, C, frames, rows, columns], not {tuple(latent.shape)}; use another rule"
        )
    noise = min(max(level, 1e-6), 1 - 1e-6)
    clean, gain = 1 - noise, torch.ones((), device=latent.device)
    for length in latent.shape[2:]:
        frequencies = torch.fft.fftfreq(length, device=latent.device)
        spectrum = 1 / (frequencies.abs() ** power + TINY)
        axis_gain = clean * spectrum / (clean**2 * spectrum + noise**2 + TINY)
        gain = gain.unsqueeze(-1) * axis_gain
    axes = tuple(range(2, latent.ndim))
    filtered = torch.fft.ifftn(torch.fft.fftn(latent.float(), dim=axes) * (gain / gain.mean()), dim=axes)
    return filtered.real.to(latent.dtype)


@dataclass(frozen=True)
class EasyCache(StepRule):
    """EasyCache (arXiv 2507.02860, the authors' code for Wan): sum estimates of the output's change.

    For the transformer's input x and output v, K = mean|v - v_before| / mean|x - x_before| of the last two evaluations.
    While the sum of K mean|x - x of the previous step| / mean|v_latest| is below `threshold`, the output is x +
    (v_latest - x_latest). A step's first call decides for all its calls. Raises ValueError without a number of steps.

    Args:
        threshold: limit of the sum; 0 always evaluates. The public code has 0.05 and 0.06 for Wan.
        ret_steps: number of evaluated steps at the start. The last step is always evaluated.
        num_inference_steps: number of solver steps, for a transformer without a pipeline.
    """

    threshold: float = number(0.05, low=0)
    ret_steps: int = integer(7, low=0)
    num_inference_steps: int | None = integer(None, low=1, none=True)

    name = "easycache"
    evaluates_last = True
    how = "reuse"
    where = "output"
    measures = True
    from_input = True

    def is_full(self, progress: RunProgress) -> bool:
        last = (self.num_inference_steps or progress.total or 0) - 1
        if progress.index < self.ret_steps or progress.index == last or "rate" not in progress.memory:
            return True
        return not progress.change < self.threshold  # also for NaN

    def observe_change(self, progress: RunProgress, before: Tensor, now: Tensor) -> None:
        memory = progress.memory
        if "rate" in memory:
            progress.change += memory["rate"] * float((now - before).abs().mean()) / memory["size"]

    def observe_output(self, progress: RunProgress, latent: Tensor, output: Tensor) -> None:
        if latent.shape != output.shape:
            raise ValueError(
                f"when='easycache' needs an output in the shape of the input; the transformer is given "
                f"{tuple(latent.shape)} and returns {tuple(output.shape)}; use another rule"
            )
        memory = progress.memory
        if "output" in memory:
            change = (latent - memory["input"]).abs().mean().clamp(min=1e-12)
            memory["rate"] = float((output - memory["output"]).abs().mean() / change)
        size = float(output.abs().mean().clamp(min=1e-12))
        memory |= {"input": latent, "output": output.detach().clone(), "size": size}

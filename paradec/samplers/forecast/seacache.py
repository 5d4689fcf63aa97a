"""SeaCache: how much the latent changes, seen through the filter that denoises it best, says when to evaluate.

arXiv 2602.18993, with the names and defaults of diffusers (`SeaCacheConfig`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.checks import check_choice
from paradec.samplers.forecast.refresh import Probe, RunProgress, integer, number, relative_change

TINY = 1e-16
"""Added to the filter's spectrum and denominator, as in the public code."""


@dataclass(frozen=True)
class SeaCache(Probe):
    """Sum the changes of the filtered latent from step to step, skipped ones too, and evaluate when that is enough.

    The filter is Wiener's for pictures whose power falls with frequency as 1 / f^`power_exp`, at the step's noise
    level. At a skipped step no block runs, and what all blocks add is continued along the line through the latest two
    evaluations, or reused.

    Args:
        threshold: of the summed change; 0 always evaluates.
        residual_order: 1 continues the line (`how="taylor"`), 0 reuses (`how="reuse"`).
        retention_steps: steps at the start that are all evaluated.
        cache_end_steps: steps at the end that are all evaluated.
        max_consecutive_cached: skipped steps in a row; 0 sets no bound.
        power_exp: how fast the power of pictures falls.

    Raises:
        ValueError: a setting out of its range; a scheduler without flow sigmas, or none; a transformer that is given
            more channels than it returns, or a latent without rows and columns that the pipeline could tell (FLUX's and
            Qwen-Image's cells are put in their places).
    """

    threshold: float = number(0.25, low=0)
    residual_order: int = 1
    retention_steps: int = integer(1, low=0)
    cache_end_steps: int = integer(1, low=0)
    max_consecutive_cached: int = integer(2, low=0)
    power_exp: float = number(3.0, low=0, open_low=True)

    name = "seacache"
    filters = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("residual_order", self.residual_order, (0, 1))

    @property
    def how(self) -> str:
        return "taylor" if self.residual_order else "reuse"

    def check_model(self, module: nn.Module) -> None:
        config = getattr(module, "config", None) or {}
        inputs, outputs, cell = (config.get(key) for key in ("in_channels", "out_channels", "patch_size"))
        packed = outputs is not None and isinstance(cell, int) and inputs == outputs * cell**2  # Qwen-Image counts so
        if inputs is not None and outputs is not None and inputs > outputs and not packed:
            raise ValueError(
                f"when='seacache' filters the latent, and {type(module).__name__} is given {inputs} channels and "
                f"returns {outputs}: conditions beside the latent; use another rule"
            )

    def noise_levels(self, scheduler: Any) -> Sequence[float]:
        sigmas = getattr(scheduler, "sigmas", None)
        config = getattr(scheduler, "config", None) or {}
        if sigmas is None or not (config.get("use_flow_sigmas") or float(torch.as_tensor(sigmas).max()) <= 1):
            kind = "a transformer by itself has no scheduler" if scheduler is None else type(scheduler).__name__
            raise ValueError(
                f"when='seacache' reads the noise levels (sigmas from 1 to 0) of a scheduler for flow matching, "
                f"such as FlowMatchEulerDiscreteScheduler, or UniPCMultistepScheduler(use_flow_sigmas=True, "
                f"prediction_type='flow_prediction'); {kind}"
            )
        return torch.as_tensor(sigmas).tolist()[getattr(scheduler, "begin_index", None) or 0 :]

    def is_full(self, state: RunProgress, first: Tensor, probe: Tensor | None, forced: bool) -> bool:
        assert state.latent is not None
        now, before = filtered(state.latent.detach(), state.level, self.power_exp), state.memory.get("filtered")
        state.memory["filtered"] = now
        full = (
            forced
            or before is None
            or state.index < self.retention_steps
            or state.index >= (state.total or 0) - self.cache_end_steps
            or 0 < self.max_consecutive_cached <= state.forecasts
        )
        if not full:
            assert before is not None
            rows = list(zip(now, before, strict=True))
            state.change += sum(relative_change(new, old) for new, old in rows) / len(rows)
            full = not state.change < self.threshold  # also where it is no number
        return full


def filtered(latent: Tensor, level: float, power: float) -> Tensor:
    """A latent [B, C, ...] of 1 - s parts picture and s parts noise, through the filter that leaves the picture.

    Over every axis after the channels the gain is a S / (a^2 S + s^2) with a = 1 - s and S = 1 / |f|^power; the gains
    are multiplied and divided by their mean. In float32; the result has the latent's type.

    Raises:
        ValueError: a latent of other axes.
    """
    if latent.ndim not in (4, 5):
        raise ValueError(
            f"when='seacache' filters over frames, rows and columns, and the transformer is given a latent of shape "
            f"{tuple(latent.shape)}, not [B, C, rows, columns] or [B, C, frames, rows, columns]; use another rule"
        )
    noise = min(max(level, 1e-6), 1 - 1e-6)
    clean, gain = 1 - noise, torch.ones((), device=latent.device)
    for length in latent.shape[2:]:
        frequencies = torch.fft.fftfreq(length, device=latent.device)
        spectrum = 1 / (frequencies.abs() ** power + TINY)
        along = clean * spectrum / (clean**2 * spectrum + noise**2 + TINY)
        gain = gain.unsqueeze(-1) * along
    axes = tuple(range(2, latent.ndim))
    picture = torch.fft.ifftn(torch.fft.fftn(latent.float(), dim=axes) * (gain / gain.mean()), dim=axes)
    return picture.real.to(latent.dtype)

"""TaylorSeer: a diffusion transformer's features between full evaluations are forecast by a Taylor expansion.

Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", arXiv 2503.06923, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import factorial
from typing import Any, ClassVar

import torch
from torch import Tensor

from paradec.checks import check_int
from paradec.protocol import MemorySpec
from paradec.samplers.forecast import ForecastSampler, ForecastState


@dataclass(frozen=True)
class TaylorSeer(ForecastSampler):
    """Evaluate every `interval`-th solver step, forecast the others from finite differences of what was evaluated.

    The whole transformer's output is forecast ("lite" in the public code): a skipped step costs no forward, and the
    memory is one latent per order. Under guidance, the guided output is forecast. The defaults are the public code's
    for FLUX.1-dev; the presets have those of the other models, which that code sets for features inside the layers
    ("lite_*" are set for the output).

    Args:
        interval: N: one full evaluation, then N - 1 forecasts; 1 evaluates always.
        max_order: O: derivatives in the expansion; 0 reuses the last output.
        first_enhance: solver steps at the start that are all evaluated.
    """

    interval: int = 6
    max_order: int = 1
    first_enhance: int = 3

    name = "taylorseer"
    paper = "TaylorSeer"
    arxiv = "2503.06923"
    summary = "most solver steps skip the transformer; its output is forecast by a Taylor expansion"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "flux": {"interval": 6, "max_order": 1, "first_enhance": 3},
        "dit": {"interval": 4, "max_order": 4, "first_enhance": 2},
        "hunyuan_video": {"interval": 5, "max_order": 1, "first_enhance": 1},
        "wan": {"interval": 5, "max_order": 1, "first_enhance": 1},
        "hidream": {"interval": 4, "max_order": 2, "first_enhance": 1},
        "lite_fast": {"interval": 5, "max_order": 2, "first_enhance": 3},
        "lite_medium": {"interval": 4, "max_order": 2, "first_enhance": 3},
        "lite_detailed": {"interval": 3, "max_order": 2, "first_enhance": 3},
    }

    def __post_init__(self) -> None:
        check_int("interval", self.interval, low=1)
        check_int("max_order", self.max_order, low=0)
        check_int("first_enhance", self.first_enhance, low=1)

    def is_full(self, index: int) -> bool:
        """Whether solver step `index` is evaluated: the first ones, then every `interval`-th after the last of them."""
        return index < self.first_enhance or (index - self.first_enhance + 1) % self.interval == 0

    def refresh(self, state: ForecastState) -> bool:
        return self.is_full(state.index)

    def memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, MemorySpec]:
        return {
            "factors": MemorySpec((self.max_order + 1, *shape), dtype, reset="sequence"),
            "orders": MemorySpec((), torch.int64, reset="sequence"),
        }

    def remember(self, state: ForecastState, output: Tensor) -> Mapping[str, Tensor]:
        factors, orders = state.memory["factors"], state.memory["orders"]
        # as in the public code, no differences are taken before the last two of the first steps
        if state.index <= self.first_enhance - 2:
            orders = torch.zeros_like(orders)
        factors, orders = differences(output.to(factors.dtype), factors, orders, state.index - state.last_full)
        return {"factors": factors, "orders": orders}

    def forecast(self, state: ForecastState) -> Tensor:
        return expand(state.memory["factors"], state.index - state.last_full)


def differences(feature: Tensor, factors: Tensor, orders: Tensor, gap: int) -> tuple[Tensor, Tensor]:
    """Derivatives by backward differences, after an evaluation; a pure function.

    As in the public code, `gap` divides at every order, also where earlier evaluations stood further apart.

    Args:
        feature: [B, ...], the new evaluation.
        factors: [B, O + 1, ...], derivatives 0 to O at the previous one.
        orders: [B] int64: how many of those are known; the others are 0.
        gap: steps between the two evaluations.

    Returns:
        The new factors [B, O + 1, ...], one order more than before, and their number [B].
    """
    most = factors.shape[1]
    found = [feature]
    for order in range(most - 1):
        known = (orders > order).view(-1, *[1] * (feature.ndim - 1))
        found.append(torch.where(known, (found[order] - factors[:, order]) / gap, 0))
    return torch.stack(found, dim=1), (orders + 1).clamp(max=most)


def expand(factors: Tensor, distance: int) -> Tensor:
    """The Taylor expansion sum_i factors[:, i] distance^i / i!, [B, O + 1, ...] -> [B, ...]; a pure function."""
    forecast = factors[:, 0]
    for order in range(1, factors.shape[1]):
        forecast = forecast + factors[:, order] * (distance**order / factorial(order))
    return forecast

"""TaylorSeer: a diffusion transformer's features between full evaluations are forecast by a Taylor expansion.

Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", arXiv 2503.06923, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Self

from paradec.core.checks import check_int
from paradec.samplers.forecast.bases import Taylor
from paradec.samplers.forecast.forecast import FeatureForecast, Forecast, read_bytes
from paradec.samplers.forecast.refresh import Every
from paradec.samplers.forecast.targets import Modules, where_from

LITE = {"order": 2, "where": "output", "first_enhance": 3}


@dataclass(frozen=True)
class TaylorSeer(FeatureForecast):
    """Evaluate every N-th step; in between, F(t - k) = sum_{i <= O} D_i F(t) k^i / i!, D_i the backward differences.

    It is `Forecast(when=Every(interval, first_enhance), how=Taylor(order), where="module")`. By default evaluations are
    spread evenly, as in the public code for Wan and HunyuanVideo; measurements are in docs/diffusion.md. Preset "paper"
    (or "flux") is the public code's schedule for FLUX.1-dev; other presets have those of other models ("lite_*" are set
    for the whole output).

    Args:
        interval: N; None is 5, or 2 in runs of at most 8 steps.
        order: O: derivatives in the expansion; 0 reuses the last feature.
        first_enhance: solver steps at the start that are all evaluated.
        where: as in `Forecast`.
        max_memory: as in `Forecast`.

    Raises:
        ValueError: a value out of its range. TypeError: a setting of `Forecast`.
    """

    interval: int | None = None
    order: int = 1
    _: KW_ONLY
    first_enhance: int = 1
    where: str | Modules | None = None
    max_memory: int | None = None

    name = "taylorseer"
    paper = "TaylorSeer"
    arxiv = "2503.06923"
    summary = "most solver steps skip the transformer; its output is forecast by a Taylor expansion"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"interval": 6, "first_enhance": 3},
        "flux": {"interval": 6, "first_enhance": 3},
        "dit": {"interval": 4, "first_enhance": 2, "order": 4},
        "hunyuan_video": {"interval": 5},
        "wan": {"interval": 5},
        "hidream": {"interval": 4, "order": 2},
        "lite_fast": LITE | {"interval": 5},
        "lite_medium": LITE | {"interval": 4},
        "lite_detailed": LITE | {"interval": 3},
    }

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        others = [name for name in settings if name not in cls.__dataclass_fields__]
        if others:
            names = {"refresh": "when", "basis": "how", "target": "where"}
            general = {names.get(name, name): value for name, value in settings.items() if name in (*others, "where")}
            if "interval" in settings and "when" not in general:
                general["when"] = f"every(interval={settings['interval']})"
            text = ", ".join(f"{name}={value!r}" for name, value in general.items())
            raise TypeError(
                f"TaylorSeer takes interval, order, first_enhance, where and max_memory, not {', '.join(others)}; "
                f"write paradec.Forecast({text})"
            )
        return super().__new__(cls, *args, **settings)

    def __post_init__(self) -> None:
        check_int("interval", self.interval, low=1, none=True)
        check_int("order", self.order, low=0)
        check_int("first_enhance", self.first_enhance, low=1)
        object.__setattr__(self, "where", where_from(self.where))
        object.__setattr__(self, "max_memory", read_bytes(self.max_memory))

    def general(self) -> Forecast:
        when = Every(self.interval, self.first_enhance)
        return Forecast(when, Taylor(self.order), self.where, max_memory=self.max_memory)

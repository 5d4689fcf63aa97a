"""Published methods as short constructors (more in `rules`), and the names that `paradec.accelerate` accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self

from paradec.core.checks import plain_name, short_repr, unknown_name
from paradec.core.component_text import parse_component
from paradec.core.other_names import PIPELINE_METHODS, check_method, check_setting_names, with_checked_names
from paradec.samplers.forecast.bases import Taylor
from paradec.samplers.forecast.forecast import RULES, FeatureForecast, Forecast
from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Rule, Verification
from paradec.samplers.forecast.rules import FirstBlock, MagCache, SeaCache
from paradec.samplers.forecast.targets import Modules

LITE = {"order": 2, "where": "output", "first_enhance": 3}


@dataclass(frozen=True)
class TaylorSeer(FeatureForecast):
    """TaylorSeer (Liu et al., arXiv 2503.06923, section 3): evaluate every N-th step.

    k steps after the evaluation at t, F(t - k) = sum_{i <= O} D_i F(t) k^i / i!, where D_i are backward differences.
    Equal to `Forecast(when=Every(interval, first_enhance), how=Taylor(order), where="module")`. The presets "paper" and
    "flux" are the public code's schedule for FLUX.1-dev. For Wan and HunyuanVideo that code spaces steps evenly. The
    presets "lite_*" have where="output".

    Args:
        interval: N; None means 5, or 2 in runs of at most 8 steps.
        order: O, the highest derivative in the expansion; 0 reuses the last feature.
        first_enhance: number of evaluated solver steps at the start.
        where, max_memory: as in `Forecast`. Other settings of `Forecast` raise TypeError.
    """

    interval: int | None = None
    order: int = 1
    _: KW_ONLY
    first_enhance: int = 1
    where: str | Modules | None = None
    max_memory: int | str | None = None

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
        if "when" in settings or "how" in settings:
            raise TypeError("TaylorSeer has no settings 'when' and 'how'; write paradec.Forecast(when=..., how=...)")
        check_setting_names(cls.__name__, settings, [field.name for field in fields(cls)])
        return super().__new__(cls, *args, **settings)

    def __post_init__(self) -> None:
        forecast = self.to_forecast()  # checks the settings
        object.__setattr__(self, "where", forecast.where)
        object.__setattr__(self, "max_memory", forecast.max_memory)

    def to_forecast(self) -> Forecast:
        when = Every(self.interval, self.first_enhance)
        return Forecast(when, Taylor(self.order), self.where, max_memory=self.max_memory)


@with_checked_names
def TeaCache(
    threshold: float = 0.2, coefficients: Sequence[float] = (1.0, 0.0), max_forecasts: int | None = None
) -> Forecast:
    """TeaCache (Liu et al., CVPR 2025, arXiv 2411.19108): skip all blocks while the input has changed little.

    Blocks are skipped while sum_t poly(|m_t - m_{t-1}| / |m_{t-1}|) < threshold, where m is the modulated input of the
    first block. The residual of all blocks is reused. The last step is always evaluated.

    Args:
        threshold: limit of the sum. The paper has 0.1 ("slow") and 0.2 ("fast") for Open-Sora.
        coefficients: coefficients of poly, highest power first; (1, 0) is x. The paper fits them for each model; FLUX
            has (498.651651, -283.781631, 55.8554382, -3.82021401, 0.264230861).
        max_forecasts: limit of consecutive skipped steps; None: no limit.
    """
    values: Any = coefficients
    return Forecast(AccumulatedChange(threshold, values, max_forecasts, "modulated", last_steps=1), "reuse", "stack")


@with_checked_names
def SpeCa(
    base_threshold: float = 0.3,
    decay_rate: float = 0.3,
    min_forecasts: int = 1,
    max_forecasts: int = 8,
    order: int = 1,
    first_enhance: int = 1,
) -> Forecast:
    """SpeCa (Liu et al., ACM MM 2025, arXiv 2509.11628): TaylorSeer's forecasts, verified in the last block.

    order: order of the Taylor expansion. The other arguments are those of `Verification`.
    """
    rule = Verification(base_threshold, decay_rate, min_forecasts, max_forecasts, first_enhance)
    return Forecast(rule, Taylor(order), "module")


@with_checked_names
def FoCa(interval: int | None = None, first_enhance: int = 1) -> Forecast:
    """FoCa in cache-dit's form: the schedule `Every(interval, first_enhance)` with the basis "foca"."""
    return Forecast(Every(interval, first_enhance), "foca", "module")


def ReCAP(**settings: Any) -> Any:
    """ReCAP (arXiv 2505.19089), for AmusedPipeline: partial and full steps. Settings: those of sampler "recap"."""
    from paradec import samplers

    return samplers.create("recap", **settings)


METHODS: Mapping[str, Callable[..., Any]] = {
    "taylorseer": TaylorSeer,
    "teacache": TeaCache,
    "speca": SpeCa,
    "foca": FoCa,
    "recap": ReCAP,
    "forecast": Forecast,
    **RULES,
}
"""Methods by name; case, "_" and "-" are ignored."""


def find_method_name(name: str) -> str | None:
    """Return the name in `METHODS` for a method's name in paradec or another tool, in any case; None if unknown."""
    methods = PIPELINE_METHODS | {plain_name(method): method for method in METHODS}
    return methods.get(plain_name(name))


def method_from(text: str, settings: Mapping[str, Any]) -> Any:
    """Make a sampler or rule from its name, possibly with settings: "taylorseer(interval=3)". Raises ValueError."""
    name, text_settings = parse_component("sampler", text) if "(" in text else (text.strip(), {})
    method = find_method_name(name)
    if method is None:
        raise ValueError(unknown_name("sampler", name, METHODS))
    settings = {**text_settings, **settings}
    make = METHODS[method]
    if make is not ReCAP:  # `ReCAP` checks its settings
        allowed = list(inspect.signature(make).parameters)
        if isinstance(make, type):
            allowed = [field.name for field in fields(make)]
        check_setting_names(method, settings, allowed, ValueError, make.__name__)
    return make(**settings)


def sampler_from(value: Any, settings: Mapping[str, Any] | None = None) -> FeatureForecast | Any:
    """Make the sampler to attach to a pipeline: a `FeatureForecast`, or the sampler "recap".

    value: a sampler, a rule, a name with `settings`, or a config of diffusers (`TaylorSeerCacheConfig`, ...); None:
    `TaylorSeer()`. Raises TypeError for another value, ValueError as `method_from` or for an unsupported config.
    """
    if settings and not isinstance(value, str | None):
        raise TypeError(
            f"{next(iter(settings))}=... needs a method's name; sampler={short_repr(value)} is already set up"
        )
    if type(value).__name__ in CONFIGS:
        method: Any = CONFIGS[type(value).__name__](value)
    else:
        check_method(value)
        method = method_from(value or "taylorseer", settings or {}) if isinstance(value, str | None) else value
    if isinstance(method, Rule):
        method = Forecast(method)
    if not isinstance(method, FeatureForecast) and getattr(method, "name", None) != "recap":
        raise TypeError(
            f"sampler={short_repr(value)} is not for pipelines: it must be {', '.join(map(repr, METHODS))}, by name or "
            f"as an object, or a config of diffusers ({', '.join(CONFIGS)}); or give cache='block' without a sampler"
        )
    return method


def _taylorseer_config(config: Any) -> Forecast:
    when = Every(config.cache_interval, config.disable_cache_before_step, "diffusers", config.disable_cache_after_step)
    how = Taylor(config.max_order, config.taylor_factors_dtype)
    if config.use_lite_mode:
        return Forecast(when, how, "output")
    skipped = tuple(config.skip_predict_identifiers or ())
    attention = r"((single_|temporal_)?transformer_)?blocks.*attn"  # modules that diffusers hooks by default
    return Forecast(when, how, Modules(tuple(config.cache_identifiers or (attention,)), skipped))


def _magcache_config(config: Any) -> Any:
    if config.calibrate:
        raise ValueError("calibrate=True: use paradec.integrations.diffusers.calibration.calibrate_magcache")
    return _with_same_settings(MagCache, config)


def _with_same_settings(rule: Any, config: Any) -> Any:
    return rule(**{field.name: getattr(config, field.name) for field in fields(rule)})


CONFIGS: Mapping[str, Callable[[Any], Forecast | Rule]] = {
    "TaylorSeerCacheConfig": _taylorseer_config,
    "FirstBlockCacheConfig": lambda config: FirstBlock(config.threshold),
    "MagCacheConfig": _magcache_config,
    "SeaCacheConfig": partial(_with_same_settings, SeaCache),
}
"""Configs of diffusers by class name; latents equal those of `enable_cache`."""

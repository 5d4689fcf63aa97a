"""`Forecast`, the general sampler of the family."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from paradec.core.checks import check_bytes, check_choice, check_int, short_repr
from paradec.core.component_text import parse_component
from paradec.core.other_names import FORECAST_SETTINGS
from paradec.samplers.forecast.base import FeatureForecast
from paradec.samplers.forecast.bases import Basis, basis_from
from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Rule, SavedAsJson, Verification
from paradec.samplers.forecast.rules import DBCache, DiCache, EasyCache, FirstBlock, MagCache, SeaCache
from paradec.samplers.forecast.step_schedule import MASKS, BlockSchedule, StepMask, StepSchedule
from paradec.samplers.forecast.targets import Modules, where_from

RULES: Mapping[str, Any] = {
    rule.name: rule
    for rule in (
        *(Every, StepMask, Verification, AccumulatedChange),
        *(FirstBlock, DBCache, MagCache, DiCache, SeaCache, EasyCache),
    )
}


@dataclass(frozen=True)
class Forecast(FeatureForecast):
    """Evaluate some solver steps, and forecast the others from evaluated features.

    In a diffusers pipeline (`paradec.accelerate`) features are inside the transformer. paradec's own loop forecasts the
    whole output, after guidance. Raises ValueError for an invalid value or settings that exclude each other.

    Args:
        when: which steps are evaluated. Schedules: `Every` (the default), a list of steps from 0, cache-dit's step mask
            "slow", "medium", "fast" or "ultra", a `StepSchedule`, a `BlockSchedule`, or a file of either. Other rules:
            `Verification`, those of `rules`, a method (`TeaCache(...)`). As text: "every(interval=6, first_enhance=3)".
        how: "taylor", "newton", "hermite", "reuse", "foca" or "dmd", with settings in parentheses, or a basis of
            `bases`. None: the basis published with `when`, or "taylor".
        where: features to forecast: "module" (attention and feed-forward outputs before their gates), "block" (each
            block's residual), "stack" (the sum of all residuals), "output" (of the transformer; needs least memory), or
            patterns of module names (`targets.Modules`). None: "module" in a pipeline, or as `when` requires.
        order: replaces the order of `how`; 0 reuses the last feature.
        max_memory: limit of the histories in a pipeline, in bytes or as a text such as "2GB". If the histories at full
            order need more, the run's first evaluation raises ValueError.
    """

    when: FeatureForecast | Rule | Sequence[int] | str | None = None
    how: Basis | str | None = None
    where: str | Modules | None = None
    order: int | None = None
    max_memory: int | str | None = None

    name = "forecast"
    summary = "some solver steps skip the transformer; its features are forecast"

    def __post_init__(self) -> None:
        if isinstance(self.when, FeatureForecast):
            method = self.when.to_forecast()
            for name in ("when", *(name for name in FORECAST_SETTINGS if getattr(self, name) is None)):
                object.__setattr__(self, name, getattr(method, name))
        for name, parse in (("when", rule_from), ("how", basis_from), ("where", where_from)):
            object.__setattr__(self, name, parse(getattr(self, name)))
        object.__setattr__(self, "max_memory", check_bytes("max_memory", self.max_memory))
        check_int("order", self.order, low=0, none=True)
        rule, where = self.rule, self.where
        if rule.where is not None and where not in (None, rule.where):
            raise ValueError(f"when={rule.name!r} needs where={rule.where!r}; leave where={short_repr(where)} out")
        watch = rule.watch if isinstance(rule, AccumulatedChange) else None
        if watch in ("modulated", "hidden") and where == "output":
            raise ValueError(f"watch={watch!r} is inside the transformer, which where='output' skips; use 'latent'")
        if watch is not None and isinstance(where, Modules):
            raise ValueError(f"watch={watch!r} does not go with a list of module patterns in where; leave one out")

    def to_forecast(self) -> Forecast:
        return self


def rule_from(value: Any) -> Rule | None:
    """Make a rule from steps, a step mask's name, a file (".json"), a rule's name ("first_block(threshold=0.05)") or
    its `to_dict`; return rules and None unchanged. Raises ValueError for anything else."""
    if value is None or isinstance(value, Rule):
        return value
    if isinstance(value, (list, tuple, range)):
        return StepSchedule(tuple(value))
    if isinstance(value, int):
        raise ValueError(f"when={short_repr(value)} must be a rule, such as Every({short_repr(value)})")
    data = value
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(".json")):
        data = SavedAsJson.read(value)
    elif isinstance(value, str):
        name, settings = parse_component("when", value) if "(" in value else (value, {})
        data = {"when": "step_mask", "mask": value} if value in MASKS else {"when": name, **settings}
    if not isinstance(data, Mapping):
        classes = ", ".join(f"{rule.__name__}(...)" for rule in RULES.values())
        raise ValueError(
            f"when={short_repr(value)} must be one of {classes}, one of their names, a list of evaluated steps, a "
            f".json file of steps, or a step mask: {', '.join(MASKS)}"
        )
    if "when" not in data:
        return (BlockSchedule if "modules" in data else StepSchedule).from_dict(data)
    settings = dict(data)
    name = settings.pop("when")
    check_choice("when", name, RULES)
    for key in settings:
        check_choice(f"setting of when={name!r}", key, [field.name for field in fields(RULES[name])])
    rule: Rule = RULES[name](**settings)
    return rule

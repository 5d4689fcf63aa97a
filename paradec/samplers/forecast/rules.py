"""Values of `Forecast(when=...)`: schedules and rules that say when to evaluate instead of forecast, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from paradec.core.checks import shown
from paradec.core.component_text import parse_component
from paradec.core.registry import unknown
from paradec.samplers.forecast.bac import BlockSchedule
from paradec.samplers.forecast.dicache import DiCache
from paradec.samplers.forecast.easycache import EasyCache
from paradec.samplers.forecast.first_block import DBCache, FirstBlock
from paradec.samplers.forecast.magcache import MagCache
from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Rule, SavedAsJson, Verification
from paradec.samplers.forecast.seacache import SeaCache
from paradec.samplers.forecast.step_masks import MASKS, StepMask
from paradec.samplers.forecast.step_schedule import StepSchedule

RULES: Mapping[str, Any] = {
    rule.name: rule
    for rule in (
        *(Every, StepMask, Verification, AccumulatedChange),
        *(FirstBlock, DBCache, MagCache, DiCache, SeaCache, EasyCache),
    )
}


def rule_from(value: Any) -> Rule | None:
    """A rule from a list of steps, a step mask's name, a file of steps (".json"), a rule's name, perhaps with settings
    ("first_block(threshold=0.05)"), or its `to_dict`; rules and None are returned. Raises ValueError otherwise."""
    if value is None or isinstance(value, Rule):
        return value
    if isinstance(value, (list, tuple, range)):
        return StepSchedule(tuple(value))
    if isinstance(value, int):
        raise ValueError(f"when={shown(value)}: one step in so many is Every({shown(value)})")
    data = value
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(".json")):
        data = SavedAsJson.read(value)
    elif isinstance(value, str):
        name, settings = parse_component("when", value) if "(" in value else (value, {})
        data = {"when": "step_mask", "mask": value} if value in MASKS else {"when": name, **settings}
    if not isinstance(data, Mapping):
        classes = ", ".join(f"{rule.__name__}(...)" for rule in RULES.values())
        raise ValueError(
            f"when={shown(value)} must be one of {classes}, one of their names, the evaluated steps, a file of them "
            f"(.json), or a step mask: {', '.join(MASKS)}"
        )
    if "when" not in data:
        return (BlockSchedule if "modules" in data else StepSchedule).from_dict(data)
    settings = dict(data)
    name = settings.pop("when")
    if not isinstance(name, str) or name not in RULES:
        raise ValueError(unknown("when", name, RULES))
    allowed = [field.name for field in fields(RULES[name])]
    for key in settings:
        if key not in allowed:
            raise ValueError(unknown(f"setting of when={name!r}", key, allowed))
    rule: Rule = RULES[name](**settings)
    return rule

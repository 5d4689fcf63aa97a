"""The rules that measure when to evaluate instead of forecast, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.core.called import called
from paradec.core.checks import shown
from paradec.core.registry import unknown
from paradec.samplers.forecast.dicache import DiCache
from paradec.samplers.forecast.easycache import EasyCache
from paradec.samplers.forecast.first_block import DBCache, FirstBlock
from paradec.samplers.forecast.magcache import MagCache
from paradec.samplers.forecast.probes import Probe
from paradec.samplers.forecast.refresh import AccumulatedChange, StepRule, Verification
from paradec.samplers.forecast.seacache import SeaCache

Rule = StepRule | Probe
RULES: Mapping[str, Any] = {
    rule.name: rule
    for rule in (Verification, AccumulatedChange, FirstBlock, DBCache, MagCache, DiCache, SeaCache, EasyCache)
}


def refresh_from(value: Any) -> Rule | None:
    """A rule from itself, its name ("first_block", "first_block(threshold=0.05)"), or its `to_dict`; None is none.

    Raises:
        ValueError: something else, or a setting that the rule has not.
    """
    if value is None or isinstance(value, Rule):
        return value
    given = value
    if isinstance(value, str):
        name, settings = called("refresh", value) if "(" in value else (value, {})
        given = {"refresh": name, **settings}
    if not isinstance(given, Mapping) or "refresh" not in given:
        classes = ", ".join(f"{rule.__name__}(...)" for rule in RULES.values())
        raise ValueError(f"refresh={shown(value)} must be one of {classes}, or one of their names")
    if not isinstance(given["refresh"], str) or given["refresh"] not in RULES:
        raise ValueError(unknown("refresh", given["refresh"], RULES))
    rule = RULES[given["refresh"]]
    settings = {key: entry for key, entry in given.items() if key != "refresh"}
    for key in settings:
        if key not in rule.__dataclass_fields__:
            raise ValueError(unknown(f"setting of refresh {rule.name!r}", key, rule.__dataclass_fields__))
    found: Rule = rule(**settings)
    return found

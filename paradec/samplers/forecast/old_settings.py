"""Settings that `TaylorSeer` had before `refresh`, `basis` and `target` said all, and what such a call is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.core.checks import shown

SCHEDULE = {"interval": 5, "first_enhance": 1, "style": "reference", "full_after": None}
"""What a schedule consisted of, with its defaults."""
BASIS = {"sigma": 0.5, "window": 6, "derivative_dtype": None}
OLD = frozenset({*SCHEDULE, *BASIS, "full_steps", "schedule", "modules", "skip"} - {"interval"})


def spelled(old: Mapping[str, Any]) -> str:
    """What a call with these old settings (or saved ones) is told: which are old, and the call as it is written now."""
    given = {key: value for key, value in old.items() if value is not None}
    changed = {key: given[key] for key, default in SCHEDULE.items() if given.get(key, default) != default}
    when = next((given[key] for key in ("full_steps", "schedule", "refresh") if key in given), None)
    new: dict[str, str] = {}
    if when is not None:
        new["refresh"] = shown(when)
    elif set(changed) - {"interval"}:
        new["refresh"] = repr(f"every({_settings(changed)})")
    elif changed:
        new["interval"] = shown(changed["interval"])
    own = {key: given[key] for key, default in BASIS.items() if given.get(key, default) != default}
    own = {"dtype" if key == "derivative_dtype" else key: value for key, value in own.items()}
    if own or "basis" in given:
        name = given.get("basis", "taylor")
        new["basis"] = repr(f"{name}({_settings(own)})" if own else name)
    if "skip" in given:
        new["target"] = shown({key: given[key] for key in ("modules", "skip") if key in given})
    elif "modules" in given:
        new["target"] = shown([given["modules"]] if isinstance(given["modules"], str) else list(given["modules"]))
    new |= {key: shown(given[key]) for key in ("target", "order", "max_memory") if key in given and key not in new}
    if when is not None and "first_enhance" in changed:
        new["refresh"] += f" with first_enhance={changed['first_enhance']} of its own"
    names = ", ".join(sorted(OLD & set(given)) or sorted(OLD & set(old)))
    call = ", ".join(f"{key}={value}" for key, value in new.items())
    return f"TaylorSeer has no {names} any more: refresh says when, basis how, target what; write TaylorSeer({call})"


def _settings(given: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in given.items())

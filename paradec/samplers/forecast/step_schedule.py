"""Evaluated steps as lists: for all modules (any steps, or those of `paradec.tune_steps`), or for each module (BAC)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paradec.core.checks import LARGEST_INT, check_int, shown
from paradec.samplers.forecast.refresh import Rule, RunProgress, SavedAsJson, StepRule, integer, number
from paradec.samplers.forecast.targets import Modules, where_from

SCHEMA = "paradec-steps/1"


@dataclass(frozen=True)
class StepSchedule(SavedAsJson, StepRule):
    """Evaluated steps, ascending from step 0, and the run that they are for; None stands for any.

    Args:
        total: solver steps of the run.
        scheduler: the class of its scheduler.
        guidance: its guidance scale.
        where: what is forecast (`Forecast.where`).
    """

    steps: tuple[int, ...]
    total: int | None = integer(None, low=1, none=True)
    scheduler: str | None = None
    guidance: float | None = number(None, none=True)
    where: str | Modules | None = None

    name = "steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "steps", check_steps("when", self.steps, self.total))
        object.__setattr__(self, "where", where_from(self.where))
        if not isinstance(self.scheduler, str | None):
            raise ValueError(f"scheduler={shown(self.scheduler)} must be the name of a class, or None")

    def is_full(self, progress: RunProgress) -> bool:
        return progress.index in self.steps

    def check_run(self, total: int | None, scheduler: Any = None, guidance: float | None = None) -> list[str]:
        scheduler_name = None if scheduler is None else type(scheduler).__name__
        unknown = []
        for name, actual, expected in (
            ("steps", total, self.total),
            ("scheduler", scheduler_name, self.scheduler),
            ("guidance_scale", guidance, self.guidance),
        ):
            if expected is not None and actual is None:
                unknown.append(name)
            elif expected not in (None, actual):
                raise ValueError(
                    f"refresh: these steps were found for runs of {name} {expected}, and this one has {actual}; find "
                    "others with paradec.tune_steps, or give the steps themselves"
                )
        return unknown

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "steps": list(self.steps)}

    @classmethod
    def from_dict(cls, data: Any) -> StepSchedule:
        fields = {} if not isinstance(data, Mapping) else {key: data[key] for key in data if key != "schema"}
        if not {"steps", "total"} <= set(fields) <= set(cls.__dataclass_fields__) or data.get("schema") != SCHEMA:
            raise ValueError(f"when={shown(data)} is no schedule of {SCHEMA}")
        return cls(**fields)


@dataclass(frozen=True)
class BlockSchedule(SavedAsJson, Rule):
    """Steps at which each module is evaluated: BAC (Ji et al., ICLR 2026, arXiv 2506.13456).

    Between them a module's last output is reused, or forecast by another basis. `hooks.bac.calibrate` finds the steps.

    Args:
        steps: solver steps of the run.
        modules: pairs (name in the transformer, ascending steps from 0), in the order of evaluation.
    """

    steps: int
    modules: tuple[tuple[str, tuple[int, ...]], ...]

    name = "bac"
    how = "reuse"
    where = "module"

    def __post_init__(self) -> None:
        check_int("steps", self.steps, low=1)
        if not self.modules or len(dict(self.modules)) != len(self.modules):
            raise ValueError(f"modules={shown(self.modules)} must name at least one module, and each once")
        modules = tuple((name, check_steps(f"steps of {name!r}", steps, self.steps)) for name, steps in self.modules)
        object.__setattr__(self, "modules", modules)

    def as_dict(self) -> dict[str, frozenset[int]]:
        return {name: frozenset(steps) for name, steps in self.modules}

    def check_run(self, total: int | None, scheduler: Any = None, guidance: float | None = None) -> list[str]:
        if total not in (None, self.steps):
            raise ValueError(f"refresh was made for runs of {self.steps} steps; this one has {total}")
        return []

    def to_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "modules": {name: list(steps) for name, steps in self.modules}}

    @classmethod
    def from_dict(cls, data: Any) -> BlockSchedule:
        modules = data.get("modules") if isinstance(data, Mapping) and set(data) == {"steps", "modules"} else None
        if not isinstance(modules, Mapping):
            raise ValueError(f'when={shown(data)} must be {{"steps": n, "modules": {{name: [0, ...]}}}}')
        return cls(data["steps"], tuple(modules.items()))


def check_steps(name: str, steps: Any, total: int | None) -> tuple[int, ...]:
    """Return a sequence of steps as a tuple. Raises ValueError unless they ascend from 0 and are below `total`."""
    values = tuple(steps) if isinstance(steps, (list, tuple, range)) else ()
    for step in values:
        check_int(name, step, low=0, high=LARGEST_INT if total is None else total - 1)
    if 0 not in values or sorted(set(values)) != list(values):
        raise ValueError(f"{name}={shown(steps)} must be ascending steps that begin with 0, each once")
    return values

"""Evaluated steps as a list, for any run or those of a search (`paradec.tune_steps`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paradec.core.checks import LARGEST_INT, check_int, shown
from paradec.samplers.forecast.refresh import RunProgress, SavedAsJson, StepRule, integer, number
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
        steps = tuple(self.steps) if isinstance(self.steps, (list, tuple, range)) else ()
        for step in steps:
            check_int("when", step, low=0, high=LARGEST_INT if self.total is None else self.total - 1)
        object.__setattr__(self, "where", where_from(self.where))
        if not isinstance(self.scheduler, str | None):
            raise ValueError(f"scheduler={shown(self.scheduler)} must be the name of a class, or None")
        if 0 not in steps or sorted(set(steps)) != list(steps):
            raise ValueError(f"when={shown(self.steps)} must be ascending steps that begin with 0, each once")
        object.__setattr__(self, "steps", steps)

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

"""The evaluated steps themselves, perhaps found for one kind of run (`paradec.tune_steps`), and the file of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paradec.core.checks import LARGEST_INT, check_int, check_number, shown
from paradec.core.text_files import write_json
from paradec.samplers.forecast.refresh import RunProgress, StepRule, read_schedule
from paradec.samplers.forecast.targets import Modules, where_from

SCHEMA = "paradec-steps/1"


@dataclass(frozen=True)
class StepSchedule(StepRule):
    """Steps to evaluate, which may be bound to the runs that they were found for.

    Args:
        steps: ascending, step 0 among them.
        total: solver steps of these runs, or None for any.
        scheduler: the class of their scheduler, or None for any.
        guidance: their guidance scale, or None for any.
        where: what was forecast (`Forecast.where`), or None for any.

    Raises:
        ValueError: an argument out of its range.
    """

    steps: tuple[int, ...]
    total: int | None = None
    scheduler: str | None = None
    guidance: float | None = None
    where: str | Modules | None = None

    name = "steps"

    def __post_init__(self) -> None:
        check_int("total", self.total, low=1, none=True)
        steps = tuple(self.steps) if isinstance(self.steps, (list, tuple, range)) else ()
        for step in steps:
            check_int("when", step, low=0, high=LARGEST_INT if self.total is None else self.total - 1)
        check_number("guidance", self.guidance, none=True)
        object.__setattr__(self, "where", where_from(self.where))
        if not isinstance(self.scheduler, str | None):
            raise ValueError(f"scheduler={shown(self.scheduler)} must be the name of a class, or None")
        if 0 not in steps or sorted(set(steps)) != list(steps):
            raise ValueError(f"when={shown(self.steps)} must be ascending steps that begin with 0, each once")
        object.__setattr__(self, "steps", steps)

    def is_full(self, course: RunProgress) -> bool:
        return course.index in self.steps

    def check_run(self, total: int | None, **run: Any) -> None:
        """Raise ValueError for a run that the steps were not found for; what is None is not known and not compared."""
        for name, found, own in self._compared(total, **run):
            if found is not None and found != own:
                raise ValueError(
                    f"refresh: these steps were found for runs of {name} {own}, and this one has {found}; find others "
                    "with paradec.tune_steps, or give the steps themselves"
                )

    def untold(self, total: int | None, **run: Any) -> list[str]:
        """What the steps are bound to, and a run does not tell."""
        return [name for name, found, _ in self._compared(total, **run) if found is None]

    def _compared(
        self, total: int | None, scheduler: Any = None, guidance: float | None = None
    ) -> list[tuple[str, Any, Any]]:
        """(name, the run's, our own) of all that the steps are bound to."""
        kind = None if scheduler is None else type(scheduler).__name__
        pairs = (
            ("steps", total, self.total),
            ("scheduler", kind, self.scheduler),
            ("guidance_scale", guidance, self.guidance),
        )
        return [pair for pair in pairs if pair[2] is not None]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in the file."""
        return {"schema": SCHEMA, **asdict(self), "steps": list(self.steps)}

    @classmethod
    def from_dict(cls, data: Any) -> StepSchedule:
        """Inverse of `to_dict`.

        Raises:
            ValueError: data of another form.
        """
        fields = {} if not isinstance(data, Mapping) else {key: data[key] for key in data if key != "schema"}
        if not {"steps", "total"} <= set(fields) <= set(cls.__dataclass_fields__) or data.get("schema") != SCHEMA:
            raise ValueError(f"when={shown(data)} is no schedule of {SCHEMA}")
        return cls(**fields)

    def save(self, path: str | Path) -> None:
        """Write the schedule as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> StepSchedule:
        """Read a file that `save` wrote.

        Raises:
            ValueError: no such file, or not of this form.
        """
        return cls.from_dict(read_schedule(path))

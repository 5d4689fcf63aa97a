"""Fixed schedules: lists of evaluated steps (for example from `paradec.tune_steps`), lists for each module (BAC), and
cache-dit's step masks ("SCM"), with the names, numbers and rules of its version 1.5.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import cycle
from typing import Any

from paradec.core.checks import LARGEST_INT, check_choice, check_int, short_repr
from paradec.samplers.forecast.refresh import Rule, RunProgress, SavedAsJson, StepRule, choice, integer, number
from paradec.samplers.forecast.targets import Modules, where_from

SCHEMA = "paradec-steps/1"


@dataclass(frozen=True)
class StepSchedule(SavedAsJson, StepRule):
    """Evaluated steps, ascending from 0, of runs with the given properties (None: of all runs).

    Args:
        total: number of solver steps of a run.
        scheduler: class name of the run's scheduler.
        guidance: the run's guidance scale.
        where: default of `Forecast.where`.
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
            raise ValueError(f"scheduler={short_repr(self.scheduler)} must be the name of a scheduler class, or None")

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
                    f"when: these steps were tuned for runs with {name}={expected}; this run has {name}={actual}; tune "
                    "others with paradec.tune_steps, or give a list of steps"
                )
        return unknown

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self), "steps": list(self.steps)}

    @classmethod
    def from_dict(cls, data: Any) -> StepSchedule:
        settings = {} if not isinstance(data, Mapping) else {key: data[key] for key in data if key != "schema"}
        if not {"steps", "total"} <= set(settings) <= set(cls.__dataclass_fields__) or data.get("schema") != SCHEMA:
            raise ValueError(f"when={short_repr(data)} is not a schedule of schema {SCHEMA}")
        return cls(**settings)


@dataclass(frozen=True)
class BlockSchedule(SavedAsJson, Rule):
    """Evaluated steps of each module: BAC (Ji et al., ICLR 2026, arXiv 2506.13456).

    In the other steps a module's last output is reused, or forecast by another basis. `calibrate_bac` finds the steps.

    Args:
        steps: number of solver steps of the run.
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
            raise ValueError(f"modules={short_repr(self.modules)} must name at least one module, each name once")
        modules = tuple((name, check_steps(f"steps of {name!r}", steps, self.steps)) for name, steps in self.modules)
        object.__setattr__(self, "modules", modules)

    def as_dict(self) -> dict[str, frozenset[int]]:
        return {name: frozenset(steps) for name, steps in self.modules}

    def check_run(self, total: int | None, scheduler: Any = None, guidance: float | None = None) -> list[str]:
        if total not in (None, self.steps):
            raise ValueError(f"when: this schedule was made for runs of {self.steps} steps; this one has {total}")
        return []

    def to_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "modules": {name: list(steps) for name, steps in self.modules}}

    @classmethod
    def from_dict(cls, data: Any) -> BlockSchedule:
        modules = data.get("modules") if isinstance(data, Mapping) and set(data) == {"steps", "modules"} else None
        if not isinstance(modules, Mapping):
            raise ValueError(f'when={short_repr(data)} must be {{"steps": n, "modules": {{name: [0, ...]}}}}')
        return cls(data["steps"], tuple(modules.items()))


def check_steps(name: str, steps: Any, total: int | None) -> tuple[int, ...]:
    """Return a sequence of steps as a tuple. Raises ValueError unless they ascend from 0 and are below `total`."""
    values = tuple(steps) if isinstance(steps, (list, tuple, range)) else ()
    for step in values:
        check_int(name, step, low=0, high=LARGEST_INT if total is None else total - 1)
    if 0 not in values or sorted(set(values)) != list(values):
        raise ValueError(f"{name}={short_repr(steps)} must be strictly ascending steps that start with 0")
    return values


# lengths of the evaluated and skipped segments, in turn, for runs of 28 steps; runs of 16 and more steps scale them
MASKS: dict[str, tuple[int, ...]] = {
    "slow": (8, 1, 3, 2, 3, 2, 2, 2, 1, 3, 1),
    "medium": (6, 1, 2, 3, 2, 3, 2, 3, 2, 3, 1),
    "fast": (6, 1, 1, 3, 1, 4, 1, 5, 1, 4, 1),
    "ultra": (4, 2, 1, 5, 1, 6, 1, 7, 1),
}
# the same for shorter runs, by their number of steps; runs of 10 to 14 steps shorten the masks for 15 steps
SHORT: dict[int, dict[str, tuple[int, ...]]] = {
    15: {
        "slow": (4, 1, 2, 1, 2, 1, 2, 1, 1),
        "medium": (4, 1, 2, 1, 1, 2, 1, 2, 1),
        "fast": (3, 1, 1, 2, 1, 2, 1, 3, 1),
        "ultra": (2, 1, 1, 2, 1, 3, 1, 3, 1),
    },
    9: {"slow": (5, 1, 3), "medium": (5, 1, 1, 1, 1), "fast": (4, 1, 1, 2, 1), "ultra": (3, 2, 1, 2, 1)},
    8: {"slow": (5, 1, 2), "medium": (4, 1, 1, 1, 1), "fast": (3, 1, 1, 2, 1), "ultra": (2, 2, 1, 2, 1)},
    6: dict.fromkeys(MASKS, (3, 2, 1)),
    4: dict.fromkeys(MASKS, (2, 1, 1)),
}


@dataclass(frozen=True)
class StepMask(StepRule):
    """Evaluate the steps of a named mask, scaled to the length of the run (`step_mask`)."""

    mask: str = choice("", *MASKS)

    name = "step_mask"

    @property
    def why_total_needed(self) -> str:
        return f"when={self.mask!r} needs a pipeline, or when=step_mask({self.mask!r}, steps) of {__name__}"

    def check_run(self, total: int | None, scheduler: Any = None, guidance: float | None = None) -> list[str]:
        unknown = super().check_run(total)
        step_mask(self.mask, total or 0)
        return unknown

    def is_full(self, progress: RunProgress) -> bool:
        assert progress.total is not None
        return progress.index in step_mask(self.mask, progress.total)


@lru_cache(maxsize=64)
def step_mask(name: str, steps: int) -> tuple[int, ...]:
    """Return the evaluated steps of a named mask, from 0; the last step is always evaluated.

    Args:
        name: "slow" (18 of 28 steps are evaluated), "medium" (15), "fast" (11) or "ultra" (8).
        steps: number of solver steps: 4, 6, or at least 8; else ValueError. Of 16 steps, "ultra" evaluates 3.
    """
    check_choice("when", name, MASKS)
    check_int("steps", steps, low=1)
    if steps < 8 and steps not in SHORT:
        raise ValueError(f"when={name!r}: there is no mask for {steps} steps; use 4, 6, or at least 8 steps")
    segments = list((MASKS if steps >= 16 else SHORT[min(length for length in SHORT if length >= steps)])[name])
    # too short: lengthen the segments in turn, each by half of its length scaled to `steps`, the last segment by 1
    share = steps / sum(segments) * 0.5
    increments = [max(int(length * share), 1) for length in segments[:-1]] + [1]
    for i in cycle(range(len(segments))):
        if sum(segments) >= steps:
            break
        segments[i] += increments[i]
    # too long: shorten the last skipped and the last evaluated segment in turn, by one step
    for first_segment in cycle((1, 0)):
        if sum(segments) == steps:
            break
        remaining = [i for i in range(first_segment, len(segments), 2) if segments[i]]
        if remaining:
            segments[remaining[-1]] -= 1
    is_evaluated = [i % 2 == 0 for i, length in enumerate(segments) for _ in range(length)]
    return tuple(step for step in range(steps) if is_evaluated[step] or step == steps - 1)

"""Step masks of cache-dit ("SCM"): which solver steps are evaluated, most of them at the start of a run.

Masks for 28 steps are cut or stretched to other lengths; short runs have other masks. Names, figures and rules are
those of cache-dit 1.5.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import Any

from paradec.core.checks import check_choice, check_int
from paradec.samplers.forecast.refresh import RunProgress, StepRule, choice

Runs = tuple[int, ...]  # lengths of the runs of evaluated and of skipped steps, in turn

MASKS: dict[str, Runs] = {  # at 28 steps, for 16 steps and more
    "slow": (8, 1, 3, 2, 3, 2, 2, 2, 1, 3, 1),
    "medium": (6, 1, 2, 3, 2, 3, 2, 3, 2, 3, 1),
    "fast": (6, 1, 1, 3, 1, 4, 1, 5, 1, 4, 1),
    "ultra": (4, 2, 1, 5, 1, 6, 1, 7, 1),
}
SHORT: dict[int, dict[str, Runs]] = {  # by the number of steps; 10 to 14 are cut from 15
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
    """Evaluate the steps of a named mask, cut or stretched to the run (`step_mask`)."""

    mask: str = choice("", *MASKS)

    name = "step_mask"

    @property
    def needs_total(self) -> str:
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
    """Return the evaluated steps of a named mask, from 0; the last step is always among them.

    Args:
        name: "slow" (18 of 28 steps are evaluated), "medium" (15), "fast" (11) or "ultra" (8).
        steps: solver steps: 4, 6, or 8 and more; else a ValueError. Of 16 steps, "ultra" evaluates 3.
    """
    check_choice("when", name, MASKS)
    check_int("steps", steps, low=1)
    if steps < 8 and steps not in SHORT:
        raise ValueError(f"when={name!r}: there is no mask for {steps} steps; 4, 6, or 8 and more have one")
    runs = list((MASKS if steps >= 16 else SHORT[min(length for length in SHORT if length >= steps)])[name])
    # too short: the runs grow in turn, by half of their shares of the new length, the last one by 1
    share = steps / sum(runs) * 0.5
    increments = [max(int(length * share), 1) for length in runs[:-1]] + [1]
    for i in cycle(range(len(runs))):
        if sum(runs) >= steps:
            break
        runs[i] += increments[i]
    # too long: the last skipped and evaluated runs shrink in turn, by single steps
    for kind in cycle((1, 0)):
        if sum(runs) == steps:
            break
        remaining = [i for i in range(kind, len(runs), 2) if runs[i]]
        if remaining:
            runs[remaining[-1]] -= 1
    flags = [i % 2 == 0 for i, length in enumerate(runs) for _ in range(length)]
    return tuple(step for step, is_full in enumerate(flags) if is_full or step == steps - 1)

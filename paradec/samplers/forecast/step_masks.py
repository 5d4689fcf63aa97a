"""Step masks of cache-dit ("SCM"): which solver steps are evaluated, most of them at the start of a run.

Masks for 28 steps are cut or stretched to other lengths; short runs have other masks. Names, figures and rules are
those of cache-dit 1.5.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, zip_longest
from typing import Any

from paradec.core.checks import check_choice, check_int
from paradec.samplers.forecast.refresh import RunProgress, StepRule, choice

Runs = tuple[tuple[int, ...], tuple[int, ...]]  # lengths of the runs of evaluated steps, and of skipped ones between

MASKS: dict[str, Runs] = {  # at 28 steps, for 16 steps and more
    "slow": ((8, 3, 3, 2, 1, 1), (1, 2, 2, 2, 3)),
    "medium": ((6, 2, 2, 2, 2, 1), (1, 3, 3, 3, 3)),
    "fast": ((6, 1, 1, 1, 1, 1), (1, 3, 4, 5, 4)),
    "ultra": ((4, 1, 1, 1, 1), (2, 5, 6, 7)),
}
SHORT: dict[int, dict[str, Runs]] = {  # by the number of steps; 10 to 14 are cut from 15
    15: {
        "slow": ((4, 2, 2, 2, 1), (1, 1, 1, 1)),
        "medium": ((4, 2, 1, 1, 1), (1, 1, 2, 2)),
        "fast": ((3, 1, 1, 1, 1), (1, 2, 2, 3)),
        "ultra": ((2, 1, 1, 1, 1), (1, 2, 3, 3)),
    },
    9: {
        "slow": ((5, 2, 1), (1,)),
        "medium": ((5, 1, 1), (1, 1)),
        "fast": ((4, 1, 1), (1, 2)),
        "ultra": ((3, 1, 1), (2, 2)),
    },
    8: {
        "slow": ((5, 1, 1), (1,)),
        "medium": ((4, 1, 1), (1, 1)),
        "fast": ((3, 1, 1), (1, 2)),
        "ultra": ((2, 1, 1), (2, 2)),
    },
    6: dict.fromkeys(MASKS, ((3, 1), (2,))),
    4: dict.fromkeys(MASKS, ((2, 1), (1,))),
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
    runs = (MASKS if steps >= 16 else SHORT[min(length for length in SHORT if length >= steps)])[name]
    full, skipped = list(runs[0]), list(runs[1])
    if steps > sum(full) + sum(skipped):
        _stretch(full, skipped, steps)
    _cut(full, skipped, steps)
    lengths = chain.from_iterable(zip_longest(full, skipped, fillvalue=0))
    flags = [turn % 2 == 0 for turn, length in enumerate(lengths) for _ in range(length)]
    return tuple(step for step, is_full in enumerate(flags) if is_full or step == steps - 1)


def _stretch(full: list[int], skipped: list[int], steps: int) -> None:
    """Lengthen the runs in turn, by half of their shares of the new length, until there are at least `steps`."""
    half = steps / (sum(full) + sum(skipped)) * 0.5
    increments = [(runs, i, max(int(runs[i] * half), 1)) for i in range(len(skipped)) for runs in (full, skipped)]
    increments.append((full, len(full) - 1, 1))
    while True:
        for runs, i, more in increments:
            runs[i] += more
            if sum(full) + sum(skipped) >= steps:
                return


def _cut(full: list[int], skipped: list[int], steps: int) -> None:
    """Shorten the last skipped and evaluated runs in turn, by single steps, until `steps` are left."""
    surplus = sum(full) + sum(skipped) - steps
    while surplus:
        for runs in (skipped, full):
            if surplus and runs:
                runs[-1] -= 1
                surplus -= 1
                if runs[-1] == 0:
                    runs.pop()

"""BAC: solver steps to evaluate, for each module of a transformer (Ji et al., ICLR 2026, arXiv 2506.13456).

As in the public code, unlike the paper's text, a segment is scored by its similarity to the features at its first step,
and the bubbling union may apply to any module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paradec.core.checks import check_int, shown
from paradec.samplers.forecast.refresh import Rule, SavedAsJson


@dataclass(frozen=True)
class BlockSchedule(SavedAsJson, Rule):
    """Steps at which each module is evaluated; between them its last output is reused, or forecast by another basis.

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
        for name, steps in self.modules:
            for step in steps:
                check_int(f"step of {name!r}", step, low=0, high=self.steps - 1)
            if not steps or steps[0] != 0 or sorted(set(steps)) != list(steps):
                raise ValueError(f"steps of {name!r}={shown(list(steps))} must be ascending and begin with 0")

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
        if not isinstance(modules, Mapping) or not all(isinstance(steps, (list, tuple)) for steps in modules.values()):
            raise ValueError(f'when={shown(data)} must be {{"steps": n, "modules": {{name: [0, ...]}}}}')
        return cls(data["steps"], tuple((str(name), tuple(steps)) for name, steps in modules.items()))


def adaptive_schedule(scores: np.ndarray, updates: int, maximise: bool = True) -> list[int]:
    """Choose the best `updates` steps to evaluate a module, beginning with step 0; ties go to the earliest.

    scores: [T, T]; entry [a, t] is how well the features of step a serve at step t. maximise: whether larger is better.
    """
    total = len(scores)
    check_int("updates", updates, low=1, high=total)
    scores = np.asarray(scores, np.float64) if maximise else -np.asarray(scores, np.float64)
    sums = np.cumsum(scores, axis=1)
    # cost[a, c]: a serves steps a to c
    cost = sums - np.take_along_axis(sums, np.arange(total)[:, None], 1) + np.diag(scores)[:, None]
    best, starts = cost[0].copy(), []
    for count in range(2, updates + 1):
        new_best, start = np.full(total, -np.inf), np.zeros(total, np.int64)
        for end in range(count - 1, total):
            totals = best[count - 2 : end] + cost[np.arange(count - 1, end + 1), end]
            start[end] = count - 1 + int(totals.argmax())
            new_best[end] = totals.max()
        best = new_best
        starts.append(start)
    steps, end = [], total - 1
    for start in reversed(starts):
        steps.append(int(start[end]))
        end = steps[-1] - 1
    return [0, *reversed(steps)]


def bubbling_union(
    steps: Mapping[str, Iterable[int]], errors: Mapping[str, float], feed_forward: Sequence[str], num_modules: int = 3
) -> dict[str, list[int]]:
    """Evaluate the modules with the largest caching errors also when a feed-forward after them is evaluated.

    steps: schedules by module, in the order of evaluation.
    errors: by module, the mean distance between its features at two steps. feed_forward: names of feed-forward modules.
    num_modules: n: modules that get the union (3 in the README, 5 in the simulations); below 2, none."""
    names = list(steps)
    united = {name: sorted(set(steps[name])) for name in names}
    if num_modules < 2:
        return united
    for name in sorted(names, key=lambda name: -errors[name])[:num_modules]:
        later = [module for module in names[names.index(name) :] if module in feed_forward]
        united[name] = sorted(set(steps[name]).union(*(steps[module] for module in later)))
    return united

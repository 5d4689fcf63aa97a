"""Which run, step and branch a call of the transformer belongs to.

A pipeline's scheduler tells: `set_timesteps` begins a run and `step` ends a solver step, whatever the number of calls
in between; that needs no cooperation of the pipeline and no wait for the device. Where there is no scheduler (a bare
transformer), a new timestep is a new step, and a timestep against the direction of the run begins the next run.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor


class Clock:
    """Counts runs and steps. `owner` is the pipeline whose `scheduler` is watched, or None."""

    def __init__(self, owner: Any = None, on_end: Callable[[], None] = lambda: None):
        self.owner = owner
        self.on_end = on_end
        self.run = 0
        """Counts the runs; a change tells the transformers to forget."""
        self.index = 0
        """The solver step."""
        self.watched: list[_Watched] = []
        self.scheduler: Any = None
        self._timestep: float | None = None
        self._direction = 0.0
        if owner is not None:
            self.watch(owner.scheduler)

    @property
    def total(self) -> int | None:
        """Solver steps of this run, as far as the scheduler knows."""
        timesteps = getattr(self.scheduler, "timesteps", None)
        return len(timesteps) if timesteps is not None else None

    def begin(self) -> None:
        """A new run."""
        self.run += 1
        self.index = 0
        self._timestep, self._direction = None, 0.0

    def advance(self) -> None:
        """The next step."""
        self.index += 1
        if self.total is not None and self.index >= self.total:
            self.on_end()

    def watch(self, scheduler: Any) -> None:
        """Watch this scheduler instead of the present one."""
        self.release()
        self.scheduler = scheduler
        if scheduler is not None:
            self.watched = [_Watched(scheduler, "set_timesteps", self.begin), _Watched(scheduler, "step", self.advance)]

    def release(self) -> None:
        """Leave the scheduler as it was."""
        for watched in self.watched:
            watched.remove()
        self.watched = []

    def see(self, timestep: Any) -> None:
        """Look at a call that is about to be made."""
        if self.owner is not None:
            if self.owner.scheduler is not self.scheduler:  # exchanged after we attached
                self.watch(self.owner.scheduler)
                self.begin()
            return
        if not isinstance(timestep, (Tensor, int, float)):
            raise ValueError(
                "without a pipeline, steps are told from the transformer's argument timestep, and this call has none; "
                "attach to the pipeline instead"
            )
        value = float(timestep.flatten()[0]) if isinstance(timestep, Tensor) else float(timestep)
        if self._timestep is None:
            if self.run == 0:
                self.begin()
        elif value != self._timestep:
            direction = 1.0 if value > self._timestep else -1.0
            if self._direction and direction != self._direction:
                self.begin()
            else:
                self._direction = direction
                self.advance()
        self._timestep = value


class _Watched:
    """A scheduler's method that also calls us; copies of the scheduler get the plain method."""

    def __init__(self, owner: Any, name: str, then: Callable[[], None]):
        self.owner, self.name, self.then = owner, name, then
        self.had = name in vars(owner)
        self.method = getattr(owner, name)
        functools.update_wrapper(self, self.method)
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.method(*args, **kwargs)
        self.then()
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        owner = memo.get(id(self.owner))
        return self.method if owner is None else types.MethodType(getattr(type(owner), self.name), owner)

    def remove(self) -> None:
        self.then = lambda: None
        if vars(self.owner).get(self.name) is self:
            if self.had:
                setattr(self.owner, self.name, self.method)
            else:
                delattr(self.owner, self.name)


def timestep_of(args: tuple, kwargs: dict[str, Any], names: list[str]) -> Any:
    """The argument `timestep` (or `timesteps`, `t`) of a transformer's call."""
    for name in ("timestep", "timesteps", "t"):
        if name in kwargs:
            return kwargs[name]
        if name in names and names.index(name) < len(args):
            return args[names.index(name)]
    return None

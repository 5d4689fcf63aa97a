"""Which run, step and branch a call of the transformer belongs to.

A pipeline's scheduler tells: `set_timesteps` begins a run and `step` ends a solver step, whatever the number of calls
in between; that needs no cooperation of the pipeline and no wait for the device. The call stack tells which calls are
the run's (`paradec.integrations.diffusers.runs`). Where there is no scheduler (a bare transformer), every call is a
run's, a new timestep is a new step, and a timestep against the direction of the run begins the next run; every thread
has runs of its own.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor

from paradec.integrations.diffusers import runs
from paradec.integrations.diffusers.hooks.stand_in import StandIn


@dataclass(eq=False)
class Run:
    """One run of a pipeline, or of a loop over a bare transformer."""

    driver: runs.Driver | None = None
    """The function call that it belongs to; None without a scheduler."""
    index: int = 0
    """The solver step."""
    strays: int = 0
    """Calls of the transformers in the run's thread that were not the run's, and were left alone."""
    states: dict[str, Any] = field(default_factory=dict)
    """What each transformer remembers of it."""
    timestep: float | None = None
    direction: float = 0.0


class Clock:
    """Counts runs and steps. `owner` is the pipeline whose `scheduler` is watched, or None."""

    def __init__(self, owner: Any = None, on_end: Callable[[Run], None] = lambda run: None):
        self.owner = owner
        self.on_end = on_end
        self.run = 0
        """Counts the runs."""
        self.latest = Run()
        """The run that began last."""
        self.watched: list[_Watched] = []
        self.scheduler: Any = None
        self._open: Run | None = None
        """The scheduler's run, until its last step."""
        self._bare: dict[int, Run] = {}
        """Runs of a bare transformer, by thread."""
        if owner is not None:
            self.watch(owner.scheduler)

    @property
    def index(self) -> int:
        """The solver step of the latest run."""
        return self.latest.index

    @property
    def total(self) -> int | None:
        """Solver steps of this run, as far as the scheduler knows; image to image leaves the first ones out."""
        timesteps = getattr(self.scheduler, "timesteps", None)
        return None if timesteps is None else len(timesteps) - (getattr(self.scheduler, "begin_index", None) or 0)

    def end(self, run: Run | None) -> None:
        """What was remembered of a run is dropped. The next `set_timesteps`, or the next call of a bare transformer,
        begins another one."""
        if run is None:
            return
        with runs.BEGIN:
            if run is self._open:
                self._open = None
            self._bare = {thread: other for thread, other in self._bare.items() if other is not run}
        self.on_end(run)

    @property
    def running(self) -> bool:
        """Whether the scheduler's run is going on."""
        return self._open is not None

    def returned(self) -> None:
        """A call of the pipeline is over, perhaps by an exception; and so is its run."""
        driver = None if self._open is None else self._open.driver
        if driver is not None and driver.thread == threading.get_ident() and driver.pipeline is not None:
            self.end(self._open)

    def end_all(self) -> None:
        """Drop what was remembered of every run."""
        for run in (self._open, *list(self._bare.values())):
            self.end(run)

    def watch(self, scheduler: Any) -> None:
        """Watch this scheduler instead of the present one."""
        self.release()
        self.scheduler = scheduler
        if scheduler is not None:
            self.watched = [
                _Watched(scheduler, "set_timesteps", self._set_timesteps),
                _Watched(scheduler, "step", self._step),
            ]

    def release(self) -> None:
        """Leave the scheduler as it was."""
        for watched in self.watched:
            watched.remove()
        self.watched = []

    def see(self, timestep: Any, frame: FrameType) -> Run | None:
        """The run of a call that is about to be made from here; None if it is no run's.

        Raises:
            ValueError: there is no scheduler, and no timestep either.
        """
        if self.owner is None:
            return self._tell(timestep)
        if self.owner.scheduler is not self.scheduler:
            self._exchanged(frame)
        run = self._open
        if run is None or run.driver is None:
            return None
        if not run.driver.calls(frame):
            run.strays += run.driver.thread == threading.get_ident()
            return None
        return run

    def _begin(self, run: Run) -> Run:
        self.run += 1
        self.latest = run
        return run

    def _set_timesteps(self, method: Callable[..., Any], frame: FrameType, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replace the scheduler's method."""
        with runs.BEGIN:
            before = None if self._open is None else self._open.driver
            driver = runs.begin(before, self.scheduler, frame, self._name)
            self.end(self._open)
            self._open = run = self._begin(Run(driver))
        try:
            return method(*args, **kwargs)
        except BaseException:
            self.end(run)
            raise

    def _step(self, method: Callable[..., Any], frame: FrameType, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replace the scheduler's method."""
        run = self._open
        if run is not None:
            run.driver = runs.step(run.driver, self.scheduler, frame, self._name)
        result = method(*args, **kwargs)
        if run is not None and run is self._open:
            assert run.driver is not None
            run.index += 1
            run.driver.stepped = bool(run.driver.paths)
            if self.total is not None and run.index >= self.total:
                self.end(run)
        return result

    @property
    def _name(self) -> str:
        return f"the accelerated {type(self.owner).__name__}"

    def _exchanged(self, frame: FrameType) -> None:
        """The pipeline has another scheduler than when we attached, and its first call of the transformer comes."""
        scheduler, pipeline = self.owner.scheduler, runs.pipeline_above(frame)
        told = getattr(scheduler, "num_inference_steps", None) is not None  # by a loop of one's own
        if pipeline is self.owner or (pipeline is None and told):
            self.end(self._open)
            self.watch(scheduler)
            self._open = self._begin(Run(runs.Driver(scheduler, frame)))

    def _tell(self, timestep: Any) -> Run:
        """The run of a call of a bare transformer."""
        if not isinstance(timestep, (Tensor, int, float)):
            raise ValueError(
                "without a pipeline, steps are told from the transformer's argument timestep, and this call has none; "
                "attach to the pipeline instead"
            )
        value = float(timestep.flatten()[0]) if isinstance(timestep, Tensor) else float(timestep)
        thread = threading.get_ident()
        run = self._bare.get(thread)
        if run is not None and run.timestep is not None and value != run.timestep:
            direction = 1.0 if value > run.timestep else -1.0
            if run.direction in (0.0, direction):
                run.direction = direction
                run.index += 1
            else:
                self.end(run)
                run = None
        if run is None:
            with runs.BEGIN:
                living = sys._current_frames()
                self._bare = {k: other for k, other in self._bare.items() if k in living}
                run = self._bare[thread] = self._begin(Run())
        run.timestep = value
        return run


class _Watched:
    """A scheduler's method with us around it; copies of the scheduler get the plain method."""

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]):
        self.method, self.around = getattr(owner, name), around
        self.active = True
        functools.update_wrapper(self, self.method)
        self.stand_in = StandIn(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.method(*args, **kwargs)
        return self.around(self.method, sys._getframe(1), args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self  # of the scheduler's attributes alone, which pipelines put back into it

    def remove(self) -> None:
        self.active = False
        self.stand_in.remove()


def timestep_of(args: tuple, kwargs: dict[str, Any], names: list[str]) -> Any:
    """The argument `timestep` (or `timesteps`, `t`) of a transformer's call."""
    for name in ("timestep", "timesteps", "t"):
        if name in kwargs:
            return kwargs[name]
        if name in names and names.index(name) < len(args):
            return args[names.index(name)]
    return None

"""Counter of the runs and solver steps of a pipeline. A pipeline has one run at a time, in one thread.

The scheduler's `set_timesteps` begins a run, and its `step` ends a solver step. In loops that do not call `step`, a
change of the timestep begins a step, and a change of its direction begins a run.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(eq=False)
class Run:
    """One run of a pipeline, or of a loop over a transformer."""

    index: int = 0  # the solver step
    is_open: bool = True
    states: dict[str, Any] = field(default_factory=dict)  # states of the transformers, by name
    foreign_calls: int = 0  # number of calls of the transformers that did not belong to the run
    thread: int | None = None  # id of the thread that calls the transformers
    is_stepped: bool = False  # whether the scheduler's `step` was called
    uses_contexts: bool | None = None  # whether calls are inside a `cache_context`; None before the first call
    timestep: float | None = None
    direction: float = 0.0  # sign of the last change of `timestep`


class Clock:
    """Counter of runs and steps. on_begin: function that is called at the start of a run."""

    def __init__(self, on_begin: Callable[[], None] = lambda: None):
        self.pipe: Any = None  # the pipeline whose scheduler is observed; None for a transformer alone
        self.on_begin = on_begin
        self.runs = 0
        self.run = Run(is_open=False)
        self.lock = threading.RLock()  # held during a call of the transformer
        self.interrupted_threads: set[int] = set()  # threads whose run ended because another thread began a run
        self.scheduler: Any = None
        self.originals: dict[str, Any] = {}  # by method: the scheduler's instance attribute before wrapping, or None

    @property
    def total(self) -> int | None:
        """Number of solver steps of this run; None if the scheduler has no timesteps."""
        timesteps = getattr(self.scheduler, "timesteps", None)
        return None if timesteps is None else len(timesteps) - self.first

    @property
    def first(self) -> int:
        """Index of the run's first timestep in the scheduler's list."""
        return getattr(self.scheduler, "begin_index", None) or 0

    def begin(self) -> Run:
        """End the current run, and begin a new one. Raises RuntimeError while another thread calls the transformer."""
        if not self.lock.acquire(blocking=False):
            raise self._thread_error()
        try:
            if self.pipe is not None and self.run.is_open and self.run.thread not in (None, threading.get_ident()):
                self.interrupted_threads.add(self.run.thread)
            self.interrupted_threads.discard(threading.get_ident())
            self.end()
            self.runs += 1
            self.run = Run()
            self.on_begin()
        except BaseException:
            self.run.is_open = False
            raise
        finally:
            self.lock.release()
        return self.run

    def end(self) -> None:
        if self.run.is_open:
            self.run.is_open = False
            for state in self.run.states.values():
                state.forget()

    def locate_call(self, timestep: Any, context: str | None) -> Run | None:
        """Return the run to which a call with this timestep and `cache_context` belongs; None if it belongs to no run.

        Raises RuntimeError if another thread makes the run, ValueError if there is neither a pipeline nor a timestep.
        """
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is not self.scheduler and getattr(scheduler, "num_inference_steps", None) is not None:
            self.observe(self.pipe)  # the scheduler was replaced since the last run
            self.begin()
        if self.pipe is None and not self.run.is_open:
            self.begin()
        self._check_interrupted()
        run = self.run
        if not run.is_open or (run.uses_contexts and context is None):
            run.foreign_calls += 1
            return None
        if not run.is_stepped:
            run = self._read_timestep(run, timestep)
        self.check_thread(run)
        run.uses_contexts = context is not None
        return run

    def observe(self, pipe: Any) -> None:
        """Wrap `set_timesteps` and `step` of the pipeline's scheduler, until `release`."""
        self.release()
        self.pipe, self.scheduler = pipe, pipe.scheduler
        for name, wrapper in (("set_timesteps", _set_timesteps), ("step", _step)):
            if hasattr(self.scheduler, name):
                method, self.originals[name] = getattr(self.scheduler, name), vars(self.scheduler).get(name)
                wrapped = functools.update_wrapper(functools.partial(wrapper, self, method), method)
                setattr(self.scheduler, name, wrapped)

    def release(self) -> None:
        for name, original in self.originals.items():
            wrapped = vars(self.scheduler).get(name)
            if isinstance(wrapped, functools.partial) and wrapped.args[0] is self:
                delattr(self.scheduler, name)
                if original is not None:
                    setattr(self.scheduler, name, original)
        self.scheduler, self.originals = None, {}

    def _read_timestep(self, run: Run, timestep: Any) -> Run:
        if not isinstance(timestep, (Tensor, int, float)):
            if self.pipe is None:
                raise ValueError(
                    "without a pipeline, steps are counted by the transformer's argument timestep, which is missing "
                    "in this call; attach to the pipeline instead"
                )
            return run
        # frames of a video may have different timesteps: use their mean
        value = float(timestep.double().mean()) if isinstance(timestep, Tensor) else float(timestep)
        direction = 0.0 if run.timestep is None else float((value > run.timestep) - (value < run.timestep))
        if direction * run.direction < 0:
            run = self.begin()
        elif direction:
            self.check_thread(run)
            run.direction = direction
            run.index += 1
        run.timestep = value
        return run

    def check_thread(self, run: Run) -> None:
        run.thread = run.thread or threading.get_ident()
        if run.thread != threading.get_ident():
            raise self._thread_error()

    def _check_interrupted(self) -> None:
        """Raise RuntimeError, once, in a thread whose run ended because another thread began a run."""
        if threading.get_ident() in self.interrupted_threads:
            self.interrupted_threads.discard(threading.get_ident())
            raise self._thread_error()

    def _thread_error(self) -> RuntimeError:
        name = "transformer" if self.pipe is None else type(self.pipe).__name__
        return RuntimeError(
            f"the accelerated {name} is used by another thread during a run, and supports one run at a time. Wait for "
            "the end of that run, or load a second pipeline"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Clock:
        return self  # pipelines deep-copy their scheduler; the copies are not observed


def _is_observed(clock: Clock, method: Callable[..., Any]) -> bool:
    # a copy of the scheduler has the same wrapper, but is not observed
    return getattr(inspect.unwrap(method), "__self__", clock.scheduler) is clock.scheduler


def _set_timesteps(clock: Clock, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not _is_observed(clock, method):
        return method(*args, **kwargs)
    clock.begin()
    try:
        return method(*args, **kwargs)
    except BaseException:
        clock.end()
        raise


def _step(clock: Clock, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run = clock.run
    if _is_observed(clock, method):
        clock._check_interrupted()
    if not _is_observed(clock, method) or not run.is_open:
        return method(*args, **kwargs)
    clock.check_thread(run)
    result = method(*args, **kwargs)
    run.index += 1
    run.is_stepped = True
    if clock.total is not None and run.index >= clock.total and run is clock.run:
        clock.end()
    return result

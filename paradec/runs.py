"""Which function call a run belongs to: found on the call stack, since a pipeline's components are not told.

A scheduler hears when a run begins (`set_timesteps`) and when a step is over (`step`), but not who is calling, nor
that a run was broken off. Other threads, a second pipeline with the same transformer, callbacks and training code may
call in between. What a run remembers must serve the calls of the function that began it, and no others.
"""

from __future__ import annotations

import sys
import threading
import weakref
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FrameType
from typing import Any

BEGIN = threading.RLock()
"""Held while it is decided whether a run may begin."""


class Driver:
    """The function call that drives a run: a pipeline's `__call__`, or the function that holds a loop of one's own.

    Frames are told by their addresses and never kept, so that nothing outlives a run that was broken off; where a
    pipeline's `__call__` has begun the run, a later call at the same address is told by its `self`.

    Args:
        scheduler: whose run it is.
        frame: where the run begins; the driver is this function or one of its callers. The nearest `__call__` of an
            object with this scheduler, if there is one; else the nearest that is still running when the model is
            called, up to the nearest generator or coroutine: what resumes that may drive others in turn.
    """

    def __init__(self, scheduler: Any, frame: FrameType):
        self.thread = threading.get_ident()
        self.pipeline: weakref.ref[Any] | None = None
        self.frames: dict[int, CodeType] = {}
        self.paths: list[list[CodeType]] = []
        """The functions between the driver and the model, of every call in the first step."""
        self.stepped = False
        """Whether the first step is over."""
        caller: FrameType | None = frame
        while caller is not None:
            pipeline = pipeline_in(caller)
            if pipeline is not None and pipeline.scheduler is scheduler:
                self.frames, self.pipeline = {}, weakref.ref(pipeline)
            self.frames[id(caller)] = caller.f_code
            if self.pipeline is not None or _pauses(caller):
                break
            caller = caller.f_back

    def calls(self, frame: FrameType | None) -> bool:
        """Whether a call of the model from here is the run's.

        Calls come by the way that they came in the first step: what a callback calls, or another pipeline that a
        callback runs, is not the run's.
        """
        if threading.get_ident() != self.thread:
            return False
        path = []
        while frame is not None and not self._is(frame):
            path.append(frame.f_code)
            frame = frame.f_back
        if frame is None:
            return False
        if len(self.frames) > 1:
            self.frames = {id(frame): frame.f_code}
        if path in self.paths:
            return True
        if not self.stepped:
            self.paths.append(path)
        return not self.stepped

    def alive(self) -> bool:
        """Whether the function is still running."""
        frame = sys._current_frames().get(self.thread)
        nearest = next(iter(self.frames))  # what called it may be doing something else by now
        while frame is not None and not (id(frame) == nearest and self._is(frame)):
            frame = frame.f_back
        return frame is not None

    def _is(self, frame: FrameType) -> bool:
        if self.frames.get(id(frame)) is not frame.f_code:
            return False
        return self.pipeline is None or frame.f_locals.get("self") is self.pipeline()


def begin(before: Driver | None, scheduler: Any, frame: FrameType, name: str) -> Driver:
    """The driver of a run that begins here; to be called with `BEGIN` held.

    Args:
        before: the driver of the last run of this scheduler, if that is not known to be over.
        name: of what is to run, for the message.

    Raises:
        RuntimeError: that run is still going on, in another thread or further up in this one.
    """
    driver = Driver(scheduler, frame)
    if before is None:
        return driver
    if before.thread != driver.thread:
        going_on = before.alive()
    else:  # a loop of one's own may have been left for another one in the same function
        going_on = before.pipeline is not None and before.frames.keys() != driver.frames.keys() and before.alive()
    if going_on:
        raise refusal(name, before.thread != driver.thread)
    return driver


def refusal(name: str, elsewhere: bool) -> RuntimeError:
    """What a second run is told. elsewhere: whether the first one is in another thread."""
    where = "in another thread" if elsewhere else "and this call comes from inside of it"
    return RuntimeError(
        f"{name} is in the middle of a run, {where}; it can serve one run at a time. Wait for the end of that run, or "
        "use a pipeline with a scheduler of its own"
    )


def step(driver: Driver | None, scheduler: Any, frame: FrameType, name: str) -> Driver:
    """The driver of the run that a step is about to be made of: the present one, unless that is another thread's and
    has not done anything yet, or is dead.

    Raises:
        RuntimeError: another thread's run is going on.
    """
    if driver is None:
        return Driver(scheduler, frame)
    if driver.thread != threading.get_ident():
        begun_only = driver.pipeline is None and not driver.paths and not driver.stepped
        if not begun_only and driver.alive():
            raise refusal(name, True)
        driver = Driver(scheduler, frame)
    return driver


def _pauses(frame: FrameType) -> bool:
    """Whether a frame is a generator's or coroutine's, those of context managers aside, whose body others are."""
    if not frame.f_code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        return False
    return frame.f_back is None or frame.f_back.f_globals.get("__name__") != "contextlib"


def pipeline_in(frame: FrameType) -> Any:
    """The pipeline whose `__call__` a frame is, or None: an object with a scheduler."""
    code = frame.f_code
    if code.co_name != "__call__" or code.co_varnames[:1] != ("self",):
        return None
    found = frame.f_locals.get("self")
    return found if getattr(found, "scheduler", None) is not None else None


def pipeline_above(frame: FrameType | None) -> Any:
    """The pipeline whose `__call__` is the nearest, or None."""
    while frame is not None:
        found = pipeline_in(frame)
        if found is not None:
            return found
        frame = frame.f_back
    return None


def called_by(frame: FrameType | None, owner: Any) -> bool:
    """Whether the function that calls a module from here, torch's own left out, is a method of `owner`."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(("torch.", "paradec.hooks.")):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_varnames[:1] == ("self",) and frame.f_locals.get("self") is owner

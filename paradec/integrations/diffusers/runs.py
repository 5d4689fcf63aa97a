"""Whose run a call is: read off the call stack, because nothing else tells.

A scheduler is told when a run begins (`set_timesteps`) and when a step is over (`step`), but neither who drives the run
nor that it was broken off. A flag or a context variable that is set during a pipeline's `__call__` (`hooks.guard`) is
seen by callbacks too, which may call the model or another pipeline, and a loop of one's own has no `__call__`. Two such
loops, written as generators, may take turns in one thread over one model, and then nothing but the function that calls
tells them apart.

What is read: the address and the code of the frames of running functions, from the call outwards, and the `self` of a
pipeline's `__call__`. Frames are not kept, so that nothing outlives a run that was broken off.

A call of the model that has the driver's frame not above it, or reached it by other functions than in the first step,
is not the run's and is left alone. If the frame is not in its thread any more, the run is over and another may begin.
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
    """The function call that drives a run of `scheduler`; `frame` is where the run begins.

    Of the callers there it is the nearest `__call__` of a pipeline with this scheduler; without one, the nearest that
    is still running when the model is called: a loop of one's own. They are looked at up to the nearest generator or
    coroutine: what resumes that may drive others in turn.
    """

    def __init__(self, scheduler: Any, frame: FrameType):
        self.thread = threading.get_ident()
        self.pipeline: weakref.ref[Any] | None = None
        """Told apart by `self`, since another pipeline's `__call__` may have the same address later."""
        self.frames: dict[int, CodeType] = {}
        """What may be the driver's frame, by address, the nearest first; one, once the model was called."""
        self.paths: list[list[CodeType]] = []
        """The functions between the driver and the model, of every call in the first step."""
        self.stepped = False
        """Whether the first step is over."""
        caller: FrameType | None = frame
        while caller is not None:
            pipeline = pipeline_in(caller)
            if pipeline is not None and pipeline.scheduler is scheduler:
                self.frames, self.pipeline = {id(caller): caller.f_code}, weakref.ref(pipeline)
                return
            self.frames[id(caller)] = caller.f_code
            if _pauses(caller):
                return
            caller = caller.f_back

    def calls(self, frame: FrameType | None) -> bool:
        """Whether a call of the model from here is the run's, not a callback's or that of a pipeline inside of one."""
        if threading.get_ident() != self.thread:
            return False
        path = []
        while frame is not None and not self._is(frame):
            path.append(frame.f_code)
            frame = frame.f_back
        if frame is None:
            return False
        self.frames = {id(frame): frame.f_code}
        if not self.stepped and path not in self.paths:
            self.paths.append(path)
        return path in self.paths

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
    if before is not None:
        elsewhere = before.thread != driver.thread
        # in one thread, a loop of one's own may have been left for another one in the same function
        within = before.pipeline is not None and before.frames.keys() != driver.frames.keys()
        if (elsewhere or within) and before.alive():
            raise refusal(name, elsewhere)
    return driver


def step(driver: Driver | None, scheduler: Any, frame: FrameType, name: str) -> Driver:
    """The driver of the run that a step is about to be made of: the present one, unless that is another thread's and
    has not done anything yet, or is over.

    Raises:
        RuntimeError: another thread's run is going on.
    """
    if driver is not None:
        if driver.thread == threading.get_ident():
            return driver
        if (driver.pipeline is not None or driver.paths or driver.stepped) and driver.alive():
            raise refusal(name, True)
    return Driver(scheduler, frame)


def refusal(name: str, elsewhere: bool) -> RuntimeError:
    """What a second run is told. elsewhere: whether the first one is in another thread."""
    where = "in another thread" if elsewhere else "and this call comes from inside of it"
    return RuntimeError(
        f"{name} is in the middle of a run, {where}; it can serve one run at a time. Wait for the end of that run, or "
        "use a pipeline with a scheduler of its own"
    )


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


def guidance_above(frame: FrameType | None) -> float | None:
    """The guidance scale that the nearest pipeline's `__call__` works with, or None where none is told: its argument,
    what it keeps (also in a guider), or `true_cfg_scale`."""
    while frame is not None and pipeline_in(frame) is None:
        frame = frame.f_back
    if frame is None:
        return None
    pipe, said = pipeline_in(frame), frame.f_locals
    guider = getattr(pipe, "guider", None)
    for found in (
        *(said.get("guidance_scale"), getattr(pipe, "_guidance_scale", None)),
        *(said.get("true_cfg_scale"), getattr(guider, "guidance_scale", None)),
    ):
        if isinstance(found, (int, float)):
            return float(found)
    return None


def called_by(frame: FrameType | None, owner: Any) -> bool:
    """Whether the function that calls a module from here, torch's own left out, is a method of `owner`."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(
        ("torch.", "paradec.integrations.diffusers.hooks.")
    ):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_varnames[:1] == ("self",) and frame.f_locals.get("self") is owner


def _pauses(frame: FrameType) -> bool:
    """Whether a frame is a generator's or coroutine's, those of context managers aside, whose body others are."""
    if not frame.f_code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        return False
    return frame.f_back is None or frame.f_back.f_globals.get("__name__") != "contextlib"

"""One call of a pipeline at a time: pipelines keep the settings of their call in their own attributes, from the first
line of `__call__` on, so that a second call would change the first one's.

The pipeline's class is replaced because Python looks `__call__` up in the class: no attribute of the pipeline can watch
it. A `__call__` that is patched into the class itself would watch every other pipeline of that class. Nothing that a
pipeline calls tells where its call begins and ends: settings are kept before `set_timesteps`, and an exception calls
nothing more.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from paradec.integrations.diffusers.runs import refusal

LOCK = threading.Lock()


class Guard:
    """Watches a pipeline's `__call__`, through a class in place of its own, derived from it and of the same name.

    Copies and pickles have the pipeline's own class.

    Args:
        pipe: has a `__call__`, or else is not watched.
        running: whether a run is going on.
        on_end: called after every call, however it ends.
    """

    def __init__(self, pipe: Any, running: Callable[[], bool], on_end: Callable[[], None]):
        self.pipe, self.running, self.on_end = pipe, running, on_end
        self.threads: list[int] = []
        """Of the calls that are going on."""
        self.plain = type(pipe)
        if callable(pipe):
            self.watching = self._derived()
            object.__setattr__(pipe, "__class__", self.watching)

    def _derived(self) -> type:
        guard = self
        plain: Any = self.plain

        @functools.wraps(plain.__call__)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is not guard.pipe:  # made with this class
                return plain.__call__(self, *args, **kwargs)
            guard.enter()
            try:
                return plain.__call__(self, *args, **kwargs)
            finally:
                guard.leave()

        def reduced(self: Any, protocol: Any) -> Any:
            found = plain.__reduce_ex__(self, protocol)
            if isinstance(found, str) or found[1] != (type(self),):
                return found
            return (object.__new__, (plain,), *found[2:])  # pickle holds copyreg's to the object's present class

        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
        return type(plain.__name__, (plain,), names | {"__call__": called, "__reduce_ex__": reduced})

    def enter(self) -> None:
        """A call begins.

        Raises:
            RuntimeError: another one is going on, in another thread, or in this one and in the middle of its run.
        """
        thread = threading.get_ident()
        with LOCK:
            others = [other for other in self.threads if other != thread]
            if others or (self.threads and self.running()):
                raise refusal(f"the accelerated {self.plain.__name__}", bool(others))
            self.threads.append(thread)

    def leave(self) -> None:
        """A call ends."""
        with LOCK:
            self.threads.pop()
            outermost = not self.threads
        if outermost:
            self.on_end()

    def remove(self) -> None:
        """Give the pipeline its class back."""
        if callable(self.pipe) and type(self.pipe) is self.watching:
            object.__setattr__(self.pipe, "__class__", self.plain)

"""Who uses a module's weights just now: requests side by side, or one update alone.

Each thread has a lock of its own, which its requests hold, so that they never wait for each other; an update takes the
locks of all threads. (That is a big-reader lock. Taking a lock of one's own costs a request next to nothing.)
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

from torch import nn

from paradec.caches.kept import weights_of


class Slot:
    """One thread's lock: `lock` is what requests take, `own` the lock itself."""

    def __init__(self) -> None:
        self.own = threading.RLock()
        self.lock: Any = self.own
        self.thread = threading.get_ident()

    @property
    def held(self) -> bool:
        """Whether the thread that asks is inside a request."""
        try:
            threading.Condition(self.own).notify(0)  # raises where the thread does not have the lock
        except RuntimeError:
            return False
        return True


class Gate:
    """What stands for a thread's lock while an update waits or runs: requests begin after it, so that a thread that
    makes one after the other lets it in. Those inside of another one go on."""

    def __init__(self, slot: Slot, over: threading.Event):
        self.slot, self.over = slot, over

    def __enter__(self) -> None:
        if not self.slot.held:
            self.over.wait()
        self.slot.own.acquire()

    def __exit__(self, *error: Any) -> None:
        self.slot.own.release()


class Use:
    """The use of one module's weights, and their version."""

    every: weakref.WeakKeyDictionary[nn.Module, Use] = weakref.WeakKeyDictionary()
    making = threading.Lock()

    def __init__(self) -> None:
        self.slots: weakref.WeakSet[Slot] = weakref.WeakSet()
        self.batches: weakref.WeakSet[Any] = weakref.WeakSet()
        """Batches (`paradec.batching`), whose rows wait between steps."""
        self._updating, self._looking = threading.Lock(), threading.Lock()
        self._version, self._seen = 0, None

    @classmethod
    def of(cls, module: nn.Module) -> Use:
        """That of a module, however many wraps it has."""
        with cls.making:
            return cls.every.setdefault(module, cls())

    def slot(self) -> Slot:
        """A new thread's."""
        with self._updating:
            slot = Slot()
            self.slots.add(slot)
            return slot

    def version(self, module: nn.Module) -> int:
        """How often the weights were seen to have changed."""
        with self._looking:
            found: Any = weights_of(module)
            self._version += self._seen not in (None, found)
            self._seen = found
            return self._version

    @contextmanager
    def alone(self, own: Slot, name: str) -> Iterator[None]:
        """Wait until no request runs, and let none begin. own: the slot of this thread. name: of the model.

        Raises:
            RuntimeError: this thread is inside a request; a batch has rows that are being decoded.
        """
        if own.held:
            raise RuntimeError(f"a request of {name} that runs in this thread asks for new weights: wait for its end")
        with self._updating:
            over, slots = threading.Event(), list(self.slots)
            try:
                for slot in slots:
                    slot.lock = Gate(slot, over)
                taken = []
                try:
                    for slot in slots:
                        slot.own.acquire()
                        taken.append(slot)
                    rows = sum(batch.occupied for batch in self.batches)
                    if rows:
                        raise RuntimeError(
                            f"{rows} rows of {name} are being decoded in a batch: take its steps until they have ended"
                        )
                    yield
                finally:
                    for slot in taken:
                        slot.own.release()
            finally:
                for slot in slots:
                    slot.lock = slot.own
                over.set()

    def after_fork(self) -> None:
        """In a child process other threads' requests and updates have no end."""
        self._updating, self._looking = threading.Lock(), threading.Lock()
        self.slots = weakref.WeakSet(slot for slot in self.slots if slot.thread == threading.get_ident())
        for slot in self.slots:
            if not slot.held:
                slot.own = threading.RLock()
            slot.lock = slot.own


class Requests(threading.local):
    """What a thread's requests hold while they run: `slot.lock`."""

    def __init__(self, use: Use):  # once per thread
        self.use, self.slot = use, use.slot()


UNSHARED: Any = SimpleNamespace(slot=SimpleNamespace(lock=nullcontext()), use=Use())
"""The `requests` of models of one's own, whose weights nothing here replaces."""


def _after_fork() -> None:
    Use.making = threading.Lock()
    for use in list(Use.every.values()):
        use.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

"""Parts that their owner has in training mode, and that calls of ours need in evaluation mode for a while."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from torch import nn

lock = threading.RLock()
"""Held while modes are changed and wraps are counted; never while anything is computed. A signal's handler may come in
between, and decode."""
needed: dict[nn.Module, int] = {}
"""Parts that their owner has in training mode, and the calls that need them in evaluation mode just now."""


def evaluate(parts: Iterable[nn.Module]) -> list[nn.Module]:
    """Put parts into evaluation mode, under the lock: those that their owner has in training mode, for `give_back`."""
    held = [part for part in dict.fromkeys(parts) if part.training or part in needed]
    for part in held:
        needed[part] = needed.get(part, 0) + 1
        _set_training(part, False)
    return held


def give_back(held: Iterable[nn.Module]) -> None:
    """End one call's need of parts; those that no other call needs are in training mode again."""
    with lock:
        for part in held:
            needed[part] -= 1
            if not needed[part]:
                del needed[part]
                _set_training(part, True)


def after_fork(idle: bool) -> None:
    """In a child process other threads' calls have no end: give their parts back, and the lock.

    Args:
        idle: whether the thread that goes on is inside no call.
    """
    global lock
    lock = threading.RLock()
    if idle:
        for part in needed:
            _set_training(part, True)
        needed.clear()


def _set_training(part: nn.Module, mode: bool) -> None:
    if type(part).__setattr__ is nn.Module.__setattr__:
        part.__dict__["training"] = mode  # many times faster
    else:
        part.training = mode

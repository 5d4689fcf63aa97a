"""Functions that run side by side, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def together(*functions: Callable[[], Any]) -> list[Any]:
    """What functions give that begin at once, each in a thread of its own: results, or exceptions."""
    found: list[Any] = [None] * len(functions)
    barrier = threading.Barrier(len(functions))

    def start(i: int) -> None:
        barrier.wait()
        try:
            found[i] = functions[i]()
        except BaseException as error:
            found[i] = error

    threads = [threading.Thread(target=start, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    return found

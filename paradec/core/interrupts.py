"""Ctrl-C while the command `paradec` starts: the libraries under it take seconds to import, and models longer to load.

Nothing is lost then, and an exception could surface anywhere inside an import; so the process just ends, with the exit
code that shells give to an interrupt. Programs that import paradec keep their own handling.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

EXIT_CODE = 130
_held = False
"""Whether the main thread is in a block of `hold_interrupt`."""


def is_debugging() -> bool:
    """Whether tracebacks are wanted."""
    return os.environ.get("PARADEC_DEBUG", "0") not in ("", "0")


def is_command(argv: list[str], original: list[str]) -> bool:
    """Whether a process is the command: the installed script, or `python -m paradec`.

    Args:
        argv: `sys.argv`, of which the first is "-m" while Python looks for a module. original: `sys.orig_argv`.
    """
    if argv[:1] == ["-m"]:
        return "-m" in original and original[original.index("-m") + 1 :][:1] == ["paradec"]
    return bool(argv) and Path(argv[0]).stem == "paradec"


def exit_on_interrupt() -> None:
    """Until `restore_interrupt`, let Ctrl-C end the process, if it is the command."""
    if not is_command(getattr(sys, "argv", []), getattr(sys, "orig_argv", [])):
        return
    # ignored is ignored: shells start background jobs so
    if threading.current_thread() is threading.main_thread() and _handler() is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def restore_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt, as it does in every other program."""
    if _handler() is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def hold_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait until the block has been left, the outermost of several: what is half printed could not be told
    from what is missing."""
    global _held
    ignored = _handler() is signal.SIG_IGN  # and stays so, as in background jobs of shells
    if threading.current_thread() is not threading.main_thread() or _held or ignored:
        yield
        return
    caught: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    _held = True
    try:
        yield
    finally:
        _held = False
        signal.signal(signal.SIGINT, before)
    if caught:
        raise KeyboardInterrupt


def _handler() -> Any:
    return signal.getsignal(signal.SIGINT)


def _exit(number: int, frame: FrameType | None) -> None:
    if is_debugging():
        traceback.print_stack(frame)
        sys.stderr.flush()
    if os.isatty(2):
        os.write(2, b"\n")  # the line says what is waited for
    os._exit(EXIT_CODE)


exit_on_interrupt()

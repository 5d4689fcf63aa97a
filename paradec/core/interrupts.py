"""Handling of Ctrl-C in the command `paradec`. Its imports take seconds. During them Ctrl-C ends the process at once,
with exit code 130, since an exception could surface inside any import. Other programs keep their handling."""

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

EXIT_CODE = 130
_is_holding = False
"""Whether the main thread is inside `hold_interrupt`."""


def is_debugging() -> bool:
    """Whether PARADEC_DEBUG requests tracebacks."""
    return os.environ.get("PARADEC_DEBUG", "0") not in ("", "0")


def is_command(argv: list[str], original_argv: list[str]) -> bool:
    """Whether a process runs the command `paradec`, as the installed script or `python -m paradec`. argv: `sys.argv`,
    whose first entry is "-m" while Python imports the module. original_argv: `sys.orig_argv`."""
    if argv[:1] == ["-m"]:
        return "-m" in original_argv and original_argv[original_argv.index("-m") + 1 :][:1] == ["paradec"]
    return bool(argv) and Path(argv[0]).stem == "paradec"


def exit_on_interrupt() -> None:
    """If the process runs the command, let Ctrl-C end it at once, until `restore_interrupt` is called."""
    if not is_command(getattr(sys, "argv", []), getattr(sys, "orig_argv", [])):
        return
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # background jobs of shells ignore it
    if threading.current_thread() is threading.main_thread() and is_default:
        signal.signal(signal.SIGINT, _exit)


def restore_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def hold_interrupt() -> Iterator[None]:
    """Delay Ctrl-C to the end of the outermost `with` block, so that no output is cut off."""
    global _is_holding
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in background jobs of shells
    if threading.current_thread() is not threading.main_thread() or _is_holding or is_ignored:
        yield
        return
    caught: list[int] = []
    previous_handler = signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    _is_holding = True
    try:
        yield
    finally:
        _is_holding = False
        signal.signal(signal.SIGINT, previous_handler)
    if caught:
        raise KeyboardInterrupt


def _exit(number: int, frame: FrameType | None) -> None:
    if is_debugging():
        traceback.print_stack(frame)
        sys.stderr.flush()
    if os.isatty(2):
        os.write(2, b"\n")  # end the progress message
    os._exit(EXIT_CODE)


exit_on_interrupt()

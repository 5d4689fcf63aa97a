"""Run the command `paradec` in this process or as a child process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import paradec
from paradec import cli


def run(*arguments: object, stdin: str | bytes | None = None) -> Any:
    """Run the command and return its result: exit code, stdout and stderr."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)


def ok(*arguments: object, stdin: str | bytes | None = None) -> str:
    """Run the command, assert that it succeeds without warnings, and return its output."""
    result = run(*arguments, stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    return result.stdout


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command as a child process, which SIGINT interrupts even if this process ignores SIGINT."""
    root = Path(paradec.__file__).parent.parent
    options.setdefault("args", [sys.executable, "-m", "paradec", *map(str, arguments)])
    environment = os.environ | {"PYTHONPATH": str(root)} | options.pop("env", {})
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        **options, **streams, env=environment, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    )


@contextmanager
def interrupts() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in this process, even if it is a background job, which ignores SIGINT."""
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def refused(*arguments: object) -> str:
    """Run the command, assert that it fails with a usage error of one line, and return the error."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr

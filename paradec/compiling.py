"""torch.compile on CPUs: what it takes, where its results are kept, and functions that say how long compiling took.

TorchInductor writes C++ for a traced function and has the machine's compiler translate it. That takes seconds to
minutes, so the results are kept in a folder and found there by later processes, which trace the function only.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

FOLDER = "PARADEC_COMPILE_CACHE"
"""The environment variable that names the folder in which compiled code is kept."""
TORCHS_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""torch's own name for it, which counts first: for all that a process compiles."""
BACKEND = "inductor"
"""What translates traced functions."""

_lock = threading.Lock()
_users = 0
_before: str | None = None


def folder() -> Path:
    """Where compiled code is kept from one process to the next: what `TORCHINDUCTOR_CACHE_DIR` or
    `PARADEC_COMPILE_CACHE` names, else `paradec/compiled` in the user's cache folder (`XDG_CACHE_HOME`, ~/.cache). It
    may be deleted at any time."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    given = os.environ.get(TORCHS_FOLDER)
    if given and os.path.abspath(given) != os.path.abspath(default_cache_dir()):  # torch writes its default there
        return Path(given)
    if os.environ.get(FOLDER):
        return Path(os.environ[FOLDER])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paradec" / "compiled"


def missing() -> str | None:
    """What this machine lacks for compiling on a CPU, in words that follow "compile=True has no effect: "; None where
    it lacks nothing."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception as error:  # of several kinds, by platform
        said = str(error).strip().split("\n", 1)[0]
        return f"no C++ compiler was found; install g++, or name one in the environment variable CXX ({said})"
    try:
        folder().mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder()).close()
    except OSError as error:
        return f"nothing can be kept in {str(folder())!r} ({error.strerror}); name another folder in {FOLDER}"
    return None


@contextmanager
def kept() -> Iterator[None]:
    """In here torch keeps what it compiles in `folder()`. As many threads at a time as like."""
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            chosen = str(folder())
            _before, os.environ[TORCHS_FOLDER] = os.environ.get(TORCHS_FOLDER), chosen
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _before is None:
                os.environ.pop(TORCHS_FOLDER, None)
            elif not _users and _before is not None:
                os.environ[TORCHS_FOLDER] = _before


class CompiledFunction:
    """A function that is compiled when it is first called, and again for what the compiled code does not serve.

    torch keeps compiled code with a function's code object, which is the class's own for methods. This has a copy of
    it: what is compiled here shows nowhere else, and goes when this goes.

    Args:
        function: a plain function. A graph break is an error (`failures`), so that it is compiled whole or not at all.
        dynamic: whether sizes of inputs may vary; as in torch.compile.
    """

    def __init__(self, function: Callable[..., Any], dynamic: bool | None = None):
        own: Any = function
        copied = types.FunctionType(
            own.__code__.replace(), own.__globals__, own.__name__, own.__defaults__, own.__closure__
        )
        copied.__kwdefaults__ = own.__kwdefaults__
        # few kernels in one file: a pool of compiling processes would only be started for nothing
        options: Any = {"compile_threads": 1} if BACKEND == "inductor" else None
        self._compiled = torch.compile(copied, fullgraph=True, dynamic=dynamic, backend=BACKEND, options=options)
        self.seconds = 0.0
        """Wall time of the calls that compiled something."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before, begin = _graphs(), time.perf_counter()
        try:
            return self._compiled(*args, **kwargs)
        finally:
            if _graphs() != before:
                self.seconds += time.perf_counter() - begin


def _graphs() -> int:
    """Graphs that this process has traced."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def failures() -> tuple[type[Exception], ...]:
    """What calls of a `CompiledFunction` raise where it cannot be compiled, beside what the function itself raises."""
    from torch._dynamo import exc

    return exc.TorchDynamoException, exc.FailOnRecompileLimitHit


def first_line(error: Exception) -> str:
    """The line of such an error that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__

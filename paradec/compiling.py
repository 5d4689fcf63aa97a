"""Compiled functions on CPUs: what they take, where they are kept, and how long compiling took.

torch.export traces a function, TorchInductor writes C++ for it ahead of time (AOTInductor) and has the machine's
compiler translate it. That takes seconds, so the results are kept in a folder and found there by later processes, which
trace the function only. A call goes straight into the translated code: there is nothing of torch.compile's own around
it (guards, and a wrapper in Python), which takes longer than what a small layer does beside its products.
"""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FOLDER = "PARADEC_COMPILE_CACHE"
"""The environment variable that names the folder in which compiled code is kept."""
TORCHS_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""torch's own name for it, which counts first: for all that a process compiles."""
BACKEND = "inductor"
"""What translates traced functions; with "eager" they run as they were traced, operation by operation."""
SAMPLE = 256
"""The length that open dimensions have while a function is traced: what loops are shared among threads for."""
LONGEST = 2**24
"""The largest length of an open dimension."""

_lock = threading.Lock()
_one_at_a_time = threading.RLock()
"""Held while something is traced and translated. A signal's handler may come in between, and decode."""
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


class Uncompilable(Exception):
    """A function cannot be traced or translated; says why in one line."""


class Compiled:
    """A function of tensors, compiled for tensors of the shapes, strides and dtypes that are given here.

    Args:
        function: of tensors; returns tensors. It may read nothing that changes from call to call but these.
        inputs: tensors as they will come; their values are not read.
        open_at: of each input the dimension whose length may be another one at every call, the same for all inputs (1
            included); None for inputs that have none. Those that have one come contiguous.

    Raises:
        Uncompilable: it cannot be traced (it asks for values of tensors, say), or the compiler fails.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor], open_at: Sequence[int | None]):
        begin = time.perf_counter()
        try:
            with _one_at_a_time, torch.inference_mode(False), torch.no_grad():
                program = _traced(function, inputs, open_at)
                self._run = _as_traced(program) if BACKEND == "eager" else _translated(program)
        except Exception as error:  # whatever torch's tracing, lowering and compilers raise
            raise Uncompilable(_first_line(error)) from error
        self.seconds = time.perf_counter() - begin
        """Wall time that compiling took, or fetching it from the folder."""

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        return self._run(inputs)


class _Function(nn.Module):
    """A function as torch.export takes it."""

    def __init__(self, function: Callable[..., Any]):
        super().__init__()
        self.function = function

    def forward(self, inputs: tuple[Tensor, ...]) -> Any:
        return self.function(*inputs)


def _traced(function: Callable[..., Any], inputs: Sequence[Tensor], open_at: Sequence[int | None]) -> Any:
    """The exported program, which no memory was taken for."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    length = torch.export.Dim("length", min=2, max=LONGEST)
    with FakeTensorMode():
        shapes = [[SAMPLE if i == at else n for i, n in enumerate(each.shape)] for each, at in zip(inputs, open_at)]
        fakes = tuple(
            torch.empty_strided(shape, each.stride(), dtype=each.dtype)
            if at is None
            else torch.empty(shape, dtype=each.dtype)
            for each, at, shape in zip(inputs, open_at, shapes)
        )
    lengths = tuple(None if at is None else {at: length} for at in open_at)
    return torch.export.export(_Function(function), (fakes,), dynamic_shapes=(lengths,), strict=False)


def _as_traced(program: Any) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    traced = program.module(check_guards=False)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        found = traced(tuple(inputs))
        return [found] if isinstance(found, Tensor) else list(found)

    return run


def _translated(program: Any) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """The program's machine code, from the folder if it is there."""
    path = folder() / f"{_digest(program)}.pt2"
    if not path.exists():
        # torch 2.13 copies a part of the program that it has deprecated itself
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        with tempfile.TemporaryDirectory(dir=folder()) as own:
            made = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(own) / "code.pt2"))
            os.replace(made, path)
    code: Any = torch._inductor.aoti_load_package(str(path)).loader

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = code.run(list(inputs))
        return found

    return run


def _digest(program: Any) -> str:
    """A name for what a program computes and from which inputs, and for the torch, the processor and the number of
    threads that it is translated for."""
    inputs = [
        (str(value.shape), str(value.stride()), str(value.dtype))
        for node in program.graph.nodes
        if node.op == "placeholder" and isinstance(value := node.meta.get("val"), Tensor)
    ]
    instructions: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # before 2.13 it may be missing
    level = torch.backends.cpu.get_cpu_capability()
    machine = platform.machine(), level, sorted(instructions.items()), torch.get_num_threads()
    said = [torch.__version__, machine, program.graph_module.code, inputs]
    digest = hashlib.sha256(repr(said).encode())
    for name, constant in sorted(program.constants.items()):
        digest.update(f"{name} {constant.dtype} {constant.shape}".encode())
        digest.update(constant.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]


def _first_line(error: Exception) -> str:
    """The line of an error that says most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__

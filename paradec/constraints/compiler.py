"""Compile constraints in subprocesses with limits of time and memory, for servers."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from paradec.constraints.automaton import ConstraintSizeError
from paradec.constraints.spelling import find_spelling, spell_texts
from paradec.constraints.values import Constraint, cache_automaton, has_automaton, token_automaton

MAX_CONSTRAINTS = 256
"""Maximum number of cached constraints."""


class Compiler:
    """Compiler of constraints to automata over the tokens of one tokenizer.

    Each compilation may take at most `seconds` and `max_bytes` of memory. It runs in one of at most `processes`
    subprocesses, which are started when needed.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, seconds: float = 10.0, max_bytes: int = 2**30, processes: int = 2
    ):
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.seconds, self.max_bytes = seconds, max_bytes
        self._slots, self._lock = threading.Semaphore(processes), threading.Lock()
        self._idle: list[subprocess.Popen[bytes]] = []
        self._constraints: dict[bytes, Constraint] = {}

    def compile(self, make: Callable[..., Constraint], *arguments: Any) -> Constraint:
        """Build the constraint `make(*arguments)`, and cache its automaton for `token_automaton`. Thread-safe.

        Raises:
            ConstraintSizeError: compilation takes too long, or too much memory. Errors of `make` are raised unchanged.
        """
        request = pickle.dumps((make, arguments))
        with self._lock:
            value = self._constraints.get(request)
        if value is not None and has_automaton(value, self.tokenizer, self.vocab_size):
            return value
        if find_spelling(self.tokenizer) is None:
            # no subprocess: with an unknown tokenizer only a Choice without `after` works, all others raise ValueError
            value = make(*arguments)
            token_automaton(value, self.tokenizer, self.vocab_size, (), ())
            return value
        with self._slots:
            reply = self._compile_in_subprocess(request)
        if isinstance(reply, Exception):
            raise reply
        value, automaton = reply
        cache_automaton(self.tokenizer, (value, self.vocab_size, (), ()), automaton)
        with self._lock:
            self._constraints[request] = value
            while len(self._constraints) > MAX_CONSTRAINTS:
                self._constraints.pop(next(iter(self._constraints)))
        return value

    def close(self) -> None:
        """End the idle subprocesses."""
        while self._idle:
            _kill(self._idle.pop())

    def _compile_in_subprocess(self, request: bytes) -> Any:
        """Compile in a subprocess. Returns an error, or a constraint and its automaton."""
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._start()
        timer = threading.Timer(self.seconds, process.kill)
        timer.start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(request)
            process.stdin.flush()
            while isinstance(reply := pickle.load(process.stdout), list):  # texts to tokenise
                pickle.dump(spell_texts(self.tokenizer, reply), process.stdin)
                process.stdin.flush()
        except (EOFError, OSError, pickle.UnpicklingError):  # the process was killed, or ran out of memory
            _kill(process)
            limits = f"{self.seconds:g} s or {self.max_bytes >> 20} MiB"
            return ConstraintSizeError(f"compiling the constraint takes more than {limits}: give a smaller one")
        finally:
            timer.cancel()
        self._idle.append(process)
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        command = [sys.executable, "-m", __name__]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, **pipes)
        assert process.stdin is not None and process.stdout is not None
        pickle.dump((find_spelling(self.tokenizer), self.vocab_size, self.max_bytes), process.stdin)
        process.stdin.flush()
        pickle.load(process.stdout)  # wait until the process is ready: `seconds` does not include its start
        return process


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes its pipes and waits
        pass


def _serve() -> None:
    """Compile requests from standard input until it closes."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    spelling, vocab_size, max_bytes = pickle.load(sys.stdin.buffer)
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        pass
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    pickle.dump(None, output)
    output.flush()

    def spell_in_parent(texts: list[str]) -> Any:
        pickle.dump(texts, output)
        output.flush()
        return pickle.load(sys.stdin.buffer)

    while True:
        try:
            make, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        reply: Any
        try:
            value = make(*arguments)
            reply = value, value.build_token_automaton(spelling, vocab_size, spell_in_parent)
        except MemoryError:
            reply = ConstraintSizeError(f"compiling the constraint takes more than {max_bytes >> 20} MiB")
        except Exception as error:
            reply = error
        pickle.dump(reply, output)
        output.flush()


if __name__ == "__main__":
    _serve()

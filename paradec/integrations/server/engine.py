"""The batch that a server decodes with, and the one thread that steps it."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from paradec.api.generate import generate
from paradec.batching.batch import Batch
from paradec.batching.slots import BatchClosed, Cancelled, Ticket
from paradec.core.checks import shown

log = logging.getLogger(__name__)
TRIES = 3
"""Steps that may fail one after the other, with an error that is no prompt's own, before the engine gives up."""
IDLE = 0.5
"""Seconds after which a thread without work looks whether it is to end."""


class EngineStopped(RuntimeError):
    """Nothing is decoded any more: the engine was closed, or its steps failed again and again."""


class ModelFailed(RuntimeError):
    """The model raises whatever it is given, as on a device that is lost."""


class Engine:
    """Decode prompts of many threads with one model.

    Args:
        model: from `paradec.load` or `paradec.wrap`, with a tokenizer.
        batch_size, max_memory, prefix_memory, arguments: as for `paradec.batching.Batch`.

    Raises:
        ValueError, TypeError: as `Batch`.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch_size: int = 8,
        max_memory: int | None = None,
        prefix_memory: int | None = None,
        **arguments: Any,
    ):
        self.model = model
        limits: dict[str, Any] = {"max_memory": max_memory, "prefix_memory": prefix_memory}
        self.batch = Batch(model, batch_size=batch_size, **limits, **arguments)
        self.failure: BaseException | None = None
        """Why it gave up, if it did."""
        self.steps = 0
        self.seconds_per_answer = 0.0
        """Of the latest answers, a moving mean; from `submit` to the end."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paradec-steps", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether prompts are decoded."""
        return self.failure is None and not self._stopping.is_set()

    @property
    def occupied(self) -> int:
        """Rows that are being decoded."""
        return self.batch.occupied

    @property
    def waiting(self) -> int:
        """Prompts that wait for a row."""
        return self.batch.waiting

    def prefixes(self, name: str) -> int:
        """A count of `paradec.batching.prefixes.Prefixes`; 0 where nothing is kept."""
        return int(getattr(self.batch.prefixes, name, 0))

    def submit(
        self, prompt: Any, *, on_done: Callable[[Ticket], None], streamer: Any = None, id: Any = None, **changes: Any
    ) -> Ticket:
        """Give a prompt to the batch, from any thread.

        Its answer is that of `paradec.generate` on this prompt alone, with its seed, or a fresh one where it has none.

        Raises:
            ValueError, TypeError: a prompt or an argument that cannot be used. EngineStopped: nothing is decoded.
        """
        if not self.alive:
            raise EngineStopped(self._why())
        if changes.get("seed") is None:
            changes["seed"] = secrets.randbits(63)
        began = time.perf_counter()

        def done(ticket: Ticket) -> None:
            seconds = time.perf_counter() - began
            self.seconds_per_answer += (seconds - self.seconds_per_answer) / 16
            try:
                on_done(ticket)
            except Exception:  # whoever asked is gone: the others go on
                log.exception("nobody took the answer of prompt %s", ticket.number)

        try:
            return self.batch.add(prompt, streamer=streamer, on_done=done, id=id, alone=True, **changes)
        except BatchClosed as error:  # in between
            raise EngineStopped(self._why()) from error

    def cancel(self, ticket: Ticket) -> bool:
        """Take a prompt back, from any thread. False if it has ended."""
        return self.batch.cancel(ticket)

    def retry_after(self) -> int:
        """Seconds, 1 to 60, after which there is likely to be a row for one prompt more."""
        rounds = (self.waiting + self.batch.batch_size) / self.batch.batch_size
        return min(60, max(1, math.ceil(self.seconds_per_answer * rounds)))

    def close(self) -> None:
        """End what is being decoded with `paradec.batching.Cancelled`, and the thread with it."""
        self._stopping.set()
        self.batch.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _why(self) -> str:
        """Why nothing is decoded."""
        return f"the engine has stopped: {'it was closed' if self.failure is None else shown(self.failure)}"

    def _run(self) -> None:
        failed = 0
        while not self._stopping.is_set():
            try:
                if self.batch.wait(IDLE):
                    self.steps += 1  # before clients learn of its answers
                    ended = self.batch.step()
                    failed = 0
                    self._check_model(ended)
            except Exception as error:  # the batch is at its last commit
                failed += 1
                log.exception("a step failed (%s of %s)", failed, TRIES)
                if failed == TRIES or isinstance(error, ModelFailed):
                    self.failure = error
                    self.batch.close(EngineStopped(self._why()))
                    return

    def _check_model(self, ended: list[Ticket]) -> None:
        """Raise `ModelFailed` where a step raised for a row by itself and the model cannot be evaluated at all: else
        the fault is that row's."""
        for ticket in ended:
            error = None if ticket.output is None else ticket.output.error
            if ticket.isolated and error is not None and not isinstance(error, Cancelled):
                log.error("prompt %s failed", ticket.number, exc_info=error)
                try:
                    generate(self.model, [[1 if self.model.facts.mask_token_id == 0 else 0]], max_new_tokens=1)
                except Exception as found:
                    raise ModelFailed(f"the model fails: {shown(found)}") from found

"""The batch of a server, and the one thread that steps it."""

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
MAX_FAILURES = 3
"""Consecutive steps that fail with an error of no single prompt before the engine stops."""
IDLE_SECONDS = 0.5
"""How often an idle thread checks whether the engine is closed."""


class EngineStopped(RuntimeError):
    """Decoding has stopped: the engine was closed, or its steps failed again and again."""


class ModelFailed(RuntimeError):
    """The model raises for every input, as after the loss of its device."""


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
        """The error that stopped it."""
        self.steps = 0
        self.seconds_per_answer = 0.0
        """Moving mean of the seconds from `submit` to the end of an answer."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paradec-steps", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether prompts are decoded."""
        return self.failure is None and not self._stopping.is_set()

    @property
    def occupied(self) -> int:
        """Number of rows that are decoded."""
        return self.batch.occupied

    @property
    def waiting(self) -> int:
        """Number of prompts that wait for a row."""
        return self.batch.waiting

    def count_prefixes(self, name: str) -> int:
        """Read a count of `paradec.batching.prefixes.Prefixes`; 0 where no keys and values are kept."""
        return int(getattr(self.batch.prefixes, name, 0))

    def submit(
        self, prompt: Any, *, on_done: Callable[[Ticket], None], streamer: Any = None, id: Any = None, **changes: Any
    ) -> Ticket:
        """Give a prompt to the batch, from any thread.

        The answer is that of `paradec.generate` on this prompt alone, with its seed or a fresh one.

        Raises:
            ValueError, TypeError: a prompt or an argument that cannot be used. EngineStopped: decoding has stopped.
        """
        self.check_alive()
        if changes.get("seed") is None:
            changes["seed"] = secrets.randbits(63)
        began = time.perf_counter()

        def done(ticket: Ticket) -> None:
            seconds = time.perf_counter() - began
            self.seconds_per_answer += (seconds - self.seconds_per_answer) / 16
            try:
                on_done(ticket)
            except Exception:  # of one client: the others go on
                log.exception("the answer of prompt %s could not be delivered", ticket.number)

        try:
            return self.batch.add(prompt, streamer=streamer, on_done=done, id=id, alone=True, **changes)
        except BatchClosed as error:  # since the check above
            raise self._stopped() from error

    def check_alive(self) -> None:
        """Raise EngineStopped if decoding has stopped."""
        if not self.alive:
            raise self._stopped()

    def cancel(self, ticket: Ticket) -> bool:
        """Cancel a prompt, from any thread. False if it has ended."""
        return self.batch.cancel(ticket)

    def retry_after(self) -> int:
        """Estimate the seconds, 1 to 60, until a row is free for one more prompt."""
        rounds = (self.waiting + self.batch.batch_size) / self.batch.batch_size
        return min(60, max(1, math.ceil(self.seconds_per_answer * rounds)))

    def close(self) -> None:
        """End unfinished answers with `paradec.batching.slots.Cancelled`, then the thread."""
        self._stopping.set()
        self.batch.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _stopped(self) -> EngineStopped:
        """Build the error of a stopped engine, with the cause."""
        return EngineStopped(
            f"the engine has stopped: {'it was closed' if self.failure is None else shown(self.failure)}"
        )

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                if self.batch.wait(IDLE_SECONDS):
                    self.steps += 1  # before clients read answers of this step
                    ended = self.batch.step()
                    failures = 0
                    self._check_model(ended)
            except Exception as error:  # the batch is as after its last commit
                failures += 1
                log.exception("a step failed (%s of %s)", failures, MAX_FAILURES)
                if failures == MAX_FAILURES or isinstance(error, ModelFailed):
                    self.failure = error
                    self.batch.close(self._stopped())
                    return

    def _check_model(self, ended: list[Ticket]) -> None:
        """Raise `ModelFailed` if a row failed alone and the model then fails for another prompt too."""
        for ticket in ended:
            error = None if ticket.output is None else ticket.output.error
            if ticket.isolated and error is not None and not isinstance(error, Cancelled):
                log.error("prompt %s failed", ticket.number, exc_info=error)
                try:
                    generate(self.model, [[1 if self.model.facts.mask_token_id == 0 else 0]], max_new_tokens=1)
                except Exception as failure:
                    raise ModelFailed(f"the model fails: {shown(failure)}") from failure

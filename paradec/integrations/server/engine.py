"""Engine of a server: a batch, the thread that steps it, and metrics."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from paradec.api.generate import generate
from paradec.batching.batch import Batch
from paradec.batching.slots import BatchClosed, Cancelled, Ticket
from paradec.core.checks import short_repr

log = logging.getLogger(__name__)
MAX_FAILURES = 3  # the engine stops after this many consecutive steps that raise
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)  # bounds of histograms
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Engine:
    """Decoder of prompts that many threads submit. Arguments and errors: as `paradec.batching.Batch`."""

    def __init__(self, model: Any, *, batch_size: int = 8, **arguments: Any):
        self.model, self.batch = model, Batch(model, batch_size=batch_size, **arguments)
        self.num_steps, self.seconds_per_answer = 0, 0.0  # seconds from `submit` to the answer: a moving mean
        self.metrics = Metrics(self)
        self._thread = threading.Thread(target=self._run, name="paradec-steps", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return not self.batch.closed

    def submit(self, prompt: Any, *, on_done: Callable[[Ticket], None], **arguments: Any) -> Ticket:
        """Add a prompt with `Batch.add`; the answer is that of `paradec.generate` for this prompt alone. The engine's
        thread calls `on_done`. If `seed` is not given, a random one is used. To cancel: `batch.cancel(ticket)`."""
        if arguments.get("seed") is None:
            arguments["seed"] = secrets.randbits(63)

        def deliver(ticket: Ticket) -> None:
            self.seconds_per_answer += (time.perf_counter() - ticket.add_time - self.seconds_per_answer) / 16
            self.metrics.record_answer(ticket)
            try:
                on_done(ticket)
            except Exception:  # the answers of other clients must continue
                log.exception("the answer of prompt %s could not be delivered", ticket.number)

        return self.batch.add(prompt, on_done=deliver, alone=True, **arguments)

    def retry_after(self) -> int:
        """Estimate the seconds until the batch has a free row for one more prompt: 1 to 60."""
        return min(60, max(1, math.ceil(self.seconds_per_answer * (1 + self.batch.waiting / self.batch.batch_size))))

    def close(self) -> None:
        """End unfinished answers with `paradec.batching.slots.Cancelled`, then stop the thread."""
        self.batch.close()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        failures = 0
        while self.alive:
            try:
                if self.batch.wait():
                    self.num_steps += 1  # first, since `step` delivers answers to clients, who may read this metric
                    tickets = self.batch.step()
                    failures = MAX_FAILURES - 1  # if `generate` below raises too, the model is broken: stop at once
                    for ticket in tickets:
                        error = ticket.output and ticket.output.error
                        if ticket.isolated and error and not isinstance(error, Cancelled):
                            log.error("prompt %s failed", ticket.number, exc_info=error)
                            generate(self.model, [[int(self.model.facts.mask_token_id == 0)]], max_new_tokens=1)
                    failures = 0
            except Exception as error:  # the batch is unchanged since its last commit
                failures += 1
                log.exception("a step failed (%s of %s)", failures, MAX_FAILURES)
                if failures == MAX_FAILURES:
                    self.batch.close(BatchClosed(f"decoding has stopped: {short_repr(error)}"))


class Metrics:
    """Metrics of one engine and its server, in their own Prometheus registry."""

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()
        count = partial(Counter, registry=self.registry)
        times = partial(Histogram, registry=self.registry, buckets=SECONDS)
        self.requests = count("paradec_requests", "HTTP requests.", ("path", "status"))
        self.seconds = times("paradec_request_seconds", "Seconds per HTTP request.", ("path",))
        self.first = times("paradec_first_text_seconds", "Seconds to the first text of a stream.")
        self.waiting = times("paradec_waiting_seconds", "Seconds that a prompt waits for a row.")
        self.committed = times("paradec_first_token_seconds", "Seconds to the first committed step, waiting included.")
        self.per_token = times("paradec_token_seconds", "Seconds of decoding per token.", buckets=TOKEN_SECONDS)
        self.answers = count("paradec_answers", "Answers: whole, cancelled or failed.", ("end",))
        self.tokens = count("paradec_tokens", "Tokens of prompts and answers.", ("of",))
        self.row_calls = count("paradec_row_calls", "Forwards of all answers.")
        self.positions = count("paradec_positions", "Positions evaluated by these forwards.")
        prefixes = engine.batch.prefixes  # None without a prefix cache
        for name, text, owner, attribute in (
            ("rows_occupied", "Rows that are decoded.", engine.batch, "occupied"),
            ("prompts_waiting", "Prompts that wait for a row.", engine.batch, "waiting"),
            ("steps", "Steps of the batch since the start.", engine, "num_steps"),
            ("prefix_rows", "Rows that began with stored keys and values.", prefixes, "hits"),
            ("prefix_tokens", "Positions that these rows did not evaluate.", prefixes, "saved_positions"),
            ("prefix_bytes", "Bytes of stored prefixes.", prefixes, "nbytes"),
            ("alive", "1 until decoding stops.", engine, "alive"),
        ):
            Gauge(f"paradec_{name}", text, registry=self.registry).set_function(partial(getattr, owner, attribute, 0))

    def record_answer(self, ticket: Ticket) -> None:
        """Record the tokens, costs and times of a finished prompt."""
        output: Any = ticket.output
        end = "whole" if output.error is None else "cancelled" if isinstance(output.error, Cancelled) else "failed"
        self.answers.labels(end).inc()
        self.tokens.labels("prompts").inc(len(ticket.prompts.rows[0]))
        self.tokens.labels("answers").inc(output.tokens[0])
        self.row_calls.inc(output.row_nfe[0])
        self.positions.inc(output.forwarded_tokens)
        if ticket.start_time:
            self.waiting.observe(ticket.start_time - ticket.add_time)
        if ticket.first_commit_time:
            self.committed.observe(ticket.first_commit_time - ticket.add_time)
            self.per_token.observe((time.perf_counter() - ticket.start_time) / max(1, output.tokens[0]))

"""What Prometheus reads at /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paradec.batching.slots import Cancelled
from paradec.integrations.server.engine import Engine

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counts of one server, in a registry of their own."""

    def __init__(self, engine: Engine):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("paradec_requests", "HTTP requests.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "paradec_request_seconds", "Seconds per HTTP request.", ["path"], buckets=SECONDS, registry=registry
        )
        self.first = Histogram(
            "paradec_first_token_seconds", "Seconds to the first text.", buckets=SECONDS, registry=registry
        )
        self.answers = Counter("paradec_answers", "Answers by how they ended.", ["end"], registry=registry)
        self.tokens = Counter("paradec_tokens", "Tokens of prompts and answers.", ["of"], registry=registry)
        self.row_calls = Counter("paradec_row_calls", "Forwards that each answer took, added.", registry=registry)
        for name, text, count in (
            ("paradec_rows_occupied", "Rows that are being decoded.", lambda: engine.occupied),
            ("paradec_prompts_waiting", "Prompts that wait for a row.", lambda: engine.waiting),
            ("paradec_steps", "Steps of the batch since the start.", lambda: engine.steps),
            ("paradec_prefix_rows", "Rows that began with stored keys and values.", lambda: engine.prefixes("hits")),
            ("paradec_prefix_tokens", "Positions that these did not evaluate.", lambda: engine.prefixes("saved")),
            ("paradec_prefix_bytes", "Bytes of stored beginnings.", lambda: engine.prefixes("nbytes")),
            ("paradec_alive", "1 as long as prompts are decoded.", lambda: engine.alive),
        ):
            Gauge(name, text, registry=registry).set_function(count)

    def first_token(self) -> Callable[[], None]:
        """A clock that starts now, to be called at the first text."""
        began = time.perf_counter()
        return lambda: self.first.observe(time.perf_counter() - began)

    def answer(self, prompt: int, tokens: int, forwards: int, error: Exception | None) -> None:
        """An answer has ended: of a prompt of so many tokens, with so many of its own."""
        end = "whole" if error is None else "cancelled" if isinstance(error, Cancelled) else "failed"
        self.answers.labels(end).inc()
        self.tokens.labels("prompts").inc(prompt)
        self.tokens.labels("answers").inc(tokens)
        self.row_calls.inc(forwards)

    def text(self) -> bytes:
        """In Prometheus' own format."""
        return generate_latest(self.registry)

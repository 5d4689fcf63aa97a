"""Counts and times for Prometheus, at /metrics."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from paradec.batching.slots import Cancelled, Ticket
from paradec.integrations.server.engine import Engine

TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine):
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("paradec_requests", "HTTP requests.", ["path", "status"], registry=registry)
        self.seconds = Histogram(
            "paradec_request_seconds", "Seconds per HTTP request.", ["path"], buckets=SECONDS, registry=registry
        )
        self.first = Histogram(
            "paradec_first_text_seconds", "Seconds to the first text of a stream.", buckets=SECONDS, registry=registry
        )
        self.waiting = Histogram(
            "paradec_waiting_seconds", "Seconds that a prompt waits for a row.", buckets=SECONDS, registry=registry
        )
        self.committed = Histogram(
            "paradec_first_token_seconds",
            "Seconds to the first step of a prompt that is committed, waiting included.",
            buckets=SECONDS,
            registry=registry,
        )
        self.per_token = Histogram(
            "paradec_token_seconds",
            "Seconds of decoding per token of an answer.",
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self.answers = Counter("paradec_answers", "Answers by how they ended.", ["end"], registry=registry)
        self.tokens = Counter("paradec_tokens", "Tokens of prompts and answers.", ["of"], registry=registry)
        self.row_calls = Counter("paradec_row_calls", "Forwards that each answer took, added.", registry=registry)
        self.positions = Counter("paradec_positions", "Positions that these evaluated.", registry=registry)
        for name, text, count in (
            ("paradec_rows_occupied", "Rows that are being decoded.", lambda: engine.occupied),
            ("paradec_prompts_waiting", "Prompts that wait for a row.", lambda: engine.waiting),
            ("paradec_steps", "Steps of the batch since the start.", lambda: engine.steps),
            (
                "paradec_prefix_rows",
                "Rows that began with stored keys and values.",
                lambda: engine.count_prefixes("hits"),
            ),
            ("paradec_prefix_tokens", "Positions that these did not evaluate.", lambda: engine.count_prefixes("saved")),
            ("paradec_prefix_bytes", "Bytes of stored beginnings.", lambda: engine.count_prefixes("nbytes")),
            ("paradec_alive", "1 as long as prompts are decoded.", lambda: engine.alive),
        ):
            Gauge(name, text, registry=registry).set_function(count)

    def record_answer(self, ticket: Ticket) -> None:
        """Record a prompt that has ended now: its tokens, its work, and the times of its row."""
        output = ticket.output
        assert output is not None
        error, tokens = output.error, output.tokens[0]
        end = "whole" if error is None else "cancelled" if isinstance(error, Cancelled) else "failed"
        self.answers.labels(end).inc()
        self.tokens.labels("prompts").inc(len(ticket.prompts.rows[0]))
        self.tokens.labels("answers").inc(tokens)
        self.row_calls.inc(output.row_nfe[0])
        self.positions.inc(output.forwarded_tokens)
        if ticket.began:
            self.waiting.observe(ticket.began - ticket.added)
        if ticket.committed:
            self.committed.observe(ticket.committed - ticket.added)
            self.per_token.observe((time.perf_counter() - ticket.began) / max(1, tokens))

    def to_text(self) -> bytes:
        """Write all of them in Prometheus' text format."""
        return generate_latest(self.registry)

"""Output of the commands: answers and their cost on standard output, progress and warnings on standard error.

rich is imported at its first use.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import paradec
from paradec.core.checks import format_count, throughput_unit
from paradec.core.interrupts import EXIT_CODE, restore_interrupt

if TYPE_CHECKING:
    from paradec.api.output import Output
    from paradec.attention.sparsed import AttentionCost
    from paradec.core.protocol import Commit, State


def on_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal that can redraw lines; TERM=dumb cannot."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def quiet_loading() -> None:
    """Silence the libraries' advice, and their progress bars except on a terminal."""
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # an unreachable hub would be reported at every retry
    logging.set_verbosity_error()
    if not on_terminal(sys.stderr):
        logging.disable_progress_bar()
        disable_progress_bars()


@contextmanager
def waiting(label: str) -> Iterator[None]:
    """Show `label` on a terminal until the block ends."""
    if on_terminal(sys.stderr):
        print(f"{label} ...", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        clear_line()


def clear_line() -> None:
    """Remove the line of `waiting` from a terminal."""
    if on_terminal(sys.stderr):
        print("\r\033[2K", end="", file=sys.stderr, flush=True)


def forwards(nfe: int, row_nfe: Sequence[int]) -> str:
    """Format forwards: "3 forwards", and for several rows also their sum: "4 forwards (9 row calls)"."""
    calls = f" ({format_count(sum(row_nfe), 'row call')})" if len(row_nfe) > 1 else ""
    return format_count(nfe, "forward") + calls


PER_ROW = ("tokens", "finished", "row_nfe", "draft_nfe", "encoder_calls")
TOTALS = ("nfe", "row_forwards", "forwarded_tokens", "seconds")


class Answers:
    """Answers of one command so far (`rows`: a list per field), and their cost (`totals`: sums over batches).

    is_single: whether only one answer is requested, so that the report has no lists. tokenizer: for `logprobs`."""

    def __init__(self, is_single: bool, tokenizer: Any = None):
        self.is_single, self.tokenizer = is_single, tokenizer
        texts = ("text", "fills", "reasoning", "new_tokens", "logprobs")
        self.rows: dict[str, list[Any]] = {name: [] for name in (*texts, *PER_ROW)}
        self.totals: dict[str, Any] = dict.fromkeys(TOTALS, 0)
        self.drafter_forwards = 0
        self.attention: AttentionCost | None = None

    def __len__(self) -> int:
        return len(self.rows["tokens"])

    def add(self, output: Output, rows: Sequence[int]) -> None:
        """Add the answers in `rows` of a batch, and the cost of the whole batch."""
        new = output.new_tokens.tolist()
        # remove the padding after the end token
        new_tokens = [new[row][: output.tokens[row]] if output.finished[row] else new[row] for row in range(len(new))]
        fields: dict[str, Any] = {name: getattr(output, name) for name in PER_ROW} | {"new_tokens": new_tokens}
        for name in ("text", "fills", "reasoning"):
            value: Any = getattr(output, name)
            fields[name] = [value] if self.is_single and value is not None else value
        fields["logprobs"] = (
            None if output.logprobs is None else [self._list_logprobs(output, row) for row in range(len(new))]
        )
        for name, values in fields.items():
            self.rows[name] += [] if values is None else [values[row] for row in rows]
        for name in TOTALS:
            self.totals[name] += getattr(output, name)
        self.drafter_forwards += max(output.draft_nfe or (0,))
        if output.attention is not None:
            self.attention = _add_attention(self.attention, output.attention, rows)

    def _list_logprobs(self, output: Output, row: int) -> list[dict[str, Any]]:
        """List token, log-probability and likeliest tokens of each filled position of a row."""
        logprobs, entries = output.logprobs, []
        assert logprobs is not None
        for column in output.filled[row].nonzero().flatten().tolist():
            log_p = float(logprobs.chosen[row, column])
            if log_p == log_p:  # not NaN: a step wrote the token
                best = zip(logprobs.best_tokens[row, column].tolist(), logprobs.best[row, column].tolist(), strict=True)
                likely = [[self._decode_token(token), round(value, 4)] for token, value in best]
                token = self._decode_token(int(output.sequences[row, column]))
                entries.append({"token": token, "logprob": round(log_p, 4), "likely": likely})
        return entries

    def _decode_token(self, token: int) -> str:
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))

    @property
    def tokens_per_forward(self) -> float:
        """Tokens divided by the rows' forwards."""
        return sum(self.rows["tokens"]) / max(1, sum(self.rows["row_nfe"]))

    def summary(self, num_requested: int, interrupted: bool) -> str:
        """Describe the cost in one line. num_requested: number of requested answers."""
        rows, missing = self.rows, f" after {len(self)} of {num_requested} answers" if num_requested > 1 else ""
        end = f", interrupted{missing}" if interrupted else ""
        drafts = f", {forwards(self.drafter_forwards, rows['draft_nfe'])} of the drafter" if rows["draft_nfe"] else ""
        if rows["encoder_calls"]:
            drafts = f" ({sum(rows['encoder_calls'])} of the encoder)"
        return (
            f"{format_count(sum(rows['tokens']), 'token')}, {forwards(self.totals['nfe'], rows['row_nfe'])}{drafts}, "
            f"{self.tokens_per_forward:.1f} {throughput_unit(len(self))}, {self.totals['seconds']:.2f} s{end}"
        )

    def report(self, sampler: Any, cache: str, interrupted: bool) -> dict[str, Any]:
        """Convert answers and cost to JSON data."""
        data = {name: values[0] if self.is_single else values for name, values in self.rows.items() if values}
        data.pop("new_tokens" if "fills" in data else "fills", None)
        data |= self.totals | {"tokens_per_forward": self.tokens_per_forward, "sampler": sampler.to_dict()}
        data |= {"cache": cache, "interrupted": interrupted}
        return data if self.attention is None else data | {"attention": dataclasses.asdict(self.attention)}


def _add_attention(total: AttentionCost | None, attention: AttentionCost, rows: Sequence[int]) -> AttentionCost:
    """Add the cost of a batch, for its `rows`, to `total`. Bytes are the maximum, since batches run one by one."""
    changes: dict[str, Any] = {}
    for entry in dataclasses.fields(attention):
        value = getattr(attention, entry.name)
        if isinstance(value, list):
            changes[entry.name] = ([] if total is None else getattr(total, entry.name)) + [value[row] for row in rows]
    pattern_bytes = max(attention.pattern_bytes, 0 if total is None else total.pattern_bytes)
    return dataclasses.replace(attention, **changes, pattern_bytes=pattern_bytes)


def with_bar(run: Callable[[Bar], Any]) -> tuple[Any, int]:
    """Run with a progress bar. Returns the output (after Ctrl-C, of the finished part) and the exit code."""
    restore_interrupt()
    try:
        with Bar() as bar:
            return run(bar), 0
    except paradec.Interrupted as interrupt:
        return interrupt.output, EXIT_CODE


class Bar:
    """A progress bar on standard error, if that is a terminal. It appears after one second."""

    delay = 1.0
    interval = 0.1  # seconds between updates; not less, since reading a state's progress may wait for a GPU
    line_interval = 30.0  # seconds between the lines of `show_share` without a terminal

    def __init__(self) -> None:
        self.enabled = on_terminal(sys.stderr)
        self.progress: Any = None
        self.task: Any = None
        self.due = time.monotonic() + (self.delay if self.enabled else self.line_interval)
        self.first, self.rows, self.total = 0, 1, 1

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar from the terminal; an update after `delay` draws it again."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
            self.due = time.monotonic() + self.delay

    def set_range(self, first: int, rows: int, total: int) -> None:
        """Set the progress of the next batch: `rows` of `total` answers, after the first `first` answers."""
        self.first, self.rows, self.total = first, rows, total

    def update(self, state: State, commit: Commit) -> None:
        """Show a state's progress. A `callback` of `paradec.generate` and `generate_images`."""
        if self._is_due():
            decided, positions = state.progress
            self._show("decoding", (self.first + self.rows * decided / max(1, positions)) / self.total)

    def show_share(self, label: str, share: float, num_answered: int = 0, num_total: int = 0) -> None:
        """Show the share of the work that is done, and numbers of prompts. Without a terminal, print a line every
        `line_interval` seconds."""
        text = f"{label}: {num_answered} of {num_total} prompts" if num_total else label
        if self._is_due():
            self._show(text, share)
        elif not self.enabled and time.monotonic() >= self.due:
            self.due = time.monotonic() + self.line_interval
            print(f"{text} ({share:.0%})", file=sys.stderr, flush=True)

    def _is_due(self) -> bool:
        time_now = time.monotonic()
        if not self.enabled or time_now < self.due:
            return False
        self.due = time_now + self.interval
        return True

    def _show(self, label: str, share: float) -> None:
        if self.progress is None:
            from rich.console import Console
            from rich.progress import Progress

            # some configurations take ten times as long as others: the speed is a mean over 5 minutes
            console = Console(stderr=True)
            self.progress = Progress(console=console, transient=True, speed_estimate_period=300, redirect_stdout=False)
            self.task = self.progress.add_task(label, total=1.0)
            self.progress.start()
        self.progress.update(self.task, description=label, completed=share)

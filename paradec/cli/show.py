"""What the commands print: answers, pictures, what is waited for, progress. `tables` and `watch` have the rest.

Standard output is for results, standard error for progress and warnings. What draws (rich) is imported when something
is drawn.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paradec.core.checks import count, per_forward

if TYPE_CHECKING:
    from paradec.api.images import ImageOutput
    from paradec.api.output import Output
    from paradec.attention.sparsed import AttentionCost
    from paradec.cli.sheets import Made
    from paradec.core.protocol import Commit, State

EQUAL = "all answers are equal: temperature 0 takes the likeliest token every time (--temperature 1 draws)"


# The terminal ----------------------------------------------------------------------------------------------------


def on_terminal(stream: Any) -> bool:
    """Whether lines can be drawn again there; TERM=dumb cannot."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def quiet_loading() -> None:
    """Keep the libraries' own progress bars and advice out of logs and pipes; a terminal still shows downloads."""
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # a hub out of reach would be reported at each of its retries
    logging.set_verbosity_error()
    if not on_terminal(sys.stderr):  # large checkpoints take minutes to read, and there the bar says how far it is
        logging.disable_progress_bar()
        disable_progress_bars()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on a terminal what is waited for, at once and until it is there: libraries take seconds to import."""
    if not on_terminal(sys.stderr):
        yield
        return
    global _waiting
    sys.stderr.write(f"{what} ...")
    sys.stderr.flush()
    _waiting = True
    try:
        yield
    finally:
        clear_waiting()


_waiting = False


def clear_waiting() -> None:
    """Take the line of `waiting` away, for what is printed in its place."""
    global _waiting
    if _waiting:
        sys.stderr.write("\r\033[2K")
        sys.stderr.flush()
    _waiting = False


# Answers of `generate` and `infill` -------------------------------------------------------------------------------


def forwards(nfe: int, row_nfe: Sequence[int]) -> str:
    """ "3 forwards", and of several rows what they add up to: "4 forwards (9 row calls)"."""
    calls = f" ({count(sum(row_nfe), 'row call')})" if len(row_nfe) > 1 else ""
    return count(nfe, "forward") + calls


def numbered(text: Any, index: int | None) -> str:
    """An answer's text, with its number, from 1, where there are several: where `index`, from 0, is not None."""
    return str(text) if index is None else f"[{index + 1}] {text}"


@dataclass
class Answers:
    """What the batches of one command have given so far. Lists have an entry per answer."""

    single: bool
    """Whether one answer was asked for: then there are no lists in the report."""
    texts: list[Any] = field(default_factory=list)
    fills: list[Any] = field(default_factory=list)
    new_tokens: list[list[int]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)
    nfe: int = 0
    """Forwards of all batches."""
    row_nfe: list[int] = field(default_factory=list)
    row_forwards: int = 0
    forwarded_tokens: int = 0
    seconds: float = 0.0
    attention: AttentionCost | None = None
    drafter_forwards: int = 0
    draft_nfe: list[int] = field(default_factory=list)
    encoder_calls: list[int] = field(default_factory=list)

    def add(self, output: Output, rows: Sequence[int]) -> None:
        """Add a batch's answers, of which `rows` are kept; what it cost counts for all of them."""

        def of(values: Any) -> list[Any]:
            listed = [values] if self.single else values
            return [listed[row] for row in rows]

        self.texts += of(output.text)
        if output.fills is not None:
            self.fills += of(output.fills)
        new = output.new_tokens.tolist()
        # without the padding after the end token
        self.new_tokens += [new[row][: output.tokens[row]] if output.finished[row] else new[row] for row in rows]
        for name in ("tokens", "finished", "row_nfe"):
            values = getattr(output, name)
            getattr(self, name).extend(values[row] for row in rows)
        for name in ("draft_nfe", "encoder_calls"):
            values = getattr(output, name)
            if values is not None:
                getattr(self, name).extend(values[row] for row in rows)
        self.drafter_forwards += max(output.draft_nfe or (0,))
        for name in ("nfe", "row_forwards", "forwarded_tokens", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(output, name))
        if output.attention is not None:
            self.attention = _joined(self.attention, output.attention, rows)

    def summary(self, asked: int, interrupted: bool) -> str:
        """What they cost, in one line; `asked`: how many answers were wanted."""
        rate = sum(self.tokens) / max(1, sum(self.row_nfe))
        missing = f" after {len(self.tokens)} of {asked} answers" if asked > 1 else ""
        end = f", interrupted{missing}" if interrupted else ""
        drafts = f", {forwards(self.drafter_forwards, self.draft_nfe)} of the drafter" if self.draft_nfe else ""
        if self.encoder_calls:
            drafts = f" ({sum(self.encoder_calls)} of the encoder)"
        return (
            f"{count(sum(self.tokens), 'token')}, {forwards(self.nfe, self.row_nfe)}{drafts}, {rate:.1f} "
            f"{per_forward(len(self.row_nfe))}, {self.seconds:.2f} s{end}"
        )

    def report(self, sampler: Any, cache: str, interrupted: bool) -> dict[str, Any]:
        """The same as data."""

        def rows(values: list[Any]) -> Any:
            return values[0] if self.single else values

        found: dict[str, Any] = {"text": rows(self.texts)}
        found |= {"fills": rows(self.fills)} if self.fills else {"new_tokens": rows(self.new_tokens)}
        found |= {
            "tokens": rows(self.tokens),
            "finished": rows(self.finished),
            "nfe": self.nfe,
            "row_nfe": rows(self.row_nfe),
            "row_forwards": self.row_forwards,
            "forwarded_tokens": self.forwarded_tokens,
            "tokens_per_forward": sum(self.tokens) / max(1, sum(self.row_nfe)),
            "seconds": self.seconds,
            "sampler": sampler.to_dict(),
            "cache": cache,
            "interrupted": interrupted,
        }
        if self.attention is not None:
            found["attention"] = dataclasses.asdict(self.attention)
        if self.draft_nfe:
            found["draft_nfe"] = rows(self.draft_nfe)
        if self.encoder_calls:
            found["encoder_calls"] = rows(self.encoder_calls)
        return found


def _joined(before: AttentionCost | None, found: AttentionCost, rows: Sequence[int]) -> AttentionCost:
    """The costs of two batches, of the second those of `rows`; bytes are held one batch after the other."""
    changes: dict[str, Any] = {}
    for each in dataclasses.fields(found):
        value = getattr(found, each.name)
        if isinstance(value, list):
            changes[each.name] = ([] if before is None else getattr(before, each.name)) + [value[row] for row in rows]
    most = max(found.pattern_bytes, 0 if before is None else before.pattern_bytes)
    return dataclasses.replace(found, **changes, pattern_bytes=most)


# Pictures of `image` ---------------------------------------------------------------------------------------------


def pictures_summary(out: Path, output: ImageOutput) -> str:
    """What pictures of a model cost, in one line; `out`: the file of the sheet."""
    what = f"{count(len(output.row_nfe), 'picture')} of {output.grid.height} x {output.grid.width} tokens"
    end = f" in {out}" if output.images is not None else ", interrupted"
    drafted, rate = max(output.draft_nfe, default=0), f"{output.tokens_per_forward:.2f}"
    drafts = f", {forwards(drafted, output.draft_nfe)} of the drafter" if drafted else ""
    took = f"{forwards(output.nfe, output.row_nfe)}{drafts}, {rate} {per_forward(len(output.row_nfe))}"
    return f"{what}{end}: {took}, {output.seconds:.2f} s"


def pictures_report(out: Path, conditions: dict[str, Any], output: ImageOutput, sampler: Any) -> dict[str, Any]:
    """The same as data."""
    return {
        "out": None if output.images is None else str(out),
        **conditions,
        "codes": None if output.codes is None else output.codes.tolist(),
        "nfe": output.nfe,
        "row_nfe": output.row_nfe,
        "draft_nfe": output.draft_nfe,
        "row_forwards": output.row_forwards,
        "forwarded_tokens": output.forwarded_tokens,
        "tokens_per_forward": output.tokens_per_forward,
        "accepted": output.accepted.T.tolist(),
        "seconds": output.seconds,
        "sampler": sampler.to_dict(),
        "interrupted": output.images is None,
    }


def pipeline_summary(out: Path, made: Made) -> str:
    """What pictures of a diffusers pipeline cost, and the session's own summary."""
    width, height = made.images[0].size
    what = f"{count(len(made.images), 'picture')} of {height} x {width} pixels in {out}, {made.seconds:.2f} s"
    if made.plain is not None:
        what += f" (plain, above: {made.plain_seconds:.2f} s; pixels {made.difference:.4f} apart)"
    return what if made.told is None else f"{what}\n{getattr(made.told, 'summary', str(made.told))}"


def pipeline_report(out: Path, conditions: dict[str, Any], pipeline: str, sampler: Any, made: Made) -> dict[str, Any]:
    """The same as data; `pipeline`: the name of its class."""
    found = {
        "out": str(out),
        **conditions,
        "pipeline": pipeline,
        "pictures": len(made.images),
        "seconds": made.seconds,
        "sampler": sampler.to_dict(),
    }
    if made.plain is not None:
        found |= {"plain_seconds": made.plain_seconds, "pixel_difference": made.difference}
    if hasattr(made.told, "calls"):
        fields = ("transformer", "step", "branch", "kind", "evaluated", "forecast", "bytes", "seconds")
        calls = [{name: getattr(call, name) for name in fields} for call in made.told.calls]
        found |= {"full_steps": made.told.full_steps, "bytes": made.told.bytes, "calls": calls}
    elif made.told is not None:
        found |= {"cells": made.told.cells, "bytes": made.told.bytes}
    return found


# A trained filter ------------------------------------------------------------------------------------------------


def filter_summary(out: Path, held_out: dict[str, Any], threshold: float) -> str:
    """How good a filter of Learn2PD is, in one line; `held_out`: what was measured."""
    return (
        f"{out}: precision {held_out['precision']:.4f}, recall {held_out['recall']:.4f} at {threshold:g}, over "
        f"{held_out['undecided']} undecided positions of prompts kept from training"
    )


# Progress --------------------------------------------------------------------------------------------------------


class Bar:
    """A progress bar on standard error, on a terminal only, that appears once the work has lasted a second."""

    delay = 1.0
    interval = 0.1

    def __init__(self) -> None:
        self.enabled = on_terminal(sys.stderr)
        self.progress: Any = None
        self.task: Any = None
        self.due = time.monotonic() + self.delay
        self.before, self.rows, self.answers = 0, 1, 1
        self.since: tuple[float, int] | None = None
        """When work began, and how many prompts had been answered before it."""

    def __enter__(self) -> Bar:
        self.due = time.monotonic() + self.delay
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take it off the terminal, until the next update that is a while away."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
            self.due = time.monotonic() + self.delay

    def among(self, before: int, rows: int, answers: int) -> None:
        """From now on `rows` of so many answers are decoded, with so many before them."""
        self.before, self.rows, self.answers = before, rows, answers

    def update(self, state: State, commit: Commit) -> None:
        """Called by `paradec.generate` after every commit."""
        if not self._is_due():
            return
        decided, total = state.progress
        if self.rows == self.answers:
            self._show("decoding", decided, total, 30)
        else:
            self._show("answers", self.before + self.rows * decided // max(1, total), self.answers, 600)

    def work(self, what: str, share: float, asked: int = 0, to_ask: int = 0) -> None:
        """Called by `paradec compare` and `tune` after every batch, with the prompts that were answered of how many."""
        now = time.monotonic()
        began, before = self.since = self.since or (now, asked)
        if self._is_due():
            rate = f", {(asked - before) / (now - began):.1f} prompts/s" if asked > before and now > began else ""
            said = f"{what}: {asked} of {to_ask} prompts{rate}" if to_ask else what
            # some configurations take ten times as long as others: judge the time left by a longer past
            self._show(said, round(1000 * share), 1000, 600)

    def _is_due(self) -> bool:
        now = time.monotonic()
        if not self.enabled or now < self.due:
            return False
        self.due = now + self.interval
        return True

    def _show(self, what: str, completed: int, total: int, period: float) -> None:
        if self.progress is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )

            # thousandths of the work are nobody's unit
            done = TaskProgressColumn() if total == 1000 else MofNCompleteColumn()
            columns = (TextColumn("{task.description}"), BarColumn(), done, TimeRemainingColumn())
            console = Console(stderr=True)
            self.progress = Progress(
                *columns, console=console, transient=True, speed_estimate_period=period, redirect_stdout=False
            )
            self.task = self.progress.add_task(what, total=total)
            self.progress.start()
        self.progress.update(self.task, description=what, completed=completed, total=total)

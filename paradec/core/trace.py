"""A replayable record of a decoding: what each step evaluated and what it made final.

`paradec.tools.traces` draws it: pages, animations, plots. This module knows data alone.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from paradec.core.checks import format_count, shown
from paradec.core.registry import Registry
from paradec.core.text_files import from_fields, parse_json, read_text, value_error, write_bytes

MAX_COUNT = 2**53
"""What browsers count exactly."""
Span = tuple[int, int]
"""First position, and the one after the last."""


def _check_token(value: Any) -> Any:
    numbers = isinstance(value, list) and all(isinstance(entry, (int, float)) for entry in value)
    if value is None or numbers or isinstance(value, int) and not isinstance(value, bool):
        return value
    raise value_error(value, "an id, the numbers of a continuous token, or null")


def _check_counts(value: Any) -> Any:
    if 0 <= min(value, default=0) and max(value, default=0) < MAX_COUNT:
        return value
    raise value_error(value, f"counts from 0 to {MAX_COUNT}")


Token = Annotated[Any, _check_token]
"""An id; of continuous tokens the numbers, None where undecided."""
Counts = Annotated[list[int], _check_counts]


@dataclass
class TraceStep:
    """One step. Rows count from 0; positions count from a row's first prompt token.

    What comes after `kind` is None in records that do not have it, and is left out where steps are compared.
    """

    commits: list[tuple[int, int, Token, float]]
    """(row, position, token, confidence) of everything that was written, sorted; the mask id where a sampler took a
    token back."""
    forwarded: Counts
    """Positions evaluated for each row, in both branches of a guidance pair and in every draft, padding excluded; 0
    where the row took no part. Steps and rows together make `Output.forwarded_tokens`."""
    kind: str
    """"full" (whole sequences), "window" (a part, over a store), "forecast" (no evaluation), ..."""
    nfe: Counts | None = field(default=None, compare=False)
    """Forward calls that each row took part in."""
    draft_nfe: Counts | None = field(default=None, compare=False)
    """Forward calls of a model that drafts, of each row, in all steps until this one was evaluated."""
    seconds: float | None = field(default=None, compare=False)
    """Wall time of the step."""
    evaluated: list[list[Span]] | None = field(default=None, compare=False)
    """Which positions of each row were evaluated."""
    blocks: list[Span | None] | None = field(default=None, compare=False)
    """The open block of each row, or its window of drafts; None where the row took no part."""
    starts: list[list[int] | None] | None = field(default=None, compare=False)
    """With pipelined blocks, where each row's open blocks begin, from left to right: `blocks` reaches from the first of
    them to the end of the last. None where the row took no part."""
    rejected: list[tuple[int, int, int]] | None = field(default=None, compare=False)
    """(row, position, token) of the drafts that were evaluated and did not become final."""
    rules: list[int] | None = field(default=None, compare=False)
    """What each entry of `commits` is due to: a place in `Trace.rules`."""
    logprobs: list[list[Any]] | None = field(default=None, compare=False)
    """With `generate(logprobs=k)`, for every entry of `commits`: [its log-probability, [[token, log-probability], ...]]
    of the k likeliest, None for what is not finite."""
    pictures: list[str] | None = field(default=None, compare=False)
    """Of a latent: a small picture of each row after the step, as a data URI."""

    def to_dict(self) -> dict[str, Any]:
        """As data that JSON can hold, without what is None."""
        return {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TraceStep:
        """Inverse of `to_dict`; names of later versions are passed over.

        Raises:
            ValueError: a field that is missing, or of another type; the message names it.
        """
        return from_fields(cls, data)


@dataclass
class Notes:
    """What is seen of a step before it is committed, for its `TraceStep`."""

    nfe: list[int]
    evaluated: list[list[Span]] | None = None
    blocks: list[Span | None] | None = None
    starts: list[list[int] | None] | None = None
    draft_nfe: list[int] | None = None
    drafts: set[tuple[int, int, int]] | None = None
    """(row, position, token) of all drafts that are evaluated; None where nothing is drafted."""
    rules: Mapping[tuple[int, int], str] | None = None
    """What writes at (row, position), where that is not the sampler as a whole."""


DRAFTED_RULE, SAMPLED_RULE = "accepted draft", "own token"
"""Names in `Trace.rules` of tokens that were drafted, and of those that the model chose itself."""


@dataclass
class Trace:
    """All steps of one request, and what is needed to replay them: the canvas before the first step.

    What comes after `steps` says how to draw it.
    """

    canvas: list[list[Token]]
    """The ids that decoding started from, one list per row, without padding."""
    settings: dict[str, Any] = field(default_factory=dict)
    steps: list[TraceStep] = field(default_factory=list)
    family: str = ""
    """Of the sampler."""
    score: str = "confidence"
    """What the commits' fourth number is, by the name that samplers give it."""
    cache: str = ""
    unit: str = "positions"
    """What `TraceStep.forwarded` counts."""
    mask_id: int | None = None
    """The id at undecided positions, of masked samplers."""
    filled: list[list[Span]] | None = None
    """What decoding is to fill, of each row; None where the mask ids in `canvas` say it."""
    ends: list[int] | None = None
    """The position after each row's last token: what is after it is padding."""
    rules: list[str] = field(default_factory=list)
    """Names of what `TraceStep.rules` points to."""
    texts: dict[int, str] = field(default_factory=dict)
    """Of every token in the trace, where there was a tokenizer."""
    special: list[int] = field(default_factory=list)
    """Which of them are special tokens."""
    joined: list[list[tuple[int, int, str]]] | None = None
    """(first position, the one after the last, text) of final tokens that are a text together alone, of each row."""
    cells: list[list[int]] | None = None
    """Of pictures: the positions of each row's image tokens, in reading order."""
    grid: tuple[int, int] | None = None
    """Of pictures: rows and columns of image tokens."""
    images: list[str] | None = None
    """Of pictures: what came of each row, as a data URI."""

    # ---- reading --------------------------------------------------------------------------------------------------

    def replay(self, until: int | None = None) -> list[list[int]]:
        """The canvas after the first `until` steps (all by default). Later writes win: edits and remasks replay too."""
        canvas = [list(row) for row in self.canvas]
        for step in self.steps[:until]:
            for row, position, token, _ in step.commits:
                canvas[row][position] = token
        return canvas

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.canvas) or max([len(self.images or ()), *(len(step.forwarded) for step in self.steps)])

    def to_fill(self, row: int) -> list[Span]:
        """The spans that decoding is to fill in a row; without `family`, those that it wrote to."""
        if self.filled is not None:
            return [(start, stop) for start, stop in self.filled[row]]
        if not self.canvas:
            return []
        if self.family and (self.mask_id is not None or None in self.canvas[row]):
            return to_spans(i for i, token in enumerate(self.canvas[row]) if token in (self.mask_id, None))
        return to_spans({position for step in self.steps for at, position, _, _ in step.commits if at == row})

    @property
    def row_nfe(self) -> list[int]:
        """Forward calls that each row took part in; of steps without `nfe`, those that evaluated something of it."""
        counts = [0] * self.batch
        for step in self.steps:
            for row, forwarded in enumerate(step.forwarded):
                counts[row] += step.nfe[row] if step.nfe is not None else int(forwarded > 0)
        return counts

    # ---- writing down ---------------------------------------------------------------------------------------------

    def add(
        self,
        commits: list[tuple[int, int, int, float]],
        forwarded: list[int],
        kind: str,
        notes: Notes | None = None,
        seconds: float | None = None,
        pictures: list[str] | None = None,
        logprobs: list[list[Any]] | None = None,
    ) -> None:
        """Append a step. `notes`: what was seen before its commit; None notes no more than the first three."""
        step = TraceStep(commits, forwarded, kind, logprobs=logprobs)
        self.steps.append(step)
        if notes is None:
            return
        step.nfe, step.draft_nfe, step.evaluated, step.blocks = (
            notes.nfe, notes.draft_nfe, notes.evaluated, notes.blocks
        )  # fmt: skip
        step.seconds, step.pictures, step.starts = seconds, pictures, notes.starts
        if notes.drafts is not None:
            written = {(row, position, token) for row, position, token, _ in commits}
            step.rejected = sorted(notes.drafts - written)
            named = [DRAFTED_RULE if entry[:3] in notes.drafts else SAMPLED_RULE for entry in commits]
        elif notes.rules is not None:
            named = [notes.rules.get(entry[:2], "") for entry in commits]
        else:
            return
        step.rules = [self._rule(name) for name in named]

    def _rule(self, name: str) -> int:
        if name not in self.rules:
            self.rules.append(name)
        return self.rules.index(name)

    # ---- files ----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """As data that JSON can hold: canvas, settings and steps, and what else there is."""
        always, default = ("canvas", "settings", "steps"), vars(Trace([]))
        found = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        found = {
            name: value
            for name, value in found.items()
            if name in always or value not in (None, "", [], {}) or value != default[name]
        }
        return found | {"steps": [step.to_dict() for step in self.steps]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trace:
        """Inverse of `to_dict`, of this version or an earlier one; names of later ones are passed over."""
        trace = from_fields(cls, data)
        trace._check()
        return trace

    def _check(self) -> None:
        """Raise ValueError where numbers do not fit each other, as in a file that something else wrote."""
        sizes, batch = [len(row) for row in self.canvas], self.batch
        if not isinstance(self.settings.get("sampler", ""), str):
            raise ValueError(f"settings['sampler']={shown(self.settings['sampler'])} must be a text")
        for name in ("filled", "ends", "joined", "cells"):
            rows = getattr(self, name)
            if rows is not None and len(rows) != batch:
                raise ValueError(f"{name} has {len(rows)} rows; the trace has {batch}")
        for index, step in enumerate(self.steps):
            rows = len(step.forwarded)
            if sizes and rows != batch:
                raise ValueError(f"steps[{index}].forwarded has {rows} rows; the trace has {batch}")
            for name in ("nfe", "draft_nfe", "evaluated", "blocks", "starts"):
                own = getattr(step, name)
                if own is not None and len(own) != rows:
                    raise ValueError(f"steps[{index}].{name} has {len(own)} rows; forwarded has {rows}")
            for name in ("rules", "logprobs"):
                own = getattr(step, name)
                if own is not None and len(own) != len(step.commits):
                    raise ValueError(f"steps[{index}].{name} has {len(own)} entries for {len(step.commits)} commits")
            if step.rules and not 0 <= min(step.rules) <= max(step.rules) < len(self.rules):
                raise ValueError(f"steps[{index}].rules names others than the {len(self.rules)} in rules")
        for name, row, start, stop in self._places():
            if not (0 <= row < batch and 0 <= start <= stop and (not sizes or stop <= sizes[row])):
                raise ValueError(f"{name}: row {row} has no positions from {start} to {stop} (exclusive)")
        if self.grid is not None and self.cells is not None:
            height, width = self.grid
            if min(self.grid) < 1 or any(len(cells) != height * width for cells in self.cells):
                raise ValueError(f"grid={self.grid} must have as many cells as each row of cells")

    def _places(self) -> Iterator[tuple[str, int, int, int]]:
        """(field, row, first position, the one after the last) of all that a file says of positions."""
        for name in ("filled", "joined"):
            for row, entries in enumerate(getattr(self, name) or ()):
                yield from ((name, row, start, stop) for start, stop, *_ in entries)
        yield from (("ends", row, 0, end) for row, end in enumerate(self.ends or ()))
        for row, cells in enumerate(self.cells or ()):
            yield from (("cells", row, cell, cell + 1) for cell in cells)
        for index, step in enumerate(self.steps):
            for name in ("commits", "rejected"):
                entries = getattr(step, name) or ()
                yield from ((f"steps[{index}].{name}", row, at, at + 1) for row, at, *_ in entries)
            for row, found in enumerate(step.evaluated or ()):
                yield from ((f"steps[{index}].evaluated", row, start, stop) for start, stop in found)
            for row, block in enumerate(step.blocks or ()):
                if block is not None:
                    yield f"steps[{index}].blocks", row, *block
            for row, starts in enumerate(step.starts or ()):
                yield from ((f"steps[{index}].starts", row, start, start) for start in starts or ())

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """JSON text; also written to `path` when one is given."""
        text = json.dumps(self.to_dict())
        if path is not None:
            write_bytes(path, text.encode())
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Trace:
        """Read a file written by `to_json`, or its text.

        Raises:
            ValueError: no trace.
        """
        text = str(source)
        named = not text.lstrip().startswith("{")
        try:
            return cls.from_dict(parse_json(read_text(source) if named else text))
        except ValueError as error:
            raise ValueError(f"{repr(text) if named else 'the text'} is no trace that paradec wrote: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file: .json (which `load` reads), .html, .gif, or a plot as .png, .pdf or .svg.

        Raises:
            ValueError: another suffix. ImportError: pillow or matplotlib is missing for what they draw.
        """
        get_drawing("file")([self], path)

    load = from_json

    # ---- pictures: `paradec.tools.traces`
    # -------------------------------------------------------------------------------

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        beside: Trace | Sequence[Trace] = (),
        names: Sequence[str] = (),
    ) -> str:
        """A page to step through: one file that needs nothing else. See `paradec.tools.traces.files.page`.

        Args:
            path: where to write it too.
            beside: further runs, stepped through together with this one.
            names: what to call the runs; by default their samplers.
        """
        text: str = get_drawing("page")(self._with(beside), names)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_gif(
        self,
        path: str | os.PathLike[str],
        *,
        beside: Trace | Sequence[Trace] = (),
        names: Sequence[str] = (),
        **how: Any,
    ) -> None:
        """An animation.

        Args:
            how: what `paradec.tools.traces.gif.write` takes: row, width, seconds, font.

        Raises:
            ImportError: pillow is missing. ValueError: as `paradec.tools.traces.gif.write`.
        """
        get_drawing("animation")(self._with(beside), path, names, **how)

    def plot(self, *, beside: Trace | Sequence[Trace] = (), names: Sequence[str] = ()) -> Any:
        """A matplotlib figure: when each position became final, and what the steps cost.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        return get_drawing("plot")(self._with(beside), names)

    def _with(self, beside: Trace | Sequence[Trace]) -> list[Trace]:
        return [self, beside] if isinstance(beside, Trace) else [self, *beside]

    def _repr_html_(self) -> str:
        return str(get_drawing("frame")(self))

    def __repr__(self) -> str:
        sampler = self.settings.get("sampler", "?")
        return (
            f"Trace({sampler!r}: {format_count(self.batch, 'row')}, {format_count(len(self.steps), 'step')}, "
            f"{format_count(max(self.row_nfe, default=0), 'forward')})"
        )


def get_drawing(name: str) -> Callable[..., Any]:
    """A function that draws; `paradec.tools.traces` says which there are."""
    return Registry.by_kind["drawing"].get(name)


def to_spans(positions: Iterable[int]) -> list[Span]:
    """Runs of neighbours among positions, ascending."""
    found: list[Span] = []
    for position in sorted(positions):
        if found and found[-1][1] == position:
            found[-1] = (found[-1][0], position + 1)
        else:
            found.append((position, position + 1))
    return found


# ---- texts of tokens, for those who look at a trace without the model ------------------------------------------------

BROKEN = "\N{REPLACEMENT CHARACTER}"
MAX_MERGED_TOKENS = 8
"""Tokens that one character can be spread over."""
METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def record_token_texts(trace: Trace, tokenizer: Any) -> None:
    """Write down the text of every token of a trace, and which final tokens make a character together alone."""
    if tokenizer is None or not trace.canvas:
        return
    ids = {token for row in trace.canvas for token in row}
    for step in trace.steps:
        ids.update(token for _, _, token, _ in step.commits)
        ids.update(token for _, _, token in step.rejected or ())
    trace.texts = token_texts(tokenizer, sorted(ids))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {*getattr(tokenizer, "all_special_ids", ()), *(i for i, token in added.items() if token.special)}
    trace.special = sorted(ids & special)
    trace.joined = [merge_characters(tokenizer, row, trace.texts) for row in trace.replay()]


def token_texts(tokenizer: Any, ids: Iterable[int]) -> dict[int, str]:
    """The text of each token by itself, with the space before it where it has one."""
    found = {}
    for token in ids:
        text = tokenizer.decode([token], skip_special_tokens=False)
        piece = tokenizer.convert_ids_to_tokens(token) if hasattr(tokenizer, "convert_ids_to_tokens") else None
        # decoders take the space off what they believe to be the first word
        if isinstance(piece, str) and piece.startswith(METASPACE) and not text.startswith(" "):
            text = " " + text
        found[token] = text
    return found


def merge_characters(tokenizer: Any, row: Sequence[int], texts: dict[int, str]) -> list[tuple[int, int, str]]:
    """(first position, the one after the last, text) of neighbours that are parts of one character each."""
    found, start = [], 0
    while start < len(row):
        stop = start + 1
        if BROKEN in texts.get(row[start], ""):
            for end in range(start + 2, min(start + MAX_MERGED_TOKENS, len(row)) + 1):
                if BROKEN not in texts.get(row[end - 1], ""):
                    break
                text = tokenizer.decode(row[start:end], skip_special_tokens=False)
                if BROKEN not in text:
                    found.append((start, end, text))
                    stop = end
                    break
        start = stop
    return found

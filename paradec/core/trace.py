"""Traces: replayable records of a decoding. `paradec.tools.traces` draws them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from paradec.core.checks import format_count, short_repr
from paradec.core.registry import Registry
from paradec.core.text_files import check_value, from_fields, parse_json, read_text, write_bytes

MAX_COUNT = 2**53
"""Largest integer that browsers represent exactly."""
Span = tuple[int, int]
"""Start and end (exclusive)."""


def _check_token(value: Any) -> Any:
    is_continuous = isinstance(value, list) and all(isinstance(entry, (int, float)) for entry in value)
    is_valid = value is None or is_continuous or isinstance(value, int) and not isinstance(value, bool)
    check_value(is_valid, value, "an id, the numbers of a continuous token, or null")
    return value


def _check_counts(value: Any) -> Any:
    is_valid = 0 <= min(value, default=0) and max(value, default=0) < MAX_COUNT
    check_value(is_valid, value, f"counts from 0 to {MAX_COUNT}")
    return value


Token = Annotated[Any, _check_token]
"""An id, or the numbers of a continuous token; None where undecided."""
Counts = Annotated[list[int], _check_counts]


@dataclass
class TraceStep:
    """A step. Positions count from a row's first prompt token. Fields after `kind` are optional; `==` ignores them."""

    commits: list[tuple[int, int, Token, float]]
    """(row, position, token, confidence) of every write, sorted. To mask a token again, a write has the mask id."""
    forwarded: Counts
    """Number of evaluated positions of each row, over all branches and drafts, without padding. The sum over steps and
    rows is `Output.forwarded_tokens`."""
    kind: str
    """ "full" (whole rows), "window" (part of each row, over a key/value store), "forecast" (no call), ..."""
    nfe: Counts | None = field(default=None, compare=False)
    """Number of forward calls of each row in this step."""
    draft_nfe: Counts | None = field(default=None, compare=False)
    """Number of the drafter's forward calls for each row in all steps up to this one."""
    seconds: float | None = field(default=None, compare=False)
    evaluated: list[list[Span]] | None = field(default=None, compare=False)
    """Spans of the evaluated positions of each row."""
    blocks: list[Span | None] | None = field(default=None, compare=False)
    """Open block or draft window of each row; None for a row that took no part in the step."""
    starts: list[list[int] | None] | None = field(default=None, compare=False)
    """With pipelined blocks: starts of each row's open blocks, ascending; `blocks` spans them. None as in `blocks`."""
    rejected: list[tuple[int, int, int]] | None = field(default=None, compare=False)
    """(row, position, token) of evaluated drafts that did not become final."""
    rules: list[int] | None = field(default=None, compare=False)
    """For each entry of `commits`, the index in `Trace.rules` of the rule that wrote it."""
    logprobs: list[list[Any]] | None = field(default=None, compare=False)
    """With `generate(logprobs=k)`, for each entry of `commits`: [log-probability, [[token, log-probability], ...]]; the
    inner list has the k likeliest tokens. A log-probability that is not finite is None."""
    pictures: list[str] | None = field(default=None, compare=False)
    """Preview of each row's latent after the step, as data URIs."""

    def to_dict(self) -> dict[str, Any]:
        """The fields other than None, as JSON data."""
        return {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) is not None}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TraceStep:
        """Inverse of `to_dict`; ignores unknown names. Raises ValueError for a missing or wrong field."""
        return from_fields(cls, data)


@dataclass
class Notes:
    """Fields of a `TraceStep` that are known before the step's commit."""

    nfe: list[int]
    evaluated: list[list[Span]] | None = None
    blocks: list[Span | None] | None = None
    starts: list[list[int] | None] | None = None
    draft_nfe: list[int] | None = None
    drafts: set[tuple[int, int, int]] | None = None
    """(row, position, token) of all evaluated drafts; None without drafting."""
    rules: Mapping[tuple[int, int], str] | None = None
    """Name of the rule that writes at (row, position), for combined samplers."""


DRAFTED_RULE, SAMPLED_RULE = "accepted draft", "own token"
"""Entries of `Trace.rules` for accepted drafts, and for tokens that the model chose."""


@dataclass
class Trace:
    """All steps of one request, with the canvas to replay them on. Fields after `steps` are for drawing.

    Attributes (a selection, for `help`):
        settings: the sampler's settings.
        filled: spans to fill, by row; None if the undecided positions of `canvas` are these spans.
        score: name of the commits' fourth number.
    """

    canvas: list[list[Token]]
    """Tokens before the first step, one list per row, without padding."""
    settings: dict[str, Any] = field(default_factory=dict)
    steps: list[TraceStep] = field(default_factory=list)
    family: str = ""
    """The sampler's family."""
    score: str = "confidence"
    """Name of the commits' fourth number."""
    cache: str = ""
    unit: str = "positions"
    """Unit of `TraceStep.forwarded`."""
    mask_id: int | None = None
    """Id of undecided positions, for masked samplers."""
    filled: list[list[Span]] | None = None
    """Spans to fill, by row; None if the undecided positions of `canvas` are these spans."""
    ends: list[int] | None = None
    """End (exclusive) of each row; padding follows."""
    rules: list[str] = field(default_factory=list)
    """Names of the rules that `TraceStep.rules` indexes."""
    texts: dict[int, str] = field(default_factory=dict)
    """Text of every token in the trace; empty without a tokenizer."""
    special: list[int] = field(default_factory=list)
    """Ids of special tokens."""
    joined: list[list[tuple[int, int, str]]] | None = None
    """(start, end, text) of neighbouring final tokens that form a character only together, by row."""
    cells: list[list[int]] | None = None
    """For images: positions of each row's image tokens, in reading order."""
    grid: tuple[int, int] | None = None
    """For images: rows and columns of image tokens."""
    images: list[str] | None = None
    """For images: each row's result, as data URIs."""

    # ---- reading --------------------------------------------------------------------------------------------------

    def replay(self, until: int | None = None) -> list[list[int]]:
        """The canvas after the first `until` steps (default: all). Later writes replace earlier ones."""
        canvas = [list(row) for row in self.canvas]
        for step in self.steps[:until]:
            for row, position, token, _ in step.commits:
                canvas[row][position] = token
        return canvas

    @property
    def batch(self) -> int:
        """Number of rows."""
        return len(self.canvas) or max([len(self.images or ()), *(len(step.forwarded) for step in self.steps)])

    def to_fill(self, row: int) -> list[Span]:
        """Spans to fill in a row. If neither `filled` nor `canvas` shows them, the spans that the steps wrote."""
        if self.filled is not None:
            return [(start, stop) for start, stop in self.filled[row]]
        if not self.canvas:
            return []
        if self.family and (self.mask_id is not None or None in self.canvas[row]):
            return to_spans(i for i, token in enumerate(self.canvas[row]) if token in (self.mask_id, None))
        return to_spans(
            {position for step in self.steps for commit_row, position, _, _ in step.commits if commit_row == row}
        )

    @property
    def row_nfe(self) -> list[int]:
        """Forward calls of each row. A step without `nfe` counts as one call for each row with evaluated positions."""
        counts = [0] * self.batch
        for step in self.steps:
            for row, forwarded in enumerate(step.forwarded):
                counts[row] += step.nfe[row] if step.nfe is not None else int(forwarded > 0)
        return counts

    # ---- recording ------------------------------------------------------------------------------------------------

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
        """Append a step. Without `notes`, only `commits`, `forwarded`, `kind` and `logprobs` are recorded."""
        step = TraceStep(commits, forwarded, kind, logprobs=logprobs)
        self.steps.append(step)
        if notes is None:
            return
        step.nfe, step.draft_nfe, step.evaluated, step.blocks = (
            notes.nfe, notes.draft_nfe, notes.evaluated, notes.blocks
        )  # fmt: skip
        step.seconds, step.pictures, step.starts = seconds, pictures, notes.starts
        if notes.drafts is not None:
            commit_keys = {(row, position, token) for row, position, token, _ in commits}
            step.rejected = sorted(notes.drafts - commit_keys)
            names = [DRAFTED_RULE if entry[:3] in notes.drafts else SAMPLED_RULE for entry in commits]
        elif notes.rules is not None:
            names = [notes.rules.get(entry[:2], "") for entry in commits]
        else:
            return
        self.rules = [*dict.fromkeys([*self.rules, *names])]
        step.rules = [self.rules.index(name) for name in names]

    # ---- files ----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data; optional fields with their default are left out."""
        required, default = ("canvas", "settings", "steps"), vars(Trace([]))
        data = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        data = {
            name: value
            for name, value in data.items()
            if name in required or value not in (None, "", [], {}) or value != default[name]
        }
        return data | {"steps": [step.to_dict() for step in self.steps]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trace:
        """Inverse of `to_dict`; ignores unknown names. Raises ValueError for inconsistent data."""
        trace = from_fields(cls, data)
        trace._check()
        return trace

    def _check(self) -> None:
        """Raise ValueError for lists of a wrong length, and positions or rules that do not exist."""
        sizes, batch = [len(row) for row in self.canvas], self.batch
        if not isinstance(self.settings.get("sampler", ""), str):
            raise ValueError(f"settings['sampler']={short_repr(self.settings['sampler'])} must be a text")
        for name, values, count in self._sized_fields():
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries; it must have {count}")
        for index, step in enumerate(self.steps):
            if step.rules and not 0 <= min(step.rules) <= max(step.rules) < len(self.rules):
                raise ValueError(f"steps[{index}].rules has an index outside the {len(self.rules)} entries of rules")
        for name, row, start, stop in self._position_fields():
            if not (0 <= row < batch and 0 <= start <= stop and (not sizes or stop <= sizes[row])):
                raise ValueError(f"{name}: row {row} has no positions from {start} to {stop} (exclusive)")
        if self.grid is not None and self.cells is not None:
            height, width = self.grid
            if min(self.grid) < 1 or any(len(cells) != height * width for cells in self.cells):
                raise ValueError(
                    f"grid={self.grid} must be positive, and each row of cells must have height * width entries"
                )

    def _sized_fields(self) -> Iterator[tuple[str, Sequence[Any] | None, int]]:
        """Yield (field, list, required number of entries) for lists with an entry per row or commit."""
        yield from ((name, getattr(self, name), self.batch) for name in ("filled", "ends", "joined", "cells"))
        for index, step in enumerate(self.steps):
            counts = dict.fromkeys(("nfe", "draft_nfe", "evaluated", "blocks", "starts"), len(step.forwarded))
            counts |= dict.fromkeys(("rules", "logprobs"), len(step.commits))
            counts |= {"forwarded": self.batch} if self.canvas else {}
            yield from ((f"steps[{index}].{name}", getattr(step, name), count) for name, count in counts.items())

    def _position_fields(self) -> Iterator[tuple[str, int, int, int]]:
        """Yield (field, row, start, end) for every position or span in the trace."""
        for name in ("filled", "joined"):
            for row, entries in enumerate(getattr(self, name) or ()):
                yield from ((name, row, start, stop) for start, stop, *_ in entries)
        yield from (("ends", row, 0, end) for row, end in enumerate(self.ends or ()))
        for row, cells in enumerate(self.cells or ()):
            yield from (("cells", row, cell, cell + 1) for cell in cells)
        for index, step in enumerate(self.steps):
            for name in ("commits", "rejected"):
                entries = getattr(step, name) or ()
                yield from ((f"steps[{index}].{name}", row, position, position + 1) for row, position, *_ in entries)
            for row, row_spans in enumerate(step.evaluated or ()):
                yield from ((f"steps[{index}].evaluated", row, start, stop) for start, stop in row_spans)
            for row, block in enumerate(step.blocks or ()):
                if block is not None:
                    yield f"steps[{index}].blocks", row, *block
            for row, starts in enumerate(step.starts or ()):
                yield from ((f"steps[{index}].starts", row, start, start) for start in starts or ())

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return JSON text, and write it to `path` if given."""
        text = json.dumps(self.to_dict())
        if path is not None:
            write_bytes(path, text.encode())
        return text

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> Trace:
        """Read a file that `to_json` wrote, or its text. Raises ValueError for anything else."""
        text = str(source)
        is_path = not text.lstrip().startswith("{")
        try:
            return cls.from_dict(parse_json(read_text(source) if is_path else text))
        except ValueError as error:
            raise ValueError(
                f"{repr(text) if is_path else 'the text'} is not a trace that paradec wrote: {error}"
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file: .json (for `load`), .html, .gif, or a plot as .png, .pdf or .svg. Raises ValueError for another
        suffix, ImportError without pillow or matplotlib."""
        get_drawing("file")([self], path)

    load = from_json

    # ---- pictures, by `paradec.tools.traces` ----------------------------------------------------------------------

    def to_html(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        beside: Trace | Sequence[Trace] = (),
        names: Sequence[str] = (),
    ) -> str:
        """Build a self-contained HTML page on which a reader steps through the trace.

        Args:
            path: file to which the page is also written.
            beside: one or several traces of other runs, shown next to this one.
            names: names of the runs; by default their samplers.
        """
        text: str = get_drawing("page")(self._list_runs(beside), names)
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
        """Write an animation. beside, names: as in `to_html`. how: arguments row, width, seconds and font of
        `paradec.tools.traces.gif.write`. Raises ImportError without pillow, and the ValueErrors of `write`."""
        get_drawing("animation")(self._list_runs(beside), path, names, **how)

    def plot(self, *, beside: Trace | Sequence[Trace] = (), names: Sequence[str] = ()) -> Any:
        """Plot the step at which each position became final, and each step's cost. beside, names: as in `to_html`.
        Raises ModuleNotFoundError without matplotlib."""
        return get_drawing("plot")(self._list_runs(beside), names)

    def _list_runs(self, beside: Trace | Sequence[Trace]) -> list[Trace]:
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
    """Import a drawing function of `paradec.tools.traces`."""
    return Registry.by_kind["drawing"].get(name)


def to_spans(positions: Iterable[int]) -> list[Span]:
    """Merge positions into ascending spans."""
    runs: list[Span] = []
    for position in sorted(positions):
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


# ---- texts of tokens, for viewers without the model -----------------------------------------------------------------

BROKEN = "\N{REPLACEMENT CHARACTER}"
MAX_MERGED_TOKENS = 8
"""Maximum number of tokens that form one character."""
METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def record_token_texts(trace: Trace, tokenizer: Any) -> None:
    """Record `texts`, `special` and `joined` of a trace; nothing without a tokenizer."""
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
    """The text of each token, with its leading space."""
    texts = {}
    for token in ids:
        text = tokenizer.decode([token], skip_special_tokens=False)
        piece = tokenizer.convert_ids_to_tokens(token) if hasattr(tokenizer, "convert_ids_to_tokens") else None
        # decoders strip the leading space of a token that they decode alone
        if isinstance(piece, str) and piece.startswith(METASPACE) and not text.startswith(" "):
            text = " " + text
        texts[token] = text
    return texts


def merge_characters(tokenizer: Any, row: Sequence[int], texts: dict[int, str]) -> list[tuple[int, int, str]]:
    """List (start, end, text) of neighbouring tokens that form one character."""
    merged, start = [], 0
    while start < len(row):
        stop = start + 1
        if BROKEN in texts.get(row[start], ""):
            for end in range(start + 2, min(start + MAX_MERGED_TOKENS, len(row)) + 1):
                if BROKEN not in texts.get(row[end - 1], ""):
                    break
                text = tokenizer.decode(row[start:end], skip_special_tokens=False)
                if BROKEN not in text:
                    merged.append((start, end, text))
                    stop = end
                    break
        start = stop
    return merged

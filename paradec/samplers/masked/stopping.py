"""Stop rules: what ends a row before its canvas is full. `commit` of the masked family asks them after every write.

A rule only speaks about text that follows everything the user gave: an end token inside a hole of an infill, with given
text after it, ends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from paradec.core.checks import shown
from paradec.core.contract import CanvasState
from paradec.core.rows import ROWS, row_layout

NEVER = np.iinfo(np.int64).max
"""The end of a row that goes on."""
WATCHED = "watched "
"""Comes before the name of a quantity that an `EarlyRule` reads, in `MaskedProposal.updates`."""


class StopRule(Protocol):
    """One reason to end a row. Made for one request, kept in its state; it may remember what it has read."""

    def __call__(self, state: CanvasState, tokens: np.ndarray) -> np.ndarray | None:
        """Where the running rows end.

        Args:
            state: the `MaskedState` after the write.
            tokens: [R, W] int64 on the host, the window after the write.

        Returns:
            [R] int64: the position after a row's last token, `NEVER` where it goes on; None when all go on. Nothing
            may be undecided between the start of a row and its end.
        """
        ...


class EarlyRule(Protocol):
    """A reason to stop and take the model's predictions for all that is left: what is undecided becomes final at once.

    A rule of this kind is an immutable value, and several requests may share it. With one in a request the window
    reaches to the end of every row, so that all of it has logits; a row ends only at a step that evaluates everything
    undecided in it (a cache's partial steps may not).
    """

    reads: tuple[str, ...]
    """Quantities of the model's logits (`paradec.samplers.statistics.QUANTITIES`), each [R, W] float64;
    `proposal.updates` has them under `WATCHED` and their names."""

    def satisfied(self, state: CanvasState, proposal: Any) -> Any:
        """[R] bool tensor: the rows to end. Changes nothing.

        Args:
            state: the `MaskedState` before the write; its window is that of the proposal.
            proposal: this step's `MaskedProposal`.
        """
        ...


@dataclass(eq=False)
class EndOfText:
    """End a row at its first end token, once nothing before it is undecided.

    Args:
        ids: the end tokens.
        mask: the mask id.
        first: [B] int64: the position from which on an end token counts.
    """

    ids: Sequence[int]
    mask: int
    first: np.ndarray = field(metadata=ROWS)

    def __call__(self, state: CanvasState, tokens: np.ndarray) -> np.ndarray | None:
        is_end = tokens == self.ids[0]
        for end in self.ids[1:]:  # one or two; np.isin takes ten times as long
            is_end |= tokens == end
        if not is_end.any():
            return None
        window = state.window
        if window.host_valid is not None:
            is_end &= window.host_valid
        is_end &= window.host_positions >= self.first[window.rows, None]
        column = (is_end | (tokens == self.mask)).argmax(1)  # the first of either
        stops = is_end[np.arange(len(column)), column]
        return np.where(stops, state.block_start[window.rows] + column + 1, NEVER) if stops.any() else None


def check_stop(value: Any, sampler: Any = None) -> tuple[tuple[StopRule, ...], tuple[EarlyRule, ...]]:
    """A rule or several, told apart. Raises TypeError for anything else, ValueError for an early rule with drafts."""
    rules = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    early = tuple(rule for rule in rules if hasattr(rule, "satisfied") and not isinstance(rule, type))
    others = tuple(rule for rule in rules if rule not in early)
    for rule in others:
        if not callable(rule) or isinstance(rule, type):
            raise TypeError(
                f"stop={shown(rule)} must be a stop rule, e.g. paradec.Prophet(), or a list of them; texts go to "
                "stop_strings"
            )
    if early and sampler and (sampler.needs.multi_step or sampler.needs.mask_probes):
        what = "drafts of later steps" if sampler.needs.multi_step else "mask probes of the block"
        raise ValueError(
            f"sampler {sampler.name!r} does not work with stop={shown(early[0])}: it evaluates {what} beside the "
            "window, which the rule widens to the end of the row"
        )
    return others, early


def first_end(rules: Sequence[StopRule], state: CanvasState, tokens: np.ndarray) -> np.ndarray | None:
    """Where the running rows end by the earliest of their rules, as a `StopRule` says it."""
    ends = None
    for rule in rules:
        found = rule(state, tokens)
        if found is not None:
            ends = found if ends is None else np.minimum(ends, found)
    return ends


@dataclass(init=False, eq=False)
class StopStrings:
    """End a row at the token that completes one of some texts, once nothing before it is undecided.

    The decided answer is decoded as a whole, so that a text may lie across tokens, and special tokens count with their
    names. The token that completes it is kept entirely, as transformers' `StopStringCriteria` does; unlike there, the
    prompt's own text is no part of a match.

    Args:
        texts: what to look for.
        tokenizer: the model's.
        mask: the mask id.
        canvas: [B, L] int64, the ids that decoding starts from.
        first: [B] int64: the position from which on text counts.
    """

    texts: list[tuple[str, ...]] = field(metadata=row_layout(fill=()))
    """Of each row; none of rows that have none."""
    canvas: np.ndarray = field(metadata=row_layout(columns=1, fill=-1))
    """[B, L] int64 on the host, kept up to date from the windows."""
    first: np.ndarray = field(metadata=ROWS)
    read: np.ndarray = field(metadata=ROWS)
    """[B] int64: the position up to which each row was read."""

    def __init__(self, texts: Sequence[str], tokenizer: Any, mask: int, canvas: np.ndarray, first: np.ndarray):
        self.texts, self.tokenizer, self.mask = [tuple(texts)] * len(canvas), tokenizer, mask
        self.canvas, self.first, self.read = canvas.copy(), first.copy(), first.copy()

    def __call__(self, state: CanvasState, tokens: np.ndarray) -> np.ndarray | None:
        rows = state.window.rows
        before = self.canvas[rows]
        self.canvas[rows[:, None], state.window.host_positions] = tokens
        # a method that revises may have changed what was read
        changed = self.canvas[rows] != before
        self.read[rows] = np.where(changed.any(1), np.minimum(self.read[rows], changed.argmax(1)), self.read[rows])
        self.read[rows] = np.maximum(self.read[rows], self.first[rows])
        length = state.end[rows]
        undecided = (self.canvas[rows] == self.mask) & (np.arange(self.canvas.shape[1]) < length[:, None])
        decided = np.where(undecided.any(1), undecided.argmax(1), length)
        ends = np.full(len(rows), NEVER)
        for index in (decided > self.read[rows]).nonzero()[0]:
            row, end = rows[index], decided[index]
            if self.texts[row] and self._holds(row, end):
                ends[index] = next(stop for stop in range(self.read[row] + 1, end + 1) if self._holds(row, stop))
            self.read[row] = end
        return ends if (ends < NEVER).any() else None

    def _holds(self, row: int, end: int) -> bool:
        """Whether the answer of a row up to the position `end` (exclusive) holds one of the texts."""
        text = self.tokenizer.decode(self.canvas[row, self.first[row] : end].tolist(), skip_special_tokens=False)
        return any(wanted in text for wanted in self.texts[row])

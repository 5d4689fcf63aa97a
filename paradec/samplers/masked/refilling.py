"""Rows that come and go: a masked state whose rows others take the place of (`paradec.batching`)."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from paradec.core import rows as of_rows
from paradec.core.checks import shown
from paradec.core.contract import CanvasState
from paradec.core.protocol import State
from paradec.samplers.masked.stopping import EndOfText, StopRule
from paradec.samplers.masked.trackers import Tracker


class RefilledRows(CanvasState, State):
    """The part of `MaskedState` that takes rows out and puts others in their place."""

    OF_ROWS: ClassVar[tuple[str, ...]]
    OF_POSITIONS: ClassVar[tuple[str, ...]]
    revises: bool
    stop_rules: tuple[StopRule, ...]
    asked: np.ndarray
    stopped: np.ndarray
    running: np.ndarray
    trackers: tuple[Tracker, ...]
    reuses: bool
    _steps: np.ndarray

    def finish(self, rows: np.ndarray) -> None: ...

    def forget_made(self) -> None: ...

    def attach_trackers(self) -> None: ...

    def _make_window(self) -> None: ...

    def fixed(self) -> str | None:
        for tracker in self.trackers:
            if tracker.fixed is not None:
                return tracker.fixed
        if self.trace is not None:
            return "a trace is of the rows that it began with"
        if not of_rows.exchangeable(self.cache_state, self.batch):
            kept = type(self.cache_state).__name__
            return f"cache {self.cache.name!r} keeps a {kept}, which has no `taken` and `put` for its rows"
        for rule in self.stop_rules:
            if not isinstance(rule, of_rows.Rows):
                return f"stop={shown(rule)} has no `taken` and `put` for its rows"
        return None

    def taken(self, rows: np.ndarray, columns: int | None = None) -> Self:
        other = copy.copy(self)
        other.batch, other.columns = len(rows), self.columns[np.zeros(len(rows), np.int64)]
        for name in (*self.OF_ROWS, *self.OF_POSITIONS):
            setattr(other, name, of_rows.kept(getattr(self, name), rows, None))
        if self.suppressed is not None and self.suppressed.ndim == 2:
            other.suppressed = of_rows.taken(self.suppressed, rows)
        if columns is not None:
            other.columns = np.tile(np.arange(columns), (len(rows), 1))
            other.canvas = of_rows.fitted(other.canvas, columns, self.facts.fill_token_id)
            other.given = of_rows.fitted(other.given, columns, False)
            # what lies beyond a row has no masks
            last = np.repeat(other.masks_before[:, -1:], max(columns + 1 - other.masks_before.shape[1], 0), 1)
            other.masks_before = np.concatenate((other.masks_before[:, : columns + 1], last), 1)
        other.total = other.masks_before[:, -1]
        other._counts, other._calls = of_rows.taken(self.counts, rows, 1), []
        other._steps = of_rows.taken(self._steps, rows, 1)
        other.block_step, other.row_step = other._steps
        other.memory = self.memory.taken(rows, columns)
        if self.store is not None:
            every = np.concatenate([rows + branch * self.batch for branch in range(self.branches)])
            other.store = self.store.taken(every, columns)
        other.cache_state = of_rows.kept(self.cache_state, rows, columns)
        other.stop_rules = tuple(rule.taken(rows, columns) for rule in self.stop_rules)  # type: ignore[attr-defined]
        other.trackers = tuple(tracker.taken(rows, columns) for tracker in self.trackers)
        other.attach_trackers()
        other._moved()
        return other

    def put(self, slots: np.ndarray, other: Self) -> None:
        self.counts, other.counts  # noqa: B018 - what was counted is summed now
        width = other.canvas.shape[1]
        for name in self.OF_ROWS:
            of_rows.exchange(getattr(self, name), slots, getattr(other, name))
        index = torch.as_tensor(slots, device=self.canvas.device)
        for own, new, fill in (
            (self.canvas, other.canvas, self.facts.fill_token_id),
            (self.given, other.given, False),
        ):
            own.index_fill_(0, index, fill)
            own.narrow(1, 0, width).index_copy_(0, index, new)
        self.reuses |= other.reuses
        self.masks_before[slots] = other.masks_before[:, -1:]
        self.masks_before[slots, : width + 1] = other.masks_before
        self._counts[:, slots], self._steps[:, slots] = other._counts, other._steps
        self._put_suppressed(slots, other)
        self.memory.grow("window", max(self.memory.size("window"), other.memory.size("window")))
        self.memory.put(slots, other.memory)
        if self.store is not None:
            every = np.concatenate([slots + branch * self.batch for branch in range(self.branches)])
            self.store.put(every, other.store)
        of_rows.exchange(self.cache_state, slots, other.cache_state)
        self.stop_rules = exchanged_rules(self, slots, other)
        trackers = {type(tracker): tracker for tracker in self.trackers}
        for tracker in other.trackers:
            trackers.setdefault(type(tracker), tracker).put(slots, tracker)
        self.trackers = tuple(trackers.values())
        self.attach_trackers()
        self.commits += 1  # what was proposed before is of other rows
        self._moved()

    def dismiss(self, rows: np.ndarray, wipe: bool = False) -> None:
        self.finish(rows)
        if wipe and self.store is not None:
            self.store.wipe(np.concatenate([rows + branch * self.batch for branch in range(self.branches)]))
        self.commits += 1
        self._moved()

    def let_run(self, rows: np.ndarray) -> None:
        """Let `rows` [N] alone take part in the next steps, and the others wait. For hosts that have not the
        logits of all rows: none of them may be done, and it is theirs to remember who waits."""
        running = np.zeros(self.batch, bool)
        running[rows] = True
        if (running != self.running).any():
            self.running = running
            self.commits += 1
            self._moved()

    def final(self, rows: np.ndarray) -> np.ndarray:
        undecided = self.undecided[torch.as_tensor(rows, device=self.canvas.device)].cpu().numpy()
        undecided &= np.arange(undecided.shape[1]) < self.end[rows, None]
        final = np.where(undecided.any(1), undecided.argmax(1), self.end[rows])
        if self.revises:  # tokens of an open block may be taken back
            final = np.where(self.running[rows], np.minimum(final, self.block_start[rows]), final)
        found: np.ndarray = final
        return found

    def extent(self, rows: np.ndarray) -> int:
        return int(np.maximum(self.length[rows], self.asked[rows]).max())

    def _moved(self) -> None:
        """Make again what was made for the rows that there were."""
        self.total = self.masks_before[:, -1]
        self.level = bool((self.length == self.canvas.shape[1]).all())
        self.forget_made()
        self._make_window()

    def _put_suppressed(self, slots: np.ndarray, other: Self) -> None:
        """The tokens that are never proposed; one list for all rows as long as they have the same."""
        own, new = self.suppressed, other.suppressed
        if own is None and new is None or own is not None and new is not None and own.ndim == 1 == new.ndim:
            if own is None or new is not None and torch.equal(own, new):
                return
        wide = [_of_each(state.suppressed, state.batch, self.mask_id, self.canvas.device) for state in (self, other)]
        size = max(part.shape[1] for part in wide)
        own, new = (of_rows.fitted(part, size, self.mask_id) for part in wide)
        of_rows.put(own, slots, new)
        self.suppressed = own


def _of_each(suppressed: Tensor | None, batch: int, mask: int, device: torch.device) -> Tensor:
    """[B, S]: the tokens that each row never proposes, the mask at least."""
    if suppressed is None:
        return torch.full((batch, 1), mask, dtype=torch.int64, device=device)
    return suppressed.expand(batch, -1).clone() if suppressed.ndim == 1 else suppressed.clone()


def exchanged_rules(state: Any, slots: np.ndarray, other: Any) -> tuple[StopRule, ...]:
    """The stop rules of a masked state whose rows `slots` [N] have become those of the state `other`; a rule that one
    of the two lacks speaks of the other's rows alone. Call it once the rows are there."""
    own = {type(rule): rule for rule in state.stop_rules}
    new = {type(rule): rule for rule in other.stop_rules}
    for kind in (*own, *new):
        for rules, of, like in ((own, state, new), (new, other, own)):
            if kind not in rules:
                rules[kind] = like[kind].silent(of)
    ends = [rule for rule in (own.get(EndOfText), new.get(EndOfText)) if rule is not None]
    if any(rule.first is not None for rule in ends):
        for rule, of in zip(ends, (state, other), strict=True):
            rule.first = of.answer_start.copy() if rule.first is None else rule.first
    for kind, rule in own.items():
        rule.put(slots, new[kind])
    return tuple(own.values())

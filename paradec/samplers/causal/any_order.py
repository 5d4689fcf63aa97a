"""Models of any order, decoded by the samplers of causal models along an order of positions.

One call of such a model predicts every position from the positions decided before it
(`paradec.models.base.Model.any_order`). The rank of a position is its index in the row's order. A chain of drafts runs
along the ranks. With fixed noise, the tokens of one-by-one decoding are a fixed point that Jacobi steps reach in a few
calls (Wiggers & Hoogeboom, arXiv 2002.09928; Song et al., arXiv 2002.03629). With `sjd` and `scd`, drafts are accepted
by the ratio p / q, as in any-subset models (arXiv 2504.20456).

This module has the state; the loop is `paradec.samplers.causal.loop`. `committed` and slots count ranks; everything
else counts positions of the canvas. Prompt tokens have the lowest ranks. Every step predicts all undecided positions,
and the next drafts are drawn from these predictions. So the first step has no drafts.

Shapes: `B` rows, `R` of them selected, `n` positions, `W` slots (at least as many as the longest row's positions).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import orders
from paradec.core.checks import short_repr
from paradec.core.family_queries import AnyOrderQuery
from paradec.core.orders import draws_from_keys
from paradec.core.prompts import Prompts
from paradec.core.query import StoreCall
from paradec.core.rows import ROWS, resize_axis
from paradec.request import Request
from paradec.samplers.causal.state import ALL_SLOTS, CausalState, Spans
from paradec.samplers.masked.blocks import NEVER
from paradec.samplers.start import answer_starts, count_new, make_trace

ORDER_NAMES = {None: "random", "random": "random", "chain": "raster"}
"""Order names that a request may have, and the orders of `paradec.core.orders` that they mean."""


def check(sampler: Any, model: Any) -> None:
    """Raise ValueError for a sampler or a setting that works from left to right only."""
    name = model.facts.name
    if not sampler.orders or getattr(sampler, "drafter", None) is not None:
        raise ValueError(
            f"sampler {sampler.name!r} decodes from left to right; {name} is a model of any order: use 'jacobi', 'sjd' "
            "or 'scd' without a drafter"
        )
    if sampler.init not in (None, "model"):
        raise ValueError(f"init={sampler.init!r} guesses from left to right; for {name}, of any order, use 'model'")
    if (group := getattr(sampler, "group", None)) is not None:
        raise ValueError(f"group={group} decodes blocks from left to right; for {name}, of any order, leave group out")


def start(
    sampler: Any, model: Any, encoded: Prompts, request: Request, *arguments: Any, state_type: Any = None
) -> OrderedState:
    """Make the state of a request. Masks in the prompts, and `max_new_tokens` masks after each, are decoded.

    arguments: `grid` and `negative_prompt`, which must be None. state_type: by default `OrderedState`.
    Raises ValueError for one of these arguments, guidance, a row without masks, or an order that does not fit a row.
    """
    facts = model.facts
    if request.guidance_scale != 1 or any(value is not None for value in arguments):
        raise ValueError(
            f"{facts.name}, a model of any order, supports no guidance and no grid: guidance_scale="
            f"{request.guidance_scale} must be 1; leave negative_prompt and grid out"
        )
    mask = facts.mask_id
    num_new = count_new(model, encoded.rows, request.max_new_tokens, mask, "mask")
    rows = [[*row, *[mask] * num_new] for row in encoded.rows]
    lengths = np.array([len(row) for row in rows], np.int64)
    starts = np.array([row.index(mask) for row in rows], np.int64)
    shift, width = np.zeros((1, len(rows)), np.int64), int(lengths.max())
    state_type = state_type or OrderedState
    state = sampler.make_state(model, request, encoded, rows, shift, starts, lengths, width, state_type=state_type)
    undecided = [np.array(row) == mask for row in rows]
    state.order = np.tile(np.arange(width), (len(rows), 1))
    for row, positions in enumerate(_row_orders(request.order, state.keys, undecided, model.first_position)):
        state.order[row, : lengths[row]] = positions
    state.num_known = np.array([(~row).sum() for row in undecided], np.int64)
    state.committed, state.num_new = state.num_known.copy(), np.full(len(rows), num_new)
    state.answer_start = answer_starts(rows, mask)
    state.num_searched = state.answer_start.copy()
    state.num_drafts[:] = 0  # the first drafts are drawn from the first step's predictions
    state.max_drafts = ALL_SLOTS if sampler.window is None else sampler.window - 1
    # the loop looks for end ids by rank; `_end_rows` does so by position
    state.ends = state.ends[:0]
    if state.stop_strings is not None:
        state.stop_strings.first = state.answer_start.copy()
    state.store = model.keep_decided(len(rows), width)
    filled = [_split_runs(np.flatnonzero(row)) for row in undecided]
    state.trace = make_trace(sampler, request, state.canvas, state.length, score="probability", filled=filled)
    sampler.open(state, model)
    return state


def _row_orders(requested: Any, keys: Tensor, undecided: list[np.ndarray], first_position: int) -> list[np.ndarray]:
    """Return each row's positions [n] by rank: prompt tokens, undecided positions before `first_position`, then the
    other undecided positions in the requested order. Raises ValueError for lists that do not fit the rows.

    undecided: [n] bool of each row. first_position: the position of cell 0; orders are orders of cells."""
    sizes = np.array([len(row) - first_position for row in undecided])
    if isinstance(requested, tuple):
        row_cells = _check_order_lists(requested, [row[first_position:] for row in undecided])
    else:
        order = requested if isinstance(requested, orders.Order) else orders.create(ORDER_NAMES[requested])
        row_cells = [np.empty(0, np.int64)] * len(sizes)
        for size in {*sizes[sizes > 0].tolist()}:
            rows_of_size = np.flatnonzero(sizes == size)
            draws = draws_from_keys(keys[torch.as_tensor(rows_of_size, device=keys.device)])
            cells = order.groups(1, size, draws).order
            for row_index, cells_in_order in zip(rows_of_size.tolist(), cells, strict=True):
                row_cells[row_index] = cells_in_order
    row_orders: list[np.ndarray] = []
    for row, cells_in_order in zip(undecided, row_cells, strict=True):
        prefix = np.flatnonzero(row[:first_position])
        row_orders.append(
            np.concatenate(
                (np.flatnonzero(~row), prefix, cells_in_order[row[first_position:][cells_in_order]] + first_position)
            )
        )
    return row_orders


def _check_order_lists(requested: tuple[Any, ...], undecided: list[np.ndarray]) -> list[np.ndarray]:
    """Return each row's cells in order. undecided: [n] bool per row. Raises ValueError for lists that do not fit."""
    lists = requested if requested and isinstance(requested[0], tuple) else (requested,) * len(undecided)
    if len(lists) != len(undecided):
        raise ValueError(f"order has {len(lists)} lists for {len(undecided)} rows; give one, or one for each row")
    for row_index, (cells, row) in enumerate(zip(lists, undecided, strict=True)):
        if sorted(cells) not in (list(range(len(row))), np.flatnonzero(row).tolist()):
            raise ValueError(
                f"order={short_repr(list(cells))} must list each of the {len(row)} positions of row {row_index} once, "
                f"or each of its {row.sum()} undecided positions; they count from 0"
            )
    return [np.array(cells, np.int64) for cells in lists]


def _split_runs(positions: np.ndarray) -> list[tuple[int, int]]:
    """Split ascending positions into runs of consecutive positions: (begin, end) of each run."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    return [(int(run[0]), int(run[-1]) + 1) for run in runs]


@dataclass
class OrderedState(CausalState):
    """A `CausalState` that counts `committed` by rank. `prompt_length` is the position of the first mask, `end` the end
    of a row's tokens."""

    order: np.ndarray = field(init=False, metadata=ROWS)
    """[B, W] int64 on the host: the position of each rank; from `length` of a row on, rank and position are equal."""
    num_known: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64 on the host: number of prompt tokens, masks excluded."""
    num_new: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64 on the host: number of masks appended to the prompt."""
    num_searched: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64 on the host: number of leading positions that were searched for end ids and stop strings."""
    max_drafts: int = field(init=False)
    """Largest number of drafts in a step."""

    in_order: ClassVar[bool] = False
    guesses: ClassVar[bool] = False

    @property
    def max_new_tokens(self) -> int:
        return int(self.num_new.max())

    @property
    def num_given(self) -> np.ndarray:
        return self.num_known

    @property
    def is_prompt(self) -> Tensor:
        return self._pad_flags(self._ranks(np.arange(self.batch)) < self.num_known[:, None])

    @property
    def undecided(self) -> Tensor:
        return self._pad_flags(self._undecided(np.arange(self.batch)))

    def final_ends(self, rows: np.ndarray) -> np.ndarray:
        undecided = self._undecided(rows)
        return np.where(undecided.any(1), undecided.argmax(1), self.end[rows])

    def _undecided(self, rows: np.ndarray) -> np.ndarray:
        """[R, n] bool: positions before the rows' ends that are not final."""
        ranks = self._ranks(rows)
        return (ranks >= self.committed[rows, None]) & (np.arange(ranks.shape[1]) < self.end[rows, None])

    def _pad_flags(self, flags: np.ndarray) -> Tensor:
        """Pad flags [B, n] to [B, L] on the device."""
        columns = resize_axis(flags, self.context.shape[1], False)
        return torch.as_tensor(columns, device=self.context.device)

    # ---- ranks ----------------------------------------------------------------------------------------------------

    @property
    def _period(self) -> int:
        """Number of positions of the longest row; higher ranks wrap around."""
        return min(self.width, self.context.shape[1])

    def positions_of_ranks(self, rows: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        return self.order[rows, ranks % self._period]

    def _ranks(self, rows: np.ndarray) -> np.ndarray:
        """[R, n] int64: the rank of each position."""
        return self.order[rows, : self._period].argsort(1)

    def num_predicted(self, evaluated: np.ndarray) -> np.ndarray:
        return self.num_slots(self.rows)

    def verified_slots(self, available: Tensor) -> Tensor:
        has_draft = np.arange(self.width) < self.num_drafts[self.rows, None]
        return super().verified_slots(available) & torch.as_tensor(has_draft, device=available.device)

    # ---- a step ---------------------------------------------------------------------------------------------------

    def _group_spans(self, store: Any, pads: bool, spans: Spans) -> list[np.ndarray]:
        sizes = self.length[spans.rows] - spans.begin
        return [np.arange(len(sizes))] if pads else [np.flatnonzero(sizes == size) for size in np.unique(sizes)]

    def _make_query(self, store: Any, spans: Spans, index: np.ndarray) -> Any:
        """Make the query that evaluates all positions of rank `begin` and above, with drafts at ranks below `stop`.
        With a store, from a row's second step on these are the undecided positions and the last final token."""
        rows, begin, stop = spans.rows[index], spans.begin[index], spans.stop[index]
        device, ranks = self.context.device, self._ranks(rows)
        slot_positions = self.positions_of_ranks(rows[:, None], self.committed[rows, None] + np.arange(self.width))
        is_evaluated = (ranks >= begin[:, None]) & (ranks < self.length[rows, None])
        count = is_evaluated.sum(1)
        column_positions = (~is_evaluated).argsort(1, kind="stable")[:, : count.max()]
        valid = np.arange(column_positions.shape[1]) < count[:, None]
        # the model orders the prompt tokens itself, and predicts each undecided position as if it came next
        is_decided = (ranks >= self.num_known[rows, None]) & (ranks < stop[:, None])
        decided_at = np.where(is_decided, ranks, -1)
        column = np.clip(is_evaluated.cumsum(1) - 1, 0, None)
        host = (
            column_positions,
            np.take_along_axis(decided_at, column_positions, 1),
            np.take_along_axis(column, slot_positions, 1),
            slot_positions,
        )
        positions, decided, wanted_columns, slots = (torch.as_tensor(array, device=device) for array in host)
        is_drafted = np.arange(self.width) < (stop - self.committed[rows])[:, None]
        tokens = self.context[torch.as_tensor(rows, device=device)]
        slots, has_draft = slots[:, : self._period], torch.as_tensor(is_drafted, device=device)[:, : self._period]
        drafts = spans.drafts[torch.as_tensor(index, device=device)][:, : self._period]
        tokens = tokens.scatter(1, slots, torch.where(has_draft, drafts, tokens.gather(1, slots)))
        query = AnyOrderQuery(
            rows=rows,
            tokens=tokens.gather(1, positions),
            positions=positions,
            wanted=wanted_columns,
            valid=None if valid.all() else torch.as_tensor(valid, device=device),
            decided_at=decided,
            forwarded=count,
            index=index,
            kind="window" if begin.any() else "full",
        )
        if store is None:
            return query
        store_slots = torch.as_tensor(np.where(valid, column_positions, -1), device=device)
        row_index = torch.as_tensor(rows, device=device)
        return query.with_fields(store=StoreCall(row_index, store_slots, rows, step=self.commits))

    def distribution(self, logits: Tensor, rows: np.ndarray, positions: Tensor) -> Tensor:
        end_ids = self.facts.eos_token_ids
        if self.request.holes_eos_inf and end_ids:
            answer_start = torch.as_tensor(self.answer_start[rows, None], device=logits.device)
            is_end = torch.isin(
                torch.arange(logits.shape[-1], device=logits.device), torch.tensor(end_ids).to(logits.device)
            )
            logits = logits.masked_fill((positions < answer_start).unsqueeze(-1) & is_end, -torch.inf)
        return super().distribution(logits, rows, positions)

    def is_draft(self, query: Any) -> np.ndarray:
        positions = query.positions.cpu().numpy()
        undecided = np.take_along_axis(self._undecided(query.rows), positions, 1)
        return undecided & (query.tokens.cpu().numpy() != self.facts.mask_id)

    def finish_step(self, rows: np.ndarray) -> None:
        self.num_drafts[rows] = self.max_drafts
        end_ids = self.facts.eos_token_ids if self.request.eos_early_stop else ()
        if end_ids or self.stop_strings is not None:
            self._end_rows(rows, np.array(end_ids, np.int64))
        self._find_rows()

    def _find_rows(self) -> None:
        self.rows = np.flatnonzero((self.committed < self.length) & (self.end == self.length))

    def _end_rows(self, rows: np.ndarray, end_ids: np.ndarray) -> None:
        """End the rows whose final tokens before the first undecided position have an end id or a stop string."""
        canvas = self.canvas[torch.as_tensor(rows, device=self.context.device)].cpu().numpy()
        final = self.final_ends(rows)
        for index, row in enumerate(rows.tolist()):
            text = canvas[index, self.num_searched[row] : final[index]]
            if not len(text):
                continue
            is_end, begin, stop = np.isin(text, end_ids), self.num_searched[row : row + 1].copy(), NEVER
            end = begin + (is_end.argmax() + 1 if is_end.any() else len(text))
            if self.stop_strings is not None:
                stop = self.stop_strings.find_ends(np.array([row]), begin, text[None], end)[0]
            self.num_searched[row] = min(end[0], stop)
            if is_end[: self.num_searched[row] - begin[0]].any() or stop < NEVER:
                self.end[row], self.stopped[row] = self.num_searched[row], stop < NEVER
                self.context[row, self.num_searched[row] :] = self.facts.fill_token_id

    def widen(self, width: int) -> None:
        self.width = max(self.width, width)
        self.memory.grow("slot", self.width)
        more = np.tile(np.arange(self.order.shape[1], self.width), (self.batch, 1))
        self.order = np.concatenate((self.order, more), 1)

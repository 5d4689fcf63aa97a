"""The state of a request on the device, and the step that changes it (see `paradec.samplers.masked.device.step`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.logprobs import LogProbs
from paradec.core.protocol import NotFinite
from paradec.core.query import Cost, StoreCall, WindowLogits, WindowQuery
from paradec.core.rows import replace_rows, select_rows
from paradec.samplers.features.holes import exclude_ends
from paradec.samplers.masked.blocks import open_blocks
from paradec.samplers.masked.device.graphs import StepLayout, captured
from paradec.samplers.masked.loop import guide, make_view
from paradec.samplers.masked.state import MaskedState, Window
from paradec.samplers.masked.view import MaskedProposal, checked_select

WIDTHS = 64
"""Widths of windows are multiples of this where the cache's window shrinks from block to block, so that graphs serve
again."""


class DeviceEngine:
    """The state of one request as tensors on the device, and the steps that change it.

    Samplers and caches are asked through the methods that the plain loop calls. Those with `device_step` read this
    object in the place of a `MaskedState`: it has the names that they read, with tensors for numbers of rows.

    Shapes: `B` rows, `L` positions, `W` positions of the widest block, `K` blocks of the row that has most.
    """

    def __init__(self, layout: StepLayout):
        self.layout = layout
        self.sampler, self.facts, self.request = layout.sampler, layout.facts, layout.request
        self.cache: Any = layout.cache
        self.mask_id = layout.facts.mask_id
        self.batch, self.columns, self.most = layout.batch, layout.columns, layout.widest
        self.device = device = layout.device

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.suppressed = torch.tensor(layout.suppressed, device=device) if layout.suppressed else None
        self.ends = torch.tensor(self.facts.eos_token_ids, dtype=torch.int64, device=device)
        self.keys = numbers(self.batch, 2)
        self.store: Any = None
        self.logprobs: LogProbs | None = None
        self.blocks = numbers(self.batch, layout.blocks, 3)
        """[B, K, 3]: start, end and undecided positions of each row's blocks that have any."""
        # one column more: the first row's takes what is not to be written
        self.canvas = numbers(self.batch, self.columns + 1)
        """[B, L + 1] int64."""
        self._given = numbers(6, self.batch)
        # [B] each: blocks, positions, what was asked for, end, where an end token counts from, planned steps
        self.block_count, self.length, self.asked, self.end, self.first, steps = self._given
        self.steps_per_block = None if self.request.steps is None else steps
        self.counts = numbers(4, self.batch)
        """[4, B]: as `State.counts`."""
        self._progress = numbers(8, self.batch)
        (
            self.block_index,
            self.block_step,
            self.row_step,
            self.decided,
            self.block_start,
            self.block_end,
            self.masks_at_open,
            self.remaining,
        ) = self._progress
        self.failed = numbers(self.batch)
        """[B]: the step at which a row's logits were not finite; -1 while they were."""
        self.stopped, self.running, self.stuck = torch.zeros((3, self.batch), dtype=torch.bool, device=device)
        """[B] bool each; `stuck`: rows of which a step committed nothing where it must."""
        self.live = torch.ones((), dtype=torch.bool, device=device)
        """False makes every step one that no row needs: graphs are warmed up and captured so."""
        self.flags = numbers(4)
        self.features: dict[str, Any] = {}  # none changes what a step on the device does
        self.longest_plan = layout.planned
        self.generator = None
        self.model: Any = None
        """While a request is served."""
        self.graphs: dict[tuple[str, int, int], Callable[[], None]] = {}
        self.pool: Any = None
        self.stream: Any = None
        self.tables: dict[Any, Tensor] = {}
        """Of the rule, made once."""

    @property
    def nbytes(self) -> int:
        """Bytes of the key/value store."""
        return 0 if self.store is None else self.store.nbytes

    def load(self, model: Any, state: MaskedState, table: tuple[np.ndarray, np.ndarray]) -> None:
        """Copy a request into the tensors. table: its `block_table`."""
        self.empty(model)
        self.replace_rows(np.arange(self.batch), state, table)

    def empty(self, model: Any) -> None:
        """Hold nothing; `model` evaluates what will be put in."""
        self.model = model
        if self.cache.facts.uses_store:
            if self.store is None:
                self.store = model.make_store(self.batch, self.columns, self.cache.store_dtype)
            self.store.token_at_write.fill_(-1)  # what it holds is another request's
        self.live.fill_(True)
        self._clear(torch.arange(self.batch, device=self.device))
        self._note_flags()

    def replace_rows(self, slots: np.ndarray, state: MaskedState, table: tuple[np.ndarray, np.ndarray]) -> None:
        """Copy a request's rows, which nobody has stepped, into `slots` [N]. table: its `block_table`."""
        (blocks, count), index = table, torch.as_tensor(slots, device=self.device)
        steps = np.zeros(len(slots), np.int64) if state.steps_per_block is None else state.steps_per_block
        given = np.stack((count, state.length, state.asked, state.end, state.answer_start, steps))
        self._clear(index)
        self.canvas[:, : state.canvas.shape[1]].index_copy_(0, index, state.canvas)
        self.keys.index_copy_(0, index, state.keys)
        self.blocks[:, : blocks.shape[1]].index_copy_(0, index, torch.as_tensor(blocks, device=self.device))
        self._given.index_copy_(1, index, torch.as_tensor(given, device=self.device))
        for at, tensor in enumerate((self.block_start, self.block_end, self.masks_at_open)):
            tensor.index_copy_(0, index, self.blocks[index, 0, at])
        self.running.index_copy_(0, index, self.block_count[index] > 0)
        if self.store is not None:
            self.store.token_at_write.index_fill_(0, index, -1)
        self._note_flags()

    def _clear(self, rows: Tensor) -> None:
        """Make `rows` [N] of all tensors what they are where no request is."""
        self.canvas.index_fill_(0, rows, self.facts.fill_token_id)
        self.failed.index_fill_(0, rows, -1)
        for tensor in (self.keys, self.blocks, self.stopped, self.running, self.stuck):
            tensor.index_fill_(0, rows, 0)
        for tensor in (self._given, self.counts, self._progress):
            tensor.index_fill_(1, rows, 0)

    # ---- rows that come and go --------------------------------------------------------------------------------------

    def take_over(self, other: DeviceEngine, rows: np.ndarray) -> None:
        """Go on with `rows` [N] of another engine in the first slots of this one, which is empty and no smaller."""
        index, count = torch.as_tensor(rows, device=self.device), len(rows)
        self.canvas[:count, : other.columns] = other.canvas[index, : other.columns]
        self.blocks[:count, : other.blocks.shape[1]] = other.blocks[index]
        for name in ("keys", "failed", "stopped", "running", "stuck"):
            getattr(self, name)[:count] = getattr(other, name)[index]
        for name in ("_given", "counts", "_progress"):
            getattr(self, name)[:, :count] = getattr(other, name)[:, index]
        if self.store is not None:
            replace_rows(self.store, np.arange(count), select_rows(other.store, rows))
        self._note_flags()

    def stop_rows(self, rows: np.ndarray) -> None:
        """Take `rows` [N] out of the steps to come."""
        index = torch.as_tensor(rows, device=self.device)
        self.running.index_fill_(0, index, False)
        self.failed.index_fill_(0, index, -1)
        self._note_flags()

    # ---- on the host ------------------------------------------------------------------------------------------------

    def run(self, poll_every: int) -> None:
        """Step until every row is done."""
        while True:
            whole, part, widest, wrong = self.flags.tolist()  # the one wait for the device
            if wrong:
                self._complain()
            if not whole + part:
                return
            self.advance(whole, part, widest, poll_every)

    def advance(self, whole: int, part: int, widest: int, poll_every: int = 1) -> None:
        """Take the steps that `flags` ask for."""
        if not self.cache.facts.uses_store:
            for _ in range(poll_every):
                self._play("full", self._rounded(whole), self.columns)
            return
        if whole:
            self._play("full", self._rounded(whole), self.columns)
        for _ in range(poll_every):
            self._play("window", self._rounded(whole + part), self._width(widest))

    def _rounded(self, rows: int) -> int:
        """The power of two that holds so many rows, or all of them."""
        return min(1 << (rows - 1).bit_length(), self.batch)

    def _width(self, widest: int) -> int:
        """Columns of a window call of which the widest row needs so many."""
        if widest <= self.most + self.facts.shift:
            return min(self.most + self.facts.shift, self.columns)
        return min(-(-widest // WIDTHS) * WIDTHS, self.columns)

    def _play(self, kind: str, rows: int, width: int) -> None:
        if not self.layout.capture:
            self.step(kind, rows, width)
            return
        key = (kind, rows, width)
        if key not in self.graphs:
            self.live.fill_(False)  # nothing changes meanwhile
            self.graphs[key] = captured(self, lambda: self.step(*key))
            self.live.fill_(True)
        self.graphs[key]()

    def _complain(self) -> None:
        failed = self.failed.cpu().numpy()
        if len(rows := np.flatnonzero(failed >= 0)):
            raise NotFinite.at_steps(rows, failed[rows])
        raise RuntimeError(f"sampler {self.sampler.name!r} committed nothing for row {self.stuck.tolist().index(True)}")

    def write_back(self, state: MaskedState, rows: np.ndarray | None = None) -> None:
        """Give the request's state what was decoded, finished or not; of `rows` [N] alone, if they are given."""
        chosen = np.arange(self.batch) if rows is None else rows
        index, width = torch.as_tensor(chosen, device=self.device), min(state.canvas.shape[1], self.columns)
        state.canvas[:, :width].index_copy_(0, index, self.canvas[index, :width])
        found = torch.stack((self.end, self.row_step, self.decided, self.stopped.long(), self.running.long()))
        host, counts = found[:, index].cpu().numpy(), np.zeros((4, self.batch), np.int64)
        state.end[chosen], state.row_step[chosen], state.decided[chosen] = host[:3]
        state.stopped[chosen] = host[3] > 0
        counts[:, chosen] = self.counts[:, index].cpu().numpy()
        state.add_counts(counts)
        self.counts.index_fill_(1, index, 0)  # told once
        state.commits = max(state.commits, int(host[1].max()))
        state.finish(chosen[host[4] == 0])
        if rows is None:
            open_blocks(state, np.empty(0, np.int64))  # makes the window of the rows that are left
        if self.store is not None:
            state.store.peak_bytes = self.store.nbytes

    # ---- what samplers and caches read ------------------------------------------------------------------------------

    def planned_steps(self, rows: Any) -> Any:
        """[R]: as `MaskedState.planned_steps`."""
        return self.masks_at_open[rows] if self.steps_per_block is None else self.steps_per_block[rows]

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(self, kind: str, count: int, width: int) -> None:
        """Take one step of the rows in the phase `kind`, at most `count` of them, over `width` columns each."""
        mine = self.running & self.live
        if self.cache.facts.uses_store:
            fresh = self.block_step == 0
            mine = mine & (fresh if kind == "full" else ~fresh)
        every = torch.arange(self.batch, device=self.device)
        rows: Any = every if count == self.batch else (~mine).int().argsort(stable=True)[:count]
        active = mine[rows]  # [n]
        length = self.length[rows]
        window, valid = self._window(rows)
        current = self.canvas[rows].gather(1, window.positions)  # [n, W]
        undecided = (current == self.mask_id) & valid & active.unsqueeze(1)
        self.remaining.index_copy_(0, rows, undecided.sum(1))
        query, evaluated = self._query(kind, rows, active, length, width)

        logits = self.model(query) if self.store is None else self.model(query, self.store)
        sampler: Any = self.sampler
        logits = guide(sampler, self, logits, query)
        if self.layout.holes:
            exclude_ends(self, logits, window.positions < self.first[rows].unsqueeze(1))
        tokens, quantities = sampler.read(self, logits, query, None)
        proposal = MaskedProposal(
            rows=rows,
            values=tokens,
            cost=Cost([query], self.batch),
            positions=window.positions,
            scores=sampler.ranked(self, tokens, quantities),
            available=undecided,
            current=current,
            quantities=quantities,
        )
        selected = checked_select(sampler, make_view(sampler, self, proposal, memory={})) & undecided

        healthy = (quantities["confidence"].isfinite() | ~valid).all(1)
        idle = ~selected.any(1)
        if sampler.needs.may_wait:
            idle = idle & (self.block_step[rows] + 1 >= self.planned_steps(rows))
        failed, stuck = active & ~healthy, active & healthy & idle
        self.failed.index_copy_(0, rows, torch.where(failed, self.row_step[rows], self.failed[rows]))
        self.stuck.index_copy_(0, rows, self.stuck[rows] | stuck)
        active = active & ~failed & ~stuck
        written = torch.where(selected & active.unsqueeze(1), tokens, current)
        flat = torch.where(valid & active.unsqueeze(1), window.flat, self.columns)
        self.canvas.view(-1).scatter_(0, flat.view(-1), written.view(-1))
        self.decided.index_add_(0, rows, (selected & active.unsqueeze(1)).sum(1))
        self._count(kind, rows, active, evaluated)
        ended = self._end_rows(rows, active, window, valid, written) if self.layout.stops else None
        full = active & ~((written == self.mask_id) & valid).any(1)
        self._open_blocks(rows, full, ended, failed | stuck)
        self._note_flags()

    def _window(self, rows: Tensor) -> tuple[Any, Tensor]:
        """The open blocks of the rows, with the names of `masked_state.Window`; and which of it is real: [n, W]."""
        start = self.block_start[rows].unsqueeze(1)
        positions = start + torch.arange(self.most, device=self.device)
        valid = positions < self.block_end[rows].unsqueeze(1)
        # padding wraps around: a row's positions stay distinct
        positions = positions % self.columns
        flat = rows.unsqueeze(1) * (self.columns + 1) + positions
        self.window = Window(rows, positions, flat, valid, host_positions=None, host_valid=None, whole=False)
        return self.window, valid

    def _query(self, kind: str, rows: Any, active: Tensor, length: Tensor, width: int) -> tuple[WindowQuery, Tensor]:
        """The model call, and how many positions of each row it evaluates [n]."""
        shift = self.facts.shift
        if kind == "full":
            first, stop = torch.zeros_like(rows), length
        else:
            first, stop = self.cache.range(self, rows)
            first, stop = (first - shift).clamp(min=0), stop.minimum(length)
        column = torch.arange(width, device=self.device)
        every: Any = torch.arange(len(rows), device=self.device)
        positions = first.unsqueeze(1) + column  # [n, Q]
        inside = positions < stop.unsqueeze(1)
        positions = positions.clamp(max=self.columns - 1)
        wanted = (self.window.positions - shift).clamp(min=0) - first.unsqueeze(1)
        query = WindowQuery(
            rows=rows,
            tokens=self.canvas[rows].gather(1, positions),
            positions=positions,
            wanted=wanted.clamp(0, width - 1),
            valid=None if self.layout.level and self.store is None else inside,
            kind=kind,
            window=WindowLogits(every),
        )
        if self.store is not None:
            slots = torch.where(inside & active.unsqueeze(1), positions, -1)
            query.store = StoreCall(rows, slots, None, self.columns)
            if len(rows) == self.batch:  # then the rows are all rows in order, and the host knows it
                query.store.index = np.arange(self.batch)
                # every request begins with such a step; where rows are as long as the canvas it fills every slot
                query.forwarded = np.full(self.batch, self.columns if self.layout.level else 0)
        return query, stop - first

    def _count(self, kind: str, rows: Tensor, active: Tensor, evaluated: Tensor) -> None:
        took = active.long()
        whole = took if kind == "full" else torch.zeros_like(took)
        self.counts.index_add_(1, rows, torch.stack((took, took, took * evaluated, whole)))
        self.row_step.index_add_(0, rows, took)
        self.block_step.index_add_(0, rows, took)

    def _end_rows(self, rows: Tensor, active: Tensor, window: Any, valid: Tensor, written: Tensor) -> Tensor:
        """End the rows that `EndOfText` ends: [n] bool. written: [n, W], the window after the write."""
        counts = window.positions >= self.first[rows].unsqueeze(1)
        is_end = (written.unsqueeze(-1) == self.ends).any(-1) & valid & counts
        column = (is_end | (written == self.mask_id)).int().argmax(1, keepdim=True)  # the first of either
        ended = is_end.gather(1, column).squeeze(1) & active
        limit = window.positions.gather(1, column).squeeze(1) + 1
        self.end.index_copy_(0, rows, torch.where(ended, limit.minimum(self.end[rows]), self.end[rows]))
        self.stopped.index_copy_(0, rows, self.stopped[rows] | ended & (limit <= self.asked[rows]))
        limit = torch.where(ended, limit, self.columns + 1)
        tail = torch.arange(self.columns + 1, device=self.device) >= limit.unsqueeze(1)
        self.canvas.index_copy_(0, rows, self.canvas[rows].masked_fill(tail, self.facts.fill_token_id))
        return ended

    def _open_blocks(self, rows: Tensor, full: Tensor, ended: Tensor | None, wrong: Tensor) -> None:
        """Move rows with a full block to their next one; take out those that have none, have ended or went wrong."""
        index = self.block_index[rows] + full.long()
        running = self.running[rows] & (index < self.block_count[rows]) & ~wrong
        if ended is not None:
            running = running & ~ended
        self.running.index_copy_(0, rows, running)
        index = index.clamp(max=self.blocks.shape[1] - 1)
        self.block_index.index_copy_(0, rows, index)
        block = self.blocks[rows, index]  # [n, 3]
        for at, tensor in enumerate((self.block_start, self.block_end, self.masks_at_open)):
            tensor.index_copy_(0, rows, block[:, at])
        self.block_step.index_copy_(0, rows, torch.where(full, 0, self.block_step[rows]))

    def _note_flags(self) -> None:
        """What the host reads: rows to evaluate whole, rows to evaluate in part, columns of the widest window that may
        come, and whether something went wrong."""
        whole, part, widest = self.running, torch.zeros_like(self.running), torch.zeros_like(self.block_start)
        if self.cache.facts.uses_store:
            whole, part = self.running & (self.block_step == 0), self.running & (self.block_step > 0)
            every = torch.arange(self.batch, device=self.device)
            first, stop = self.cache.range(self, every)
            widest = torch.where(self.running, stop.minimum(self.length) - (first - self.facts.shift).clamp(min=0), 0)
        wrong = (self.failed >= 0).any() | self.stuck.any()
        self.flags.copy_(torch.stack((whole.sum(), part.sum(), widest.max(), wrong.long())))

"""State of a request on the device, and the step that changes it (see `paradec.samplers.masked.device.step`)."""

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
from paradec.samplers.masked.device.graphs import StepLayout, capture_graph
from paradec.samplers.masked.loop import make_view, prepare_logits
from paradec.samplers.masked.state import MaskedState, Window
from paradec.samplers.masked.view import MaskedProposal, run_select

WIDTH_MULTIPLE = 64
"""The width of windows that shrink from block to block is rounded up to a multiple of this, to reuse graphs."""


class DeviceEngine:
    """State of one request as tensors on the device, and the steps that change it.

    Samplers and caches with `device_step` read this object instead of a `MaskedState`; it has the fields that they
    read. Shapes: `B` rows, `L` positions, `W` positions of the widest block, at most `K` blocks per row.
    """

    def __init__(self, layout: StepLayout):
        self.layout = layout
        self.sampler, self.facts, self.request = layout.sampler, layout.facts, layout.request
        self.cache: Any = layout.cache
        self.mask_id = layout.facts.mask_id
        self.batch, self.columns, self.max_block_length = layout.batch, layout.columns, layout.max_block_length
        self.device = device = layout.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.suppressed = torch.tensor(layout.suppressed, device=device) if layout.suppressed else None
        self.ends = torch.tensor(self.facts.eos_token_ids, dtype=torch.int64, device=device)
        self.keys = zeros(self.batch, 2)
        self.store: Any = None
        self.logprobs: LogProbs | None = None
        self.blocks = zeros(self.batch, layout.max_blocks, 3)
        """[B, K, 3]: start, end and number of undecided positions of each row's blocks that are not full."""
        self.canvas = zeros(self.batch, self.columns + 1)
        """[B, L + 1] int64. Values to discard are written into the first row's extra entry."""
        self._row_fields = zeros(6, self.batch)
        # [B] each; only end tokens from `answer_start` on end a row
        self.block_count, self.length, self.requested_end, self.end, self.answer_start, steps = self._row_fields
        self.steps_per_block = None if self.request.steps is None else steps
        self.counts = zeros(4, self.batch)
        """[4, B]: as `State.counts`."""
        self._progress = zeros(8, self.batch)
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
        self.failed = zeros(self.batch)
        """[B]: number of the row's step that had NaN or infinite logits, or -1."""
        self.stopped, self.running, self.stuck = torch.zeros((3, self.batch), dtype=torch.bool, device=device)
        """[B] bool each. A row is stuck if a step that must commit a token committed none."""
        self.live = torch.ones((), dtype=torch.bool, device=device)
        """Whether steps change rows; False in the warm-up and capture of graphs."""
        self.flags = zeros(4)
        """Set by `_update_flags`, read by the host."""
        self.features: dict[str, Any] = {}  # empty; the one supported feature, `holes`, is in `layout`
        self.longest_plan = layout.longest_plan
        self.generator = None
        self.model: Any = None
        """None while the engine serves no request."""
        self.graphs: dict[tuple[str, int, int], Callable[[], None]] = {}
        self.pool: Any = None
        self.stream: Any = None
        self.tables: dict[Any, Tensor] = {}
        """Constant tables that the sampler makes at its first step."""

    @property
    def nbytes(self) -> int:
        return 0 if self.store is None else self.store.nbytes

    def load(self, model: Any, state: MaskedState, table: tuple[np.ndarray, np.ndarray]) -> None:
        self.clear(model)
        self.replace_rows(np.arange(self.batch), state, table)

    def clear(self, model: Any) -> None:
        """Drop all rows; `model` evaluates the next rows."""
        self.model = model
        if self.cache.facts.uses_store:
            if self.store is None:
                self.store = model.make_store(self.batch, self.columns, self.cache.store_dtype)
            self.store.token_at_write.fill_(-1)  # entries of earlier requests are invalid
        self.live.fill_(True)
        self._clear(torch.arange(self.batch, device=self.device))
        self._update_flags()

    def replace_rows(self, slots: np.ndarray, state: MaskedState, table: tuple[np.ndarray, np.ndarray]) -> None:
        """Copy a request's rows, which have not run any step, into `slots` [N]. table: the request's `block_table`."""
        (blocks, num_blocks), index = table, torch.as_tensor(slots, device=self.device)
        steps = np.zeros(len(slots), np.int64) if state.steps_per_block is None else state.steps_per_block
        row_fields = np.stack((num_blocks, state.length, state.requested_end, state.end, state.answer_start, steps))
        self._clear(index)
        self.canvas[:, : state.canvas.shape[1]].index_copy_(0, index, state.canvas)
        self.keys.index_copy_(0, index, state.keys)
        self.blocks[:, : blocks.shape[1]].index_copy_(0, index, torch.as_tensor(blocks, device=self.device))
        self._row_fields.index_copy_(1, index, torch.as_tensor(row_fields, device=self.device))
        for column, tensor in enumerate((self.block_start, self.block_end, self.masks_at_open)):
            tensor.index_copy_(0, index, self.blocks[index, 0, column])
        self.running.index_copy_(0, index, self.block_count[index] > 0)
        if self.store is not None:
            self.store.token_at_write.index_fill_(0, index, -1)
        self._update_flags()

    def _clear(self, rows: Tensor) -> None:
        self.canvas.index_fill_(0, rows, self.facts.fill_token_id)
        self.failed.index_fill_(0, rows, -1)
        for tensor in (self.keys, self.blocks, self.stopped, self.running, self.stuck):
            tensor.index_fill_(0, rows, 0)
        for tensor in (self._row_fields, self.counts, self._progress):
            tensor.index_fill_(1, rows, 0)

    # ---- rows that come and go --------------------------------------------------------------------------------------

    def copy_rows(self, source: DeviceEngine, rows: np.ndarray) -> None:
        """Copy `rows` [N] of the engine `source` into the first slots of this empty engine, which has room for them."""
        index, count = torch.as_tensor(rows, device=self.device), len(rows)
        self.canvas[:count, : source.columns] = source.canvas[index, : source.columns]
        self.blocks[:count, : source.blocks.shape[1]] = source.blocks[index]
        for name in ("keys", "failed", "stopped", "running", "stuck"):
            getattr(self, name)[:count] = getattr(source, name)[index]
        for name in ("_row_fields", "counts", "_progress"):
            getattr(self, name)[:, :count] = getattr(source, name)[:, index]
        if self.store is not None:
            replace_rows(self.store, np.arange(count), select_rows(source.store, rows))
        self._update_flags()

    def stop_rows(self, rows: np.ndarray) -> None:
        index = torch.as_tensor(rows, device=self.device)
        self.running.index_fill_(0, index, False)
        self.failed.index_fill_(0, index, -1)
        self._update_flags()

    # ---- on the host ------------------------------------------------------------------------------------------------

    def run(self, poll_every: int) -> None:
        """Decode all rows, reading `flags` every `poll_every` steps. Raises NotFinite, or RuntimeError if stuck."""
        while True:
            num_full, num_window, widest, has_failed = self.flags.tolist()  # waits for the device
            if has_failed:
                failed = self.failed.cpu().numpy()
                if len(rows := np.flatnonzero(failed >= 0)):
                    raise NotFinite.at_steps(rows, failed[rows])
                row = self.stuck.tolist().index(True)
                raise RuntimeError(f"sampler {self.sampler.name!r} committed nothing for row {row}")
            if not num_full + num_window:
                return
            self.advance(num_full, num_window, widest, poll_every)

    def advance(self, num_full: int, num_window: int, widest: int, poll_every: int = 1) -> None:
        """Run the phases that `flags` request."""
        if not self.cache.facts.uses_store:
            for _ in range(poll_every):
                self._run_step("full", self._round_up_rows(num_full), self.columns)
            return
        if num_full:
            self._run_step("full", self._round_up_rows(num_full), self.columns)
        width = self.max_block_length + self.facts.shift
        if widest > width:
            width = -(-widest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        width = min(width, self.columns)
        for _ in range(poll_every):
            self._run_step("window", self._round_up_rows(num_full + num_window), width)

    def _round_up_rows(self, rows: int) -> int:
        return min(1 << (rows - 1).bit_length(), self.batch)

    def _run_step(self, kind: str, rows: int, width: int) -> None:
        if not self.layout.capture:
            self.step(kind, rows, width)
            return
        key = (kind, rows, width)
        if key not in self.graphs:
            self.live.fill_(False)  # the capture's steps change no row
            self.graphs[key] = capture_graph(self, lambda: self.step(*key))
            self.live.fill_(True)
        self.graphs[key]()

    def write_back(self, state: MaskedState, rows: np.ndarray | None = None) -> None:
        """Write tokens and counters into the request's state; rows: [N], None for all."""
        selected = np.arange(self.batch) if rows is None else rows
        index, width = torch.as_tensor(selected, device=self.device), min(state.canvas.shape[1], self.columns)
        state.canvas[:, :width].index_copy_(0, index, self.canvas[index, :width])
        fields = torch.stack((self.end, self.row_step, self.decided, self.stopped.long(), self.running.long()))
        host, counts = fields[:, index].cpu().numpy(), np.zeros((4, self.batch), np.int64)
        state.end[selected], state.row_step[selected], state.decided[selected] = host[:3]
        state.stopped[selected] = host[3] > 0
        counts[:, selected] = self.counts[:, index].cpu().numpy()
        state.add_counts(counts)
        self.counts.index_fill_(1, index, 0)  # these counts were added to the state
        state.commits = max(state.commits, int(host[1].max()))
        state.finish(selected[host[4] == 0])
        if rows is None:
            open_blocks(state, np.empty(0, np.int64))  # makes the window of the running rows
        if self.store is not None:
            state.store.peak_bytes = self.store.nbytes

    def planned_steps(self, rows: Any) -> Any:
        return self.masks_at_open[rows] if self.steps_per_block is None else self.steps_per_block[rows]

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(self, kind: str, count: int, width: int) -> None:
        """Run one step in the phase `kind` ("full" or "window") on n = `count` rows, over `width` columns of each."""
        in_phase = self.running & self.live
        if self.cache.facts.uses_store:
            is_first_step = self.block_step == 0
            in_phase = in_phase & (is_first_step if kind == "full" else ~is_first_step)
        all_rows = torch.arange(self.batch, device=self.device)
        rows: Any = all_rows if count == self.batch else (~in_phase).int().argsort(stable=True)[:count]
        active = in_phase[rows]  # [n]
        length = self.length[rows]
        window, valid = self._window(rows)
        current = self.canvas[rows].gather(1, window.positions)  # [n, W]
        undecided = (current == self.mask_id) & valid & active.unsqueeze(1)
        self.remaining.index_copy_(0, rows, undecided.sum(1))
        query, num_evaluated = self._query(kind, rows, active, length, width)

        logits = self.model(query) if self.store is None else self.model(query, self.store)
        sampler: Any = self.sampler
        logits = prepare_logits(sampler, self, logits, query)
        if self.layout.holes:
            exclude_ends(self, logits, window.positions < self.answer_start[rows].unsqueeze(1))
        tokens, quantities = sampler.read_candidates(self, logits, query, None)
        proposal = MaskedProposal(
            rows=rows,
            values=tokens,
            cost=Cost([query], self.batch),
            positions=window.positions,
            scores=sampler.ranking_scores(self, tokens, quantities),
            available=undecided,
            current=current,
            quantities=quantities,
        )
        selected = run_select(sampler, make_view(sampler, self, proposal, memory={})) & undecided

        is_finite = (quantities["confidence"].isfinite() | ~valid).all(1)
        idle = ~selected.any(1)
        if sampler.needs.may_wait:
            idle = idle & (self.block_step[rows] + 1 >= self.planned_steps(rows))
        failed, stuck = active & ~is_finite, active & is_finite & idle
        self.failed.index_copy_(0, rows, torch.where(failed, self.row_step[rows], self.failed[rows]))
        self.stuck.index_copy_(0, rows, self.stuck[rows] | stuck)
        active = active & ~failed & ~stuck
        written = torch.where(selected & active.unsqueeze(1), tokens, current)
        flat = torch.where(valid & active.unsqueeze(1), window.flat, self.columns)
        self.canvas.view(-1).scatter_(0, flat.view(-1), written.view(-1))
        self.decided.index_add_(0, rows, (selected & active.unsqueeze(1)).sum(1))
        step_count = active.long()
        num_full = step_count if kind == "full" else torch.zeros_like(step_count)
        self.counts.index_add_(1, rows, torch.stack((step_count, step_count, step_count * num_evaluated, num_full)))
        self.row_step.index_add_(0, rows, step_count)
        self.block_step.index_add_(0, rows, step_count)
        ended = self._end_rows(rows, active, window, valid, written) if self.layout.stops else None
        full = active & ~((written == self.mask_id) & valid).any(1)
        self._open_blocks(rows, full, ended, failed | stuck)
        self._update_flags()

    def _window(self, rows: Tensor) -> tuple[Any, Tensor]:
        """Make a `Window` of the rows' open blocks; also return which positions are not padding: [n, W] bool."""
        start = self.block_start[rows].unsqueeze(1)
        positions = start + torch.arange(self.max_block_length, device=self.device)
        valid = positions < self.block_end[rows].unsqueeze(1)
        # padding wraps around, so that a row's positions are distinct
        positions = positions % self.columns
        flat = rows.unsqueeze(1) * (self.columns + 1) + positions
        self.window = Window(rows, positions, flat, valid, host_positions=None, host_valid=None)
        return self.window, valid

    def _query(self, kind: str, rows: Any, active: Tensor, length: Tensor, width: int) -> tuple[WindowQuery, Tensor]:
        """Build the model call; also return the number of positions that it evaluates per row [n]."""
        shift = self.facts.shift
        if kind == "full":
            start, stop = torch.zeros_like(rows), length
        else:
            start, stop = self.cache.range(self, rows)
            start, stop = (start - shift).clamp(min=0), stop.minimum(length)
        column = torch.arange(width, device=self.device)
        all_rows: Any = torch.arange(len(rows), device=self.device)
        positions = start.unsqueeze(1) + column  # [n, Q]
        is_inside = positions < stop.unsqueeze(1)
        positions = positions.clamp(max=self.columns - 1)
        wanted = (self.window.positions - shift).clamp(min=0) - start.unsqueeze(1)
        query = WindowQuery(
            rows=rows,
            tokens=self.canvas[rows].gather(1, positions),
            positions=positions,
            wanted=wanted.clamp(0, width - 1),
            valid=None if self.layout.rows_fill_canvas and self.store is None else is_inside,
            kind=kind,
            window=WindowLogits(all_rows),
        )
        if self.store is not None:
            slots = torch.where(is_inside & active.unsqueeze(1), positions, -1)
            query.store = StoreCall(rows, slots, None, self.columns)
            if len(rows) == self.batch:  # all rows, in order
                query.store.index = np.arange(self.batch)
                # the request's first step has filled every slot, if all rows are as long as the canvas
                query.forwarded = np.full(self.batch, self.columns if self.layout.rows_fill_canvas else 0)
        return query, stop - start

    def _end_rows(self, rows: Tensor, active: Tensor, window: Any, valid: Tensor, written: Tensor) -> Tensor:
        """End rows as `EndOfText` does; return which rows ended [n] bool. written: [n, W], tokens after the step."""
        is_answer = window.positions >= self.answer_start[rows].unsqueeze(1)
        is_end = (written.unsqueeze(-1) == self.ends).any(-1) & valid & is_answer
        column = (is_end | (written == self.mask_id)).int().argmax(1, keepdim=True)  # the first end token or mask
        ended = is_end.gather(1, column).squeeze(1) & active
        limit = window.positions.gather(1, column).squeeze(1) + 1
        self.end.index_copy_(0, rows, torch.where(ended, limit.minimum(self.end[rows]), self.end[rows]))
        self.stopped.index_copy_(0, rows, self.stopped[rows] | ended & (limit <= self.requested_end[rows]))
        limit = torch.where(ended, limit, self.columns + 1)
        tail = torch.arange(self.columns + 1, device=self.device) >= limit.unsqueeze(1)
        self.canvas.index_copy_(0, rows, self.canvas[rows].masked_fill(tail, self.facts.fill_token_id))
        return ended

    def _open_blocks(self, rows: Tensor, full: Tensor, ended: Tensor | None, failed: Tensor) -> None:
        index = self.block_index[rows] + full.long()
        running = self.running[rows] & (index < self.block_count[rows]) & ~failed
        if ended is not None:
            running = running & ~ended
        self.running.index_copy_(0, rows, running)
        index = index.clamp(max=self.blocks.shape[1] - 1)
        self.block_index.index_copy_(0, rows, index)
        block = self.blocks[rows, index]  # [n, 3]
        for column, tensor in enumerate((self.block_start, self.block_end, self.masks_at_open)):
            tensor.index_copy_(0, rows, block[:, column])
        self.block_step.index_copy_(0, rows, torch.where(full, 0, self.block_step[rows]))

    def _update_flags(self) -> None:
        """Set `flags`: number of rows in the phases "full" and "window", width of the widest call, any failure."""
        full, window, widest = self.running, torch.zeros_like(self.running), torch.zeros_like(self.block_start)
        if self.cache.facts.uses_store:
            full, window = self.running & (self.block_step == 0), self.running & (self.block_step > 0)
            all_rows = torch.arange(self.batch, device=self.device)
            start, stop = self.cache.range(self, all_rows)
            widest = torch.where(self.running, stop.minimum(self.length) - (start - self.facts.shift).clamp(min=0), 0)
        has_failed = (self.failed >= 0).any() | self.stuck.any()
        self.flags.copy_(torch.stack((full.sum(), window.sum(), widest.max(), has_failed.long())))

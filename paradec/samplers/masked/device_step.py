"""The device-side step: a masked decoding whose every decision is taken on the accelerator.

The loop of `protocol.decode` keeps blocks, counters and ends on the host, which waits for the device at every step.
Here all of it lives in tensors of fixed shapes, and one step is a pure function of them: embedding, layers against the
store, output matrix on the window alone, token statistics, selection, commit, the stop at the end of the text, the next
block. On CUDA each shape of it is captured in a graph once and replayed; with `capture=False` the same code runs
uncaptured.

A row is in one of two phases: it evaluates itself whole (always without a cache; a block's first step with one), or its
window. A step is of one phase and leaves the rows of the other as they are; so a step that no row needs changes nothing
and is counted nowhere. The host reads one small tensor every `poll_every` steps to see which phase is needed. Graphs
are made per phase, number of rows (powers of two: rows of the phase are gathered) and width of the window.

Graphs outlive their request. A step reads nothing of a request but tensors that stay where they are, into which the
next one is copied, and a `Layout`: all that is fixed while a graph is captured. An `Engine` is made from a layout
alone, and serves requests of equal layouts only. The model keeps the engines that were used last (`KEPT`,
`KEPT_SHARE`), until `clear_graphs`.

What a row decodes does not depend on any of this: it takes the same steps as in the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.checks import check_bool, check_int
from paradec.models.facts import ModelFacts
from paradec.protocol import Query
from paradec.request import Request
from paradec.samplers.masked.base import MaskedSampler, View
from paradec.samplers.masked.dream import DreamSampler
from paradec.samplers.masked.schedules import time_share
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.stopping import EndOfText
from paradec.samplers.statistics import top_by_rank

SAMPLERS = frozenset(
    "entropy entropy_bound entropy_threshold factor hierarchy localleap low_confidence margin maskgit_plus random "
    "threshold topk_margin".split()
)
"""Methods whose `select` is known to wait for no device and to take counts from tensors."""
CACHES = frozenset(("none", "prefix", "dual"))
WIDTHS = 64
"""Widths of windows are multiples of this where the cache's window shrinks from block to block, so that graphs serve
again."""
COLUMNS = 64
"""Canvases are padded to a multiple of this, so that requests of other lengths find graphs of theirs. Where all rows
are just as long, attention needs no mask."""
KEPT = 4
"""Engines that a model keeps between requests."""
KEPT_SHARE = 0.25
"""The share of the device's memory that the key/value stores of kept engines may take together."""
MOST_ENDS = 9
"""More end ids than this have torch.isin sort, and wait for the device."""


class NotCapturable(RuntimeError):
    """A step does something that no CUDA graph can hold. The request's state is as it was."""


@dataclass(frozen=True)
class Layout:
    """All that is fixed in a captured step; graphs serve every request with an equal one."""

    sampler: MaskedSampler
    request: Request
    cache: Cache
    facts: ModelFacts
    batch: int
    columns: int
    """Positions of the canvas, padding included."""
    widest: int
    """Positions of the widest block."""
    blocks: int
    """Entries of the table of blocks, per row."""
    planned: int
    """Steps of the longest plan of a block."""
    level: bool
    """Whether all rows fill the canvas."""
    stops: bool
    """Whether rows end at their end token."""
    suppressed: tuple[int, ...]
    holes: bool
    """Whether end tokens are kept out of holes."""
    device: torch.device
    capture: bool

    @classmethod
    def of(cls, sampler: MaskedSampler, state: MaskedState, table: np.ndarray, capture: bool) -> Layout:
        """The layout of a request whose blocks are `table` (see `block_table`)."""
        exact, widest = state.canvas.shape[1], int((table[..., 1] - table[..., 0]).max())
        columns = exact
        if getattr(state.cache, "max_memory", None) is None:  # a bound that may leave no room for padding
            columns = -(-exact // COLUMNS) * COLUMNS
            if state.facts.max_length is not None:
                columns = max(exact, min(columns, state.facts.max_length))
        return cls(
            sampler=sampler,
            request=Request(**state.request.sampling()),
            cache=state.cache,
            facts=state.facts,
            batch=state.batch,
            columns=columns,
            widest=widest,
            blocks=1 << (table.shape[1] - 1).bit_length(),
            planned=widest if state.steps_per_block is None else int(state.steps_per_block.max()),
            level=state.level and columns == exact,
            stops=bool(state.stop_rules),
            suppressed=() if state.suppressed is None else tuple(state.suppressed.tolist()),
            holes=state.guards_holes,
            device=state.canvas.device,
            capture=capture,
        )


def refusal(sampler: MaskedSampler, model: Any, state: MaskedState) -> str | None:
    """Why the device-side step cannot serve a request, in words that follow its names; None where it can."""
    if sampler.name not in SAMPLERS:
        return f"sampler {sampler.name!r} keeps something on the host between steps"
    if not type(sampler).__module__.startswith("paradec."):
        return f"sampler {sampler.name!r} is a class of your own, {type(sampler).__name__}"
    if sampler.memory():
        return f"sampler {sampler.name!r} with these settings remembers something between steps"
    if state.cache.name not in CACHES:
        return f"cache {state.cache.name!r} chooses on the host what to evaluate"
    if model.kind != "decoder" or state.facts.topology != "bidirectional":
        return f"{state.facts.name} is not a bidirectional transformers decoder"
    if state.reads_blocks:
        return f"blocks={state.blocks} end where the host reads it from the logits"
    if state.attention_state is not None:
        return "sparse attention keeps its pattern on the host"
    if state.reuses or state.settled is not None:
        return "a prefix that is taken over or kept is laid out on the host"
    if state.branches > 1:
        return "guidance evaluates two rows for one"
    if state.generator is not None:
        return "rng='reference' draws on the host"
    if state.early_rules or not all(isinstance(rule, EndOfText) for rule in state.stop_rules):
        return "stop rules other than the end token are asked on the host"
    if state.request.confidence_eos_eot_inf and len(state.ends) > MOST_ENDS:
        return f"confidence_eos_eot_inf looks for {len(state.ends)} end tokens, and more than {MOST_ENDS} are sorted"
    if len({parameter.device for parameter in model.module.parameters()}) > 1:
        return f"{state.facts.name} is spread over several devices"
    return None


def decode(
    sampler: MaskedSampler, model: Any, state: MaskedState, *, capture: bool = True, poll_every: int = 1
) -> MaskedState:
    """Decode a request from its start to its end, as `protocol.decode` does.

    Args:
        sampler, model, state: of a request that nobody has stepped yet, and that `refusal` has nothing against.
        capture: replay CUDA graphs; False runs the same step uncaptured, on any device.
        poll_every: steps between two looks of the host at the device. More than one saves the wait for it, and may
            replay so many steps less one for nothing at every block's end.

    Raises:
        ValueError: a request that the device-side step cannot serve, or `capture` without a CUDA device.
        FloatingPointError, RuntimeError: as `MaskedSampler.commit`; the row at fault has not been written to.
    """
    check_bool("capture", capture)
    check_int("poll_every", poll_every, low=1)
    if capture and state.canvas.device.type != "cuda":
        raise ValueError(f"capture=True takes a CUDA device; the model is on {state.canvas.device}")
    if reason := refusal(sampler, model, state):
        raise ValueError(f"the device-side step cannot serve this request: {reason}")
    if state.commits or int(state.counts.sum()):
        raise ValueError("the device-side step starts a request from its beginning; this state has been stepped")
    with torch.inference_mode(), torch.cuda.device(state.canvas.device) if capture else nullcontext():
        _decode(sampler, model, state, capture, poll_every)
    return state


def _decode(sampler: MaskedSampler, model: Any, state: MaskedState, capture: bool, poll_every: int) -> None:
    table = block_table(state)
    layout, module = Layout.of(sampler, state, table[0], capture), _fingerprint(model)
    for key in [key for key in model.engines if key[1] != module]:  # of weights that are gone
        del model.engines[key]
    # taken out while it serves: a request beside this one makes its own
    engine = model.engines.pop((layout, module), None) or Engine(layout)
    engine.load(model, state, table)
    try:
        engine.run(poll_every)
    except NotCapturable:
        raise
    except BaseException:
        engine.write_back(state)
        raise  # and the engine is not kept: its store may hold NaN
    engine.write_back(state)
    engine.model = None
    model.engines[layout, module] = engine
    _evict(model, layout.device)


def _evict(model: Any, device: torch.device) -> None:
    """Drop the engines that were used longest ago, as far as there are too many."""
    room = float("inf")
    if device.type == "cuda":
        room = KEPT_SHARE * torch.cuda.get_device_properties(device).total_memory
    while len(model.engines) > KEPT or sum(engine.nbytes for engine in model.engines.values()) > room:
        del model.engines[next(iter(model.engines))]


def clear_graphs(model: Any) -> int:
    """Free the CUDA graphs that `model` keeps, and the tensors and key/value stores that they work on.

    Graphs made from other weights (moved, converted, exchanged), or from another attention, are never replayed. Call
    this after a change that shows in neither, such as a hook on a module or an adapter that is switched off.

    Returns:
        How many sets of graphs there were.
    """
    count = len(model.engines)
    model.engines.clear()
    return count


def _fingerprint(model: Any) -> tuple[Any, ...]:
    """Where the weights stand, and what else a captured forward has fixed."""
    module = model.module
    tensors = (*module.parameters(), *module.buffers())
    places = tuple((_place(tensor), tensor.dtype, tensor.shape) for tensor in tensors)
    return id(module), model.attn_implementation, places


def _place(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # quantized weights, which are several tensors
        return id(tensor)


class Engine:
    """The state of one request as tensors on the device, and the steps that change it.

    Samplers and caches are asked through the methods that the plain loop calls, with this object in the place of the
    state: it has the attributes that those of `SAMPLERS` and `CACHES` read, as tensors.

    Shapes: `B` rows, `L` positions, `W` positions of the widest block, `K` blocks of the row that has most.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self.sampler, self.facts, self.request, self.cache = layout.sampler, layout.facts, layout.request, layout.cache
        self.batch, self.columns, self.most = layout.batch, layout.columns, layout.widest
        self.device = device = layout.device

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.suppressed = torch.tensor(layout.suppressed, device=device) if layout.suppressed else None
        self.ends = torch.tensor(self.facts.eos_token_ids, dtype=torch.int64, device=device)
        self.keys = numbers(self.batch, 2)
        self.store: Any = None
        self.blocks = numbers(self.batch, layout.blocks, 3)
        """[B, K, 3]: start, end and undecided positions of each row's blocks that have any."""
        # one column more takes what is not to be written
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
        self.shares = self._time_shares() if isinstance(self.sampler, DreamSampler) else None
        self.window: Any = None
        self.generator = None
        self.model: Any = None
        """While a request is served."""
        self.graphs: dict[tuple[str, int, int], Callable[[], None]] = {}
        self.pool: Any = None
        self.stream: Any = None
        self._made: dict[Any, Any] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the key/value store."""
        return 0 if self.store is None else self.store.nbytes

    def load(self, model: Any, state: MaskedState, table: tuple[np.ndarray, np.ndarray]) -> None:
        """Copy a request into the tensors. table: its `block_table`."""
        self.model, (blocks, count) = model, table
        if self.cache.uses_store:
            if self.store is None:
                self.store = model.make_store(self.batch, self.columns, self.cache.store_dtype)
            self.store.token_at_write.fill_(-1)  # what it holds is another request's
        exact = state.canvas.shape[1]
        self.canvas.fill_(self.facts.fill_token_id)[:, :exact].copy_(state.canvas)
        self.keys.copy_(state.keys)
        self.blocks.zero_()[:, : blocks.shape[1]].copy_(torch.as_tensor(blocks))
        steps = np.zeros(self.batch, np.int64) if state.steps_per_block is None else state.steps_per_block
        given = (count, state.length, state.asked, state.end, state.answer_start, steps)
        self._given.copy_(torch.as_tensor(np.stack(given)))
        for tensor in (self.counts, self._progress, self.stopped, self.stuck):
            tensor.zero_()
        for at, tensor in enumerate((self.block_start, self.block_end, self.masks_at_open)):
            tensor.copy_(self.blocks[:, 0, at])
        self.failed.fill_(-1)
        self.live.fill_(True)
        torch.gt(self.block_count, 0, out=self.running)
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
            if not self.cache.uses_store:
                for _ in range(poll_every):
                    self._play("full", self._rounded(whole), self.columns)
                continue
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
        failed = self.failed.tolist()
        for row, step in enumerate(failed):
            if step >= 0:
                raise FloatingPointError(f"the model returned NaN or infinite logits for row {row} at its step {step}")
        raise RuntimeError(f"sampler {self.sampler.name!r} committed nothing for row {self.stuck.tolist().index(True)}")

    def write_back(self, state: MaskedState) -> None:
        """Give the request's state what was decoded, finished or not."""
        state.canvas.copy_(self.canvas[:, : state.canvas.shape[1]])
        flags = (self.stopped.long(), self.running.long())
        host = torch.stack((self.end, self.row_step, self.decided, *flags)).cpu().numpy()
        state.end[:], state.row_step[:], state.decided[:], state.stopped[:] = host[0], host[1], host[2], host[3] > 0
        state.commits = int(host[1].max())
        state.add_counts(self.counts.cpu().numpy())
        state.finish(np.flatnonzero(host[4] == 0))
        state.open_blocks(np.empty(0, np.int64))  # makes the window of the rows that are left
        if self.store is not None:
            state.store.peak_bytes = self.store.nbytes

    # ---- what samplers and caches read ------------------------------------------------------------------------------

    def planned_steps(self, rows: Tensor) -> Tensor:
        """[n] int64, as `MaskedState.planned_steps`."""
        return self.masks_at_open[rows] if self.steps_per_block is None else self.steps_per_block[rows]

    def while_rows_stand(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that is made once for each number of rows, which is part of the key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _time_shares(self) -> Tensor:
        """[P + 1, P] float32: `time_share` for each number of planned steps and each step before the last."""
        steps = self.layout.planned
        planned, step = np.divmod(np.arange((steps + 1) * steps), steps)
        share = time_share(step, planned, self.sampler.eps).reshape(steps + 1, steps)
        return torch.as_tensor(share, device=self.device)

    def _quota(self, rows: Tensor) -> Any:
        """Tokens that the schedule grants, as the sampler's `quota` has it."""
        if self.shares is None:
            return self.sampler.quota(self, rows)
        planned, step, left = self.planned_steps(rows), self.block_step[rows], self.remaining[rows]
        share = self.shares[planned, step.clamp(max=self.shares.shape[1] - 1)]
        return torch.where(step >= planned - 1, left, (left.float() * share).long())

    # ---- one step ---------------------------------------------------------------------------------------------------

    def step(self, kind: str, count: int, width: int) -> None:
        """Take one step of the rows in the phase `kind`, at most `count` of them, over `width` columns each."""
        mine = self.running & self.live
        if self.cache.uses_store:
            fresh = self.block_step == 0
            mine = mine & (fresh if kind == "full" else ~fresh)
        every = torch.arange(self.batch, device=self.device)
        rows = every if count == self.batch else (~mine).int().argsort(stable=True)[:count]
        active = mine[rows]  # [n]
        length = self.length[rows]
        window, valid = self._window(rows)
        current = self.canvas[rows].gather(1, window.positions)  # [n, W]
        undecided = (current == self.facts.mask_token_id) & valid & active.unsqueeze(1)
        self.remaining.index_copy_(0, rows, undecided.sum(1))
        query, evaluated = self._query(kind, rows, active, length, width)

        logits = self.model(query) if self.store is None else self.model(query, self.store)
        sampler = self.sampler
        logits = sampler._guided(self, logits, query)
        if self.layout.holes:
            sampler._keep_ends_out(self, logits, window.positions < self.first[rows].unsqueeze(1))
        tokens, quantities = sampler._read(self, logits, query, None)
        scores = sampler._ranked(self, tokens, quantities)
        view = View(
            scores=torch.where(undecided, scores, -torch.inf),
            candidates=undecided,
            tokens=tokens,
            positions=window.positions,
            quantities=quantities,
            quota=self._quota(rows),
            memory={},
            updates={},
            current=current,
            editable=torch.zeros_like(undecided),
            top=top_by_rank,
            draw=lambda: sampler._position_noise(self, None),
            choose=lambda scores, number: sampler._choose(self, scores, number, None),
            ends=self.ends,
        )
        selected = sampler.select(view) & undecided

        healthy = (quantities["confidence"].isfinite() | ~valid).all(1)
        idle = ~selected.any(1)
        if sampler.may_wait:
            idle = idle & (self.block_step[rows] + 1 >= self.planned_steps(rows))
        failed, stuck = active & ~healthy, active & healthy & idle
        self.failed.index_copy_(0, rows, torch.where(failed, self.row_step[rows], self.failed[rows]))
        self.stuck.index_copy_(0, rows, self.stuck[rows] | stuck)
        active = active & ~failed & ~stuck
        written = torch.where(selected & active.unsqueeze(1), tokens, current)
        flat = rows.unsqueeze(1) * (self.columns + 1)
        flat = flat + torch.where(valid & active.unsqueeze(1), window.positions, self.columns)
        self.canvas.view(-1).scatter_(0, flat.view(-1), written.view(-1))
        self.decided.index_add_(0, rows, (selected & active.unsqueeze(1)).sum(1))
        self._count(kind, rows, active, evaluated)
        ended = self._end_rows(rows, active, window, valid, written) if self.layout.stops else None
        full = active & ~((written == self.facts.mask_token_id) & valid).any(1)
        self._open_blocks(rows, full, ended, failed | stuck)
        self._note_flags()

    def _window(self, rows: Tensor) -> tuple[Any, Tensor]:
        """The open blocks of the rows, with the names of `masked_state.Window`; and which of it is real: [n, W]."""
        start = self.block_start[rows].unsqueeze(1)
        positions = start + torch.arange(self.most, device=self.device)
        valid = positions < self.block_end[rows].unsqueeze(1)
        # padding wraps around: a row's positions stay distinct
        self.window = SimpleNamespace(rows=rows, row_index=rows.unsqueeze(1), positions=positions % self.columns)
        return self.window, valid

    def _query(self, kind: str, rows: Tensor, active: Tensor, length: Tensor, width: int) -> tuple[Query, Tensor]:
        """The model call, and how many positions of each row it evaluates [n]."""
        shift = self.facts.shift
        if kind == "full":
            first, stop = torch.zeros_like(rows), length
        else:
            first, stop = self.cache.range(self, rows)
            first, stop = (first - shift).clamp(min=0), stop.minimum(length)
        column = torch.arange(width, device=self.device)
        positions = first.unsqueeze(1) + column  # [n, Q]
        inside = positions < stop.unsqueeze(1)
        positions = positions.clamp(max=self.columns - 1)
        wanted = (self.window.positions - shift).clamp(min=0) - first.unsqueeze(1)
        query = Query(
            rows=rows,
            tokens=self.canvas[rows].gather(1, positions),
            positions=positions,
            wanted=wanted.clamp(0, width - 1),
            valid=None if self.layout.level and self.store is None else inside,
            index=torch.arange(len(rows), device=self.device),
            kind=kind,
        )
        if self.store is not None:
            query.store_rows = rows
            query.slots = torch.where(inside & active.unsqueeze(1), positions, -1)
            query.reach = self.columns
            if len(rows) == self.batch:  # then the rows are all rows in order, and the host knows it
                query.store_index = np.arange(self.batch)
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
        is_end = (
            (written.unsqueeze(-1) == self.ends).any(-1) & valid & (window.positions >= self.first[rows].unsqueeze(1))
        )
        column = (is_end | (written == self.facts.mask_token_id)).int().argmax(1, keepdim=True)  # the first of either
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
        if self.cache.uses_store:
            whole, part = self.running & (self.block_step == 0), self.running & (self.block_step > 0)
            every = torch.arange(self.batch, device=self.device)
            first, stop = self.cache.range(self, every)
            widest = torch.where(self.running, stop.minimum(self.length) - (first - self.facts.shift).clamp(min=0), 0)
        wrong = (self.failed >= 0).any() | self.stuck.any()
        self.flags.copy_(torch.stack((whole.sum(), part.sum(), widest.max(), wrong.long())))


def captured(engine: Engine, step: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of one step, ready to be replayed.

    Raises:
        NotCapturable: the step waits for the device, or does what no graph can hold.
    """
    device = engine.device
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    if engine.pool is None:
        # graphs of one engine never run side by side and leave nothing behind for each other: they share memory, which
        # takes one stream; another than that of the warm-up, so that cuBLAS puts its workspace there as well
        engine.pool, engine.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(2):  # what libraries set up, and compile, at first use
            step()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # what other threads do on the device is no business of the capture
        with torch.cuda.graph(graph, pool=engine.pool, stream=engine.stream, capture_error_mode="thread_local"):
            step()
    except RuntimeError as error:
        torch.cuda.set_stream(current)  # a capture that breaks off leaves its own
        raise NotCapturable(f"a step of {engine.facts.name} cannot be captured: {error}") from error
    return graph.replay


def block_table(state: MaskedState) -> tuple[np.ndarray, np.ndarray]:
    """The blocks that a request's rows will open, as `MaskedState.open_blocks` opens them one by one.

    Returns:
        [B, K, 3] int64: start, end, and undecided positions of each; zeros behind a row's last. [B] int64: how many.
    """
    masks_before = np.zeros((state.batch, state.canvas.shape[1] + 1), np.int64)
    masks_before[:, 1:] = state.undecided.cpu().numpy().cumsum(1)
    start = state.prompt_length.copy()
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(state.batch)]
    while len(rows := np.flatnonzero(start < state.length)):
        end = state.blocks.open(start[rows], state.prompt_length[rows], state.length[rows])
        masks = masks_before[rows, end] - masks_before[rows, start[rows]]
        for row, block in zip(rows.tolist(), zip(start[rows].tolist(), end.tolist(), masks.tolist())):
            if block[2]:
                found[row].append(block)
        start[rows] = end
    count = np.array([len(blocks) for blocks in found], np.int64)
    table = np.zeros((state.batch, max(1, int(count.max())), 3), np.int64)
    for row, blocks in enumerate(found):
        table[row, : len(blocks)] = blocks if blocks else np.empty((0, 3))
    return table, count

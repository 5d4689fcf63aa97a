"""The state of a masked decoding: canvas, blocks per row, and the model calls that a plan asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec import rng
from paradec.blocks import BlockPolicy
from paradec.caches.base import Cache, Part
from paradec.checks import check_int
from paradec.models.facts import ModelFacts
from paradec.prompts import encode
from paradec.protocol import Memory, Query, Sampler, State
from paradec.samplers.request import Request, block_policy, cache_of, check_steps, make_request, randomness
from paradec.trace import Trace


@dataclass
class Window:
    """The positions that may become final now: the open block of every running row.

    Shapes: `R` running rows, `W` positions (the widest block; narrower rows are padded with `valid` False).
    """

    rows: np.ndarray
    """[R] int64 on the host: the state's rows."""
    positions: Tensor
    """[R, W] int64; distinct within a row, padding included."""
    flat: Tensor
    """[R, W] int64: the same as indices into a flattened canvas."""
    valid: Tensor | None
    """[R, W] bool, or None when all are valid."""
    host_positions: np.ndarray
    host_valid: np.ndarray | None
    """[R, W]: the same on the host."""
    whole: bool
    """Whether the running rows are all rows of the state."""

    @cached_property
    def row_index(self) -> Tensor:
        """[R, 1] int64: the rows on the device, ready to index."""
        return torch.as_tensor(self.rows, device=self.positions.device).unsqueeze(1)

    def read(self, tensor: Tensor) -> Tensor:
        """The window [R, W] of a canvas-shaped tensor [B, L]."""
        return tensor.take(self.flat)

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Write the window [R, W] of a canvas-shaped tensor [B, L], in place."""
        tensor.put_(self.flat, values)


@dataclass
class MaskedState(State):
    """What changes while a masked sampler decodes. `B` rows, canvas of `L` positions; row r uses the first `length[r]`.

    Tensors live on the model's device; [B] bookkeeping is numpy on the host, fed by one transfer per step.
    """

    facts: ModelFacts
    request: Request
    cache: Cache
    blocks: BlockPolicy
    pads: bool
    canvas: Tensor
    """[B, L] int64 ids; the mask id stands at undecided positions and nowhere else."""
    given: Tensor
    """[B, L] bool: what the user gave (masked in the unconditional branch of guidance)."""
    prompt_length: np.ndarray
    length: np.ndarray
    keys: Tensor
    """[B, 2] int64 random keys."""
    generator: torch.Generator | None
    suppressed: Tensor | None
    """[S] int64 ids that are never proposed, beside the mask id; None when there are none."""
    ends: Tensor
    """[E] int64 ids that end an answer."""
    store: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.block_start = self.prompt_length.copy()
        self.block_end = self.prompt_length.copy()
        self.remaining = np.zeros(self.batch, np.int64)
        """Undecided positions of the open block."""
        self.masks_at_open = np.zeros(self.batch, np.int64)
        self._steps = np.zeros((2, self.batch), np.int64)
        self.block_step, self.row_step = self._steps  # views
        self.running = np.ones(self.batch, bool)
        self._running_rows = self.batch
        self.decided = np.zeros(self.batch, np.int64)
        self.total = self.length - self.prompt_length
        self._made_for_blocks: dict[Any, Any] = {}
        self._made_for_rows: dict[Any, Any] = {}
        counts = [self.blocks.count(int(p), int(n)) for p, n in zip(self.prompt_length, self.length, strict=True)]
        steps = self.request.steps
        self.steps_per_block = None if steps is None else np.array([-(-steps // count) for count in counts])
        # undecided positions before each position, as they stood at the start
        self._masks_before = np.zeros((self.batch, self.canvas.shape[1] + 1), np.int64)
        self._masks_before[:, 1:] = self.undecided.cpu().numpy().cumsum(1)
        self.open_blocks(np.arange(self.batch))

    @property
    def branches(self) -> int:
        """Rows of the model per row of the state: 2 under guidance."""
        return 2 if self.request.guidance_scale != 1.0 else 1

    @property
    def undecided(self) -> Tensor:
        """[B, L] bool: positions that are not final yet."""
        return self.canvas == self.facts.mask_token_id

    @property
    def done(self) -> bool:
        return self._running_rows == 0

    @property
    def progress(self) -> tuple[int, int]:
        return int(np.where(self.running, self.decided, self.total).sum()), int(self.total.sum())

    def open_blocks(self, rows: np.ndarray) -> None:
        """Move `rows` to their next block that has something undecided; rows without one are finished."""
        while len(rows):
            self.block_start[rows] = self.block_end[rows]
            rows = rows[self.block_start[rows] < self.length[rows]]
            if not len(rows):
                break
            start = self.block_start[rows]
            self.block_end[rows] = self.blocks.open(start, self.prompt_length[rows], self.length[rows])
            masks = self._masks_before[rows, self.block_end[rows]] - self._masks_before[rows, start]
            self.masks_at_open[rows] = self.remaining[rows] = masks
            self.block_step[rows] = 0
            self.memory.reset(rows, "block")
            rows = rows[masks == 0]
        self.running &= self.block_start < self.length
        self._make_window()

    def advance(self, rows: np.ndarray, committed: np.ndarray) -> None:
        """Count one step of the running rows, of which `rows` [R] committed so many tokens each."""
        self.commits += 1
        self._steps += self.running
        if not self.window.whole:
            committed, of_running = np.zeros(self.batch, np.int64), committed
            committed[rows] = of_running
        self.decided += committed
        self.remaining -= committed

    def finish(self, rows: np.ndarray) -> None:
        """Take rows out of the decoding."""
        self.running[rows] = False

    def _make_window(self) -> None:
        rows = self.running.nonzero()[0]
        self._made_for_blocks = {}
        if len(rows) != self._running_rows:  # rows only ever leave
            self._made_for_rows, self._running_rows = {}, len(rows)
        if not len(rows):
            return
        start, end = self.block_start[rows], self.block_end[rows]
        size = end - start
        width = size.max()
        positions = start[:, None] + np.arange(width)
        valid = None
        if size.min() < width:
            valid = positions < end[:, None]
            positions %= self.canvas.shape[1]  # padding wraps around: a row's positions stay distinct
        device = self.canvas.device
        self.window = Window(
            rows=rows,
            host_positions=positions,
            host_valid=valid,
            positions=torch.as_tensor(positions, device=device),
            flat=torch.as_tensor(positions + rows[:, None] * self.canvas.shape[1], device=device),
            valid=None if valid is None else torch.as_tensor(valid, device=device),
            whole=len(rows) == self.batch,
        )

    def while_blocks_stand(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that holds until a block moves, made on first use."""
        if key not in self._made_for_blocks:
            self._made_for_blocks[key] = make()
        return self._made_for_blocks[key]

    def while_rows_stand(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that holds until a row finishes, made on first use."""
        if key not in self._made_for_rows:
            self._made_for_rows[key] = make()
        return self._made_for_rows[key]

    def planned_steps(self, rows: np.ndarray) -> np.ndarray:
        """[R] int64: steps planned for the open block of each row (one token a step without a plan)."""
        return self.masks_at_open[rows] if self.steps_per_block is None else self.steps_per_block[rows]


def start_state(
    sampler: Sampler,
    model: Any,
    prompt: Any,
    attention_mask: Any,
    chat: bool | None,
    max_new_tokens: int | None,
    blocks: BlockPolicy | None,
    block_length: int | None,
    cache: str | Cache | None,
    seed: Any,
    generator: torch.Generator | None,
    trace: bool,
    request: dict[str, Any],
) -> MaskedState:
    """Check every argument, then lay out the canvas: each row's prompt from position 0, masks after it."""
    settings = make_request(request)
    facts = model.facts
    if facts.mask_token_id is None or facts.topology == "causal":
        raise ValueError(f"sampler {sampler.name!r} needs a model with a mask token; {facts.name} is autoregressive")
    rows = encode(model, prompt, attention_mask, chat).rows
    new = model.default_max_new_tokens if max_new_tokens is None else max_new_tokens
    check_int("max_new_tokens", new, low=1)
    longest = max(map(len, rows)) + new
    if facts.max_length is not None and longest > facts.max_length:
        raise ValueError(
            f"prompt of {longest - new} tokens + max_new_tokens={new} = {longest} is longer than {facts.name} takes "
            f"({facts.max_length})"
        )
    policy = block_policy(model, blocks, block_length)
    check_steps(settings, policy, rows, new)
    for token in settings.suppress_tokens:
        check_int("suppress_tokens", token, low=0, high=facts.vocab_size - 1)
    cache = cache_of(cache, model)
    generator, seeds = randomness(settings, seed, generator, rows)

    lengths = np.array([len(row) for row in rows], np.int64)
    canvas = np.full((len(rows), longest), facts.fill_token_id, np.int64)
    column = np.arange(longest)
    undecided = (column >= lengths[:, None]) & (column < lengths[:, None] + new)
    canvas[undecided] = facts.mask_token_id
    canvas[column < lengths[:, None]] = np.concatenate(rows)
    device = model.device
    ends = list(facts.eos_token_ids)
    suppressed = {*settings.suppress_tokens, *(ends if settings.logits_eos_inf else ())}
    if len(suppressed | {facts.mask_token_id}) >= facts.vocab_size:
        raise ValueError(f"suppress_tokens excludes all {facts.vocab_size} words of the vocabulary")
    sizes = {"position": longest, "vocab": facts.vocab_size}
    state = MaskedState(
        batch=len(rows),
        memory=Memory(sampler.memory(), len(rows), sizes, device),
        facts=facts,
        request=settings,
        cache=cache,
        blocks=policy,
        pads=model.pads,
        canvas=torch.as_tensor(canvas, device=device),
        given=torch.as_tensor(column < lengths[:, None], device=device),
        prompt_length=lengths,
        length=lengths + new,
        keys=torch.as_tensor(rng.row_keys(seeds, rows), device=device),
        generator=generator,
        suppressed=torch.tensor(sorted(suppressed), device=device) if suppressed else None,
        ends=torch.tensor(ends, dtype=torch.int64, device=device),
    )
    if cache.uses_store:
        state.store = model.make_store(state.branches * state.batch, longest)
    if trace:
        start = [canvas[r, : lengths[r] + new].tolist() for r in range(len(rows))]
        state.trace = Trace(canvas=start, settings=sampler.to_dict() | dataclasses.asdict(settings))
    return state


def part_query(state: MaskedState, part: Part) -> Query:
    """The model call of one part of the plan. What does not change from step to step is made once."""
    key = ("query", part.kind, part.index.tobytes(), part.positions.tobytes())
    query, row_index, whole = state.while_blocks_stand(key, lambda: _query_of_blocks(state, part, key))
    if whole and query.branches == 1:
        return query  # its tokens are the canvas itself
    tokens = _tokens_of(state.canvas, query, row_index)
    if query.branches == 2:
        given = _tokens_of(state.given, query, row_index)
        tokens = torch.cat((tokens, tokens.masked_fill(given, state.facts.mask_token_id)))
    return query.but(tokens=tokens)


def _tokens_of(tensor: Tensor, query: Query, row_index: Tensor) -> Tensor:
    """What a canvas-shaped tensor [B, L] holds at a query's positions: [N, Q]."""
    rows = tensor.index_select(0, row_index[:, 0])
    own = query.positions[: len(query.rows)]
    return rows.narrow(1, 0, own.shape[1]) if query.kind == "full" else rows.gather(1, own)


def _query_of_blocks(state: MaskedState, part: Part, key: Any) -> tuple[Query, Tensor, bool]:
    """The query as it stands while the blocks do: everything but its tokens."""
    # whole rows stay what they are while blocks move
    keep = state.while_rows_stand if part.kind == "full" else state.while_blocks_stand
    fixed, row_index, whole = keep(("fixed", key), lambda: _fixed_query(state, part))
    wanted, available = _wanted(state, part)
    return fixed.but(wanted=wanted, available=available), row_index, whole


def _fixed_query(state: MaskedState, part: Part) -> tuple[Query, Tensor, bool]:
    """The query without its tokens and wanted columns, the rows' index [N, 1], and whether it is the canvas itself."""
    device, rows = state.canvas.device, state.window.rows[part.index]
    row_index = torch.as_tensor(rows, device=device)
    query = Query(
        rows=rows,
        tokens=state.canvas,
        positions=_per_branch(state, part.positions),
        valid=None if part.valid is None else _per_branch(state, part.valid),
        branches=state.branches,
        forwarded=part.sizes,
        index=part.index,
        kind=part.kind,
    )
    if state.store is not None:
        query.store_rows = torch.cat([row_index + branch * state.batch for branch in range(state.branches)])
        slots = part.positions if part.valid is None else np.where(part.valid, part.positions, -1)
        query.slots = _per_branch(state, slots)
    whole = part.valid is None and len(rows) == state.batch and part.positions.shape == tuple(state.canvas.shape)
    return query, row_index.unsqueeze(1), whole


def _wanted(state: MaskedState, part: Part) -> tuple[Tensor, Tensor | None]:
    """Columns of the call [R, W] that hold the window's logits, and which of them are there [N, W] (None: all)."""
    source = state.window.host_positions
    if len(part.index) < len(source):
        source = source[part.index]
    if state.facts.shift:  # logits stand to the left; position 0 has no left neighbour and uses its own
        source = np.maximum(source - state.facts.shift, 0)
    if part.kind == "full":
        if state.window.host_valid is not None:  # padding of the window may ask beyond the row
            source = np.minimum(source, part.positions.shape[1] - 1)
        return _per_branch(state, source), None
    # the column of each position in this call, -1 where it is not evaluated
    column = np.full((len(part.index), state.canvas.shape[1]), -1)
    row, at = np.ones_like(part.positions).nonzero() if part.valid is None else part.valid.nonzero()
    column[row, part.positions[row, at]] = at
    source = np.take_along_axis(column, source, axis=1)
    there = source >= 0
    available = None if there.all() else torch.as_tensor(there, device=state.canvas.device)
    return _per_branch(state, np.maximum(source, 0)), available


def _per_branch(state: MaskedState, array: np.ndarray) -> Tensor:
    """[N, ...] on the host -> [branches * N, ...] on the device."""
    tensor = torch.as_tensor(array, device=state.canvas.device)
    return torch.cat((tensor, tensor)) if state.branches == 2 else tensor


def rows_of(memory: Memory, rows: np.ndarray) -> dict[str, Tensor]:
    return {name: tensor[torch.as_tensor(rows, device=tensor.device)] for name, tensor in memory.tensors.items()}


def put_rows(tensor: Tensor, rows: np.ndarray, value: Tensor) -> Tensor:
    return tensor.index_copy(0, torch.as_tensor(rows, device=tensor.device), value.to(tensor.dtype))

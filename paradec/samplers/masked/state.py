"""The state of a masked decoding: canvas, blocks per row, and the model calls that a plan asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec import rng
from paradec.blocks import BlockPolicy, Opening
from paradec.caches.base import Cache, Part, StoredCache, outward
from paradec.caches.cost import advice
from paradec.caches.kept import KeptPrefix, Reuse, keep_prefix, plan_reuse
from paradec.checks import check_int, shown
from paradec.models.facts import ModelFacts
from paradec.prompts import encode
from paradec.protocol import Call, Memory, Query, State
from paradec.samplers.masked.stopping import EarlyRule, EndOfText, StopRule, StopStrings, check_stop, check_stop_strings
from paradec.samplers.request import (
    Request,
    attention_of,
    block_counts,
    block_policy,
    cache_of,
    check_steps,
    make_request,
    randomness,
)
from paradec.trace import Trace, TraceStep


@dataclass
class Window:
    """The positions that may become final now: the open block of every running row; with early rules, all after it too.

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

    def undecided(self, current: Tensor, mask: int) -> Tensor:
        """[R, W] bool: where a window that holds `current` [R, W] is undecided, padding excluded."""
        undecided = current == mask
        return undecided if self.valid is None else undecided & self.valid

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
    """[B] int64: the position of each row's first mask; all before it was given."""
    answer_start: np.ndarray
    """[B] int64: the position after the last one that was given; beyond `prompt_length` where the prompt has holes."""
    length: np.ndarray
    """[B] int64: positions of each row; fewer than there were once the method has cut it off."""
    asked: np.ndarray
    """[B] int64: the position after the last one that was asked for; before `length` where a block-causal model's last
    block reaches beyond it."""
    max_new_tokens: int
    """Masks that were appended to every row."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    generator: torch.Generator | None
    suppressed: Tensor | None
    """[S] int64 ids that are never proposed, beside the mask id; None when there are none."""
    ends: Tensor
    """[E] int64 ids that end an answer."""
    revises: bool = False
    """Whether the sampler may take back what it decided in an open block."""
    shadows: bool = False
    """Whether queries hold the window twice, the second time as masks (see `MaskedSampler.shadows`)."""
    stop_rules: tuple[StopRule, ...] = ()
    early_rules: tuple[EarlyRule, ...] = ()
    store: Any = None
    cache_state: Any = None
    """What the cache keeps (see `paradec.caches.base.Cache.begin`); it changes in commits."""
    attention_state: Any = None
    """What the attention method keeps (`paradec.attention`); None where every call attends to everything."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.block_start = self.prompt_length.copy()
        self.block_end = self.prompt_length.copy()
        self.remaining = np.zeros(self.batch, np.int64)
        """Undecided positions of the open block."""
        self.masks_at_open = np.zeros(self.batch, np.int64)
        self.reads_blocks = getattr(self.blocks, "reads_logits", False)
        self.opening = np.zeros(self.batch, bool)
        """Rows whose block ends where this step's logits will say; until then it is all that the policy reads."""
        self._steps = np.zeros((2, self.batch), np.int64)
        self.block_step, self.row_step = self._steps  # views
        self.running = np.ones(self.batch, bool)
        self.level = bool((self.length == self.canvas.shape[1]).all())
        """Whether all rows have one length."""
        self.columns = np.tile(np.arange(self.canvas.shape[1]), (self.batch, 1))
        """[B, L] int64: the position of every entry of the canvas."""
        self._running_rows = self.batch
        self.decided = np.zeros(self.batch, np.int64)
        self.watched = tuple(dict.fromkeys(name for rule in self.early_rules for name in rule.reads))
        self.end = self.asked.copy()
        """[B] int64: the position after each row's last token; before `asked` where a stop rule ended it."""
        self.stopped = np.zeros(self.batch, bool)
        """Rows that a stop rule ended."""
        self.reused = np.zeros(self.batch, np.int64)
        """[B] int64: positions on the left that no step evaluates, since their keys and values came from a prefix."""
        self.reuses = False
        """Whether there are any."""
        self.settled: np.ndarray | None = None
        """[B] int64: on block-causal models, what lies left was evaluated after its blocks were full; None unless it is
        to be kept."""
        holes = bool((self.answer_start > self.prompt_length).any())
        self.guards_holes = self.request.holes_eos_inf and holes and len(self.facts.eos_token_ids) > 0
        """Whether there are holes that end tokens are kept out of."""
        self._took_over: KeptPrefix | None = None
        self._made_for_blocks: dict[Any, Any] = {}
        self._made_for_rows: dict[Any, Any] = {}
        self.steps_per_block: np.ndarray | None = None
        """[B] int64: steps planned for each block of a row; None plans one token a step."""
        if self.request.steps is not None:
            counts = block_counts(self.request.steps, self.blocks, self.prompt_length, self.length)
            self.steps_per_block = -(-self.request.steps // counts)
        # undecided positions before each position, as they stood at the start
        self._masks_before = np.zeros((self.batch, self.canvas.shape[1] + 1), np.int64)
        self._masks_before[:, 1:] = self.undecided.cpu().numpy().cumsum(1)
        self.total = self._masks_before[:, -1]
        self.open_blocks(np.arange(self.batch))

    def __getstate__(self) -> dict[str, Any]:
        # what is made on first use is made again, and copies of views would be no views
        left_out: dict[str, Any] = {"_made_for_blocks": {}, "_made_for_rows": {}, "block_step": None, "row_step": None}
        return self.__dict__ | left_out

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.block_step, self.row_step = self._steps

    @property
    def branches(self) -> int:
        """Rows of the model per row of the state: 2 under guidance."""
        return 2 if self.request.guidance_scale != 1.0 else 1

    @property
    def stored_cache(self) -> StoredCache:
        """The cache of a request that has a store."""
        assert isinstance(self.cache, StoredCache)
        return self.cache

    @property
    def undecided(self) -> Tensor:
        """[B, L] bool: positions that are not final yet."""
        return self.canvas == self.facts.mask_id

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
            self.opening[rows] = self.reads_blocks
            self.memory.reset(rows, "block")
            rows = rows[masks == 0]
        self.running &= self.block_start < self.length
        self._make_window()

    def read_blocks(self, tokens: Tensor, confidence: Tensor, available: Tensor) -> Tensor | None:
        """Where each running row's block ends, [R] int64, if the candidates [R, W] decide it for any; else None."""
        rows = self.window.rows
        index = self.opening[rows].nonzero()[0]
        if not len(index):
            return None
        opened, device = rows[index], tokens.device
        start, end = torch.as_tensor(np.stack((self.block_start[rows], self.block_end[rows])), device=device)
        at = torch.as_tensor(index, device=device)
        opening = Opening(
            tokens=tokens[at],
            confidence=confidence[at],
            available=available[at],
            start=self.block_start[opened],
            prompt_length=self.prompt_length[opened],
            length=self.length[opened],
        )
        # the block reaches what can be committed, where given text comes first
        size = self.blocks.cut(opening).maximum(opening.available.int().argmax(1) + 1)
        return end.index_copy(0, at, start[at] + size)

    def settle_blocks(self, rows: np.ndarray, end: np.ndarray) -> None:
        """Let the blocks of `rows` [R] end at `end` [R], as `read_blocks` has it."""
        read = self.opening[rows]
        rows, end = rows[read], end[read]
        if (end > self.block_end[rows]).any():
            raise RuntimeError(f"blocks={self.blocks} cut a block that is longer than what it read")
        self.block_end[rows] = end
        masks = self._masks_before[rows, end] - self._masks_before[rows, self.block_start[rows]]
        self.masks_at_open[rows] = self.remaining[rows] = masks
        self.opening[rows] = False

    def advance(self, rows: np.ndarray, committed: np.ndarray) -> None:
        """Count one step of the running rows, of which `rows` [R] committed so many tokens each."""
        self.commits += 1
        self._steps += self.running
        if self.settled is not None:
            self.settled[rows] = outward(self, self.block_start[rows], self.block_end[rows])[0]
        if not self.window.whole:
            committed, of_running = np.zeros(self.batch, np.int64), committed
            committed[rows] = of_running
        self.decided += committed
        self.remaining -= committed

    def trim(self, cut: np.ndarray, tokens: np.ndarray) -> None:
        """Cut the running rows off at `cut` [R]; the window [R, W] holds `tokens`, and is to be made again."""
        window = self.window
        shorter = cut < self.length[window.rows]
        rows, cut = window.rows[shorter], cut[shorter]
        self.length[rows], self.level = cut, False
        self.end[rows] = np.minimum(self.end[rows], cut)
        self.block_end[rows] = np.minimum(self.block_end[rows], cut)
        left = tokens[shorter] == self.facts.mask_id
        left &= window.host_positions[shorter] < self.block_end[rows, None]
        if window.host_valid is not None:
            left &= window.host_valid[shorter]
        self.remaining[rows] = left.sum(1)
        self._made_for_rows = {}
        if self.store is not None:
            for branch in range(self.branches):
                self.store.forget(rows + branch * self.batch, cut)
        column = torch.arange(self.canvas.shape[1], device=self.canvas.device)
        tail = column >= torch.as_tensor(self.length, device=column.device).unsqueeze(1)
        self.canvas.masked_fill_(tail, self.facts.fill_token_id)

    def close_full_rows(self, tokens: np.ndarray) -> None:
        """Make the open block the last one of rows with nothing undecided. tokens: [R, W], of a window that reaches the
        end of every row."""
        window = self.window
        masks = tokens == self.facts.mask_id
        if window.host_valid is not None:
            masks &= window.host_valid
        rows = window.rows[~masks.any(1)]
        self.block_end[rows], self.remaining[rows] = self.length[rows], 0

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
        start, end = self.block_start[rows], (self.length if self.early_rules else self.block_end)[rows]
        size = end - start
        width = size.max()
        positions = start[:, None] + np.arange(width)
        valid = None
        if size.min() < width:
            valid = positions < end[:, None]
            positions %= self.canvas.shape[1]  # padding wraps around: a row's positions stay distinct
        if self.memory.specs:
            self.memory.grow("window", int(width))
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

    @property
    def block_ends(self) -> Tensor:
        """[R, 1] int64: where the running rows' blocks end, on the device."""
        rows, device = self.window.rows, self.canvas.device
        return self.while_blocks_stand("ends", lambda: torch.as_tensor(self.block_end[rows, None], device=device))

    def holes_of(self, index: np.ndarray | None) -> Tensor | None:
        """[N, W] bool: where the windows of the running rows `index` [N] (None: all) lie in holes that end tokens are
        kept out of; None when they do nowhere."""
        if not self.guards_holes:
            return None
        holes = self.while_blocks_stand("holes", self._holes)
        if holes is None or index is None or len(index) == len(holes):
            return holes
        return holes.index_select(0, torch.as_tensor(index, device=holes.device))

    def _holes(self) -> Tensor | None:
        # that takes in what was given between them, for which nothing is proposed
        inside = self.window.host_positions < self.answer_start[self.window.rows, None]
        return torch.as_tensor(inside, device=self.canvas.device) if inside.any() else None

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

    @contextmanager
    def freed_store(self) -> Iterator[None]:
        """Give the store's memory back on exit, whatever happened: a traceback would keep the state alive."""
        try:
            yield
        finally:
            for kept in (self.store, self.attention_state):
                if kept is not None:
                    kept.release()

    def take_over(self, reuse: Reuse, model: Any) -> None:
        """Put the prefix of a request into its store. One that is evaluated for that is a forward of every row's, whose
        positions are the first row's."""
        called = reuse.fill(self.store, model, self.stored_cache)
        self.reused, self.reuses, self._took_over = reuse.counts, True, reuse.kept
        if not called:
            return
        once = (np.arange(self.batch) == 0).astype(np.int64)
        self._calls.append(Call(np.arange(self.batch), 1, once, np.full(self.batch, reuse.start) * once, False))
        if self.trace is not None:
            self.trace.steps.append(TraceStep([], (reuse.start * once).tolist(), "prefix"))

    def kept_prefix(self, model: Any) -> KeptPrefix | None:
        """What the next request can take over, if that was asked for; to be taken before the store is freed."""
        return None if self.settled is None else keep_prefix(self, model, self._took_over)

    def cache_advice(self) -> str | None:
        """Why the cache cannot win for this request, if it cannot."""
        if self.reuses:
            return None  # it has won already
        longest = int(self.length.argmax())
        prompt, new = int(self.prompt_length[longest]), int((self.length - self.prompt_length)[longest])
        block = int(self.block_end[longest] - self.block_start[longest])
        steps = int(self.planned_steps(np.array([longest]))[0])
        return advice(self.cache, self.batch, prompt, new, block, steps, self.canvas.device.type)

    def planned_steps(self, rows: np.ndarray) -> np.ndarray:
        """[R] int64: steps planned for the open block of each row (one token a step without a plan)."""
        return self.masks_at_open[rows] if self.steps_per_block is None else self.steps_per_block[rows]


PREFIX_ARGUMENTS = {"prefix": None, "share_prefix": False, "keep_prefix": False}
"""Arguments of a request that say what outlives it, with their defaults."""


def start_state(
    sampler: Any,
    model: Any,
    prompt: Any,
    attention_mask: Any,
    chat: bool | None,
    max_new_tokens: int | None,
    blocks: str | BlockPolicy | None,
    block_length: int | None,
    cache: str | Cache | None,
    seed: Any,
    generator: torch.Generator | None,
    trace: bool,
    stop_strings: Any,
    stop: Any,
    request: dict[str, Any],
) -> MaskedState:
    """Check every argument, then lay out the canvas: each row's prompt from position 0 (masks in it are holes to fill),
    masks after it."""
    sampler.check_model(model)
    prefix, share, keep = (request.pop(name, no) for name, no in PREFIX_ARGUMENTS.items())
    attention = request.pop("attention", None)
    settings = make_request(request)
    facts = model.facts
    if facts.mask_token_id is None or facts.topology == "causal":
        raise ValueError(f"sampler {sampler.name!r} needs a model with a mask token; {facts.name} is autoregressive")
    if sampler.shadows and not (model.supports_visibility and facts.prediction == "same"):
        raise ValueError(
            f"sampler {sampler.name!r} evaluates masks that the rest of the row does not see, which takes a "
            f"transformers decoder that predicts in place ('same'); {facts.name} is not one"
        )
    prompts = encode(model, prompt, attention_mask, chat)
    rows = prompts.rows
    mask = facts.mask_id
    holes = any(mask in row for row in rows)
    new = max_new_tokens
    if new is None:
        new = 0 if holes else model.default_max_new_tokens
    check_int("max_new_tokens", new, low=0 if holes else 1)
    for index, row in enumerate(rows):
        if not new and mask not in row:
            raise ValueError(f"the prompt of row {index} has no mask to fill; give it one, or max_new_tokens above 0")
    longest = max(map(len, rows)) + new
    if facts.max_length is not None and longest > facts.max_length:
        raise ValueError(
            f"prompt of {longest - new} tokens + max_new_tokens={new} = {longest} is longer than {facts.name} takes "
            f"({facts.max_length})"
        )
    policy = block_policy(sampler, model, blocks, block_length, holes)
    # where decoding starts, and where text begins that nothing given follows
    starts = np.array([row.index(mask) if mask in row else len(row) for row in rows], np.int64)
    answers = np.array([next((i + 1 for i in range(len(r) - 1, -1, -1) if r[i] != mask), 0) for r in rows], np.int64)
    lengths = np.array([len(row) for row in rows], np.int64)
    check_steps(settings, policy, starts, lengths + new)
    for token in settings.suppress_tokens:
        check_int("suppress_tokens", token, low=0, high=facts.vocab_size - 1)
    cache = cache_of(cache, sampler, model, settings, policy)
    sampler.check(facts, policy, cache, int((lengths + new - starts).max()))
    generator, seeds = randomness(settings, seed, generator, rows)
    stop_rules, early_rules = check_stop(stop, sampler)
    texts = check_stop_strings(stop_strings)
    if texts and model.tokenizer is None:
        raise ValueError(f"stop_strings={shown(stop_strings)} needs a tokenizer; {facts.name} has none")

    branches = 1 if settings.guidance_scale == 1.0 else 2
    reuse = plan_reuse(prefix, share, keep, model, cache, branches, rows, starts)
    attention = attention_of(attention, sampler, model, prefix is not None or share)

    ends = lengths + new
    if facts.topology == "block_causal" and new:
        # such models were trained on whole blocks: the last one is decoded whole, and cut afterwards
        ends += -ends % facts.block_length
        if facts.max_length is not None:
            ends = np.minimum(ends, facts.max_length)
        longest = int(ends.max())
    canvas = np.full((len(rows), longest), facts.fill_token_id, np.int64)
    column = np.arange(longest)
    undecided = (column >= lengths[:, None]) & (column < ends[:, None])
    canvas[undecided] = mask
    canvas[column < lengths[:, None]] = np.concatenate(rows)
    device = model.device
    end_tokens = list(facts.eos_token_ids)
    suppressed = {*settings.suppress_tokens, *(end_tokens if settings.logits_eos_inf else ())}
    if len(suppressed | {facts.mask_id}) >= facts.vocab_size:
        raise ValueError(f"suppress_tokens excludes all {facts.vocab_size} words of the vocabulary")
    if settings.holes_eos_inf and (answers > starts).any():
        if len(suppressed | {facts.mask_id, *end_tokens}) >= facts.vocab_size:
            raise ValueError("holes_eos_inf=True leaves no word for holes beside those of suppress_tokens")
    rules: list[StopRule] = [*stop_rules]
    if settings.eos_early_stop and end_tokens:
        rules.append(EndOfText(end_tokens, mask, answers if holes else None))
    if texts:
        rules.append(StopStrings(texts, model.tokenizer, mask, canvas, answers))
    sizes = {"position": longest, "vocab": facts.vocab_size, "window": 0}
    state = MaskedState(
        batch=len(rows),
        memory=Memory(sampler.memory(), len(rows), sizes, device),
        facts=facts,
        request=settings,
        cache=cache,
        blocks=policy,
        pads=model.pads,
        canvas=torch.as_tensor(canvas, device=device),
        given=torch.as_tensor((column < lengths[:, None]) & (canvas != mask), device=device),
        prompt_length=starts,
        answer_start=answers,
        length=ends,
        asked=lengths + new,
        max_new_tokens=new,
        keys=torch.as_tensor(rng.row_keys(seeds, rows, prompts.before), device=device),
        generator=generator,
        suppressed=torch.tensor(sorted(suppressed), device=device) if suppressed else None,
        ends=torch.tensor(end_tokens, dtype=torch.int64, device=device),
        revises=sampler.revises,
        shadows=sampler.shadows,
        stop_rules=tuple(rules),
        early_rules=early_rules,
    )
    if isinstance(cache, StoredCache):
        state.store = model.make_store(
            branches * state.batch,
            longest,
            cache.store_dtype,
            cache.max_memory,
            start=0 if reuse is None else reuse.start,
        )
    state.cache_state = cache.begin(state)
    if attention is not None:
        state.attention_state = attention.begin(state, sampler.uses_steps)
    if trace:
        start = [canvas[r, : ends[r]].tolist() for r in range(len(rows))]
        state.trace = Trace(canvas=start, settings=sampler.to_dict() | dataclasses.asdict(settings))
    if keep:
        state.settled = np.zeros(state.batch, np.int64)
    if reuse is not None:
        state.take_over(reuse, model)
    return state


def part_query(state: MaskedState, part: Part) -> Query:
    """The model call of one part of the plan. What does not change from step to step is made once."""
    if part.lasts:
        key = ("query", part.kind, part.index.tobytes(), part.positions.tobytes())
        query, row_index, whole = state.while_blocks_stand(key, lambda: _query_of_blocks(state, part, key))
    else:
        query, row_index, whole = _fixed_query(state, part)
        query.wanted, query.available = _wanted(state, part)
    if state.store is not None:
        query = query.but(step=state.commits)
    if state.attention_state is not None:
        query = query.but(attention=state.attention_state.plan(state, part))
    if whole and query.branches == 1 and not state.shadows:
        return query  # its tokens are the canvas itself
    tokens = _tokens_of(state.canvas, query, row_index)
    if query.branches == 2:
        given = _tokens_of(state.given, query, row_index)
        tokens = torch.cat((tokens, tokens.masked_fill(given, state.facts.mask_id)))
    if not state.shadows:
        return query.but(tokens=tokens)
    if part.lasts:
        shadow = state.while_blocks_stand(("shadow", key), lambda: _shadow(state, query))
    else:
        shadow = _shadow(state, query)
    width = shadow["positions"].shape[1] - tokens.shape[1]
    return query.but(tokens=torch.nn.functional.pad(tokens, (0, width), value=state.facts.mask_id), **shadow)


def _shadow(state: MaskedState, query: Query) -> dict[str, Any]:
    """The fields of a query that change when the window stands behind its columns once more, as masks.

    Q columns become Q + W, and 2 W are wanted. Shadows take the window's position ids, are not written to a store, and
    see each other and all columns but the one of their own position; columns do not see shadows.
    """
    assert query.wanted is not None and query.index is not None and query.forwarded is not None
    window, device, columns = state.window, state.canvas.device, query.positions.shape[1]
    at = window.host_positions[query.index]
    there = np.ones_like(at, bool) if window.host_valid is None else window.host_valid[query.index]
    shadow = _per_branch(state, at)  # [R, W]
    rows, width = shadow.shape
    positions = torch.cat((query.positions, shadow), 1)
    valid = None
    if query.valid is not None or window.host_valid is not None:
        real = torch.ones_like(query.positions, dtype=torch.bool) if query.valid is None else query.valid
        valid = torch.cat((real, _per_branch(state, there)), 1)
    visible = torch.ones((rows, columns + width, columns + width), dtype=torch.bool, device=device)
    visible[:, :columns, columns:] = False
    visible[:, columns:, :columns] = shadow.unsqueeze(2) != query.positions.unsqueeze(1)
    if state.facts.topology == "block_causal":
        block = positions // state.facts.block_unit
        visible &= block.unsqueeze(2) >= block.unsqueeze(1)
    own = torch.arange(columns, columns + width, device=device).expand(rows, width)
    return {
        "positions": positions,
        "valid": valid,
        "visible": visible,
        "wanted": torch.cat((query.wanted, own), 1),
        "slots": None if query.slots is None else torch.cat((query.slots, torch.full_like(shadow, -1)), 1),
        "forwarded": query.forwarded + there.sum(1),
    }


def _tokens_of(tensor: Tensor, query: Query, row_index: Tensor) -> Tensor:
    """What a canvas-shaped tensor [B, L] holds at a query's positions: [N, Q]. row_index: [N] int64."""
    rows = tensor.index_select(0, row_index)
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
    """The query without its tokens and wanted columns, the rows' index [N], and whether it is the canvas itself."""
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
        query.store_index = np.concatenate([rows + branch * state.batch for branch in range(state.branches)])
        query.store_rows = torch.as_tensor(query.store_index, device=device)
        slots = part.positions if part.valid is None else np.where(part.valid, part.positions, -1)
        query.slots = _per_branch(state, slots)
        # no row sees beyond its end, nor, in a block-causal model, beyond the last block that it evaluates
        reach = int(state.length[rows].max())
        if state.facts.topology == "block_causal":
            block = state.facts.block_unit
            reach = min(reach, int(part.positions.max()) // block * block + block)
        query.reach = reach + -reach % state.stored_cache.shape_multiple
    whole = part.valid is None and len(rows) == state.batch and part.positions.shape == tuple(state.canvas.shape)
    return query, row_index, whole


def _wanted(state: MaskedState, part: Part) -> tuple[Tensor, Tensor | None]:
    """Columns of the call [R, W] that hold the window's logits, and which of them are there [N, W] (None: all)."""
    source = state.window.host_positions
    if len(part.index) < len(source):
        source = source[part.index]
    if state.facts.shift:  # logits stand to the left; position 0 has no left neighbour and uses its own
        source = np.maximum(source - state.facts.shift, 0)
    if part.kind == "full":
        if source is state.window.host_positions and state.branches == 1 and state.window.host_valid is None:
            return state.window.positions, None
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


def rows_of(memory: Memory, rows: np.ndarray, width: int | None = None) -> dict[str, Tensor]:
    """What a method remembers of `rows`, by name; "window" dimensions are cut to `width`. Not to be written to."""
    found = {}
    for name, tensor in memory.tensors.items():
        for axis, dim in enumerate(memory.specs[name].dims, start=1):
            if dim == "window" and width is not None:
                tensor = tensor.narrow(axis, 0, width)
        whole = len(rows) == len(tensor)  # rows are distinct and ascending
        found[name] = tensor if whole else tensor.index_select(0, torch.as_tensor(rows, device=tensor.device))
    return found


def put_rows(memory: Memory, name: str, rows: np.ndarray, value: Tensor) -> None:
    """Write `value` [R, ...] for `rows`; "window" dimensions may be narrower than the memory's."""
    if value.shape == memory[name].shape:
        memory[name] = value.to(memory[name].dtype)
        return
    memory[name] = tensor = part = memory[name].clone()  # proposals and copies may still hold the old one
    for axis, dim in enumerate(memory.specs[name].dims, start=1):
        if dim == "window":
            part = part.narrow(axis, 0, value.shape[axis])
    if len(rows) == len(tensor):
        part.copy_(value)
    else:
        part.index_copy_(0, torch.as_tensor(rows, device=tensor.device), value.to(tensor.dtype))

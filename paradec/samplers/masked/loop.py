"""The masked family: positions start as masks, and each step makes some of them final.

The method on one page, for one row of ids without a cache (tests compare `MaskedSampler` with it):

```python
import torch

def decode(model, ids, mask_id, end_ids=(), block_length=32, steps=None, threshold=None, shift=0):
    '''Fill the masks of `ids`; model(ids [1, L]) gives logits [1, L, V]. `steps` are those of a block.'''
    tokens = torch.tensor(ids)
    block_start = ids.index(mask_id)
    answer_start = max((i + 1 for i, token in enumerate(ids) if token != mask_id), default=0)
    while block_start < len(ids):
        block = slice(block_start, min(block_start + block_length, len(ids)))
        masks, step = int((tokens[block] == mask_id).sum()), 0
        while (undecided := tokens[block] == mask_id).any():
            # query: one forward over the row; the logits of position p may be at p - 1
            logits = model(tokens.unsqueeze(0))[0].double()
            if shift:
                logits = torch.cat((logits[:1], logits[:-1]))
            # propose: the best token of each position of the block, and its probability
            logits[:, mask_id] = -torch.inf
            confidence, candidates = logits[block].softmax(-1).max(-1)
            scores = torch.where(undecided, confidence, -torch.inf)
            # commit, `select`: LLaDA's schedule, or Fast-dLLM's threshold
            if threshold is None:
                count = 1 if steps is None else masks // steps + (step < masks % steps)
                best = scores.sort(descending=True, stable=True).indices[:count]
                selected = torch.zeros_like(undecided).scatter(0, best, True) & undecided
            else:
                selected = scores >= threshold
                selected[scores.argmax()] = True
            # commit, write
            tokens[block] = torch.where(selected, candidates, tokens[block])
            step += 1
            # commit, close: the row ends at an end token with nothing undecided before it
            for position in range(block.start, block.stop):
                token = int(tokens[position])
                if token == mask_id:
                    break
                if token in end_ids and position >= answer_start:
                    return tokens[: position + 1].tolist()
        block_start = block.stop
    return tokens.tolist()
```

Below, each row has its own block, step and end. The order of a step: the query, the logits stages (guidance,
suppression, the method's `process_logits`), candidate tokens and statistics, `select`, the write, the stop rules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache, Part
from paradec.core.blocks import BlockPolicy
from paradec.core.logprobs import StepLogProbs
from paradec.core.protocol import Commit, NotFinite, Sampler
from paradec.core.query import Cost, WindowLogits, WindowQuery
from paradec.core.trace import Notes
from paradec.kernels.token_stats import token_statistics
from paradec.request import Request, request_for
from paradec.samplers.distributions import guided
from paradec.samplers.features.adaptive_blocks import cut_blocks
from paradec.samplers.features.early_stops import WATCHED
from paradec.samplers.features.logprobs import known_probabilities, step_logprobs
from paradec.samplers.features.pipelined_blocks import leading_blocks, open_starts, with_progress
from paradec.samplers.masked import drawing, reference
from paradec.samplers.masked.blocks import close_blocks, find_ends, trim_rows
from paradec.samplers.masked.partial_calls import call_store, columns_of_part, in_row_order, scatter_to_window
from paradec.samplers.masked.rules import revision
from paradec.samplers.masked.rules.revision import Revision
from paradec.samplers.masked.start import start_state
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import LAST, UNCUT, Decision, MaskedProposal, Needs, Stage, View, checked_select
from paradec.samplers.statistics import top_by_rank

__all__ = ["LAST", "UNCUT", "MaskedProposal", "MaskedSampler", "MaskedState", "Needs", "Revision", "Stage", "View"]

MIN_SAVED_LOGITS = 2**15
"""Logits of decided positions are left out of a call where that saves at least this many."""
OVERRIDES = {
    "preview": "previews",
    "process_logits": "processes_logits",
    "extra_quantities": "extra_quantities",
    "revise": "revises",
    "draw_tokens": "draws_tokens",
}
"""Methods of `MaskedSampler`, and the field of `Needs` that overriding each implies."""


@dataclass(frozen=True)
class MaskedSampler(Sampler):
    """Base of the family. A subclass declares what it reads and implements `select` (and `quota` if it has a schedule).

    Class attributes (others: `Sampler`):
        needs: what the method reads and does; flags implied by overridden methods are set automatically.
        draws: whether positions are drawn (`View.draw`, `View.choose`), at temperature 0 too.
        device_step: whether `select` waits for no device, takes counts from tensors, and is all that the class
            overrides, so that the device step can run it. Not inherited.
        sweep: at least two variants for `paradec compare`: settings of the method, and arguments of the request. A
            fraction for `steps` is that share of the undecided positions.
    """

    family: ClassVar[str] = "masked"
    models: ClassVar[tuple[str, ...]] = ("text", "codes", "masked image")
    needs: ClassVar[Needs] = Needs()
    draws: ClassVar[bool] = False
    device_step: ClassVar[bool] = False
    sweep: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if not isinstance(cls.needs, Needs):
            raise TypeError(
                f"needs={cls.needs!r} of sampler class {cls.__name__} must be a paradec.samplers.masked.Needs"
            )
        flags: Any = {
            OVERRIDES[name]: True for name in OVERRIDES if getattr(cls, name) is not getattr(MaskedSampler, name)
        }
        cls.needs = replace(cls.needs, **flags)
        cls.device_step = vars(cls).get("device_step", False)

    def select(self, view: View) -> Tensor:
        """Choose the candidates that become final: [R, W] bool. A pure function of the view."""
        raise NotImplementedError(f"sampler class {type(self).__name__} has no select")

    def quota(self, state: MaskedState, rows: np.ndarray) -> Any:
        """Compute `view.quota` of `rows` [R] at this step."""
        return None

    def blocks(self, block_length: int | None) -> BlockPolicy | None:
        """The block policy that is part of the method, for requests that give none (a length at most)."""
        return None

    def preview(self, state: MaskedState) -> np.ndarray:
        """[R, K] int64: positions that this step will commit, in order, -1 where a row has fewer. Changes nothing."""
        raise NotImplementedError

    def positions_for_cache(self, state: MaskedState) -> np.ndarray | None:
        """[R, K] int64 positions for a cache that asks the sampler before it plans (`CacheFacts.evaluates`)."""
        return self.preview(state)

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        """New values [R, ...] of the declared memory, after a selection."""
        return {}

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Logits stage [R, W, V] -> [R, W, V] before a token is chosen. Changes nothing in place.

        Also returns tensors [R, ...] by name for `view.updates`; the commit writes those with the name of a memory.
        """
        return logits, {}

    def extra_quantities(self, state: MaskedState, proposal: MaskedProposal) -> Mapping[str, Tensor]:
        """Compute further quantities [R, W] of a proposal, for `view.quantities`. Changes nothing."""
        return {}

    def revise(self, view: View, selected: Tensor) -> Revision:
        """What to take back of `view.editable`, after a selection (needs `decided_logits`)."""
        return Revision()

    def most_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        """[R] int64: the bound on a block's steps for methods that revise, at least `masks_at_open`."""
        return 2 * masks_at_open

    def trim(self, view: View, selected: Tensor) -> Tensor | None:
        """Cut rows off after this step: [R] int64 positions, `UNCUT` where they are not; None cuts none.

        A cut lies within the window and after everything given; positions after it become padding. Not called for
        requests with `eos_early_stop=False`.
        """
        return None

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        """Raise ValueError where the settings do not fit a request. longest: positions of the longest answer."""

    @torch.inference_mode(False)  # tensors made in inference mode could not be used outside of it
    @torch.no_grad()
    def start(
        self, model: Any, prompt: Any, request: Request | None = None, *, attention_mask: Any = None, **arguments: Any
    ) -> MaskedState:
        """Make the state of one request: a `paradec.Request`, or its fields by name.

        Raises:
            ValueError, TypeError: an argument out of its range; the message names it.
        """
        return start_state(self, model, prompt, request_for(self, request, arguments), attention_mask)

    def query(self, state: MaskedState) -> list[WindowQuery]:
        """One query per part of the cache's plan, for the logits of its rows' windows, or of the undecided positions
        there where nothing reads the others."""
        asks = state.cache.facts.evaluates in ("picks", "targets")
        parts = state.cache.plan(state, self.positions_for_cache(state) if asks else None)
        queries = [build_query(state, part) for part in parts]
        needs = self.needs
        if needs.decided_logits or needs.revises or needs.processes_logits or needs.extra_quantities:
            return queries
        if needs.mask_probes or needs.multi_step or any(each.reads_window(state) for each in state.features.values()):
            return queries
        return [leave_out_decided(state, query) for query in queries]

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> MaskedProposal:
        """A candidate token and its scores for every window position (the current token and 0 where a query leaves it
        out). outputs: logits [R, W, V], one per query, or [R, K, V] of its `columns`."""
        window, features = state.window, state.features
        generator = None if state.generator is None else reference.copy_generator(state.generator)
        current = window.read(state.canvas)
        available = window.undecided(current, state.mask_id)
        for query in queries:
            if query.window.available is not None:
                index = torch.as_tensor(query.window.index, device=available.device)
                available = available.index_copy(0, index, available[index] & query.window.available)
        if "early_stops" in features:  # the window reaches beyond the block
            available = available & (window.positions < state.block_ends)
        constraint, kept, holes = features.get("constraint"), features.get("logprobs"), features.get("holes")
        parts, logprobs = [], []
        for logits, query in zip(outputs, queries, strict=True):
            logits = guide(self, state, logits, query)
            if holes is not None:
                holes.exclude_ends(state, logits, query.window.index)
            processed, updates = self._process(state, logits, query, available, current)
            read = type(self).read if constraint is None else constraint.candidates
            tokens, quantities = read(self, state, processed, query, generator)
            if query.window.columns is not None:
                tokens, quantities = scatter_to_window(tokens, quantities, query, current)
            parts.append((tokens, quantities, updates))
            if kept is not None:
                window_logits = logits[:, : window.positions.shape[1]]  # columns of mask probes may follow
                plain = constraint is None and type(self).read is MaskedSampler.read
                known = known_probabilities(self, state, window_logits, quantities["confidence"]) if plain else None
                logprobs.append(step_logprobs(state.request, window_logits, tokens, kept.logprobs.count, known))
        order = None
        if len(parts) > 1:
            tokens, quantities, updates, order = in_row_order(parts, queries)
        proposal = MaskedProposal(
            rows=window.rows,
            values=tokens,
            cost=Cost(queries, state.batch),
            positions=window.positions,
            scores=self.ranked(state, tokens, quantities),
            available=available,
            current=current,
            quantities=quantities,
            updates=updates,
            made_at=state.commits,
            kind=queries[0].kind if len(queries) == 1 else "+".join(dict.fromkeys(query.kind for query in queries)),
            generator_state=None if generator is None else generator.get_state(),
            logprobs=StepLogProbs.concatenate(logprobs, order) if logprobs else None,
        )
        for feature in features.values():
            feature.on_propose(state, proposal)
        if self.needs.extra_quantities:
            proposal.quantities.update(self.extra_quantities(state, proposal))
        return proposal

    def _process(
        self, state: MaskedState, logits: Tensor, query: WindowQuery, available: Tensor, current: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The logits [R, W, V] that tokens are chosen from, and tensors that early rules and `process_logits` read."""
        watched: dict[str, Tensor] = {}
        if (early := state.features.get("early_stops")) is not None:
            statistics = token_statistics(logits, early.reads)[1]
            watched = {WATCHED + name: value for name, value in statistics.items()}
        if not self.needs.processes_logits:
            return logits, watched
        tensors = [available, state.window.positions, current]
        if len(query.rows) < len(available):
            index = torch.as_tensor(query.window.index, device=available.device)
            tensors = [tensor.index_select(0, index) for tensor in tensors]
        available, positions, current = tensors
        memory = state.memory.read(query.rows, available.shape[1])
        processed, updates = self.process_logits(logits, Stage(available, positions, memory, current))
        return processed, watched | dict(updates)

    def guidance(self, state: MaskedState, rows: np.ndarray) -> float | Tensor:
        """The guidance scale of `rows` [R] at this step, for requests with guidance: a number, or [R, 1, 1]."""
        return state.request.guidance_scale

    def weighs_mask(self, state: MaskedState) -> bool:
        """Whether the mask's logit counts in probabilities, although it is never proposed (`reference.read`)."""
        return state.generator is not None

    def read(
        self, state: MaskedState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Candidate tokens [R, W] and quantities [R, W] of one query's rows."""
        request = state.request
        filtered = self.needs.score_from == "sampled" and (request.top_p, request.top_k) != (None, None)
        if generator is None and request.temperature == 0 and not filtered:
            return token_statistics(logits, self.needs.reads)
        return drawing.read_drawn(self, state, logits, query, generator)

    def ranked(self, state: MaskedState, tokens: Tensor, quantities: Mapping[str, Tensor]) -> Tensor:
        """[R, W] float64: the scores that candidates are ranked by."""
        scores = quantities[self.needs.score]
        if state.request.confidence_eos_eot_inf and len(state.ends):
            scores = scores.masked_fill(torch.isin(tokens, state.ends), LAST)
        return scores

    def draw_tokens(
        self, state: MaskedState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> Tensor:
        """Draw tokens [R, W] from softmax(logits [R, W, V])."""
        return drawing.draw_tokens(state, logits, query, self.needs.score_from, generator)

    def position_noise(self, state: MaskedState, generator: torch.Generator | None) -> Tensor:
        """[R, W] float64 uniform numbers for choosing positions."""
        return drawing.position_noise(state, self.needs.reference_draws, generator)

    def observe(self, state: MaskedState, proposal: MaskedProposal) -> Notes:
        """Add the open blocks, and the positions that an early stop fills."""
        notes = super().observe(state, proposal)
        rows, ends = proposal.rows.tolist(), state.block_end[proposal.rows].tolist()
        if proposal.block_end is not None:
            ends = proposal.block_end.tolist()
        notes.blocks = [None] * state.batch
        for row, end in zip(rows, ends, strict=True):
            notes.blocks[row] = (int(state.block_start[row]), end)
        if "pipelined_blocks" in state.features:
            spans = enumerate(notes.blocks)
            notes.starts = [None if span is None else open_starts(state, row, *span) for row, span in spans]
        if proposal.early is not None:
            positions = proposal.positions.tolist()
            for index in proposal.early.nonzero().flatten().tolist():
                early = {(rows[index], position): "early stop" for position in positions[index]}
                notes.rules = {**(notes.rules or {}), **early}
        return notes

    def commit(self, state: MaskedState, proposal: MaskedProposal) -> Commit:
        """Select, write, remember; then close full blocks and finished rows.

        Raises:
            FloatingPointError: the model returned NaN or infinite logits. Nothing is written then.
            RuntimeError: the method committed nothing where it must.
        """
        state.check_current(proposal)
        rows, needs, features = proposal.rows, self.needs, state.features
        generator = None if state.generator is None else reference.after(state.generator, proposal.generator_state)
        view = make_view(self, state, proposal, generator)
        selected = checked_select(self, view) & view.candidates
        if view.leading is not None:
            selected = with_progress(selected, view)
        decision = Decision(proposal.values, selected, selected)
        if needs.revises:
            decision = revision.revise_decision(self, state, view, selected)
        for feature in features.values():
            feature.on_commit(state, proposal, decision)
        cut = self.trim(view, decision.selected) if state.request.eos_early_stop else None
        written = torch.where(decision.selected, decision.values, proposal.current)
        decided = to_host(
            filled=decision.filled,
            tokens=written,
            confidence=proposal.quantities["confidence"],
            selected=decision.selected if needs.revises else None,
            hold_block=decision.hold_block,
            cut=cut,
            block_end=proposal.block_end,
            available=proposal.available if state.cache.facts.needs_confidence else None,
        )
        committed = np.add.reduce(decided["filled"], 1, dtype=np.int64)
        self._check_decision(state, rows, decided["confidence"], committed)  # nothing has changed until here

        if state.generator is not None and generator is not None:
            state.generator.set_state(generator.get_state())
        state.window.write(state.canvas, written)
        if state.memory.specs:
            updates = {name: value for name, value in proposal.updates.items() if name in state.memory}
            for name, value in {**updates, **self.remember(view, selected)}.items():
                state.memory.write(name, rows, value)
        if proposal.block_end is not None:
            cut_blocks(state, rows, decided["block_end"])
        if state.cache.facts.needs_confidence:
            state.cache.observe_confidence(state, decided["confidence"], decided["available"])
        finish_step(self, state, proposal, decision, decided, committed)
        scores, kind = proposal.scores, proposal.kind
        return Commit(rows, decision.values, proposal.positions, decision.selected, scores, kind, decision.logprobs)

    def _check_decision(
        self, state: MaskedState, rows: np.ndarray, confidence: np.ndarray, committed: np.ndarray
    ) -> None:
        """Raise where the model's confidence [R, W] is not finite, or too little becomes final: `committed` [R]."""
        if not math.isfinite(np.add.reduce(confidence, None)):  # a NaN or infinite logit makes it NaN
            broken = rows[~np.isfinite(confidence).all(1)]
            raise NotFinite.at_steps(broken, state.row_step[broken])
        if self.needs.may_wait:  # but must have filled the block by its last planned step
            idle = ((committed == 0) & (state.block_step[rows] + 1 >= state.planned_steps(rows))).any()
        elif self.needs.revises:
            idle = (committed < revision.min_filled(self, state, rows)).any()
        else:
            idle = 0 in committed.tolist()
        if idle:
            raise RuntimeError(f"sampler {self.name!r} committed nothing for row {int(rows[committed.argmin()])}")


def finish_step(
    sampler: MaskedSampler,
    state: MaskedState,
    proposal: MaskedProposal,
    decision: Decision,
    decided: Mapping[str, np.ndarray],
    committed: np.ndarray,
) -> None:
    """Count a step that was written; close full blocks and the rows that have ended.

    Args:
        decided: arrays [R, ...] on the host: the window's "tokens", the "cut" of rows.
        committed: [R] int64, positions that the step has filled.
    """
    rows, tokens = proposal.rows, decided["tokens"]
    state.count(proposal.cost)
    state.cache.committed(state, tokens)
    state.advance(rows, committed)
    held, stable = None, tokens
    if sampler.needs.revises:
        held, stable = revision.stable_tokens(sampler, state, rows, decided)
    ends = find_ends(state.stop_rules, state, stable) if state.stop_rules else None
    moved = False
    for feature in state.features.values():
        moved |= feature.on_close(state, proposal, decision, tokens, ends)
    if "cut" in decided and (decided["cut"] < state.length[rows]).any():
        trim_rows(state, decided["cut"], tokens)
        moved = True
    close_blocks(state, rows, ends, held, moved)


def build_query(state: MaskedState, part: Part) -> WindowQuery:
    """Build the model call of one part of the cache's plan."""
    rows, facts, branches = state.window.rows[part.index], state.facts, state.branches
    wanted, available = _wanted_columns(state, part)
    query = WindowQuery(
        rows=rows,
        tokens=state.canvas,
        positions=state.per_branch(part.positions),
        wanted=wanted,
        valid=None if part.valid is None else state.per_branch(part.valid),
        branches=branches,
        forwarded=part.sizes,
        kind=part.kind,
        window=WindowLogits(part.index, available),
    )
    if branches == 2 or part.valid is not None or part.positions.shape != tuple(state.canvas.shape):
        # else they are the canvas itself
        index = torch.as_tensor(rows, device=state.canvas.device)
        query.tokens = tokens_of(state.canvas, query, index)
        if branches == 2:
            given = tokens_of(state.given, query, index)
            query.tokens = torch.cat((query.tokens, query.tokens.masked_fill(given, facts.mask_id)))
    if facts.prompt_aligned:
        query.origin = state.per_branch(state.prompt_length[rows, None])
    if state.store is not None:
        query.store = call_store(state, part, query)
    for feature in state.features.values():
        feature.on_query(state, part, query)
    return query


def _wanted_columns(state: MaskedState, part: Part) -> tuple[Tensor, Tensor | None]:
    """Columns of the call [R, W] that hold the window's logits, and which of them exist [N, W] (None: all)."""
    source = state.window.host_positions
    if len(part.index) < len(source):
        source = source[part.index]
    if state.facts.shift:  # logits are one position to the left; position 0 has no left neighbour and uses its own
        source = np.maximum(source - state.facts.shift, 0)
    if part.kind == "full":
        if source is state.window.host_positions and state.branches == 1 and state.window.host_valid is None:
            return state.window.positions, None
        if state.window.host_valid is not None:  # padding of the window may ask beyond the row
            source = np.minimum(source, part.positions.shape[1] - 1)
        return state.per_branch(source), None
    return columns_of_part(state, part, source)


def leave_out_decided(state: MaskedState, query: WindowQuery) -> WindowQuery:
    """Drop the logits of decided positions: the row with the most undecided ones sets the number of columns, which
    other rows fill up with decided ones. Unchanged where that saves little."""
    assert query.wanted is not None
    window = state.window
    width = window.positions.shape[1]
    multiple = 1 if state.store is None else state.stored_cache.shape_multiple
    most = -(-int(state.remaining[query.rows].max()) // multiple) * multiple
    if (width - most) * len(query.wanted) * state.facts.vocab_size < MIN_SAVED_LOGITS:
        return query
    undecided = window.undecided(window.read(state.canvas), state.mask_id)
    if len(query.rows) < len(undecided):
        undecided = undecided[torch.as_tensor(query.window.index, device=undecided.device)]
    columns = undecided.byte().argsort(dim=1, descending=True, stable=True)[:, :most]
    both = columns.repeat(query.branches, 1) if query.branches > 1 else columns
    return query.with_fields(wanted=query.wanted.gather(1, both), window=query.window.with_fields(columns=columns))


def tokens_of(tensor: Tensor, query: WindowQuery, row_index: Tensor) -> Tensor:
    """[N, Q]: a canvas-shaped tensor [B, L] at a query's positions. row_index: [N] int64, the query's rows."""
    rows = tensor.index_select(0, row_index)
    positions = query.positions[: len(query.rows)]
    return rows.narrow(1, 0, positions.shape[1]) if query.kind == "full" else rows.gather(1, positions)


def guide(sampler: MaskedSampler, state: Any, logits: Tensor, query: WindowQuery) -> Tensor:
    """Apply guidance, and exclude the tokens that are never proposed: the logits stages before `process_logits`."""
    request = state.request
    if request.guidance_scale != 1.0:
        logits = guided(logits, sampler.guidance(state, query.rows))
    elif request.temperature > 0:
        # scaled logits can leave the range of float16
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # in place: the logits are this step's, and can be large
    if not sampler.weighs_mask(state):
        logits.select(-1, state.mask_id).fill_(-torch.inf)
    if state.suppressed is not None:
        if state.suppressed.ndim == 1:
            logits.index_fill_(-1, state.suppressed, -torch.inf)
        else:  # each row has others
            rows, copies = query.rows, query.window.copies
            if copies is not None and len(logits) != len(rows):  # drafts have rows of their own
                rows = rows[(np.arange(copies.max())[:, None] < copies).nonzero()[1]]
            excluded = state.suppressed[torch.as_tensor(rows, device=logits.device)]
            logits.scatter_(-1, excluded.unsqueeze(1).expand(-1, logits.shape[1], -1), -torch.inf)
    return logits


def make_view(
    sampler: MaskedSampler,
    state: Any,
    proposal: MaskedProposal,
    generator: torch.Generator | None = None,
    memory: Mapping[str, Tensor] | None = None,
) -> View:
    """Make what `select` sees of a proposal. memory: the method's; None reads it from the state."""
    rows, available = proposal.rows, proposal.available
    draw = functools.partial(sampler.position_noise, state, generator)
    if memory is None:
        memory = state.memory.read(rows, available.shape[1]) if state.memory.specs else {}
    editable = revision.editable_positions(state, proposal) if sampler.needs.revises else torch.zeros_like(available)
    return View(
        scores=torch.where(available, proposal.scores, -torch.inf),
        candidates=available,
        tokens=proposal.values,
        positions=proposal.positions,
        quantities=proposal.quantities,
        quota=sampler.quota(state, rows),
        memory=memory,
        updates=proposal.updates,
        current=proposal.current,
        editable=editable,
        top=top_by_rank if generator is None else lambda scores, count: reference.top(state, scores, count),
        draw=draw if generator is None else functools.cache(draw),  # a generator moves on with every reading
        choose=functools.partial(drawing.choose_positions, sampler, state, generator),
        ends=state.ends,
        leading=leading_blocks(state, proposal.current) if "pipelined_blocks" in state.features else None,
    )


def to_host(**tensors: Tensor | None) -> dict[str, np.ndarray]:
    """Copy the tensors that are not None to numpy arrays in one transfer, the step's one wait for the device. All are
    shaped as the first, or lack its last dimension."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if all(tensor.is_cpu for tensor in present.values()):
        return {name: tensor.numpy() for name, tensor in present.items()}
    first = next(iter(present.values()))
    # float64 holds flags, ids and logits exactly
    wide = [
        (tensor if tensor.ndim == first.ndim else tensor.unsqueeze(-1).expand_as(first)).double()
        for tensor in present.values()
    ]
    dtypes = {torch.bool: bool, torch.int64: np.int64}
    arrays = {}
    for (name, tensor), array in zip(present.items(), torch.stack(wide).cpu().numpy(), strict=True):
        arrays[name] = array.astype(dtypes.get(tensor.dtype, np.float64))
        if tensor.ndim < first.ndim:
            arrays[name] = arrays[name][..., 0]
    return arrays

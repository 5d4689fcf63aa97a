"""The masked family: all new positions start as masks, and each step makes some of them final.

The whole method, for one row of ids and without a cache (tests compare `MaskedSampler` with it):

```python
import torch

def decode(model, ids, mask_id, end_ids=(), block_length=32, steps=None, threshold=None, shift=0):
    '''Fill the masks of `ids`. model(ids [1, L]) returns logits [1, L, V]. steps: number of steps per block.'''
    tokens = torch.tensor(ids)
    block_start = ids.index(mask_id)
    answer_start = max((i + 1 for i, token in enumerate(ids) if token != mask_id), default=0)
    while block_start < len(ids):
        block = slice(block_start, min(block_start + block_length, len(ids)))
        num_masks, step = int((tokens[block] == mask_id).sum()), 0
        while (undecided := tokens[block] == mask_id).any():
            # query: one forward over the row; with `shift`, the logits of position p are at p - 1
            logits = model(tokens.unsqueeze(0))[0].double()
            if shift:
                logits = torch.cat((logits[:1], logits[:-1]))
            # propose: the best token of each position in the block, and its probability
            logits[:, mask_id] = -torch.inf
            confidence, candidates = logits[block].softmax(-1).max(-1)
            scores = torch.where(undecided, confidence, -torch.inf)
            # commit, `select`: LLaDA's schedule, or Fast-dLLM's threshold
            if threshold is None:
                count = 1 if steps is None else num_masks // steps + (step < num_masks % steps)
                best = scores.sort(descending=True, stable=True).indices[:count]
                selected = torch.zeros_like(undecided).scatter(0, best, True) & undecided
            else:
                selected = scores >= threshold
                selected[scores.argmax()] = True
            # commit, write
            tokens[block] = torch.where(selected, candidates, tokens[block])
            step += 1
            # commit, close: the row ends at an end token if all positions before it are decided
            for position in range(block.start, block.stop):
                token = int(tokens[position])
                if token == mask_id:
                    break
                if token in end_ids and position >= answer_start:
                    return tokens[: position + 1].tolist()
        block_start = block.stop
    return tokens.tolist()
```

In `MaskedSampler`, each row has its own block, step and end. A step consists of the query, the logits stages (guidance,
suppression, the method's `process_logits`), candidate tokens and statistics, `select`, the write, and the stop rules.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache, Part
from paradec.core import rng
from paradec.core.blocks import BlockPolicy
from paradec.core.logprobs import StepLogProbs
from paradec.core.protocol import Commit, NotFinite, Sampler
from paradec.core.query import Cost, WindowLogits, WindowQuery
from paradec.core.trace import Notes
from paradec.kernels.token_stats import read_stats, token_statistics
from paradec.request import NO_FILTERS, Request, request_for
from paradec.samplers.distributions import apply_guidance
from paradec.samplers.features.adaptive_blocks import cut_blocks
from paradec.samplers.features.early_stops import EARLY_PREFIX
from paradec.samplers.features.logprobs import known_probabilities, step_logprobs
from paradec.samplers.features.pipelined_blocks import ensure_progress, leading_blocks, open_starts
from paradec.samplers.masked import drawing, reference
from paradec.samplers.masked.blocks import close_blocks, find_ends, trim_rows
from paradec.samplers.masked.partial_calls import build_store_call, find_columns, merge_parts, scatter_to_window
from paradec.samplers.masked.rules import revision
from paradec.samplers.masked.rules.revision import Revision
from paradec.samplers.masked.start import start_state
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import (
    LAST,
    UNCUT,
    MaskedProposal,
    Needs,
    Stage,
    StepDecision,
    View,
    run_process_logits,
    run_select,
)
from paradec.samplers.statistics import top_by_rank

__all__ = ["LAST", "UNCUT", "MaskedProposal", "MaskedSampler", "MaskedState", "Needs", "Revision", "Stage", "View"]

MIN_SAVED_LOGITS = 2**15
"""A call omits the logits of decided positions if this saves at least this number of logits."""
OVERRIDES = {
    "preview": "previews",
    "process_logits": "processes_logits",
    "extra_quantities": "extra_quantities",
    "revise": "revises",
    "draw_tokens": "draws_tokens",
}
"""Method of `MaskedSampler` -> field of `Needs` that is set if a class overrides the method."""
PARAMETERS = {"select": "self, view", "process_logits": "self, logits, stage", "quota": "self, state, rows"}
"""Parameters of methods that users often define."""
LOOP_METHODS = ("query", "propose", "commit")
"""Methods that a sampler must not override if it is combined with others or wrapped by a drafting method."""


@dataclass(frozen=True)
class MaskedSampler(Sampler):
    """Base of the family. A subclass declares what it reads and implements `select` (and `quota` if it has a schedule).

    Class attributes (others: `Sampler`):
        needs: what the method reads and does; overridden methods set their flags.
        draws: whether the method draws positions (`View.draw`, `View.choose`), even at temperature 0.
        device_step: whether `compile=True` can run the method. Then `select` and `quota` must not wait for the device,
            and must accept counts as tensors. Subclasses do not inherit the attribute.
        sweep: at least two variants for `paradec compare`, each with settings and request arguments. A fraction as
            `steps` is a share of the undecided positions.
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
        for name, parameters in PARAMETERS.items():
            if inspect.isfunction(function := vars(cls).get(name)):
                try:
                    inspect.signature(function).bind(*parameters.split(", "))
                except TypeError:
                    signature = f"{name}{inspect.signature(function)}"
                    raise TypeError(f"{signature} of sampler class {cls.__name__} must take ({parameters})") from None
        flags: Any = {
            OVERRIDES[name]: True for name in OVERRIDES if getattr(cls, name) is not getattr(MaskedSampler, name)
        }
        cls.needs = replace(cls.needs, **flags)
        cls.device_step = vars(cls).get("device_step", False)

    def select(self, view: View) -> Tensor:
        """Choose the candidates that become final: [R, W] bool. A pure function of the view."""
        raise NotImplementedError

    def quota(self, state: MaskedState, rows: np.ndarray) -> Any:
        """Compute `view.quota`, how many positions each of `rows` [R] commits in this step: [R] int64. For the open
        blocks, the state has `planned_steps(rows)`, `block_step`, `masks_at_open` and `remaining` (masks)."""
        if self.uses_steps and not self.needs.may_wait:  # a method that waits may count steps in another way
            way = "define it, or subclass paradec.samplers.LowConfidence, which has one"
            raise TypeError(f"sampler {self.name!r} has uses_steps = True, but no quota: {way}")
        return None

    def blocks(self, block_length: int | None) -> BlockPolicy | None:
        """Return the method's block policy for requests without `blocks`. block_length: the request's, or None."""
        return None

    def preview(self, state: MaskedState) -> np.ndarray:
        """Predict the K or fewer positions that this step commits, best first: [R, K] int64, padded with -1."""
        raise NotImplementedError

    def positions_for_cache(self, state: MaskedState) -> np.ndarray | None:
        """Return the positions [R, K] int64 that the cache needs for its plan (`CacheFacts.evaluates`)."""
        return self.preview(state)

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        """Compute the new values [R, ...] of memory tensors, by name, after `select`."""
        return {}

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Process logits [R, W, V] before tokens are chosen, not in place: [R, W, V]. Also return tensors [R, ...] by
        name for `view.updates`; the commit writes those named like a memory tensor to the memory."""
        return logits, {}

    def extra_quantities(self, state: MaskedState, proposal: MaskedProposal) -> Mapping[str, Tensor]:
        """Compute further quantities [R, W] of a proposal, for `view.quantities`. Changes no state."""
        return {}

    def revise(self, view: View, selected: Tensor) -> Revision:
        """Choose the tokens at `view.editable` positions to take back or replace, after `select`."""
        return Revision()

    def max_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        """Return the maximum steps of a block for methods that revise: [R] int64, at least `masks_at_open`."""
        return 2 * masks_at_open

    def trim(self, view: View, selected: Tensor) -> Tensor | None:
        """Choose shorter lengths of rows after this step: [R] int64, each in the window and after the prompt. `UNCUT`
        keeps a row's length, and None all lengths. Not called with `eos_early_stop=False`."""
        return None

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        """Raise ValueError if the settings do not fit a request. longest: positions of the longest answer."""

    @torch.inference_mode(False)  # tensors made in inference mode cannot be changed in place outside of it
    @torch.no_grad()
    def start(
        self, model: Any, prompt: Any, request: Request | None = None, *, attention_mask: Any = None, **arguments: Any
    ) -> MaskedState:
        """Make the state of one request, which is a `paradec.Request` or its fields by name. Raises ValueError or
        TypeError for an argument out of its range; the message names the argument."""
        if type(self).select is MaskedSampler.select and type(self).commit is MaskedSampler.commit:
            raise TypeError(f"sampler class {type(self).__name__} has no select; docs/write_a_sampler.md shows one")
        return start_state(self, model, prompt, request_for(self, request, arguments), attention_mask)

    def query(self, state: MaskedState) -> list[WindowQuery]:
        """Build one query per part of the cache's plan. A query requests the logits of the rows' windows, or only those
        of undecided positions if these suffice."""
        needs_positions = state.cache.facts.evaluates in ("picks", "targets")
        parts = state.cache.plan(state, self.positions_for_cache(state) if needs_positions else None)
        queries = [build_query(state, part) for part in parts]
        needs = self.needs
        if needs.decided_logits or needs.revises or needs.processes_logits or needs.extra_quantities:
            return queries
        reads_window = any(feature.reads_window(state) for feature in state.features.values())
        if needs.mask_probes or needs.multi_step or reads_window:
            return queries
        return [drop_decided(state, query) for query in queries]

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> MaskedProposal:
        """Propose a candidate token and its scores for every evaluated window position; values at other positions are
        undefined. outputs: logits per query, [R, W, V], or [R, K, V] at the query's K `window.columns`."""
        window, features = state.window, state.features
        generator = None if state.generator is None else state.generator.clone_state()
        current = window.read(state.canvas)
        available = window.undecided(current, state.mask_id)
        for query in queries:
            if query.window.available is not None:
                index = torch.as_tensor(query.window.index, device=available.device)
                available = available.index_copy(0, index, available[index] & query.window.available)
        if "early_stops" in features:  # the window reaches beyond the block
            available = available & (window.positions < state.block_ends)
        constraint, recorder, holes = features.get("constraint"), features.get("logprobs"), features.get("holes")
        parts, logprobs = [], []
        for logits, query in zip(outputs, queries, strict=True):
            logits = prepare_logits(self, state, logits, query)
            if holes is not None:
                holes.exclude_ends(state, logits, query.window.index)
            processed, updates = self._run_logits_stage(state, logits, query, available, current)
            if constraint is None:
                tokens, quantities = self.read_candidates(state, processed, query, generator)
            else:
                tokens, quantities = constraint.read_candidates(self, state, processed, query, generator)
            if query.window.columns is not None:
                tokens, quantities = scatter_to_window(tokens, quantities, query, current)
            parts.append((tokens, quantities, updates))
            if recorder is not None:
                window_logits = logits[:, : window.positions.shape[1]]  # columns of mask probes may follow
                is_standard = constraint is None and type(self).read_candidates is MaskedSampler.read_candidates
                known = None
                if is_standard:
                    known = known_probabilities(self, state, window_logits, quantities["confidence"])
                logprobs.append(step_logprobs(state.request, window_logits, tokens, recorder.logprobs.count, known))
        order = None
        if len(parts) > 1:
            tokens, quantities, updates, order = merge_parts(parts, queries)
        proposal = MaskedProposal(
            rows=window.rows,
            values=tokens,
            cost=Cost(queries, state.batch),
            positions=window.positions,
            scores=self.ranking_scores(state, tokens, quantities),
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

    def _run_logits_stage(
        self, state: MaskedState, logits: Tensor, query: WindowQuery, available: Tensor, current: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        early_quantities: dict[str, Tensor] = {}
        if (early_stops := state.features.get("early_stops")) is not None:
            statistics = token_statistics(logits, early_stops.reads)[1]
            early_quantities = {EARLY_PREFIX + name: value for name, value in statistics.items()}
        if not self.needs.processes_logits:
            return logits, early_quantities
        tensors = [available, state.window.positions, current]
        if len(query.rows) < len(available):
            index = torch.as_tensor(query.window.index, device=available.device)
            tensors = [tensor.index_select(0, index) for tensor in tensors]
        available, positions, current = tensors
        memory = state.memory.read(query.rows, available.shape[1])
        processed, updates = run_process_logits(self, logits, Stage(available, positions, memory, current))
        return processed, early_quantities | dict(updates)

    def guidance(self, state: MaskedState, rows: np.ndarray) -> float | Tensor:
        """Return the guidance scale of `rows` [R] at this step: a number, or [R, 1, 1]."""
        return state.request.guidance_scale

    def weighs_mask(self, state: MaskedState) -> bool:
        """Whether the softmax includes the mask token, which is never proposed (`reference.read_candidates`)."""
        return state.generator is not None

    def read_candidates(
        self, state: MaskedState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute candidate tokens [R, W] and quantities [R, W] of one query's rows."""
        request = state.request
        reads_filtered = self.needs.score_from == "sampled" and request.filters != NO_FILTERS
        if generator is None and request.temperature == 0 and not reads_filtered:
            return token_statistics(logits, self.needs.reads)
        return drawing.draw_candidates(self, state, logits, query, generator)

    def ranking_scores(self, state: MaskedState, tokens: Tensor, quantities: Mapping[str, Tensor]) -> Tensor:
        """Compute the scores that rank candidates: [R, W] float64."""
        scores = quantities[self.needs.score]
        if state.request.confidence_eos_eot_inf and len(state.ends):
            scores = scores.masked_fill(torch.isin(tokens, state.ends), LAST)
        return scores

    def draw_tokens(
        self, state: MaskedState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> Tensor:
        """Draw tokens [R, W] from softmax(logits [R, W, V]). With a generator, draw as the public codes do: by
        torch.multinomial if needs.score_from="sampled" (Dream), else by the Gumbel-max trick in float64 (LLaDA)."""
        if generator is None:
            sample = read_stats(logits, frozenset(), draws=drawing.token_draws(state, query)).sample
            assert sample is not None  # since `draws` is set
            return sample
        rows, positions = query.rows, state.window.query_positions(query)
        if self.needs.score_from == "sampled":
            return reference.draw_categorical(state, logits, positions, rows, generator)
        noise = reference.gumbel_uniform(state, logits.shape[-1], rows, positions, generator)
        return (logits.double() + rng.gumbel(noise)).argmax(-1)

    def position_noise(self, state: MaskedState, generator: torch.Generator | None) -> Tensor:
        """Draw the uniform numbers by which positions are chosen: [R, W] float64."""
        if generator is not None:
            return reference.position_noise(state, self.needs.reference_draws, generator)
        window = state.window
        steps = torch.as_tensor(state.row_step[window.rows], device=window.positions.device)
        keys = state.keys[window.row_index[:, 0]]
        return rng.uniform(keys, steps, window.positions, 1, rng.POSITION_STREAM).squeeze(-1)

    def observe(self, state: MaskedState, proposal: MaskedProposal) -> Notes:
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
                early_rules = {(rows[index], position): "early stop" for position in positions[index]}
                notes.rules = {**(notes.rules or {}), **early_rules}
        return notes

    def commit(self, state: MaskedState, proposal: MaskedProposal) -> Commit:
        """Select and write tokens, update the memory, close full blocks and finished rows. Before any write, raises
        FloatingPointError for NaN or infinite logits, and RuntimeError if the method commits no token but must."""
        state.check_current(proposal)
        rows, needs, features = proposal.rows, self.needs, state.features
        generator = (
            None if state.generator is None else reference.generator_after(state.generator, proposal.generator_state)
        )
        view = make_view(self, state, proposal, generator)
        selected = run_select(self, view) & view.candidates
        if view.leading is not None:
            selected = ensure_progress(selected, view)
        decision = StepDecision(values=proposal.values, selected=selected, filled=selected)
        if needs.revises:
            decision = revision.revise_decision(self, state, view, selected)
        for feature in features.values():
            feature.on_commit(state, proposal, decision)
        cut = self.trim(view, decision.selected) if state.request.eos_early_stop else None
        written = torch.where(decision.selected, decision.values, proposal.current)
        arrays = to_host(
            filled=decision.filled,
            tokens=written,
            confidence=proposal.quantities["confidence"],
            selected=decision.selected if needs.revises else None,
            hold_block=decision.hold_block,
            cut=cut,
            block_end=proposal.block_end,
            available=proposal.available if state.cache.facts.needs_confidence else None,
        )
        committed = np.add.reduce(arrays["filled"], 1, dtype=np.int64)
        self._check_decision(state, rows, arrays["confidence"], committed)  # the state is unchanged so far

        if state.generator is not None and generator is not None:
            state.generator.set_state(generator.get_state())
        state.window.write(state.canvas, written)
        if state.memory.specs:
            updates = {name: value for name, value in proposal.updates.items() if name in state.memory}
            for name, value in {**updates, **self.remember(view, selected)}.items():
                state.memory.write(name, rows, value)
        if proposal.block_end is not None:
            cut_blocks(state, rows, arrays["block_end"])
        if state.cache.facts.needs_confidence:
            state.cache.observe_confidence(state, arrays["confidence"], arrays["available"])
        finish_step(self, state, proposal, decision, arrays, committed)
        scores, kind = proposal.scores, proposal.kind
        return Commit(rows, decision.values, proposal.positions, decision.selected, scores, kind, decision.logprobs)

    def _check_decision(
        self, state: MaskedState, rows: np.ndarray, confidence: np.ndarray, committed: np.ndarray
    ) -> None:
        if not math.isfinite(np.add.reduce(confidence, None)):  # logits with NaN or +inf make confidence NaN
            broken = rows[~np.isfinite(confidence).all(1)]
            raise NotFinite.at_steps(broken, state.row_step[broken])
        if self.needs.may_wait:  # only the last planned step must commit
            is_idle = ((committed == 0) & (state.block_step[rows] + 1 >= state.planned_steps(rows))).any()
        elif self.needs.revises:
            is_idle = (committed < revision.min_filled(self, state, rows)).any()
        else:
            is_idle = 0 in committed.tolist()
        if is_idle:
            raise RuntimeError(f"sampler {self.name!r} committed nothing for row {int(rows[committed.argmin()])}")


def finish_step(
    sampler: MaskedSampler,
    state: MaskedState,
    proposal: MaskedProposal,
    decision: StepDecision,
    arrays: Mapping[str, np.ndarray],
    committed: np.ndarray,
) -> None:
    """Count a step with `committed` [R] positions, then close full blocks and ended rows. arrays: from `to_host`."""
    rows, tokens = proposal.rows, arrays["tokens"]
    state.count(proposal.cost)
    state.cache.on_commit(state, tokens)
    state.advance(rows, committed)
    holds_block, stable = None, tokens
    if sampler.needs.revises:
        holds_block, stable = revision.stable_tokens(sampler, state, rows, arrays)
    ends = find_ends(state.stop_rules, state, stable) if state.stop_rules else None
    changed = False
    for feature in state.features.values():
        changed |= feature.on_close(state, proposal, decision, tokens, ends)
    if "cut" in arrays and (arrays["cut"] < state.length[rows]).any():
        trim_rows(state, arrays["cut"], tokens)
        changed = True
    close_blocks(state, rows, ends, holds_block, changed)


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
        # otherwise the call's tokens are the canvas itself
        index = torch.as_tensor(rows, device=state.canvas.device)
        query.tokens = gather_tokens(state.canvas, query, index)
        if branches == 2:
            is_prompt = gather_tokens(state.is_prompt, query, index)  # masked in the second branch of guidance
            query.tokens = torch.cat((query.tokens, query.tokens.masked_fill(is_prompt, facts.mask_id)))
    if facts.prompt_aligned:
        query.origin = state.per_branch(state.prompt_length[rows, None])
    if state.store is not None:
        query.store = build_store_call(state, part, query)
    for feature in state.features.values():
        feature.on_query(state, part, query)
    return query


def _wanted_columns(state: MaskedState, part: Part) -> tuple[Tensor, Tensor | None]:
    """Find the columns of a part's call that give the logits of its N rows' windows: [branches * N, W]. Also return
    which window positions the part evaluates: [N, W] bool, None for all."""
    source = state.window.host_positions
    if len(part.index) < len(source):
        source = source[part.index]
    if state.facts.shift:  # the logits of position p are at p - 1; those of position 0 are read at 0
        source = np.maximum(source - state.facts.shift, 0)
    if part.kind == "full":
        if source is state.window.host_positions and state.branches == 1 and state.window.host_valid is None:
            return state.window.positions, None
        if state.window.host_valid is not None:  # padding may lie beyond the call's columns
            source = np.minimum(source, part.positions.shape[1] - 1)
        return state.per_branch(source), None
    return find_columns(state, part, source)


def drop_decided(state: MaskedState, query: WindowQuery) -> WindowQuery:
    """Omit the logits of decided positions from a call, unless that saves little. All rows get as many columns as the
    row with the most undecided positions has; rows with fewer also request decided positions."""
    assert query.wanted is not None
    window = state.window
    width = window.positions.shape[1]
    multiple = 1 if state.store is None else state.stored_cache.shape_multiple
    num_columns = -(-int(state.remaining[query.rows].max()) // multiple) * multiple
    if (width - num_columns) * len(query.wanted) * state.facts.vocab_size < MIN_SAVED_LOGITS:
        return query
    undecided = window.undecided(window.read(state.canvas), state.mask_id)
    if len(query.rows) < len(undecided):
        undecided = undecided[torch.as_tensor(query.window.index, device=undecided.device)]
    columns = undecided.byte().argsort(dim=1, descending=True, stable=True)[:, :num_columns]
    branch_columns = columns.repeat(query.branches, 1) if query.branches > 1 else columns
    wanted = query.wanted.gather(1, branch_columns)
    return query.with_fields(wanted=wanted, window=query.window.with_fields(columns=columns))


def gather_tokens(tensor: Tensor, query: WindowQuery, row_index: Tensor) -> Tensor:
    """Gather a canvas-shaped tensor [B, L] at the Q positions of a query's rows: [N, Q]. row_index: [N], the rows."""
    rows = tensor.index_select(0, row_index)
    positions = query.positions[: len(query.rows)]
    return rows.narrow(1, 0, positions.shape[1]) if query.kind == "full" else rows.gather(1, positions)


def prepare_logits(sampler: MaskedSampler, state: Any, logits: Tensor, query: WindowQuery) -> Tensor:
    """Apply guidance, exclude tokens that are never proposed (in place), and apply token controls."""
    request = state.request
    if request.guidance_scale != 1.0:
        logits = apply_guidance(logits, sampler.guidance(state, query.rows))
    elif request.temperature > 0:
        # scaled logits can leave the range of float16
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # in place: only this step reads the logits, and they can be large
    if not sampler.weighs_mask(state):
        logits.select(-1, state.mask_id).fill_(-torch.inf)
    if state.suppressed is not None:
        if state.suppressed.ndim == 1:
            logits.index_fill_(-1, state.suppressed, -torch.inf)
        else:  # one list per row
            rows, num_drafts = query.rows, query.window.num_drafts
            if num_drafts is not None and len(logits) != len(rows):  # the logits have one row per draft
                rows = rows[(np.arange(num_drafts.max())[:, None] < num_drafts).nonzero()[1]]
            excluded = state.suppressed[torch.as_tensor(rows, device=logits.device)]
            logits.scatter_(-1, excluded.unsqueeze(1).expand(-1, logits.shape[1], -1), -torch.inf)
    controls = state.features.get("controls")
    if controls is None:
        return logits
    return controls.adjust_rows(state, logits, query.rows, state.window.query_positions(query))


def make_view(
    sampler: MaskedSampler,
    state: Any,
    proposal: MaskedProposal,
    generator: torch.Generator | None = None,
    memory: Mapping[str, Tensor] | None = None,
) -> View:
    """Make the view of a proposal. memory: the method's memory; None reads it from the state."""
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
        top=top_by_rank if generator is None else lambda scores, count: reference.top_by_topk(state, scores, count),
        draw=draw if generator is None else functools.cache(draw),  # a second call would advance the generator
        choose=functools.partial(drawing.choose_positions, sampler, state, generator),
        ends=state.ends,
        leading=leading_blocks(state, proposal.current) if "pipelined_blocks" in state.features else None,
    )


def to_host(**tensors: Tensor | None) -> dict[str, np.ndarray]:
    """Copy tensors to numpy arrays in one transfer, so that a step waits for the device only once. Each tensor has the
    shape of the first, with or without the last dimension. None values are omitted."""
    by_name = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if all(tensor.is_cpu for tensor in by_name.values()):
        return {name: tensor.numpy() for name, tensor in by_name.items()}
    widest = next(iter(by_name.values()))
    # float64 holds flags, ids and logits exactly
    columns = [
        (tensor if tensor.ndim == widest.ndim else tensor.unsqueeze(-1).expand_as(widest)).double()
        for tensor in by_name.values()
    ]
    dtypes = {torch.bool: bool, torch.int64: np.int64}
    arrays = {}
    for (name, tensor), array in zip(by_name.items(), torch.stack(columns).cpu().numpy(), strict=True):
        arrays[name] = array.astype(dtypes.get(tensor.dtype, np.float64))
        if tensor.ndim < widest.ndim:
            arrays[name] = arrays[name][..., 0]
    return arrays

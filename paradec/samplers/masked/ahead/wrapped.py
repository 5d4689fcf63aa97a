"""Samplers that run the steps of another sampler, the base, from drafts of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import short_repr
from paradec.core.logprobs import StepLogProbs
from paradec.core.protocol import Sampler
from paradec.core.query import Cost, WindowLogits, WindowQuery
from paradec.core.registry import Registry
from paradec.core.trace import Notes
from paradec.samplers.features.feature import overrides
from paradec.samplers.features.pipelined_blocks import ensure_progress
from paradec.samplers.features.token_controls import CONTROLS
from paradec.samplers.masked.ahead.draft_layout import DraftLogits, DraftState, logits_by_draft
from paradec.samplers.masked.loop import LOOP_METHODS, MaskedSampler, make_view
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import MaskedProposal, Needs, Stage, run_process_logits, run_select


@dataclass
class BaseStep:
    """One step of the base from one draft. Shapes: `R` rows, `W` positions."""

    proposal: MaskedProposal
    """The base's proposal; its cost covers all drafts."""
    written: Tensor
    """[R, W] int64: the window after the step."""
    memory: Mapping[str, Tensor]
    """The base's memory after the step, each [R, ...]."""
    quantities: Mapping[str, Tensor]
    cut: Tensor | None = None
    """[R] int64, from `MaskedSampler.trim`."""


@dataclass(kw_only=True)
class DraftProposal(MaskedProposal):
    """Proposal with the base's step from each draft. The inherited fields are those of the row itself, draft 0."""

    drafts: list[DraftState]
    base_steps: list[BaseStep]
    num_drafts: np.ndarray
    """[R] int64 on the host: number of evaluated drafts of each row, the row itself included."""


@dataclass(frozen=True)
class DraftingSampler(MaskedSampler):
    """Base of the methods that run the steps of another sampler, `base`, from several drafts of a row in one call."""

    base: Any = "threshold"

    needs = Needs(multi_step=True)
    # one stream of numbers ("rng") cannot serve several drafts; token controls read tokens, which differ by draft
    unsupported = (*MaskedSampler.unsupported, "rng", *CONTROLS)

    def _adopt(self, base: MaskedSampler, why: str | None, **changes: Any) -> None:
        """Set `base`, and `needs` to the base's needs with `changes`. Raises ValueError for an unsupported base; `why`
        is the subclass's reason against the base, or None."""
        if (why := why_not_a_base(base) or why) is not None:
            raise ValueError(f"base={base.name!r} does not work with sampler {self.name!r}: {why}")
        names = ("reads", "score", "score_from", "decided_logits")
        needs = replace(self.needs, **{name: getattr(base.needs, name) for name in names} | changes)
        vars(self).update(base=base, needs=needs, draws=base.draws)

    def blocks(self, block_length: int | None) -> BlockPolicy | None:
        return self.base.blocks(block_length)

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        self.base.check(facts, blocks, cache, longest)

    def take_steps(
        self, reader: MaskedSampler, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery], chain: bool
    ) -> tuple[list[DraftState], list[BaseStep], np.ndarray]:
        """Run the base's step from each draft of a call. Returns the drafts, the steps, and the number of evaluated
        drafts per row [R].

        reader: the sampler that reads candidates and quantities from logits. outputs: logits [R, W, V], one per query.
        chain: True reads a step's memory from the previous draft's step, False from the state."""
        window, base = state.window, self.base
        draft_windows = [query.window for query in queries if isinstance(query.window, DraftLogits)]
        drafts = draft_windows[0].drafts if draft_windows else [DraftState(state, 0, window.read(state.canvas))]
        logits, indices, num_drafts = logits_by_draft(state, base, outputs, queries, len(drafts))
        window_memory = state.memory.read(window.rows, window.positions.shape[1])
        memory: Mapping[str, Tensor] = {name: window_memory[name] for name in base.memory()}
        window_logits = WindowLogits(np.arange(len(window.rows)))
        query = WindowQuery(window.rows, drafts[0].tokens, window.positions, window=window_logits)
        base_steps: list[BaseStep] = []
        for draft, index in zip(drafts, indices, strict=True):
            processed = logits
            if len(drafts) > 1 or (index != window_logits.index).any():
                processed = logits.index_select(0, torch.as_tensor(index, device=logits.device))
            if (holes := state.features.get("holes")) is not None:
                holes.exclude_ends(state, processed, None)
            updates: Mapping[str, Tensor] = {}
            unprocessed = processed
            if base.needs.processes_logits:
                stage = Stage(draft.undecided_window, window.positions, memory, draft.tokens)
                processed, updates = run_process_logits(base, processed, stage)
            tokens, quantities = reader.read_candidates(draft, processed, query, None)
            base_steps.append(self.take_step(draft, tokens, quantities, updates, memory, queries))
            if state.logprobs is not None:
                base_steps[-1].proposal.logprobs = StepLogProbs.from_logits(unprocessed, tokens, state.logprobs.count)
            if chain:
                memory = base_steps[-1].memory
        return drafts, base_steps, num_drafts

    def take_step(
        self,
        draft: Any,
        tokens: Tensor,
        quantities: Mapping[str, Tensor],
        updates: Mapping[str, Tensor],
        memory: Mapping[str, Tensor],
        queries: list[WindowQuery],
    ) -> BaseStep:
        """Run the base's step from one draft with candidates `tokens` and quantities, each [R, W]."""
        base, window = self.base, draft.window
        proposal = MaskedProposal(
            rows=window.rows,
            values=tokens,
            cost=Cost(queries, draft.batch),
            positions=window.positions,
            scores=base.ranking_scores(draft, tokens, quantities),
            available=draft.undecided_window,
            current=draft.tokens,
            quantities=dict(quantities),
            updates=dict(updates),
            made_at=draft.commits,
            kind="+".join(dict.fromkeys(query.kind for query in queries)),
        )
        if base.needs.extra_quantities:
            proposal.quantities.update(base.extra_quantities(draft, proposal))
        view = make_view(base, draft, proposal, memory=memory)
        selected = run_select(base, view) & view.candidates
        if view.leading is not None:
            selected = ensure_progress(selected, view)
        new_memory = {**memory, **{name: updates[name] for name in updates if name in memory}}
        new_memory |= base.remember(view, selected)
        cut = base.trim(view, selected) if draft.request.eos_early_stop else None
        return BaseStep(proposal, torch.where(selected, tokens, draft.tokens), new_memory, quantities, cut)

    def observe(self, state: MaskedState, proposal: MaskedProposal) -> Notes:
        notes = super().observe(state, proposal)
        assert isinstance(proposal, DraftProposal)
        notes.rules, notes.drafts = None, set()
        positions, current = proposal.positions.tolist(), proposal.drafts[0].tokens
        for number, draft in enumerate(proposal.drafts[1:], start=1):
            for index, column in (draft.tokens != current).nonzero().tolist():
                if number < proposal.num_drafts[index]:
                    token = int(draft.tokens[index, column])
                    notes.drafts.add((int(proposal.rows[index]), positions[index][column], token))
        return notes


def why_not_a_base(base: MaskedSampler) -> str | None:
    """Return why the steps of a sampler cannot run from drafts; None if they can."""
    if base.needs.multi_step:
        return "it drafts by itself"
    if base.needs.revises:
        return "it takes tokens back"
    if getattr(base.blocks(None), "reads_logits", False):
        return "its blocks depend on logits, which drafts do not have yet"
    for method in LOOP_METHODS:
        if overrides(base, method):
            return f"it overrides `{method}`, so that its step is more than `select`"
    return None


def base_sampler(base: Any) -> MaskedSampler:
    """Make the sampler of the setting `base`."""
    sampler = base
    try:
        if isinstance(base, str):
            sampler = Registry.by_kind["sampler"].create(base)
        elif isinstance(base, Mapping):
            sampler = Sampler.from_dict(base)
    except (TypeError, ValueError) as error:
        raise ValueError(f"base={short_repr(base)}: {error}") from error
    if not isinstance(sampler, MaskedSampler):
        raise ValueError(f"base={short_repr(base)} must be a masked sampler, its name or its to_dict")
    return sampler


def pick_step(tensors: list[Tensor], step_index: Tensor) -> Tensor:
    """Select row r from `tensors[step_index[r]]`, for each row r: [R, ...]. tensors: [R, ...] each. step_index: [R]."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack(tensors)[step_index, torch.arange(len(step_index), device=step_index.device)]

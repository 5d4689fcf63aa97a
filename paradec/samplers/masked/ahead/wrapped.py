"""Samplers that take the steps of another one, their base: which base that is, and its steps from drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import shown
from paradec.core.logprobs import StepLogProbs
from paradec.core.protocol import Sampler
from paradec.core.query import Cost, WindowLogits, WindowQuery
from paradec.core.registry import Registry
from paradec.core.trace import Notes
from paradec.samplers.features.pipelined_blocks import with_progress
from paradec.samplers.masked.ahead.draft_layout import Ahead, DraftLogits, logits_by_draft
from paradec.samplers.masked.loop import MaskedProposal, MaskedSampler, MaskedState, Needs, Stage, make_view
from paradec.samplers.masked.view import checked_select

OWN = ("query", "propose", "commit")
"""What a base must leave to the family."""


@dataclass
class Taken:
    """One step of the base, taken from one draft. Shapes: `R` rows, `W` positions."""

    proposal: MaskedProposal
    """What the base would have proposed; its cost is that of all drafts."""
    written: Tensor
    """[R, W] int64: the window after it."""
    memory: Mapping[str, Tensor]
    """The base's memory after it, each [R, ...]."""
    quantities: Mapping[str, Tensor]
    """What was read from the logits, each [R, W]."""
    cut: Tensor | None = None
    """[R] int64: where it cuts rows off, as `MaskedSampler.trim` says it."""


@dataclass(kw_only=True)
class DraftProposal(MaskedProposal):
    """`taken[j]` is the base's step from `drafts[j]`; the other fields are those of the first one, the row itself."""

    drafts: list[Ahead]
    taken: list[Taken]
    copies: np.ndarray
    """[R] int64 on the host: how many drafts of each row were evaluated, the row itself included; the rest is not to be
    read."""


@dataclass(frozen=True)
class DraftingSampler(MaskedSampler):
    """Base of the methods that take the steps of another sampler, `base`, from several drafts of a row in one call."""

    base: Any = "threshold"

    needs = Needs(multi_step=True)

    def blocks(self, block_length: int | None) -> BlockPolicy | None:
        return self.base.blocks(block_length)

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        self.base.check(facts, blocks, cache, longest)

    def take_steps(
        self, reader: MaskedSampler, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery], chain: bool
    ) -> tuple[list[Ahead], list[Taken], np.ndarray]:
        """The drafts of a call, the base's step from each, and how many drafts of each row were evaluated [R] int64.

        Args:
            reader: the sampler that reads candidates and quantities from logits.
            outputs: logits [R, W, V], one per query.
            chain: whether a step has the memory that the step from the draft before it left, or that of the state.
        """
        window, base = state.window, self.base
        drafted = [query.window for query in queries if isinstance(query.window, DraftLogits)]
        drafts = drafted[0].drafts if drafted else [Ahead(state, 0, window.read(state.canvas))]
        logits, indices, copies = logits_by_draft(state, base, outputs, queries, len(drafts))
        stored = state.memory.read(window.rows, window.positions.shape[1])
        memory: Mapping[str, Tensor] = {name: stored[name] for name in base.memory()}
        every_row = WindowLogits(np.arange(len(window.rows)))
        query = WindowQuery(window.rows, drafts[0].tokens, window.positions, window=every_row)
        taken: list[Taken] = []
        for draft, index in zip(drafts, indices, strict=True):
            processed = logits
            if len(drafts) > 1 or (index != every_row.index).any():
                processed = logits.index_select(0, torch.as_tensor(index, device=logits.device))
            if (holes := state.features.get("holes")) is not None:
                holes.exclude_ends(state, processed, None)
            updates: Mapping[str, Tensor] = {}
            plain = processed
            if base.needs.processes_logits:
                stage = Stage(draft.candidates, window.positions, memory, draft.tokens)
                processed, updates = base.process_logits(processed, stage)
            tokens, quantities = reader.read(draft, processed, query, None)
            taken.append(take(base, draft, tokens, quantities, updates, memory, queries))
            if state.logprobs is not None:
                taken[-1].proposal.logprobs = StepLogProbs.from_logits(plain, tokens, state.logprobs.count)
            if chain:
                memory = taken[-1].memory
        return drafts, taken, copies

    def observe(self, state: MaskedState, proposal: MaskedProposal) -> Notes:
        """As for all; and the tokens in which drafts differ from the row."""
        notes = super().observe(state, proposal)
        assert isinstance(proposal, DraftProposal)
        notes.rules, notes.drafts = None, set()
        positions, current = proposal.positions.tolist(), proposal.drafts[0].tokens
        for number, draft in enumerate(proposal.drafts[1:], start=1):
            for index, column in (draft.tokens != current).nonzero().tolist():
                if number < proposal.copies[index]:
                    token = int(draft.tokens[index, column])
                    notes.drafts.add((int(proposal.rows[index]), positions[index][column], token))
        return notes


def take(
    base: MaskedSampler,
    ahead: Any,
    tokens: Tensor,
    quantities: Mapping[str, Tensor],
    updates: Mapping[str, Tensor],
    memory: Mapping[str, Tensor],
    queries: list[WindowQuery],
) -> Taken:
    """The base's step from one draft, given what was read from logits: candidates `tokens` and their quantities, each
    [R, W], and what its logits stage found."""
    window = ahead.window
    proposal = MaskedProposal(
        rows=window.rows,
        values=tokens,
        cost=Cost(queries, ahead.batch),
        positions=window.positions,
        scores=base.ranked(ahead, tokens, quantities),
        available=ahead.candidates,
        current=ahead.tokens,
        quantities=dict(quantities),
        updates=dict(updates),
        made_at=ahead.commits,
        kind="+".join(dict.fromkeys(query.kind for query in queries)),
    )
    if base.needs.extra_quantities:
        proposal.quantities.update(base.extra_quantities(ahead, proposal))
    view = make_view(base, ahead, proposal, memory=memory)
    selected = checked_select(base, view) & view.candidates
    if view.leading is not None:
        selected = with_progress(selected, view)
    after = {**memory, **{name: updates[name] for name in updates if name in memory}}
    after |= base.remember(view, selected)
    cut = base.trim(view, selected) if ahead.request.eos_early_stop else None
    return Taken(proposal, torch.where(selected, tokens, ahead.tokens), after, quantities, cut)


def why_not_a_base(base: MaskedSampler) -> str | None:
    """Why the steps of a sampler cannot be taken from drafts; None where they can."""
    if base.needs.multi_step:
        return "it drafts by itself"
    if base.needs.revises:
        return "it takes back what it decided"
    if getattr(base.blocks(None), "reads_logits", False):
        return "the logits say where its blocks end, and drafts are made before"
    for part in OWN:
        if getattr(type(base), part) is not getattr(MaskedSampler, part):
            return f"it has a `{part}` of its own, so that `select` does not say what a step does"
    return None


def base_sampler(base: Any) -> MaskedSampler:
    """The sampler that a setting means."""
    made = base
    try:
        if isinstance(base, str):
            made = Registry.by_kind["sampler"].create(base)
        elif isinstance(base, Mapping):
            made = Sampler.from_dict(base)
    except (TypeError, ValueError) as error:
        raise ValueError(f"base={shown(base)}: {error}") from error
    if not isinstance(made, MaskedSampler):
        raise ValueError(f"base={shown(base)} must be a masked sampler: a name, one made with settings, or its to_dict")
    return made


def picked(tensors: list[Tensor], which: Tensor) -> Tensor:
    """Of tensors [R, ...], for each row that of number `which` [R]."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.stack(tensors)[which, torch.arange(len(which), device=which.device)]

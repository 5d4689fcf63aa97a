"""Samplers that take the steps of another one, their base: which base that is, and a step of it from a draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradec.core.checks import shown
from paradec.core.protocol import Sampler
from paradec.core.query import Cost, WindowQuery
from paradec.core.registry import Registry
from paradec.samplers.features.pipelined_blocks import with_progress
from paradec.samplers.masked.loop import MaskedProposal, MaskedSampler, make_view
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
    cut: Tensor | None = None
    """[R] int64: where it cuts rows off, as `MaskedSampler.trim` says it."""


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
    return Taken(proposal, torch.where(selected, tokens, ahead.tokens), after, cut)


def own_part(base: MaskedSampler) -> str | None:
    """What of a step a base has a method of its own for, so that `select` does not say what it does; else None."""
    return next((part for part in OWN if getattr(type(base), part) is not getattr(MaskedSampler, part)), None)


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

"""Stop rules that end a row early, by filling all its undecided positions at once (`paradec.Prophet`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from paradec.core.checks import short_repr
from paradec.samplers.features.feature import Ends, Feature

EARLY_PREFIX = "early "
"""Prefix of names in `MaskedProposal.updates`, for the quantities that early rules read."""


class EarlyRule(Protocol):
    """Rule that ends a row at the current step: its undecided positions get the model's predictions.

    A rule is an immutable value that requests may share. If a request has a rule, the window extends to the end of
    every row. A row ends only at a step that evaluates all its undecided positions; with caches, some steps do not.
    """

    reads: tuple[str, ...]
    """Quantities of the model's logits (`paradec.kernels.token_stats.QUANTITIES`), each [R, W] float64, stored in
    `proposal.updates` under `EARLY_PREFIX` + name."""

    def satisfied(self, state: Any, proposal: Any) -> Any:
        """Choose the rows to end: [R] bool tensor. state: the `MaskedState` before the write; it must not change."""
        ...


@dataclass
class EarlyStops(Feature):
    """The early rules of a request; the window extends to the end of every row."""

    rules: tuple[EarlyRule, ...]
    reads: tuple[str, ...]
    """Quantities of the model's logits that the rules read."""

    why_host_only = "stop rules other than the end token run on the host"

    def reads_window(self, state: Any) -> bool:
        return True

    def on_propose(self, state: Any, proposal: Any) -> None:
        """Set `proposal.early`, the rows that end at this step."""
        satisfied = [rule.satisfied(state, proposal) for rule in self.rules]
        proposal.early = torch.stack(satisfied).any(0)
        undecided = state.window.undecided(proposal.current, state.mask_id)
        for query in proposal.cost.queries:
            if query.window.available is not None:  # positions without logits at this step cannot be filled
                index = torch.as_tensor(query.window.index, device=undecided.device)
                proposal.early[index] &= ~(undecided[index] & ~query.window.available).any(1)

    def on_commit(self, state: Any, proposal: Any, decision: Any) -> None:
        """Commit the candidates of all undecided positions in rows that end at this step."""
        early = proposal.early.unsqueeze(1)
        undecided = state.window.undecided(proposal.current, state.mask_id)
        decision.values = torch.where(early, proposal.values, decision.values)
        decision.selected = torch.where(early, undecided, decision.selected)
        decision.filled = torch.where(early, undecided.to(decision.filled.dtype), decision.filled)
        if decision.hold_block is not None:
            decision.hold_block = decision.hold_block & ~proposal.early

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        """In rows without undecided positions, extend the open block to the row's end."""
        window = state.window
        masks = tokens == state.mask_id
        if window.host_valid is not None:
            masks &= window.host_valid
        rows = window.rows[~masks.any(1)]
        state.block_end[rows], state.remaining[rows] = state.length[rows], 0
        return False


def split_stop_rules(value: Any, sampler: Any = None) -> tuple[tuple[Any, ...], tuple[EarlyRule, ...]]:
    """Split stop rules into rules that end a row at a token, and early rules. Raises TypeError for other values, and
    ValueError for an early rule with a sampler that evaluates drafts or mask probes."""
    rules = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    early = tuple(rule for rule in rules if hasattr(rule, "satisfied") and not isinstance(rule, type))
    token_rules = tuple(rule for rule in rules if rule not in early)
    for rule in token_rules:
        if not callable(rule) or isinstance(rule, type):
            raise TypeError(
                f"stop={short_repr(rule)} must be stop rules, e.g. paradec.Prophet(); texts go to stop_strings"
            )
    if early and sampler and (sampler.needs.multi_step or sampler.needs.mask_probes):
        raise ValueError(f"sampler {sampler.name!r} does not work with stop={short_repr(early[0])}: leave stop out")
    return token_rules, early

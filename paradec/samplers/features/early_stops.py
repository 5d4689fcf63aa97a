"""Stop rules that end a row by filling all that is left of it at once (`paradec.Prophet`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import shown
from paradec.samplers.features.feature import Ends, Feature

WATCHED = "watched "
"""Comes before the name of a quantity that an `EarlyRule` reads, in `MaskedProposal.updates`."""


class EarlyRule(Protocol):
    """A reason to stop and take the model's predictions for all that is left: what is undecided becomes final at once.

    A rule of this kind is an immutable value, and several requests may share it. With one in a request the window
    reaches to the end of every row, so that all of it has logits; a row ends only at a step that evaluates everything
    undecided in it (a cache's partial steps may not).
    """

    reads: tuple[str, ...]
    """Quantities of the model's logits (`paradec.kernels.token_stats.QUANTITIES`), each [R, W] float64;
    `proposal.updates` has them under `WATCHED` and their names."""

    def satisfied(self, state: Any, proposal: Any) -> Any:
        """[R] bool tensor: the rows to end. Changes nothing.

        Args:
            state: the `MaskedState` before the write; its window is that of the proposal.
            proposal: this step's `MaskedProposal`.
        """
        ...


@dataclass
class EarlyStops(Feature):
    """The early rules of a request. With them the window reaches beyond the block, to the end of every row."""

    rules: tuple[EarlyRule, ...]
    reads: tuple[str, ...]
    """Quantities of the model's logits that the rules read."""

    host_only = "stop rules other than the end token are asked on the host"

    def reads_window(self, state: Any) -> bool:
        return True

    def on_propose(self, state: Any, proposal: Any) -> None:
        """Say which rows end now."""
        satisfied = [rule.satisfied(state, proposal) for rule in self.rules]
        # what has no logits at this step cannot be filled
        proposal.early = torch.stack(satisfied).any(0) & self._are_evaluated(state, proposal)

    def on_commit(self, state: Any, proposal: Any, decision: Any) -> None:
        """Take the candidates of all that is undecided in rows that end now."""
        early = proposal.early.unsqueeze(1)
        undecided = state.window.undecided(proposal.current, state.mask_id)
        decision.values = torch.where(early, proposal.values, decision.values)
        decision.selected = torch.where(early, undecided, decision.selected)
        decision.filled = torch.where(early, undecided.to(decision.filled.dtype), decision.filled)
        if decision.hold_block is not None:
            decision.hold_block = decision.hold_block & ~proposal.early

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        """Make the open block the last one of rows with nothing undecided: the window reaches to their end."""
        window = state.window
        masks = tokens == state.mask_id
        if window.host_valid is not None:
            masks &= window.host_valid
        rows = window.rows[~masks.any(1)]
        state.block_end[rows], state.remaining[rows] = state.length[rows], 0
        return False

    def _are_evaluated(self, state: Any, proposal: Any) -> Tensor:
        """[R] bool: rows of which everything undecided has logits at this step."""
        undecided = state.window.undecided(proposal.current, state.mask_id)
        evaluated = torch.ones(len(undecided), dtype=torch.bool, device=undecided.device)
        for query in proposal.cost.queries:
            if query.window.available is not None:
                index = torch.as_tensor(query.window.index, device=evaluated.device)
                evaluated[index] = ~(undecided[index] & ~query.window.available).any(1)
        return evaluated


def split_stop_rules(value: Any, sampler: Any = None) -> tuple[tuple[Any, ...], tuple[EarlyRule, ...]]:
    """Split the stop rules of a request into those that end a row at a token, and early ones.

    Raises:
        TypeError: something else than a rule or several.
        ValueError: an early rule with a sampler that drafts.
    """
    rules = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    early = tuple(rule for rule in rules if hasattr(rule, "satisfied") and not isinstance(rule, type))
    others = tuple(rule for rule in rules if rule not in early)
    for rule in others:
        if not callable(rule) or isinstance(rule, type):
            raise TypeError(
                f"stop={shown(rule)} must be a stop rule, e.g. paradec.Prophet(), or a list of them; texts go to "
                "stop_strings"
            )
    if early and sampler and (sampler.needs.multi_step or sampler.needs.mask_probes):
        source = "drafts of later steps" if sampler.needs.multi_step else "mask probes of the block"
        raise ValueError(
            f"sampler {sampler.name!r} does not work with stop={shown(early[0])}: it evaluates {source} beside the "
            "window, which the rule widens to the end of the row"
        )
    return others, early

"""Rows that an `EarlyRule` ends: what is undecided takes this step's candidates, all at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.stopping import EarlyRule
from paradec.samplers.masked.trackers import Ends, Tracker
from paradec.samplers.masked.views import Decision, MaskedProposal


@dataclass
class EarlyStops(Tracker):
    """The early rules of a request. With them the window reaches beyond the block, to the end of every row."""

    early_rules: tuple[EarlyRule, ...]
    watched: tuple[str, ...]

    host_only = "stop rules other than the end token are asked on the host"

    def reads_window(self, state: MaskedState) -> bool:
        return True

    def proposed(self, state: MaskedState, proposal: MaskedProposal) -> None:
        """Say which rows end now."""
        satisfied = [rule.satisfied(state, proposal) for rule in self.early_rules]
        # what has no logits at this step cannot be filled
        proposal.early = torch.stack(satisfied).any(0) & self._evaluated(state, proposal)

    def decided(self, state: MaskedState, proposal: MaskedProposal, decision: Decision) -> None:
        """Take the candidates of all that is undecided in rows that end now."""
        assert proposal.early is not None
        early = proposal.early.unsqueeze(1)
        undecided = state.window.undecided(proposal.current, state.mask_id)
        decision.values = torch.where(early, proposal.values, decision.values)
        decision.selected = torch.where(early, undecided, decision.selected)
        decision.filled = torch.where(early, undecided.to(decision.filled.dtype), decision.filled)
        if decision.hold_block is not None:
            decision.hold_block = decision.hold_block & ~proposal.early

    def closing(self, state: MaskedState, proposal: MaskedProposal, tokens: np.ndarray, ends: Ends) -> bool:
        """Make the open block the last one of rows with nothing undecided: the window reaches to their end."""
        window = state.window
        masks = tokens == state.facts.mask_id
        if window.host_valid is not None:
            masks &= window.host_valid
        rows = window.rows[~masks.any(1)]
        state.block_end[rows], state.remaining[rows] = state.length[rows], 0
        return False

    def _evaluated(self, state: MaskedState, proposal: MaskedProposal) -> Tensor:
        """[R] bool: rows of which everything undecided has logits at this step."""
        undecided = state.window.undecided(proposal.current, state.mask_id)
        found = torch.ones(len(undecided), dtype=torch.bool, device=undecided.device)
        for query in proposal.cost.queries:
            if query.window.available is not None:
                index = torch.as_tensor(query.window.index, device=found.device)
                found[index] = ~(undecided[index] & ~query.window.available).any(1)
        return found

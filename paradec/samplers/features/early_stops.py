"""Stop rules that end a row by filling all that is left of it at once (`paradec.Prophet`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.samplers.features.feature import Ends, Feature


@dataclass
class EarlyStops(Feature):
    """The early rules of a request. With them the window reaches beyond the block, to the end of every row."""

    rules: tuple[Any, ...]
    """Each an `EarlyRule` (`paradec.samplers.masked.stopping`)."""
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

"""The log-probabilities of what a request decides, where it asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from paradec.core.logprobs import LogProbs
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.trackers import Tracker
from paradec.samplers.masked.views import Decision, MaskedProposal


@dataclass
class KeptLogProbs(Tracker):
    """Keeps the log-probabilities of what is written."""

    logprobs: LogProbs

    per_row = {"logprobs": None}
    host_only = "logprobs are kept step by step"

    def reads_window(self, state: MaskedState) -> bool:
        return True

    def written(self, state: MaskedState, proposal: MaskedProposal, decision: Decision) -> None:
        if proposal.logprobs is None:
            return
        found = proposal.logprobs.but(decision.values == state.facts.mask_id)  # taken back
        step = state.row_step[proposal.rows]
        self.logprobs.write(proposal.rows, proposal.positions, decision.selected, found, step)
        decision.logprobs = found

"""A chain of drafts of a smaller model, one forward of it a token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats import draw
from paradec.samplers.causal.base import DRAFT_STREAM
from paradec.samplers.causal.drafts.source import checked, drafting_of, read, softened, that_fit
from paradec.samplers.causal.drafts.stopping import StopRule, ends
from paradec.samplers.causal.state import CausalState, Spans


@dataclass(frozen=True)
class DraftChain:
    """One token after the other, each row as many as it has slots for, or up to where `stop` ends its window."""

    stop: StopRule | None = None

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """See `DraftSource.fill`."""
        own = drafting_of(state)
        # what the store holds beyond the final tokens before the last belongs to rejected drafts
        fed = own.fed[rows] = np.minimum(own.fed[rows], state.committed[rows] - 1)
        if own.store is not None:
            for branch in range(state.branches):
                shift = np.where(fed > 0, state.shift[branch, rows], 0)
                own.store.forget(rows + branch * state.batch, fed + shift)
        drafts, every_q = state.memory["drafts"].clone(), state.memory["draft_distribution"].clone()
        judged = every_q.clone() if self.stop is not None else every_q  # what the rule is shown
        for slot in range(state.width - 1):
            rows = rows[state.slots(rows) - 1 > slot]
            if not len(rows):
                break
            index = torch.as_tensor(rows, device=drafts.device)
            stop = state.committed[rows] + slot
            spans = Spans(rows, drafts[index], own.fed[rows], stop, stop - 1, 1)
            calls = state.calls(own.store, own.model.pads, spans)
            positions = torch.as_tensor(stop, device=drafts.device).unsqueeze(1)
            logits = read(state, calls)
            before = torch.nn.functional.pad(drafts[index, :slot], (1, 0))
            logits = that_fit(state, logits, rows, torch.arange(-1, slot).unsqueeze(0), before, [slot])
            q = checked(own, rows, state.distribution(logits, rows, positions))
            drafts[index, slot] = draw(q, state.uniform(rows, positions, 1, DRAFT_STREAM).squeeze(-1)).squeeze(1)
            every_q[index, slot] = q.squeeze(1).to(every_q.dtype)
            own.fed[rows] = stop
            if self.stop is not None:
                judged[index, slot] = softened(state).distribution(logits, rows, positions).squeeze(1).to(judged.dtype)
                state.drafted[rows] = slot + 1
                rows = rows[~ends(self.stop, judged[index, : slot + 1], drafts[index, : slot + 1])]
        state.memory["drafts"], state.memory["draft_distribution"] = drafts, every_q
        state.memory["draft_source"] = torch.arange(state.width, device=drafts.device).expand(state.batch, -1)

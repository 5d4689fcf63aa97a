"""Drafts of a whole window in one forward of the drafter, each of which depends on the draft before it (DFlash 2,
DSpark): the forward makes the states of all rows, and small matrices go from one token to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.family_queries import CausalQuery
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.base import DRAFT_STREAM, read_logits
from paradec.samplers.causal.drafts.block import DraftBlock
from paradec.samplers.causal.drafts.source import checked, drafting_of, that_fit
from paradec.samplers.causal.state import CausalState


@dataclass(frozen=True)
class DraftWalk(DraftBlock):
    """A window that is drawn from left to right over what one forward of the drafter made."""

    def _drawn(
        self, state: CausalState, rows: np.ndarray, positions: Tensor, found: Tensor, query: CausalQuery
    ) -> tuple[Tensor, Tensor]:
        own, device = drafting_of(state), found.device
        drafter: Any = own.model
        last = torch.as_tensor(state.committed[rows] - 1 + state.shift[0, rows], device=device)
        token = state.context[torch.as_tensor(rows, device=device), last]
        uniform = state.uniform(rows, positions, 1, DRAFT_STREAM)
        drafts, every_q = [], []
        with torch.no_grad():
            walk = drafter.walk(found, lambda parts: read_logits(state, [parts], [query]), state.allowed)
            for slot in range(positions.shape[1]):
                at = positions[:, slot : slot + 1]
                q = state.distribution(that_fit(state, walk.logits(slot, token).unsqueeze(1), rows), rows, at)
                token = _drawn_from(q, None if state.prescribes else walk.candidates_of(slot), uniform[:, slot])
                drafts.append(token)
                every_q.append(q)
        return torch.stack(drafts, 1), checked(own, rows, torch.cat(every_q, 1))


def _drawn_from(q: Tensor, candidates: Tensor | None, uniform: Tensor) -> Tensor:
    """[R]: a token of q [R, 1, V] by uniform [R, 1], in the order of candidates [R, K] outside of which q is 0 (None:
    of the vocabulary), as the public codes draw it."""
    if candidates is None:
        return draw(q, uniform).squeeze(1)
    at = draw(q.squeeze(1).gather(1, candidates).unsqueeze(1), uniform)
    return candidates.gather(1, at).squeeze(1)

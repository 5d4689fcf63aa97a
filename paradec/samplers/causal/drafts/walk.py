"""Drafts of a whole window in one forward of the drafter, each of which depends on the draft before it (DFlash 2,
DSpark): the forward makes the states of all rows, and small matrices go from one token to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.family_queries import CausalQuery
from paradec.samplers.causal.base import read_logits
from paradec.samplers.causal.drafts.block import DraftBlock, in_turn
from paradec.samplers.causal.drafts.source import drafting_of
from paradec.samplers.causal.state import CausalState


@dataclass(frozen=True)
class DraftWalk(DraftBlock):
    """A window that is drawn from left to right over what one forward of the drafter made."""

    def _drawn(
        self, state: CausalState, rows: np.ndarray, positions: Tensor, found: Tensor, query: CausalQuery
    ) -> tuple[Tensor, Tensor]:
        drafter: Any = drafting_of(state).model
        sure: list[Tensor] = []
        with torch.no_grad():
            walk = drafter.walk(found, lambda parts: read_logits(state, [parts], [query]), state.allowed)

            def logits(slot: int, before: Tensor) -> Tensor:
                if "confidence" in state.memory:
                    sure.append(walk.confidence(slot, before).sigmoid())
                return walk.logits(slot, before)

            drawn = in_turn(state, rows, positions, logits, walk.candidates_of)
        if sure:
            state.memory.write("confidence", rows, torch.nn.functional.pad(torch.stack(sure, 1), (0, 1)))
        return drawn

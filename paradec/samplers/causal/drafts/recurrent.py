"""A chain of drafts from the model's hidden states (EAGLE, arXiv 2401.15077): the drafter reads what it made of the
token before."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradec.samplers.causal.drafts.static_tree import StaticTree
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import RULES, tree_of


@dataclass(frozen=True)
class RecurrentChain:
    """A tree with one child everywhere, whose node i is slot i - 1 of a chain."""

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """See `DraftSource.fill`."""
        StaticTree(tree_of((1,) * (state.width - 1)), RULES["recursive"]).fill(state, rows, features)
        drafts = state.memory["drafts"]
        state.memory["drafts"] = drafts.roll(-1, 1).clamp(min=0)  # nothing is drafted for the last
        state.memory["draft_source"] = torch.arange(state.width, device=drafts.device).expand(state.batch, -1)

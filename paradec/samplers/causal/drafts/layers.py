"""A chain of drafts of several layers, each of which makes one (MTP, arXiv 2412.19437).

The first layer reads the final tokens beside the model's hidden states; the next one reads what that made of the same
columns beside the tokens one further to the right, its draft at the end. So a later layer's last columns hold drafts:
these columns, as many as there are layers after the first, are read again when the tokens are final.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.query import Cost
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.base import DRAFT_STREAM, read_logits
from paradec.samplers.causal.drafts.source import checked, drafting_of, that_fit, unread
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.tree_query import tree_query
from paradec.samplers.causal.trees import tree_of

ROOT = tree_of((1,)).layout


@dataclass(frozen=True)
class DraftLayers:
    """One token of each layer."""

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """See `DraftSource.fill`."""
        own, device = drafting_of(state), state.context.device
        drafter: Any = own.model
        assert features is not None  # such drafters read them
        again = drafter.reads_again
        goes_on, last = unread(state, rows, True)
        drafts, every_q = (state.memory.read(rows)[name].clone() for name in ("drafts", "draft_distribution"))
        query = tree_query(state, own.store, rows, ROOT, drafts, np.maximum(goes_on - again, 1), 0, np.zeros(1, int))
        states = self._beside(state, query, torch.as_tensor(goes_on.reshape(-1, 1), device=device), features)
        positions = state.positions(rows)[:, :-1]
        uniform = state.uniform(rows, positions, 1, DRAFT_STREAM)
        for slot in range(positions.shape[1]):
            with torch.no_grad():
                logits, states = drafter(query, states, own.store, slot)
            logits = read_logits(state, [logits], [query])
            before = torch.nn.functional.pad(drafts[:, :slot], (1, 0))
            logits = that_fit(state, logits, rows, torch.arange(-1, slot).unsqueeze(0), before, [slot])
            q = checked(own, rows, state.distribution(logits, rows, positions[:, slot : slot + 1]))
            token = draw(q, uniform[:, slot])
            drafts[:, slot : slot + 1], every_q[:, slot : slot + 1] = token, q.to(every_q.dtype)
            query = query.but(tokens=torch.cat((query.tokens[:, 1:], token.repeat(state.branches, 1)), 1))
        own.nfe += Cost([query], state.batch).nfe  # all layers once
        own.fed[rows] = state.committed[rows]
        state.memory.write("drafts", rows, drafts)
        state.memory.write("draft_distribution", rows, every_q)
        state.memory.write("draft_source", rows, torch.arange(state.width, device=device).expand(len(rows), -1))

    def _beside(self, state: CausalState, query: Any, goes_on: Tensor, features: Tensor) -> Tensor:
        """[branches * R, Q, D]: the hidden states left of the query's columns, of which those of the last columns are
        kept for the next time.

        Args:
            goes_on: [branches * R, 1]: the position of the first token that was never read; `features` begin left of
                it.
        """
        own, at = drafting_of(state), query.store.rows
        assert own.features is not None  # `DraftingSampler._first_drafts` has made them
        again = own.features.shape[1]
        known = torch.cat((own.features[at], features), 1)
        place = (query.positions - goes_on + again).clamp(0, known.shape[1] - 1)
        found = known.take_along_dim(place.unsqueeze(-1), 1)
        own.features = own.features.index_copy(0, at, torch.nn.functional.pad(found, (0, 0, again, 0))[:, -again:])
        return found

"""Chains of drafts: of a smaller model, one forward of it a token, or of several layers, each of which makes one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.query import Cost
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.drafts.source import checked, read, softened, that_fit, unread
from paradec.samplers.causal.drafts.stopping import StopRule, ends
from paradec.samplers.causal.state import DRAFT_STREAM, CausalState, Spans, read_logits
from paradec.samplers.causal.trees import tree_of, tree_query

ROOT = tree_of((1,)).layout


@dataclass(frozen=True)
class DraftChain:
    """One token after the other, each row as many as it has slots for, or up to where `stop` ends its window."""

    stop: StopRule | None = None

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """See `DraftSource.fill`."""
        own = state.drafting
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


@dataclass(frozen=True)
class DraftLayers:
    """One token of each of several layers (MTP, arXiv 2412.19437).

    The first layer reads the final tokens beside the model's hidden states; the next one reads what that made of the
    same columns beside the tokens one further to the right, its draft at the end. So a later layer's last columns hold
    drafts: these columns, as many as there are layers after the first, are read again when the tokens are final.
    """

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """See `DraftSource.fill`."""
        own, device = state.drafting, state.context.device
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
        own, at = state.drafting, query.store.rows
        assert own.features is not None  # `DraftingSampler.open` has made them
        again = own.features.shape[1]
        known = torch.cat((own.features[at], features), 1)
        place = (query.positions - goes_on + again).clamp(0, known.shape[1] - 1)
        found = known.take_along_dim(place.unsqueeze(-1), 1)
        own.features = own.features.index_copy(0, at, torch.nn.functional.pad(found, (0, 0, again, 0))[:, -again:])
        return found

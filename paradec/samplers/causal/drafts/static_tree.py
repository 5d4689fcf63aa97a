"""A tree of drafts whose shape is fixed: all children of one depth in one forward of the drafter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradec.samplers.causal.base import DRAFT_STREAM
from paradec.samplers.causal.drafts.source import (
    checked,
    drafting_of,
    drafts_left,
    read_tree,
    softened,
    that_fit,
    unread,
)
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.tree_query import tree_query
from paradec.samplers.causal.trees import Naive, Rule, Tree


@dataclass(frozen=True)
class StaticTree:
    """The children of every node, drawn as `rule` has it, one depth after the other."""

    tree: Tree
    rule: Rule

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """See `DraftSource.fill`."""
        tree, rule = self.tree, self.rule
        own, device = drafting_of(state), state.context.device
        index = torch.as_tensor(rows, device=device)
        depths, children = np.array(tree.depths), tree.children
        drawn_from = softened(state) if isinstance(rule, Naive) else state
        drafts = torch.full((len(rows), tree.size), -1, dtype=torch.int64, device=device)
        every_q = state.memory["draft_distribution"][index]
        begin, last = unread(state, rows, features is not None)
        made = None if features is None else features.new_zeros(len(features), tree.size, features.shape[-1])
        committed = torch.as_tensor(state.committed[rows, None], device=device)
        for depth in range(min(tree.depth, drafts_left(state, rows).max())):
            nodes = np.flatnonzero(depths == depth)
            known = int((depths <= depth).sum()) - 1  # drafts that there are, all in front
            query = tree_query(state, own.store, rows, tree.layout, drafts, begin, known, nodes)
            logits, out = read_tree(state, query, known, last - begin, features, made)
            logits = that_fit(state, logits, rows, tree.layout.parents, drafts, nodes)
            q = drawn_from.distribution(logits, rows, (committed + depth).expand(-1, len(nodes)))
            q = checked(own, rows, q)
            every_q[:, nodes] = q.to(every_q.dtype)
            counts = (children[nodes] >= 0).sum(1)
            most = int(counts.max())
            noise = state.uniform(rows, committed + depth, len(nodes) * most, DRAFT_STREAM).reshape(-1, most)
            drawn = rule.children(q.flatten(0, 1), most, noise).unflatten(0, (len(rows), len(nodes)))
            for at, node in enumerate(nodes):
                below = children[node][: counts[at]].to(device)
                drafts[:, below] = drawn[:, at, : counts[at]]
                if made is not None and out is not None:
                    made[:, below] = out[:, at : at + 1]
            own.fed[rows], begin = state.committed[rows], last
        state.memory.write("drafts", rows, drafts)
        state.memory.write("draft_distribution", rows, every_q)

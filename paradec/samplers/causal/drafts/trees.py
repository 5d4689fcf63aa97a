"""Trees of drafts, all nodes of one depth in one forward of the drafter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paradec.samplers.causal.drafts.source import (
    checked,
    drafts_left,
    read_tree,
    softened,
    that_fit,
    unread,
)
from paradec.samplers.causal.state import DRAFT_STREAM, CausalState
from paradec.samplers.causal.trees import RULES, DynamicTree, Naive, Rule, Tree, TreeLayout, tree_of, tree_query


@dataclass(frozen=True)
class StaticTree:
    """A tree of one shape: the children of every node, drawn as `rule` has it, one depth after the other."""

    tree: Tree
    rule: Rule

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """See `DraftSource.fill`."""
        tree, rule = self.tree, self.rule
        own, device = state.drafting, state.context.device
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


@dataclass(frozen=True)
class RecurrentChain:
    """A tree with one child everywhere, whose node i is slot i - 1 of a chain (EAGLE, arXiv 2401.15077)."""

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """See `DraftSource.fill`."""
        StaticTree(tree_of((1,) * (state.width - 1)), RULES["recursive"]).fill(state, rows, features)
        drafts = state.memory["drafts"]
        state.memory["drafts"] = drafts.roll(-1, 1).clamp(min=0)  # nothing is drafted for the last
        state.memory["draft_source"] = torch.arange(state.width, device=drafts.device).expand(state.batch, -1)


@dataclass(frozen=True)
class GrownTree:
    """The nodes of highest probability under the drafter, as `DynamicTree` has it (EAGLE-2, arXiv 2406.16858)."""

    tree: DynamicTree

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None) -> None:
        """See `DraftSource.fill`."""
        tree, own, device = self.tree, state.drafting, state.context.device
        top = min(tree.top_k, state.facts.vocab_size)
        soft = softened(state)
        committed = torch.as_tensor(state.committed[rows, None], device=device)
        begin, last = unread(state, rows, features is not None)
        root = torch.full_like(committed, -1)
        # what the drafter reads: the root, then `top` nodes of each level; their places are among all that it named
        parents, tokens, place, score = root, root, torch.zeros_like(root), torch.zeros(root.shape, device=device)
        made = None if features is None else features.new_zeros(len(features), 1, features.shape[-1])
        left = drafts_left(state, rows)
        limit = torch.as_tensor(left, device=device).unsqueeze(1)  # what a row names does not depend on its neighbours
        wanted = np.arange(1)
        named: list[tuple[Tensor, Tensor, Tensor]] = []
        for level in range(min(tree.depth, left.max())):
            known = tokens.shape[1] - 1
            layout = TreeLayout(parents, level, top)
            query = tree_query(state, own.store, rows, layout, tokens, begin, known, wanted)
            logits, out = read_tree(state, query, known, last - begin, features, made)
            logits = that_fit(state, logits, rows, parents, tokens, wanted)
            q = checked(own, rows, soft.distribution(logits, rows, (committed + level).expand(-1, len(wanted))))
            best = q.topk(top, -1)
            total = (score.unsqueeze(-1) + best.values.log()).flatten(1).masked_fill(limit <= level, -torch.inf)
            first = 1 + sum(part.shape[1] for part, *_ in named)
            named.append((best.indices.flatten(1), total, place[:, wanted].repeat_interleave(top, 1)))
            score, at = total.topk(top, -1)
            above = torch.as_tensor(wanted, device=device)[at // top]
            parents, place = torch.cat((parents, above), 1), torch.cat((place, first + at), 1)
            tokens = torch.cat((tokens, named[-1][0].gather(1, at)), 1)
            if made is not None and out is not None:
                source = (at // top).repeat(state.branches, 1).unsqueeze(-1)
                made = torch.cat((made, out.take_along_dim(source, 1)), 1)
            wanted = np.arange(known + 1, known + 1 + top)
            own.fed[rows], begin = state.committed[rows], last
        tokens, score, place = (torch.cat(part, 1) for part in zip(*named, strict=True))
        # a parent is as likely as its child or likelier, and named before it: it is kept too
        kept = score.sort(dim=1, descending=True, stable=True).indices[:, : tree.size - 1].sort(1).values
        drafts = tokens.gather(1, kept).masked_fill(score.gather(1, kept).isinf(), -1)
        above = torch.searchsorted(torch.cat((torch.zeros_like(root), kept + 1), 1), place.gather(1, kept))
        count = 1 + kept.shape[1]
        every = torch.full((len(rows), tree.size), -1, dtype=torch.int64, device=device)
        every[:, 1:count] = drafts
        state.memory.write("drafts", rows, every)
        index = torch.as_tensor(rows, device=device)
        assert own.parents is not None  # `DraftingSampler.open` has made them
        own.parents = own.parents.clone()
        own.parents[index, 1:count] = above

"""Further drafts beside a window: branches of a tree whose chain is the window's, evaluated in the same forward.

The n-grams of a pool (`pool.py`) and siblings of drafts (`siblings.py`) are such branches. Node 0 of the tree is the
last final token, nodes 1 to W - 1 are the window's drafts, and the branches come after these. A step goes on with one
path of the tree, which its method chooses; from there on it is a window as any other.

`R` rows, `W` slots, `N` nodes, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.family_queries import CausalQuery
from paradec.core.protocol import Proposal
from paradec.samplers.causal.base import proposed, read_logits
from paradec.samplers.causal.chain import ChainSampler
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.tree_query import tree_query
from paradec.samplers.causal.trees import TreeLayout
from paradec.samplers.causal.verification import DraftWindow, probability


@dataclass
class Path:
    """What a step goes on with."""

    node: Tensor
    """[R, W] int64: the node whose distribution is each slot's."""
    p: Tensor
    """[R, W, V]: these distributions."""
    fresh: Tensor
    """[R, W] int64: a token drawn from each."""
    drafts: Tensor
    """[R, W] int64: the draft that each slot verifies, -1 where there is none and the slot takes its fresh token."""
    uniform: Tensor
    """[R, W, 2] float64: the numbers that verify each draft, and resample a rejected one; 0 accepts what the tree's
    verification has accepted."""
    quantities: dict[str, Tensor] = field(default_factory=dict)
    """What else the commit needs."""


@dataclass(frozen=True)
class BranchedChain(ChainSampler):
    """Base of the methods whose window may have branches. A subclass says which (`_tree`, `_nodes`), and which path of
    them a step goes on with (`_path`)."""

    def _tree(self, state: CausalState) -> TreeLayout | None:
        """The window's chain and the branches; None where there are none."""
        raise NotImplementedError

    def _nodes(self, state: CausalState, tree: TreeLayout) -> Tensor:
        """[R, N] int64: the running rows' drafts, -1 where a node has none and at the root."""
        raise NotImplementedError

    def _path(self, state: CausalState, tree: TreeLayout, nodes: Tensor, p: Tensor, positions: Tensor) -> Path:
        """The path of nodes [R, N] that the step goes on with, of p [R, N, V] at positions [R, N]."""
        raise NotImplementedError

    def _check_branches(self, name: str, model: Any) -> None:
        """Raise ValueError for a setting that needs branches, on a model whose queries cannot hold them."""
        if not (model.supports_store and model.supports_visibility):
            raise ValueError(
                f"{name}={getattr(self, name)} needs a model that runs over a store; {model.facts.name} does not"
            )

    def query(self, state: CausalState) -> list[CausalQuery]:
        """As `ChainSampler.query`; with branches these are beside the window, and the store takes final tokens
        alone."""
        if (tree := self._tree(state)) is None:
            return super().query(state)
        rows = state.rows
        # what the last step made final was evaluated as a draft, which the store did not take
        held = np.where(state.row_step[rows] > 0, state.committed[rows] - state.last_accepted[rows], state.reused[rows])
        begin = np.where(held > 0, held + state.shift[:, rows], 0)
        wanted = np.arange(tree.parents.shape[1])
        nodes = self._real_nodes(state, tree)
        return [tree_query(state, state.store, rows, tree, nodes, begin, len(wanted) - 1, wanted)]

    def _real_nodes(self, state: CausalState, tree: TreeLayout) -> Tensor:
        """`_nodes`, without those that no token comes after before the row's end."""
        rows, nodes = state.rows, self._nodes(state, tree)
        left = torch.as_tensor(state.end[rows, None] - state.committed[rows, None], device=nodes.device)
        return nodes.masked_fill(tree.depths.to(nodes.device) >= left, -1)

    def propose(self, state: CausalState, outputs: list[Tensor], queries: list[CausalQuery]) -> Proposal:
        """As `ChainSampler.propose`, of the path that the step goes on with; "drafts" [R, W] of it among the
        quantities."""
        if (tree := self._tree(state)) is None:
            return super().propose(state, outputs, queries)
        rows, logits, nodes = state.rows, read_logits(state, outputs, queries), self._real_nodes(state, tree)
        positions = torch.as_tensor(state.committed[rows, None], device=nodes.device) + tree.depths.to(nodes.device)
        guided = logits
        if state.masks is not None:
            logits = state.masks.of_nodes(state, logits, rows, tree.parents, nodes)
        p = state.distribution(logits, rows, positions)
        path, own = self._path(state, tree, nodes, p, positions), positions[:, : state.width]
        quantities = {"p": path.p, "uniform": path.uniform, "top_logit": logits.amax(-1), "drafts": path.drafts}
        if state.logprobs is not None:
            said = logits.take_along_dim(path.node.unsqueeze(-1), 1)
            quantities["log_p"] = state.log_distribution(path.p, said, rows, own)
        if state.rollout is not None:
            quantities["logits"] = guided.take_along_dim(path.node.unsqueeze(-1), 1)
        slots = torch.as_tensor(self._evaluated(state)[:, None], device=p.device)
        available = torch.arange(state.width, device=p.device) < slots
        scores = probability(path.p, path.fresh)
        return proposed(state, queries, path.fresh, own, scores, available, quantities | path.quantities)

    def _drafted(self, state: CausalState, proposal: Proposal) -> Tensor:
        found = super()._drafted(state, proposal)
        return found & (proposal.quantities["drafts"] >= 0) if "drafts" in proposal.quantities else found

    def _window(self, state: CausalState, proposal: Proposal) -> DraftWindow:
        window = super()._window(state, proposal)
        if "drafts" in proposal.quantities:
            window.drafts.tokens = proposal.quantities["drafts"].clamp(min=0)
        return window

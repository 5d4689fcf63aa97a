"""Siblings of the next drafts: SJD-PAC's proactive drafting (arXiv 2603.18599).

The token after the last accepted draft changes the distributions of the slots after it, so the next window's first
drafts are rejected most often. Therefore each of its first `branching` slots has `siblings` distinct drafts, the same
below every parent. Later slots have drafts only below the path of first siblings. The tree takes one forward.

- "maximal": the first sibling is drawn from the slot's q, each other sibling from q without the siblings before it.
  The rule "without_replacement" of `paradec.samplers.causal.trees` verifies them. Later slots are verified as a window.
- "gumbel": a slot's token is argmax(log p + g), where g is the noise of its position. The siblings are the tokens of
  largest log q + g. Drafts below a sibling are verified only if the slot's token is this sibling.

Both couplings are exact; the paper's public code is not (docs/fidelity.md).

`R` rows, `W` slots, `K` siblings, `B` slots with siblings, `N` nodes, `V` tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_choice, check_int
from paradec.core.memory import MemorySpec
from paradec.samplers.causal.state import DRAFT_STREAM, CausalState
from paradec.samplers.causal.trees import MAX_NODES, RULES, Tree, TreeLayout, parse_tree, walk
from paradec.samplers.causal.window import Path, check_branches, draw_tokens, draw_uniform, read_drafts
from paradec.samplers.distributions import safe_log, select_slots

COUPLINGS = ("gumbel", "maximal")
RULE = RULES["without_replacement"]


@dataclass(frozen=True)
class SiblingTree:
    """A window's chain with siblings in its first slots."""

    top: Tree
    """Tree of depth B with the siblings: K children below every node."""
    node_index: Tensor
    """[n] int64: index in `layout` of each of the n nodes of `top`."""
    layout: TreeLayout
    """Layout of all nodes: the root, the chain of W - 1 drafts, then the other nodes of `top` in their order."""


@lru_cache(maxsize=64)
def make_sibling_tree(width: int, siblings: int, branching: int) -> SiblingTree:
    """Make the tree for a window of `width` slots; width must exceed `branching`."""
    top = parse_tree((siblings,) * branching)
    node_index = [0]
    for path in top.paths:
        next_node = 1 + max(width - 1, *node_index)
        node_index.append(next_node if any(path) else len(path))
    node_of = dict(zip(((), *top.paths), node_index, strict=True))
    parents = [*range(-1, width - 1), *(node_of[path[:-1]] for path in top.paths if any(path))]
    return SiblingTree(top, torch.tensor(node_index), TreeLayout(torch.tensor([parents]), width - 1, siblings))


@dataclass(frozen=True)
class Siblings:
    """Siblings as branches of a window (`paradec.samplers.causal.window.Branches`).

    Args:
        siblings: number of drafts of each of the first slots. With 1, or at temperature 0, only the window is drafted.
        branching: number of first slots that have siblings, up to the whole window. The number of their nodes (siblings
            + siblings**2 + ... + siblings**branching) is at most 255.
        refresh: the coupling, "gumbel" or "maximal".
    """

    siblings: int
    branching: int
    refresh: str

    def __post_init__(self) -> None:
        check_choice("refresh", self.refresh, COUPLINGS)
        check_int("siblings", self.siblings, low=1, high=MAX_NODES - 1)
        check_int("branching", self.branching, low=1, high=MAX_NODES - 1)
        if self.siblings > 1:
            nodes = sum(self.siblings**depth for depth in range(1, min(self.branching, 8) + 1))
            if nodes >= MAX_NODES:
                raise ValueError(
                    f"branching={self.branching} slots of siblings={self.siblings} make more than {MAX_NODES - 1} "
                    "nodes; give fewer of either"
                )

    def check_model(self, model: Any) -> None:
        if getattr(model, "any_order", False):
            raise ValueError(
                f"siblings={self.siblings} needs decoding from left to right; for {model.facts.name}, of any order, "
                "leave it at 1"
            )
        check_branches("siblings", self.siblings, model)

    def memory(self) -> dict[str, MemorySpec]:
        return {"siblings": MemorySpec((self.branching, self.siblings - 1), torch.int64, -1, reset="sequence")}

    def tree(self, state: CausalState) -> SiblingTree | None:
        """The window's chain with siblings; None without siblings."""
        branching = min(self.branching, state.width - 1)
        if branching < 1 or state.request.temperature == 0:
            return None
        return make_sibling_tree(state.width, self.siblings, branching)

    def layout(self, state: CausalState) -> TreeLayout | None:
        return None if (tree := self.tree(state)) is None else tree.layout

    def nodes(self, state: CausalState, tree: TreeLayout) -> Tensor:
        memory, siblings = state.memory.read(state.rows), self.tree(state)
        assert siblings is not None
        drafts, depth = memory["drafts"], siblings.top.depth
        slot_drafts = torch.cat((drafts[:, :depth, None], memory["siblings"][:, :depth]), 2)
        sibling_nodes = [(len(path) - 1, path[-1]) for path in siblings.top.paths if any(path)]
        slot, child = torch.tensor(sibling_nodes, device=drafts.device).T
        return torch.cat((torch.full_like(drafts[:, :1], -1), drafts[:, :-1], slot_drafts[:, slot, child]), 1)

    # ---- verification ---------------------------------------------------------------------------------------------

    def select_path(self, state: CausalState, tree: TreeLayout, nodes: Tensor, p: Tensor, positions: Tensor) -> Path:
        """Select the path: the accepted siblings, then first siblings; from slot B on, the chain."""
        siblings = self.tree(state)
        assert siblings is not None
        positions = positions[:, : state.width]
        uniform, guesses = draw_uniform(state, positions, True)
        walk_siblings = self._verify_siblings if self.refresh == "maximal" else self._match_siblings
        path = walk_siblings(state, siblings, nodes, p, positions, uniform)
        path.quantities |= guesses
        return path

    def _verify_siblings(
        self, state: CausalState, tree: SiblingTree, nodes: Tensor, p: Tensor, positions: Tensor, uniform: Tensor
    ) -> Path:
        rows, depth, node_index = state.rows, tree.top.depth, tree.node_index.to(p.device)
        window = read_drafts(state, rows)
        slot = torch.arange(depth, device=p.device).expand(len(rows), -1)
        slot_of_node = torch.tensor(tree.top.depths, device=p.device).clamp(max=depth - 1)
        # per slot: u of each sibling, then the number that draws a token if no sibling is accepted
        sibling_uniform = state.uniform(rows, positions[:, : depth + 1], 2 + self.siblings, rng.TOKEN_STREAM)[..., 3:]
        walk_uniform = torch.cat((uniform[:, : depth + 1, 1:2], sibling_uniform, uniform[:, : depth + 1, 2:]), 2)
        result = walk(
            tree.top,
            nodes[:, node_index],
            p[:, node_index],
            window.distributions(slot)[:, slot_of_node],
            RULE,
            walk_uniform,
            accepts_matching_draw=False,
        )
        path, reaches_chain = follow_path(tree, result.nodes, result.accepted)
        path_p = p.take_along_dim(path.unsqueeze(-1), 1)
        sampled = draw_tokens(state, path_p, positions, uniform[..., 0])
        column = torch.arange(state.width, device=p.device)
        is_last = (column == result.accepted.unsqueeze(1)) & ~reaches_chain.unsqueeze(1)
        is_accepted = column < result.accepted.unsqueeze(1)
        tokens = torch.nn.functional.pad(result.tokens, (0, state.width - depth - 1))
        drafts = torch.where(is_accepted, tokens, window.tokens).masked_fill(is_last, -1)
        sampled = torch.where(is_last, tokens, sampled)
        return Path(path, path_p, sampled, drafts, uniform[..., 1:].masked_fill(is_accepted.unsqueeze(-1), 0))

    def _match_siblings(
        self, state: CausalState, tree: SiblingTree, nodes: Tensor, p: Tensor, positions: Tensor, uniform: Tensor
    ) -> Path:
        device, top = p.device, tree.top
        children, node_index = top.children.to(device), tree.node_index.to(device)
        row, tree_drafts = torch.arange(len(p), device=device), nodes[:, node_index]
        node, active = torch.zeros_like(row), torch.ones_like(row, dtype=torch.bool)
        reached, hits = [node], []
        for depth in range(top.depth):
            node_p = p[row, node_index[node]].unsqueeze(1)
            token = draw_tokens(state, node_p, positions[:, depth : depth + 1], uniform[:, depth : depth + 1, 0])
            matches = tree_drafts.gather(1, children[node]) == token
            active = active & matches.any(1)
            hits.append(active)
            node = torch.where(active, children[node].gather(1, matches.int().argmax(1, keepdim=True)).squeeze(1), -1)
            reached.append(node)
            node = node.clamp(min=0)
        accepted = torch.stack(hits, 1).sum(1)
        path, reaches_chain = follow_path(tree, torch.stack(reached, 1), accepted)
        path_p = p.take_along_dim(path.unsqueeze(-1), 1)
        sampled = draw_tokens(state, path_p, positions, uniform[..., 0])
        # a draft of the chain is accepted if it equals the draw
        is_correct = state.memory.read(state.rows)["drafts"] == sampled
        is_correct[:, : top.depth] = torch.stack(hits, 1)
        is_correct[:, top.depth :] &= reaches_chain.unsqueeze(1)
        drafts = torch.where(is_correct.long().cumprod(1).bool(), sampled, -1)
        return Path(path, path_p, sampled, drafts, torch.zeros_like(uniform[..., 1:]))  # 0 always accepts

    # ---- the next siblings ----------------------------------------------------------------------------------------

    def draft(self, state: CausalState, rows: np.ndarray, quantities: dict[str, Tensor]) -> None:
        if (siblings := self.tree(state)) is None or not len(rows):
            return
        window, depth = read_drafts(state, rows), siblings.top.depth
        positions = state.positions(rows)[:, :depth]
        slot = torch.arange(depth, device=positions.device).expand(len(rows), -1)
        remaining = window.distributions(slot).scatter(-1, window.tokens[:, :depth, None], 0)
        if self.refresh == "gumbel":
            noise = select_slots(state.memory.read(rows)["noise"], positions % state.width)
            largest = (safe_log(remaining) + noise).topk(min(self.siblings - 1, remaining.shape[-1]), -1)
            drafts = largest.indices.masked_fill(largest.values.isinf(), -1)
        else:
            # the first number of each position draws the guess
            uniform = state.uniform(rows, positions, self.siblings, DRAFT_STREAM)[..., 1:]
            drafts = RULE.children(remaining.flatten(0, 1), self.siblings - 1, uniform.flatten(0, 1)).view_as(uniform)
        padding = (0, self.siblings - 1 - drafts.shape[2], 0, self.branching - depth)
        state.memory.write("siblings", rows, torch.nn.functional.pad(drafts, padding, value=-1))


def follow_path(tree: SiblingTree, nodes: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Continue a walk through the first slots along the chain.

    nodes: [R, B + 1] int64: reached nodes of `tree.top`, -1 after the last. accepted: [R] int64.
    Returns the node in `tree.layout` of each slot, [R, W] int64: the reached nodes, then first siblings, and from slot
    B on the chain. Also returns whether the walk ended at the chain's node of slot B, where the chain continues, [R]
    bool."""
    depth, device = tree.top.depth, nodes.device
    children, node_index = tree.top.children.to(device), tree.node_index.to(device)
    node, path = nodes[:, 0], [nodes[:, 0]]
    for slot in range(1, depth):
        node = torch.where(nodes[:, slot] >= 0, nodes[:, slot], children[node, 0])
        path.append(node)
    last_node = torch.where(nodes[:, depth] >= 0, node_index[nodes[:, depth].clamp(min=0)], depth)
    chain = torch.arange(depth + 1, tree.layout.depth + 1, device=device).expand(len(nodes), -1)
    slot_nodes = torch.cat((node_index[torch.stack(path, 1)], last_node.unsqueeze(1), chain), 1)
    return slot_nodes, (accepted == depth) & (last_node == depth)

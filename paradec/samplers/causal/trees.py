"""Verification of several drafts for one position: rules for a node, and the walk down a tree of drafts.

A rule draws the children of a node from the draft distribution q and verifies them against the target distribution p.
`RULES` are exact: the token after a node has the distribution p for any q. They differ in how often this token is one
of the children and the walk continues. Shapes: `R` rows, `N` nodes, `K` children in order of verification, `V` tokens.

- "recursive": independent children, each verified against the residual of those before it (SpecInfer, arXiv
  2305.09781).
- "without_replacement": distinct children, each verified against the distribution it was drawn from (arXiv 2402.14160).
- "k_seq": independent children, all verified against p / rho, with the best rho in [1, K] (SpecTr, arXiv 2310.15141).
- "naive": the K likeliest tokens; a draw from p is a hit if it is one of them.
- "greedy": the K - 1 likeliest tokens and a token drawn from the rest; it accepts most often (arXiv 2502.18779).

"k_seq" suits spread-out distributions (images), "without_replacement" and "greedy" peaked ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int, short_repr, unknown_name
from paradec.core.family_queries import CausalQuery
from paradec.core.query import StoreCall
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.state import CausalState
from paradec.samplers.distributions import probability, residual

if TYPE_CHECKING:
    from paradec.caches.store import KeyValueStore

BISECTIONS = 40
MAX_NODES = 256


class TreeRule(Protocol):
    """Rule that draws and verifies the children of one node."""

    distinct: ClassVar[bool]
    """Whether repeated children are skipped."""

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        """Draw children [R, K] int64 from q [R, V] with uniform [R, K]. A child is -1 if q has no further token."""

    def verify(self, p: Tensor, q: Tensor, drafts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of the accepted child, [R] int64 (-1: none), and weights [R, V] to draw from if it is -1.

        p, q: [R, V], with sum 1. drafts: [R, K] int64, -1: no draft. uniform: [R, K]."""


def normalize(weights: Tensor) -> Tensor:
    """Scale weights [..., V] to sum 1."""
    return weights / weights.sum(-1, keepdim=True)


def remove_tokens(distribution: Tensor, tokens: Tensor) -> Tensor:
    """Set the probability of tokens [R, N] to 0 in a distribution [R, V], without normalising; skip tokens of -1."""
    size = distribution.shape[-1]
    mask = torch.zeros((len(tokens), size + 1), dtype=torch.bool, device=tokens.device)
    mask.scatter_(1, torch.where(tokens < 0, size, tokens), True)
    return distribution.masked_fill(mask[:, :size], 0)


class Sequential:
    """Verify the children one by one until one is accepted."""

    distinct: ClassVar[bool] = False

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the acceptance probability [R] of children x [R], and p and q [R, V] after a rejection."""
        raise NotImplementedError

    def verify(self, p: Tensor, q: Tensor, drafts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        child = torch.full_like(drafts[:, 0], -1)
        for i, x in enumerate(drafts.unbind(1)):
            chance, next_p, next_q = self.step(p, q, x.clamp(min=0))
            is_verified = (child < 0) & (x >= 0)
            child = torch.where(is_verified & (uniform[:, i] < chance), i, child)
            rejected = (is_verified & (child < 0)).unsqueeze(1)
            p, q = torch.where(rejected, next_p, p), torch.where(rejected, next_q, q)
        return child, p


class Recursive(Sequential):
    """Independent children; each is verified against the residual of those before it."""

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        return draw(q.unsqueeze(1).expand(-1, count, -1), uniform)

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return probability(p, x) / probability(q, x), normalize(residual(p, q)), q


class WithoutReplacement(Sequential):
    """Distinct children, each verified against the distribution that it was drawn from."""

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        nodes = []
        for i in range(count):
            x = draw(q, uniform[:, i])
            nodes.append(torch.where((q > 0).any(-1), x, -1))
            q = remove_tokens(q, x.unsqueeze(1))
        return torch.stack(nodes, 1)

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        next_q = remove_tokens(q, x.unsqueeze(1))
        next_q = torch.where((next_q > 0).any(-1, keepdim=True), normalize(next_q), q)
        return probability(p, x) / probability(q, x), normalize(residual(p, q)), next_q


class Naive(Sequential):
    """The likeliest tokens, each accepted with its probability in the remaining p. Together this is one draw from p."""

    distinct = True

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        return q.topk(count, -1).indices

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        next_p = remove_tokens(p, x.unsqueeze(1))
        return probability(p, x), torch.where((next_p > 0).any(-1, keepdim=True), normalize(next_p), p), q


class KSeq:
    """Independent children, verified against fixed distributions: p divided by the rho that accepts most often."""

    distinct: ClassVar[bool] = False
    children = Recursive.children

    def verify(self, p: Tensor, q: Tensor, drafts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        is_draft = drafts >= 0
        count = is_draft.sum(1, keepdim=True).to(p.dtype)
        low, high = torch.ones_like(count), count.clamp(min=1)
        for _ in range(BISECTIONS):  # the smallest rho with 1 - (1 - beta)^K <= rho beta, which holds for rho = K
            middle = (low + high) / 2
            beta = q.minimum(p / middle).sum(-1, keepdim=True)
            is_feasible = 1 - (1 - beta).clamp(min=0) ** count <= middle * beta
            low, high = torch.where(is_feasible, low, middle), torch.where(is_feasible, middle, high)
        x = drafts.clamp(min=0)
        accept = is_draft & (uniform < p.gather(1, x) / (high * q.gather(1, x)))
        child = torch.where(accept.any(1), accept.int().argmax(1), -1)
        overlap = q.minimum(p / high)
        beta = overlap.sum(-1, keepdim=True)
        scale = torch.where(beta > 0, (1 - (1 - beta).clamp(min=0) ** count) / beta, 0)
        return child, normalize(residual(p, overlap * scale))


class Greedy:
    """The likeliest tokens, and one token drawn from the remaining ones. Only the drawn token is verified; after its
    rejection, the new draw may equal one of the likeliest tokens (`accepts_matching_draw` of `walk`)."""

    distinct: ClassVar[bool] = False

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        top_tokens = q.topk(count - 1, -1).indices
        remaining = remove_tokens(q, top_tokens)
        sampled = torch.where((remaining > 0).any(-1), draw(remaining, uniform[:, -1]), -1)
        return torch.cat((top_tokens, sampled.unsqueeze(1)), 1)

    def verify(self, p: Tensor, q: Tensor, drafts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        # the drawn child is the last one that is not -1
        last_column = (drafts >= 0).sum(1, keepdim=True) - 1
        column = torch.arange(drafts.shape[1], device=drafts.device)
        remaining = remove_tokens(q, drafts.masked_fill(column >= last_column, -1))
        total = remaining.sum(-1, keepdim=True)
        is_drawn, index = (last_column >= 0) & (total > 0), last_column.clamp(min=0)
        remaining = torch.where(is_drawn, remaining / total, 0)
        token = drafts.gather(1, index).clamp(min=0)
        chance = p.gather(1, token) / remaining.gather(1, token)
        accept = is_drawn & (uniform.gather(1, index) < chance)
        weights = torch.where(is_drawn, normalize(residual(p, remaining)), p)
        return torch.where(accept, last_column, -1).squeeze(1), weights


RULES: dict[str, TreeRule] = {
    "recursive": Recursive(),
    "without_replacement": WithoutReplacement(),
    "k_seq": KSeq(),
    "naive": Naive(),
    "greedy": Greedy(),
}


def _grow_paths(*counts: str) -> tuple[tuple[int, ...], ...]:
    """Make the paths of a tree. counts: per depth, the number of children of each node, one digit per node."""
    paths: list[tuple[int, ...]] = []
    nodes: list[tuple[int, ...]] = [()]
    for digits in counts:
        nodes = [(*path, i) for path, count in zip(nodes, digits, strict=True) for i in range(int(count))]
        paths += nodes
    return tuple(paths)


TREES: dict[str, tuple[tuple[int, ...], ...]] = {
    "mc_sim_7b_63": tuple(
        tuple(map(int, path))
        for path in "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001".split()
    ),
    "2.2.2": _grow_paths(
        "8", "84321111", "832111112100100101100", "5211100010010000001001100", "311001000010100", "20010000"
    ),
}
"""Published static trees by name: the tree of EAGLE and LANTERN, and the tree of Token Recycling."""


@dataclass(frozen=True)
class Tree:
    """A static tree of drafts. Node 0 is the last final token; the other nodes are sorted by depth, then by path.

    paths: for every node except the root, the indices of the children from the root to the node.
    Raises ValueError for a path whose parent or previous sibling is missing."""

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        paths = sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path))
        if not paths or not paths[0] or len(paths) > MAX_NODES:
            raise ValueError(f"tree={short_repr(self.paths)} must have 1 to {MAX_NODES} paths, none of them empty")
        for path in paths:
            for entry in path:
                check_int("tree", entry, low=0)
            sibling = (*path[:-1], path[-1] - 1)
            if (len(path) > 1 and path[:-1] not in paths) or (path[-1] > 0 and sibling not in paths):
                raise ValueError(
                    f"tree={short_repr(self.paths)} has the path {path} without its parent or previous sibling"
                )
        object.__setattr__(self, "paths", tuple(paths))

    @classmethod
    def from_setting(cls, tree: Any) -> Tree:
        """Make a tree from paths, the number of children per depth (e.g. (2, 2, 1)), or a name of `TREES`. Raises
        ValueError for anything else."""
        if isinstance(tree, str):
            if tree not in TREES:
                raise ValueError(unknown_name("tree", tree, TREES))
            return cls(TREES[tree])
        if not isinstance(tree, Sequence) or len(tree) == 0:
            raise ValueError(f"tree={short_repr(tree)} must be children per depth, e.g. (2, 2, 1), or paths")
        if not all(isinstance(entry, int) for entry in tree):
            if not all(isinstance(entry, Sequence) and not isinstance(entry, str) for entry in tree):
                raise ValueError(f"tree={short_repr(tree)} must be children per depth, e.g. (2, 2, 1), or paths")
            return cls(tuple(map(tuple, tree)))
        nodes: list[tuple[int, ...]] = [()]
        paths: list[tuple[int, ...]] = []
        for count in tree:
            check_int("tree", count, low=1, high=MAX_NODES)
            if len(paths) + len(nodes) * count > MAX_NODES:
                raise ValueError(f"tree={short_repr(tree)} has more than {MAX_NODES} nodes")
            nodes = [(*path, i) for path in nodes for i in range(count)]
            paths += nodes
        return cls(tuple(paths))

    @property
    def size(self) -> int:
        """Number of nodes, including the root."""
        return len(self.paths) + 1

    @cached_property
    def depths(self) -> list[int]:
        """[N]: distance of each node from the root."""
        return [0, *map(len, self.paths)]

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return self.depths[-1]

    @property
    def children(self) -> Tensor:
        """[N, K] int64: every node's children, padded with -1."""
        return self.layout.children[0]

    @cached_property
    def layout(self) -> TreeLayout:
        """The tree as a layout that all rows share."""
        index = {(): 0} | {path: i for i, path in enumerate(self.paths, start=1)}
        parents = torch.tensor([[-1, *(index[path[:-1]] for path in self.paths)]])
        return TreeLayout(parents, self.depth, 1 + max(path[-1] for path in self.paths))


@dataclass(frozen=True)
class TreeLayout:
    """Trees of the rows. Parents precede children; siblings are in the order of verification.

    parents: [R, N] int64, or [1, N] if all rows have the same tree; -1 for the root, node 0.
    depth: depth of the deepest possible node. widest: largest possible number of children of a node."""

    parents: Tensor
    depth: int
    widest: int

    @cached_property
    def ancestors(self) -> Tensor:
        """[R, N, N] bool: whether node i (dim 1) attends to node j (dim 2), which is node i or lies on its path."""
        column = torch.arange(self.parents.shape[1], device=self.parents.device)
        ancestor = column.expand_as(self.parents)
        is_ancestor = torch.zeros((), dtype=torch.bool, device=ancestor.device)
        for _ in range(self.depth + 1):
            is_ancestor = is_ancestor | (ancestor.unsqueeze(-1) == column)
            ancestor = torch.where(ancestor < 0, -1, self.parents.gather(1, ancestor.clamp(min=0)))
        return is_ancestor

    @cached_property
    def depths(self) -> Tensor:
        """[R, N] int64: distance of each node from the root."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def children(self) -> Tensor:
        """[R, N, K] int64: every node's children, padded with -1."""
        rows, size = self.parents.shape
        sibling_index = (self.parents.unsqueeze(-1) == self.parents.unsqueeze(-2)).tril(-1).sum(-1)
        nodes = torch.full((rows, size * self.widest), -1, dtype=torch.int64, device=self.parents.device)
        node = torch.arange(1, size, device=nodes.device).expand(rows, -1)
        return nodes.scatter_(1, (self.parents * self.widest + sibling_index)[:, 1:], node).unflatten(1, (size, -1))


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree, different for every row and step (arXiv 2406.16858, section 4). Each level adds the `top_k`
    likeliest tokens below each of the `top_k` likeliest paths of the level above. Of all these tokens, the `nodes - 1`
    with the likeliest paths are selected. Such drafts are not random, so only the rule "naive" verifies them exactly.

    nodes: number of nodes, including the root (60 for 7B models in the paper).
    depth: number of levels below the root, as in the paper. The public code's depth is smaller by 1.
    top_k: nodes per level, and tokens per node.
    Raises ValueError for a number out of its range, or more nodes than candidates."""

    nodes: int = 60
    depth: int = 6
    top_k: int = 10

    def __post_init__(self) -> None:
        check_int("nodes", self.nodes, low=2, high=MAX_NODES)
        check_int("depth", self.depth, low=1)
        check_int("top_k", self.top_k, low=1)
        max_candidates = self.top_k + (self.depth - 1) * self.top_k**2
        if self.nodes - 1 > max_candidates:
            raise ValueError(
                f"nodes={self.nodes} must be at most {max_candidates + 1}, the candidates of depth={self.depth} and "
                f"top_k={self.top_k} and the root"
            )

    def to_dict(self) -> dict[str, int]:
        return {"nodes": self.nodes, "depth": self.depth, "top_k": self.top_k}


def to_tuples(tree: Any) -> Any:
    """Convert the lists of a static tree (from JSON) to tuples."""
    return tree if isinstance(tree, str) else tuple(n if isinstance(n, int) else tuple(n) for n in tree)


@lru_cache(maxsize=64)
def parse_tree(tree: str | tuple[int, ...] | tuple[tuple[int, ...], ...]) -> Tree:
    """`Tree.from_setting`, cached."""
    return Tree.from_setting(tree)


@dataclass
class Walk:
    """Result of a tree's verification, for `R` rows and a tree of depth `D`."""

    nodes: Tensor
    """[R, D + 1] int64: the node reached at each depth, root first; -1 after the last node."""
    tokens: Tensor
    """[R, D + 1] int64: the tokens that become final: `accepted` children, then one more; -1 after these."""
    accepted: Tensor
    """[R] int64."""
    weights: Tensor
    """[R, V]: weights that the last token was drawn from; not normalised."""
    scores: Tensor
    """[R, D + 1]: the tokens' target probabilities; after the last token, a finite filler."""


def walk(
    tree: Tree | TreeLayout,
    drafts: Tensor,
    p: Tensor | Callable[[Tensor], Tensor],
    q: Tensor,
    rule: TreeRule,
    uniform: Tensor,
    accepts_matching_draw: bool = True,
) -> Walk:
    """Verify a tree of drafts from the root down.

    drafts: [R, N] int64: the nodes' tokens; -1: no draft.
    p: [R, N, V]: the target distribution after each node; or a function that returns it for the reached nodes [R].
    q: [R, N, V]: the draft distribution after each node.
    uniform: [R, D + 1, K + 1]: per depth, a number for each child, and a number for the draw if no child is accepted.
    accepts_matching_draw: whether the walk continues at a child that equals this draw; exact for `RULES`."""
    rows, device = len(drafts), drafts.device
    layout = tree.layout if isinstance(tree, Tree) else tree
    children = layout.children.to(device).expand(rows, -1, -1)
    node = torch.zeros(rows, dtype=torch.int64, device=device)
    active = torch.ones(rows, dtype=torch.bool, device=device)
    nodes, tokens, scores = [node], [], []
    row, no_node = torch.arange(rows, device=device), torch.full_like(node, -1)

    def target(nodes: Tensor) -> Tensor:
        return p[row, nodes] if isinstance(p, Tensor) else p(nodes)

    weights = root = target(node)
    accepted = torch.zeros_like(node)
    for depth in range(tree.depth + 1):
        if active.is_cpu and not active.any():
            nodes.append(no_node)
            tokens.append(no_node)
            scores.append(root[:, 0])
            continue
        child_nodes = children[row, node]
        candidates = torch.where(child_nodes >= 0, drafts.gather(1, child_nodes.clamp(min=0)), -1)
        if rule.distinct:
            is_repeated = (candidates.unsqueeze(2) == candidates.unsqueeze(1)).tril(-1).any(-1)
            candidates = candidates.masked_fill(is_repeated, -1)
        node_p = target(node) if depth else root
        child, remaining = rule.verify(node_p, q[row, node], candidates, uniform[:, depth, :-1])
        remaining = torch.where((candidates >= 0).any(1, keepdim=True), remaining, node_p)
        token = draw(remaining, uniform[:, depth, -1])
        if accepts_matching_draw:
            matches = candidates == token.unsqueeze(1)
            child = torch.where((child < 0) & matches.any(1), matches.int().argmax(1), child)
        accept = child >= 0
        child_column = child.clamp(min=0).unsqueeze(1)
        token = torch.where(accept, candidates.gather(1, child_column).squeeze(1), token)
        tokens.append(torch.where(active, token, -1))
        scores.append(torch.where(active, probability(node_p, token), root[:, 0]))
        weights = torch.where(active.unsqueeze(1), remaining, weights)
        active = active & accept
        accepted = accepted + active.long()
        node = torch.where(active, child_nodes.gather(1, child_column).squeeze(1), node)
        nodes.append(torch.where(active, node, -1))
    return Walk(torch.stack(nodes[:-1], 1), torch.stack(tokens, 1), accepted, weights, torch.stack(scores, 1))


def drop_nodes_past_end(state: CausalState, tree: TreeLayout, nodes: Tensor) -> Tensor:
    """Set nodes [R, N] of the running rows to -1 if no position remains after them before the row's end."""
    remaining = torch.as_tensor((state.end - state.committed)[state.rows, None], device=nodes.device)
    return nodes.masked_fill(tree.depths.to(nodes.device) >= remaining, -1)


def make_step_query(state: CausalState, tree: TreeLayout, nodes: Tensor) -> CausalQuery:
    """Make the query that evaluates the trees of a step. nodes: [R, N] int64. Only final tokens are stored."""
    rows, num_stored = state.rows, state.num_stored()[state.rows]
    begin = np.where(num_stored > 0, num_stored + state.shift[:, rows], 0)
    wanted_nodes = np.arange(tree.parents.shape[1]) * state.num_drafts[rows].any()
    return query_tree(state, state.store, rows, tree, nodes, begin, int(wanted_nodes.max()), wanted_nodes)


def query_tree(
    state: CausalState,
    store: KeyValueStore | None,
    rows: np.ndarray,
    tree: TreeLayout,
    drafts: Tensor,
    begin: np.ndarray,
    num_drafts: int,
    wanted_nodes: np.ndarray,
) -> CausalQuery:
    """Make the query that evaluates final tokens, which are stored, then drafts of a tree, which are not stored.

    rows: [R]. drafts: [R, N] int64, -1: no draft.
    begin: [branches, R] int64: position of the first final token to evaluate. The last final token is the root.
    num_drafts: number of drafts to evaluate, from node 1 on. wanted_nodes: [W] int64: nodes whose logits are read."""
    device, branches = state.context.device, state.branches
    committed = (state.committed[rows] + state.shift[:, rows]).reshape(-1)
    num_new = committed - begin.reshape(-1)
    width, count = int(num_new.max()), len(committed)
    # final tokens are right-aligned before column `width`
    final_positions = committed[:, None] - width + np.arange(width)
    draft_positions = torch.as_tensor(committed[:, None] - 1, device=device)
    draft_positions = draft_positions + tree.depths[:, 1 : num_drafts + 1].to(device).repeat(
        branches if len(tree.parents) > 1 else 1, 1
    )
    store_rows = state.context_rows(rows)
    row_index = torch.as_tensor(store_rows, device=device)
    positions = torch.cat((torch.as_tensor(final_positions, device=device), draft_positions), 1)
    positions = positions.clamp(0, state.context.shape[1] - 1)
    nodes = drafts[:, 1 : num_drafts + 1].repeat(branches, 1)
    is_unstored = final_positions >= begin.reshape(-1, 1)
    end = torch.as_tensor((state.length[rows] + state.shift[:, rows]).reshape(-1, 1), device=device)
    valid = torch.cat((torch.as_tensor(is_unstored, device=device), (draft_positions < end) & (nodes >= 0)), 1)
    tokens = torch.cat((state.context[row_index.unsqueeze(1), positions[:, :width]], nodes.clamp(min=0)), 1)
    trees = tree.ancestors[:, 1 : num_drafts + 1, 1 : num_drafts + 1].to(device)
    visible = (
        torch.ones((width + num_drafts, width + num_drafts), dtype=torch.bool, device=device)
        .tril()
        .repeat(len(trees), 1, 1)
    )
    visible[:, width:, width:] = trees
    slots = np.concatenate((np.where(is_unstored, final_positions, -1), np.full((count, num_drafts), -1)), 1)
    return CausalQuery(
        rows=rows,
        tokens=tokens,
        positions=positions,
        wanted=torch.as_tensor(wanted_nodes + width - 1, device=device).expand(count, -1),
        valid=valid,
        visible=visible.repeat(branches, 1, 1) if len(trees) > 1 else visible.expand(count, -1, -1),
        store=StoreCall(
            row_index, torch.as_tensor(slots, device=device), store_rows, int(committed.max()), step=state.commits
        ),
        branches=branches,
        forwarded=num_new[: len(rows)] + num_drafts,
        index=np.arange(len(rows)),
        kind="window" if begin.any() else "full",
    )

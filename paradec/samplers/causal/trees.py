"""Verification of several drafts for one place: rules for a node, and the walk down a tree of drafts.

A rule draws the children of a node from the draft distribution q and verifies them against the target distribution p.
Those of `RULES` are exact: the token that a node puts out has the distribution p, whatever q is. They differ in how
often it is one of the children, below which the walk goes on. Shapes: `R` rows, `K` children in the order of
verification, `V` tokens.

- "recursive": independent children, each verified against the residual of those before it (SpecInfer, arXiv
  2305.09781).
- "without_replacement": distinct children, each against the distribution it was drawn from (arXiv 2402.14160).
- "k_seq": independent children against fixed distributions, p over the best rho in [1, K] (SpecTr, arXiv 2310.15141).
- "naive": the K likeliest tokens; a draw from p is a hit when it is one of them.
- "greedy": the K - 1 likeliest tokens and one drawn from the rest; it accepts most often (arXiv 2502.18779).

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

from paradec.core.checks import check_int, shown
from paradec.core.family_queries import CausalQuery
from paradec.core.query import StoreCall
from paradec.core.registry import unknown
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.state import CausalState
from paradec.samplers.distributions import probability, residual

if TYPE_CHECKING:
    from paradec.caches.store import KeyValueStore

BISECTIONS = 40
MOST_NODES = 256


class Rule(Protocol):
    """How one node's children are drawn and verified."""

    distinct: ClassVar[bool]
    """Whether a child that repeats an earlier one is passed over."""

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        """Children [R, K] int64 from q [R, V] with uniform [R, K]; -1 where q has no further token."""
        ...

    def verify(self, p: Tensor, q: Tensor, drafts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Which child is accepted, [R] int64 (-1: none), and the weights [R, V] that the token is drawn from when none
        is.

        Args:
            p, q: [R, V], each of sum 1. drafts: [R, K] int64, -1 where there is none. uniform: [R, K].
        """
        ...


def normalized(weights: Tensor) -> Tensor:
    """weights [..., V] of sum 1."""
    return weights / weights.sum(-1, keepdim=True)


def without(distribution: Tensor, tokens: Tensor) -> Tensor:
    """distribution [R, V] with tokens [R, N] set to 0 (-1 sets none), not normalised."""
    return distribution.masked_fill(_holds(tokens, distribution.shape[-1]), 0)


def _holds(tokens: Tensor, size: int) -> Tensor:
    """[R, V] bool: whether a token is one of tokens [R, N]."""
    held = torch.zeros((len(tokens), size + 1), dtype=torch.bool, device=tokens.device)
    return held.scatter_(1, torch.where(tokens < 0, size, tokens), True)[:, :size]


class Sequential:
    """Verify the children one by one until one is accepted; a rule says how likely that is and what is left else."""

    distinct: ClassVar[bool] = False

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For children x [R]: the chance that each is accepted [R], and p and q [R, V] for the next one else."""
        raise NotImplementedError

    def verify(self, p: Tensor, q: Tensor, drafts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.full_like(drafts[:, 0], -1)
        for i, x in enumerate(drafts.unbind(1)):
            chance, next_p, next_q = self.step(p, q, x.clamp(min=0))
            tried = (chosen < 0) & (x >= 0)
            chosen = torch.where(tried & (uniform[:, i] < chance), i, chosen)
            rejected = (tried & (chosen < 0)).unsqueeze(1)
            p, q = torch.where(rejected, next_p, p), torch.where(rejected, next_q, q)
        return chosen, p


class Recursive(Sequential):
    """Independent children; each is verified against the residual of those before it."""

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        return draw(q.unsqueeze(1).expand(-1, count, -1), uniform)

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return probability(p, x) / probability(q, x), normalized(residual(p, q)), q


class WithoutReplacement(Sequential):
    """Distinct children, each verified against the distribution that it was drawn from."""

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        nodes = []
        for i in range(count):
            x = draw(q, uniform[:, i])
            nodes.append(torch.where((q > 0).any(-1), x, -1))
            q = without(q, x.unsqueeze(1))
        return torch.stack(nodes, 1)

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rest = without(q, x.unsqueeze(1))
        rest = torch.where((rest > 0).any(-1, keepdim=True), normalized(rest), q)
        return probability(p, x) / probability(q, x), normalized(residual(p, q)), rest


class Naive(Sequential):
    """The likeliest tokens, each accepted with its share of what p has left: together one draw from p."""

    distinct = True

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        return q.topk(count, -1).indices

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rest = without(p, x.unsqueeze(1))
        return probability(p, x), torch.where((rest > 0).any(-1, keepdim=True), normalized(rest), p), q


class KSeq:
    """Independent children against fixed distributions, p divided by the rho that hits most often."""

    distinct: ClassVar[bool] = False
    children = Recursive.children

    def verify(self, p: Tensor, q: Tensor, drafts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        real = drafts >= 0
        count = real.sum(1, keepdim=True).to(p.dtype)
        low, high = torch.ones_like(count), count.clamp(min=1)
        for _ in range(BISECTIONS):  # the smallest rho with 1 - (1 - beta)^K <= rho beta; K is always one
            middle = (low + high) / 2
            beta = q.minimum(p / middle).sum(-1, keepdim=True)
            fits = 1 - (1 - beta).clamp(min=0) ** count <= middle * beta
            low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
        x = drafts.clamp(min=0)
        accept = real & (uniform < p.gather(1, x) / (high * q.gather(1, x)))
        chosen = torch.where(accept.any(1), accept.int().argmax(1), -1)
        taken = q.minimum(p / high)
        beta = taken.sum(-1, keepdim=True)
        share = torch.where(beta > 0, (1 - (1 - beta).clamp(min=0) ** count) / beta, 0)
        return chosen, normalized(residual(p, taken * share))


class Greedy:
    """The likeliest tokens, and one drawn from the rest, which alone is verified; a draw may hit the others."""

    distinct: ClassVar[bool] = False

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        best = q.topk(count - 1, -1).indices
        rest = without(q, best)
        last = torch.where((rest > 0).any(-1), draw(rest, uniform[:, -1]), -1)
        return torch.cat((best, last.unsqueeze(1)), 1)

    def verify(self, p: Tensor, q: Tensor, drafts: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        # a node's children end where it has no more: columns are as many as the tree's widest node has
        at = (drafts >= 0).sum(1, keepdim=True) - 1
        column = torch.arange(drafts.shape[1], device=drafts.device)
        rest = without(q, drafts.masked_fill(column >= at, -1))
        total = rest.sum(-1, keepdim=True)
        real, place = (at >= 0) & (total > 0), at.clamp(min=0)
        rest = torch.where(real, rest / total, 0)
        last = drafts.gather(1, place).clamp(min=0)
        chance = p.gather(1, last) / rest.gather(1, last)
        accept = real & (uniform.gather(1, place) < chance)
        return torch.where(accept, at, -1).squeeze(1), torch.where(real, normalized(residual(p, rest)), p)


RULES: dict[str, Rule] = {
    "recursive": Recursive(),
    "without_replacement": WithoutReplacement(),
    "k_seq": KSeq(),
    "naive": Naive(),
    "greedy": Greedy(),
}


def _grown(*counts: str) -> tuple[tuple[int, ...], ...]:
    """Paths of a tree, from how many children each node of a depth has, a digit a node."""
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
    "2.2.2": _grown(
        "8", "84321111", "832111112100100101100", "5211100010010000001001100", "311001000010100", "20010000"
    ),
}
"""Published static trees by name: EAGLE's (LANTERN's too), and Token Recycling's."""


@dataclass(frozen=True)
class Tree:
    """A static tree of drafts. Node 0 is the last final token; the others come in order of depth, then of their paths.

    Args:
        paths: one for every node but the root: which child to take at each depth.

    Raises:
        ValueError: a path whose parent or elder sibling is missing.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        paths = sorted({tuple(path) for path in self.paths}, key=lambda path: (len(path), path))
        if not paths or not paths[0] or len(paths) > MOST_NODES:
            raise ValueError(f"tree={shown(self.paths)} must have 1 to {MOST_NODES} paths, none of them empty")
        for path in paths:
            for entry in path:
                check_int("tree", entry, low=0)
            elder = (*path[:-1], path[-1] - 1)
            if (len(path) > 1 and path[:-1] not in paths) or (path[-1] > 0 and elder not in paths):
                raise ValueError(f"tree={shown(self.paths)} has the path {path} without its parent or elder sibling")
        object.__setattr__(self, "paths", tuple(paths))

    @classmethod
    def of(cls, tree: Any) -> Tree:
        """Make a tree from its paths, the number of children per depth, (2, 2, 1), or a name. Raises ValueError
        otherwise."""
        if isinstance(tree, str):
            if tree not in TREES:
                raise ValueError(unknown("tree", tree, TREES))
            return cls(TREES[tree])
        if not isinstance(tree, Sequence) or len(tree) == 0:
            raise ValueError(f"tree={shown(tree)} must be children per depth, (2, 2, 1) say, or paths")
        if not all(isinstance(entry, int) for entry in tree):
            if not all(isinstance(entry, Sequence) and not isinstance(entry, str) for entry in tree):
                raise ValueError(f"tree={shown(tree)} must be children per depth, (2, 2, 1) say, or paths")
            return cls(tuple(map(tuple, tree)))
        nodes: list[tuple[int, ...]] = [()]
        paths: list[tuple[int, ...]] = []
        for count in tree:
            check_int("tree", count, low=1, high=MOST_NODES)
            if len(paths) + len(nodes) * count > MOST_NODES:
                raise ValueError(f"tree={shown(tree)} has more than {MOST_NODES} nodes")
            nodes = [(*path, i) for path in nodes for i in range(count)]
            paths += nodes
        return cls(tuple(paths))

    @property
    def size(self) -> int:
        """Nodes, the root included."""
        return len(self.paths) + 1

    @cached_property
    def depths(self) -> list[int]:
        """[N]: how far each node is from the root."""
        return [0, *map(len, self.paths)]

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return self.depths[-1]

    @property
    def children(self) -> Tensor:
        """[N, K] int64: every node's children, -1 where it has fewer than the widest."""
        return self.layout.children[0]

    @cached_property
    def layout(self) -> TreeLayout:
        """The same for all rows."""
        index = {(): 0} | {path: i for i, path in enumerate(self.paths, start=1)}
        parents = torch.tensor([[-1, *(index[path[:-1]] for path in self.paths)]])
        return TreeLayout(parents, self.depth, 1 + max(path[-1] for path in self.paths))


@dataclass(frozen=True)
class TreeLayout:
    """How the nodes of the rows' trees are connected. Parents come before children, siblings in the order of
    verification.

    Args:
        parents: [R, N] int64, or [1, N] where all rows have the same tree; -1 for the root, node 0.
        depth: of the deepest node that there may be.
        widest: the most children that a node may have.
    """

    parents: Tensor
    depth: int
    widest: int

    @cached_property
    def ancestors(self) -> Tensor:
        """[R, N, N] bool: whether a node (row) sees another: those on the path to it, and itself."""
        column = torch.arange(self.parents.shape[1], device=self.parents.device)
        up = column.expand_as(self.parents)
        sees = torch.zeros((), dtype=torch.bool, device=up.device)
        for _ in range(self.depth + 1):
            sees = sees | (up.unsqueeze(-1) == column)
            up = torch.where(up < 0, -1, self.parents.gather(1, up.clamp(min=0)))
        return sees

    @cached_property
    def depths(self) -> Tensor:
        """[R, N] int64: how far each node is from the root."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def children(self) -> Tensor:
        """[R, N, K] int64: every node's children, -1 where it has fewer than `widest`."""
        rows, size = self.parents.shape
        elder = (self.parents.unsqueeze(-1) == self.parents.unsqueeze(-2)).tril(-1).sum(-1)
        nodes = torch.full((rows, size * self.widest), -1, dtype=torch.int64, device=self.parents.device)
        node = torch.arange(1, size, device=nodes.device).expand(rows, -1)
        return nodes.scatter_(1, (self.parents * self.widest + elder)[:, 1:], node).unflatten(1, (size, -1))


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree, another one for every row and step (arXiv 2406.16858, section 4). Level by level the drafter
    names the `top_k` likeliest tokens below each of the `top_k` likeliest nodes, by their path's probability; the
    likeliest `nodes - 1` of all are kept. They are taken, not drawn: "naive" alone verifies them exactly.

    Args:
        nodes: the root and the drafts that are kept (the paper's 60 for 7B models).
        depth: of the deepest node. The public code counts from the second level: its 5 is 6 here, as in the paper.
        top_k: see above.

    Raises:
        ValueError: a number out of its range, or more nodes than are ever named.
    """

    nodes: int = 60
    depth: int = 6
    top_k: int = 10

    def __post_init__(self) -> None:
        check_int("nodes", self.nodes, low=2, high=MOST_NODES)
        check_int("depth", self.depth, low=1)
        check_int("top_k", self.top_k, low=1)
        named = self.top_k + (self.depth - 1) * self.top_k**2
        if self.nodes - 1 > named:
            raise ValueError(
                f"nodes={self.nodes} is more than depth={self.depth} and top_k={self.top_k} name ({named}) and the root"
            )

    @property
    def size(self) -> int:
        """Nodes, the root included."""
        return self.nodes

    def to_dict(self) -> dict[str, int]:
        return {"nodes": self.nodes, "depth": self.depth, "top_k": self.top_k}


def hashable(tree: Any) -> Any:
    """A static tree as strings, ints and tuples: lists come from JSON."""
    return tree if isinstance(tree, str) else tuple(n if isinstance(n, int) else tuple(n) for n in tree)


@lru_cache(maxsize=64)
def tree_of(tree: str | tuple[int, ...] | tuple[tuple[int, ...], ...]) -> Tree:
    """`Tree.of`, once for equal trees."""
    return Tree.of(tree)


@dataclass
class Walk:
    """What a tree's verification found, for `R` rows. D is the depth of the tree."""

    nodes: Tensor
    """[R, D + 1] int64: the node reached at each depth, root first; -1 after the last."""
    tokens: Tensor
    """[R, D + 1] int64: the tokens that become final: `accepted` children, then one more."""
    accepted: Tensor
    """[R] int64."""
    weights: Tensor
    """[R, V]: what the last token was drawn from; not normalised."""
    scores: Tensor
    """[R, D + 1]: the tokens' target probabilities; after the last, that of token 0 after the root."""


def walk(
    tree: Tree | TreeLayout,
    drafts: Tensor,
    p: Tensor | Callable[[Tensor], Tensor],
    q: Tensor,
    rule: Rule,
    uniform: Tensor,
    hits: bool = True,
) -> Walk:
    """Verify a tree of drafts from the root down.

    Args:
        drafts: [R, N] int64: the nodes' tokens; -1 where a node could not be drafted.
        p: [R, N, V]: the target distribution after each node; or a function of nodes [R], called for nodes reached
            alone.
        q: [R, N, V]: the draft distributions after each node.
        uniform: [R, D + 1, K + 1]: per depth, one number per child and one for the draw when none is accepted.
        hits: whether a token drawn because no child was accepted, which equals a child, leads on to it; exact for
            `RULES`.
    """
    rows, device = len(drafts), drafts.device
    layout = tree.layout if isinstance(tree, Tree) else tree
    children = layout.children.to(device).expand(rows, -1, -1)
    node = torch.zeros(rows, dtype=torch.int64, device=device)
    going = torch.ones(rows, dtype=torch.bool, device=device)
    nodes, tokens, scores = [node], [], []
    row, none = torch.arange(rows, device=device), torch.full_like(node, -1)

    def target(nodes: Tensor) -> Tensor:
        return p[row, nodes] if isinstance(p, Tensor) else p(nodes)

    weights = root = target(node)
    accepted = torch.zeros_like(node)
    for depth in range(tree.depth + 1):
        if going.is_cpu and not going.any():  # nobody waits for it
            nodes.append(none)
            tokens.append(none)
            scores.append(root[:, 0])
            continue
        below = children[row, node]
        candidates = torch.where(below >= 0, drafts.gather(1, below.clamp(min=0)), -1)
        if rule.distinct:
            again = (candidates.unsqueeze(2) == candidates.unsqueeze(1)).tril(-1).any(-1)
            candidates = candidates.masked_fill(again, -1)
        here = target(node) if depth else root
        chosen, left = rule.verify(here, q[row, node], candidates, uniform[:, depth, :-1])
        left = torch.where((candidates >= 0).any(1, keepdim=True), left, here)
        token = draw(left, uniform[:, depth, -1])
        if hits:
            same = candidates == token.unsqueeze(1)
            chosen = torch.where((chosen < 0) & same.any(1), same.int().argmax(1), chosen)
        accept = chosen >= 0
        chosen_column = chosen.clamp(min=0).unsqueeze(1)
        token = torch.where(accept, candidates.gather(1, chosen_column).squeeze(1), token)
        tokens.append(torch.where(going, token, -1))
        scores.append(torch.where(going, probability(here, token), root[:, 0]))
        weights = torch.where(going.unsqueeze(1), left, weights)
        going = going & accept
        accepted = accepted + going.long()
        node = torch.where(going, below.gather(1, chosen_column).squeeze(1), node)
        nodes.append(torch.where(going, node, -1))
    return Walk(torch.stack(nodes[:-1], 1), torch.stack(tokens, 1), accepted, weights, torch.stack(scores, 1))


def real_nodes(state: CausalState, tree: TreeLayout, nodes: Tensor) -> Tensor:
    """Nodes [R, N] of the running rows, without those that no token comes after before the row's end."""
    left = torch.as_tensor((state.end - state.committed)[state.rows, None], device=nodes.device)
    return nodes.masked_fill(tree.depths.to(nodes.device) >= left, -1)


def step_query(state: CausalState, tree: TreeLayout, nodes: Tensor) -> CausalQuery:
    """Evaluate the trees of a step, nodes [R, N] of the running rows; the store takes final tokens alone."""
    rows, held = state.rows, state.num_stored()[state.rows]
    begin = np.where(held > 0, held + state.shift[:, rows], 0)
    wanted = np.arange(tree.parents.shape[1]) * state.drafted[rows].any()
    return tree_query(state, state.store, rows, tree, nodes, begin, int(wanted.max()), wanted)


def tree_query(
    state: CausalState,
    store: KeyValueStore | None,
    rows: np.ndarray,
    tree: TreeLayout,
    drafts: Tensor,
    begin: np.ndarray,
    known: int,
    wanted: np.ndarray,
) -> CausalQuery:
    """Evaluate final tokens, which enter the store, and after them drafts of a tree, which do not.

    Args:
        rows: [R]. drafts: [R, N] int64, -1 where a node has none.
        begin: [branches, R] int64: the first final token to evaluate, by its position in each branch; the last is the
            root.
        known: drafts to evaluate, counted from node 1.
        wanted: [W] int64: nodes whose logits are wanted; the root only where it is evaluated.
    """
    device, branches = state.context.device, state.branches
    committed = (state.committed[rows] + state.shift[:, rows]).reshape(-1)
    fresh = committed - begin.reshape(-1)
    width, count = int(fresh.max()), len(committed)
    # the final tokens end at column `width`, however many a row has
    final = committed[:, None] - width + np.arange(width)
    below = torch.as_tensor(committed[:, None] - 1, device=device)
    below = below + tree.depths[:, 1 : known + 1].to(device).repeat(branches if len(tree.parents) > 1 else 1, 1)
    at_rows = state.every(rows)
    row_index = torch.as_tensor(at_rows, device=device)
    positions = torch.cat((torch.as_tensor(final, device=device), below), 1).clamp(0, state.context.shape[1] - 1)
    nodes = drafts[:, 1 : known + 1].repeat(branches, 1)
    real_final = final >= begin.reshape(-1, 1)
    end = torch.as_tensor((state.length[rows] + state.shift[:, rows]).reshape(-1, 1), device=device)
    real = torch.cat((torch.as_tensor(real_final, device=device), (below < end) & (nodes >= 0)), 1)
    tokens = torch.cat((state.context[row_index.unsqueeze(1), positions[:, :width]], nodes.clamp(min=0)), 1)
    trees = tree.ancestors[:, 1 : known + 1, 1 : known + 1].to(device)
    sees = torch.ones((width + known, width + known), dtype=torch.bool, device=device).tril().repeat(len(trees), 1, 1)
    sees[:, width:, width:] = trees
    slots = np.concatenate((np.where(real_final, final, -1), np.full((count, known), -1)), 1)
    return CausalQuery(
        rows=rows,
        tokens=tokens,
        positions=positions,
        wanted=torch.as_tensor(wanted + width - 1, device=device).expand(count, -1),
        valid=real,
        visible=sees.repeat(branches, 1, 1) if len(trees) > 1 else sees.expand(count, -1, -1),
        store=StoreCall(
            row_index, torch.as_tensor(slots, device=device), at_rows, int(committed.max()), step=state.commits
        ),
        branches=branches,
        forwarded=fresh[: len(rows)] + known,
        index=np.arange(len(rows)),
        kind="window" if begin.any() else "full",
    )

"""A pool of n-grams beside a Jacobi window: what the model has said after rejected tokens is tried elsewhere.

The idea is Jacobi Forcing's rejection recycling (hao-ai-lab, 2026), and Lookahead decoding's before it (Fu et al.,
arXiv 2402.02057). A draft x at a slot, and what the model says after it, are an n-gram even where x is rejected, or
waits. When the last final token is x, the n-grams of the pool that begin with it are further drafts for the next
positions: branches beside the window's chain, verified in the same forward.

All branches share the draws of their positions: at each position the token is a function of the text before it. So a
step commits a prefix of one and the same text, whichever branch holds it, and the longest is taken: the result is that
of the window alone, in fewer forwards.

`R` rows, `W` slots, `n` the n-grams' length, `N` nodes: the root, the chain of `W - 1` drafts, then the branches one
after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_int
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Proposal
from paradec.samplers.causal.branches import BranchedChain, Path
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import TreeLayout
from paradec.samplers.causal.verification import DraftWindow, Verified


@dataclass(frozen=True)
class PooledChain(BranchedChain):
    """A window beside which n-grams of a pool are verified. For methods that commit what this step draws, with draws
    that belong to positions.

    Args:
        pool: n-grams verified beside the window, at most; 0 to 256, where 0 is none (Jacobi Forcing's public setting is
            4). Needs a model with a key/value store whose queries may say which columns see which.
        ngram: tokens of an n-gram, 2 to 64: the last final one, and `ngram - 1` drafts.
        pool_size: n-grams that a row keeps, 1 to 4096; the oldest go.
    """

    pool: int = 0
    ngram: int = 4
    pool_size: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("pool", self.pool, low=0, high=256)
        check_int("ngram", self.ngram, low=2, high=64)
        check_int("pool_size", self.pool_size, low=1, high=4096)

    def check_model(self, model: Any) -> None:
        """As for all; ValueError for a pool beside a model whose queries cannot hold branches."""
        super().check_model(model)
        if self.pool:
            self._check_branches("pool", model)

    def memory(self) -> dict[str, MemorySpec]:
        pooled = {"pool": MemorySpec((self.pool_size, self.ngram), torch.int64, -1, reset="sequence")}
        return super().memory() | (pooled if self.pool else {})

    def _tree(self, state: CausalState) -> TreeLayout | None:
        length = min(self.ngram, state.width) - 1
        return layout(state.width, self.pool, length) if self.pool and length else None

    def _nodes(self, state: CausalState, tree: TreeLayout) -> Tensor:
        rows, memory = state.rows, state.memory.read(state.rows)
        index = torch.as_tensor(rows, device=state.context.device)
        last = state.canvas[index, torch.as_tensor(state.committed[rows] - 1, device=index.device)]
        branches = beginning_with(memory["pool"], last, self.pool, min(self.ngram, state.width) - 1)
        root = torch.full_like(last, -1).unsqueeze(1)
        return torch.cat((root, memory["drafts"][:, :-1], branches.flatten(1)), 1)

    def _path(self, state: CausalState, tree: TreeLayout, nodes: Tensor, p: Tensor, positions: Tensor) -> Path:
        """That of the branch that the model's draws follow longest. Quantities besides: "said" [R, G, n], the step's
        n-grams."""
        rows, width, device = state.rows, state.width, p.device
        tokens = self._fresh(state, p, positions, state.uniform(rows, positions, 1, rng.TOKEN_STREAM)[..., 0])
        depth, node = longest(tree, nodes, tokens)
        drawn = tokens.gather(1, node)
        slots = torch.as_tensor(self._evaluated(state)[:, None], device=device)
        return Path(
            node,
            p.take_along_dim(node.unsqueeze(-1), 1),
            drawn,
            # each draft of the branch is what was drawn before it; after its end nothing is verified
            torch.where(torch.arange(width, device=device) < depth, drawn, -1),
            torch.zeros((*drawn.shape, 2), dtype=torch.float64, device=device),  # nothing is left to chance
            {"said": said(state.memory.read(rows)["drafts"], tokens[:, :width], slots, self.ngram)},
        )

    def _draft(
        self, state: CausalState, proposal: Proposal, window: DraftWindow, found: Verified, count: Tensor
    ) -> None:
        super()._draft(state, proposal, window, found, count)
        if "said" in proposal.quantities:
            held = state.memory.read(proposal.rows)["pool"]
            state.memory.write("pool", proposal.rows, remembered(held, proposal.quantities["said"]))


@lru_cache(maxsize=64)
def layout(width: int, branches: int, length: int) -> TreeLayout:
    """A chain of `width - 1` nodes below the root, and `branches` of `length` nodes."""
    parents = list(range(-1, width - 1))
    for branch in range(branches):
        first = width + branch * length
        parents += [0, *range(first, first + length - 1)]
    return TreeLayout(torch.tensor([parents]), width - 1, branches + 1)


def beginning_with(pool: Tensor, token: Tensor, count: int, length: int) -> Tensor:
    """The newest n-grams that begin with a token.

    Args:
        pool: [R, S, n] int64, the newest first, -1 where there is none. token: [R].

    Returns:
        [R, count, length] int64: the tokens after it, -1 where there are fewer.
    """
    size = pool.shape[1]
    held = pool[:, :, 0] == token.unsqueeze(1)
    age = torch.arange(size, device=pool.device)
    best = torch.where(held, age, size).topk(min(count, size), dim=1, largest=False, sorted=True)
    found = pool[:, :, 1 : length + 1].take_along_dim(best.indices.unsqueeze(-1), 1)
    found = found.masked_fill((best.values == size).unsqueeze(-1), -1)
    return torch.nn.functional.pad(found, (0, 0, 0, count - found.shape[1]), value=-1)


def said(drafts: Tensor, tokens: Tensor, evaluated: Tensor, length: int) -> Tensor:
    """N-grams of a step: each draft, and the tokens that the model drew for the slots after it.

    Args:
        drafts, tokens: [R, W] int64: of the window's chain. evaluated: [R, 1] int64: slots that hold something.

    Returns:
        [R, W - n + 1, n] int64, -1 where a slot was not evaluated.
    """
    count = max(drafts.shape[1] - length + 1, 0)
    columns = [drafts[:, :count]] + [tokens[:, k : k + count] for k in range(1, length)]
    inside = torch.arange(count, device=drafts.device) + length <= evaluated
    return torch.stack(columns, -1).masked_fill(~inside.unsqueeze(-1), -1)


def remembered(pool: Tensor, new: Tensor) -> Tensor:
    """The pool [R, S, n] with new n-grams [R, G, n] in front; each once, and the oldest go."""
    every = torch.cat((new, pool), 1)
    # those of the pool are distinct already
    again = (every.unsqueeze(2) == new.unsqueeze(1)).all(-1).tril(-1).any(-1)
    gone = again | (every < 0).any(-1)
    order = gone.long().sort(dim=1, stable=True).indices
    return every.masked_fill(gone.unsqueeze(-1), -1).take_along_dim(order.unsqueeze(-1), 1)[:, : pool.shape[1]]


def longest(tree: TreeLayout, drafts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The deepest node all of whose path the model has drawn.

    Args:
        drafts: [R, N] int64, -1 where a node has none. tokens: [R, N] int64: drawn after each node.

    Returns:
        How deep it is, [R, 1] int64, and for each slot the node whose draw is the slot's, [R, W]: on the path to it,
        and from there on the chain's own.
    """
    ancestors, depths = tree.ancestors.to(drafts.device), tree.depths.to(drafts.device)
    drawn = drafts == tokens.gather(1, tree.parents.to(drafts.device).clamp(min=0).expand_as(drafts))
    drawn[:, 0] = True
    right = ~(~drawn.unsqueeze(1) & ancestors).any(-1)
    depth, node = torch.where(right, depths, -1).max(1, keepdim=True)
    slot = torch.arange(tree.depth + 1, device=drafts.device)
    path = ancestors[0][node.squeeze(1)].unsqueeze(1) & (depths.unsqueeze(1) == slot.unsqueeze(-1))
    return depth, torch.where(slot <= depth, path.int().argmax(-1), slot)

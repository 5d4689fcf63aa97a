"""Token Recycling: the tokens that the model thought likely after a token are drafted where that token comes again.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling", arXiv
2408.08696. No model drafts. A matrix holds, for each token of the vocabulary, the `k` likeliest next ones when the
model evaluated it last, whether it became final or was rejected. A static tree of drafts is read from it: child j of a
node is entry j of its token's row. The drafts are taken, not drawn, so the exact rule for them is "naive".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int
from paradec.core.memory import MemorySpec
from paradec.samplers.causal.drafts.source import NamedDrafter
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import tree_of


@dataclass(frozen=True)
class TokenRecycling(NamedDrafter):
    """A drafter without a network: `create("speculative", drafter="token_recycling", rule="naive")`, or with settings
    `drafter=TokenRecycling(...)`.

    Differs from the public code (greedy, one row, one matrix for all requests, which begins with zeros): every
    temperature is exact; each row has a matrix of its own, so that neighbours and earlier requests change nothing; what
    the matrix does not know is not drafted. As there, the prompt is not read, and of tokens that a step evaluates
    several times the last one, in the tree's order, is remembered.

    Args:
        k: tokens remembered of each token of the vocabulary: 4 * k bytes of memory a token and row.
        tree: of drafts, with at most k children a node: "2.2.2", the paper's of 80 drafts, or as `Speculative` takes
            them.

    Raises:
        ValueError: a setting out of its range, or a node of more children than `k`.
    """

    k: int = 8
    tree: str | tuple[int, ...] | tuple[tuple[int, ...], ...] = "2.2.2"

    name: ClassVar[str] = "token_recycling"

    def __post_init__(self) -> None:
        check_int("k", self.k, low=1)
        if not isinstance(self.tree, str):  # as lists, from JSON
            entries = tuple(entry if isinstance(entry, int) else tuple(entry) for entry in self.tree)
            object.__setattr__(self, "tree", entries)
        if (widest := tree_of(self.tree).children.shape[1]) > self.k:
            raise ValueError(f"k={self.k} is less than the {widest} children of a node of tree={self.tree!r}")

    def memory(self) -> dict[str, MemorySpec]:
        """The matrix [V, k] of each row."""
        return {"recycled": MemorySpec(("vocab", self.k), torch.int32, -1, reset="sequence")}

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None = None) -> None:
        """Draft for rows [R]: see `paradec.samplers.causal.drafts.source.DraftSource`."""
        matrix, tree = state.memory["recycled"], tree_of(self.tree)
        index = torch.as_tensor(rows, device=matrix.device)
        last = state.canvas[index, torch.as_tensor(state.committed[rows] - 1, device=matrix.device)]
        parents, depths = tree.layout.parents[0], np.array(tree.depths)
        tokens = torch.full((len(rows), tree.size), -1, dtype=torch.int64, device=matrix.device)
        tokens[:, 0] = last.masked_fill(last >= matrix.shape[1], -1)  # prompts may hold ids that have no logit
        child = torch.tensor([0, *(path[-1] for path in tree.paths)], device=matrix.device)
        for depth in range(1, tree.depth + 1):
            nodes = torch.as_tensor(np.flatnonzero(depths == depth), device=matrix.device)
            above = tokens[:, parents.to(matrix.device)[nodes]]
            found = matrix[index.unsqueeze(1), above.clamp(min=0), child[nodes]].long()
            tokens[:, nodes] = torch.where(above >= 0, found, -1)
        tokens[:, 0] = -1
        state.memory.write("drafts", rows, tokens)

    def observe(self, state: CausalState, rows: np.ndarray, tokens: Tensor, logits: Tensor) -> None:
        """See `NamedDrafter.observe`."""
        matrix = state.memory["recycled"]
        best = logits.topk(min(self.k, logits.shape[-1]), -1)
        likeliest = best.indices.masked_fill(best.values == -torch.inf, -1).to(matrix.dtype)
        # a token's last place alone is written: several writes to one place have no order
        again = (tokens.unsqueeze(2) == tokens.unsqueeze(1)).triu(1).any(2)
        row, node = (~again & (tokens >= 0) & (tokens < matrix.shape[1])).nonzero(as_tuple=True)
        at = torch.as_tensor(rows, device=matrix.device)[row]
        matrix[at, tokens[row, node], : likeliest.shape[-1]] = likeliest[row, node]

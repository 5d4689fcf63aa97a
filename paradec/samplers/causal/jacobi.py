"""Jacobi decoding (Santilli et al., "Accelerating Transformer Inference for Translation via Parallel Decoding", arXiv
2305.10427).

`R` rows, `W` slots, `n` tokens of an n-gram, `N` nodes: the root, the chain of `W - 1` drafts, then the branches one by
one.
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
from paradec.core.protocol import Proposal
from paradec.samplers.causal.sjd import SJD
from paradec.samplers.causal.state import ALL_SLOTS, CausalState
from paradec.samplers.causal.trees import TreeLayout
from paradec.samplers.causal.window import DraftWindow, Path, VerifiedWindow, check_branches, draw_tokens

EARLY_EXITS = ("prefix", "published")


@dataclass(frozen=True)
class Jacobi(SJD):
    """Jacobi decoding: a draft is accepted if it equals the token that this step draws at its slot.

    Lossless at every temperature: a step commits its own draws from p. With new noise in every step
    (`refresh="resample"`), decoding saves almost no calls above temperature 0. With fixed noise per position
    (`refresh="gumbel"`), the iteration has a fixed point.

    By default the window slides: every step commits the tokens that are known to be correct. With `group`, whole blocks
    are decoded, as in CEED-VLA (Song et al., arXiv 2506.13725). The prompt predicts the first block's first token. Then
    every iteration replaces each token by its prediction, until nothing changes, in at most `group` iterations. The
    last iteration predicts the next block's first token. After i iterations at least i + 1 tokens are correct. The
    block's keys and values are removed from the store after every iteration but the last. (In the public code this is
    commented out, so that its fixed point differs.) A row's block ends early once an end token is known to be correct.

    With `pool`, n-grams of earlier steps are drafts in addition to the sliding window (`NGramPool`). The tokens are the
    same, with fewer forwards, but each forward has `pool * (ngram - 1)` more slots.

    Args:
        group: number of tokens of a block; needs `refresh="gumbel"`. None: a sliding window.
        max_iterations: limit of iterations per block, with `group`; None means `group`.
        early_exit: tokens to commit of a block that still changes in its last iteration. "prefix" (lossless): the
            tokens known to be correct; the other tokens start the next block. "published": the whole block, but with
            the keys and values of the tokens before the last change. It is lossless only if `max_iterations` is
            `group` or more, and it needs a key/value store.
        window, guess_distribution: see `SJD`.
        init: see `SJD`. With `group`, a "random" guess is a random token of the row so far, if it may be drawn.
        pool, ngram, pool_size: see `NGramPool`. A pool needs `refresh="gumbel"`, so that all branches share draws.
    """

    refresh: str = "gumbel"
    pool: int = 0
    ngram: int = 4
    pool_size: int = 64
    group: int | None = None
    max_iterations: int | None = None
    early_exit: str = "prefix"

    name = "jacobi"
    paper = "Jacobi decoding"
    arxiv = "2305.10427"
    summary = "a draft is accepted when it equals the token that this step draws at its slot; lossless"
    presets = {"ceed": {"group": 36, "max_iterations": 22, "early_exit": "published"}}
    resamples = False
    guesses_from_text = property(lambda self: self.group is not None)  # type: ignore[assignment]
    lossless = property(  # type: ignore[assignment]
        lambda self: self.early_exit == "prefix" or self.iteration_limit >= (self.group or 0)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        NGramPool(self.pool, self.ngram, self.pool_size)  # checks the settings
        check_int("group", self.group, low=1, none=True)
        check_int("max_iterations", self.max_iterations, low=1, none=True)
        check_choice("early_exit", self.early_exit, EARLY_EXITS)
        defaults = self.settings()
        if self.pool and self.group is not None:
            raise ValueError(f"pool={self.pool} has no meaning with group={self.group}: leave pool out")
        if self.pool and self.refresh != "gumbel":
            raise ValueError(f"refresh={self.refresh!r}: pool={self.pool} needs 'gumbel', so that branches share draws")
        if self.group is None:
            for name in ("max_iterations", "early_exit"):
                if getattr(self, name) != defaults[name]:
                    raise ValueError(f"{name}={getattr(self, name)!r} has no meaning without group: leave it out")
            return
        if self.window != defaults["window"]:
            raise ValueError(f"window={self.window} has no meaning with group={self.group}: leave window out")
        if self.refresh != "gumbel":
            raise ValueError(f"refresh={self.refresh!r}: group={self.group} needs 'gumbel', which has a fixed point")

    @property
    def iteration_limit(self) -> int:
        """Limit of iterations per block; 0 without blocks."""
        return (self.group if self.max_iterations is None else self.max_iterations) or 0

    @property
    def branches(self) -> NGramPool | None:
        return NGramPool(self.pool, self.ngram, self.pool_size) if self.pool else None

    def accept(self, window: DraftWindow) -> Tensor:
        """Return 1 where the draft equals the token drawn in this step, else 0."""
        return (window.drafts.tokens == window.sampled).to(window.p.dtype)

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def check_model(self, model: Any) -> None:
        """As in the base class. Also raise ValueError for the published early exit without a key/value store."""
        super().check_model(model)
        if self.early_exit == "published" and not model.supports_store:
            raise ValueError(
                f"early_exit='published' needs a model with a key/value store; {model.facts.name} has none; use "
                "'prefix'"
            )

    def num_slots(self, model: Any, num_new: int) -> int:
        return super().num_slots(model, num_new) if self.group is None else min(self.group, num_new)

    def memory(self) -> dict[str, MemorySpec]:
        iteration = {} if self.group is None else {"iteration": MemorySpec((), torch.int64, reset="sequence")}
        return super().memory() | iteration

    def open(self, state: CausalState, model: Any) -> None:
        super().open(state, model)
        if self.group is not None:  # the first block needs the prompt's prediction first
            state.num_drafts[:] = 0

    def verify(self, state: CausalState, proposal: Proposal) -> VerifiedWindow:
        """As in the base class; no token of a block becomes final before the block ends."""
        verified = super().verify(state, proposal)
        if self.group is None:
            return verified
        num_correct, size = verified.accepted + 1, proposal.available.sum(1, keepdim=True)
        is_complete = num_correct == size
        if len(state.ends):
            slot = torch.arange(state.width, device=num_correct.device)
            is_complete |= (torch.isin(verified.tokens, state.ends) & (slot < num_correct)).any(1, keepdim=True)
        is_last = state.memory.read(proposal.rows)["iteration"].unsqueeze(1) + 1 >= self.iteration_limit
        num_final = num_correct if self.early_exit == "prefix" else size
        return verified._replace(accepted=torch.where(is_complete, num_correct, torch.where(is_last, num_final, 0)) - 1)

    def draft_window(self, state: CausalState, proposal: Proposal, verified: VerifiedWindow, count: Tensor) -> None:
        if self.group is not None:
            rows, iteration = proposal.rows, state.memory.read(proposal.rows)["iteration"]
            state.memory.write("iteration", rows, torch.where(count.squeeze(1) > 0, 0, iteration + 1))
            state.num_drafts[rows] = ALL_SLOTS
        super().draft_window(state, proposal, verified, count)


@dataclass(frozen=True)
class NGramPool:
    """N-grams of earlier steps as branches next to a window: Jacobi Forcing's rejection recycling (hao-ai-lab, 2026),
    after Lookahead decoding (Fu et al., arXiv 2402.02057).

    A draft x and the model's draws after it form an n-gram, even if x is rejected. When the last final token is x, the
    pool's n-grams that start with x are further drafts, verified in the same forward. All branches share the noise of
    their positions. So every branch commits a prefix of the same text, and the branch with the longest prefix is used.

    pool: limit of n-grams verified next to the window, 0 to 256 (Jacobi Forcing's public setting is 4). Needs a model
        with a key/value store whose queries can have a mask of visible columns.
    ngram: tokens of an n-gram, 2 to 64: the last final token and `ngram - 1` drafts.
    pool_size: limit of stored n-grams per row, 1 to 4096; the oldest are dropped."""

    pool: int = 0
    ngram: int = 4
    pool_size: int = 64

    def __post_init__(self) -> None:
        check_int("pool", self.pool, low=0, high=256)
        check_int("ngram", self.ngram, low=2, high=64)
        check_int("pool_size", self.pool_size, low=1, high=4096)

    def check_model(self, model: Any) -> None:
        check_branches("pool", self.pool, model)

    def memory(self) -> dict[str, MemorySpec]:
        return {"pool": MemorySpec((self.pool_size, self.ngram), torch.int64, -1, reset="sequence")}

    def layout(self, state: CausalState) -> TreeLayout | None:
        length = min(self.ngram, state.width) - 1
        return make_pool_layout(state.width, self.pool, length) if length else None

    def nodes(self, state: CausalState, tree: TreeLayout) -> Tensor:
        rows, memory = state.rows, state.memory.read(state.rows)
        index = torch.as_tensor(rows, device=state.context.device)
        last_token = state.canvas[index, torch.as_tensor(state.committed[rows] - 1, device=index.device)]
        branches = find_ngrams(memory["pool"], last_token, self.pool, min(self.ngram, state.width) - 1)
        root = torch.full_like(last_token, -1).unsqueeze(1)
        return torch.cat((root, memory["drafts"][:, :-1], branches.flatten(1)), 1)

    def select_path(self, state: CausalState, tree: TreeLayout, nodes: Tensor, p: Tensor, positions: Tensor) -> Path:
        """Select the branch that agrees longest with the model's draws. Quantities: "ngrams" [R, G, n], new n-grams."""
        rows, width, device = state.rows, state.width, p.device
        tokens = draw_tokens(state, p, positions, state.uniform(rows, positions, 1, rng.TOKEN_STREAM)[..., 0])
        depth, node = find_longest_path(tree, nodes, tokens)
        sampled = tokens.gather(1, node)
        evaluated = torch.as_tensor(state.num_evaluated()[:, None], device=device)
        return Path(
            node,
            p.take_along_dim(node.unsqueeze(-1), 1),
            sampled,
            # each draft of the branch equals the draw of its slot; no draft after the branch is verified
            torch.where(torch.arange(width, device=device) < depth, sampled, -1),
            torch.zeros((*sampled.shape, 2), dtype=torch.float64, device=device),  # 0 always accepts
            {"ngrams": make_ngrams(state.memory.read(rows)["drafts"], tokens[:, :width], evaluated, self.ngram)},
        )

    def draft(self, state: CausalState, rows: np.ndarray, quantities: dict[str, Tensor]) -> None:
        if "ngrams" in quantities:
            pool = state.memory.read(rows)["pool"]
            state.memory.write("pool", rows, add_ngrams(pool, quantities["ngrams"]))


@lru_cache(maxsize=64)
def make_pool_layout(width: int, branches: int, length: int) -> TreeLayout:
    """Layout of a chain of `width - 1` nodes below the root, and `branches` chains of `length` nodes."""
    parents = list(range(-1, width - 1))
    for branch in range(branches):
        first_node = width + branch * length
        parents += [0, *range(first_node, first_node + length - 1)]
    return TreeLayout(torch.tensor([parents]), width - 1, branches + 1)


def find_ngrams(pool: Tensor, token: Tensor, count: int, length: int) -> Tensor:
    """Return the tokens after `token` [R] in the newest n-grams that start with `token`: [R, count, length] int64,
    padded with -1.

    pool: [R, S, n] int64, the newest first, padded with -1."""
    size = pool.shape[1]
    matches = pool[:, :, 0] == token.unsqueeze(1)
    age = torch.arange(size, device=pool.device)
    newest = torch.where(matches, age, size).topk(min(count, size), dim=1, largest=False, sorted=True)
    tokens = pool[:, :, 1 : length + 1].take_along_dim(newest.indices.unsqueeze(-1), 1)
    tokens = tokens.masked_fill((newest.values == size).unsqueeze(-1), -1)
    return torch.nn.functional.pad(tokens, (0, 0, 0, count - tokens.shape[1]), value=-1)


def make_ngrams(drafts: Tensor, tokens: Tensor, evaluated: Tensor, length: int) -> Tensor:
    """Make the n-grams [R, W - n + 1, n] int64 of a step (n: `length`): each draft with the tokens drawn for the slots
    after it. N-grams that include a slot that was not evaluated are all -1.

    drafts, tokens: [R, W] int64, of the window's chain. evaluated: [R, 1] int64: number of evaluated slots."""
    count = max(drafts.shape[1] - length + 1, 0)
    columns = [drafts[:, :count]] + [tokens[:, k : k + count] for k in range(1, length)]
    in_range = torch.arange(count, device=drafts.device) + length <= evaluated
    return torch.stack(columns, -1).masked_fill(~in_range.unsqueeze(-1), -1)


def add_ngrams(pool: Tensor, ngrams: Tensor) -> Tensor:
    """Put G new n-grams [R, G, n] in front of the pool [R, S, n]; drop duplicates, and the oldest beyond S."""
    candidates = torch.cat((ngrams, pool), 1)
    # n-grams of the pool are already distinct
    is_repeated = (candidates.unsqueeze(2) == ngrams.unsqueeze(1)).all(-1).tril(-1).any(-1)
    dropped = is_repeated | (candidates < 0).any(-1)
    order = dropped.long().sort(dim=1, stable=True).indices
    return candidates.masked_fill(dropped.unsqueeze(-1), -1).take_along_dim(order.unsqueeze(-1), 1)[:, : pool.shape[1]]


def find_longest_path(tree: TreeLayout, drafts: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Find the deepest node whose whole path equals the model's draws.

    drafts: [R, N] int64, -1: no draft. tokens: [R, N] int64, drawn after each node.
    Returns the depth of the node, [R, 1] int64, and for each slot the node whose draw the slot uses, [R, W]: up to
    this depth the nodes of the path, after it those of the chain."""
    ancestors, depths = tree.ancestors.to(drafts.device), tree.depths.to(drafts.device)
    matches = drafts == tokens.gather(1, tree.parents.to(drafts.device).clamp(min=0).expand_as(drafts))
    matches[:, 0] = True
    is_correct = ~(~matches.unsqueeze(1) & ancestors).any(-1)
    depth, node = torch.where(is_correct, depths, -1).max(1, keepdim=True)
    slot = torch.arange(tree.depth + 1, device=drafts.device)
    path = ancestors[0][node.squeeze(1)].unsqueeze(1) & (depths.unsqueeze(1) == slot.unsqueeze(-1))
    return depth, torch.where(slot <= depth, path.int().argmax(-1), slot)

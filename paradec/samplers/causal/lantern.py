"""LANTERN (arXiv 2410.03355, section 4) and LANTERN++ (arXiv 2502.06352): close code vectors are exchangeable in a
picture, so the probability of a draft may count its neighbours' in the codebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number
from paradec.samplers.causal.drafting import DraftingSampler
from paradec.samplers.causal.sjd import SJD
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import DynamicTree, Naive, Sequential, WithoutReplacement, normalized, without
from paradec.samplers.causal.window import DraftWindow
from paradec.samplers.distributions import probability


def neighbours(codes: Tensor, tokens: Tensor, count: int) -> Tensor:
    """The `count` nearest other tokens of tokens [...] by Euclidean distance: [..., count] int64, nearest first; -1
    where there are no more. codes: [V, d], NaN rows for tokens that have no code."""
    distance = torch.cdist(codes[tokens.reshape(-1)], codes).nan_to_num(nan=torch.inf)
    distance.scatter_(1, tokens.reshape(-1, 1), torch.inf)
    nearest = distance.topk(min(count, len(codes) - 1), largest=False)
    return nearest.indices.masked_fill(nearest.values.isinf(), -1).unflatten(0, tokens.shape)


def relaxed_probability(
    p: Tensor, x: Tensor, neighbour_ids: Tensor, additive: bool, bound: float
) -> tuple[Tensor, Tensor]:
    """m(x): a token's probability plus that of its neighbours, nearest first, as long as these stay within a limit
    together. Returns it, [...], and whether any neighbour was taken.

    p: [..., V]. x: [...]. neighbour_ids: [..., K], -1 where there is none.
    additive: the limit is `bound`; else (bound - 1) p(x)."""
    p_x = probability(p, x)
    mass = p.gather(-1, neighbour_ids.clamp(min=0)).masked_fill(neighbour_ids < 0, 0).cumsum(-1)
    limit = torch.full_like(p_x, bound) if additive else (bound - 1) * p_x
    in_limit = (neighbour_ids >= 0) & (mass <= limit.unsqueeze(-1))  # the shares grow, so these come first
    return p_x + mass.masked_fill(~in_limit, 0).amax(-1), in_limit.any(-1)


@dataclass(frozen=True)
class Lantern(DraftingSampler, SJD):
    """A draft x is accepted with probability min(1, m(x) / q(x)); m(x) is p(x) plus the probabilities of as many of the
    `k` codes nearest to x as stay within `delta` together. A rejected one is resampled from norm(max(0, p - q)).

    Not lossless: given a draft, p changes by at most `delta` in total variation (`benchmarks/exactness.py` measures the
    output). delta=0 is SJD (with a drafter: speculative decoding). At temperature 0 it is greedy decoding for every
    delta; the public code relaxes untempered distributions there.

    Without a drafter it drafts as SJD does. The public code has a trained drafter (`paradec.load_drafter`), which draws
    a static tree (`tree="mc_sim_7b_63"`) or grows a dynamic one (`tree=DynamicTree(59, 5)`), verified by `NodeRule`.
    Its residual after a rejected node is not p - q, and it is not exact at delta=0 where tokens have no probability.

    Args:
        k: number of neighbours that are read.
        delta: the most probability that they may add.
        drafter: a smaller model of the family or an EAGLE drafter; None drafts as SJD does.
        tree: of drafts, see `paradec.samplers.causal.drafting.DraftingSampler`; None is a chain of `window - 1`.
        guess_distribution: "one_hot" accepts a random guess with m(x); under "uniform" nearly every guess would be,
            since `delta` is far above one token's share.
        window, init, refresh: see `SJD`. With a drafter `init`, `refresh` and `guess_distribution` must not be given.
    """

    guess_distribution: str = "one_hot"
    k: int = 1000
    delta: float = 0.1

    name = "lantern"
    paper = "LANTERN"
    arxiv = "2410.03355"
    summary = "SJD where a draft also counts the probability of its neighbours in the codebook; not lossless"
    lossless = False
    compared_by = "codebook"
    hits: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=1)
        check_number("delta", self.delta, low=0, high=1)
        defaults = self.settings()
        for name in ("init", "refresh", "guess_distribution") if self.drafter is not None else ():
            if (value := getattr(self, name)) != defaults[name]:
                raise ValueError(f"{name}={value!r} has no meaning where a model drafts; leave it out")

    @property
    def limit(self) -> tuple[bool, float]:
        """What the neighbours may add: `additive` and `bound` of `relaxed_probability`."""
        return True, self.delta

    def accept(self, window: DraftWindow) -> Tensor:
        """min(1, m(x) / q(x))."""
        assert window.embeddings is not None  # `compared_embeddings` has seen to it
        x = window.drafts.tokens
        # a one-hot p has nothing to move; delta=1 would let its every neighbour be accepted for it
        neighbour_ids = neighbours(window.embeddings, x, self.k)
        neighbour_ids.masked_fill_((window.p.amax(-1) == 1).unsqueeze(-1), -1)
        mass, _ = relaxed_probability(window.p, x, neighbour_ids, *self.limit)
        return (mass / window.drafts.draft_probability()).clamp(max=1)

    def node_rule(self, state: CausalState) -> NodeRule:
        assert state.embeddings is not None  # likewise
        # a one-hot distribution has no neighbours to add, and a rejected draft must not take its token along
        k = self.k if state.request.temperature else 0
        return NodeRule(state.embeddings, k, *self.limit, not isinstance(self.tree, DynamicTree), state.allowed)


@dataclass(frozen=True)
class LanternPlusPlus(Lantern):
    """LANTERN whose limit grows with the draft's own probability: the neighbours add at most (lam - 1) p(x). Not
    lossless; lam=1 is SJD.

    Args:
        k: neighbours looked at.
        lam: the paper's lambda.
        delta: takes no part.
        drafter, tree, guess_distribution: see `Lantern`. window, init, refresh: see `SJD`.
    """

    k: int = 10
    lam: float = 5.0

    name = "lantern++"
    paper = "LANTERN++"
    arxiv = "2502.06352"
    summary = "LANTERN whose neighbours count in proportion to the draft's own probability; not lossless"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("lam", self.lam, low=1)

    @property
    def limit(self) -> tuple[bool, float]:
        return False, self.lam


class NodeRule(Sequential):
    """The public code's rule for a node of a tree (`paradec.samplers.causal.trees.Rule`). Not exact.

    Drafts of dynamic trees are accepted with m(x); those of static trees, drawn without replacement, with m(x) / q(x),
    q being what is left of the draft distribution; they are passed over where that is nothing. A rejected draft takes k
    + 1 neighbours along; where nothing is left every token is equally likely, as in that code.

    codes: [V, d]. k: neighbours; 0 is the rule without LANTERN. additive, bound: see `relaxed_probability`.
    sampled: whether the drafts were drawn.
    allowed: [V] bool: the tokens that are likely where nothing is left (that code: all); None is all."""

    distinct = True

    def __init__(
        self, codes: Tensor, k: int, additive: bool, bound: float, sampled: bool, allowed: Tensor | None = None
    ):
        self.codes, self.k, self.additive, self.bound, self.sampled = codes, k, additive, bound, sampled
        floor = torch.ones((), device=codes.device) if allowed is None else allowed
        self.floor = floor.to(codes.dtype)

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        rule = WithoutReplacement() if self.sampled else Naive()
        return rule.children(q, count, uniform)

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mass, removed = probability(p, x), torch.full_like(x, -1).unsqueeze(1)
        if self.k:
            neighbour_ids = neighbours(self.codes, x, self.k + 1)
            mass, any_near = relaxed_probability(p, x, neighbour_ids[..., : self.k], self.additive, self.bound)
            removed = torch.where(any_near.unsqueeze(1), neighbour_ids, -1)
        if not self.sampled:
            return mass, self._or_uniform(without(without(p, x.unsqueeze(1)), removed)), q
        q_x = probability(q, x)
        possible = (q_x > 0).unsqueeze(1)
        next_q = self._or_uniform(without(q, x.unsqueeze(1)))  # uniform only where no draft can follow
        next_p = torch.where(possible, self._or_uniform((p - without(q, removed)).clamp(min=0)), p)
        return torch.where(q_x > 0, mass / q_x, 0), next_p, next_q

    def _or_uniform(self, weights: Tensor) -> Tensor:
        """weights [R, V] of sum 1, all allowed tokens alike where there are none."""
        return normalized(torch.where((weights > 0).any(-1, keepdim=True), weights, self.floor))

"""LANTERN (arXiv 2410.03355, section 4) and LANTERN++ (arXiv 2502.06352): close code vectors are interchangeable in an
image. So verification adds to a draft's probability the probabilities of its neighbours in the codebook."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number
from paradec.samplers.causal.drafting import DraftingSampler
from paradec.samplers.causal.sjd import SJD
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import DynamicTree, Naive, Sequential, WithoutReplacement, normalize, remove_tokens
from paradec.samplers.causal.window import DraftWindow
from paradec.samplers.distributions import probability


def neighbours(codes: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Find the `count` other tokens nearest to each of tokens [...] by Euclidean distance of their codes: [..., count]
    int64, nearest first, padded with -1. codes: [V, d], NaN rows for tokens without a code."""
    distance = torch.cdist(codes[tokens.reshape(-1)], codes).nan_to_num(nan=torch.inf)
    distance.scatter_(1, tokens.reshape(-1, 1), torch.inf)
    nearest = distance.topk(min(count, len(codes) - 1), largest=False)
    return nearest.indices.masked_fill(nearest.values.isinf(), -1).unflatten(0, tokens.shape)


def relaxed_probability(
    p: Tensor, x: Tensor, neighbour_ids: Tensor, additive: bool, bound: float
) -> tuple[Tensor, Tensor]:
    """Return m(x) [...]: the probability of token x plus the probabilities of its nearest neighbours, as many as
    together stay within a limit. Also return whether any neighbour was included, [...] bool.

    p: [..., V]. x: [...]. neighbour_ids: [..., K], nearest first, padded with -1.
    additive: whether the limit is `bound`; if not, it is (bound - 1) p(x)."""
    p_x = probability(p, x)
    mass = p.gather(-1, neighbour_ids.clamp(min=0)).masked_fill(neighbour_ids < 0, 0).cumsum(-1)
    limit = torch.full_like(p_x, bound) if additive else (bound - 1) * p_x
    in_limit = (neighbour_ids >= 0) & (mass <= limit.unsqueeze(-1))  # a prefix: the sums ascend
    return p_x + mass.masked_fill(~in_limit, 0).amax(-1), in_limit.any(-1)


@dataclass(frozen=True)
class Lantern(DraftingSampler, SJD):
    """A draft x is accepted with probability min(1, m(x) / q(x)). m(x) is p(x) plus the probabilities of the nearest
    codes: at most `k` codes, with a sum of at most `delta`. A rejected draft is resampled from norm(max(0, p - q)).

    Not lossless: given a draft, p changes by at most `delta` in total variation (`benchmarks/exactness.py` measures the
    output). delta=0 is SJD (with a drafter: speculative decoding). Temperature 0 is greedy decoding for every delta,
    whereas the public code then relaxes the distribution of temperature 1.

    Without a drafter it drafts as SJD does. The public code has a trained drafter (`paradec.load_drafter`), which draws
    a static tree (`tree="mc_sim_7b_63"`) or grows a dynamic tree (`tree=DynamicTree(59, 5)`). `LanternRule` verifies
    trees. Its residual after a rejected node is not p - q. Even delta=0 is inexact if tokens have probability 0.

    Args:
        k: number of neighbours considered.
        delta: limit of the probability that neighbours add.
        drafter: a smaller model with the same tokens, or an EAGLE drafter; None drafts as SJD does.
        tree: tree of drafts, see `paradec.samplers.causal.speculative.Speculative`; None: a chain of `window - 1`.
        guess_distribution: "one_hot" accepts a random guess with probability m(x). "uniform" would accept nearly every
            guess, since `delta` is far above the probability of one token.
        window, init, refresh: see `SJD`. With a drafter, leave out `init`, `refresh` and `guess_distribution`.
    """

    guess_distribution: str = "one_hot"
    k: int = 1000
    delta: float = 0.1

    name = "lantern"
    paper = "LANTERN"
    arxiv = "2410.03355"
    summary = "SJD where a draft also counts the probability of its neighbours in the codebook; not lossless"
    lossless = False
    embedding_source = "codebook"
    accepts_matching_draw: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("k", self.k, low=1)
        check_number("delta", self.delta, low=0, high=1)
        defaults = self.settings()
        for name in ("init", "refresh", "guess_distribution") if self.drafter is not None else ():
            if (value := getattr(self, name)) != defaults[name]:
                raise ValueError(f"{name}={value!r} has no meaning with a drafter; leave it out")

    @property
    def limit(self) -> tuple[bool, float]:
        """`additive` and `bound` of `relaxed_probability`."""
        return True, self.delta

    def accept(self, window: DraftWindow) -> Tensor:
        """Return min(1, m(x) / q(x)) of each draft x."""
        assert window.embeddings is not None  # `read_embeddings` checked it
        x = window.drafts.tokens
        # no neighbours for a one-hot p: delta=1 would accept every neighbour of its token
        neighbour_ids = neighbours(window.embeddings, x, self.k)
        neighbour_ids.masked_fill_((window.p.amax(-1) == 1).unsqueeze(-1), -1)
        mass, _ = relaxed_probability(window.p, x, neighbour_ids, *self.limit)
        return (mass / window.drafts.draft_probability()).clamp(max=1)

    def node_rule(self, state: CausalState) -> LanternRule:
        assert state.embeddings is not None  # `read_embeddings` checked it
        # no neighbours at temperature 0: a rejected draft must not remove the only token of a one-hot p
        k = self.k if state.request.temperature else 0
        return LanternRule(state.embeddings, k, *self.limit, not isinstance(self.tree, DynamicTree), state.allowed)


@dataclass(frozen=True)
class LanternPlusPlus(Lantern):
    """LANTERN with a limit proportional to the draft's own probability: neighbours add at most (lam - 1) p(x). Not
    lossless; lam=1 is SJD.

    Args:
        k: number of neighbours considered.
        lam: the paper's lambda.
        delta: not used.
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


class LanternRule(Sequential):
    """The public code's `paradec.samplers.causal.trees.TreeRule` for the nodes of a tree. Not exact.

    A draft of a dynamic tree is accepted with probability m(x). Drafts of a static tree are drawn without replacement.
    Such a draft is accepted with probability m(x) / q(x), where q is the draft distribution without the drafts before
    it; a draft with q(x) = 0 is skipped. If m(x) counts a neighbour, a rejection also removes the k + 1 nearest codes:
    from p (dynamic tree), or from the q that is subtracted (static tree). If nothing remains, p is uniform.

    codes: [V, d]. k: number of neighbours; 0: the rule without LANTERN. additive, bound: see `relaxed_probability`.
    sampled: whether the drafts were drawn (static trees).
    allowed: [V] bool: tokens that are equally likely if no probability remains; None: all, as in the public code."""

    distinct = True

    def __init__(
        self, codes: Tensor, k: int, additive: bool, bound: float, sampled: bool, allowed: Tensor | None = None
    ):
        self.codes, self.k, self.additive, self.bound, self.sampled = codes, k, additive, bound, sampled
        weights = torch.ones((), device=codes.device) if allowed is None else allowed
        self.uniform_weights = weights.to(codes.dtype)

    def children(self, q: Tensor, count: int, uniform: Tensor) -> Tensor:
        rule = WithoutReplacement() if self.sampled else Naive()
        return rule.children(q, count, uniform)

    def step(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mass, removed = probability(p, x), torch.full_like(x, -1).unsqueeze(1)
        if self.k:
            neighbour_ids = neighbours(self.codes, x, self.k + 1)
            mass, has_neighbours = relaxed_probability(p, x, neighbour_ids[..., : self.k], self.additive, self.bound)
            removed = torch.where(has_neighbours.unsqueeze(1), neighbour_ids, -1)
        if not self.sampled:
            return mass, self._normalize_or_uniform(remove_tokens(remove_tokens(p, x.unsqueeze(1)), removed)), q
        q_x = probability(q, x)
        is_possible = (q_x > 0).unsqueeze(1)
        next_q = self._normalize_or_uniform(remove_tokens(q, x.unsqueeze(1)))  # uniform only where no draft can follow
        next_p = torch.where(is_possible, self._normalize_or_uniform((p - remove_tokens(q, removed)).clamp(min=0)), p)
        return torch.where(q_x > 0, mass / q_x, 0), next_p, next_q

    def _normalize_or_uniform(self, weights: Tensor) -> Tensor:
        """Normalise weights [R, V]; if all are 0, the allowed tokens are equally likely."""
        return normalize(torch.where((weights > 0).any(-1, keepdim=True), weights, self.uniform_weights))

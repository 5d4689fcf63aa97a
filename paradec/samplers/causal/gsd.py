"""Grouped speculative decoding (arXiv 2508.07747, section 4): verification compares the probabilities of groups of
similar tokens. Many image tokens are alike, so that each has a low probability, and exact verification rejects most
drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number
from paradec.samplers.causal.sjd import SJD
from paradec.samplers.causal.window import DraftWindow
from paradec.samplers.distributions import sort_ascending

MAX_COMPARED_ID = 10_000
"""A group with a higher id is not filtered by the distance of embeddings, as in the public code."""


def rank_window(p: Tensor, tokens: Tensor, half_width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rank [..., 1] of tokens [..., 1] by ascending p [..., V] (ties: lower id first); the ranks around it,
    from -half_width to half_width - 1, [..., 2 * half_width]; and the tokens of these ranks, clamped to [0, V)."""
    ids = torch.arange(p.shape[-1], device=p.device)
    if p.dtype == torch.float32:
        # the bits of a float >= 0 sort like the float; the id in the lower 32 bits breaks ties
        keys = p.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(ids)
        order = sort_ascending(keys)
        rank = torch.searchsorted(order, keys.gather(-1, tokens))
    else:
        order = p.argsort(dim=-1, stable=True)
        rank = (order == tokens).int().argmax(-1, keepdim=True)
    ranks = rank + torch.arange(-half_width, half_width, device=p.device)
    return rank, ranks, order.gather(-1, ranks.clamp(0, len(ids) - 1)) & 0xFFFFFFFF  # the id in a key's lower bits


@dataclass(frozen=True)
class GSD(SJD):
    """A draft x is accepted with probability min(1, p(G) / q(G)) for the group G of x; the accepted token is x itself.

    G is taken from the tokens ordered by p: `group_half_width` before x, x, and `group_half_width - 1` after x. A token
    belongs to G if its probability differs from p(x) by less than `p_threshold` and its input embedding lies within
    `d_threshold` (squared Euclidean distance). If fewer than `group_half_width` tokens precede x, G is x alone.

    Not lossless: biased towards the draft distribution (`benchmarks/exactness.py` measures it).

    Args:
        group_half_width, p_threshold, d_threshold: define the group. d_threshold=None compares no embeddings. As in the
            public code, the embeddings of groups with an id above 10000 are not compared.
        guess_distribution: q of random guesses, as for `SJD`. "one_hot" makes q(G) = 1, which gives most of the gain.
        window, init, refresh: see `SJD`.
    """

    guess_distribution: str = "one_hot"
    group_half_width: int = 7
    p_threshold: float = 0.15
    d_threshold: float | None = 0.5

    name = "gsd"
    paper = "GSD"
    arxiv = "2508.07747"
    summary = "SJD that verifies groups of tokens that the model finds alike; more drafts are accepted, not lossless"
    lossless = False
    embedding_source = property(  # type: ignore[assignment]
        lambda self: "" if self.d_threshold is None else "token_embeddings"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("group_half_width", self.group_half_width, low=1, high=256)
        check_number("p_threshold", self.p_threshold, low=0, high=1, open_low=True)
        check_number("d_threshold", self.d_threshold, low=0, none=True, open_low=True)

    def accept(self, window: DraftWindow) -> Tensor:
        """Return min(1, p(G) / q(G)) of each draft x; if too few tokens precede x, min(1, p(x) / q(x))."""
        half_width, x, embeddings = self.group_half_width, window.drafts.tokens.unsqueeze(-1), window.embeddings
        rank, ranks, group = rank_window(window.p, x, half_width)
        in_range, p = ranks < window.p.shape[-1], window.p.gather(-1, group)
        is_member = in_range & ((p - window.p.gather(-1, x)).abs() < self.p_threshold)
        if self.d_threshold is not None and embeddings is not None:
            is_near = (embeddings[group] - embeddings[x]).square().sum(-1) < self.d_threshold
            # as in the public code, ids that the probability threshold excludes count too
            has_large_id = ((group > MAX_COMPARED_ID) & in_range).any(-1, keepdim=True)
            is_member &= is_near | has_large_id
        is_member |= ranks == rank
        p_group = torch.where(is_member, p, 0).sum(-1)  # p(G)
        q_group = torch.where(is_member, window.drafts.probability_of(group), 0).sum(-1)  # q(G)
        return torch.where(rank.squeeze(-1) < half_width, super().accept(window), (p_group / q_group).clamp(max=1))

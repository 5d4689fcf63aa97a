"""Numbers read from logits, under the names that samplers declare; filters of the sampling distribution.

How they are computed is `paradec.kernels.token_stats`' business. Scores are float64 whatever the path: trained models
are so confident of many positions that float32 probabilities tie at 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats import SMALL_VOCABULARY, path_for, read_stats

QUANTITIES = ("confidence", "margin", "negative_entropy", "minus_entropy", "best_token", "logit_gap")
FIELDS = {
    "margin": "margin",
    "negative_entropy": "smoothed_entropy",
    "minus_entropy": "entropy",
    "logit_gap": "gap",
}
"""What the quantities are called in `TokenStats`; entropies with the other sign, so that higher is more confident."""
IN_ONE_READ = FIELDS | {"negative_entropy": "entropy"}
"""The same where a second read, or a second logarithm, would cost more than the first."""
CHUNK = 2**25
"""Logits of an accelerator held in float32 at a time: 128 MB."""
CPU_CHUNK = 2**19
"""The same on the CPU: what stays in its caches is twice as fast."""
TINY = 1e-12
HEAD = 2**12
"""Tokens that a nucleus is looked for in before all others are."""


def tempered(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Logits [..., V] less the largest of their row, over a temperature (a number, or broadcastable): no finite row
    overflows, however low the temperature. Softmax is that of logits / temperature. Rows of -inf alone are NaN, and so
    is what is +inf or NaN."""
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature)


def log_of(p: Tensor) -> Tensor:
    """ln of distributions [..., V], -inf where a probability is 0 or no normal number of its type: a processor's
    logarithm takes ten times as long over these."""
    least = torch.finfo(p.dtype).tiny
    return torch.threshold_(p.clamp(min=least).log_(), math.log(2 * least), -torch.inf)


def divided(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature [..., V] to the bit, as public codes have them; `tempered` in rows where that overflows."""
    top = logits.amax(-1, keepdim=True)
    beyond = (top / temperature).isinf() & top.isfinite()
    return (logits - top.where(beyond, 0)).div_(temperature)


def token_statistics(
    logits: Tensor, reads: tuple[str, ...], tokens: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Statistics of each position's distribution softmax(logits).

    Args:
        logits: [..., V] of any float dtype; -inf excludes a token.
        reads: which of `QUANTITIES` to compute.
        tokens: [...] int64: "confidence" is the probability of these; None takes the best token (lowest id on ties).

    Returns:
        The tokens [...] int64, and the quantities by name, each [...] float64: "confidence" p(token), "margin"
        p(1st) - p(2nd), "minus_entropy" sum p ln p, "negative_entropy" sum p ln(p + 1e-10) (Dream's form; higher is
        more confident), "best_token" the likeliest token (int64), "logit_gap" z(1st) - z(2nd). All but the last two are
        NaN where a logit is NaN or +inf. Large vocabularies, which are read in float32, have sum p ln p in place of
        Dream's form: less by 1e-10 a token at most, where its second logarithm would cost more than all else.
    """
    fields = FIELDS
    if "negative_entropy" in reads and path_for(logits) != "float64":
        fields = IN_ONE_READ
    stats = read_stats(logits, _wanted(reads, fields is FIELDS), ids=tokens)
    found: dict[str, Tensor] = {}
    for name in reads:
        if name == "confidence":
            found[name] = getattr(stats, "prob" if tokens is None else "ids_prob")
        elif name == "best_token":
            found[name] = stats.token
        else:
            value = getattr(stats, fields[name])
            found[name] = -value if name.endswith("entropy") else value
    return stats.token if tokens is None else tokens, found


@lru_cache(maxsize=64)
def _wanted(reads: tuple[str, ...], smoothed: bool) -> frozenset[str]:
    fields = FIELDS if smoothed else IN_ONE_READ
    return frozenset(fields[name] for name in reads if name in fields)


def _chunks(logits: Tensor) -> tuple[Tensor, ...]:
    """[..., V] as pieces [n, V] of a bounded size."""
    rows = max(1, (CPU_CHUNK if logits.is_cpu else CHUNK) // logits.shape[-1])
    return logits.reshape(-1, logits.shape[-1]).split(rows)


def best_with_probability(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best token [...] (int64) of logits [..., V], and its probability [...], in float32 at least: enough where it
    is not compared with a threshold, and cheap."""
    if path_for(logits) != "float64":
        stats = read_stats(logits, frozenset())
        return stats.token, stats.prob
    # a small vocabulary takes half the time of float64 in float32
    best = logits.argmax(-1, keepdim=True)
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    return best.squeeze(-1), p.gather(-1, best).squeeze(-1)


@dataclass(frozen=True)
class Raised:
    """Logits of which a few tokens per position are raised, unwritten: a confidence follows from what was read of the
    logits before, without reading them again. Shapes: `K` tokens of every position."""

    logits: Tensor
    """[..., V]."""
    best: Tensor
    """[...] int64: the best token before."""
    prob: Tensor
    """[...] float64: its probability before."""
    ids: Tensor
    """[..., K] int64, distinct within a position; -1 raises nothing."""
    by: Tensor
    """[..., K] float, at least 0."""

    def written(self) -> Tensor:
        """The raised logits [..., V], a copy, in float32 at least: bfloat16 would round the difference away."""
        copy = self.logits.to(torch.promote_types(self.logits.dtype, torch.float32), copy=True)
        return copy.scatter_add_(-1, self.ids.clamp(min=0), self.by.where(self.ids >= 0, 0).to(copy.dtype))

    def statistics(self) -> tuple[Tensor, Tensor]:
        """The best token [...] int64 after raising (the lowest id on ties), and its probability [...] float64."""
        best = self.best.unsqueeze(-1)
        tokens = torch.cat((best, self.ids.clamp(min=0)), -1)
        z = self.logits.gather(-1, tokens).double()
        z = z - z[..., :1]
        by = torch.cat((self.by.where(self.ids == best, 0).sum(-1, keepdim=True), self.by), -1).double()
        # the best token is counted once, and tokens that are not there not at all
        counted = torch.cat((torch.ones_like(best, dtype=torch.bool), (self.ids >= 0) & (self.ids != best)), -1)
        higher = (z + by).where(counted, -torch.inf)
        top = higher.amax(-1, keepdim=True)
        # all shares are of what the best token has now, so that no credit is too high for them
        raised, share = (higher - top).exp(), (z - top).exp().where(counted, 0)
        total = (-top.squeeze(-1)).exp() / self.prob + (raised - share).sum(-1)
        most = raised.amax(-1)
        first = tokens.where(counted & (raised == most.unsqueeze(-1)), torch.iinfo(torch.int64).max).amin(-1)
        # where a logit is NaN no token is the first one
        return first.where(most.isfinite(), self.best), most / total


def written(logits: Tensor | Raised) -> Tensor:
    """Logits [..., V], written out if they are not."""
    return logits.written() if isinstance(logits, Raised) else logits


def raise_tokens(logits: Tensor, best: Tensor, prob: Tensor, ids: Tensor, by: Tensor) -> Tensor | Raised:
    """Logits [..., V] with the tokens `ids` [..., K] higher by `by` [..., K]; arguments as in `Raised`. They are
    written where a second read costs next to nothing, and is exact to the last digit: in small vocabularies."""
    raised = Raised(logits, best, prob, ids, by)
    return raised.written() if path_for(logits) == "float64" else raised


def divergence(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """p = softmax(logits) [..., V] in float32, and KL(p || previous) [...] in nats, with 1e-12 added to both within
    the logarithm: tokens that `previous` excludes count finitely."""
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).float()
    pairs = zip(_chunks(p), _chunks(previous), strict=True)
    kl = [torch.linalg.vecdot(now, ((now + TINY) / (before + TINY)).log_()) for now, before in pairs]
    return p, torch.cat(kl).view(p.shape[:-1])


def guided(logits: Tensor, scale: float | Tensor) -> Tensor:
    """uncond + s (cond - uncond) of a call's logits [2N, W, V], whose first half is conditional: [N, W, V].

    It is float32 at least, for scaled logits can leave the range of float16. scale: s, a number or [N, 1, 1].

    The guided distribution is proportional to p_cond^s p_uncond^(1 - s). Where a branch excludes a token (-inf), that
    distribution's limit is taken: what both exclude stays excluded; so does what the conditional branch alone excludes,
    at s > 0; what the unconditional branch alone excludes is excluded at s < 1, keeps its conditional logit at 1, and
    above 1 it and its like take all the mass, in proportion to p_cond^s. NaN and +inf of either branch stay NaN or
    +inf.
    """
    conditional, unconditional = logits.to(torch.promote_types(logits.dtype, torch.float32)).chunk(2)
    mixed = conditional - unconditional
    # in place, since a large tensor more costs as much as the sum; scales of their own may be of a wider type
    mixed = scale * mixed + unconditional if isinstance(scale, Tensor) else mixed.mul_(scale).add_(unconditional)
    if mixed.is_cpu and not mixed.sum().isnan():  # elsewhere a look would wait for the device
        return mixed
    out, gone = conditional == -torch.inf, unconditional == -torch.inf
    sole = gone & ~out & (scale > 1)
    mixed = torch.where(gone, scale * conditional, mixed)
    lost = sole.any(-1, keepdim=True) & ~gone & (mixed < torch.inf)  # False where it is NaN
    lost |= out & (unconditional < torch.inf) & (scale > 0)
    lost |= gone & (conditional < torch.inf) & (scale < 1)
    mixed = mixed.masked_fill(lost, -torch.inf)
    # at 0 what the conditional branch says does not matter
    return torch.where(out & (scale == 0), unconditional, mixed) if isinstance(scale, Tensor) or not scale else mixed


def filter_logits(logits: Tensor, top_p: float | None, top_k: int | None, top_n_sigma: float | None = None) -> Tensor:
    """Exclude (-inf) all but the nucleus of mass `top_p`, then all but the `top_k` best, then all but those within
    `top_n_sigma` standard deviations of the best (`near_the_best`). logits: [..., V].

    Dream's order; the token that crosses `top_p` stays in, and so does the best one always. Tokens as good as the
    `top_k`-th stay; which of equal tokens the nucleus ends with is left to `torch.sort`.
    """
    if top_n_sigma is not None:
        return near_the_best(filter_logits(logits, top_p, top_k), top_n_sigma)
    nucleus = top_p is not None and top_p < 1
    if not nucleus and (top_k is None or top_k >= logits.shape[-1]):
        return logits
    if not logits.is_cpu or logits.dtype not in (torch.float32, torch.float64):
        return _filter_by_rank(logits, top_p, top_k)
    least, known = _least_kept(logits.detach(), top_p if nucleus else None, top_k)
    filtered = _without_less(logits.detach(), least)
    if not known.all():
        filtered[~known] = _filter_by_rank(logits[~known], top_p, top_k)
    return filtered


def filtered_distribution(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """What a token is drawn from: logits [..., V] -> [..., V], float32 at least; one-hot on the best at temperature 0.
    NaN where no logit is finite.

    The order of LlamaGen's public code and its kin: the temperature, then top-k, then top-p of what is left. The token
    that crosses `top_p` stays.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        best = argmax(logits).unsqueeze(-1)
        one_hot = torch.zeros_like(logits).scatter_(-1, best, 1)
        return one_hot.masked_fill_(~logits.gather(-1, best).isfinite(), torch.nan)
    kept = filter_logits(tempered(logits, temperature), None, top_k)
    return filter_logits(kept, top_p, None).softmax(-1)


def near_the_best(logits: Tensor, count: float) -> Tensor:
    """Exclude (-inf) logits [..., V] that are more than `count` standard deviations below the best of their row.

    Tang et al., "Top-nsigma: Not All Logits Are You Need", arXiv 2411.07641. The deviation is that of the row's finite
    logits about their mean (divisor N), in float64. Neither an offset nor a temperature changes what is kept. What
    Lumina-mGPT 2.0 computes where logits are excluded already is their root mean square about zero, which an offset
    changes. Rows with NaN or +inf stay as they are.
    """
    return torch.cat([_near_the_best(rows, count) for rows in _chunks(logits)]).view(logits.shape)


def _near_the_best(logits: Tensor, count: float) -> Tensor:
    """The same of [n, V]."""
    finite = logits.isfinite()
    below = logits.double() - logits.amax(-1, keepdim=True)
    known = below.where(finite, 0)
    number = finite.sum(-1, keepdim=True).clamp(min=1)
    # as shares of the widest distance: squares stay in range
    widest = known.amin(-1, keepdim=True).neg().clamp(min=torch.finfo(torch.float64).tiny)
    share = known / widest
    spread = (share - share.sum(-1, keepdim=True) / number).where(finite, 0)
    sigma = (spread.square().sum(-1, keepdim=True) / number).sqrt() * widest
    return logits.masked_fill(below < -count * sigma, -torch.inf)


def _filter_by_rank(logits: Tensor, top_p: float | None, top_k: int | None) -> Tensor:
    """`filter_logits` token by token."""
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        out = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p > top_p)
        logits = logits.masked_fill(out, -torch.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    return logits


def _least_kept(logits: Tensor, top_p: float | None, top_k: int | None) -> tuple[Tensor, Tensor]:
    """The least logit [...] that `filter_logits` keeps, and whether that says it all [...]: not where it keeps some of
    several equal tokens. On the CPU."""
    if logits.numel() > CPU_CHUNK and len(parts := _chunks(logits)) > 1:
        found = zip(*(_least_kept(rows, top_p, top_k) for rows in parts), strict=True)
        least, known = (torch.cat(each).view(logits.shape[:-1]) for each in found)
        return least, known
    size = logits.shape[-1]
    top_k = size if top_k is None else min(top_k, size)
    if top_p is None:
        # numpy's search takes ten times as long over rows that are mostly -inf; from the other end it does not
        negated = -logits.numpy()
        negated.partition(top_k - 1)
        kth = torch.from_numpy(negated)[..., top_k - 1].neg()
        return kth, torch.ones_like(kth, dtype=torch.bool)
    ordered = ascending(logits).flip(-1)
    p = ordered.softmax(-1)[..., :top_k]
    # from some token on all are out: sums grow, shares fall, and rounding keeps their order
    part = p[..., :HEAD]
    out = part.cumsum(-1) - part > top_p
    if top_k > HEAD and not out[..., -1].all():
        part = p
        out = part.cumsum(-1) - part > top_p
    kept = part.shape[-1] - out.sum(-1, keepdim=True)
    least, following = ordered.gather(-1, kept - 1), ordered.gather(-1, kept.clamp(max=size - 1))
    known = (least > following) | (kept == size) | (least == -torch.inf)
    return least.squeeze(-1), known.squeeze(-1)


def _without_less(logits: Tensor, least: Tensor) -> Tensor:
    """Logits [..., V] with -inf for what is less than `least` [...]. On the CPU."""
    size = logits.shape[-1]
    if size <= SMALL_VOCABULARY:
        return torch.where(logits < least.unsqueeze(-1), -torch.inf, logits)
    filtered = torch.empty(logits.shape, dtype=logits.dtype)
    # row by row with one number each: a comparison with a tensor takes six times as long
    bounds = least.nextafter(torch.full_like(least, -torch.inf)).flatten().tolist()
    for row, out, bound in zip(logits.reshape(-1, size), filtered.view(-1, size), bounds, strict=True):
        torch.threshold(row, bound, -torch.inf, out=out)
    return filtered


def ascending(values: Tensor) -> Tensor:
    """Values [..., N] in ascending order. On the CPU by numpy, which sorts values an order of magnitude faster than
    torch sorts values and places."""
    return torch.from_numpy(np.sort(values.numpy())) if values.is_cpu else values.sort(-1).values


def argmax(values: Tensor) -> Tensor:
    """Where the largest of values [..., N] is, [...] int64, the first on ties. Float32 or float64: on the CPU numpy's
    search is again an order of magnitude faster."""
    return torch.as_tensor(values.detach().numpy().argmax(-1)) if values.is_cpu else values.argmax(-1)


def top_by_rank(scores: Tensor, count: np.ndarray | Tensor) -> Tensor:
    """The `count` highest scores of each row; equal scores go to the lower index.

    Args:
        scores: [R, W], -inf where not eligible.
        count: [R] int64, on the host or the device.

    Returns:
        [R, W] bool; never an ineligible entry.
    """
    if isinstance(count, np.ndarray):
        if set(count.tolist()) == {1}:  # one token a step needs no sort
            at = scores.argmax(-1, keepdim=True)
            return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, at, scores.gather(-1, at) > -torch.inf)
        count = torch.as_tensor(count, device=scores.device)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    within = torch.arange(scores.shape[-1], device=scores.device) < count.unsqueeze(-1)
    return torch.zeros_like(within).scatter(-1, order, within) & (scores > -torch.inf)


def best_one(scores: Tensor) -> Tensor:
    """The highest score of each row [R, W] (the lowest index on ties), as a [R, W] bool mask."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.argmax(-1, keepdim=True), True)

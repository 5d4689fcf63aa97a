"""The PyTorch paths, "float64" and "chunked": a few rows at a time, which stay in a processor's caches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paradec.core import rng
from paradec.kernels.token_stats.reference import EPSILON, GumbelDraws, TokenStats

CPU_CHUNK = 2**17
"""Tokens that "chunked" holds at a time on the CPU, if a row is no longer: 0.5 MB, which pays for the calls and is
still near the core, twice and beside the logits."""
SEARCH_CHUNK = 2**22
"""Tokens among which "chunked" looks for the two best of each row at a time on the CPU: few enough to be there still
when they are read again."""
FLOAT64_CPU_CHUNK = 2**17
"""The same for "float64": 1 MB."""
LONG = 2**11
"""Tokens from which on "float64" looks among stretches first."""
CHUNK = 2**25
"""The same on accelerators."""
NOISE_CHUNK = 2**22
"""The same where noise is drawn, which takes some 100 bytes a token while it is made."""
STRETCH = 2**9
"""Tokens whose largest logit is found before an index is looked for; less where that divides the vocabulary."""
FLOOR = -73.5
"""Where a token's difference to the second best, over the temperature, is cut off: what is below 2**-106 of it is
nothing beside it in float64. Processors take ten times as long over an exponential whose result is no normal number, as
at low temperatures and of excluded tokens."""


def portable_stats(
    path: str, logits: Tensor, wanted: frozenset[str], temperature: float, ids: Tensor | None, draws: GumbelDraws | None
) -> TokenStats:
    """`token_stats`, unchecked. path: "float64" or "chunked"."""
    if draws is not None:
        sample = _samples(logits, draws)
        asked = sample if ids is None else torch.cat((ids.reshape(*sample.shape, -1), sample.unsqueeze(-1)), -1)
        found = portable_stats(path, logits, wanted, temperature, asked, None)
        if ids is None:
            return found._replace(ids_prob=None, sample=sample, sample_prob=found.ids_prob)
        both = found.ids_prob
        assert both is not None
        return found._replace(ids_prob=both[..., :-1].reshape(ids.shape), sample=sample, sample_prob=both[..., -1])
    if path == "chunked":
        return _from_sums(_all_sums(logits, wanted, temperature), logits, wanted, temperature, ids)
    logits = logits.detach()
    if logits.numel() <= (FLOAT64_CPU_CHUNK if logits.is_cpu else CHUNK):
        return _float64_stats(logits, wanted, temperature, ids)
    lead, parts, at = logits.shape[:-1], [], 0
    pieces = list(_pieces(logits, FLOAT64_CPU_CHUNK, CHUNK))
    queue = None if ids is None else ids.reshape(-1, *ids.shape[len(lead) :])
    # memory that is new for every piece takes longer than the passes over it
    shape = (2, max(map(len, pieces)), logits.shape[-1])
    scratch = torch.empty(shape, dtype=torch.float64, device=logits.device)
    for rows in pieces:
        here = slice(at, at + len(rows))
        own = None if queue is None else queue[here]
        parts.append(_float64_stats(rows, wanted, temperature, own, scratch[:, : len(rows)]))
        at = here.stop
    fields: list[Any] = [None if each is None else each.view(lead + each.shape[1:]) for each in _joined(parts)]
    return TokenStats(*fields)


def _joined(parts: Iterable[tuple[Tensor | None, ...]]) -> list[Any]:
    """Field by field, the parts' rows one below the other."""
    return [None if field[0] is None else _one(field) for field in zip(*parts, strict=True)]


def _pieces(logits: Tensor, on_cpu: int, elsewhere: int) -> Iterator[Tensor]:
    """[..., V] as views [n, V] of about so many tokens, in order: one at least."""
    rows = max(1, (on_cpu if logits.is_cpu else elsewhere) // logits.shape[-1])
    if logits.dim() <= 2 or logits.is_contiguous() or not logits.numel():
        yield from logits.reshape(-1, logits.shape[-1]).split(rows)
    else:
        for part in logits:
            yield from _pieces(part, on_cpu, elsewhere)


def _float64_stats(
    logits: Tensor, wanted: frozenset[str], temperature: float, ids: Tensor | None, scratch: Tensor | None = None
) -> TokenStats:
    """In float64 and few passes, all at once in memory. scratch: two tensors of the logits' shape, overwritten; None
    makes them."""
    # what follows works in place where it can: these passes over the vocabulary are most of a small model's step
    probabilities, wide = (None, None) if scratch is None else scratch.unbind(0)
    if wide is not None or temperature != 1 or "entropy" in wanted or "smoothed_entropy" in wanted:
        wide = logits.to(torch.float64, copy=True) if wide is None else wide.copy_(logits)
        if temperature != 1:
            # what is divided are differences, which stay finite, or -inf, at every temperature
            wide.sub_(wide.amax(-1, keepdim=True)).div_(temperature)
        p = torch.softmax(wide, -1, out=probabilities)
    else:
        p = torch.softmax(logits, -1, dtype=torch.float64)
    best, first = _best(p)
    if not wanted and ids is None:
        return TokenStats(first, best)
    ids_prob = second = margin = entropy = smoothed = gap = logsumexp = nonfinite = None
    if ids is not None:
        ids_prob = p.gather(-1, ids) if ids.dim() == p.dim() else p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if "gap" in wanted:
        highest = logits.topk(min(2, logits.shape[-1]), dim=-1).values.double()
        gap = highest[..., 0] - highest[..., 1] if logits.shape[-1] > 1 else torch.full_like(best, torch.inf)
    if "smoothed_entropy" in wanted:
        # `wide` is free to be overwritten where the other entropy does not need it
        logarithm = (p + EPSILON).log_() if "entropy" in wanted else torch.add(p, EPSILON, out=wide).log_()
        smoothed = -logarithm.mul_(p).sum(-1)
    if not wanted.isdisjoint(("second_prob", "margin", "entropy", "logsumexp")):
        at = first.unsqueeze(-1)
        if "entropy" in wanted:
            # sum p (z - z_best) + ln p_best needs no logarithm per token; both terms are negative, so nothing cancels
            assert wide is not None
            spread = wide.sub_(wide.gather(-1, at)).clamp_(min=torch.finfo(torch.float64).min).mul_(p).sum(-1)
        p.scatter_(-1, at, 0)
        if "entropy" in wanted or "logsumexp" in wanted:
            beyond = (p.sum(-1) / best).log1p()  # -ln p_best
        if "entropy" in wanted:
            entropy = beyond - spread
        if "logsumexp" in wanted:
            logsumexp = logits.gather(-1, at).squeeze(-1).double() / temperature + beyond
        if "second_prob" in wanted or "margin" in wanted:
            second = p.amax(-1)
            margin = best - second
    if "nonfinite" in wanted:
        nonfinite = best.isnan()
    return TokenStats(first, best, second, margin, entropy, smoothed, logsumexp, gap, nonfinite, ids_prob)


class _Sums(NamedTuple):
    """What the portable path reads of rows [N, V]; all else follows from it at once for all rows. Each [N], float64 but
    for `token`. Shares are exp((logit - second) / temperature): what is far below the second best is too small for
    float32 only where it is too small beside it, however probable the best token is."""

    token: Tensor
    top: Tensor
    """The largest logit."""
    second: Tensor
    """The second largest; -inf where there is none."""
    mass: Tensor
    """Sum of the shares of all tokens but the best."""
    weight: Tensor | None
    """Sum of share x (logit - second) / temperature over them."""
    others: Tensor | None
    """Sum of p / (p + EPSILON / 2) over them."""


def _all_sums(logits: Tensor, wanted: frozenset[str], temperature: float) -> _Sums:
    """Of all rows of [..., V], each field [N]."""
    groups = list(_pieces(logits.detach(), SEARCH_CHUNK, CHUNK))
    rows, vocab = max(map(len, groups)), logits.shape[-1]
    most = max(1, min(rows, (CPU_CHUNK if logits.is_cpu else CHUNK) // vocab))
    reads_shares = "entropy" in wanted or "smoothed_entropy" in wanted
    # in one piece: of two, allocators give both back and ask for them again at every call
    scratch = torch.empty((1 + reads_shares, most, vocab), dtype=torch.float32, device=logits.device)
    return _Sums(*_joined(_sums(group, wanted, temperature, scratch) for group in groups))


def _sums(logits: Tensor, wanted: frozenset[str], temperature: float, scratch: Tensor) -> _Sums:
    """Of rows [n, V]. scratch: [2, m, V] float32, overwritten m rows at a time; [1, m, V] where no entropy is
    wanted."""
    at, top, second = _two_best(logits)
    base = second.where(second > -torch.inf, top)
    if logits.dtype.itemsize < 4:  # differences would be rounded to it
        base = base.float()
    top, second = top.double(), second.double()
    masses, weights, others = [], [], []
    most, start = scratch.shape[1], 0
    for rows, own, best in zip(logits.split(most), base.split(most), at.split(most), strict=True):
        apart, share = scratch[0, : len(rows)], scratch[-1, : len(rows)]
        if rows.dtype != own.dtype:
            rows = apart.copy_(rows)
        torch.sub(rows, own, out=apart)
        if temperature != 1:
            apart.mul_(1 / temperature)
        apart.clamp_(min=FLOOR).scatter_(-1, best, FLOOR)
        torch.exp(apart, out=share)
        masses.append(share.sum(-1))
        if "smoothed_entropy" in wanted:
            # with s the share, p / (p + EPSILON / 2) is 1 - h / (s + h), where h is EPSILON / 2 as a share
            here = slice(start, start + len(rows))
            scale = ((second[here] - top[here]) / temperature).exp()  # of the second best beside the best
            half = (EPSILON / 2 * (1 + scale * masses[-1].unsqueeze(-1)) / scale).clamp(max=1e30)
            least = torch.add(share, half.float()).reciprocal_().sum(-1)
            others.append(share.shape[-1] - half.squeeze(-1) * least)
        if "entropy" in wanted or "smoothed_entropy" in wanted:
            weights.append(share.mul_(apart).sum(-1))
        start += len(rows)
    mass, weight, beyond = (_one(each).double() if each else None for each in (masses, weights, others))
    assert mass is not None
    return _Sums(at.squeeze(-1), top.squeeze(-1), second.squeeze(-1), mass, weight, beyond)


def _one(parts: Sequence[Tensor]) -> Tensor:
    """The parts' rows one below the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _from_sums(
    sums: _Sums, logits: Tensor, wanted: frozenset[str], temperature: float, ids: Tensor | None
) -> TokenStats:
    """Statistics of logits [..., V] from the fields of `_Sums` for each of their rows."""
    lead = logits.shape[:-1]
    token, top, second, mass = (each.view(lead) for each in sums[:4])
    weight, others = (None if each is None else each.view(lead) for each in sums[4:])
    nonfinite = (top.abs() < torch.inf).logical_not_()  # the largest of NaN and anything is NaN
    below = (second - top) / temperature
    ratio = below.exp()
    rest = ratio * mass
    total = 1 + rest
    best = total.reciprocal().masked_fill_(nonfinite, torch.nan)
    ids_prob = second_prob = margin = entropy = smoothed = logsumexp = gap = None
    if ids is not None:
        chosen = logits.gather(-1, ids if ids.dim() == logits.dim() else ids.unsqueeze(-1)).double()
        ids_prob = (((chosen - top.unsqueeze(-1)) / temperature).exp() * best.unsqueeze(-1)).view(ids.shape)
    if "second_prob" in wanted or "margin" in wanted:
        second_prob = ratio * best
        margin = best - second_prob
    if weight is not None:
        # sum of exp(z) z over the others, with z = (logit - top) / temperature; of no share, where none is left
        spread = ((weight + mass * below) * ratio).masked_fill_(ratio == 0, 0)
        entropy = (rest.log1p() - spread / total).masked_fill_(nonfinite, torch.nan)
        if others is not None:
            # p ln(p + e) is p ln p + p ln(1 + e/p), and that addend e p / (p + e/2) to within e/13: no second logarithm
            smoothed = entropy - EPSILON * others - best * (EPSILON / best).log1p()
    if "logsumexp" in wanted:
        logsumexp = (top / temperature + rest.log1p()).masked_fill_(nonfinite, torch.nan)
    if "gap" in wanted:
        gap = (top - second).masked_fill_(nonfinite, torch.nan)
    return TokenStats(token, best, second_prob, margin, entropy, smoothed, logsumexp, gap, nonfinite, ids_prob)


def _best(source: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry of [..., V] and where it is, [...] each; the lowest index on ties. A search that remembers
    indices takes ten times as long as one that does not, which long rows repay."""
    size = next((size for size in (128, 64) if source.shape[-1] % size == 0), 0)
    if source.shape[-1] < LONG or not size:
        return source.max(-1)
    top, stretch = source.unflatten(-1, (-1, size)).amax(-1).max(-1, keepdim=True)
    inside = source.gather(-1, stretch * size + torch.arange(size, device=source.device))
    return top.squeeze(-1), inside.argmax(-1).add_(stretch.squeeze(-1), alpha=size)


def _two_best(source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the largest entry of [..., V] is (the lowest index on ties) [..., 1], itself [..., 1], and the second
    largest [..., 1].

    Largest of stretches first, which is one vectorized pass; an index is then looked for in one stretch alone.
    """
    vocab = source.shape[-1]
    size = math.gcd(vocab, STRETCH)
    if size < STRETCH // 4:
        size = STRETCH
    whole = vocab // size * size
    stretches = source[..., :whole].unflatten(-1, (whole // size, size)).amax(-1)
    if whole < vocab:
        stretches = torch.cat((stretches, source[..., whole:].amax(-1, keepdim=True)), -1)
    top, stretch = stretches.max(-1, keepdim=True)
    column = stretch * size + torch.arange(size, device=source.device)
    if whole < vocab:
        inside = source.gather(-1, column.clamp(max=vocab - 1)).masked_fill_(column >= vocab, -torch.inf)
    else:
        inside = source.gather(-1, column)
    at = inside.argmax(-1, keepdim=True)
    second = inside.scatter_(-1, at, -torch.inf).amax(-1, keepdim=True)
    others = stretches.scatter_(-1, stretch, -torch.inf).amax(-1, keepdim=True)
    return at.add_(stretch, alpha=size), top, second.maximum(others)


def _samples(logits: Tensor, draws: GumbelDraws) -> Tensor:
    """Draw a token from each of the rows [..., V], in float64: [...]."""
    found, at, noise = [], 0, draws.by_row()
    for rows in _pieces(logits, CPU_CHUNK, NOISE_CHUNK):
        here = slice(at, at + len(rows))
        keys, steps, positions = (own[here] for own in noise)
        uniform = rng.uniform(keys, steps, positions.unsqueeze(1), rows.shape[-1], rng.TOKEN_STREAM).squeeze(1)
        # less the largest, which would take the noise's digits
        wide = rows.to(torch.float64, copy=True).sub_(rows.amax(-1, keepdim=True)).div_(draws.temperature)
        found.append(wide.add_(rng.gumbel(uniform)).argmax(-1))
        at = here.stop
    return torch.cat(found).view(logits.shape[:-1])

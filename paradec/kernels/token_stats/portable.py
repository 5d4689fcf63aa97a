"""A few rows at a time, which stay in a processor's caches: the path "chunked", and what PyTorch's paths share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def with_samples(
    read: Callable[..., TokenStats],
    path: str,
    logits: Tensor,
    wanted: frozenset[str],
    temperature: float,
    ids: Tensor | None,
    draws: GumbelDraws,
) -> TokenStats:
    """What `read_stats` finds, by a path of PyTorch, and a token drawn from each row with its probability."""
    sample = _samples(logits, draws)
    asked = sample if ids is None else torch.cat((ids.reshape(*sample.shape, -1), sample.unsqueeze(-1)), -1)
    found = read(logits, wanted, temperature, asked, None, path)
    if ids is None:
        return found._replace(ids_prob=None, sample=sample, sample_prob=found.ids_prob)
    both = found.ids_prob
    assert both is not None
    return found._replace(ids_prob=both[..., :-1].reshape(ids.shape), sample=sample, sample_prob=both[..., -1])


def in_pieces(
    read: Callable[..., TokenStats],
    on_cpu: int,
    logits: Tensor,
    wanted: frozenset[str],
    temperature: float,
    ids: Tensor | None,
) -> TokenStats:
    """What `read` finds in float64 of logits [..., V], about `on_cpu` of them at a time on the CPU."""
    lead, parts, at = logits.shape[:-1], [], 0
    pieces = list(_pieces(logits, on_cpu, CHUNK))
    queue = None if ids is None else ids.reshape(-1, *ids.shape[len(lead) :])
    # memory that is new for every piece takes longer than the passes over it
    shape = (2, max(map(len, pieces)), logits.shape[-1])
    scratch = torch.empty(shape, dtype=torch.float64, device=logits.device)
    for rows in pieces:
        here = slice(at, at + len(rows))
        own = None if queue is None else queue[here]
        parts.append(read(rows, wanted, temperature, own, scratch[:, : len(rows)]))
        at = here.stop
    fields: list[Any] = [None if each is None else each.view(lead + each.shape[1:]) for each in _joined(parts)]
    return TokenStats(*fields)


def chunked_stats(logits: Tensor, wanted: frozenset[str], temperature: float, ids: Tensor | None) -> TokenStats:
    """`token_stats` by the path "chunked", unchecked."""
    return _from_sums(_all_sums(logits, wanted, temperature), logits, wanted, temperature, ids)


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

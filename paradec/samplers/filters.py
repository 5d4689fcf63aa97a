"""Filters of the distribution that tokens are drawn from: the nucleus, and the best tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from paradec.kernels.token_stats import SMALL_VOCABULARY
from paradec.kernels.token_stats.draws import SEGMENT, draw, locate, segment_sums
from paradec.samplers.bounds import kept_bound, shares_of
from paradec.samplers.distributions import ascending, chunks, one_hot_on_best, tempered

HEAD = 2**12
"""Tokens that a nucleus is looked for in before all others are."""


def filter_logits(logits: Tensor, top_p: float | None, top_k: int | None, *, sorted_ties: bool = True) -> Tensor:
    """Exclude (-inf) all but the nucleus of mass `top_p`, then all but the `top_k` best. logits: [..., V].

    Dream's order; the token that crosses `top_p` stays in, and so does the best one always. Tokens as good as the
    `top_k`-th stay. Which of equal tokens the nucleus ends with is left to `torch.sort`, as in public codes. Without
    `sorted_ties` the first of them stay in large vocabularies on the CPU, which takes no sort.
    """
    nucleus = top_p is not None and top_p < 1
    if not nucleus and (top_k is None or top_k >= logits.shape[-1]):
        return logits
    if not logits.is_cpu or logits.dtype not in (torch.float32, torch.float64):
        return _filter_by_rank(logits, top_p, top_k)
    if logits.shape[-1] > SMALL_VOCABULARY:
        return _filter_by_bounds(logits.detach(), top_p if nucleus else None, top_k, sorted_ties)
    least, known = _least_kept(logits.detach(), top_p if nucleus else None, top_k)
    filtered = torch.where(logits.detach() < least.unsqueeze(-1), -torch.inf, logits.detach())
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
        return one_hot_on_best(logits)
    kept = filter_logits(tempered(logits, temperature), None, top_k)
    return filter_logits(kept, top_p, None).softmax(-1)


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
    several equal tokens. For small vocabularies on the CPU."""
    if len(parts := chunks(logits)) > 1:
        found = zip(*(_least_kept(rows, top_p, top_k) for rows in parts), strict=True)
        least, known = (torch.cat(each).view(logits.shape[:-1]) for each in found)
        return least, known
    size = logits.shape[-1]
    top_k = size if top_k is None else min(top_k, size)
    if top_p is None:
        # numpy's search takes ten times as long over rows that are mostly -inf; from the other end it does not
        negated = -(logits.amax(-1, keepdim=True) if top_k == 1 else logits).numpy()
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


def _filter_by_bounds(logits: Tensor, top_p: float | None, top_k: int | None, sorted_ties: bool) -> Tensor:
    """`filter_logits` without a sort, for large vocabularies. On the CPU."""
    size = logits.shape[-1]
    filtered = torch.empty(logits.shape, dtype=logits.dtype)
    for row, out in zip(logits.reshape(-1, size), filtered.view(-1, size), strict=True):
        least, last = kept_bound(row, shares_of(row) if top_p is not None else None, top_p, top_k)
        if last < size - 1 and sorted_ties:
            out.copy_(_filter_by_rank(row, top_p, top_k))
        else:
            out.copy_(row).masked_fill_(_is_out(row, least, last), -torch.inf)
    return filtered


def _is_out(row: Tensor, least: float, last: int) -> Tensor:
    """Which of logits [V] are less than `least`, or equal to it after the token `last`."""
    out = row < least
    out[last + 1 :] |= row[last + 1 :] == least
    return out


def draw_filtered(
    logits: Tensor, uniform: Tensor, temperature: float, top_p: float | None, top_k: int | None
) -> Tensor | None:
    """Draw tokens [...] from what `filter_logits(sorted_ties=False)` leaves of logits / temperature [..., V], with the
    numbers uniform [...], without writing it. None where this saves nothing: in small vocabularies, on other devices,
    other dtypes."""
    size = logits.shape[-1]
    if not logits.is_cpu or logits.dtype not in (torch.float32, torch.float64) or size <= SMALL_VOCABULARY:
        return None
    flat = logits.detach().reshape(-1, size)
    bounds, sums = [], torch.empty((len(flat), -(-size // SEGMENT)), dtype=logits.dtype)
    for row, out in zip(flat, sums, strict=True):
        shares = shares_of(row, temperature)
        bounds.append(kept_bound(row, shares, None if top_p == 1 else top_p, top_k))
        out.copy_(segment_sums(shares.masked_fill_(_is_out(row, *bounds[-1]), 0)))
    least, last = torch.tensor(bounds, dtype=torch.float64).view(-1, 2, 1).unbind(1)
    top = flat.amax(-1, keepdim=True)

    def weights(tokens: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        own = flat[rows].gather(-1, tokens).double()
        out = (own < least[rows]) | (own == least[rows]) & (tokens > last[rows])
        return (own - top[rows]).div_(temperature).exp_().masked_fill_(out, 0)

    uniform = uniform.reshape(-1)

    def again(near: Tensor) -> Tensor:
        return draw(weights(torch.arange(size).expand(int(near.sum()), -1), near), uniform[near])

    return locate(sums, uniform, size, weights, again).view(logits.shape[:-1])

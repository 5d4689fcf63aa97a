"""Token distributions: guidance, temperature, filters and draws, on logits or distributions [..., V]."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from paradec.kernels.token_stats import SMALL_VOCABULARY, argmax
from paradec.kernels.token_stats.draws import SEGMENT, draw, locate, segment_sums
from paradec.kernels.token_stats.portable import FLOOR
from paradec.request import NO_FILTERS, Request

CHUNK = 2**25
"""Logits per chunk on an accelerator: 128 MB in float32."""
CPU_CHUNK = 2**19
"""Logits per chunk on the CPU: chunks that fit in the CPU's caches are twice as fast."""
UNLIKELY = -80.0
"""Bound of (logit - best logit) / temperature in float32: tokens below it get probability 0 (instead of < 2e-35)."""
HEAD = 2**12
"""Number of best tokens that are searched first for the end of a nucleus."""
FEW = 2**8
"""Largest number of probabilities (shares) to sort; a larger number is first reduced by bisection."""


# ---- guidance, temperature, logarithms -------------------------------------------------------------------------------


def apply_guidance(logits: Tensor, scale: float | Tensor) -> Tensor:
    """Compute uncond + s (cond - uncond) of logits [2N, W, V], conditional half first: [N, W, V], at least float32.

    The guided distribution is proportional to p_cond^s p_uncond^(1 - s). Where a branch excludes a token (-inf), the
    result is the limit of this product. A token that both branches exclude is excluded. A token that only the
    conditional branch excludes is excluded at s > 0. A token that only the unconditional branch excludes is excluded at
    s < 1, and keeps its conditional logit at s = 1; at s > 1 such tokens share all the mass, in proportion to p_cond^s.
    NaN and +inf of either branch stay NaN or +inf. scale: s, a number or [N, 1, 1].
    """
    conditional, unconditional = logits.to(torch.promote_types(logits.dtype, torch.float32)).chunk(2)
    guided = conditional - unconditional
    # in place, since a new tensor costs as much as the sum; but not for a scale per row, whose dtype may be wider
    guided = scale * guided + unconditional if isinstance(scale, Tensor) else guided.mul_(scale).add_(unconditional)
    if guided.is_cpu and not guided.sum().isnan():  # an accelerator would have to wait for this check
        return guided
    no_conditional, no_unconditional = conditional == -torch.inf, unconditional == -torch.inf
    takes_mass = no_unconditional & ~no_conditional & (scale > 1)
    guided = torch.where(no_unconditional, scale * conditional, guided)
    excluded = takes_mass.any(-1, keepdim=True) & ~no_unconditional & (guided < torch.inf)  # NaN stays NaN
    excluded |= no_conditional & (unconditional < torch.inf) & (scale > 0)
    excluded |= no_unconditional & (conditional < torch.inf) & (scale < 1)
    guided = guided.masked_fill(excluded, -torch.inf)
    # at scale 0 the conditional branch does not count
    if isinstance(scale, Tensor) or not scale:
        guided = torch.where(no_conditional & (scale == 0), unconditional, guided)
    return guided


def apply_temperature(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Subtract each row's largest logit, then divide by the temperature (a number, or broadcastable). logits: [..., V].
    Finite rows never overflow. Rows with +inf or NaN, or only -inf, then contain NaN."""
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature)


def safe_log(p: Tensor) -> Tensor:
    """Compute ln of distributions [..., V]; -inf up to twice the smallest normal number (subnormals are slow)."""
    tiny = torch.finfo(p.dtype).tiny
    return torch.threshold_(p.clamp(min=tiny).log_(), math.log(2 * tiny), -torch.inf)


def divide_logits(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits [..., V] by the temperature, as public codes do; in rows that overflow, as `apply_temperature`."""
    top = logits.amax(-1, keepdim=True)
    overflows = (top / temperature).isinf() & top.isfinite()
    return (logits - top.where(overflows, 0)).div_(temperature)


def split_chunks(logits: Tensor) -> tuple[Tensor, ...]:
    """Split logits [..., V] into chunks [n, V] of at most `CHUNK` or `CPU_CHUNK` logits, but at least one row."""
    rows = max(1, (CPU_CHUNK if logits.is_cpu else CHUNK) // logits.shape[-1])
    return logits.reshape(-1, logits.shape[-1]).split(rows)


def sort_ascending(values: Tensor) -> Tensor:
    """Sort values [..., N] in ascending order. On the CPU numpy is ten times as fast as torch's sort with indices."""
    return torch.from_numpy(np.sort(values.numpy())) if values.is_cpu else values.sort(-1).values


def divergence(logits: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Compute p = softmax(logits) [..., V] in float32, and KL(p || previous) [...] in nats, with ln(p + 1e-12)."""
    p = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).float()
    pairs = zip(split_chunks(p), split_chunks(previous), strict=True)
    kl = [torch.linalg.vecdot(current, (current + 1e-12).div_(earlier + 1e-12).log_()) for current, earlier in pairs]
    return p, torch.cat(kl).view(p.shape[:-1])


# ---- top-p and top-k -------------------------------------------------------------------------------------------------


def filter_logits(
    logits: Tensor, top_p: float | None, top_k: int | None, min_p: float | None = None, *, sorted_ties: bool = True
) -> Tensor:
    """Exclude (-inf) tokens less likely than `min_p` times the best token, then all but the nucleus of mass `top_p`,
    then all but the `top_k` best tokens. logits: [..., V].

    Top-p precedes top-k, as in Dream. The token that crosses `top_p` stays, and so do all tokens with the same logit as
    the `top_k`-th. If the nucleus ends among equal tokens, `torch.sort` decides which of them stay. With
    `sorted_ties=False`, large vocabularies on the CPU keep the first of these tokens, without a sort.
    """
    if min_p:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    has_nucleus = top_p is not None and top_p < 1
    if not has_nucleus and (top_k is None or top_k >= logits.shape[-1]):
        return logits
    if not logits.is_cpu or logits.dtype not in (torch.float32, torch.float64):
        return _filter_by_rank(logits, top_p, top_k)
    if logits.shape[-1] > SMALL_VOCABULARY:
        return _filter_by_bounds(logits.detach(), top_p if has_nucleus else None, top_k, sorted_ties)
    min_logit, is_exact = _find_min_logit(logits.detach(), top_p if has_nucleus else None, top_k)
    filtered = torch.where(logits.detach() < min_logit.unsqueeze(-1), -torch.inf, logits.detach())
    if not is_exact.all():
        filtered[~is_exact] = _filter_by_rank(logits[~is_exact], top_p, top_k)
    return filtered


def _filter_by_rank(logits: Tensor, top_p: float | None, top_k: int | None) -> Tensor:
    """Filter as `filter_logits`, by sorting all tokens."""
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(-1)
        excluded = torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p > top_p)
        logits = logits.masked_fill(excluded, -torch.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    return logits


def _find_min_logit(logits: Tensor, top_p: float | None, top_k: int | None) -> tuple[Tensor, Tensor]:
    """Find the lowest logit [...] that `filter_logits` keeps, and [...] bool: whether all tokens with this logit stay.
    For small vocabularies on the CPU."""
    if len(parts := split_chunks(logits)) > 1:
        results = zip(*(_find_min_logit(rows, top_p, top_k) for rows in parts), strict=True)
        min_logit, is_exact = (torch.cat(values).view(logits.shape[:-1]) for values in results)
        return min_logit, is_exact
    size = logits.shape[-1]
    top_k = size if top_k is None else min(top_k, size)
    if top_p is None:
        # on rows that are mostly -inf, numpy's partition is ten times as slow as on the negated rows
        negated = -(logits.amax(-1, keepdim=True) if top_k == 1 else logits).numpy()
        negated.partition(top_k - 1)
        kth = torch.from_numpy(negated)[..., top_k - 1].neg()
        return kth, torch.ones_like(kth, dtype=torch.bool)
    ordered = sort_ascending(logits).flip(-1)
    p = ordered.softmax(-1)[..., :top_k]
    # after the first excluded token, all are excluded: sums grow, probabilities fall, and rounding keeps the order
    head = p[..., :HEAD]
    excluded = head.cumsum(-1) - head > top_p
    if top_k > HEAD and not excluded[..., -1].all():
        head = p
        excluded = head.cumsum(-1) - head > top_p
    num_kept = head.shape[-1] - excluded.sum(-1, keepdim=True)
    min_logit, following = ordered.gather(-1, num_kept - 1), ordered.gather(-1, num_kept.clamp(max=size - 1))
    is_exact = (min_logit > following) | (num_kept == size) | (min_logit == -torch.inf)
    return min_logit.squeeze(-1), is_exact.squeeze(-1)


def _filter_by_bounds(logits: Tensor, top_p: float | None, top_k: int | None, sorted_ties: bool) -> Tensor:
    """Filter as `filter_logits`, without a sort: for large vocabularies on the CPU."""
    size = logits.shape[-1]
    filtered = torch.empty(logits.shape, dtype=logits.dtype)
    for row, filtered_row in zip(logits.reshape(-1, size), filtered.view(-1, size), strict=True):
        min_logit, last_token = find_bound(row, compute_shares(row) if top_p is not None else None, top_p, top_k)
        if last_token < size - 1 and sorted_ties:
            filtered_row.copy_(_filter_by_rank(row, top_p, top_k))
        else:
            filtered_row.copy_(row).masked_fill_(_is_excluded(row, min_logit, last_token), -torch.inf)
    return filtered


def _is_excluded(row: Tensor, min_logit: float, last_token: int) -> Tensor:
    excluded = row < min_logit
    excluded[last_token + 1 :] |= row[last_token + 1 :] == min_logit
    return excluded


def draw_filtered(
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None = None,
) -> Tensor | None:
    """Draw tokens [...] from `filter_logits(logits / temperature, sorted_ties=False)`, without storing these logits.

    logits: [..., V], float32 or float64 on the CPU. uniform: random numbers [...] in (0, 1). Returns None if this saves
    nothing or is unsupported: small vocabularies, accelerators, other dtypes, `min_p`."""
    size = logits.shape[-1]
    if min_p or not logits.is_cpu or logits.dtype not in (torch.float32, torch.float64) or size <= SMALL_VOCABULARY:
        return None
    flat = logits.detach().reshape(-1, size)
    bounds, sums = [], torch.empty((len(flat), -(-size // SEGMENT)), dtype=logits.dtype)
    for row, row_sums in zip(flat, sums, strict=True):
        shares = compute_shares(row, temperature)
        bounds.append(find_bound(row, shares, None if top_p == 1 else top_p, top_k))
        row_sums.copy_(segment_sums(shares.masked_fill_(_is_excluded(row, *bounds[-1]), 0)))
    min_logit, last_token = torch.tensor(bounds, dtype=torch.float64).view(-1, 2, 1).unbind(1)
    top = flat.amax(-1, keepdim=True)

    def weights(tokens: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        token_values = flat[rows].gather(-1, tokens).double()
        excluded = (token_values < min_logit[rows]) | (token_values == min_logit[rows]) & (tokens > last_token[rows])
        return (token_values - top[rows]).div_(temperature).exp_().masked_fill_(excluded, 0)

    uniform = uniform.reshape(-1)

    def redraw(rows: Tensor) -> Tensor:
        return draw(weights(torch.arange(size).expand(int(rows.sum()), -1), rows), uniform[rows])

    return locate(sums, uniform, size, weights, redraw).view(logits.shape[:-1])


def compute_shares(row: Tensor, temperature: float = 1.0) -> Tensor:
    """Compute softmax(row / temperature) [V]. For speed, no share is below exp(FLOOR) times the largest share."""
    return apply_temperature(row, temperature).clamp_(min=FLOOR).softmax(-1)


def find_bound(row: Tensor, shares: Tensor | None, top_p: float | None, top_k: int | None) -> tuple[float, int]:
    """Find the lowest logit of `row` [V] that stays, and the last token with that logit that stays (V - 1 if all do).

    A token is in the nucleus if the shares [V] of all better tokens add up to at most `top_p`, in float64; all tokens
    are in it if a logit is NaN or +inf, or if none is finite. `top_k` keeps the best tokens of the nucleus, and all
    tokens that equal the last of these.

    shares: `compute_shares(row)`; not read without `top_p`. top_p: below 1; None keeps all. top_k: None keeps all."""
    min_logit, last_token = -math.inf, len(row) - 1
    if top_p is not None and shares is not None:
        min_logit, last_token = _nucleus_bound(row.numpy(), shares.numpy(), top_p)
    if top_k is not None and top_k < len(row) and (kth := float(row.topk(top_k).values[-1])) > min_logit:
        min_logit, last_token = kth, len(row) - 1
    return min_logit, last_token


def _nucleus_bound(values: np.ndarray, shares: np.ndarray, top_p: float) -> tuple[float, int]:
    total = float(torch.from_numpy(shares).sum(dtype=torch.float64))
    limit, size = top_p * total, len(values)
    if not limit < total:  # NaN, or `top_p` rounds to the whole mass
        return -math.inf, size - 1
    # bisect: the first excluded token's share lies in [low, high]; `sum_above` is the sum of all shares above `high`
    # at first, all shares up to `low` together are less than total - limit
    low, high, sum_above = (total - limit) / size * 0.999, float(shares.max()), 0.0
    inside = shares[shares > low]
    while len(inside) > FEW and high > low * (1 + 1e-7):
        pivot = math.sqrt(low * high)
        above = inside > pivot
        mass = float(inside[above].sum(dtype=np.float64))
        if sum_above + mass > limit or above.all():
            inside, low = inside[above], pivot
        else:
            inside, high, sum_above = inside[~above], pivot, sum_above + mass
    inside = np.sort(inside)[::-1].astype(np.float64)
    num_kept = max(int((sum_above + inside.cumsum() - inside <= limit).sum()), 1)
    # equal shares are ordered by descending logit, and equal logits by token
    tied = np.flatnonzero(shares == inside[num_kept - 1])
    tied = tied[np.argsort(-values[tied], kind="stable")]
    count = int((inside[:num_kept] == inside[num_kept - 1]).sum())
    min_logit = values[tied[count - 1]]
    cuts_ties = count < len(tied) and values[tied[count]] == min_logit
    return float(min_logit), int(tied[count - 1]) if cuts_ties else size - 1


# ---- distributions ---------------------------------------------------------------------------------------------------


def token_distribution(logits: Tensor, request: Request, allowed: Tensor | None = None) -> Tensor:
    """Compute the distribution of a token: logits [..., V] -> [..., V], at least float32; one-hot at temperature 0.
    NaN in rows without a finite allowed logit. allowed: [V] bool; other tokens get probability 0."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if allowed is not None:
        logits = torch.where(allowed, logits, -torch.inf)
    if request.temperature == 0:
        return one_hot_on_best(logits)
    if request.temperature != 1:
        logits = apply_temperature(logits, request.temperature)
        # softmax is twice as slow if it includes logits that are too low to be drawn
        if logits.dtype == torch.float32:
            logits = torch.threshold_(logits, UNLIKELY, -torch.inf)
    if request.filters != NO_FILTERS:
        logits = filter_logits(logits, *request.filters)
    return logits.softmax(-1)


def filtered_distribution(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Compute the distribution of a token as LlamaGen's public code does: temperature, then top-k, then top-p."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature == 0:
        return one_hot_on_best(logits)
    filtered = filter_logits(apply_temperature(logits, temperature), None, top_k)
    return filter_logits(filtered, top_p, None).softmax(-1)


def one_hot_on_best(logits: Tensor) -> Tensor:
    """Compute distributions [..., V] that are 1 at the best logit [..., V]; NaN if the best logit is not finite."""
    best = argmax(logits).unsqueeze(-1)
    finite = logits.gather(-1, best).isfinite()
    one_hot = torch.zeros_like(logits).scatter_(-1, best, 1)
    if logits.is_cpu and finite.all():  # saves a pass; an accelerator would have to wait for this check
        return one_hot
    return one_hot.masked_fill_(~finite, torch.nan)


def probability(distribution: Tensor, tokens: Tensor) -> Tensor:
    """Read the probabilities [...] of tokens [...] from a distribution [..., V]."""
    return distribution.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def select_slots(distributions: Tensor, slot: Tensor) -> Tensor:
    """Copy the distributions of slots [R, N] from distributions [R, W, V]: [R, N, V]."""
    return distributions[torch.arange(len(distributions), device=distributions.device).unsqueeze(1), slot]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Compute weights max(0, p - q) [..., V], not normalised; p itself in rows where rounding makes all weights 0."""
    weights = (p - q).clamp_(min=0)
    is_zero = weights.amax(-1, keepdim=True) <= 0
    # add p times 0 or 1; torch.where would copy
    return weights.addcmul_(p, is_zero.to(p.dtype))

"""Token statistics under the names that samplers use, the choice of a path, and the "float64" path."""

from __future__ import annotations

import torch
from torch import Tensor

from paradec.kernels import has_triton
from paradec.kernels.token_stats.draws import TokenDraws
from paradec.kernels.token_stats.portable import chunked_stats, concatenate, float64_samples, row_blocks
from paradec.kernels.token_stats.reference import EPSILON, FIELDS, TokenStats

SMALL_VOCABULARY = 2**13
"""Largest vocabulary for which every dtype uses "float64"."""
IN_ONE_READ = frozenset(FIELDS) - {"smoothed_entropy"}
"""Fields of the Triton kernel; Dream's p + 1e-10 would need a second read of the logits."""
QUANTITIES = ("confidence", "margin", "negative_entropy", "minus_entropy", "best_token", "logit_gap")
QUANTITY_FIELDS = {
    "margin": "margin",
    "negative_entropy": "smoothed_entropy",
    "minus_entropy": "entropy",
    "logit_gap": "gap",
}
"""Quantities except "confidence" and "best_token" -> fields of `TokenStats`. The sign of entropies is changed."""
ONE_READ_FIELDS = QUANTITY_FIELDS | {"negative_entropy": "entropy"}
"""`QUANTITY_FIELDS` of the float32 paths: "smoothed_entropy" would need a second read or a logarithm per token."""
FLOAT64_CPU_BLOCK = 2**17
"""Numbers per block of "float64" on the CPU: 1 MB."""


def token_statistics(
    logits: Tensor,
    reads: tuple[str, ...],
    tokens: Tensor | None = None,
    draws: TokenDraws | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Statistics of each position's distribution softmax(logits / temperature). Returns tokens [...] int64, and a dict
    of the requested quantities, each [...] float64.

    "confidence" is p(token). "margin" is p(1st) - p(2nd). "minus_entropy" is sum p ln p. "negative_entropy" is Dream's
    sum p ln(p + 1e-10), or sum p ln p for large vocabularies in float32. "best_token" is the likeliest token (int64).
    "logit_gap" is z(1st) - z(2nd). All except "best_token" and "logit_gap" are NaN where a logit is NaN or +inf.

    logits: [..., V] of any float dtype; -inf excludes a token. reads: names from `QUANTITIES`.
    tokens: [...] int64, returned and used for "confidence"; None: the best tokens (lowest id on ties), or with `draws`
    tokens that are drawn. temperature: above 0; divides all logits."""
    is_exact = "negative_entropy" not in reads or path_for(logits) == "float64"
    fields = QUANTITY_FIELDS if is_exact else ONE_READ_FIELDS
    needed = frozenset(fields[name] for name in reads if name in fields)
    stats = read_stats(logits, needed, temperature, ids=tokens, draws=draws)
    prob: Tensor | None = stats.prob
    if draws is not None:
        tokens, prob = stats.sample, stats.sample_prob
    elif tokens is not None:
        prob = stats.ids_prob
    quantities: dict[str, Tensor] = {}
    for name in reads:
        if name == "confidence":
            assert prob is not None  # `read_stats` was passed the tokens
            quantities[name] = prob
        elif name == "best_token":
            quantities[name] = stats.token
        else:
            value = getattr(stats, fields[name])
            if name == "logit_gap" and temperature != 1:
                value = value / temperature
            quantities[name] = -value if name.endswith("entropy") else value
    return stats.token if tokens is None else tokens, quantities


def read_stats(
    logits: Tensor,
    fields: frozenset[str],
    temperature: float = 1.0,
    ids: Tensor | None = None,
    draws: TokenDraws | None = None,
    path: str | None = None,
) -> TokenStats:
    """Compute `token_stats` without checks."""
    path = path or path_for(logits, fields)
    if path == "triton":
        # imported here: `import paradec` must not import triton
        from paradec.kernels.token_stats.triton import triton_stats

        return triton_stats(logits, fields, temperature, ids, draws)
    logits = logits.detach()
    if path == "chunked":
        stats = chunked_stats(logits, fields, temperature, draws)
    else:
        if logits.numel() <= FLOAT64_CPU_BLOCK:
            stats = _float64_stats(logits, fields, temperature)
        else:
            chunks = [_float64_stats(rows, fields, temperature) for rows in row_blocks(logits, FLOAT64_CPU_BLOCK)]
            stats = TokenStats(*concatenate(chunks, logits.shape[:-1]))
        if draws is not None:
            stats = stats._replace(sample=float64_samples(logits, draws.uniform(), draws.temperature))
    if ids is not None:
        stats = stats._replace(ids_prob=_probabilities(logits, ids, stats, temperature))
    if stats.sample is not None:
        stats = stats._replace(sample_prob=_probabilities(logits, stats.sample, stats, temperature))
    return stats


def path_for(logits: Tensor, fields: frozenset[str] = IN_ONE_READ) -> str:
    """Choose a path by dtype, vocabulary, device and fields, never by the number of rows."""
    if logits.dtype == torch.float64 or logits.shape[-1] <= SMALL_VOCABULARY:
        return "float64"
    return "triton" if logits.is_cuda and fields <= IN_ONE_READ and has_triton() else "chunked"


def _probabilities(logits: Tensor, ids: Tensor, stats: TokenStats, temperature: float) -> Tensor:
    """Probabilities of tokens `ids` [...] or [..., K] under logits [..., V], shaped as `ids`."""
    id_logits = logits.gather(-1, ids.reshape(*logits.shape[:-1], -1)).double()
    top = logits.gather(-1, stats.token.unsqueeze(-1)).double()
    return (((id_logits - top) / temperature).exp() * stats.prob.unsqueeze(-1)).view(ids.shape)


def _float64_stats(logits: Tensor, fields: frozenset[str], temperature: float) -> TokenStats:
    """Compute statistics of rows [..., V] in float64, in few passes."""
    if temperature != 1 or "entropy" in fields or "smoothed_entropy" in fields:
        scaled = logits.to(torch.float64, copy=True)
        if temperature != 1:
            # differences stay finite, or become -inf, at every temperature
            scaled.sub_(scaled.amax(-1, keepdim=True)).div_(temperature)
        p = scaled.softmax(-1)
    else:
        p = logits.softmax(-1, dtype=torch.float64)
    # NumPy is ten times as fast as torch on the CPU
    token = torch.as_tensor(p.numpy().argmax(-1)) if p.is_cpu else p.argmax(-1)
    best_index = token.unsqueeze(-1)
    prob = p.gather(-1, best_index).squeeze(-1)
    second_prob = margin = entropy = smoothed = logsumexp = gap = nonfinite = None
    if "gap" in fields:
        highest = logits.topk(min(2, logits.shape[-1]), dim=-1).values.double()
        gap = highest[..., 0] - highest[..., 1] if logits.shape[-1] > 1 else torch.full_like(prob, torch.inf)
    if "smoothed_entropy" in fields:
        smoothed = -(p + EPSILON).log_().mul_(p).sum(-1)
    if not fields.isdisjoint(("second_prob", "margin", "entropy", "logsumexp")):
        if "entropy" in fields:
            # sum p ln p = sum p (z - z_best) + ln p_best: no logarithm per token; neither term is positive, so no
            # digits cancel
            entropy = (
                -scaled.sub_(scaled.gather(-1, best_index)).clamp_(min=torch.finfo(torch.float64).min).mul_(p).sum(-1)
            )
        p.scatter_(-1, best_index, 0)
        if "entropy" in fields or "logsumexp" in fields:
            surprisal = (p.sum(-1) / prob).log1p()  # -ln p_best
            entropy = None if entropy is None else entropy.add_(surprisal)
        if "logsumexp" in fields:
            logsumexp = logits.gather(-1, best_index).squeeze(-1).double() / temperature + surprisal
        if "second_prob" in fields or "margin" in fields:
            second_prob = p.amax(-1)
            margin = prob - second_prob
    if "nonfinite" in fields:
        nonfinite = prob.isnan()
    return TokenStats(token, prob, second_prob, margin, entropy, smoothed, logsumexp, gap, nonfinite)

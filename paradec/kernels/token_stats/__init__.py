"""Token statistics: what samplers want to know of a position's distribution, from one read of its logits.

Three paths compute the same numbers, and `path_for` says which one serves which logits:

- "float64": the reference, written out in float64. For float64 logits, and for vocabularies so small that little is
  gained by another;
- "chunked": PyTorch in float32 over a few rows at a time that stay in the processor's cache. The CPU path;
- "triton": one kernel that reads every logit once, and a small one that joins the parts of a row where the vocabulary
  was split over programs.

Trained models are so sure of many positions that float32 probabilities tie at 1, and a rule that ranks them would then
go by position. So the float32 paths never add the best word's share to that of the others: with m the largest logit,
they sum `rest` = sum exp(z - m) and `weight` = sum exp(z - m) (z - m) over all other words, and the probability
1 / (1 + rest), the entropy ln(1 + rest) - weight / (1 + rest) and all else follow in float64. The entropy keeps
float32's relative precision as far down as float32 has numbers (1e-36), and 1 - p as far down as float64 goes.

A temperature divides differences to the largest logit only: these never overflow, whatever the logits, and what is far
below the best word comes to nothing, as it should.

Two such sums merge exactly (online softmax: Milakov and Gimelshein, arXiv 1805.02867), also where one is empty.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paradec import rng
from paradec.checks import check_choice, check_number, check_temperature, shown

if TYPE_CHECKING:
    import triton.language as tl

PATHS = ("float64", "chunked", "triton")
SMALL_VOCABULARY = 2**13
"""Up to so many words "float64" serves all logits: little beside any forward."""
CPU_CHUNK = 2**17
"""Words that "chunked" holds at a time on the CPU, if a row is no longer: 0.5 MB, what a core has to itself."""
FLOAT64_CPU_CHUNK = 2**19
"""The same for "float64", which takes twice as long per word outside the processor's caches."""
CHUNK = 2**25
"""The same on accelerators."""
NOISE_CHUNK = 2**22
"""The same where noise is drawn, which takes some 100 bytes a word while it is made."""
BLOCK = 2048
"""Words that a Triton program works on at a time: eight a thread, which leaves registers for four programs."""
FLOOR, LEAST = -87.0, 2e-38
"""Where a word's difference to the best one, over the temperature, is cut off in float32; and the share up to which a
word then counts as one without any. exp(-87) is 1.6e-38, and processors take ten times as long over an exp whose result
is no normal number, as at low temperatures and of excluded words."""
EPSILON = 1e-10
"""What Dream adds to probabilities within the logarithm."""


class TokenStats(NamedTuple):
    """What `token_stats` found. `[...]` are the logits' dimensions but the last; fields that were not asked for may be
    None. Floats are float64. Where a row is `nonfinite` its floats are NaN and its ids mean nothing."""

    token: Tensor
    """[...] int64: the likeliest word, the lowest id on ties."""
    prob: Tensor
    """[...]: its probability."""
    second_prob: Tensor | None = None
    """[...]: the probability of the second likeliest; that of `token` again where two tie."""
    margin: Tensor | None = None
    """[...]: prob - second_prob."""
    entropy: Tensor | None = None
    """[...]: -sum p ln p, in nats."""
    smoothed_entropy: Tensor | None = None
    """[...]: -sum p ln(p + 1e-10), Dream's form of it."""
    logsumexp: Tensor | None = None
    """[...]: of the logits over `temperature`."""
    gap: Tensor | None = None
    """[...]: the largest logit minus the second largest, at the logits' own scale; inf where there is one word only."""
    nonfinite: Tensor | None = None
    """[...] bool: a logit is NaN or +inf, or all are -inf."""
    ids_prob: Tensor | None = None
    """Shaped as `ids`: their probabilities."""
    sample: Tensor | None = None
    """[...] int64: a word drawn from softmax(logits / draws.temperature)."""
    sample_prob: Tensor | None = None
    """[...]: its probability, under the same distribution as `prob`."""


FIELDS = TokenStats._fields[:9]
"""What `fields` may name; `ids_prob`, `sample` and `sample_prob` are there whenever `ids` and `draws` are."""
IN_ONE_READ = frozenset(FIELDS) - {"smoothed_entropy"}
"""What the kernel finds: a logarithm of p + 1e-10 takes the normalized p, and so a second read."""


@dataclass(frozen=True)
class Draws:
    """Where Gumbel noise comes from: word v of a position takes the number v of `rng.uniform`, so that a draw depends
    neither on the batch nor on how the vocabulary is split.

    Args:
        keys: [R, 2] int64 row keys (`rng.row_keys`).
        steps: [R] int64.
        positions: [R, W] int64, for logits [R, W, V]; [R] for logits [R, V].
        temperature: words are drawn from softmax(logits / temperature), whatever the temperature of the statistics.
    """

    keys: Tensor
    steps: Tensor
    positions: Tensor
    temperature: float = 1.0


def token_stats(
    logits: Tensor,
    *,
    fields: Sequence[str] | None = None,
    temperature: float = 1.0,
    ids: Tensor | None = None,
    draws: Draws | None = None,
    path: str | None = None,
) -> TokenStats:
    """Statistics of each row's distribution softmax(logits / temperature).

    Args:
        logits: [..., V] of any float dtype, rows strided as they like; -inf excludes a word.
        fields: which of `FIELDS` are wanted; None is all. `token` and `prob` always come.
        temperature: divides the logits before everything but `gap` (Dream); LLaDA's statistics have 1.
        ids: [...] or [..., K] int64: words whose probabilities are wanted, each from 0 to V - 1 (not checked on
            accelerators, which would have to be waited for).
        draws: asks for a sample by the Gumbel-max trick.
        path: one of `PATHS`; None asks `path_for`.

    Raises:
        TypeError: logits that are no float tensor. ValueError: any other argument out of its range, or a path that
            this machine does not have.
    """
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(f"logits must be a float tensor [..., V], not {shown(getattr(logits, 'dtype', type(logits)))}")
    if not logits.dim() or not logits.shape[-1]:
        raise ValueError(f"logits of shape {tuple(logits.shape)} have no words; expected [..., V]")
    wanted = frozenset(FIELDS) if fields is None else frozenset(fields)
    for name in wanted:
        check_choice("fields", name, FIELDS)
    check_number("temperature", temperature, low=1e-6, high=1e6)
    if ids is not None:
        _check_ids(ids, logits)
    if draws is not None:
        _check_draws(draws, logits)
    if path is not None:
        check_choice("path", path, PATHS)
        if path == "triton":
            _check_triton(logits, wanted)
    return read_stats(logits, wanted, float(temperature), ids, draws, path)


def read_stats(
    logits: Tensor,
    wanted: frozenset[str],
    temperature: float = 1.0,
    ids: Tensor | None = None,
    draws: Draws | None = None,
    path: str | None = None,
) -> TokenStats:
    """`token_stats` without its checks, for callers at every step."""
    if path is None:
        path = path_for(logits, wanted)
    if path == "triton":
        return _triton_stats(logits, wanted, temperature, ids, draws)
    return _torch_stats(path, logits, wanted, temperature, ids, draws)


def path_for(logits: Tensor, fields: frozenset[str] = IN_ONE_READ) -> str:
    """The path that serves these logits: it depends on dtype, vocabulary and device, never on how many rows there
    are."""
    if logits.dtype == torch.float64 or logits.shape[-1] <= SMALL_VOCABULARY:
        return "float64"
    return "triton" if logits.is_cuda and fields <= IN_ONE_READ and _has_triton() else "chunked"


def _check_ids(ids: Tensor, logits: Tensor) -> None:
    lead = logits.shape[:-1]
    if ids.dtype != torch.int64 or ids.shape[: len(lead)] != lead or ids.dim() > logits.dim():
        raise ValueError(
            f"ids must be int64 of shape {tuple(lead)} or {(*lead, 'K')}, not {ids.dtype} {tuple(ids.shape)}"
        )
    if ids.is_cpu and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[-1]:
        raise ValueError(f"ids from {int(ids.min())} to {int(ids.max())} must be from 0 to {logits.shape[-1] - 1}")


def _check_draws(draws: Draws, logits: Tensor) -> None:
    if logits.dim() not in (2, 3):
        raise ValueError(f"draws take logits [R, V] or [R, W, V], not {tuple(logits.shape)}")
    rows, lead = logits.shape[0], tuple(logits.shape[:-1])
    for name, shape in (("keys", (rows, 2)), ("steps", (rows,)), ("positions", lead)):
        given = getattr(draws, name)
        if given.dtype != torch.int64 or tuple(given.shape) != shape:
            raise ValueError(f"draws.{name} must be int64 {shape}, not {given.dtype} {tuple(given.shape)}")
    check_temperature("draws.temperature", draws.temperature)
    if draws.temperature == 0:
        raise ValueError("draws.temperature=0 draws nothing: leave draws out, the best word is `token`")


# ---- PyTorch --------------------------------------------------------------------------------------------------------


def _torch_stats(
    path: str, logits: Tensor, wanted: frozenset[str], temperature: float, ids: Tensor | None, draws: Draws | None
) -> TokenStats:
    """Both PyTorch paths, a few rows at a time."""
    if draws is not None:
        sample = _samples(logits, draws)
        asked = sample if ids is None else torch.cat((ids.reshape(*sample.shape, -1), sample.unsqueeze(-1)), -1)
        found = _torch_stats(path, logits, wanted, temperature, asked, None)
        if ids is None:
            return found._replace(ids_prob=None, sample=sample, sample_prob=found.ids_prob)
        both = found.ids_prob
        return found._replace(ids_prob=both[..., :-1].reshape(ids.shape), sample=sample, sample_prob=both[..., -1])
    if path == "chunked":
        return _from_sums(_all_sums(logits, wanted, temperature), logits, temperature, ids)
    if logits.numel() <= (FLOAT64_CPU_CHUNK if logits.is_cpu else CHUNK):
        return float64_stats(logits, wanted, temperature, ids)
    lead, found, at = logits.shape[:-1], [], 0
    queue = None if ids is None else ids.reshape(-1, *ids.shape[len(lead) :])
    for rows in _pieces(logits, FLOAT64_CPU_CHUNK, CHUNK):
        here = slice(at, at + len(rows))
        found.append(float64_stats(rows, wanted, temperature, None if queue is None else queue[here]))
        at = here.stop
    return TokenStats(*(None if each is None else each.view(lead + each.shape[1:]) for each in _joined(found)))


def _joined(parts: Iterable[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
    """Field by field, the parts' rows one below the other."""
    return [None if field[0] is None else torch.cat(field) for field in zip(*parts, strict=True)]


def _pieces(logits: Tensor, on_cpu: int, elsewhere: int) -> Iterator[Tensor]:
    """[..., V] as views [n, V] of about so many words, in order: one at least."""
    rows = max(1, (on_cpu if logits.is_cpu else elsewhere) // logits.shape[-1])
    if logits.dim() <= 2 or logits.is_contiguous() or not logits.numel():
        yield from logits.reshape(-1, logits.shape[-1]).split(rows)
    else:
        for part in logits:
            yield from _pieces(part, on_cpu, elsewhere)


def float64_stats(
    logits: Tensor, wanted: frozenset[str], temperature: float = 1.0, ids: Tensor | None = None
) -> TokenStats:
    """The reference. Arguments as in `token_stats`, unchecked, and all at once in memory."""
    # what follows works in place where it can: these passes over the vocabulary are most of a small model's step
    wide = None
    if temperature != 1:
        # what is divided are differences, which stay finite, or -inf, at every temperature
        wide = logits.to(torch.float64, copy=True)
        p = wide.sub_(wide.amax(-1, keepdim=True)).div_(temperature).softmax(dim=-1)
    elif "entropy" in wanted or "smoothed_entropy" in wanted:
        wide = logits.to(torch.float64, copy=True)
        p = wide.softmax(dim=-1)
    else:
        p = logits.softmax(dim=-1, dtype=torch.float64)
    best, first = p.max(dim=-1)
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
            # sum p (z - z_best) + ln p_best needs no logarithm per word; both terms are negative, so nothing cancels
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
    """What the portable path reads of rows [n, V]; all else follows from it at once for all rows. Each [n]."""

    token: Tensor
    top: Tensor
    """Float64, as all that follows: the largest logit."""
    second: Tensor
    rest: Tensor
    weight: Tensor | None
    others: Tensor | None
    """Sum of p / (p + EPSILON / 2) over all words but the best."""


def _all_sums(logits: Tensor, wanted: frozenset[str], temperature: float) -> _Sums:
    """Of all rows of [..., V], each field [N]."""
    pieces = list(_pieces(logits.detach(), CPU_CHUNK, CHUNK))
    shape = max(map(len, pieces)), logits.shape[-1]
    scratch = [torch.empty(shape, dtype=torch.float32, device=logits.device) for _ in range(2)]
    return _Sums(*_joined(_sums(rows, wanted, temperature, scratch) for rows in pieces))


def _sums(logits: Tensor, wanted: frozenset[str], temperature: float, scratch: list[Tensor]) -> _Sums:
    """Of as many rows as fit into the caches. scratch: two of [at least n, V] float32, overwritten."""
    apart, share = (buffer[: len(logits)] for buffer in scratch)
    if logits.dtype.itemsize < 4:  # differences would be rounded to it
        logits = apart.copy_(logits)
    at, top, second = _two_best(logits)
    torch.sub(logits, top, out=apart)
    if temperature != 1:
        apart.mul_(1 / temperature)
    torch.exp(apart.clamp_(min=FLOOR).scatter_(-1, at, FLOOR), out=share)
    rest = torch.threshold_(share, LEAST, 0.0).sum(-1).double()  # NaN stays
    weight = others = None
    if "entropy" in wanted or "smoothed_entropy" in wanted:
        weight = apart.mul_(share).sum(-1).double()
    if "smoothed_entropy" in wanted:
        # with s the share, p / (p + EPSILON / 2) is 1 - h / (s + h); the best word's share stands at 0
        half = EPSILON / 2 * (1 + rest)
        others = share.shape[-1] - half * torch.add(share, half.float().unsqueeze(-1), out=apart).reciprocal_().sum(-1)
    return _Sums(at.squeeze(-1), top.squeeze(-1).double(), second.double(), rest, weight, others)


def _from_sums(sums: Sequence[Tensor | None], logits: Tensor, temperature: float, ids: Tensor | None) -> TokenStats:
    """Statistics of logits [..., V] from the fields of `_Sums` for each of their rows."""
    lead = logits.shape[:-1]
    token, top, second, rest, weight, others = (None if each is None else each.view(lead) for each in sums)
    total = 1 + rest
    nonfinite = ~(top.isfinite() & rest.isfinite())
    best = torch.where(nonfinite, torch.nan, 1 / total)
    ids_prob = entropy = smoothed = None
    if ids is not None:
        chosen = logits.gather(-1, ids if ids.dim() == logits.dim() else ids.unsqueeze(-1)).double()
        ids_prob = (((chosen - top.unsqueeze(-1)) / temperature).exp() * best.unsqueeze(-1)).view(ids.shape)
    second_prob = ((second - top) / temperature).exp() * best
    if weight is not None:
        entropy = torch.where(nonfinite, torch.nan, rest.log1p() - weight / total)
    if others is not None:
        # p ln(p + e) is p ln p + p ln(1 + e/p), and that addend e p / (p + e/2) to within e/13: no second logarithm
        smoothed = entropy - EPSILON * others - best * (EPSILON / best).log1p()
    return TokenStats(
        token=token,
        prob=best,
        second_prob=second_prob,
        margin=best - second_prob,
        entropy=entropy,
        smoothed_entropy=smoothed,
        logsumexp=torch.where(nonfinite, torch.nan, top / temperature + rest.log1p()),
        gap=torch.where(nonfinite, torch.nan, top - second),
        nonfinite=nonfinite,
        ids_prob=ids_prob,
    )


def _two_best(source: Tensor, size: int = 512) -> tuple[Tensor, Tensor, Tensor]:
    """Where the largest entry of [..., V] is (the lowest index on ties) [..., 1], itself [..., 1], and the second
    largest [...].

    Largest of stretches first, which is one vectorized pass; an index is then looked for in one stretch alone.
    """
    words = source.shape[-1]
    whole = words // size * size
    stretches = source[..., :whole].unflatten(-1, (whole // size, size)).amax(-1)
    if whole < words:
        stretches = torch.cat((stretches, source[..., whole:].amax(-1, keepdim=True)), -1)
    top, stretch = stretches.max(-1, keepdim=True)
    column = stretch * size + torch.arange(size, device=source.device)
    inside = source.gather(-1, column.clamp(max=words - 1)).masked_fill_(column >= words, -torch.inf)
    at = inside.argmax(-1, keepdim=True)
    second = inside.scatter_(-1, at, -torch.inf).amax(-1)
    others = stretches.scatter_(-1, stretch, -torch.inf).amax(-1)
    return stretch * size + at, top, second.maximum(others)


def _flat(draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [N, 2], steps [N] and positions [N], one of each per row of the flattened logits."""
    width = draws.positions[0].numel() if len(draws.positions) else 1
    return (
        draws.keys.repeat_interleave(width, 0),
        draws.steps.repeat_interleave(width, 0),
        draws.positions.reshape(-1),
    )


def _samples(logits: Tensor, draws: Draws) -> Tensor:
    """Draw a word from each of the rows [..., V], in float64: [...]."""
    found, at, noise = [], 0, _flat(draws)
    for rows in _pieces(logits, CPU_CHUNK, NOISE_CHUNK):
        here = slice(at, at + len(rows))
        keys, steps, positions = (own[here] for own in noise)
        uniform = rng.uniform(keys, steps, positions.unsqueeze(1), rows.shape[-1], rng.TOKEN_STREAM).squeeze(1)
        # less the largest, which would take the noise's digits
        wide = rows.to(torch.float64, copy=True).sub_(rows.amax(-1, keepdim=True)).div_(draws.temperature)
        found.append(wide.add_(rng.gumbel(uniform)).argmax(-1))
        at = here.stop
    return torch.cat(found).view(logits.shape[:-1])


# ---- Triton ---------------------------------------------------------------------------------------------------------

_DEVICE_FUNCTIONS: list[Any] = []


def _on_device(function: Any) -> Any:
    """Mark a function that `_triton` compiles, so that importing this module needs no triton."""
    _DEVICE_FUNCTIONS.append(function)
    return function


@functools.cache
def _triton() -> Any:
    """triton, with the functions below compiled (on their first launch) in their place."""
    import triton
    import triton.language

    names = globals()
    names["tl"] = triton.language
    for function in _DEVICE_FUNCTIONS:
        names[function.__name__] = triton.jit(function)
    return triton


@functools.cache
def _has_triton() -> bool:
    try:
        _triton()
    except ImportError:
        return False
    return True


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 must be set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _check_triton(logits: Tensor, wanted: frozenset[str]) -> None:
    missing = sorted(wanted - IN_ONE_READ)
    if missing:
        raise ValueError(f"path='triton' has no {missing[0]}, which takes a second read; use path='chunked'")
    if logits.dtype == torch.float64:
        raise ValueError("path='triton' computes in float32; for float64 logits use path='float64'")
    if not logits.is_cuda and not interpreting():
        raise ValueError(f"path='triton' takes logits on a CUDA device, not on {logits.device}; use path='chunked'")
    if not _has_triton():
        raise ValueError("path='triton' needs the package triton; install it, or use path='chunked'")


def _triton_stats(
    logits: Tensor,
    wanted: frozenset[str],
    temperature: float,
    ids: Tensor | None,
    draws: Draws | None,
    block: int = BLOCK,
    splits: int | None = None,
) -> TokenStats:
    """The kernel. block: words per tile, a power of two. splits: parts of the vocabulary; None fits the device."""
    triton = _triton()
    lead, words = logits.shape[:-1], logits.shape[-1]
    grid = logits if logits.dim() == 3 else logits.reshape(1, -1, words)  # [R, W, V]; three dimensions need no copy
    if grid.stride(2) != 1:
        grid = grid.contiguous()
    count, width, device = grid.shape[0] * grid.shape[1], grid.shape[1], logits.device
    if splits is None:
        splits = max(1, min(_programs(device) // max(count, 1), triton.cdiv(words, block)))
    span = triton.cdiv(triton.cdiv(words, splits), block) * block
    splits = triton.cdiv(words, span)
    partial = torch.empty((count, splits, PARTIAL), dtype=torch.float64, device=device)
    floats = torch.empty((len(FLOATS), count), dtype=torch.float64, device=device)
    tokens = torch.empty((2, count), dtype=torch.int64, device=device)
    nonfinite = torch.empty(count, dtype=torch.bool, device=device)
    flat_ids = ids_prob = None
    if ids is not None:
        flat_ids = ids.reshape(count, -1).contiguous()
        ids_prob = torch.empty(flat_ids.shape, dtype=torch.float64, device=device)
    noise, sharpness = (None, None, None), None
    if draws is not None:
        noise = tuple(own.contiguous() for own in _flat(draws))
        # a tensor: as an argument of the kernel it would be rounded to float32
        sharpness = torch.full((1,), draws.temperature, dtype=torch.float64, device=device)
    if count:
        _partial_kernel[(count, splits)](
            grid, partial, *noise, sharpness, width, grid.stride(0), grid.stride(1), words, span, 1 / temperature,
            SAMPLE=draws is not None, BLOCK=block, num_warps=8,
        )  # fmt: skip
        many = 0 if flat_ids is None else flat_ids.shape[1]
        _finish_kernel[(count,)](
            grid, partial, floats, tokens, nonfinite, flat_ids, ids_prob, sharpness,
            count, splits, width, grid.stride(0), grid.stride(1), temperature, many,
            SAMPLE=draws is not None, IDS=triton.next_power_of_2(many) if many else 0, num_warps=1,
        )  # fmt: skip
    numbers = dict(zip(FLOATS, floats.view(len(FLOATS), *lead).unbind(0), strict=True))
    sample_prob = numbers.pop("sample_prob")
    return TokenStats(
        token=tokens[0].view(lead),
        nonfinite=nonfinite.view(lead),
        ids_prob=None if ids_prob is None or ids is None else ids_prob.view(ids.shape),
        sample=None if draws is None else tokens[1].view(lead),
        sample_prob=None if draws is None else sample_prob,
        **numbers,
    )


@functools.cache
def _programs(device: torch.device) -> int:
    """How many programs a device holds at once: four per multiprocessor, by the kernel's registers."""
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


FLOATS = ("prob", "second_prob", "margin", "entropy", "logsumexp", "gap", "sample_prob")
"""Rows of `floats` in the kernel, in order."""
PARTIAL = 7
"""Numbers per part of a row: m, second, best, rest, weight; best perturbed logit, less m, and its word."""


@_on_device
def _partial_kernel(
    logits, partial, keys, steps, positions, sharpness, width, row_stride, column_stride, words, span, scale,
    SAMPLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One part of one row's vocabulary -> partial [N, splits, 7] float64. Grid (N, splits)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    source = logits + (row // width) * row_stride + (row % width) * column_stride
    begin = split * span
    stop = tl.minimum(begin + span, words)
    m = tl.full((), float("-inf"), tl.float32)
    second = tl.full((), float("-inf"), tl.float32)
    best = tl.full((), -1, tl.int32)
    # lane by lane, summed at the end; the scalars hold words that were the best once
    rest = tl.zeros((BLOCK,), tl.float32)
    weight = tl.zeros((BLOCK,), tl.float32)
    rest_of_best = tl.full((), 0.0, tl.float32)
    weight_of_best = tl.full((), 0.0, tl.float32)
    drawn = tl.full((), float("-inf"), tl.float64)
    sample = tl.full((), 0, tl.int32)
    lane = tl.arange(0, BLOCK)
    ahead = tl.load(source + begin + lane, mask=begin + lane < stop, other=float("-inf"))
    for at in range(begin, stop, BLOCK):
        word = at + lane
        # float32 at once: the interpreter computes nothing in bfloat16
        x = ahead.to(tl.float32)
        # the next tile is on its way while this one is worked on
        ahead = tl.load(source + word + BLOCK, mask=word + BLOCK < stop, other=float("-inf"))
        top = tl.max(x, 0)
        if top > second:  # few tiles hold one of the two best so far
            where = tl.min(tl.where(x == top, word, words), 0)
            other = tl.max(tl.where(word == where, float("-inf"), x), 0)
            if top > m:
                second = tl.maximum(m, other)
                if m > float("-inf"):
                    # finite, so that 0 times it is 0
                    shift = tl.maximum((m - top) * scale, -200.0)
                    factor = tl.exp(shift)
                    weight = factor * (weight + rest * shift)
                    rest = factor * rest
                    weight_of_best = factor * (weight_of_best + (rest_of_best + 1) * shift)
                    rest_of_best = factor * (rest_of_best + 1)
                    if SAMPLE:
                        drawn += (m.to(tl.float64) - top.to(tl.float64)) / tl.load(sharpness)
                m = top
                best = where
            else:
                second = top
        reference = tl.where(m == float("-inf"), 0.0, m)
        apart = (x - reference) * scale
        share = tl.where(word == best, 0.0, tl.exp(apart))
        rest += share
        weight += share * tl.maximum(apart, -200.0)
        if SAMPLE:
            seed = (tl.load(keys + 2 * row + 1) << 32) | tl.load(keys + 2 * row)
            flat = word * 0
            position = (flat + tl.load(positions + row)).to(tl.int32)
            step = (flat + tl.load(steps + row)).to(tl.int32)
            # two words share one call of Philox, as in rng.uniform; its stream 0 is the one that draws tokens
            a, b, c, d = tl.philox(seed, word // 2, position, step, flat)
            high = tl.where(word % 2 == 0, a, c).to(tl.int64)
            low = tl.where(word % 2 == 0, b, d).to(tl.int64)
            uniform = (((high << 21) | (low >> 11)).to(tl.float64) + 0.5) * 1.1102230246251565e-16
            gumbel = -tl.log(-tl.log(uniform))
            # less the largest logit so far, which would take the noise's digits
            below = (x.to(tl.float64) - reference.to(tl.float64)) / tl.load(sharpness)
            z = tl.where(word < stop, below + gumbel, float("-inf"))
            highest = tl.max(z, 0)
            if highest > drawn:
                drawn = highest
                sample = tl.min(tl.where(z == highest, word, words), 0)
    out = partial + (row * tl.num_programs(1) + split) * 7
    tl.store(out, m.to(tl.float64))
    tl.store(out + 1, second.to(tl.float64))
    tl.store(out + 2, best.to(tl.float64))
    tl.store(out + 3, (tl.sum(rest, 0) + rest_of_best).to(tl.float64))
    tl.store(out + 4, (tl.sum(weight, 0) + weight_of_best).to(tl.float64))
    tl.store(out + 5, drawn)
    tl.store(out + 6, sample.to(tl.float64))


@_on_device
def _finish_kernel(
    logits, partial, floats, tokens, nonfinite, ids, ids_prob, sharpness,
    count, splits, width, row_stride, column_stride, temperature, many,
    SAMPLE: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one row, and write what follows from them. Grid (N,)."""
    row = tl.program_id(0).to(tl.int64)
    source = logits + (row // width) * row_stride + (row % width) * column_stride
    none = float("-inf")
    m = tl.full((), none, tl.float64)
    second = tl.full((), none, tl.float64)
    best = tl.full((), 0.0, tl.float64)
    rest = tl.full((), 0.0, tl.float64)
    weight = tl.full((), 0.0, tl.float64)
    drawn = tl.full((), none, tl.float64)
    sample = tl.full((), 0.0, tl.float64)
    for split in range(0, splits):
        part = partial + (row * splits + split) * 7
        m2 = tl.load(part)
        second2 = tl.load(part + 1)
        best2 = tl.load(part + 2)
        rest2 = tl.load(part + 3)
        weight2 = tl.load(part + 4)
        top = tl.maximum(m, m2)
        # how far each side is below the larger maximum; a side without words weighs nothing
        down = tl.where(m == none, 0.0, (m - top) / temperature)
        down2 = tl.where(m2 == none, 0.0, (m2 - top) / temperature)
        factor = tl.where(m == none, 0.0, tl.exp(down))
        factor2 = tl.where(m2 == none, 0.0, tl.exp(down2))
        stays = m >= m2  # equal maxima: the lower words stay
        # the side that loses puts its best word among the others
        mass = rest + tl.where(stays | (m == none), 0.0, 1.0)
        mass2 = rest2 + tl.where(stays & (m2 > none), 1.0, 0.0)
        weight = factor * (weight + mass * down) + factor2 * (weight2 + mass2 * down2)
        rest = factor * mass + factor2 * mass2
        second = tl.maximum(tl.minimum(m, m2), tl.maximum(second, second2))
        best = tl.where(stays, best, best2)
        if SAMPLE:
            drawn += tl.where(m == none, 0.0, (m - top) / tl.load(sharpness))
            drawn2 = tl.load(part + 5) + tl.where(m2 == none, 0.0, (m2 - top) / tl.load(sharpness))
            sample = tl.where(drawn2 > drawn, tl.load(part + 6), sample)
            drawn = tl.maximum(drawn, drawn2)
        m = top
    bad = (m == none) | (m == float("inf")) | (rest != rest)
    safe = tl.where(bad, 0.0, m)
    total = tl.where(bad, float("nan"), 1.0 + rest)
    # ln(1 + rest) where 1 + rest rounds most of it away
    logarithm = tl.where(rest < 1e-5, rest - 0.5 * rest * rest, tl.log(total))
    ratio = tl.where(second == none, 0.0, tl.exp((second - safe) / temperature))
    tl.store(floats + row, 1.0 / total)
    tl.store(floats + count + row, ratio / total)
    tl.store(floats + 2 * count + row, (1.0 - ratio) / total)
    tl.store(floats + 3 * count + row, logarithm - weight / total)
    tl.store(floats + 4 * count + row, tl.where(bad, float("nan"), safe / temperature + logarithm))
    tl.store(floats + 5 * count + row, tl.where(bad, float("nan"), safe - second))
    tl.store(tokens + row, tl.maximum(best, 0.0).to(tl.int64))
    tl.store(nonfinite + row, bad)
    if SAMPLE:
        x = tl.load(source + sample.to(tl.int64)).to(tl.float32).to(tl.float64)
        tl.store(tokens + count + row, sample.to(tl.int64))
        tl.store(floats + 6 * count + row, tl.exp((x - safe) / temperature) / total)
    if IDS:
        k = tl.arange(0, IDS)
        word = tl.load(ids + row * many + k, mask=k < many, other=0)
        x = tl.load(source + word, mask=k < many, other=none).to(tl.float32).to(tl.float64)
        tl.store(ids_prob + row * many + k, tl.exp((x - safe) / temperature) / total, mask=k < many)

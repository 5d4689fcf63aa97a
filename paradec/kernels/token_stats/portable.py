"""A few rows at a time, which stay in a processor's caches: the path "chunked", and what PyTorch's paths share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.kernels import exp_is_faster
from paradec.kernels.token_stats.draws import SEGMENT, TokenDraws, draw, locate
from paradec.kernels.token_stats.memory import kept_by_thread, scratch
from paradec.kernels.token_stats.reference import EPSILON, TokenStats

CPU_CHUNK = 3 * 2**17
"""Tokens that "chunked" holds at a time on the CPU, if a row is no longer: 1.5 MB, so that what one call writes is in a
core's own caches when the next one reads it, and calls are few."""
SEARCH_CHUNK = 2**22
"""Tokens among which "chunked" looks for the two best of each row at a time on the CPU: few enough to be there still
when they are read again."""
CHUNK = 2**25
"""The same on accelerators."""
STRETCH = 2**9
"""Tokens whose largest logit is found before an index is looked for; less where that divides the vocabulary."""
FLOOR = -73.5
"""Where a token's difference to the second best, over the temperature, is cut off: what is below 2**-106 of it is
nothing beside it in float64. Processors take ten times as long over an exponential whose result is no normal number, as
at low temperatures and of excluded tokens."""
NOTHING = 2.0**-105.9
"""More than is left of what has been cut off."""
HIGHEST = 256.0
"""How far above the second best nothing is left of it in float64, as an exponent."""
MOST_APART = 700.0
"""Where the best token's difference to the second best is cut off in draws: its weight stays a number."""
LOG2_E = 1 / math.log(2)
MOST_PIECES = 4
"""`_Piece`s that a thread keeps: up to 3 MB if a row is no longer than `CPU_CHUNK`, most of it shared by all."""
VECTORS = 64
"""Numbers of float32 of which torch computes all by whole vectors."""
MOST_WHOLE = 2.0**10
"""Exponents up to which differences are taken in one pass, in either direction."""
LANES = 3 * SEGMENT
"""Powers are taken of multiples of so many numbers: 1, 2, 3 or 4 threads have whole vectors each."""
PART = 170 * LANES
"""Numbers that 4 threads share at most: torch gives each 32,768 at least."""


class Exponential(NamedTuple):
    """An exponential function of torch, and the constants that depend on its base."""

    power: Callable[..., Tensor]
    unit: float
    """One nat as an exponent."""

    @property
    def floor(self) -> float:
        """`FLOOR` as an exponent."""
        return FLOOR * self.unit

    @property
    def unseen(self) -> float:
        """All tokens of the largest vocabulary, this far below the second best, are less beside it than float32 is
        rounded."""
        return -30.5 * self.unit


EXP, EXP2 = Exponential(torch.exp, 1.0), Exponential(torch.exp2, LOG2_E)
exponential = EXP if exp_is_faster() else EXP2
"""The one that differences are raised by: the faster one on this processor."""
_PRODUCT = torch.full((VECTORS,), 1 + 2.0**-12)
fuses_product = bool((torch.add(-_PRODUCT.square(), _PRODUCT, alpha=1 + 2.0**-12) != 0).all())
"""Whether this processor's torch adds a product that it does not round. Without that, differences of large logits
would be wrong by 2**-16, and take two passes."""


def with_sample(read: Callable[[Tensor | None], TokenStats], sample: Tensor, ids: Tensor | None) -> TokenStats:
    """What `read` finds for given ids, for `ids` [...] or [..., K], and of the `sample` [...] with its probability."""
    asked = sample if ids is None else torch.cat((ids.reshape(*sample.shape, -1), sample.unsqueeze(-1)), -1)
    found = read(asked)
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


def chunked_stats(
    logits: Tensor, wanted: frozenset[str], temperature: float, ids: Tensor | None, draws: TokenDraws | None
) -> TokenStats:
    """`token_stats` by the path "chunked", unchecked."""
    groups = [[rows] for rows in _pieces(logits.detach(), SEARCH_CHUNK, CHUNK)]
    sums = _all_sums(groups, _Asked(wanted, temperature, None if draws is None else draws.temperature))
    if draws is None:
        return _from_sums(sums, logits, wanted, temperature, ids)
    sample = _sample(sums, logits.detach(), draws)
    return with_sample(lambda asked: _from_sums(sums, logits, wanted, temperature, asked), sample, ids)


def stats_where(
    logits: Tensor, chosen: Tensor, wanted: frozenset[str] = frozenset(), reader: RowReader | None = None
) -> TokenStats:
    """What the path "chunked" finds of the `chosen` rows of logits [..., V] alone, which the others cost nothing.

    Args:
        chosen: [...] bool, on the host. wanted: as of `read_stats`.
        reader: sees these rows in order, each while it is in the caches.

    Returns:
        Fields [N], of the N chosen rows in order.
    """
    groups: list[list[Tensor]] = [[]]
    most = max(1, (SEARCH_CHUNK if logits.is_cpu else CHUNK) // logits.shape[-1])
    held = 0
    for view in _runs(logits.detach().reshape(-1, logits.shape[-1]), chosen.flatten().tolist()):
        for part in view.split(most):
            if held + len(part) > most:
                groups.append([])
                held = 0
            groups[-1].append(part)
            held += len(part)
    if not held:
        reader = None
    sums = _all_sums(groups, _Asked(wanted, 1.0, reader=reader))
    return _from_sums(sums, sums.top.unsqueeze(-1), wanted, 1.0, None)


def _runs(rows: Tensor, chosen: list[bool]) -> Iterator[Tensor]:
    """Views of the chosen of rows [N, V], where they lie one after the other; one at least."""
    ends = [at for at in range(1, len(chosen)) if chosen[at] != chosen[at - 1]]
    for first, stop in zip([0, *ends], [*ends, len(chosen)], strict=True):
        if stop > first and chosen[first]:
            yield rows[first:stop]
    if not any(chosen):
        yield rows[:0]


def _joined(parts: Iterable[tuple[Tensor | None, ...]]) -> list[Any]:
    """Field by field, the parts' rows one below the other."""
    return [None if field[0] is None else _one(field) for field in zip(*parts, strict=True)]


def _pieces(logits: Tensor, on_cpu: int, elsewhere: int) -> Iterator[Tensor]:
    """[..., V] as views [n, V] of about so many tokens, in order: one at least."""
    rows = max(1, (on_cpu if logits.is_cpu else elsewhere) // logits.shape[-1])
    if logits.dim() <= 2 or logits.is_contiguous() or not logits.numel():
        yield from cut(logits.reshape(-1, logits.shape[-1]), rows)
    else:
        for part in logits:
            yield from _pieces(part, on_cpu, elsewhere)


class RowReader(Protocol):
    """Sees one row of logits after the other."""

    least: float
    """Where exponents are cut off, beside the best token's."""
    memory: Iterator[tuple[Tensor, Tensor]]
    """Where each row is written and stays, [`padded(V)`], and its first V numbers, [1, V]: beside some base, as
    exponents of `exponential`, and the least of them at the best token. What is padded is its `floor` before."""

    def read(self, share: Tensor, height: float) -> None:
        """The next row has been written. share: [V], what its exponents come to, in memory that is used again. height:
        where the best token is as an exponent, `HIGHEST` at most."""


def padded(vocab: int) -> int:
    """Numbers of a row of so many tokens: its segments are of one length, and whole vectors of every thread."""
    return -(-vocab // LANES) * LANES


class _Sums(NamedTuple):
    """What the portable path reads of rows [N, V]; all else follows from it at once for all rows. Each [N] if nothing
    else is said, float64 but for `token`. Shares are exp((logit - second) / temperature): what is far below the second
    best is too small for float32 only where it is too small beside it, however probable the best token is."""

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
    segments: Tensor | None
    """[N, S]: of shares at the temperature that tokens are drawn at, the best token's among them, by `SEGMENT`."""


class _Base(NamedTuple):
    """What differences of rows are to, as exponents: the second best logit, or a whole exponent beside it, which one
    pass subtracts while it scales. Each [n, 1]."""

    logit: Tensor
    scale: float
    """Times a difference of logits."""
    near: list[bool]
    """Of each row: whether differences are to the whole exponent. Empty where none are."""
    whole: Tensor
    """That exponent, with the other sign."""
    apart: Tensor
    """[n, k], k times the same: how far the second best is above it."""
    share: Tensor
    """Float64: that raised."""

    @property
    def beyond(self) -> Tensor:
        return self.apart[:, :1].double()

    @classmethod
    def to(cls, logit: Tensor, temperature: float) -> _Base:
        scale = float(np.float32(exponential.unit / temperature))
        # nothing to scale; or the product would be rounded; or `near` would be waited for
        if scale == 1 or not (fuses_product and logit.is_cpu):
            apart = torch.zeros_like(logit)
            return cls(logit, scale, [], logit, apart, apart.double() + 1)
        with np.errstate(over="ignore"):
            whole = torch.from_numpy(np.rint(logit.numpy() * np.float32(-scale)))
        near = [abs(each) <= MOST_WHOLE for each in whole.flatten().tolist()]
        # as all others are computed, so that tokens as likely as the second best have its share
        apart = torch.add(whole, logit.expand(-1, VECTORS), alpha=scale)
        if not all(near):
            apart[torch.tensor(near).logical_not_()] = 0
        return cls(logit, scale, near, whole, apart, exponential.power(apart)[:, :1].double())

    def split(self, sizes: Sequence[int]) -> list[_Base]:
        """That of some rows after the other, but for `apart` and `share`."""
        if not self.near:
            return [self._replace(logit=logit) for logit in self.logit.split_with_sizes(sizes)]
        wholes, ends = self.whole.split_with_sizes(sizes), accumulate(sizes)
        logits = repeat(self.logit) if all(self.near) else self.logit.split_with_sizes(sizes)  # else not looked at
        parts = zip(logits, wholes, sizes, ends, strict=False)
        return [self._replace(logit=z, whole=w, near=self.near[end - size : end]) for z, w, size, end in parts]


def _difference(rows: Tensor, base: _Base, out: Tensor) -> Tensor:
    """Differences of rows [n, V], all of them near or none."""
    if rows.dtype != base.logit.dtype:
        rows = out.copy_(rows)
    if base.near and base.near[0]:  # one pass, where `fuses_product`
        return torch.add(base.whole, rows, alpha=base.scale, out=out)
    apart = torch.sub(rows, base.logit, out=out)
    return apart if base.scale == 1 else apart.mul_(base.scale)


class _Piece:
    """Memory for the shares of a few rows, with the views of it that every piece of so many rows takes.

    Rows are padded with what counts as nothing: segments are of one length, and powers of multiples of `LANES`. Torch
    computes what is left of a thread's part after whole vectors by another function, which rounds otherwise.
    """

    def __init__(self, memory: Tensor, vocab: int):
        self._pads, self.rows = memory[0, :, vocab:], memory.shape[1]
        self._parts = list(zip(*(cut(memory[at].view(-1), PART) for at in (0, -1)), strict=True))
        self._memory, self._segments = (memory[at].unflatten(-1, (-1, SEGMENT)) for at in (0, -1))
        self.apart, self.share = memory[0, :, :vocab], memory[-1, :, :vocab]
        """[n, V] each: differences to a base, as exponents, and what they come to; one memory, or two."""

    def subtract(self, rows: Tensor, base: _Base) -> Tensor:
        """`apart`, of rows [n, V]."""
        near = base.near
        if any(near) and not all(near):  # each by itself, so that a row depends on no other
            single = (1,) * len(near)
            for row, own, out in zip(rows.split(1), base.split(single), self.apart.split(1), strict=True):
                _difference(row, own, out)
            return self.apart
        return _difference(rows, base, self.apart)

    def raise_to(self, sums: Tensor) -> None:
        """Make `share` of `apart`, and `sums` [n, S] its sums."""
        self._pads.fill_(exponential.floor)
        for apart, share in self._parts:
            exponential.power(apart, out=share)
        self.add_up(sums)

    def raise_row(self, exponents: Tensor, sums: Tensor) -> None:
        """The same of a row's exponents [padded(V)], which are elsewhere."""
        for apart, (_, share) in zip(cut(exponents, PART), self._parts, strict=True):
            exponential.power(apart, out=share)
        self.add_up(sums)

    def add_up(self, sums: Tensor) -> None:
        """Sum `share` by segments."""
        torch.sum(self._segments, -1, out=sums)

    def weigh(self, sums: Tensor) -> None:
        """Sum `share` times `apart` by segments."""
        if sums.is_cpu:
            np.vecdot(self._segments.numpy(), self._memory.numpy(), out=sums.numpy())
        else:
            torch.sum(self._segments * self._memory, -1, out=sums)

    def smoothed(self, below: Tensor, temperature: float, beyond: Tensor, sums: Tensor) -> Tensor:
        """[n]: the sum of p / (p + EPSILON / 2) over `share`. below: [n, 1] float64, from the second best to the best.
        beyond: [n, 1], the share of the second best. sums: of `share`, as `raise_to` leaves them."""
        # with s the share, p / (p + EPSILON / 2) is 1 - h / (s + h), where h is EPSILON / 2 as a share
        scale = (below / temperature).exp()  # of the second best beside the best
        mass = sums.sum(-1, keepdim=True, dtype=torch.float64)
        half = (EPSILON / 2 * (beyond + scale * mass) / scale).clamp(max=1e30)
        least = torch.add(self.share, half.float()).reciprocal_().sum(-1)
        return self.share.shape[-1] - half.squeeze(-1) * least


def _piece(shape: tuple[int, int, int], vocab: int, device: torch.device) -> _Piece:
    """Of memory [1 or 2, n, padded(V)]. A thread keeps those on the CPU: making one takes as long as some passes do."""
    on_cpu = device.type == "cpu"
    kept: dict[tuple[int, ...], _Piece] = kept_by_thread.__dict__.setdefault("pieces", {}) if on_cpu else {}
    found = kept.get((*shape, vocab))
    if found is None:
        if len(kept) == MOST_PIECES:
            del kept[next(iter(kept))]
        found = kept[*shape, vocab] = _Piece(scratch(shape, device), vocab)
    return found


class _Asked(NamedTuple):
    """What is read of rows."""

    wanted: frozenset[str]
    temperature: float
    sharpness: float | None = None
    """The temperature that tokens are drawn at; None draws none."""
    reader: RowReader | None = None

    @property
    def weighs(self) -> bool:
        return not self.wanted.isdisjoint(("entropy", "smoothed_entropy"))


def _all_sums(groups: list[list[Tensor]], asked: _Asked) -> _Sums:
    """Of all rows of groups of views [n, V], each field [N]."""
    return _Sums(*_joined(_sums(views, asked) for views in groups))


def _sums(views: list[Tensor], asked: _Asked) -> _Sums:
    """Of rows [n, V], one view below the other."""
    at, top, second = _two_best(views)
    base = second.clamp(min=torch.finfo(second.dtype).min)
    if base.dtype.itemsize < 4:  # differences would be rounded to it
        base = base.float()
    top, second = top.double(), second.double()
    smoothed, weighs, sharpness = "smoothed_entropy" in asked.wanted, asked.weighs, asked.sharpness
    vocab, on_cpu = views[0].shape[-1], views[0].is_cpu
    width = padded(vocab)
    sums = torch.empty((1 + weighs + (sharpness is not None), len(at), width // SEGMENT), device=at.device)
    others: list[Tensor] = []
    own = drawn_from = _Base.to(base, asked.temperature)
    if sharpness is not None and sharpness != asked.temperature:
        drawn_from = _Base.to(base, sharpness)
    most = max(1, (CPU_CHUNK if on_cpu else CHUNK) // width) if asked.reader is None else 1
    parts = [part for view in views for part in cut(view, most)]
    sizes = [part.shape[0] for part in parts]
    pieces, start = {size: _piece((1 + weighs, size, width), vocab, at.device) for size in set(sizes)}, 0
    heights = [] if asked.reader is None else _heights(top, base, own)
    bases, masses, bests = own.split(sizes), sums[0].split_with_sizes(sizes), at.split_with_sizes(sizes)
    drawn_bases = bases if drawn_from is own else drawn_from.split(sizes)
    for rows, best, origin, mass, drawn_base in zip(parts, bests, bases, masses, drawn_bases, strict=True):
        now = pieces[rows.shape[0]]
        here, start = slice(start, start + now.rows), start + now.rows
        if asked.reader is not None:
            memory, apart = next(asked.reader.memory)
            cut_off = asked.reader.least + heights[here.start]
            least = max(exponential.floor, min(cut_off, exponential.unseen))
            _difference(rows, origin, apart).clamp_(min=least).scatter_(-1, best, least)
            now.raise_row(memory, mass)
            if cut_off > least:  # else one pass was enough
                apart.clamp_(min=cut_off)
            asked.reader.read(now.share[0], heights[here.start])
            continue
        now.subtract(rows, origin).clamp_(min=exponential.floor).scatter_(-1, best, exponential.floor)
        now.raise_to(mass)
        if smoothed:
            others.append(now.smoothed(second[here] - top[here], asked.temperature, own.share[here], mass))
        if sharpness == asked.temperature:
            # what has been cut off is drawn never, not rarely
            torch.threshold_(now.share, NOTHING, 0.0)
            now.add_up(sums[-1, here])
        if weighs:
            now.weigh(sums[1, here])
        if drawn_from is not own:
            apart = now.subtract(rows, drawn_base)
            torch.threshold_(apart, exponential.floor, -torch.inf).scatter_(-1, best, -torch.inf)
            now.raise_to(sums[-1, here])
    total, weight = sums[0].sum(-1, dtype=torch.float64), None
    share = own.share.squeeze(-1)
    if weighs:
        weight = sums[1].sum(-1, dtype=torch.float64).addcmul_(own.beyond.squeeze(-1), total, value=-1)
        weight.div_(exponential.unit * share)
    total.div_(share)
    drawn = None
    if sharpness is not None:
        drawn = sums[-1].double().div_(drawn_from.share)
        apart = ((top - second) / sharpness).clamp_(max=MOST_APART).exp_()
        drawn.scatter_add_(-1, torch.div(at, SEGMENT, rounding_mode="floor"), apart)
    counted = _one(others).double() if smoothed else None
    return _Sums(at.squeeze(-1), top.squeeze(-1), second.squeeze(-1), total, weight, counted, drawn)


def _heights(top: Tensor, base: Tensor, own: _Base) -> list[float]:
    """How far the best of rows are above what differences are to, as numbers of float32. top: [n, 1] float64."""
    apart = (top - base).squeeze_(-1).numpy() * own.scale + own.apart[:, 0].numpy()
    return np.minimum(apart, HIGHEST).astype(np.float32).tolist()


def cut(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """Parts of `size` along the first dimension, the last one of what is left."""
    whole, rest = divmod(tensor.shape[0], size)
    return (tensor,) if whole + (rest > 0) <= 1 else tensor.split_with_sizes([size] * whole + [rest] * (rest > 0))


def _one(parts: Sequence[Tensor]) -> Tensor:
    """The parts' rows one below the other."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _from_sums(
    sums: _Sums, logits: Tensor, wanted: frozenset[str], temperature: float, ids: Tensor | None
) -> TokenStats:
    """Statistics of logits [..., V] from the fields of `_Sums` for each of their rows."""
    lead = logits.shape[:-1]
    token, top, second, mass = (each.view(lead) for each in sums[:4])
    weight, others = (None if each is None else each.view(lead) for each in sums[4:6])
    nonfinite = (top - top).isnan()  # as of infinities; the largest of NaN and anything is NaN
    below = second - top if temperature == 1 else (second - top) / temperature
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


def _two_best(views: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Where the largest entry of each row of [n, V] is (the lowest index on ties) [N, 1], itself [N, 1], and the second
    largest [N, 1], of one view below the other.

    Largest of stretches first, which is one vectorized pass; an index is then looked for in one stretch alone.
    """
    vocab = views[0].shape[-1]
    size = shared if (shared := math.gcd(vocab, STRETCH)) >= STRETCH // 4 else min(vocab, STRETCH)
    count = vocab // size
    whole = count * size
    stretched = [view[:, :whole].unflatten(-1, (count, size)) for view in views]
    stretches = _one([view.amax(-1) for view in stretched])
    if whole < vocab:
        rest = _one([view[:, whole:] for view in views])
        stretches = torch.cat((stretches, rest.amax(-1, keepdim=True)), -1)
    top, stretch = stretches.max(-1, keepdim=True)
    column = stretch.clamp(max=count - 1).unsqueeze(-1).expand(-1, -1, size)
    columns = column.split_with_sizes([view.shape[0] for view in views])
    inside = _one([view.gather(1, own) for view, own in zip(stretched, columns, strict=True)]).squeeze(1)
    if whole < vocab:
        inside = inside.where(stretch < count, pad(rest, (0, size - rest.shape[-1]), value=-torch.inf))
    at = inside.argmax(-1, keepdim=True)
    second = inside.scatter_(-1, at, -torch.inf).amax(-1, keepdim=True)
    others = stretches.scatter_(-1, stretch, -torch.inf).amax(-1, keepdim=True)
    return at.add_(stretch, alpha=size), top, second.maximum(others)


def _sample(sums: _Sums, logits: Tensor, draws: TokenDraws) -> Tensor:
    """Draw a token from each of the rows [..., V]: [...]."""
    lead, top, uniform = logits.shape[:-1], sums.top, draws.uniform()
    assert sums.segments is not None

    def weights(tokens: Tensor) -> Tensor:
        return (logits.gather(-1, tokens).double() - top.view(*lead, 1)).div_(draws.temperature).exp_()

    def again(near: Tensor) -> Tensor:
        return samples(logits[near], uniform[near], draws.temperature)

    return locate(sums.segments.view(*lead, -1), uniform, logits.shape[-1], weights, again)


def samples(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Draw a token from each of the rows [..., V] with the numbers uniform [...], in float64: [...]."""
    found, at, uniform = [], 0, uniform.flatten()
    for rows in _pieces(logits, CPU_CHUNK, CHUNK):
        wide = rows.to(torch.float64, copy=True).sub_(rows.amax(-1, keepdim=True)).div_(temperature)
        found.append(draw(wide.softmax(-1), uniform[at : at + len(rows)]))
        at += len(rows)
    return torch.cat(found).view(logits.shape[:-1])

"""The "chunked" path in compiled code: one pass over the vocabulary for the largest logits, and one for all sums.

For large vocabularies on CPUs, where a caller has put compiled sums in its thread's place (`serving`). What it computes
is what `paradec.kernels.token_stats` says of the float32 paths; the exponential is evaluated once and never written.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paradec.compiling import CompiledFunction, failures, first_line
from paradec.kernels.token_stats.reference import TokenStats

STRETCH = 512
"""Words that are summed in float32 before float64 goes on."""
FLOOR, LEAST = -87.0, 2e-38
"""Where differences to the best word are cut off, and a bit more than the exponential there: see `portable`."""
SURE = 1e-25
"""A sum of all others' shares below which what is cut off would show in float32. Such rows are summed word by word."""
SERVED = frozenset(("second_prob", "margin", "entropy", "logsumexp", "gap", "nonfinite"))
"""The fields that follow from the sums."""


class CompiledSums:
    """Sums over vocabularies, compiled once for each size and dtype, for any number of rows."""

    def __init__(self) -> None:
        self._functions: dict[tuple[int, torch.dtype, bool], CompiledFunction] = {}
        self.failed: str | None = None
        """Why it cannot be compiled; the portable path serves from then on."""

    @property
    def seconds(self) -> float:
        """Spent compiling so far."""
        return sum(function.seconds for function in list(self._functions.values()))

    def serves(self, logits: Tensor, wanted: frozenset[str], temperature: float) -> bool:
        """Whether `stats` can be asked: dense rows on a CPU in float32 or narrower, as they are."""
        return (
            self.failed is None
            and logits.is_cpu
            and logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and logits.shape[-1] >= 2 * STRETCH
            and logits.numel() > 0
            and logits.is_contiguous()
            and temperature == 1
            and wanted <= SERVED
        )

    def stats(self, logits: Tensor, ids: Tensor | None) -> TokenStats | None:
        """All of `SERVED` for logits [..., V], and the probabilities of `ids` [...] or [..., K]; None where the sums
        turn out not to compile."""
        rows = logits.detach().view(-1, logits.shape[-1])
        # code for one row is another one's
        key = rows.shape[-1], rows.dtype, len(rows) == 1
        function = self._functions.get(key)
        if function is None:
            function = self._functions.setdefault(key, CompiledFunction(_sums))
        at, top, second = _two_best(rows)
        if len(rows) > 1:
            for tensor in (rows, top):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        try:
            sums = function(rows, top)
        except failures() as error:
            self.failed = first_line(error)
            return None
        rest, weight = (part.sum(-1, dtype=torch.float64) for part in sums)
        top, second = top.squeeze(-1).double(), second.double()
        # the sums leave out words as good as the best one, and count what is cut off
        apart = (second == top) | (rest < SURE)
        if apart.any():
            rest[apart], weight[apart] = _exact_sums(rows[apart], at[apart])
        lead = logits.shape[:-1]
        found = [each.view(lead) for each in (at.squeeze(-1), top, second, rest, weight)]
        return _stats(*found, logits=logits, ids=ids)


def _sums(logits: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Over all words below the best one, for each stretch of logits [n, V] apart [n, S] float32: sum exp(z - m), and
    sum exp(z - m) (z - m). top: m [n, 1]."""
    whole = logits.shape[-1] // STRETCH * STRETCH
    found = [_shares(logits[:, :whole].unflatten(-1, (-1, STRETCH)), top.unsqueeze(-1))]
    if whole < logits.shape[-1]:
        rest, weight = _shares(logits[:, whole:], top)
        found.append((rest.unsqueeze(-1), weight.unsqueeze(-1)))
    return torch.cat([rest for rest, _ in found], -1), torch.cat([weight for _, weight in found], -1)


def _shares(logits: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    apart = (logits.float() - top.float()).clamp(min=FLOOR)
    share = apart.exp()
    return torch.where(apart < 0, share, 0.0).sum(-1), (apart * share).sum(-1)


def _exact_sums(rows: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The same of whole rows [n, V] in float64 [n], over all words but that at `at` [n, 1]; what is cut off counts as
    exactly nothing."""
    apart = (rows.float() - rows.gather(-1, at).float()).clamp_(min=FLOOR).scatter_(-1, at, FLOOR)
    share = torch.threshold_(apart.exp(), LEAST, 0.0)
    return share.sum(-1, dtype=torch.float64), apart.mul_(share).sum(-1, dtype=torch.float64)


def _two_best(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows [n, V]: where the largest is, the lowest index on ties [n, 1]; it [n, 1]; and the second largest [n]."""
    words = rows.shape[-1]
    whole = words // STRETCH * STRETCH
    highest = rows[:, :whole].unflatten(-1, (-1, STRETCH)).amax(-1)
    if whole < words:
        highest = torch.cat((highest, rows[:, whole:].amax(-1, keepdim=True)), -1)
    top, stretch = highest.max(-1, keepdim=True)
    column = stretch * STRETCH + torch.arange(STRETCH)
    near = rows.gather(-1, column.clamp(max=words - 1)).masked_fill_(column >= words, -torch.inf)
    place = near.argmax(-1, keepdim=True)
    second = near.scatter_(-1, place, -torch.inf).amax(-1)
    elsewhere = highest.scatter_(-1, stretch, -torch.inf).amax(-1)
    return stretch * STRETCH + place, top, second.maximum(elsewhere)


def _stats(
    at: Tensor, top: Tensor, second: Tensor, rest: Tensor, weight: Tensor, *, logits: Tensor, ids: Tensor | None
) -> TokenStats:
    """What follows from the sums, in float64."""
    nonfinite = ~(top.isfinite() & rest.isfinite())
    best = torch.where(nonfinite, torch.nan, 1 / (1 + rest))
    second_prob = (second - top).exp() * best
    ids_prob = None
    if ids is not None:
        chosen = logits.gather(-1, ids if ids.dim() == logits.dim() else ids.unsqueeze(-1)).double()
        ids_prob = ((chosen - top.unsqueeze(-1)).exp() * best.unsqueeze(-1)).view(ids.shape)
    return TokenStats(
        token=at,
        prob=best,
        second_prob=second_prob,
        margin=best - second_prob,
        entropy=torch.where(nonfinite, torch.nan, rest.log1p() - weight / (1 + rest)),
        logsumexp=torch.where(nonfinite, torch.nan, top + rest.log1p()),
        gap=torch.where(nonfinite, torch.nan, top - second),
        nonfinite=nonfinite,
        ids_prob=ids_prob,
    )


class _Thread(threading.local):
    sums: CompiledSums | None = None


_thread = _Thread()


@contextmanager
def serving(sums: CompiledSums | None) -> Iterator[None]:
    """In here the statistics of this thread go through `sums` where these serve; None leaves them alone."""
    before, _thread.sums = _thread.sums, sums
    try:
        yield
    finally:
        _thread.sums = before


def compiled_stats(logits: Tensor, wanted: frozenset[str], temperature: float, ids: Tensor | None) -> TokenStats | None:
    """Statistics from this thread's compiled sums; None where there are none, or where they do not serve."""
    sums = _thread.sums
    if sums is None or not sums.serves(logits, wanted, temperature):
        return None
    return sums.stats(logits, ids)

"""The "chunked" path in compiled code: one pass over the vocabulary, in stretches that stay near the core.

For large vocabularies on CPUs, where a caller has put compiled sums in its thread's place (`serving`). What it computes
is what `paradec.kernels.token_stats` says of the float32 paths. Each stretch is summed beside its own largest logit, so
that it is read from memory once; what is left are few numbers a row, which are put together in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paradec.compiling import Compiled, Uncompilable
from paradec.kernels.token_stats.reference import TokenStats

STRETCH = 256
"""Words that are summed in float32, beside the largest of them, before float64 goes on."""
FLOOR, FAR = -87.0, -1000.0
"""Where differences to the largest are cut off, since processors take long over exponentials that are no normal
numbers: in float32 within a stretch, whose sum is 1 at least; in float64 between stretches, where it is nothing."""
LOWEST = -3e38
"""Stands for the largest of a stretch in which all words are excluded."""
SERVED = frozenset(("second_prob", "margin", "entropy", "logsumexp", "gap", "nonfinite"))
"""The fields that follow from the sums."""


class CompiledSums:
    """Sums over vocabularies, compiled once for each size and dtype, for any number of rows."""

    def __init__(self) -> None:
        self._functions: dict[tuple[int, torch.dtype, int], Compiled] = {}
        self.failed: str | None = None
        """Why it cannot be compiled; the portable path serves from then on."""
        self.seconds = 0.0
        """Spent compiling so far."""

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
        key = rows.shape[-1], rows.dtype, torch.get_num_threads()
        function = self._functions.get(key)
        if function is None:
            try:
                function = self._functions.setdefault(key, Compiled(_read, [rows], [0]))
            except Uncompilable as error:
                self.failed = str(error)
                return None
            self.seconds += function.seconds
        lead = logits.shape[:-1]
        found = {name: each.view(lead) for name, each in zip(READ, function(rows), strict=True)}
        top = found.pop("top").unsqueeze(-1)
        ids_prob = None
        if ids is not None:
            chosen = logits.gather(-1, ids if ids.dim() == logits.dim() else ids.unsqueeze(-1)).double()
            ids_prob = ((chosen - top).exp() * found["prob"].unsqueeze(-1)).view(ids.shape)
        return TokenStats(**found, ids_prob=ids_prob)


READ = ("top", "token", "prob", "second_prob", "margin", "entropy", "logsumexp", "gap", "nonfinite")
"""What is read of each row: its largest logit, and fields of the statistics."""


def _read(logits: Tensor) -> tuple[Tensor, ...]:
    """Of logits [n, V], [n] each: `READ`."""
    token, top, second, rest, weight = _joined(logits, *_sums(logits))
    nonfinite = ~(top.isfinite() & rest.isfinite())
    prob = torch.where(nonfinite, torch.nan, 1 / (1 + rest))
    second_prob = (second - top).exp() * prob
    entropy = torch.where(nonfinite, torch.nan, rest.log1p() - weight / (1 + rest))
    logsumexp = torch.where(nonfinite, torch.nan, top + rest.log1p())
    gap = torch.where(nonfinite, torch.nan, top - second)
    return top, token, prob, second_prob, prob - second_prob, entropy, logsumexp, gap, nonfinite


def _sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each stretch of logits [n, V], [n, S] float32: its largest m, sum exp(z - m), and sum exp(z - m) (z - m)."""
    whole = logits.shape[-1] // STRETCH * STRETCH
    found = _stretches(logits[:, :whole].unflatten(-1, (-1, STRETCH)))
    if whole == logits.shape[-1]:
        return found
    highest, mass, weight = zip(found, _stretches(logits[:, whole:].unsqueeze(1)), strict=True)
    return torch.cat(highest, -1), torch.cat(mass, -1), torch.cat(weight, -1)


def _stretches(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of logits [n, S, W], [n, S] each."""
    logits = logits.float()
    highest = logits.amax(-1, keepdim=True)
    apart = (logits - highest.clamp(min=LOWEST)).clamp(min=FLOOR)
    share = apart.exp()
    return highest.squeeze(-1), share.sum(-1), (apart * share).sum(-1)


def _joined(
    rows: Tensor, highest: Tensor, mass: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows [n, V] and their stretches [n, S] put together, [n] each: where the largest logit m is (the lowest index on
    ties); it, the second largest, sum exp(z - m) and sum exp(z - m) (z - m) over all words but that one, in float64."""
    words = rows.shape[-1]
    top, stretch = highest.max(-1, keepdim=True)
    column = stretch * STRETCH + torch.arange(STRETCH)
    near = rows.gather(-1, column.clamp(max=words - 1)).double().masked_fill_(column >= words, -torch.inf)
    place = near.argmax(-1, keepdim=True)
    near.scatter_(-1, place, -torch.inf)
    others, top = highest.double().scatter_(-1, stretch, -torch.inf), top.double()
    second = near.amax(-1).maximum(others.amax(-1))
    # the best word's own stretch is summed anew, word by word: less the best one it may be next to nothing
    apart = (near - top).clamp_(min=FAR)
    share = apart.exp()
    below = others.sub_(top).clamp_(min=FAR)
    scale = below.exp()
    rest = torch.linalg.vecdot(scale, mass.double()) + share.sum(-1)
    weights = torch.linalg.vecdot(scale, below.mul_(mass).add_(weight)) + torch.linalg.vecdot(share, apart)
    return (stretch * STRETCH + place).squeeze(-1), top.squeeze(-1), second, rest, weights


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

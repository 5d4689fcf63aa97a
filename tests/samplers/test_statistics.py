"""Filters of the sampling distribution against their plain definition, and the searches that they rest on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paradec.samplers.averages import Averages
from paradec.samplers.causal.gsd import around
from paradec.samplers.distributions import argmax, ascending, divided, log_of, tempered
from paradec.samplers.divergences import divergence
from paradec.samplers.filters import HEAD, draw_filtered, filter_logits
from paradec.samplers.statistics import Raised, statistics_where, token_statistics


def plain(logits: Tensor, top_p: float | None, top_k: int | None, first: bool = False) -> Tensor:
    """The definition: sort all tokens, with their places. first: of equal ones the first."""
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=first)
        out = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) > top_p
        logits = logits.masked_fill(torch.zeros_like(out).scatter(-1, order, out), -torch.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    return logits


def excluded(logits: Tensor, generator: torch.Generator) -> Tensor:
    out = torch.rand(logits.shape, generator=generator) < 0.6
    out[..., 0] = False
    return logits.masked_fill(out, -torch.inf)


def alike(logits: Tensor, generator: torch.Generator) -> Tensor:
    return torch.zeros_like(logits)


KINDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "continuous": lambda logits, generator: logits,
    "ties": lambda logits, generator: logits.round(),
    "excluded": excluded,
    "ties and excluded": lambda logits, generator: excluded((2 * logits).round() / 2, generator),
    "rows of other widths": lambda logits, generator: logits * torch.linspace(0.01, 20, len(logits)).view(-1, 1, 1),
    "alike": alike,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_filters_are_their_definition_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 60, 1500):
        logits = KINDS[kind](4 * torch.randn(3, 2, size, generator=generator), generator).to(dtype)
        for top_p in (None, 1.0, 0.9999999, 0.9, 0.3, 1e-6):
            for top_k in (None, 1, 2, max(1, size // 2), size, size + 1):
                given = logits.clone()
                found = filter_logits(logits, top_p, top_k)
                assert found.dtype == dtype and torch.equal(found, plain(logits, top_p, top_k)), (size, top_p, top_k)
                assert torch.equal(logits, given)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_of_large_vocabularies(kind: str, dtype: torch.dtype) -> None:
    """Without a sort, where nuclei end early and late, and where the least kept logit is 0; and draws from them."""
    generator = torch.Generator().manual_seed(5)
    logits = KINDS[kind](4 * torch.randn(2, 30, 9001, generator=generator), generator).to(dtype)
    logits[0, 0] -= logits[0, 0].topk(50).values[-1].where(logits[0, 0] > -torch.inf, 0)
    for top_p, top_k in ((None, 50), (0.95, None), (0.3, 3000)):
        found = filter_logits(logits, top_p, top_k)
        assert found.dtype == dtype and torch.equal(found, plain(logits, top_p, top_k)), (top_p, top_k)
        assert torch.equal(filter_logits(logits[1, 2], top_p, top_k), found[1, 2])
        assert torch.equal(filter_logits(logits[:, ::2], top_p, top_k), found[:, ::2])
        unsorted = filter_logits(logits, top_p, top_k, sorted_ties=False)
        assert torch.equal(unsorted, plain(logits, top_p, top_k, first=True)), (top_p, top_k)
        uniform = torch.rand(2, 30, generator=generator, dtype=torch.float64)
        drawn = draw_filtered(logits, uniform, 0.7, top_p, top_k)
        sums = plain(tempered(logits.double(), 0.7), top_p, top_k, first=True).softmax(-1).cumsum(-1)
        expected = torch.searchsorted(sums, uniform.unsqueeze(-1) * sums[..., -1:], right=True).squeeze(-1)
        assert drawn is not None and torch.equal(drawn, expected)
        assert torch.equal(draw_filtered(logits[1, 2:3], uniform[1, 2:3], 0.7, top_p, top_k), drawn[1, 2:3])
        left = plain(tempered(logits, 0.7), top_p, top_k, first=True)
        assert (left.gather(-1, drawn.unsqueeze(-1)) > -torch.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_token_that_crosses_the_nucleus_is_found_to_the_last_digit(dtype: torch.dtype) -> None:
    """Masses that are exactly what lies before some token, and the numbers next to them."""
    generator = torch.Generator().manual_seed(2)
    wide = 2 * HEAD
    for spread, size, ranks in ((3, 300, range(1, 200, 9)), (0.5, wide, range(wide // 2 - 2, wide - 99, 700))):
        logits = spread * torch.randn(4, size, generator=generator, dtype=torch.float64).to(dtype)
        distribution = logits.sort(dim=-1, descending=True).values.softmax(-1)
        for mass in (distribution.cumsum(-1) - distribution)[0, list(ranks)]:
            for top_p in (mass, mass.nextafter(mass + 1), mass.nextafter(mass - 1)):
                assert torch.equal(filter_logits(logits, float(top_p), None), plain(logits, float(top_p), None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-6, 0.05, 0.7, 2.0])
def test_temperatures_divide_what_stays_finite(temperature: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(6)
    large = torch.finfo(dtype).max
    logits = (4 * torch.randn(5, 30, generator=generator)).to(dtype)
    logits[1, 3:] = -torch.inf
    logits[2], logits[2, [4, 9]] = -large, large
    logits[3] = -large / 2
    logits[4] = large / 3
    wide = logits.double() / temperature
    expected = (wide - wide.amax(-1, keepdim=True)).softmax(-1)
    expected[2:] = (logits[2:] == logits[2:].amax(-1, keepdim=True)).double()
    expected[2:] /= expected[2:].sum(-1, keepdim=True)
    for found in (tempered(logits, temperature), divided(logits, temperature)):
        assert found.dtype == dtype and not found.isnan().any() and (found[1, 3:] == -torch.inf).all()
        rel = 30 * torch.finfo(dtype).eps / min(temperature, 1)
        torch.testing.assert_close(found.double().softmax(-1), expected, rtol=0, atol=min(rel, 1e-3))
    if dtype != torch.float16 or temperature > 1e-3:  # nothing of the first row overflows: as the public codes have it
        assert torch.equal(divided(logits, temperature)[:2], logits[:2] / temperature)
    broken = torch.zeros(3, 4, dtype=dtype)
    broken[0, 1], broken[1, 1], broken[2] = torch.inf, torch.nan, -torch.inf
    for function in (tempered, divided):
        assert function(broken, temperature).softmax(-1).isnan().any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_logarithms_of_distributions(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    distribution = torch.tensor([0.5, 0.0, 1e-30, 8 * tiny, tiny, tiny / 1024, 1.0, torch.nan], dtype=dtype)
    found = log_of(distribution.clone())
    expected = distribution.log()
    expected[[1, 4, 5]] = -torch.inf
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found[6] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("by", [0.0, 3.0, 200.0, 2e4])
def test_tokens_may_be_raised_by_any_amount(by: float, dtype: torch.dtype) -> None:
    """Unwritten, as in large vocabularies, they have the probabilities that they have written."""
    logits = 4 * torch.randn(3, 60, generator=torch.Generator().manual_seed(7), dtype=dtype)
    logits[1, 5] = -torch.inf
    prob, best = logits.double().softmax(-1).max(-1)
    ids = torch.tensor([[3, 5, -1], [5, 20, 21], [-1, -1, -1]])
    ids[2, 0] = best[2]
    raised = Raised(logits, best, prob, ids, by * torch.tensor([1.0, 0.5, 1.0], dtype=dtype).expand(3, -1))
    written = raised.written().double().softmax(-1)
    token, found = raised.statistics(("confidence",))
    assert torch.equal(token, written.argmax(-1))
    rtol = 1e-4 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(found["confidence"], written.amax(-1), rtol=rtol, atol=0)


def test_divergence_of_logits_beyond_float32() -> None:
    logits = torch.tensor([[1e300, -1e300, 1e300], [2.0, 1.0, 0.0]], dtype=torch.float64)
    p, kl = divergence(logits, torch.tensor([[0.5, 0.0, 0.5], [1 / 3, 1 / 3, 1 / 3]]))
    assert p.dtype == torch.float32 and torch.equal(p[0], torch.tensor([0.5, 0.0, 0.5]))
    torch.testing.assert_close(kl, torch.tensor([0.0, math.log(3) - float(torch.special.entr(p[1]).sum())]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_filters_at_their_bounds(dtype: torch.dtype) -> None:
    """The token before which exactly `top_p` lies crosses it, and tokens as good as the `top_k`-th are kept."""
    logits = torch.zeros(2, 4, dtype=dtype)  # each token has a quarter
    for top_p, kept in ((0.25, 2), (0.5, 3), (0.75, 4), (0.2, 1), (0.7, 3)):
        assert (filter_logits(logits, top_p, None) > -torch.inf).sum(-1).tolist() == [kept, kept]
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0]], dtype=dtype)
    for top_k, kept in ((1, [0]), (2, [0, 2, 3, 4]), (4, [0, 2, 3, 4])):
        assert (filter_logits(logits, None, top_k) > -torch.inf)[0].nonzero().flatten().tolist() == kept


def test_searches() -> None:
    generator = torch.Generator().manual_seed(3)
    for values in (torch.randn(2, 3, 400, generator=generator), torch.randint(5, (2, 3, 400), generator=generator)):
        assert torch.equal(ascending(values), values.sort(-1).values)
    values = torch.randn(2, 3, 400, generator=generator, requires_grad=True)
    for each in (values, values.round(), values.double().detach(), values[0, 0]):
        first = (each == each.amax(-1, keepdim=True)).int().argmax(-1)
        assert torch.equal(argmax(each), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 20, 1000])
def test_the_tokens_around_one_are_those_of_a_stable_sort(size: int, dtype: torch.dtype) -> None:
    """GSD's groups: with distinct probabilities, equal ones, and many that are nothing or next to it."""
    generator = torch.Generator().manual_seed(4)
    distribution = (3 * torch.randn(2, 5, size, generator=generator)).softmax(-1).to(dtype)
    empty = distribution.masked_fill(torch.rand(distribution.shape, generator=generator) < 0.5, 0)
    empty[..., -1] = 1e-42
    token_ids = torch.randint(size, (2, 5, 1), generator=generator)
    for each in (distribution, (distribution * size).round() / size, empty):
        order = each.argsort(dim=-1, stable=True)
        rank = order.argsort(-1).gather(-1, token_ids)
        places = rank + torch.arange(-7, 7)
        found = around(each, token_ids, 7)
        expected = (rank, places, order.gather(-1, places.clamp(0, size - 1)))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("size", [7, 700, 9_001])
def test_averages_are_read_as_their_logits_would_be(size: int) -> None:
    """One to three distributions, from flat ones to those so sure that the entropy is 1e-20; ties go to the lowest."""
    generator, averages = torch.Generator().manual_seed(size), Averages(size)
    for count in (1, 2, 3):
        for scale in (0.1, 3.0, 40.0):
            logits = scale * torch.randn(count, size, generator=generator)
            logits[:, 3] = -torch.inf
            logits[:, 5] += scale
            parts = logits.softmax(-1)
            token, probability, certainty = averages.of(list(parts))
            mean = parts.double().mean(0)
            others = mean.sum() - mean.max() if mean.max() < 0.9 else mean[mean < mean.max()].sum()
            expected = torch.special.entr(mean / mean.sum()).sum() if scale < 40 else None
            assert token == int(mean.argmax())
            assert math.isclose(probability, float(mean.max() / (mean.max() + others)), rel_tol=1e-6)
            assert expected is None or math.isclose(certainty, -float(expected), rel_tol=1e-5)
    sure = torch.zeros(size)
    sure[2], sure[6] = 1.0, 1e-20
    assert averages.of([sure])[0] == 2 and math.isclose(
        averages.of([sure])[2], -1e-20 * (1 + math.log(1e20)), rel_tol=1e-5
    )
    tied = torch.zeros(size)
    tied[[6, 1]] = 0.5
    assert averages.of([tied, tied.clone()])[:2] == (1, 0.5)
    assert math.isclose(averages.of([tied])[2], -math.log(2), rel_tol=1e-6)


def test_statistics_of_chosen_positions_are_those_of_all() -> None:
    """To the last bit, wherever they lie; the others have the token that is there, and 0."""
    generator = torch.Generator().manual_seed(2)
    logits, reads = 5 * torch.randn(3, 9, 9_001, generator=generator), ("confidence", "minus_entropy", "margin")
    current = torch.arange(27).view(3, 9)
    tokens, found = token_statistics(logits, reads)
    for share in (0.0, 0.3, 0.8, 1.0):
        chosen = torch.rand(3, 9, generator=generator) < share
        own_tokens, own = statistics_where(logits, reads, chosen, current)
        assert torch.equal(own_tokens, torch.where(chosen, tokens, current))
        for name in reads:
            assert torch.equal(own[name], torch.where(chosen, found[name], 0)), name

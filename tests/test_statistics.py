"""Filters of the sampling distribution against their plain definition, and the searches that they rest on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paradec.samplers.gsd import around
from paradec.samplers.statistics import argmax, ascending, filter_logits


def plain(logits: Tensor, top_p: float | None, top_k: int | None) -> Tensor:
    """The definition: sort all words, with their places."""
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_word_that_crosses_the_nucleus_is_found_to_the_last_digit(dtype: torch.dtype) -> None:
    """Masses that are exactly what lies before some word, and the numbers next to them."""
    logits = 3 * torch.randn(4, 300, generator=torch.Generator().manual_seed(2)).to(dtype)
    law = logits.sort(dim=-1, descending=True).values.softmax(-1)
    for mass in (law.cumsum(-1) - law)[0, 1:200:9]:
        for top_p in (mass, mass.nextafter(mass + 1), mass.nextafter(mass - 1)):
            assert torch.equal(filter_logits(logits, float(top_p), None), plain(logits, float(top_p), None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_filters_at_their_bounds(dtype: torch.dtype) -> None:
    """The word before which exactly `top_p` lies crosses it, and words as good as the `top_k`-th are kept."""
    logits = torch.zeros(2, 4, dtype=dtype)  # each word has a quarter
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
def test_the_words_around_one_are_those_of_a_stable_sort(size: int, dtype: torch.dtype) -> None:
    """GSD's groups: with distinct probabilities, equal ones, and many that are nothing or next to it."""
    generator = torch.Generator().manual_seed(4)
    law = (3 * torch.randn(2, 5, size, generator=generator)).softmax(-1).to(dtype)
    empty = law.masked_fill(torch.rand(law.shape, generator=generator) < 0.5, 0)
    empty[..., -1] = 1e-42
    words = torch.randint(size, (2, 5, 1), generator=generator)
    for each in (law, (law * size).round() / size, empty):
        order = each.argsort(dim=-1, stable=True)
        rank = order.argsort(-1).gather(-1, words)
        places = rank + torch.arange(-7, 7)
        found = around(each, words, 7)
        expected = (rank, places, order.gather(-1, places.clamp(0, size - 1)))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

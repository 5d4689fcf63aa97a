"""Filters of the sampling distribution compared with their definition, also for large vocabularies."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paradec.samplers.distributions import HEAD, apply_temperature, draw_filtered, filter_logits


def plain_filter(logits: Tensor, top_p: float | None, top_k: int | None, stable: bool = False) -> Tensor:
    """Filter logits by the definition, with a full sort. stable: whether top-p keeps the first of equal logits."""
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=stable)
        is_excluded = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) > top_p
        logits = logits.masked_fill(torch.zeros_like(is_excluded).scatter(-1, order, is_excluded), -torch.inf)
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k, dim=-1).values[..., -1:], -torch.inf)
    return logits


def exclude_some(logits: Tensor, generator: torch.Generator) -> Tensor:
    is_excluded = torch.rand(logits.shape, generator=generator) < 0.6
    is_excluded[..., 0] = False
    return logits.masked_fill(is_excluded, -torch.inf)


KINDS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "continuous": lambda logits, generator: logits,
    "ties": lambda logits, generator: logits.round(),
    "excluded": exclude_some,
    "ties and excluded": lambda logits, generator: exclude_some((2 * logits).round() / 2, generator),
    "rows of different sharpness": lambda logits, generator: (
        logits * torch.linspace(0.01, 20, len(logits)).view(-1, 1, 1)
    ),
    "equal": lambda logits, generator: torch.zeros_like(logits),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_filters_equal_their_definition_bitwise(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for size in (1, 2, 60, 1500):
        logits = KINDS[kind](4 * torch.randn(3, 2, size, generator=generator), generator).to(dtype)
        for top_p in (None, 1.0, 0.9999999, 0.9, 0.3, 1e-6):
            for top_k in (None, 1, 2, max(1, size // 2), size, size + 1):
                unchanged = logits.clone()
                filtered = filter_logits(logits, top_p, top_k)
                assert torch.equal(filtered, plain_filter(logits, top_p, top_k)), (size, top_p, top_k)
                assert filtered.dtype == dtype and torch.equal(logits, unchanged)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_filters_of_large_vocabularies(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = KINDS[kind](4 * torch.randn(2, 30, 9001, generator=generator), generator).to(dtype)
    logits[0, 0] -= logits[0, 0].topk(50).values[-1].where(logits[0, 0] > -torch.inf, 0)
    for top_p, top_k in ((None, 50), (0.95, None), (0.3, 3000)):
        filtered = filter_logits(logits, top_p, top_k)
        assert filtered.dtype == dtype and torch.equal(filtered, plain_filter(logits, top_p, top_k)), (top_p, top_k)
        assert torch.equal(filter_logits(logits[1, 2], top_p, top_k), filtered[1, 2])
        assert torch.equal(filter_logits(logits[:, ::2], top_p, top_k), filtered[:, ::2])
        unsorted = filter_logits(logits, top_p, top_k, sorted_ties=False)
        assert torch.equal(unsorted, plain_filter(logits, top_p, top_k, stable=True)), (top_p, top_k)
        uniform = torch.rand(2, 30, generator=generator, dtype=torch.float64)
        tokens = draw_filtered(logits, uniform, 0.7, top_p, top_k)
        sums = plain_filter(apply_temperature(logits.double(), 0.7), top_p, top_k, stable=True).softmax(-1).cumsum(-1)
        expected = torch.searchsorted(sums, uniform.unsqueeze(-1) * sums[..., -1:], right=True).squeeze(-1)
        assert tokens is not None and torch.equal(tokens, expected)
        assert torch.equal(draw_filtered(logits[1, 2:3], uniform[1, 2:3], 0.7, top_p, top_k), tokens[1, 2:3])
        remaining = plain_filter(apply_temperature(logits, 0.7), top_p, top_k, stable=True)
        assert (remaining.gather(-1, tokens.unsqueeze(-1)) > -torch.inf).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_close_to_0_and_to_1(kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = KINDS[kind](4 * torch.randn(2, 1, 9001, generator=generator), generator).to(dtype)
    smallest = filter_logits(logits, 1e-15, None, sorted_ties=False) > -torch.inf
    assert torch.equal(smallest, torch.zeros_like(smallest).scatter_(-1, logits.argmax(-1, keepdim=True), True))
    for top_p in (math.nextafter(1, 0), 1 - 1e-12):
        filtered = filter_logits(logits, top_p, None, sorted_ties=False)
        p = logits.double().softmax(-1)
        assert torch.equal(filtered[filtered > -torch.inf], logits[filtered > -torch.inf])
        assert (p.masked_fill(filtered > -torch.inf, 0).sum(-1) < 1e-11).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_top_p_is_exact_to_the_last_digit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    wide = 2 * HEAD
    for spread, size, ranks in ((3, 300, range(1, 200, 9)), (0.5, wide, range(wide // 2 - 2, wide - 99, 700))):
        logits = spread * torch.randn(4, size, generator=generator, dtype=torch.float64).to(dtype)
        distribution = logits.sort(dim=-1, descending=True).values.softmax(-1)
        for mass in (distribution.cumsum(-1) - distribution)[0, list(ranks)]:
            for top_p in (mass, mass.nextafter(mass + 1), mass.nextafter(mass - 1)):
                assert torch.equal(filter_logits(logits, float(top_p), None), plain_filter(logits, float(top_p), None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_filters_at_their_bounds(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 4, dtype=dtype)  # each token has probability 1/4
    for top_p, expected in ((0.25, 2), (0.5, 3), (0.75, 4), (0.2, 1), (0.7, 3)):
        assert (filter_logits(logits, top_p, None) > -torch.inf).sum(-1).tolist() == [expected, expected]
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0]], dtype=dtype)
    for top_k, expected in ((1, [0]), (2, [0, 2, 3, 4]), (4, [0, 2, 3, 4])):
        assert (filter_logits(logits, None, top_k) > -torch.inf)[0].nonzero().flatten().tolist() == expected

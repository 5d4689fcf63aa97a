"""The counter-based generator: known answers, uniformity, and what its draws depend on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from paradec import rng


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: str) -> None:
    """The vectors published with Random123."""
    words = rng.philox([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def draws(words: int = 7, rows: int = 3, width: int = 5, step: int = 2, stream: int = 0) -> torch.Tensor:
    keys = torch.as_tensor(rng.row_keys([11] * rows, [[r] for r in range(rows)]))
    position = torch.arange(width).expand(rows, width)
    return rng.uniform(keys, torch.full((rows,), step), position, words, stream)


def test_uniform() -> None:
    sample = draws(words=1001, rows=4, width=20).flatten().numpy()
    assert sample.min() > 0 and sample.max() < 1
    assert kstest(sample, "uniform").pvalue > 1e-3
    assert len(np.unique(sample)) == len(sample)


def test_draws_depend_on_everything_named_and_nothing_else() -> None:
    base = draws()
    assert torch.equal(base, draws())
    assert not torch.equal(base, draws(step=3))
    assert not torch.equal(base, draws(stream=1))
    # fewer rows, positions or words: the same numbers
    assert torch.equal(draws(words=3, rows=2, width=4), base[:2, :4, :3])


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=6), st.integers(0, 2**63 - 1))
@settings(max_examples=50, deadline=None)
def test_row_keys(prompts: list[list[int]], seed: int) -> None:
    """A row's key ignores the rows around it, and copies of one prompt have keys of their own."""
    keys = [tuple(key) for key in rng.row_keys([seed] * len(prompts), prompts)]
    assert len(set(keys)) == len(keys)
    for prompt in prompts:
        assert tuple(rng.row_keys([seed], [prompt])[0]) == keys[prompts.index(prompt)]

"""The counter-based generator: known answers, uniformity, and arguments that its draws depend on."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

import paradec
from paradec.core import rng
from paradec.models.adapter import Model
from paradec.samplers.start import row_keys


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    """Test vectors published with Random123."""
    words = rng.philox(*([torch.tensor([int(word, 16)]) for word in text.split()] for text in (counter, key)))
    assert " ".join(f"{int(word):08x}" for word in words) == expected


def draws(vocab: int = 7, rows: int = 3, width: int = 5, step: int = 2, stream: int = 0) -> torch.Tensor:
    keys = torch.as_tensor(row_keys([11] * rows, [[r] for r in range(rows)]))
    position = torch.arange(width).expand(rows, width)
    return rng.uniform(keys, torch.full((rows,), step), position, vocab, stream)


def test_draws_are_uniform() -> None:
    sample = draws(vocab=1001, rows=4, width=20).flatten().numpy()
    assert sample.min() > 0 and sample.max() < 1
    assert kstest(sample, "uniform").pvalue > 1e-3
    assert len(np.unique(sample)) == len(sample)


def test_draws_depend_on_step_and_stream_but_not_on_the_shape() -> None:
    base = draws()
    assert torch.equal(base, draws())
    assert not torch.equal(base, draws(step=3))
    assert not torch.equal(base, draws(stream=1))
    # with fewer rows, positions or tokens the numbers stay the same
    assert torch.equal(draws(vocab=3, rows=2, width=4), base[:2, :4, :3])


@pytest.mark.parametrize(
    ("rows", "width", "vocab"), [(2, 3, 5), (1, 1, 40_001), (3, 2, 10_001), (200, 100, 3), (2, 0, 3)]
)
def test_numpy_draws_equal_the_tensor_formula(rows: int, width: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(0, 2**32, (rows, 2), generator=generator)
    step = torch.randint(0, 2**31, (rows,), generator=generator)
    position = torch.randint(0, 2**32, (rows, width), generator=generator)
    pairs = torch.arange((vocab + 1) // 2)
    stream = torch.full((1, 1, 1), 3)
    a, b, c, d = rng.philox(
        (pairs.view(1, 1, -1), position.unsqueeze(-1), step.view(-1, 1, 1), stream),
        (keys[:, 0].view(-1, 1, 1), keys[:, 1].view(-1, 1, 1)),
    )
    bits = torch.stack((a * 2**21 + b // 2**11, c * 2**21 + d // 2**11), -1).flatten(-2)[..., :vocab]
    uniform = rng.uniform(keys, step, position, vocab, 3)
    assert uniform.dtype == torch.float64 and torch.equal(uniform, (bits.double() + 0.5) / 2**53)


def test_seeds_go_with_their_prompts_and_copies(llada64: Model) -> None:
    arguments = {"max_new_tokens": 6, "temperature": 4.0, "eos_early_stop": False, "num_return_sequences": 3}
    prompts = [[1, 2, 3], [4, 5, 6, 7]]

    def decode(prompts: Any, seed: Any) -> list[list[int]]:
        return paradec.generate(llada64, prompts, seed=seed, **arguments).new_tokens.tolist()

    first, second = decode(prompts[0], 5), decode(prompts[1], 6)
    assert len({tuple(row) for row in first + second}) == 6
    assert decode(prompts, [5, 6]) == decode(prompts, [5, 5, 5, 6, 6, 6]) == first + second
    # the n-th copy with a seed equals the n-th copy of a request whose copies all have this seed
    mixed = decode(prompts, [7, 5, 5, 8, 6, 9])
    assert mixed[1:3] == first[:2] and mixed[4] == second[0]
    assert mixed[0] == decode(prompts[0], 7)[0]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=6), st.integers(0, 2**63 - 1))
@settings(max_examples=50, deadline=None)
def test_row_keys_are_distinct_and_follow_the_prompt(prompts: list[list[int]], seed: int) -> None:
    keys = [tuple(key) for key in row_keys([seed] * len(prompts), prompts)]
    assert len(set(keys)) == len(keys)
    for prompt in prompts:
        assert tuple(row_keys([seed], [prompt])[0]) == keys[prompts.index(prompt)]

"""A pool of n-grams beside a Jacobi window: the tokens of the window alone, fewer forwards, its parts by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from eagle_drafters import NEGATIVE, PROMPTS, answers, exactness, tiny_base
from image_models import tiny_llamagen

import paradec
from paradec.samplers.causal.jacobi import Jacobi


@pytest.mark.parametrize(
    "request_",
    [
        {"temperature": 0},
        {"temperature": 0.8, "top_k": 3},
        {"guidance_scale": 1.7, "negative_prompt": NEGATIVE, "logprobs": 2},
    ],
)
@pytest.mark.parametrize("settings", [{"pool": 1, "ngram": 2}, {"pool": 4, "ngram": 4, "pool_size": 8}])
def test_tokens_are_those_of_the_window_alone(settings: dict[str, Any], request_: dict[str, Any]) -> None:
    base = tiny_base()
    given = {"max_new_tokens": 24, "seed": 3} | request_
    expected, alone = answers(Jacobi(window=6), base, PROMPTS, **given)
    found, state = answers(Jacobi(window=6, **settings), base, PROMPTS, **given)
    assert found == expected and state.nfe.sum() < alone.nfe.sum()
    if state.logprobs is not None:
        for name in ("chosen", "best"):
            own, other = (getattr(each.logprobs, name) for each in (state, alone))
            torch.testing.assert_close(own, other, rtol=0, atol=1e-9, equal_nan=True)


def test_short_answers_and_windows() -> None:
    base = tiny_base()
    for new in (1, 2, 3):
        given = {"max_new_tokens": new, "temperature": 0}
        assert answers(Jacobi(pool=3), base, PROMPTS, **given)[0] == answers(Jacobi(), base, PROMPTS, **given)[0]
    given = {"max_new_tokens": 6, "temperature": 0}
    assert answers(Jacobi(pool=3, window=1), base, PROMPTS, **given)[1].nfe.tolist() == [6] * 4


def test_answers_have_the_model_s_distribution() -> None:
    model = exactness.TableModel.random(3, seed=4, sharpness=2.0)
    found = exactness.test_case(Jacobi(window=3, pool=2, ngram=3, pool_size=6), model, 3000, seed=1, new=6)
    assert min(found["p_values"]) > 0.01 / 2 and found["nfe"] < 6


@pytest.mark.full
def test_pictures_are_the_same_in_fewer_forwards() -> None:
    model = paradec.load("digits-ar")
    given = {"class_labels": range(10), "seed": 77, "output_type": "latent"}
    alone = paradec.generate_images(model, sampler=Jacobi(), **given)
    found = paradec.generate_images(model, sampler=Jacobi(pool=4), **given)
    assert (found.tokens != alone.tokens).sum() <= 4  # float32: a near-tie may fall the other way
    assert np.sum(found.row_nfe) < np.sum(alone.row_nfe)


def test_over_llamagen_with_guidance() -> None:
    model = tiny_llamagen()
    given = {"class_labels": [3, 7], "temperature": 0.5, "guidance_scale": 2.0, "seed": 2, "output_type": "latent"}
    found = paradec.generate_images(model, sampler=Jacobi(pool=2, ngram=3), **given)
    assert torch.equal(found.tokens, paradec.generate_images(model, sampler=Jacobi(), **given).tokens)

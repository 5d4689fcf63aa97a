"""MaskGIT and Halton-MaskGIT: schedules, noise, draws and orders."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from images import random_uvit

import paradec
from paradec import samplers
from paradec.models.images.uvit import UViTModel
from paradec.samplers.masked.rules.halton import halton_order
from paradec.samplers.masked.rules.maskgit import SCHEDULES, commit_counts


@pytest.fixture(scope="module")
def model() -> UViTModel:
    return random_uvit()


def commits_of(out: paradec.Output) -> list[list[tuple[int, int]]]:
    """Return the sorted (position in the image, token) pairs that each step commits in row 0."""
    return [sorted((c[1] - 1, c[2]) for c in step.commits if c[0] == 0) for step in out.trace.steps]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("masks", "steps"), [(1, 1), (5, 5), (16, 3), (64, 32), (64, 64), (256, 8), (256, 100)])
def test_counts_are_positive_and_sum_to_all_masks(schedule: str, masks: int, steps: int) -> None:
    step_counts = commit_counts(schedule, masks, steps)
    assert len(step_counts) == steps and sum(step_counts) == masks and min(step_counts) >= 1


@pytest.mark.parametrize(
    ("schedule", "masked_share"),
    [
        ("cosine", lambda r: math.cos(math.pi / 2 * r)),
        ("arccos", lambda r: 1 - (1 - math.acos(r) / (math.pi / 2))),
        ("linear", lambda r: 1 - r),
        ("power", lambda r: 1 - r**2.5),
    ],
)
def test_remaining_masks_follow_the_schedule(schedule: str, masked_share: Any) -> None:
    remaining = 1024 - np.cumsum(commit_counts(schedule, 1024, 8))
    expected = [math.floor(1024 * masked_share((t + 1) / 8) + 1e-9) for t in range(7)]
    assert np.abs(remaining[:-1] - expected).max() <= 1 and remaining[-1] == 0


@pytest.mark.parametrize(("masks", "steps"), [(16, 4), (64, 8), (64, 10), (256, 20)])
def test_remaining_masks_equal_those_of_diffusers_amused(masks: int, steps: int) -> None:
    from diffusers import AmusedScheduler

    scheduler = AmusedScheduler(mask_token_id=9)
    scheduler.set_timesteps(steps)
    generator = torch.Generator().manual_seed(0)
    sample, theirs = torch.full((1, masks), 9), []
    for timestep in scheduler.timesteps:
        logits = torch.randn(1, masks, 9, generator=generator)
        sample = scheduler.step(logits, timestep, sample, generator=generator).prev_sample
        theirs.append(int((sample == 9).sum()))
    assert (masks - np.cumsum(commit_counts("cosine", masks, steps))).tolist() == theirs


def test_without_noise_the_most_confident_positions_are_committed(model: UViTModel) -> None:
    sampler = samplers.create("maskgit", choice_temperature=0)
    state = sampler.start(model, [[model.class_token(1)]], steps=5)
    for expected in commit_counts("cosine", 16, 5):
        proposal = sampler.step(model, state)
        before = state.canvas.clone()
        sampler.commit(state, proposal)
        chosen = (before != state.canvas)[:, 1:]
        assert int(chosen.sum()) == expected
        scores = torch.where(proposal.available, proposal.scores, -torch.inf)
        assert scores[chosen].min() >= scores[~chosen].max()
    assert state.done


def test_noise_chooses_by_gumbel_max(model: UViTModel) -> None:
    """With one position per step, the probability to be first is proportional to p ** (1 / noise scale)."""
    sampler = samplers.create("maskgit", choice_temperature=2.0)
    rows = [[model.class_token(1)]] * 1500
    state = sampler.start(model, rows, steps=16, seed=0)
    with torch.no_grad():
        proposal = sampler.step(model, state)
        sampler.commit(state, proposal)
    scale = 2.0 * (1 - 1 / 16)
    expected = (proposal.scores[0] ** (1 / scale)) / (proposal.scores[0] ** (1 / scale)).sum()
    first = (state.canvas[:, 1:] != model.facts.mask_token_id).double().mean(0)
    assert ((first - expected) / (expected * (1 - expected) / len(rows)).sqrt()).abs().max() < 4.5


def test_the_final_temperature_applies_to_the_last_step(model: UViTModel) -> None:
    sampler = samplers.create("maskgit", final_temperature=1e-6)
    state = sampler.start(model, [[model.class_token(1)]] * 8, steps=2, temperature=1.0, seed=2)
    first = sampler.step(model, state)
    sampler.commit(state, first)
    (query,) = sampler.query(state)
    with torch.no_grad():
        best = model(query)[..., : model.module.codebook_size].argmax(-1)
    undecided = state.undecided[:, 1:].clone()
    sampler.commit(state, sampler.step(model, state))
    assert torch.equal(state.canvas[:, 1:][undecided], best[undecided])
    assert len({tuple(row) for row in first.values.tolist()}) > 1


def test_tokens_of_the_second_draw_are_independent_of_the_first(model: UViTModel) -> None:
    one_draw = samplers.create("maskgit", choice_temperature=0)
    two_draws = samplers.create("maskgit", choice_temperature=0, final_temperature=1.0)
    rows = [[model.class_token(1)]] * 400
    probabilities = {}
    for sampler in (one_draw, two_draws):
        state = sampler.start(model, rows, steps=16, temperature=1.0, seed=5)
        with torch.no_grad():
            (query,) = sampler.query(state)
            distribution = model(query)[0].softmax(-1)
            proposal = sampler.step(model, state)
        selected = sampler.commit(state, proposal).selected
        at, tokens = selected.nonzero()[:, 1], proposal.values[selected]
        probabilities[sampler.final_temperature] = distribution[at, tokens].mean()
        expected = (distribution[at] ** 2).sum(-1).mean()
        standard_error = distribution[at, tokens].std() / len(rows) ** 0.5
        if sampler is two_draws:
            assert (probabilities[1.0] - expected).abs() < 4 * standard_error
    assert probabilities[None] > probabilities[1.0]  # without a second draw, confident draws are selected


def test_halton_order_begins_with_the_sequence() -> None:
    # (1/2, 1/3), (1/4, 2/3), (3/4, 1/9), (1/8, 4/9), (5/8, 7/9): row by base 2, column by base 3
    first = halton_order(16, 16).argsort()[:5]
    assert [(int(cell) // 16, int(cell) % 16) for cell in first] == [(8, 5), (4, 10), (12, 1), (2, 7), (10, 12)]


def test_halton_commits_in_order(model: UViTModel) -> None:
    out = paradec.generate(model, [[model.class_token(2)]], sampler="halton", steps=4, temperature=1.0, trace=True)
    order = halton_order(4, 4).argsort()
    edges = np.cumsum((0, *commit_counts("arccos", 16, 4)))
    expected = [sorted(order[a:b].tolist()) for a, b in zip(edges[:-1], edges[1:], strict=True)]
    assert [[position for position, _ in step] for step in commits_of(out)] == expected


def test_halton_fills_missing_cells_of_an_image_in_order(model: UViTModel) -> None:
    mask = model.facts.mask_token_id
    row = [model.class_token(2), *[3] * 6, *[mask] * 10]
    sampler = samplers.create("halton", height=4, width=4)
    out = paradec.generate(model, [row], sampler=sampler, steps=10, trace=True)
    ranks = halton_order(4, 4)
    assert [step[0][0] for step in commits_of(out)] == sorted(range(6, 16), key=lambda cell: ranks[cell])

"""The parallel rules against plain loops written from the papers' formulas, and settings at which rules coincide."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from rule_views import INF, random_scores, view_of
from tiny_models import tiny

import paradec
from paradec import samplers
from paradec.kernels.token_stats import token_statistics
from paradec.models.adapter import Model
from paradec.samplers.masked.loop import LAST

PROMPTS = [[38, 0, 1, 2, 3, 4, 5, 6, 41], [36, 17, 17, 18, 14, 10, 19, 10, 41], [37, 5, 0, 2, 3, 0, 5, 7, 41]]


def best(row: list[float]) -> int:
    return max(range(len(row)), key=lambda i: (row[i], -i))


def hierarchy(row: list[float], threshold: float | None, low_threshold: float | None) -> set[int]:
    chosen, run = {best(row)}, []
    for i, score in enumerate([*row, -INF]):
        if score > -INF:
            run.append(i)
            continue
        if run:
            top = max(row[j] for j in run)
            chosen |= {j for j in run if row[j] == top and (low_threshold is None or top > low_threshold)}
        run = []
    return chosen | {i for i, score in enumerate(row) if threshold is not None and score > threshold}


def localleap(row: list[float], anchor_threshold: float, relaxed_threshold: float, radius: int) -> set[int]:
    anchors = [i for i, score in enumerate(row) if score >= anchor_threshold]
    chosen = {best(row)}
    for i, score in enumerate(row):
        theta = relaxed_threshold if any(abs(i - a) <= radius for a in anchors) else anchor_threshold
        if score >= theta:
            chosen.add(i)
    return chosen


def entropy_bound(row: list[float], gamma: float) -> set[int]:
    order = sorted((i for i, score in enumerate(row) if score > LAST), key=lambda i: (-row[i], i))
    chosen = {best(row)}
    for k in range(1, len(order) + 1):
        entropies = [-row[i] for i in order[:k]]
        if math.fsum(entropies) - max(entropies) <= gamma:
            chosen |= set(order[:k])
    return chosen


def entropy_threshold(row: list[float], threshold: float) -> set[int]:
    return {best(row)} | {i for i, score in enumerate(row) if -score <= threshold}


RULES: list[tuple[str, Callable[..., set[int]], dict]] = [
    ("hierarchy", hierarchy, {"threshold": 0.9, "low_threshold": 0.4}),
    ("hierarchy", hierarchy, {"threshold": None, "low_threshold": 0.62}),
    ("hierarchy", hierarchy, {"threshold": 0.7, "low_threshold": None}),
    ("localleap", localleap, {"anchor_threshold": 0.9, "relaxed_threshold": 0.75, "radius": 4}),
    ("localleap", localleap, {"anchor_threshold": 0.8, "relaxed_threshold": 0.2, "radius": 1}),
    ("localleap", localleap, {"anchor_threshold": 0.95, "relaxed_threshold": 0.5, "radius": 10**9}),
    ("entropy_bound", entropy_bound, {"gamma": 0.1}),
    ("entropy_bound", entropy_bound, {"gamma": 1.3}),
    ("entropy_threshold", entropy_threshold, {"threshold": 0.5}),
    ("entropy_threshold", entropy_threshold, {"threshold": 2.0}),
]


@pytest.mark.parametrize(("name", "loops", "settings"), RULES)
def test_rule_equals_loops(name: str, loops: Callable[..., set[int]], settings: dict) -> None:
    sampler = samplers.create(name, **settings)
    sizes = set()
    for seed in range(60):
        scores = random_scores(seed, entropies=name.startswith("entropy"))
        selected = sampler.select(view_of(scores)) & (scores > -INF)
        for row, taken in zip(scores.tolist(), selected, strict=True):
            expected = {i for i in loops(row, **settings) if row[i] > -INF}
            assert set(taken.nonzero().flatten().tolist()) == expected
            sizes.add(len(expected))
    assert len(sizes) > 5  # the rule had something to decide


def test_equal_maxima_of_a_run_are_all_taken() -> None:
    scores = torch.tensor([[0.5, 0.5, 0.3, -INF, 0.45, 0.45]], dtype=torch.float64)
    selected = samplers.create("hierarchy").select(view_of(scores))
    assert selected.tolist() == [[True, True, False, False, True, True]]


def test_minus_entropy_is_exact() -> None:
    logits = torch.randn(6, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits *= torch.tensor([0.0, 0.1, 1.0, 5.0, 40.0, 200.0], dtype=torch.float64).unsqueeze(1)
    logits[:, 3] = -INF
    _, found = token_statistics(logits, ("minus_entropy",))
    for row, value in zip(logits.tolist(), found["minus_entropy"].tolist(), strict=True):
        weights = [math.exp(z - max(row)) for z in row]
        p = [w / math.fsum(weights) for w in weights]
        # ln p from the logits: where the best token's p rounds to 1, its share in the entropy is not 0
        log_total = math.log1p(math.fsum(sorted(weights)[:-1]))
        logs = [z - max(row) - log_total for z in row]
        expected = math.fsum(q * log for q, log in zip(p, logs, strict=True) if q > 0)
        assert value == pytest.approx(expected, rel=1e-12, abs=1e-300)
    assert (found["minus_entropy"] < 0).all()


def test_entropy_bound_reads_what_tokens_are_drawn_from(llada64: Model) -> None:
    sampler = samplers.create("entropy_bound")
    arguments = {"max_new_tokens": 24, "block_length": 12, "eos_early_stop": False, "seed": 0}
    assert paradec.generate(llada64, PROMPTS[0], sampler=sampler, temperature=1.0, top_k=1, **arguments).nfe == 2
    assert paradec.generate(llada64, PROMPTS[0], sampler=sampler, temperature=1.0, **arguments).nfe > 2


def test_random_draws_the_order_of_a_block_once(llada64: Model) -> None:
    sampler, found = samplers.create("random", order="block"), {}
    for each in (1, 2, 4):
        out = paradec.generate(
            llada64,
            PROMPTS,
            sampler=sampler,
            max_new_tokens=16,
            block_length=8,
            steps=16 // each,
            seed=3,
            eos_early_stop=False,
            trace=True,
        )
        steps = out.trace.steps[: 8 // each]
        found[each] = [[{p for r, p, *_ in step.commits if r == row} for step in steps] for row in range(len(PROMPTS))]
    for row, singles in enumerate(found[1]):
        assert singles != sorted(singles, key=min)
        for each in (2, 4):
            assert found[each][row] == [set().union(*singles[i : i + each]) for i in range(0, 8, each)]


def test_margin_takes_the_largest_margin(llada64: Model, dream64: Model) -> None:
    """Each step commits the position with the largest p(1st) - p(2nd) of the model's own distribution."""
    sampler, other_position = samplers.create("margin"), 0
    for model in (llada64, dream64):
        for prompt in PROMPTS[:2]:
            state = sampler.start(model, prompt, max_new_tokens=16, block_length=16, temperature=0.9, seed=1)
            with torch.inference_mode():
                while not state.done:
                    logits = model.module(input_ids=state.canvas, use_cache=False).logits[0]
                    logits[:, model.facts.mask_token_id] = -INF
                    p = logits.softmax(-1).sort(-1, descending=True).values.roll(model.facts.shift, 0)
                    p[~state.undecided[0]] = 0
                    margins = p[:, 0] - p[:, 1]
                    ((_, position, _, score),) = sampler.commit(state, sampler.step(model, state)).to_list()
                    assert position == margins.argmax()
                    assert score == pytest.approx(margins.max().item(), rel=1e-9)
                    other_position += position != p[:, 0].argmax().item()
    assert other_position  # somewhere the likeliest token stands elsewhere


def test_margin_follows_the_linear_schedule(llada64: Model) -> None:
    out = paradec.generate(
        llada64,
        PROMPTS[0],
        sampler="margin",
        max_new_tokens=16,
        steps=3,
        block_length=16,
        eos_early_stop=False,
        trace=True,
    )
    assert [len(step.commits) for step in out.trace.steps] == [6, 5, 5]


def test_origin_goes_through_the_time_grid_in_every_block() -> None:
    """Of what is masked at step i of a block's 4, about 1 / (4 - i) becomes final, in the second block as in the
    first."""
    count, size, planned = 160, 8, 4
    out = paradec.generate(
        tiny(1), [[1, 2, 3]] * count, sampler="origin", max_new_tokens=2 * size, block_length=size, steps=2 * planned,
        eos_early_stop=False, seed=list(range(count)), trace=True,
    )  # fmt: skip
    final, left = ([[0] * planned for _ in range(2)] for _ in range(2))
    for row in range(count):
        masked, step = [size, size], 0
        for found in out.trace.steps:
            if not any(masked):
                break
            block = 0 if masked[0] else 1
            here = [position for at, position, _, _ in found.commits if at == row]
            assert all((position - 3) // size == block for position in here)
            left[block][step] += masked[block]
            final[block][step] += len(here)
            masked[block] -= len(here)
            step = 0 if not masked[block] else step + 1
    for block in range(2):
        assert final[block][-1] == left[block][-1] > 0
        for step in range(planned - 1):
            share, trials = 1 / (planned - step), left[block][step]
            error = 5 * math.sqrt(share * (1 - share) / trials)
            assert abs(final[block][step] / trials - share) < error, (block, step)


@pytest.mark.parametrize("kept", [{"top_k": 3}, {"top_p": 0.7}])
def test_entropies_of_the_public_code_take_tokens_that_are_left_out(kept: dict, dream64: Model) -> None:
    """With rng="reference" an entropy is sum p ln(p + 1e-10), in which a token of probability 0 counts nothing."""
    sampler = samplers.create("entropy")
    state = sampler.start(
        dream64, PROMPTS[:1], max_new_tokens=8, steps=4, temperature=0.8, rng="reference", seed=0, **kept
    )
    with torch.inference_mode():
        proposal = sampler.step(dream64, state)
        logits = dream64.module(input_ids=state.canvas, use_cache=False).logits[0] / 0.8
    for at, position in enumerate(proposal.positions[0].tolist()):
        distribution = sorted(logits[position - 1].softmax(-1).tolist(), reverse=True)  # of the position to the left
        if "top_k" in kept:
            distribution = distribution[:3]
        else:  # as many as it takes to reach the share
            distribution = distribution[
                : next(size for size in range(1, len(distribution) + 1) if sum(distribution[:size]) > 0.7)
            ]
        distribution = [p / sum(distribution) for p in distribution]
        expected = sum(p * math.log(p + 1e-10) for p in distribution)
        assert float(proposal.scores[0, at]) == pytest.approx(expected, abs=1e-9)

"""Selection rules equal plain loops, and include or exclude scores at their thresholds as the papers do."""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import INF, view_from_scores
from oracles.masked import entropy_bound, entropy_threshold, factor_profile, hierarchy, localleap
from small_models import tiny
from torch import Tensor
from traces import (
    assert_batches_move_together,
    assert_replayed,
    cache_without_left_position,
    decode,
    force_first_position,
    load_trace,
    model_of,
    restrict_to_top_k,
    some_or_all,
    trace_names,
)

import paradec
from paradec import AdaptiveBlocks, samplers
from paradec.models.adapter import Model
from paradec.samplers.features.adaptive_blocks import Opening
from paradec.samplers.features.early_stops import EARLY_PREFIX
from paradec.samplers.masked.loop import LAST, Stage, View

pytestmark = pytest.mark.filterwarnings("ignore:cache=")

PROMPTS = [[38, 0, 1, 2, 3, 4, 5, 6, 41], [36, 17, 17, 18, 14, 10, 19, 10, 41], [37, 5, 0, 2, 3, 0, 5, 7, 41]]


# (sampler, oracle, settings)
CASES: list[tuple[str, Callable[..., set[int]], dict]] = [
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


@pytest.mark.parametrize(("name", "select_by_loop", "settings"), CASES)
def test_rules_equal_the_oracles(name: str, select_by_loop: Callable[..., set[int]], settings: dict) -> None:
    sampler = samplers.create(name, **settings)
    sizes = set()
    for seed in range(60):
        scores = random_scores(seed, entropies=name.startswith("entropy"))
        selected = sampler.select(view_from_scores(scores)) & (scores > -INF)
        for row, row_selected in zip(scores.tolist(), selected, strict=True):
            expected = {i for i in select_by_loop(row, **settings) if row[i] > -INF}
            assert set(row_selected.nonzero().flatten().tolist()) == expected
            sizes.add(len(expected))
    assert len(sizes) > 5  # the rule selects different numbers of positions


def random_scores(seed: int, entropies: bool = False) -> Tensor:
    """Return scores [12, width], some of them equal, with -inf at decided positions. Every row has a candidate."""
    generator = torch.Generator().manual_seed(seed)
    width = int(torch.randint(1, 40, (1,), generator=generator))
    scores = torch.rand(12, width, generator=generator, dtype=torch.float64)
    scores[::2] = (scores[::2] * 10).round() / 10
    if entropies:
        scores = -(3 * scores**3)
        scores[0] = LAST  # end tokens, which must come last
    decided = torch.rand(12, width, generator=generator) < torch.rand(12, 1, generator=generator)
    decided[torch.arange(12), torch.randint(width, (12,), generator=generator)] = False
    return scores.masked_fill(decided, -INF)


def test_entropy_bound_reads_the_filtered_distribution(llada64: Model) -> None:
    sampler = samplers.create("entropy_bound")
    arguments = {"max_new_tokens": 24, "block_length": 12, "eos_early_stop": False, "seed": 0}
    assert paradec.generate(llada64, PROMPTS[0], sampler=sampler, temperature=1.0, top_k=1, **arguments).nfe == 2
    assert paradec.generate(llada64, PROMPTS[0], sampler=sampler, temperature=1.0, **arguments).nfe > 2


def test_random_draws_the_order_of_a_block_once(llada64: Model) -> None:
    sampler, orders = samplers.create("random", order="block"), {}
    request = {"max_new_tokens": 16, "block_length": 8, "seed": 3, "eos_early_stop": False, "trace": True}
    for per_step in (1, 2, 4):
        out = paradec.generate(llada64, PROMPTS, sampler=sampler, steps=16 // per_step, **request)
        steps = out.trace.steps[: 8 // per_step]
        orders[per_step] = [
            [{p for r, p, *_ in step.commits if r == row} for step in steps] for row in range(len(PROMPTS))
        ]
    for row, singles in enumerate(orders[1]):
        assert singles != sorted(singles, key=min)
        for per_step in (2, 4):
            assert orders[per_step][row] == [set().union(*singles[i : i + per_step]) for i in range(0, 8, per_step)]


def test_origin_follows_dreams_time_grid_in_every_block() -> None:
    """Step i (from 0) of a block's 4 steps commits about 1 / (4 - i) of the remaining masks."""
    count, size, planned = 160, 8, 4
    out = paradec.generate(
        tiny(1), [[1, 2, 3]] * count, sampler="origin", max_new_tokens=2 * size, block_length=size, steps=2 * planned,
        eos_early_stop=False, seed=list(range(count)), trace=True,
    )  # fmt: skip
    num_committed, num_masks = ([[0] * planned for _ in range(2)] for _ in range(2))
    for row in range(count):
        masked, step = [size, size], 0
        for record in out.trace.steps:
            if not any(masked):
                break
            block = 0 if masked[0] else 1
            positions = [position for index, position, _, _ in record.commits if index == row]
            assert all((position - 3) // size == block for position in positions)
            num_masks[block][step] += masked[block]
            num_committed[block][step] += len(positions)
            masked[block] -= len(positions)
            step = 0 if not masked[block] else step + 1
    for block in range(2):
        assert num_committed[block][-1] == num_masks[block][-1] > 0
        for step in range(planned - 1):
            share, trials = 1 / (planned - step), num_masks[block][step]
            error = 5 * math.sqrt(share * (1 - share) / trials)
            assert abs(num_committed[block][step] / trials - share) < error, (block, step)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.7}])
def test_reference_entropies_of_filtered_distributions(filters: dict, dream64: Model) -> None:
    """With rng="reference" the score is the sum of p ln(p + 1e-10), to which excluded tokens (p = 0) add 0."""
    sampler = samplers.create("entropy")
    request = {"max_new_tokens": 8, "steps": 4, "temperature": 0.8, "rng": "reference", "seed": 0} | filters
    state = sampler.start(dream64, PROMPTS[:1], **request)
    with torch.inference_mode():
        proposal = sampler.step(dream64, state)
        logits = dream64.module(input_ids=state.canvas, use_cache=False).logits[0] / 0.8
    for at, position in enumerate(proposal.positions[0].tolist()):
        # the model is shifted: the position to the left predicts
        distribution = sorted(logits[position - 1].softmax(-1).tolist(), reverse=True)
        count = 3
        if "top_p" in filters:  # the smallest number of tokens with a total probability above 0.7
            count = next(size for size in range(1, len(distribution) + 1) if sum(distribution[:size]) > 0.7)
        distribution = distribution[:count]
        distribution = [p / sum(distribution) for p in distribution]
        expected = sum(p * math.log(p + 1e-10) for p in distribution)
        assert float(proposal.scores[0, at]) == pytest.approx(expected, abs=1e-9)


PROFILE_TRACES = trace_names("fastdllm-plusplus")


@pytest.mark.parametrize("margin", [0.0, 0.02, 0.25, 0.9, 1.0])
def test_factor_profile_equals_a_plain_loop(margin: float) -> None:
    sampler, sizes = samplers.create("factor", profile=True, margin=margin), set()
    for seed in range(40):
        scores = 1 - (1 - random_scores(seed)) * 0.2
        scores = scores.masked_fill(random_scores(seed) == -math.inf, -math.inf)
        selections = sampler.select(view_from_scores(scores))
        for row, selected in zip(scores.tolist(), selections, strict=True):
            expected = factor_profile(row, margin)
            assert set(selected.nonzero()[:, 0].tolist()) == expected
            sizes.add(len(expected))
    assert sizes == {1} if margin == 1 else len(sizes) > 3


def test_the_bound_of_factor_profile_is_strict() -> None:
    """The sum of 1 - c, in which the last position counts twice, is 3/8 = 1 - margin: this position is not chosen."""
    at = view_from_scores(torch.tensor([[0.875, 0.875]], dtype=torch.float64))
    assert samplers.create("factor", profile=True, margin=0.625).select(at).tolist() == [[True, False]]
    below = view_from_scores(torch.tensor([[0.875, math.nextafter(0.875, 1)]], dtype=torch.float64))
    assert samplers.create("factor", profile=True, margin=0.625).select(below).tolist() == [[True, True]]


@pytest.mark.parametrize("numbers", some_or_all(2, 5))
@pytest.mark.parametrize("name", PROFILE_TRACES)
def test_public_traces(name: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings, model = trace["settings"], model_of(trace)
    sampler: Any = samplers.create("factor", profile=True, margin=settings["frechet_margin"])
    cache: Any = settings["cache"]
    request: dict[str, Any] = {"block_length": settings["block_length"]}
    if model.facts.shift:
        sampler, filters = restrict_to_top_k(sampler)
        sampler, request = force_first_position(sampler), request | filters
        cache = cache_without_left_position(cache == "dual")
    rows = decode(model, trace, sampler, numbers=numbers, cache=cache, **request)
    if trace["batch_size"] > 1:
        assert_batches_move_together(rows, settings["block_length"])
    else:
        assert_replayed(rows)


END = 9


def neighbours_of(value: float) -> list[float]:
    """Return the next larger number, the value, and the next smaller number."""
    return [math.nextafter(value, INF), value, math.nextafter(value, -INF)]


def one_row_view(scores: list[float], quota: int | None = None, **more: Any) -> View:
    """Return a view of one row. more: fields of `View` as lists with one entry per position."""
    view = view_from_scores(torch.tensor([scores], dtype=torch.float64))
    fields = tensors(more)
    fields["quantities"] = view.quantities | fields.get("quantities", {})
    quotas = None if quota is None else np.array([quota])
    return dataclasses.replace(view, quota=quotas, ends=torch.tensor([END]), **fields)


def tensors(values: Any) -> Any:
    """Convert lists to tensors [1, len(list)], and numbers to tensors [1]."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, dict):
        return {name: tensors(value) for name, value in values.items()}
    return torch.tensor([values])


def selected_positions(
    sampler: str, scores: list[float], quota: Any = None, settings: Any = None, **more: Any
) -> list[int]:
    view = one_row_view(scores, quota, **more)
    selected = samplers.create(sampler, **(settings or {})).select(view) & view.candidates
    return selected[0].nonzero().flatten().tolist()


BEST = 1.0
"""The first score of a row, which every rule commits."""
# (sampler, settings, threshold, whether a score equal to the threshold is committed)
AT_THRESHOLD = [
    ("threshold", {"threshold": 0.75}, 0.75, True),
    ("adablock", {"threshold": 0.75}, 0.75, True),
    ("credit", {"threshold": 0.75}, 0.75, True),
    ("localleap", {"anchor_threshold": 0.75, "relaxed_threshold": 0.75}, 0.75, True),
    ("localleap", {"anchor_threshold": 0.75, "relaxed_threshold": 0.25, "radius": 0}, 0.75, True),
    # the first score is an anchor, and the second score is near it
    ("localleap", {"anchor_threshold": 0.75, "relaxed_threshold": 0.25}, 0.25, True),
    ("hierarchy", {"threshold": 0.75, "low_threshold": None}, 0.75, False),
    ("wino", {"threshold": 0.75}, 0.75, False),
    ("editing", {"threshold": 0.75}, 0.75, False),
    # with c_1 = 1, c_2 needs 3 (1 - c_2) <= 1.5
    ("factor", {"factor": 1.5}, 0.5, True),
    ("entropy_threshold", {"threshold": 0.5}, -0.5, True),
]


@pytest.mark.parametrize(("name", "settings", "value", "included"), AT_THRESHOLD)
def test_a_score_at_the_threshold(name: str, settings: dict, value: float, included: bool) -> None:
    best = BEST if value > 0 else -1e-9
    for score, expected in zip(neighbours_of(value), (True, included, False), strict=True):
        assert selected_positions(name, [best, score], settings=settings) == ([0, 1] if expected else [0]), score


def test_probabilities_that_round_to_1_reach_a_threshold_of_1() -> None:
    """Such probabilities occur with trained models."""
    scores = [1.0, math.nextafter(1.0, 0), 1.0, -INF]
    for name in ("threshold", "adablock", "credit", "localleap"):
        settings = {"anchor_threshold": 1.0, "radius": 0} if name == "localleap" else {"threshold": 1.0}
        assert selected_positions(name, scores, settings=settings) == [0, 2]


SABER_MEMORY = {"total": torch.tensor([1.5], dtype=torch.float64), "count": torch.tensor([2])}
"""Saber's memory of two committed tokens with a mean confidence of 0.75."""
BUFFERED = {"updates": {"buffered": [True, True]}}
# (sampler, settings, scores by x, bound of x, whether the bound is enough, fields of the view, columns if x is enough)
BOUNDS: list[tuple[str, dict[str, Any], Callable[[float], list[float]], float, bool, dict[str, Any], list[int]]] = [
    ("hierarchy", {"threshold": None, "low_threshold": 0.5}, lambda x: [0.625, -INF, 0.25, x], 0.5, False, {}, [0, 3]),
    # (n + 1) (1 - c_n) <= f with numbers that are exact: n = 1 always, n = 3 at 1 - f / 4
    ("factor", {"factor": 1.0}, lambda x: [0.875, 0.875, x], 0.75, True, {}, [0, 1, 2]),
    # entropies of the first k - 1 positions sum to gamma
    ("entropy_bound", {"gamma": 0.625}, lambda x: [-0.125, x, -0.75], -0.5, True, {}, [0, 1, 2]),
    ("ccd", {"entropy_threshold": 0.5}, lambda x: [-0.125, x], -0.5, True, BUFFERED, [0, 1]),
    ("saber", {"minimum": 1}, lambda x: [0.875, x], 0.75, False, {"memory": SABER_MEMORY}, [0, 1]),
]


@pytest.mark.parametrize(("name", "settings", "scores", "bound", "included", "more", "columns"), BOUNDS)
def test_bounds_that_depend_on_several_scores(
    name: str, settings: dict, scores: Any, bound: float, included: bool, more: dict, columns: list[int]
) -> None:
    quota = 1 if name == "ccd" else None
    for score, is_enough in zip(neighbours_of(bound), (True, included, False), strict=True):
        expected = columns if is_enough else columns[:-1]
        assert selected_positions(name, scores(score), quota, settings, **more) == expected


def test_ccd_commits_only_buffered_positions_by_threshold() -> None:
    assert selected_positions(
        "ccd", [-0.125, -0.25], 1, {"entropy_threshold": 0.5}, updates={"buffered": [True, False]}
    ) == [0]


def test_runs_of_hierarchy_and_the_radius_of_localleap() -> None:
    assert selected_positions("hierarchy", [0.5, 0.5, 0.3, -INF, 0.45, 0.45]) == [0, 1, 4, 5]  # equal maxima of a run
    settings = {"anchor_threshold": 0.75, "relaxed_threshold": 0.5, "radius": 2}
    assert selected_positions("localleap", [0.5] * 3 + [0.875] + [0.5] * 4, settings=settings) == [*range(1, 6)]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_klass_needs_a_confidence_above_its_threshold_and_enough_stable_steps(steps: int) -> None:
    settings = {"confidence_threshold": 0.5, "history": 2}
    for score, is_confident in zip(neighbours_of(0.5), (True, False, False), strict=True):
        updates = {"stable": [0, steps]}
        expected = [1] if is_confident and steps >= 2 else [0]
        assert selected_positions("klass", [0.875, score], 1, settings, updates=updates) == expected


def test_klass_needs_a_divergence_below_its_threshold() -> None:
    """An unchanged distribution has divergence 0 and is stable. A divergence equal to the threshold is not stable."""
    sampler = samplers.create("klass", kl_threshold=0.5, history=1)
    memory = {name: torch.zeros(1, 1, *((4,) if name == "previous" else ()), dtype=spec.dtype)
              for name, spec in sampler.memory().items()}  # fmt: skip
    logits = torch.tensor([[[1.0, 0.0, -1.0, 2.0]]], dtype=torch.float64)
    stage = Stage(torch.ones(1, 1, dtype=torch.bool), torch.zeros(1, 1, dtype=torch.int64), memory)
    _, first = sampler.process_logits(logits, stage)
    assert first["stable"].tolist() == [[0]]
    second_stage = dataclasses.replace(stage, memory=first)
    p = first["previous"].double()
    assert sampler.process_logits(logits, second_stage)[1]["stable"].tolist() == [[1]]
    # the divergence of a changed step, by the formula
    changed = logits.flip(-1)
    q = changed.softmax(-1).float()
    kl = float(torch.linalg.vecdot(q, ((q + 1e-12) / (p.float() + 1e-12)).log()))
    for threshold, stable in zip(neighbours_of(kl), (1, 0, 0), strict=True):
        # use float32's distance between numbers, since p and q are float32
        threshold = kl if threshold == kl else kl * (1 + 1e-5 * (1 if threshold > kl else -1))
        updates = samplers.create("klass", kl_threshold=threshold, history=1).process_logits(changed, second_stage)[1]
        assert updates["stable"].tolist() == [[stable]], threshold


def test_persistence_at_its_three_thresholds() -> None:
    settings = {"threshold": 0.75, "persist": 3, "end_threshold": 0.5}

    def columns_after_run(score: float, runs: int, token: int = 1) -> list[int]:
        memory = {"best": [5, token], "run": [1, runs]}
        tokens = torch.tensor([[4, token]])
        fields = {"memory": memory, "quantities": {"best_token": tokens}, "tokens": tokens}
        return selected_positions("persistence", [0.875, score], 1, settings, **fields)

    for score, enough in zip(neighbours_of(0.75), (True, True, False), strict=True):
        for runs in (1, 2, 3):  # the current step extends the run by one
            assert columns_after_run(score, runs) == ([0, 1] if enough and runs >= 2 else [0])
    # position 0 predicts an end token with the highest score, and is committed if the score reaches `end_threshold`
    for score, enough in zip(neighbours_of(0.5), (True, True, False), strict=True):
        view = {"memory": {"best": [5, 5], "run": [0, 0]}, "quantities": {"best_token": torch.tensor([[END, 1]])}}
        columns = selected_positions("persistence", [score, 0.25], 1, settings, tokens=torch.tensor([[END, 1]]), **view)
        assert columns == ([0] if enough else [1])


@pytest.mark.parametrize(
    ("step", "masks", "quota", "agreed", "expected"),
    [
        (1, 11, 1, range(6), [0]),  # the second of two warmup steps
        (2, 11, 1, range(6), [0, 1, 2]),  # the compared width grows from the last warmup step on
        (2, 12, 1, range(6), [0, 1]),  # with at most half of the masks left, the width is 2
        (2, 11, 2, (0, 2), [0, 2]),  # as many positions agree as the quota
        (2, 11, 2, (2,), [0, 1]),
        (2, 11, 1, (0,), [0]),
    ],
)
def test_ccd_agree_at_its_warmup_tail_and_quota(step: int, masks: int, quota: int, agreed: Any, expected: Any) -> None:
    settings = {"warmup": 2, "expand_ratio": 4.0, "tail": 0.5}
    best = [1 if column in agreed else 2 for column in range(6)]
    memory = {"best": best, "buffer": [True] * 6, "step": step, "masks": masks}
    scores = [-0.1 * column for column in range(1, 7)]
    quantities = {"best_token": torch.ones(1, 6, dtype=torch.int64)}
    assert selected_positions("ccd_agree", scores, quota, settings, memory=memory, quantities=quantities) == expected


def test_learn2pd_at_its_thresholds() -> None:
    for acceptance, accepted in zip(neighbours_of(0.75), (True, False, False), strict=True):
        quantities = {"acceptance": torch.tensor([[0.0, acceptance]], dtype=torch.float64)}
        columns = selected_positions(
            "learn2pd", [0.875, 0.25], settings={"filter_threshold": 0.75}, quantities=quantities
        )
        assert columns == ([0, 1] if accepted else [0])
    sampler = samplers.create("learn2pd", eot_confidence=0.5)
    for confidence, is_cut in zip(neighbours_of(0.5), (True, True, False), strict=True):
        view = one_row_view([0.875, confidence], quantities={"is_end": torch.tensor([[False, True]])})
        (cut,) = sampler.trim(view, torch.tensor([[True, True]])).tolist()
        assert (cut == 9) == is_cut  # the view begins at position 7


def revise(sampler: str, settings: dict, confidence: float, proposed: int = 2, **more: Any) -> Any:
    """Revise a row of two undecided positions, which are committed, and a decided token with id 1.

    confidence: of the token `proposed` at the decided position."""
    candidates = torch.tensor([[True, True, False]])
    fields = {"candidates": candidates, "editable": ~candidates, "current": [0, 0, 1], "tokens": [2, 2, proposed]}
    fields["quantities"] = {"confidence": torch.tensor([[0.875, 0.875, confidence]], dtype=torch.float64)}
    view = one_row_view([0.875, 0.875, -INF], **fields, **more)
    return samplers.create(sampler, **settings).revise(view, candidates)


def test_wino_remasks_below_its_threshold() -> None:
    for shadow, is_remasked in zip(neighbours_of(0.5), (False, False, True), strict=True):
        updates = {"shadow_confidence": torch.tensor([[1.0, 1.0, shadow]], dtype=torch.float64)}
        revision = revise("wino", {"threshold_back": 0.5}, 0.5, memory={"accepted": 2}, updates=updates)
        assert revision.remask.tolist() == [[False, False, is_remasked]]


def test_editing_replaces_above_its_threshold() -> None:
    for score, is_edited in zip(neighbours_of(0.5), (True, False, False), strict=True):
        for token in (1, 2):
            revision = revise("editing", {"editing_threshold": 0.5}, score, token, memory={"post_steps": 0})
            assert revision.edit.tolist() == [[False, False, is_edited and token != 1]]


@pytest.mark.parametrize(("decided", "threshold"), [(0, 4.0), (24, 4.0), (25, 2.0), (74, 2.0), (75, 1.0), (99, 1.0)])
def test_prophet_at_the_thresholds_of_its_stages(decided: int, threshold: float) -> None:
    rule = paradec.Prophet(gaps=(4.0, 2.0, 1.0), stages=(0.25, 0.75))
    window = SimpleNamespace(rows=np.array([0]), undecided=lambda current, mask: current == mask)
    facts = SimpleNamespace(mask_token_id=3)
    state = SimpleNamespace(window=window, facts=facts, decided=np.array([decided]), total=np.array([100]))
    for gap, satisfied in zip(neighbours_of(threshold), (True, True, False), strict=True):
        gaps = torch.tensor([[gap, 100.0, gap]], dtype=torch.float64)
        proposal = SimpleNamespace(updates={EARLY_PREFIX + "logit_gap": gaps}, current=torch.tensor([[3, 1, 3]]))
        assert rule.satisfied(state, proposal).tolist() == [satisfied]


def cut_of(policy: AdaptiveBlocks, confidence: list[float], tokens: list[int], answer: int, start: int = 0) -> int:
    """Return the length of the block that a row with a prompt of 3 tokens opens.

    confidence, tokens: of the read positions. answer: length of the answer. start: of the block, in the answer."""
    size = len(tokens)
    read = torch.tensor([tokens]), torch.tensor([confidence], dtype=torch.float64), torch.ones(1, size).bool()
    opening = Opening(*read, start=np.array([3 + start]), prompt_length=np.array([3]), length=np.array([3 + answer]))
    return int(policy.cut(opening))


def test_adaptive_blocks_at_their_threshold() -> None:
    policy = AdaptiveBlocks(length=4, delimiter_threshold=0.5, delimiters=(7,), window=0.5)
    for score, is_enough in zip(neighbours_of(0.5), (True, True, False), strict=True):
        assert cut_of(policy, [0.9, score, 0.9, 0.9], [1, 7, 1, 1], 8) == (2 if is_enough else 4)
    # the block ends at the first of the most confident delimiters
    assert cut_of(policy, [0.5, 0.75, 0.75, 0.5], [7, 7, 7, 7], 8) == 2
    # the window is half of the answer: 4 positions of 9
    assert cut_of(policy, [0.5] * 5, [1, 1, 1, 7, 1], 9) == 4
    policy = dataclasses.replace(policy, length=5)
    # the delimiter is outside the window, so the block has the default length
    assert cut_of(policy, [0.75] * 5, [1, 1, 1, 1, 7], 9) == 5
    assert cut_of(policy, [0.5, 0.625, 0.5, 0.5, 0.75], [1, 7, 1, 1, 7], 9) == 2
    policy = dataclasses.replace(policy, min_length=3)
    assert [cut_of(policy, [0.75] * 5, [7 if i == at else 1 for i in range(5)], 10) for at in range(5)] == [
        3, 3, 3, 4, 5
    ]  # fmt: skip


def test_equal_scores_go_to_the_lower_position() -> None:
    for name in ("threshold", "adablock", "credit", "localleap", "factor", "entropy_threshold", "entropy_bound",
                 "wino", "editing"):  # fmt: skip
        value = -3.0 if name.startswith("entropy") else 0.125
        assert selected_positions(name, [-INF, value - 0.125, value, value, value]) == [2], name
    updates_by_name = {"klass": {"stable": [0] * 5}, "ccd": {"buffered": [False] * 5}}
    for name in ("low_confidence", "margin", "entropy", "klass", "ccd"):
        updates = updates_by_name.get(name, {})
        assert selected_positions(name, [-INF, 0.0, 0.125, 0.125, 0.125], 2, updates=updates) == [2, 3], name

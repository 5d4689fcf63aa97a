"""Masked samplers on a model with exact conditional distributions: answers are right as often as formulas predict."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import facts_of
from torch import Tensor

import paradec
from paradec import samplers
from paradec.core.facts import ModelFacts
from paradec.core.query import Query
from paradec.samplers.masked.rules.learn2pd_filter import BlockFilter, FilterFacts, save_filter

ERROR, COPIES = 1e-9, 500  # probability that a test fails by chance; rows per task
N = 4  # tokens of an answer
TOKENS = range(6)
HOLE = 6
FIRST_TASK = 7  # a prompt is one token, the id of its task

LIST = (0, 1, 2, 3, 4)  # the tokens of a list; 5 is a new token


def tasks() -> dict[str, list[tuple[int, ...]]]:
    """The right answers of each task, all equally likely and N tokens long."""
    four, three = LIST[:4], LIST[:3]
    return {
        "copy": [four],
        "shuffle": [order for order in itertools.permutations(four) if order != four],
        "permutation": list(itertools.permutations(four)),
        "replace_random": [(*four[:i], 5, *four[i + 1 :]) for i in range(N)],
        "insert_random": [(*three[:i], 5, *three[i:]) for i in range(N)],
        "remove_random": [LIST[:i] + LIST[i + 1 :] for i in range(N + 1)],
    }


TASKS = tasks()
PROMPTS = [[FIRST_TASK + index] for index in range(len(TASKS)) for _ in range(COPIES)]


class Denoiser:
    """A model that predicts the exact conditional distributions of `TASKS`."""

    tokenizer, pads, supports_store, supports_visibility = None, True, False, True
    default_max_new_tokens, default_block_length = N, None
    device, dtype = torch.device("cpu"), torch.float64
    facts = ModelFacts(vocab_size=FIRST_TASK + len(TASKS), mask_token_id=HOLE, name="the tasks")

    def __init__(self, sampler: str = "threshold", block: int = N) -> None:
        self.facts = replace(self.facts, **facts_of(sampler, N + 1 if block == N else block))

    def __call__(self, query: Query, store: Any = None) -> Tensor:
        rows, count = query.tokens.shape[0], query.wanted.shape[1]
        logits = torch.full((rows, count, self.facts.vocab_size), -torch.inf, dtype=torch.float64)
        known = query.tokens[:, None, 1 : N + 1].expand(rows, count, N)
        if query.visible is not None:
            visible = query.visible.gather(1, query.wanted.unsqueeze(2).expand(rows, count, query.visible.shape[2]))
            known = known.masked_fill(~visible[:, :, 1 : N + 1], HOLE)
        slot = query.positions.gather(1, query.wanted) - 1
        for index, answers in enumerate(TASKS.values()):
            is_of_task = query.tokens[:, 0] == FIRST_TASK + index
            support = torch.tensor(answers)  # [answers, N]
            known_of_task = known[is_of_task].unsqueeze(2)
            agrees = ((known_of_task == support) | (known_of_task == HOLE)).all(-1)
            agrees |= ~agrees.any(-1, keepdim=True)
            token_ids = support.T[slot[is_of_task]]  # [rows, positions, answers]
            counts = torch.zeros_like(logits[is_of_task]).scatter_add(2, token_ids, agrees.double())
            logits[is_of_task] = (counts / counts.sum(-1, keepdim=True)).log()
        return logits


def probability_of_one_step(answers: Sequence[tuple[int, ...]]) -> float:
    """Return the probability of a right answer if every position is drawn independently from its marginal."""
    marginal = [{token: sum(a[i] == token for a in answers) / len(answers) for token in TOKENS} for i in range(N)]
    return math.fsum(math.prod(marginal[i][token_id] for i, token_id in enumerate(answer)) for answer in answers)


def is_right(task: str, answers: Tensor) -> Tensor:
    """Return which answers [rows, N] are right, [rows] bool. For "permutation" the unchanged list counts as wrong."""
    support = torch.tensor(TASKS["shuffle" if task == "permutation" else task])
    return (answers.unsqueeze(1) == support).all(-1).any(1)


def assert_probability(hits: int, trials: int, p: float, comparisons: int = 1) -> None:
    """Assert that `hits` of `trials` fit the probability p, by the Chernoff bound.

    With q = hits / trials, P(KL(q, p) >= x) <= 2 exp(-trials x)."""
    if p in (0.0, 1.0):
        assert hits == p * trials
        return
    q = hits / trials
    kl = sum(a * math.log(a / b) for a, b in ((q, p), (1 - q, 1 - p)) if a > 0)
    assert trials * kl <= math.log(2 * comparisons / ERROR), f"{q:.4f}, expected {p:.4f}"


ONE_STEP: dict[str, dict] = {
    "threshold": {"threshold": 0.0}, "factor": {"factor": N + 1.0}, "hierarchy": {"threshold": 0.0},
    "entropy_bound": {"gamma": 1e9}, "entropy_threshold": {"threshold": 1e9},
    "localleap": {"anchor_threshold": 0.0, "relaxed_threshold": 0.0}, "adablock": {"threshold": 0.0},
    "learn2pd": {"filter_threshold": 0.0}, "lopa": {"base": {"sampler": "threshold", "threshold": 0.0}},
    "wino": {"threshold": 0.0, "cap_low": N, "cap_share": 1.0}, "editing": {"threshold": 0.0, "editing_threshold": 1.0},
    "saber": {"minimum": N}, "s2d2": {"route": "span", "min_span": N + 2, "block_steps": 1},
    "credit": {"threshold": 0.0, "fusion": 0.0},
    "union": {"rules": ({"sampler": "threshold", "threshold": 0.0}, "localleap")},
    "intersection": {"rules": [{"sampler": "threshold", "threshold": 0.0}, {"sampler": "factor", "factor": N + 1.0}]},
}  # fmt: skip
"""Settings with which a block takes one step, for samplers without the field `steps`."""
TILTS = {"credit", "union"}
"""Samplers whose defaults change the logits: answers are right, but not equally likely."""
MEMORYLESS = {"ccd": {"history": 1}, "lopa": {"branches": 0}}
"""Settings with which tokens depend only on the current step's logits. With their defaults, these samplers also use
logits of earlier steps, which do not know later decisions."""
MASKED = [name for name in samplers.names() if samplers.get(name).family == "masked"]
MASKED = [name for name in MASKED if "temperature" not in samplers.get(name).unsupported]


@pytest.fixture(scope="module")
def filter_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A filter for learn2pd with random weights, which have no effect with filter_threshold=0."""
    path: Path = tmp_path_factory.mktemp("filter") / "filter.safetensors"
    torch.manual_seed(0)
    facts = FilterFacts("block", Denoiser.facts.name, Denoiser.facts.vocab_size, N, ("none",), threshold=0.96)
    save_filter(path, facts, BlockFilter(N))
    return str(path)


def decode(name: str, settings: dict, filter_file: str, block: int, **request: Any) -> paradec.Output:
    if name == "learn2pd":
        settings = settings | {"filter": filter_file, "allow_mismatch": True}
    request |= {"blocks": paradec.FixedBlocks(block), "max_new_tokens": N, "temperature": 1.0, "seed": 11}
    return paradec.generate(Denoiser(name, block), PROMPTS, sampler=samplers.create(name, **settings), **request)


def answers_of(out: paradec.Output, task: str) -> Tensor:
    index = list(TASKS).index(task)
    return out.new_tokens[index * COPIES : (index + 1) * COPIES]


def test_the_probabilities_of_one_step_have_closed_forms() -> None:
    assert probability_of_one_step(TASKS["copy"]) == 1
    assert probability_of_one_step(TASKS["replace_random"]) == pytest.approx((1 - 1 / N) ** (N - 1), rel=1e-14)
    shuffled = probability_of_one_step(TASKS["permutation"]) * len(TASKS["shuffle"]) / len(TASKS["permutation"])
    assert shuffled == pytest.approx((math.factorial(N) - 1) / N**N, rel=1e-14)


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
def test_one_step_is_right_as_often_as_the_marginals_predict(name: str, filter_file: str) -> None:
    steps = 1 if samplers.create(name).uses_steps else None
    if steps is None:
        assert name in ONE_STEP, f"ONE_STEP has no settings with which {name!r} commits a block in one step"
    out = decode(name, ONE_STEP.get(name, {}), filter_file, N, steps=steps)
    assert set(out.row_nfe) == {1}
    for task, answers in TASKS.items():
        expected = probability_of_one_step(answers)
        if task == "permutation":
            expected = (math.factorial(N) - 1) / N**N
        assert_probability(int(is_right(task, answers_of(out, task)).sum()), COPIES, expected, len(TASKS))


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
def test_with_blocks_of_one_token_answers_are_always_right(name: str, filter_file: str) -> None:
    out = decode(name, {}, filter_file, 1)
    comparisons = sum(map(len, TASKS.values()))
    for task, answers in TASKS.items():
        answer_ids = answers_of(out, task)
        if task != "permutation":
            assert is_right(task, answer_ids).all()
        counts = [int((answer_ids == torch.tensor(answer)).all(1).sum()) for answer in answers]
        assert sum(counts) == COPIES
        if name not in TILTS:
            for count in counts:
                assert_probability(count, COPIES, 1 / len(answers), comparisons)


@pytest.mark.thinned
@pytest.mark.parametrize("name", MASKED)
def test_rows_that_commit_one_token_per_step_are_right(name: str, filter_file: str) -> None:
    max_commits = torch.zeros(len(PROMPTS), dtype=torch.int64)

    def callback(state: Any, commit: Any) -> None:
        rows = torch.as_tensor(commit.rows)
        max_commits[rows] = torch.maximum(max_commits[rows], commit.selected.sum(1))

    out = decode(name, MEMORYLESS.get(name, {}), filter_file, N, callback=callback)
    for index, task in enumerate(TASKS):
        if task == "permutation":
            continue
        right = is_right(task, answers_of(out, task))
        one_by_one = max_commits[index * COPIES : (index + 1) * COPIES] == 1
        assert right[one_by_one].all()
        if task == "copy":
            assert right.all()

"""The packaged model answers unseen prompts, and parallel samplers differ on it."""

import pytest

import paradec
from paradec import samplers
from paradec.models.adapter import Model
from paradec.tools.evaluation.tasks import TASKS, load_prompts

NUM_PROMPTS = 12
"""Prompts per task, of 48."""


def success_and_tokens_per_forward(model: Model, task: str, sampler: object) -> tuple[float, float]:
    examples = load_prompts([task], limit=NUM_PROMPTS)
    prompts = [example.prompt for example in examples]
    out = paradec.generate(model, prompts, sampler=sampler, max_new_tokens=24, block_length=24)
    checks = [TASKS[task].check(example, text) for example, text in zip(examples, out.text, strict=True)]
    return sum(checks) / len(checks), out.tokens_per_forward


@pytest.mark.thinned
@pytest.mark.parametrize("task", ["copy", "reverse", "sort", "insert_at", "remove_at", "replace_at", "replace_name"])
def test_tasks_with_one_right_answer(packaged: Model, task: str) -> None:
    one_by_one, per_forward = success_and_tokens_per_forward(packaged, task, "low_confidence")
    assert one_by_one >= 0.9 and per_forward <= 1.0
    parallel, per_forward = success_and_tokens_per_forward(packaged, task, "threshold")
    assert parallel >= 0.9 and per_forward > 2.0


@pytest.mark.thinned
@pytest.mark.parametrize("task", ["shuffle", "insert_random", "replace_random", "latin_square"])
def test_tasks_with_many_answers_fail_in_one_step(packaged: Model, task: str) -> None:
    one_by_one, _ = success_and_tokens_per_forward(packaged, task, "low_confidence")
    at_once, per_forward = success_and_tokens_per_forward(packaged, task, samplers.create("threshold", threshold=0.0))
    assert one_by_one >= 0.75
    assert at_once <= one_by_one - 0.5 and per_forward > 3.0

"""The packaged prompts and their checkers (`paradec.tools.evaluation.tasks`) for lm-evaluation-harness."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from datasets import Dataset, DatasetDict

from paradec.tools.evaluation.tasks import Example, get_task, load_prompts


def prompts(task: str, **_: Any) -> DatasetDict:
    """Load the packaged prompts of one task. Other arguments, which the harness passes, are ignored."""
    rows = [asdict(example) for example in load_prompts(task)]
    return DatasetDict(test=Dataset.from_list([row | {"answer": row["answer"] or ""} for row in rows]))


def judge_answer(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Judge the only answer in `results`: 1.0 if it is right, else 0.0."""
    example = Example(**{**doc, "items": tuple(doc["items"])})
    return {"exact_match": float(get_task(example.task).check(example, results[0]))}

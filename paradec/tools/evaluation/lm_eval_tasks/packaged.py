"""The packaged prompts as lm-evaluation-harness reads them, and the checkers of `paradec.tools.evaluation.tasks`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from datasets import Dataset, DatasetDict

from paradec.tools.evaluation.tasks import Example, get_task, load_prompts


def prompts(task: str, **_: Any) -> DatasetDict:
    """The shipped prompts of one task; what else the harness hands over is not for them."""
    rows = [asdict(example) for example in load_prompts(task)]
    return DatasetDict(test=Dataset.from_list([row | {"answer": row["answer"] or ""} for row in rows]))


def judged(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether the answer is right: exactly one of those that the task accepts."""
    example = Example(**{**doc, "items": tuple(doc["items"])})
    return {"exact_match": float(get_task(example.task).check(example, results[0]))}

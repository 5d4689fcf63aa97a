"""What a comparison asks: prompts with judges of their answers, the packaged ones or those of a file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paradec.constraints.values import Constraint, one_constraint
from paradec.core.checks import check_int, check_text, shown
from paradec.core.registry import unknown
from paradec.core.text_files import parse_json, read_lines
from paradec.tools.evaluation.tasks import get_task, load_prompts, spread

LINE = ("prompt", "answer", "regex", "task", "constraint")
"""Fields of a line of a file of prompts."""


@dataclass(frozen=True)
class Question:
    """A prompt and the judge of its answer.

    Attributes:
        task: what the prompt is counted under.
        prompt: what the user says.
        right: whether a text (without special tokens) is a right answer.
        many: whether there are several right answers; None when that is not known.
        key: what is asked and how it is judged, as text; a comparison is only resumed on equal questions.
        constraint: what the answer must be; None takes what is asked of all.
    """

    task: str
    prompt: str
    right: Callable[[str], bool]
    many: bool | None = None
    key: str = ""
    constraint: Constraint | None = None


def packaged_questions(tasks: str | Iterable[str] | None = None, limit: int | None = None) -> list[Question]:
    """The prompts inside the package (`paradec.tools.evaluation.TASKS`), with their checkers.

    Args:
        tasks: names of the tasks wanted; None takes all.
        limit: how many prompts of each task; None takes all.

    Raises:
        ValueError: an unknown task, or a limit below 1.
    """
    check_int("limit", limit, low=1, none=True)

    def question(example: Any) -> Question:
        task = get_task(example.task)
        return Question(
            task.name,
            example.prompt,
            lambda text: task.check(example, text),
            task.many_answers,
            f"{task.name}: {example.prompt}",
        )

    return [question(example) for example in load_prompts(tasks, limit)]


def read_questions(
    file: str | os.PathLike[str], tasks: str | Iterable[str] | None = None, limit: int | None = None
) -> list[Question]:
    """Read one's own prompts: a file of JSON lines, one object per prompt.

        {"prompt": "What is 2 + 3?", "answer": "5"}
        {"prompt": "Name a prime.", "answer": ["2", "3", "5", "7"], "task": "primes"}
        {"prompt": "Say hello.", "regex": "(?i)hello|hi"}
        {"prompt": "Is 7 a prime?", "answer": "yes", "constraint": {"choice": ["yes", "no"]}}

    `answer` (a text, or a list of them) must be the whole answer; spaces around words and empty lines at either end do
    not count. `regex` (Python's) must be found in the answer. `task` groups prompts; it is "prompts" by default.
    `constraint` says what the answer must be, as `to_dict` of `paradec.Choice`, `Regex` or `JsonSchema`.

    Args:
        file: path of the file, UTF-8.
        tasks: names of the tasks wanted; None takes all.
        limit: how many prompts of each task, at even distances; None takes all.

    Raises:
        ValueError: a line that is no such object, an unknown task, or no prompts; the message names the line.
        OSError: the file cannot be read.
    """
    check_int("limit", limit, low=1, none=True)
    questions = read_lines(file, _question)
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    wanted = list(by_task) if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks)
    for name in wanted:
        if name not in by_task:
            raise ValueError(unknown(f"task in {str(file)!r}", name, by_task))
    if not questions:
        raise ValueError(f"{str(file)!r} has no prompts")
    return [question for name, group in by_task.items() if name in wanted for question in spread(group, limit)]


def _question(line: str) -> Question:
    fields = parse_json(line)
    if not isinstance(fields, dict):
        raise ValueError(f"{shown(fields)} is not an object with a prompt and an answer")
    for name in fields:
        if name not in LINE:
            raise ValueError(unknown("field", name, LINE))
    prompt, task = fields.get("prompt"), fields.get("task", "prompts")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(f"prompt={shown(prompt)} must be a text")
    check_text("prompt", prompt)
    if not isinstance(task, str) or not task:
        raise ValueError(f"task={shown(task)} must be a text")
    right, many = judge(fields)
    return Question(task, prompt, right, many, line.strip(), one_constraint("constraint", fields.get("constraint")))


def judge(fields: Mapping[str, Any]) -> tuple[Callable[[str], bool], bool | None]:
    """What judges answers to a prompt with an "answer" or a "regex", and whether several are right (None: unknown).

    Raises:
        ValueError: neither, both, or one of another kind.
    """
    if ("answer" in fields) == ("regex" in fields):
        raise ValueError("give either answer or regex")
    if "answer" in fields:
        answers = [fields["answer"]] if isinstance(fields["answer"], str) else fields["answer"]
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
            raise ValueError(f"answer={shown(fields['answer'])} must be a text or a list of texts")
        accepted = [_words(answer) for answer in answers]
        return (lambda text: _words(text) in accepted), len(accepted) > 1 or None
    try:
        pattern = re.compile(fields["regex"])
    except (re.error, TypeError) as error:
        raise ValueError(f"regex={shown(fields['regex'])} is no regular expression ({error})") from None
    return (lambda text: pattern.search(text) is not None), None


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]

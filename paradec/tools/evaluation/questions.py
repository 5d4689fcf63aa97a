"""Questions: prompts, packaged or read from a file, with functions that judge answers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paradec.constraints.values import Constraint, parse_one_constraint
from paradec.core.checks import check_int, check_names, check_text, short_repr, unknown_name
from paradec.core.text_files import parse_json, read_lines
from paradec.tools.evaluation.tasks import get_task, load_prompts, spread

FIELDS = ("prompt", "input_ids", "answer", "regex", "answer_ids", "task", "constraint")
"""Fields of a line in a file of prompts."""


@dataclass(frozen=True)
class Question:
    """A prompt, and how to judge answers to it.

    Attributes:
        prompt: a text, or ids (with the mask id at positions to fill); for tuning also a chat.
        key: prompt and answer as text. A comparison or study can be continued only with equal keys.
        right: function that returns whether a text (without special tokens) is a right answer; None: not used.
        truth: the right ids of the filled positions, in order; None: not used.
        task: name of the task, for results per task. Tuning splits the prompts of each task between its two halves.
        group: name of a group. Tuning keeps the prompts of a group in one half, and resamples them together for
            intervals. "": the prompt is its own group.
        many: whether there are several right answers; None: unknown.
        constraint: constraint of the answer; None: the constraint of the comparison, if any.
    """

    prompt: Any
    key: str = ""
    right: Callable[[str], bool] | None = None
    truth: tuple[int, ...] | None = None
    task: str = "prompts"
    group: str = ""
    many: bool | None = None
    constraint: Constraint | None = None

    @property
    def judged(self) -> bool:
        """Whether answers can be judged (`right` or `truth` is set)."""
        return self.right is not None or self.truth is not None


def packaged_questions(tasks: str | Iterable[str] | None = None, limit: int | None = None) -> list[Question]:
    """Read the packaged prompts of `tasks` (names in `paradec.tools.evaluation.TASKS`), at most `limit` of each task;
    None is all. Raises ValueError: an unknown task, or a limit below 1."""
    check_int("limit", limit, low=1, none=True)

    def question(example: Any) -> Question:
        task = get_task(example.task)
        key, right = f"{task.name}: {example.prompt}", lambda text: task.check(example, text)
        return Question(example.prompt, key, right, task=task.name, many=task.many_answers)

    return [question(example) for example in load_prompts(tasks, limit)]


def read_questions(
    file: str | os.PathLike[str], tasks: str | Iterable[str] | None = None, limit: int | None = None
) -> list[Question]:
    """Read custom prompts from JSON lines, one object per prompt.

        {"prompt": "Name a prime.", "answer": ["2", "3", "5", "7"], "task": "primes"}
        {"prompt": "Say hello.", "regex": "(?i)hello|hi"}
        {"prompt": "Is 7 a prime?", "answer": "yes", "constraint": {"choice": ["yes", "no"]}}
        {"input_ids": [2, 7, 4, 4, 3], "answer_ids": [9, 11]}

    `answer` is the complete right answer, or a list of right answers. The judge ignores spaces around words, and empty
    lines at either end. `regex` (Python's syntax) must match somewhere in the answer. `task` is "prompts" by default.
    `constraint` is the `to_dict` of a `paradec.Choice`, `Regex` or `JsonSchema`. `answer_ids` are the right ids of all
    filled positions before the end token.

    file: path of the file, UTF-8. tasks: names of tasks; None is all.
    limit: maximum number of prompts of each task, evenly spaced in the file; None is all.
    Raises ValueError: a malformed line (the message has its number), an unknown task, or no prompts. OSError: an
    unreadable file."""
    check_int("limit", limit, low=1, none=True)
    questions = read_lines(file, _question)
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    task_names = list(by_task) if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks)
    for name in task_names:
        if name not in by_task:
            raise ValueError(unknown_name(f"task in {str(file)!r}", name, by_task))
    if not questions:
        raise ValueError(f"{str(file)!r} has no prompts")
    return [question for name, group in by_task.items() if name in task_names for question in spread(group, limit)]


def _question(line: str) -> Question:
    fields = read_fields(line, FIELDS, ids=True)
    truth = read_ids("answer_ids", fields["answer_ids"]) if "answer_ids" in fields else None
    if truth is not None and ("answer" in fields or "regex" in fields):
        raise ValueError("give answer_ids, or answer or regex, not both")
    right, has_many = build_judge(fields) if truth is None else (None, None)
    prompt = fields["prompt"] if "prompt" in fields else list(read_ids("input_ids", fields["input_ids"]))
    constraint = parse_one_constraint("constraint", fields.get("constraint"))
    task = fields.get("task", "prompts")
    return Question(prompt, line.strip(), right, truth, task=task, many=has_many, constraint=constraint)


def read_ids(name: str, value: Any) -> tuple[int, ...]:
    """Convert a list or array of token ids. Raises ValueError for any other value. name: the value's name in errors."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise ValueError(f"{name}={short_repr(value)} must be a row of token ids")
    for entry in value:
        check_int(f"id in {name}", entry, low=-1)
    return tuple(value)


def read_fields(line: str, allowed: Sequence[str] | None = None, ids: bool = False) -> dict[str, Any]:
    """Read the JSON object in a line of a prompt file. allowed: the allowed fields; None allows all. ids: whether
    `input_ids` may replace `prompt`. Raises ValueError: not an object, an unknown field, or a prompt, task or group
    that is not a text."""
    fields = parse_json(line)
    if not isinstance(fields, dict):
        raise ValueError(f"{short_repr(fields)} is not an object with a prompt")
    if allowed is not None:
        check_names("field", fields, allowed)
    if ids and ("prompt" in fields) == ("input_ids" in fields):
        raise ValueError("give either prompt or input_ids")
    prompt = fields.get("prompt")
    if not (ids and "input_ids" in fields) and (not isinstance(prompt, str) or not prompt.strip()):
        raise ValueError(f"prompt={short_repr(prompt)} must be a text")
    check_text("prompt", prompt or "")
    for name in ("task", "group"):
        if name in fields and (not isinstance(fields[name], str) or not fields[name]):
            raise ValueError(f"{name}={short_repr(fields[name])} must be a text")
    return fields


def build_judge(fields: Mapping[str, Any]) -> tuple[Callable[[str], bool], bool | None]:
    """Build the function that judges answers from the field "answer" or "regex". Returns the function, and whether
    several answers are right (None: unknown). Raises ValueError: not exactly one of the fields, or a wrong value."""
    if ("answer" in fields) == ("regex" in fields):
        raise ValueError("give either answer or regex")
    if "answer" in fields:
        answers = [fields["answer"]] if isinstance(fields["answer"], str) else fields["answer"]
        if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
            raise ValueError(f"answer={short_repr(fields['answer'])} must be a text or a list of texts")
        accepted = [_words(answer) for answer in answers]
        return (lambda text: _words(text) in accepted), len(accepted) > 1 or None
    try:
        pattern = re.compile(fields["regex"])
    except (re.error, TypeError) as error:
        raise ValueError(f"regex={short_repr(fields['regex'])} is not a regular expression ({error})") from None
    return (lambda text: pattern.search(text) is not None), None


def _words(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().split("\n")]

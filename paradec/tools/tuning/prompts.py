"""Prompts of a tuning run, with their known answers, and their division into two halves."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from paradec.core.checks import check_int, short_repr
from paradec.core.text_files import read_lines
from paradec.tools.evaluation.questions import Question, build_judge, read_fields, read_ids

FIELDS = ("prompt", "input_ids", "answer", "regex", "answer_ids", "task", "group")
"""Allowed fields of a line."""


def read_prompts(file: str | os.PathLike[str], limit: int | None = None) -> list[Question]:
    """Read a file of JSON lines, one object per prompt.

        {"prompt": "What is 2 + 3?", "answer": "5"}
        {"prompt": "Say hello.", "regex": "(?i)hello|hi", "task": "manners"}
        {"input_ids": [2, 7, 4, 4, 3], "answer_ids": [9, 11]}

    `answer` and `regex` are as in `paradec.tools.evaluation.read_questions`, but optional. `input_ids` replace `prompt`
    for models without a tokenizer, and may contain the mask id. `answer_ids` are the right ids of the filled positions,
    in order. `task` and `group`: see `Question`.

    Args:
        limit: maximum number of prompts, from the beginning of the file; None is all.

    Raises:
        ValueError: a malformed line (the message has its number), or no prompts. OSError: an unreadable file.
    """
    check_int("limit", limit, low=1, none=True)
    questions = read_lines(file, _parse_line)
    if not questions:
        raise ValueError(f"{str(file)!r} has no prompts")
    return questions[:limit]


def _parse_line(line: str) -> Question:
    fields = read_fields(line, FIELDS, ids=True)
    right = build_judge(fields)[0] if "answer" in fields or "regex" in fields else None
    truth = read_ids("answer_ids", fields["answer_ids"]) if "answer_ids" in fields else None
    if right is not None and truth is not None:
        raise ValueError("give answer_ids, or answer or regex, not both")
    prompt = fields["prompt"] if "prompt" in fields else list(read_ids("input_ids", fields["input_ids"]))
    task, group = fields.get("task", "prompts"), fields.get("group", "")
    return Question(prompt, json.dumps(fields, sort_keys=True), right, truth, task, group or _identity(prompt))


def to_questions(prompts: Any, answers: Sequence[Any] | None = None) -> list[Question]:
    """Convert a caller's prompts to questions.

    prompts: a file (`read_prompts`), or a sequence of texts, chats, rows of ids, or `Question`s.
    answers: one entry per prompt: a text, a list of texts, ids, or None (always None for a `Question`).
    Raises ValueError, TypeError: no prompts, different numbers of answers and prompts, or an invalid answer."""
    if isinstance(prompts, (str, os.PathLike)):
        if answers is not None:
            raise ValueError("answers needs a sequence of prompts; a file of prompts has the answers in its lines")
        return read_prompts(prompts)
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise TypeError(f"prompts={short_repr(prompts)} must be a file of JSON lines or a sequence of prompts")
    if not len(prompts):
        raise ValueError("prompts is empty; give at least two")
    if answers is not None and (isinstance(answers, str) or len(answers) != len(prompts)):
        raise ValueError(f"answers has {len(answers)} entries for {len(prompts)} prompts; give one or None for each")
    answer_of_prompt = [None] * len(prompts) if answers is None else answers
    return [_parse_entry(index, *entry) for index, entry in enumerate(zip(prompts, answer_of_prompt, strict=True))]


def _parse_entry(index: int, prompt: Any, answer: Any) -> Question:
    if isinstance(prompt, Question) and answer is not None:
        raise ValueError(f"prompt {index} is a Question, which has a judge; its entry in answers must be None")
    if isinstance(prompt, Question):
        identity = _identity(prompt.prompt)
        return replace(prompt, key=prompt.key or identity, group=prompt.group or identity)
    if isinstance(prompt, str):
        plain: Any = prompt
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(turn, dict) for turn in prompt):
        plain = list(prompt)
    else:
        plain = list(read_ids(f"prompt {index}", prompt))
    right, truth = None, None
    if isinstance(answer, str) or isinstance(answer, (list, tuple)) and answer and isinstance(answer[0], str):
        right = build_judge({"answer": answer if isinstance(answer, str) else list(answer)})[0]
    elif answer is not None:
        truth = read_ids(f"answer {index}", answer)
        answer = list(truth)
    return Question(plain, json.dumps([plain, answer]), right, truth, "prompts", _identity(plain))


def _identity(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def fingerprint(questions: Sequence[Question]) -> str:
    """Compute the digest of prompts and answers."""
    return hashlib.sha256("\n".join(entry.key for entry in questions).encode()).hexdigest()[:16]


def split_halves(questions: Sequence[Question], seed: int) -> tuple[list[Question], list[Question]]:
    """Split questions into the choosing half and the reported half, each in decoding order.

    The groups of each task are shuffled, and assigned to the two halves in turn. The decoding order takes one group of
    each task in turn, so a rung has prompts of all tasks. Raises ValueError: fewer than two groups.
    """
    groups: dict[str, list[Question]] = {}
    for entry in questions:
        groups.setdefault(entry.group, []).append(entry)
    if len(groups) < 2:
        raise ValueError(f"prompts has {len(groups)} different prompt; tune needs two, to choose and to report")
    by_task: dict[str, list[list[Question]]] = {}
    for members in groups.values():
        by_task.setdefault(members[0].task, []).append(members)
    draw, turn = random.Random(seed), 0
    dealt: tuple[list[list[list[Question]]], list[list[list[Question]]]] = ([], [])
    for members_of_task in by_task.values():
        draw.shuffle(members_of_task)
        for half in dealt:
            half.append([])
        for members in members_of_task:
            dealt[turn % 2][-1].append(members)
            turn += 1
    first, second = (
        [entry for members in itertools.chain(*itertools.zip_longest(*half, fillvalue=[])) for entry in members]
        for half in dealt
    )
    return first, second

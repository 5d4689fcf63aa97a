"""Short list tasks that measure how much accuracy parallel decoding loses.

A sampler that commits several tokens in one step treats them as independent. This is harmless for prompts with one
right answer (copy, sort, ...) and harmful for prompts with many right answers (shuffle, "insert anywhere", ...). The
difference between the accuracies of both groups shows this loss. The tasks follow the waiting-line and Latin-square
tasks of ParallelBench (arXiv 2510.04767), with words instead of names and short instructions::

    Sort: pear fig apple                    -> apple fig pear
    Insert kiwi at 1: pear fig apple        -> pear kiwi fig apple    (indices count from 0)
    Shuffle: pear fig apple                 -> any other order of the three
    Latin square: A B C                     -> three lines; no symbol twice in a row or column

``remove_random`` is a control: the likeliest words, chosen independently at each position, give a right answer.

A hash of the prompt decides whether it is for training or evaluation (:func:`is_held_out`). So training prompts
(``held_out=False``) are never among the prompts packaged for evaluation (:func:`load_prompts`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from random import Random
from typing import Any, cast

from paradec.core.checks import check_choice
from paradec.core.packaged import LIST_LENGTHS, SQUARE_SIZES, SYMBOLS, TEMPLATES, WORDS
from paradec.core.text_files import number_lines

Lines = list[list[str]]
"""Lines, each split into words: those of one answer, or several one-line answers to choose from."""


@dataclass(frozen=True)
class Example:
    """One prompt, with the values that :meth:`Task.check` needs.

    Attributes:
        task: Key into :data:`TASKS`.
        prompt: The user's text, without chat template.
        items: The list in the prompt (words, or the symbols of a Latin square).
        word: The word to insert, or the replacement of an item.
        target: The item that the prompt mentions (to replace it, ...).
        index: The position in the list that the prompt mentions, from 0.
        answer: One right answer; ``None`` in packaged prompts with many right answers.
    """

    task: str
    prompt: str
    items: tuple[str, ...]
    word: str | None = None
    target: str | None = None
    index: int | None = None
    answer: str | None = None


@dataclass(frozen=True)
class Task:
    """A kind of prompt. :meth:`make` generates examples, :meth:`check` judges answers.

    Attributes:
        name: Key into :data:`TASKS`.
        template: The prompt; random values replace ``{items}``, ``{word}``, ``{target}`` and ``{index}``.
        solve: Function that returns one right answer, at random if there are several.
        accept: Function that judges an answer, if several are right; ``None``: only ``solve``'s answer is right.
        alphabet: Words from which ``{items}`` and ``{word}`` are drawn.
        sizes: Allowed numbers of items.
        slots: Number of allowed values of ``{index}`` beyond the last item: 1 for an insertion, else 0.
        max_answer_tokens: Number of words and line breaks in the longest answer.
    """

    name: str
    template: str
    solve: Callable[[Example, Random], Lines]
    accept: Callable[[Example, Lines], bool] | None = None
    alphabet: tuple[str, ...] = WORDS
    sizes: tuple[int, ...] = LIST_LENGTHS
    slots: int = 0
    max_answer_tokens: int = 7

    @property
    def many_answers(self) -> bool:
        """Whether a prompt of this task has more than one right answer."""
        return self.accept is not None

    def make(self, rng: Random, held_out: bool = False, size: int | None = None) -> Example:
        """Draw a random prompt, and one right answer to it.

        rng: Source of randomness. held_out: Whether the prompt is for evaluation (:func:`is_held_out`).
        size: Number of items; by default drawn from ``sizes``."""
        if size is not None and size not in self.sizes:
            raise ValueError(f"size={size} must be one of task {self.name!r}'s sizes {self.sizes}")
        while True:
            example = self._draw(rng, size or rng.choice(self.sizes))
            if is_held_out(example.prompt) == held_out:
                return example

    def _draw(self, rng: Random, size: int) -> Example:
        *items, word = rng.sample(self.alphabet, size + 1)
        values: dict[str, Any] = {
            "word": word if "{word}" in self.template else None,
            "target": rng.choice(items) if "{target}" in self.template else None,
            "index": rng.randrange(size + self.slots) if "{index}" in self.template else None,
        }
        prompt = self.template.format(items=" ".join(items), **values)
        question = Example(self.name, prompt, tuple(items), **values)
        return replace(question, answer="\n".join(map(" ".join, self.solve(question, rng))))

    def check(self, example: Example, text: str) -> bool:
        """Check whether ``text`` (without special tokens) is a right answer to ``example``. Spaces around words and
        empty lines at either end are ignored; case, order and line breaks count."""
        if example.task != self.name:
            raise ValueError(f"example.task={example.task!r} must be {self.name!r}")
        lines = [line.split() for line in text.strip().splitlines()]
        if self.accept is not None:
            return self.accept(example, lines)
        return lines == self.solve(example, Random(0))  # with one right answer, the rng is not used


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is for evaluation, not for training. One prompt in sixteen is."""
    return hashlib.blake2b(prompt.encode(), digest_size=1).digest()[0] < 16


# Answers ------------------------------------------------------------------------------------------


def _insertions(x: Example) -> Lines:
    return [[*x.items[:k], str(x.word), *x.items[k:]] for k in range(len(x.items) + 1)]


def _removals(x: Example) -> Lines:
    return [[*x.items[:k], *x.items[k + 1 :]] for k in range(len(x.items))]


def _replacements(x: Example) -> Lines:
    return [[*x.items[:k], str(x.word), *x.items[k + 1 :]] for k in range(len(x.items))]


def _at_index(options: Callable[[Example], Lines]) -> Callable[[Example, Random], Lines]:
    """Build `solve` of a task whose answer is the option with the prompt's index."""
    return lambda x, rng: [options(x)[cast(int, x.index)]]


def _any_of(options: Callable[[Example], Lines]) -> tuple[Any, Any]:
    """Build `solve` and `accept` of a task for which every option is right."""

    def solve(x: Example, rng: Random) -> Lines:
        lines = options(x)
        return [lines[rng.randrange(len(lines))]]

    return solve, lambda x, lines: len(lines) == 1 and lines[0] in options(x)


def _shuffle(x: Example, rng: Random) -> Lines:
    while (order := rng.sample(x.items, len(x.items))) == list(x.items):
        pass
    return [order]


def _is_shuffle(x: Example, lines: Lines) -> bool:
    return len(lines) == 1 and sorted(lines[0]) == sorted(x.items) and lines[0] != list(x.items)


def _latin_square(x: Example, rng: Random) -> Lines:
    # Draw rows; reject a row that repeats a symbol in a column. The loop terminates, because every Latin rectangle can
    # be completed (Hall's theorem).
    rows: Lines = []
    while len(rows) < len(x.items):
        row = rng.sample(x.items, len(x.items))
        if all(a != b for earlier_row in rows for a, b in zip(earlier_row, row, strict=True)):
            rows.append(row)
    return rows


def _is_latin_square(x: Example, lines: Lines) -> bool:
    symbols = sorted(x.items)
    if len(lines) != len(symbols) or any(sorted(row) != symbols for row in lines):
        return False
    return all(sorted(column) == symbols for column in zip(*lines, strict=True))


def _task(name: str, solve: Callable[[Example, Random], Lines], *accept: Any, **fields: Any) -> Task:
    return Task(name, TEMPLATES[name], solve, *accept, **fields)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _task("copy", lambda x, rng: [[*x.items]]),
        _task("reverse", lambda x, rng: [[*x.items[::-1]]]),
        _task("sort", lambda x, rng: [sorted(x.items)]),
        _task("insert_at", _at_index(_insertions), slots=1),
        _task("insert_after", lambda x, rng: [_insertions(x)[x.items.index(str(x.target)) + 1]]),
        _task("remove_at", _at_index(_removals)),
        _task("remove_name", lambda x, rng: [[item for item in x.items if item != x.target]]),
        _task("replace_at", _at_index(_replacements)),
        _task("replace_name", lambda x, rng: [[str(x.word) if item == x.target else item for item in x.items]]),
        _task(
            "rotations",
            lambda x, rng: [[*x.items[k:], *x.items[:k]] for k in range(len(x.items))],
            max_answer_tokens=41,
        ),
        _task("shuffle", _shuffle, _is_shuffle),
        _task("insert_random", *_any_of(_insertions)),
        _task("remove_random", *_any_of(_removals)),
        _task("replace_random", *_any_of(_replacements)),
        _task(
            "latin_square", _latin_square, _is_latin_square, alphabet=SYMBOLS, sizes=SQUARE_SIZES, max_answer_tokens=19
        ),
    )
}
"""All tasks by name: ten with one right answer, then five with many."""


def get_task(name: str) -> Task:
    """Return a task by its name. Raises ValueError: an unknown name."""
    check_choice("task", name, TASKS)
    return TASKS[name]


def load_prompts(tasks: str | Iterable[str] | None = None, limit: int | None = None) -> list[Example]:
    """Read the packaged prompts, in the order of :data:`TASKS`. The packaged models were not trained on these prompts.

    tasks: Name or names of the tasks; by default all.
    limit: Maximum number of prompts of each task, spread over its list lengths; by default all."""
    names = list(TASKS) if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks)
    task_names = {get_task(name).name for name in names}
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1, or None for all prompts")
    by_task: dict[str, list[Example]] = {name: [] for name in TASKS if name in task_names}
    source = files("paradec.tools.evaluation") / "data" / "prompts.jsonl"
    for _, line in number_lines(source.read_text(encoding="utf-8")):
        fields = json.loads(line)
        if fields["task"] in task_names:
            example = Example(**{**fields, "items": tuple(fields["items"])})
            by_task[example.task].append(example)
    return [example for group in by_task.values() for example in spread(group, limit)]


def spread(examples: Sequence[Any], limit: int | None) -> Sequence[Any]:
    """Select ``limit`` evenly spaced examples (packaged ones are sorted by list length)."""
    if limit is None or limit >= len(examples):
        return examples
    return [examples[k * len(examples) // limit] for k in range(limit)]

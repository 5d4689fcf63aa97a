"""ParallelBench's waiting-line and Latin-square tasks in plain words, for any model that follows instructions.

The form is ParallelBench's (arXiv 2510.04767, section 4, and its dataset code): lists of 3 to 6 people, 25 prompts of
each length, one worked example before each, answers as a list of quoted names; Latin squares of 4 symbols from A to Z
and 0 to 9 as lines of commas. Names, sentences and draws are our own: scores compare samplers on one model, and are not
ParallelBench's. Its Sudoku and its five text tasks, which need stored data and other models to judge, are left out.

How a list is judged is `paradec.tools.evaluation.tasks`', on the names that are in quotes; what else is said around
the list does not count, unless `strict` asks for the list alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from paradec.core.checks import check_bool, check_int
from paradec.core.registry import unknown
from paradec.tools.evaluation.questions import Question
from paradec.tools.evaluation.tasks import TASKS, Example, Task

FIRST = (
    *("Ada", "Boris", "Carla", "Dario", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kira", "Leon", "Mina"),
    *("Nils", "Olga", "Paul", "Rosa", "Sven", "Tara", "Umut", "Vera", "Yusuf"),
)
LAST = (
    *("Adler", "Bauer", "Costa", "Demir", "Engel", "Fuchs", "Gomez", "Hansen", "Ivanov", "Jansen", "Kaya", "Lopez"),
    *("Moser", "Novak", "Olsen", "Petrov", "Rossi", "Silva", "Toth", "Urban", "Weber", "Zeman"),
)
PEOPLE = tuple(f"{first}_{last}" for first in FIRST for last in LAST)
"""In one word each, as tasks judge them; prompts and answers have a space."""
LENGTHS = (3, 4, 5, 6)
SYMBOLS = tuple(string.ascii_uppercase + string.digits)
SQUARE = 4
INSTRUCTIONS = {
    "copy": "Repeat the line as it is.",
    "reverse": "Give the line in reverse order.",
    "sort": "Sort the line by first name, then by last name.",
    "shuffle": "Shuffle the line: the same people in another order.",
    "insert_at": "Put {word} into the line so that there are {index} people before them.",
    "insert_random": "Put {word} anywhere into the line; the order of the others stays.",
    "remove_at": "Remove the person who has {index} people before them.",
    "remove_random": "Remove any one person; the order of the others stays.",
    "replace_at": "Put {word} in the place of the person who has {index} people before them.",
    "replace_random": "Put {word} in the place of any one person; the order of the others stays.",
}
"""What is asked of a line: ParallelBench's ten tasks, by our names."""
LATIN_SQUARE = "latin_square"
NAMES = (*INSTRUCTIONS, LATIN_SQUARE)
"""ParallelBench's tasks among those of `paradec.tools.evaluation.TASKS`."""


def waiting_line_questions(
    tasks: str | Iterable[str] | None = None, limit: int | None = None, *, per_length: int = 25, strict: bool = False
) -> list[Question]:
    """Prompts with judges of their answers, the same on every call.

    Args:
        tasks: of `NAMES`; None takes all.
        limit: prompts of each task; None takes all.
        per_length: prompts of each task and length; squares are 4 times as many. 25 is ParallelBench's.
        strict: whether an answer must be the list and nothing else.

    Raises:
        ValueError: an unknown task, or a number out of its range.
    """
    check_int("limit", limit, low=1, none=True)
    check_int("per_length", per_length, low=1, high=1000)
    check_bool("strict", strict)
    wanted = list(NAMES) if tasks is None else [tasks] if isinstance(tasks, str) else list(tasks)
    for name in wanted:
        if name not in NAMES:
            raise ValueError(unknown("task of ParallelBench", name, NAMES))
    found = []
    for name in NAMES:
        if name in wanted:
            questions = _questions(name, per_length, strict)
            step = 1 if limit is None else max(1, len(questions) // limit)
            found += questions[::step][:limit]
    return found


def _questions(name: str, per_length: int, strict: bool) -> list[Question]:
    seed = (int(hashlib.sha256(name.encode()).hexdigest(), 16) + 42) % 65535  # ParallelBench's way to a seed
    rng, questions, seen = Random(seed), [], set()
    square = name == LATIN_SQUARE
    sizes = (SQUARE,) * len(LENGTHS) if square else LENGTHS
    task = replace(TASKS[name], alphabet=SYMBOLS if square else PEOPLE, sizes=(*{*sizes},))
    for size in sizes:
        count = 0
        while count < per_length:
            shown, asked = task.make(rng, size=size), task.make(rng, size=size)
            if asked.items in seen:
                continue
            seen.add(asked.items)
            count += 1
            prompt = (_square_prompt if square else _line_prompt)(shown, asked)
            questions.append(_question(task, asked, prompt, strict))
    return questions


def _question(task: Task, asked: Example, prompt: str, strict: bool) -> Question:
    read = _rows if task.name == LATIN_SQUARE else _people

    def right(text: str) -> bool:
        lines = read(text, strict)
        return lines is not None and task.check(asked, "\n".join(" ".join(line) for line in lines))

    how = "strict" if strict else "lenient"
    return Question(task.name, prompt, right, task.many_answers, f"{task.name}, {how}: {prompt}")


def _line_prompt(shown: Example, asked: Example) -> str:
    def part(example: Example) -> str:
        said = INSTRUCTIONS[example.task].format(word=_spaced(example.word or ""), index=example.index)
        return f"Line: {_listed(example.items)}\n{said}"

    answer = _listed((shown.answer or "").split())
    return (
        "People wait in a line. Answer with the new line alone, as a list of quoted names.\n\n"
        f"Example\n{part(shown)}\nAnswer: {answer}\n\nYour turn\n{part(asked)}\nAnswer:"
    )


def _square_prompt(shown: Example, asked: Example) -> str:
    def part(example: Example) -> str:
        return f"Symbols: {', '.join(example.items)}"

    answer = (shown.answer or "").replace(" ", ",")
    return (
        f"Write a Latin square of {SQUARE} lines: each symbol once in every line and once in every column. Answer with "
        f"the lines alone, symbols separated by commas.\n\nExample\n{part(shown)}\nAnswer:\n{answer}\n\n"
        f"Your turn\n{part(asked)}\nAnswer:\n"
    )


def _listed(people: Iterable[str]) -> str:
    return json.dumps([_spaced(person) for person in people])


def _spaced(person: str) -> str:
    return person.replace("_", " ")


def _people(text: str, strict: bool) -> list[list[str]] | None:
    """The names of a list, in one word each; None where there is no list."""
    if strict:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, list) or not all(isinstance(person, str) for person in found):
            return None
    else:
        inside = re.search(r"\[([^\[\]]*)\]", text)
        found = re.findall(r'"([^"]*)"', text if inside is None else inside[1])
    # a name without anything in it would vanish between the others
    return [["_".join(person.split()) or '""' for person in found]]


def _rows(text: str, strict: bool) -> list[list[str]] | None:
    """The lines of a square: without `strict` the first that have as many symbols as it has lines."""
    lines = [[symbol.strip() for symbol in line.split(",")] for line in text.strip().splitlines()]
    if strict:
        return lines if all(symbol and " " not in symbol for line in lines for symbol in line) else None
    valid = [line for line in lines if len(line) == SQUARE and all(len(symbol) == 1 for symbol in line)]
    return valid[:SQUARE]

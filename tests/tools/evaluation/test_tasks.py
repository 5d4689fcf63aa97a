"""The built-in list tasks: generators, checkers, the held-out split, and the packaged prompts."""

from collections import Counter
from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paradec.tools.evaluation import TASKS, Example, load_prompts
from paradec.tools.evaluation.tasks import is_held_out

names = st.sampled_from(sorted(TASKS))
seeds = st.integers(0, 2**32)

ITEMS = ("pear", "fig", "apple")
INSERTED = ["kiwi pear fig apple", "pear kiwi fig apple", "pear fig kiwi apple", "pear fig apple kiwi"]


def example_of(task: str, **fields: object) -> Example:
    return Example(task, prompt="", items=ITEMS, **fields)


@settings(deadline=None)
@given(names, seeds)
def test_reference_answers_are_right_and_corrupted_ones_wrong(name: str, seed: int) -> None:
    task, rng = TASKS[name], Random(seed)
    example = task.make(rng)
    assert task.check(example, example.answer)
    assert task.check(example, f"  {example.answer}\n")
    words = example.answer.split(" ")
    assert not task.check(example, " ".join(words[:-1])), "a word is missing"
    assert not task.check(example, " ".join([words[0], *words])), "a word is doubled"
    assert not task.check(example, example.answer.replace(" ", "", 1)), "two words are glued"
    assert not task.check(example, example.answer.replace(" ", "\n", 1)), "a line is broken"
    assert not task.check(example, "")


@settings(deadline=None)
@given(names, seeds, st.booleans())
def test_examples_fit_the_task_description(name: str, seed: int, held_out: bool) -> None:
    task = TASKS[name]
    example = task.make(Random(seed), held_out=held_out)
    assert example == task.make(Random(seed), held_out=held_out)
    assert is_held_out(example.prompt) is held_out
    assert len(example.items) in task.sizes
    assert set(example.items) <= set(task.alphabet)
    assert len(set(example.items)) == len(example.items)
    assert example.word not in example.items
    assert example.target is None or example.target in example.items
    assert example.index is None or 0 <= example.index < len(example.items) + task.slots
    assert example.prompt.endswith(": " + " ".join(example.items))
    tokens = len(example.answer.split()) + example.answer.count("\n")
    assert tokens <= task.max_answer_tokens


@pytest.mark.parametrize(
    ("task", "fields", "answer"),
    [
        ("copy", {}, "pear fig apple"),
        ("reverse", {}, "apple fig pear"),
        ("sort", {}, "apple fig pear"),
        ("insert_at", {"word": "kiwi", "index": 0}, "kiwi pear fig apple"),
        ("insert_at", {"word": "kiwi", "index": 3}, "pear fig apple kiwi"),
        ("insert_after", {"word": "kiwi", "target": "pear"}, "pear kiwi fig apple"),
        ("remove_at", {"index": 1}, "pear apple"),
        ("remove_name", {"target": "apple"}, "pear fig"),
        ("replace_at", {"word": "kiwi", "index": 2}, "pear fig kiwi"),
        ("replace_name", {"word": "kiwi", "target": "pear"}, "kiwi fig apple"),
        ("rotations", {}, "pear fig apple\nfig apple pear\napple pear fig"),
    ],
)
def test_tasks_accept_the_one_right_answer(task: str, fields: dict, answer: str) -> None:
    example = example_of(task, **fields)
    candidates = [" ".join(p) for n in (2, 3, 4) for p in permutations((*ITEMS, "kiwi"), n)]
    assert [text for text in {answer, *candidates} if TASKS[task].check(example, text)] == [answer]


@pytest.mark.parametrize(
    ("task", "fields", "answers"),
    [
        ("shuffle", {}, "pear apple fig,fig pear apple,fig apple pear,apple pear fig,apple fig pear"),
        ("insert_random", {"word": "kiwi"}, ",".join(INSERTED)),
        ("remove_random", {}, "fig apple,pear apple,pear fig"),
        ("replace_random", {"word": "kiwi"}, "kiwi fig apple,pear kiwi apple,pear fig kiwi"),
    ],
)
def test_tasks_accept_all_right_answers(task: str, fields: dict, answers: str) -> None:
    example = example_of(task, **fields)
    words = (*ITEMS, *ITEMS, "kiwi", "kiwi")  # some candidates repeat words
    candidates = {" ".join(p) for n in (2, 3, 4) for p in permutations(words, n)}
    assert {text for text in candidates if TASKS[task].check(example, text)} == {*answers.split(",")}
    drawn = {" ".join(TASKS[task].solve(example, Random(seed))[0]) for seed in range(200)}
    assert drawn == {*answers.split(",")}, "training meets every right answer"


def test_all_latin_squares_are_accepted() -> None:
    task = TASKS["latin_square"]
    example = Example("latin_square", "Latin square: A B C", ("A", "B", "C"))
    rows = list(permutations("ABC"))
    squares = {"\n".join(" ".join(r) for r in square) for square in permutations(rows, 3)}
    assert sum(task.check(example, square) for square in squares) == 12  # all of order 3
    assert not task.check(example, "A B C\nA B C\nA B C"), "columns repeat"
    assert not task.check(example, "A B C\nB C A"), "a row is missing"
    assert not task.check(example, "A B C\nB C A\nC A B\nA B C"), "a row too many"
    assert not task.check(example, "a b c\nb c a\nc a b"), "case counts"
    assert not task.check(example, "A B D\nB D A\nD A B"), "other symbols"


def test_shipped_prompts_are_held_out_and_balanced() -> None:
    examples = load_prompts()
    assert len({example.prompt for example in examples}) == len(examples)
    assert Counter(example.task for example in examples) == dict.fromkeys(TASKS, 48)
    assert all(is_held_out(example.prompt) for example in examples)
    for example in examples:
        task = TASKS[example.task]
        assert (example.answer is None) is task.many_answers
        assert task.many_answers or task.check(example, example.answer)


def test_load_prompts_selects_tasks_and_sizes() -> None:
    assert {e.task for e in load_prompts("sort")} == {"sort"}
    few = load_prompts(["shuffle", "copy"], limit=4)
    assert [e.task for e in few] == ["copy"] * 4 + ["shuffle"] * 4
    assert [len(e.items) for e in few] == [3, 4, 5, 6] * 2
    assert len(load_prompts("copy", limit=1000)) == 48

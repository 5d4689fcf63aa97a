"""Whether an answer agrees with what its case expects, and where it first does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from paradec.tools.conformance.cases import Case, Tie
from paradec.tools.conformance.targets import Answer
from paradec.tools.conformance.traces import Asked, Expected, changes

AGREE, DIFFER, UNDECIDED, MISSING, FAILED = "agree", "differ", "undecided", "not implemented", "failed"
STATUSES = (AGREE, DIFFER, UNDECIDED, MISSING, FAILED)


@dataclass(frozen=True)
class Difference:
    """The first place where a row is not what it must be."""

    row: int
    step: int | None
    """Which of the forwards that change something in this row, from 0; None where only answers are compared."""
    position: int | None
    expected: int | None
    """The token that must be there then; None where nothing is to be written yet."""
    found: int | None
    also: tuple[tuple[dict[int, int], dict[int, int]], ...] = ()
    """Of a step: all that must be written, and all that was."""
    what: str = ""
    """Of ties: what was made final, and what the decoder seems to do."""


def difference(case: Case, answer: Answer) -> Difference | None:
    """The first one of the case's first row that has any; None where all agree."""
    if case.tie is not None:
        return _tie_difference(case.tie, case.asked, answer)
    for row, expected in enumerate(case.expected):
        found = _row_difference(row, expected, case.asked, answer)
        if found is not None:
            return found
    return None


def _row_difference(row: int, expected: Expected, asked: Asked, answer: Answer) -> Difference | None:
    if expected.steps is not None and answer.steps is not None:
        ours = changes(answer.steps, row, _start(asked, row, answer), expected.compared)
        for number in range(max(len(expected.steps), len(ours))):
            theirs = expected.steps[number] if number < len(expected.steps) else {}
            mine = ours[number] if number < len(ours) else {}
            if theirs != mine:
                position = min(at for at in theirs.keys() | mine.keys() if theirs.get(at) != mine.get(at))
                return Difference(
                    row, number, position, theirs.get(position), mine.get(position), also=((theirs, mine),)
                )
    for position in sorted(expected.compared):
        if answer.ids[row][position] != expected.ids[position]:
            return Difference(row, None, position, expected.ids[position], answer.ids[row][position])
    return None


def _start(asked: Asked, row: int, answer: Answer) -> list[int]:
    """A row before its first step; -1 where nothing is decided, so that whatever is written there is a change."""
    assert answer.steps is not None
    written = [position for step in answer.steps for of, position, _ in step if of == row]
    prompt = asked.prompts[row]
    undecided = max(asked.max_new_tokens, max(written, default=0) + 1 - len(prompt))
    return [*prompt, *[-1 if asked.mask_id is None else asked.mask_id] * undecided]


def _tie_difference(tie: Tie, asked: Asked, answer: Answer) -> Difference | None:
    for row, right in enumerate(tie.answers[tie.right]):
        found = list(_tokens_by_step(tie, asked, answer, row))
        if answer.steps is None:
            right, found = [sorted(sum(right, []))], [sorted(sum(found, []))]
        if found == right:
            continue
        step = next(i for i in range(max(len(found), len(right))) if found[i : i + 1] != right[i : i + 1])
        what = f"{_tokens(found, step)} made final, {_tokens(right, step)} expected"
        for name, steps in tie.answers.items():
            other = steps[row] if answer.steps is not None else [sorted(sum(steps[row], []))]
            if found == other:
                what += f": it {name}, the method {tie.right}"
        return Difference(row, None if answer.steps is None else step, None, None, None, what=what)
    return None


def _tokens(steps: list[list[int]], number: int) -> str:
    """ "8 tokens (4 x 1, 4 x 3)"."""
    tokens = Counter(steps[number] if number < len(steps) else [])
    each = ", ".join(f"{count} x {token}" for token, count in sorted(tokens.items()))
    return f"{tokens.total()} token{'' if tokens.total() == 1 else 's'}" + (f" ({each})" if each else "")


def _tokens_by_step(tie: Tie, asked: Asked, answer: Answer, row: int) -> Iterator[list[int]]:
    """The tokens that each step made final, sorted, one of twins for all of them."""
    one = {token: min(twins) for twins in tie.twins for token in twins}
    begin = len(asked.prompts[row])
    if answer.steps is None:
        yield sorted(one.get(token, token) for token in answer.ids[row][begin : begin + asked.max_new_tokens])
        return
    for step in changes(answer.steps, row, _start(asked, row, answer), range(begin + asked.max_new_tokens)):
        yield sorted(one.get(token, token) for token in step.values())

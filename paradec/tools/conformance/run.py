"""Ask a target every case, and say what came of each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from paradec.tools.conformance import distribution
from paradec.tools.conformance.archive import Data
from paradec.tools.conformance.cases import Case
from paradec.tools.conformance.compare import AGREE, DIFFER, FAILED, MISSING, UNDECIDED, Difference, difference
from paradec.tools.conformance.margins import margin
from paradec.tools.conformance.targets import Answer, BadAnswer, Ended, Ours, Target, checked, request

DRAWS = 10_000
"""Of each distribution."""
ROWS = 1000
"""Of one request for draws of a distribution."""
TOLERANCE = 1e-5
"""In probabilities: differences of decisions nearer to their tie are undecided. About what float32 leaves open."""


@dataclass
class Outcome:
    """What came of a case."""

    case: str
    group: str
    method: str
    status: str
    message: str = ""
    """Why it was not implemented, failed or differs, as far as more can be said than the difference."""
    difference: Difference | None = None
    margin: float | None = None
    answers_only: bool = False
    """Whether the target gave no steps where they would have been compared."""
    fit: distribution.Fit | None = None
    corrected: float | None = None
    """The p-value times the number of distributions that were tested."""


@dataclass
class Run:
    """All outcomes, and of what."""

    target: str
    version: str
    """Of the kit."""
    digest: str
    tolerance: float
    draws: int
    narrowed: dict[str, Any]
    """What was left out by methods, groups or quick."""
    outcomes: list[Outcome] = field(default_factory=list)
    interrupted: bool = False

    def count(self, status: str) -> int:
        """How many cases came to it."""
        return sum(outcome.status == status for outcome in self.outcomes)

    @property
    def passed(self) -> bool:
        """Whether something agrees and nothing differs or failed."""
        return self.count(AGREE) > 0 and not self.count(DIFFER) and not self.count(FAILED) and not self.interrupted


def run(
    target: Target,
    data: Data,
    cases: Iterable[Case],
    into: Run,
    after: Callable[[int, int], None] = lambda done, total: None,
) -> Run:
    """Ask `target` all `cases`, and note the outcomes in `into`, which also says how: its tolerance and draws.

    Args:
        after: called after each case with how many are done, and of how many.

    Ctrl-C ends it and keeps the outcomes; `Run.interrupted` says so.
    """
    every, asker = list(cases), _Asker(target, data, into.tolerance, into.draws)
    try:
        for number, case in enumerate(every, start=1):
            into.outcomes.append(asker.outcome(case))
            after(number, len(every))
    except KeyboardInterrupt:
        into.interrupted = True
    judge_distributions(into.outcomes)
    return into


def judge_distributions(outcomes: list[Outcome]) -> None:
    """Agree or differ, by p-values corrected for how many there are (Bonferroni)."""
    tested = [outcome for outcome in outcomes if outcome.fit is not None]
    for outcome in tested:
        assert outcome.fit is not None
        outcome.corrected = min(1.0, outcome.fit.p_value * len(tested))
        finds = distribution.found_error(outcome.fit.draws, outcome.fit.degrees, len(tested))
        outcome.fit = dataclasses.replace(outcome.fit, finds=finds)
        outcome.status = DIFFER if outcome.corrected < distribution.LEVEL else AGREE
        if outcome.status == DIFFER:
            outcome.message = "the answers do not follow the model's distribution: what is accepted or drawn is biased"
            if outcome.fit.impossible is not None:
                outcome.message = f"the answer {outcome.fit.impossible} was drawn, which has no probability"


class _Asker:
    """A target, and what is known of it so far."""

    def __init__(self, target: Target, data: Data, tolerance: float, draws: int):
        self.target, self.data, self.tolerance, self.draws = target, data, tolerance, draws
        self.ours = Ours()
        self.ended = ""

    def answer(self, case: Case, asked: dict[str, Any]) -> Answer | Outcome:
        """Its answer, or what became of the case instead."""

        def failed(message: str) -> Outcome:
            return Outcome(case.name, case.group, case.method, FAILED, " ".join(message.split()))

        if self.ended:
            return failed(self.ended)
        try:
            return checked(self.target(asked), asked)
        except NotImplementedError as error:
            return Outcome(case.name, case.group, case.method, MISSING, str(error))
        except Ended as error:
            self.ended = str(error)
            return failed(str(error))
        except BadAnswer as error:
            return failed(str(error))
        except Exception as error:  # whatever it is made of
            return failed(f"{type(error).__name__}: {error}")

    def outcome(self, case: Case) -> Outcome:
        """Of one case; distributions are judged later, all together."""
        if case.distribution is not None:
            return self._drawn(case)
        asked = request(case, self.data)
        answer = self.answer(case, asked)
        if isinstance(answer, Outcome):
            return answer
        compares_steps = case.tie is not None or any(row.steps is not None for row in case.expected)
        found = Outcome(case.name, case.group, case.method, AGREE)
        found.answers_only = answer.steps is None and compares_steps
        found.difference = difference(case, answer)
        if found.difference is None:
            return found
        found.message = found.difference.what
        alone = case.alone[found.difference.row] if case.alone else case
        found.margin = self._margin(alone, found.difference, 0 if case.alone else found.difference.row)
        certain = case.tie is not None or case.expected[found.difference.row].certain
        near = found.margin is not None and found.margin < self.tolerance
        found.status = UNDECIDED if near or not certain else DIFFER
        if found.status == UNDECIDED and not near:
            found.message = "the published code itself decides otherwise in float64 here"
        elif found.status == DIFFER and case.alone:
            single = self.answer(alone, request(alone, self.data))
            if isinstance(single, Answer) and difference(alone, single) is None:
                found.message = "the same row alone agrees: rows of a batch depend on their neighbours"
        return found

    def _margin(self, case: Case, found: Difference, row: int) -> float | None:
        asked = request(case, self.data)
        return margin(self.ours, case, asked, dataclasses.replace(found, row=row))

    def _drawn(self, case: Case) -> Outcome:
        assert case.distribution is not None
        drawn: Counter[tuple[int, ...]] = Counter()
        prompt, new = case.asked.prompts[0], case.asked.max_new_tokens
        while drawn.total() < self.draws:
            rows = min(ROWS, self.draws - drawn.total())
            batch = dataclasses.replace(case, asked=case.asked.but(prompts=[prompt] * rows, seed=drawn.total()))
            answer = self.answer(case, request(batch, self.data))
            if isinstance(answer, Outcome):
                return answer
            drawn.update(tuple(ids[len(prompt) : len(prompt) + new]) for ids in answer.ids)
        fit = distribution.fit(case.distribution.answers, case.distribution.probabilities, drawn)
        return Outcome(case.name, case.group, case.method, AGREE, fit=fit)

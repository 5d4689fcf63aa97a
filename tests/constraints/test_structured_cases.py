"""Recorded cases: automata, marginals under a constraint, most likely texts, and joint samples."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from recorded import replays
from structured import CASES, SETTINGS, automaton_of, case_names, distribution

from paradec.constraints import passes
from paradec.constraints.automaton import STRETCH, TokenAutomaton
from paradec.constraints.marginals import Marginals, _run_sums, _scattered_sums


def same_language(automaton: TokenAutomaton, steps: list[list[int]], accept: list[int]) -> bool:
    """Return whether both automata accept the same sequences. steps[state][token]: the next state, or negative.

    Neither automaton may have states from which no end is reachable."""
    pairs = [(0, 0)]
    for state, recorded in pairs:
        if automaton.accept[state] != (recorded in accept):
            return False
        for token, next_recorded in enumerate(steps[recorded]):
            next_state = automaton.step(state, token)
            if (next_state < 0) != (next_recorded < 0):
                return False
            if next_state >= 0 and (next_state, next_recorded) not in pairs:
                pairs.append((next_state, next_recorded))
    return True


@pytest.mark.parametrize("name", [name for name, case in SETTINGS.items() if "automaton" in case])
@replays("name")
def test_automata_accept_the_recorded_languages(name: str) -> None:
    case = CASES[name]
    automaton = automaton_of(case)
    assert same_language(automaton, case["automaton"]["step"], case["automaton"]["accept"])
    num_paths = np.zeros(automaton.states, object)
    num_paths[0] = 1
    for _ in range(case["slots"]):
        after = np.zeros(automaton.states, object)
        for source, index, target in automaton.edges.tolist():
            after[target] += num_paths[source] * int(automaton.sizes[index])
        num_paths = after
    assert case.get("texts") is None or num_paths[automaton.accept].sum() == case["texts"]


def undecided_logits(case: dict[str, Any]) -> torch.Tensor:
    """Return the logits of a case's undecided positions."""
    return torch.tensor(case["p"], dtype=torch.float64)[[token is None for token in case["canvas"]]].log()


@pytest.mark.parametrize("name", case_names("marginals"))
@replays("name")
def test_recorded_marginals_best_texts_and_samples(name: str) -> None:
    case, expected = CASES[name], CASES[name]["expected"]
    automaton, canvas, size = automaton_of(case), case["canvas"], len(case["vocab"])
    assert len(canvas) == len(case["p"]) == case["slots"]
    padded = torch.nn.functional.pad(undecided_logits(case), (0, 2), value=-torch.inf)
    actual = Marginals(automaton, padded, canvas, 0, automaton.accept)
    assert math.exp(actual.log_z()) == pytest.approx(expected["z"], rel=1e-9)
    undecided = [position for position, token in enumerate(canvas) if token is None]
    marginals = actual.conditioned_logits().softmax(-1)[:, :size]
    expected_marginals = torch.tensor(expected["marginals"], dtype=torch.float64)[undecided]
    torch.testing.assert_close(marginals, expected_marginals, rtol=1e-9, atol=1e-15)
    best = [*canvas]
    for position, token in zip(undecided, actual.best().tolist(), strict=True):
        best[position] = token
    assert best == expected["best"]
    probability = math.prod(case["p"][position][best[position]] for position in undecided)
    assert probability == pytest.approx(expected["best_probability"], rel=1e-9)
    for uniform, text in zip(expected["uniforms"], expected["draws"], strict=True):
        assert actual.sample(np.array(uniform)[undecided]).tolist() == [text[position] for position in undecided]
    fits = passes.possible_classes(automaton, canvas, 0, automaton.accept)
    allowed = [
        sorted(np.concatenate([automaton.members[index] for index in np.flatnonzero(row)]).tolist()) for row in fits
    ]
    assert [allowed[position] for position in undecided] == [expected["allowed"][position] for position in undecided]
    for position, token in enumerate(canvas):  # `allowed` has the whole class of a decided token
        assert token is None or token in allowed[position]
    probabilities, total = distribution(automaton, case["p"], canvas)
    assert total == pytest.approx(expected["z"], rel=1e-9)
    for position in undecided:
        for token in range(size):
            marginal = math.fsum(mass for text, mass in probabilities.items() if text[position] == token)
            assert expected["marginals"][position][token] == pytest.approx(marginal, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", case_names("refused"))
@replays("name")
def test_recorded_lengths_of_accepted_texts(name: str) -> None:
    case, expected = CASES[name], CASES[name]["expected"]
    with_ends, without_ends = automaton_of(case, ends=True), automaton_of(case, ends=False)
    assert len(case["canvas"]) == case["slots"]
    automaton = automaton_of(case)
    assert bool(passes.completions(automaton, case["canvas"], automaton.accept)[0, 0]) == expected["feasible"]
    assert np.flatnonzero(passes.lengths(with_ends, 20))[0] == expected["shortest"]
    assert np.flatnonzero(passes.lengths(without_ends, 7)).tolist() == expected["lengths"]


@pytest.mark.parametrize("name", case_names("marginals"))
def test_sums_for_devices_equal_sums_for_the_host(name: str) -> None:
    automaton, logits = automaton_of(CASES[name]), torch.nn.functional.pad(undecided_logits(CASES[name]), (0, 2))
    logits[0, automaton.runs.tokens[0]] = -torch.inf
    actual = _scattered_sums(automaton.runs, logits.index_select(-1, torch.as_tensor(automaton.runs.tokens)))
    np.testing.assert_allclose(actual, _run_sums(automaton.runs, logits), rtol=1e-12)


def test_marginals_of_classes_with_many_token_ranges() -> None:
    size, draw = 3 * STRETCH + 100, np.random.default_rng(0)
    class_of = draw.integers(0, 4, size)  # tokens of class 3 are in no text
    members = [np.flatnonzero(class_of == index) for index in range(3)]
    edges = np.array([[0, 0, 0], [0, 1, 1], [1, 2, 0], [1, 1, 1]])
    automaton = TokenAutomaton(size, members, edges, np.array([False, True]))
    logits = torch.as_tensor(4 * draw.standard_normal((3, size)))
    actual = Marginals(automaton, logits, [None] * 3, 0, automaton.accept)
    p = logits.softmax(-1).numpy()
    step = np.full((2, size), -1)
    for state, index, target in edges.tolist():
        step[state, members[index]] = target

    def weights(slot: int, state: int, reduce: Any) -> np.ndarray:
        """Return the weights [size] of a slot's tokens times those of all continuations, reduced by max or sum."""
        if slot == 3:
            return automaton.accept[state]
        after = np.array([reduce(weights(slot + 1, target, reduce)) for target in range(2)])
        return np.where(step[state] >= 0, p[slot] * after[step[state]], 0)

    def build_text(choose: Any, reduce: Any) -> list[int]:
        state, tokens = 0, list[int]()
        for slot in range(3):
            tokens.append(int(choose(slot, weights(slot, state, reduce))))
            state = step[state, tokens[-1]]
        return tokens

    assert actual.best().tolist() == build_text(lambda slot, w: w.argmax(), np.max)
    assert math.exp(actual.log_z()) == pytest.approx(weights(0, 0, np.sum).sum(), rel=1e-9)
    for uniform in draw.random((60, 3)):
        chosen = build_text(lambda slot, w: np.searchsorted(w.cumsum(), uniform[slot] * w.sum(), side="right"), np.sum)  # noqa: B023
        assert actual.sample(uniform).tolist() == chosen

"""Recorded automata, constrained marginals, likeliest texts and joint draws."""

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


def same_language(ours: TokenAutomaton, steps: list[list[int]], accept: list[int]) -> bool:
    """Return whether both automata accept the same sequences. Neither has useless states."""
    pairs = [(0, 0)]
    for state, other in pairs:
        if ours.accept[state] != (other in accept):
            return False
        for token, next_state in enumerate(steps[other]):
            our_next = ours.step(state, token)
            if (our_next < 0) != (next_state < 0):
                return False
            if our_next >= 0 and (our_next, next_state) not in pairs:
                pairs.append((our_next, next_state))
    return True


@pytest.mark.parametrize("name", [name for name, case in SETTINGS.items() if "automaton" in case])
@replays("name")
def test_automata(name: str) -> None:
    case = CASES[name]
    ours = automaton_of(case)
    assert same_language(ours, case["automaton"]["step"], case["automaton"]["accept"])
    ways = np.zeros(ours.states, object)
    ways[0] = 1
    for _ in range(case["slots"]):
        after = np.zeros(ours.states, object)
        for source, index, target in ours.edges.tolist():
            after[target] += ways[source] * int(ours.sizes[index])
        ways = after
    assert case.get("texts") is None or ways[ours.accept].sum() == case["texts"]


def table_of(case: dict[str, Any]) -> torch.Tensor:
    """Return the logits of the undecided positions."""
    return torch.tensor(case["p"], dtype=torch.float64)[[token is None for token in case["canvas"]]].log()


@pytest.mark.parametrize("name", case_names("marginals"))
@replays("name")
def test_marginals(name: str) -> None:
    case, expected = CASES[name], CASES[name]["expected"]
    ours, canvas, size = automaton_of(case), case["canvas"], len(case["vocab"])
    assert len(canvas) == len(case["p"]) == case["slots"]
    actual = Marginals(ours, torch.nn.functional.pad(table_of(case), (0, 2), value=-torch.inf), canvas, 0, ours.accept)
    assert math.exp(actual.log_z()) == pytest.approx(expected["z"], rel=1e-9)
    undecided = [at for at, token in enumerate(canvas) if token is None]
    marginals = actual.conditioned_logits().softmax(-1)[:, :size]
    wanted = torch.tensor(expected["marginals"], dtype=torch.float64)[undecided]
    torch.testing.assert_close(marginals, wanted, rtol=1e-9, atol=1e-15)
    best = [*canvas]
    for at, token in zip(undecided, actual.best().tolist(), strict=True):
        best[at] = token
    assert best == expected["best"]
    probability = math.prod(case["p"][at][best[at]] for at in undecided)
    assert probability == pytest.approx(expected["best_probability"], rel=1e-9)
    for uniform, text in zip(expected["uniforms"], expected["draws"], strict=True):
        assert actual.sample(np.array(uniform)[undecided]).tolist() == [text[at] for at in undecided]
    fits = passes.possible_classes(ours, canvas, 0, ours.accept)
    allowed = [sorted(np.concatenate([ours.members[index] for index in np.flatnonzero(row)]).tolist()) for row in fits]
    assert [allowed[at] for at in undecided] == [expected["allowed"][at] for at in undecided]
    for at, token in enumerate(canvas):  # a class may hold more than what is there
        assert token is None or token in allowed[at]
    listed, total = distribution(ours, case["p"], canvas)
    assert total == pytest.approx(expected["z"], rel=1e-9)
    for at in undecided:
        for token in range(size):
            full = math.fsum(mass for text, mass in listed.items() if text[at] == token)
            assert expected["marginals"][at][token] == pytest.approx(full, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("name", case_names("refused"))
@replays("name")
def test_lengths(name: str) -> None:
    case, expected = CASES[name], CASES[name]["expected"]
    with_ends, full = automaton_of(case, ends=True), automaton_of(case, ends=False)
    assert len(case["canvas"]) == case["slots"]
    stated = automaton_of(case)
    assert bool(passes.completions(stated, case["canvas"], stated.accept)[0, 0]) == expected["feasible"]
    assert np.flatnonzero(passes.lengths(with_ends, 20))[0] == expected["shortest"]
    assert np.flatnonzero(passes.lengths(full, 7)).tolist() == expected["lengths"]


@pytest.mark.parametrize("name", case_names("marginals"))
def test_sums_on_a_device_equal_those_of_the_host(name: str) -> None:
    ours, logits = automaton_of(CASES[name]), torch.nn.functional.pad(table_of(CASES[name]), (0, 2))
    logits[0, ours.runs.tokens[0]] = -torch.inf
    actual = _scattered_sums(ours.runs, logits.index_select(-1, torch.as_tensor(ours.runs.tokens)))
    np.testing.assert_allclose(actual, _run_sums(ours.runs, logits), rtol=1e-12)


def test_marginals_over_several_token_ranges() -> None:
    size, draw = 3 * STRETCH + 100, np.random.default_rng(0)
    owner = draw.integers(0, 4, size)  # class 3: tokens that no text has
    members = [np.flatnonzero(owner == index) for index in range(3)]
    edges = np.array([[0, 0, 0], [0, 1, 1], [1, 2, 0], [1, 1, 1]])
    automaton = TokenAutomaton(size, members, edges, np.array([False, True]))
    logits = torch.as_tensor(4 * draw.standard_normal((3, size)))
    actual = Marginals(automaton, logits, [None] * 3, 0, automaton.accept)
    p = logits.softmax(-1).numpy()
    step = np.full((2, size), -1)
    for state, index, target in edges.tolist():
        step[state, members[index]] = target

    def weights(slot: int, state: int, among: Any) -> np.ndarray:
        """Return the weights [V] of a slot's tokens, including all continuations."""
        if slot == 3:
            return automaton.accept[state]
        after = np.array([among(weights(slot + 1, to, among)) for to in range(2)])
        return np.where(step[state] >= 0, p[slot] * after[step[state]], 0)

    def text(choose: Any, among: Any) -> list[int]:
        state, tokens = 0, list[int]()
        for slot in range(3):
            tokens.append(int(choose(slot, weights(slot, state, among))))
            state = step[state, tokens[-1]]
        return tokens

    assert actual.best().tolist() == text(lambda slot, w: w.argmax(), np.max)
    assert math.exp(actual.log_z()) == pytest.approx(weights(0, 0, np.sum).sum(), rel=1e-9)
    for uniform in draw.random((60, 3)):
        chosen = text(lambda slot, w: np.searchsorted(w.cumsum(), uniform[slot] * w.sum(), side="right"), np.sum)  # noqa: B023
        assert actual.sample(uniform).tolist() == chosen

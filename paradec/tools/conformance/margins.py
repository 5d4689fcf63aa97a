"""How near a decision of the published code was to its tie, so that a difference can be told from rounding.

Nothing of it was recorded. This library's replay of a case is equal to the recording step by step, so that its scores,
in float64, are those that the recorded decisions were made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paradec.tools.conformance.cases import Case
from paradec.tools.conformance.compare import Difference
from paradec.tools.conformance.targets import Ours
from paradec.tools.conformance.traces import changes

Scores = dict[int, float]


def margin(ours: Ours, case: Case, asked: Mapping[str, Any], difference: Difference) -> float | None:
    """How much the scores would have to change for the found decision, in the method's own measure (probabilities, or
    entropies in nats); where only answers were compared, the smallest such change in any decision of the row until the
    position that differs. None where that cannot be said: random draws, or a rule without a number to be near to.

    Args:
        case: its row alone, where it is one of several. asked: the request of it.
    """
    if case.tie is not None or case.distribution is not None or case.asked.draws != "none" or not case.expected:
        return None
    model, arguments = ours.model(asked), ours.arguments(asked)
    sampler = arguments.pop("sampler")
    row, compared = difference.row, case.expected[difference.row].compared
    prompts = [list(prompt) for prompt in asked["prompts"]]
    state = sampler.start(model, prompts, **arguments)
    number, smallest = 0, None
    while not state.done:
        queries = sampler.query(state)
        outputs = [model(query) if state.store is None else model(query, state.store) for query in queries]
        proposal = sampler.propose(state, outputs, queries)
        before = state.canvas[row].tolist()
        commit = sampler.commit(state, proposal)
        written = changes([[entry[:3] for entry in commit.to_list()]], row, before, compared)
        if not written:
            continue
        scores = _scores(proposal, row, before, asked["mask_id"])
        tokens = _tokens(outputs, queries, proposal, row)
        if difference.step is None:
            here = _of_decision(scores, set(written[0]), asked["settings"])
            gaps = [tokens[at][0] for at in written[0] if at in tokens]
            smallest = min((value for value in (smallest, here, *gaps) if value is not None), default=None)
            if difference.position in written[0]:
                return smallest
        elif number == difference.step:
            return _of_difference(scores, tokens, *difference.also[0], asked["settings"])
        number += 1
    return smallest


def _scores(proposal: Any, row: int, canvas: list[int], mask: int) -> Scores:
    """The scores of a row's positions that could have become final."""
    index = proposal.rows.tolist().index(row)
    positions, scores = proposal.positions[index].tolist(), proposal.scores[index].tolist()
    available = proposal.available[index].tolist()
    return {
        at: score
        for at, score, there in zip(positions, scores, available, strict=True)
        if there and at < len(canvas) and canvas[at] == mask
    }


def _tokens(outputs: list[Any], queries: list[Any], proposal: Any, row: int) -> dict[int, tuple[float, Any]]:
    """By position: how much likelier the best token is than the next one, and all probabilities [V]. Empty where the
    call's logits are not those that were decided on (guidance), or are of other columns than the proposal's."""
    found: dict[int, tuple[float, Any]] = {}
    for query, logits in zip(queries, outputs, strict=True):
        if row not in query.rows.tolist() or query.branches != 1 or query.window.columns is not None:
            continue
        index, mine = query.rows.tolist().index(row), proposal.rows.tolist().index(row)
        if logits.shape[1] != proposal.positions.shape[1]:
            continue
        for at, values in zip(proposal.positions[mine].tolist(), logits[index].double().softmax(-1), strict=True):
            best = values.topk(2).values
            found[at] = (float(best[0] - best[1]), values)
    return found


def _of_decision(scores: Scores, written: set[int], settings: Mapping[str, Any]) -> float | None:
    """The least change of scores that would have chosen other positions."""
    chosen = [score for at, score in scores.items() if at in written]
    left = [score for at, score in scores.items() if at not in written]
    found = [abs(min(chosen) - max(left))] if chosen and left else []
    found += [abs(score - value) for score in scores.values() for value in _thresholds(settings)]
    return min(found, default=None)


def _of_difference(
    scores: Scores,
    tokens: Mapping[int, tuple[float, Any]],
    expected: Mapping[int, int],
    found: Mapping[int, int],
    settings: Mapping[str, Any],
) -> float | None:
    """The least change of scores and probabilities that makes `found` of `expected`; both are tokens by position."""
    needed: list[float] = []
    for at in expected.keys() & found.keys():
        if expected[at] != found[at]:
            if at not in tokens or not 0 <= found[at] < len(tokens[at][1]):
                return None
            needed.append(abs(float(tokens[at][1][expected[at]] - tokens[at][1][found[at]])))
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    if any(at not in scores for at in missing | extra):
        return None  # it was decided already, or not evaluated
    if missing and extra:
        needed.append(max(scores[at] for at in missing) - min(scores[at] for at in extra))
    elif missing or extra:
        thresholds = _thresholds(settings)
        if not thresholds:
            return None
        needed += [min(abs(scores[at] - value) for value in thresholds) for at in missing | extra]
    return max((abs(value) for value in needed), default=None)


def _thresholds(settings: Mapping[str, Any]) -> list[float]:
    return [
        float(value)
        for name, value in settings.items()
        if "threshold" in name and isinstance(value, (int, float)) and not torch.tensor(value).isinf()
    ]

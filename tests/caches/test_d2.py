"""d2Cache: evaluated positions compared with a plain loop, and replays of the public code's traces.

The recorded sets of evaluated positions differ from paradec's in three points:
1. they include positions from attention rollout;
2. masks are ranked by the first step's confidence;
3. the length of blocks is the number of masks that are left (`RecordedPositions.block_ends`).
So traces are replayed with the recorded sets, and every call must commit the same tokens. With points 2 and 3 imitated,
the recorded sets must contain the last step's tokens and the masks of the open block that paradec selects.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from oracles.masked import d2_positions
from small_models import MASK, tiny
from traces import (
    Forward,
    assert_confidences,
    decode_forwards,
    load_trace,
    mark_others_full,
    model_of,
    peek_trace,
    recorded_forwards,
    replay_case,
    select_cases,
    some_or_all,
    trace_names,
)

import paradec
from paradec import Suffix, caches, samplers
from paradec.caches.d2 import D2Cache, decided_density
from paradec.samplers.masked.rules.low_confidence import LowConfidence

pytestmark = pytest.mark.filterwarnings("ignore:cache=")

ROWS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11, 12, 13], [14]]
NEW = 20
REQUEST = {"max_new_tokens": NEW, "block_length": 5, "eos_early_stop": False, "seed": 3}
PRIORS = [name for name in trace_names("d2cache") if "prior_sigma" in peek_trace(name)["settings"]]
NAMES = [name for name in trace_names("d2cache") if name not in PRIORS]


@pytest.mark.parametrize("prediction", ["same", "shifted"])
@pytest.mark.parametrize(("k", "sigma", "w"), [(3, 10.0, 4), (7, 2.0, 0)])
def test_every_step_evaluates_the_positions_of_the_rule(prediction: str, k: int, sigma: float, w: int) -> None:
    model, sampler = tiny(2, prediction=prediction), samplers.create("threshold", threshold=0.4)
    cache = caches.create("d2", current_k=k, sigma=sigma, inflate_w=w)
    state = sampler.start(model, ROWS, cache=cache, **REQUEST)
    confidences: list[dict[int, float]] = [{} for _ in ROWS]
    last: list[set[int]] = [set() for _ in ROWS]
    while not state.done:
        proposal = sampler.step(model, state)
        evaluated = {}
        for query in proposal.cost.queries:
            for row, positions in zip(query.rows.tolist(), query.positions.tolist(), strict=True):
                evaluated[row] = set(positions)
        for index, row in enumerate(proposal.rows.tolist()):
            if state.row_step[row] == 0:
                assert len(evaluated[row]) == state.length[row]
            else:
                assert evaluated[row] == d2_positions(state, row, confidences[row], last[row], k, sigma, w)
            for column in proposal.available[index].nonzero().flatten().tolist():
                position = int(proposal.positions[index, column])
                confidences[row][position] = float(proposal.quantities["confidence"][index, column])
        commit = sampler.commit(state, proposal)
        for index, row in enumerate(commit.rows.tolist()):
            last[row] = set(commit.positions[index][commit.selected[index]].tolist())


class AllPositions(D2Cache):
    """A d2Cache that evaluates all positions."""

    name: ClassVar[str] = "all_positions"

    def positions_to_evaluate(self, state: Any, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        return np.ones((len(rows), state.canvas.shape[1]), bool) | super().positions_to_evaluate(state, rows, picks)


@pytest.mark.thinned
@pytest.mark.parametrize("suffix", [None, Suffix(6, "gaussian")], ids=str)
@pytest.mark.parametrize("prediction", ["same", "shifted"])
def test_evaluating_all_positions_equals_no_cache(prediction: str, suffix: Suffix | None) -> None:
    model = tiny(3, prediction=prediction)
    request = REQUEST | {"sampler": "low_confidence", "suffix": suffix, "temperature": 0.3}
    cached = paradec.generate(model, ROWS, cache=AllPositions(), **request)
    plain = paradec.generate(model, ROWS, cache="none", **request)
    assert torch.equal(cached.sequences, plain.sequences)
    assert cached.cost.forwarded_tokens == plain.cost.forwarded_tokens


def test_a_schedule_takes_more_steps_if_too_few_positions_are_evaluated() -> None:
    model = tiny(1)
    request = REQUEST | {"sampler": "low_confidence", "steps": 4, "cache": caches.create("d2", current_k=3)}
    out = paradec.generate(model, ROWS, **request)
    # the first step commits 5 tokens, then each of the other three blocks takes steps of 3 and 2
    assert out.row_nfe == [7] * 3 and not (out.sequences[:, -NEW:] == MASK).any()


@dataclass(frozen=True)
class RecordedPositions(D2Cache):
    """Evaluate the recorded positions. `chosen` collects paradec's sets, with differences 2 and 3 imitated."""

    forwards: tuple[Forward, ...] = ()
    chosen: Any = None

    def observe_confidence(self, state: Any, confidence: np.ndarray, available: np.ndarray) -> None:
        if state.row_step[0] == 0:
            super().observe_confidence(state, confidence, available)

    def block_ends(self, state: Any, rows: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Imitate the public loop, in which the length of blocks is the number of masks before the last step."""
        log, prompt = state.cache_state, int(state.prompt_length[0])
        new = log.changed_at[0] == state.row_step[0] - 1
        column = np.arange(len(new)) - prompt
        size = int(state.block_end[0] - state.block_start[0])
        masks = (log.undecided(rows)[0] | new) & (column // size == column[new].min() // size)
        return prompt + ((last - prompt) // masks.sum() + 1) * masks.sum()

    def positions_to_evaluate(self, state: Any, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        log, shift, step = state.cache_state, state.facts.shift, int(state.row_step[0])
        masks = self.choose_masks(state, rows)[0] & (np.arange(state.canvas.shape[1]) < state.block_end[0])
        new = np.flatnonzero(log.changed_at[0] == step - 1)
        self.chosen.append({*(np.flatnonzero(masks) - shift).tolist(), *new.tolist()})
        evaluated = np.zeros((1, state.canvas.shape[1]), bool)
        evaluated[0, list(self.forwards[step].positions)] = True
        return evaluated


@pytest.mark.parametrize("numbers", some_or_all(2))
@pytest.mark.parametrize("name", mark_others_full(NAMES))
def test_public_traces(name: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings = trace["settings"]
    sampler: Any = samplers.create("low_confidence")
    if settings["threshold"] is not None:
        sampler = samplers.create("threshold", threshold=settings["threshold"])
    model = model_of(trace)
    for label, case in select_cases(trace, numbers):
        pairs: list[Any] = []
        with replay_case(trace, label, case, pairs):
            recorded, chosen_sets = recorded_forwards(case), list[set[int]]()
            names = ("current_k", "sigma", "inflate_w")
            cache = RecordedPositions(
                **{name: settings[name] for name in names}, forwards=tuple(recorded), chosen=chosen_sets
            )
            ours, tokens = decode_forwards(model, sampler, case, cache=cache, block_length=settings["block_length"])
            pairs += zip(ours, recorded, strict=False)
            assert ours == recorded and tokens == case["final_ids"][0]
            for call, chosen in zip(recorded[1:], chosen_sets, strict=True):
                assert chosen <= call.positions and chosen
            assert_confidences(ours, recorded)


@dataclass(frozen=True)
class ConfidenceTimesDensity(LowConfidence):
    """Rank by confidence times the answer's certainty density, which the public code calls a prior."""

    sigma: float = 10.0

    def ranking_scores(self, state: Any, tokens: torch.Tensor, quantities: Any) -> torch.Tensor:
        answer = state.canvas[:, int(state.prompt_length[0]) :] != state.mask_id
        density = torch.as_tensor(decided_density(answer.numpy(), self.sigma))
        return super().ranking_scores(state, tokens, quantities) * density


@pytest.mark.parametrize("numbers", some_or_all(2, 3))
@pytest.mark.parametrize("name", PRIORS)
def test_density_as_a_prior(name: str, numbers: tuple[int, ...] | None) -> None:
    trace = load_trace(name)
    settings = trace["settings"]
    model, sampler = model_of(trace), ConfidenceTimesDensity(sigma=settings["prior_sigma"])
    for label, case in select_cases(trace, numbers):
        pairs: list[Any] = []
        with replay_case(trace, label, case, pairs):
            recorded = recorded_forwards(case)
            ours, tokens = decode_forwards(model, sampler, case, block_length=settings["block_length"])
            pairs += zip(ours, recorded, strict=False)
            assert ours == recorded and tokens == case["final_ids"][0]

"""`logprobs`: log-probabilities of each final token and of the likeliest tokens, at the step that decided it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import fits, topology_of
from small_models import END, MASK, VOCAB, tiny
from torch import Tensor

import paradec
from paradec import samplers
from paradec.core.logprobs import StepLogProbs
from paradec.core.trace import Trace
from paradec.models.adapter import Model

ROWS = [[3, 5, 7, 9, 11], [2], [20, 21, 22]]
MASKED = [sampler for sampler in map(samplers.get, samplers.names()) if sampler.family == "masked"]
SEPARATE = ("freedave", "learn2pd", "lopa")
WITH_LOGPROBS = [
    s.name for s in MASKED if "text" in s.models and not (s.name in SEPARATE or "logprobs" in s.unsupported)
]
NEW = 12


@pytest.fixture(scope="module")
def masked() -> Model:
    return tiny(2)


@pytest.fixture(scope="module")
def causal() -> Model:
    return paradec.wrap(tiny(2).unwrap(), topology="causal", prediction="shifted", eos_token_id=END)


@pytest.fixture(scope="module")
def drafter() -> Model:
    return paradec.wrap(tiny(1, seed=1).unwrap(), topology="causal", prediction="shifted")


def causal_sampler(name: str, drafter: Model) -> Any:
    if name == "tree":
        return samplers.create("speculative", drafter=drafter, tree=(2, 2, 1))
    if name == "dynamic":
        from paradec.samplers.causal.trees import DynamicTree

        return samplers.create("speculative", drafter=drafter, tree=DynamicTree(8, 3, 3), rule="naive")
    return samplers.create(name, **({"drafter": drafter, "window": 4} if name == "speculative" else {"window": 4}))


def decode_and_record(sampler: Any, model: Model, scale: float = 1.0, **request: Any) -> tuple[Any, dict[Any, Any]]:
    """Decode. Return the state, and for each (row, position) the token, its log-probability, the three likeliest
    tokens, their log-probabilities, and the step that decided the token."""
    state = sampler.start(model, ROWS, max_new_tokens=NEW, logprobs=3, **request)
    expected: dict[tuple[int, int], Any] = {}
    with torch.inference_mode():
        while not state.done:
            queries, steps = sampler.query(state), state.row_step.copy()
            outputs = [model(query) if state.store is None else model(query, state.store) for query in queries]
            saved = [output.clone() for output in outputs]
            positions = state.window.positions.clone()
            for row, position, token, _ in sampler.commit(state, sampler.propose(state, outputs, queries)).to_list():
                if token == MASK:
                    expected.pop((row, position), None)
                    continue
                log_p = log_softmax_at(saved, queries, positions, row, position, scale)
                best = log_p.argsort(descending=True)[:3]
                expected[row, position] = token, float(log_p[token]), best.tolist(), log_p[best].tolist(), steps[row]
    return state, expected


def log_softmax_at(
    outputs: list[Tensor], queries: list[Any], positions: Tensor, row: int, position: int, scale: float
) -> Tensor:
    """Return the log-probabilities [V] of a position, with a plain softmax of the logits of the row's query."""
    for logits, query in zip(outputs, queries, strict=True):
        if row not in query.rows.tolist():
            continue
        index = query.rows.tolist().index(row)
        column = positions[query.window.index[index]].tolist().index(position)
        line = logits[index, column].clone()
        if scale != 1:
            line = logits[len(query.rows) + index, column] + scale * (line - logits[len(query.rows) + index, column])
        line[MASK] = -torch.inf
        return torch.log(torch.exp(line - line.max()) / torch.exp(line - line.max()).sum())
    raise AssertionError("a position was committed but not evaluated")


def assert_expected_logprobs(state: Any, expected: dict[tuple[int, int], Any]) -> None:
    logprobs = state.logprobs
    for row in range(state.batch):
        for position in range(state.canvas.shape[1]):
            if (row, position) not in expected:
                assert logprobs.chosen[row, position].isnan() and logprobs.step[row, position] == -1
                continue
            token, expected_logp, ids, values, step = expected[row, position]
            assert state.canvas[row, position] == token or position >= state.end[row]
            assert float(logprobs.chosen[row, position]) == pytest.approx(expected_logp, abs=1e-9)
            assert logprobs.best[row, position].tolist() == pytest.approx(values, abs=1e-9)
            assert logprobs.best_tokens[row, position].tolist() == ids
            assert logprobs.step[row, position] == step


@pytest.mark.thinned
@pytest.mark.parametrize("name", WITH_LOGPROBS)
def test_masked_logprobs_are_a_softmax_at_the_deciding_step(masked: Model, name: str) -> None:
    sampler = samplers.create(name)
    request: dict[str, Any] = {"temperature": 0.8, "seed": 1, "eos_early_stop": False, "block_length": 4}
    if name == "adablock":
        request.pop("block_length")
    model = masked if fits(name, masked) else tiny(2, topology_of(name))
    state, expected = decode_and_record(sampler, model, **request)
    assert len(expected) == state.total.sum() >= NEW * len(ROWS)
    assert_expected_logprobs(state, expected)


def test_masked_logprobs_with_guidance_and_with_a_cache(masked: Model) -> None:
    sampler = samplers.create("threshold", threshold=0.3)
    state, expected = decode_and_record(sampler, masked, 2.0, guidance_scale=2.0, block_length=4)
    assert_expected_logprobs(state, expected)
    state, expected = decode_and_record(sampler, masked, cache="dual", block_length=4)
    assert_expected_logprobs(state, expected)


def test_logprobs_of_an_edited_token_are_those_of_its_last_edit(masked: Model) -> None:
    sampler = samplers.create("editing", threshold=0.1, editing_threshold=0.0)
    state, expected = decode_and_record(sampler, masked, block_length=6, trace=True)
    assert_expected_logprobs(state, expected)
    trace = paradec.generate(masked, ROWS, sampler=sampler, max_new_tokens=NEW, block_length=6, trace=True).trace
    assert trace is not None
    assert max(Counter(commit[:2] for step in trace.steps for commit in step.commits).values()) > 1


def test_freedave_has_the_logprobs_of_its_base(masked: Model) -> None:
    request: dict[str, Any] = {"max_new_tokens": NEW, "block_length": 6, "temperature": 0.0, "seed": 3, "logprobs": 2}
    base = paradec.generate(masked, ROWS, sampler="low_confidence", **request)
    freedave = samplers.create("freedave", base="low_confidence", draft_steps=3)
    out = paradec.generate(masked, ROWS, sampler=freedave, **request, trace=True)
    assert out.nfe < base.nfe and torch.equal(out.new_tokens, base.new_tokens)
    for name, tolerance in (("chosen", 1e-9), ("best", 1e-9), ("best_tokens", 0), ("step", 0)):
        actual, expected = getattr(out.logprobs, name), getattr(base.logprobs, name)
        torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=tolerance)


def test_infill_returns_logprobs_of_filled_tokens(masked: Model) -> None:
    output = paradec.infill(masked, [[3, MASK, 5, MASK, MASK, 8], [MASK, 9]], logprobs=1)
    logprobs = output.logprobs
    assert logprobs is not None and logprobs.chosen.shape == output.sequences.shape
    assert torch.equal(~logprobs.chosen.isnan(), output.filled)
    assert torch.equal(logprobs.step >= 0, output.filled)
    assert (logprobs.best_tokens[..., 0][output.filled] == output.sequences[output.filled]).all()
    assert (logprobs.best[..., 0][output.filled] == logprobs.chosen[output.filled]).all()


def test_logprobs_do_not_depend_on_the_batch(masked: Model) -> None:
    request: dict[str, Any] = {"max_new_tokens": NEW, "logprobs": 2, "block_length": 4, "eos_early_stop": False}
    batch = paradec.generate(masked, ROWS, **request)
    assert batch.logprobs is not None
    for index, row in enumerate(ROWS):
        expected = paradec.generate(masked, [row], **request).logprobs
        chosen, total = batch.logprobs.chosen[index, -NEW:], batch.logprobs.sums()[index]
        torch.testing.assert_close(chosen, expected.chosen[0, -NEW:], rtol=0, atol=1e-9)
        torch.testing.assert_close(total, expected.sums()[0], rtol=0, atol=1e-9)


def answer_log_p(model: Model, row: list[int], answer: list[int], temperature: float, top_k: int | None) -> Tensor:
    """Return the log-probabilities [N, V] at every answer token, from one forward of the module."""
    with torch.inference_mode():
        logits = model.module(torch.tensor([row + answer])).logits[0, len(row) - 1 : -1].double()
    logits = logits / (temperature or 1)
    if top_k is not None and temperature:
        logits = torch.where(logits < logits.sort(descending=True).values[:, top_k - 1 : top_k], -torch.inf, logits)
    return torch.log(torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True))


@pytest.mark.thinned
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, None), (1.0, None), (0.7, 5)])
@pytest.mark.parametrize("name", ["sjd", "scd", "sjd_pac", "jacobi", "gsd", "speculative", "tree", "dynamic"])
def test_causal_logprobs_are_those_of_the_verified_distribution(
    causal: Model, drafter: Model, name: str, temperature: float, top_k: int | None
) -> None:
    request = {"sampler": causal_sampler(name, drafter), "temperature": temperature, "top_k": top_k, "seed": 2}
    output = paradec.generate(causal, ROWS, max_new_tokens=NEW, logprobs=3, **request)
    logprobs = output.logprobs
    assert logprobs is not None
    for index, row in enumerate(ROWS):
        answer = output.new_tokens[index, : output.tokens[index]].tolist()
        log_p = answer_log_p(causal, row, answer, temperature, top_k)
        columns = torch.arange(len(answer)) + logprobs.chosen.shape[1] - NEW
        expected_logp = log_p[torch.arange(len(answer)), torch.tensor(answer)]
        torch.testing.assert_close(logprobs.chosen[index, columns], expected_logp, rtol=0, atol=1e-9)
        torch.testing.assert_close(logprobs.sums()[index], expected_logp.sum(), rtol=0, atol=1e-9)
        best = log_p.sort(descending=True)
        torch.testing.assert_close(logprobs.best[index, columns], best.values[:, :3], rtol=0, atol=1e-9)
        assert torch.equal(logprobs.best_tokens[index, columns], best.indices[:, :3])
        assert logprobs.chosen[index].isfinite().sum() == len(answer)
        steps = logprobs.step[index, columns]
        assert (steps.diff() >= 0).all() and steps[0] == 0 and steps[-1] < output.row_nfe[index]


def test_traces_are_saved_with_and_without_logprobs(masked: Model, tmp_path: Path) -> None:
    sampler = samplers.create("wino", threshold=0.05, threshold_back=0.9)
    output = paradec.generate(masked, ROWS, sampler=sampler, max_new_tokens=NEW, logprobs=2, trace=True, block_length=6)
    assert output.recorded_trace is not None and output.logprobs is not None
    output.trace.to_json(tmp_path / "trace.json")
    loaded = Trace.from_json(tmp_path / "trace.json")
    assert loaded.steps == output.trace.steps
    last: dict[tuple[int, int], Any] = {}
    for step in loaded.steps:
        assert step.logprobs is not None
        for (row, position, token, _), entry in zip(step.commits, step.logprobs, strict=True):
            last[row, position] = entry
            if token == MASK:
                assert entry == [None, [[-1, None], [-1, None]]]
    width = output.sequences.shape[1]
    for row, prompt in enumerate(ROWS):
        for position in range(len(prompt), len(prompt) + output.tokens[row]):
            column = position + width - len(prompt) - NEW
            expected_logp, best = last[row, position]
            assert expected_logp == float(output.logprobs.chosen[row, column])
            assert [token for token, _ in best] == output.logprobs.best_tokens[row, column].tolist()
    plain = paradec.generate(masked, ROWS, sampler=sampler, max_new_tokens=NEW, trace=True, block_length=6)
    assert plain.logprobs is None and plain.recorded_trace is not None
    text = plain.trace.to_json()
    assert "logprobs" not in text and Trace.from_json(text).steps == plain.trace.steps
    assert [step.commits for step in plain.trace.steps] == [step.commits for step in loaded.steps]
    json.loads(output.trace.to_json(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_logprobs_change_no_other_output(masked: Model, causal: Model) -> None:
    for model, sampler in ((masked, "threshold"), (causal, "sjd")):
        request: dict[str, Any] = {"sampler": sampler, "max_new_tokens": NEW, "temperature": 0.9, "seed": 4}
        without = paradec.generate(model, ROWS, **request)
        for count in (0, 4):
            out = paradec.generate(model, ROWS, **request, logprobs=count)
            assert torch.equal(out.sequences, without.sequences) and out.row_nfe == without.row_nfe
            assert out.logprobs.best.shape == (*out.sequences.shape, count)


@pytest.mark.parametrize("value", [-1, VOCAB + 1])
def test_wrong_counts_are_refused(masked: Model, causal: Model, value: Any) -> None:
    for model, sampler in ((masked, "threshold"), (causal, "sjd")):
        with pytest.raises(ValueError, match=f"logprobs={value!r} must be an integer"):
            paradec.generate(model, ROWS, sampler=sampler, max_new_tokens=4, logprobs=value)


def test_padding_after_an_end_token_has_no_logprobs() -> None:
    facts = {"mask_token_id": MASK, "eos_token_id": [*range(20)], "prediction": "same", "topology": "bidirectional"}
    model = paradec.wrap(tiny(2).unwrap(), **facts)
    output = paradec.generate(model, ROWS, max_new_tokens=NEW, logprobs=2, sampler="low_confidence")
    assert any(output.finished) and output.logprobs is not None
    assert output.logprobs.chosen.isfinite().sum(1).tolist() == output.tokens
    assert np.isfinite(output.logprobs.sums().numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_likeliest_of_a_large_vocabulary(dtype: torch.dtype) -> None:
    logits = torch.randn(2, 6, 9001, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    logits[0, 0, -3:] = torch.tensor([30.0, 29.0, 28.0], dtype=dtype)
    logits[0, 1, 500:504] = 40.0 + torch.arange(4)
    logits[0, 2] = torch.where(torch.arange(9001) % 1500 == 7, logits[0, 2], -torch.inf)
    log_p = logits.double().log_softmax(-1)
    tokens = torch.randint(9001, (2, 6), generator=torch.Generator().manual_seed(1))
    tokens[0, 2] = 7
    chosen = log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    for probability in (None, chosen.exp()):
        logprobs = StepLogProbs.from_logits(logits, tokens, 6, probability)
        best = log_p.topk(6)
        assert torch.equal(logprobs.best_tokens, best.indices)
        torch.testing.assert_close(logprobs.best, best.values, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(logprobs.chosen, chosen, rtol=1e-6, atol=1e-6)

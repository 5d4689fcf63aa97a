"""Rules that end a chain of drafts: which drafts are made and verified, that answers stay exact, refusals."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from eagle_drafters import PROMPTS, answers
from jacobi_runs import TableModel, exactness
from places import GOLDEN
from torch import Tensor

import paradec
from paradec.samplers.causal.drafts.stopping import Unconfident, Unsure
from paradec.samplers.causal.sjd import SJD
from paradec.samplers.causal.speculative import Speculative

MODEL = TableModel.random(5, seed=0)
DRAFTER = TableModel.random(5, seed=1, near=MODEL)
RECORDED = GOLDEN / "drafters" / "drafters"


def low_tokens(q: Tensor, drafts: Tensor) -> Tensor:
    """Depends on the draft itself, which is verified all the same."""
    return drafts[:, -1] >= 2


RULES = [Unsure(0.5), Unsure(0.6, product=True, least=2), low_tokens]


@pytest.mark.parametrize("rule", RULES)
def test_answers_have_the_model_s_distribution(rule: Any) -> None:
    found = exactness.test_case(Speculative(drafter=DRAFTER, window=5, stop=rule), MODEL, 3000, seed=2, new=5)
    assert min(found["p_values"]) > 0.01 / 6 and found["nfe"] < 4.5


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("rule", RULES)
def test_twenty_thousand_answers_have_the_model_s_distribution(rule: Any, temperature: float) -> None:
    sampler = Speculative(drafter=DRAFTER, window=4, stop=rule)
    found = exactness.test_case(sampler, MODEL, 20_000, seed=9, temperature=temperature)
    assert min(found["p_values"]) > 0.01 / 12


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("rule", RULES)
def test_windows_end_after_the_draft_that_the_rule_names(rule: Any, temperature: float) -> None:
    method, width = Speculative(drafter=DRAFTER, window=6, stop=rule), 6
    state = method.start(MODEL, [[2, 0], [4, 1, 3], [1]], max_new_tokens=17, seed=5, temperature=temperature)
    lengths, before, stale = set(), np.zeros(3, np.int64), np.array([True] * 3)
    while not state.done:
        for row in state.rows.tolist():
            slots = min(width, int(state.length[row] - state.committed[row]))
            text, expected = state.canvas[row, : state.committed[row]].tolist(), 0
            drafts, q = state.memory["drafts"][row], []
            for slot in range(slots - 1):
                last = [5, *text][-2], text[-1]
                q.append((DRAFTER.table[last] / (temperature or 1)).softmax(-1))
                text.append(int(drafts[slot]))
                expected = slot + 1
                if rule(torch.stack(q).unsqueeze(0), drafts[:expected].unsqueeze(0)):
                    break
            if slots > 1:
                assert state.drafted[row] == expected
                lengths.add(expected)
                assert state.draft_nfe[row] - before[row] == expected or not stale[row]
        stale, before = np.isin(np.arange(3), state.rows), state.draft_nfe.copy()
        proposal = method.step(MODEL, state)
        evaluated = np.minimum(state.slots(state.rows), 1 + state.drafted[state.rows])
        assert proposal.available.sum(1).tolist() == evaluated.tolist()
        method.commit(state, proposal)
    assert len(lengths) > 1


@pytest.mark.parametrize("name", ["eagle3-original", "dflash2-zlab", "dspark-vanilla"])
def test_drafters_of_hidden_states(name: str) -> None:
    pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="needs transformers 5.23")
    base = paradec.load(RECORDED / "base", dtype=torch.float64)
    drafter = paradec.load_drafter(RECORDED / name, base=base)
    given = {"max_new_tokens": 12, "temperature": 0, "seed": 1}
    expected, _ = answers(SJD(window=1), base, PROMPTS, **given)
    whole = answers(Speculative(drafter=drafter), base, PROMPTS, **given)[1]
    found, state = answers(Speculative(drafter=drafter, stop=low_tokens), base, PROMPTS, **given)
    assert found == expected and state.forwarded_tokens.sum() < whole.forwarded_tokens.sum()


def test_a_recorded_confidence_ends_the_window() -> None:
    pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="needs transformers 5.23")
    from safetensors.torch import load_file

    cases = json.loads((RECORDED / "cases.json").read_text())
    tensors = load_file(RECORDED / "cases.safetensors")
    base = paradec.load(RECORDED / "base", dtype=torch.float64)
    seen = 0
    for key, case in cases.items():
        if f"{key}/confidence_logit" not in tensors or case["temperature"] != 0:
            continue
        drafter = paradec.load_drafter(RECORDED / case["drafter"], base=base)
        confidence = tensors[f"{key}/confidence_logit"].double().sigmoid()
        for threshold in (0.0, float(confidence[1:].median()) + 1e-4, float(confidence[1:].min()) + 1e-4):
            method, ids = Speculative(drafter=drafter, stop=Unconfident(threshold)), tensors["ids"].tolist()
            prompt = ids[: case["anchor"]]
            state = method.start(base, [prompt], max_new_tokens=20, temperature=0)
            proposal = method.step(base, state)
            state.ends = state.ends[:0]
            proposal.values[0, 0] = ids[case["anchor"]]  # the recorded token follows, whatever the model says
            proposal.quantities["p"][0, 0] = torch.nn.functional.one_hot(proposal.values[0, 0], 64)
            method.commit(state, proposal)
            assert state.memory["drafts"][0, : len(case["drafts"])].tolist() == case["drafts"]
            expected = 1 + int((confidence[1:] >= threshold).long().cumprod(0).sum())
            assert state.drafted[0] == expected
            seen += 1 < expected < len(confidence)
    assert seen


def test_settings_travel() -> None:
    for rule in (Unsure(0.3, product=True), Unsure()):
        method = Speculative(drafter="prompt_lookup") if rule is None else Speculative(drafter=DRAFTER, stop=rule)
        assert method.to_dict()["stop"] == rule.to_dict()
        assert Speculative(drafter=DRAFTER, stop=rule.to_dict()) == method
    assert Speculative(drafter=DRAFTER, stop="unsure").stop == Unsure()
    assert Speculative(drafter=DRAFTER, stop=low_tokens).to_dict()["stop"] == "low_tokens"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop": 3}, "stop=3 must be a callable of q and drafts, or 'unsure' or 'unconfident'"),
        ({"stop": {"stop": "unsure", "size": 3}}, "unexpected keyword argument 'size'"),
        ({"stop": "unsure", "tree": (2, 1)}, "is for chains that a model drafts, not for tree=(2, 1)"),
        ({"stop": "unsure", "drafter": "prompt_lookup"}, "not for drafter='prompt_lookup'"),
        ({"stop": "unconfident"}, "needs a drafter with a confidence head (DSpark's); table has none"),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Speculative(**{"drafter": DRAFTER} | settings)


@pytest.mark.parametrize("answer", [True, torch.zeros(2), torch.zeros(1, 1, dtype=torch.bool)])
def test_a_rule_that_answers_something_else_is_refused(answer: Any) -> None:
    method = Speculative(drafter=DRAFTER, stop=lambda q, drafts: answer)
    with pytest.raises(ValueError, match=re.escape("it must return [R] bool, R=1")):
        method.start(MODEL, [[1, 2]], max_new_tokens=6)

"""Constraints on causal models: recorded runs, the distribution of masked token-by-token decoding, and refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from recorded import replay, replays
from small_models import tiny_llama, wrap_causal
from structured import (
    CASES,
    KINDS,
    VOCAB,
    assert_drawn,
    automaton_of,
    causal_model_of,
    lettered,
    masked_distribution,
    named,
)

import paradec
from paradec import samplers
from paradec.models.adapter import Model
from paradec.samplers.causal.trees import DynamicTree

CHAINS: dict[str, dict[str, Any]] = {
    "sjd": {"window": 4},
    "one by one": {"sampler": "sjd", "window": 1},
    "jacobi": {"window": 3},
    "scd": {"window": 3},
    "gumbel": {"sampler": "sjd", "window": 3, "refresh": "gumbel"},
    "lookup": {"sampler": "speculative", "drafter": "prompt_lookup"},
    "drafter": {"sampler": "speculative", "window": 3},
}


def sampler_of(name: str, drafter: Model) -> Any:
    settings = {"sampler": name} | CHAINS[name]
    if name == "drafter":
        settings["drafter"] = drafter
    return samplers.create(settings.pop("sampler"), **settings)


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", named("causal"))
@replays("name")
def test_recorded_greedy_runs(name: str, chain: str) -> None:
    case, size = CASES[name], len(CASES[name]["vocab"])
    state_of = sampler_of(chain, causal_model_of(case, 0.3))
    out = paradec.generate(
        causal_model_of(case),
        torch.tensor([[size + 1]]),
        sampler=state_of,
        temperature=0.0,
        constraint=paradec.Regex(case["constraint"]["regex"]),
        max_new_tokens=case["slots"],
        logprobs=size,
    )
    found = out.sequences[0, 1:].tolist()[: int(out.tokens[0])]
    expected = case["expected"]
    assert found + [case["end"]] * (case["slots"] - len(found)) == expected["tokens"]
    assert out.nfe <= len(found) and (chain != "one by one" or out.nfe == len(found))
    for slot, step in enumerate(expected["steps"]):
        assert out.logprobs is not None
        assert np.exp(float(out.logprobs.chosen[0, 1 + slot])) == pytest.approx(step["probability"], rel=1e-9)
        shown = torch.tensor([[size + 1, *expected["tokens"][:slot]]])
        whole = causal_model_of(case).module(shown)[0, slot].softmax(-1)
        assert float(whole[step["allowed"]].sum()) == pytest.approx(step["mass"], rel=1e-9)
        assert step["token"] == expected["tokens"][slot]
        likely = out.logprobs.best[0, 1 + slot] > -torch.inf
        assert set(out.logprobs.best_tokens[0, 1 + slot][likely].tolist()) == set(step["allowed"])


def masked_of(case: dict[str, Any]) -> dict[tuple[int, ...], float]:
    module, size = causal_model_of(case).module, len(case["vocab"])
    return masked_distribution(
        automaton_of(case),
        lambda text: module(torch.tensor([[size + 1, *text]]))[0, len(text), :size].softmax(-1).tolist(),
        case["slots"],
    )


ROWS = 2000


@pytest.mark.parametrize(
    "chain", [pytest.param(name, marks=() if name in ("sjd", "drafter") else pytest.mark.full) for name in CHAINS]
)
def test_draws_have_the_distribution_of_masked_decoding(chain: str) -> None:
    case = CASES[next(name for name in named("law") if CASES[name]["ends"])]
    expected, size = masked_of(case), len(case["vocab"])
    out = paradec.generate(
        causal_model_of(case),
        torch.full((ROWS, 1), size + 1),
        sampler=sampler_of(chain, causal_model_of(case, 1.0)),
        temperature=1.0,
        seed=[*range(ROWS)],
        constraint=paradec.Regex(case["constraint"]["regex"]),
        max_new_tokens=case["slots"],
        eos_early_stop=False,
    )
    assert_drawn(out.sequences[:, 1:], expected)


def test_the_recorded_masked_distribution() -> None:
    for name in named("law"):
        if CASES[name]["settings"]["order"] == "left":
            with replay(name):
                recorded = {tuple(text): mass for text, mass in CASES[name]["expected"]["masked"]}
                assert masked_of(CASES[name]) == pytest.approx(recorded, rel=1e-9)


@pytest.fixture(scope="module")
def causal() -> Model:
    model = wrap_causal(tiny_llama(vocab=VOCAB).double())
    model.tokenizer = lettered().tokenizer
    return paradec.wrap(
        model.module, eos_token_id=39, topology="causal", prediction="shifted", tokenizer=lettered().tokenizer
    )


OVER_STORES: dict[str, dict[str, Any]] = {
    "sjd": {"window": 6},
    "pool": {"sampler": "jacobi", "window": 4, "pool": 2},
    "group": {"sampler": "jacobi", "group": 4},
    "chain": {"sampler": "speculative", "window": 4},
    "tree": {"sampler": "speculative", "tree": (3, 2, 1)},
    "dynamic": {"sampler": "speculative", "tree": DynamicTree(5, 2, 2), "rule": "naive"},
    "lookup": {"sampler": "speculative", "drafter": "prompt_lookup"},
    "recycling": {"sampler": "speculative", "drafter": "token_recycling", "rule": "naive"},
    "sjd_pac": {"window": 4, "siblings": 3, "branching": 2},
    "gumbel siblings": {"sampler": "scd", "window": 4, "siblings": 3},
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("tree", "lookup", "sjd_pac") else pytest.mark.full)
        for name in OVER_STORES
    ],
)
def test_every_answer_fits(name: str, causal: Model) -> None:
    settings = {"sampler": name} | OVER_STORES[name]
    if name in ("chain", "tree", "dynamic"):
        settings["drafter"] = wrap_causal(tiny_llama(seed=3, layers=1, vocab=VOCAB).double())
    sampler = samplers.create(settings.pop("sampler"), **settings)
    for value, fits in KINDS.values():
        asked = {"constraint": value, "max_new_tokens": 11, "guidance_scale": 1.5}
        plain = paradec.generate(causal, [[1, 2, 3], [4]], temperature=0.0, sampler="sjd", **asked)
        greedy = paradec.generate(causal, [[1, 2, 3], [4]], temperature=0.0, sampler=sampler, **asked)
        drawn = paradec.generate(causal, [[1, 2, 3], [4]], temperature=1.3, seed=1, sampler=sampler, **asked)
        assert greedy.text == plain.text
        assert all(fits(text) for text in (*greedy.text, *drawn.text)), drawn.text


def test_a_template_joins_the_next_forward(causal: Model) -> None:
    out = paradec.generate(
        causal,
        [[1, 2]],
        sampler=samplers.create("sjd", window=16),
        constraint=paradec.Regex(r"\{x:[0-3],y:\[\]\}"),
        temperature=1.0,
        seed=4,
        max_new_tokens=16,
    )
    assert out.text[0].startswith("{x:") and out.nfe <= 3

"""Constraints on causal models: recorded runs, and the distribution of token-by-token decoding of allowed tokens."""

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
    assert_frequencies,
    automaton_of,
    case_names,
    causal_model_of,
    constrained_distribution,
    texts_behind_a_marker,
    tiny_with_texts,
)

import paradec
from paradec import samplers
from paradec.constraints.values import parse_constraint
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
@pytest.mark.parametrize("name", case_names("causal"))
@replays("name")
def test_recorded_greedy_runs(name: str, chain: str) -> None:
    case, size = CASES[name], len(CASES[name]["vocab"])
    sampler = sampler_of(chain, causal_model_of(case, 0.3))
    request = {"constraint": paradec.Regex(case["constraint"]["regex"]), "max_new_tokens": case["slots"]}
    request |= {"sampler": sampler, "temperature": 0.0, "logprobs": size}
    out = paradec.generate(causal_model_of(case), torch.tensor([[size + 1]]), **request)
    tokens = out.sequences[0, 1:].tolist()[: int(out.tokens[0])]
    expected = case["expected"]
    assert tokens + [case["end"]] * (case["slots"] - len(tokens)) == expected["tokens"]
    assert out.nfe <= len(tokens) and (chain != "one by one" or out.nfe == len(tokens))
    for slot, step in enumerate(expected["steps"]):
        assert out.logprobs is not None
        assert np.exp(float(out.logprobs.chosen[0, 1 + slot])) == pytest.approx(step["probability"], rel=1e-9)
        ids = torch.tensor([[size + 1, *expected["tokens"][:slot]]])
        p = causal_model_of(case).module(ids)[0, slot].softmax(-1)
        assert float(p[step["allowed"]].sum()) == pytest.approx(step["mass"], rel=1e-9)
        assert step["token"] == expected["tokens"][slot]
        likely = out.logprobs.best[0, 1 + slot] > -torch.inf
        assert set(out.logprobs.best_tokens[0, 1 + slot][likely].tolist()) == set(step["allowed"])


def case_distribution(case: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Return the distribution of token-by-token decoding under the case's constraint."""
    module, size = causal_model_of(case).module, len(case["vocab"])

    def next_probabilities(text: tuple[int, ...]) -> list[float]:
        return module(torch.tensor([[size + 1, *text]]))[0, len(text), :size].softmax(-1).tolist()

    return constrained_distribution(automaton_of(case), next_probabilities, case["slots"])


ROWS = 2000


@pytest.mark.thinned
@pytest.mark.parametrize(
    "chain", [pytest.param(name, marks=() if name in ("sjd", "drafter") else pytest.mark.full) for name in CHAINS]
)
def test_answers_have_the_distribution_of_token_by_token_decoding(chain: str) -> None:
    case = CASES[next(name for name in case_names("law") if CASES[name]["ends"])]
    expected, size = case_distribution(case), len(case["vocab"])
    request = {"constraint": paradec.Regex(case["constraint"]["regex"]), "max_new_tokens": case["slots"]}
    request |= {"temperature": 1.0, "seed": [*range(ROWS)], "eos_early_stop": False}
    prompts, sampler = torch.full((ROWS, 1), size + 1), sampler_of(chain, causal_model_of(case, 1.0))
    out = paradec.generate(causal_model_of(case), prompts, sampler=sampler, **request)
    assert_frequencies(out.sequences[:, 1:], expected)


def test_the_recorded_constrained_distribution() -> None:
    for name in case_names("law"):
        if CASES[name]["settings"]["order"] == "left":
            with replay(name):
                recorded = {tuple(text): mass for text, mass in CASES[name]["expected"]["masked"]}
                assert case_distribution(CASES[name]) == pytest.approx(recorded, rel=1e-9)


def enumerate_texts(case: dict[str, Any], temperature: float) -> dict[tuple[int, ...], float]:
    """Return the probability of each text of `texts_behind_a_marker` in token-by-token decoding."""
    module, size, texts = causal_model_of(case).module, len(case["vocab"]), texts_behind_a_marker(case)
    masses = {(): 1.0}
    for slot in range(case["slots"]):
        longer = {}
        for prefix, mass in masses.items():
            row = module(torch.tensor([[size + 1, *prefix]]))[0, slot, :size] / temperature
            allowed = sorted({text[slot] for text in texts if text[:slot] == prefix})
            longer |= {
                (*prefix, token): mass * share for token, share in zip(allowed, row[allowed].softmax(-1).tolist())
            }
        masses = longer
    return masses


@pytest.mark.thinned
@pytest.mark.parametrize(("after", "budget"), [("a", None), ("ab", 1), ("aa", None), ("b", 0)])
@pytest.mark.parametrize(
    "chain", ["sjd", *(pytest.param(c, marks=pytest.mark.full) for c in ("one by one", "drafter"))]
)
def test_reasoning_and_answers_have_the_distribution_of_token_by_token_decoding(
    chain: str, after: str, budget: int | None
) -> None:
    draw = torch.Generator().manual_seed(2)
    bias, pair = torch.randn(5, 4, generator=draw), torch.randn(5, 5, 4, 4, generator=draw)
    constraint = {"regex": "[bc]?a?|ca*", "after": after, "thinking_budget": budget}
    case = {"vocab": [*"abc", "<end>"], "end": 3, "ends": True, "slots": 5, "constraint": constraint}
    case["model"] = {"bias": bias.tolist(), "pair": pair.tolist()}
    model, value = causal_model_of(case), parse_constraint("constraint", constraint)
    request: dict[str, Any] = {"sampler": sampler_of(chain, causal_model_of(case, 1.0)), "constraint": value}
    request |= {"max_new_tokens": 5, "eos_early_stop": False, "logprobs": 0}
    for temperature in (0.7, 1.0):
        prompts = torch.full((ROWS, 1), 5)
        out = paradec.generate(model, prompts, temperature=temperature, seed=[*range(ROWS)], **request)
        assert all(value.accepts(free + after + text) for free, text in zip(out.reasoning, out.text, strict=True))
        expected = enumerate_texts(case, temperature)
        assert_frequencies(out.new_tokens, expected)
        scores = out.logprobs.chosen[:, 1:].nan_to_num(0).sum(1).exp()
        for text, score in dict(zip(map(tuple, out.new_tokens.tolist()), scores.tolist(), strict=True)).items():
            assert score == pytest.approx(expected[text], rel=1e-9)
    greedy = tuple[int, ...]()
    for slot in range(5):  # the most likely token among those that continue an allowed text
        prefixes = {text[: slot + 1] for text in texts_behind_a_marker(case) if text[:slot] == greedy}
        row = model.module(torch.tensor([[5, *greedy]]))[0, slot]
        greedy = max(prefixes, key=lambda text: float(row[text[-1]]))
    out = paradec.generate(model, torch.tensor([[5]]), temperature=0.0, **request)
    assert tuple(out.new_tokens[0].tolist()) == greedy


@pytest.fixture(scope="module")
def causal() -> Model:
    module, tokenizer = tiny_llama(vocab=VOCAB).double(), tiny_with_texts().tokenizer
    return paradec.wrap(module, eos_token_id=39, topology="causal", prediction="shifted", tokenizer=tokenizer)


SAMPLERS: dict[str, dict[str, Any]] = {
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


@pytest.mark.thinned
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("tree", "lookup", "sjd_pac") else pytest.mark.full) for n in SAMPLERS]
)
def test_every_answer_satisfies_the_constraint(name: str, causal: Model) -> None:
    settings = {"sampler": name} | SAMPLERS[name]
    if name in ("chain", "tree", "dynamic"):
        settings["drafter"] = wrap_causal(tiny_llama(seed=3, layers=1, vocab=VOCAB).double())
    sampler = samplers.create(settings.pop("sampler"), **settings)
    for value, is_allowed in KINDS.values():
        request = {"constraint": value, "max_new_tokens": 11, "guidance_scale": 1.5}
        plain = paradec.generate(causal, [[1, 2, 3], [4]], temperature=0.0, sampler="sjd", **request)
        greedy = paradec.generate(causal, [[1, 2, 3], [4]], temperature=0.0, sampler=sampler, **request)
        sampled = paradec.generate(causal, [[1, 2, 3], [4]], temperature=1.3, seed=1, sampler=sampler, **request)
        assert greedy.text == plain.text
        assert all(is_allowed(text) for text in (*greedy.text, *sampled.text)), sampled.text


def test_tokens_without_alternatives_take_no_forwards_of_their_own(causal: Model) -> None:
    request = {"constraint": paradec.Regex(r"\{x:[0-3],y:\[\]\}"), "temperature": 1.0, "seed": 4, "max_new_tokens": 16}
    out = paradec.generate(causal, [[1, 2]], sampler=samplers.create("sjd", window=16), **request)
    assert out.text[0].startswith("{x:") and out.nfe <= 3

"""Rows whose logits an engine computes: the tokens, forwards and steps of `paradec.generate`."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hosting import Engine
from tiny_models import tiny

import paradec
from paradec import samplers
from paradec.engines.hosted import Hosted, refusal
from paradec.models.adapter import Model

HOSTED = [name for name in samplers.names() if refusal(samplers.create(name, **{})) is None]
SETTINGS: dict[str, dict[str, Any]] = {
    "union": {"rules": ("credit", "localleap")},
    "intersection": {"rules": ("threshold", "klass")},
}


@pytest.fixture(scope="module")
def causal() -> Model:
    return tiny(2, "block_causal")


def made(name: str) -> Any:
    return samplers.create(name, **SETTINGS.get(name, {}))


def steps_of(name: str, blocks: int) -> dict[str, int]:
    return {"steps": 2 * blocks} if made(name).uses_steps else {}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("name", HOSTED)
def test_rows_in_an_engine_are_those_of_generate(name: str, temperature: float, causal: Model) -> None:
    """Rows of unequal lengths that come, pause and leave at different times: the tokens, the steps and the end."""
    draw = random.Random(f"{name} {temperature}")
    hosted = Hosted(made(name), causal.facts)
    engine, waiting, expected, taken = Engine(causal, hosted), {}, {}, {}
    for key in range(4):
        prompt = [draw.randrange(36) for _ in range(draw.randint(1, 10))]
        request = {
            "max_new_tokens": draw.choice((4, 9)),
            "temperature": temperature,
            "seed": draw.randrange(2**31),
            "eos_early_stop": draw.random() < 0.7,
            "top_k": draw.choice((None, 5)),
        }
        length = len(prompt) + request["max_new_tokens"]
        request |= steps_of(name, -(-length // 4) - len(prompt) // 4)
        waiting[key] = prompt, request
        expected[key] = paradec.generate(causal, prompt, sampler=made(name), trace=True, **request)
    while waiting or len(hosted):
        for key in [key for key in waiting if draw.random() < 0.5]:
            prompt, request = waiting.pop(key)
            engine.add(key, prompt, **{"new": request.pop("max_new_tokens"), **request})
            taken[key] = 0
        going = [key for key in hosted.keys() if draw.random() < 0.7]
        for key, stepped in engine.round(going).items():
            taken[key] += 1
            if stepped.done:
                answer = expected[key]
                filled = answer.sequences[0, answer.filled[0]].tolist()
                decided = filled[: answer.tokens[0]]
                begin = len(answer.sequences[0]) - len(filled)
                assert engine.ids[key][begin : begin + len(decided)] == decided
                assert hosted.answer(key) == decided
                assert taken[key] == answer.row_nfe[0]
                hosted.close(key)
    assert len(taken) == 4

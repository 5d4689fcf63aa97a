"""vLLM itself, on a CPU, with paradec's samplers: the tokens of `paradec.generate` on the same weights.

Scheduler, pages of keys and values, roll-back and ragged batches are vLLM's own; only its kernels are interpreted.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_on_a_cpu import BLOCK, END, KINDS, MASK, VOCAB, Engine, checkpoint

SAMPLERS: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.5},
    "credit": {},
    "klass": {},
    "saber": {},
    "editing": {"threshold": 0.3},
    "credit+localleap": {},
}
"""One that knows only the step, three with memory, two that take tokens back, and two joined."""


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(checkpoint(request.param, tmp_path_factory.mktemp("models") / request.param))
    yield made
    made.close()


def prompts(seed: int) -> list[list[int]]:
    """Six prompts for four slots: shorter than a block, whole blocks, several blocks and a tail."""
    draw = random.Random(seed)
    return [[draw.randrange(2, MASK) for _ in range(size)] for size in (1, 3, 4, 8, 13, 22)]


def said(name: str) -> dict[str, Any]:
    return {"sampler": {"sampler": name, **SAMPLERS[name]} if SAMPLERS[name] else name}


def made(name: str) -> Any:
    from paradec import samplers

    return samplers.create(name, **SAMPLERS[name])


def nothing_is_left(engine: Engine) -> None:
    """vLLM tells its runner of ended requests when it schedules the next: slots are those that vLLM has, and at the
    next request that is the only one."""
    state, theirs = engine.runner.model_state, engine.runner.req_states
    assert state.numbers == theirs.req_id_to_index
    assert state.slots.keys() == set(state.numbers.values())
    engine.answers([[2, 3]], engine.params(1))
    assert len(state.slots) == len(state.numbers) == 1


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_tokens_are_those_of_generate(engine: Engine, name: str) -> None:
    for seed, new in ((0, 7), (1, 14)):
        batch = prompts(seed)
        found = engine.answers(batch, engine.params(new, said(name)))
        for prompt, answer in zip(batch, found, strict=True):
            expected = engine.expected(prompt, new, sampler=made(name))
            assert list(answer.token_ids) == expected, (name, len(prompt))
            assert answer.finish_reason == ("stop" if expected[-1] == END else "length")
    nothing_is_left(engine)

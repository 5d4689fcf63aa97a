"""vLLM on a CPU with paradec's samplers has the tokens of `paradec.generate` on the same weights."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_on_a_cpu import END, KINDS, MASK, Engine, checkpoint, paradec

SAMPLERS: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.5}, "credit": {}, "klass": {}, "saber": {}, "editing": {"threshold": 0.3},
    "credit+localleap": {},
}  # fmt: skip
"""A sampler without memory, samplers with memory, samplers that rewrite tokens, and a combination."""


@pytest.fixture(scope="module", params=KINDS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    instance = Engine(checkpoint(request.param, tmp_path_factory.mktemp("models") / request.param))
    yield instance
    instance.close()


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(2, MASK) for _ in range(size)] for size in (1, 3, 4, 8, 13, 22)]


def settings_of(name: str) -> dict[str, Any]:
    return {"sampler": {"sampler": name, **SAMPLERS[name]} if SAMPLERS[name] else name}


def create_sampler(name: str) -> Any:
    return paradec.samplers.create(name, **SAMPLERS[name])


def assert_slots_are_free(engine: Engine) -> None:
    """Check that paradec has the same slots as vLLM, and after the next request only that request's."""
    state = engine.runner.model_state
    assert state.numbers == engine.runner.req_states.req_id_to_index
    assert state.slots.keys() == set(state.numbers.values())
    engine.answers([[2, 3]], engine.params(1))
    assert len(state.slots) == len(state.numbers) == 1


@pytest.mark.parametrize("name", SAMPLERS)
def test_tokens_equal_generate(engine: Engine, name: str) -> None:
    for seed, new in ((0, 7), (1, 14)):
        batch = prompts(seed)
        for prompt, answer in zip(batch, engine.answers(batch, engine.params(new, settings_of(name))), strict=True):
            expected = engine.expected(prompt, new, sampler=create_sampler(name))
            assert list(answer.token_ids) == expected, (name, len(prompt))
            assert answer.finish_reason == ("stop" if expected[-1] == END else "length")
    assert_slots_are_free(engine)


@pytest.mark.parametrize("name", ["threshold", "klass"])
def test_draws_equal_generate(engine: Engine, name: str) -> None:
    batch = prompts(2)[:4]
    settings = {"sampler": name, "temperature": 0.8, "seed": 5, "top_k": 8}
    for prompt, answer in zip(batch, engine.answers(batch, engine.params(9, settings)), strict=True):
        assert list(answer.token_ids) == engine.expected(prompt, 9, **settings)


def test_an_answer_ends_where_vllm_ends_it(engine: Engine) -> None:
    prompt = prompts(3)[3]
    full = engine.expected(prompt, 12, eos_early_stop=False)
    (actual,) = engine.answers([prompt], engine.params(12, ignore_eos=True))
    assert list(actual.token_ids) == full
    stop = full[5]
    (actual,) = engine.answers([prompt], engine.params(12, ignore_eos=True, stop_token_ids=[stop]))
    assert list(actual.token_ids) == full[: full.index(stop) + 1] and actual.stop_reason == stop


def test_a_template_is_filled(engine: Engine) -> None:
    prompt = prompts(4)[4]
    template = [MASK, 7, MASK, 9, 10, 11, 12, 13, 14, MASK, 16]
    for new in (0, 5):
        params = engine.params(len(template) + new, {"template": template}, ignore_eos=True)
        (actual,) = engine.answers([prompt], params)
        for model in (engine.model, engine.exact):
            out = paradec.generate(model, [[*prompt, *template]], max_new_tokens=new, eos_early_stop=False)
            assert list(actual.token_ids) == out.sequences[0, len(prompt) :].tolist()
        assert len(actual.token_ids) >= len(template)
        assert all(expected in (MASK, token) for token, expected in zip(actual.token_ids, template))


def test_aborted_requests_free_their_slots(engine: Engine) -> None:
    running = engine.llm.llm_engine
    batch = prompts(5)[:4]
    for index, prompt in enumerate(batch):
        running.add_request(f"r{index}", {"prompt_token_ids": prompt}, engine.params(14, {"sampler": "credit"}))
    state, outputs = engine.runner.model_state, {}
    for _ in range(4):
        running.step()
    assert len(state.slots) == 4
    running.abort_request(["r0", "r2"])
    while running.has_unfinished_requests():
        outputs |= {output.request_id: output for output in running.step() if output.finished}
    for index in (1, 3):
        expected = engine.expected(batch[index], 14, sampler="credit")
        assert list(outputs[f"r{index}"].outputs[0].token_ids) == expected
    assert "r0" not in outputs or outputs["r0"].outputs[0].finish_reason == "abort"
    assert_slots_are_free(engine)
    for prompt, answer in zip(batch, engine.answers(batch, engine.params(9, {"sampler": "credit"})), strict=True):
        assert list(answer.token_ids) == engine.expected(prompt, 9, sampler="credit")

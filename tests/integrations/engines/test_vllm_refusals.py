"""vLLM refuses unsupported requests with paradec's messages."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from decoding import refuses
from vllm_on_a_cpu import BLOCK, MASK, Engine, VLLMValidationError, checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = checkpoint("sdar", tmp_path_factory.mktemp("models") / "sdar")
    instance = Engine(folder, hf_overrides={"paradec": {"sampler": "low_confidence"}})
    yield instance
    instance.close()


@pytest.mark.parametrize(
    ("settings", "others", "message"),
    [
        ({"sampler": "treshold"}, {}, "treshold"),
        ({"sampler": "freedave"}, {}, "cannot run inside an engine"),
        ({"guidance_scale": 2.0}, {}, "guidance_scale"),
        ({"block_length": 8}, {}, "block_length=8"),
        (None, {"presence_penalty": 0.5}, "presence_penalty"),
        (None, {"logprobs": 1}, "logprobs"),
    ],
)
def test_requests_are_refused_before_any_work(engine: Engine, settings: Any, others: Any, message: str) -> None:
    refuses(lambda: engine.answers([[2, 3]], engine.params(8, settings, **others)), message, VLLMValidationError)
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_undecodable_prompts_end_with_an_error(engine: Engine) -> None:
    valid = [5, 9, 2, 30, 11]
    settings = [engine.params(8), engine.params(8), engine.params(8, {"sampler": "low_confidence", "steps": 1})]
    output, mask, steps = engine.answers([valid, [2, MASK, 3], valid], settings)
    assert list(output.token_ids) == engine.expected(valid, 8, sampler="low_confidence")
    assert mask.finish_reason == steps.finish_reason == "error" and not mask.token_ids and not steps.token_ids
    assert "mask id" in mask.stop_reason and "steps=1" in steps.stop_reason
    engine.answers([valid], engine.params(1))
    assert len(engine.runner.model_state.slots) == 1


def test_settings_of_the_server_are_defaults_of_requests(engine: Engine) -> None:
    state = engine.runner.model_state
    for settings, name in ((None, "low_confidence"), ({"steps": 4}, "low_confidence"), ({"sampler": "klass"}, "klass")):
        engine.answers([[4, 5]], engine.params(4, settings))
        assert [slot.hosted.sampler.name for slot in state.slots.values()] == [name]


def test_the_configuration_goes_to_other_processes(engine: Engine) -> None:
    config = engine.llm.llm_engine.vllm_config
    repeated = pickle.loads(pickle.dumps(config))
    assert repeated.model_config.hf_config.to_dict() == config.model_config.hf_config.to_dict()
    assert repeated.scheduler_config.scheduler_cls == config.scheduler_config.scheduler_cls
    assert repeated.num_speculative_tokens == BLOCK


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"diffusion_config": {"canvas_length": 8}}, "canvas_length=8"),
        ({"diffusion_config": {"canvas_length": BLOCK, "max_denoising_steps": 3}}, "max_denoising_steps=3"),
        ({"async_scheduling": True}, "async-scheduling"),
        ({"hf_overrides": {"paradec": {"samplr": "klass"}}}, "samplr"),
        ({"hf_overrides": {"paradec": {"sampler": "klas"}}}, "klas"),
        ({"hf_overrides": {"canvas_length": None}}, "has the block length"),
    ],
)
def test_engines_that_are_refused(options: Any, message: str, tmp_path: Path) -> None:
    refuses(lambda: Engine(checkpoint("sdar", tmp_path / "sdar"), **options), message, (ValueError, TypeError))

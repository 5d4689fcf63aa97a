"""vLLM itself refuses what its requests cannot be, with paradec's words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm_on_a_cpu import MASK, VOCAB, Engine, VLLMValidationError, checkpoint


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    made = Engine(checkpoint("sdar", tmp_path_factory.mktemp("models") / "sdar"))
    yield made
    made.close()


@pytest.mark.parametrize(
    "settings, others, words",
    [
        ({"sampler": "treshold"}, {}, "treshold"),
        ({"stepps": 4}, {}, "stepps"),
        ({"sampler": "freedave"}, {}, "cannot run inside an engine"),
        ({"sampler": {"sampler": "threshold", "threshold": 7}}, {}, "threshold"),
        ({"guidance_scale": 2.0}, {}, "guidance_scale"),
        ({"block_length": 8}, {}, "block_length=8"),
        ({"suppress_tokens": [VOCAB]}, {}, "suppress_tokens"),
        ({"template": [MASK, VOCAB]}, {}, "template"),
        ("{", {}, "JSON"),
        (None, {"presence_penalty": 0.5}, "presence_penalty"),
        (None, {"logprobs": 1}, "logprobs"),
        (None, {"temperature": 0.5}, "temperature"),
    ],
)
def test_requests_are_refused_before_any_work(engine: Engine, settings: Any, others: Any, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words):
        engine.answers([[2, 3]], engine.params(8, settings, **others))
    assert not engine.llm.llm_engine.has_unfinished_requests()


def test_what_takes_the_prompt_ends_a_request_with_an_error(engine: Engine) -> None:
    """Beside one that is served."""
    good = [5, 9, 2, 30, 11]
    settings = [engine.params(8), engine.params(8), engine.params(8, {"sampler": "low_confidence", "steps": 1})]
    fine, mask, steps = engine.answers([good, [2, MASK, 3], good], settings)
    assert list(fine.token_ids) == engine.expected(good, 8)
    assert mask.finish_reason == steps.finish_reason == "error" and not mask.token_ids and not steps.token_ids
    assert "mask id" in mask.stop_reason and "steps=1" in steps.stop_reason
    engine.answers([good], engine.params(1))
    assert len(engine.runner.model_state.slots) == 1

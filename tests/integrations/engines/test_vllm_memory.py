"""vLLM with little memory and paradec's samplers: shared pages, and requests that are preempted and continue."""

import random
from typing import Any

import pytest
from vllm_on_a_cpu import BLOCK, MASK, Engine, checkpoint


@pytest.fixture(scope="module", params=["fast_dllm_v2", "sdar"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = checkpoint(request.param, tmp_path_factory.mktemp("models") / request.param)
    instance = Engine(folder, block_size=32, num_gpu_blocks_override=7, max_num_batched_tokens=18)
    yield instance
    instance.close()


def random_ids(seed: int, size: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(2, MASK) for _ in range(size)]


def test_pages_are_shared(engine: Engine) -> None:
    common = random_ids(0, 64)
    for tail in ([], [5, 6], [7, 8, 9, 10], random_ids(1, 9)):
        prompt = [*common, *tail]
        (output,) = engine.llm.generate([{"prompt_token_ids": prompt}], engine.params(10), use_tqdm=False)
        assert list(output.outputs[0].token_ids) == engine.expected(prompt, 10)
    assert output.num_cached_tokens == 64


def test_preempted_requests_continue(engine: Engine) -> None:
    scheduler = engine.llm.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt_request = [], scheduler._preempt_request

    def record(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request)
        preempt_request(request, *args, **kwargs)

    scheduler._preempt_request = record
    try:
        batch = [random_ids(10 + index, 27 - index) for index in range(4)]
        actual = engine.answers(batch, engine.params(40, ignore_eos=True))
    finally:
        scheduler._preempt_request = preempt_request
    assert any(request.num_output_tokens for request in preempted)
    for prompt, answer in zip(batch, actual, strict=True):
        assert list(answer.token_ids) == engine.expected(prompt, 40, eos_early_stop=False)


def test_a_chunk_ends_where_a_block_does(engine: Engine) -> None:
    batch = [random_ids(20 + index, size) for index, size in enumerate((41, 3, 19, BLOCK))]
    for prompt, answer in zip(batch, engine.answers(batch, engine.params(9)), strict=True):
        assert list(answer.token_ids) == engine.expected(prompt, 9)

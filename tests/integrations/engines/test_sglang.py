"""paradec's algorithms for SGLang on a test base class that has SGLang's two loops."""

import gc
import importlib
import sys
import tomllib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoding import refuses
from engines import ENGINE_SAMPLERS, check_sampler, dllm_config, forward_batch
from places import ROOT
from small_models import END, MASK, VOCAB, tiny

from paradec import samplers
from paradec.integrations.engines.hosted import why_unsupported
from paradec.integrations.engines.sglang import ENGINE, FACTS, PREFIX, REQUEST, algorithms
from paradec.models.adapter import Model


class Base:
    def __init__(self, config: Any):
        self.block_size, self.mask_id = config.block_size, config.mask_id
        self.fdfo = config.first_done_first_out_mode

    def run(self: Any, evaluate: Any, batch: Any, states: list[Any]) -> tuple[Any, ...]:
        fresh = self.init_step_state(batch)
        if self.fdfo:
            states = [carried or new for carried, new in zip(states, fresh, strict=True)]
            done = self.step(batch, evaluate(batch), states)
            return None, None, [self.block_size * flag for flag in done], states, False
        for _ in range(self.max_steps(self.block_size)):
            if all(self.step(batch, evaluate(batch), fresh)):
                return None, None, None, None, False
        raise AssertionError("a block is not done after max_steps steps")


ALGORITHMS = algorithms(Base)


def create_algorithm(name: str, fdfo: bool = False, **settings: Any) -> Any:
    return ALGORITHMS[name](dllm_config(fdfo=fdfo, **settings))


def logits_of(*rows: list[int], sure: float = 9.0) -> torch.Tensor:
    """Return logits [B * W, V] that are `sure` at the tokens of `rows` and 0 elsewhere."""
    return torch.nn.functional.one_hot(torch.tensor(rows).flatten(), VOCAB).double() * sure


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2, "block_causal")


@pytest.mark.thinned
@pytest.mark.parametrize("fdfo", [False, True], ids=["sync", "fdfo"])
@pytest.mark.parametrize("name", ENGINE_SAMPLERS)
def test_steps_equal_generate(name: str, fdfo: bool, model: Model) -> None:
    algorithm = create_algorithm(name, fdfo, **ENGINE_SAMPLERS[name].config)
    check_sampler(name, algorithm, lambda logits: logits, model, fdfo)
    gc.collect()
    assert len(algorithm._hosted) == 0


def test_every_masked_sampler_of_text_has_an_algorithm() -> None:
    expected = {"Combination"}
    for name in samplers.names():
        kind = samplers.get(name)
        if kind.family == "masked" and "text" in kind.models:
            expected.add(kind.__name__)
    assert {PREFIX + name for name in expected} == {*ALGORITHMS}
    for name, kind in ALGORITHMS.items():
        assert kind.__name__ == name and issubclass(kind, Base)
        if name == "ParadecCombination":
            continue
        why = why_unsupported(samplers.create(kind.sampler_name))
        if why is None:
            assert create_algorithm(name).sampler == samplers.create(kind.sampler_name)
        else:
            with pytest.raises(ValueError, match=f"'{kind.sampler_name}' cannot run inside SGLang: {why}"):
                create_algorithm(name)


def test_the_configuration_has_the_sampler_s_settings_and_the_request_s() -> None:
    settings = {"preset": "llada2.0", "temperature": 0.5, "top_k": 3, "block_size": 4, "eos_token_ids": END}
    algorithm = create_algorithm("ParadecThreshold", **settings)
    assert algorithm.sampler == samplers.create("threshold", threshold=0.95)
    assert algorithm.fields == {"temperature": 0.5, "top_k": 3, "seed": 0} and algorithm.eos_token_ids == (END,)
    assert create_algorithm("ParadecEditing", threshold=0.8, max_post_steps=2).sampler.max_post_steps == 2
    joined = create_algorithm("ParadecCombination", combination="credit(threshold=0.8)+localleap").sampler
    assert joined == samplers.create("credit(threshold=0.8)+localleap")
    empty = ALGORITHMS["ParadecThreshold"](SimpleNamespace(**{**vars(dllm_config()), "algorithm_config": None}))
    assert empty.sampler == samplers.create("threshold")
    for kind in ALGORITHMS.values():  # no key has two meanings
        settings = {} if kind.sampler_name is None else samplers.get(kind.sampler_name).settings()
        assert not {"preset", "combination", *settings} & {*REQUEST, *FACTS, *ENGINE}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("ParadecThreshold", {"treshold": 0.5}, "unknown key for ParadecThreshold: 'treshold' .did you mean 'thresh"),
        ("ParadecThreshold", {"threshold": 1.5}, "threshold=1.5 must be a number"),
        ("ParadecThreshold", {"preset": "none"}, "unknown preset"),
        ("ParadecThreshold", {"temperature": -1}, "temperature=-1 must be"),
        ("ParadecThreshold", {"seed": "x"}, "seed='x' must be an integer"),
        ("ParadecThreshold", {"steps": 3}, "steps=3 has no effect: sampler 'threshold' has no schedule"),
        ("ParadecThreshold", {"block_length": 3}, "block_length=3 must divide the engine's block of 4"),
        ("ParadecLowConfidence", {"steps": 3, "block_length": 2}, "steps=3 must be a multiple of the parts"),
        ("ParadecCombination", {}, "combination=None must be text"),
        ("ParadecCombination", {"combination": "credit+wino"}, "cannot be joined"),
        ("ParadecThreshold", {"cache": "dual"}, "unknown key"),
    ],
)
def test_wrong_configurations_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    refuses(lambda: create_algorithm(name, **settings), message)


def test_models_without_a_mask_and_configurations_that_are_no_mapping_are_refused() -> None:
    threshold = ALGORITHMS["ParadecThreshold"]
    refuses(lambda: threshold(dllm_config(mask=-1)), "ParadecThreshold fills masks; mask_id=-1")
    config = SimpleNamespace(**{**vars(dllm_config()), "algorithm_config": [1]})
    refuses(lambda: threshold(config), "must be a mapping")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, None),
        ({"temperature": 0.3, "top_p": 0.5, "logit_bias": {}, "repetition_penalty": 1.0}, None),
        ({"regex": "a+", "repetition_penalty": 1.1}, "ParadecCredit does not support repetition_penalty, regex"),
        ({"logit_bias": {"3": 1.0}}, "ParadecCredit does not support logit_bias"),
    ],
)
def test_unsupported_request_fields_are_refused(fields: dict[str, Any], message: str | None) -> None:
    request = SimpleNamespace(sampling_params=SimpleNamespace(**fields), return_logprob=False)
    assert ALGORITHMS["ParadecCredit"].validate_request(request) == message  # type: ignore[attr-defined]
    request.return_logprob = True
    assert "return_logprob" in ALGORITHMS["ParadecCredit"].validate_request(request)  # type: ignore[attr-defined]


def test_prompt_blocks_are_done_at_once_and_their_masks_stay() -> None:
    algorithm = create_algorithm("ParadecThreshold", True)
    rows = [[1, 2, MASK, 4], [5, MASK, MASK, MASK]]
    batch = forward_batch(rows, ["a", "b"], [0, 8], torch.tensor([[True] * 4, [True, True, False, False]]))
    states = algorithm.init_step_state(batch)
    assert algorithm.step(batch, logits_of([7] * 4, [9] * 4), states) == [True, False]
    assert batch.input_ids.view(2, 4).tolist() == [[1, 2, MASK, 4], [5, MASK, 9, 9]]
    # the forward that finds no mask reports the block as done; other logits no longer change it
    assert algorithm.step(batch, logits_of([7] * 4, [8] * 4), states) == [True, True]
    assert batch.input_ids.view(2, 4).tolist() == [[1, 2, MASK, 4], [5, MASK, 9, 9]]


def test_steps_write_into_the_tensor_of_ids_of_the_engine() -> None:
    algorithm = create_algorithm("ParadecThreshold")
    batch = forward_batch([[1, MASK, MASK, MASK]])
    ids, place = batch.input_ids, batch.input_ids.data_ptr()
    algorithm.step(batch, logits_of([9] * 4), algorithm.init_step_state(batch))
    assert batch.input_ids is ids and ids.data_ptr() == place and ids.tolist() == [1, 9, 9, 9]


def test_a_block_that_the_engine_restarts() -> None:
    algorithm = create_algorithm("ParadecThreshold", True, threshold=1.0)
    batch = forward_batch([[1, MASK, MASK, MASK]], ["a"], [4])
    states = algorithm.init_step_state(batch)
    algorithm.step(batch, logits_of([9] * 4), states)
    assert batch.input_ids.tolist() == [1, 9, MASK, MASK]
    batch.input_ids.copy_(torch.tensor([1, 2, MASK, MASK]))
    done = []
    for _ in range(3):
        done.append(algorithm.step(batch, logits_of([9] * 4), states)[0])
    assert done == [False, False, True] and batch.input_ids.tolist() == [1, 2, 9, 9]


def test_an_end_token_of_the_configuration_ends_the_block() -> None:
    logits = logits_of([1, END, 7, 7])
    logits[2:] = 0.0  # low confidence after the end token
    for ends, forwards in (((), 4), ((END,), 2)):
        algorithm = create_algorithm("ParadecThreshold", True, eos_token_ids=list(ends))
        batch = forward_batch([[1, MASK, MASK, MASK]], ["a"], [4])
        states, count = algorithm.init_step_state(batch), 0
        while not algorithm.step(batch, logits, states)[0]:
            count += 1
        assert count + 1 == forwards
    assert batch.input_ids.tolist() == [1, END, END, END]


def test_draws_depend_on_seed_request_and_position() -> None:
    def draw(names: list[str], starts: list[int], **settings: Any) -> list[list[int]]:
        algorithm = create_algorithm("ParadecThreshold", temperature=1.0, threshold=0.0, **settings)
        batch = forward_batch([[MASK] * 4 for _ in names], names, starts)
        algorithm.step(batch, torch.zeros(4 * len(names), VOCAB), algorithm.init_step_state(batch))
        return batch.input_ids.view(-1, 4).tolist()

    rows = draw(["a", "b", "a"], [4, 4, 8])
    assert rows[0] != rows[1] and rows[0] != rows[2] and MASK not in rows[0]
    assert draw(["a", "b", "a"], [4, 4, 8]) == rows
    assert draw(["b"], [4]) == [rows[1]]  # independent of other rows
    assert draw(["b"], [4], seed=1) != [rows[1]]


def test_parts_of_a_block() -> None:
    for steps in (2, 4):  # of the whole block, half of them for each part
        for prefix in ([], [1], [1, 2], [1, 2, 3]):
            algorithm = create_algorithm("ParadecLowConfidence", True, block_length=2, steps=steps)
            batch = forward_batch([prefix + [MASK] * (4 - len(prefix))], ["a"], [8])
            states, ids_after_steps = algorithm.init_step_state(batch), []
            while not algorithm.step(batch, logits_of([9] * 4), states)[0]:
                ids_after_steps.append(batch.input_ids.tolist())
            masks = [min(2, 4 - len(prefix)), max(0, 2 - len(prefix))]  # of the second part and of the first
            num_steps = sum(min(steps // 2, num_masks) for num_masks in masks)
            assert len(ids_after_steps) == num_steps <= algorithm.max_steps(4) - 1
            assert ids_after_steps[-1] == prefix + [9] * (4 - len(prefix))
            assert all(ids[2:].count(MASK) == masks[0] for ids in ids_after_steps if MASK in ids[:2])


def test_errors_of_non_finite_logits_name_the_request() -> None:
    algorithm = create_algorithm("ParadecThreshold", True)
    batch = forward_batch([[1, MASK, MASK, MASK], [2, MASK, MASK, MASK]], ["a", "b"], [4, 8])
    states, logits = algorithm.init_step_state(batch), logits_of([9] * 4, [9] * 4)
    logits[6, 3] = torch.nan
    refuses(lambda: algorithm.step(batch, logits, states), "request 'b', block at position 8", FloatingPointError)
    assert batch.input_ids.tolist() == [1, MASK, MASK, MASK, 2, MASK, MASK, MASK]
    assert algorithm.step(batch, logits_of([9] * 4, [8] * 4), states) == [False, False]
    assert batch.input_ids.tolist() == [1, 9, 9, 9, 2, 8, 8, 8]


def test_memory_is_limited_to_the_latest_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paradec.integrations.engines.sglang.MAX_MEMORIES", 2)
    algorithm = create_algorithm("ParadecSaber")
    for name in ("a", "b", "a", "c"):
        algorithm.run(lambda _: logits_of([9] * 4), forward_batch([[1, MASK, MASK, MASK]], [name], [4]), [None])
    assert [*algorithm._memories] == ["a", "c"]


def test_the_entry_point_needs_no_sglang() -> None:
    entry_points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    module, _, name = entry_points["sglang.srt.plugins"]["paradec"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    assert not [name for name in sys.modules if name.split(".")[0] == "sglang"]

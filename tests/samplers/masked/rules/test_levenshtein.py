"""LLaDA2.2's rule: recorded steps of SGLang's code, recorded answers of a checkpoint, and limits of its edits.

The recordings are in `tests/golden/autumn`: `indel` and `llada22`."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from places import GOLDEN
from recorded import golden, read_arrays, read_json, read_json_unrecorded, replay_with_margin
from small_models import DELETE, MASK, SPLIT, tiny
from torch import Tensor

import paradec
from paradec.core.facts import ModelFacts
from paradec.core.query import Query
from paradec.models.adapter import Model

INDEL = [path for path in sorted(golden("autumn").glob("indel/*.json")) if "cases" in read_json_unrecorded(path)]
CASES = [(path, number) for path in INDEL for number in range(len(read_json_unrecorded(path)["cases"]))]


class RecordedModel:
    """A model that returns the recorded logits [rows, block length, vocabulary] in `logits` for any input."""

    tokenizer, default_max_new_tokens, default_block_length = None, 8, None
    pads = supports_store = supports_visibility = True
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, case: dict[str, Any]):
        ids = {name: case[name] for name in ("delete_token_id", "split_token_id")} | {"mask_token_id": case["mask_id"]}
        blocks = {"topology": "block_causal", "block_length": case["block_length"]}
        self.facts = ModelFacts(case["vocab_size"], **blocks, **ids)
        self.logits: Tensor

    def __call__(self, query: Query, store: Any = None) -> Tensor:
        assert query.wanted is not None
        row_logits = self.logits[torch.as_tensor(query.rows)]
        at = query.positions.gather(1, query.wanted) - self.facts.block_length
        return row_logits.gather(1, at.unsqueeze(2).expand(-1, -1, row_logits.shape[2])).clone()


def create_sampler(settings: dict[str, Any]) -> Any:
    thresholds = {"threshold": settings["threshold"], "editing_threshold": settings["edit_threshold"]}
    return paradec.samplers.create("levenshtein", max_post_steps=settings["max_post_edit_steps"], **thresholds)


def every_third(cases: list[Any]) -> list[Any]:
    """Return cases as parameters of a test. Every third case runs by default; the rest is marked `full`."""
    marks = [() if index % 3 == 0 else (pytest.mark.full,) for index in range(len(cases))]
    return [pytest.param(*case, marks=mark) for case, mark in zip(cases, marks, strict=True)]


@pytest.mark.parametrize(("path", "number"), every_third(CASES))
def test_recorded_steps(path: Path, number: int) -> None:
    case, logits = read_json(path)["cases"][number], read_arrays(path.with_name("logits.safetensors"))
    with replay_with_margin(case["name"], case):
        model, sampler, block = RecordedModel(case), create_sampler(case["used"]), case["block_length"]
        mask_id = model.facts.mask_id
        for row, (entry, in_prompt) in enumerate(zip(case["ids"], case["given"], strict=True)):
            count = sum(in_prompt)  # number of prompt tokens at the front of the block
            # replace masks in the prompt, which paradec would fill; the recorded logits do not depend on the tokens
            ids = [0 if fixed and token == mask_id else token for token, fixed in zip(entry, in_prompt, strict=True)]
            prompt = [0] * block + ids[:count]  # add a block, because a prompt must not be empty
            state = sampler.start(model, [prompt], max_new_tokens=2 * block - len(prompt), eos_early_stop=False)
            assert state.canvas[0, block:].tolist() == ids
            for step in case["steps"]:
                is_finished = step["closed"][row] or step["done"][row]
                if not state.done:
                    logits_of_step = logits[case["name"]][step["logits"]]
                    model.logits = logits_of_step.view(len(case["ids"]), block, -1)[row : row + 1]
                    sampler.commit(state, sampler.step(model, state))
                    assert state.done == is_finished
                assert is_finished or not state.done
                assert state.canvas[0, block + count :].tolist() == step["ids"][row][count:]
                if not state.done:
                    assert state.memory["post_steps"].tolist() == [step["post_steps"][row]]
                    assert state.block_step.tolist() == [step["steps"][row]]
                    assert state.memory["original"][0].tolist() == [flag > 0 for flag in step["original"][row][count:]]
            assert state.done
        assert case["forwards"] == len(case["steps"]) <= case["max_steps"]
        assert all(case["used"][name] == value for name, value in case["settings"].items())


TINY = GOLDEN / "autumn" / "llada22" / "llada22-tiny"
FACTS = read_json_unrecorded(TINY / "forwards.json")["facts"]
ANSWERS = read_json_unrecorded(TINY / "answers.json")["cases"]
ANSWER_FILES = sorted(golden("autumn").glob("**/answers.json"))
RECORDED = [(path, number) for path in ANSWER_FILES for number in range(len(read_json_unrecorded(path)["cases"]))]


@functools.cache
def load_model(folder: Path) -> Model:
    """Load a checkpoint once, with the facts in `forwards.json`."""
    facts = read_json(folder / "forwards.json")["facts"]
    return paradec.load(folder, dtype="float64", mask_token_id=facts["mask"], block_length=facts["block"])


@pytest.fixture(scope="module")
def tiny22() -> Model:
    return load_model(TINY)


@pytest.mark.thinned
@pytest.mark.parametrize(("path", "number"), RECORDED)
@pytest.mark.parametrize("cache", ["none", "block"])
def test_recorded_answers(path: Path, number: int, cache: str) -> None:
    case, model = read_json(path)["cases"][number], load_model(path.parent)
    block = model.facts.block_length
    with replay_with_margin(f"{path.parent.name}, answer {number}", case):
        sampler = create_sampler(case["settings"])
        state = sampler.start(model, [case["prompt_ids"]], max_new_tokens=case["max_new_tokens"], cache=cache)
        calls = 0
        for recorded in case["blocks"]:
            first, closed = recorded["block"] * block, False
            for step in recorded["steps"]:
                if closed:  # this call only stores the block; paradec stores it in the next block's first call
                    continue
                sampler.commit(state, sampler.step(model, state))
                calls, closed = calls + 1, step["closed"]
                stop = min(first + block, int(state.end[0]))  # padding follows an end token
                assert state.canvas[0, first:stop].tolist() == step["ids"][: stop - first]
        assert state.done and state.nfe.tolist() == [calls]
        request = {"sampler": sampler, "max_new_tokens": case["max_new_tokens"], "cache": cache}
        out = paradec.generate(model, [case["prompt_ids"]], **request)
        begin, answer = len(case["prompt_ids"]), case["answer"]
        assert out.new_tokens[0, : out.tokens[0]].tolist() == answer
        assert case["canvas"][: begin + len(answer)] == [*case["prompt_ids"], *answer]
        prefill = begin >= block
        assert case["forwards"] == prefill + sum(len(recorded["steps"]) for recorded in case["blocks"])


def test_traces_contain_deletions_and_insertions(tiny22: Model) -> None:
    num_remasked = 0
    for case in ANSWERS[:4]:
        prompt, canvases = case["prompt_ids"], list[list[int]]()
        request = {"max_new_tokens": case["max_new_tokens"], "eos_early_stop": False, "trace": True}
        request["callback"] = lambda state, commit, canvases=canvases: canvases.append(state.canvas[0].tolist())
        out = paradec.generate(tiny22, [prompt], sampler=create_sampler(case["settings"]), **request)
        text = prompt + [FACTS["mask"]] * (len(canvases[0]) - len(prompt))
        for step, after in zip(out.trace.steps, canvases, strict=True):
            for _, position, token, _ in step.commits:
                num_remasked += token == FACTS["mask"]
                text[position] = token
            assert text == after
        assert out.trace.replay()[0][: out.sequences.shape[1]] == out.sequences[0].tolist()
    assert num_remasked


@pytest.mark.parametrize("settings", [{}, {"max_post_steps": 0}, {"threshold": 1.0, "max_post_steps": 3}])
def test_the_steps_of_a_block_are_bounded(settings: dict[str, Any]) -> None:
    """A block takes at most (block length + max_post_steps + 1) steps, and ends without masks and control ids."""
    block = 6
    case = {"vocab_size": 9, "mask_id": 8, "block_length": block, "delete_token_id": 6, "split_token_id": 7}
    method = paradec.samplers.create("levenshtein", **settings)
    for seed in range(15):
        model, draw = RecordedModel(case), torch.Generator().manual_seed(seed)
        state = method.start(model, [[1] * (block + seed % block)], max_new_tokens=block - seed % block)
        steps = 0
        while not state.done:
            noise = torch.randn(1, block, 9, generator=draw) * 3
            noise[..., 6:8] += 2.0  # most predictions are deletions and splits
            model.logits = noise
            method.commit(state, method.step(model, state))
            steps += 1
        assert steps <= block + method.max_post_steps + 1
        assert (state.canvas < 6).all()


def test_prompt_tokens_keep_their_positions() -> None:
    model = tiny(2, "block_causal")
    prompt = [5, DELETE, SPLIT, MASK, MASK, 7, MASK, DELETE, MASK, MASK, MASK, 9]
    state = paradec.samplers.create("levenshtein").start(model, [prompt], max_new_tokens=4)
    fixed, method = [i for i, token in enumerate(prompt) if token != MASK], paradec.samplers.create("levenshtein")
    while not state.done:
        method.commit(state, method.step(model, state))
        assert [int(state.canvas[0, i]) for i in fixed] == [prompt[i] for i in fixed]
    assert not (state.canvas == MASK).any()


def test_control_ids_may_be_settings_of_the_sampler() -> None:
    model = tiny(2, "block_causal")
    model.facts = dataclasses.replace(model.facts, delete_token_id=None)
    with pytest.raises(ValueError, match="delete_token_id"):
        paradec.generate(model, [[1, 2]], sampler="levenshtein", max_new_tokens=4)
    sampler = paradec.samplers.create("levenshtein", delete_token_id=DELETE, split_token_id=SPLIT)
    assert paradec.generate(model, [[1, 2]], sampler=sampler, max_new_tokens=4).tokens[0] <= 4

"""Nemotron-Labs-Diffusion against recordings in `tests/golden/autumn/nld`.

The recordings are float32 forwards of transformers' module in all three modes, and traces of the published loops. Each
call evaluates one row. The published loops may predict the mask id, which paradec never does; no trace depends on it.
"""

import copy
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from places import GOLDEN
from recorded import (
    Refused,
    find_checkpoint,
    golden,
    read_arrays,
    read_json,
    read_json_unrecorded,
    replay,
    replay_with_margin,
)
from torch import Tensor
from traces import scores_of

import paradec
from paradec import samplers
from paradec.core.family_queries import CausalQuery
from paradec.core.query import Query, StoreCall, WindowLogits, WindowQuery
from paradec.kernels.token_stats import draw
from paradec.models.base import Model
from paradec.models.checkpoint import CheckpointError

FOLDERS = sorted(path.parent for path in (GOLDEN / "autumn" / "nld").glob("*/config.json"))
NEW = 13


@functools.cache
def model_of(folder: Path, topology: str | None = None, dtype: str = "float64") -> Model:
    path = folder / "forwards.json"
    mask = read_json(path)["facts"]["mask"] if path.exists() else None
    return paradec.load(folder, topology=topology, dtype=dtype, mask_token_id=mask)


def first_model() -> Model:
    return model_of(FOLDERS[0])


def make_prompts(model: Model, lengths: tuple[int, ...] = (5, 1, 9)) -> list[list[int]]:
    special = {model.facts.mask_id, *model.facts.eos_token_ids}
    usual = [token for token in range(20, model.facts.vocab_size) if token not in special]
    return [usual[7 * row : 7 * row + length] for row, length in enumerate(lengths)]


def forwards() -> list[Any]:
    result = []
    for path in sorted(golden("autumn").glob("**/forwards.json")):
        if read_json_unrecorded(path)["schema"].startswith("paradec-golden-nld/"):
            names = [case["name"] for case in read_json_unrecorded(path)["cases"]]
            result += [pytest.param(path, index, id=f"{path.parent.name}-{name}") for index, name in enumerate(names)]
    return result


@pytest.mark.parametrize("path", sorted({param.values[0] for param in forwards()}), ids=lambda path: path.parent.name)
def test_facts_equal_the_recorded_ones(path: Path) -> None:
    facts, model = read_json(path)["facts"], model_of(path.parent)
    with replay(f"{path.parent.name}, facts"):
        assert model.facts.mask_id == facts["mask"] and facts["eos"] in model.facts.eos_token_ids
        assert model.facts.block_length == facts["block"]
        assert read_json_unrecorded(path.parent / "config.json")["bos_token_id"] == facts["bos"]


def evaluate(model: Model, ids: list[int], start: int, store: Any, mask: Any, is_stored: bool, **extra: Any) -> Tensor:
    """Return the logits [T, V] of one call. mask: attention mask [T, T]; True: full; None: the model's default."""
    tokens, width = torch.tensor([ids]), len(ids)
    positions = torch.arange(start, start + width)[None]
    common: dict[str, Any] = {"rows": np.array([0]), "tokens": tokens, "positions": positions}
    if store is not None:
        slots = positions if is_stored else torch.full_like(positions, -1)
        common["store"] = StoreCall(torch.tensor([0]), slots, np.array([0]), start + (width if mask is None else 0))
    if mask is not None:
        full = torch.ones(1, width, width, dtype=torch.bool)
        common["visible"] = full if mask is True else mask[None]
    query: Query
    if model.facts.topology == "causal":
        query = CausalQuery(**common, index=np.array([0]))
    else:
        query = WindowQuery(**common, **extra, window=WindowLogits(np.array([0])))
    return (model(query) if store is None else model(query, store))[0]


def logits_of_case(model: Model, folder: Path, case: dict[str, Any]) -> Tensor:
    ids, count = case["input_ids"], len(case["input_ids"])
    if case["kind"] == "block_causal":
        return evaluate(model, ids, 0, None, None, False, origin=torch.tensor([[case["origin"]]]))
    rows = torch.arange(count)
    causal = rows[:, None] >= rows
    if case["kind"] == "one_call":
        return evaluate(model, ids, 0, None, causal | (rows[:, None] >= case["causal_below"]), False)
    store, start = model.make_store(1, 64), 0
    is_causal = model.facts.topology == "causal"
    for call in case["before"]:
        size = len(call["input_ids"])
        mask = None if is_causal else True if not call["causal"] else causal_mask(size)
        evaluate(model, call["input_ids"], start, store, mask, True)
        start += size
    mask = None if is_causal else True if not case["causal"] else causal_mask(count)
    if not case["adapter"]:
        return evaluate(model, ids, start, store, mask, is_causal)
    with model.self_drafting.adapter.apply_to(model.module):
        return evaluate(model, ids, start, store, mask, is_causal)


def causal_mask(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


@pytest.mark.thinned
@pytest.mark.parametrize(("path", "number"), forwards())
def test_forwards_equal_the_recorded_ones(path: Path, number: int) -> None:
    folder, case = path.parent, read_json(path)["cases"][number]
    plain = all(call["causal"] for call in case["before"]) and case.get("causal")
    modes = ["block_causal"] if case["kind"] == "block_causal" else [None, "causal"] if plain else [None]
    expected = read_arrays(folder / "forwards.safetensors")[case["name"]]
    later = [other["name"] for other in read_json_unrecorded(path)["cases"][number + 1 :]]
    with replay(f"{folder.name}, {case['name']}{' (earlier)' * (case['name'] in later)}"):
        if case["name"] in later:
            raise Refused("forwards.safetensors holds the tensors of a later case with this name")
        for mode in modes:
            outputs = logits_of_case(model_of(folder, mode, "float32"), folder, case)
            torch.testing.assert_close(outputs, expected, atol=2e-4, rtol=0)


def list_traces(mode: str) -> list[Any]:
    """List the recorded traces of one mode."""
    result = []
    for path in sorted(golden("autumn").glob("nld/traces/*.json")):
        if read_json_unrecorded(path)["mode"] == mode:
            result.append(pytest.param(path, id=path.stem))
    return result


def cache_params(actual: list[Any]) -> list[Any]:
    """Pair every recording with both caches. Most pairs run only in full test runs."""
    models, cases = sorted({read_json_unrecorded(param.values[0])["model"] for param in actual}), []
    for number, param in enumerate(actual):
        (path,) = param.values
        for i, cache in enumerate(("none", "block")):
            runs = (number + models.index(read_json_unrecorded(path)["model"])) % 2 == 0 and number // 2 % 2 == i
            marks = () if runs else (pytest.mark.full,)
            cases.append(pytest.param(path, cache, id=f"{param.id}-{cache}", marks=marks))
    return cases


def replayed_cases(path: Path, trace: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(f"{path.stem}, case {number}", case) for number, case in enumerate(trace["cases"])]


def has_end_tokens(trace: dict[str, Any]) -> bool:
    return trace["settings"].get("eos", 0) is not None


def replaying_sampler(name: str, numbers: list[float], **settings: Any) -> Any:
    """Create a masked sampler that draws with recorded numbers and removes those that it uses.
    A step that seeds a block with its first token uses one number; other steps use one for each mask."""
    cls: Any = samplers.get(name)

    @dataclass(frozen=True)
    class Replaying(cls):  # type: ignore[misc]
        def weighs_mask(self, state: Any) -> bool:
            return True

        def draw_tokens(self, state: Any, logits: Tensor, query: Any, generator: Any) -> Tensor:
            masks = (state.window.read(state.canvas) == state.mask_id)[0].nonzero()[:, 0].tolist()
            is_seeding = state.seeding is not None and bool(state.seeding[0])
            uniform = torch.full(logits.shape[:2], 0.5, dtype=torch.float64)
            for column in masks[:1] if is_seeding else masks:
                uniform[0, column] = numbers.pop(0)
            return draw(logits.double().softmax(-1), uniform)

    return Replaying(**settings)


@pytest.mark.thinned
@pytest.mark.parametrize("path", list_traces("ar"))
def test_causal_traces(path: Path) -> None:
    trace = read_json(path)
    model = model_of(find_checkpoint(trace["model"], "autumn"), "causal")
    temperature = trace["settings"].get("temperature", 0.0)
    for name, case in replayed_cases(path, trace):
        with replay_with_margin(name, case):
            request = {"max_new_tokens": case["max_new_tokens"], "eos_early_stop": has_end_tokens(trace)}
            sampler = samplers.create("sjd", window=1)
            state = sampler.start(model, [case["prompt_ids"]], **request, temperature=temperature)
            numbers = iter([*case.get("uniforms", []), *[0.5] * case["max_new_tokens"]])
            state.uniform = lambda rows, positions, count, *rest, numbers=numbers: torch.full(
                (*positions.shape, count), next(numbers), dtype=torch.float64
            )
            while not state.done:
                sampler.commit(state, sampler.step(model, state))
            begin = len(case["prompt_ids"])
            assert state.canvas[0, begin : begin + len(case["tokens"])].tolist() == case["tokens"]
            later = [[begin + index, 1, 1, 1, 0] for index in range(int(state.nfe[0]) - 1)]
            assert case["calls"] == [[0, begin, 1, 1, 0], *later] and case["forwards"] == len(case["calls"])


@pytest.mark.thinned
@pytest.mark.parametrize(("path", "cache"), cache_params(list_traces("diffusion")))
def test_block_diffusion_traces(path: Path, cache: str) -> None:
    trace = read_json(path)
    settings = trace["settings"]
    threshold, block = settings["threshold"], settings["block"]
    context = settings.get("causal_context", True)
    model = model_of(find_checkpoint(trace["model"], "autumn"), None if context else "block_causal")
    by_count = threshold is None or threshold > 1
    name, extra = ("low_confidence", {}) if by_count else ("threshold", {"threshold": threshold})
    for label, case in replayed_cases(path, trace):
        with replay_with_margin(label, case):
            numbers = [*case.get("uniforms", []), *[0.5] * 99]
            sampler = (
                replaying_sampler(name, numbers, **extra) if "uniforms" in case else samplers.create(name, **extra)
            )
            new, begin = case["max_new_tokens"], len(case["prompt_ids"])
            request: dict[str, Any] = {"steps": new} if by_count else {}
            request |= {"blocks": paradec.FixedBlocks(block), "cache": cache, "eos_early_stop": has_end_tokens(trace)}
            request["temperature"] = settings.get("temperature", 0.0)
            state = sampler.start(model, [case["prompt_ids"]], max_new_tokens=new, **request)
            commits, evaluated, scores = [], [], []
            while not state.done:
                before = state.canvas.clone()
                proposal = sampler.step(model, state)
                scores.append(scores_of(sampler.commit(state, proposal))[0])
                evaluated.append(int(proposal.cost.queries[0].forwarded[0]))
                changed = (state.canvas[0] != before[0]).nonzero()[:, 0].tolist()
                commits.append({(column, int(state.canvas[0, column])) for column in changed})
            recorded, width, confidences = [], [], []
            for step in case["steps"]:
                if "step" in step:
                    recorded.append({(column, token) for column, token in step["commit"]})
                    width.append(block)
                    confidences.append(dict(zip((column for column, _ in step["commit"]), step["conf"], strict=True)))
                elif step["seed"] != model.facts.mask_id:
                    recorded.append({(begin + step["block"] * block, step["seed"])})
                    width.append(begin if not step["block"] else block)
                    confidences.append({})
            if state.stopped[0]:  # later tokens are padding
                commits, recorded = (
                    [{c for c in step if c[0] < state.end[0]} for step in steps] for steps in (commits, recorded)
                )
                assert not any(recorded[len(commits) :])
                recorded, width = recorded[: len(commits)], width[: len(commits)]
            assert commits == recorded
            for actual, expected, changed in zip(scores, confidences, commits, strict=False):
                assert all(abs(actual[i] - expected[i]) < 2e-4 for i, _ in changed if i in expected)
            assert state.canvas[0, begin : begin + len(case["tokens"])].tolist() == case["tokens"]
            if cache == "block" and model.facts.topology == "causal_context":
                assert evaluated == width
            # after each block, a further forward stores it
            calls, last = [[0, begin, int(context), 1, 0]], 0
            for step in case["steps"]:
                start = begin + step["block"] * block
                if "seed" in step and step["block"]:
                    calls.append([start - block, block, int(context), 1, 0])
                calls += [[start, block, 0, 0, 0]] if "step" in step else []
                last = start
            assert case["calls"] == [*calls, [last, block, int(context), 1, 0]]
            assert case["forwards"] == len(case["calls"])


METHODS = ["threshold", "credit", "klass", "editing", "low_confidence"]


@pytest.mark.thinned
@pytest.mark.parametrize("sampler", METHODS)
@pytest.mark.parametrize("cache", ["none", "block"])
def test_rows_do_not_depend_on_their_neighbours(sampler: str, cache: str) -> None:
    model = first_model()
    request = {"sampler": sampler, "temperature": 0.7, "seed": 3, "max_new_tokens": NEW, "logprobs": 1}
    rows = make_prompts(model)
    together = paradec.generate(model, rows, cache=cache, **request)
    plain = paradec.generate(model, rows, **request)
    assert together.new_tokens.tolist() == plain.new_tokens.tolist()
    torch.testing.assert_close(together.logprobs.chosen, plain.logprobs.chosen, equal_nan=True, atol=1e-9, rtol=0)
    for row, output in enumerate(paradec.generate_many(model, rows, cache=cache, batch_size=2, **request)):
        assert output.new_tokens.tolist() == [together.new_tokens[row].tolist()]
        alone = paradec.generate(model, [rows[row]], cache=cache, **request)
        assert output.new_tokens.tolist() == alone.new_tokens.tolist()
        assert output.row_nfe == [together.row_nfe[row]] == alone.row_nfe


def test_the_first_token_of_a_block_is_causal() -> None:
    model = first_model()
    causal = paradec.generate(
        model_of(FOLDERS[0], "causal"), make_prompts(model), sampler="jacobi", temperature=0, max_new_tokens=NEW
    )
    for sampler in METHODS:
        blocks = paradec.FixedBlocks(1)
        output = paradec.generate(model, make_prompts(model), sampler=sampler, blocks=blocks, max_new_tokens=NEW)
        assert output.new_tokens.tolist() == causal.new_tokens.tolist()


def test_infilling_keeps_tokens_between_masks() -> None:
    model = first_model()
    mask, (row,) = model.facts.mask_id, make_prompts(model, (3,))
    block = model.facts.block_length
    holes = [*row, *[mask] * block, 40, *[mask] * (block + 1), 41, mask]
    for request in ({}, {"guidance_scale": 1.5}):
        actual = [
            paradec.generate(model, [holes], sampler="credit", cache=cache, max_new_tokens=0, **request)
            for cache in ("none", "block")
        ]
        assert actual[0].sequences.tolist() == actual[1].sequences.tolist()
        assert mask not in actual[0].sequences
        fixed = [column for column, token in enumerate(holes) if token != mask]
        assert actual[0].sequences[0, fixed].tolist() == [holes[column] for column in fixed]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"sampler": "freedave"}, "several steps in one call"),
        ({"blocks": "pipelined"}, "before the previous one is final"),
        ({"suffix": 8}, "suffix"),
        ({"cache": "prefix"}, "the cache needs a bidirectional"),
        ({"cache": "block", "keep_prefix": True}, "begin where its prompt ends"),
    ],
)
def test_unsupported_requests_are_refused(request_: dict[str, Any], message: str) -> None:
    model = first_model()
    with pytest.raises(ValueError, match=message):
        paradec.generate(model, make_prompts(model), **{"sampler": "credit", "max_new_tokens": NEW} | request_)


def test_facts_come_from_the_files(tmp_path: Path) -> None:
    config = json.loads((FOLDERS[0] / "config.json").read_text())
    for topology in (None, "causal", "block_causal"):
        model = model_of(FOLDERS[0], topology)
        facts, drafts = model.facts, model.self_drafting
        assert facts.topology == (topology or "causal_context")
        assert facts.prediction == ("shifted" if topology == "causal" else "same")
        assert facts.block_length == (None if topology == "causal" else config["block_size"])
        assert (facts.mask_token_id, drafts.block_length) == (config["mask_token_id"], config["block_size"])
        assert facts.eos_token_ids == (config["eos_token_id"],)
    assert paradec.load(FOLDERS[0], block_length=2).facts.block_length == 2
    refuses(lambda: paradec.load(FOLDERS[0], topology="bidirectional"), "topology='bidirectional'", CheckpointError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dlm_paradigm": "autoregressive"}, "dlm_paradigm"),
        ({"model_type": "nemotron_labs_diffusion_vlm"}, "reads pictures"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"block_size": None}, "block_length"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_unsupported_configs_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((FOLDERS[0] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (tmp_path / "model.safetensors").write_bytes((FOLDERS[0] / "model.safetensors").read_bytes())
    refuses(lambda: paradec.load(tmp_path), message, CheckpointError)


def test_wrapped_modules_decode_like_loaded_ones() -> None:
    model = first_model()
    facts: dict[str, Any] = {"mask_token_id": model.facts.mask_id, "prediction": "same", "topology": "causal_context"}
    facts["block_length"] = model.facts.block_length
    wrapped = paradec.wrap(copy.deepcopy(model.module), **facts, block_align="prompt")
    request = {"sampler": "credit", "cache": "block", "max_new_tokens": NEW, "eos_early_stop": False}
    answers = [paradec.generate(each, make_prompts(model), **request).new_tokens.tolist() for each in (model, wrapped)]
    assert answers[0] == answers[1]
    refuses(lambda: paradec.wrap(copy.deepcopy(model.module), **facts), "block_align='absolute'.*'prompt'")


@pytest.mark.thinned
@pytest.mark.parametrize("topology", [None, "causal", "block_causal"])
def test_saving_keeps_facts_and_adapter(tmp_path: Path, topology: str | None) -> None:
    model_of(FOLDERS[0], topology).save_pretrained(tmp_path)
    saved, source = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, FOLDERS[0]))
    assert saved.keys() == source.keys()
    for mode in (None, "causal"):
        repeated, before = paradec.load(tmp_path, topology=mode, dtype="float64"), model_of(FOLDERS[0], mode)
        assert repeated.facts == paradec.core.facts.ModelFacts(**vars(before.facts) | {"name": repeated.facts.name})
        for name, (down, up, scale) in before.self_drafting.adapter.products.items():
            product = repeated.self_drafting.adapter.products[name]
            assert torch.equal(product[0], down) and torch.equal(product[1], up) and product[2] == scale
    assert (FOLDERS[0] / "linear_spec_lora").is_dir() == (tmp_path / "linear_spec_lora").is_dir()

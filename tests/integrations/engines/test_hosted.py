"""Rows with logits from an engine have the tokens, forwards and steps of `paradec.generate`."""

import dataclasses
import random
from functools import partial
from typing import Any

import pytest
import torch
from decoding import refuses
from engines import HostEngine
from small_models import END, MASK, VOCAB, tiny

import paradec
from paradec import samplers
from paradec.core.facts import ModelFacts
from paradec.integrations.engines.hosted import Hosted, why_unsupported
from paradec.models.adapter import Model

FACTS = ModelFacts(VOCAB, MASK, (END,), topology="block_causal", block_length=4)


@pytest.fixture(scope="module")
def causal() -> Model:
    return tiny(2, "block_causal")


def draw_request(draw: random.Random, sampler: Any) -> dict[str, Any]:
    request = {"temperature": draw.choice((0.0, 0.7)), "top_k": draw.choice((None, 5))}
    request |= {"eos_early_stop": draw.random() < 0.7} | ({"steps": 6} if sampler.uses_steps else {})
    return {name: value for name, value in request.items() if name not in sampler.unsupported}


def assert_rows_equal_generate(model: Model, sampler: Any, rows: dict[int, Any], draw: random.Random) -> None:
    """Decode rows (prompt, request) that start and end at different times, and compare each with `generate`."""
    hosted = Hosted(sampler, model.facts)
    engine, waiting, steps = HostEngine(model, hosted), dict(rows), dict.fromkeys(rows, 0)
    while waiting or len(hosted):
        for key in [key for key in waiting if draw.random() < 0.5]:
            prompt, request = waiting.pop(key)
            fields = {name: value for name, value in request.items() if name != "max_new_tokens"}
            engine.add(key, prompt, request["max_new_tokens"], **fields)
        for key, stepped in engine.round([key for key in hosted.keys() if draw.random() < 0.7]).items():
            steps[key] += 1
            assert hosted.done(key) == stepped.done
            assert torch.equal(hosted.state(key).canvas[0, : len(rows[key][0])], torch.tensor(rows[key][0]))
            if stepped.done:
                prompt, request = rows[key]
                out = paradec.generate(model, prompt, sampler=sampler, **request)
                answer = out.sequences[0, out.filled[0]].tolist()[: out.tokens[0]]
                assert hosted.answer(key) == answer
                assert engine.ids[key][len(prompt) :][: len(answer)] == answer
                assert steps[key] == out.row_nfe[0]
                hosted.close(key)


@pytest.mark.thinned
@pytest.mark.parametrize("name", [name for name in samplers.names() if why_unsupported(samplers.create(name)) is None])
def test_rows_equal_generate(name: str, causal: Model) -> None:
    draw, sampler = random.Random(name), samplers.create(name)
    first, second = draw_request(draw, sampler), draw_request(draw, sampler)
    rows = {}
    for key, request in enumerate((first, first, first, second)):
        prompt = [draw.randrange(36) for _ in range(draw.choice((1, 2, 3, 5, 6, 7)))]
        rows[key] = prompt, request | {"max_new_tokens": 9, "seed": draw.randrange(2**31)}
    assert_rows_equal_generate(causal, sampler, rows, draw)


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["threshold", "saber"])
@pytest.mark.parametrize(
    ("topology", "prediction"),
    [("bidirectional", "same"), ("bidirectional", "shifted"), ("block_causal", "shifted"), ("block_causal", "same")],
)
def test_models_and_shorter_blocks(name: str, topology: str, prediction: str) -> None:
    model, draw = tiny(1, topology, prediction), random.Random(f"{name} {topology}")
    # a bidirectional model would see masks after the open block, so one block holds the whole answer
    length = 9 if topology == "bidirectional" else 2
    request = {"max_new_tokens": 9, "block_length": length}
    rows = {key: ([draw.randrange(36) for _ in range(3)], request | {"seed": key}) for key in range(2)}
    assert_rows_equal_generate(model, samplers.create(name), rows, draw)


def test_max_length_may_shorten_the_last_block() -> None:
    hosted = Hosted("threshold", dataclasses.replace(FACTS, max_length=10))
    for key in range(2):
        hosted.open(key, [1, 2, 3, 4, 5, 6, 7, 8 + key], 1 + key)
        start, tokens = hosted.window(key)
        assert (start, tokens.tolist()) == (8, [MASK] * 2)
    results = hosted.step(dict.fromkeys(range(2), 9.0 * torch.nn.functional.one_hot(torch.tensor([7, 7]), VOCAB)))
    assert [results[key].tokens.tolist() for key in range(2)] == [[7, 7]] * 2
    assert [hosted.answer(key) for key in range(2)] == [[7], [7, 7]]


def test_edits_report_the_stored_tokens() -> None:
    hosted = Hosted(samplers.create("editing", threshold=0.5, editing_threshold=0.5), FACTS)
    hosted.open(0, [1, 2, 3], 1, eos_early_stop=False)

    def step(token: int) -> tuple[list[int], bool, bool]:
        logits = 20.0 * torch.nn.functional.one_hot(torch.tensor([9, 9, 9, token]), VOCAB).double()
        result = hosted.step({0: logits})[0]
        return result.tokens.tolist(), result.changed, result.closed

    assert step(5) == ([1, 2, 3, 5], True, False)
    assert step(6) == ([1, 2, 3, 6], True, False)  # prompt tokens are not edited
    assert step(6) == ([1, 2, 3, 6], False, True)
    assert hosted.done(0)


def test_answers_only_grow_even_if_the_sampler_rewrites_tokens() -> None:
    torch.manual_seed(0)
    hosted, num_rewritten = Hosted(samplers.create("editing", threshold=0.2, editing_threshold=0.2), FACTS), 0
    for row in range(8):
        hosted.open(row, [1, 2, 3, 4], 12, eos_early_stop=False)
    before: dict[int, list[int]] = {row: [] for row in range(8)}
    blocks: dict[int, list[int]] = {row: [] for row in range(8)}
    while running := [row for row in range(8) if not hosted.done(row)]:
        stepped = hosted.step({row: 4 * torch.randn(4, VOCAB, dtype=torch.float64) for row in running})
        for row in running:
            block = stepped[row].tokens.tolist()
            if any(old != MASK and old != new for old, new in zip(blocks[row], block)):
                num_rewritten += 1
            blocks[row] = [] if stepped[row].closed else block
            answer = hosted.answer(row)
            assert answer[: len(before[row])] == before[row] and MASK not in answer
            before[row] = answer
    assert num_rewritten and all(len(answer) == 12 for answer in before.values())


def test_non_finite_logits_fail_only_their_row() -> None:
    torch.manual_seed(0)
    hosted, single = Hosted("credit", FACTS), Hosted("credit", FACTS)
    logits = {key: torch.randn(4, VOCAB) for key in "abc"}
    for key in "abc":
        hosted.open(key, [1, 2, 3, 4], 8)
    single.open("a", [1, 2, 3, 4], 8)
    broken = logits["b"].clone()
    broken[2, 3] = torch.nan
    actual = hosted.step(logits | {"b": broken})
    expected = single.step({"a": logits["a"]})["a"]
    assert isinstance(actual["b"].error, FloatingPointError) and "at its step 0" in str(actual["b"].error)
    assert not actual["b"].changed and actual["b"].tokens.tolist() == [MASK] * 4
    assert actual["a"].tokens.equal(expected.tokens) and actual["a"].error is None and actual["a"].changed
    # the row continues unchanged
    assert hosted.step({"b": logits["a"]})["b"].tokens.equal(expected.tokens)


def test_logits_of_the_engine_are_not_written_to() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        hosted = Hosted("credit", FACTS)
        hosted.open(0, [1, 2], 6, logits_eos_inf=True)
        logits = torch.randn(4, VOCAB).to(dtype)
        before = logits.clone()
        hosted.step({0: logits})
        assert logits.equal(before)


def test_the_memory_of_a_sequence_moves_to_another_row() -> None:
    torch.manual_seed(0)
    logits = [3 * torch.randn(4, VOCAB) for _ in range(8)]
    full, parts = Hosted("saber", FACTS), Hosted("saber", FACTS)
    full.open(0, [1, 2, 3, 4], 8, eos_early_stop=False)
    parts.open(0, [1, 2, 3, 4], 4, eos_early_stop=False)
    step = 0
    while not parts.done(0):
        parts.step({0: logits[step]})
        full.step({0: logits[step]})
        step += 1
    assert int(parts.copy_sequence_memory(0)["count"]) == 4
    parts.open(1, [1, 2, 3, 4, *parts.answer(0)], 4, eos_early_stop=False)
    parts.set_sequence_memory(1, parts.copy_sequence_memory(0))
    while not full.done(0):
        assert full.step({0: logits[step]})[0].tokens.equal(parts.step({1: logits[step]})[1].tokens)
        step += 1
    refuses(lambda: parts.set_sequence_memory(1, parts.copy_sequence_memory(0)), "key=1 has been stepped")


def test_invalid_input_is_refused_and_changes_no_state() -> None:
    refuses(lambda: Hosted("threshold", ModelFacts(VOCAB, topology="causal")), "has no masks to fill")
    for name in ("freedave", "wino", "adablock", "halton", "diffusion_gemma"):
        refuses(partial(Hosted, name, FACTS), f"sampler '{name}' cannot run inside an engine")
    hosted = Hosted("threshold", FACTS)
    wrong: list[tuple[Any, int, dict[str, Any], str]] = [
        *(([1], 8, {name: value}, f"{name}=") for name, value in (("cache", "dual"), ("guidance_scale", 2.0))),
        *(([1], 8, {name: value}, f"{name}=") for name, value in (("stop_strings", "x"), ("stop", paradec.Prophet()))),
        *(([1], 8, {"block_length": length}, f"block_length={length}") for length in (3, 8)),
        ([1], 8, {"threshold": 0.5}, "unknown argument: 'threshold'"),
        ([1], -1, {}, "max_new_tokens=-1"),
        *((ids, 4, {}, words) for ids, words in (([], "empty"), ([VOCAB], "outside the voc"), ("text", "prompt_ids="))),
        ([[1], [2]], 4, {}, "prompt_ids holds 2 rows"),
    ]
    for ids, new, fields, message in wrong:
        refuses(partial(hosted.open, 0, ids, new, **fields), message, (ValueError, TypeError))
    assert len(hosted) == 0
    hosted.open(0, [1, 2, 3], 1, eos_early_stop=False)
    hosted.open(1, [1, 2, 3], 4)
    refuses(lambda: hosted.open(0, [1], 4), "key=0 is open already")
    valid = torch.randn(4, VOCAB)
    for logits in ({0: valid, 2: valid}, {0: valid, 1: valid[:3]}, {0: valid, 1: valid.long()}, {0: valid, 1: None}):
        refuses(partial(hosted.step, logits), f"key={max(logits)}", (ValueError, TypeError))
        assert hosted.window(0)[1].tolist() == [1, 2, 3, MASK]
    assert hosted.step({0: valid})[0].done
    for call in (lambda: hosted.step({0: valid}), lambda: hosted.window(0)):
        refuses(call, "key=0 is done")
    hosted.close(0)
    refuses(lambda: hosted.close(0), "key=0 is not open")
    assert hosted.keys() == [1]

"""Jacobi decoding in blocks: recorded cases of the public code, and equality with token-by-token decoding."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recorded
import torch
from drafters import GRID, RecordingModel, exactness
from oracles.causal import token_by_token
from recorded import plain, replays
from small_models import tiny
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import paradec
from paradec.core.protocol import decode
from paradec.models.cache_argument import cache_keyword
from paradec.samplers.causal.jacobi import Jacobi

CASES = [(name, recorded.image_case("ceed", name)[0]) for name in recorded.image_cases("ceed", "blocks")]
STALE_NAMES = {name for name, case in CASES if plain(case)["settings"]["mode"].startswith("published")}
FRESH_CASES = [pytest.param(case, id=name) for name, case in CASES if name not in STALE_NAMES]
STALE_CASES = [pytest.param(case, id=name) for name, case in CASES if name in STALE_NAMES]
"""Cases in which the public code does not remove a block's keys and values before it evaluates the block again."""
PROMPTS = [[5, 6, 7, 8], [9], [3, 1, 4, 1, 5, 9, 2, 6]]


def module_of(case: dict[str, Any]) -> LlamaForCausalLM:
    config, weights = recorded.image_case("ceed", f"{case['model']}.config")
    assert config.pop("architecture") == "LlamaForCausalLM"
    module = LlamaForCausalLM(LlamaConfig(**config))
    module.load_state_dict(weights)
    return module.eval()


@pytest.mark.parametrize("case", FRESH_CASES)
@replays("case")
def test_blocks_are_those_of_the_public_code(case: dict[str, Any]) -> None:
    """Compare every iterate, the evaluated positions and logits, published early exits, and commits."""
    settings, blocks = case["settings"], case["blocks"]
    module = module_of(case)
    model, end = paradec.wrap(module), module.config.eos_token_id
    assert model.facts.eos_token_ids == (end,) and settings["eos"] in (None, end)
    group = settings["block"]
    sampler = Jacobi(group=group, max_iterations=settings["max_iter"], early_exit="published")
    suppressed = () if settings["eos"] is not None else (end,)  # the public code sets its logit to -10000
    request = {"temperature": 0, "suppress_tokens": suppressed, "seed": 0}
    # the last block also predicts the token after it
    state = sampler.start(model, [settings["prompt"]], max_new_tokens=len(blocks) * group + 1, **request)
    sampler.commit(state, sampler.step(model, state))
    for block in blocks:
        if state.done:  # the previous block predicted an end token as this block's first token
            break
        start = int(state.committed[0])
        assert int(state.canvas[0, start - 1]) == block["first"]
        assert len(block["calls"]) == len(block["trajectory"]) == block["iterations"] + block["converged"]
        assert block["cached_after"] == block["calls"][-1]["positions"][1]
        # the first iterate; the last slot (0) is for the next block's first token and is not evaluated
        state.memory.write("drafts", np.arange(1), torch.tensor([[*block["random"], 0]]))
        for iterate, call in zip([*block["trajectory"], None], block["calls"], strict=False):
            assert int(state.store.valid.sum()) == call["cached_before"]
            (query,) = sampler.query(state)
            logits = model(query, state.store)
            assert (int(query.positions[0, 0]), int(query.positions[0, -1]) + 1) == tuple(call["positions"])
            assert iterate is None or query.tokens[0].tolist() == iterate
            logits_shown = logits.index_fill(-1, torch.tensor(suppressed, dtype=torch.int64), -10000)
            recorded.assert_checksum(logits_shown, call["logits"])
            assert logits_shown[0].argmax(-1).tolist() == call["argmax"]
            commit = sampler.commit(state, sampler.propose(state, [logits], [query]))
            if end in block["committed"] and int(state.committed[0]) > start:
                break  # a finished row stops inside its block
        else:
            assert int(state.row_step[0]) == 1 + sum(len(b["calls"]) for b in blocks[: blocks.index(block) + 1])
        if end not in [*block["committed"], block["next_first"]]:
            assert commit.values[0].tolist() == [*block["committed"][1:], block["next_first"]]
    answer = state.canvas[0, len(settings["prompt"]) :].tolist()
    expected = [*case["generated"], blocks[-1]["next_first"]]
    cut = expected.index(end) + 1 if end in expected else len(expected)
    assert answer[:cut] == expected[:cut] and state.done
    if cut == len(expected):
        assert state.nfe.tolist() == [case["calls"]]
    assert len(blocks) == next(
        n for n in itertools.count(1) if n * group > settings["max_new_seq_len"] or cut <= n * group
    )
    if sampler.lossless:
        assert case["generated"] == case["greedy"]


@pytest.mark.parametrize("case", STALE_CASES)
@replays("case")
def test_a_block_that_stays_in_the_store_has_another_fixed_point(case: dict[str, Any]) -> None:
    """A loop that never drops keys and values gives the public code's text, which is not greedy; paradec's is."""
    settings, module = case["settings"], module_of(case)
    end = module.config.eos_token_id
    cache, num_cached = DynamicCache(config=module.config), 0

    def predict(tokens: list[int]) -> list[int]:
        nonlocal num_cached
        positions = torch.arange(num_cached, num_cached + len(tokens)).unsqueeze(0)
        logits = module(torch.tensor([tokens]), position_ids=positions, **cache_keyword(module, cache)).logits[0]
        num_cached += len(tokens)
        logits[:, end] = -10000
        return logits.argmax(-1).tolist()

    with torch.no_grad():
        first, generated, calls = predict(settings["prompt"])[-1], [], 1
        for block in case["blocks"]:
            tokens, changed = [first, *block["random"]], True
            while changed:
                tokens_after = predict(tokens)
                calls += 1
                changed = tokens[1:] != tokens_after[:-1]
                tokens = [first, *tokens_after[:-1]]
            first = tokens_after[-1]
            generated += tokens
    assert generated == case["generated"] != case["greedy"] and calls == case["calls"]
    assert num_cached == case["blocks"][-1]["cached_after"]

    model, group = paradec.wrap(module), settings["block"]
    sampler = Jacobi(group=group, max_iterations=settings["max_iter"], early_exit="published")
    request = {"temperature": 0, "suppress_tokens": (end,), "max_new_tokens": len(case["greedy"]), "seed": 0}
    state = sampler.start(model, [settings["prompt"]], **request)
    sampler.commit(state, sampler.step(model, state))
    for block in case["blocks"]:
        start = state.committed.copy()
        if not state.done:
            state.memory.write("drafts", np.arange(1), torch.tensor([[*block["random"], 0]])[:, : state.width])
        while not state.done and (state.committed == start).all():
            sampler.commit(state, sampler.step(model, state))
    assert state.done and state.canvas[0, len(settings["prompt"]) :].tolist() == case["greedy"]


def test_early_exit_prefix_is_greedy_where_the_published_early_exit_is_not() -> None:
    """Checked on the recorded cases with unconverged blocks."""
    count = 0
    for _, case in CASES:
        settings = case["settings"]
        if all(block["converged"] for block in case["blocks"]) or settings["mode"].startswith("published"):
            continue
        model = paradec.wrap(module_of(case))
        request = {"max_new_tokens": len(case["greedy"]), "temperature": 0.0, "seed": 0}
        request |= {"suppress_tokens": model.facts.eos_token_ids} if settings["eos"] is None else {}
        sampler = Jacobi(group=settings["block"], max_iterations=settings["max_iter"])
        out = paradec.generate(model, input_ids=[settings["prompt"]], sampler=sampler, **request)
        assert sampler.lossless and out.new_tokens[0].tolist() == case["greedy"] != case["generated"]
        count += 1
    assert count


MODEL = tiny(2, topology="causal", prediction="shifted", ends=())


@pytest.mark.thinned
@pytest.mark.parametrize(("group", "iterations"), [(1, None), (2, 2), (5, 5), (5, 9), (7, None), (40, None)])
@pytest.mark.parametrize("early_exit", ["prefix", "published"])
def test_as_many_iterations_as_tokens_give_greedy_decoding(group: int, iterations: int | None, early_exit: str) -> None:
    sampler = Jacobi(group=group, max_iterations=iterations, early_exit=early_exit)
    assert sampler.lossless
    for new in (1, 2, 13):
        expected = [token_by_token(MODEL, prompt, new, ()) for prompt in PROMPTS]
        out = paradec.generate(
            MODEL, input_ids=PROMPTS, sampler=sampler, max_new_tokens=new, seed=new, trace=True, temperature=0.0
        )
        assert out.new_tokens.tolist() == expected
        blocks = 1 + -(-(new - 1) // group)
        assert all(forwards <= 1 + (new - 1) + blocks for forwards in out.row_nfe)
        for row, prompt in enumerate(PROMPTS):
            alone = paradec.generate(MODEL, input_ids=[prompt], sampler=sampler, max_new_tokens=new, seed=new)
            assert alone.row_nfe == [out.row_nfe[row]] and alone.new_tokens[0].tolist() == expected[row]


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_the_prefix_of_an_early_exit_is_greedy_decoding(iterations: int) -> None:
    sampler = Jacobi(group=6, max_iterations=iterations)
    out = paradec.generate(MODEL, input_ids=PROMPTS, sampler=sampler, max_new_tokens=13, seed=0)
    assert out.new_tokens.tolist() == [token_by_token(MODEL, prompt, 13, ()) for prompt in PROMPTS]
    lossy = Jacobi(group=6, max_iterations=iterations, early_exit="published")
    assert not lossy.lossless
    published = paradec.generate(MODEL, input_ids=PROMPTS, sampler=lossy, max_new_tokens=13, seed=0)
    assert not torch.equal(published.new_tokens, out.new_tokens) and published.nfe < out.nfe
    # prefill, and `iterations` for each of two blocks of six (the second block also gives the last token)
    assert max(published.row_nfe) <= 1 + 2 * iterations


def test_a_row_can_end_inside_a_block_while_other_rows_continue() -> None:
    end = [token_by_token(MODEL, prompt, 20, ()) for prompt in PROMPTS][0][4]
    model = tiny(2, topology="causal", prediction="shifted", ends=(end,))
    expected = [token_by_token(model, prompt, 20, (end,)) for prompt in PROMPTS]
    assert len(expected[0]) <= 5 and max(map(len, expected)) == 20
    out = paradec.generate(model, input_ids=PROMPTS, sampler=Jacobi(group=16), max_new_tokens=20, seed=0)
    for row, answer in enumerate(expected):
        assert out.new_tokens[row, : len(answer)].tolist() == answer and out.tokens[row] == len(answer)
    # the n-th token is correct after at most n iterations
    assert out.row_nfe[0] <= 1 + len(expected[0]) - 1 < max(out.row_nfe)


def test_an_end_token_in_an_unconverged_draft_does_not_end_the_row() -> None:
    greedy = token_by_token(MODEL, PROMPTS[0], 9, ())
    ends = tuple(sorted({*range(40)} - {*greedy}))  # 40 is the mask
    sampler, request = Jacobi(group=9), {"input_ids": PROMPTS[:1], "max_new_tokens": 9, "seed": 0}
    model = tiny(2, topology="causal", prediction="shifted", ends=ends)
    out, expected = (paradec.generate(wrapped, sampler=sampler, **request) for wrapped in (model, MODEL))
    assert out.new_tokens.tolist() == expected.new_tokens.tolist() == [greedy] and out.row_nfe == expected.row_nfe
    state = sampler.start(model, PROMPTS[:1], max_new_tokens=9, temperature=0, seed=0)
    num_committed = []
    while not state.done:
        num_committed.append(int(sampler.commit(state, sampler.step(model, state)).selected.sum()))
    assert num_committed == [1, *[0] * (len(num_committed) - 2), 8]


@pytest.mark.thinned
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("early_exit", ["prefix", "published"])
def test_sampled_tokens_equal_those_of_token_by_token_decoding(temperature: float, early_exit: str) -> None:
    """Each position has its own random noise, so the fixed point equals token-by-token decoding with this noise."""
    request = {"max_new_tokens": 11, "temperature": temperature, "seed": (4, 5, 6), "top_k": 9, "guidance_scale": 1.3}
    expected = paradec.generate(MODEL, input_ids=PROMPTS, sampler=Jacobi(window=1), **request)
    for group in (1, 4, 40):
        sampler = Jacobi(group=group, early_exit=early_exit)
        out = paradec.generate(MODEL, input_ids=PROMPTS, sampler=sampler, **request)
        assert torch.equal(out.new_tokens, expected.new_tokens)


def test_answers_have_the_model_s_distribution() -> None:
    table = exactness.TableModel.random(5, seed=0)
    settings = ({"group": 3}, {"group": 4, "early_exit": "published"}, {"group": 4, "max_iterations": 2})
    for index, setting in enumerate(settings):
        result = exactness.test_case(Jacobi(**setting), table, 3000, seed=index, temperature=0.8, top_k=4)
        assert min(result["p_values"]) > 0.01 / 6
    lossy = Jacobi(group=4, max_iterations=1, early_exit="published")
    result = exactness.test_case(lossy, table, 3000, temperature=0.8, top_k=4)
    assert max(result["p_values"]) < 1e-6  # the test detects a wrong distribution


def test_images_equal_those_of_token_by_token_decoding() -> None:
    model = RecordingModel()
    prompts = [[3, 1], [2], [7, 7, 7]]
    for temperature in (0.0, 1.0):
        expected = Jacobi(window=1).start(model, prompts, grid=GRID, temperature=temperature, seed=1)
        decode(Jacobi(window=1), model, expected)
        for group in (4, 30):
            sampler = Jacobi(group=group)
            state = sampler.start(model, prompts, grid=GRID, temperature=temperature, seed=1)
            decode(sampler, model, state)
            assert torch.equal(state.canvas, expected.canvas) and (state.nfe < expected.nfe).all()


def test_log_probabilities_equal_those_of_token_by_token_decoding() -> None:
    request = {"max_new_tokens": 11, "seed": 0, "logprobs": 2}
    out, expected = (
        paradec.generate(MODEL, input_ids=PROMPTS, sampler=sampler, **request)
        for sampler in (Jacobi(group=5), Jacobi(window=1))
    )
    torch.testing.assert_close(out.logprobs.chosen, expected.logprobs.chosen, equal_nan=True)


def test_lossless_settings_and_models_without_a_store() -> None:
    ceed = paradec.samplers.create("jacobi", preset="ceed")
    assert not ceed.lossless and Jacobi().lossless and Jacobi(group=4, max_iterations=1).lossless
    assert Jacobi(group=4, max_iterations=4, early_exit="published").lossless

    class SuccessorModule(torch.nn.Module):
        config = SimpleNamespace(vocab_size=7)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return torch.eye(7)[(input_ids + 1) % 7]

    model = paradec.wrap(SuccessorModule(), topology="causal", prediction="shifted")
    with pytest.raises(ValueError, match="early_exit='published' needs a model with a key.value store"):
        paradec.generate(model, input_ids=[[1, 2]], sampler=ceed, max_new_tokens=5)
    out = paradec.generate(model, input_ids=[[1, 2]], sampler=Jacobi(group=3), max_new_tokens=5)
    assert out.new_tokens.tolist() == [[3, 4, 5, 6, 0]]

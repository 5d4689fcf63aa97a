"""The Jacobi family on causal language models: greedy at temperature 0, the contracts of the protocol, bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_models import LLAMA_VOCAB, PROMPTS, close_model, tiny_llama, wrap_causal
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

import paradec
from paradec.core.protocol import decode
from paradec.core.query import Query, StoreCall
from paradec.models.images.grid import Grid
from paradec.samplers.causal.loop import CausalSampler, CausalState

SAMPLERS: dict[str, dict[str, Any]] = {
    "sjd": {"window": 5},
    "sjd, wide": {"window": 16},
    "sjd, token by token": {"window": 1},
    "sjd, repeat": {"window": 5, "init": "repeat_horizontal"},
    "sjd, sample": {"window": 5, "init": "sample_horizontal"},
    "sjd, keep": {"window": 4, "refresh": "keep"},
    "sjd, one-hot": {"window": 4, "guess_distribution": "one_hot"},
    "scd": {"window": 5},
    "scd, maximal": {"window": 5, "refresh": "maximal"},
    "jacobi": {"window": 5},
    "speculative": {},
    "speculative, wide": {"window": 9},
    "speculative, tree": {"tree": (2, 2, 1)},
    "speculative, naive tree": {"tree": ((0,), (1,), (0, 0), (0, 0, 0)), "rule": "naive"},
    "speculative, greedy tree": {"tree": (3, 2), "rule": "greedy"},
    "speculative, k_seq tree": {"tree": (3, 2), "rule": "k_seq"},
}

VARIED = ["sjd", "sjd, sample", "sjd, keep", "scd", "scd, maximal", "jacobi", "speculative", "speculative, tree"]


def made(name: str) -> CausalSampler:
    settings = dict(SAMPLERS[name])
    kind = name.split(",")[0]
    if kind == "speculative":
        settings["drafter"] = close_model()
    return paradec.samplers.create(kind, **settings)


def answers(sampler: CausalSampler, model: Any, prompt: Any, **request: Any) -> tuple[list[list[int]], CausalState]:
    """The new tokens of every row, and the final state."""
    state = sampler.start(model, prompt, **request)
    decode(sampler, model, state)
    spans = zip(state.canvas.tolist(), state.prompt_length, state.end, strict=True)
    return [row[start:stop] for row, start, stop in spans], state


def greedy(module: LlamaForCausalLM, prompt: list[int], new: int) -> list[int]:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.thinned
@pytest.mark.parametrize("name", SAMPLERS)
def test_greedy_equals_token_by_token(name: str) -> None:
    model, sampler = wrap_causal(), made(name)
    expected = [greedy(model.module, prompt, 11) for prompt in PROMPTS]
    together, state = answers(sampler, model, PROMPTS, max_new_tokens=11, temperature=0, seed=0)
    assert together == expected
    assert (state.nfe <= 11).all() and (sampler.window > 1 or (state.nfe == 11).all())
    assert np.sum(state.accepted, 0).tolist() == [11] * 4
    if name.startswith("speculative"):
        assert (state.nfe < 11).all() and (state.draft_nfe > 0).all()


def test_greedy_with_guidance_and_prompts_of_other_lengths() -> None:
    # shorter than the prompt, and longer than all of them
    model, negative = wrap_causal(), [[1, 2, 3], [4], [5, 6, 1, 2, 3, 4, 5, 6, 7, 8], [7, 8, 9, 10]]
    expected = []
    for prompt, other in zip(PROMPTS, negative, strict=True):
        new: list[int] = []
        for _ in range(8):
            with torch.inference_mode():
                cond, uncond = (model.module(torch.tensor([start + new])).logits[0, -1] for start in (prompt, other))
            new.append(int((uncond + 3 * (cond - uncond)).argmax()))
        expected.append(new)
    for name in ("sjd", "speculative", "speculative, tree"):
        found, state = answers(
            made(name), model, PROMPTS, max_new_tokens=8, temperature=0, guidance_scale=3.0, negative_prompt=negative
        )
        assert found == expected
        assert (state.row_forwards == 2 * state.nfe).all()


@pytest.mark.parametrize("name", ["speculative", "speculative, tree", "speculative, greedy tree"])
def test_drafters_stop_one_token_before_the_end(name: str) -> None:
    """A step makes one token more than stand of its drafts, so that the last one is never drafted."""
    model, sampler, new = wrap_causal(), made(name), 11
    depth = {"speculative": sampler.window - 1, "speculative, tree": 3, "speculative, greedy tree": 2}[name]
    for prompt in PROMPTS:
        _, state = answers(sampler, model, [prompt], max_new_tokens=new, temperature=0, seed=0)
        left, calls = new, 0
        for made_ in np.concatenate(state.accepted).tolist():
            calls += min(depth, left - 1)
            left -= made_
        assert left == 0 and state.draft_nfe.tolist() == [calls]


def test_lossy_methods_with_nothing_to_give_are_greedy() -> None:
    """At temperature 0 a distribution has one token: groups and neighbours of another draft add nothing but it."""
    model = wrap_causal()
    model.codebook = model.token_embeddings
    expected = [greedy(model.module, prompt, 9) for prompt in PROMPTS]
    lossy = [("gsd", {"d_threshold": 1e-9}), ("gsd", {"p_threshold": 1, "d_threshold": None})]
    lossy += [("lantern", {"delta": delta}) for delta in (0, 0.5, 1)] + [("lantern++", {"lam": lam}) for lam in (1, 9)]
    for name, settings in lossy:
        sampler = paradec.samplers.create(name, window=4, **settings)
        for certain in ({"temperature": 0}, {"temperature": 1e-6}, {"temperature": 0.7, "top_k": 1}):
            assert answers(sampler, model, PROMPTS, max_new_tokens=9, seed=3, **certain)[0] == expected, settings


def test_models_with_windowed_or_eager_attention_run_without_a_store() -> None:
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=LLAMA_VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    modules = [MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=3)).double().eval()]
    modules.append(tiny_llama())
    modules[1].set_attn_implementation("eager")
    for module in modules:
        model = wrap_causal(module)
        assert not model.supports_store and not model.pads
        found, _ = answers(made("sjd"), model, PROMPTS, max_new_tokens=7, temperature=0)
        assert found == [greedy(module, prompt, 7) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["sjd", "scd", "speculative", "speculative, tree"])
def test_the_store_after_a_rollback_is_that_of_a_fresh_prefill(name: str) -> None:
    model, sampler = wrap_causal(), made(name)
    state = sampler.start(model, PROMPTS, max_new_tokens=10, seed=4, guidance_scale=1.5)
    partial = False
    with torch.inference_mode():
        while len(state.rows) == len(PROMPTS):
            sampler.commit(state, sampler.step(model, state))
            # a tree's accepted drafts are written by the next step
            held = state.num_stored() if sampler.name == "speculative" and sampler.tree else state.committed - 1
            length = (held + state.shift).reshape(-1)
            assert torch.equal(state.store.valid.sum(1), torch.as_tensor(length))
            fresh = model.make_store(len(length), state.context.shape[1])
            column = torch.arange(int(length.max()))
            valid = column < torch.as_tensor(length)[:, None]
            query = Query(
                rows=np.arange(len(length)),
                tokens=state.context[:, : len(column)],
                positions=column.expand(len(length), -1),
                valid=valid,
                store=StoreCall(torch.arange(len(length)), torch.where(valid, column, -1)),
                forwarded=length,
                kind="full",
            )
            model(query, fresh)
            for layers, own in (
                (fresh.layer_keys, state.store.layer_keys),
                (fresh.layer_values, state.store.layer_values),
            ):
                for layer, expected in layers.items():
                    torch.testing.assert_close(
                        own[layer][:, : len(column)][valid], expected[:, : len(column)][valid], rtol=0, atol=1e-12
                    )
            partial |= bool((state.accepted[-1] < sampler.window).any())
    assert partial  # something was rolled back


def test_steps_over_the_store_evaluate_the_window_alone() -> None:
    _, state = answers(made("sjd"), wrap_causal(), PROMPTS, max_new_tokens=12, seed=0)
    prompt = np.array(list(map(len, PROMPTS)))
    assert (state.full_forwards == 1).all()
    assert (state.forwarded_tokens <= prompt + 4 + 5 * (state.nfe - 1)).all()


@pytest.mark.parametrize("name", VARIED)
def test_a_step_repeated_equals_the_step(name: str) -> None:
    model, sampler = wrap_causal(), made(name)
    state = sampler.start(model, PROMPTS, max_new_tokens=10, seed=4)
    with torch.inference_mode():
        while not state.done:
            kept = [state.canvas.clone(), *(tensor.clone() for tensor in state.memory.tensors.values())]
            first, again = sampler.step(model, state), sampler.step(model, state)
            assert torch.equal(first.values, again.values) and torch.equal(first.scores, again.scores)
            for quantity, value in first.quantities.items():
                assert torch.equal(value, again.quantities[quantity])
            now = [state.canvas, *state.memory.tensors.values()]
            assert all(torch.equal(before, after) for before, after in zip(kept, now, strict=True))
            before = state.committed.copy()
            sampler.commit(state, again)
            moved = state.committed - before
            assert (moved[first.rows] >= 1).all() and (moved == state.accepted[-1]).all()
            with pytest.raises(ValueError, match="earlier state"):
                sampler.commit(state, first)
    assert state.progress == (40, 40)


def test_modules_that_take_no_padding_are_called_by_length() -> None:
    class Plain(torch.nn.Module):
        def __init__(self, module: LlamaForCausalLM):
            super().__init__()
            self.module, self.config = module, module.config

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.module(input_ids).logits

    module = tiny_llama()
    found = [
        answers(made(name), model, PROMPTS, max_new_tokens=9, seed=5)[0]
        for model in (wrap_causal(Plain(module)), wrap_causal(module))
        for name in ("sjd", "speculative")
    ]
    assert found[:2] == found[2:]
    with pytest.raises(ValueError, match="needs models that run over a store"):
        made("speculative, tree").start(wrap_causal(Plain(module)), PROMPTS, max_new_tokens=9)


@pytest.mark.parametrize("name", ["sjd", "speculative, tree"])
def test_the_trace_replays(name: str) -> None:
    model, sampler = wrap_causal(), made(name)
    state = sampler.start(model, PROMPTS, max_new_tokens=9, seed=5, trace=True)
    decode(sampler, model, state)
    finals = [row[:stop] for row, stop in zip(state.canvas.tolist(), state.length, strict=True)]
    assert state.trace.replay() == finals
    written = [entry[:2] for step in state.trace.steps for entry in step.commits]
    assert len(written) == len(set(written)) == 36
    assert len(state.trace.steps) == state.nfe.max()


@pytest.mark.parametrize("name", ["sjd", "speculative, tree"])
def test_nan_logits_are_refused(name: str) -> None:
    model, sampler = wrap_causal(), made(name)
    state = sampler.start(model, PROMPTS, max_new_tokens=9, seed=5)
    before = state.canvas.clone()
    model.module.lm_head.weight.data[3] = torch.nan
    with pytest.raises(FloatingPointError, match="row 0 at its step 0"):
        decode(sampler, model, state)
    assert torch.equal(state.canvas, before) and not state.nfe.any()


@pytest.mark.parametrize("name", ["sjd", "scd", "jacobi", "speculative", "speculative, tree"])
def test_generate_stops_at_the_end_of_text(name: str) -> None:
    model = wrap_causal(eos_token_id=7)
    out = paradec.generate(model, input_ids=PROMPTS, sampler=made(name), max_new_tokens=11)
    assert out.finished[0] and not all(out.finished)
    for row, prompt in enumerate(PROMPTS):
        expected = greedy(model.module, prompt, 11)
        if 7 in expected:
            expected = expected[: expected.index(7) + 1]
        assert out.new_tokens[row, : len(expected)].tolist() == expected
        assert (out.new_tokens[row, len(expected) :] == 7).all()
        assert out.tokens[row] == len(expected) and out.finished[row] == (expected[-1] == 7)
    longer = paradec.generate(model, input_ids=PROMPTS, sampler=made(name), max_new_tokens=11, eos_early_stop=False)
    assert longer.new_tokens[0].tolist() == greedy(model.module, PROMPTS[0], 11)
    assert paradec.generate(
        model, input_ids=[6], sampler=made(name), max_new_tokens=9, logits_eos_inf=True, seed=1
    ).finished == [False]


def test_generate_that_is_cut_short_says_what_is_missing() -> None:
    model = wrap_causal()
    out = paradec.generate(model, input_ids=PROMPTS, sampler="sjd", max_new_tokens=9, callback=lambda *_: True, seed=0)
    assert all(1 <= count < 9 for count in out.tokens) and out.row_nfe == [1] * 4


def zipar_by_hand(module: LlamaForCausalLM, prompt: list[int], grid: Grid, window: int) -> tuple[list[int], int]:
    """Greedy ZipAR with a forward for every token, over what is known at its step; and the number of steps. For one
    layer, whose keys and values follow from the token alone."""
    layout, first = grid.layout.tolist(), len(grid.head)
    known = dict(enumerate(layout[:first]))  # what is evaluated, by offset
    stand_in: dict[int, int] = {}
    done, steps = [0] * grid.height, 0
    while done[-1] < grid.width:
        steps, before, found = steps + 1, list(done), {}
        for row in range(grid.height):
            if row and before[row - 1] < min(window, grid.width):
                break
            if before[row] == grid.width:
                continue
            at = first + row * grid.stride + before[row]
            if row and not before[row]:
                if grid.row_end is not None:
                    known[at - 1] = grid.row_end
                elif before[row - 1] < grid.width:
                    stand_in[at - 1] = known[at - grid.width - 1 + before[row - 1]]
            done[row] += 1
            found[at] = None
        for at in found:
            seen = {offset: token_id for offset, token_id in (stand_in | known).items() if offset < at}
            order = sorted(seen)
            ids = torch.tensor([[*prompt, *(seen[offset] for offset in order)]])
            positions = torch.tensor([[*range(len(prompt)), *(len(prompt) + offset for offset in order)]])
            with torch.inference_mode():
                logits = module(ids, position_ids=positions).logits[0, -1]
            found[at] = max(grid.cells, key=lambda token_id: float(logits[token_id]))
        known |= found
        for row in range(grid.height):
            if done[row] == grid.width and grid.row_end is not None:
                known[first + (row + 1) * grid.stride - 1] = grid.row_end
    return [known.get(offset, token_id) for offset, token_id in enumerate(layout)], steps


@pytest.mark.thinned
@pytest.mark.parametrize("window", [1, 2, 3, 9])
@pytest.mark.parametrize("row_end", [None, 8])
def test_zipar_is_what_its_steps_say(window: int, row_end: int | None) -> None:
    grid = Grid(4, 4, cells=range(2, 8), row_end=row_end, head=(0,), tail=(9, 1))
    module = tiny_llama(layers=1)
    model, sampler = wrap_causal(module), paradec.samplers.create("zipar", window=window)
    found, state = answers(sampler, model, PROMPTS, grid=grid, temperature=0)
    for row, prompt in enumerate(PROMPTS):
        assert (found[row], int(state.nfe[row])) == zipar_by_hand(module, prompt, grid, window)
    assert (state.nfe == 4 + 3 * min(window, 4)).all()
    token_by_token, _ = answers(made("sjd, token by token"), model, PROMPTS, grid=grid, temperature=0)
    assert (found == token_by_token) == (window == 9)


def test_zipar_over_two_layers_with_guidance_and_a_full_lead_is_token_by_token() -> None:
    grid, model = Grid(3, 4, cells=range(2, 8), row_end=8), wrap_causal()
    request: dict[str, Any] = {"grid": grid, "temperature": 0, "guidance_scale": 2.0, "negative_prompt": [[1, 2, 3]]}
    sampler = paradec.samplers.create("zipar", window=4)
    expected, _ = answers(made("sjd, token by token"), model, PROMPTS, **request)
    assert answers(sampler, model, PROMPTS, **request)[0] == expected
    with pytest.raises(ValueError, match="needs a grid"):
        sampler.start(model, PROMPTS, max_new_tokens=4)


def test_settings_travel() -> None:
    for name in SAMPLERS:
        if not name.startswith("speculative"):
            assert type(made(name)).from_dict(made(name).to_dict()) == made(name)


def test_requests_are_checked() -> None:
    model = wrap_causal()
    wrong: dict[str, Any] = {"seed": [1, 2], "suppress_tokens": [12], "negative_prompt": [[1], [2]], "blocks": "fixed"}
    wrong |= {"cache": "dual", "steps": 3, "rng": "reference", "confidence_eos_eot_inf": True, "temprature": 1}
    for name, value in wrong.items():
        with pytest.raises((ValueError, TypeError), match=name):
            made("sjd").start(model, [1, 2], **{"max_new_tokens": 8, "guidance_scale": 2.0, name: value})
    with pytest.raises(ValueError, match="negative_prompt"):
        made("sjd").start(model, [1, 2], max_new_tokens=8, negative_prompt=[1])
    with pytest.raises(ValueError, match="max_new_tokens=70"):
        made("sjd").start(model, [1, 2], max_new_tokens=70)
    with pytest.raises(ValueError, match="init='repeat_vertical' needs a grid"):
        paradec.samplers.create("sjd", init="repeat_vertical").start(model, [1, 2], max_new_tokens=8)
    with pytest.raises(ValueError, match="prediction='shifted'"):
        made("sjd").start(paradec.wrap(tiny_llama(), topology="causal", prediction="same"), [1, 2])
    with pytest.raises(ValueError, match="lantern.*codebook"):
        paradec.samplers.create("lantern").start(model, [1, 2], max_new_tokens=8)
    with pytest.raises(ValueError, match="drafter is needed"):
        paradec.samplers.create("speculative").start(model, [1, 2], max_new_tokens=8)


def test_a_drafter_must_have_the_same_vocabulary() -> None:
    config = tiny_llama().config.__class__(**{**tiny_llama().config.to_dict(), "vocab_size": 13})
    drafter = wrap_causal(LlamaForCausalLM(config).double())
    with pytest.raises(ValueError, match="vocabulary of 13"):
        paradec.samplers.create("speculative", drafter=drafter).start(wrap_causal(), [1, 2], max_new_tokens=8)
    short = wrap_causal(tiny_llama(), max_length=6)
    with pytest.raises(ValueError, match="takes 6 positions"):
        paradec.samplers.create("speculative", drafter=short).start(wrap_causal(), [1, 2], max_new_tokens=8)

"""SJD and related samplers on causal language models: drafters, lossy methods, models without a KV cache, ZipAR."""

from typing import Any

import numpy as np
import pytest
import torch
from drafters import decode_answers
from oracles.causal import greedy, zipar_by_hand
from small_models import LLAMA_VOCAB, PROMPTS, similar_model, tiny_llama, wrap_causal
from torch import Tensor
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

import paradec
from paradec.models.images.grid import Grid
from paradec.samplers.causal.loop import CausalSampler

SAMPLERS: dict[str, dict[str, Any]] = {
    "sjd": {"window": 5}, "sjd, token by token": {"window": 1}, "scd": {"window": 5}, "speculative": {},
    "speculative, tree": {"tree": (2, 2, 1)}, "speculative, greedy tree": {"tree": (3, 2), "rule": "greedy"},
}  # fmt: skip


def create_sampler(name: str) -> CausalSampler:
    settings = dict(SAMPLERS[name])
    kind = name.split(",")[0]
    if kind == "speculative":
        settings["drafter"] = similar_model()
    return paradec.samplers.create(kind, **settings)


@pytest.mark.parametrize("name", ["speculative", "speculative, tree", "speculative, greedy tree"])
def test_drafters_stop_one_token_before_the_end(name: str) -> None:
    """A step commits one token more than the accepted drafts, so the last token never needs a draft."""
    model, sampler, new = wrap_causal(), create_sampler(name), 11
    depth = {"speculative": sampler.window - 1, "speculative, tree": 3, "speculative, greedy tree": 2}[name]
    for prompt in PROMPTS:
        _, state = decode_answers(sampler, model, [prompt], max_new_tokens=new, temperature=0, seed=0)
        remaining, calls = new, 0
        for num_committed in np.concatenate(state.accepted).tolist():
            calls += min(depth, remaining - 1)
            remaining -= num_committed
        assert remaining == 0 and state.draft_nfe.tolist() == [calls]


def test_lossy_methods_without_alternatives_are_greedy() -> None:
    """If the distribution has one token, groups and neighbours add no probability to other drafts."""
    model = wrap_causal()
    model.codebook = model.token_embeddings
    expected = greedy(model.module, PROMPTS, 9)
    lossy = [("gsd", {"d_threshold": 1e-9}), ("gsd", {"p_threshold": 1, "d_threshold": None})]
    lossy += [("lantern", {"delta": delta}) for delta in (0, 0.5, 1)] + [("lantern++", {"lam": lam}) for lam in (1, 9)]
    for name, settings in lossy:
        sampler = paradec.samplers.create(name, window=4, **settings)
        for certain in ({"temperature": 0}, {"temperature": 1e-6}, {"temperature": 0.7, "top_k": 1}):
            assert decode_answers(sampler, model, PROMPTS, max_new_tokens=9, seed=3, **certain)[0] == expected, settings


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
        tokens, _ = decode_answers(create_sampler("sjd"), model, PROMPTS, max_new_tokens=7, temperature=0)
        assert tokens == greedy(module, PROMPTS, 7)


def test_steps_with_a_store_evaluate_only_the_window() -> None:
    _, state = decode_answers(create_sampler("sjd"), wrap_causal(), PROMPTS, max_new_tokens=12, seed=0)
    prompt_lengths = np.array(list(map(len, PROMPTS)))
    assert (state.full_forwards == 1).all()
    assert (state.forwarded_tokens <= prompt_lengths + 4 + 5 * (state.nfe - 1)).all()


def test_modules_without_padding_get_rows_of_equal_length() -> None:
    class WithoutPadding(torch.nn.Module):
        def __init__(self, module: LlamaForCausalLM):
            super().__init__()
            self.module, self.config = module, module.config

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.module(input_ids).logits

    module = tiny_llama()
    answers = [
        decode_answers(create_sampler(name), model, PROMPTS, max_new_tokens=9, seed=5)[0]
        for model in (wrap_causal(WithoutPadding(module)), wrap_causal(module))
        for name in ("sjd", "speculative")
    ]
    assert answers[:2] == answers[2:]
    with pytest.raises(ValueError, match="needs models that run over a store"):
        create_sampler("speculative, tree").start(wrap_causal(WithoutPadding(module)), PROMPTS, max_new_tokens=9)


@pytest.mark.thinned
@pytest.mark.parametrize("window", [1, 2, 3, 9])
@pytest.mark.parametrize("row_end", [None, 8])
def test_zipar_equals_a_plain_loop(window: int, row_end: int | None) -> None:
    grid = Grid(4, 4, image_ids=range(2, 8), row_end=row_end, head=(0,), tail=(9, 1))
    module = tiny_llama(layers=1)
    model, sampler = wrap_causal(module), paradec.samplers.create("zipar", window=window)
    tokens, state = decode_answers(sampler, model, PROMPTS, grid=grid, temperature=0)
    for row, prompt in enumerate(PROMPTS):
        assert (tokens[row], int(state.nfe[row])) == zipar_by_hand(module, prompt, grid, window)
    assert (state.nfe == 4 + 3 * min(window, 4)).all()
    token_by_token, _ = decode_answers(create_sampler("sjd, token by token"), model, PROMPTS, grid=grid, temperature=0)
    assert (tokens == token_by_token) == (window == 9)


def test_zipar_with_a_full_window_equals_token_by_token_decoding() -> None:
    grid, model = Grid(3, 4, image_ids=range(2, 8), row_end=8), wrap_causal()
    request: dict[str, Any] = {"grid": grid, "temperature": 0, "guidance_scale": 2.0, "negative_prompt": [[1, 2, 3]]}
    sampler = paradec.samplers.create("zipar", window=4)
    expected, _ = decode_answers(create_sampler("sjd, token by token"), model, PROMPTS, **request)
    assert decode_answers(sampler, model, PROMPTS, **request)[0] == expected

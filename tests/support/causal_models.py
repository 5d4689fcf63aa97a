"""Causal image models that tests of several methods decode."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import paradec
from paradec.models.adapter import Model

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6], [5, 3, 5, 8, 9, 7, 9]]
VOCAB = 12


def tiny_llama(seed: int = 0, layers: int = 2, vocab: int = VOCAB, inner: int = 16) -> LlamaForCausalLM:
    """A random causal Llama in float64. inner: the width of its MLPs."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = LlamaForCausalLM(config)
    return module.double().eval()


def wrapped(module: torch.nn.Module | None = None, **facts: Any) -> Model:
    return paradec.wrap(module or tiny_llama(), topology="causal", prediction="shifted", **facts)


def close_model() -> Model:
    """A drafter that often, not always, agrees with `tiny_llama`."""
    module = tiny_llama()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in module.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return wrapped(module)

"""Small random models in float64, for what must hold for any weights."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import paradec
from paradec.models.adapter import Model

VOCAB, MASK, END, DELETE, SPLIT = 41, 40, 39, 38, 37


def tiny(
    layers: int,
    topology: str = "bidirectional",
    prediction: str = "same",
    seed: int = 0,
    ends: tuple[int, ...] = (END,),
) -> Model:
    """A random Llama ("same") or Qwen2 ("shifted") with grouped heads; blocks of 4 where block-causal."""
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        # random weights at the default scale attend to everything alike and would hide mistakes
        "initializer_range": 0.4,
    }
    torch.manual_seed(seed)
    if prediction == "same":
        module = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        module = Qwen2ForCausalLM(Qwen2Config(**sizes))
    model = paradec.wrap(
        module.double(),
        mask_token_id=MASK,
        eos_token_id=ends,
        topology=topology,
        prediction=prediction,
        block_length=4 if topology in ("block_causal", "causal_context") else None,
        block_align="prompt" if topology == "causal_context" else "absolute",
    )
    if topology == "block_causal":  # whose methods may delete and split
        model.facts = replace(model.facts, delete_token_id=DELETE, split_token_id=SPLIT)
    return model


def everything(length: int) -> torch.Tensor:
    """[1, 1, length, length] bool: every position sees every other. For calls of a module itself, which attends as its
    owner chose, whatever it is wrapped as."""
    return torch.ones(1, 1, length, length, dtype=torch.bool)

"""Models that questions are put to: small random networks over a byte-level tokenizer with a chat template, and a
network that says the same at every position."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from byte_tokenizers import byte_level_tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import paradec
from paradec.models.adapter import Model

TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """ "Yes", "No" and all letters are tokens."""
    tokenizer = byte_level_tokenizer(text="Yes Yes Yes No No No level level Answer only.\n" * 9)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


TOKENIZER = chat_tokenizer()
VOCAB = len(TOKENIZER)
MASK, END = TOKENIZER.mask_token_id, TOKENIZER.eos_token_id


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype).eval()


def model_of(topology: str, prediction: str = "same", module: nn.Module | None = None, **more: Any) -> Model:
    """topology "causal" has no mask."""
    if topology == "causal":
        more, prediction = {"eos_token_id": END} | more, "shifted"
    else:
        more = {"mask_token_id": MASK, "eos_token_id": END} | more
    return paradec.wrap(module or network(), topology=topology, prediction=prediction, tokenizer=TOKENIZER, **more)


class Says(nn.Module):
    """Gives each of some ids its logit at every position, and all others none."""

    def __init__(self, logits: Mapping[int, float], vocab: int = VOCAB):
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocab, max_position_embeddings=4096)
        self.logits = torch.full((vocab,), -torch.inf, dtype=torch.float64)
        for token, value in logits.items():
            self.logits[token] = value

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits.expand(*ids.shape, -1).clone()


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]

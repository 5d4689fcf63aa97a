"""Modules that a user wraps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from places import GOLDEN
from torch import Tensor, nn

import paradec
from paradec.models.adapter import Model

SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 48,
    "pad_token_id": 1,
}
MASK, EOS = 5, 7
IDS = {"mask_token_id": MASK, "eos_token_id": EOS}
ENCODERS = ["Bert", "Roberta", "Electra", "MPNet", "ModernBert", "DebertaV2"]
UNPADDED_ENCODERS = ["ConvBert", "Nystromformer"]


def module_of(name: str, head: str, **config: Any) -> Any:
    """A small random module of transformers, float64, as its constructor leaves it (in training mode)."""
    if head == "ForCausalLM":
        config = {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": None} | config
    torch.manual_seed(0)
    made = getattr(transformers, name + "Config")(**(SMALL | config))
    module = getattr(transformers, name + head)(made).double()
    for parameter in module.parameters():  # layer norms start at 1 and biases at 0; make them count
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def encoder(name: str = "Bert", **config: Any) -> Any:
    return module_of(name, "ForMaskedLM", **config)


def decoder(name: str = "Llama", **config: Any) -> Any:
    return module_of(name, "ForCausalLM", **config)


class Opaque(nn.Module):
    """A module of one's own: a bidirectional mixture of embeddings."""

    def __init__(self, vocab: int = 40):
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(vocab_size=vocab, max_position_embeddings=48)
        self.embed = nn.Embedding(vocab, 8, dtype=torch.float64)
        self.head = nn.Linear(8, vocab, dtype=torch.float64)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, ids: Tensor) -> Tensor:
        self.shapes.append(tuple(ids.shape))
        x = self.embed(ids)
        return self.head(torch.tanh(x + x.mean(1, keepdim=True) + x.roll(1, dims=1)))


class OpaqueWithOutput(Opaque):
    """The same, called as remote code is: an output object, and keyword arguments."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = True) -> Any:
        assert attention_mask is None
        assert not use_cache
        return SimpleNamespace(logits=super().forward(input_ids))


def wrapped(kind: str) -> Model:
    """One model of each kind, float64."""
    if kind in ("llada", "dream"):
        return paradec.load(GOLDEN / f"{kind}-tiny", dtype="float64")
    if kind == "Opaque":
        return paradec.wrap(Opaque(), prediction="same", topology="bidirectional", **IDS)
    if kind == "OpaqueWithOutput":
        return paradec.wrap(OpaqueWithOutput(), prediction="shifted", topology="bidirectional", **IDS)
    if kind in ENCODERS + UNPADDED_ENCODERS:
        return paradec.wrap(encoder(kind), **IDS)
    name, _, topology = kind.partition(" ")
    extra = {"block_length": 4} if topology == "block_causal" else {}
    return paradec.wrap(decoder(name), prediction="shifted", topology=topology, **extra, **IDS)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(8, 40, shape, generator=torch.Generator().manual_seed(1))


ROWS = [[8, 9, 10], [11, 12, 13, 14, 15, 16, 17, 18], [1, 20], [21, 22, 23, 24, 25]]

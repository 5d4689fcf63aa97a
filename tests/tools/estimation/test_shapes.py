"""What estimates read of a model: its sizes, from every entry point, held to the weights of real modules."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import MOE, golden_moe
from places import GOLDEN, golden
from tiny_models import tiny
from transformers import AutoModelForCausalLM, Glm4MoeConfig, GPT2Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

import paradec
from paradec.models.adapter import Model
from paradec.models.checkpoint import CheckpointError
from paradec.tools.estimation.shapes import BUILT_IN, Shape, shape_of

LLADA22 = golden("autumn") / "llada22" / "llada22-tiny"
LLADA = {
    "model_type": "llada",
    "block_type": "llama",
    "activation_type": "silu",
    "include_bias": False,
    "layer_norm_type": "rms",
    "rope": True,
    "d_model": 4096,
    "n_layers": 32,
    "n_heads": 32,
    "n_kv_heads": 32,
    "mlp_hidden_size": 12288,
    "vocab_size": 126464,
    "embedding_size": 126464,
    "max_sequence_length": 4096,
    "rope_theta": 500000.0,
    "weight_tying": False,
    "torch_dtype": "bfloat16",
}
DREAM = {
    "model_type": "Dream",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
LLADA2 = {
    "model_type": "llada2_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "rope_theta": 600000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "vocab_size": 157184,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PUBLISHED = {"LLaDA-8B": LLADA, "Dream-7B": DREAM, "LLaDA2.0-mini": LLADA2}


def written(folder: Path, name: str, config: dict[str, Any]) -> Path:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(config))
    return folder / name


def matrices(module: torch.nn.Module) -> int:
    """Weights of a module but for what has one dimension: norms and biases."""
    return sum(p.numel() for p in module.parameters() if p.ndim > 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_in_models_are_what_their_config_says(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path, name, PUBLISHED[name])
    assert shape_of(folder) == BUILT_IN[name] == shape_of(str(folder / "config.json"))
    assert shape_of(name.upper()) is BUILT_IN[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_their_parameters_are_those_of_a_real_module(name: str, tmp_path: Path) -> None:
    """On the device "meta", where tensors have no values: the count is transformers' own."""
    from paradec.models.loading import known_family

    family = known_family(PUBLISHED[name])
    assert family is not None
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(family.config(PUBLISHED[name]))
    assert BUILT_IN[name].parameters == matrices(module)
    # the cards: LLaDA 8.0B, Dream 7.6B, LLaDA2.0-mini 16B of which 1.4B are active, its embedding counted
    active = {"LLaDA-8B": 8.0e9, "Dream-7B": 7.6e9, "LLaDA2.0-mini": 1.4e9}
    shape = BUILT_IN[name]
    assert shape.active_parameters + shape.head_weights == pytest.approx(active[name], rel=0.03)


def golden(name: str) -> Model:
    return golden_moe(name) if (MOE / name).exists() else paradec.load(GOLDEN / name)


@pytest.mark.parametrize("name", ["llada-tiny", "dream-tiny", "llada2-tiny", "llada-moe-tiny", "sdar-moe-tiny"])
def test_checkpoints_of_every_format(name: str) -> None:
    model = golden(name)
    shape = shape_of(model)
    assert shape.parameters == matrices(model.module)
    facts = model.facts
    assert (shape.topology, shape.prediction, shape.block_length) == (
        facts.topology,
        facts.prediction,
        facts.block_length,
    )
    assert shape.default_block_length == model.default_block_length and shape.max_length == facts.max_length
    layers = model.module.model.layers
    mixtures = [layer for layer in layers if hasattr(layer.mlp, "experts")]
    assert (shape.layers, shape.mixtures) == (len(layers), len(mixtures))
    if name == "llada2-tiny":  # which states its block nowhere
        with pytest.raises(CheckpointError, match="how long its blocks are"):
            shape_of(MOE / name)
        return
    folder = GOLDEN / name if (GOLDEN / name).exists() else MOE / name
    assert [getattr(shape_of(folder), size) for size in SIZES] == [getattr(shape, size) for size in SIZES]


SIZES = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate",
    "vocab",
    "experts",
    "topology",
    "mixtures",
)


def test_configurations_and_modules_of_transformers() -> None:
    config = Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    module = AutoModelForCausalLM.from_config(config)
    assert shape_of(config) == shape_of(module)
    assert shape_of(config).parameters == matrices(module) and shape_of(config).topology == "causal"
    wrapped = tiny(2, "block_causal")
    assert (shape_of(wrapped).topology, shape_of(wrapped).block_length) == ("block_causal", 4)


def test_experts_that_a_batch_covers() -> None:
    """Against draws of `experts_per_token` of the experts for every token."""
    shape = Shape("", 1, 1, 1, 1, 1, 1, 1, dense_layers=0, experts=32, experts_per_token=4, expert_width=1)
    generator = torch.Generator().manual_seed(0)
    for tokens in (1, 5, 20):
        chosen = torch.rand(4000, tokens, 32, generator=generator).topk(4, -1).indices
        seen = torch.zeros(4000, 32).scatter_(1, chosen.flatten(1), 1.0).sum(1).mean()
        assert shape.covered(tokens) == pytest.approx(float(seen), rel=0.01)
    # one block chooses among 6, another one among others
    blocks = dataclasses.replace(shape, expert_capacity=6, block_length=5)
    among = torch.rand(4000, 5, 6, generator=generator).topk(4, -1).indices
    seen = torch.zeros(4000, 6).scatter_(1, among.flatten(1), 1.0).sum(1).mean()
    assert blocks.covered(5) == pytest.approx(float(seen), rel=0.01) and blocks.whole_blocks
    assert blocks.covered(5) < blocks.covered(10) < shape.covered(10) and blocks.covered(1) == pytest.approx(4)
    published = shape_of(paradec.load(LLADA22, mask_token_id=95))
    assert (published.experts, published.expert_capacity, published.block_length) == (16, 6, 8)
    assert shape.covered(1) == pytest.approx(4) and Shape("", 1, 1, 1, 1, 1, 1, 1).covered(9) == 0


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        ("GSAI-ML/LLaDA-8B-Instruct", CheckpointError, "asks no hub"),
        (None, TypeError, "not None"),
        (7, TypeError, "not 7"),
        (GPT2Config(), ValueError, "model_type='gpt2'; estimates know the layers of 'llama'"),
        (LlamaConfig(num_hidden_layers=0), ValueError, "llama's layers=0 must be an integer from 1"),
    ],
)
def test_what_is_none(source: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said) as caught:
        paradec.estimate(source)
    assert "\n" not in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        paradec.estimate(tmp_path)
    with pytest.raises(CheckpointError, match="model_type='diffusion_gemma'; estimates are for"):
        paradec.estimate(written(tmp_path, "canvases", {"model_type": "diffusion_gemma"}))
    with pytest.raises(CheckpointError, match="d_model"):
        paradec.estimate(written(tmp_path, "half", {k: v for k, v in LLADA.items() if k != "d_model"}))


SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 8, "head_dim": 8,
         "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}  # fmt: skip
GLM = {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}


@pytest.mark.parametrize(
    ("config", "mixtures"),
    [
        (Glm4MoeConfig(**SMALL, **GLM, num_hidden_layers=3), 2),
        (Qwen3MoeConfig(**SMALL, num_experts=4, num_hidden_layers=3, decoder_sparse_step=2), 1),
        (Qwen3MoeConfig(**SMALL, num_experts=4, num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3]), 1),
        (Qwen3MoeConfig(**SMALL, num_experts=4, num_hidden_layers=2, mlp_only_layers=[]), 2),
    ],
)
def test_mixtures_of_transformers_count_as_they_compute(config: Any, mixtures: int) -> None:
    shape = shape_of(config)
    assert shape.parameters == matrices(AutoModelForCausalLM.from_config(config))
    assert (shape.shared_width, shape.mixtures) == (16 if config.model_type == "glm4_moe" else 0, mixtures)

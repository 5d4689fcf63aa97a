"""Text models with int8 weights: rounding, files, tokens and logits of every family."""

import copy
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from places import GOLDEN
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.quantizers import HfQuantizer

import paradec
from paradec.batching.batch import Batch
from paradec.core.query import Query
from paradec.kernels.int8 import Int8Experts, Int8Linear, quantize_weight, weight_bits
from paradec.models.checkpoint import CheckpointError
from paradec.models.int8 import Int8Config

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llada": ("llada-tiny", {}),
    "dream": ("dream-tiny", {}),
    "sdar": ("autumn/s2d2/sdar-tiny", {}),
    "sdar_moe": ("moe/sdar-moe-tiny", {}),
    "llada_moe": ("moe/llada-moe-tiny", {"mask_token_id": 95}),
    "llada2": ("moe/llada2-tiny", {"mask_token_id": 95, "block_length": 4}),
    "llada22": ("autumn/llada22/llada22-tiny", {"mask_token_id": 95}),
    "nemotron": ("autumn/nld/nld-tiny", {}),
}
SMALL = Int8Config(min_weights=64)
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]


def load_family(family: str, **options: Any) -> Any:
    folder, arguments = FAMILIES[family]
    return paradec.load(GOLDEN / folder, **arguments, **options)


def logits(model: Any, tokens: Tensor) -> Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(Query(np.arange(len(tokens)), tokens, positions))


def median_error(actual: Tensor, expected: Tensor) -> float:
    """Return the median over positions of the relative error (2-norm)."""
    errors = (actual - expected).flatten(0, 1).norm(dim=-1) / expected.flatten(0, 1).norm(dim=-1)
    return float(errors.median())


def scale_name(name: str) -> str:
    return name.removesuffix("weight") + "scale" if name.endswith("weight") else f"{name}_scale"


def token_rows(output: Any) -> list[list[int]]:
    return [row[:count].tolist() for row, count in zip(output.new_tokens, output.tokens, strict=True)]


def decode(model: Any, prompts: Any = PROMPTS) -> list[list[int]]:
    sampler = "jacobi" if model.facts.topology == "causal" else None
    arguments = {} if sampler is None else {"sampler": sampler}
    return token_rows(paradec.generate(model, prompts, max_new_tokens=16, **arguments))


@pytest.fixture(scope="module")
def causal_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Write causal checkpoints. Keys of the result: whether the output matrix is tied to the embeddings."""
    folders = {}
    for tied in (False, True):
        torch.manual_seed(0)
        sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": tied}
        config = LlamaConfig(**sizes, **ids, num_attention_heads=4, initializer_range=0.3, attention_bias=True)
        folders[tied] = tmp_path_factory.mktemp("causal")
        LlamaForCausalLM(config).save_pretrained(folders[tied])
    return folders


@pytest.mark.parametrize(
    "family",
    [name if name in ("dream", "llada2") else pytest.param(name, marks=pytest.mark.further) for name in FAMILIES],
)
def test_logits_stay_close_and_files_reload_exactly(family: str, tmp_path: Path) -> None:
    exact, model = load_family(family), load_family(family, quantization=SMALL)
    parts = list(model.module.modules())
    assert not any(type(part) is nn.Linear for part in parts)
    assert sum(isinstance(part, Int8Linear) for part in parts) > 4
    has_experts = any(isinstance(part, Int8Experts) for part in parts)
    assert has_experts == (family in ("sdar_moe", "llada_moe", "llada2", "llada22"))
    tokens = torch.randint(4, 60, (3, 16), generator=torch.Generator().manual_seed(0))
    expected, actual = logits(exact, tokens), logits(model, tokens)
    # the median, because rounding may change a token's experts and thus all its logits
    assert 0 < median_error(actual, expected) < (0.08 if has_experts else 0.04) * (1 if weight_bits() == 8 else 2)
    state = model.module.state_dict()
    for name, weight in exact.module.state_dict().items():
        if state.get(name, weight).dtype == torch.int8:
            weight.copy_(state[name].mT * state[scale_name(name)].unsqueeze(-1))
    assert median_error(actual, logits(exact, tokens)) < 0.003  # now only the activations are rounded differently
    model.save_pretrained(tmp_path)
    repeated = paradec.load(tmp_path)
    assert replace(repeated.facts, name=model.facts.name) == model.facts
    assert torch.equal(logits(repeated, tokens), actual)
    assert decode(repeated) == decode(model)
    repeated.save_pretrained(tmp_path / "twice")
    first, second = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "twice" / "model.safetensors")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path, tmp_path / "twice")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("family", ["llada", "llada_moe", "llada2"])
def test_weights_equal_those_of_the_rounded_module(family: str) -> None:
    """Matrices equal the loaded matrices after rounding. Embeddings, norms and routers are unchanged."""
    exact = load_family(family).module.state_dict()
    state = load_family(family, quantization=SMALL).module.state_dict()
    for name, tensor in state.items():
        if tensor.dtype == torch.int8:
            weight, scale = quantize_weight(exact[name], weight_bits())
            assert torch.equal(tensor.mT, weight)
            assert torch.equal(state[scale_name(name)], scale)
        elif name in exact:
            assert torch.equal(tensor, exact[name])
    unchanged = {name.split(".")[-2] for name in exact if name in state and state[name].dtype != torch.int8}
    assert {"embed_tokens", "norm", "input_layernorm"} <= unchanged


@pytest.mark.thinned
@pytest.mark.parametrize("family", ["llada", "llada_moe"])
def test_batches_and_copies_give_the_same_tokens(family: str) -> None:
    model = load_family(family, quantization=SMALL)
    expected = decode(model)
    assert [decode(model, [prompt])[0] for prompt in PROMPTS] == expected
    assert decode(copy.deepcopy(model)) == expected
    assert decode(pickle.loads(pickle.dumps(model))) == expected
    with Batch(model, batch_size=2, max_new_tokens=16) as batch:
        tickets = [batch.add(prompt) for prompt in PROMPTS]
        while any(ticket.output is None for ticket in tickets):
            batch.step()
    assert [token_rows(ticket.output)[0] for ticket in tickets] == expected


@pytest.mark.parametrize("tied", [False, True])
def test_causal_models_reload_exactly(tied: bool, causal_folders: dict[bool, Path], tmp_path: Path) -> None:
    exact, model = (paradec.load(causal_folders[tied], quantization=value) for value in (None, SMALL))
    assert isinstance(model.module.lm_head, Int8Linear)
    assert torch.equal(model.token_embeddings(), exact.token_embeddings())
    assert model.module.model.layers[0].self_attn.q_proj.bias is not None
    model.save_pretrained(tmp_path)
    repeated = paradec.load(tmp_path)
    assert decode(repeated) == decode(model)
    assert str(model).split(":")[1] == str(repeated).split(":")[1]
    assert (repeated.facts.eos_token_ids, repeated.facts.pad_token_id) == (model.facts.eos_token_ids, 0)


def test_mixtures_without_int8_experts_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    config = GptOssConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, pad_token_id=0)
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    assert paradec.load(tmp_path).facts.topology == "causal"
    with pytest.raises(CheckpointError, match="quantization='int8' does not work for experts of class GptOssExperts"):
        paradec.load(tmp_path, quantization=SMALL)


def test_saved_settings_and_dtypes_are_restored(tmp_path: Path) -> None:
    model = paradec.load(quantization=Int8Config(min_weights=50_000, activations=8), dtype="bfloat16")
    sizes = {type(part): part.weight.numel() for part in model.module.modules() if hasattr(part, "in_features")}
    assert sizes[nn.Linear] < 50_000 <= sizes[Int8Linear]
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    repeated = paradec.load(tmp_path)
    linear = [part for part in repeated.module.modules() if isinstance(part, Int8Linear)]
    assert {part.activations for part in linear} == {8}
    assert {part.scale.dtype for part in linear} == {torch.float32}
    assert min(part.weight.numel() for part in linear) >= 50_000
    assert repeated.dtype == torch.bfloat16
    assert "int8 and bfloat16 on cpu" in repr(repeated)
    assert paradec.load(tmp_path, quantization="int8").dtype == torch.bfloat16
    assert paradec.load(tmp_path, dtype="float32").dtype == torch.float32
    assert decode(repeated) == decode(model)
    with pytest.raises(ValueError, match=r"no layer has 1,048,576 weights.*Int8Config\(min_weights="):
        paradec.load(quantization="int8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int4"}, "quantization='int4' must be 'int8'"),
        ({"quantization_config": {"quant_method": "torchao"}}, "does not go with quantization_config="),
        ({"adapter": "folder"}, "does not go with adapter='folder'; merge it first"),
        ({"tp_plan": "auto"}, "does not go with tp_plan='auto'"),
        ({"device_map": "auto"}, "does not go with device_map='auto'"),
    ],
)
def test_options_that_int8_excludes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_family("llada", **{"quantization": "int8"} | options)


def test_wrong_settings_and_files_are_refused(tmp_path: Path) -> None:
    for wrong in ({"activations": 4}, {"min_weights": 0}, {"weight_bits": 4}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Int8Config(**wrong)
    with pytest.raises(ValueError, match="is not for image models"):
        paradec.load("digits-maskgit", quantization="int8")
    model = load_family("llada", quantization=SMALL)
    with pytest.raises(ValueError, match="offloaded or quantised"):
        model.update_weights({"lm_head.weight": torch.zeros(model.module.lm_head.weight.shape)})
    model.save_pretrained(tmp_path / "good")
    file = "model.safetensors"
    weights = load_file(tmp_path / "good" / file)
    scale = next(name for name in weights if name.endswith("q_proj.scale"))
    weight = scale.replace("scale", "weight")
    changes: dict[str, dict[str, Tensor | None]] = {
        "missing weights": {scale: None},
        "unexpected weights": {"other.scale": torch.zeros(2)},
        "mismatched weights": {weight: weights[weight][1:].clone()},
        "is stored as torch.float32, not torch.int8": {weight: weights[weight].float()},
    }
    if not hasattr(HfQuantizer, "get_new_dtype"):  # transformers before 5.21 casts all stored weights to int8
        del changes["is stored as torch.float32, not torch.int8"]
    for message, change in changes.items():
        folder = tmp_path / message.split()[0]
        shutil.copytree(tmp_path / "good", folder)
        save_file({name: value for name, value in (weights | change).items() if value is not None}, folder / file)
        with pytest.raises(CheckpointError, match=message):
            paradec.load(folder)
    folder = tmp_path / "settings"
    shutil.copytree(tmp_path / "good", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["activations"] = 3
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="activations=3"):
        paradec.load(folder)


def test_weights_have_seven_bits_where_eight_are_inexact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors where products of 8-bit weights are inexact, weights have 7 bits, and files with 8 are refused."""
    monkeypatch.setattr("paradec.models.int8.weight_bits", lambda: 8)
    load_family("llada", quantization=SMALL).save_pretrained(tmp_path / "eight")
    monkeypatch.setattr("paradec.models.int8.weight_bits", lambda: 7)
    model = load_family("llada", quantization=SMALL)
    assert model.module.lm_head.state_dict()["weight"].abs().max() == 63
    model.save_pretrained(tmp_path / "seven")
    with pytest.raises(CheckpointError, match="not exact on this processor"):
        paradec.load(tmp_path / "eight")
    assert decode(paradec.load(tmp_path / "seven")) == decode(model)
    monkeypatch.setattr("paradec.models.int8.weight_bits", lambda: 8)
    assert decode(paradec.load(tmp_path / "seven")) == decode(model)

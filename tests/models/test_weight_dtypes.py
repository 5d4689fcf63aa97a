"""Every loader refuses missing weights and weights of unsupported dtypes, by name."""

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, DREAM, IDS, LLADA, logits, random_weights, shard, write_checkpoint, write_family
from decoding import refuses
from drafters import eagle_weights as eagle_checkpoint
from drafters import tiny_base, write_drafter
from images import tiny_chameleon, tiny_emu3, tiny_janus, tiny_llamagen, tiny_vq
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import tiny_gemma
from tokenized_models import tokenizer_of
from torch import Tensor
from transformers import T5Config, T5EncoderModel

import paradec
from paradec.models.images.chameleon import LAYOUTS, load_chameleon
from paradec.models.images.emu3 import load_emu3
from paradec.models.images.janus import load_janus
from paradec.samplers.masked.rules.learn2pd_filter import FilterFacts, load_filter, save_filter

UNSUPPORTED = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.complex128,
)  # fmt: skip
"""Dtypes that models do not compute with. A safetensors file cannot hold the last one."""


def recode(file: Path, name: str, dtype: torch.dtype) -> None:
    later = file.stat().st_mtime_ns + 10**9  # `load_filter` caches by path and modification time
    if file.suffix == ".safetensors":
        weights = load_file(file)
        save_file(weights | {name: weights[name].to(dtype)}, file, {"format": "pt"} | metadata_of(file))
    else:
        weights = torch.load(file, weights_only=True)
        torch.save(weights | {name: weights[name].to(dtype)}, file)
    os.utime(file, ns=(later, later))


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata() or {}


def floats(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.float().contiguous() for name, tensor in module.state_dict().items()}


Case = tuple[Path, str, Callable[[], Any]]  # (weights file, name of a weight in it, function that loads the file)


def text_case(model_type: str) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        if model_type in CONFIGS:
            write_family(folder, model_type)
        else:
            write_checkpoint(folder, LLADA if model_type == "llada" else DREAM)
        return folder / "model.safetensors", min(load_file(folder / "model.safetensors")), lambda: paradec.load(folder)

    return make


def shards(folder: Path) -> Case:
    shard(write_checkpoint(folder / "whole", LLADA), folder / "shards")
    file = folder / "shards" / "model-00002-of-00002.safetensors"
    return file, min(load_file(file)), lambda: paradec.load(folder / "shards")


def llamagen(folder: Path, suffix: str = ".safetensors") -> Case:
    file = folder / f"c2i_B_256{suffix}"
    weights = floats(tiny_llamagen(grid=16, vq=False).module) | {"freqs_cis": torch.ones(257, 3, dtype=torch.complex64)}
    store(file, weights)
    return file, "output.weight", lambda: paradec.load(file, n_head=4)


BASE = tiny_base()


def eagle(folder: Path, file: str = "model.safetensors") -> Case:
    config, weights = eagle_checkpoint()
    old = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2, dtype=torch.int32)}
    write_drafter(folder, config, weights | old, file)
    return folder / file, "fc.weight", lambda: paradec.load_drafter(folder, base=BASE)


def learn2pd(folder: Path) -> Case:
    facts = FilterFacts("block", "tiny", 41, 4, ("none",), 0.5)
    save_filter(folder / "filter.safetensors", facts, network := facts.network())
    return folder / "filter.safetensors", min(network.state_dict()), lambda: load_filter(folder / "filter.safetensors")


def transformers_format(make_model: Callable[[], Any], load: Callable[[Path], Any]) -> Callable[[Path], Case]:
    def make(folder: Path) -> Case:
        module = make_model().module
        module.generation_config._from_model_config = False  # otherwise transformers would rebuild it
        module.save_pretrained(folder)
        return (
            folder / "model.safetensors",
            next(n for n in load_file(folder / "model.safetensors") if n.endswith("embed_tokens.weight")),
            lambda: load(folder),
        )

    return make


def text_encoder(folder: Path) -> Case:
    store(folder / "t2i_XL_256.pt", floats(tiny_llamagen("t2i", grid=16, vq=False).module))
    config = T5Config(vocab_size=8, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    T5EncoderModel(config).save_pretrained(folder / "t5")
    tokenizer_of([*"abcdefg", "<mask>"]).save_pretrained(folder / "t5")
    return (
        folder / "t5" / "model.safetensors",
        "encoder.final_layer_norm.weight",
        lambda: paradec.load(folder / "t2i_XL_256.pt", n_head=4, text_encoder=str(folder / "t5")),
    )


def store(file: Path, weights: dict[str, Tensor]) -> None:
    if file.suffix == ".safetensors":
        save_file(weights, file)
    else:
        torch.save(weights, file)


SAFETENSORS: dict[str, Callable[[Path], Case]] = {
    **{model_type: text_case(model_type) for model_type in ("llada", "Dream", *CONFIGS)}, "shards": shards,
    "llamagen": llamagen, "eagle": eagle, "learn2pd": learn2pd, "emu3": transformers_format(tiny_emu3, load_emu3),
    "chameleon": transformers_format(lambda: tiny_chameleon(LAYOUTS["anole"], vq=False), load_chameleon),
    "janus": transformers_format(tiny_janus, load_janus), "text encoder": text_encoder,
    "canvas": transformers_format(lambda: paradec.wrap(copy.deepcopy(tiny_gemma())), paradec.load),
}  # fmt: skip
PICKLES: dict[str, Callable[[Path], Case]] = {
    "llamagen pickle": lambda folder: llamagen(folder, ".pt"),
    "eagle pickle": lambda folder: eagle(folder, "pytorch_model.bin"),
}


def check_refused(case: Case, message: str) -> None:
    file, _, load = case
    with pytest.raises(ValueError, match=message) as error:
        load()
    assert str(file) in str(error.value) or str(file.parent) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.thinned
@pytest.mark.parametrize("loader", [*SAFETENSORS, *PICKLES])
def test_weights_of_other_dtypes_are_refused(loader: str, tmp_path: Path) -> None:
    case = file, name, load = (SAFETENSORS | PICKLES)[loader](tmp_path)
    load()  # unchanged files load
    data = file.read_bytes()
    for dtype in UNSUPPORTED[:-1] if file.suffix == ".safetensors" else UNSUPPORTED:
        recode(file, name, dtype)
        check_refused(case, f"{name} is {str(dtype).removeprefix('torch.')}")
        file.write_bytes(data)


@pytest.mark.thinned
@pytest.mark.parametrize("loader", SAFETENSORS)
def test_missing_weights_are_refused(loader: str, tmp_path: Path) -> None:
    case = file, name, _ = SAFETENSORS[loader](tmp_path)
    weights = load_file(file)
    save_file(
        {other: value for other, value in weights.items() if other != name}, file, {"format": "pt"} | metadata_of(file)
    )
    check_refused(case, "missing weights: |" + re.escape(name))


def test_weights_that_nothing_reads_may_be_missing(tmp_path: Path) -> None:
    """An Anole needs no image encoder, and no codebook other than the VQ decoder's."""
    file, _, load = SAFETENSORS["chameleon"](tmp_path)
    weights, part = load_file(file), "model.vqmodel."
    expected = load().codebook()
    save_file({k: v for k, v in weights.items() if not k.startswith(part) or ".quantize." in k}, file, {"format": "pt"})
    assert torch.equal(load().codebook().nan_to_num(), expected.nan_to_num())
    save_file({name: value for name, value in weights.items() if not name.startswith(part)}, file, {"format": "pt"})
    refuses(load, r"missing weights: model\.vqmodel\.quantize\.embedding\.weight$", paradec.CheckpointError)
    load_chameleon(tmp_path, layout=LAYOUTS["anole"], vq=tiny_vq(l2_norm=False, channel_mult=[1, 1, 1, 1]))


def test_integer_buffers_are_accepted(tmp_path: Path) -> None:
    _, _, load = SAFETENSORS["emu3"](tmp_path / "emu3")
    counts = [name for name, value in load().module.state_dict().items() if not value.is_floating_point()]
    assert counts and all(name.endswith("num_batches_tracked") for name in counts)


def write_fp8(folder: Path, config: dict[str, Any], **quantisation: Any) -> tuple[Path, Path]:
    weights = {name: value.bfloat16() for name, value in random_weights(config).items()}
    stored, plain = dict(weights), dict(weights)
    for name, value in weights.items():
        if value.ndim == 2 and ("blocks" in name or "layers" in name):
            scale = torch.rand((value.shape[0] + 7) // 8, (value.shape[1] + 7) // 8) / 50 + 0.01
            wide = scale.repeat_interleave(8, 0)[: value.shape[0]].repeat_interleave(8, 1)[:, : value.shape[1]]
            stored[name] = (value.float() / wide).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            plain[name] = (stored[name].float() * wide).bfloat16()
    fields = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic", "dequantize": True}
    quantised = config | {"quantization_config": fields | quantisation}
    return write_checkpoint(folder / "fp8", quantised, stored), write_checkpoint(folder / "plain", config, plain)


@pytest.mark.parametrize("config", [LLADA, DREAM], ids=["llada", "dream"])
def test_fp8_checkpoints_load_through_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    quantised, plain = write_fp8(tmp_path, config)
    model, expected = paradec.load(quantised), paradec.load(plain)
    assert torch.equal(logits(model, IDS), logits(expected, IDS))
    model.save_pretrained(tmp_path / "saved")  # as unquantised weights
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    assert torch.equal(logits(paradec.load(tmp_path / "saved"), IDS), logits(expected, IDS))
    fields = json.loads((quantised / "config.json").read_text())
    del fields["quantization_config"]
    (quantised / "config.json").write_text(json.dumps(fields))
    refuses(lambda: paradec.load(quantised), "is float8_e4m3fn", paradec.CheckpointError)

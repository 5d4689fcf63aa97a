"""The golden mixtures of experts: small random checkpoints in the published formats, and what their published code
computes on them (`golden/moe/<name>/forwards.json`).

`NAMES` are those of tests/golden. Recorded cases are those of `RECORDED`, in which other checkpoints may stand
(`tests/replays.py`). Functions that take a name also take the path of a checkpoint's folder.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from places import GOLDEN
from recorded import golden, read_head, read_json
from torch import Tensor

import paradec
from paradec.models.adapter import Model

MOE = GOLDEN / "moe"
NAMES = ("llada2-tiny", "llada-moe-tiny", "sdar-moe-tiny")
RECORDED = golden("moe")
CHECKPOINTS = sorted(path.parent for path in RECORDED.glob("*/forwards.json"))


def forwards(name: str | Path) -> dict[str, Any]:
    """`forwards.json` of a checkpoint."""
    return read_json(MOE / name / "forwards.json")


def format_of(name: str | Path) -> str:
    """Which format a checkpoint is in, by the name of tests/golden's."""
    kind = read_head(MOE / name / "config.json")["model_type"]
    return {"llada2_moe": "llada2-tiny", "llada": "llada-moe-tiny", "sdar_moe": "sdar-moe-tiny"}[kind]


def told(name: str | Path) -> dict[str, Any]:
    """What `load` must be told, since the published config.json does not say it."""
    facts = forwards(name)["facts"]
    block = {"block_length": facts["block"]} if format_of(name) == "llada2-tiny" else {}
    return {"mask_token_id": facts["mask"]} | block


def golden_moe(
    name: str | Path, dtype: str = "float32", block_length: int | None = None, mask_token_id: int | None = None
) -> Model:
    """A model that tests share. block_length, mask_token_id: other ones than `forwards.json` states."""
    return _loaded(MOE / name, dtype, block_length, mask_token_id)


@functools.cache
def _loaded(folder: Path, dtype: str, block_length: int | None, mask_token_id: int | None) -> Model:
    stated = {"block_length": block_length, "mask_token_id": mask_token_id}
    facts = told(folder) if (folder / "forwards.json").exists() else {}
    return paradec.load(
        folder, dtype=dtype, **facts | {name: value for name, value in stated.items() if value is not None}
    )


SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
ITS_OWN: dict[str, dict[str, Any]] = {
    "llada2-tiny": {
        "head_dim": 8, "rotary_dim": 4, "intermediate_size": 12, "moe_intermediate_size": 6, "n_group": 2,
        "topk_group": 1, "block_length": 4,
    },
    "llada-moe-tiny": {"expert_intermediate_size": 6, "dense_intermediate_size": 12, "moe_layer_freq": [0, 1]},
    "sdar-moe-tiny": {
        "head_dim": 6, "intermediate_size": 12, "moe_intermediate_size": 6, "mlp_only_layers": [0], "block_size": 4,
    },
}  # fmt: skip


def small_config(name: str, **fields: Any) -> dict[str, Any]:
    """A golden checkpoint's config.json with smaller sizes: a dense layer, and one of experts; blocks of 4."""
    config = json.loads((MOE / name / "config.json").read_text())
    config.pop("mask_token_id", None)
    return config | SMALL | ITS_OWN[name] | fields


def small_weights(name: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights under the published names, float64."""
    hidden, vocab, experts = (config[field] for field in ("hidden_size", "vocab_size", "num_experts"))
    heads, pairs = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim", hidden // heads)
    wide, narrow = heads * width, pairs * width
    inner = config.get("moe_intermediate_size", config.get("expert_intermediate_size"))
    dense = config.get("intermediate_size", config.get("dense_intermediate_size"))
    embeddings = "model.word_embeddings.weight" if name == "llada2-tiny" else "model.embed_tokens.weight"
    shapes: dict[str, tuple[int, ...]] = {embeddings: (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        shapes |= {f"{place}{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        if name == "llada2-tiny":
            shapes[f"{place}attention.query_key_value.weight"] = (wide + 2 * narrow, hidden)
            shapes |= {f"{place}attention.{norm}_layernorm.weight": (width,) for norm in ("query", "key")}
            shapes[f"{place}attention.dense.weight"] = (hidden, wide)
        else:
            sizes = zip("qkv", (wide, narrow, narrow), strict=True)
            shapes |= {f"{place}self_attn.{part}_proj.weight": (rows, hidden) for part, rows in sizes}
            shapes |= {f"{place}self_attn.{part}_norm.weight": (width,) for part in "qk"}
            shapes[f"{place}self_attn.o_proj.weight"] = (hidden, wide)
        mlps = {"": dense}
        if layer:
            shapes[f"{place}mlp.gate.weight"] = (experts, hidden)
            mlps = {f"experts.{index}.": inner for index in range(experts)}
        if layer and name == "llada2-tiny":
            shapes[f"{place}mlp.gate.expert_bias"] = (experts,)
            mlps["shared_experts."] = inner
        for part, rows in mlps.items():
            shapes |= {f"{place}mlp.{part}{half}_proj.weight": (rows, hidden) for half in ("gate", "up")}
            shapes[f"{place}mlp.{part}down_proj.weight"] = (hidden, rows)
    generator = torch.Generator().manual_seed(0)
    found = {
        key: 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64) + ("norm" in key)
        for key, shape in shapes.items()
    }
    # transformers keeps these in float32 whatever the others are in
    return {key: value.float() if key.endswith("expert_bias") else value for key, value in found.items()}

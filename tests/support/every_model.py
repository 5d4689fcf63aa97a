"""One small model of every kind that paradec decodes, and one short decoding of each."""

import copy
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from checkpoints import CONFIGS, MOE, moe_facts, write_family
from diffusers import DDIMScheduler
from images import (
    IMAGE_MODELS,
    MAR_DECODER,
    MAR_SIZES,
    randomize,
    tiny_lpd,
    tiny_nar,
    tiny_student,
    tiny_var,
    tiny_var_student,
)
from pipelines import noise, tiny_dit
from places import GOLDEN
from small_models import ROWS, piece, tiny_gemma, wrap_kind
from torch import Tensor

import paradec
from paradec.core.protocol import decode
from paradec.models.images.diffusion import DiffusionModel
from paradec.models.images.mar import MAR, MARModel
from paradec.models.images.vq import KLDecoder, VQConfig

WRAPPED = [
    "Bert", "ModernBert", "ConvBert", "Llama bidirectional", "Qwen2 block_causal", "Qwen3 bidirectional",
    "Llama causal", "Qwen2 causal", "Opaque", "OpaqueWithOutput",
]  # fmt: skip
MIXTURES = ["llada2-tiny", "llada-moe-tiny"]
NEMOTRON = {"nemotron": "causal_context", "nemotron causal": "causal"}
LOADED = ["llada", "dream", *CONFIGS, *MIXTURES, *NEMOTRON]
TEXT = [*LOADED, *WRAPPED]
IMAGES = [*IMAGE_MODELS, "nar", "distilled", "distilled var", "digits-maskgit", "mar", "lpd", "var", "dit"]
CANVAS, PROTEIN, IN_ORDER = "diffusion_gemma", "protein", "protein in a row's order"
EVERY = [*TEXT, CANVAS, PROTEIN, IN_ORDER, *IMAGES]


def tiny_protein() -> Any:
    pieces = [piece(first, stop, f"{first} to {stop}") for first, stop in ((0, 12), (30, 38))]
    return paradec.load_protein_mpnn(GOLDEN / "proteins" / "small.pt", pieces, dtype=torch.float64)


def make_mar() -> MARModel:
    torch.manual_seed(0)
    module = randomize(MAR(**MAR_SIZES), 0.1)
    return MARModel(module, KLDecoder(VQConfig(**MAR_DECODER)).double(), {"steps": 5, "guidance_scale": 2.0}, "tiny")


MAKERS: dict[str, Callable[[], Any]] = {name: make for name, (make, _) in IMAGE_MODELS.items()} | {
    "nar": tiny_nar, "distilled": tiny_student, "distilled var": tiny_var_student, "mar": make_mar, "var": tiny_var,
    "lpd": tiny_lpd, "dit": lambda: DiffusionModel(tiny_dit(torch.float64)),
    CANVAS: lambda: paradec.wrap(copy.deepcopy(tiny_gemma(dtype=torch.float64, canvas=4))),
    PROTEIN: tiny_protein, IN_ORDER: tiny_protein,
    "digits-maskgit": lambda: paradec.load("digits-maskgit", dtype="float64"),
}  # fmt: skip
PICTURES: dict[str, dict[str, Any]] = {
    name: {**request, "temperature": 0.8, "sampler": paradec.samplers.create("sjd", window=4)}
    for name, (_, request) in IMAGE_MODELS.items()
} | {
    "mar": {"class_labels": [1, 2], "sampler": paradec.samplers.create("mar", head_steps=3)},
    "var": {"class_labels": [1, 2]},
    "lpd": {"class_labels": [1, 2], "guidance_scale": 2.0},
    "nar": {"class_labels": [3, 9], "temperature": 0.8},
    "distilled": {"class_labels": [3, 1]},
    "distilled var": {"class_labels": [3, 1]},
    "digits-maskgit": {"class_labels": [1, 7], "steps": 4},
}


def build_model(kind: str) -> Any:
    if kind in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            return paradec.load(write_family(Path(folder) / kind, kind), dtype="float64")
    if kind in MIXTURES:
        return paradec.load(MOE / kind, dtype="float64", **moe_facts(kind))
    if kind in NEMOTRON:
        return paradec.load(GOLDEN / "autumn" / "nld" / "nld-tiny-b", dtype="float64", topology=NEMOTRON[kind])
    return MAKERS[kind]() if kind in MAKERS else wrap_kind(kind)


@lru_cache
def shared_model(kind: str) -> Any:
    return build_model(kind)


@lru_cache
def expected(kind: str, seed: int = 0) -> Tensor:
    return decode_briefly(shared_model(kind), kind, seed)


def decode_briefly(model: Any, kind: str, seed: int = 0, **request: Any) -> Tensor:
    """Decode a few tokens or steps; return the tokens or the latent."""
    if kind == "dit":
        sampler = paradec.samplers.create("taylorseer", interval=2)
        arguments = {"scheduler": DDIMScheduler(), "num_inference_steps": 6, "guidance_scale": 2.0}
        state = sampler.start(model, noise(2, torch.float64) + seed, class_labels=[1, 2], **arguments, **request)
        return decode(sampler, model, state).latent
    if kind in PICTURES:
        arguments = PICTURES[kind] | {"output_type": "latent", "seed": seed}
        return paradec.generate_images(model, **(arguments | request)).images
    if kind == CANVAS:
        arguments = {"sampler": short_canvases(), "max_new_tokens": 8, "seed": seed}
        return paradec.generate(model, ROWS, **(arguments | request)).new_tokens
    if kind in (PROTEIN, IN_ORDER):
        arguments = {"sampler": "jacobi", "temperature": 0.7, "seed": seed}
        if kind == PROTEIN:
            arguments |= {"sampler": "random", "steps": 4}
        return paradec.generate(model, protein_prompts(model), **(arguments | request)).sequences
    arguments = {"max_new_tokens": 8, "temperature": 0.7, "seed": seed, "eos_early_stop": False}
    if model.facts.topology == "causal":
        arguments |= {"sampler": paradec.samplers.create("sjd", window=4)}
    elif model.supports_store:
        arguments |= {"cache": "block" if kind in NEMOTRON else "dual", "block_length": 4}
    return paradec.generate(model, ROWS, **(arguments | request)).new_tokens


def protein_prompts(model: Any) -> list[list[int]]:
    return [model.prompt(0, fixed=[2, 3]), model.prompt(1)]


def short_canvases() -> Any:
    return paradec.samplers.create("diffusion_gemma", max_denoising_steps=5, confidence_threshold=0.5)

"""One small model of every kind that paradec decodes with, and one short decoding of each."""

import copy
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from checkpoints import CONFIGS, MOE, moe_facts, write_family
from diffusers import DDIMScheduler
from images import IMAGE_MODELS, MAR_DECODER, MAR_SIZES, tiny_lpd, tiny_nar, tiny_student, tiny_var, tiny_var_student
from pipelines import noise, tiny_dit
from places import GOLDEN, ROOT
from small_models import ROWS, tiny_gemma, wrap_kind
from torch import Tensor

import paradec
from paradec.core.protocol import decode
from paradec.models.images.diffusion import DiffusionModel
from paradec.models.images.mar import MAR, MARModel
from paradec.models.images.vq import KLDecoder, VQConfig
from paradec.models.proteins.structure import Structure, read_pdb

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


def make(kind: str) -> Any:
    """A new model, float64."""
    if kind in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            return paradec.load(write_family(Path(folder) / kind, kind), dtype="float64")
    if kind == CANVAS:
        return paradec.wrap(copy.deepcopy(tiny_gemma(dtype=torch.float64, canvas=4)))
    if kind in (PROTEIN, IN_ORDER):
        return tiny_protein()
    if kind in MIXTURES:
        return paradec.load(MOE / kind, dtype="float64", **moe_facts(kind))
    if kind in NEMOTRON:
        return paradec.load(GOLDEN / "autumn" / "nld" / "nld-tiny-b", dtype="float64", topology=NEMOTRON[kind])
    if kind in IMAGE_MODELS:
        return IMAGE_MODELS[kind][0]()
    if kind == "digits-maskgit":
        return paradec.load(kind, dtype="float64")
    if kind == "nar":
        return tiny_nar()
    if kind.startswith("distilled"):
        return tiny_student() if kind == "distilled" else tiny_var_student()
    if kind == "mar":
        torch.manual_seed(0)
        module = MAR(**MAR_SIZES).double()
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        return MARModel(
            module, KLDecoder(VQConfig(**MAR_DECODER)).double(), {"steps": 5, "guidance_scale": 2.0}, "tiny"
        )
    if kind == "var":
        return tiny_var()
    if kind == "lpd":
        return tiny_lpd()
    if kind == "dit":
        return DiffusionModel(tiny_dit(torch.float64))
    return wrap_kind(kind)


@lru_cache
def shared(kind: str) -> Any:
    """A model for all tests that leave it as it is."""
    return make(kind)


@lru_cache
def expected(kind: str, seed: int = 0) -> Tensor:
    """What `decoded` gives for the shared model."""
    return decoded(shared(kind), kind, seed)


def decoded(model: Any, kind: str, seed: int = 0, **request: Any) -> Tensor:
    """What a short decoding ends with: tokens, or a latent."""
    if kind == "dit":
        sampler = paradec.samplers.create("taylorseer", interval=2)
        given = {"scheduler": DDIMScheduler(), "num_inference_steps": 6, "guidance_scale": 2.0}
        state = sampler.start(model, noise(2, torch.float64) + seed, class_labels=[1, 2], **given, **request)
        return decode(sampler, model, state).latent
    if kind == "mar":
        sampler = paradec.samplers.create("mar", head_steps=3)
        given = {"class_labels": [1, 2], "sampler": sampler, "output_type": "latent"}
        return paradec.generate_images(model, **given, seed=seed, **request).images
    if kind == "var":
        given = {"class_labels": [1, 2], "output_type": "latent"}
        return paradec.generate_images(model, **given, seed=seed, **request).images
    if kind == "lpd":
        given = {"class_labels": [1, 2], "guidance_scale": 2.0, "output_type": "latent"}
        return paradec.generate_images(model, **given, seed=seed, **request).tokens
    if kind == "nar":
        given = {"class_labels": [3, 9], "temperature": 0.8, "output_type": "latent"}
        return paradec.generate_images(model, **given, seed=seed, **request).tokens
    if kind.startswith("distilled"):
        given = {"class_labels": [3, 1], "output_type": "latent"}
        return paradec.generate_images(model, **given, seed=seed, **request).images
    if kind == "digits-maskgit":
        given = {"class_labels": [1, 7], "steps": 4, "output_type": "latent"}
        return paradec.generate_images(model, **given, seed=seed, **request).tokens
    if kind in IMAGE_MODELS:
        given = {"temperature": 0.8, "output_type": "latent", "sampler": paradec.samplers.create("sjd", window=4)}
        return paradec.generate_images(model, **IMAGE_MODELS[kind][1], **given, seed=seed, **request).tokens
    if kind == CANVAS:
        given = {"sampler": short_canvases(), "max_new_tokens": 8, "seed": seed}
        return paradec.generate(model, ROWS, **(given | request)).new_tokens
    if kind in (PROTEIN, IN_ORDER):
        given = {"sampler": "jacobi", "temperature": 0.7, "seed": seed}
        if kind == PROTEIN:
            given |= {"sampler": "random", "steps": 4}
        return paradec.generate(model, designs(model), **(given | request)).sequences
    given = {"max_new_tokens": 8, "temperature": 0.7, "seed": seed, "eos_early_stop": False}
    if model.facts.topology == "causal":
        given |= {"sampler": paradec.samplers.create("sjd", window=4)}
    elif model.supports_store:
        given |= {"cache": "block" if kind in NEMOTRON else "dual", "block_length": 4}
    return paradec.generate(model, ROWS, **(given | request)).new_tokens


def tiny_protein() -> Any:
    """A ProteinMPNN with random weights, and two pieces of a backbone."""
    whole = read_pdb(ROOT / "benchmarks" / "data" / "backbones" / "1ubi.pdb")
    pieces = [
        Structure(whole.coordinates[first:stop], whole.sequence[first:stop], name=f"{first} to {stop}")
        for first, stop in ((0, 12), (30, 38))
    ]
    return paradec.load_protein_mpnn(GOLDEN / "proteins" / "small.pt", pieces, dtype=torch.float64)


def designs(model: Any) -> list[list[int]]:
    """A row of each of its structures, some residues of which are given."""
    return [model.prompt(0, fixed=[2, 3]), model.prompt(1)]


def short_canvases() -> Any:
    return paradec.samplers.create("diffusion_gemma", max_denoising_steps=5, confidence_threshold=0.5)

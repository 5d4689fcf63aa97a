"""The defaults that users get without asking: the papers', under the papers' names, written down once more.

A default that changes changes what everybody's run does, so it must be changed here as well, with its source. The
numbers are those of the papers or, where these leave them open, of their public code.
"""

import dataclasses
from typing import Any

import pytest

import paradec
from paradec import caches, samplers
from paradec.models.adapter import Model
from paradec.models.text import diffusion_gemma

JACOBI = {"window": None, "init": None, "refresh": "resample"}
"""A window of None is SJD's 16 (`chain.WINDOW`), which is in all of its scripts, for those that build on it too; no
init is its random guesses."""
LANTERN: dict[str, Any] = {"guess_distribution": "one_hot", "drafter": None, "tree": None, "delta": 0.1}
SCHEDULED = {"alg_temp": None, "eps": 0.001}
CANVAS = dict.fromkeys(("max_denoising_steps", "t_min", "t_max", "stability_threshold", "confidence_threshold"))
CANVAS |= {"early_stop": True, "encode_wait": 2}
"""None follows the checkpoint."""
STORE = {"store_dtype": None, "max_memory": None, "shape_multiple": 1}

SCALES: dict[str, Any] = {"guidance_schedule": "linear", "top_ks": None, "temperatures": None, "smooth": False}

MASKGIT = {"schedule": "cosine", "choice_temperature": 4.5, "final_temperature": None, "guidance_start": None}
GRID = {"height": None, "width": None}
ADAPTIVE = {"delimiter_threshold": 0.3, "delimiters": ("\n",), "delimiter_match": "exact", "window": 0.25}

SAMPLERS: dict[str, dict[str, Any]] = {
    "low_confidence": {},
    "random": {"order": "step"},
    "origin": {"eps": 0.001},
    "maskgit_plus": SCHEDULED,
    "topk_margin": SCHEDULED,
    "entropy": SCHEDULED,
    "threshold": {"threshold": 0.9, "quota_per_step": "none"},
    "factor": {"factor": 1.0, "reference_last_rank": False, "profile": False, "margin": 0.25},
    "margin": {},
    "hierarchy": {"threshold": 0.9, "low_threshold": 0.4},
    "entropy_bound": {"gamma": 0.1},
    "entropy_threshold": {"threshold": 0.5},
    "localleap": {"anchor_threshold": 0.9, "relaxed_threshold": 0.75, "radius": 4},
    "adablock": ADAPTIVE | {"threshold": 0.9, "init_block_length": 32, "min_block_length": 1},
    "learn2pd": dict(filter=None, filter_threshold=0.96, eot="committed", eot_confidence=0.0, allow_mismatch=False),
    "wino": {"threshold": 0.6, "threshold_back": 0.9, "cap_share": 0.7, "cap_low": 5, "cap_high": 20},
    "editing": {"threshold": 0.7, "editing_threshold": 0.5, "max_post_steps": 16, "least": 1, "end": "step"},
    "saber": {"minimum": 2, "remask_share": 0.125},
    "levenshtein": dict(
        threshold=0.5, editing_threshold=0.0, max_post_steps=16, delete_token_id=None, split_token_id=None
    ),
    "s2d2": {
        "route": "score", "min_span": 1, "tau": 0.0, "on": 1.0, "off": -5.0, "cost": 1.0, "dynamic": False,
        "estimator": "entropy", "threshold": 0.85, "block_steps": None, "confident_too": False, "causal": True,
    },
    "freedave": {"base": "low_confidence", "draft_steps": 4, "draft_mode": "batch", "agreement": "exact"},
    "lopa": {"base": "threshold", "branches": 4, "alpha": 0.0, "tail": 1.0, "confidence": "minus_entropy"},
    "credit": {"threshold": 0.9, "decay": 0.7, "exponent": 0.2, "fusion": 0.65, "storage": "slots", "slots": 8},
    "ccd": {"history": 3, "buffer": 4, "entropy_threshold": 0.3},
    "ccd_agree": {"warmup": 5, "expand_ratio": 4.0, "tail": 0.1, "adaptive": True},
    "klass": {"confidence_threshold": 0.9, "kl_threshold": 0.01, "history": 2},
    "persistence": {"threshold": 0.97, "persist": 2, "end_threshold": 0.8},
    "union": {"rules": ("credit", "localleap"), "stages": ()},
    "intersection": {"rules": ("threshold", "entropy_threshold"), "stages": ()},
    "maskgit": MASKGIT,
    "halton": MASKGIT | GRID | {"schedule": "arccos", "choice_temperature": 0.0},
    "recap": MASKGIT
    | GRID
    | {"schedule": "power", "choice_temperature": 5.5, "final_temperature": 0.65}
    | {"local_steps": 1, "full_groups": 0, "order": "confidence"},
    "lpd": {"groups": None, "repulsion": None, "proximity": 1.0, "height": None, "width": None},
    "sjd": JACOBI | {"guess_distribution": "uniform"},
    "scd": JACOBI | {"refresh": "gumbel", "guess_distribution": "uniform", "siblings": 1, "branching": 1},
    "sjd_pac": JACOBI | {"refresh": "maximal", "guess_distribution": "uniform", "siblings": 8, "branching": 1},
    "gsd": JACOBI | {"guess_distribution": "one_hot", "group_half_width": 7, "p_threshold": 0.15, "d_threshold": 0.5},
    "lantern": JACOBI | LANTERN | {"k": 1000},
    "lantern++": JACOBI | LANTERN | {"k": 10, "lam": 5.0},
    "jacobi": JACOBI
    | {"refresh": "gumbel", "guess_distribution": "uniform"}
    | {"pool": 0, "ngram": 4, "pool_size": 64}
    | {"group": None, "max_iterations": None, "early_exit": "prefix"},
    "self_speculative": {"window": None, "rule": "ratio", "threshold": None, "adapter": None},
    "speculative": {"window": 5, "drafter": None, "tree": None, "rule": "without_replacement", "stop": None},
    "zipar": {"window": 16},
    "diffusion_gemma": CANVAS | {"entropy_bound": None},
    "canvas": CANVAS | {"rule": "threshold"},
    "forecast": {"when": None, "how": None, "where": None, "order": None, "max_memory": None},
    "taylorseer": {"interval": None, "order": 1, "first_enhance": 1, "where": None, "max_memory": None},
    "groups": dict(order="lpd", guidance_schedule="linear", lossless=False, verify="jacobi", window=None),
    "nar": {"cfg_interval": -1},
    "distilled": {"t_list": None, "split": None, "teacher": None, "teacher_start": 0, "masked_prefix": False},
    "var": SCALES,
    "code": SCALES | {"drafter": None, "split": None},
    "cspd": {
        "draft": None, "num_draft": 8, "ratio": 0.15, "inner_temperature": 42.0, "mended": True, "max_rounds": 100,
        "head_steps": 100, "temperature": 1.0, "guidance_schedule": "linear",
    },
    "mar": {
        "local_steps": 0, "full_groups": None, "head_steps": 100, "fast_ratio": 0.4, "temperature": 1.0,
        "guidance_schedule": "linear", "chunk_order": "raster", "keep_buffer": False,
    },
}  # fmt: skip

LITE = {"order": 2, "where": "output", "first_enhance": 3}
PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "adablock": {
        "llada": {"delimiter_threshold": 0.3, "delimiter_match": "exact"},
        "dream": {"delimiter_threshold": 0.5, "delimiter_match": "ends"},
    },
    "jacobi": {"ceed": {"group": 36, "max_iterations": 22, "early_exit": "published"}},
    "s2d2": {
        "sdar": {}, "sdar_16": {"cost": 0.0}, "fast_dllm_v2": {"route": "hysteresis", "dynamic": True, "causal": False},
        "llada2_quality": {"tau": -5.0, "cost": 4.0, "causal": False}, "llada2_speed": {"cost": 4.0, "causal": False},
    },
    "editing": {
        "llada2.1": {"threshold": 0.95, "editing_threshold": 0.9, "max_post_steps": 16, "end": "block"},
        "dllm": {"threshold": 0.95, "editing_threshold": 0.9, "max_post_steps": 16},
        "sglang": {"threshold": 0.5, "editing_threshold": 0.0, "max_post_steps": 16},
    },
    "threshold": {"llada2.0": {"threshold": 0.95}},
    "freedave": {"freedave++": {"base": {"sampler": "threshold", "threshold": 0.95}, "agreement": "subset"}},
    "credit": {
        "dinfer": {"threshold": 0.9, "decay": 0.8, "exponent": 0.2, "fusion": 0.7, "storage": "dense"},
        "sglang": {"threshold": 0.95, "decay": 0.65, "exponent": 0.5, "fusion": 0.7, "storage": "slots", "slots": 8},
    },
    "ccd": {"llada": {"history": 2}, "dream": {"history": 3}},
    "klass": {
        "llada": {"confidence_threshold": 0.6, "kl_threshold": 0.015},
        "dream": {"confidence_threshold": 0.9, "kl_threshold": 0.001},
    },
    "maskgit": {"maskgit-r": {"schedule": "power", "choice_temperature": 5.5, "final_temperature": 0.65}},
    "recap": {"maskgit-r-32": {"full_groups": 12, "final_temperature": 0.75}, "maskgit-r-16": {"full_groups": 8}},
    "taylorseer": {
        "paper": {"interval": 6, "first_enhance": 3}, "flux": {"interval": 6, "first_enhance": 3},
        "dit": {"interval": 4, "first_enhance": 2, "order": 4}, "hunyuan_video": {"interval": 5},
        "wan": {"interval": 5}, "hidream": {"interval": 4, "order": 2}, "lite_fast": LITE | {"interval": 5},
        "lite_medium": LITE | {"interval": 4}, "lite_detailed": LITE | {"interval": 3},
    },
    "cspd": {"demo": {"num_draft": 4, "ratio": 0.05, "guidance_schedule": "constant"}},
    "mar": {"recap": {"local_steps": 1}},
    "groups": {"lpd": {"order": "lpd"}},
    "var": {"smooth": {"smooth": True}},
    "distilled": {
        "llamagen_b": {"t_list": (0, 80), "split": 80}, "llamagen_l": {"t_list": (0, 80), "split": 130},
        "llamagen_l_22": {"t_list": (0, 80), "split": 180, "teacher_start": 60},
        "llamagen_l_42": {"t_list": (0, 80), "split": 180, "teacher_start": 40},
        "llamagen_l_81": {"t_list": (0, 80), "split": 220, "teacher_start": 0},
        "var_d16": {"t_list": (0, 5), "split": 5}, "var_d20": {"t_list": (0, 4), "split": 4},
        "var_d24": {"t_list": (0, 4), "split": 4}, "var_d16_3": {"t_list": (0, 5), "split": 5, "teacher_start": 4},
        "var_d16_4": {"t_list": (0, 5), "split": 8, "teacher_start": 3},
        "var_d16_6": {"t_list": (0, 5), "split": 9, "teacher_start": 0},
    },
}  # fmt: skip

CACHES: dict[str, dict[str, Any]] = {
    "none": {}, "prefix": STORE, "dual": STORE,
    "vicinity": STORE | {"prefix_look": 16, "after_look": 16, "warmup_steps": 4, "cache_update_freq": None},
    "delayed": STORE | {"cache_delay_iter": 1, "refresh_interval": 10000, "waiting": None},
    "d2": STORE | {"current_k": 32, "sigma": 10.0, "inflate_w": 4},
    "dkv_decode": STORE | {"refresh_interval": None, "shift_type": "un_right"},
    "dkv_greedy": STORE | {"refresh_interval": 2, "window": 4}, "dkv_prefill": STORE,
    "dkv_pd": STORE | {"refresh_interval": None, "shift_type": "un_right"}, "block": STORE, "hierarchical": STORE,
    "recap": STORE | {"recompute_prompt": True},
}  # fmt: skip

VALUES: dict[str, dict[str, Any]] = {
    "AdaptiveBlocks": ADAPTIVE | {"length": 32, "min_length": 1, "model_block": None, "model_align": "absolute"},
    "SparseD": {
        "select": 0.3, "skip": 0.2, "block_size": 128, "dense_steps": None, "refresh_pattern_every": None,
        "selection": "isolated", "backend": "auto",
    },
    "Prophet": {"gaps": (7.5, 5.0, 2.5), "stages": (0.33, 0.67), "answer": None},
}  # fmt: skip


def defaults(kind: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", samplers.names())
def test_samplers(name: str) -> None:
    assert defaults(samplers.get(name)) == SAMPLERS[name]
    assert dict(samplers.get(name).presets) == PRESETS.get(name, {})


@pytest.mark.parametrize("name", caches.names())
def test_caches(name: str) -> None:
    assert defaults(caches.get(name)) == CACHES[name]


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    assert defaults(getattr(paradec, name)) == VALUES[name]


def test_blocks_of_a_model_that_names_none(llada: Model, dream: Model) -> None:
    assert llada.default_block_length == 32
    assert dream.default_block_length is None


def test_canvases_follow_transformers_where_the_checkpoint_says_nothing() -> None:
    assert dict(diffusion_gemma.DEFAULTS) == {
        "entropy_bound": 0.1,
        "max_denoising_steps": 48,
        "t_min": 0.4,
        "t_max": 0.8,
        "stability_threshold": 1,
        "confidence_threshold": 0.005,
    }
    assert diffusion_gemma.DEFAULT_NEW_TOKENS == 256

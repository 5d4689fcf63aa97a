"""Proves that a refactoring changed nothing: a wheel of a commit before against this tree, on random requests.

    python tests/differential.py --base COMMIT [--count 2000] [--seed 0] [--jobs 2] [--only FAMILY] [--show 5]

Every request is answered by both versions, each in processes of its own (`differential_worker.py`), and everything
that a caller sees is compared exactly: tokens, texts, pictures bit for bit, counts of forwards, traces, kinds of
errors, what is registered. Exit status 1 on any difference. `--messages` compares texts of errors and warnings too.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import queue
import random
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).resolve().parent / "differential_worker.py"
CHUNK = 20
"""Requests that a process takes at once."""
LONGEST = 60.0
"""Seconds that a request may take, after the first few, which load models."""
MANY_REFUSALS = 0.6
SHARES = {
    "masked": 40, "infill": 10, "causal": 12, "images": 7, "masked images": 5, "mar": 4, "pipelines": 8,
    "schedulers": 6, "hf_generate": 4, "command": 4,
}  # fmt: skip
"""How many requests of a hundred each family gets."""

RENAMED = {"random_law": "guess_distribution"}
"""Settings that have another name now, and are read under both."""
GONE = ("init", "refresh", "guess_distribution")
"""Settings that samplers no longer have where they took no part."""
ADDED = ("share", "draft_nfe", "encoder_calls", "denoising_calls", "logprobs")
"""Fields of outputs that a version before need not have."""

# ---- requests --------------------------------------------------------------------------------------------------------

Draw = random.Random
TEXTS = (
    "Sort: pear fig apple", "Reverse: pear fig apple kiwi", "Shuffle: pear fig apple", "Sort: kiwi apple fig pear plum",
    "Reverse: fig apple", "Sort: plum fig",
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "packaged": {"share": 25, "same": True, "text": True, "store": True, "dtypes": ("", "float64")},
    "llada": {"share": 20, "same": True, "ids": (0, 60), "store": True, "dtypes": ("", "float64")},
    "dream": {"share": 15, "same": False, "ids": (0, 50), "store": True, "dtypes": ("", "float64")},
    "sdar": {"share": 12, "same": True, "ids": (4, 31), "store": True, "block": 4, "dtypes": ("", "float64")},
    "fast": {"share": 9, "same": False, "ids": (4, 31), "store": True, "block": 8, "dtypes": ("", "float64")},
    "same": {"share": 8, "same": True, "ids": (0, 38), "store": True, "dtypes": ("",)},
    "shifted": {"share": 6, "same": False, "ids": (0, 38), "store": True, "dtypes": ("",)},
    "bert": {"share": 3, "same": True, "ids": (0, 38), "store": False, "dtypes": ("",)},
    "plain": {"share": 8, "same": True, "ids": (0, 38), "store": False, "dtypes": ("",)},
}
"""Masked models: what a request to them must know. Ids that prompts are drawn from, the block of block-causal ones."""
MASK_IDS = {"llada": 63, "dream": 55, "sdar": 3, "fast": 3, "same": 40, "shifted": 40, "bert": 40, "plain": 40}

SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "random": {"order": ("step", "block")},
    "origin": {"eps": (1e-3, 0.1)},
    "maskgit_plus": {"alg_temp": (None, 0.1, 1.0), "eps": (1e-3, 0.1)},
    "topk_margin": {"alg_temp": (None, 0.1, 1.0), "eps": (1e-3, 0.1)},
    "entropy": {"alg_temp": (None, 0.1, 1.0), "eps": (1e-3, 0.1)},
    "threshold": {"threshold": (0.3, 0.5, 0.5, 0.95, 1.0), "quota_per_step": ("none", "carry")},
    "factor": {"factor": (0.5, 1.5, 3.0), "reference_last_rank": (False, True)},
    "hierarchy": {"threshold": (0.5, 0.95), "low_threshold": (0.1, 0.4)},
    "entropy_bound": {"gamma": (0.01, 0.5, 2.0)},
    "entropy_threshold": {"threshold": (0.1, 1.0, 2.0)},
    "localleap": {"anchor_threshold": (0.5, 0.8, 0.95), "relaxed_threshold": (0.3, 0.7), "radius": (1, 3, 8)},
    "adablock": {
        "threshold": (0.5, 0.9), "init_block_length": (4, 8), "delimiter_threshold": (0.0, 0.05, 0.3),
        "delimiters": ([5, 6, 7, 8, 9, 10, 11, 12],), "window": (0.25, 0.5, 1.0), "min_block_length": (1, 2),
    },
    "learn2pd": {
        "filter": ({"$": "filter"},), "filter_threshold": (0.5, 0.9), "eot": ("committed", "greedy", "none"),
        "eot_confidence": (0.0, 0.3), "allow_mismatch": (True,),
    },
    "wino": {"threshold": (0.2, 0.6), "threshold_back": (0.5, 0.9), "cap_share": (0.3, 0.7), "cap_low": (1, 5)},
    "editing": {"threshold": (0.2, 0.7), "editing_threshold": (0.2, 0.5), "max_post_steps": (1, 4, 16)},
    "saber": {"minimum": (1, 2, 3), "remask_share": (0.125, 0.5)},
    "freedave": {
        "base": ("low_confidence", "threshold", "random", "entropy", "credit+localleap"), "draft_steps": (1, 2, 4),
        "draft_mode": ("batch",), "agreement": ("exact",),
    },
    "credit": {
        "threshold": (0.5, 0.95), "decay": (0.5, 0.9), "exponent": (0.2, 0.7), "fusion": (0.3, 0.65),
        "storage": ("slots", "dense"), "slots": (1, 4, 8),
    },
    "ccd": {"history": (1, 3), "buffer": (1, 4), "entropy_threshold": (None, 0.1, 1.0)},
    "ccd_agree": {"warmup": (1, 5), "expand_ratio": (2.0, 8.0), "tail": (0.1, 0.4), "adaptive": (True, False)},
    "klass": {"confidence_threshold": (0.2, 0.9), "kl_threshold": (0.01, 1.0), "history": (1, 2)},
    "persistence": {"threshold": (0.5, 0.97), "persist": (1, 2, 3), "end_threshold": (0.3, 0.8)},
    "union": {"rules": (["threshold", "localleap"], ["factor", "klass"]), "stages": ([], ["credit"])},
    "intersection": {"rules": (["threshold", "klass"], ["factor", "entropy_threshold"]), "stages": ([], ["credit"])},
    "maskgit": {
        "schedule": ("cosine", "arccos", "linear", "power"), "choice_temperature": (0.0, 1.0, 4.5),
        "final_temperature": (None, 0.5), "guidance_start": (None, 0.5),
    },
    "halton": {"schedule": ("cosine", "arccos", "linear"), "choice_temperature": (0.0, 1.0)},
    "recap": {
        "schedule": ("cosine", "power"), "choice_temperature": (0.0, 5.5), "final_temperature": (None, 0.65),
        "local_steps": (0, 1, 3), "full_groups": (0, 1, 2), "order": ("confidence", "halton"),
    },
}  # fmt: skip
"""Values that settings are drawn from; a sampler that is not here is used with its defaults."""
EVEN: tuple[tuple[str, dict[str, Any]], ...] = (
    ("threshold", {"threshold": 0.5}),
    ("localleap", {"anchor_threshold": 0.95, "relaxed_threshold": 0.5}),
    ("localleap", {"anchor_threshold": 0.5, "relaxed_threshold": 0.3}),
    ("hierarchy", {"threshold": 0.5, "low_threshold": 0.3}),
    ("klass", {"confidence_threshold": 0.5, "kl_threshold": 1.0}),
    ("credit", {"threshold": 0.5}),
    ("editing", {"threshold": 0.5}),
)
"""Settings at which the module of one's own, which is confident of pairs of tokens, meets its thresholds exactly."""
JACOBI = {
    "window": (1, 2, 4, 8, 16), "init": ("random", "repeat_horizontal", "sample_horizontal"),
    "refresh": ("resample", "maximal", "gumbel", "keep"), "random_law": ("uniform", "one_hot"),
}  # fmt: skip
DRAFTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "sjd": JACOBI,
    "scd": JACOBI | {"refresh": ("gumbel", "maximal")},
    "sjd_pac": JACOBI | {"refresh": ("gumbel", "maximal"), "siblings": (2, 4), "branching": (1, 2)},
    "jacobi": {"window": (1, 4, 8), "init": JACOBI["init"]},
    "gsd": JACOBI | {"group_half_width": (1, 3, 7), "p_threshold": (0.1, 0.5), "d_threshold": (None, 0.5)},
    "lantern": JACOBI | {"k": (3, 10), "delta": (0.05, 0.3)},
    "lantern++": JACOBI | {"k": (3, 10), "delta": (0.1, 0.3), "lam": (2.0, 5.0)},
    "zipar": {"window": (2, 3, 5), "random_law": ("uniform", "one_hot")},
    "speculative": {"window": (2, 3, 5)},
}
COMBINATIONS = (
    "credit+localleap", "credit(threshold=0.95)+localleap", "threshold&klass", "credit>>factor", "factor+localleap",
    "klass+persistence", "credit>>localleap", "threshold(threshold=0.5)&entropy_threshold", "(threshold+factor)&klass",
    "credit>>threshold+hierarchy",
)  # fmt: skip
SUFFIXES = (
    0, 3, 16, "5", "gaussian:9", "uniform:8:2", {"window": 12, "density": "gaussian", "scale": 1.0, "k_sigma": 2.0},
)  # fmt: skip
REREADS = {"learn2pd", "editing", "saber", "wino"}
"""Samplers that read decided positions again, which caches of decided positions refuse."""
PICKS = {"random", "halton", "lpd"}
"""Samplers that know what they commit before the forward."""


def likely(draw: Draw, share: float) -> bool:
    return draw.random() < share


def some_settings(draw: Draw, table: Mapping[str, Sequence[Any]], share: float = 0.5) -> dict[str, Any]:
    return {name: draw.choice(values) for name, values in table.items() if likely(draw, share)}


def sampler_of(draw: Draw, name: str, table: Mapping[str, Mapping[str, Sequence[Any]]]) -> Any:
    """A name, or a sampler with settings."""
    if name not in table or likely(draw, 0.3):
        return name
    settings = some_settings(draw, table[name])
    if name == "localleap" and {"anchor_threshold", "relaxed_threshold"} & set(settings):
        settings |= {"anchor_threshold": 0.95, "relaxed_threshold": draw.choice((0.3, 0.7))}
    if name in ("klass", "wino", "hierarchy", "maskgit", "recap") and likely(draw, 0.1):
        settings = {}
    return {"$": "sampler", "name": name, "settings": settings}


def cache_of(draw: Draw, name: str, used: Mapping[str, Any], caches: Sequence[str]) -> Any:
    """A cache that goes with the sampler and the model, mostly; None for none."""
    if likely(draw, 0.04):
        return draw.choice(caches)  # whatever becomes of it
    if not used["store"] or likely(draw, 0.4):
        return draw.choice((None, None, "none"))
    kinds = ["prefix", "dual", "dkv_prefill"]
    if used.get("block"):
        kinds += ["block", "hierarchical", "block"]
    if name != "freedave" or used.get("block"):
        kinds += ["vicinity"]
    if not REREADS & set(name.replace(">>", "+").split("+")) and name != "freedave":
        kinds += ["dkv_decode", "dkv_pd"]
    if name in PICKS and used["same"]:
        kinds += ["dkv_greedy"] * 3
    if name == "recap" and used["same"] and not used.get("block"):
        kinds += ["recap"] * 4
    # a cache that this table does not know yet
    kinds += [kind for kind in caches if kind not in {*kinds, "none", "dkv_greedy", "recap", "block", "hierarchical",
                                                     "vicinity", "dkv_decode", "dkv_pd"}]  # fmt: skip
    kind = draw.choice(kinds)
    settings: dict[str, Any] = {}
    if kind == "vicinity":
        settings = some_settings(
            draw, {"prefix_look": (0, 2, 16), "after_look": (0, 2), "warmup_steps": (0, 1), "cache_update_freq": (1, 3)}
        )
    elif kind in ("dkv_decode", "dkv_pd"):
        shifts = ("un", "un_right") if used["same"] else ("un_right", "un", "right")
        settings = some_settings(draw, {"refresh_interval": (1, 3), "shift_type": shifts[:1] + ("un_right",)})
    elif kind == "dkv_greedy":
        settings = some_settings(draw, {"refresh_interval": (1, 2, 3), "window": (1, 4)})
    elif kind == "recap":
        settings = some_settings(draw, {"recompute_prompt": (True, False)})
    elif kind == "d2":
        settings = some_settings(draw, {"current_k": (1, 3, 8), "sigma": (0.5, 3.0), "inflate_w": (0, 2, 6)})
    elif kind == "delayed":
        settings = some_settings(
            draw, {"cache_delay_iter": (1, 2, 3), "refresh_interval": (2, 5), "waiting": ("first", "all")}
        )
    if kind not in ("block", "none") and likely(draw, 0.15):
        settings |= some_settings(draw, {"shape_multiple": (2, 4), "store_dtype": ("float32", "bfloat16")})
    return {"$": "cache", "name": kind, "settings": settings} if settings or likely(draw, 0.2) else kind


def ids_of(draw: Draw, bounds: tuple[int, int], length: int) -> list[int]:
    return [draw.randint(*bounds) for _ in range(length)]


def words_of(draw: Draw, call: dict[str, Any], bounds: tuple[int, int]) -> None:
    """What is drawn from the distribution: temperature, filters, what is kept out."""
    temperature = draw.choice((0, 0, 0.1, 0.7, 1.0))
    if temperature or likely(draw, 0.1):
        call["temperature"] = temperature
    if likely(draw, 0.25):
        call["top_p"] = draw.choice((0.5, 0.9, 1.0))
    if likely(draw, 0.25):
        call["top_k"] = draw.choice((1, 3, 12))
    if likely(draw, 0.2):
        call["guidance_scale"] = draw.choice((0.0, 0.5, 1.5, 3.0))
    if likely(draw, 0.15):
        call["suppress_tokens"] = ids_of(draw, bounds, draw.randint(1, 4))
    for name, share in (("logits_eos_inf", 0.1), ("confidence_eos_eot_inf", 0.12), ("holes_eos_inf", 0.1)):
        if likely(draw, share):
            call[name] = draw.choice((True, True, False))
    if likely(draw, 0.3):
        call["eos_early_stop"] = draw.choice((True, False, False))


def hearing(draw: Draw, call: dict[str, Any]) -> None:
    if likely(draw, 0.06):
        call["streamer"] = {"$": "streamer"}
    if likely(draw, 0.08):
        call["callback"] = {"$": "callback", "stop": draw.choice((None, 1, 2, 4))}


def masked(draw: Draw, known: Mapping[str, Any]) -> dict[str, Any]:
    kind = draw.choices(list(MODELS), [entry["share"] for entry in MODELS.values()])[0]
    used = MODELS[kind]
    names = [name for name, facts in known["samplers"].items() if facts["family"] == "masked"]
    name = draw.choice(names) if likely(draw, 0.82) else draw.choice(COMBINATIONS)
    while (name == "wino" and not used["same"]) or (name == "learn2pd" and kind != "packaged" and likely(draw, 0.8)):
        name = draw.choice(names)
    made = sampler_of(draw, name, SETTINGS)
    if kind == "plain" and likely(draw, 0.5):
        name, settings = draw.choice(EVEN)
        made = {"$": "sampler", "name": name, "settings": dict(settings)}
    call: dict[str, Any] = {"trace": True, "sampler": made}
    uses_steps = known["samplers"].get(name, {}).get("uses_steps", False)
    cache = cache_of(draw, name, used, known["caches"])
    if cache is not None:
        call["cache"] = cache

    rows, own = draw.choice((1, 1, 1, 2, 3, 4)), used.get("block")
    bounds = used.get("ids", (3, 90))
    length = draw.choice((1, 2, 3, 5, 7, 8, 12))
    lengths = [length] * rows if likely(draw, 0.3) else [draw.randint(1, 12) for _ in range(rows)]
    if used.get("text"):
        texts = [draw.choice(TEXTS) for _ in range(rows)]
        call["prompt"] = texts[0] if rows == 1 else texts
        if likely(draw, 0.1):
            call["prompt"] = [{"role": "user", "content": texts[0]}]
            rows = 1
        if likely(draw, 0.1):
            call["chat"] = draw.choice((True, False, None))
        if likely(draw, 0.15):
            call["stop_strings"] = draw.choice(("fig", ["apple", "kiwi"], "pe", " fig apple"))
    else:
        prompts = [ids_of(draw, bounds, n) for n in lengths]
        shape = draw.random()
        if shape < 0.6:
            name_of_ids = "prompt" if likely(draw, 0.5) else "input_ids"
            call[name_of_ids] = prompts if rows > 1 or likely(draw, 0.5) else prompts[0]
        else:  # padded, on either side
            width, left = max(lengths), likely(draw, 0.6)
            ids, mask = [], []
            for row in prompts:
                padding, ones = [bounds[0]] * (width - len(row)), [1] * len(row)
                zeros = [0] * len(padding)
                ids.append(padding + row if left else row + padding)
                mask.append(zeros + ones if left else ones + zeros)
            call["input_ids"] = {"$": "tensor", "values": ids}
            call["attention_mask"] = {"$": "tensor", "values": mask}

    new = draw.choice((4, 8, 8, 12, 16, 16, 24))
    block = new
    call["max_new_tokens"] = new
    drafts = name == "freedave"
    picks = isinstance(cache, (str, dict)) and "dkv_greedy" in json.dumps(cache)
    if own:
        if likely(draw, 0.3):
            call["block_length"] = draw.choice((own, own // 2, own * 2))
        elif likely(draw, 0.1):
            call["blocks"] = draw.choice(("whole", "fixed"))
    elif name != "adablock":
        form = draw.random()
        if form < 0.45:
            block = draw.choice([size for size in (2, 4, 8, 16) if new % size == 0] or [new])
            call["block_length"] = block
        elif form < 0.55:
            block = draw.choice([size for size in (3, 4, 5, 8) if size <= new])
            call["blocks"] = {"$": "FixedBlocks", "length": block}
            if likely(draw, 0.3):
                call["blocks"]["align"] = draw.choice(("prompt", "absolute"))
        elif form < 0.7 and not drafts and not picks:
            call["blocks"] = "adaptive"
            if not used.get("text") or likely(draw, 0.5):
                call["blocks"] = {"$": "AdaptiveBlocks", "length": draw.choice((4, 8))}
                call["blocks"]["delimiters"] = ids_of(draw, bounds, 12)
                call["blocks"] |= some_settings(
                    draw, {"delimiter_threshold": (0.0, 0.05, 0.3), "window": (0.25, 0.5), "min_length": (1, 2)}
                )
        elif form < 0.8:
            call["blocks"] = "whole"
        elif form < 0.9 and not drafts and not uses_steps:
            call["blocks"] = {"$": "PipelinedBlocks", "length": draw.choice((2, 4, 8))}
            pipeline = {"add": (0.1, 0.5, 1.0), "full": (0.5, 0.95), "forced": ("first", "active")}
            call["blocks"] |= some_settings(draw, pipeline)
        kept = cache["name"] if isinstance(cache, dict) else cache
        whole = kept in (None, "none", "prefix", "dual", "vicinity", "d2")
        if likely(draw, 0.3 if whole else 0.03) and name != "wino":
            call["suffix"] = draw.choice(SUFFIXES)
            if likely(draw, 0.9) and form >= 0.9:  # one block of the whole answer has nothing after it
                call["block_length"] = draw.choice((2, 4))
    cut = call.get("blocks")
    plain_blocks = "block_length" in call or cut == "whole"
    if not own and plain_blocks and likely(draw, 0.6 if uses_steps else 0.05):
        blocks = 1 if cut == "whole" else -(-new // block)
        most = max(1, min(block, new) if cut != "whole" else new)
        call["steps"] = blocks * draw.randint(1, most)
    if own and rows == 1 and "block_length" not in call and cut is None and uses_steps and likely(draw, 0.3):
        call["steps"] = 12 * draw.choice((1, 2))
    words_of(draw, call, bounds)
    if likely(draw, 0.1) and "callback" not in call:
        call["stop"] = {"$": "Prophet"}
        call["stop"] |= some_settings(draw, {"gaps": ([2.0, 1.0, 0.5], [0.0, 0.0, 0.0]), "stages": ([0.1, 0.5],)})
        if likely(draw, 0.3):
            call["stop"]["answer"] = {"$": "range", "first": 1, "last": 3}
    if likely(draw, 0.07) and used["store"]:
        call["attention"] = draw.choice(("dense", "sparsed", {"$": "SparseD"}))
        if isinstance(call["attention"], dict):
            call["attention"] |= some_settings(
                draw,
                {"select": (0.2, 0.5), "skip": (0.0, 0.3), "block_size": (2, 4), "dense_steps": (1, 2),
                 "refresh_pattern_every": (2, 3), "selection": ("isolated", "reference"), "backend": ("auto", "torch")},
            )  # fmt: skip
    numbers = draw.random()
    if numbers < 0.6:
        call["seed"] = draw.randint(0, 99) if likely(draw, 0.75) else [draw.randint(0, 99) for _ in range(rows)]
    elif numbers < 0.7:
        call["generator"] = {"$": "generator", "seed": draw.randint(0, 99)}
    elif numbers < 0.85 and (rows == 1 if used.get("text") else len(set(lengths)) == 1):
        call["rng"] = "reference"
        call["generator"] = {"$": "generator", "seed": draw.randint(0, 99)}
    if likely(draw, 0.08) and rows < 3:
        call["num_return_sequences"] = draw.choice((2, 3))
    elif likely(draw, 0.05) and rows == 1:
        call["race"] = draw.choice((2, 3))
        call.pop("rng", None)
    if likely(draw, 0.01):
        call["compile"] = True
    hearing(draw, call)
    dtype = draw.choice(used["dtypes"])
    request: dict[str, Any] = {"do": "generate", "model": f"{kind}:{dtype}" if dtype else kind, "call": call}
    if used["store"] and cache not in (None, "none") and "attention_mask" not in call and likely(draw, 0.3):
        call["share_prefix" if likely(draw, 0.4) else "keep_prefix"] = True
        several = "race" in call or "num_return_sequences" in call
        if call.get("keep_prefix") and not used.get("text") and not several:
            turn: dict[str, Any] = {"max_new_tokens": 8, "trace": True, "seed": 4, "cache": cache}
            turn |= {"suffix": call["suffix"]} if "suffix" in call else {}
            turn |= {"sampler": call["sampler"]} | ({"block_length": 4} if not own and name != "adablock" else {})
            request["next"] = {"more": ids_of(draw, bounds, draw.randint(1, 6)), "call": turn}
    return request


def infill(draw: Draw, known: Mapping[str, Any]) -> dict[str, Any]:
    kinds = [kind for kind in MODELS]
    kind = draw.choices(kinds, [MODELS[entry]["share"] for entry in kinds])[0]
    used = MODELS[kind]
    names = [name for name, facts in known["samplers"].items() if facts["family"] == "masked"]
    name = draw.choice(names) if likely(draw, 0.85) else draw.choice(COMBINATIONS)
    while name in ("learn2pd",) or (name == "wino" and not used["same"]):
        name = draw.choice(names)
    call: dict[str, Any] = {"trace": True, "sampler": sampler_of(draw, name, SETTINGS)}
    cache = cache_of(draw, name, used, known["caches"])
    if cache is not None:
        call["cache"] = cache
    bounds = used.get("ids", (3, 90))
    entry = "infill" if likely(draw, 0.8) else "generate"
    if used.get("text"):
        entry = "infill"
        holes = ("kiwi <mask:2> pear", "<mask> fig apple", "pear<mask><mask>apple", "apple <mask:3> fig <mask:2>")
        form = draw.random()
        if form < 0.5:
            asked = {"role": "user", "content": draw.choice(TEXTS)}
            call["prompt"] = [asked, {"role": "assistant", "content": draw.choice(holes)}]
        elif form < 0.7:
            call |= {"mask": "[hole]", "prompt": draw.choice(("kiwi [hole][hole] pear", "fig [hole:2] apple [hole]"))}
        else:
            call["prompt"] = [draw.choice(holes) for _ in range(draw.randint(1, 3))]
        if likely(draw, 0.15):
            call["stop_strings"] = draw.choice(("fig", ["apple", "kiwi"]))
    else:
        rows = []
        for _ in range(draw.choice((1, 1, 2, 3))):
            row = ids_of(draw, bounds, draw.randint(4, 16))
            for at in draw.sample(range(len(row)), draw.randint(1, len(row) - 1)):
                row[at] = MASK_IDS[kind]
            rows.append(row)
        call["input_ids" if likely(draw, 0.5) else "prompt"] = rows if len(rows) > 1 else draw.choice((rows, rows[0]))
    if likely(draw, 0.3):
        call["max_new_tokens"] = draw.choice((0, 2, 4, 8))
    if likely(draw, 0.3) and not used.get("block") and name != "adablock":
        call["block_length"] = draw.choice((2, 4, 8))
    if "block_length" in call and name != "wino" and likely(draw, 0.4):
        call["suffix"] = draw.choice(SUFFIXES)
    words_of(draw, call, bounds)
    call["seed"] = draw.randint(0, 99)
    if likely(draw, 0.1):
        call["num_return_sequences"] = 2
    hearing(draw, call)
    if "streamer" in call and likely(draw, 0.8):
        call.pop("streamer")
    dtype = draw.choice(used["dtypes"])
    return {"do": entry, "model": f"{kind}:{dtype}" if dtype else kind, "call": call}


def drafting(draw: Draw, known: Mapping[str, Any], images: bool, base: str) -> Any:
    """A sampler of the draft-and-verify family."""
    names = [name for name, facts in known["samplers"].items() if facts["family"] == "draft_verify"]
    name = draw.choice(names)
    while not images and name in ("zipar", "gsd", "lantern", "lantern++") and likely(draw, 0.93):
        name = draw.choice(names)
    made = sampler_of(draw, name, DRAFTS)
    if isinstance(made, dict):
        settings = made["settings"]
        if images and "init" in settings and likely(draw, 0.4):
            settings["init"] = draw.choice(("repeat_vertical", "sample_vertical"))
        if settings.get("init", "random") != "random" or settings.get("refresh") == "keep":
            settings.pop("random_law", None)
    if name in ("speculative", "lantern", "lantern++") and (name == "speculative" or likely(draw, 0.25)):
        settings = made["settings"] if isinstance(made, dict) else {}
        made = {"$": "sampler", "name": name, "settings": settings}
        for other in ("init", "refresh", "random_law"):
            settings.pop(other, None)
        if settings.get("window", 0) > 5 or name != "speculative":
            settings["window"] = draw.choice((3, 5))
        settings["drafter"] = {"$": "model", "name": "digits-ar-drafter" if images else "drafter"}
        if base == "causal-llama" and likely(draw, 0.5):
            settings["drafter"] = {"$": "eagle", "base": base}
        if likely(draw, 0.4):
            settings.pop("window", None)
            settings["tree"] = draw.choice(([2, 1], [3, 2, 1], [2, 2], [[0], [1], [0, 0], [0, 1], [0, 0, 0]]))
        elif settings["drafter"]["$"] == "eagle" and likely(draw, 0.4):
            settings.pop("window", None)
            settings["tree"] = {"$": "DynamicTree"}
            if name == "speculative":
                settings["rule"] = "naive"
        if name == "speculative" and isinstance(settings.get("tree"), list) and likely(draw, 0.5):
            settings["rule"] = draw.choice(("without_replacement", "naive"))
    return made


def causal(draw: Draw, known: Mapping[str, Any]) -> dict[str, Any]:
    base = draw.choice(("causal", "causal-llama"))
    rows = draw.choice((1, 1, 2, 3, 4))
    prompts = [ids_of(draw, (0, 38), draw.randint(1, 10)) for _ in range(rows)]
    call: dict[str, Any] = {"trace": True, "sampler": drafting(draw, known, False, base)}
    call |= {"prompt": prompts if rows > 1 else draw.choice((prompts, prompts[0]))}
    call["max_new_tokens"] = draw.choice((1, 4, 8, 16, 24))
    call["seed"] = draw.randint(0, 99) if likely(draw, 0.7) else [draw.randint(0, 99) for _ in range(rows)]
    if likely(draw, 0.8):
        call["temperature"] = draw.choice((0.0, 0.1, 0.7, 1.0))
    if likely(draw, 0.3):
        call["top_p"] = draw.choice((0.5, 0.9))
    if likely(draw, 0.3):
        call["top_k"] = draw.choice((1, 3, 12))
    if likely(draw, 0.15):
        call["suppress_tokens"] = ids_of(draw, (0, 38), 3)
    if likely(draw, 0.15):
        call["logits_eos_inf"] = True
    if likely(draw, 0.2):
        call["eos_early_stop"] = draw.choice((True, False))
    if likely(draw, 0.1):
        call["num_return_sequences"] = 2
    elif likely(draw, 0.05) and rows == 1:
        call["race"] = 2
    if likely(draw, 0.04):
        call[draw.choice(("steps", "guidance_scale"))] = 2
    hearing(draw, call)
    return {"do": "generate", "model": base, "call": call}


def pictures(draw: Draw, call: dict[str, Any]) -> None:
    labels = [draw.randint(0, 9) for _ in range(draw.choice((1, 1, 2)))]
    call |= {"class_labels": labels if likely(draw, 0.8) else labels[0], "trace": likely(draw, 0.85)}
    numbers = draw.random()
    if numbers < 0.7:
        call["seed"] = draw.randint(0, 99)
    elif numbers < 0.85 and isinstance(call["class_labels"], list):
        call["seed"] = [draw.randint(0, 99) for _ in labels]
    else:
        call["generator"] = {"$": "generator", "seed": draw.randint(0, 99)}
    call["output_type"] = draw.choice(("pil", "pt", "latent"))
    if likely(draw, 0.1):
        call["num_images"] = 2
        call["seed"] = 5
        call.pop("generator", None)
    if likely(draw, 0.25):
        call["guidance_scale"] = draw.choice((1, 1.5, 3.0))
    if likely(draw, 0.08):
        call["callback"] = {"$": "callback", "stop": draw.choice((None, 1, 3))}


def images(draw: Draw, known: Mapping[str, Any]) -> dict[str, Any]:
    call: dict[str, Any] = {"sampler": drafting(draw, known, True, "digits-ar")}
    pictures(draw, call)
    if likely(draw, 0.4):
        call["temperature"] = draw.choice((0, 0.1, 0.7, 1.0))
    if likely(draw, 0.3):
        call["top_k"] = draw.choice((0, 1, 5, 50))
    if likely(draw, 0.3):
        call["top_p"] = draw.choice((0.5, 0.9, 1.0))
    if likely(draw, 0.04):
        call[draw.choice(("steps", "height", "cache"))] = 28
    return {"do": "images", "model": draw.choice(("digits-ar", "digits-ar", "digits-ar:float64")), "call": call}


def masked_images(draw: Draw, known: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name, facts in known["samplers"].items() if facts["family"] == "masked"]
    name = draw.choice(("maskgit", "halton", "recap", draw.choice(names)))
    while name in ("learn2pd", "adablock"):
        name = draw.choice(names)
    call: dict[str, Any] = {"sampler": sampler_of(draw, name, SETTINGS)}
    pictures(draw, call)
    if known["samplers"][name]["uses_steps"]:
        call["steps"] = draw.choice((2, 4, 8))
    if likely(draw, 0.3):
        call["temperature"] = draw.choice((0, 0.7, 1.0))
    if likely(draw, 0.2):
        call["top_k"] = draw.choice((0, 5, 50))
    if likely(draw, 0.1):
        call["cache"] = draw.choice(("none", "recap", "dual"))
    return {"do": "images", "model": draw.choice(("digits-maskgit", "digits-maskgit:float64")), "call": call}


def mar(draw: Draw, known: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"head_steps": draw.choice((2, 3, 5))}
    settings |= some_settings(
        draw,
        {"local_steps": (0, 1, 2), "full_groups": (None, 1, 2), "fast_ratio": (0.4, 1.0), "temperature": (0.5, 1.0),
         "guidance_schedule": ("linear", "constant"), "chunk_order": ("raster", "order"), "keep_buffer": (True, False)},
        0.4,
    )  # fmt: skip
    call: dict[str, Any] = {"sampler": {"$": "sampler", "name": "mar", "settings": settings}}
    if likely(draw, 0.1):
        call["sampler"] = "recap"
    if "cspd" in known["samplers"] and likely(draw, 0.25):
        settings = {"head_steps": draw.choice((2, "2,1")), "draft": {"$": "model", "name": "mar"}}
        settings |= some_settings(draw, {"num_draft": (2, 3), "ratio": (0, 0.3), "mended": (True, False)}, 0.5)
        call["sampler"] = {"$": "sampler", "name": "cspd", "settings": settings}
    pictures(draw, call)
    call |= {"output_type": "latent", "steps": draw.choice((3, 4, 6, 8))}
    return {"do": "images", "model": draw.choice(("mar", "mar:float64")), "call": call}


PIPES = (
    "digits-dit", "digits-dit", "dit", "flux", "wan", "DiT", "FLUX", "SD3", "PixArt", "Sana", "Wan", "HunyuanVideo",
    "QwenImage", "SD3/loop", "PixArt/loop",
)  # fmt: skip


def pipelines(draw: Draw, known: Mapping[str, Any]) -> dict[str, Any]:
    name = draw.choice(PIPES)
    request: dict[str, Any] = {"do": "accelerate", "pipe": name, "steps": draw.choice((4, 6, 9))}
    if name.split("/")[0] in ("SD3", "PixArt", "Sana", "Wan") and likely(draw, 0.3):
        request["more"] = {"calls": 2}
    if name == "digits-dit":
        request["more"] = {"labels": [draw.randint(0, 9) for _ in range(draw.randint(1, 2))]}
    if likely(draw, 0.06):
        return request | {"settings": None}
    settings = some_settings(
        draw,
        {"interval": (1, 2, 3, 5), "order": (0, 1, 2, 3), "first_enhance": (1, 2, 3),
         "style": ("reference", "diffusers"), "target": ("module", "block", "output"), "full_after": (5,),
         "basis": ("taylor", "newton", "hermite", "reuse", "foca"), "derivative_dtype": ("bfloat16", "float64")},
        0.4,
    )  # fmt: skip
    if settings.get("style") == "diffusers" or settings.get("basis") in ("foca", "newton"):
        settings.pop("derivative_dtype", None)
    if likely(draw, 0.1):
        settings |= {"basis": "dmd", "target": "output", "window": draw.choice((4, 6))}
        settings.pop("derivative_dtype", None)
    if settings.get("basis") == "hermite" and likely(draw, 0.5):
        settings["sigma"] = draw.choice((0.3, 0.8))
    if settings.get("basis") in ("foca",):
        settings.pop("order", None)
    form = draw.random()
    if form < 0.12:
        for key in ("interval", "first_enhance", "style", "full_after"):
            settings.pop(key, None)
        settings["full_steps"] = sorted({0, *draw.sample(range(1, request["steps"]), 2)})
    elif form < 0.3:
        for key in ("interval", "style", "full_after"):
            settings.pop(key, None)
        settings["refresh"] = {"$": "Verification"} | some_settings(
            draw, {"base_threshold": (0.05, 0.3), "decay_rate": (0.3, 1.0), "max_forecasts": (2, 4)}
        )
        if likely(draw, 0.5):
            settings["refresh"] = {"$": "AccumulatedChange", "threshold": draw.choice((0.05, 0.2, 0.5))}
            settings["refresh"] |= some_settings(draw, {"max_forecasts": (1, 3)})
    elif form < 0.38 and name in ("digits-dit", "dit", "flux", "DiT", "PixArt"):
        settings = {"basis": "reuse"}
        request["bac"] = [draw.choice((2, 3)), draw.choice(("cosine", "l1", "mse"))]
        request.pop("more", None)
    elif form < 0.44:
        settings["max_memory"] = draw.choice((20_000, 200_000, "2MB"))
    return request | {"settings": settings, "runs": draw.choice((1, 1, 2))}


TEXT_SCHEDULERS = {
    "Threshold": "threshold", "LowConfidence": "low_confidence", "Random": "random", "Margin": "margin",
    "Factor": "factor", "Hierarchy": "hierarchy", "EntropyBound": "entropy_bound",
    "EntropyThreshold": "entropy_threshold", "LocalLeap": "localleap", "CreditDecoding": "credit", "CCD": "ccd",
    "CCDAgree": "ccd_agree", "KLASS": "klass", "Persistence": "persistence", "Editing": "editing", "Saber": "saber",
    "Combination": "", "FreeDave": "", "Wino": "",
}  # fmt: skip
WORDS = {"temperature": (0.0, 0.7, 1.0), "top_p": (0.9,), "top_k": (5,)}
IMAGE_SCHEDULERS = {"MaskGIT": "maskgit", "Halton": "halton", "LPD": "lpd", "Recap": "recap"}


def schedulers(draw: Draw, known: Mapping[str, Any]) -> dict[str, Any]:
    table = IMAGE_SCHEDULERS if likely(draw, 0.35) else TEXT_SCHEDULERS
    name = draw.choice(list(table))
    if name in ("FreeDave", "Wino") and likely(draw, 0.7):
        name = "Threshold"
    made = sampler_of(draw, table[name], SETTINGS) if table[name] else {}
    settings = made["settings"] if isinstance(made, dict) and made else {}
    if name == "Combination":
        settings = {"combination": draw.choice(COMBINATIONS[:6])}
    request: dict[str, Any] = {"scheduler": f"{name}Scheduler", "settings": settings}
    generator = {"$": "generator", "seed": draw.randint(0, 99)}
    if likely(draw, 0.3):
        text = table is TEXT_SCHEDULERS
        width = draw.choice((4, 8))
        if text:
            settings = settings | {"block_length": width}
        else:
            settings = settings | {"mask_token_id": 40}
            width = 16
        sample = []
        for _ in range(draw.randint(1, 3)):
            sample.append([draw.choice((40, 40, 40, draw.randint(0, 38))) for _ in range(width)])
            sample[-1][draw.randrange(width)] = 40
        call = some_settings(draw, WORDS, 0.4) if text else {}
        return {
            "do": "by hand", "scheduler": f"{name}Scheduler", "settings": settings, "seed": draw.randint(0, 99),
            "sample": sample, "steps": draw.choice((2, 4, 8)), "sharpness": draw.choice((0.3, 1.0, 3.0)),
            "kind": "text" if text else "image", "call": call,
        }  # fmt: skip
    if table is TEXT_SCHEDULERS:
        ids = [ids_of(draw, (0, 38), 6) for _ in range(draw.choice((1, 1, 2)))]
        call = {"input_ids": {"$": "tensor", "values": ids}, "gen_length": draw.choice((6, 10, 12))}
        call |= {"num_inference_steps": draw.choice((1, 2, 4)), "eos_early_stop": likely(draw, 0.5)}
        call |= some_settings(draw, WORDS, 0.4)
        return request | {"do": "llada2", "call": call | {"generator": generator}, "cache": likely(draw, 0.3)}
    side = draw.choice((4, 8))
    call = {"num_inference_steps": draw.choice((3, 6)), "height": side, "width": side, "generator": generator}
    call |= {"guidance_scale": draw.choice((0.0, 3.0)), "num_images_per_prompt": draw.choice((1, 2))}
    call["output_type"] = draw.choice(("latent", "np"))
    if likely(draw, 0.25):
        request["recap"] = some_settings(draw, {"local_steps": (1, 2), "full_groups": (1, 2)}) or {"full_groups": 2}
        if "local_steps" in request["recap"]:
            request["recap"].pop("full_groups", None)
    return request | {"do": "amused", "call": call}


def hf_generate(draw: Draw, known: Mapping[str, Any]) -> dict[str, Any]:
    kind = draw.choice(("same", "shifted"))
    names = [name for name, facts in known["samplers"].items() if facts["family"] == "masked"]
    name = draw.choice(names)
    while name in ("learn2pd", "wino"):
        name = draw.choice(names)
    rows, width = draw.choice((1, 2, 3)), draw.randint(2, 8)
    call: dict[str, Any] = {"sampler": sampler_of(draw, name, SETTINGS), "mask_token_id": 40}
    call["inputs"] = {"$": "tensor", "values": [ids_of(draw, (1, 38), width) for _ in range(rows)]}
    if likely(draw, 0.5):
        paddings = [draw.randint(0, width - 1) for _ in range(rows)]
        call["attention_mask"] = {"$": "tensor", "values": [[0] * n + [1] * (width - n) for n in paddings]}
    call["max_new_tokens"] = draw.choice((4, 8, 12))
    cache = cache_of(draw, name, {"store": True, "same": kind == "same"}, known["caches"])
    if cache is not None:
        call["cache"] = cache
    if name != "adablock" and likely(draw, 0.5):
        call["block_length"] = 4
        if known["samplers"][name]["uses_steps"] and likely(draw, 0.4):
            call["steps"] = call["max_new_tokens"] // 4 * draw.choice((1, 2))
    if likely(draw, 0.6):
        call |= {"do_sample": True, "temperature": draw.choice((0.1, 0.7, 1.0))}
        call |= some_settings(draw, {"top_p": (0.9,), "top_k": (3, 12), "num_return_sequences": (2,)}, 0.3)
    if likely(draw, 0.2):
        call["guidance_scale"] = 1.5
    if likely(draw, 0.2):
        call["suppress_tokens"] = ids_of(draw, (1, 38), 3)
    call["seed"] = draw.randint(0, 99)
    if likely(draw, 0.2):
        call[draw.choice(("logits_eos_inf", "confidence_eos_eot_inf"))] = True
    if likely(draw, 0.2):
        call["eos_early_stop"] = False
    if likely(draw, 0.2):
        call["return_dict_in_generate"] = False
    return {"do": "hf", "model": kind, "call": call}


def command(draw: Draw, known: Mapping[str, Any]) -> dict[str, Any]:
    names = [name for name, facts in known["samplers"].items() if facts["family"] == "masked"]
    name = draw.choice([*names, "credit+localleap", "threshold&klass"])
    form = draw.random()
    arguments: list[Any]
    if form < 0.6:
        arguments = ["generate", draw.choice(TEXTS), "--sampler", name, "--max-new-tokens", draw.choice((8, 16))]
        if form > 0.45:
            arguments = ["infill", "kiwi <mask:2> pear", "--prompt", draw.choice(TEXTS), "--sampler", name]
        settings = some_settings(draw, SETTINGS.get(name, {}), 0.4)
        for key, value in settings.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                arguments += ["--set", f"{key}={value}"]
        cache = draw.choice((None, None, "prefix", "dual", "dkv_prefill"))
        arguments += ["--cache", cache] if cache else []
        for flag, values, share in (
            ("--temperature", (0.1, 0.7, 1.0), 0.4), ("--top-p", (0.9,), 0.2), ("--top-k", (1, 5), 0.2),
            ("--guidance-scale", (1.5,), 0.15), ("-n", (2, 3), 0.2), ("--seed", (0, 5), 0.5),
            ("--block-length", (4, 8), 0.3), ("--trace", ("trace.json",), 0.3),
        ):  # fmt: skip
            if likely(draw, share) and not (flag == "--block-length" and name == "adablock"):
                arguments += [flag, draw.choice(values)]
        if arguments[0] == "generate":
            arguments += ["--stop", "fig"] if likely(draw, 0.15) else []
            arguments += draw.choice(([], [], ["--raw"], ["--no-eos-early-stop"]))
        arguments += draw.choice(([], ["--json"]))
    elif form < 0.85:
        kind = draw.choice(("digits-ar", "digits-maskgit", "digits-dit"))
        arguments = ["image", "--model", kind, "--out", "out.png", "--class", draw.choice(("3", "0,7"))]
        if kind == "digits-ar":
            arguments += ["--sampler", draw.choice(("sjd", "scd", "gsd", "lantern++", "jacobi", "zipar"))]
        else:
            arguments += ["--steps", 4]
        if kind == "digits-dit":
            arguments += ["--interval", draw.choice((1, 2, 3)), *draw.choice(([], ["--compare"]))]
        elif likely(draw, 0.5):
            arguments += ["--temperature", draw.choice((0.1, 0.7)), "--trace", "trace.png"]
        arguments += ["--seed", draw.randint(0, 9), *draw.choice(([], ["--json"])), "--enlarge", draw.choice((1, 2))]
    elif form < 0.95:
        arguments = draw.choice((["samplers"], ["caches"], ["samplers", "--json"], ["caches", "--json"], ["--help"]))
        if likely(draw, 0.4):
            arguments = [draw.choice(("generate", "infill", "image", "compare", "samplers", "learn2pd")), "--help"]
    else:
        arguments = ["compare", "--limit", 1, "--tasks", "sort", "--samplers", f"threshold,{name}", "--json"]
    return {"do": "command", "arguments": [str(argument) for argument in arguments]}


FAMILIES = {
    "masked": masked,
    "infill": infill,
    "causal": causal,
    "images": images,
    "masked images": masked_images,
    "mar": mar,
    "pipelines": pipelines,
    "schedulers": schedulers,
    "hf_generate": hf_generate,
    "command": command,
}


def requests_of(seed: int, count: int, known: Mapping[str, Any], only: str | None = None) -> list[dict[str, Any]]:
    """So many requests as plain JSON, the same for the same seed.

    Args:
        known: what is registered: {"samplers": {name: {"family", "uses_steps"}}, "caches": [name], ...}.
        only: a family of `FAMILIES`, or all.
    """
    found = []
    for index in range(count):
        draw = random.Random(f"{seed}/{index}")
        family = draw.choices(list(SHARES), list(SHARES.values()))[0] if only is None else only
        found.append({"id": index, "family": family} | FAMILIES[family](draw, known))
    return found


# ---- comparing -------------------------------------------------------------------------------------------------------


def differences(before: Any, after: Any, messages: bool = False) -> list[tuple[str, Any, Any]]:
    """Where two answers differ: (path, before, after), to the innermost difference; empty where nothing does.

    Args:
        messages: whether texts of errors and warnings count as well.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        before, after = ({RENAMED.get(key, key): value for key, value in side.items()} for side in (before, after))
        for key in dict.fromkeys([*before, *after]):
            if not messages and key in ("message", "warnings"):
                continue
            if key in ADDED and key not in before or key in GONE and key not in after:
                continue
            if key not in before or key not in after:
                found.append((key, before.get(key, "(nothing)"), after.get(key, "(nothing)")))
                continue
            inner = differences(before[key], after[key], messages)
            found += [(f"{key}.{path}" if path else key, old, new) for path, old, new in inner]
        return found
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        found = []
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            inner = differences(old, new, messages)
            found += [(f"{index}.{path}" if path else str(index), old, new) for path, old, new in inner]
        return found
    # as texts, since NaN is not equal to itself, and 1 equals True and 1.0
    return [] if json.dumps(before) == json.dumps(after) else [("", before, after)]


def verdict(before: Mapping[str, Any], after: Mapping[str, Any], messages: bool = False) -> str:
    """ "equal", "refused" (alike) or "different"."""
    broken = any("broken" in answer for answer in (before, after))
    if broken or differences(before, after, messages):
        return "different"
    return "refused" if "error" in before else "equal"


# ---- processes -------------------------------------------------------------------------------------------------------


class Worker:
    """A process that answers requests with one version; begun anew after a crash or a hang."""

    def __init__(self, place: Path, fixtures: Path, log: Path):
        self.place, self.fixtures, self.log = place, fixtures, log
        self.process: subprocess.Popen[bytes] | None = None
        self.read = b""

    def start(self) -> None:
        environment = os.environ | {
            "PYTHONPATH": str(self.place),
            "PARADEC_DIFFERENTIAL": str(self.fixtures),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        empty = self.fixtures / "empty"
        empty.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(self.place)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=empty, bufsize=0,
            )  # fmt: skip
        self.read = b""

    def ask(self, request: Any) -> dict[str, Any]:
        fresh = self.process is None or self.process.poll() is not None
        if fresh:
            self.start()
        process = self.process
        assert process is not None and process.stdin is not None and process.stdout is not None
        end = time.monotonic() + LONGEST + 60 * fresh
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            while b"\n" not in self.read:
                ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
                if not ready:
                    self.stop()
                    return {"broken": f"no answer in {LONGEST:.0f} s"}
                some = os.read(process.stdout.fileno(), 1 << 20)
                if not some:
                    break
                self.read += some
        except BrokenPipeError:
            pass
        if b"\n" not in self.read:
            code = process.wait()
            self.stop()
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            return {"broken": f"the process ended with {code}: {' '.join(last)}"}
        line, self.read = self.read.split(b"\n", 1)
        return json.loads(line)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def installed(commit: str) -> Path:
    """The folder that a wheel of a commit is installed in; built once per commit."""
    name = subprocess.run(
        ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True, text=True
    )
    if name.returncode:
        raise SystemExit(f"--base {commit}: no such commit")
    full = name.stdout.strip()
    place = Path(tempfile.gettempdir()) / "paradec-differential" / full
    if (place / "paradec" / "__init__.py").exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        source, wheels, target = (Path(folder) / part for part in ("source", "wheels", "target"))
        source.mkdir()
        archive = subprocess.run(["git", "archive", full], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(source)], input=archive, check=True)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        build = [*pip, "wheel", "--no-deps", "--wheel-dir", str(wheels), str(source)]
        bare = subprocess.run([sys.executable, "-c", "import hatchling"], capture_output=True).returncode == 0
        subprocess.run(build + (["--no-build-isolation"] if bare else []), check=True)
        wheel = str(next(wheels.glob("*.whl")))
        subprocess.run([*pip, "install", "--no-deps", "--target", str(target), wheel], check=True)
        try:
            target.rename(place)
        except OSError:  # another run was faster
            if not (place / "paradec" / "__init__.py").exists():
                raise
    return place


def write_fixtures(folder: Path) -> None:
    """Checkpoints with random weights in published formats, which both versions load."""
    import torch
    from safetensors.torch import save_file

    words = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "mask", *(f"w{index}" for index in range(28))]
    sizes: dict[str, Any] = {
        "vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 128, "rope_theta": 1000000,
        "rope_scaling": None, "rms_norm_eps": 1e-6, "hidden_act": "silu", "sliding_window": None,
        "use_sliding_window": False, "attention_dropout": 0.0, "torch_dtype": "float32", "bos_token_id": 0,
    }  # fmt: skip
    configs = {
        "sdar": sizes | {"model_type": "sdar", "head_dim": 8, "attention_bias": False, "eos_token_id": 0,
                         "block_size": 4, "tie_word_embeddings": False},
        "fast": sizes | {"model_type": "Fast_dLLM_Qwen", "bd_size": 8, "eos_token_id": 2, "pad_token_id": 2,
                         "tie_word_embeddings": True},
    }  # fmt: skip
    masks = {"sdar": "<|MASK|>", "fast": "|<MASK>|"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    for family, config in configs.items():
        generator = torch.Generator().manual_seed(len(family))
        draw = lambda *shape: 0.4 * torch.randn(shape, generator=generator)  # noqa: E731, B023
        weights = {"model.embed_tokens.weight": draw(32, 32), "model.norm.weight": 1 + draw(32)}
        if family == "sdar":
            weights["lm_head.weight"] = draw(32, 32)
        for index in range(config["num_hidden_layers"]):
            layer = f"model.layers.{index}."
            for name, size in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
                weights[f"{layer}self_attn.{name}.weight"] = draw(size, 32)
                if family == "fast":
                    weights[f"{layer}self_attn.{name}.bias"] = draw(size)
            if family == "sdar":
                weights |= {f"{layer}self_attn.{name}.weight": 1 + draw(8) for name in ("q_norm", "k_norm")}
            weights[f"{layer}self_attn.o_proj.weight"] = draw(32, 32)
            weights |= {f"{layer}mlp.{name}.weight": draw(48, 32) for name in ("gate_proj", "up_proj")}
            weights[f"{layer}mlp.down_proj.weight"] = draw(32, 48)
            for name in ("input_layernorm", "post_attention_layernorm"):
                weights[f"{layer}{name}.weight"] = 1 + draw(32)
        mask = masks[family]
        own = [mask if word == "mask" else word for word in words]
        table = {
            "version": "1.0",
            "added_tokens": [{"id": index, "content": word} | flags for index, word in enumerate(own[:4])],
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(own)}, "unk_token": "w0"},
        }
        settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        (folder / family).mkdir()
        save_file(weights, folder / family / "model.safetensors")
        (folder / family / "config.json").write_text(json.dumps(config))
        (folder / family / "tokenizer.json").write_text(json.dumps(table))
        (folder / family / "tokenizer_config.json").write_text(json.dumps(settings | {"mask_token": mask}))
    (folder / "mar").mkdir()
    golden = WORKER.parent / "golden" / "recap" / "golden_recap_mar.safetensors"
    shutil.copy(golden, folder / "mar" / "model.safetensors")
    fields = {"model_type": "mar", "heads": 2, "eps": 1e-5, "defaults": {"guidance_scale": 2.0}}
    (folder / "mar" / "config.json").write_text(json.dumps(fields))
    hidden, vocab = 32, 41  # EAGLE's format, for the small Llama of 41 tokens
    generator = torch.Generator().manual_seed(9)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (vocab, hidden), "fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,),
        "layers.0.self_attn.q_proj.weight": (hidden, hidden), "layers.0.self_attn.k_proj.weight": (16, hidden),
        "layers.0.self_attn.v_proj.weight": (16, hidden), "layers.0.self_attn.o_proj.weight": (hidden, hidden),
        "layers.0.mlp.gate_proj.weight": (24, hidden), "layers.0.mlp.up_proj.weight": (24, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, 24), "layers.0.post_attention_layernorm.weight": (hidden,),
    }  # fmt: skip
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": 24,
        "max_position_embeddings": 256, "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1,
        "num_key_value_heads": 2, "pad_token_id": 0, "rms_norm_eps": 1e-6, "rope_scaling": None, "vocab_size": vocab,
        "torch_dtype": "float64",
    }  # fmt: skip
    (folder / "eagle").mkdir()
    (folder / "eagle" / "config.json").write_text(json.dumps(config))
    drawn = {name: torch.randn(s, generator=generator, dtype=torch.float64) * 0.5 for name, s in shapes.items()}
    save_file(drawn, folder / "eagle" / "model.safetensors")


def answers_of(
    places: Mapping[str, Path], asked: Sequence[Any], jobs: int, fixtures: Path
) -> dict[str, list[dict[str, Any]]]:
    """What every version answers, in the order of the requests. At most `jobs` processes work at a time."""
    found: dict[str, list[Any]] = {side: [None] * len(asked) for side in places}
    chunks: dict[str, queue.SimpleQueue[int]] = {side: queue.SimpleQueue() for side in places}
    for side in places:
        for first in range(0, len(asked), CHUNK):
            chunks[side].put(first)
    turns, done, began = threading.Semaphore(jobs), [0], time.monotonic()

    def work(side: str, worker: Worker) -> None:
        try:
            while True:
                try:
                    first = chunks[side].get_nowait()
                except queue.Empty:
                    return
                with turns:
                    for index in range(first, min(first + CHUNK, len(asked))):
                        begun = time.monotonic()
                        found[side][index] = worker.ask(asked[index])
                        found[side][index]["seconds"] = time.monotonic() - begun
                        done[0] += 1
                    if sys.stderr.isatty():
                        progress = f"\r{done[0]} of {2 * len(asked)}, {time.monotonic() - began:.0f} s"
                        print(progress, end="", file=sys.stderr)
        finally:
            worker.stop()

    threads = [
        threading.Thread(
            target=work, daemon=True, args=(side, Worker(place, fixtures, fixtures / f"{side}-{index}.log"))
        )
        for index in range(max(1, jobs // len(places)))
        for side, place in places.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return found


def short(value: Any, width: int = 160) -> str:
    text = json.dumps(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", default="HEAD~1", help="the commit before (default: HEAD~1)")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that work at a time")
    parser.add_argument("--only", choices=list(FAMILIES), help="a single family")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a folder with the package after, instead of this tree")
    parser.add_argument("--show", type=int, default=5, help="how many differences are printed")
    parser.add_argument("--messages", action="store_true", help="compare the texts of errors and warnings too")
    parser.add_argument("--refusals", action="store_true", help="print what was refused, the most frequent first")
    parser.add_argument("--one", type=int, help="ask the request of this number alone, and print it")
    given = parser.parse_args()
    began = time.monotonic()
    places = {"before": installed(given.base), "after": given.tree.resolve()}
    with tempfile.TemporaryDirectory(prefix="paradec-differential-") as folder:
        fixtures = Path(folder)
        write_fixtures(fixtures)
        described = {}
        for side, place in places.items():
            worker = Worker(place, fixtures, fixtures / f"{side}.log")
            described[side] = worker.ask("describe")
            worker.stop()
            if "broken" in described[side]:
                print(worker.log.read_text(errors="replace"), file=sys.stderr)
                raise SystemExit(f"{side} ({place}): {described[side]['broken']}")
        failed = bool(differences(*described.values()))
        for path, old, new in differences(*described.values()):
            print(f"registered otherwise: {path}: {short(old)} -> {short(new)}")
        asked = requests_of(given.seed, given.count, described["before"], given.only)
        if given.one is not None:
            asked = [asked[given.one]]
            print(json.dumps(asked[0], indent=1))
        answers = answers_of(places, asked, given.jobs, fixtures)
    return report(given, asked, answers, time.monotonic() - began, failed)


def report(
    given: argparse.Namespace,
    asked: Sequence[Mapping[str, Any]],
    answers: Mapping[str, Sequence[dict[str, Any]]],
    seconds: float,
    failed: bool,
) -> int:
    """Print the differences and the summary; the exit status."""
    counts = {family: collections.Counter[str]() for family in FAMILIES}
    spent = collections.Counter[str]()
    refused: dict[str, collections.Counter[str]] = {family: collections.Counter() for family in FAMILIES}
    shown = 0
    slowest: list[tuple[float, int]] = []
    for request, before, after in zip(asked, answers["before"], answers["after"], strict=True):
        taken = before.pop("seconds") + after.pop("seconds")
        spent[request["family"]] += taken
        slowest.append((taken, request["id"]))
        found = verdict(before, after, given.messages)
        counts[request["family"]][found] += 1
        if found == "refused":
            refused[request["family"]][f"{before['error']}: {before['message']}"] += 1
        elif found == "different":
            failed = True
            shown += 1
            if shown <= given.show:
                print(f"\nrequest {request['id']} ({request['family']}): {json.dumps(request)}")
                for path, old, new in differences(before, after, given.messages)[:6] or [("", before, after)]:
                    print(f"  {path}: {short(old)} -> {short(new)}")
                for side, answer in (("before", before), ("after", after)):
                    if "error" in answer or "broken" in answer:
                        print(f"  {side}: {short(answer, 400)}")
    if given.refusals:
        for family, messages in refused.items():
            for message, number in messages.most_common(12):
                print(f"refused {number} x {family}: {message[:300]}")
    if given.one is not None:
        print(json.dumps(answers["after"][0], indent=1)[:6000])
    print(f"\n{'family':<16}{'requests':>9}{'equal':>8}{'different':>11}{'refused alike':>15}{'seconds':>9}")
    for family, count in counts.items():
        if count:
            cells = (count.total(), count["equal"], count["different"], count["refused"])
            print(f"{family:<16}{cells[0]:>9}{cells[1]:>8}{cells[2]:>11}{cells[3]:>15}{spent[family]:>9.1f}")
    total = sum(counts.values(), collections.Counter())
    cells = (total.total(), total["equal"], total["different"], total["refused"])
    print(f"{'all':<16}{cells[0]:>9}{cells[1]:>8}{cells[2]:>11}{cells[3]:>15}{seconds:>9.1f}")
    kinds = collections.Counter[str]()
    for messages in refused.values():
        kinds.update(message.split(":")[0] for message in messages.elements())
    print("refused with: " + (", ".join(f"{kind} {number}" for kind, number in kinds.most_common()) or "nothing"))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # says more than the clock where others work as well
    print(f"processor time of both: {used.ru_utime + used.ru_stime:.0f} s")
    print("slowest: " + ", ".join(f"request {index} {taken:.1f} s" for taken, index in sorted(slowest)[:-4:-1]))
    for family, count in counts.items():
        if count and count["refused"] > MANY_REFUSALS * count.total():
            print(f"WARNING: {count['refused']} of {count.total()} requests of {family} were refused: they show little")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())

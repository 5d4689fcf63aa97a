"""Wrong settings of samplers, caches, orders and policies: the error names the setting and its value."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import paradec
from paradec import caches, samplers
from paradec.core import orders
from paradec.samplers.causal.drafts.stopping import Unconfident, Unsure
from paradec.samplers.causal.drafts.text import PromptLookup, TokenRecycling
from paradec.samplers.causal.trees import DynamicTree
from paradec.samplers.forecast.bases import DMD, Hermite, Newton
from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Verification
from paradec.samplers.forecast.targets import Modules

RECYCLING: dict[str, Any] = {"drafter": "token_recycling", "rule": "naive"}
CARRY = {"sampler": "threshold", "threshold": 0.3, "quota_per_step": "carry"}
SAMPLERS: dict[str, list[dict[str, Any]]] = {
    "hierarchy": [{"threshold": 1.5}, {"low_threshold": -0.1}],
    "entropy_bound": [{"gamma": -1}, {"gamma": math.nan}],
    "entropy_threshold": [{"threshold": "0.5"}],
    "localleap": [
        *({"relaxed_threshold": 0.95}, {"relaxed_threshold": -1}, {"radius": 1.5}),
        *({"anchor_threshold": 0.5}, {"anchor_threshold": None}),
    ],
    "factor": [
        *({"profile": 1}, {"margin": 0.1}, {"profile": True, "margin": 1.5}),
        *({"factor": 0.7, "profile": True}, {"reference_last_rank": True, "profile": True}),
    ],
    "credit": [{"decay": 1.1}, {"fusion": -1}, {"storage": "sparse"}, {"slots": 0}],
    "klass": [{"kl_threshold": 0}, {"history": 0}],
    "persistence": [{"persist": 0}, {"end_threshold": 2}],
    "ccd": [{"buffer": 0}, {"entropy_threshold": -0.1}],
    "ccd_agree": [{"tail": 1.5}, {"adaptive": 1}],
    "wino": [{"threshold": 1.5}, {"threshold_back": None}, {"cap_share": 2}, {"cap_low": 0}, {"cap_high": 4}],
    "editing": [{"editing_threshold": -0.1}, {"max_post_steps": -1}],
    "saber": [{"minimum": 0}, {"remask_share": 1.1}],
    "learn2pd": [{"filter_threshold": 1.1}, {"eot": "eager"}, {"eot_confidence": -1}, {"filter": 3}],
    "s2d2": [{"route": "x"}, {"min_span": 0}, {"off": 9.0}, {"threshold": 2}, {"block_steps": 0}],
    "adablock": [
        *({"init_block_length": 0}, {"min_block_length": 33}, {"delimiter_threshold": 2}, {"window": 1.2}),
        *({"delimiters": value} for value in ("\n", 3, [], ("",))),
        {"delimiter_match": "end"},
    ],
    "maskgit": [*({"schedule": "cos"}, {"choice_temperature": -1}, {"final_temperature": 2}, {"guidance_start": "no"})],
    "halton": [{"height": 4}, {"width": 4, "height": 0}],
    "recap": [{"local_steps": -1}, {"order": "raster"}, {"final_temperature": 0}],
    "freedave": [
        *({"base": "freedave"}, {"base": "adablock"}, {"base": "sjd"}, {"base": "low_confidense"}),
        *({"base": {"sampler": "threshold", "threshold": 2}}, {"base": CARRY, "agreement": "subset"}),
        *({"draft_steps": 0}, {"draft_mode": "trea"}, {"agreement": "most"}),
    ],
    "lopa": [
        *({"base": "low_confidence"}, {"base": "freedave"}, {"base": "wino"}, {"base": "adablock"}, {"base": "none"}),
        *({"branches": -1}, {"alpha": 1.5}, {"tail": 0}, {"confidence": "entropy"}),
    ],
    "sjd": [{"window": 0}, {"window": 2.0}, {"init": "left"}, {"refresh": "never"}, {"guess_distribution": "flat"}],
    "scd": [
        *({"refresh": "resample"}, {"siblings": 0}, {"siblings": 2, "branching": 0}),
        *({"siblings": 4, "branching": 4}, {"siblings": 16, "branching": 200}),
    ],
    "gsd": [{"group_half_width": 0}, {"p_threshold": 0}, {"d_threshold": -1}],
    "jacobi": [
        *({"pool": -1}, {"pool": 4, "ngram": 1}, {"pool": 4, "pool_size": 0}, {"group": 8, "pool": 4}),
        *({"pool": 4, "refresh": "resample"}, {"group": 0}, {"group": 4, "max_iterations": 0}, {"max_iterations": 3}),
        *({"group": 4, "early_exit": "soon"}, {"early_exit": "published"}, {"group": 4, "window": 8}),
        {"group": 4, "refresh": "resample"},
    ],
    "lantern": [{"k": 0}, {"delta": 2}, {"drafter": "prompt_lookup"}, {"drafter": "token_recycling"}],
    "lantern++": [{"lam": 0.5}],
    "self_speculative": [
        *({"rule": "greedy"}, {"threshold": 0.5}, {"rule": "match", "threshold": 2}, {"adapter": "no"}, {"window": 0})
    ],
    "speculative": [
        *({"rule": "best"}, {"tree": ()}, {"tree": ((1,),)}, {"tree": (0,)}),
        *({"tree": ((0,), (1,), (0, 0)), "rule": "greedy"}, {"drafter": "lookup"}, {"stop": 3}),
        *({"drafter": "prompt_lookup", name: value} for name, value in {"tree": (2, 1), "window": 7}.items()),
        *({"drafter": "token_recycling"}, RECYCLING | {"tree": (2, 1)}, RECYCLING | {"tree": DynamicTree(4, 2, 2)}),
    ],
    "diffusion_gemma": [
        *({"entropy_bound": -0.1}, {"max_denoising_steps": 0}, {"t_min": -1.0}, {"t_max": 0.0}),
        *({"t_max": 0.8, "t_min": 0.9}, {"stability_threshold": -1}, {"confidence_threshold": 0.0}),
        *({"early_stop": 1}, {"encode_wait": -1}),
    ],
    "cspd": [
        *({"num_draft": 0}, {"ratio": 1.1}, {"inner_temperature": 0}, {"mended": 1}, {"max_rounds": -1}),
        *({"temperature": -1}, {"head_steps": 0}, {"head_steps": ""}, {"head_steps": "501,1"}),
        *({"guidance_schedule": "cosine"}, {"mended": False, "temperature": 0}),
    ],
    "distilled": [
        *({"t_list": (1, 2)}, {"t_list": ()}, {"t_list": (0, 2.5)}, {"split": -1}, {"teacher_start": -1}),
        {"masked_prefix": 1},
    ],
    "var": [{"top_ks": (-1,)}],
    "mar": [
        *({"local_steps": -1}, {"head_steps": 1001}, {"fast_ratio": 0}, {"temperature": -1}),
        {"chunk_order": "random"},
    ],
    "nar": [{"cfg_interval": -2}],
    "groups": [
        *({"order": 3}, {"guidance_schedule": "cosine"}),
        *({"verify": "sjd"}, {"window": 4}, {"lossless": 1}),
        *({"lossless": True, "verify": "gsd"}, {"lossless": True, "window": 0}),
    ],
}
CACHES: dict[str, list[dict[str, Any]]] = {
    "dkv_decode": [{"refresh_interval": 0}, {"shift_type": "left"}],
    "dkv_greedy": [{"window": -1}],
    "vicinity": [{"prefix_look": -1}, {"cache_update_freq": 0}],
    "dual": [{"store_dtype": "int8"}, {"max_memory": 0}],
    "prefix": [{"shape_multiple": 0}],
    "delayed": [{"waiting": "last"}],
    "d2": [{"current_k": 0}, {"sigma": 0}, {"inflate_w": -1}],
}
CLASSES: dict[Callable[..., Any], list[dict[str, Any]]] = {
    PromptLookup: [
        *({"prompt_lookup_num_tokens": value} for value in (0, -1, 2.5, True)),
        *({"max_matching_ngram_size": value} for value in (0, -1, 2.5, True)),
    ],
    TokenRecycling: [{"k": 0}, {"tree": "2.2.2", "k": 3}, {"tree": "2.2.3"}],
    Unsure: [{"threshold": value} for value in (-0.1, 1.5, True, "x")],
    Unconfident: [{"threshold": value} for value in (-0.1, 1.5, True, "x")],
    paradec.PipelinedBlocks: [
        *({"length": 0}, {"length": 4, "add": 1.5}, {"length": 4, "full": -1}),
        *({"length": 4, "forced": "all"}, {"length": 4, "align": "left"}),
    ],
    paradec.AdaptiveBlocks: [{"length": 0}, {"min_length": 33}, {"window": 1.2}, {"delimiters": (1.5,)}],
    paradec.Prophet: [
        *({"gaps": (1, 2)}, {"gaps": (1, 2, "x")}, {"gaps": (1, 2, -1)}, {"stages": (0.5, 0.2)}),
        *({"stages": (0.5, 2)}, {"answer": "five"}, {"answer": []}, {"answer": [-1]}),
    ],
    paradec.Suffix: [
        *({"window": -1}, {"density": "gaussian", "window": 0}, {"window": True}, {"density": "gauss"}),
        *({"scale": 2.0}, {"density": "gaussian", "scale": 0}, {"density": "gaussian", "count": 3}),
        *({"density": "uniform", "count": None}, {"density": "uniform", "count": 65}),
    ],
    paradec.SparseD: [
        *({"select": 1.1}, {"skip": -0.1}, {"block_size": 0}, {"dense_steps": 0}),
        *({"refresh_pattern_every": 0}, {"selection": "top"}, {"backend": "cuda"}),
    ],
    paradec.Forecast: [
        *({"order": value} for value in (-1, "1")),
        *({"when": value} for value in ([1, 2], [0, 2, 1], [0, 0], [0, 1.5], "0", (), 3, {"a": [0]}, "sometimes")),
        *({"when": value} for value in ({"steps": 2, "modules": [1]}, "nowhere.json", {"threshold": 1})),
        *({"how": value} for value in ("tailor", 2, {"order": 1})),
        *({"where": value} for value in ("layers", 1, {"skip": ["a"]})),
        *({"max_memory": value} for value in (0, "many", "2XB", 1.5)),
    ],
    Every: [{"interval": 0}, {"first_enhance": 0}, {"full_after": 0}],
    Verification: [{"base_threshold": 0}, {"decay_rate": 2}, {"min_forecasts": 5, "max_forecasts": 4}],
    AccumulatedChange: [{"coefficients": ()}],
    Modules: [{"modules": ()}, {"modules": "a", "skip": 5}],
    Hermite: [{"sigma": 0}],
    DMD: [{"window": 3}],
    Newton: [{"dtype": 16}],
    orders.Raster: [{"sizes": 0}, {"sizes": "all"}],
    orders.ZipAR: [{"window": 0}],
    orders.LPD: [{"repulsion": -1}, {"proximity": "near"}],
    orders.Given: [{"cells": ()}],
}


def cases() -> Iterator[Any]:
    for registry, table in ((samplers, SAMPLERS), (caches, CACHES)):
        for name, wrong in table.items():
            yield from (pytest.param(registry.create, {"name": name} | settings, id=name) for settings in wrong)
    for cls, wrong in CLASSES.items():
        yield from (pytest.param(cls, settings, id=cls.__name__) for settings in wrong)


@pytest.mark.parametrize(("create", "settings"), [*cases()])
def test_a_wrong_setting_is_named(create: Callable[..., Any], settings: dict[str, Any]) -> None:
    """The last setting is wrong. The error may name only the wrong element of a list."""
    *_, (name, value) = settings.items()
    with pytest.raises((ValueError, TypeError)) as error:
        create(**settings)
    text = str(error.value)
    elements = value if isinstance(value, (list, tuple)) else ()
    assert name in text and any(repr(named) in text for named in (value, *elements)), text

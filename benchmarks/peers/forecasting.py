"""Comparison of TaylorSeer in paradec, diffusers and cache-dit on transformers with random weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import common
import diffusers
import torch
from common import Contestant
from diffusers import DiTTransformer2DModel, FluxTransformer2DModel, TaylorSeerCacheConfig
from diffusers.hooks import HookRegistry, apply_taylorseer_cache
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from provenance import COMMIT
from torch import Tensor, nn

import paradec

MODELS = ("DiT", "FLUX")
STEPS = 24
SCHEDULE = {"interval": 5, "order": 1, "first_enhance": 3}
"""Settings of diffusers' TaylorSeer hook; `FULL_STEPS` are the steps that they evaluate."""
FULL_STEPS = (0, 1, 2, 4, 9, 14, 19)
TARGETS = ("stack", "output")
"""Targets of paradec's forecasts in addition to its default, "module" (the modules that diffusers' hook forecasts)."""
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "tiny": {
        "DiT": {"layers": 4, "width": 48, "side": 8, "batch": 2},
        "FLUX": {"layers": 2, "singles": 3, "width": 48, "side": 8, "text": 16, "batch": 1},
    },
    "deep": {  # as many blocks as DiT-XL and FLUX.1 have, but very narrow ones
        "DiT": {"layers": 28, "width": 48, "side": 8, "batch": 2},
        "FLUX": {"layers": 19, "singles": 38, "width": 48, "side": 8, "text": 16, "batch": 1},
    },
    "wide": {
        "DiT": {"layers": 4, "width": 256, "side": 8, "batch": 2},
        "FLUX": {"layers": 2, "singles": 3, "width": 256, "side": 8, "text": 16, "batch": 1},
    },
}
"""{size: {model: numbers}}; a picture has `side` x `side` positions."""
BRANCHES = {
    "DiT": [r"transformer_blocks\.\d+\.(attn1|ff)"],
    # no module returns a single-stream block's sum of branches: proj_out is forecast, its inputs are still computed
    "FLUX": [r"transformer_blocks\.\d+\.(attn|ff|ff_context)", r"single_transformer_blocks\.\d+\.(attn|proj_out)"],
    "Wan": [r"blocks\.\d+\.(attn1|attn2|ffn)"],
}
BRANCHES["digits"] = BRANCHES["DiT"]

Attach = Callable[[nn.Module, str], contextlib.AbstractContextManager[Callable[[], Any]]]
"""Function (transformer, name in `BRANCHES`) that returns a context in which a method accelerates the transformer. The
context yields a function to call before every run."""


def build(model: str, size: dict[str, int]) -> nn.Module:
    """Build a transformer with random, nonzero weights."""
    torch.manual_seed(0)
    width = size["width"]
    if model == "DiT":
        heads = {"num_attention_heads": 4, "attention_head_dim": width // 4, "num_layers": size["layers"]}
        made: Any = DiTTransformer2DModel(
            **heads, sample_size=2 * size["side"], in_channels=4, out_channels=4, num_embeds_ada_norm=1000
        )
    else:
        heads = {"num_attention_heads": 2, "attention_head_dim": width // 2, "num_layers": size["layers"]}
        text = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
        made = FluxTransformer2DModel(
            **heads,
            **text,
            num_single_layers=size["singles"],
            axes_dims_rope=(width // 2 - 16, 8, 8),
            patch_size=1,
            in_channels=16,
        )
    return randomise(made)


def randomise(module: nn.Module) -> nn.Module:
    """Fill all matrices of the module with normal numbers of standard deviation 1 / sqrt(inputs)."""
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return module.eval().requires_grad_(False)


def inputs(model: str, size: dict[str, int]) -> dict[str, Tensor]:
    """Make the arguments of a call, except the timestep."""
    draw = torch.Generator().manual_seed(1)
    batch, side = size["batch"], size["side"]
    if model == "DiT":
        labels = torch.arange(1, batch + 1)
        return {"hidden_states": torch.randn(batch, 4, 2 * side, 2 * side, generator=draw), "class_labels": labels}
    axis = torch.arange(float(side))
    return {
        "hidden_states": torch.randn(batch, side * side, 16, generator=draw),
        "encoder_hidden_states": torch.randn(batch, size["text"], 32, generator=draw),
        "pooled_projections": torch.randn(batch, 32, generator=draw),
        "img_ids": torch.cartesian_prod(torch.zeros(1), axis, axis),
        "txt_ids": torch.zeros(size["text"], 3),
    }


@torch.no_grad()
def denoise(model: str, module: nn.Module, arguments: dict[str, Tensor], steps: int = STEPS) -> Tensor:
    """Compute the latent after Euler steps from time 1 to 0."""
    latent = arguments["hidden_states"]
    for i in range(steps):
        time = torch.full((len(latent),), (steps - i) / steps) * (1 if model == "FLUX" else 1000)
        time = time.long() if model == "DiT" else time
        output = module(**arguments | {"hidden_states": latent}, timestep=time, return_dict=False)[0]
        latent = latent - output / steps
    return latent


@contextlib.contextmanager
def attach_diffusers(module: nn.Module, model: str, **changes: Any) -> Any:
    """Attach diffusers' TaylorSeer hook to the modules that paradec forecasts, as diffusers' pipelines do."""
    settings = {
        "cache_interval": SCHEDULE["interval"],
        "disable_cache_before_step": SCHEDULE["first_enhance"],
        "max_order": SCHEDULE["order"],
        "taylor_factors_dtype": torch.float32,
        "cache_identifiers": BRANCHES[model],
    }
    config = TaylorSeerCacheConfig(**settings | changes)
    apply_taylorseer_cache(module, config)
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.invalidate_child_registries_cache()

    def start() -> None:
        registry.reset_stateful_hooks()
        _set_cache_context(module, CacheContext("all"))

    yield start
    registry.remove_hook("taylorseer_cache", recurse=True)


@contextlib.contextmanager
def attach_cachedit(module: nn.Module, model: str) -> Any:
    """Attach cache-dit's DBCache with its Taylor calibrator. All blocks are evaluated at `FULL_STEPS`, and each
    list's first block at every step."""
    import cache_dit

    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        max_warmup_steps=1,
        residual_diff_threshold=1e9,
        num_inference_steps=STEPS,
        steps_computation_mask=[int(step in FULL_STEPS) for step in range(STEPS)],
        steps_computation_policy="static",
        enable_separate_cfg=False,
    )
    calibrator = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=SCHEDULE["order"])
    cache_dit.enable_cache(module, cache_config=config, calibrator_config=calibrator)
    yield lambda: cache_dit.refresh_context(module, num_inference_steps=STEPS)
    cache_dit.disable_cache(module)


def paradec_attachment(**settings: Any) -> Attach:
    """Build an `Attach` of paradec's `Forecast`, with more of its settings."""

    @contextlib.contextmanager
    def attach(module: nn.Module, model: str) -> Any:
        rule = paradec.Every(SCHEDULE["interval"], SCHEDULE["first_enhance"], "diffusers")
        sampler = paradec.Forecast(when=rule, order=SCHEDULE["order"], **settings)
        session = paradec.accelerate(module, sampler)
        yield session.reset
        session.detach()

    return attach


def contestant(
    stack: contextlib.ExitStack, name: str, attach: Attach, model: str, size: dict[str, int], version: str
) -> Contestant:
    """Build a contestant with its own copy of the transformer; `stack` keeps the method attached until it is closed."""
    module, arguments = build(model, size), inputs(model, size)
    start = stack.enter_context(attach(module, model))

    def run() -> Tensor:
        start()
        return denoise(model, module, arguments)

    return Contestant(name, run, version)


def race(models: list[str], sizes: list[str], turns: int) -> dict[str, Any]:
    """Let diffusers' hook, cache-dit, the plain transformer and paradec take turns, on every model in every size."""
    import cache_dit

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    peers = {
        "diffusers": (attach_diffusers, diffusers.__version__),
        "cache-dit": (attach_cachedit, cache_dit.__version__),
    }
    attachments = {
        "plain": (lambda *_: contextlib.nullcontext(lambda: None), diffusers.__version__),
        **peers,
        "paradec": (paradec_attachment(), COMMIT),
    }
    attachments |= {f"paradec, {target}": (paradec_attachment(where=target), COMMIT) for target in TARGETS}
    cases: dict[str, Any] = {}
    for size in sizes:
        for model in models:
            shape = SIZES[size][model]
            with contextlib.ExitStack() as stack:
                racing = [
                    contestant(stack, name, attach, model, shape, version)
                    for name, (attach, version) in attachments.items()
                ]
                common.alternate(racing, turns)
            aims = {"paradec": "diffusers"} if model == "DiT" else {}
            entry = common.report(racing, ["plain", *peers], aims)
            cases[f"{model}, {size}"] = {"shape": shape, "contestants": entry}
            print(common.show(f"{model}, {size}", entry, [*peers]), flush=True)
    return cases

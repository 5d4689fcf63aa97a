"""TaylorSeer beside diffusers' own hook and cache-dit: error, module calls, arithmetic and memory at equal full steps.

    python benchmarks/taylorseer.py [--steps 24] [--width 48]

The packaged DiT of digits (guidance 2, its DDIM scheduler), and small DiT, FLUX and Wan transformers with random
weights (Euler steps) denoise the same noise; every method evaluates the transformer at as many steps (7 of 24), and the
run that evaluates all of them is the yardstick. Random weights say nothing about pictures; they do say how far each
method strays from the model that it replaces.

- error: |latent - full run's| / |full run's - the noise|, mean over seeds.
- module calls: of attention and feed-forward modules in a run, counted at their first matrix.
- FLOPs: matrix products and attention (torch's counter), as a share of the full run's.
- memory: bytes of what is kept between steps (cache-dit's is not counted).

Ours are measured on three schedules: the public code's, diffusers', and one spread evenly. They have equally many full
steps with 24 steps; with other `--steps` the public code's may have one less.
cache-dit is measured where it is installed (`pip install -e ".[bench]"`). Writes benchmarks/results/taylorseer.json and
prints the tables of docs/diffusion_data.md.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import platform
import re
from collections.abc import Callable, Iterator
from typing import Any

import diffusers
import torch
from diffusers import (
    DDIMScheduler,
    DiTTransformer2DModel,
    FluxTransformer2DModel,
    TaylorSeerCacheConfig,
    WanTransformer3DModel,
)
from diffusers.hooks import HookRegistry, apply_taylorseer_cache
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from provenance import RESULTS, write_result
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import paradec
from paradec import Every, TaylorSeer
from paradec.models.images.loading import packaged_image
from paradec.models.images.pixel_dit import PixelDiTPipeline
from paradec.samplers.forecast.refresh import RunProgress, StepRule
from paradec.samplers.forecast.step_schedule import StepSchedule

BRANCHES = {
    "DiT": [r"transformer_blocks\.\d+\.(attn1|ff)"],
    # no module is a single block's sum: its matrix of both is forecast, and what feeds it still computed
    "FLUX": [r"transformer_blocks\.\d+\.(attn|ff|ff_context)", r"single_transformer_blocks\.\d+\.(attn|proj_out)"],
    "Wan": [r"blocks\.\d+\.(attn1|attn2|ffn)"],
}
BRANCHES["digits"] = BRANCHES["DiT"]
FIRST_MATRICES = {
    "DiT": r"transformer_blocks\.\d+\.(attn1\.to_q|ff\.net\.0\.proj)",
    "FLUX": r"transformer_blocks\.\d+\.(attn\.to_q|ff(_context)?\.net\.0\.proj)"
    r"|single_transformer_blocks\.\d+\.(attn\.to_q|proj_mlp|proj_out)",
    "Wan": r"blocks\.\d+\.(attn[12]\.to_q|ffn\.net\.0\.proj)",
}
FIRST_MATRICES["digits"] = FIRST_MATRICES["DiT"]
MODELS = ("digits", "DiT", "FLUX", "Wan")
SCHEDULES = ("the paper's", "diffusers'", "even")
FORECASTS: dict[str, dict[str, Any]] = {
    "module, taylor 1": {},
    "module, newton 2": {"basis": "newton", "order": 2},
    "module, hermite 2": {"basis": "hermite", "order": 2},
    "module, reuse": {"basis": "reuse"},
    "block, taylor 1": {"target": "block"},
    "output, taylor 1": {"target": "output"},
    "output, newton 2": {"target": "output", "basis": "newton", "order": 2},
    "output, reuse": {"target": "output", "basis": "reuse"},
    "output, dmd": {"target": "output", "basis": "dmd"},
}
CACHE_DIT = "cache-dit, DBCache + Taylor"
LABELS = 5
GUIDANCE = 2.0


def build(name: str, width: int) -> nn.Module:
    """The packaged transformer, or one with random weights, all of them in use."""
    if name == "digits":
        return PixelDiTPipeline.digits().transformer.eval().requires_grad_(False)
    torch.manual_seed(0)
    if name == "DiT":
        heads = {"num_attention_heads": 4, "attention_head_dim": width // 4, "num_layers": 4}
        module = DiTTransformer2DModel(**heads, sample_size=16, in_channels=4, out_channels=4, num_embeds_ada_norm=1000)
    elif name == "FLUX":
        heads = {"num_attention_heads": 2, "attention_head_dim": width // 2, "num_layers": 2, "num_single_layers": 3}
        rope = (width // 2 - 16, 8, 8)
        embeds = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "axes_dims_rope": rope}
        module = FluxTransformer2DModel(**heads, **embeds, patch_size=1, in_channels=16)
    else:
        heads = {"num_attention_heads": 2, "attention_head_dim": width // 2, "num_layers": 4, "ffn_dim": 4 * width}
        embeds = {"text_dim": 32, "freq_dim": 64, "rope_max_seq_len": 32, "cross_attn_norm": True}
        module = WanTransformer3DModel(**heads, **embeds, in_channels=8, out_channels=8)
    for parameter in module.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return module.eval().requires_grad_(False)


def inputs(name: str, seed: int) -> dict[str, Tensor]:
    """The arguments of a call but for the timestep."""
    draw = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    if name == "digits":
        labels = torch.arange(LABELS) + LABELS * (seed % 2)
        return {"hidden_states": noise(LABELS, 1, 28, 28), "class_labels": labels}
    if name == "DiT":
        return {"hidden_states": noise(2, 4, 16, 16), "class_labels": torch.tensor([1, 1000])}
    if name == "FLUX":
        ids = torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0))
        text = {"encoder_hidden_states": noise(1, 16, 32), "pooled_projections": noise(1, 32)}
        return {"hidden_states": noise(1, 64, 16), "img_ids": ids, "txt_ids": torch.zeros(16, 3)} | text
    return {"hidden_states": noise(1, 8, 3, 8, 8), "encoder_hidden_states": noise(1, 16, 32)}


def denoise(name: str, module: nn.Module, given: dict[str, Tensor], steps: int) -> Tensor:
    """The latent after Euler steps from time 1 to 0; for the digits, after their own scheduler's, under guidance."""
    if name == "digits":
        return denoise_digits(module, given, steps)
    latent, whole = given["hidden_states"], name == "FLUX"
    with torch.no_grad():
        for i in range(steps):
            time = torch.full((len(latent),), (steps - i) / steps) * (1 if whole else 1000)
            time = time.long() if name == "DiT" else time
            output = module(**given | {"hidden_states": latent}, timestep=time, return_dict=False)[0]
            latent = latent - output / steps
    return latent


def denoise_digits(module: nn.Module, given: dict[str, Tensor], steps: int) -> Tensor:
    """As `PixelDiTPipeline` does it."""
    scheduler = DDIMScheduler.from_pretrained(packaged_image("digits-dit"), subfolder="scheduler")
    scheduler.set_timesteps(steps)
    x = given["hidden_states"]
    labels = torch.cat([given["class_labels"], torch.full((len(x),), module.config.num_embeds_ada_norm)])
    with torch.no_grad():
        for t in scheduler.timesteps:
            output = module(torch.cat([x, x]), timestep=t.expand(2 * len(x)), class_labels=labels, return_dict=False)[0]
            conditional, unconditional = output.chunk(2)
            x = scheduler.step(unconditional + GUIDANCE * (conditional - unconditional), t, x).prev_sample
    return x


def diffusers_hook(**settings: Any) -> Callable[[nn.Module, str], Any]:
    """diffusers' TaylorSeer, with the context that its pipelines would set."""

    @contextlib.contextmanager
    def attached(module: nn.Module, name: str) -> Iterator[Callable[[], dict[str, Any]]]:
        patterns = {} if settings.get("cache_identifiers") is None else {"cache_identifiers": BRANCHES[name]}
        config = TaylorSeerCacheConfig(**settings | patterns | {"taylor_factors_dtype": torch.float32})
        apply_taylorseer_cache(module, config)
        registry = HookRegistry.check_if_exists_or_initialize(module)
        registry.invalidate_child_registries_cache()
        peak = 0

        def look() -> None:
            nonlocal peak
            found = [child.get_hook("taylorseer_cache") for child in registry._get_child_registries()]
            states = [s for hook in found if hook for s in hook.state_manager._state_cache.values()]
            factors = [f for s in states for stream in s.taylor_factors.values() for f in stream.values()]
            peak = max(peak, sum(factor.nbytes for factor in factors))

        def start() -> None:
            registry.reset_stateful_hooks()
            _set_cache_context(module, CacheContext("all"))

        handle = module.register_forward_hook(lambda *call: look())
        attached.start = start
        try:
            yield lambda: {"memory": peak}
        finally:
            handle.remove()
            registry.remove_hook("taylorseer_cache", recurse=True)

    attached.start = lambda: None
    return attached


def cache_dit_hook(full_steps: list[int], steps: int) -> Callable[[nn.Module, str], Any]:
    """cache-dit's DBCache with its Taylor calibrator, evaluating at the same steps; one block always runs."""
    import cache_dit

    @contextlib.contextmanager
    def attached(module: nn.Module, name: str) -> Iterator[Callable[[], dict[str, Any]]]:
        mask = [int(step in full_steps) for step in range(steps)]
        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=1,
            Bn_compute_blocks=0,
            max_warmup_steps=1,
            residual_diff_threshold=1e9,
            num_inference_steps=steps,
            steps_computation_mask=mask,
            steps_computation_policy="static",
            enable_separate_cfg=False,
        )
        cache_dit.enable_cache(
            module, cache_config=config, calibrator_config=cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=1)
        )
        attached.start = lambda: cache_dit.refresh_context(module, num_inference_steps=steps)
        try:
            yield lambda: {}
        finally:
            cache_dit.disable_cache(module)

    attached.start = lambda: None
    return attached


def ours(settings: dict[str, Any]) -> Callable[[nn.Module, str], Any]:
    """paradec's session."""

    @contextlib.contextmanager
    def attached(module: nn.Module, name: str) -> Iterator[Callable[[], dict[str, Any]]]:
        with paradec.accelerate(module, TaylorSeer(**settings)) as session:
            attached.start = session.reset

            yield lambda: {"memory": session.report().bytes}

    attached.start = lambda: None
    return attached


class Calls(TorchFunctionMode):
    """Counts products with some matrices of a module, whatever is hooked around them."""

    def __init__(self, module: nn.Module, pattern: str):
        super().__init__()
        found = [child for name, child in module.named_modules() if re.fullmatch(pattern, name)]
        self.watched, self.count = {id(child.weight) for child in found}, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and id(args[1]) in self.watched:
            self.count += 1
        return func(*args, **(kwargs or {}))


def counted(name: str, module: nn.Module, given: dict[str, Tensor], steps: int) -> tuple[Tensor, int, int]:
    """The latent, FLOPs, and module calls."""
    with FlopCounterMode(display=False) as counter, Calls(module, FIRST_MATRICES[name]) as calls:
        latent = denoise(name, module, given, steps)
    return latent, counter.get_total_flops(), calls.count


def measure(
    name: str, method: Callable[[nn.Module, str], Any], steps: int, width: int, plain: list[Tensor], flops: int
) -> dict[str, Any]:
    """Mean error, calls, FLOPs and memory.

    plain: latents of the runs that evaluate all steps, one per seed; flops: of such a run. What is counted does not
    depend on the noise, so one run is counted.
    """
    module, latents = build(name, width), []
    with method(module, name) as say:
        for seed in range(len(plain)):
            method.start()
            if seed == 0:
                latent, spent, calls = counted(name, module, inputs(name, seed), steps)
            else:
                latent = denoise(name, module, inputs(name, seed), steps)
            latents.append(latent)
        errors = [
            float((latent - aim).norm() / (aim - inputs(name, seed)["hidden_states"]).norm())
            for seed, (latent, aim) in enumerate(zip(latents, plain, strict=True))
        ]
        return {"error": sum(errors) / len(errors), "calls": calls, "flops": spent / flops} | say()


def steps_of(rule: StepRule, total: int) -> list[int]:
    """The steps that a schedule evaluates."""
    return [step for step in range(total) if rule.is_full(RunProgress(total, step))]


def tables(results: dict[str, dict[str, Any]]) -> str:
    """For the documentation: errors (ours on the three schedules), then what the kinds of methods cost."""
    head = ["| | " + " | ".join(results) + " |", "|---" * (len(results) + 1) + "|"]
    theirs = [label for label in next(iter(results.values())) if label.startswith(("diffusers,", "cache-dit"))]

    def cell(rows: dict[str, Any], label: str, key: str = "error", scale: float = 1, form: str = ".3f") -> str:
        return format(rows[label][key] * scale, form) if key in rows.get(label, {}) else "-"

    lines = [*head]
    for label in theirs:
        lines.append(f"| {label} | " + " | ".join(cell(rows, label) for rows in results.values()) + " |")
    for forecast in FORECASTS:
        labels = [f"paradec, {forecast}, {schedule} schedule" for schedule in SCHEDULES]
        cells = [" / ".join(cell(rows, label) for label in labels) for rows in results.values()]
        lines.append(f"| {forecast} | " + " | ".join(cells) + " |")
    lines += ["", *head]
    ours = [f"paradec, {target}, taylor 1, the paper's schedule" for target in ("module", "block", "output")]
    for label in ["all steps", *theirs, *ours]:
        cells = [
            f"{cell(rows, label, 'calls', 1, 'd')}, {cell(rows, label, 'flops', form='.0%')}, "
            f"{cell(rows, label, 'memory', 1e-3, '.0f')} kB"
            for rows in results.values()
        ]
        name = label.removesuffix(", taylor 1, the paper's schedule")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    diffusers.utils.logging.disable_progress_bar()

    schedules: list[StepRule] = [Every(5, 3), Every(5, 3, "diffusers")]
    full_steps = steps_of(schedules[1], args.steps)
    theirs = {"cache_interval": 5, "disable_cache_before_step": 3, "max_order": 1}
    methods: dict[str, Callable[[nn.Module, str], Any]] = {
        "diffusers, its default": diffusers_hook(**theirs),
        "diffusers, all branches": diffusers_hook(**theirs, cache_identifiers=[]),
        "diffusers, lite": diffusers_hook(**theirs, use_lite_mode=True),
    }
    try:
        methods[CACHE_DIT] = cache_dit_hook(full_steps, args.steps)
    except ImportError:
        print("cache-dit is not installed; it is left out")
    even = [round(i * args.steps / len(full_steps)) for i in range(len(full_steps))]
    schedules.append(StepSchedule(tuple(even)))
    methods |= {
        f"paradec, {label}, {name} schedule": ours({"refresh": rule, **settings})
        for label, settings in FORECASTS.items()
        for name, rule in zip(SCHEDULES, schedules, strict=True)
    }

    facts = {
        "steps": args.steps,
        "full_steps": len(full_steps),
        "schedules": {name: steps_of(rule, args.steps) for name, rule in zip(SCHEDULES, schedules, strict=True)},
        "width": args.width,
        "seeds": args.seeds,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "machine": platform.machine(),
    }
    results: dict[str, Any] = {}
    for name in args.models:
        module = build(name, args.width)
        latent, flops, calls = counted(name, module, inputs(name, 0), args.steps)
        plain = [latent, *(denoise(name, module, inputs(name, seed), args.steps) for seed in range(1, args.seeds))]
        results[name] = {"all steps": {"error": 0.0, "calls": calls, "flops": 1.0, "memory": 0}}
        for label, method in methods.items():
            try:
                results[name][label] = measure(name, method, args.steps, args.width, plain, flops)
            except Exception as error:  # theirs: what does not work is a result too
                if label.startswith("paradec"):
                    raise
                results[name][label] = {"failed": f"{type(error).__name__}: {error}"[:200]}
            print(name, label, results[name][label], flush=True)
    rows = [{"model": name, "method": label} | row for name, found in results.items() for label, row in found.items()]
    write_result(RESULTS / "taylorseer.json", {"facts": facts, "rows": rows})
    print(tables(results))


if __name__ == "__main__":
    main()

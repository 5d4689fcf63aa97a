"""TaylorSeer beside diffusers' own hook and cache-dit: error of the latent, arithmetic and memory at equal full steps.

    python benchmarks/taylorseer.py [--steps 24] [--width 48]

Small DiT, FLUX and Wan transformers with random weights denoise the same noise by Euler steps; every method evaluates
the transformer at as many steps (7 of 24: interval 5), and the run that evaluates all of them is the yardstick. Random
weights say nothing about pictures; they do say how far each method strays from the model that it stands for.

- error: |latent - full run's| / |full run's - the noise|, mean over seeds.
- FLOPs: matrix products and attention (torch's counter), as a share of the full run's.
- memory: bytes of what is kept between steps (cache-dit's is not counted).

cache-dit is measured where it is installed (`pip install -e ".[bench]"`). Writes benchmarks/results/taylorseer.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiTTransformer2DModel, FluxTransformer2DModel, TaylorSeerCacheConfig, WanTransformer3DModel
from diffusers.hooks import HookRegistry, apply_taylorseer_cache
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import paradec
from paradec import TaylorSeer

RESULTS = Path(__file__).resolve().parent / "results" / "taylorseer.json"
BRANCHES = {
    "DiT": [r"transformer_blocks\.\d+\.(attn1|ff)"],
    # no module is a single block's sum: its matrix of both is forecast, and what feeds it still computed
    "FLUX": [r"transformer_blocks\.\d+\.(attn|ff|ff_context)", r"single_transformer_blocks\.\d+\.(attn|proj_out)"],
    "Wan": [r"blocks\.\d+\.(attn1|attn2|ffn)"],
}
OURS: dict[str, dict[str, Any]] = {
    "module, order 1": {},
    "module, order 1, diffusers' schedule": {"style": "diffusers"},
    "module, newton 2": {"basis": "newton", "order": 2},
    "module, hermite 2": {"basis": "hermite", "order": 2},
    "module, reuse": {"basis": "reuse"},
    "block, order 1": {"target": "block"},
    "output, order 1": {"target": "output"},
    "output, order 1, diffusers' schedule": {"target": "output", "style": "diffusers"},
    "output, newton 2": {"target": "output", "basis": "newton", "order": 2},
    "output, dmd": {"target": "output", "basis": "dmd"},
}


def build(name: str, width: int) -> nn.Module:
    """A transformer with random weights, all of them in use."""
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

    if name == "DiT":
        return {"hidden_states": noise(2, 4, 16, 16), "class_labels": torch.tensor([1, 1000])}
    if name == "FLUX":
        ids = torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0))
        text = {"encoder_hidden_states": noise(1, 16, 32), "pooled_projections": noise(1, 32)}
        return {"hidden_states": noise(1, 64, 16), "img_ids": ids, "txt_ids": torch.zeros(16, 3)} | text
    return {"hidden_states": noise(1, 8, 3, 8, 8), "encoder_hidden_states": noise(1, 16, 32)}


def denoise(module: nn.Module, given: dict[str, Tensor], steps: int) -> Tensor:
    """The latent behind Euler steps from time 1 to 0."""
    latent, whole = given["hidden_states"], isinstance(module, FluxTransformer2DModel)
    with torch.no_grad():
        for i in range(steps):
            time = torch.full((len(latent),), (steps - i) / steps) * (1 if whole else 1000)
            time = time.long() if isinstance(module, DiTTransformer2DModel) else time
            output = module(**given | {"hidden_states": latent}, timestep=time, return_dict=False)[0]
            latent = latent - output / steps
    return latent


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
        with paradec.accelerate(
            module, TaylorSeer(**{"interval": 5, "order": 1, "first_enhance": 3} | settings)
        ) as session:
            attached.start = session.reset

            def facts() -> dict[str, Any]:
                report = session.report()
                return {"memory": report.bytes, "full_steps": len(report.full_steps)}

            yield facts

    attached.start = lambda: None
    return attached


def counted(module: nn.Module, given: dict[str, Tensor], steps: int) -> tuple[Tensor, int]:
    """The latent, and FLOPs."""
    with FlopCounterMode(display=False) as counter:
        latent = denoise(module, given, steps)
    return latent, counter.get_total_flops()


def measure(
    name: str, method: Callable[[nn.Module, str], Any], steps: int, width: int, expected: list[tuple[Tensor, int]]
) -> dict[str, Any]:
    """Mean error, FLOPs, and what the method says about itself; expected: of the plain runs, one per seed."""
    module, errors, flops = build(name, width), [], 0
    with method(module, name) as say:
        for seed, (latent, full) in enumerate(expected):
            given = inputs(name, seed)
            method.start()
            found, spent = counted(module, given, steps)
            moved = (latent - given["hidden_states"]).norm()
            errors.append(float((found - latent).norm() / moved))
            flops += spent / full
        return {"error": sum(errors) / len(errors), "flops": flops / len(errors)} | say()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--seeds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--models", nargs="+", default=list(BRANCHES), choices=list(BRANCHES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)

    schedule = TaylorSeer(interval=5, first_enhance=3, style="diffusers")
    full_steps = [step for step in range(args.steps) if schedule.is_full(step)]
    theirs = {"cache_interval": 5, "disable_cache_before_step": 3, "max_order": 1}
    methods: dict[str, Callable[[nn.Module, str], Any]] = {
        "diffusers, its default": diffusers_hook(**theirs),
        "diffusers, all branches": diffusers_hook(**theirs, cache_identifiers=[]),
        "diffusers, lite": diffusers_hook(**theirs, use_lite_mode=True),
    }
    try:
        methods["cache-dit, DBCache + Taylor"] = cache_dit_hook(full_steps, args.steps)
    except ImportError:
        print("cache-dit is not installed; it is left out")
    methods |= {f"paradec, {label}": ours(settings) for label, settings in OURS.items()}

    facts = {
        "steps": args.steps,
        "full_steps": len(full_steps),
        "width": args.width,
        "seeds": args.seeds,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "machine": platform.machine(),
    }
    results: dict[str, Any] = {}
    for name in args.models:
        results[name] = {}
        module = build(name, args.width)
        expected = [counted(module, inputs(name, seed), args.steps) for seed in range(args.seeds)]
        print(f"{name:<46} {'error':>8} {'FLOPs':>7} {'memory, kB':>11}")
        for label, method in methods.items():
            try:
                row = measure(name, method, args.steps, args.width, expected)
            except Exception as error:  # theirs: what does not work is a result too
                if label.startswith("paradec"):
                    raise
                row = {"failed": f"{type(error).__name__}: {error}"[:200]}
            results[name][label] = row
            RESULTS.write_text(json.dumps({"facts": facts, "results": results}, indent=1) + "\n", encoding="utf-8")
            if "failed" in row:
                print(f"{label:<46} {row['failed'][:70]}")
            else:
                memory = f"{row['memory'] / 1e3:>11.1f}" if "memory" in row else f"{'-':>11}"
                print(f"{label:<46} {row['error']:>8.4f} {row['flops']:>7.1%} {memory}")


if __name__ == "__main__":
    main()

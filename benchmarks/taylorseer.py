"""paradec's forecasts compared with diffusers' TaylorSeer hook and cache-dit, at equal numbers of evaluated steps.

    python benchmarks/taylorseer.py [--models digits DiT FLUX Wan] [--seeds 2]

The packaged DiT of digits (guidance 2, its DDIM scheduler), and small DiT, FLUX and Wan transformers with random
weights (Euler steps) denoise the same noise. Every method evaluates the transformer at 7 of 24 steps, and is compared
with the full run, which evaluates all steps. With random weights this measures how far each method deviates from the
model, not image quality.

- error: |latent - full run's| / |full run's - the noise|, mean over seeds.
- calls: number of calls of attention and feed-forward modules in a run, counted at their first matrix.
- flops: matrix products and attention (torch's counter), as a share of the full run's.
- memory: bytes that are stored between steps (not counted for cache-dit).

paradec is measured on three schedules with 7 evaluated steps: the paper's (as in its public code), diffusers', and
evenly spread steps. cache-dit is measured if it is installed (`pip install -e ".[bench]"`). Writes
benchmarks/results/taylorseer.json and prints the tables of docs/tables/taylorseer.csv and taylorseer_costs.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import platform
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DDIMScheduler, WanTransformer3DModel
from diffusers.hooks import HookRegistry
from provenance import RESULTS, read_result, write_result
from tables import taylorseer_tables
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).parent / "peers"))

import forecasting  # noqa: E402
from forecasting import STEPS  # noqa: E402

import paradec
from paradec import Every, Forecast
from paradec.models.images.loading import packaged_path
from paradec.models.images.pixel_dit import PixelDiTPipeline
from paradec.samplers.forecast.refresh import RunProgress, StepRule
from paradec.samplers.forecast.step_schedule import StepSchedule

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
    "module, newton 2": {"how": "newton", "order": 2},
    "module, hermite 2": {"how": "hermite", "order": 2},
    "module, reuse": {"how": "reuse"},
    "block, taylor 1": {"where": "block"},
    "output, taylor 1": {"where": "output"},
    "output, newton 2": {"where": "output", "how": "newton", "order": 2},
    "output, reuse": {"where": "output", "how": "reuse"},
    "output, dmd": {"where": "output", "how": "dmd"},
}
LABELS = 5
GUIDANCE = 2.0


def build(name: str) -> nn.Module:
    """Build the packaged transformer, or one with random, nonzero weights."""
    if name == "digits":
        return PixelDiTPipeline.digits().transformer.eval().requires_grad_(False)
    torch.manual_seed(0)
    if name != "Wan":
        return forecasting.build(name, forecasting.SIZES["tiny"][name])
    heads = {"num_attention_heads": 2, "attention_head_dim": 24, "num_layers": 4, "ffn_dim": 192}
    embeds = {"text_dim": 32, "freq_dim": 64, "rope_max_seq_len": 32, "cross_attn_norm": True}
    return forecasting.randomise(WanTransformer3DModel(**heads, **embeds, in_channels=8, out_channels=8))


def inputs(name: str, seed: int) -> dict[str, Tensor]:
    """Make the arguments of a call, except the timestep."""
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


def denoise(name: str, module: nn.Module, arguments: dict[str, Tensor], steps: int) -> Tensor:
    """Compute the latent after Euler steps from time 1 to 0; for digits, with their scheduler and guidance."""
    if name != "digits":
        return forecasting.denoise(name, module, arguments, steps)
    scheduler = DDIMScheduler.from_pretrained(packaged_path("digits-dit"), subfolder="scheduler")
    scheduler.set_timesteps(steps)
    x = arguments["hidden_states"]
    labels = torch.cat([arguments["class_labels"], torch.full((len(x),), module.config.num_embeds_ada_norm)])
    with torch.no_grad():
        for t in scheduler.timesteps:
            output = module(torch.cat([x, x]), timestep=t.expand(2 * len(x)), class_labels=labels, return_dict=False)[0]
            conditional, unconditional = output.chunk(2)
            x = scheduler.step(unconditional + GUIDANCE * (conditional - unconditional), t, x).prev_sample
    return x


Attached = Callable[[nn.Module, str], contextlib.AbstractContextManager[tuple[Callable[[], Any], Callable[[], Any]]]]
"""Function (transformer, name of the model) that returns a context in which a method is attached. The context yields a
function to call before each run, and a function that returns {"memory": bytes}."""


def diffusers_hook(**changes: Any) -> Attached:
    """Build an `Attached` with diffusers' TaylorSeer hook; `changes` are settings of its config."""

    @contextlib.contextmanager
    def attached(module: nn.Module, name: str) -> Iterator[Any]:
        peak = 0

        def update_peak(*call: Any) -> None:
            nonlocal peak
            registry = HookRegistry.check_if_exists_or_initialize(module)
            hooks = [child.get_hook("taylorseer_cache") for child in registry._get_child_registries()]
            states = [s for hook in hooks if hook for s in hook.state_manager._state_cache.values()]
            factors = [f for s in states for stream in s.taylor_factors.values() for f in stream.values()]
            peak = max(peak, sum(factor.nbytes for factor in factors))

        with forecasting.attach_diffusers(module, name, **changes) as start:
            module.register_forward_hook(update_peak)
            yield start, lambda: {"memory": peak}

    return attached


@contextlib.contextmanager
def cache_dit_hook(module: nn.Module, name: str) -> Iterator[Any]:
    """Attach cache-dit's DBCache with its Taylor calibrator; its memory is not counted."""
    with forecasting.attach_cachedit(module, name) as start:
        yield start, dict


def paradec_forecast(settings: dict[str, Any]) -> Attached:
    """Build an `Attached` with paradec's `Forecast`."""

    @contextlib.contextmanager
    def attached(module: nn.Module, name: str) -> Iterator[Any]:
        with paradec.accelerate(module, Forecast(**settings)) as session:
            yield session.reset, lambda: {"memory": session.report().bytes}

    return attached


class Calls(TorchFunctionMode):
    """Counter of `linear` calls with weights of the modules that match `pattern`, independent of hooks on modules."""

    def __init__(self, module: nn.Module, pattern: str):
        super().__init__()
        modules = [child for name, child in module.named_modules() if re.fullmatch(pattern, name)]
        self.watched, self.count = {id(child.weight) for child in modules}, 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear and id(args[1]) in self.watched:
            self.count += 1
        return func(*args, **(kwargs or {}))


def denoise_counted(name: str, module: nn.Module, arguments: dict[str, Tensor]) -> tuple[Tensor, int, int]:
    """Denoise; return the latent, FLOPs, and module calls."""
    with FlopCounterMode(display=False) as counter, Calls(module, FIRST_MATRICES[name]) as calls:
        latent = denoise(name, module, arguments, STEPS)
    return latent, counter.get_total_flops(), calls.count


def measure(name: str, method: Attached, plain: list[Tensor], flops: int) -> dict[str, Any]:
    """Measure a method's mean error, calls, FLOPs and memory.

    Args:
        plain: latents of the full runs, one per seed.
        flops: FLOPs of a full run. They do not depend on the noise, so calls and FLOPs are counted for seed 0 only.
    """
    module, latents = build(name), []
    with method(module, name) as (start, read_memory):
        for seed in range(len(plain)):
            start()
            if seed == 0:
                latent, spent, calls = denoise_counted(name, module, inputs(name, seed))
            else:
                latent = denoise(name, module, inputs(name, seed), STEPS)
            latents.append(latent)
        errors = [
            float((latent - aim).norm() / (aim - inputs(name, seed)["hidden_states"]).norm())
            for seed, (latent, aim) in enumerate(zip(latents, plain, strict=True))
        ]
        return {"error": sum(errors) / len(errors), "calls": calls, "flops": spent / flops} | read_memory()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--out", type=Path, default=RESULTS / "taylorseer.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    diffusers.utils.logging.disable_progress_bar()

    schedules: list[StepRule] = [Every(5, 3), Every(5, 3, "diffusers")]
    even = [round(i * STEPS / len(forecasting.FULL_STEPS)) for i in range(len(forecasting.FULL_STEPS))]
    schedules.append(StepSchedule(tuple(even)))
    methods: dict[str, Attached] = {
        "diffusers, its default": diffusers_hook(cache_identifiers=None),
        "diffusers, all branches": diffusers_hook(),
        "diffusers, lite": diffusers_hook(cache_identifiers=None, use_lite_mode=True),
        "cache-dit, DBCache + Taylor": cache_dit_hook,
    }
    methods |= {
        f"paradec, {label}, {name} schedule": paradec_forecast({"when": rule, **settings})
        for label, settings in FORECASTS.items()
        for name, rule in zip(SCHEDULES, schedules, strict=True)
    }
    facts = {
        "steps": STEPS,
        "full_steps": len(forecasting.FULL_STEPS),
        "schedules": {
            name: [step for step in range(STEPS) if rule.is_full(RunProgress(STEPS, step))]
            for name, rule in zip(SCHEDULES, schedules, strict=True)
        },
        "seeds": args.seeds,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "machine": platform.machine(),
    }
    rows: list[dict[str, Any]] = []
    for name in args.models:
        latent, flops, calls = denoise_counted(name, build(name), inputs(name, 0))
        plain = [latent, *(denoise(name, build(name), inputs(name, seed), STEPS) for seed in range(1, args.seeds))]
        rows.append({"model": name, "method": "all steps", "error": 0.0, "calls": calls, "flops": 1.0, "memory": 0})
        for label, method in methods.items():
            try:
                row = measure(name, method, plain, flops)
            except Exception as error:  # a failure of another library is recorded as its result
                if label.startswith("paradec"):
                    raise
                row = {"failed": f"{type(error).__name__}: {error}"[:200]}
            rows.append({"model": name, "method": label} | row)
            print(rows[-1], flush=True)
    write_result(args.out, {"facts": facts, "rows": rows})
    print(*taylorseer_tables(read_result(args.out)), sep="\n\n")


if __name__ == "__main__":
    main()

"""Ranking of rules for when to evaluate a diffusion transformer (schedules, step masks, thresholds), on held-out noise.

    python benchmarks/probes.py [--models digits FLUX ...] [--seeds 16] [--steps 28]

The packaged DiT of digits (guidance 2, its DDIM scheduler) and small FLUX, Wan, SD3 and PixArt transformers of five
blocks with random weights (Euler steps) denoise noise of many seeds and prompts. A full run evaluates every step. Every
method ("way") has several settings: intervals, or thresholds that are bisected towards a budget, a maximum number of
evaluated steps. On one half of the seeds, the setting with the smallest error is chosen among those within the budget;
its results on the other half are reported. Published settings are reported unchanged.

- error: |latent - full run's| / |full run's - the noise|; mean and 95 % interval (Student's t) over seeds.
- over_even: this error divided by that of "even, module, taylor 1" with the same budget, on the same noise; geometric
  mean and its 95 % interval.
- evaluated: number of steps of a run at which all blocks are evaluated. Some rules also evaluate a few blocks (probes)
  at other steps, which do not count.
- blocks: share of the full run's block evaluations, including those of probes.
- cpu: CPU time of a run divided by that of the full run, on one thread; median over seeds. On every seed all methods
  and the full run take turns.

Budgets are the evaluated steps of cache-dit's masks "ultra" and "fast" at 28 steps. MagCache's ratios are the mean over
full runs on the choosing seeds. Writes benchmarks/results/probes.json.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from provenance import RESULTS, write_result
from taylorseer import build as build_taylorseer
from taylorseer import denoise, forecasting, inputs
from torch import Tensor, nn

import paradec
from paradec import Every, Forecast
from paradec.integrations.diffusers.calibration import calibrate_magcache
from paradec.samplers.forecast.forecast import DBCache, DiCache, FirstBlock, MagCache
from paradec.samplers.forecast.rules import MagRatios
from paradec.samplers.forecast.step_schedule import step_mask

MODELS = ("digits", "FLUX", "Wan", "SD3", "PixArt")
BUDGETS = (8, 11)
LEVELS, HALVINGS = (0.02, 2.0), 5
"""Range in which thresholds are bisected, and number of bisection steps."""
T95 = {4: 3.182, 6: 2.571, 8: 2.365, 10: 2.262, 12: 2.201, 16: 2.131, 20: 2.093}
"""Two-sided 95 % quantile of Student's t, by number of seeds."""


def even(steps: int, count: int) -> list[int]:
    """Choose `count` evenly spread steps, from the first to the last."""
    return sorted({round(i * (steps - 1) / max(count - 1, 1)) for i in range(count)})


def build(name: str) -> nn.Module:
    """Build the packaged transformer, or one of five blocks with random, nonzero weights."""
    if name == "digits":
        return build_taylorseer(name)
    torch.manual_seed(0)
    made: Any
    if name == "FLUX":
        made = diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=24,
            num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(8, 8, 8),
        )  # fmt: skip
    elif name == "Wan":
        made = diffusers.WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=24, num_layers=5, ffn_dim=192, text_dim=32, freq_dim=64,
            rope_max_seq_len=32, cross_attn_norm=True, in_channels=8, out_channels=8,
        )  # fmt: skip
    elif name == "SD3":
        made = diffusers.SD3Transformer2DModel(
            sample_size=16, patch_size=2, in_channels=4, num_layers=5, attention_head_dim=24, num_attention_heads=2,
            joint_attention_dim=32, caption_projection_dim=48, pooled_projection_dim=32, out_channels=4,
            pos_embed_max_size=16,
        )  # fmt: skip
    else:
        made = diffusers.PixArtTransformer2DModel(
            sample_size=16, num_layers=5, patch_size=2, attention_head_dim=24, num_attention_heads=2,
            caption_channels=32, in_channels=4, cross_attention_dim=48, out_channels=4, num_embeds_ada_norm=1000,
            use_additional_conditions=False,
        )  # fmt: skip
    return forecasting.randomise(made)


def call_inputs(name: str, seed: int) -> dict[str, Tensor]:
    """Make the arguments of a call, except the timestep: the noise and the prompt of a seed."""
    if name == "digits":  # two of the ten classes; seeds 2 k and 2 k + 1, one of each half, have the same classes
        first = seed // 2 * 2 % 10
        noise = inputs(name, seed)["hidden_states"][:2]
        return {"hidden_states": noise, "class_labels": torch.tensor([first, first + 1])}
    if name not in ("SD3", "PixArt"):
        return inputs(name, seed)
    draw = torch.Generator().manual_seed(seed)
    arguments = {
        "hidden_states": torch.randn(1, 4, 16, 16, generator=draw),
        "encoder_hidden_states": torch.randn(1, 16, 32, generator=draw),
    }
    if name == "SD3":
        arguments["pooled_projections"] = torch.randn(1, 32, generator=draw)
    return arguments


Settings = dict[str, Any]
EVEN = "even, module, taylor 1"
"""The method whose errors are the denominators of "over_even"."""


def ways(steps: int) -> dict[str, list[Settings]]:
    """List candidate settings of `Forecast` by method, for methods with a fixed schedule."""
    spread = [{"when": even(steps, count)} for count in BUDGETS]
    masks = [{"when": step_mask(name, steps)} for name in ("ultra", "fast")]
    stack, reuse = {"where": "stack"}, {"where": "stack", "how": "reuse"}
    return {
        EVEN: spread,
        "interval, module, taylor 1": [{"when": Every(n)} for n in (3, 4, 5)],
        "the paper's schedule, module, taylor 1": [{"when": Every(n, 3)} for n in (3, 4, 5)],
        "even, output, taylor 1": [entry | {"where": "output"} for entry in spread],
        "even, stack, taylor 1": [entry | stack for entry in spread],
        "even, stack, reuse": [entry | reuse for entry in spread],
        "step mask, module, taylor 1": masks,
        "step mask, stack, reuse": [entry | reuse for entry in masks],
    }


def rules(ratios: Any, steps: int) -> dict[str, Callable[[float], Settings]]:
    """Build settings of `Forecast` as functions of a threshold, by method, for methods that decide by a measurement."""
    return {
        "FirstBlock": lambda level: {"when": FirstBlock(level)},
        "FirstBlock, taylor 1": lambda level: {"when": FirstBlock(level), "how": "taylor"},
        "DBCache": lambda level: {"when": DBCache(1, 0, min(level, 1.0), 4)},
        "DBCache, taylor 1": lambda level: {"when": DBCache(1, 0, min(level, 1.0), 4), "how": "taylor"},
        "MagCache": lambda level: {"when": MagCache(ratios, level, 5, 0.1)},
        "DiCache, delta_y": lambda level: {"when": DiCache(level, num_inference_steps=steps)},
        "DiCache, delta_minus": lambda level: {"when": DiCache(level, "delta_minus", 1, 0.0, steps)},
    }


def published(ratios: Any, steps: int) -> dict[str, Settings]:
    """List settings of public codes and papers by name. DBCache's published Fn, 8, exceeds these models' five blocks,
    so Fn is 1."""
    masks = {f"step mask {name}, module, taylor 1": {"when": step_mask(name, steps)} for name in ("slow", "medium")}
    return masks | {
        "TaylorSeer: ours, interval 5": {},
        "TaylorSeer: the paper's, interval 6 after 3 full steps": {"when": Every(6, 3)},
        "TaylorSeer: diffusers' hook": {"when": Every(5, 3, "diffusers")},
        "FirstBlock 0.05": {"when": FirstBlock(0.05)},
        "FirstBlock 0.08": {"when": FirstBlock(0.08)},
        "DBCache F1B0W8 0.08": {"when": DBCache(1, 0, 0.08, 8)},
        "DBCache F1B0W8 0.12": {"when": DBCache(1, 0, 0.12, 8)},
        "DBCache F1B0W8 0.12, taylor 1": {"when": DBCache(1, 0, 0.12, 8), "how": "taylor"},
        "MagCache 0.06, K 3, 0.2": {"when": MagCache(ratios, 0.06, 3, 0.2)},
        "MagCache 0.24, K 5, 0.1": {"when": MagCache(ratios, 0.24, 5, 0.1)},
        "DiCache delta_y 0.4, 0.2": {"when": DiCache(num_inference_steps=steps)},
        "DiCache delta_minus 0.08, 0": {"when": DiCache(0.08, "delta_minus", 1, 0.0, steps)},
    }


def run(name: str, module: nn.Module, settings: Settings | None, steps: int, seed: int) -> dict[str, Any]:
    """Denoise once: "latent", CPU "seconds", "evaluated" steps and share of "blocks". With settings=None every step is
    evaluated, and only the first two are returned."""
    arguments = call_inputs(name, seed)
    if settings is None:
        began = time.process_time()
        return {"latent": denoise(name, module, arguments, steps), "seconds": time.process_time() - began}
    with paradec.accelerate(module, Forecast(**settings)) as session:
        began = time.process_time()
        latent = denoise(name, module, arguments, steps)
        seconds = time.process_time() - began
        stack, calls = session.transformers[0].stack, session.report().calls
    evaluated = sum(call.evaluated / (call.evaluated + call.forecast) for call in calls)
    always = 0.0 if stack is None else 1 - len(stack.forecast_places) / len(stack.places)
    blocks = (evaluated * (1 - always) + len(calls) * always) / steps
    return {"latent": latent, "seconds": seconds, "evaluated": evaluated, "blocks": blocks}


def latent_error(name: str, latent: Tensor, seed: int, plain: dict[int, Tensor]) -> float:
    """Compute the error of a latent; `plain` has the full runs' latents by seed."""
    return float((latent - plain[seed]).norm() / (plain[seed] - call_inputs(name, seed)["hidden_states"]).norm())


def interval(values: list[float]) -> list[float]:
    """Compute the mean and half the width of its 95 % interval."""
    half = T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return [statistics.fmean(values), half]


def ratio(errors: list[float], base_errors: list[float]) -> list[float]:
    """Compute the geometric mean over seeds of errors / base_errors, and its 95 % interval."""
    mean, half = interval([math.log(max(a, 1e-9) / max(b, 1e-9)) for a, b in zip(errors, base_errors, strict=True)])
    return [math.exp(mean), math.exp(mean - half), math.exp(mean + half)]


def choose(name: str, module: nn.Module, ratios: Any, steps: int, seeds: list[int], plain: dict[int, Tensor]) -> Any:
    """Choose settings on these seeds: {method: {budget: settings}}. Methods that exceed the budget with every setting
    are left out."""

    def measure(settings: Settings) -> tuple[float, float, Settings]:
        runs = [run(name, module, settings, steps, seed) for seed in seeds]
        errors = [latent_error(name, result["latent"], seed, plain) for result, seed in zip(runs, seeds, strict=True)]
        return statistics.fmean(result["evaluated"] for result in runs), statistics.fmean(errors), settings

    candidates = {way: [measure(entry) for entry in settings] for way, settings in ways(steps).items()}
    for way, settings_of in rules(ratios, steps).items():
        by_level: dict[float, tuple[float, float, Settings]] = {}
        for budget in BUDGETS:  # bisect the threshold on a logarithmic scale
            low, high = LEVELS
            for _ in range(HALVINGS):
                level = math.sqrt(low * high)
                if level not in by_level:
                    by_level[level] = measure(settings_of(level))
                low, high = (level, high) if by_level[level][0] > budget else (low, level)
        candidates[way] = list(by_level.values())
    chosen: dict[str, dict[int, Settings]] = {}
    for way, entries in candidates.items():
        for budget in BUDGETS:
            fits = [entry[1:] for entry in entries if entry[0] <= budget + 1e-6]
            if fits:
                chosen.setdefault(way, {})[budget] = min(fits, key=lambda entry: entry[0])[1]
    return chosen


def rank(name: str, steps: int, seeds: int) -> list[dict[str, Any]]:
    """Measure, on odd seeds, published settings and every method at every budget with settings chosen on even seeds."""
    module = build(name)
    choosing, reporting = [seed for seed in range(seeds) if seed % 2 == 0], [s for s in range(seeds) if s % 2]
    plain = {seed: run(name, module, None, steps, seed)["latent"] for seed in range(seeds)}

    ratios = [
        calibrate_magcache(module, lambda seed=seed: denoise(name, module, call_inputs(name, seed), steps))
        for seed in choosing
    ]
    means = MagRatios(tuple(statistics.fmean(values) for values in zip(*(run.values for run in ratios), strict=True)))
    chosen = choose(name, module, means, steps, choosing, plain)
    contestants: dict[Any, Settings] = {(way, budget): s for way, by in chosen.items() for budget, s in by.items()}
    contestants |= {(way, None): settings for way, settings in published(means, steps).items()}
    runs: dict[Any, list[dict[str, Any]]] = {key: [] for key in [None, *contestants]}
    for seed in reporting:
        for key in runs:  # take turns
            runs[key].append(run(name, module, contestants.get(key), steps, seed))
    errors = {
        key: [latent_error(name, out["latent"], seed, plain) for out, seed in zip(runs[key], reporting, strict=True)]
        for key in contestants
    }
    rows = []
    for way, budget in contestants:
        way_runs = runs[way, budget]
        row = {
            "model": name,
            "budget": budget,
            "way": way,
            "error": interval(errors[way, budget]),
            "evaluated": statistics.fmean(result["evaluated"] for result in way_runs),
            "blocks": statistics.fmean(result["blocks"] for result in way_runs),
            "cpu": statistics.median(a["seconds"] / b["seconds"] for a, b in zip(way_runs, runs[None], strict=True)),
        }
        if budget is not None:
            row["over_even"] = ratio(errors[way, budget], errors[EVEN, budget])
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", type=int, default=16, help="half to choose, half to report; default: %(default)s")
    parser.add_argument("--steps", type=int, default=28, help="default: %(default)s, the length of the step masks")
    parser.add_argument("--out", type=Path, default=RESULTS / "probes.json", help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {
        "steps": args.steps,
        "seeds": args.seeds,
        "budgets": list(BUDGETS),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "machine": platform.machine(),
    }
    rows: list[dict[str, Any]] = []
    for name in args.models:
        rows += rank(name, args.steps, args.seeds)
        parts = {
            "ways": [row for row in rows if row["budget"]],
            "published": [row for row in rows if not row["budget"]],
        }
        write_result(args.out, {"facts": facts} | parts)


if __name__ == "__main__":
    main()

"""When to evaluate a diffusion transformer: schedules, step masks, and rules that measure, ranked on held-out noise.

    python benchmarks/probes.py [--models digits FLUX ...] [--seeds 16] [--steps 28]

The packaged DiT of digits (guidance 2, its DDIM scheduler) and small FLUX, Wan, SD3 and PixArt transformers of five
blocks with random weights (Euler steps) denoise noise of many seeds and prompts. For every way of deciding there are
several settings (intervals; thresholds, bisected towards the budget). On one half of the seeds, of those that evaluate
no more steps than a budget, the setting with the smallest error is chosen; reported is that setting on the other half.

- error: |latent - full run's| / |full run's - the noise|; mean and 95 % interval (Student's t) over seeds.
- evaluated: steps of a run at which all blocks are evaluated (a probe's own blocks are not counted here).
- blocks: share of the full run's block evaluations, with those of probes.
- CPU seconds of a run, as a share of the full run's, one thread: median over the seeds, in turns.

Budgets are the evaluated steps of cache-dit's masks "ultra" and "fast" at 28 steps. MagCache's ratios are
measured in one of the runs that choose. The committed result also has DiCache (arXiv 2508.17356), as it was at that
commit; it paid on the trained model alone, and is not part of paradec yet. Writes benchmarks/results/probes.json.
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
from provenance import write_result
from taylorseer import build as smaller
from taylorseer import denoise, inputs
from torch import Tensor, nn

import paradec
from paradec import TaylorSeer
from paradec.hooks.magcache import calibrate
from paradec.samplers.forecast.rules import DBCache, FirstBlock, MagCache

RESULTS = Path(__file__).resolve().parent / "results" / "probes.json"
MODELS = ("digits", "FLUX", "Wan", "SD3", "PixArt")
BUDGETS = (8, 11)
LEVELS, HALVINGS = (0.01, 3.0), 5
"""Between which thresholds are looked for, and how often."""
T95 = {4: 3.182, 6: 2.571, 8: 2.365, 10: 2.262, 12: 2.201, 16: 2.131, 20: 2.093}
"""Student's t, two-sided, by the number of seeds."""


def even(steps: int, count: int) -> list[int]:
    """`count` of the steps from the first to the last, spread evenly."""
    return sorted({round(i * (steps - 1) / max(count - 1, 1)) for i in range(count)})


def build(name: str) -> nn.Module:
    """The packaged transformer, or one of five blocks with random weights, all of them in use."""
    if name == "digits":
        return smaller(name, 48)
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
    for parameter in made.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    module: nn.Module = made.eval().requires_grad_(False)
    return module


def given(name: str, seed: int) -> dict[str, Tensor]:
    """The arguments of a call but for the timestep: noise and prompt of a seed."""
    if name == "digits":
        return {key: tensor[:2] for key, tensor in inputs(name, seed).items()}
    if name not in ("SD3", "PixArt"):
        return inputs(name, seed)
    draw = torch.Generator().manual_seed(seed)
    found = {
        "hidden_states": torch.randn(1, 4, 16, 16, generator=draw),
        "encoder_hidden_states": torch.randn(1, 16, 32, generator=draw),
    }
    if name == "SD3":
        found["pooled_projections"] = torch.randn(1, 32, generator=draw)
    return found


Settings = dict[str, Any]


def ways(steps: int) -> dict[str, list[Settings]]:
    """Settings of `TaylorSeer` by the way of deciding and forecasting: those that follow a schedule."""
    spread = [{"full_steps": even(steps, count)} for count in BUDGETS]
    masks = [{"full_steps": mask(name, steps)} for name in ("ultra", "fast")]
    return {
        "interval, module, taylor 1": [{"interval": n, "first_enhance": 1} for n in (3, 4, 5)],
        "the paper's schedule, module, taylor 1": [{"interval": n, "first_enhance": 3} for n in (3, 4, 5)],
        "even, module, taylor 1": spread,
        "even, stack, reuse": [entry | {"target": "stack", "basis": "reuse"} for entry in spread],
        "step mask, module, taylor 1": masks,
        "step mask, stack, reuse": [entry | {"target": "stack", "basis": "reuse"} for entry in masks],
    }


def rules(ratios: Any) -> dict[str, Callable[[float], Settings]]:
    """Settings by a threshold: the ways that measure."""
    return {
        "FirstBlock": lambda level: {"refresh": FirstBlock(level)},
        "FirstBlock, taylor 1": lambda level: {"refresh": FirstBlock(level), "basis": "taylor"},
        "DBCache, taylor 1": lambda level: {"refresh": DBCache(1, 0, min(level, 1.0), 4), "basis": "taylor"},
        "MagCache": lambda level: {"refresh": MagCache(ratios, level, 5, 0.1)},
    }


MASKS = {
    "slow": (8, 1, 3, 2, 3, 2, 2, 2, 1, 3, 1),
    "medium": (6, 1, 2, 3, 2, 3, 2, 3, 2, 3, 1),
    "fast": (6, 1, 1, 3, 1, 4, 1, 5, 1, 4, 1),
    "ultra": (4, 2, 1, 5, 1, 6, 1, 7, 1),
}
"""cache-dit's step masks at 28 steps: runs of evaluated and skipped steps, in turn."""


def mask(name: str, steps: int) -> list[int]:
    """The evaluated steps of a mask, at 28 steps."""
    flags = [turn % 2 == 0 for turn, length in enumerate(MASKS[name]) for _ in range(length)]
    assert len(flags) == steps
    return [step for step, full in enumerate(flags) if full]


def measured(
    name: str, module: nn.Module, settings: Settings, steps: int, seeds: list[int], plain: dict[int, Tensor]
) -> dict[str, list[float]]:
    """Errors, evaluated steps, share of block evaluations and CPU seconds of a setting, by seed."""
    found: dict[str, list[float]] = {"error": [], "evaluated": [], "blocks": [], "seconds": []}
    with paradec.accelerate(module, TaylorSeer(**settings)) as session:
        stack = session.transformers[0].stack
        for seed in seeds:
            arguments = given(name, seed)
            session.reset()
            began = time.process_time()
            latent = denoise(name, module, arguments, steps)
            found["seconds"].append(time.process_time() - began)
            start = arguments["hidden_states"]
            found["error"].append(float((latent - plain[seed]).norm() / (plain[seed] - start).norm()))
            calls = session.report().calls
            share = sum(call.evaluated / (call.evaluated + call.forecast) for call in calls)
            always = 0.0 if stack is None else 1 - len(stack.forecasts) / len(stack.places)
            found["evaluated"].append(share)
            found["blocks"].append((share * (1 - always) + len(calls) * always) / steps)
    return found


def interval(values: list[float]) -> dict[str, float]:
    """Mean and half the width of its 95 % interval."""
    half = T95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": statistics.fmean(values), "half": half}


def rank(name: str, facts: dict[str, Any], results: dict[str, Any], out: Path) -> None:
    """Every way at every budget: the setting chosen on even seeds, and what it gives on odd ones."""
    steps, seeds = facts["steps"], facts["seeds"]
    module = build(name)
    choosing, reporting = [seed for seed in range(seeds) if seed % 2 == 0], [s for s in range(seeds) if s % 2]
    plain, seconds = {}, {}
    for seed in range(seeds):
        began = time.process_time()
        plain[seed] = denoise(name, module, given(name, seed), steps)
        seconds[seed] = time.process_time() - began
    ratios = calibrate(module, lambda: denoise(name, module, given(name, 0), steps))
    found: dict[str, Any] = {"mag_ratios": list(ratios.values), "ways": {}}

    def tried(settings: Settings) -> tuple[float, float, Settings]:
        row = measured(name, module, settings, steps, choosing, plain)
        return statistics.fmean(row["evaluated"]), statistics.fmean(row["error"]), settings

    candidates = {way: [tried(entry) for entry in settings] for way, settings in ways(steps).items()}
    for way, settings_of in rules(ratios).items():
        candidates[way] = []
        for budget in BUDGETS:  # the threshold is halved towards the budget, on a logarithmic scale
            low, high = LEVELS
            for _ in range(HALVINGS):
                level = math.sqrt(low * high)
                candidates[way].append(tried(settings_of(level)))
                low, high = (level, high) if candidates[way][-1][0] > budget else (low, level)
    for way, entries in candidates.items():
        rows = found["ways"][way] = {}
        for budget in BUDGETS:
            fits = [entry[1:] for entry in entries if entry[0] <= budget + 1e-6]
            if not fits:
                continue
            chosen = min(fits, key=lambda entry: entry[0])[1]
            row = measured(name, module, chosen, steps, reporting, plain)
            rows[budget] = {
                "settings": {key: value for key, value in TaylorSeer(**chosen).to_dict().items() if key in chosen},
                "error": interval(row["error"]),
                "evaluated": statistics.fmean(row["evaluated"]),
                "blocks": statistics.fmean(row["blocks"]),
                "cpu": statistics.median(a / seconds[s] for a, s in zip(row["seconds"], reporting, strict=True)),
            }
        write_result(out, {"facts": facts, "results": results | {name: found}})
        cells = [
            f"{row['error']['mean']:.4f}+-{row['error']['half']:.4f} ({row['evaluated']:.1f}, cpu {row['cpu']:.2f})"
            for row in rows.values()
        ]
        print(f"{name:<7} {way:<38} {'  '.join(cells)}", flush=True)
    results[name] = found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--seeds", type=int, default=8, help="half to choose, half to report; default: %(default)s")
    parser.add_argument("--steps", type=int, default=28, help="default: %(default)s, for which the masks are made")
    parser.add_argument("--out", type=Path, default=RESULTS, help="default: %(default)s")
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
    results: dict[str, Any] = {}
    for name in args.models:
        rank(name, facts, results, args.out)


if __name__ == "__main__":
    main()

"""SeaCache, EasyCache and TeaCache compared with evenly spread and searched steps, at equal numbers of evaluations.

    python benchmarks/skipping.py [--models digits Wan SD3] [--budgets 5 7] [--seeds 8] [--runs 60]

The packaged pipeline of digits (guidance 2, DDIM) and the random transformers of benchmarks/probes.py with
FlowMatchEuler make 20 steps. On the first half of the seeds, thresholds are bisected so that the mean number of
evaluated steps is at most the budget, and `paradec.tune_steps` searches for steps. The results are measured on the
other half: the error |x - full| / |full - noise|, where full is the run that evaluates every step (mean and 95 %
interval, Student's t), and its ratio to the error of `EVEN` on the same seed (geometric mean). SeaCache needs flow
sigmas, so it is left out for digits. Writes benchmarks/results/skipping.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from probes import build, call_inputs, interval, ratio
from provenance import RESULTS, write_result
from torch import Tensor

import paradec
from paradec import AccumulatedChange, EasyCache, Forecast, SeaCache, TaylorSeer

STEPS = 20
HALVINGS = 8
EVEN = "even, output, taylor 1"
"""The best evenly spread steps, with forecasts of the whole output."""


class Flow(diffusers.DiffusionPipeline):
    """Pipeline of a transformer of benchmarks/probes.py with FlowMatchEuler; returns the latent."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        self.register_modules(transformer=build(name), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0))

    @torch.no_grad()
    def __call__(self, seed: int) -> Tensor:
        inputs = call_inputs(self.name, seed)
        latent = inputs["hidden_states"]
        self.scheduler.set_timesteps(STEPS)
        for t in self.scheduler.timesteps:
            call = inputs | {"hidden_states": latent, "timestep": t.expand(len(latent))}
            latent = self.scheduler.step(self.transformer(**call).sample, t, latent).prev_sample
        return latent


def pipeline(name: str) -> tuple[Any, Callable[[int], tuple[Tensor, Tensor]]]:
    """Build a pipeline, and a function that runs it with a seed and returns (noise, latent)."""
    if name != "digits":
        flow = Flow(name)
        return flow, lambda seed: (call_inputs(name, seed)["hidden_states"], flow(seed))
    pipe = paradec.PixelDiTPipeline.digits()
    pipe.set_progress_bar_config(disable=True)

    def run(seed: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(1, 1, 28, 28, generator=torch.Generator().manual_seed(seed))
        made = pipe(seed % 10, num_inference_steps=STEPS, latents=noise, output_type="pt").images
        return noise, made * 2 - 1

    return pipe, run


def rules(name: str) -> dict[str, Callable[[float], TaylorSeer]]:
    """Build samplers as functions of a threshold, by method."""
    named_rules: dict[str, Callable[[float], TaylorSeer]] = {
        "EasyCache, 2 first steps": lambda level: Forecast(when=EasyCache(level, ret_steps=2)),
        "TeaCache (modulated, no polynomial), stack, reuse": lambda level: Forecast(
            when=AccumulatedChange(level, watch="modulated", last_steps=1), where="stack", how="reuse"
        ),
    }
    if name != "digits":
        named_rules["SeaCache, no bound"] = lambda level: Forecast(when=SeaCache(level, max_consecutive_cached=0))
    return named_rules


def measure(pipe: Any, run: Any, sampler: TaylorSeer, seeds: list[int], full: dict[int, Tensor]) -> dict[str, Any]:
    """Measure the error on each seed, and the mean number of evaluated steps; `full` has full runs' latents by seed."""
    errors, evaluated = [], []
    for seed in seeds:
        with paradec.accelerate(pipe, sampler) as session:
            noise, latent = run(seed)
        evaluated.append(len(session.report().full_steps))
        errors.append(float((latent - full[seed]).norm() / (full[seed] - noise).norm()))
    return {"errors": errors, "evaluated": statistics.fmean(evaluated)}


def measure_methods(name: str, budgets: list[int], seeds: int, runs: int) -> list[dict[str, Any]]:
    """Measure every method at every budget; return a row for each."""
    pipe, run = pipeline(name)
    choosing, reporting = list(range(seeds)), list(range(seeds, 2 * seeds))
    full = {seed: run(seed)[1] for seed in choosing + reporting}
    rows = []
    for budget in budgets:
        ways: dict[str, TaylorSeer] = {}
        for target in ("output", "stack", "module"):
            method = TaylorSeer(where=target)
            tuned = paradec.tune_steps(pipe, run, budget=budget, seeds=seeds, report=seeds, sampler=method, runs=runs)
            for kind, schedule in (("even", tuned.even), ("searched", tuned.best)):
                ways[f"{kind}, {target}, taylor 1"] = Forecast(when=schedule)
        for way, sampler_of in rules(name).items():
            low, high, best = 1e-3, 30.0, None
            for _ in range(HALVINGS):
                level = math.sqrt(low * high)
                if measure(pipe, run, sampler_of(level), choosing, full)["evaluated"] <= budget:
                    high, best = level, sampler_of(level)
                else:
                    low = level
            if best is not None:
                ways[way] = best
        measured = {way: measure(pipe, run, sampler, reporting, full) for way, sampler in ways.items()}
        for way, result in measured.items():
            error, ratio_to_even = interval(result["errors"]), ratio(result["errors"], measured[EVEN]["errors"])
            row = {"model": name, "budget": budget, "way": way, "error": error, "over_even": ratio_to_even}
            rows.append(row | {"evaluated": result["evaluated"]})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["digits", "Wan", "SD3"], choices=("digits", "Wan", "SD3"))
    parser.add_argument("--budgets", nargs="+", type=int, default=[5, 7])
    parser.add_argument(
        "--seeds", type=int, default=8, choices=(4, 6, 8, 10, 12, 16), help="number of seeds of each half"
    )
    parser.add_argument(
        "--runs", type=int, default=60, help="sets of steps that each search evaluates; default: %(default)s"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "skipping.json", help="default: %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"steps": STEPS, "seeds": args.seeds, "runs": args.runs, "diffusers": diffusers.__version__}
    rows: list[dict[str, Any]] = []
    for name in args.models:
        rows += measure_methods(name, args.budgets, args.seeds, args.runs)
        write_result(args.out, {"facts": facts, "ways": rows})


if __name__ == "__main__":
    main()

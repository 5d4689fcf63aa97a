"""Calibrations from full runs: MagCache's ratios, and BAC's schedules (Ji et al., ICLR 2026, arXiv 2506.13456).

Two points follow BAC's public code, not the paper's text: a segment of steps is scored by the similarity of its
features to those at its first step, and the bubbling union may extend the schedule of any module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paradec.core.checks import check_choice, check_int
from paradec.integrations.diffusers.hooks.blocks import FEED_FORWARD, find_places
from paradec.integrations.diffusers.hooks.hook import Hook
from paradec.integrations.diffusers.hooks.session import Session, check_every_step, find_transformers
from paradec.samplers.forecast.forecast import Forecast
from paradec.samplers.forecast.refresh import Every, Probe, RunProgress
from paradec.samplers.forecast.rules import MagRatios
from paradec.samplers.forecast.step_schedule import BlockSchedule

METRICS = ("cosine", "l1", "mse")


@dataclass(frozen=True, eq=False)
class _Magnitudes(Probe):
    ratios: dict[int, list[float]] = field(default_factory=dict)  # by step, one for each call of the step

    def is_full(self, progress: RunProgress, first: Tensor, probe: Tensor, forced: bool) -> bool:
        return True

    def observe_residual(self, progress: RunProgress, residual: Tensor) -> None:
        size, before = residual.float().norm(dim=-1), progress.memory.get("size")
        ratio = 1.0 if before is None else float((size / (before + 1e-8)).mean())
        self.ratios.setdefault(progress.nodes[0], []).append(ratio)
        progress.memory["size"] = size


def calibrate_magcache(pipe: Any, run: Callable[[], Any], *, runs: int = 1) -> MagRatios:
    """Measure the magnitude ratios of a model, for `MagCache(mag_ratios=...)`.

    Args:
        pipe: a diffusers pipeline (each transformer is measured at its steps), or a transformer; restored at the end.
        run: function that runs the pipeline once, with all steps.
        runs: number of runs. Ratios are averaged over the runs and over the calls of a step (guidance).

    Raises ValueError for invalid `runs`, no known blocks, or runs of different lengths; TypeError for other objects.
    """
    check_int("runs", runs, low=1)
    measured: list[list[float]] = []
    for _ in range(runs):
        measure = _Magnitudes()
        with Session(pipe, Forecast(when=measure)) as session:
            run()
            steps = sorted(session.report().full_steps)
        check_every_step("the transformer", steps, len(measured[0]) if measured else 0)
        measured.append([sum(measure.ratios[step]) / len(measure.ratios[step]) for step in steps])
    return MagRatios(tuple(sum(values) / runs for values in zip(*measured, strict=True)))


def calibrate_bac(
    pipe: Any,
    run: Callable[[], Any],
    updates: int,
    *,
    runs: int = 1,
    metric: str = "cosine",
    bubbling: int = 3,
    samples: int = 65536,
) -> BlockSchedule:
    """Find a schedule for the attention and feed-forward modules of a residual transformer.

    Args:
        pipe: a diffusers pipeline, or a transformer; restored at the end.
        run: function that runs the pipeline once, with all steps.
        updates: number of evaluations of each module in a run, before the bubbling union adds some.
        runs: number of runs over which scores are averaged.
        metric: similarity of features: "cosine" (the paper's), "l1" or "mse".
        bubbling: number of modules whose schedules the bubbling union extends.
        samples: number of compared entries of a feature, evenly spaced (4 bytes each, per module and step).

    Raises ValueError for an invalid setting, no known modules, runs of different lengths; TypeError for other objects.
    """
    check_int("updates", updates, low=1)
    check_int("runs", runs, low=1)
    check_choice("metric", metric, METRICS)
    check_int("bubbling", bubbling, low=0)
    check_int("samples", samples, low=1)
    module = next(iter(find_transformers(pipe).values()))
    names = [place.name for place in find_places(module, "module") if place.kind == "forecast"]
    total: dict[str, np.ndarray] = {}
    errors = dict.fromkeys(names, 0.0)
    for _ in range(runs):
        for name, samples_by_step in _record_features(pipe, run, module, names, samples).items():
            steps = sorted(samples_by_step)
            check_every_step(name, steps, len(total.get(name, ())))
            scores, error = _score_steps(torch.stack([torch.cat(samples_by_step[step]) for step in steps]), metric)
            total[name] = total.get(name, 0) + scores
            errors[name] += error
    schedules = {name: adaptive_schedule(total[name], updates, maximise=metric == "cosine") for name in names}
    feed_forwards = [name for name in names if FEED_FORWARD.fullmatch(name.split(".")[-1]) or name.endswith("proj_out")]
    extended = bubbling_union(schedules, errors, feed_forwards, bubbling)
    return BlockSchedule(len(total[names[0]]), tuple((name, tuple(extended[name])) for name in names))


def _record_features(
    pipe: Any, run: Callable[[], Any], module: nn.Module, names: list[str], samples: int
) -> dict[str, dict[int, list[Tensor]]]:
    """Run once without forecasts. Return by module and step: samples [n] of each output tensor of each call."""
    features: dict[str, dict[int, list[Tensor]]] = {name: {} for name in names}

    def record(name: str, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        output = forward(*args, **kwargs)
        for leaf in tree_leaves(output) if transformer.is_inside else ():
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                flat = leaf.detach().flatten()
                flat = flat[:: max(-(-len(flat) // samples), 1)].float().cpu()
                features[name].setdefault(transformer.run_progress.index, []).append(flat)
        return output

    with Session(pipe, Forecast(Every(1), "reuse", "output")) as session:
        transformer = next(entry for entry in session.transformers if entry.module is module)
        hooks = [Hook(module.get_submodule(name), partial(record, name), "paradec_record") for name in names]
        try:
            run()
        finally:
            for hook in reversed(hooks):
                hook.remove()
    return features


def _score_steps(features: Tensor, metric: str) -> tuple[np.ndarray, float]:
    """From features [T, n] of T steps, return scores [T, T] float64 of all pairs, and their mean absolute distance."""

    def pairwise(measure: Callable[[Tensor], Tensor]) -> np.ndarray:
        return torch.stack([measure(features - row).mean(1) for row in features]).double().numpy()

    distance, steps = pairwise(torch.abs), len(features)
    error = float(distance.sum() / max(steps * (steps - 1), 1))
    if metric != "cosine":
        return distance if metric == "l1" else pairwise(torch.square), error
    unit = features.double() / features.double().norm(dim=1, keepdim=True).clamp(min=1e-12)
    return (unit @ unit.T).numpy(), error


def adaptive_schedule(scores: np.ndarray, updates: int, maximise: bool = True) -> list[int]:
    """Choose the best `updates` steps (step 0 and others) to evaluate a module; of equally good sets, the earliest.

    scores: [T, T]; entry [a, t] scores the use of step a's features at step t. maximise: whether large scores are good.
    """
    total = len(scores)
    check_int("updates", updates, low=1, high=total)
    scores = np.asarray(scores, np.float64) if maximise else -np.asarray(scores, np.float64)
    sums = np.cumsum(scores, axis=1)
    # gain[a, c]: total score of the segment of steps a to c, which use the features of step a
    gain = sums - np.take_along_axis(sums, np.arange(total)[:, None], 1) + np.diag(scores)[:, None]
    gain[np.tril_indices(total, -1)] = -np.inf
    best, starts = gain[0], []
    for _ in range(1, updates):
        totals = best[:-1, None] + gain[1:]  # [k, c]: the last segment has steps k + 1 to c
        starts.append(totals.argmax(0) + 1)
        best = totals.max(0)
    steps, end = [], total - 1
    for start in reversed(starts):
        steps.append(int(start[end]))
        end = steps[-1] - 1
    return [0, *reversed(steps)]


def bubbling_union(
    steps: Mapping[str, Iterable[int]], errors: Mapping[str, float], feed_forwards: Sequence[str], num_modules: int = 3
) -> dict[str, list[int]]:
    """Add the steps of later feed-forward modules to the schedules of the modules with the largest errors.

    steps: by module, its schedule; the modules are in the order of evaluation.
    errors: by module, mean distance between its features at two steps. feed_forwards: names of feed-forward modules.
    num_modules: number of extended schedules (3 in BAC's README, 5 in its simulations); below 2, none is extended."""
    names = list(steps)
    extended = {name: sorted(set(steps[name])) for name in names}
    if num_modules < 2:
        return extended
    for name in sorted(names, key=lambda name: -errors[name])[:num_modules]:
        later = [module for module in names[names.index(name) :] if module in feed_forwards]
        extended[name] = sorted(set(steps[name]).union(*(steps[module] for module in later)))
    return extended

"""BAC's calibration: a schedule for each module, from plain runs (`paradec.samplers.forecast.bac`)."""

from __future__ import annotations

from collections.abc import Callable
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
from paradec.samplers.forecast.bac import BlockSchedule, adaptive_schedule, bubbling_union
from paradec.samplers.forecast.forecast import Forecast
from paradec.samplers.forecast.refresh import Every

METRICS = ("cosine", "l1", "mse")


def calibrate(
    pipe: Any,
    run: Callable[[], Any],
    updates: int,
    *,
    runs: int = 1,
    metric: str = "cosine",
    bubbling: int = 3,
    samples: int = 65536,
    transformer: str = "transformer",
) -> BlockSchedule:
    """Find a schedule for the attention and feed-forward modules of a residual transformer.

    Args:
        pipe: a diffusers pipeline, or a transformer; restored at the end.
        run: makes one plain run with all steps.
        updates: n: evaluations of each module in a run, before the bubbling union.
        runs: calls of `run`, which are averaged.
        metric: similarity of features: "cosine" (the paper's), "l1" or "mse".
        bubbling: number of modules that get the bubbling union.
        samples: compared entries of a feature, evenly strided (4 bytes each, per module and step).
        transformer: the component of the pipeline to calibrate.

    Raises ValueError for an invalid setting, no such modules, or runs of unequal lengths; TypeError for another `pipe`.
    """
    check_int("updates", updates, low=1)
    check_int("runs", runs, low=1)
    check_choice("metric", metric, METRICS)
    check_int("bubbling", bubbling, low=0)
    check_int("samples", samples, low=1)
    components = find_transformers(pipe)
    if not isinstance(pipe, nn.Module):
        check_choice("transformer", transformer, components)
    module = components.get(transformer, next(iter(components.values())))
    names = [place.name for place in find_places(module, "module") if place.kind == "forecast"]
    total: dict[str, np.ndarray] = {}
    errors = dict.fromkeys(names, 0.0)
    for _ in range(runs):
        for name, samples_by_step in _record_features(pipe, run, module, names, samples).items():
            steps = sorted(samples_by_step)
            check_every_step(f"{name} was not evaluated", steps, len(total.get(name, ())))
            scores, error = _compare(torch.stack([torch.cat(samples_by_step[step]) for step in steps]), metric)
            total[name] = total.get(name, 0) + scores
            errors[name] += error
    count = len(total[names[0]])
    check_int("updates", updates, low=1, high=count)
    schedules = {name: adaptive_schedule(total[name], updates, maximise=metric == "cosine") for name in names}
    feed_forward = [name for name in names if FEED_FORWARD.fullmatch(name.split(".")[-1]) or name.endswith("proj_out")]
    united = bubbling_union(schedules, errors, feed_forward, bubbling)
    return BlockSchedule(count, tuple((name, tuple(united[name])) for name in names))


def _record_features(
    pipe: Any, run: Callable[[], Any], module: nn.Module, names: list[str], samples: int
) -> dict[str, dict[int, list[Tensor]]]:
    """Make a plain run; return samples of the modules' outputs by name and step, for each call of the step."""
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


def _compare(features: Tensor, metric: str) -> tuple[np.ndarray, float]:
    """Return [T, T] float64 scores of features [T, n] against each other, and their mean absolute distance."""
    distance = torch.stack([(features - row).abs().mean(1) for row in features]).double().numpy()
    steps = len(features)
    error = float(distance.sum() / max(steps * (steps - 1), 1))
    if metric == "l1":
        return distance, error
    if metric == "mse":
        return torch.stack([(features - row).square().mean(1) for row in features]).double().numpy(), error
    unit = features.double() / features.double().norm(dim=1, keepdim=True).clamp(min=1e-12)
    return (unit @ unit.T).numpy(), error

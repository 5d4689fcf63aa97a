"""BAC's calibration: the steps at which to evaluate each module, from plain runs (`paradec.samplers.forecast.bac`)."""

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
from paradec.integrations.diffusers.hooks.hook import Attached, Hook
from paradec.integrations.diffusers.hooks.session import Session, find_transformers
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
        pipe: a diffusers pipeline, or a transformer alone; restored at the end.
        run: makes one plain run with all steps.
        updates: n: evaluations of each module in a run, before the bubbling union adds some.
        runs: calls of `run`, which are averaged.
        metric: how features at two steps are compared: "cosine" (the paper's), "l1" or "mse".
        bubbling: modules that get the bubbling union, as in `bubbling_union`.
        samples: compared entries of a feature, evenly strided (4 bytes each, per module and step).
        transformer: the component of the pipeline to calibrate.

    Raises:
        ValueError: a setting out of its range, a transformer without such modules, or runs of unequal lengths.
        TypeError: `pipe` is neither.
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
    with _Recorder(pipe, module, names, samples) as recorder:
        for _ in range(runs):
            recorder.features = {name: {} for name in names}
            run()
            for name in names:
                steps = sorted(recorder.features[name])
                if steps != list(range(len(steps))) or not steps:
                    raise ValueError(f"run: {name} was not evaluated at every step of a run, but at {steps}")
                features = torch.stack([torch.cat(recorder.features[name][step]) for step in steps])
                scores, error = _compare(features, metric)
                if name in total and total[name].shape != scores.shape:
                    raise ValueError(f"run: one run has {len(total[name])} steps, another {len(scores)}")
                total[name] = total.get(name, 0) + scores
                errors[name] += error
    count = len(total[names[0]])
    check_int("updates", updates, low=1, high=count)
    schedules = {name: adaptive_schedule(total[name], updates, maximise=metric == "cosine") for name in names}
    feed_forward = [name for name in names if FEED_FORWARD.fullmatch(name.split(".")[-1]) or name.endswith("proj_out")]
    united = bubbling_union(schedules, errors, feed_forward, bubbling)
    return BlockSchedule(count, tuple((name, tuple(united[name])) for name in names))


class _Recorder(Attached):
    """Keeps samples of what modules return, per step of a plain run."""

    def __init__(self, pipe: Any, module: nn.Module, names: list[str], samples: int):
        self.features: dict[str, dict[int, list[Tensor]]] = {}
        self.samples = samples
        self.session = Session(pipe, Forecast(Every(1), "reuse", "output"))
        self.transformer = next(one for one in self.session.transformers if one.module is module)
        modules = dict(module.named_modules())
        self.hooks = [Hook(modules[name], partial(self._record, name), "paradec_record") for name in names]

    def _record(self, name: str, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        output = inner(*args, **kwargs)
        if self.transformer.is_inside:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    flat = leaf.detach().flatten()
                    flat = flat[:: max(-(-len(flat) // self.samples), 1)].float().cpu()
                    self.features[name].setdefault(self.transformer.run_progress.index, []).append(flat)
        return output

    def detach(self) -> None:
        for hook in reversed(self.hooks):
            hook.remove()
        self.session.detach()


def _compare(features: Tensor, metric: str) -> tuple[np.ndarray, float]:
    """[T, T] float64 scores of features [T, n] against each other, and their mean absolute distance."""
    distance = torch.stack([(features - row).abs().mean(1) for row in features]).double().numpy()
    steps = len(features)
    error = float(distance.sum() / max(steps * (steps - 1), 1))
    if metric == "l1":
        return distance, error
    if metric == "mse":
        return torch.stack([(features - row).square().mean(1) for row in features]).double().numpy(), error
    unit = features.double() / features.double().norm(dim=1, keepdim=True).clamp(min=1e-12)
    return (unit @ unit.T).numpy(), error

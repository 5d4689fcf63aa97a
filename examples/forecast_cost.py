"""What forecasts cost and save in a diffusers pipeline: the distance to the plain run over speed, measured and drawn.

The drawing needs matplotlib, which the extra `bench` brings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradec.integrations.diffusers.hooks.session import accelerate
from paradec.samplers.forecast.forecast import Forecast
from paradec.samplers.forecast.refresh import Every
from paradec.tools.evaluation.plot import check_plot, save

CURVES: dict[str, dict[str, Any]] = {
    "taylor 1": {"order": 1},
    "taylor 2": {"order": 2},
    "reuse": {"how": "reuse"},
    "newton 2": {"how": "newton", "order": 2},
    "taylor 1, output": {"order": 1, "where": "output"},
}
"""Settings of `TaylorSeer` that a user would compare."""
INTERVALS = (2, 3, 4, 6)


@dataclass(frozen=True)
class Point:
    """One accelerated run beside the plain one."""

    curve: str
    interval: int
    evaluated: float
    """Share of the hooked modules' calls that were evaluated."""
    speedup: float
    """Seconds of the plain run, by those of this one."""
    error: float
    """|result - plain result| / |plain result|."""


def sweep(
    pipe: Any,
    run: Callable[[], Tensor],
    curves: Mapping[str, Mapping[str, Any]] = CURVES,
    intervals: Iterable[int] = INTERVALS,
    **common: Any,
) -> list[Point]:
    """Run a pipeline plainly, and once for every curve and interval.

    Args:
        pipe: a diffusers pipeline. run: calls it, always with the same noise, and returns latents or pixels.
        curves: settings of `Forecast` by name. common: settings of all of them, `where` for example.

    Raises:
        ValueError: a setting out of its range, before anything is run; or another shape than the plain run's.
    """
    samplers = [
        (name, interval, Forecast(**{"when": Every(interval), **common, **settings}))
        for name, settings in curves.items()
        for interval in intervals
    ]
    run()  # what is done once only should not count
    plain, plain_seconds = _timed(run)
    points = []
    for name, interval, sampler in samplers:
        with accelerate(pipe, sampler) as session:
            found, seconds = _timed(run)
            calls = session.report().calls
        if found.shape != plain.shape:
            raise ValueError(f"run gave shape {tuple(found.shape)}, and {tuple(plain.shape)} without acceleration")
        evaluated = sum(call.evaluated for call in calls)
        share = evaluated / (evaluated + sum(call.forecast for call in calls))
        error = float((found.double() - plain.double()).norm() / plain.double().norm())
        points.append(Point(name, interval, share, plain_seconds / seconds, error))
    return points


def table(points: Iterable[Point]) -> str:
    """One line for each."""
    return "\n".join(
        f"{point.curve}, interval {point.interval}: {point.evaluated:.0%} evaluated, {point.speedup:.2f}x as fast, "
        f"error {point.error:.4f}"
        for point in points
    )


def draw(points: Iterable[Point], file: str | os.PathLike[str]) -> None:
    """The error over the share that was evaluated, and over measured speed, a curve per setting.

    Raises:
        ModuleNotFoundError: matplotlib is not installed. ValueError: not a PNG, PDF or SVG file in an existing folder.
    """
    check_plot(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    points = list(points)
    for axis, key, scale, label in (
        (axes[0], "evaluated", 100, "modules evaluated, %"),
        (axes[1], "speedup", 1, "times as fast as the plain run"),
    ):
        for curve in dict.fromkeys(point.curve for point in points):
            mine = [point for point in points if point.curve == curve]
            xs = [scale * getattr(point, key) for point in mine]
            axis.plot(xs, [point.error for point in mine], "o-", markersize=4, linewidth=1, label=curve)
        axis.set_xlabel(label)
        axis.grid(alpha=0.25, linewidth=0.5)
    axes[0].set_ylabel("relative distance to the plain run")
    axes[1].legend(fontsize="small", frameon=False)
    save(figure, file)


def _timed(run: Callable[[], Tensor]) -> tuple[Tensor, float]:
    begin = time.perf_counter()
    found = run()
    if found.is_cuda:
        torch.cuda.synchronize(found.device)
    return found, time.perf_counter() - begin

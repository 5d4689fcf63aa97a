"""Accuracy against parallelism, as a picture. Needs matplotlib, which the extra `bench` brings."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paradec.tools.evaluation.compare import Comparison
from paradec.tools.evaluation.metrics import wilson

Point = tuple[float, float, float, float]
"""x, y, and the ends of y's interval."""
LEGEND_ROWS = 18


@dataclass(frozen=True)
class Panel:
    """One pair of axes: a curve per sampler, and the baseline's point."""

    title: str
    curves: Mapping[str, Sequence[Point]]
    baseline: Point


def check_plot(file: str | os.PathLike[str]) -> None:
    """Raise unless a picture can be written there; worth asking before hours of work.

    Raises:
        ModuleNotFoundError: matplotlib is not installed. ValueError: not a PNG, PDF or SVG file in an existing folder.
    """
    path = Path(file)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"plot={str(file)!r} must end in .png, .pdf or .svg")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"cannot write the plot to {str(file)!r}: not a file in an existing folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            'plots need matplotlib; install paradec with its extra "bench", or pip install matplotlib'
        )


def frontier(comparison: Comparison, file: str | os.PathLike[str]) -> None:
    """Draw a comparison: right answers over tokens per forward, by whether prompts have one right answer or many.

    Raises:
        ModuleNotFoundError, ValueError: as `check_plot`.
    """
    groups = {
        "one right answer": comparison.group(many=False),
        "many right answers": comparison.group(many=True),
    }
    if not all(groups.values()):
        groups = {"all prompts": list(comparison.many)}
    panels = []
    for title, tasks in groups.items():
        curves: dict[str, list[Point]] = {}
        for result in comparison.results:
            low, high = wilson(*result.right(tasks))
            point = (result.tokens_per_forward, 100 * result.accuracy(tasks), 100 * low, 100 * high)
            curves.setdefault(result.configuration.sampler, []).append(point)
        panels.append(Panel(title, curves, curves[comparison.baseline.configuration.sampler][0]))
    draw(panels, file, "tokens per forward, all prompts", "right answers, %")


def draw(panels: Sequence[Panel], file: str | os.PathLike[str], x_label: str, y_label: str) -> None:
    """Draw panels side by side over a shared logarithmic x axis, one colour and marker per sampler.

    Raises:
        ModuleNotFoundError, ValueError: as `check_plot`.
    """
    check_plot(file)
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    columns = -(-(max(len(panel.curves) for panel in panels) + 1) // LEGEND_ROWS)
    figure = Figure(figsize=(4.6 * len(panels) + 0.4 + 1.8 * columns, 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for number, (sampler, points) in enumerate(panel.curves.items()):
            xs, ys, lows, highs = (list(column) for column in zip(*sorted(points), strict=True))
            spans = [[y - low for y, low in zip(ys, lows)], [high - y for y, high in zip(ys, highs)]]
            colour, marker = f"C{number % 10}", "osv^DPX*"[number % 8]
            style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1, "elinewidth": 0.5}
            axis.errorbar(
                xs, ys, spans, label=sampler, linestyle=("-", "--", ":")[number // 10 % 3], alpha=0.85, **style
            )
        axis.plot(*panel.baseline[:2], "o", markersize=12, markerfacecolor="none", color="black", label="baseline")
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set(title=panel.title, xlabel=x_label)
        axis.grid(alpha=0.25, linewidth=0.5)
    axes[0].set_ylabel(y_label)
    figure.legend(
        *axes[0].get_legend_handles_labels(),
        loc="outside right upper",
        fontsize="small",
        frameon=False,
        ncols=columns,
    )
    figure.savefig(file, dpi=100)

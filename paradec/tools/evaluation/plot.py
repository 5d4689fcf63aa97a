"""Plots of accuracy against parallelism. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paradec.tools.evaluation.compare import Comparison
from paradec.tools.evaluation.metrics import wilson
from paradec.tools.traces.payload import check_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float, float, float]
"""x, y, and the lower and upper end of y's interval."""
GREY = "#8c959f88"
MAX_COLOURED = 12
"""Maximum number of curves with a colour and a name; the other curves are grey."""
DARK = """<style>@media (prefers-color-scheme: dark) {
text, [style*="fill: #000000"] { fill: #e6edf3 !important } [style*="stroke: #000000"] { stroke: #e6edf3 !important }
}</style>"""
"""Style for SVG files: on dark pages, black becomes light."""


@dataclass(frozen=True)
class Panel:
    """One plot of a figure: a curve per sampler, and the baseline's point."""

    title: str
    curves: Mapping[str, Sequence[Point]]
    baseline: Point


def check_plot(file: str | os.PathLike[str]) -> None:
    """Check that a plot can be written to `file`. Raises ModuleNotFoundError: matplotlib is not installed; ValueError:
    not a PNG, PDF or SVG file in an existing folder."""
    path = Path(file)
    if path.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"plot={str(file)!r} must end in .png, .pdf or .svg")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"cannot write the plot to {str(file)!r}: it is not a file in an existing folder")
    check_matplotlib()


def frontier(comparison: Comparison, file: str | os.PathLike[str]) -> None:
    """Draw a comparison: right answers over tokens per forward. Prompts with one and with many right answers have
    separate panels. Raises the errors of `check_plot`."""
    groups = {"one right answer": comparison.group(many=False), "many right answers": comparison.group(many=True)}
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


def select_coloured(panels: Sequence[Panel]) -> list[str]:
    """Select at most `MAX_COLOURED` samplers whose curves are coloured, in the order of the panels. A sampler's rank is
    the number of points above and to the right of its best point, summed over the panels; low ranks are selected."""
    rank: dict[str, int] = {}
    for panel in panels:
        points = np.array([point[:2] for curve in panel.curves.values() for point in curve])
        for name, curve in panel.curves.items():
            num_better = min(int((points > point[:2]).all(1).sum()) for point in curve)
            rank[name] = rank.get(name, 0) + num_better
    best = sorted(rank, key=rank.__getitem__)[:MAX_COLOURED]
    return [name for name in rank if name in best]


def save(figure: Figure, file: str | os.PathLike[str]) -> None:
    """Write a figure. An SVG file has selectable text and a transparent background for light and dark pages."""
    if Path(file).suffix.lower() != ".svg":
        figure.savefig(file, dpi=100)
        return
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "paradec"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue().replace("<defs>", DARK + "<defs>", 1)
    Path(file).write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def draw(panels: Sequence[Panel], file: str | os.PathLike[str], x_label: str, y_label: str) -> None:
    """Draw panels side by side, with logarithmic x axes and a shared y axis. Each sampler of `select_coloured` has a
    colour and a marker; the others are grey. Raises the errors of `check_plot`."""
    check_plot(file)
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    coloured = select_coloured(panels)
    figure = Figure(figsize=(4.6 * len(panels) + 2.2, 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for sampler, points in panel.curves.items():
            if sampler not in coloured:
                axis.plot(
                    *zip(*sorted(point[:2] for point in points), strict=True), color=GREY, linewidth=0.7, zorder=1
                )
                continue
            style_index = coloured.index(sampler)
            xs, ys, lows, highs = (list(column) for column in zip(*sorted(points), strict=True))
            spans = [[y - low for y, low in zip(ys, lows)], [high - y for y, high in zip(ys, highs)]]
            colour, marker = f"C{style_index % 10}", "osv^DPX*"[style_index % 8]
            style = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 1, "elinewidth": 0.5}
            axis.errorbar(xs, ys, spans, label=sampler, linestyle=("-", "--")[style_index // 10], alpha=0.85, **style)
        if num_others := len(panel.curves) - len(coloured):
            axis.plot([], [], color=GREY, linewidth=0.7, label=f"{num_others} others")
        axis.plot(*panel.baseline[:2], "o", markersize=12, markerfacecolor="none", color="black", label="baseline")
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.set(title=panel.title, xlabel=x_label)
        axis.grid(alpha=0.25, linewidth=0.5)
    axes[0].set_ylabel(y_label)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small", frameon=False)
    save(figure, file)

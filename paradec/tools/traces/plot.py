"""Plots of traces: the step that decided each position, and each step's cost. Needs matplotlib (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paradec.core.checks import format_count
from paradec.core.trace import Trace
from paradec.tools.traces.payload import check_matplotlib, check_runs

COLOURS = {"full": "tab:blue", "forecast": "lavender", "prefix": "tab:brown"}


def figure(traces: Sequence[Trace], names: Sequence[str] = ()) -> Any:
    """Draw a matplotlib figure with one column per run. The upper plot shows the step that decided each position (or
    image token) of the first row; without a canvas, each step's kind. The lower plot shows each step's cost, in the
    trace's unit. Raises ModuleNotFoundError: matplotlib is not installed; and the errors of `check_runs`."""
    run_names = check_runs(traces, names)
    check_matplotlib()
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(1 + 4.5 * len(traces), 5.5), layout="constrained")
    axes = drawing.subplots(2, len(traces), squeeze=False, height_ratios=(2.2, 1))
    for upper, lower, trace, name in zip(axes[0], axes[1], traces, run_names, strict=True):
        upper.set_title(f"{name}: {format_count(max(trace.row_nfe, default=0), 'forward')}")
        _draw_positions(drawing, upper, trace)
        costs = [sum(step.forwarded) for step in trace.steps]
        colours = [COLOURS.get(step.kind, "tab:green") for step in trace.steps]
        lower.bar(range(1, len(costs) + 1), costs, color=colours, width=0.9)
        lower.set_xlabel("step")
        lower.set_ylabel(trace.unit)
    return drawing


def _draw_positions(figure: Any, axes: Any, trace: Trace) -> None:
    if trace.grid is not None and trace.cells:
        steps = np.full(len(trace.cells[0]), np.nan)
        cell_of_position = {position: cell for cell, position in enumerate(trace.cells[0])}
        for index, step in enumerate(trace.steps, start=1):
            for row, position, token, _ in step.commits:
                if row == 0 and position in cell_of_position:
                    steps[cell_of_position[position]] = np.nan if token == trace.mask_id else index
        image = axes.imshow(steps.reshape(trace.grid), cmap="viridis", vmin=1, vmax=max(1, len(trace.steps)))
        axes.set_xticks([])
        axes.set_yticks([])
        figure.colorbar(image, ax=axes, label="step")
        return
    if not trace.canvas:
        kinds = [step.kind for step in trace.steps]
        for kind in dict.fromkeys(kinds):
            step_indices = [index for index, step_kind in enumerate(kinds, start=1) if step_kind == kind]
            axes.vlines(step_indices, 0, 1, label=kind, color=COLOURS.get(kind, "tab:green"), linewidth=3)
        axes.set_yticks([])
        axes.set_xlabel("step")
        axes.legend()
        return
    commits = [
        (index, position, score, token == trace.mask_id)
        for index, step in enumerate(trace.steps, start=1)
        for row, position, token, score in step.commits
        if row == 0
    ]
    for index, step in enumerate(trace.steps, start=1):
        for start, stop in step.evaluated[0] if step.evaluated else ():
            axes.fill_betweenx((start - 0.5, stop - 0.5), index - 0.5, index + 0.5, color="tab:blue", alpha=0.12, lw=0)
    decided = [entry for entry in commits if not entry[3]]
    scores = np.array([entry[2] for entry in decided], float)
    scores[~np.isfinite(scores) | (np.abs(scores) > 1e30)] = np.nan
    step_indices, positions = [entry[0] for entry in decided], [entry[1] for entry in decided]
    points = axes.scatter(step_indices, positions, c=scores, cmap="viridis", s=14, plotnonfinite=True)
    if np.isfinite(scores).any():
        figure.colorbar(points, ax=axes, label=trace.score)
    if reverted := [entry for entry in commits if entry[3]]:
        axes.plot([entry[0] for entry in reverted], [entry[1] for entry in reverted], "rx", label="taken back")
        axes.legend()
    spans = trace.to_fill(0)
    if spans:
        axes.set_ylim(max(stop for _, stop in spans) - 0.5, min(start for start, _ in spans) - 0.5)
    axes.set_xlabel("step")
    axes.set_ylabel("position")

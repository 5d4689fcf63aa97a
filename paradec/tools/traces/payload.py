"""JSON data of a trace's HTML page.

The limits below keep a page to a few megabytes, even for long runs. The page lists the parts that were left out.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Any

from paradec.core.checks import short_repr
from paradec.core.trace import Trace, TraceStep

MAX_RUNS = 4
"""Maximum number of runs on a page."""
MAX_ROWS = 16
"""Maximum number of rows of a run; further rows are left out."""
MAX_WRITES = 120_000
"""Maximum number of committed tokens; further steps are merged into one step with the final result."""
MAX_STEPS = 10_000
"""Maximum number of steps; further steps are merged, too."""
MAX_MARKS = 60_000
"""Maximum number of evaluated spans, and of rejected drafts; further spans or drafts are left out."""
MAX_TEXT_LENGTH = 60
"""Maximum number of characters of a token."""
MAX_SETTING_LENGTH = 200
MAX_IMAGE_TEXT = 4_000_000
"""Maximum number of characters of all encoded images together; further images are left out."""


def check_matplotlib() -> None:
    """Raise ModuleNotFoundError if matplotlib, which draws plots, is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError('plots need matplotlib; install paradec with its extra "bench", or pip install it')


def check_runs(traces: Sequence[Trace], names: Sequence[str]) -> list[str]:
    """Check traces, and return the names of the runs: `names`, or by default their samplers. Raises TypeError: values
    that are not traces; ValueError: no or too many traces, or different numbers of names and traces."""
    for trace in traces:
        if not isinstance(trace, Trace):
            raise TypeError(f"beside={short_repr(trace)} must be a paradec.core.trace.Trace, or several")
    if not 1 <= len(traces) <= MAX_RUNS:
        raise ValueError(f"{len(traces)} traces: from 1 to {MAX_RUNS} can be side by side")
    if names and len(names) != len(traces):
        raise ValueError(f"names has {len(names)} entries for {len(traces)} traces; give one for each, or none")
    run_names = [str(name) for name in names]
    for trace in () if run_names else traces:
        cache = "" if trace.cache in ("", "none", "causal") else f", cache {trace.cache}"
        run_names.append((trace.settings.get("sampler") or trace.family or "trace") + cache)
    return run_names


def run_data(trace: Trace, name: str) -> dict[str, Any]:
    """Build the data of one run."""
    rows = range(min(trace.batch, MAX_ROWS))
    left_out: list[str] = []
    if trace.batch > MAX_ROWS:
        left_out.append(f"rows {MAX_ROWS + 1} to {trace.batch}")
    images: list[str | None] = []
    budget = MAX_IMAGE_TEXT
    for image in (trace.images or [])[: len(rows)]:
        fits = len(image) <= budget
        budget -= len(image) * fits
        images.append(image if fits else None)
    if None in images:
        left_out.append("some of the pictures")
    steps = _steps(trace, len(rows), budget, left_out)
    return {
        "name": name,
        "family": trace.family,
        "sampler": str(trace.settings.get("sampler", "")),
        "settings": {
            key: text if len(text) <= MAX_SETTING_LENGTH else text[: MAX_SETTING_LENGTH - 3] + "..."
            for key, text in ((key, str(value)) for key, value in trace.settings.items())
        },
        "cache": trace.cache,
        "score": trace.score,
        "unit": trace.unit,
        "mask": trace.mask_id,
        "texts": {str(token): text[:MAX_TEXT_LENGTH] for token, text in trace.texts.items()},
        "special": trace.special,
        "rules": [rule or str(trace.settings.get("sampler", "")) for rule in trace.rules],
        "rows": [_row(trace, row, images) for row in rows],
        "grid": trace.grid,
        "steps": steps,
        "left": left_out,
    }


def _row(trace: Trace, row: int, images: list[str | None]) -> dict[str, Any]:
    data: dict[str, Any] = {"filled": trace.to_fill(row)}
    if trace.canvas:
        data["start"] = [_token(token) for token in trace.canvas[row]]
    if trace.ends is not None:
        data["end"] = trace.ends[row]
    if trace.joined is not None and trace.joined[row]:
        data["joined"] = trace.joined[row]
    if trace.cells is not None:
        data["cells"] = trace.cells[row]
    if row < len(images) and images[row] is not None:
        data["image"] = images[row]
    return data


def _token(token: Any) -> int | None:
    """Return a token's id; None for continuous tokens."""
    return token if isinstance(token, int) else None


def _number(value: float) -> float | None:
    """Round a score to four digits; None for infinite, NaN or extreme scores, which some samplers return."""
    return float(f"{value:.4g}") if math.isfinite(value) and abs(value) < 1e30 else None


def _steps(trace: Trace, num_rows: int, image_budget: int, left_out: list[str]) -> list[dict[str, Any]]:
    """Build the data of the steps. image_budget: characters left for images. Lists omitted parts in `left_out`."""
    entries: list[dict[str, Any]] = []
    writes = spans = drafts = 0
    within_limits = (True, True, True)
    for index, step in enumerate(trace.steps):
        writes += len(step.commits)
        if writes > MAX_WRITES or index >= MAX_STEPS:
            entries.append(_merge_steps(trace, index, num_rows))
            left_out.append(f"steps {index + 1} to {len(trace.steps)} one by one: the last step here merges them")
            break
        spans += sum(len(row) for row in step.evaluated or ())
        drafts += len(step.rejected or ())
        image_budget -= sum(len(picture) for picture in step.pictures or ())
        within_limits = (spans <= MAX_MARKS, drafts <= MAX_MARKS, image_budget >= 0)
        entries.append(_step(step, num_rows, *within_limits))
    for fits, label in zip(within_limits, ("what was evaluated", "rejected drafts", "the latent"), strict=True):
        if not fits:
            left_out.append(f"{label}, in later steps")
    return entries


def _step(step: TraceStep, num_rows: int, has_spans: bool, has_drafts: bool, has_pictures: bool) -> dict[str, Any]:
    rules = step.rules or [-1] * len(step.commits)
    commits = zip(step.commits, rules, strict=True)
    data: dict[str, Any] = {
        "k": step.kind,
        "f": step.forwarded[:num_rows],
        "c": [
            [row, position, _token(token), _number(score), rule]
            for (row, position, token, score), rule in commits
            if row < num_rows
        ],
    }
    by_row: dict[str, Any] = {"n": step.nfe, "d": step.draft_nfe, "b": step.blocks, "o": step.starts}
    by_row |= {"e": step.evaluated if has_spans else None, "p": step.pictures or None if has_pictures else None}
    data |= {key: values[:num_rows] for key, values in by_row.items() if values is not None}
    if step.seconds is not None:
        data["s"] = _number(step.seconds)
    if step.rejected and has_drafts:
        data["r"] = [list(entry) for entry in step.rejected if entry[0] < num_rows]
    return data


def _merge_steps(trace: Trace, first: int, num_rows: int) -> dict[str, Any]:
    """Merge the steps from `first` on into one."""
    last_commit: dict[tuple[int, int], Any] = {}
    forwarded, nfe = [0] * num_rows, [0] * num_rows
    for step in trace.steps[first:]:
        for row, position, token, score in step.commits:
            if row < num_rows:
                last_commit[row, position] = [row, position, _token(token), _number(score), -1]
        for row, count in enumerate(step.forwarded[:num_rows]):
            forwarded[row] += count
            nfe[row] += step.nfe[row] if step.nfe is not None else int(count > 0)
    return {"k": "rest", "f": forwarded, "n": nfe, "c": [last_commit[cell] for cell in sorted(last_commit)]}

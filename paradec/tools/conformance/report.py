"""What a run came to: a table, the first differences, one line to quote, and all of it as data."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import paradec
from paradec.tools.conformance import distribution
from paradec.tools.conformance.archive import SCHEMA
from paradec.tools.conformance.compare import AGREE, DIFFER, FAILED, MISSING, STATUSES, UNDECIDED
from paradec.tools.conformance.run import Outcome, Run

WIDTH = 80
HEADS = {AGREE: "agree", DIFFER: "differ", UNDECIDED: "undecided", MISSING: "missing", FAILED: "failed"}


def text(run: Run) -> str:
    """For a terminal of 80 columns."""
    parts = ["\n".join(_table(run)), *_distributions(run), *_findings(run, DIFFER), *_findings(run, FAILED)]
    parts += [*_findings(run, UNDECIDED), *_findings(run, MISSING), "\n".join(_notes(run)), summary(run)]
    return "\n\n".join(part for part in parts if part)


def summary(run: Run) -> str:
    """The line that a result is quoted by."""
    counts = ", ".join(f"{run.count(status)} {status}" for status in STATUSES)
    narrowed = "".join(f", {name}={value}" for name, value in run.narrowed.items())
    stopped = ", interrupted" if run.interrupted else ""
    return (
        f"paradec verify, kit {run.version}, data {run.digest[:12]}: {run.target}: {counts} "
        f"(tolerance {run.tolerance:g}, {run.draws} draws{narrowed}{stopped})"
    )


def data(run: Run) -> dict[str, Any]:
    """As data that JSON can hold."""
    found = []
    for outcome in run.outcomes:
        entry = {name: value for name, value in asdict(outcome).items() if value not in (None, "", False)}
        if outcome.difference is not None:
            entry["difference"] = {
                name: getattr(outcome.difference, name) for name in ("row", "step", "position", "expected", "found")
            }
        if outcome.fit is not None:
            fit = asdict(outcome.fit)
            entry["fit"] = {name: None if _no_number(value) else value for name, value in fit.items()}
        found.append(entry)
    return {
        "schema": f"{SCHEMA}-result",
        "summary": summary(run),
        "passed": run.passed,
        "kit": run.version,
        "data": run.digest,
        "paradec": paradec.__version__,
        "target": run.target,
        "tolerance": run.tolerance,
        "draws": run.draws,
        "level": distribution.LEVEL,
        "narrowed": run.narrowed,
        "interrupted": run.interrupted,
        "counts": {status: run.count(status) for status in STATUSES},
        "cases": found,
    }


def _no_number(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _table(run: Run) -> Iterator[str]:
    kinds = list(dict.fromkeys((outcome.method, outcome.group) for outcome in run.outcomes))
    counts = Counter((outcome.method, outcome.group, outcome.status) for outcome in run.outcomes)
    wide = max([len("method"), *(len(method) for method, _ in kinds)])
    yield f"{'method':{wide}}  {'group':8}" + "".join(f"{HEADS[status]:>11}" for status in STATUSES)
    for method, group in sorted(kinds):
        numbers = (counts[method, group, status] for status in STATUSES)
        yield f"{method:{wide}}  {group:8}" + "".join(f"{number or '-':>11}" for number in numbers)


def _distributions(run: Run) -> Iterator[str]:
    """Of each method the distribution that fits worst."""
    found: dict[str, list[Outcome]] = {}
    for outcome in run.outcomes:
        if outcome.fit is not None:
            found.setdefault(outcome.method, []).append(outcome)
    if not found:
        return
    lines = ["laws"]
    for method, outcomes in sorted(found.items()):
        worst = min(outcomes, key=lambda outcome: outcome.corrected or 0.0)
        assert worst.fit is not None
        lines.append(
            f"{method}: smallest corrected p {worst.corrected:.2g} of {len(outcomes)} (chi-square "
            f"{worst.fit.chi_square:.1f} of {worst.fit.degrees}); {worst.fit.draws} draws find an error of "
            f"{max(outcome.fit.finds for outcome in outcomes if outcome.fit):.0%} in every probability "
            f"{distribution.POWER:.0%} of the time"
        )
    yield "\n".join(_wrapped(line) for line in lines)


def _findings(run: Run, status: str) -> Iterator[str]:
    """The first of each method and group, and how many there are."""
    found: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in run.outcomes:
        if outcome.status == status:
            found.setdefault((outcome.method, outcome.group), []).append(outcome)
    if not found:
        return
    lines = []
    for (method, group), outcomes in sorted(found.items()):
        first, more = outcomes[0], len(outcomes) - 1
        said = f"{method}, {group}: {first.case}: {described(first)}"
        lines.append(_wrapped(said + (f" ({more} more)" if more else "")))
    titles = {DIFFER: "first differences", UNDECIDED: "undecided: within rounding of a tie", FAILED: "failed"}
    yield "\n".join([titles.get(status, status), *lines])


def described(outcome: Outcome) -> str:
    """Where a case differs, and what it is due to as far as that can be seen."""
    where = []
    if outcome.difference is not None:
        place, parts = outcome.difference, [f"row {outcome.difference.row}"]
        parts += [] if place.step is None else [f"step {place.step}"]
        parts += [] if place.position is None else [f"position {place.position}"]
        where.append(", ".join(parts))
        if place.position is not None:
            where.append(f"{_token(place.found)}, expected {_token(place.expected)}")
            where.append("margin unknown" if outcome.margin is None else f"margin {outcome.margin:.3g}")
    return "; ".join([*where, *([outcome.message] if outcome.message else [])]) or "no reason given"


def _token(token: int | None) -> str:
    return "nothing written" if token is None else f"token {token}"


def _notes(run: Run) -> Iterator[str]:
    answers = sum(outcome.answers_only for outcome in run.outcomes)
    if answers:
        yield _wrapped(f"Of {answers} cases answers alone were compared: the target gave no steps.")
    if not run.outcomes or not run.count(AGREE):
        yield "Nothing agrees."


def _wrapped(line: str) -> str:
    return textwrap.fill(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)

"""What tuning found: the front with its intervals, what is chosen from it, as text, data and preset."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paradec.core.checks import check_int
from paradec.core.text_files import write_json
from paradec.request import Request
from paradec.tools.evaluation.metrics import bootstrap, wilson
from paradec.tools.tuning.halving import fronts
from paradec.tools.tuning.scoring import Measured
from paradec.tools.tuning.space import Candidate

SCHEMA = "paradec-tuning/1"
WIDTH = 80
MOST_POINTS = 8
"""Points of a front that are reported."""
FEW = 30
"""Prompts: fewer choose badly, and the report says so."""


@dataclass
class Point:
    """A setting that was measured on the whole choosing half."""

    candidate: Candidate
    request: Request
    choosing: Measured
    reported: Measured | None = None
    """On the other half; None where that was not measured."""
    by_hand: bool = False
    """Whether it is a sampler's defaults or one of its `sweep`, and not what a search proposed."""

    @property
    def name(self) -> str:
        return self.candidate.name


@dataclass
class Tuning:
    """Result of `paradec.tune`; `str()` of it is the command's report, at most 80 columns wide. Scores are shares from
    0 to 1. `reported` was measured on prompts that chose nothing."""

    setup: dict[str, Any]
    """What was tuned on what: all that must be equal for a study to go on."""
    costs: tuple[str, ...]
    """The objectives beside the score: "forwards", "seconds" or both."""
    tolerance: float
    """Points of score that `choose` gives away, on the choosing half."""
    points: list[Point]
    """The front and the chosen one, the cheapest first."""
    chosen: int | None
    """Which of them the preset is; None where there is none yet."""
    reference: Measured | None = None
    """One token per step on the reported half. It is no candidate."""
    default: Point | None = None
    """The baseline of `paradec compare`, `threshold` at its defaults, whether it is on the front or not."""
    hand: Point | None = None
    """What `choose` takes of the settings made by hand, whether it is on the front or not."""
    groups: list[str] = field(default_factory=list)
    """Of every reported prompt."""
    trials: dict[str, int] = field(default_factory=dict)
    """How many were measured whole, stopped early, refused before anything was decoded, or failed."""
    failures: list[str] = field(default_factory=list)
    """Why trials failed, each reason once."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Samplers and pairs that do not work on this model, and why."""
    complete: bool = False
    """Whether the search came to its end and the reported half was measured."""

    # ---- the preset ---------------------------------------------------------------------------------------------

    @property
    def preset(self) -> Request:
        """The chosen request, for `preset=`. Raises ValueError: nothing has been measured on all choosing prompts
        yet."""
        return self.request(None)

    def request(self, point: int | None) -> Request:
        """The request of a point of the front, counted from 1 as in the report; None is the chosen one. Raises
        ValueError: no such point, or none at all."""
        if self.chosen is None:
            raise ValueError("no setting was measured on all choosing prompts yet: give more trials or minutes")
        check_int("point", point, low=1, high=len(self.points), none=True)
        return self.points[self.chosen if point is None else point - 1].request

    def save(self, path: str | os.PathLike[str], point: int | None = None) -> None:
        """Write a point's request as a preset, for `generate(preset=)`, `--preset`, schedulers and servers. Raises as
        `request`; OSError."""
        self.request(point).save(Path(path))

    # ---- intervals ----------------------------------------------------------------------------------------------

    def score(self, measured: Measured) -> list[float]:
        """What a report calls a measurement's score, by prompt: truth where all of it is known, else the score."""
        truths = [value for value in measured.truth if value is not None]
        return truths if self.by_truth and len(truths) == len(measured) else measured.score

    @property
    def by_truth(self) -> bool:
        """Whether reported scores are truth: answers were known for every reported prompt, and no checker chose."""
        measured = next((point.reported for point in self.points if point.reported is not None), None)
        if measured is None or self.setup["score"] == "checker":
            return False
        return all(value is not None for value in measured.truth)

    def interval(self, values: Sequence[float]) -> tuple[float, float]:
        """95 % interval of the mean of one number per reported prompt: Wilson's where all are right or wrong and every
        prompt is a group of its own, else a percentile bootstrap over groups."""
        if self.exact:
            return wilson(int(sum(values)), len(values))
        return bootstrap(values, self.groups)

    @property
    def exact(self) -> bool:
        """Whether intervals of scores are Wilson's."""
        points = [*self.points, self.default, self.hand]
        measured = [point.reported for point in points if point is not None and point.reported is not None]
        values = {value for entry in measured for value in self.score(entry)}
        return values <= {0.0, 1.0} and len(set(self.groups)) == len(self.groups)

    def difference(self, first: Measured, second: Measured) -> tuple[float, float, float]:
        """Mean difference of two scores, prompt by prompt, and its 95 % interval: a paired bootstrap over groups."""
        values = [a - b for a, b in zip(self.score(first), self.score(second), strict=True)]
        return (sum(values) / len(values), *bootstrap(values, self.groups))

    def alike(self) -> list[list[int]]:
        """For every point the others, counted from 1, whose paired difference on the reported half has an interval with
        0."""

        def holds_zero(a: Measured | None, b: Measured | None) -> bool:
            if a is None or b is None:
                return False
            _, low, high = self.difference(a, b)
            return low <= 0 <= high

        numbered = list(enumerate(self.points, 1))
        return [[k for k, b in numbered if a is not b and holds_zero(a.reported, b.reported)] for a in self.points]

    # ---- as data ------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON holds it: what was measured, prompt by prompt, and what follows from it."""
        points, alike_of_point = [], self.alike()
        for index, point in enumerate(self.points):
            points.append(self._row(point) | {"chosen": index == self.chosen, "alike": alike_of_point[index]})
        names = ("complete", "setup", "tolerance", "trials", "failures", "left_out", "groups")
        data: dict[str, Any] = {"schema": SCHEMA, "costs": list(self.costs), "points": points}
        data |= {name: getattr(self, name) for name in names}
        data["reference"] = None if self.reference is None else self._summary(self.reference)
        for name, point_or_none in (("default", self.default), ("hand", self.hand)):
            data[name] = None if point_or_none is None else self._row(point_or_none)
        return data

    def _row(self, point: Point) -> dict[str, Any]:
        choosing = {name: point.choosing.mean(name) for name in ("score", "forwards", "positions", "seconds")}
        row = {"name": point.name, **point.candidate.to_data(), "preset": point.request.to_dict()}
        row |= {"by_hand": point.by_hand, "choosing": choosing}
        if point.reported is not None:
            row["reported"] = self._summary(point.reported)
            if self.reference is not None:
                row["versus_reference"] = list(self.difference(point.reported, self.reference))
        return row

    def _summary(self, measured: Measured) -> dict[str, Any]:
        values = self.score(measured)
        means = {name: measured.mean(name) for name in ("forwards", "positions", "seconds")}
        means |= {"score": sum(values) / len(values), "agreement_or_score": measured.mean("score")}
        return means | {"interval": list(self.interval(values)), "prompts": asdict(measured)}

    def to_json(self, file: str | os.PathLike[str]) -> None:
        """Write `to_dict`, whole or not at all."""
        write_json(file, self.to_dict())

    # ---- as text ------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        chose, reported = self.setup["prompts"]["choose"], self.setup["prompts"]["report"]
        counted = ", ".join(f"{count} {state}" for state, count in self.trials.items() if count)
        text = f"{self.setup['model']}: {chose} prompts chose, by {self.setup['score']}; {reported} others are reported"
        head = [*textwrap.wrap(text, WIDTH), *textwrap.wrap(f"trials: {counted or 'none'}", WIDTH), ""]
        table = self._table() if self.points else ["nothing was measured on all choosing prompts yet"]
        return "\n".join([*head, *table, "", *self._foot()])

    def _table(self) -> list[str]:
        measured = all(point.reported is not None for point in self.points)
        label = "right, %" if self.by_truth else "score, %"
        costs = [cost for cost in ("forwards", "seconds") if cost == "forwards" or cost in self.costs]
        head = f"  #  {label:>8}  {'95 %':^11}  {'- one per step (95 %)':^21}"
        lines = [head + "".join(f"  {cost:>8}" for cost in costs) + ("  alike" if measured else "")]
        alike_of_point = self.alike()
        if self.reference is not None:
            lines.append(self._line("", self.reference, costs, "", versus=False))
            lines += _under("one token per step (the reference, no candidate)")
        for extra, label in ((self.default, "the baseline"), (self.hand, "the best set by hand")):
            if extra is not None and extra.reported is not None:
                lines.append(self._line("", extra.reported, costs, ""))
                lines += _under(f"{extra.name} ({label})")
        for k, point in enumerate(self.points):
            mark = f"{'*' if k == self.chosen else ' '}{k + 1}"
            lines.append(
                self._line(mark, point.reported or point.choosing, costs, ",".join(map(str, alike_of_point[k])))
            )
            lines += _under(point.name)
        return lines

    def _line(self, mark: str, measured: Measured, costs: Sequence[str], alike: str, versus: bool = True) -> str:
        chosen_on = self.reference is None  # then there is nothing but the choosing half
        values = measured.score if chosen_on else self.score(measured)
        cells = f"{mark:>3}  {100 * sum(values) / len(values):8.1f}"
        if chosen_on:
            cells += " " * 36
        else:
            low, high = self.interval(values)
            ends = f"{100 * low:.1f}-{100 * high:.1f}"
            if not versus and self.setup["score"] == "agreement" and not self.by_truth:
                ends = "(itself)"
            paired = ""
            if versus and self.reference is not None:
                mean, below, above = (100 * value for value in self.difference(measured, self.reference))
                paired = f"{mean:+.1f} ({below:+.1f} to {above:+.1f})"
            cells += f"  {ends:>11}  {paired:>21}"
        for cost in costs:
            cells += f"  {measured.mean(cost):8.{3 if cost == 'seconds' else 2}f}"
        return (cells + (f"  {alike}" if alike else "")).rstrip()

    def _foot(self) -> list[str]:
        notes = []
        if self.chosen is not None:
            cost = self.costs[-1]
            bound = f"at most {self.tolerance:g} points"
            notes.append(
                f"*: chosen: of what was set by hand the fewest {cost} {bound} below the best, or what takes fewer "
                f"{cost} than that, scores no less, and is {bound} below by a paired interval."
            )
        if self.points and self.reference is None:
            notes.append("Scores are those of the prompts that chose, which flatter: the other half was not measured.")
        elif self.points:
            exact = "Wilson's" if self.exact else "bootstraps over prompts"
            notes.append(f"Intervals are {exact}. alike: points whose scores these prompts do not separate.")
        if self.setup["score"] == "agreement":
            reported = "truth" if self.by_truth and self.reference is not None else "agreement too"
            notes.append(f"Chosen by agreement with one token per step; what is reported is {reported}.")
        if self.points and (num_choosing := self.setup["prompts"]["choose"]) < FEW:
            notes.append(f"Only {num_choosing} prompts chose: what is right on these by chance looks best.")
        if not self.complete:
            notes.append("Incomplete: the same command with the same study goes on.")
        notes += [f"Failed: {reason}" for reason in self.failures[:3]]
        return [line for note in notes for line in textwrap.wrap(note, WIDTH)]


def _under(name: str) -> list[str]:
    return textwrap.wrap(name, WIDTH, initial_indent=" " * 5, subsequent_indent=" " * 7)


def pareto(points: Sequence[Point], costs: Sequence[str], loss: float) -> list[Point]:
    """The points that no other beats in score and costs, the cheapest first; of equals the first, and none more than
    `loss` (a share) below the best score."""
    if not points:
        return []
    best_score = max(point.choosing.mean("score") for point in points)
    good = [point for point in points if point.choosing.mean("score") >= best_score - loss]
    objectives = [point.choosing.point(costs) for point in good]
    by_objectives: dict[tuple[float, ...], Point] = {}
    for point, objective, level in zip(good, objectives, fronts(objectives), strict=True):
        if level == 0:
            by_objectives.setdefault(objective, point)
    return [by_objectives[objective] for objective in sorted(by_objectives, key=lambda place: place[1:])]


def choose(points: Sequence[Point], costs: Sequence[str], tolerance: float, groups: Sequence[str]) -> list[Point]:
    """Choose the preset, and the hand-made setting that it was measured against.

    The hand-made choice costs least (the last cost) among those at most `tolerance` (a share) below their best score.
    Of hundreds of searched settings the best score is also the luckiest one: a searched setting replaces the choice
    only if it costs less, scores no less, and the 95 % interval of the paired difference ends at most `tolerance`
    below. Without hand-made settings all points count.

    points: measured on the whole choosing half. groups: of every choosing prompt.
    Returns (chosen, hand-made), twice the same where nothing replaces it, or nothing without points."""
    if not points:
        return []

    def cost(point: Point) -> float:
        return point.choosing.mean(costs[-1])

    def score(point: Point) -> float:
        return point.choosing.mean("score")

    by_hand = [point for point in points if point.by_hand] or points
    # a share of right answers is no sum of tenths: 97.8 - 1 is 96.8, whatever the last bit says
    min_score = max(map(score, by_hand)) - tolerance - 1e-9
    hand = min(
        (point for point in by_hand if score(point) >= min_score), key=lambda point: (cost(point), -score(point))
    )
    for point in sorted(points, key=lambda point: (cost(point), -score(point))):
        if cost(point) >= cost(hand):
            break
        if score(point) >= score(hand) - 1e-9 and paired(point.choosing, hand.choosing, groups)[0] >= -tolerance - 1e-9:
            return [point, hand]
    return [hand, hand]


def surely_below(measured: Measured, others: Iterable[Measured], groups: Sequence[str], loss: float) -> bool:
    """Whether one of the others, on the same prompts, is better by more than `loss` (a share), whatever chance did:
    the 95 % interval of the paired difference says so."""
    mean_score = measured.mean("score")
    # most need no bootstrap
    return any(
        paired(measured, other, groups)[1] < -loss for other in others if mean_score < other.mean("score") - loss
    )


def paired(first: Measured, second: Measured, groups: Sequence[str]) -> tuple[float, float]:
    """95 % interval of the mean difference of two scores, prompt by prompt: a bootstrap over groups."""
    return bootstrap([a - b for a, b in zip(first.score, second.score, strict=True)], groups)


def thinned(
    points: Sequence[Point], chosen: Point | None, costs: Sequence[str], max_points: int = MOST_POINTS
) -> tuple[list[Point], int | None]:
    """Thin a front out, keeping the chosen, the cheapest and the best point: those closest to a neighbour's score go.
    Returns the front and the chosen point's index in it."""
    front = list(points)
    if chosen is not None and all(point is not chosen for point in front):
        front = sorted([*front, chosen], key=lambda point: point.choosing.point(costs)[1:])
    points, fixed = list(front), {id(chosen)}
    fixed |= {id(points[0]), id(max(points, key=lambda point: point.choosing.mean("score")))} if points else set()
    while len(front) > max(max_points, len(fixed)):
        scores = [point.choosing.mean("score") for point in front]
        gaps = {
            k: min(abs(scores[k] - scores[j]) for j in (k - 1, k + 1) if 0 <= j < len(front))
            for k in range(len(front))
            if id(front[k]) not in fixed
        }
        front.pop(min(gaps, key=lambda k: gaps[k]))
    chosen_index = None if chosen is None else next(k for k, point in enumerate(front) if point is chosen)
    return front, chosen_index

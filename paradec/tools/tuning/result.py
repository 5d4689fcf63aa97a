"""Result of tuning: the Pareto front with intervals, and the chosen setting; as a report, JSON data and presets."""

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
MAX_POINTS = 8
"""Maximum number of reported points of a front."""
FEW = 30
"""With fewer choosing prompts, the report warns that the choice may be due to chance."""


@dataclass
class Point:
    """A setting that was measured on all prompts of the choosing half."""

    candidate: Candidate
    request: Request
    choosing: Measured
    reported: Measured | None = None
    """Measurements on the reported half; None if not measured."""
    by_hand: bool = False
    """Whether the setting is hand-made (a sampler's default or an entry of its `sweep`), not proposed by Optuna."""

    @property
    def name(self) -> str:
        return self.candidate.name


@dataclass
class Tuning:
    """Result of `paradec.tune`. `str()` returns the report, at most 80 columns wide. Scores are shares from 0 to 1. The
    prompts of the reported half have no influence on the choice."""

    setup: dict[str, Any]
    """Model, prompts and search space. A study can be continued only with an equal setup."""
    costs: tuple[str, ...]
    """The objectives besides the score: "forwards", "seconds" or both."""
    tolerance: float
    """Points of score (of 100) by which the preset may be below the best hand-made setting on the choosing half."""
    points: list[Point]
    """The Pareto front and the chosen point, in the order of their costs."""
    chosen: int | None
    """Index in `points` of the chosen setting; None if nothing is chosen yet."""
    reference: Measured | None = None
    """Measurements of the reference (one token per step) on the reported half. The reference is never chosen."""
    default: Point | None = None
    """The baseline of `paradec compare`: `threshold` with its defaults. It may be outside of the front."""
    hand: Point | None = None
    """The best hand-made setting (see `choose`). It may be outside of the front."""
    groups: list[str] = field(default_factory=list)
    """Group of each reported prompt."""
    trials: dict[str, int] = field(default_factory=dict)
    """Number of trials by state: "measured", "stopped early", "refused" (before decoding), "failed", "under way"."""
    failures: list[str] = field(default_factory=list)
    """The reasons why trials failed, without duplicates."""
    left_out: dict[str, str] = field(default_factory=dict)
    """By sampler, or sampler and cache: the reason why it does not work on this model."""
    complete: bool = False
    """Whether the search has ended and the reported half is measured."""

    # ---- the preset ---------------------------------------------------------------------------------------------

    @property
    def preset(self) -> Request:
        """The chosen request, for `preset=`. Raises ValueError: no setting was measured on all choosing prompts yet."""
        return self.request(None)

    def request(self, point: int | None) -> Request:
        """Return the request of a point of the front, counted from 1 as in the report; None is the chosen point. Raises
        ValueError: an unknown point, or no points yet."""
        if self.chosen is None:
            raise ValueError("no setting was measured on all choosing prompts yet: give more trials or minutes")
        check_int("point", point, low=1, high=len(self.points), none=True)
        return self.points[self.chosen if point is None else point - 1].request

    def save(self, path: str | os.PathLike[str], point: int | None = None) -> None:
        """Write a point's request as a preset, for `generate(preset=)`, `--preset`, schedulers and servers. Raises
        the errors of `request`; OSError."""
        self.request(point).save(Path(path))

    # ---- intervals ----------------------------------------------------------------------------------------------

    def score(self, measured: Measured) -> list[float]:
        """Return the reported score of each prompt: by known answers if `by_truth`, else by the scorer."""
        truths = [value for value in measured.truth if value is not None]
        return truths if self.by_truth and len(truths) == len(measured) else measured.score

    @property
    def by_truth(self) -> bool:
        """Whether reported scores are by known answers: all reported prompts have an answer, and no checker is used."""
        measured = next((point.reported for point in self.points if point.reported is not None), None)
        if measured is None or self.setup["score"] == "checker":
            return False
        return all(value is not None for value in measured.truth)

    def interval(self, values: Sequence[float]) -> tuple[float, float]:
        """Compute the 95 % interval of the mean of `values`, one per reported prompt: Wilson's if `exact`, else by a
        percentile bootstrap over groups."""
        if self.exact:
            return wilson(int(sum(values)), len(values))
        return bootstrap(values, self.groups)

    @property
    def exact(self) -> bool:
        """Whether intervals of scores are Wilson's: all scores are 0 or 1, and each prompt is a separate group."""
        points = [*self.points, self.default, self.hand]
        measured = [point.reported for point in points if point is not None and point.reported is not None]
        values = {value for entry in measured for value in self.score(entry)}
        return values <= {0.0, 1.0} and len(set(self.groups)) == len(self.groups)

    def difference(self, first: Measured, second: Measured) -> tuple[float, float, float]:
        """Compute the mean difference of two scores over the prompts, and its 95 % interval (bootstrap over groups)."""
        values = [a - b for a, b in zip(self.score(first), self.score(second), strict=True)]
        return (sum(values) / len(values), *bootstrap(values, self.groups))

    def alike(self) -> list[list[int]]:
        """List for every point the numbers (from 1) of the points whose scores on the reported half do not differ
        significantly: the interval of the `difference` contains 0."""

        def contains_zero(a: Measured | None, b: Measured | None) -> bool:
            if a is None or b is None:
                return False
            _, low, high = self.difference(a, b)
            return low <= 0 <= high

        numbered = list(enumerate(self.points, 1))
        return [[k for k, b in numbered if a is not b and contains_zero(a.reported, b.reported)] for a in self.points]

    # ---- as data ------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data: the measurements of each prompt, means and intervals."""
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
        """Write `to_dict` to a file, atomically."""
        write_json(file, self.to_dict())

    # ---- as text ------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        chose, reported = self.setup["prompts"]["choose"], self.setup["prompts"]["report"]
        counted = ", ".join(f"{count} {state}" for state, count in self.trials.items() if count)
        text = f"{self.setup['model']}: chosen on {chose} prompts, by {self.setup['score']}; {reported} others reported"
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
        for extra, role in ((self.default, "the baseline"), (self.hand, "the best set by hand")):
            if extra is not None and extra.reported is not None:
                lines.append(self._line("", extra.reported, costs, ""))
                lines += _under(f"{extra.name} ({role})")
        for k, point in enumerate(self.points):
            mark = f"{'*' if k == self.chosen else ' '}{k + 1}"
            lines.append(
                self._line(mark, point.reported or point.choosing, costs, ",".join(map(str, alike_of_point[k])))
            )
            lines += _under(point.name)
        return lines

    def _line(self, mark: str, measured: Measured, costs: Sequence[str], alike: str, versus: bool = True) -> str:
        only_choosing = self.reference is None  # only the choosing half was measured
        values = measured.score if only_choosing else self.score(measured)
        cells = f"{mark:>3}  {100 * sum(values) / len(values):8.1f}"
        if only_choosing:
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
                f"*: chosen: the hand-made setting with the fewest {cost} among those {bound} below the best one; or a "
                f"setting with fewer {cost}, no lower score, and a paired interval that goes {bound} below it."
            )
        if self.points and self.reference is None:
            notes.append("Scores are of the choosing half, so they are optimistic: the other half was not measured.")
        elif self.points:
            exact = "Wilson's" if self.exact else "bootstraps over prompts"
            notes.append(f"Intervals are {exact}. alike: points whose scores do not differ significantly.")
        if self.setup["score"] == "agreement":
            reported = "truth" if self.by_truth and self.reference is not None else "agreement too"
            notes.append(f"Chosen by agreement with one token per step; the report shows {reported}.")
        if self.points and (num_choosing := self.setup["prompts"]["choose"]) < FEW:
            notes.append(f"Chosen on only {num_choosing} prompts: settings that are right by chance look best.")
        if not self.complete:
            notes.append("Incomplete: the same command with the same study continues.")
        notes += [f"Failed: {reason}" for reason in self.failures[:3]]
        return [line for note in notes for line in textwrap.wrap(note, WIDTH)]


def _under(name: str) -> list[str]:
    return textwrap.wrap(name, WIDTH, initial_indent=" " * 5, subsequent_indent=" " * 7)


def pareto(points: Sequence[Point], costs: Sequence[str], loss: float) -> list[Point]:
    """Select the Pareto-optimal points in score and costs, ordered by costs; of points with equal objectives, only the
    first. Points more than `loss` (a share) below the best score are left out."""
    if not points:
        return []
    best_score = max(point.choosing.mean("score") for point in points)
    good = [point for point in points if point.choosing.mean("score") >= best_score - loss]
    objectives = [point.choosing.point(costs) for point in good]
    by_objectives: dict[tuple[float, ...], Point] = {}
    for point, objective, level in zip(good, objectives, fronts(objectives), strict=True):
        if level == 0:
            by_objectives.setdefault(objective, point)
    return [by_objectives[objective] for objective in sorted(by_objectives, key=lambda objective: objective[1:])]


def choose(points: Sequence[Point], costs: Sequence[str], tolerance: float, groups: Sequence[str]) -> list[Point]:
    """Choose the preset, and the best hand-made setting.

    The best hand-made setting has the lowest cost (the last of `costs`) among hand-made settings at most `tolerance` (a
    share) below the best hand-made score. A searched setting is chosen instead only if it costs less, scores at least
    as much, and the lower end of the 95 % interval of the paired difference is at least -`tolerance`: the best score
    among hundreds of settings is partly luck. If no setting is hand-made, all points are treated as hand-made.

    points: settings that were measured on the choosing half. groups: the group of every choosing prompt.
    Returns [chosen, best hand-made], which may be the same point; [] if there are no points."""
    if not points:
        return []

    def cost(point: Point) -> float:
        return point.choosing.mean(costs[-1])

    def score(point: Point) -> float:
        return point.choosing.mean("score")

    by_hand = [point for point in points if point.by_hand] or points
    # 1e-9 allows for rounding: 96.8 must count as 97.8 - 1
    min_low = -tolerance - 1e-9
    min_score = max(map(score, by_hand)) + min_low

    hand = min(
        (point for point in by_hand if score(point) >= min_score), key=lambda point: (cost(point), -score(point))
    )
    for point in sorted(points, key=lambda point: (cost(point), -score(point))):
        if cost(point) >= cost(hand):
            break
        if score(point) >= score(hand) - 1e-9 and paired_bootstrap(point.choosing, hand.choosing, groups)[0] >= min_low:
            return [point, hand]
    return [hand, hand]


def surely_below(measured: Measured, others: Iterable[Measured], groups: Sequence[str], loss: float) -> bool:
    """Whether one of `others`, measured on the same prompts, is surely better by more than `loss` (a share). Surely
    means that the 95 % interval of the paired difference (`measured` minus the other) is below -`loss`."""
    mean_score = measured.mean("score")
    # comparing the means first avoids most bootstraps
    better = [other for other in others if mean_score < other.mean("score") - loss]
    return any(paired_bootstrap(measured, other, groups)[1] < -loss for other in better)


def paired_bootstrap(first: Measured, second: Measured, groups: Sequence[str]) -> tuple[float, float]:
    """Compute the 95 % interval of the mean difference of two settings' scores, by a paired bootstrap over groups."""
    return bootstrap([a - b for a, b in zip(first.score, second.score, strict=True)], groups)


def thin_front(
    points: Sequence[Point], chosen: Point | None, costs: Sequence[str], max_points: int = MAX_POINTS
) -> tuple[list[Point], int | None]:
    """Reduce a front to `max_points`. Points closest to a neighbour's score are removed first; the chosen, the cheapest
    and the best point stay. Returns the front, and the chosen point's index in it."""
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

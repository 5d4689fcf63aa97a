"""`tune_steps`: search the solver steps at which a diffusers pipeline evaluates its transformer."""

from __future__ import annotations

import math
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from paradec.core.checks import check_int, short_repr
from paradec.core.text_files import read_json, write_json
from paradec.integrations.diffusers.hooks.session import Session, find_transformers
from paradec.integrations.diffusers.hooks.transformer import read_guidance
from paradec.samplers.forecast.forecast import FeatureForecast, Forecast
from paradec.samplers.forecast.methods import sampler_from
from paradec.samplers.forecast.refresh import Every
from paradec.samplers.forecast.step_schedule import StepSchedule
from paradec.tools.tuning.run import fingerprint_checkpoint
from paradec.tools.tuning.step_search import Steps, even_starts, search
from paradec.tools.tuning.study import describe_difference

SCHEMA = "paradec-tune-steps/1"
# 97.5 % quantiles of Student's t for 1 to 16 degrees of freedom; above 16, the last is used
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)


@dataclass(frozen=True)
class StepTuning:
    """Result of `tune_steps`. Errors of final latents x are |x - full| / |full - noise|, from a full run's latents."""

    even: StepSchedule  # the evenly spread set of steps with the smallest error on the choosing seeds
    best: StepSchedule  # the set with the smallest error that the search found on the choosing seeds
    seeds: tuple[int, ...]  # choosing seeds
    report: tuple[int, ...]  # reporting seeds
    errors: dict[str, dict[str, list[float]]]  # by "even" or "best", and "choose" or "report": an error per seed
    num_sets: int  # number of evaluated sets
    sampler: Forecast  # the sampler with the chosen steps, for `accelerate(pipe, tuned.sampler)`

    @property
    def difference(self) -> tuple[float, float, float]:
        """Mean of the errors' differences best - even on the reporting seeds, and the ends of its 95 % interval."""
        return paired_interval(self.errors["best"]["report"], self.errors["even"]["report"])

    @property
    def chosen(self) -> str:
        """ "best" if the interval of `difference` is below 0, else "even"."""
        return "best" if self.difference[2] < 0 else "even"

    @property
    def schedule(self) -> StepSchedule:
        """The chosen steps."""
        return self.best if self.chosen == "best" else self.even

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the chosen steps, for `Forecast(when=path)`."""
        self.schedule.save(Path(path))

    def to_dict(self) -> dict[str, Any]:
        return {
            "even": self.even.to_dict(),
            "best": self.best.to_dict(),
            "seeds": list(self.seeds),
            "report": list(self.report),
            "errors": self.errors,
            "num_sets": self.num_sets,
            "difference": dict(zip(("mean", "low", "high"), self.difference, strict=True)),
            "chosen": self.chosen,
        }

    def __str__(self) -> str:
        lines = [f"{len(self.even.steps)} of {self.even.total} steps, {self.num_sets} sets evaluated"]
        for name, schedule in (("even", self.even), ("best", self.best)):
            choose, report = (statistics.fmean(self.errors[name][role]) for role in ("choose", "report"))
            steps = ", ".join(map(str, schedule.steps))
            lines.append(f"{name:5}  choosing {choose:.4f}  reporting {report:.4f}  steps {steps}")
        mean, low, high = self.difference
        lines.append(f"best - even on other seeds: {mean:+.4f} ({low:+.4f} to {high:+.4f}); chosen: {self.chosen}")
        return "\n".join(lines)


def tune_steps(
    pipe: Any,
    run: Callable[[int], Any],
    *,
    budget: int = 7,
    seeds: int | Sequence[int] = 8,
    report: int | Sequence[int] = 8,
    sampler: FeatureForecast | str | None = None,
    runs: int = 150,
    study: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: Callable[[str, float], None] | None = None,
) -> StepTuning:
    """Search the solver steps at which to evaluate a pipeline's transformer.

    >>> tuned = paradec.tune_steps(pipe, lambda seed: pipe("a fox", generator=...), budget=7)    # doctest: +SKIP
    >>> tuned.save("steps.json"); paradec.accelerate(pipe, tuned.sampler)                        # doctest: +SKIP

    The error of a set of steps is the distance of its final latents (the last `scheduler.step`) from those of full
    runs. The search anneals from the best evenly spread set, then climbs. Its best set is chosen if, on other seeds,
    the paired interval of the errors' differences best - even is below 0.

    Args:
        pipe: a diffusers pipeline; restored at the end.
        run: `run(seed)` runs the pipeline once with this seed, with the steps, guidance and size of later use.
        budget: number of steps of a run to evaluate.
        seeds, report: choosing and reporting seeds: lists, or numbers of seeds (choosing from 0, reporting after them).
        sampler: a sampler or its name, without a schedule or rule; by default `Forecast(where="output")`.
        runs: number of sets that the search evaluates; evenly spread sets, full runs and the report are not counted.
        study: a JSON file for the measurements. If it exists, the same call continues its search.
        seed: seed of the search.
        progress: function that is called after every set, with a description and the share of the work that is done.

    Raises:
        TypeError: an unsuitable `pipe` or `sampler`. ValueError, before any run: an argument out of its range.
            ValueError: a budget above the run's steps, runs of different lengths, or a study of other arguments.
    """
    method = Forecast(where="output") if sampler is None else sampler_from(sampler)
    choosing, reporting = _check(pipe, budget, seeds, report, method, runs, seed)
    settings: Forecast = method.to_forecast()
    sampler = replace(settings, when=None, where=settings.where or "module")
    with Session(pipe, replace(sampler, when=(0,))):  # raises for an unsuitable pipeline
        pass
    runner = _Runner(pipe, run, sampler, choosing, None if study is None else Path(study), progress)
    runner.max_errors = (runs + 3) * len(choosing)
    runner.make_full_runs((*choosing, *reporting), budget)
    even, best = search(runner.loss, even_starts(runner.total, budget), runner.total, runs, seed)
    errors = {
        name: {"choose": runner.errors(steps, choosing), "report": runner.errors(steps, reporting)}
        for name, steps in (("even", even), ("best", best))
    }
    num_sets = sum(any(seed in row for seed in choosing) for row in runner.error_table.values())
    result = StepTuning(runner.schedule(even), runner.schedule(best), choosing, reporting, errors, num_sets, sampler)
    return replace(result, sampler=replace(sampler, when=result.schedule))


def _check(
    pipe: Any, budget: Any, seeds: Any, report: Any, sampler: Any, runs: Any, seed: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the choosing and the reporting seeds. Raises the errors of `tune_steps` that need no run."""
    if not hasattr(pipe, "scheduler"):
        raise TypeError(f"pipe={short_repr(pipe)} must be a diffusers pipeline: its scheduler counts the steps")
    find_transformers(pipe)
    check_int("budget", budget, low=1)
    check_int("runs", runs, low=0)
    check_int("seed", seed, low=0)
    if not isinstance(sampler, FeatureForecast):
        raise TypeError(f"sampler={short_repr(sampler)} must be a paradec.Forecast or its name")
    if (when := sampler.to_forecast().when) not in (None, Every()):
        raise ValueError(f"sampler has when={short_repr(when)}, but tune_steps chooses the steps: leave when out")
    seed_sets: list[tuple[int, ...]] = []
    for name, value in (("seeds", seeds), ("report", report)):
        first_seed = max(seed_sets[0]) + 1 if seed_sets else 0
        if isinstance(value, Sequence) and not isinstance(value, str):
            for entry in value:
                check_int(name, entry, low=0)
        else:
            check_int(name, value, low=1)
            value = range(first_seed, first_seed + value)
        seed_sets.append(tuple(value))
    choosing, reporting = seed_sets
    if not choosing or len(reporting) < 2 or len(set(choosing + reporting)) < len(choosing + reporting):
        raise ValueError(
            f"seeds={short_repr(seeds)}, report={short_repr(report)}: give at least one choosing "
            "seed and two reporting seeds, all different"
        )
    return choosing, reporting


@dataclass
class _Runner:
    """Measurement of the errors of sets of steps, saved in a study."""

    pipe: Any
    run: Callable[[int], Any]
    sampler: Forecast
    choosing: tuple[int, ...]
    study: Path | None
    progress: Callable[[str, float], None] | None
    total: int = 0
    guidance: float | None = None
    max_errors: int = 1  # maximum number of errors that the search measures
    error_table: dict[Steps, dict[int, float]] = field(default_factory=dict)  # errors by set of steps and seed
    full_runs: dict[int, tuple[Tensor, float]] = field(default_factory=dict)  # by seed: latent, and |latent - noise|

    def make_full_runs(self, seeds: tuple[int, ...], budget: int) -> None:
        """Make the full runs, and read the study, whose setup must be equal to theirs."""
        saved = read_json(self.study) if self.study is not None and self.study.exists() else None
        if saved is not None and saved.get("schema") != SCHEMA:
            raise ValueError(f"study={str(self.study)!r} is not a study of {SCHEMA}")
        for seed in seeds:
            run = self._make_run(seed, None)
            self.total, self.guidance = run.total, run.guidance
            self.full_runs[seed] = run.latent, float((run.latent - run.noise).norm())
        if budget > self.total:
            raise ValueError(f"budget={budget} is more than the {self.total} steps of a run")
        if self.guidance is None:
            warnings.warn(
                "run: the guidance scale is unknown, so these steps will be accepted with any guidance; use "
                "them only with the guidance of this run",
                stacklevel=3,
            )
        self.setup: dict[str, Any] = {
            "total": self.total,
            "scheduler": type(self.pipe.scheduler).__name__,
            "guidance": self.guidance,
            "weights": fingerprint_checkpoint(SimpleNamespace(module=[*find_transformers(self.pipe).values()][0])),
            "sampler": self.sampler.to_dict(),
            "noise": [round(self.full_runs[seed][1], 3) for seed in self.choosing],
        }
        if saved is not None:
            if (difference := describe_difference(saved["setup"], self.setup)) is not None:
                raise ValueError(f"the study in {str(self.study)!r} was made with another {difference}")
            self.error_table = {tuple(steps): dict(row) for steps, row in saved["errors"]}

    def schedule(self, steps: Steps) -> StepSchedule:
        return StepSchedule(steps, self.total, self.setup["scheduler"], self.guidance, self.sampler.where)

    def loss(self, steps: Steps, bound: float) -> float:
        """Return the mean error over the choosing seeds; infinity as soon as it is known to be at least `bound`."""
        error_sum, count = 0.0, len(self.choosing)
        for seed in self.choosing:
            error_sum += self.error(steps, seed)
            if error_sum >= bound * count:
                break
        self._save(steps)
        return math.inf if error_sum >= bound * count else error_sum / count

    def errors(self, steps: Steps, seeds: Sequence[int]) -> list[float]:
        values = [self.error(steps, seed) for seed in seeds]
        self._save(steps)
        return values

    def error(self, steps: Steps, seed: int) -> float:
        row = self.error_table.setdefault(steps, {})
        if seed not in row:
            full, distance = self.full_runs[seed]
            row[seed] = float((self._make_run(seed, steps).latent - full).norm()) / max(distance, 1e-12)
        return row[seed]

    def _make_run(self, seed: int, steps: Steps | None) -> SimpleNamespace:
        """Run the pipeline once; evaluate all steps if `steps` is None. Return the run's initial `noise` and final
        `latent` (both float64), its number of steps `total`, and `guidance`."""
        scheduler, run = self.pipe.scheduler, SimpleNamespace(total=0)
        original_step = scheduler.step

        def step(*args: Any, **kwargs: Any) -> Any:
            output = original_step(*args, **kwargs)
            if not run.total:
                sample = kwargs["sample"] if "sample" in kwargs else args[2]
                run.noise, run.guidance = sample.detach().double().cpu(), read_guidance(self.pipe)
            run.latent = (output[0] if isinstance(output, tuple) else output.prev_sample).detach().double().cpu()
            run.total += 1
            return output

        scheduler.step = step
        try:
            with nullcontext() if steps is None else Session(self.pipe, replace(self.sampler, when=steps)):
                self.run(seed)
        finally:
            del scheduler.step
        if not run.total:
            raise ValueError("run: no step of the pipeline's scheduler was made")
        for fact, expected, actual in (("steps", self.total, run.total), ("guidance", self.guidance, run.guidance)):
            if self.full_runs and expected != actual:
                raise ValueError(f"run: one run has {expected} {fact}, another {actual}")
        return run

    def _save(self, steps: Steps) -> None:
        """Write the study and report the progress."""
        if self.study is not None:
            errors = [[list(steps), sorted(row.items())] for steps, row in self.error_table.items()]
            write_json(self.study, {"schema": SCHEMA, "setup": self.setup, "errors": errors}, indent=None)
        if self.progress is not None:
            num_done = sum(len(row) for row in self.error_table.values())
            self.progress(f"steps {', '.join(map(str, steps))}", min(1.0, num_done / self.max_errors))


def paired_interval(new: Sequence[float], old: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the differences new - old, and the ends of its 95 % interval (Student's t for pairs)."""
    differences = [a - b for a, b in zip(new, old, strict=True)]
    mean, count = statistics.fmean(differences), len(differences)
    half_width = T95[min(count - 1, len(T95)) - 1] * statistics.stdev(differences) / math.sqrt(count)
    return mean, mean - half_width, mean + half_width

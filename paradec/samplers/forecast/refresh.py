"""How far a run is, and when to evaluate instead of forecast: evenly, or as measured once a step by SpeCa and TeaCache.

`methods` has all values of `Forecast(when=...)` by name. Independent of how features are forecast (`bases`): every
rule goes with every basis.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from torch import Tensor

from paradec.core.checks import check_choice, check_int, check_number, check_order, shown
from paradec.core.text_files import parse_json, read_text
from paradec.samplers.forecast.targets import Modules

STYLES = ("reference", "diffusers")
FEW_STEPS = 8
"""Solver steps of a run up to which little can be skipped."""
WATCHED = ("modulated", "hidden", "latent")


@dataclass
class RunProgress:
    """How far a run is: what the rules read. Steps are counted from 0."""

    total: int | None = None
    """Solver steps of the run, where they are known."""
    index: int = 0
    """The step that comes next."""
    first: int = 0
    """Steps of the scheduler that the run leaves out at its start (image to image)."""
    last_full: int = -1
    """The latest step that was evaluated."""
    change: float = 0.0
    """Accumulated change of the watched input since then, this step's included (`AccumulatedChange`)."""
    error: float | None = None
    """Relative error of the latest forecast that was verified since then (`Verification`)."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a rule keeps from step to step (`EasyCache`)."""

    @property
    def forecasts(self) -> int:
        """Forecasts since the latest evaluation."""
        return self.index - self.last_full - 1

    def finished(self, full: bool) -> None:
        """Go on to the next step."""
        if full:
            self.last_full, self.change, self.error = self.index, 0.0, None
        self.index += 1


@dataclass(frozen=True)
class Rule:
    """Base of all values of `Forecast(when=...)`."""

    name: ClassVar[str] = ""
    measures: ClassVar[bool] = False
    """Whether `StepRule.changed` reads how the input changes."""
    from_input: ClassVar[bool] = False
    """Whether what is forecast is how the transformer's output differs from its input, with no other `where`."""

    @property
    def how(self) -> str:
        """How features are forecast unless the sampler says."""
        return "taylor"

    @property
    def where(self) -> str | Modules | None:
        """What is forecast unless the sampler says; None is "module"."""
        return None

    @property
    def guard(self) -> int:
        """The last step at which no differences are taken: TaylorSeer's public code waits for the last two of the first
        steps."""
        return int(getattr(self, "first_enhance", 1)) - 2

    def check_run(self, total: int | None, **run: Any) -> None:
        """Raise ValueError if the rule cannot serve a run of `total` solver steps (None: nobody tells) with this
        `scheduler` and `guidance`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `methods.rule_from`."""
        return {"when": self.name} | asdict(self)


@dataclass(frozen=True)
class StepRule(Rule):
    """Base of the rules that are asked once a step, by its first call. A subclass implements `is_full`."""

    def is_full(self, course: RunProgress) -> bool:
        """Whether the next step is evaluated; what `changed` says of it is in `course` already."""
        raise NotImplementedError

    def changed(self, course: RunProgress, before: Tensor, now: Tensor) -> None:
        """Note in the course how the watched input [B, ...] changed from one step to the next."""

    def evaluated(self, course: RunProgress, given: Tensor, output: Tensor) -> None:
        """Take note of the transformer's input and output, both [B, ...], in the call that decided for its step."""


@dataclass(frozen=True)
class Every(StepRule):
    """Evaluate evenly spread steps: the first `first_enhance`, and every `interval`-th from the last of them on.

    Args:
        interval: N: one evaluation, then N - 1 forecasts; 1 evaluates always. None is 5, or 2 in runs of at most 8
            steps, as models distilled to a few steps have them.
        first_enhance: solver steps at the start that are all evaluated.
        style: "reference" is the public code's schedule. "diffusers" is that of `TaylorSeerCacheConfig`: the second
            step after the first ones is evaluated too, every `interval`-th follows from there, and differences are
            taken from the first steps on.
        full_after: from this step on, every step is evaluated (`disable_cache_after_step`); None: no such step.
    """

    interval: int | None = None
    first_enhance: int = 1
    style: str = "reference"
    full_after: int | None = None

    name = "every"

    def __post_init__(self) -> None:
        check_int("interval", self.interval, low=1, none=True)
        check_int("first_enhance", self.first_enhance, low=1)
        check_choice("style", self.style, STYLES)
        check_int("full_after", self.full_after, low=1, none=True)

    @property
    def guard(self) -> int:
        return super().guard if self.style == "reference" else -1

    def is_full(self, course: RunProgress) -> bool:
        if course.index < self.first_enhance or (self.full_after is not None and course.index >= self.full_after):
            return True
        offset = 1 if self.style == "reference" else -1
        interval = self.interval or (2 if course.total is not None and course.total <= FEW_STEPS else 5)
        return (course.index - self.first_enhance + offset) % interval == 0


@dataclass(frozen=True)
class Verification(StepRule):
    """Refresh when a verified forecast was off: SpeCa (Liu et al., "SpeCa", ACM MM 2025, arXiv 2509.11628).

    The last transformer block is also evaluated at forecast steps, on the forecast features, and compared with its own
    forecast, which is what is used. If the mean relative error exceeds max(base_threshold decay_rate^(step / steps),
    0.1), the *next* step is evaluated; nothing is taken back. After an evaluation comes a forecast, also among the
    first steps. The public code asks for all four numbers; these defaults are ours.

    Args:
        base_threshold: relative error allowed at the first step.
        decay_rate: what it is multiplied with from the first step to the last.
        min_forecasts: forecasts after an evaluation before the error counts (`min_taylor_steps`).
        max_forecasts: forecasts after which the next step is evaluated anyhow (`max_taylor_steps`).
        first_enhance: solver steps at the start that are evaluated, but for the forecast after each evaluation.
    """

    base_threshold: float = 0.3
    decay_rate: float = 0.3
    min_forecasts: int = 1
    max_forecasts: int = 8
    first_enhance: int = 1

    name = "verification"

    def __post_init__(self) -> None:
        check_number("base_threshold", self.base_threshold, low=0, open_low=True)
        check_number("decay_rate", self.decay_rate, low=0, high=1, open_low=True)
        check_int("min_forecasts", self.min_forecasts, low=1)
        check_int("max_forecasts", self.max_forecasts)
        check_order("min_forecasts", self.min_forecasts, "max_forecasts", self.max_forecasts)
        check_int("first_enhance", self.first_enhance, low=1)

    def is_full(self, course: RunProgress) -> bool:
        if course.forecasts == 0:
            return False
        if course.index < self.first_enhance or course.forecasts >= self.max_forecasts:
            return True
        if course.error is None or course.forecasts < self.min_forecasts:
            return False
        done = (course.index - 1) / course.total if course.total else 0.0
        return course.error > max(self.base_threshold * self.decay_rate**done, 0.1)


@dataclass(frozen=True)
class AccumulatedChange(StepRule):
    """Refresh when the input has changed enough: TeaCache (Liu et al., CVPR 2025, arXiv 2411.19108).

    The relative L1 change of the watched input from step to step, rescaled by a polynomial, is summed since the last
    evaluation; at `threshold` the step is evaluated. The public code for FLUX is `watch="modulated", last_steps=1`,
    with `where="stack", how="reuse"`, and coefficients 498.651651, -283.781631, 55.8554382,
    -3.82021401, 0.264230861.

    Args:
        threshold: accumulated change that asks for an evaluation.
        coefficients: of the polynomial, highest power first. The paper fits them per model; (1, 0) is the change as
            it is.
        max_forecasts: forecasts in a row after which the next step is evaluated anyhow; None sets no bound.
        watch: "modulated", the input of the first block's attention (the paper's); "hidden", the hidden states before
            the first block; or "latent". None is the first thing that a forecast would replace: "modulated" with
            `where="module"`, "hidden" with "block" and "stack", "latent" with "output", where nothing else is known.
        last_steps: steps at the end of a run that are all evaluated (1 in the public code).
        first_enhance: solver steps at the start that are all evaluated.
    """

    threshold: float = 0.2
    coefficients: tuple[float, ...] = (1.0, 0.0)
    max_forecasts: int | None = None
    watch: str | None = None
    last_steps: int = 0
    first_enhance: int = 1

    name = "accumulated_change"
    measures = True

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, open_low=True)
        if not isinstance(self.coefficients, (list, tuple)) or not self.coefficients:
            raise ValueError(f"coefficients={shown(self.coefficients)} must be numbers, highest power first")
        for value in self.coefficients:
            check_number("coefficients", value)
        object.__setattr__(self, "coefficients", tuple(map(float, self.coefficients)))
        check_int("max_forecasts", self.max_forecasts, low=1, none=True)
        if self.watch is not None:
            check_choice("watch", self.watch, WATCHED)
        check_int("last_steps", self.last_steps, low=0)
        check_int("first_enhance", self.first_enhance, low=1)

    def check_run(self, total: int | None, **run: Any) -> None:
        if self.last_steps and total is None:
            raise ValueError(
                f"last_steps={self.last_steps} needs the number of steps, which a transformer by itself does not tell; "
                "attach to the pipeline, or leave last_steps out"
            )

    def changed(self, course: RunProgress, before: Tensor, now: Tensor) -> None:
        course.change += self.rescale(relative_change(now, before))

    def rescale(self, change: float) -> float:
        """The polynomial of one step's change."""
        total = 0.0
        for coefficient in self.coefficients:
            total = total * change + coefficient
        return total

    def is_full(self, course: RunProgress) -> bool:
        late = self.last_steps and course.index >= (course.total or 0) - self.last_steps
        if course.index < self.first_enhance or late:
            return True
        if self.max_forecasts is not None and course.forecasts >= self.max_forecasts:
            return True
        return course.change >= self.threshold

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for `methods.rule_from`."""
        return super().to_dict() | {"coefficients": list(self.coefficients)}


def read_schedule(path: str | os.PathLike[str]) -> Any:
    """What a file of steps holds, as data.

    Raises:
        ValueError: no such file, or no JSON.
    """
    try:
        return parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise ValueError(f"when={str(path)!r} is no schedule file: {error}") from None


def relative_change(new: Tensor, old: Tensor) -> float:
    """mean |new - old| / mean |old|. Waits for the device."""
    return float((new - old).abs().mean() / old.abs().mean().clamp(min=1e-12))


def relative_error(forecast: Tensor, real: Tensor) -> float:
    """mean(|forecast - real| / |real|), as SpeCa measures it. Waits for the device."""
    return float(((forecast - real).abs() / (real.abs() + 1e-10)).mean())

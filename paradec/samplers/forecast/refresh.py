"""Rules that decide whether a step is evaluated or forecast: base classes, and rules that decide once per step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from torch import Tensor, nn

from paradec.core.checks import check_at_most, check_choice, check_int, check_number, short_repr
from paradec.core.other_names import check_setting_names
from paradec.core.text_files import parse_json, read_text, write_json
from paradec.samplers.forecast.targets import Modules

FEW_STEPS = 8  # runs of at most this many solver steps skip fewer steps
WATCH_INPUTS = ("modulated", "hidden", "latent")


@dataclass
class RunProgress:
    """State that rules read and update. Each run has one; a `Probe` has one for each call of a step."""

    total: int | None = None  # number of steps
    index: int = 0  # current step
    first: int = 0  # the scheduler's step at which the run starts (image to image)
    nodes: tuple[int, ...] = ()  # the latest two evaluated steps, newest first
    num_forecasts: int = 0  # number of forecasts since the latest evaluation
    num_skips: int = 0  # number of forecasts in the run
    change: float = 0.0  # the change that the rule compares: the latest one, or a sum since the latest evaluation
    product: float = 1.0  # the rule's product since the latest evaluation; for `DiCache` the latest gain g
    error: float | None = None  # relative error of the latest forecast that `Verification` checked
    latent: Tensor | None = None  # the transformer's input in this call [B, ...]
    level: float = 0.0  # the noise level of this step, from `Rule.noise_levels`
    memory: dict[str, Any] = field(default_factory=dict)  # data that the rule keeps between steps

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self.memory.values() if isinstance(value, Tensor))

    def finish_step(self, full: bool) -> None:
        """Advance to the next step. full: whether this step was evaluated."""
        if full:
            self.nodes = (self.index, *self.nodes)[:2]
            self.num_forecasts, self.change, self.product, self.error = 0, 0.0, 1.0, None
        else:
            self.num_forecasts += 1
            self.num_skips += 1
        self.index += 1


def number(default: float | None, **bounds: Any) -> Any:
    """Declare a setting that `check_number` checks."""
    return field(default=default, metadata={"check": partial(check_number, **bounds)})


def integer(default: int | None, **bounds: Any) -> Any:
    """Declare a setting that `check_int` checks."""
    return field(default=default, metadata={"check": partial(check_int, **bounds)})


def choice(default: Any, *allowed: Any) -> Any:
    """Declare a setting that `check_choice` checks."""
    return field(default=default, metadata={"check": partial(check_choice, allowed=allowed)})


class Checked:
    """Base of dataclasses whose settings are declared by `number`, `integer` and `choice`."""

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        check_setting_names(cls.__name__, settings, [field.name for field in fields(cls)])  # type: ignore[arg-type]
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for setting in fields(self):  # type: ignore[arg-type]
            if "check" in setting.metadata:
                setting.metadata["check"](setting.name, getattr(self, setting.name))


@dataclass(frozen=True)
class Rule(Checked):
    """Base of all values of `Forecast(when=...)`. Raises ValueError for a setting out of its range."""

    name: ClassVar[str] = ""
    how: ClassVar[str] = "taylor"  # default of `Forecast.how`
    measures: ClassVar[bool] = False  # whether `StepRule.observe_change` is implemented
    from_input: ClassVar[bool] = False  # whether the difference of the transformer's output and input is forecast
    filters: ClassVar[bool] = False  # whether `RunProgress.latent` must have rows and columns
    evaluates_last: ClassVar[bool] = False  # whether the last step is evaluated; then the number of steps must be known

    @property
    def where(self) -> str | Modules | None:
        """Default of `Forecast.where`; None means "module"."""
        return None

    @property
    def last_warmup_step(self) -> int:
        """Last step that computes no differences (TaylorSeer's public code)."""
        return int(getattr(self, "first_enhance", 1)) - 2

    @property
    def why_total_needed(self) -> str:
        """First clause of the error for runs of an unknown number of steps; "" if the rule supports such runs."""
        is_unknown = self.evaluates_last and getattr(self, "num_inference_steps", None) is None
        return f"num_inference_steps=None: {type(self).__name__} evaluates the last step" if is_unknown else ""

    def check_run(self, total: int | None, scheduler: Any = None, guidance: float | None = None) -> list[str]:
        """Return the names of values that the rule checks but that are unknown (None).

        Raises ValueError if the rule does not support a run of `total` solver steps with this scheduler and guidance.
        """
        if total is None and (clause := self.why_total_needed):
            raise ValueError(f"{clause}, and without a pipeline the number of steps is unknown")
        return []

    def check_model(self, module: nn.Module) -> None:
        """Raise ValueError if the rule does not support this transformer."""

    def noise_levels(self, scheduler: Any) -> Sequence[float]:
        """Noise level of each step; () if not needed. Raises ValueError for an unsuitable or missing scheduler."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; `forecast.rule_from` is the inverse."""
        return {"when": self.name} | asdict(self)


@dataclass(frozen=True)
class StepRule(Rule):
    """Base of the rules that decide once per step, in its first call. A subclass implements `is_full`."""

    def is_full(self, progress: RunProgress) -> bool:
        """Whether the next step is evaluated. Called after `observe_change`."""
        raise NotImplementedError

    def observe_change(self, progress: RunProgress, before: Tensor, now: Tensor) -> None:
        """Record the change of the watched input [B, ...] from one step to the next."""

    def observe_output(self, progress: RunProgress, latent: Tensor, output: Tensor) -> None:
        """Record the transformer's input and output [B, ...] in the first call of an evaluated step."""


@dataclass(frozen=True)
class Probe(Rule):
    """Base of the rules that decide in every call: from the first blocks' output (the probe), the latent, or a table.

    The blocks after the probe (except the last `tail`) are evaluated, or forecast as one residual.
    """

    how = "reuse"
    where = "stack"
    head: ClassVar[int] = 0  # number of blocks in the probe, evaluated at every step
    tail: ClassVar[int] = 0  # number of last blocks that are evaluated at every step
    replaces_probe: ClassVar[bool] = False  # whether a forecast also replaces the probe's blocks

    def is_full(self, progress: RunProgress, first: Tensor, probe: Tensor, forced: bool) -> bool:
        """Whether this call evaluates the blocks after the probe; must be true if `forced` (no forecast is possible).

        first, probe: [B, ...] hidden states before the first block, and after the probe.
        """
        raise NotImplementedError

    def forecast_at(self, progress: RunProgress) -> float:
        """Step at which the basis forecasts the residual in this call."""
        return progress.index

    def observe_residual(self, progress: RunProgress, residual: Tensor) -> None:
        """Record the residual [B, ...] of evaluated blocks."""


@dataclass(frozen=True)
class Every(StepRule):
    """Evaluate the first `first_enhance` steps, then every `interval`-th step, counted from `first_enhance` - 1.

    Args:
        interval: N, for one evaluation and N - 1 forecasts in turn; None means 5, or 2 in runs of at most 8 steps.
        first_enhance: number of evaluated solver steps at the start.
        style: "reference" is TaylorSeer's public code. "diffusers" is `TaylorSeerCacheConfig`: the next evaluation
            after the first steps is step `first_enhance` + 1, and differences are computed from step 0 on.
        full_after: from this step on all steps are evaluated (`disable_cache_after_step`); None: no such step.
    """

    interval: int | None = integer(None, low=1, none=True)
    first_enhance: int = integer(1, low=1)
    style: str = choice("reference", "reference", "diffusers")
    full_after: int | None = integer(None, low=1, none=True)

    name = "every"

    @property
    def last_warmup_step(self) -> int:
        return super().last_warmup_step if self.style == "reference" else -1

    def is_full(self, progress: RunProgress) -> bool:
        if progress.index < self.first_enhance or (self.full_after is not None and progress.index >= self.full_after):
            return True
        offset = 1 if self.style == "reference" else -1
        interval = self.interval or (2 if progress.total is not None and progress.total <= FEW_STEPS else 5)
        return (progress.index - self.first_enhance + offset) % interval == 0


@dataclass(frozen=True)
class Verification(StepRule):
    """Evaluate after a forecast with a large error: SpeCa (Liu et al., ACM MM 2025, arXiv 2509.11628).

    In a step that is forecast, the last block is nevertheless evaluated, to measure the error of its forecast. If the
    mean relative error exceeds max(base_threshold decay_rate^(step / steps), 0.1), the *next* step is evaluated. The
    step after an evaluation is always forecast. The public code has no defaults.

    Args:
        base_threshold: relative error allowed at the first step.
        decay_rate: ratio of the last step's threshold to the first step's.
        min_forecasts: number of forecasts after an evaluation before the error is compared (`min_taylor_steps`).
        max_forecasts: limit of consecutive forecasts (`max_taylor_steps`).
        first_enhance: number of solver steps at the start in which evaluations and forecasts alternate.
    """

    base_threshold: float = number(0.3, low=0, open_low=True)
    decay_rate: float = number(0.3, low=0, high=1, open_low=True)
    min_forecasts: int = integer(1, low=1)
    max_forecasts: int = integer(8)
    first_enhance: int = integer(1, low=1)

    name = "verification"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_most("min_forecasts", self.min_forecasts, "max_forecasts", self.max_forecasts)

    def is_full(self, progress: RunProgress) -> bool:
        if progress.num_forecasts == 0:
            return False
        if progress.index < self.first_enhance or progress.num_forecasts >= self.max_forecasts:
            return True
        if progress.error is None or progress.num_forecasts < self.min_forecasts:
            return False
        fraction = (progress.index - 1) / progress.total if progress.total else 0.0
        return progress.error > max(self.base_threshold * self.decay_rate**fraction, 0.1)


@dataclass(frozen=True)
class AccumulatedChange(StepRule):
    """Evaluate when the input has changed enough: TeaCache (Liu et al., CVPR 2025, arXiv 2411.19108).

    Relative L1 changes of an input from step to step, rescaled by a polynomial, are summed since the last evaluation.

    Args:
        threshold: a step is evaluated if the sum reaches it.
        coefficients: of the polynomial (the paper fits them to each model), highest power first; (1, 0) is x.
        max_forecasts: limit of consecutive forecasts; None: no limit.
        watch: the input whose change is summed. "modulated": input of the first block's attention (as in the paper).
            "hidden": hidden states before the first block. "latent": the latent. None means "modulated" with
            `where="module"`, "hidden" with "block" and "stack", "latent" with "output".
        last_steps: number of evaluated steps at the end (1 in the public code).
        first_enhance: number of evaluated steps at the start.
    """

    threshold: float = number(0.2, low=0, open_low=True)
    coefficients: tuple[float, ...] = (1.0, 0.0)
    max_forecasts: int | None = integer(None, low=1, none=True)
    watch: str | None = None
    last_steps: int = integer(0, low=0)
    first_enhance: int = integer(1, low=1)

    name = "accumulated_change"
    measures = True

    def __post_init__(self) -> None:
        super().__post_init__()
        values = self.coefficients.tolist() if isinstance(self.coefficients, np.ndarray) else self.coefficients
        if not isinstance(values, (list, tuple)) or not values:
            raise ValueError(f"coefficients={short_repr(values)} must be a list of numbers, highest power first")
        for value in values:
            check_number("coefficients", value)
        object.__setattr__(self, "coefficients", tuple(map(float, values)))
        if self.watch is not None:
            check_choice("watch", self.watch, WATCH_INPUTS)

    @property
    def why_total_needed(self) -> str:
        return f"last_steps={self.last_steps} needs a pipeline" if self.last_steps else ""

    def observe_change(self, progress: RunProgress, before: Tensor, now: Tensor) -> None:
        progress.change += self.rescale(relative_change(now, before))

    def rescale(self, change: float) -> float:
        return float(np.polyval(self.coefficients, change))

    def is_full(self, progress: RunProgress) -> bool:
        is_at_end = self.last_steps and progress.index >= (progress.total or 0) - self.last_steps
        is_limit = self.max_forecasts is not None and progress.num_forecasts >= self.max_forecasts
        return bool(progress.index < self.first_enhance or is_at_end or is_limit or progress.change >= self.threshold)


class SavedAsJson:
    """Base of values with `to_dict` and `from_dict` that are saved as JSON."""

    setting: ClassVar[str] = "when"
    content: ClassVar[str] = "schedule file"
    to_dict: Any
    from_dict: Any

    def save(self, path: str | Path) -> None:
        """Write a JSON file."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Any:
        """Read a file written by `save`. Raises ValueError for any other file."""
        return cls.from_dict(cls.read(path))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Any:
        """Read the data of a file. Raises ValueError if it is missing or not JSON."""
        try:
            return parse_json(read_text(path))
        except (OSError, ValueError) as error:
            raise ValueError(f"{cls.setting}={str(path)!r} is not a {cls.content}: {error}") from None


def relative_change(new: Tensor, old: Tensor) -> float:
    """Compute mean |new - old| / mean |old|. Synchronises with the device."""
    return float((new - old).abs().mean() / old.abs().mean().clamp(min=1e-12))


def relative_error(forecast: Tensor, real: Tensor) -> float:
    """Compute SpeCa's mean(|forecast - real| / |real|). Synchronises with the device."""
    return float(((forecast - real).abs() / (real.abs() + 1e-10)).mean())

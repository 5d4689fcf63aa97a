"""Report of a session of `paradec.accelerate`."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import Any

import torch
from torch import Tensor

from paradec.core.other_names import METHOD_OF_RULE
from paradec.core.thumbnails import images_to_uris
from paradec.core.trace import Notes, Trace, get_drawing
from paradec.samplers.forecast.forecast import Forecast
from paradec.samplers.forecast.refresh import Every
from paradec.samplers.forecast.step_schedule import StepMask, StepSchedule
from paradec.samplers.forecast.targets import Modules


@dataclass
class CallRecord:
    """One call of a transformer."""

    transformer: str
    step: int
    branch: str  # the open `cache_context` ("cond") or "call", and the number of the call in the step
    kind: str  # "full" (all hooked modules were evaluated), "forecast" (none was), or "mixed"
    evaluated: int  # number of hooked modules that were evaluated
    forecast: int  # number of hooked modules that were forecast or skipped
    bytes: int  # size of this transformer's histories after the call
    start: Any = field(repr=False)  # from `read_clock`
    end: Any = field(repr=False)

    @property
    def seconds(self) -> float:
        """Duration of the call. On a GPU, this property waits for the end of the call."""
        if isinstance(self.start, float):
            return self.end - self.start
        self.end.synchronize()
        return self.start.elapsed_time(self.end) / 1000


@dataclass(repr=False)
class Report:
    """Report of the latest run of a session."""

    settings: dict[str, Forecast]  # by transformer
    modules: dict[str, list[str]]  # by transformer, the names of the hooked modules
    coverage: dict[str, float]  # by transformer, the share of its parameters that a forecast step does not use
    runs: int  # number of runs so far
    calls: list[CallRecord]
    notes: list[str]  # automatic decisions, and the number of foreign calls
    changes: list[float] = field(default_factory=list)  # measured values that the rule compared with its threshold

    @property
    def full_steps(self) -> list[int]:
        """Steps with a full call of a transformer."""
        return sorted({call.step for call in self.calls if call.kind == "full"})

    @property
    def evaluated_share(self) -> float:
        """Share of the calls that were evaluated, in part or in full; 1 if there are no calls."""
        return sum(call.kind != "forecast" for call in self.calls) / len(self.calls) if self.calls else 1.0

    @property
    def speedup(self) -> float | None:
        """Speed-up over a run with full calls only, estimated by the median time of each transformer's full
        calls; None without calls, or if a called transformer has no full calls."""
        full_seconds: dict[str, list[float]] = {}
        for call in self.calls:
            if call.kind == "full":
                full_seconds.setdefault(call.transformer, []).append(call.seconds)
        if not self.calls or any(call.transformer not in full_seconds for call in self.calls):
            return None
        total = sum(call.seconds for call in self.calls)
        return sum(median(full_seconds[call.transformer]) for call in self.calls) / total if total else None

    @property
    def why_nothing_skipped(self) -> str | None:
        """The reason why all calls were full, in one line; None if any call was not full."""
        if any(call.kind != "full" for call in self.calls):
            return None
        steps = len({call.step for call in self.calls})
        rule = next(iter(self.settings.values())).rule
        if not self.calls:
            why = "no transformer was called in a run, which begins at the scheduler's set_timesteps"
        elif steps == 1 and len(self.calls) > 2:
            why = "steps could not be counted: no calls of the scheduler's step, and no changes of the timestep"
        elif isinstance(rule, (StepSchedule, StepMask, Every)):
            why = f"the schedule evaluates each of these {steps} steps"
        else:
            name = METHOD_OF_RULE.get(rule.name, rule.name)
            why = f"{name} requested an evaluation at each of {steps} steps; a larger threshold skips some"
            if self.changes:
                smallest = min(self.changes)
                why += f": the smallest change was {smallest:.3g}, so a threshold of {1.01 * smallest:.3g} would"
        return f"nothing was skipped: {why}"

    @property
    def bytes(self) -> int:
        """Largest size of the histories, summed over the transformers."""
        names = {call.transformer for call in self.calls}
        return sum(max(call.bytes for call in self.calls if call.transformer == name) for name in names)

    @property
    def summary(self) -> str:
        """The text above the table of calls."""
        lines = []
        for name, settings in self.settings.items():
            where = "named modules" if isinstance(settings.where, Modules) else settings.where
            lines.append(
                f"{name}: where={where}, how={settings.forecaster.name}, order {settings.forecaster.order}; "
                f"{len(self.modules[name])} modules hooked, "
                f"{self.coverage[name]:.0%} of the parameters unused at a forecast step"
            )
        if self.speedup is not None and self.why_nothing_skipped is None:
            lines.append(f"the transformer was {self.speedup:.2f} times as fast as with only full calls (by medians)")
        return "\n".join([*lines, *self.notes, *filter(None, [self.why_nothing_skipped]), self.short])

    @property
    def short(self) -> str:
        """The run in one line."""
        kinds = [call.kind for call in self.calls]
        return (
            f"run {self.runs}: {len(kinds)} calls, {kinds.count('full')} full, {kinds.count('forecast')} forecast, "
            f"{kinds.count('mixed')} mixed; {self.evaluated_share:.0%} evaluated, histories took "
            f"{self.bytes / 1e6:.1f} MB at most"
        )

    def trace(self, images: Any = None) -> Trace:
        """Make a trace of the run. images: PIL images, or a tensor [B, C, H, W] in [0, 1], to show in the trace."""
        settings = next(iter(self.settings.values())).to_dict() if self.settings else {}
        trace = Trace([], settings, family="forecast", unit="modules")
        for _, group in groupby(self.calls, lambda call: call.step):
            calls = list(group)
            kinds = {call.kind for call in calls}
            notes = Notes([sum(call.kind != "forecast" for call in calls)])
            trace.add(
                [],
                [sum(call.evaluated for call in calls)],
                kinds.pop() if len(kinds) == 1 else "mixed",
                notes,
                sum(call.seconds for call in calls),
            )
        trace.images = None if images is None else images_to_uris(images)
        return trace

    def _repr_html_(self) -> str:
        return str(get_drawing("report")(self))

    def __str__(self) -> str:
        lines = [self.summary]
        lines.append(f"{'step':>4} {'branch':<10} {'kind':<9} {'evaluated':>9} {'forecast':>8} {'MB':>9} {'ms':>9}")
        for call in self.calls:
            lines.append(
                f"{call.step:>4} {call.branch:<10} {call.kind:<9} {call.evaluated:>9} {call.forecast:>8} "
                f"{call.bytes / 1e6:>9.2f} {call.seconds * 1000:>9.2f}"
            )
        return "\n".join(lines)


def read_clock(inputs: list[Any]) -> Any:
    """Return the time in seconds. If an input is on a GPU, record and return an event instead, without waiting."""
    if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in inputs):
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

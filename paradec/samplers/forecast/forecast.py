"""`Forecast`: at some solver steps a model is evaluated, at the others what it would have computed is forecast.

When, how and where are three values; methods of the literature are combinations of them (`methods`, `taylorseer`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.core.checks import LARGEST_INT64, check_int, shown
from paradec.core.memory import MemorySpec
from paradec.samplers.forecast.bac import BlockSchedule
from paradec.samplers.forecast.base import ForecastSampler, ForecastState
from paradec.samplers.forecast.bases import BASES, Basis, History, basis_from
from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Probe, Rule, RunProgress, StepRule, Verification
from paradec.samplers.forecast.rules import rule_from
from paradec.samplers.forecast.targets import Modules, where_from


@dataclass(frozen=True)
class FeatureForecast(ForecastSampler):
    """Base of the samplers that forecast features by a rule and a basis. A subclass implements `general`."""

    def general(self) -> Forecast:
        """The sampler as a `Forecast`."""
        raise NotImplementedError

    @cached_property
    def rule(self) -> Rule:
        """When to evaluate."""
        return rule_from(self.general().when) or Every()

    @cached_property
    def forecaster(self) -> Basis:
        """How to forecast."""
        settings = self.general()
        basis = basis_from(settings.how) or BASES[self.rule.how]()
        return replace(basis, guard=self.rule.guard, order=basis.order if settings.order is None else settings.order)

    # ---- when and how -----------------------------------------------------------------------------------------------

    def evaluates(self, course: RunProgress) -> bool:
        # a `Probe` decides inside the call (`paradec.integrations.diffusers.hooks.stack`)
        assert isinstance(self.rule, StepRule)
        return not course.nodes or self.rule.is_full(course)

    def watch(self, course: RunProgress, before: Tensor, now: Tensor) -> None:
        if isinstance(self.rule, StepRule):
            self.rule.changed(course, before, now)

    # ---- paradec's own loop -----------------------------------------------------------------------------------------

    def start(self, model: Any, latent: Tensor, **request: Any) -> ForecastState:
        """As `ForecastSampler.start`; refuses settings that need the inside of a transformer."""
        rule, settings = self.rule, self.general()
        within = isinstance(rule, (Verification, Probe, BlockSchedule)) or rule.from_input
        within = within or (isinstance(rule, AccumulatedChange) and rule.watch not in (None, "latent"))
        where = settings.where or rule.where
        inside = {"max_memory": settings.max_memory, "when": rule if within else None}
        for setting, value in {**inside, "where": None if where == "output" else where}.items():
            if value is not None:
                raise ValueError(
                    f"{setting}={shown(value)} needs a pipeline, or the inside of the transformer: attach the sampler "
                    "with paradec.accelerate; this loop forecasts the whole output"
                )
        state = super().start(model, latent, **request)
        rule.check_run(state.total, state.scheduler, state.guidance_scale)
        return state

    def memory(self) -> Mapping[str, MemorySpec]:
        return {"history": MemorySpec((self.forecaster.slots, "latent"), self.forecaster.dtype, reset="sequence")}

    def remember(
        self, state: ForecastState, output: Tensor, full: bool
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
        if not full and not self.forecaster.rolls:
            return {}, {}
        history = _history(state)
        if full:
            history = self.forecaster.update(history, output, state.index)
        else:
            assert history is not None  # a forecast follows an evaluation
            history = self.forecaster.roll(history, output)
        tensors = torch.stack(history.tensors, dim=1)
        missing = state.memory["history"].shape[1] - len(history.tensors)
        tensors = pad(tensors, (0, 0) * (tensors.ndim - 2) + (0, missing))
        return {"history": tensors}, {"count": len(history.tensors), "nodes": history.nodes, "dtype": history.dtype}

    def forecast(self, state: ForecastState) -> Tensor:
        history = _history(state)
        assert history is not None
        output = self.forecaster.forecast(history, state.index)
        # callers may write into a proposal, not into the memory
        return output.clone() if output is history.tensors[0] else output


@dataclass(frozen=True)
class Forecast(FeatureForecast):
    """Evaluate some solver steps, and forecast the others from features that were evaluated.

    In a diffusers pipeline (`paradec.accelerate`) features inside the transformer are forecast. In paradec's own loop
    the whole output is, under guidance the guided one.

    Args:
        when: when to evaluate. A schedule: `Every(interval, ...)`, the default; a list of steps with step 0; the name
            of one of cache-dit's step masks, "slow", "medium", "fast" or "ultra"; or a `StepSchedule`
            (`paradec.tune_steps`) or `BlockSchedule` (BAC's `calibrate`), or its file. Or a rule that measures:
            `Verification`, `AccumulatedChange`, `EasyCache`, and, deciding in every call, `FirstBlock`, `DBCache`,
            `MagCache`, `DiCache`, `SeaCache`. All also by name, with settings: "every(interval=6, first_enhance=3)".
        how: how features are forecast: "taylor", "newton", "hermite", "reuse", "foca" or "dmd", with settings in
            parentheses, or such an object of `bases`. None is taylor, or what `when` was published with.
        where: what is forecast in a pipeline: "module" (attention and feed-forward outputs before their gates),
            "block" (each block's residual), "stack" (what all blocks add, as one), "output" (the transformer is skipped
            as a whole; least memory), or a list of patterns of modules (`targets.Modules`). None is "module" there, or
            what `when` needs; paradec's own loop knows the output only.
        order: replaces the order of `how`; 0 reuses the last feature.
        max_memory: bytes that the histories may take in a pipeline, as a number or "2GB". If the requested order or
            place does not fit, a smaller one is used, and the session reports it.

    Raises:
        ValueError: an invalid value, or two that do not go together.
    """

    when: Rule | Sequence[int] | str | None = None
    how: Basis | str | None = None
    where: str | Modules | None = None
    order: int | None = None
    max_memory: int | None = None

    name = "forecast"
    summary = "some solver steps skip the transformer; what it would have computed is forecast"

    def __post_init__(self) -> None:
        for name, read in (("when", rule_from), ("how", basis_from), ("where", where_from), ("max_memory", read_bytes)):
            object.__setattr__(self, name, read(getattr(self, name)))
        check_int("order", self.order, low=0, none=True)
        rule, where = self.rule, self.where
        if rule.where is not None and where not in (None, rule.where):
            raise ValueError(f"when={rule.name!r} goes with where={rule.where!r} alone; leave where={shown(where)} out")
        watch = rule.watch if isinstance(rule, AccumulatedChange) else None
        if watch in ("modulated", "hidden") and where == "output":
            raise ValueError(f"watch={watch!r} is inside the transformer, which where='output' skips; use 'latent'")
        if watch is not None and isinstance(where, Modules):
            raise ValueError(f"watch={watch!r} does not go with modules by patterns; leave one out")

    def general(self) -> Forecast:
        return self


def _history(state: ForecastState) -> History | None:
    """The history in a state's memory."""
    if not state.notes:
        return None
    tensors = state.memory["history"].unbind(1)[: state.notes["count"]]
    return History(tensors, state.notes["nodes"], state.notes["dtype"])


def read_bytes(value: Any) -> int | None:
    """A number of bytes from an int or a text as "2GB" (10^9) or "512MiB" (2^20)."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|)\s*", value, re.IGNORECASE)
        if match is None:
            raise ValueError(f'max_memory={value!r} must be bytes, as a number or as text: "2GB", "512MiB"')
        value = int(float(match[1]) * units[match[2].upper()])
    check_int("max_memory", value, low=1, high=LARGEST_INT64, none=True)
    return value

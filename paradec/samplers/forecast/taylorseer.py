"""TaylorSeer: a diffusion transformer's features between full evaluations are forecast by a Taylor expansion.

Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", arXiv 2503.06923, section 3.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.core.checks import LARGEST_INT64, check_int, shown
from paradec.core.memory import MemorySpec
from paradec.samplers.forecast.bac import BlockSchedule
from paradec.samplers.forecast.base import ForecastSampler, ForecastState
from paradec.samplers.forecast.bases import BASES, Basis, History, basis_from
from paradec.samplers.forecast.probes import Probe
from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Rule, RunProgress, StepRule, Verification
from paradec.samplers.forecast.rules import refresh_from
from paradec.samplers.forecast.targets import Modules, target_from

LITE = {"basis": "taylor(order=2)", "target": "output"}


@dataclass(frozen=True)
class TaylorSeer(ForecastSampler):
    """Evaluate some solver steps, every fifth by default, and forecast the others from features that were evaluated.

    Three values say when, how and what; `interval` and `order` are short for the paper's two numbers. In a diffusers
    pipeline (`paradec.accelerate`) features inside the transformer are forecast. In paradec's own loop the whole output
    is, under guidance the guided one. By default evaluations are spread evenly, as in the public code for Wan and
    HunyuanVideo. In every measurement with equally many evaluations this came nearest to the full run
    (docs/diffusion.md). Preset "paper" (or "flux") is the public code's schedule for FLUX.1-dev; other presets have
    those of other models ("lite_*" are set for the whole output).

    Args:
        refresh: when to evaluate. A schedule: `Every(interval, ...)`, the default; the steps themselves, as a list with
            step 0; the name of one of cache-dit's step masks, "slow", "medium", "fast" or "ultra"; or what
            `paradec.tune_steps` (`StepSchedule`) or BAC's `calibrate` found (`BlockSchedule`: steps for every module),
            or the file of it. Or a rule that measures: `Verification`, `AccumulatedChange`, `EasyCache`, and, deciding
            in every call, `FirstBlock`, `DBCache`, `MagCache`, `DiCache`, `SeaCache`. All also by name, with settings:
            "every(interval=6, first_enhance=3)".
        basis: how features are forecast: "taylor" (the paper's), "newton", "hermite", "reuse", "foca" or "dmd", with
            settings in parentheses, or such an object of `bases`. None is taylor, or what `refresh` was published with.
        target: what is forecast in a pipeline: "module" (the paper's: attention and feed-forward outputs before their
            gates), "block" (each block's residual), "stack" (what all blocks add, as one), "output" (the transformer
            is skipped as a whole; least memory), or a list of patterns of modules (`targets.Modules`). None is "module"
            there, or what `refresh` needs; paradec's own loop knows the output only.
        interval: N, short for `refresh=Every(N)`; beside an `Every` it replaces that one's interval.
        order: O: derivatives in the expansion, in the place of the basis's own (1); 0 reuses the last feature.
        max_memory: bytes that the histories may take in a pipeline, as a number or "2GB". If the requested order or
            target does not fit, a smaller one is used, and the session says so.

    Raises:
        ValueError: a value that is none of these, or two that do not go together.
    """

    refresh: Rule | Sequence[int] | str | None = None
    basis: Basis | str | None = None
    target: str | Modules | None = None
    interval: int | None = None
    order: int | None = None
    max_memory: int | None = None

    name = "taylorseer"
    paper = "TaylorSeer"
    arxiv = "2503.06923"
    summary = "most solver steps skip the transformer; its output is forecast by a Taylor expansion"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"refresh": "every(interval=6, first_enhance=3)"},
        "flux": {"refresh": "every(interval=6, first_enhance=3)"},
        "dit": {"refresh": "every(interval=4, first_enhance=2)", "basis": "taylor(order=4)"},
        "hunyuan_video": {"refresh": "every(interval=5)"},
        "wan": {"refresh": "every(interval=5)"},
        "hidream": {"refresh": "every(interval=4)", "basis": "taylor(order=2)"},
        "lite_fast": LITE | {"refresh": "every(interval=5, first_enhance=3)"},
        "lite_medium": LITE | {"refresh": "every(interval=4, first_enhance=3)"},
        "lite_detailed": LITE | {"refresh": "every(interval=3, first_enhance=3)"},
        "diffusers": {"refresh": "every(interval=5, first_enhance=3, style='diffusers')"},
    }

    def __post_init__(self) -> None:
        for name, read in (("refresh", refresh_from), ("basis", basis_from), ("target", target_from)):
            object.__setattr__(self, name, read(getattr(self, name)))
        object.__setattr__(self, "max_memory", _bytes(self.max_memory))
        check_int("interval", self.interval, low=1, none=True)
        check_int("order", self.order, low=0, none=True)
        if self.interval is not None and isinstance(self.refresh, Rule) and not isinstance(self.refresh, Every):
            raise ValueError(f"interval={self.interval} and refresh={self.refresh.name!r} both say when to evaluate")
        rule, target = self.rule, self.target
        if rule.target is not None and target not in (None, rule.target):
            raise ValueError(
                f"refresh={rule.name!r} goes with target={rule.target!r} alone; leave target={shown(target)} out"
            )
        watch = rule.watch if isinstance(rule, AccumulatedChange) else None
        if watch in ("modulated", "hidden") and target == "output":
            raise ValueError(f"watch={watch!r} is inside the transformer, which target='output' skips; use 'latent'")
        if watch is not None and isinstance(target, Modules):
            raise ValueError(f"watch={watch!r} does not go with modules by patterns; leave one out")

    # ---- when and how -----------------------------------------------------------------------------------------------

    @cached_property
    def rule(self) -> Rule:
        """`refresh`, or the default."""
        rule = refresh_from(self.refresh) or Every()
        return rule if self.interval is None else replace(rule, interval=self.interval)  # type: ignore[call-arg]

    @cached_property
    def forecaster(self) -> Basis:
        """`basis`, or the default, with this sampler's settings."""
        basis = basis_from(self.basis) or BASES[self.rule.basis]()
        return replace(basis, guard=self.rule.guard, order=basis.order if self.order is None else self.order)

    def evaluates(self, course: RunProgress) -> bool:
        # rules that decide inside the call are asked there (`paradec.integrations.diffusers.hooks.stack`)
        assert isinstance(self.rule, StepRule)
        return course.last_full < 0 or self.rule.is_full(course)

    def watch(self, course: RunProgress, before: Tensor, now: Tensor) -> None:
        if isinstance(self.rule, StepRule):
            self.rule.changed(course, before, now)

    # ---- paradec's own loop -----------------------------------------------------------------------------------------

    def start(self, model: Any, latent: Tensor, **request: Any) -> ForecastState:
        """As `ForecastSampler.start`; refuses settings that need the inside of a transformer."""
        rule = self.rule
        within = isinstance(rule, (Verification, Probe, BlockSchedule)) or rule.from_input
        if isinstance(rule, AccumulatedChange) and rule.watch not in (None, "latent"):
            within = True
        inside: dict[str, Any] = {"max_memory": self.max_memory, "refresh": rule if within else None}
        target = self.target or rule.target
        inside["target"] = None if target == "output" else target
        for setting, value in inside.items():
            if value is not None:
                raise ValueError(
                    f"{setting}={shown(value)} needs a pipeline, or the inside of the transformer: attach the sampler "
                    "with paradec.accelerate; this loop forecasts the whole output"
                )
        state = super().start(model, latent, **request)
        rule.check_run(state.total, scheduler=state.scheduler, guidance=state.guidance_scale)
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
        found = self.forecaster.forecast(history, state.index)
        # with nothing to add it is the memory itself, and a proposal is its caller's to write into
        return found.clone() if found is history.tensors[0] else found


def _history(state: ForecastState) -> History | None:
    """The history that is in a state's memory."""
    if not state.notes:
        return None
    tensors = state.memory["history"].unbind(1)[: state.notes["count"]]
    return History(tensors, state.notes["nodes"], state.notes["dtype"])


def _bytes(value: Any) -> int | None:
    """A number of bytes from an int or a text as "2GB" (10^9) or "512MiB" (2^20)."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|)\s*", value, re.IGNORECASE)
        if found is None:
            raise ValueError(f'max_memory={value!r} must be bytes, as a number or as text: "2GB", "512MiB"')
        value = int(float(found[1]) * units[found[2].upper()])
    check_int("max_memory", value, low=1, high=LARGEST_INT64, none=True)
    return value

"""TaylorSeer: a diffusion transformer's features between full evaluations are forecast by a Taylor expansion.

Liu et al., "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers", arXiv 2503.06923, section 3.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.core.checks import LARGEST_INT64, check_choice, check_int, check_number, shown
from paradec.core.memory import MemorySpec
from paradec.samplers.forecast.bac import BlockSchedule
from paradec.samplers.forecast.base import ForecastSampler, ForecastState
from paradec.samplers.forecast.bases import BASES, Basis, History
from paradec.samplers.forecast.probes import Probe
from paradec.samplers.forecast.refresh import AccumulatedChange, RunProgress, Verification, relative_change
from paradec.samplers.forecast.rules import Rule, refresh_from
from paradec.samplers.forecast.step_masks import MASKS, step_mask

STYLES = ("reference", "diffusers")
TARGETS = ("module", "block", "stack", "output")
DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class TaylorSeer(ForecastSampler):
    """Evaluate every `interval`-th solver step and forecast the others from finite differences of evaluated features.

    In a diffusers pipeline (`paradec.accelerate`) it forecasts features inside the transformer. In paradec's own loop
    it forecasts the whole output, under guidance the guided one. By default evaluations are spread evenly, as in the
    public code for Wan and HunyuanVideo. In every measurement with equally many evaluations this came nearest to the
    full run (docs/diffusion.md). Preset "paper" (or "flux") is the public code's schedule for FLUX.1-dev; other
    presets have those of other models ("lite_*" are set for the whole output).

    Args:
        interval: N: one full evaluation, then N - 1 forecasts; 1 evaluates always.
        order: O: derivatives in the expansion; 0 reuses the last feature.
        first_enhance: solver steps at the start that are all evaluated.
        style: "reference" is the public code's schedule. "diffusers" is that of `TaylorSeerCacheConfig`: the second
            step after the first ones is evaluated too, and differences are taken from the first steps on.
        full_after: from this step on, every step is evaluated (`disable_cache_after_step`); None: no such step.
        full_steps: the evaluated steps themselves, step 0 among them, instead of a schedule; or the name of one of
            cache-dit's step masks, "slow", "medium", "fast" or "ultra" (`step_masks.step_mask`).
        refresh: a rule that measures when to evaluate, instead of a schedule (also by name): `Verification`,
            `AccumulatedChange`, or one that decides inside a call, over `target="stack"`: `FirstBlock`, `DBCache`,
            `MagCache`, `DiCache`. `first_enhance` applies to all of them.
        schedule: separate steps for every module, as `paradec.integrations.diffusers.hooks.bac.calibrate` finds them: a
            `BlockSchedule` or its file.
        basis: how features are forecast: taylor (the paper's), newton, hermite, reuse, foca or dmd; see `bases`. None
            is taylor, or what `refresh` was published with (reuse, for most rules that decide inside a call).
        sigma: of `hermite`, and of `dmd` while it has too few snapshots.
        window: snapshots that `dmd` keeps.
        target: what is forecast in a pipeline: "module" (the paper's: attention and feed-forward outputs before their
            gates), "block" (each block's residual), "stack" (what all blocks add, as one), or "output" (the transformer
            is skipped as a whole; least memory). None is "module" there, or what `refresh` needs; paradec's own loop
            knows the output only.
        modules: patterns (`re.fullmatch` on names within the transformer) of modules that are forecast, instead of
            `target`.
        skip: patterns of modules that are skipped at forecast steps, because a forecast replaces everything that they
            feed; used with `modules`.
        derivative_dtype: dtype in which differences are kept, such as "bfloat16"; None keeps the features' own type.
        max_memory: bytes that the histories may take in a pipeline, as a number or "2GB". If the requested order or
            target does not fit, a smaller one is used, and the session says so.
    """

    interval: int = 5
    order: int = 1
    first_enhance: int = 1
    style: str = "reference"
    full_after: int | None = None
    full_steps: tuple[int, ...] | str | None = None
    refresh: Rule | None = None
    schedule: BlockSchedule | None = None
    basis: str | None = None
    sigma: float = 0.5
    window: int = 6
    target: str | None = None
    modules: tuple[str, ...] | None = None
    skip: tuple[str, ...] | None = None
    derivative_dtype: str | None = None
    max_memory: int | None = None

    name = "taylorseer"
    paper = "TaylorSeer"
    arxiv = "2503.06923"
    summary = "most solver steps skip the transformer; its output is forecast by a Taylor expansion"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"interval": 6, "order": 1, "first_enhance": 3},
        "flux": {"interval": 6, "order": 1, "first_enhance": 3},
        "dit": {"interval": 4, "order": 4, "first_enhance": 2},
        "hunyuan_video": {"interval": 5, "order": 1, "first_enhance": 1},
        "wan": {"interval": 5, "order": 1, "first_enhance": 1},
        "hidream": {"interval": 4, "order": 2, "first_enhance": 1},
        "lite_fast": {"interval": 5, "order": 2, "first_enhance": 3, "target": "output"},
        "lite_medium": {"interval": 4, "order": 2, "first_enhance": 3, "target": "output"},
        "lite_detailed": {"interval": 3, "order": 2, "first_enhance": 3, "target": "output"},
        "diffusers": {"interval": 5, "order": 1, "first_enhance": 3, "style": "diffusers"},
    }

    def __post_init__(self) -> None:
        check_int("interval", self.interval, low=1)
        check_int("order", self.order, low=0)
        check_int("first_enhance", self.first_enhance, low=1)
        check_choice("style", self.style, STYLES)
        check_int("full_after", self.full_after, low=1, none=True)
        if self.basis is not None:
            check_choice("basis", self.basis, BASES)
        check_number("sigma", self.sigma, low=0, open_low=True)
        check_int("window", self.window, low=4)
        if self.target is not None:
            check_choice("target", self.target, TARGETS)
        if self.derivative_dtype is not None:
            name = str(self.derivative_dtype).removeprefix("torch.")
            check_choice("derivative_dtype", name, DTYPES)
            object.__setattr__(self, "derivative_dtype", name)
        object.__setattr__(self, "max_memory", _bytes(self.max_memory))
        object.__setattr__(self, "refresh", refresh_from(self.refresh))
        if isinstance(self.schedule, (str, os.PathLike)):
            object.__setattr__(self, "schedule", BlockSchedule.load(Path(self.schedule)))
        elif self.schedule is not None and not isinstance(self.schedule, BlockSchedule):
            object.__setattr__(self, "schedule", BlockSchedule.from_dict(self.schedule))
        object.__setattr__(self, "full_steps", _steps(self.full_steps))
        for setting in ("modules", "skip"):
            object.__setattr__(self, setting, _patterns(setting, getattr(self, setting)))
        if self.skip is not None and self.modules is None:
            raise ValueError("skip=... needs modules=...: which forecast would replace what the skipped modules feed?")
        chosen = [key for key in ("full_steps", "refresh", "schedule") if getattr(self, key) is not None]
        if len(chosen) > 1:
            raise ValueError(f"{chosen[0]} and {chosen[1]} both say when to evaluate; give one of them")
        if isinstance(self.refresh, Probe):
            for setting, fits in (("target", (None, "stack")), ("modules", (None,)), ("skip", (None,))):
                if getattr(self, setting) not in fits:
                    raise ValueError(
                        f"refresh={self.refresh.name!r} forecasts what all blocks add; leave {setting}="
                        f"{shown(getattr(self, setting))} out"
                    )
        for setting in ("modules", "schedule"):
            if getattr(self, setting) is not None and self.target not in (None, "module"):
                raise ValueError(
                    f"{setting} names modules, which target={self.target!r} does not forecast; leave one out"
                )

    # ---- when -----------------------------------------------------------------------------------------------------

    def check_run(self, total: int | None) -> None:
        """Raise ValueError if these settings cannot serve a run of `total` solver steps (None: nobody tells)."""
        if isinstance(self.full_steps, str):
            self._named(total)
        if isinstance(self.refresh, Probe):
            self.refresh.check_run(total)

    def _named(self, total: int | None) -> tuple[int, ...]:
        """The steps of a named mask."""
        assert isinstance(self.full_steps, str)
        if total is None:
            raise ValueError(
                f"full_steps={self.full_steps!r} is made for a number of solver steps, which a transformer by itself "
                f"does not tell; give full_steps=step_mask({self.full_steps!r}, steps) of "
                "paradec.samplers.forecast.step_masks"
            )
        return step_mask(self.full_steps, total)

    def is_full(self, index: int, total: int | None = None) -> bool:
        """Whether the schedule evaluates solver step `index`; a `refresh` rule or BAC's schedule is not asked.

        total: solver steps of the run, which a named mask needs.

        Style "reference": the first `first_enhance` steps, and every `interval`-th after the last of them. Style
        "diffusers": the first ones, the second step after them, and every `interval`-th from there.
        """
        if self.full_steps is not None:
            return index in (self._named(total) if isinstance(self.full_steps, str) else self.full_steps)
        if index < self.first_enhance or (self.full_after is not None and index >= self.full_after):
            return True
        offset = 1 if self.style == "reference" else -1
        return (index - self.first_enhance + offset) % self.interval == 0

    def evaluates(self, course: RunProgress) -> bool:
        if course.last_full < 0:
            return True
        if self.refresh is not None:
            assert not isinstance(
                self.refresh, Probe
            )  # asked inside the call (`paradec.integrations.diffusers.hooks.stack`)
            return self.refresh.is_full(course, self.first_enhance)
        return self.is_full(course.index, course.total)

    def watch(self, course: RunProgress, before: Tensor, now: Tensor) -> None:
        if isinstance(self.refresh, AccumulatedChange):
            course.change += self.refresh.rescale(relative_change(now, before))

    # ---- how ------------------------------------------------------------------------------------------------------

    @cached_property
    def forecaster(self) -> Basis:
        """The basis with this sampler's settings."""
        settings: dict[str, Any] = {"order": self.order}
        if self.derivative_dtype is not None:
            settings["dtype"] = getattr(torch, self.derivative_dtype)
        if self.style == "reference":
            settings["guard"] = self.first_enhance - 2
        basis = self.basis or (self.refresh.basis if isinstance(self.refresh, Probe) else "taylor")
        fields = BASES[basis].__dataclass_fields__
        settings |= {name: getattr(self, name) for name in ("sigma", "window") if name in fields}
        return BASES[basis](**settings)

    # ---- paradec's own loop -----------------------------------------------------------------------------------------

    def start(self, model: Any, latent: Tensor, **request: Any) -> ForecastState:
        """As `ForecastSampler.start`; refuses settings that need the inside of a transformer."""
        inside: dict[str, Any] = {"schedule": self.schedule, "modules": self.modules, "max_memory": self.max_memory}
        if self.target not in (None, "output"):
            inside["target"] = self.target
        if isinstance(self.refresh, (Verification, Probe)):
            inside["refresh"] = self.refresh
        for setting, value in inside.items():
            if value is not None:
                raise ValueError(
                    f"{setting}={shown(value)} needs the inside of the transformer: attach the sampler with "
                    "paradec.accelerate; this loop forecasts the whole output"
                )
        state = super().start(model, latent, **request)
        self.check_run(state.total)
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


def _steps(value: Any) -> tuple[int, ...] | str | None:
    """A checked list of steps that has step 0, or the name of a mask."""
    if value is None:
        return None
    if isinstance(value, str):
        check_choice("full_steps", value, MASKS)
        return value
    steps = list(value) if isinstance(value, (list, tuple, range)) else [value]
    for step in steps:
        check_int("full_steps", step, low=0)
    if 0 not in steps or sorted(set(steps)) != steps:
        raise ValueError(f"full_steps={shown(value)} must be ascending steps that begin with 0, each once")
    return tuple(steps)


def _patterns(name: str, value: Any) -> tuple[str, ...] | None:
    """A checked tuple of regular expressions."""
    if value is None:
        return None
    patterns = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"{name}={shown(value)} must be a regular expression for module names, or a list of them")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{name}={shown(pattern)} is no regular expression: {error}") from None
    return patterns

"""Base of the forecast family, and its loop over a diffusers scheduler. All rows are at the same step."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number, short_repr
from paradec.core.family_queries import LatentProposal, LatentQuery
from paradec.core.memory import Memory
from paradec.core.protocol import Commit, Sampler, State, check_finite
from paradec.core.query import Cost
from paradec.core.trace import Trace
from paradec.samplers.forecast.bases import BASES, Basis, History
from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Probe, Rule, RunProgress, StepRule, Verification
from paradec.samplers.forecast.step_schedule import BlockSchedule
from paradec.samplers.start import row_keys


@dataclass
class ForecastState(State):
    """State of one request. `B` rows."""

    scheduler: Any  # copy of the diffusers scheduler, with timesteps set
    latent: Tensor  # [B, ...] float
    conditions: dict[str, Tensor]
    guidance_scale: float
    generator: torch.Generator | list[torch.Generator] | None  # for a stochastic scheduler: one per row, or one for all
    positions: int  # positions (patches) per row that one evaluation computes
    history: History | None = None  # the evaluated outputs

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run_progress = RunProgress(total=self.total)
        self.input = self._model_input()

    @property
    def index(self) -> int:
        return self.run_progress.index

    @property
    def total(self) -> int:
        """Number of the scheduler's timesteps, which may exceed `num_inference_steps`."""
        return len(self.scheduler.timesteps)

    @property
    def done(self) -> bool:
        return self.index >= self.total

    @property
    def progress(self) -> tuple[int, int]:
        return self.index * self.batch, self.total * self.batch

    def advance(self, output: Tensor, full: bool) -> None:
        """Take one solver step. output: the model's output if `full`, else its forecast."""
        options = {} if self.generator is None else {"generator": self.generator}
        timestep = self.scheduler.timesteps[self.index]
        self.latent = self.scheduler.step(output, timestep, self.latent, return_dict=False, **options)[0]
        self.run_progress.finish_step(full)
        self.input = self._model_input()

    def _model_input(self) -> Tensor:
        # once per step, not in `query`: scaling changes the state of some schedulers
        if self.done or not hasattr(self.scheduler, "scale_model_input"):
            return self.latent
        return self.scheduler.scale_model_input(self.latent, self.scheduler.timesteps[self.index])


@dataclass(frozen=True)
class FeatureForecast(Sampler):
    """Base of `Forecast` and `TaylorSeer`. A subclass implements `to_forecast`."""

    family: ClassVar[str] = "forecast"
    models: ClassVar[tuple[str, ...]] = ("latent",)

    def to_forecast(self) -> Any:
        """Return the equivalent `Forecast`."""
        raise NotImplementedError

    @cached_property
    def rule(self) -> Rule:
        """Rule that decides which steps are evaluated."""
        rule: Any = self.to_forecast().when
        return rule or Every()

    @cached_property
    def forecaster(self) -> Basis:
        """Basis that computes forecasts."""
        settings = self.to_forecast()
        basis: Any = settings.how or BASES[self.rule.how]()
        order = basis.order if settings.order is None else settings.order
        return replace(basis, last_warmup_step=self.rule.last_warmup_step, order=order)

    def evaluates(self, progress: RunProgress) -> bool:
        """Whether the next step of the run evaluates the model (else its output is forecast)."""
        # a `Probe` decides inside the call (`paradec.integrations.diffusers.hooks.stack`)
        assert isinstance(self.rule, StepRule)
        return not progress.nodes or self.rule.is_full(progress)

    @torch.inference_mode(False)  # else the state could be used in inference mode only
    @torch.no_grad()
    def start(
        self,
        model: Any,
        latent: Tensor,
        *,
        scheduler: Any,
        num_inference_steps: int = 50,
        guidance_scale: float = 1.0,
        seed: int | Sequence[int] | None = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
        trace: bool = False,
        **conditions: Any,
    ) -> ForecastState:
        """Make the state of one request.

        Args:
            model: from `paradec.models.images.diffusion`.
            latent: [B, ...] float noise, already multiplied by the scheduler's `init_noise_sigma`.
            scheduler: a diffusers scheduler; it is copied.
            num_inference_steps: number of solver steps.
            guidance_scale: s in uncond + s (cond - uncond). 1: no guidance; otherwise calls have two branches per row.
            seed, generator: one value, or one per row, for stochastic schedulers. Seeds are combined with the latents.
            conditions: conditions of the model, such as `class_labels` for DiT.

        Raises ValueError or TypeError for an invalid argument, or a setting that needs access to inner layers.
        """
        self.check_model(model)
        self._check_output_only()
        if not isinstance(latent, Tensor) or not latent.is_floating_point():
            raise TypeError(f"latent must be a floating tensor, not {getattr(latent, 'dtype', type(latent).__name__)}")
        if latent.ndim < 2 or latent.numel() == 0 or not latent.isfinite().all():
            raise ValueError(f"latent has shape {tuple(latent.shape)}; it must be [batch, ...], not empty, and finite")
        for method in ("set_timesteps", "step"):
            if not hasattr(scheduler, method):
                raise TypeError(f"scheduler must be a diffusers scheduler; {type(scheduler).__name__} has no {method}")
        check_int("num_inference_steps", num_inference_steps, low=1)
        check_number("guidance_scale", guidance_scale, low=0)
        latent = latent.to(model.device)
        branches = 1 if guidance_scale == 1.0 else 2
        conditions = model.conditions(latent, conditions, branches)
        scheduler = copy.deepcopy(scheduler)
        generator = _make_generators(scheduler, seed, generator, latent)
        scheduler.set_timesteps(num_inference_steps, device=latent.device)
        state = ForecastState(
            batch=len(latent),
            memory=Memory(),
            scheduler=scheduler,
            latent=latent,
            conditions=conditions,
            guidance_scale=guidance_scale,
            generator=generator,
            positions=model.positions(latent),
        )
        if trace:
            request = {"num_inference_steps": num_inference_steps, "guidance_scale": guidance_scale}
            state.trace = Trace(canvas=[], settings=self.to_dict() | request, family=self.family)
        self.rule.check_run(state.total, scheduler, guidance_scale)
        return state

    def _check_output_only(self) -> None:
        rule, settings = self.rule, self.to_forecast()
        is_inside = isinstance(rule, (Verification, Probe, BlockSchedule)) or rule.from_input
        is_inside |= isinstance(rule, AccumulatedChange) and rule.watch not in (None, "latent")
        where = settings.where or rule.where
        for setting, value, is_unsupported in (
            ("max_memory", settings.max_memory, settings.max_memory is not None),
            ("when", rule, is_inside),
            ("where", where, where not in (None, "output")),
        ):
            if is_unsupported:
                raise ValueError(
                    f"{setting}={short_repr(value)} needs a pipeline: attach the sampler with paradec.accelerate; "
                    "without a pipeline only the whole output is forecast"
                )

    def query(self, state: ForecastState) -> list[LatentQuery]:
        """Evaluate the whole model for all rows; no query if the output is forecast."""
        if not self.evaluates(state.run_progress):
            return []
        branches = 1 if state.guidance_scale == 1.0 else 2
        return [
            LatentQuery(
                rows=state.rows,
                latent=torch.cat([state.input] * branches) if branches > 1 else state.input,
                timestep=state.scheduler.timesteps[state.index],
                conditions=state.conditions,
                branches=branches,
                forwarded=np.full(state.batch, state.positions),
            )
        ]

    def propose(self, state: ForecastState, outputs: list[Tensor], queries: list[LatentQuery]) -> LatentProposal:
        """Return the guided output, or its forecast. outputs: [branches * R, ...], one per query."""
        cost = Cost(queries, state.batch)
        if not queries:
            assert state.history is not None  # the first step is evaluated
            output = self.forecaster.forecast(state.history, state.index)
            if output is state.history.tensors[0]:
                output = output.clone()  # callers may write into a proposal
            return LatentProposal(state.rows, output, cost, kind="forecast", made_at=state.commits)
        output = outputs[0]
        if queries[0].branches == 2:
            conditional, unconditional = output.chunk(2)
            output = unconditional + state.guidance_scale * (conditional - unconditional)
        return LatentProposal(state.rows, output, cost, kind=queries[0].kind, made_at=state.commits)

    def commit(self, state: ForecastState, proposal: LatentProposal) -> Commit:
        """Take the solver's step, and update the history.

        Raises FloatingPointError for NaN or infinite values, ValueError for a proposal made from an earlier state.
        """
        state.check_current(proposal)
        full = proposal.kind != "forecast"
        if full:
            message = f"the model returned NaN or infinite values for row {{row}} at step {state.index}"
            check_finite(proposal.values.flatten(1).isfinite().all(1), proposal.rows, message)
        history, basis, index, latent = state.history, self.forecaster, state.index, state.input
        values = proposal.values.clone()  # callers may write into a proposal
        if full:
            history = basis.update(history, values, index)
        elif history is not None:
            history = basis.roll(history, values)
        state.advance(proposal.values, full)  # before the history changes, since the scheduler may raise
        state.history = history
        if not state.done and isinstance(self.rule, StepRule):
            self.rule.observe_change(state.run_progress, latent, state.input)
        state.count(proposal.cost)
        state.commits += 1
        return Commit(proposal.rows, state.latent, kind=proposal.kind)


def _make_generators(scheduler: Any, seed: Any, generator: Any, latent: Tensor) -> Any:
    """Make the generators of a stochastic scheduler; None for other schedulers. Raises ValueError for bad seeds."""
    if seed is not None and generator is not None:
        raise ValueError("give seed or generator, not both")
    seeds = list(seed) if isinstance(seed, (Sequence, np.ndarray, Tensor)) else [seed] * len(latent)
    generators = generator if isinstance(generator, list) else [generator] * len(latent)
    for name, entries in (("seed", seeds), ("generator", generators)):
        if len(entries) != len(latent):
            raise ValueError(f"{name} has {len(entries)} entries for {len(latent)} rows; give one, or one per row")
    for entry in seeds:
        check_int("seed", entry.item() if isinstance(entry, Tensor) else entry, low=0, high=2**63 - 1, none=True)
    if not all(isinstance(entry, torch.Generator | None) for entry in generators):
        raise ValueError(f"generator={generator!r} must be a torch.Generator, or a list of them")
    if "generator" not in inspect.signature(scheduler.step).parameters:
        return None
    if generator is not None:
        return generator
    if None in seeds:
        random_seed = int(torch.randint(2**63 - 1, (1,)))
        seeds = [random_seed if entry is None else entry for entry in seeds]
    digests = [hashlib.blake2b(row.double().cpu().numpy().tobytes(), digest_size=8).digest() for row in latent]
    keys = row_keys([int(entry) for entry in seeds], [np.frombuffer(d, dtype="<i8").tolist() for d in digests])
    return [torch.Generator(latent.device).manual_seed(low | (high & 0x7FFFFFFF) << 32) for low, high in keys.tolist()]

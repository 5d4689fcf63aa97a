"""The forecast family: continuous models, whose output at some solver steps is forecast instead of evaluated.

The solver is a diffusers scheduler; all rows are at the same step.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.core.checks import check_int, check_number, shown
from paradec.core.family_queries import LatentProposal, LatentQuery
from paradec.core.memory import Memory, MemorySpec
from paradec.core.protocol import Commit, Sampler, State, check_finite
from paradec.core.query import Cost
from paradec.core.trace import Trace
from paradec.samplers.forecast.bac import BlockSchedule
from paradec.samplers.forecast.bases import BASES, Basis, History
from paradec.samplers.forecast.refresh import AccumulatedChange, Every, Probe, Rule, RunProgress, StepRule, Verification
from paradec.samplers.start import row_keys


@dataclass
class ForecastState(State):
    """What changes while a latent is denoised. `B` rows."""

    scheduler: Any  # the request's copy of the diffusers scheduler, its timesteps set
    latent: Tensor  # [B, ...] float
    conditions: dict[str, Tensor]
    guidance_scale: float
    generator: torch.Generator | list[torch.Generator] | None  # of a stochastic scheduler: one per row, or the caller's
    positions: int  # positions (patches) that one evaluation costs per row
    notes: Mapping[str, Any] = field(default_factory=dict)  # of the memory: number of tensors, their steps and dtype

    def __post_init__(self) -> None:
        super().__post_init__()
        self.run_progress = RunProgress(total=self.total)
        self.input = self._model_input()

    @property
    def history(self) -> History | None:
        """The evaluated features, from the memory."""
        if not self.notes:
            return None
        tensors = self.memory["history"].unbind(1)[: self.notes["count"]]
        return History(tensors, self.notes["nodes"], self.notes["dtype"])

    @property
    def index(self) -> int:
        return self.run_progress.index

    @property
    def total(self) -> int:
        """Solver steps: timesteps of the scheduler, which may be more than `num_inference_steps`."""
        return len(self.scheduler.timesteps)

    @property
    def done(self) -> bool:
        return self.index >= self.total

    @property
    def progress(self) -> tuple[int, int]:
        return self.index * self.batch, self.total * self.batch

    def advance(self, output: Tensor, full: bool) -> None:
        """Take one solver step with the model's output, or (not `full`) with its forecast."""
        options = {} if self.generator is None else {"generator": self.generator}
        timestep = self.scheduler.timesteps[self.index]
        self.latent = self.scheduler.step(output, timestep, self.latent, return_dict=False, **options)[0]
        self.run_progress.finish_step(full)
        self.input = self._model_input()

    def _model_input(self) -> Tensor:
        # here and not in the query: some schedulers change while they scale
        if self.done or not hasattr(self.scheduler, "scale_model_input"):
            return self.latent
        return self.scheduler.scale_model_input(self.latent, self.scheduler.timesteps[self.index])


@dataclass(frozen=True)
class FeatureForecast(Sampler):
    """Base of the samplers that forecast by a rule and a basis. A subclass implements `to_forecast`."""

    family: ClassVar[str] = "forecast"
    models: ClassVar[tuple[str, ...]] = ("latent",)

    def to_forecast(self) -> Any:
        """The sampler as a `forecast.Forecast`."""
        raise NotImplementedError

    @cached_property
    def rule(self) -> Rule:
        """When to evaluate."""
        rule: Any = self.to_forecast().when
        return rule or Every()

    @cached_property
    def forecaster(self) -> Basis:
        """How to forecast."""
        settings = self.to_forecast()
        basis: Any = settings.how or BASES[self.rule.how]()
        return replace(basis, guard=self.rule.guard, order=basis.order if settings.order is None else settings.order)

    def evaluates(self, progress: RunProgress) -> bool:
        """Whether the model is evaluated at the next step of a run, or forecast."""
        # a `Probe` decides inside the call (`paradec.integrations.diffusers.hooks.stack`)
        assert isinstance(self.rule, StepRule)
        return not progress.nodes or self.rule.is_full(progress)

    @torch.inference_mode(False)  # else only inference mode could go on with the state
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
            latent: [B, ...] float noise, as the scheduler starts from it (times `init_noise_sigma`). It is not changed.
            scheduler: a diffusers scheduler. It is copied: the caller's stays as it is.
            num_inference_steps: solver steps.
            guidance_scale: s in uncond + s (cond - uncond); 1 is off, else a call evaluates two rows for each.
            seed: one for all rows or one per row, for schedulers that draw noise from it and the row's latent.
            generator: the caller's, one or one per row, instead of a seed.
            conditions: what the model asks for: `class_labels` for DiT.

        Raises:
            ValueError, TypeError: an argument out of its range, or a setting of the sampler that needs the inside of a
                transformer; before any work.
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
        generator = _generators(scheduler, seed, generator, latent)
        scheduler.set_timesteps(num_inference_steps, device=latent.device)
        spec = {"history": MemorySpec((self.forecaster.slots, "latent"), self.forecaster.dtype, reset="sequence")}
        state = ForecastState(
            batch=len(latent),
            memory=Memory.allocate(spec, len(latent), {"latent": latent.shape[1:]}, latent.device, latent.dtype),
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
        is_within = isinstance(rule, (Verification, Probe, BlockSchedule)) or rule.from_input
        is_within = is_within or (isinstance(rule, AccumulatedChange) and rule.watch not in (None, "latent"))
        where = settings.where or rule.where
        inside = {"max_memory": settings.max_memory, "when": rule if is_within else None}
        for setting, value in {**inside, "where": None if where == "output" else where}.items():
            if value is not None:
                raise ValueError(
                    f"{setting}={shown(value)} needs a pipeline, or the inside of the transformer: attach the sampler "
                    "with paradec.accelerate; this loop forecasts the whole output"
                )

    def query(self, state: ForecastState) -> list[LatentQuery]:
        """The whole model on all rows, or nothing where the output is forecast."""
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
        """The model's output under guidance, or its forecast. outputs: [R, ...], one per query."""
        cost = Cost(queries, state.batch)
        if not queries:
            assert state.history is not None  # the first step is evaluated
            output = self.forecaster.forecast(state.history, state.index)
            if output is state.history.tensors[0]:
                output = output.clone()  # callers may write into a proposal, not into the memory
            return LatentProposal(state.rows, output, cost, kind="forecast", made_at=state.commits)
        output = outputs[0]
        if queries[0].branches == 2:
            conditional, unconditional = output.chunk(2)
            output = unconditional + state.guidance_scale * (conditional - unconditional)
        return LatentProposal(state.rows, output, cost, kind=queries[0].kind, made_at=state.commits)

    def commit(self, state: ForecastState, proposal: LatentProposal) -> Commit:
        """Take the solver's step, and remember what was evaluated.

        Raises:
            FloatingPointError: the model returned NaN or infinite values. Nothing is written then.
            ValueError: a proposal made from an earlier state.
        """
        state.check_current(proposal)
        full = proposal.kind != "forecast"
        if full:
            message = f"the model returned NaN or infinite values for row {{row}} at step {state.index}"
            check_finite(proposal.values.flatten(1).isfinite().all(1), proposal.rows, message)
        history, basis, index, latent = state.history, self.forecaster, state.index, state.input
        if full:
            history = basis.update(history, proposal.values, index)
        elif basis.rolls:
            assert history is not None  # a forecast follows an evaluation
            history = basis.roll(history, proposal.values)
        state.advance(proposal.values, full)  # first: a scheduler that raises leaves the memory as it was
        if history is not None and (full or basis.rolls):
            tensors = torch.stack(history.tensors, dim=1)
            missing = basis.slots - len(history.tensors)
            state.memory["history"] = pad(tensors, (0, 0) * (tensors.ndim - 2) + (0, missing))
            state.notes = {"count": len(history.tensors), "nodes": history.nodes, "dtype": history.dtype}
        if not state.done and isinstance(self.rule, StepRule):
            self.rule.observe_change(state.run_progress, latent, state.input)
        state.count(proposal.cost)
        state.commits += 1
        return Commit(proposal.rows, state.latent, kind=proposal.kind)


def _generators(scheduler: Any, seed: Any, generator: Any, latent: Tensor) -> Any:
    """The scheduler's generators of noise; None if it draws none."""
    if seed is not None and generator is not None:
        raise ValueError("give seed or generator, not both")
    seeds = list(seed) if isinstance(seed, (Sequence, np.ndarray, Tensor)) else [seed] * len(latent)
    if len(seeds) != len(latent):
        raise ValueError(f"seed has {len(seeds)} entries for {len(latent)} rows; give one int, or one per row")
    for entry in seeds:
        check_int("seed", entry.item() if isinstance(entry, Tensor) else entry, low=0, high=2**63 - 1, none=True)
    generators = generator if isinstance(generator, list) else [generator] * len(latent)
    if not all(owner is None or isinstance(owner, torch.Generator) for owner in generators):
        raise ValueError(f"generator={generator!r} must be a torch.Generator, or a list of them")
    if len(generators) != len(latent):
        raise ValueError(f"generator has {len(generators)} entries for {len(latent)} rows; give one, or one per row")
    if "generator" not in inspect.signature(scheduler.step).parameters:
        return None
    if generator is not None:
        return generator
    if None in seeds:
        seed_drawn = int(torch.randint(2**63 - 1, (1,)))
        seeds = [seed_drawn if entry is None else entry for entry in seeds]
    digests = [hashlib.blake2b(row.double().cpu().numpy().tobytes(), digest_size=8).digest() for row in latent]
    keys = row_keys([int(entry) for entry in seeds], [np.frombuffer(d, dtype="<i8").tolist() for d in digests])
    row_generators = [torch.Generator(latent.device) for _ in keys]
    for owner, (low, high) in zip(row_generators, keys.tolist(), strict=True):
        owner.manual_seed(low | (high & 0x7FFFFFFF) << 32)
    return row_generators

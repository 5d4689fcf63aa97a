"""Sampler of MAR (Li et al., arXiv 2406.11838, and its public code): it decides several continuous tokens per step, in
random order. Steps may form ReCAP's groups of full and local steps (arXiv 2505.19089, and its public code for MAR)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_bool, check_choice, check_int, check_number
from paradec.core.family_queries import LatentProposal
from paradec.core.memory import Memory
from paradec.core.orders import Cosine, draws_from_keys, remaining_counts
from paradec.core.protocol import Commit, Sampler, State, check_finite
from paradec.core.query import Cost
from paradec.models.images.continuous import ContinuousAnswer, ContinuousQuery, ReusedKeys
from paradec.request import Request, request_for
from paradec.samplers.pictures.start import check_labels, make_label_trace, scheduled_guidance, unsupported_for_pictures
from paradec.samplers.start import row_keys

DEFAULT_STEPS = 64


@dataclass
class ContinuousState(State):
    """State of a request. `B` rows of `S` positions (row by row), with `channels` numbers each."""

    tokens: Tensor
    """[B, S, channels]: 0 at undecided positions."""
    order: Tensor
    """[B, S] int64: positions, from the last to be decided to the first."""
    labels: Tensor
    """[B] int64."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    num_left: np.ndarray
    """[commits + 1] int64 on the host: number of undecided positions of a row before every commit; 0 after the last."""
    guidance_scale: float
    index: int = 0
    """Index of the next commit."""

    @property
    def done(self) -> bool:
        return self.index == len(self.num_left) - 1

    @property
    def progress(self) -> tuple[int, int]:
        return int(self.num_left[0] - self.num_left[self.index]) * self.batch, int(self.num_left[0]) * self.batch

    @property
    def draft_nfe(self) -> np.ndarray:
        """[B] int64 on the host: forwards of a draft model."""
        return np.zeros(self.batch, np.int64)


@dataclass(frozen=True)
class ContinuousSampler(Sampler):
    """Base of the samplers of continuous tokens. A subclass implements `_state`."""

    family = "continuous"
    models = ("continuous image",)
    uses_steps = True
    unsupported = unsupported_for_pictures("steps")  # `temperature` is a setting of the sampler

    def _state(self, num_left: np.ndarray, fields: dict[str, Any]) -> Any:
        """Make the state of a request.

        num_left: [T + 1] int64, from `remaining_counts`. fields: those of `ContinuousState` except `num_left`."""
        raise NotImplementedError

    @torch.inference_mode(False)  # else the state could be used in inference mode only
    @torch.no_grad()
    def start(
        self,
        model: Any,
        prompt: Sequence[int] | int,
        request: Request | None = None,
        *,
        order: Tensor | None = None,
        **arguments: Any,
    ) -> Any:
        """As `Sampler.start`.

        prompt: class labels, one per image.
        request: `steps` is T, from 1 to S, by default 64 (the paper's fast setting; 256 is its best). The three
            published models have a `guidance_scale` of 2.9, 3.0 and 3.2. A trace records each token's numbers.
        order: [B, S] int64: positions, from the last to be decided to the first; None: a random order per image."""
        self.check_model(model)
        if "temperature" in arguments:
            raise ValueError(f"temperature is a setting of sampler {self.name!r}: leave it out of the request")
        request = request_for(self, request, arguments)
        module = model.module
        size, labels = module.positions, check_labels(prompt, module.classes - 1)
        steps = DEFAULT_STEPS if request.steps is None else request.steps
        check_int("steps", steps, low=1, high=size)
        seed, generator = request.seed, request.generator
        seeds = list(seed) if isinstance(seed, Sequence) else [seed] * len(labels)
        if len(seeds) != len(labels):
            raise ValueError(f"seed has {len(seeds)} entries for {len(labels)} images; give one int, or one per image")
        base_seed = 0
        if None in seeds:
            generator_device = None if generator is None else generator.device
            base_seed = int(torch.randint(2**62, (1,), generator=generator, device=generator_device))
        seeds = [base_seed if entry is None else int(entry) for entry in seeds]
        device, dtype = model.device, torch.promote_types(module.mask_token.dtype, torch.float32)
        keys = torch.as_tensor(row_keys(seeds, [[label] for label in labels]), device=device)
        if order is None:
            groups = Cosine(steps).groups(module.side, module.side, draws_from_keys(keys))
            order = torch.as_tensor(groups.order[:, ::-1].copy())
        order = torch.as_tensor(order, device=device)
        if order.shape != (len(labels), size) or not (order.sort(-1).values == torch.arange(size, device=device)).all():
            raise ValueError(f"order has shape {tuple(order.shape)}; it must permute {size} positions for each image")
        fields = {
            "batch": len(labels),
            "memory": Memory(),
            "tokens": torch.zeros(len(labels), size, module.channels, dtype=dtype, device=device),
            "order": order,
            "labels": torch.tensor(labels, device=device),
            "keys": keys,
            "guidance_scale": request.guidance_scale,
        }
        state = self._state(remaining_counts(size, steps), fields)
        trace_settings = {"steps": steps, "guidance_scale": request.guidance_scale, "seed": seeds}
        state.trace = make_label_trace(self, request, labels, size, **trace_settings)
        return state


def to_normal(uniform: Tensor) -> Tensor:
    """Transform uniform numbers in (0, 1) to standard normal numbers."""
    return math.sqrt(2) * torch.erfinv(2 * uniform - 1)


@dataclass
class MARState(ContinuousState):
    """State of a request; each step is a commit."""

    reused_keys: ReusedKeys | None = None
    """Keys and values from the full step of the current group."""


@dataclass(kw_only=True)
class MARProposal(LatentProposal):
    """Proposal of a step. A full step also returns keys and values for the group's local steps."""

    positions: Tensor
    """[R, W] int64: positions of the values."""
    reused_keys: ReusedKeys | None = None
    conditions: Tensor | None = None
    """[R, W, width]: conditions from which the diffusion head drew."""


@dataclass(frozen=True)
class MAR(ContinuousSampler):
    """Each step decides the next positions of a random order, which is drawn per image. After step t (from 0) of T,
    floor(S cos(pi / 2 * (t + 1) / T)) of S positions are undecided, but every step decides at least one.

    With `local_steps` > 0 the steps form groups, as in ReCAP. The first step of a group evaluates everything, stores
    keys and values of encoder and decoder, and decides the first of the group's positions. The other (local) steps
    evaluate only the group's positions, with fewer steps of the diffusion head.

    Random numbers are counter-based: an image depends on its seed and class, not on the other rows.

    Args:
        local_steps: local steps per group. 0 is MAR; ReCAP's scripts have 1.
        full_groups: number of first groups that have no local steps; None: half of all steps, as in the scripts.
        head_steps: steps of the diffusion head, 1 to 1000.
        fast_ratio: share of `head_steps` that local steps make, in (0, 1]; rounded down to at least 1 step.
        temperature: factor of the noise that the head's steps add.
        guidance_schedule: "linear": the scale grows with the number of decided positions, from 1 to the request's (as
            in the paper); or "constant".
        chunk_order: order in which steps decide a group's positions: "raster", row by row, a quirk of ReCAP's code; or
            "order", the random order.
        keep_buffer: True reads the stored keys and values of the class tokens in local steps; False evaluates the class
            tokens again, as in the scripts.

    Raises:
        ValueError: a setting out of its range.
    """

    local_steps: int = 0
    full_groups: int | None = None
    head_steps: int = 100
    fast_ratio: float = 0.4
    temperature: float = 1.0
    guidance_schedule: str = "linear"
    chunk_order: str = "raster"
    keep_buffer: bool = False

    name = "mar"
    paper = "MAR"
    arxiv = "2406.11838"
    summary = "continuous tokens in random order; the number per step grows from step to step"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"recap": {"local_steps": 1}}

    def __post_init__(self) -> None:
        check_int("local_steps", self.local_steps, low=0, high=2**16)
        check_int("full_groups", self.full_groups, low=0, none=True)
        check_int("head_steps", self.head_steps, low=1, high=1000)
        check_number("fast_ratio", self.fast_ratio, low=0, high=1, open_low=True)
        check_number("temperature", self.temperature, low=0)
        check_choice("guidance_schedule", self.guidance_schedule, ("linear", "constant"))
        check_choice("chunk_order", self.chunk_order, ("raster", "order"))
        check_bool("keep_buffer", self.keep_buffer)

    def _state(self, num_left: np.ndarray, fields: dict[str, Any]) -> MARState:
        return MARState(num_left=num_left, **fields)

    # ---- groups -----------------------------------------------------------------------------------------------------

    def group(self, state: MARState) -> range:
        """Return the steps of the current group."""
        steps = len(state.num_left) - 1
        full = steps // 2 if self.full_groups is None else self.full_groups
        size = self.local_steps + 1
        first = state.index if state.index < full else full + (state.index - full) // size * size
        return range(first, first + 1 if first < full else min(first + size, steps))

    def chunks(self, state: MARState) -> list[Tensor]:
        """Return the ascending positions [B, n] that each step of the current group decides."""
        group, num_left = self.group(state), state.num_left
        if self.chunk_order == "order" or len(group) == 1:
            return [state.order[:, num_left[step + 1] : num_left[step]].sort(-1).values for step in group]
        group_positions = state.order[:, num_left[group[-1] + 1] : num_left[group[0]]].sort(-1).values
        return list(group_positions.split([int(num_left[step] - num_left[step + 1]) for step in group], 1))

    # ---- steps ------------------------------------------------------------------------------------------------------

    def query(self, state: MARState) -> list[ContinuousQuery]:
        group, chunks = self.group(state), self.chunks(state)
        step_in_group = state.index - group[0]
        targets = torch.cat(chunks, 1).sort(-1).values
        if step_in_group == 0:
            known_positions = state.order[:, state.num_left[state.index] :].sort(-1).values
            all_positions = torch.arange(state.order.shape[1], device=known_positions.device).expand_as(state.order)
            drop, targets = (targets if len(group) > 1 else None), all_positions
            columns, wanted = known_positions, chunks[0]
        else:
            known_positions = torch.cat(chunks[:step_in_group], 1).sort(-1).values
            drop = None
            columns, wanted = (
                torch.searchsorted(targets, index.contiguous()) for index in (known_positions, chunks[step_in_group])
            )
        index = known_positions.unsqueeze(-1).expand(-1, -1, state.tokens.shape[-1])
        guided = state.guidance_scale != 1.0
        return [
            ContinuousQuery(
                rows=state.rows,
                tokens=state.tokens.gather(1, index),
                known=known_positions,
                targets=targets,
                columns=columns,
                wanted=wanted,
                labels=state.labels,
                noise=self._noise(state, chunks[step_in_group], step_in_group > 0),
                temperature=self.temperature,
                guidance=self.guidance(state) if guided else None,
                reused_keys=state.reused_keys if step_in_group else None,
                drop=drop,
                keep_buffer=self.keep_buffer,
                branches=2 if guided else 1,
                forwarded=np.full(state.batch, targets.shape[1]),
                kind="window" if step_in_group else "full",
            )
        ]

    def guidance(self, state: MARState) -> float:
        """Return the guidance scale of this step."""
        size = int(state.num_left[0])
        num_decided = size - int(state.num_left[state.index + 1])
        return float(scheduled_guidance(self.guidance_schedule, state.guidance_scale, num_decided, size))

    def _noise(self, state: MARState, positions: Tensor, is_local: bool) -> Tensor:
        """Draw standard normal numbers [B, W, steps + 1, channels] for the head at `positions` [B, W]."""
        steps = max(int(self.head_steps * self.fast_ratio), 1) if is_local else self.head_steps
        count = (steps + 1) * state.tokens.shape[-1]
        step = torch.full((state.batch,), state.index, device=positions.device)
        uniform = rng.uniform(state.keys, step, positions, count, rng.TOKEN_STREAM)
        return to_normal(uniform).unflatten(-1, (steps + 1, -1))

    def propose(self, state: MARState, outputs: list[ContinuousAnswer], queries: list[ContinuousQuery]) -> MARProposal:
        (answer,), (query,) = outputs, queries
        return MARProposal(
            rows=query.rows,
            values=answer.tokens,
            cost=Cost(queries, state.batch),
            positions=query.targets.gather(1, query.wanted),
            made_at=state.commits,
            kind=query.kind,
            reused_keys=answer.reused_keys,
            conditions=answer.conditions,
        )

    def commit(self, state: MARState, proposal: MARProposal) -> Commit:
        """Write the tokens. Raises FloatingPointError for NaN or infinite numbers (then nothing is written)."""
        state.check_current(proposal)
        is_finite = proposal.values.flatten(1).isfinite().all(1)
        message = f"the model returned NaN or infinite tokens at step {state.index} for row {{row}}"
        check_finite(is_finite, proposal.rows, message)
        index = proposal.positions.unsqueeze(-1).expand_as(proposal.values)
        state.tokens = state.tokens.scatter(1, index, proposal.values.to(state.tokens.dtype))
        if proposal.kind == "full":
            state.reused_keys = proposal.reused_keys
        state.count(proposal.cost)
        state.commits += 1
        state.index += 1
        if state.done or state.index == self.group(state)[0]:
            state.reused_keys = None  # the next step evaluates everything
        selected = torch.ones_like(proposal.positions, dtype=torch.bool)
        return Commit(proposal.rows, proposal.values, proposal.positions, selected, kind=proposal.kind)

"""Distilled Decoding: a student makes a picture from noise in one or two calls, optionally with its teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_bool, check_int, short_repr
from paradec.core.family_queries import LatentProposal
from paradec.core.memory import Memory
from paradec.core.protocol import Commit, Sampler, State, check_finite
from paradec.core.query import Cost, Query, StoreCall
from paradec.core.trace import Notes
from paradec.kernels.token_stats import BELOW_ONE, draw
from paradec.models.images.distilled import DistilledAnswer, DistilledQuery, Stages
from paradec.models.images.var import ScaleQuery
from paradec.request import Request, request_for
from paradec.samplers.distributions import apply_guidance, filtered_distribution
from paradec.samplers.pictures.continuous import to_normal
from paradec.samplers.pictures.start import check_labels, make_label_trace, scheduled_guidance, unsupported_for_pictures
from paradec.samplers.start import make_row_keys


class CellTeacher:
    """LlamaGen as teacher. It draws one cell of the picture per call, with a key/value store. At guidance scale 1 the
    unconditional branch is not evaluated (at this scale the public code reads no prefix, and fails)."""

    def __init__(self, teacher: Any, labels: Sequence[int], count: int, scale: float):
        layout = teacher.request(list(labels), teacher.grid())
        rows = layout.prompts.rows + (layout.unconditional.rows if scale != 1 else [])
        self.model, self.scale, self.batch = layout.model, scale, len(labels)
        self.branches = len(rows) // self.batch
        self.prompts = torch.tensor(rows, device=teacher.device)
        """[branches * B, 1] int64."""
        self.store = self.model.make_store(len(rows), 1 + count)
        self.stored = 0
        """Number of tokens in the store, including the class."""

    def query(self, ids: Tensor, codes: Tensor, stage: int, step: int) -> Any:
        """Make the query of cell `stage`. ids: [B, N] int64: tokens. codes: [V, C], read by `ScaleTeacher`."""
        context = torch.cat((self.prompts, ids[:, :stage].repeat(self.branches, 1).to(self.prompts.device)), 1)
        index = np.arange(len(context))
        column = torch.arange(self.stored, stage + 1, device=context.device)
        positions = column.expand(len(context), -1)
        return Query(
            rows=np.arange(self.batch),
            tokens=context[:, self.stored :],
            positions=positions,
            wanted=torch.full_like(positions[:, :1], stage - self.stored),
            store=StoreCall(torch.as_tensor(index, device=context.device), positions, index, stage + 1, step=step),
            branches=self.branches,
            forwarded=np.full(self.batch, len(column)),
            kind="full" if self.stored == 0 else "window",
        )

    def answer(self, query: Any) -> Tensor:
        """Compute logits [branches * B, W, V], or [B, W, V] if the unconditional branch has no weight."""
        return self.model(query, self.store)

    def apply_guidance(self, logits: Tensor, stage: int) -> Tensor:
        """Apply guidance; return [B, W, V]."""
        return apply_guidance(logits, self.scale) if self.branches == 2 else logits

    def span(self, stage: int) -> tuple[int, int]:
        """Return the indices of a stage's tokens as (first, last + 1)."""
        return stage, stage + 1


class ScaleTeacher(CellTeacher):
    """VAR as teacher. It draws one scale per call, with a store. Its first call also evaluates all earlier scales, and
    in the public code all these scales see each other. `masked` adds the mask used in training."""

    def __init__(self, teacher: Any, labels: Sequence[int], request: Request, masked: bool):
        self.model, self.masked, self.scale = teacher, masked, request.guidance_scale
        self.scales, self.ends = teacher.facts.scales, (0, *teacher.facts.ends)
        self.labels = torch.tensor(labels, device=teacher.device)
        self.branches = 1 if self.scale == 1 else 2
        self.store = teacher.store(self.branches * len(labels), len(self.scales) - 1)
        self.stored = 0
        """Number of scales in the store."""

    def query(self, ids: Tensor, codes: Tensor, stage: int, step: int) -> ScaleQuery:
        device = self.labels.device
        prefix = codes[ids[:, : self.ends[stage]]].to(device, self.model.codes.dtype)
        with torch.no_grad():
            inputs = self.model.vq.inputs(prefix, self.scales)[0]
        first, stop = self.ends[self.stored], self.ends[stage + 1]
        return ScaleQuery(
            rows=np.arange(len(self.labels)),
            inputs=inputs[:, max(first - 1, 0) : stop - 1],
            labels=self.labels,
            first=self.stored,
            last=stage,
            store=self.store,
            branches=self.branches,
            # at guidance scale 1 the unconditional half is evaluated only for its keys and values
            wanted=self.branches if self._guidance(stage) != 1 else 1,
            masked=self.masked,
            forwarded=np.full(len(self.labels), stop - first),
            kind="full" if first == 0 else "window",
            positions=torch.arange(first, stop, device=device).expand(len(self.labels), -1),
        )

    def _guidance(self, scale_index: int) -> float:
        return scheduled_guidance("linear", self.scale, scale_index, max(len(self.scales) - 1, 1))

    def answer(self, query: Any) -> Tensor:
        return self.model(query).logits

    def apply_guidance(self, logits: Tensor, stage: int) -> Tensor:
        return logits if self._guidance(stage) == 1 else apply_guidance(logits, self._guidance(stage))

    def span(self, stage: int) -> tuple[int, int]:
        return self.ends[stage], self.ends[stage + 1]


TEACHER_FIELDS = {"guidance_scale": (1.0,), "temperature": (1.0,), "top_k": (None,), "top_p": (None, 1)}
"""Fields of a request that only a teacher supports, and their allowed values without a teacher."""
NOISE_STREAM = 3
"""Random stream (`paradec.core.rng`) of the noise from which the student makes a picture."""


@dataclass
class DistilledState(State):
    """State of a request. `B` rows of `N` tokens with `C` numbers."""

    request: Request
    stages: Stages
    plan: list[tuple[str, int]]
    """Kind and stage of each step: ("student", t), or ("teacher", index of the cell or scale to draw)."""
    labels: Tensor
    """[B] int64."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    codes: Tensor
    """[V, C]: the code vectors."""
    noise: Tensor
    """[B, N, C]: noise from which the picture is made, the same in every call."""
    tokens: Tensor
    """[B, N, C]: the first `num_final` tokens are final; the others are from the latest call (at first noise)."""
    ids: Tensor
    """[B, N] int64: latest proposed ids (-1: none). A teacher's first call reads the codes nearest to `tokens`."""
    split: int  # number of tokens that are codes in the result; the other tokens are vectors
    teacher: CellTeacher | None = None
    """The teacher, with its store."""
    index: int = 0
    """Index of the next step."""
    num_final: int = 0
    """Number of tokens of each row that no later step changes."""
    accepted: list[np.ndarray] = field(default_factory=list)
    """[B] int64 per step: number of tokens that became final."""

    @property
    def done(self) -> bool:
        return self.index == len(self.plan)

    @property
    def progress(self) -> tuple[int, int]:
        return self.num_final * self.batch, self.tokens.shape[1] * self.batch

    @property
    def teacher_nfe(self) -> int:
        """Forwards of the teacher for each row; `nfe` includes them."""
        return sum(kind == "teacher" for kind, _ in self.plan[: self.index])

    def stores(self) -> tuple[Any, ...]:
        return () if self.teacher is None else (self.teacher.store,)

    def uniform(self, positions: Tensor) -> Tensor:
        """Draw uniform numbers [B, W] float64 in (0, 1) with which the teacher draws tokens at positions [W]."""
        step = torch.zeros(self.batch, dtype=torch.int64, device=positions.device)
        return rng.uniform(self.keys, step, positions.expand(self.batch, -1), 1, rng.TOKEN_STREAM).squeeze(-1)


@dataclass(kw_only=True)
class DistilledProposal(LatentProposal):
    """Proposal of one call."""

    ids: Tensor
    """[B, W] int64: codes drawn by a teacher, or a student's likeliest codes (at data tokens the nearest codes)."""
    first: int = 0
    """Index of the first token of `values`."""
    continuous: Tensor | None = None
    """[B, N, C]: vectors from the student's head."""
    logits: Tensor | None = None
    """[B, N, V]: logits of the student's head; or [B, W, V]: a teacher's logits with guidance."""


@dataclass(frozen=True)
class Distilled(Sampler):
    """The student is called once for each stage t of `t_list`. A call leaves the first K(t) tokens (data) unchanged,
    resets the others to the initial noise, and predicts their codes and vectors. In the result the first
    K(split) tokens are codes, and the rest vectors. K(t) is t for a student of LlamaGen; for a student of VAR it is the
    number of tokens in the first t scales.

    A student has no guidance, and only its initial noise is random. A `teacher` draws the tokens from stage
    `teacher_start` until the second stage of `t_list` begins. It reads the codes nearest to the vectors of the
    student's first call; teacher_start=0 omits that call. The request's `guidance_scale`, `temperature`, `top_k` and
    `top_p` apply to the teacher.

    Random numbers are counter-based: a picture depends on its seed and class, not on the other rows.

    Args:
        t_list: the stages, ascending from 0; None: (0,) for steps=1, else (0, t) with the student's default t.
        split: stage before which tokens are codes in the result; None: the student's default.
        teacher: the model that the student was distilled from; `to_dict` has only its name.
        teacher_start: first stage of the teacher.
        masked_prefix: whether a VAR teacher's first call has the attention mask used in training, so that no scale
            sees finer scales (the public code has no such mask). No effect for LlamaGen, or with teacher_start=0.

    Raises:
        ValueError, TypeError: a setting out of its range.
    """

    t_list: tuple[int, ...] | None = None
    split: int | None = None
    teacher: Any = None
    teacher_start: int = 0
    masked_prefix: bool = False

    name = "distilled"
    family = "distilled"
    models = ("distilled image",)
    paper = "Distilled Decoding"
    arxiv = "2412.17153"
    summary = "a student makes all tokens from noise in one call or two, with its teacher in between (optional)"
    uses_steps = True
    unsupported = unsupported_for_pictures("steps", "temperature", "top_p", "top_k")
    request_defaults: ClassVar[Mapping[str, Any]] = {"temperature": 1.0}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "llamagen_b": {"t_list": (0, 80), "split": 80},
        "llamagen_l": {"t_list": (0, 80), "split": 130},
        "llamagen_l_22": {"t_list": (0, 80), "split": 180, "teacher_start": 60},
        "llamagen_l_42": {"t_list": (0, 80), "split": 180, "teacher_start": 40},
        "llamagen_l_81": {"t_list": (0, 80), "split": 220, "teacher_start": 0},
        "var_d16": {"t_list": (0, 5), "split": 5},
        "var_d20": {"t_list": (0, 4), "split": 4},
        "var_d24": {"t_list": (0, 4), "split": 4},
        "var_d16_3": {"t_list": (0, 5), "split": 5, "teacher_start": 4},
        "var_d16_4": {"t_list": (0, 5), "split": 8, "teacher_start": 3},
        "var_d16_6": {"t_list": (0, 5), "split": 9, "teacher_start": 0},
    }

    def __post_init__(self) -> None:
        if self.t_list is not None:
            is_list = isinstance(self.t_list, (tuple, list)) and len(self.t_list) > 0
            for stage in self.t_list if is_list else ():
                check_int("t_list", stage, low=0)
            ascends = is_list and all(a < b for a, b in zip(self.t_list, self.t_list[1:]))
            if not ascends or self.t_list[0] != 0:
                raise ValueError(
                    f"t_list={short_repr(self.t_list)} must be stages that ascend from 0, such as (0,) or (0, 80)"
                )
            object.__setattr__(self, "t_list", tuple(self.t_list))
        check_int("split", self.split, low=0, none=True)
        check_int("teacher_start", self.teacher_start, low=0)
        check_bool("masked_prefix", self.masked_prefix)
        if self.teacher is not None:
            if not callable(self.teacher) or not hasattr(self.teacher, "facts"):
                raise TypeError(f"teacher={short_repr(self.teacher)} must be an image model, as from paradec.load")
            if self.t_list is not None and len(self.t_list) != 2:
                raise ValueError(f"with a teacher, t_list={short_repr(self.t_list)} must be two stages, as in (0, 80)")
            if self.t_list is not None and self.teacher_start >= self.t_list[1]:
                raise ValueError(f"teacher_start={self.teacher_start} must be below the second stage, {self.t_list[1]}")

    @torch.inference_mode(False)  # else the state could be used in inference mode only
    @torch.no_grad()
    def start(
        self,
        model: Any,
        prompt: Sequence[int] | int,
        request: Request | None = None,
        *,
        noise: Tensor | None = None,
        **arguments: Any,
    ) -> DistilledState:
        """As `Sampler.start`.

        prompt: class labels, one per picture.
        request: `steps` is 1 or 2 (default: 2). Fields in `TEACHER_FIELDS` raise ValueError without a teacher.
        noise: [B, N, C]: standard normal numbers from which the pictures are made; None: drawn from the seeds."""
        self.check_model(model)
        request = request_for(self, request, arguments)
        facts = model.facts
        labels = check_labels(prompt, facts.classes - 1)
        for name, neutral in TEACHER_FIELDS.items():
            if self.teacher is None and (value := getattr(request, name)) not in neutral:
                raise ValueError(f"{name}={short_repr(value)} has no meaning without a teacher; leave it out")
        stages: Stages = facts.stages
        split = stages.split if self.split is None else self.split
        check_int("split", split, low=0, high=stages.last)
        plan = self.plan(stages, request.steps)
        device, dtype = model.device, torch.promote_types(model.dtype, torch.float32)
        keys, seeds = make_row_keys(request, [[label] for label in labels], device)
        shape = (len(labels), stages.data_counts[-1], facts.channels)
        if noise is None:
            positions = torch.arange(shape[1], device=device).expand(shape[:2])
            zero = torch.zeros(len(labels), dtype=torch.int64, device=device)
            noise = to_normal(rng.uniform(keys, zero, positions, shape[2], NOISE_STREAM).clamp(max=BELOW_ONE))
        noise = torch.as_tensor(noise)
        if noise.shape != shape or not noise.is_floating_point():
            raise ValueError(f"noise must be floats of shape {shape}, not {noise.dtype} of {tuple(noise.shape)}")
        noise = noise.to(device, dtype)
        state = DistilledState(
            batch=len(labels),
            memory=Memory(),
            request=request.without_objects(),
            stages=stages,
            plan=plan,
            labels=torch.tensor(labels, device=device),
            keys=keys,
            codes=model.codes().detach().to(device, dtype),
            noise=noise,
            tokens=noise.clone(),
            ids=torch.full(shape[:2], -1, device=device),
            split=stages.data_counts[split],
        )
        if self.teacher is not None:
            model.check_teacher(self.teacher)
            if stages.scales:
                state.teacher = ScaleTeacher(self.teacher, labels, request, self.masked_prefix)
            else:
                state.teacher = CellTeacher(self.teacher, labels, shape[1], request.guidance_scale)
        teacher_fields = {name: getattr(request, name) for name in TEACHER_FIELDS} if self.teacher is not None else {}
        trace_settings = {"steps": request.steps, "seed": seeds} | teacher_fields
        state.trace = make_label_trace(self, request, labels, shape[1], **trace_settings)
        return state

    def plan(self, stages: Stages, steps: int | None) -> list[tuple[str, int]]:
        """Return the kind and stage of each step (`DistilledState.plan`)."""
        t_list = self.t_list
        if t_list is None:
            check_int("steps", steps, low=1, high=2, none=True)
            t_list = (0,) if steps == 1 else (0, stages.second)
        elif steps is not None and steps != len(t_list):
            raise ValueError(f"steps={steps} must be {len(t_list)}, the length of t_list={t_list}, or left out")
        check_int("t_list", t_list[-1], low=0, high=stages.last)
        if self.teacher is None:
            return [("student", stage) for stage in t_list if stage < stages.last]
        if len(t_list) != 2:
            raise ValueError("steps=1 has no steps for a teacher; give steps=2")
        check_int("teacher_start", self.teacher_start, low=0, high=t_list[1] - 1)
        first = [("student", 0)] if self.teacher_start else []
        last = [("student", t_list[1])] if t_list[1] < stages.last else []
        return [*first, *(("teacher", stage) for stage in range(self.teacher_start, t_list[1])), *last]

    # ---- steps ------------------------------------------------------------------------------------------------------

    def query(self, state: DistilledState) -> list[Any]:
        kind, stage = state.plan[state.index]
        if kind == "teacher":
            assert state.teacher is not None  # only a plan with a teacher has such steps
            return [state.teacher.query(state.ids, state.codes, stage, state.commits)]
        num_data = state.stages.data_counts[stage]
        return [
            DistilledQuery(
                rows=state.rows,
                labels=state.labels,
                tokens=torch.cat((state.tokens[:, :num_data], state.noise[:, num_data:]), 1),
                num_data=num_data,
                forwarded=np.full(state.batch, state.tokens.shape[1]),
            )
        ]

    def step(self, model: Any, state: DistilledState) -> DistilledProposal:
        """Make one call, of the student or of its teacher."""
        queries = self.query(state)
        if state.plan[state.index][0] == "teacher":
            assert state.teacher is not None
            return self.propose(state, [state.teacher.answer(query) for query in queries], queries)
        return self.propose(state, [model(query) for query in queries], queries)

    def propose(self, state: DistilledState, outputs: list[Any], queries: list[Any]) -> DistilledProposal:
        (answer,), (query,) = outputs, queries
        if not isinstance(answer, DistilledAnswer):
            return self._propose_draws(state, answer, query)
        position = torch.arange(state.tokens.shape[1], device=state.tokens.device)
        is_data = (position < query.num_data).expand(state.batch, -1)
        ids = torch.where(is_data, find_nearest(query.tokens, state.codes), answer.logits.argmax(-1))
        vectors = torch.where(is_data.unsqueeze(-1), query.tokens, answer.continuous.to(state.tokens.dtype))
        result = torch.where((position < state.split).unsqueeze(-1), state.codes[ids], vectors)
        return DistilledProposal(
            rows=query.rows,
            values=result,
            cost=Cost([query], state.batch),
            made_at=state.commits,
            kind="full",
            ids=ids,
            continuous=answer.continuous,
            logits=answer.logits,
        )

    def _propose_draws(self, state: DistilledState, answer: Tensor, query: Any) -> DistilledProposal:
        """Draw a teacher's tokens from its logits [branches * B, W, V]."""
        assert state.teacher is not None
        request, (_, stage) = state.request, state.plan[state.index]
        first, stop = state.teacher.span(stage)
        logits = state.teacher.apply_guidance(answer, stage)
        p = filtered_distribution(logits, request.temperature, request.top_k, request.top_p)
        ids = draw(p, state.uniform(torch.arange(first, stop, device=logits.device)))
        return DistilledProposal(
            rows=state.rows,
            values=state.codes[ids],
            cost=Cost([query], state.batch),
            made_at=state.commits,
            kind="window",
            ids=ids,
            first=first,
            logits=logits,
        )

    def commit(self, state: DistilledState, proposal: DistilledProposal) -> Commit:
        """Write the tokens. Raises FloatingPointError for NaN or infinite numbers (then nothing is written)."""
        state.check_current(proposal)
        kind, stage = state.plan[state.index]
        assert proposal.logits is not None
        # a teacher's logits may be -inf, but not all logits of a token
        checked_values = proposal.logits if kind == "student" else proposal.logits.amax(-1)
        is_finite = checked_values.flatten(1).isfinite().all(1) & proposal.values.flatten(1).isfinite().all(1)
        message = f"the {kind} returned NaN or infinite numbers at step {state.index} for row {{row}}"
        check_finite(is_finite, proposal.rows, message)
        stop = proposal.first + proposal.values.shape[1]
        state.tokens = torch.cat((state.tokens[:, : proposal.first], proposal.values, state.tokens[:, stop:]), 1)
        state.ids = torch.cat((state.ids[:, : proposal.first], proposal.ids, state.ids[:, stop:]), 1)
        state.count(proposal.cost)
        state.commits += 1
        state.index += 1
        next_step = None if state.done else state.plan[state.index]
        if kind == "student" and next_step is not None and next_step[0] == "teacher":
            state.ids = find_nearest(state.tokens, state.codes)
            state.tokens = state.codes[state.ids]
        if kind == "teacher" and state.teacher is not None:
            state.teacher.stored = stage + 1
        start = state.num_final
        state.num_final = state.tokens.shape[1] if next_step is None else state.stages.data_counts[next_step[1]]
        state.accepted.append(np.full(state.batch, state.num_final - start, np.int64))
        positions = torch.arange(start, state.num_final, device=state.tokens.device).expand(state.batch, -1)
        values, selected = state.tokens[:, start : state.num_final], torch.ones_like(positions, dtype=torch.bool)
        return Commit(proposal.rows, values, positions, selected, kind=proposal.kind)

    def observe(self, state: DistilledState, proposal: DistilledProposal) -> Notes:
        return Notes(proposal.cost.counts[0].tolist(), None)


def find_nearest(vectors: Tensor, codes: Tensor) -> Tensor:
    """Return the ids [B, N] int64 of the codes [V, C] nearest to vectors [B, N, C]."""
    # one row at a time: torch's rounding of a distance may depend on the number of vectors in the call
    return torch.stack(
        [torch.cdist(row, codes, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1) for row in vectors]
    )

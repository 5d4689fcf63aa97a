"""The teachers of Distilled Decoding: they draw tokens of a picture given those before them."""

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
from paradec.samplers.pictures.continuous import normal
from paradec.samplers.pictures.start import guidance_at, labels_of, trace_of_labels, unsupported_for_pictures
from paradec.samplers.start import make_row_keys


class CellTeaching:
    """A LlamaGen, which draws a cell at a time over a key/value store. At guidance 1 its second branch is not evaluated
    (the public code reads no prefix then, and stops with an error)."""

    def __init__(self, teacher: Any, labels: Sequence[int], count: int, scale: float):
        laid = teacher.request(list(labels), teacher.grid())
        rows = laid.prompts.rows + (laid.unconditional.rows if scale != 1 else [])
        self.model, self.scale, self.batch = laid.model, scale, len(labels)
        self.branches = len(rows) // self.batch
        self.prompts = torch.tensor(rows, device=teacher.device)
        """[branches * B, 1] int64."""
        self.store = self.model.make_store(len(rows), 1 + count)
        self.stored = 0
        """Tokens that the store holds, the class among them."""

    def query(self, ids: Tensor, codes: Tensor, at: int, step: int) -> Any:
        """The call for cell `at`; ids [B, N] int64 and codes [V, C] say which tokens are before it."""
        context = torch.cat((self.prompts, ids[:, :at].repeat(self.branches, 1).to(self.prompts.device)), 1)
        index = np.arange(len(context))
        column = torch.arange(self.stored, at + 1, device=context.device)
        positions = column.expand(len(context), -1)
        return Query(
            rows=np.arange(self.batch),
            tokens=context[:, self.stored :],
            positions=positions,
            wanted=torch.full_like(positions[:, :1], at - self.stored),
            store=StoreCall(torch.as_tensor(index, device=context.device), positions, index, at + 1, step=step),
            branches=self.branches,
            forwarded=np.full(self.batch, len(column)),
            kind="full" if self.stored == 0 else "window",
        )

    def answer(self, query: Any) -> Tensor:
        """Logits [branches * B, W, V], or of fewer branches where the others have no weight."""
        return self.model(query, self.store)

    def guided(self, logits: Tensor, at: int) -> Tensor:
        """[B, W, V]."""
        return apply_guidance(logits, self.scale) if self.branches == 2 else logits

    def span(self, at: int) -> tuple[int, int]:
        """The first token of `at`, and the one after its last."""
        return at, at + 1


class ScaleTeaching(CellTeaching):
    """A VAR, which draws a scale at a time over a store and reads all scales before its first in one call. The public
    code has no mask there, so that coarse scales see finer ones; `masked` adds the mask of the training."""

    def __init__(self, teacher: Any, labels: Sequence[int], request: Request, masked: bool):
        self.model, self.masked, self.scale = teacher, masked, request.guidance_scale
        self.scales, self.ends = teacher.facts.scales, (0, *teacher.facts.ends)
        self.labels = torch.tensor(labels, device=teacher.device)
        self.branches = 1 if self.scale == 1 else 2
        self.store = teacher.store(self.branches * len(labels), len(self.scales) - 1)
        self.stored = 0
        """Scales that the store holds."""

    def query(self, ids: Tensor, codes: Tensor, at: int, step: int) -> ScaleQuery:
        device = self.labels.device
        prefix = codes[ids[:, : self.ends[at]]].to(device, self.model.codes.dtype)
        with torch.no_grad():
            inputs = self.model.vq.inputs(prefix, self.scales)[0]
        first, stop = self.ends[self.stored], self.ends[at + 1]
        return ScaleQuery(
            rows=np.arange(len(self.labels)),
            inputs=inputs[:, max(first - 1, 0) : stop - 1],
            labels=self.labels,
            first=self.stored,
            last=at,
            store=self.store,
            branches=self.branches,
            # the unconditional half of a scale that it has no weight in is there for its keys and values alone
            wanted=self.branches if self._weight(at) != 1 else 1,
            masked=self.masked,
            forwarded=np.full(len(self.labels), stop - first),
            kind="full" if first == 0 else "window",
            positions=torch.arange(first, stop, device=device).expand(len(self.labels), -1),
        )

    def _weight(self, scale_index: int) -> float:
        return guidance_at("linear", self.scale, scale_index, max(len(self.scales) - 1, 1))

    def answer(self, query: Any) -> Tensor:
        return self.model(query).logits

    def guided(self, logits: Tensor, at: int) -> Tensor:
        return logits if self._weight(at) == 1 else apply_guidance(logits, self._weight(at))

    def span(self, at: int) -> tuple[int, int]:
        return self.ends[at], self.ends[at + 1]


TAUGHT = {"guidance_scale": (1.0,), "temperature": (1.0,), "top_k": (None,), "top_p": (None, 1)}
"""Fields of a request that are the teacher's, and their values without one."""
NOISE_STREAM = 3
"""Of `paradec.core.rng`: the noise that a picture is made from, apart from the teacher's draws."""


@dataclass
class DistilledState(State):
    """What changes while pictures are decoded. `B` rows of `N` tokens of `C` numbers."""

    request: Request
    stages: Stages
    plan: list[tuple[str, int]]
    """What each step is: ("student", t), or ("teacher", the cell or scale that it draws)."""
    labels: Tensor
    """[B] int64."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    codes: Tensor
    """[V, C]: the code vectors."""
    noise: Tensor
    """[B, N, C]: what the picture is made from, the same at every call."""
    tokens: Tensor
    """[B, N, C]: data up to `final`, after it what the last call gave."""
    ids: Tensor
    """[B, N] int64: the nearest codes of `tokens`, where a teacher reads them; -1 elsewhere."""
    split: int
    teaching: CellTeaching | None = None
    """The teacher, and what it has read."""
    index: int = 0
    """The step."""
    written: int = 0
    """Tokens of every row that no later step changes."""
    accepted: list[np.ndarray] = field(default_factory=list)
    """[B] int64 per step: tokens that became final."""

    @property
    def done(self) -> bool:
        return self.index == len(self.plan)

    @property
    def progress(self) -> tuple[int, int]:
        return self.written * self.batch, self.tokens.shape[1] * self.batch

    @property
    def teacher_nfe(self) -> int:
        """The forwards of the teacher for every row, which `nfe` has too."""
        return sum(kind == "teacher" for kind, _ in self.plan[: self.index])

    def stores(self) -> tuple[Any, ...]:
        return () if self.teaching is None else (self.teaching.store,)

    def uniform(self, positions: Tensor) -> Tensor:
        """[B, W] float64 in (0, 1): the numbers that the teacher draws tokens at positions [W] with."""
        step = torch.zeros(self.batch, dtype=torch.int64, device=positions.device)
        return rng.uniform(self.keys, step, positions.expand(self.batch, -1), 1, rng.TOKEN_STREAM).squeeze(-1)


@dataclass(kw_only=True)
class DistilledProposal(LatentProposal):
    """What a call gave."""

    ids: Tensor
    """[B, W] int64: of a student all tokens' best codes (of data the nearest), of a teacher those that it drew."""
    first: int = 0
    """Where `values` begin."""
    continuous: Tensor | None = None
    """[B, N, C]: as the student's head gives them."""
    logits: Tensor | None = None
    """[B, N, V]: as the student's head gives them; of a teacher [B, W, V], guided."""


@dataclass(frozen=True)
class Distilled(Sampler):
    """Each stage t of `t_list` is one call of the student. Tokens after the first K(t) become the initial noise again,
    and the student predicts code and vector of all of them. The first K(split) become codes; the others are decoded as
    vectors. K(t) is t tokens for a student of LlamaGen, t scales for one of VAR.

    A student has no guidance, and only its noise is random. A `teacher` draws the tokens from stage `teacher_start` up
    to the second stage, over the codes nearest to the first call's vectors (at 0 it replaces the first call).
    `guidance_scale`, `temperature`, `top_k` and `top_p` of the request apply to the teacher.

    Random numbers are counter-based: a picture depends on its seed and class, not on its neighbours.

    Args:
        t_list: the stages, ascending from 0; None is (0,) or (0, t) for one or two `steps`, with the student's own t.
        split: None is the student's own.
        teacher: the model that the student was distilled from; `to_dict` names it only.
        teacher_start: its first stage.
        masked_prefix: whether a teacher of scales (VAR) reads its prefix as in its training, where no scale sees finer
            ones; the public code has no such mask. No effect without a prefix, and on LlamaGen.

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
    summary = "a student makes all tokens from noise in one call or two, with its teacher in between if wanted"
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
                    f"t_list={short_repr(self.t_list)} must be stages that ascend from 0: (0,) or (0, 80) say"
                )
            object.__setattr__(self, "t_list", tuple(self.t_list))
        check_int("split", self.split, low=0, none=True)
        check_int("teacher_start", self.teacher_start, low=0)
        check_bool("masked_prefix", self.masked_prefix)
        if self.teacher is not None:
            if not callable(self.teacher) or not hasattr(self.teacher, "facts"):
                raise TypeError(f"teacher={short_repr(self.teacher)} must be an image model, from paradec.load say")
            if self.t_list is not None and len(self.t_list) != 2:
                raise ValueError(f"t_list={short_repr(self.t_list)} must be two stages, (0, 80) say, with a teacher")
            if self.t_list is not None and self.teacher_start >= self.t_list[1]:
                raise ValueError(f"teacher_start={self.teacher_start} must be below the second stage, {self.t_list[1]}")

    @torch.inference_mode(False)  # else only inference mode could go on with the state
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

        prompt: the class labels, one per picture.
        request: `steps` is 1 or 2 (the default); fields of the teacher's distribution are refused without one.
        noise: [B, N, C] standard normal numbers to make the pictures from; None draws them."""
        self.check_model(model)
        request = request_for(self, request, arguments)
        facts = model.facts
        labels = labels_of(prompt, facts.classes - 1)
        for name, neutral in TAUGHT.items():
            if self.teacher is None and (value := getattr(request, name)) not in neutral:
                raise ValueError(
                    f"{name}={short_repr(value)} has no meaning without a teacher: a student is not guided"
                )
        stages: Stages = facts.stages
        split = stages.split if self.split is None else self.split
        check_int("split", split, low=0, high=stages.last)
        plan = self.plan(stages, request.steps)
        device, dtype = model.device, torch.promote_types(model.dtype, torch.float32)
        keys, seeds = make_row_keys(request, [[label] for label in labels], device)
        shape = (len(labels), stages.kept[-1], facts.channels)
        if noise is None:
            positions = torch.arange(shape[1], device=device).expand(shape[:2])
            zero = torch.zeros(len(labels), dtype=torch.int64, device=device)
            noise = normal(rng.uniform(keys, zero, positions, shape[2], NOISE_STREAM).clamp(max=BELOW_ONE))
        noise = torch.as_tensor(noise)
        if noise.shape != shape or not noise.is_floating_point():
            raise ValueError(f"noise has shape {tuple(noise.shape)}; it must be {list(shape)} numbers")
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
            split=stages.kept[split],
        )
        if self.teacher is not None:
            model.check_teacher(self.teacher)
            if stages.scales:
                state.teaching = ScaleTeaching(self.teacher, labels, request, self.masked_prefix)
            else:
                state.teaching = CellTeaching(self.teacher, labels, shape[1], request.guidance_scale)
        taught = {name: getattr(request, name) for name in TAUGHT} if self.teacher is not None else {}
        trace_settings = {"steps": request.steps, "seed": seeds} | taught
        state.trace = trace_of_labels(self, request, labels, shape[1], **trace_settings)
        return state

    def plan(self, stages: Stages, steps: int | None) -> list[tuple[str, int]]:
        """What each step of a request is."""
        t_list = self.t_list
        if t_list is None:
            check_int("steps", steps, low=1, high=2, none=True)
            t_list = (0,) if steps == 1 else (0, stages.second)
        elif steps is not None and steps != len(t_list):
            raise ValueError(f"steps={steps} must be {len(t_list)}, the stages of t_list={t_list}, or left out")
        check_int("t_list", t_list[-1], low=0, high=stages.last)
        if self.teacher is None:
            return [("student", stage) for stage in t_list if stage < stages.last]
        if len(t_list) != 2:
            raise ValueError("steps=1 leaves no place for a teacher; give steps=2")
        check_int("teacher_start", self.teacher_start, low=0, high=t_list[1] - 1)
        first = [("student", 0)] if self.teacher_start else []
        last = [("student", t_list[1])] if t_list[1] < stages.last else []
        return [*first, *(("teacher", at) for at in range(self.teacher_start, t_list[1])), *last]

    # ---- steps ------------------------------------------------------------------------------------------------------

    def query(self, state: DistilledState) -> list[Any]:
        kind, stage = state.plan[state.index]
        if kind == "teacher":
            assert state.teaching is not None  # the plan has such steps with a teacher alone
            return [state.teaching.query(state.ids, state.codes, stage, state.commits)]
        num_kept = state.stages.kept[stage]
        return [
            DistilledQuery(
                rows=state.rows,
                labels=state.labels,
                tokens=torch.cat((state.tokens[:, :num_kept], state.noise[:, num_kept:]), 1),
                kept=num_kept,
                forwarded=np.full(state.batch, state.tokens.shape[1]),
            )
        ]

    def step(self, model: Any, state: DistilledState) -> DistilledProposal:
        """One call, of the student or of its teacher."""
        queries = self.query(state)
        if state.plan[state.index][0] == "teacher":
            assert state.teaching is not None
            return self.propose(state, [state.teaching.answer(query) for query in queries], queries)
        return self.propose(state, [model(query) for query in queries], queries)

    def propose(self, state: DistilledState, outputs: list[Any], queries: list[Any]) -> DistilledProposal:
        (answer,), (query,) = outputs, queries
        if not isinstance(answer, DistilledAnswer):
            return self._draw_ids(state, answer, query)
        position = torch.arange(state.tokens.shape[1], device=state.tokens.device)
        data = (position < query.kept).expand(state.batch, -1)
        ids = torch.where(data, nearest(query.tokens, state.codes), answer.logits.argmax(-1))
        vectors = torch.where(data.unsqueeze(-1), query.tokens, answer.continuous.to(state.tokens.dtype))
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

    def _draw_ids(self, state: DistilledState, answer: Tensor, query: Any) -> DistilledProposal:
        """The tokens that the teacher draws from its logits [branches * B, W, V]."""
        assert state.teaching is not None
        request, (_, stage) = state.request, state.plan[state.index]
        first, stop = state.teaching.span(stage)
        logits = state.teaching.guided(answer, stage)
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
        """Write what a call gave. Raises FloatingPointError for NaN or infinite numbers; nothing is written then."""
        state.check_current(proposal)
        kind, stage = state.plan[state.index]
        assert proposal.logits is not None
        # a teacher's filters and -inf of its own are no error; a distribution without a finite logit is
        checked_values = proposal.logits if kind == "student" else proposal.logits.amax(-1)
        sound = checked_values.flatten(1).isfinite().all(1) & proposal.values.flatten(1).isfinite().all(1)
        message = f"the {kind} returned NaN or infinite numbers at step {state.index} for row {{row}}"
        check_finite(sound, proposal.rows, message)
        stop = proposal.first + proposal.values.shape[1]
        state.tokens = torch.cat((state.tokens[:, : proposal.first], proposal.values, state.tokens[:, stop:]), 1)
        state.ids = torch.cat((state.ids[:, : proposal.first], proposal.ids, state.ids[:, stop:]), 1)
        state.count(proposal.cost)
        state.commits += 1
        state.index += 1
        following = None if state.done else state.plan[state.index]
        if kind == "student" and following is not None and following[0] == "teacher":
            state.ids = nearest(state.tokens, state.codes)
            state.tokens = state.codes[state.ids]
        if kind == "teacher" and state.teaching is not None:
            state.teaching.stored = stage + 1
        start = state.written
        state.written = state.tokens.shape[1] if following is None else state.stages.kept[following[1]]
        state.accepted.append(np.full(state.batch, state.written - start, np.int64))
        positions = torch.arange(start, state.written, device=state.tokens.device).expand(state.batch, -1)
        values, selected = state.tokens[:, start : state.written], torch.ones_like(positions, dtype=torch.bool)
        return Commit(proposal.rows, values, positions, selected, kind=proposal.kind)

    def observe(self, state: DistilledState, proposal: DistilledProposal) -> Notes:
        return Notes(proposal.cost.counts[0].tolist(), None)


def nearest(vectors: Tensor, codes: Tensor) -> Tensor:
    """Ids [B, N] int64 of the codes [V, C] that are closest to vectors [B, N, C], row by row."""
    # one row at a time: distances by products depend on how many there are
    return torch.stack(
        [torch.cdist(row, codes, compute_mode="donot_use_mm_for_euclid_dist").argmin(-1) for row in vectors]
    )

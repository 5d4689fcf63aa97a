"""LPD's decoding: each call reads the last group's tokens, and asks for the next group by masks at its positions.

Zhang et al., "Locality-aware Parallel Decoding for Efficient Autoregressive Image Generation", arXiv 2507.01957, and
its public code. A step commits one group of an order (`paradec.core.orders`), each token drawn on its own. Keys and
values are stored by rank, so that a column sees what was decided up to some group.

`Groups(lossless=True)` asks for each of several positions given the tokens before it in a row's order: a query sees the
tokens of lower rank and itself. So the model is one of any order, with the loop of `paradec.samplers.causal.any_order`.
The result is that of groups of one position; in LPD's larger groups queries see each other. A call writes keys and
values of the last final token and of the drafts at their ranks, again until they are final, and none of queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import orders, rng
from paradec.core.checks import check_bool, check_choice, check_int
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import GroupQuery, RankedQuery
from paradec.core.memory import Memory
from paradec.core.orders import Order, draws_from_keys
from paradec.core.prompts import Prompts
from paradec.core.protocol import Commit, Proposal, Sampler, State, check_finite
from paradec.core.query import Cost, StoreCall
from paradec.core.trace import Notes
from paradec.kernels.token_stats import draw
from paradec.models.images.grid import Grid
from paradec.request import DEFAULTS, Request, request_for
from paradec.samplers.causal import any_order
from paradec.samplers.causal.any_order import OrderedState
from paradec.samplers.causal.jacobi import Jacobi
from paradec.samplers.causal.scd import SCD
from paradec.samplers.causal.sjd import SJD
from paradec.samplers.causal.state import Spans
from paradec.samplers.distributions import apply_guidance, filtered_distribution, probability
from paradec.samplers.pictures.start import unsupported_for_pictures
from paradec.samplers.start import make_row_keys, make_trace, pad_rows

if TYPE_CHECKING:
    from paradec.caches.store import KeyValueStore


@dataclass
class WrittenState(State):
    """What changes with every sampler of the family. `B` rows of `L` positions: a prompt, then the cells."""

    request: Request
    context: Tensor
    """[branches * B, L] int64 ids, conditional rows first."""
    prompt_length: np.ndarray
    """[B] int64 on the host, of both branches."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    store: KeyValueStore
    index: int = field(init=False, default=0)
    """The group that the next step commits."""
    accepted: list[np.ndarray] = field(init=False, default_factory=list)
    """[B] int64 per step: how many tokens each row made final."""

    @property
    def canvas(self) -> Tensor:
        """[B, L] int64 ids."""
        return self.context[: self.batch]

    @property
    def draft_nfe(self) -> np.ndarray:
        """[B] int64: nothing drafts."""
        return np.zeros(self.batch, np.int64)

    def stores(self) -> tuple[Any, ...]:
        return (self.store,)


@dataclass
class GroupState(WrittenState):
    """What changes while pictures are decoded group by group. All prompts have `T` tokens, and `S` cells after them; in
    `context` undecided cells are `blank`, and the slots of `store` are ranks."""

    facts: ModelFacts
    groups: orders.Groups
    """Of the cells."""
    cells: Tensor
    """[B, S] int64: the order, as positions in the sequence."""
    dtype: torch.dtype
    """Of the model's parameters."""
    blank: int
    """The token at undecided cells: the id that asks the model for a token."""
    branches: int

    @property
    def prompt(self) -> int:
        """T."""
        return int(self.prompt_length[0])

    @property
    def done(self) -> bool:
        return self.index == len(self.groups)

    @property
    def progress(self) -> tuple[int, int]:
        num_left = self.groups.num_left
        return int(num_left[0] - num_left[self.index]) * self.batch, int(num_left[0]) * self.batch

    def end(self, group: int) -> int:
        """The rank after a group's last cell; after the prompt for group -1."""
        return self.prompt + (0 if group < 0 else int(self.groups.ends[group]))

    def positions(self, group: int) -> Tensor:
        """[B, n] int64: a group's positions in the sequence; the prompt's for group -1."""
        if group < 0:
            return torch.arange(self.prompt, device=self.cells.device).expand(self.batch, -1)
        return self.cells[:, self.end(group - 1) - self.prompt : self.end(group) - self.prompt]

    def ranks(self, group: int) -> Tensor:
        """[n] int64: a group's slots; the prompt's for group -1."""
        first = 0 if group < 0 else self.end(group - 1)
        return torch.arange(first, self.end(group), device=self.cells.device)


@dataclass(frozen=True)
class GroupWriter(Sampler):
    """What all samplers of the family share: what tokens are drawn from, and how a group is written."""

    family: ClassVar[str] = "groups"
    request_defaults = {"temperature": 1.0}

    def distribution(self, state: WrittenState, logits: Tensor) -> Tensor:
        """What tokens are drawn from: logits [B, n, V], guided -> [B, n, V]. After the temperature the `top_k` best are
        kept, then the nucleus of these."""
        request = state.request
        return filtered_distribution(logits, request.temperature, request.top_k, request.top_p)

    def _state(self, model: Any, prompt: Any, request: Request, grid: Grid, negative_prompt: Any) -> Any:
        """Make the state of a request; arguments as for `start`."""
        raise NotImplementedError

    @torch.inference_mode(False)  # else only inference mode could go on with the state
    @torch.no_grad()
    def start(
        self,
        model: Any,
        prompt: Any,
        request: Request | None = None,
        *,
        grid: Grid | None = None,
        negative_prompt: Any = None,
        **arguments: Any,
    ) -> Any:
        """As `Sampler.start`.

        model: for captions of `nar` the copy that the model's `request` gives.
        prompt: rows of ids as `model.request` lays them out; for `groups` all of one length.
        request: `steps` is the number of groups, for orders that say none; temperature is 1 by default.
        grid: the raster; the model's own by default.
        negative_prompt: rows of the unconditional branch, as long as the prompt's; needed for guidance."""
        self.check_model(model)
        request = request_for(self, request, arguments)
        return self._state(model, prompt, request, model.grid() if grid is None else grid, negative_prompt)

    def commit(self, state: WrittenState, proposal: Proposal) -> Commit:
        """Write the group. Raises FloatingPointError for NaN or infinite logits; nothing is written then."""
        state.check_current(proposal)
        sound = (proposal.quantities["top_logit"].isfinite() & proposal.scores.isfinite()).all(1)
        message = f"the model returned NaN or infinite logits for row {{row}} at its step {state.index}"
        check_finite(sound, proposal.rows, message)
        branches = len(state.context) // state.batch
        positions, tokens = proposal.positions.repeat(branches, 1), proposal.values.repeat(branches, 1)
        state.context = state.context.scatter(1, positions, tokens)
        state.accepted.append(np.full(state.batch, tokens.shape[1], np.int64))
        state.count(proposal.cost)
        state.commits += 1
        state.index += 1
        selected = torch.ones_like(proposal.values, dtype=torch.bool)
        return Commit(proposal.rows, proposal.values, proposal.positions, selected, proposal.scores, proposal.kind)


def checked_rows(
    model: Any, prompt: Any, request: Request, negative_prompt: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Check the rows of a request, and those of its unconditional branch (none without guidance). Raises ValueError for
    rows that do not fit the model, each other or the guidance."""
    rows = _rows("prompt", prompt)
    model.check_prompts("prompt", rows)
    if request.guidance_scale == 1:
        if negative_prompt is not None:
            raise ValueError("negative_prompt has no effect without guidance; give guidance_scale")
        return rows, []
    if negative_prompt is None:
        raise ValueError(f"guidance_scale={request.guidance_scale} needs negative_prompt, for the unconditional branch")
    negative = _rows("negative_prompt", negative_prompt)
    model.check_prompts("negative_prompt", negative)
    if len(negative) != len(rows) or len(negative[0]) != len(rows[0]):
        raise ValueError(f"negative_prompt has {len(negative)} rows of {len(negative[0])} ids; prompt others")
    return rows, negative


def _rows(name: str, prompt: Any) -> list[list[int]]:
    """Rows of ids, at least one, all as long."""
    rows = prompt.rows if isinstance(prompt, Prompts) else [list(row) for row in prompt]
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError(f"{name} must be rows of ids, all of one length; it has {[len(row) for row in rows][:8]} ids")
    return rows


METHODS: dict[str, type[SJD]] = {"jacobi": Jacobi, "sjd": SJD, "scd": SCD}
"""What verifies drafts: by fixed noise, with which tokens are those of one position a step, or by a quotient."""


@dataclass
class RankedState(OrderedState):
    """An `OrderedState` of pictures: guided by rank, over a store whose slots are ranks."""

    guidance: float = 1.0
    grows: bool = False
    """Whether guidance grows from 1 with the rank, as published."""

    def _call(self, store: Any, spans: Spans, index: np.ndarray) -> Any:
        query = super()._call(store, spans, index)
        rows, device = query.rows, query.tokens.device
        ranks = torch.as_tensor(self._ranks(rows), device=device).gather(1, query.positions)
        slot, num_left = np.arange(self.width), self.slots(rows)
        wanted_slots = np.minimum(slot, num_left[:, None] - 1)[:, : num_left.max()]
        cells = self.length[rows, None] - self.known[rows, None]
        num_decided = (self.committed - self.known)[rows, None] + wanted_slots
        scale = (
            1 + (self.guidance - 1) * num_decided / cells if self.grows else np.full(num_decided.shape, self.guidance)
        )
        final = int(spans.begin[index].max())
        return RankedQuery(
            **{
                **vars(query),
                "branches": 1 if self.guidance == 1 else 2,
                "ranks": ranks,
                "scale": torch.as_tensor(scale, device=device),
                "is_wanted": torch.as_tensor(slot[: num_left.max()] < num_left[:, None], device=device),
                "store": StoreCall(query.store.rows, None, rows, final, step=self.commits),
            }
        )

    def distribution(self, logits: Tensor, rows: np.ndarray, positions: Tensor) -> Tensor:
        request = self.request
        assert self.allowed is not None
        logits = logits.masked_fill(~self.allowed, -torch.inf)
        return filtered_distribution(logits, request.temperature, request.top_k, request.top_p)


@dataclass(frozen=True)
class Groups(GroupWriter):
    """Per call, evaluate the tokens of the last group (at first the class) and a mask at every position of the next
    one; draw that group's tokens independently.

    Keys and values are written at ranks of the order; the next call overwrites those of masks by those of the tokens
    there. Tokens see all ranks up to their own group's end; masks also see each other.

    Args:
        order: which positions are decided together: a name of `paradec.core.orders.names()`, one made by
            `paradec.core.orders.create`, or its plain data ({"order": "lpd", "sizes": 32, "repulsion": 3}). Without
            sizes, the request's `steps` is the number of groups; without `steps` too, LPD's order has its published
            sizes, and others groups of one position.
        guidance_schedule: "linear" grows from 1 with the rank r of S, 1 + (scale - 1) r / S, as published; or
            "constant".
        lossless: decide what groups of one position decide in this order, in fewer calls: each asks for all undecided
            positions, given drafts for them; the drafts that the order confirms become final (see the module). The
            order's sizes shape the order alone.
        verify: how. "jacobi": the noise of a position is kept; the tokens are those of one position a call with this
            noise. "sjd", "scd": drafts are accepted by their probabilities; the same distribution.
        window: with `lossless`, how many positions a call may decide; None is all, 1 one a call.

    Raises:
        ValueError: a setting out of its range. TypeError: no order.
    """

    order: str | Order | Mapping[str, Any] = "lpd"
    guidance_schedule: str = "linear"
    lossless: bool = False
    verify: str = "jacobi"
    window: int | None = None

    name = "groups"
    paper = "LPD"
    arxiv = "2507.01957"
    summary = "groups of positions in any order, each asked for by masks at its positions"
    models = ("grouped image",)
    uses_steps = True
    unsupported = unsupported_for_pictures("steps", "temperature", "top_p", "top_k")
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"lpd": {"order": "lpd"}}

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", orders.resolve_order(self.order))
        check_choice("guidance_schedule", self.guidance_schedule, ("linear", "constant"))
        check_bool("lossless", self.lossless)
        check_choice("verify", self.verify, METHODS)
        check_int("window", self.window, low=1, none=True)
        if not self.lossless and (self.verify != "jacobi" or self.window is not None):
            name = "window" if self.window is not None else "verify"
            raise ValueError(f"{name}={getattr(self, name)!r} has no meaning without lossless=True: leave it out")

    @property
    def exact(self) -> SJD:
        """The method that verifies drafts."""
        return METHODS[self.verify](window=self.window)

    def _state(self, model: Any, prompt: Any, request: Request, grid: Grid, negative_prompt: Any) -> Any:
        """A `GroupState`; with `lossless` a `RankedState`."""
        facts, device = model.facts, model.device
        rows, negative = checked_rows(model, prompt, request, negative_prompt)
        branches, contexts = 1 + bool(negative), [*rows, *negative]
        keys, _ = make_row_keys(request, rows, torch.device("cpu"))
        assert isinstance(self.order, Order)
        groups = self.order.with_steps(request.steps).groups(grid.height, grid.width, draws_from_keys(keys))
        if self.lossless:
            masked = [[*row, *[model.blank_id] * grid.length] for row in rows]
            order = groups.order.tolist()
            ranked_request = replace(request, sampler=DEFAULTS["sampler"], guidance_scale=1.0, steps=None, order=order)
            view, encoded = model.in_any_order(branches), Prompts(masked, single=False, starts=[0] * len(rows))
            ranked_state = any_order.start(self.exact, view, encoded, ranked_request, kind=RankedState)
            assert isinstance(ranked_state, RankedState)
            ranked_state.guidance, ranked_state.grows = request.guidance_scale, self.guidance_schedule == "linear"
            return ranked_state
        length = len(rows[0])
        cells = length + grid.cell_offsets[torch.as_tensor(groups.order.copy())]
        state = GroupState(
            batch=len(rows),
            memory=Memory(),
            facts=facts,
            request=request.without_objects(),
            context=torch.as_tensor(pad_rows(contexts, length + grid.length, model.blank_id), device=device),
            groups=groups,
            cells=cells.to(device),
            prompt_length=np.full(len(rows), length),
            keys=keys.to(device),
            dtype=model.dtype,
            blank=model.blank_id,
            branches=branches,
            store=model.make_store(len(contexts), length + grid.length),
        )
        ends = state.prompt_length + grid.length
        state.trace = make_trace(self, request, state.canvas, ends, score="probability", mask_id=model.blank_id)
        return state

    # ---- steps ----------------------------------------------------------------------------------------------------

    def query(self, state: Any) -> list[Any]:
        if isinstance(state, RankedState):
            return self.exact.query(state)
        previous, group = state.index - 1, state.index
        previous_positions, group_positions = state.positions(previous), state.positions(group)
        positions = torch.cat((previous_positions, group_positions), 1).repeat(state.branches, 1)
        tokens = state.context.gather(1, positions)  # blank where nothing is decided
        ranks = torch.cat((state.ranks(previous), state.ranks(group)))
        ends = torch.tensor([state.end(previous), state.end(group)], device=ranks.device)
        visible_end = ends.repeat_interleave(
            torch.tensor([previous_positions.shape[1], group_positions.shape[1]], device=ranks.device)
        )
        rows = np.arange(len(tokens))
        row_index = torch.as_tensor(rows, device=ranks.device)
        return [
            GroupQuery(
                rows=state.rows,
                tokens=tokens,
                positions=positions,
                wanted=torch.arange(previous_positions.shape[1], len(ranks), device=ranks.device).expand(len(rows), -1),
                store=StoreCall(row_index, ranks.expand(len(rows), -1), rows, state.end(group), step=state.commits),
                visible_end=visible_end.expand(len(rows), -1),
                branches=state.branches,
                forwarded=np.full(state.batch, len(ranks)),
                kind="window" if state.index else "full",
            )
        ]

    def propose(self, state: Any, outputs: list[Tensor], queries: list[Any]) -> Proposal:
        """A token for every position of the group. Quantities: "top_logit" [B, n]."""
        if isinstance(state, RankedState):
            return self.exact.propose(state, outputs, queries)
        (logits,), (query,) = outputs, queries
        if state.branches == 2:
            logits = apply_guidance(logits, self.guidance(state))
        p = self.distribution(state, logits)
        positions = state.positions(state.index)
        tokens = self.draw(state, p, positions)
        return Proposal(
            rows=query.rows,
            values=tokens,
            cost=Cost([query], state.batch),
            positions=positions,
            scores=probability(p, tokens).double(),
            available=torch.ones_like(tokens, dtype=torch.bool),
            quantities={"top_logit": logits.amax(-1)},
            made_at=state.commits,
            kind=query.kind,
        )

    def draw(self, state: GroupState, p: Tensor, positions: Tensor) -> Tensor:
        """Tokens [B, n] of positions [B, n]: the lowest id whose cumulated probability is above a uniform number."""
        step = torch.full((state.batch,), state.index, device=positions.device)
        uniform = rng.uniform(state.keys, step, positions, 1, rng.TOKEN_STREAM)
        return draw(p, uniform.squeeze(-1))

    def commit(self, state: Any, proposal: Proposal) -> Commit:
        return self.exact.commit(state, proposal) if isinstance(state, RankedState) else super().commit(state, proposal)

    def observe(self, state: Any, proposal: Any) -> Notes:
        if isinstance(state, RankedState):
            return self.exact.observe(state, proposal)
        return super().observe(state, proposal)

    def guidance(self, state: GroupState) -> float | Tensor:
        """The guidance scale of this step's group, for requests with guidance: a number, or [1, n, 1]."""
        scale = state.request.guidance_scale
        if self.guidance_schedule == "constant":
            return scale
        rank = (state.ranks(state.index) - state.prompt).to(torch.promote_types(state.dtype, torch.float32))
        return 1 + (scale - 1) * rank.view(1, -1, 1) / state.groups.order.shape[1]

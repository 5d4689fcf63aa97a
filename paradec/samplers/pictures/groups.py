"""LPD's decoding by groups of positions: a call evaluates the previous group's tokens, and masks for the next group.

Zhang et al., "Locality-aware Parallel Decoding for Efficient Autoregressive Image Generation", arXiv 2507.01957, and
its public code. A step commits one group (`paradec.core.orders`), whose tokens are drawn independently. Keys and values
are stored by rank, the index in decoding order. An input token attends to all ranks up to the end of its own group.

With `Groups(lossless=True)` a mask attends only to tokens of lower rank and to itself, so that one call predicts
several positions, each from the tokens before it in decoding order. `paradec.samplers.causal.any_order` then decodes.
The tokens are those of groups of one position; in LPD's larger groups, masks attend to each other. A call stores keys
and values of the last final token and of the drafts (again in every call), but never of masks.
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
class PictureState(State):
    """State of a request, for all samplers of the family. `B` rows of `L` positions: the prompt, then the picture."""

    request: Request
    context: Tensor
    """[branches * B, L] int64 ids, conditional rows first."""
    prompt_length: np.ndarray
    """[B] int64 on the host, equal in both branches."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    store: KeyValueStore
    index: int = field(init=False, default=0)
    """Index of the group that the next step commits."""
    accepted: list[np.ndarray] = field(init=False, default_factory=list)
    """[B] int64 per step: number of tokens of each row that became final."""

    @property
    def canvas(self) -> Tensor:
        """[B, L] int64 ids."""
        return self.context[: self.batch]

    @property
    def draft_nfe(self) -> np.ndarray:
        """[B] int64: 0, since there is no draft model."""
        return np.zeros(self.batch, np.int64)

    def stores(self) -> tuple[Any, ...]:
        return (self.store,)


@dataclass
class GroupState(PictureState):
    """State of pictures that are decoded group by group. All prompts have `T` tokens, followed by the `S` cells of the
    picture. `context` has `blank` at undecided cells. The slots of `store` are ranks."""

    facts: ModelFacts
    groups: orders.Groups
    """Groups of cells."""
    cells: Tensor
    """[B, S] int64: positions in the sequence, in the order of decoding."""
    dtype: torch.dtype
    """Dtype of the model's parameters."""
    blank: int
    """Id of undecided cells: the mask at which the model predicts a token."""
    branches: int

    @property
    def prompt_size(self) -> int:
        """T: number of tokens of the prompt."""
        return int(self.prompt_length[0])

    @property
    def done(self) -> bool:
        return self.index == len(self.groups)

    @property
    def progress(self) -> tuple[int, int]:
        num_left = self.groups.num_left
        return int(num_left[0] - num_left[self.index]) * self.batch, int(num_left[0]) * self.batch

    def end(self, group: int) -> int:
        """Return the rank after a group's last cell; group -1 is the prompt."""
        return self.prompt_size + (0 if group < 0 else int(self.groups.ends[group]))

    def positions(self, group: int) -> Tensor:
        """[B, n] int64: positions of a group in the sequence; group -1 is the prompt."""
        if group < 0:
            return torch.arange(self.prompt_size, device=self.cells.device).expand(self.batch, -1)
        return self.cells[:, self.end(group - 1) - self.prompt_size : self.end(group) - self.prompt_size]

    def ranks(self, group: int) -> Tensor:
        """[n] int64: ranks of a group, which are its slots; group -1 is the prompt."""
        first = 0 if group < 0 else self.end(group - 1)
        return torch.arange(first, self.end(group), device=self.cells.device)


@dataclass(frozen=True)
class GroupSampler(Sampler):
    """Base of the samplers of the family: start, token distribution and commit. A subclass implements `_state`."""

    family: ClassVar[str] = "groups"
    request_defaults = {"temperature": 1.0}

    def distribution(self, state: PictureState, logits: Tensor) -> Tensor:
        """Compute the token distribution [B, n, V] of guided logits [B, n, V]: temperature, then top-k, then top-p."""
        request = state.request
        return filtered_distribution(logits, request.temperature, request.top_k, request.top_p)

    def _state(self, model: Any, prompt: Any, request: Request, grid: Grid, negative_prompt: Any) -> Any:
        """Make the state of a request; arguments as for `start`."""
        raise NotImplementedError

    @torch.inference_mode(False)  # else the state could be used in inference mode only
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

        model: an image model; for `nar` with captions, the copy that `model.request` returns.
        prompt: rows of ids from `model.request`, for `groups` all of the same length.
        request: `steps` is the number of groups if the order has no group sizes. Temperature is 1 by default.
        grid: the picture's grid of cells; None: that of the model.
        negative_prompt: rows of ids for the unconditional branch, each as long as the row of `prompt`; required for
            guidance."""
        self.check_model(model)
        request = request_for(self, request, arguments)
        return self._state(model, prompt, request, model.grid() if grid is None else grid, negative_prompt)

    def commit(self, state: PictureState, proposal: Proposal) -> Commit:
        """Write the group. Raises FloatingPointError for NaN or infinite logits (then nothing is written)."""
        state.check_current(proposal)
        is_finite = (proposal.quantities["top_logit"].isfinite() & proposal.scores.isfinite()).all(1)
        message = f"the model returned NaN or infinite logits for row {{row}} at step {state.index}"
        check_finite(is_finite, proposal.rows, message)
        branches = len(state.context) // state.batch
        positions, tokens = proposal.positions.repeat(branches, 1), proposal.values.repeat(branches, 1)
        state.context = state.context.scatter(1, positions, tokens)
        state.accepted.append(np.full(state.batch, tokens.shape[1], np.int64))
        state.count(proposal.cost)
        state.commits += 1
        state.index += 1
        selected = torch.ones_like(proposal.values, dtype=torch.bool)
        return Commit(proposal.rows, proposal.values, proposal.positions, selected, proposal.scores, proposal.kind)


def check_rows(
    model: Any, prompt: Any, request: Request, negative_prompt: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the rows of ids of a request and of its unconditional branch (without guidance: none). Raises ValueError
    if the rows do not fit the model, differ in length, or if only one of guidance and `negative_prompt` is given."""
    rows = _read_rows("prompt", prompt)
    model.check_prompts("prompt", rows)
    if request.guidance_scale == 1:
        if negative_prompt is not None:
            raise ValueError("negative_prompt has no effect without guidance; give guidance_scale")
        return rows, []
    if negative_prompt is None:
        raise ValueError(f"guidance_scale={request.guidance_scale} needs negative_prompt, for the unconditional branch")
    negative = _read_rows("negative_prompt", negative_prompt)
    model.check_prompts("negative_prompt", negative)
    if len(negative) != len(rows) or len(negative[0]) != len(rows[0]):
        sizes = [f"{len(part)} rows of {len(part[0])} ids" for part in (negative, rows)]
        raise ValueError(f"negative_prompt has {sizes[0]}, prompt {sizes[1]}")
    return rows, negative


def _read_rows(name: str, prompt: Any) -> list[list[int]]:
    """Read rows of ids: at least one, all of the same length and not empty."""
    rows = prompt.rows if isinstance(prompt, Prompts) else [list(row) for row in prompt]
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError(f"{name} must be rows of ids of one length; it has {[len(row) for row in rows][:8]} ids")
    return rows


METHODS: dict[str, type[SJD]] = {"jacobi": Jacobi, "sjd": SJD, "scd": SCD}
"""Samplers that verify drafts: "jacobi" with fixed noise for each position, "sjd" and "scd" by the ratio p / q."""


@dataclass
class RankedState(OrderedState):
    """`OrderedState` of pictures: the guidance scale may depend on the rank, and the store's slots are ranks."""

    guidance: float = 1.0
    guidance_grows: bool = False
    """Whether guidance grows from 1 with the rank, as published."""

    def _make_query(self, store: Any, spans: Spans, index: np.ndarray) -> Any:
        query = super()._make_query(store, spans, index)
        rows, device = query.rows, query.tokens.device
        ranks = torch.as_tensor(self._ranks(rows), device=device).gather(1, query.positions)
        slots, num_left = np.arange(self.width), self.num_slots(rows)
        wanted_slots = np.minimum(slots, num_left[:, None] - 1)[:, : num_left.max()]
        num_cells = self.length[rows, None] - self.num_known[rows, None]
        num_decided = (self.committed - self.num_known)[rows, None] + wanted_slots
        scale = np.full(num_decided.shape, self.guidance)
        if self.guidance_grows:
            scale = 1 + (self.guidance - 1) * num_decided / num_cells
        num_final = int(spans.begin[index].max())
        return RankedQuery(
            **{
                **vars(query),
                "branches": 1 if self.guidance == 1 else 2,
                "ranks": ranks,
                "scale": torch.as_tensor(scale, device=device),
                "is_wanted": torch.as_tensor(slots[: num_left.max()] < num_left[:, None], device=device),
                "store": StoreCall(query.store.rows, None, rows, num_final, step=self.commits),
            }
        )

    def distribution(self, logits: Tensor, rows: np.ndarray, positions: Tensor) -> Tensor:
        request = self.request
        assert self.allowed is not None
        logits = logits.masked_fill(~self.allowed, -torch.inf)
        return filtered_distribution(logits, request.temperature, request.top_k, request.top_p)


@dataclass(frozen=True)
class Groups(GroupSampler):
    """Each call evaluates the tokens of the previous group (at first the class) and a mask at every position of the
    next group. The tokens of the next group are then drawn independently.

    Keys and values are stored by rank, the index in decoding order. The next call replaces the keys and values of a
    mask by those of the drawn token. Tokens and masks attend to all ranks up to the end of their own group.

    Args:
        order: order and groups of the positions: a name of `paradec.core.orders.names()`, an order from
            `paradec.core.orders.create`, or its plain data ({"order": "lpd", "sizes": 32, "repulsion": 3}). Without
            sizes, the request's `steps` is the number of groups. Without `steps` too, LPD's order has its published
            sizes, and other orders have groups of one position.
        guidance_schedule: "linear": the r-th of S cells in decoding order (from 0) has guidance scale
            1 + (scale - 1) r / S, as published; "constant": all cells have the same scale.
        lossless: whether to compute the result of groups of one position in this order, in fewer calls. Each call
            predicts all undecided positions from drafts, and verified drafts become final. Group sizes then affect
            only the order of the positions.
        verify: method of verification, for `lossless`. "jacobi" draws a position with the same noise in every call; the
            tokens equal those of one position per call. With "sjd" and "scd", only the distribution is equal.
        window: with `lossless`, the largest number of positions that a call decides; None: all.

    Raises:
        ValueError: a setting out of its range. TypeError: `order` is not an order.
    """

    order: str | Order | Mapping[str, Any] = "lpd"
    guidance_schedule: str = "linear"
    lossless: bool = False
    verify: str = "jacobi"
    window: int | None = None

    name = "groups"
    paper = "LPD"
    arxiv = "2507.01957"
    summary = "groups of positions in any order; a call predicts a group by masks at its positions"
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
    def verifier(self) -> SJD:
        """The sampler that verifies drafts, with `lossless`."""
        return METHODS[self.verify](window=self.window)

    def _state(self, model: Any, prompt: Any, request: Request, grid: Grid, negative_prompt: Any) -> Any:
        """Make a `GroupState`, or with `lossless` a `RankedState`."""
        facts, device = model.facts, model.device
        rows, negative = check_rows(model, prompt, request, negative_prompt)
        branches, contexts = 1 + bool(negative), [*rows, *negative]
        keys, _ = make_row_keys(request, rows, torch.device("cpu"))
        assert isinstance(self.order, Order)
        groups = self.order.with_steps(request.steps).groups(grid.height, grid.width, draws_from_keys(keys))
        if self.lossless:
            masked = [[*row, *[model.blank_id] * grid.length] for row in rows]
            order = groups.order.tolist()
            ranked_request = replace(request, sampler=DEFAULTS["sampler"], guidance_scale=1.0, steps=None, order=order)
            view, encoded = model.in_any_order(branches), Prompts(masked, single=False, starts=[0] * len(rows))
            ranked_state = any_order.start(self.verifier, view, encoded, ranked_request, state_type=RankedState)
            assert isinstance(ranked_state, RankedState)
            ranked_state.guidance = request.guidance_scale
            ranked_state.guidance_grows = self.guidance_schedule == "linear"
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
            return self.verifier.query(state)
        previous, group = state.index - 1, state.index
        previous_positions, group_positions = state.positions(previous), state.positions(group)
        positions = torch.cat((previous_positions, group_positions), 1).repeat(state.branches, 1)
        tokens = state.context.gather(1, positions)  # `blank` at undecided cells
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
        """Draw a token for every position of the group. Quantities: "top_logit" [B, n]."""
        if isinstance(state, RankedState):
            return self.verifier.propose(state, outputs, queries)
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
        """Draw tokens [B, n] at positions [B, n]: the lowest id whose cumulative p exceeds a uniform number."""
        step = torch.full((state.batch,), state.index, device=positions.device)
        uniform = rng.uniform(state.keys, step, positions, 1, rng.TOKEN_STREAM)
        return draw(p, uniform.squeeze(-1))

    def commit(self, state: Any, proposal: Proposal) -> Commit:
        if isinstance(state, RankedState):
            return self.verifier.commit(state, proposal)
        return super().commit(state, proposal)

    def observe(self, state: Any, proposal: Any) -> Notes:
        if isinstance(state, RankedState):
            return self.verifier.observe(state, proposal)
        return super().observe(state, proposal)

    def guidance(self, state: GroupState) -> float | Tensor:
        """Return the guidance scale of the next group: a number, or [1, n, 1]. Only for requests with guidance."""
        scale = state.request.guidance_scale
        if self.guidance_schedule == "constant":
            return scale
        rank = (state.ranks(state.index) - state.prompt_size).to(torch.promote_types(state.dtype, torch.float32))
        return 1 + (scale - 1) * rank.view(1, -1, 1) / state.groups.order.shape[1]

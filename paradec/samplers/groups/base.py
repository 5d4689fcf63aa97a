"""Image models that are fed groups of positions in any order: the loop that their samplers share.

A sampler of this family commits one group of an order (`paradec.core.orders`) per step, every token of it drawn on its
own. What a step evaluates for that is the sampler's `query`; keys and values are stored by rank, so that a column sees
what was decided up to some group, wherever it lies in the picture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import GroupQuery
from paradec.core.memory import Memory
from paradec.core.orders import Groups, Order, keyed
from paradec.core.prompts import Prompts
from paradec.core.protocol import Commit, Proposal, Sampler, State, check_finite
from paradec.core.query import Cost
from paradec.kernels.token_stats import draw
from paradec.models.images.grid import Grid
from paradec.request import Request, request_for
from paradec.samplers.causal.verification import probability
from paradec.samplers.filters import filtered_distribution
from paradec.samplers.guidance import guided
from paradec.samplers.starting import keys_of, padded, trace_of, unsupported_for_pictures

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
    groups: Groups
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
        left = self.groups.left
        return int(left[0] - left[self.index]) * self.batch, int(left[0]) * self.batch

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

    def both(self, rows: Tensor) -> Tensor:
        """[B, ...] -> [branches * B, ...]."""
        return rows.repeat(self.branches, *[1] * (rows.ndim - 1))


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

    def commit(self, state: WrittenState, proposal: Proposal) -> Commit:
        """Write the group.

        Raises:
            FloatingPointError: the model returned NaN or infinite logits. Nothing is written then.
        """
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
        written = torch.ones_like(proposal.values, dtype=torch.bool)
        return Commit(proposal.rows, proposal.values, proposal.positions, written, proposal.scores, proposal.kind)


@dataclass(frozen=True)
class GroupSampler(GroupWriter):
    """Base of the samplers of any order. A subclass says in which order (`order_for`), what a step evaluates (`query`),
    and with which guidance (`guidance`)."""

    models: ClassVar[tuple[str, ...]] = ("grouped image",)
    uses_steps: ClassVar[bool] = True
    unsupported: ClassVar[tuple[str, ...]] = unsupported_for_pictures("steps", "temperature", "top_p", "top_k")

    # ---- the method's own decisions -------------------------------------------------------------------------------

    def order_for(self, steps: int | None) -> Order:
        """The order of a request. steps: groups that it asks for, or None.

        Raises:
            ValueError: an order whose groups cannot be so many.
        """
        raise NotImplementedError

    def query(self, state: GroupState) -> list[GroupQuery]:
        """The model call of this step; its wanted columns are the group's, in the order's order."""
        raise NotImplementedError

    def guidance(self, state: GroupState) -> float | Tensor:
        """The guidance scale of this step's group, for requests with guidance: a number, or [1, n, 1]."""
        return state.request.guidance_scale

    # ---- start ----------------------------------------------------------------------------------------------------

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
    ) -> GroupState:
        """Make the state of one request.

        Args:
            model: an image model that is fed groups.
            prompt: rows of ids, all of one length, as `model.request` lays them out.
            request: a `paradec.Request`; or its fields by name instead. All but `unsupported` count; `steps` is
                the number of groups, for orders that say none; temperature is 1 by default.
            grid: the raster; the model's own by default.
            negative_prompt: the unconditional branch's prompts under guidance.

        Raises:
            TypeError: a model of another kind. ValueError: an argument out of its range; the message names it.
        """
        self.check_model(model)
        request = request_for(self, request, arguments)
        facts, device = model.facts, model.device
        grid = model.grid() if grid is None else grid
        rows, negative = checked_rows(model, prompt, request, negative_prompt)
        branches, contexts = 1 + bool(negative), [*rows, *negative]
        keys, _ = keys_of(request, rows, torch.device("cpu"))
        groups = self.order_for(request.steps).groups(grid.height, grid.width, keyed(keys))
        length = len(rows[0])
        cells = length + grid.cell_offsets[torch.as_tensor(groups.order.copy())]
        state = GroupState(
            batch=len(rows),
            memory=Memory({}, len(rows), {}, device),
            facts=facts,
            request=request.without_objects(),
            context=torch.as_tensor(padded(contexts, length + grid.length, model.blank_id), device=device),
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
        state.trace = trace_of(self, request, state.canvas, ends, score="probability", mask_id=model.blank_id)
        return state

    # ---- steps ----------------------------------------------------------------------------------------------------

    def propose(self, state: GroupState, outputs: list[Tensor], queries: list[GroupQuery]) -> Proposal:
        """A token for every position of the group. Quantities: "top_logit" [B, n]."""
        (logits,), (query,) = outputs, queries
        if state.branches == 2:
            logits = guided(logits, self.guidance(state))
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


def checked_rows(
    model: Any, prompt: Any, request: Request, negative_prompt: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """The rows of a request, and those of its unconditional branch, of which there are none without guidance.

    Raises:
        ValueError: rows that the model does not take, or that do not fit each other or the guidance.
    """
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


def _rows(name: str, given: Any) -> list[list[int]]:
    """Rows of ids, at least one, all as long."""
    rows = given.rows if isinstance(given, Prompts) else [list(row) for row in given]
    if not rows or len({len(row) for row in rows}) != 1 or not rows[0]:
        raise ValueError(f"{name} must be rows of ids, all of one length; it has {[len(row) for row in rows][:8]} ids")
    return rows

"""State of a request to a causal model, and the model calls that evaluate spans of rows with the key/value store."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import CausalQuery
from paradec.core.protocol import Proposal, State
from paradec.core.query import Cost, StoreCall, branch_rows
from paradec.core.rows import ROWS, RowLayout, row_layout
from paradec.models.images.grid import Grid
from paradec.request import Request
from paradec.samplers.distributions import apply_guidance, safe_log, token_distribution

if TYPE_CHECKING:
    from paradec.caches.store import KeyValueStore


DRAFT_STREAM, NOISE_STREAM = 2, 3
"""Random streams of drafts and of position noise; `paradec.core.rng` has streams 0 and 1."""
ALL_SLOTS = np.iinfo(np.int64).max - 1
"""Value of `CausalState.num_drafts`: every slot has a draft."""


class Spans(NamedTuple):
    """Positions of rows that a call evaluates."""

    rows: np.ndarray
    """[R] int64."""
    drafts: Tensor
    """[R, W] int64: drafts, from position `committed` on."""
    begin: np.ndarray
    stop: np.ndarray
    """`begin` and `stop` [R] int64: the positions to evaluate. A `begin` of 0 is the start of each branch's prompt."""
    first_wanted: np.ndarray
    wanted: int
    """Logits are read at `wanted` positions from `first_wanted` [R] on. Past a span, its last one is read again."""
    is_first: np.ndarray | None = None
    """[R] bool: rows whose prompts are evaluated. With a store, these rows have a separate call."""


@dataclass
class Drafting:
    """State of the model that drafts. `B` rows."""

    model: Any
    """The drafter: a model (for `SelfSpeculative` the request's), `TokenRecycling`, or a
    `paradec.models.drafter.FeatureDrafter`, which reads the hidden states of the request's model."""
    nfe: np.ndarray = field(metadata=ROWS)
    """[B] int64: forwards of the drafter."""
    num_read: np.ndarray = field(metadata=ROWS)
    """[B] int64: number of final tokens that the drafter has read; after a `DraftChain` also its drafts."""
    store: KeyValueStore | None = field(default=None, metadata=ROWS)
    features: Tensor | None = field(default=None, metadata=ROWS)
    """[branches * B, F, D]: hidden states before the last F tokens read, for drafters that read these tokens again."""
    broken: Tensor | None = field(default=None, metadata=ROWS)
    """[B] bool: whether the drafter returned NaN or infinite logits for a row."""
    parents: Tensor | None = field(default=None, metadata=ROWS)
    """[B, N] int64: each node's parent (-1 for the root), if trees differ between rows."""


@dataclass
class CausalState(State):
    """State of rows whose tokens are drafted and verified. `B` rows (`R` of them selected), canvas of `L` positions,
    `W` window slots, `V` tokens.

    Slot i of a row's window is position `committed + i`; a draft in the last slot is never verified. The memory has
    "drafts" [B, W], "draft_source" [B, W] and "draft_distribution" [B, W, V], as in `DraftDistributions`; for Gumbel
    noise "noise" [B, W, V], with position i at index i % W; for init "sample_*" the likeliest tokens "best" [B, L].
    """

    facts: ModelFacts
    request: Request
    pads: bool
    context: Tensor = field(metadata={"rows": lambda state, _: RowLayout(columns=1, fill=state.facts.fill_token_id)})
    """[branches * B, L] int64 ids, conditional rows first; positions from `committed` on hold the fill id."""
    shift: np.ndarray = field(metadata=row_layout(axis=1))
    """[branches, B] int64: length of the branch's prompt minus that of the conditional branch's prompt."""
    prompt_length: np.ndarray = field(metadata=ROWS)
    length: np.ndarray = field(metadata=ROWS)
    """[B] int64 on the host: number of positions of each row."""
    keys: Tensor = field(metadata=ROWS)
    """[B, 2] int64 random keys."""
    width: int
    """W: the sampler's window or the whole answer, whichever is shorter; for a tree the number of nodes."""
    guess: Tensor
    """[V] float: the uniform distribution of random guesses."""
    guess_ids: Tensor
    """[S] int64: tokens with a probability above 0 in `guess`."""
    allowed: Tensor | None
    """[V] bool: tokens that may be drawn; None: all."""
    ends: Tensor
    """[E] int64: ids that end a row."""
    grid: Grid | None = None
    layout: Tensor | None = None
    """[N] int64: token that the grid prescribes at each offset from the prompt's end; -1: none."""
    store: KeyValueStore | None = field(default=None, metadata=ROWS)
    embeddings: Tensor | None = field(init=False, default=None)
    """[V, d] float: vectors of the tokens, for methods that compare them."""
    drafting: Any = field(init=False, default=None, metadata=ROWS)
    """`Drafting`, or None without a drafter."""
    committed: np.ndarray = field(init=False, metadata=ROWS)
    row_step: np.ndarray = field(init=False, metadata=ROWS)
    num_drafts: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64 on the host: number of drafts in each row's window."""
    requested_end: np.ndarray = field(init=False, metadata=ROWS)
    end: np.ndarray = field(init=False, metadata=ROWS)
    answer_start: np.ndarray = field(init=False, metadata=ROWS)
    stopped: np.ndarray = field(init=False, metadata=ROWS)
    reused: np.ndarray = field(init=False, metadata=ROWS)
    last_accepted: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64: number of tokens that each row made final in the last step."""

    revises: ClassVar[bool] = False
    guesses: ClassVar[bool] = True
    """Whether slots that are new to the window get guesses."""
    attention_state: ClassVar[None] = None
    causal_keys: ClassVar[bool] = True
    cache: ClassVar[SimpleNamespace] = SimpleNamespace(name="causal")
    in_order: ClassVar[bool] = True
    """Whether positions become final from left to right."""
    constraint: ClassVar[Any] = property(lambda self: self.features.get("constraint"))
    """The `CausalConstraint`, or None."""
    controls: ClassVar[Any] = property(lambda self: self.features.get("controls"))
    """The `TokenControls`, or None."""
    stop_strings: ClassVar[Any] = property(lambda self: self.features.get("stop_strings"))
    """The `StopStrings`, or None."""
    rollout: ClassVar[Any] = property(lambda self: self.features.get("rollout"))
    """The `RecordedRollout`, or None."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.committed = self.prompt_length.copy()
        self.row_step = np.zeros(self.batch, np.int64)
        self.num_drafts = np.full(self.batch, ALL_SLOTS)
        self.requested_end, self.end = self.length, self.length.copy()
        self.answer_start = self.prompt_length
        self.stopped = np.zeros(self.batch, bool)
        self.reused = np.zeros(self.batch, np.int64)
        self.last_accepted = np.zeros(self.batch, np.int64)
        self.accepted: list[np.ndarray] = []
        """[B] int64 per step since the last change of rows: number of tokens that each row made final."""

    @property
    def draft_nfe(self) -> np.ndarray:
        """[B] int64: forwards of the model that drafts."""
        return np.zeros(self.batch, np.int64) if self.drafting is None else self.drafting.nfe

    @property
    def canvas(self) -> Tensor:
        """[B, L] int64 ids."""
        return self.context[: self.batch]

    @cached_property
    def branches(self) -> int:
        """Model rows per row of the state: 2 under guidance, else 1."""
        return len(self.shift)

    @property
    def max_new_tokens(self) -> int:
        return int((self.length - self.prompt_length).max())

    @property
    def running(self) -> np.ndarray:
        """[B] bool: whether the row is not done yet."""
        return np.isin(np.arange(self.batch), self.rows)

    @property
    def num_given(self) -> np.ndarray:
        """[B] int64: number of prompt tokens."""
        return self.prompt_length

    @property
    def decided(self) -> np.ndarray:
        """[B] int64: number of tokens that steps made final."""
        return self.committed - self.num_given

    @property
    def is_prompt(self) -> Tensor:
        """[B, L] bool: prompts."""
        return self._column < torch.as_tensor(self.prompt_length, device=self.context.device).unsqueeze(1)

    @property
    def undecided(self) -> Tensor:
        """[B, L] bool: positions before the rows' ends that are not final yet."""
        bounds = torch.as_tensor(np.stack((self.committed, self.end)), device=self.context.device).unsqueeze(-1)
        return (self._column >= bounds[0]) & (self._column < bounds[1])

    @property
    def done(self) -> bool:
        return len(self.rows) == 0

    @property
    def progress(self) -> tuple[int, int]:
        total = self.length - self.num_given
        return int(np.where(self.running, self.decided, total).sum()), int(total.sum())

    @property
    def _column(self) -> Tensor:
        return torch.arange(self.context.shape[1], device=self.context.device)

    def num_slots(self, rows: np.ndarray) -> np.ndarray:
        """[R] int64: number of slots of each row's window that lie before the row's `length`."""
        return np.minimum(self.width, self.length[rows] - self.committed[rows])

    def positions(self, rows: np.ndarray) -> Tensor:
        """[R, W] int64: positions of the slots, also past a row's end."""
        ranks = self.committed[rows, None] + np.arange(self.width)
        return torch.as_tensor(self.positions_of_ranks(rows[:, None], ranks), device=self.context.device)

    def positions_of_ranks(self, rows: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Positions of `ranks` (int64, any shape) in the orders of `rows` (broadcast with `ranks`)."""
        return ranks

    def num_evaluated(self) -> np.ndarray:
        """[R] int64: number of slots of each running row's window that this step evaluates."""
        return np.minimum(self.num_slots(self.rows), 1 + self.num_drafts[self.rows])

    def num_stored(self) -> np.ndarray:
        """[B] int64: number of final tokens in the store, if the store has final tokens only."""
        return np.where(self.row_step > 0, self.committed - self.last_accepted, self.reused)

    def num_predicted(self, evaluated: np.ndarray) -> np.ndarray:
        """[R] int64: number of the running rows' slots with logits, if a step evaluates `evaluated` [R] slots."""
        return evaluated

    def verified_slots(self, available: Tensor) -> Tensor:
        """[R, W] bool: slots whose drafts are verified. available: [R, W] bool: slots with logits."""
        # the last slot with logits is the token after all drafts; it has no draft
        return torch.nn.functional.pad(available[:, 1:], (0, 1))

    def is_draft(self, query: CausalQuery) -> np.ndarray:
        """[N, Q] bool on the host: whether a column of a query's first branch is a draft (or padding)."""
        return query.positions[: len(query.rows)].cpu().numpy() >= self.committed[query.rows, None]

    def finish_step(self, rows: np.ndarray) -> None:
        """Clear the store after the final tokens of `rows` [R], and find the rows that still run."""
        if self.store is not None:
            context_rows = self.context_rows(rows)
            # the last final token has not been evaluated
            self.store.clear_from(context_rows, (self.committed[rows] + self.shift[:, rows] - 1).reshape(-1))
        self._find_rows()

    def _find_rows(self) -> None:
        self.rows = np.flatnonzero(self.committed < self.end)

    @cached_property
    def has_prescribed_tokens(self) -> bool:
        """Whether the grid prescribes tokens."""
        return self.grid is not None and self.grid.length > self.grid.height * self.grid.width

    def uniform(
        self,
        rows: np.ndarray,
        positions: Tensor,
        count: int,
        stream: int | Tensor,
        steps_ahead: np.ndarray | None = None,
    ) -> Tensor:
        """Draw uniform numbers [R, W, count] float64 for `positions` at the rows' steps + `steps_ahead` [W]."""
        steps = self.row_step[rows] if steps_ahead is None else self.row_step[rows, None] + steps_ahead
        steps = torch.as_tensor(steps, device=positions.device)
        return rng.uniform(self.keys[torch.as_tensor(rows, device=positions.device)], steps, positions, count, stream)

    def prescribed_tokens(self, rows: np.ndarray, positions: Tensor) -> Tensor:
        """[R, W] int64: tokens that the grid prescribes at positions; -1: none."""
        layout = self.layout
        assert layout is not None  # called only with a grid
        offset = positions - torch.as_tensor(self.prompt_length[rows, None], device=positions.device)
        tokens = layout[offset.clamp(0, len(layout) - 1)]
        return torch.where(offset < len(layout), tokens, -1)

    def distribution(self, logits: Tensor, rows: np.ndarray, positions: Tensor) -> Tensor:
        """Compute the distribution [R, W, V] of logits [R, W, V] at positions [R, W]: filters, prescribed tokens."""
        p = token_distribution(logits, self.request, self.allowed)
        if self.has_prescribed_tokens:
            forced = self.prescribed_tokens(rows, positions).unsqueeze(-1)
            p = p.masked_fill(forced >= 0, 0)
            p.scatter_add_(-1, forced.clamp(min=0), (forced >= 0).to(p.dtype))
        return p

    def recorded_quantities(
        self,
        p: Tensor | None,
        logits: Tensor,
        guided: Tensor,
        rows: np.ndarray,
        positions: Tensor,
        node: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the proposal's quantities for log-probabilities ("log_p" [R, W, V]) and rollouts ("logits" [R, W, V]).

        p: [R, W, V]: the target distributions at `positions` [R, W]; None: computed from the logits.
        logits, guided: [R, N, V]: logits with constraint, and without. node: [R, W] int64: indices in N; None: all."""
        quantities = {}
        if self.logprobs is not None:
            node_logits = logits if node is None else logits.take_along_dim(node.unsqueeze(-1), 1)
            source = self
            if self.request.temperature == 0:  # p is one-hot: record temperature 1 instead
                source, p = copy.copy(self), None
                source.request = dataclasses.replace(self.request, temperature=1.0, top_p=None, top_k=None, min_p=None)
            quantities["log_p"] = safe_log(source.distribution(node_logits, rows, positions) if p is None else p)
        if self.rollout is not None:
            quantities["logits"] = guided if node is None else guided.take_along_dim(node.unsqueeze(-1), 1)
        return quantities

    def write(self, positions: Tensor, rows: np.ndarray, tokens: Tensor) -> None:
        """Write tokens [R, W] at positions [R, W] of every branch; -1 writes nothing. The positions of a row must be
        distinct; positions past the row's end must be the last."""
        # a tree can be deeper than the canvas: a column that wraps around twice would overwrite itself
        columns = self.context.shape[1]
        positions, tokens = positions[:, :columns], tokens[:, :columns]
        row_offset = torch.as_tensor(
            self.context_rows(rows).reshape(self.branches, -1, 1) * columns, device=tokens.device
        )
        shift = torch.as_tensor(self.shift[:, rows, None], device=tokens.device)
        # slots past the end wrap around, so that all indices of a row are valid and distinct
        index, context = (positions + shift) % columns + row_offset, self.context.view(-1)
        context[index] = torch.where(tokens >= 0, tokens, context.take(index))

    def make_queries(self, store: KeyValueStore | None, pads: bool, spans: Spans) -> list[CausalQuery]:
        """Make the queries that evaluate spans of rows: one for each group of `_group_spans`.

        store: has the tokens before the spans, and will store the spans; None: rows are evaluated from position 0.
        pads: whether the model supports padding."""
        if store is None:
            spans = spans._replace(begin=np.zeros_like(spans.begin))
        return [self._make_query(store, spans, index) for index in self._group_spans(store, pads, spans)]

    def _group_spans(self, store: KeyValueStore | None, pads: bool, spans: Spans) -> list[np.ndarray]:
        """Return the indices of each call's spans. Without padding, all spans of a call have the same bounds."""
        if not pads:
            bounds = np.stack((spans.begin, spans.stop), 1)
            return [np.flatnonzero((bounds == span).all(1)) for span in np.unique(bounds, axis=0)]
        is_first = spans.is_first
        if store is not None and is_first is not None and is_first.any() and not is_first.all():
            return [np.flatnonzero(is_first), np.flatnonzero(~is_first)]
        return [np.arange(len(spans.rows))]

    def _make_query(self, store: KeyValueStore | None, spans: Spans, index: np.ndarray) -> CausalQuery:
        rows, begin, stop, first = (array[index] for array in (spans.rows, spans.begin, spans.stop, spans.first_wanted))
        device, shift = self.context.device, self.shift[:, rows]
        # from this line on, arrays are [branches * N], branch after branch
        committed, stop, first = ((array + shift).reshape(-1) for array in (self.committed[rows], stop, first))
        is_full = not begin.any()
        begin = np.where(begin > 0, begin + shift, 0).reshape(-1)
        column = begin[:, None] + np.arange((stop - begin).max())
        valid = column < stop[:, None]
        # slots past a span repeat the logits of its last column
        wanted_columns = np.minimum(first[:, None] + np.arange(spans.wanted), stop[:, None] - 1) - begin[:, None]
        store_rows = self.context_rows(rows)
        row_index = torch.as_tensor(store_rows, device=device)
        positions = torch.as_tensor(np.minimum(column, stop[:, None] - 1), device=device)
        slot = torch.as_tensor(column - committed[:, None], device=device)
        drafts = spans.drafts
        if len(index) < len(drafts):
            drafts = drafts[torch.as_tensor(index, device=device)]
        drafts = torch.cat((drafts,) * self.branches)
        final = self.context[row_index.unsqueeze(1), positions]
        query = CausalQuery(
            rows=rows,
            tokens=torch.where(slot < 0, final, drafts.gather(1, slot.clamp(0, drafts.shape[1] - 1))),
            positions=positions,
            wanted=torch.as_tensor(wanted_columns, device=device),
            valid=None if valid.all() else torch.as_tensor(valid, device=device),
            branches=self.branches,
            # the mean of the branches, rounded up, because their prompts may have different lengths
            forwarded=-(-(stop - begin).reshape(self.branches, -1).sum(0) // self.branches),
            index=index,
            kind="full" if is_full else "window",
        )
        if store is not None:
            slots = torch.as_tensor(np.where(valid, column, -1), device=device)
            query.store = StoreCall(row_index, slots, store_rows, int(stop.max()), step=self.commits)
        return query

    # ---- rows that join and leave ------------------------------------------------------------------------------------

    def why_rows_fixed(self) -> str | None:
        if self.trace is not None:
            return "its trace records a fixed set of rows"
        drafter: Any = None if self.drafting is None else self.drafting.model
        if getattr(drafter, "reads_features", False) and drafter.base.makes != "text":
            return "its drafter reads hidden states of an image model, which identifies rows by their index"
        return None

    def before_row_change(self, other: Self | None) -> None:
        super().before_row_change(other)
        if other is not None:
            width = max(self.width, other.width)
            self.widen(width)
            other.widen(width)

    def after_row_change(self) -> None:
        super().after_row_change()
        self.accepted = []
        self._find_rows()

    def finish(self, rows: np.ndarray) -> None:
        self.end[rows] = self.final_ends(rows)  # `_find_rows` compares `committed` with `end`

    def final_ends(self, rows: np.ndarray) -> np.ndarray:
        return np.minimum(self.committed[rows], self.end[rows])

    def num_columns(self, rows: np.ndarray) -> int:
        return int((self.length[rows] + self.shift[:, rows]).max())

    def widen(self, width: int) -> None:
        """Widen the window to `width` slots; new slots lie past every row's end."""
        old_width, self.width = self.width, max(self.width, width)
        self.memory.grow("slot", self.width)
        if "noise" in self.memory and self.width > old_width:  # the index of a position's noise depends on the width
            noise = self.memory["noise"]
            position = self.committed[:, None] + np.arange(old_width)
            row = torch.arange(self.batch, device=noise.device).unsqueeze(1)
            old_slot, new_slot = (
                torch.as_tensor(position % size, device=noise.device) for size in (old_width, self.width)
            )
            resized = torch.zeros_like(noise)
            resized[row, new_slot] = noise[row, old_slot]
            self.memory["noise"] = resized

    def context_rows(self, rows: np.ndarray) -> np.ndarray:
        """[branches * R]: rows in the context and the store of `rows` [R]."""
        return branch_rows(rows, self.batch, self.batch * self.branches)

    def stores(self) -> tuple[KeyValueStore | None, ...]:
        return self.store, None if self.drafting is None else self.drafting.store

    def cache_advice(self) -> None:
        """None: the store is exact."""

    def kept_prefix(self, model: Any) -> None:
        """None: the next request reuses nothing."""


def read_logits(state: CausalState, outputs: list[Tensor], queries: list[CausalQuery]) -> Tensor:
    """Apply guidance and join the outputs: logits [R, W, V] in the order of `state.rows`."""
    if state.branches == 2:
        outputs = [apply_guidance(logits, state.request.guidance_scale) for logits in outputs]
    if len(outputs) == 1:
        return outputs[0]
    order = np.argsort(np.concatenate([query.index for query in queries]))
    return torch.cat(outputs)[torch.as_tensor(order, device=outputs[0].device)]


def make_proposal(
    state: CausalState,
    queries: list[CausalQuery],
    tokens: Tensor,
    positions: Tensor,
    scores: Tensor,
    available: Tensor,
    quantities: dict[str, Tensor],
) -> Proposal:
    """Make the `Proposal` of the running rows."""
    return Proposal(
        rows=state.rows,
        values=tokens,
        cost=Cost(queries, state.batch),
        positions=positions,
        scores=scores,
        available=available,
        quantities=quantities,
        made_at=state.commits,
        kind=queries[0].kind,
    )

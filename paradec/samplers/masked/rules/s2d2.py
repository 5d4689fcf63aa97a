"""S2D2: drafts of a block, which the same block-causal model verifies token by token if that seems worth a call (arXiv
2603.25702; public code for SDAR, generate_ssd_policy.py). `sampler="self_speculative"` is the lossless form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core import rng
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_at_most, check_bool, check_choice, check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.core.query import WindowLogits, WindowQuery
from paradec.kernels.token_stats import draw
from paradec.request import Request, request_for
from paradec.samplers.distributions import apply_temperature, filter_logits
from paradec.samplers.masked.ahead.draft_layout import select_part_rows
from paradec.samplers.masked.loop import MaskedSampler, MaskedState, build_query, gather_tokens
from paradec.samplers.masked.view import MaskedProposal, Needs, View
from paradec.samplers.statistics import top_by_rank

ROUTES = ("span", "score", "hysteresis")
ESTIMATORS = ("entropy", "margin")
MARGIN = 0.05
"""With estimator="margin", drafts whose best token leads the second by more than this are expected to be accepted."""


@dataclass
class VerifyLogits(WindowLogits):
    """Logits of the masks that verify drafts."""


@dataclass(frozen=True)
class S2D2(MaskedSampler):
    """A step drafts all masks of the open block. If the route chooses so, the next step verifies the first run of
    masks, by one causal call over the block with its drafts. The call has an additional mask for each position, which
    attends to the tokens before the position. Let p be the distribution of the draft call and q that of the causal
    call. A draft is accepted with probability min(1, q / p), and the first rejected draft is drawn again from max(0,
    q - p). If a step has then committed fewer tokens than the block's schedule requires, it also fills the most
    confident other masks.

    Lossy: answers follow the model with blocks of length 1 only if temperature > 0, `block_steps` is None and the route
    always verifies ("span" with min_span=1). At temperature 0, as in the published scripts, drafts are the best tokens
    but are accepted by probabilities. Then answers are random, and follow the model with neither block length.

    Args:
        route: rule that decides whether drafts are verified: "span", "score" or "hysteresis". The score is the expected
            number of accepted drafts minus `cost`.
        min_span: "span" verifies runs of at least this many masks.
        tau: "score" verifies if the score is at least `tau`.
        on, off: "hysteresis" begins to verify at a score above `on`, and ends at a score below `off`.
        cost: cost of a verification call, in tokens.
        dynamic: whether `cost` is multiplied by the number of masks with a confidence above `threshold`.
        estimator: estimated probability that a draft is accepted. "entropy": exp(-H / ln V), H the entropy of p, V the
            vocabulary size. "margin": 1 if the best token is likelier than the second by more than 0.05, else 0.
        threshold: masks with a confidence above this are filled without verification.
        block_steps: planned steps per block; None plans one step per position.
        confident_too: whether a verification step also fills masks above `threshold` if it has committed enough.
        causal: whether tokens of closed blocks and those before the first mask attend causally (as in SDAR).
    """

    route: str = "score"
    min_span: int = 1
    tau: float = 0.0
    on: float = 1.0
    off: float = -5.0
    cost: float = 1.0
    dynamic: bool = False
    estimator: str = "entropy"
    threshold: float = 0.85
    block_steps: int | None = None
    confident_too: bool = False
    causal: bool = True

    name = "s2d2"
    paper = "S2D2"
    arxiv = "2603.25702"
    summary = (
        "drafts a block and verifies the first drafts token by token with the same weights, where that pays; lossy"
    )
    needs = Needs(decided_logits=True, mask_probes=True, may_wait=True, stores_final=True, topologies=("block_causal",))
    draws = True
    unsupported = (*MaskedSampler.unsupported, "rng")
    sweep = ({"cost": 0.0}, {"route": "span"})
    presets = {
        "sdar": {},
        "sdar_16": {"cost": 0.0},
        "fast_dllm_v2": {"route": "hysteresis", "dynamic": True, "causal": False},
        "llada2_quality": {"tau": -5.0, "cost": 4.0, "causal": False},
        "llada2_speed": {"cost": 4.0, "causal": False},
    }

    def __post_init__(self) -> None:
        check_choice("route", self.route, ROUTES)
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_int("min_span", self.min_span, low=1)
        check_int("block_steps", self.block_steps, low=1, none=True)
        for name in ("tau", "on", "off", "cost"):
            check_number(name, getattr(self, name))
        check_at_most("off", self.off, "on", self.on)
        check_number("threshold", self.threshold, low=0, high=1)
        for name in ("dynamic", "confident_too", "causal"):
            check_bool(name, getattr(self, name))
        object.__setattr__(self, "needs", replace(self.needs, causal_keys=self.causal))

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        if facts.prompt_aligned:
            raise ValueError(f"sampler {self.name!r} needs blocks counted from position 0, unlike in {facts.name}")

    def memory(self) -> Mapping[str, MemorySpec]:
        return {
            "verifies": MemorySpec(dtype=torch.int64),
            "step": MemorySpec(dtype=torch.int64),
            "is_on": MemorySpec(dtype=torch.int64, reset="sequence"),
            "drafts": MemorySpec(("window",), torch.int64),
            "draft_p": MemorySpec(("window", "vocab"), torch.float32),
        }

    def start(
        self, model: Any, prompt: Any, request: Request | None = None, *, attention_mask: Any = None, **arguments: Any
    ) -> MaskedState:
        state = super().start(model, prompt, request_for(self, request, arguments), attention_mask=attention_mask)
        # a step drafts or verifies: a block needs at most two steps per position
        state.steps_per_block = np.full(state.batch, 2 * state.canvas.shape[1])
        return state

    def query(self, state: MaskedState) -> list[WindowQuery]:
        verifies = state.memory["verifies"].cpu().numpy()[state.window.rows] > 0
        queries = []
        for part in state.cache.plan(state, None):
            for is_verifying in (False, True):
                selected = verifies[part.index] == is_verifying
                if selected.any():
                    query = build_query(state, select_part_rows(part, selected))
                    build = self._verify_query if is_verifying else self._draft_query
                    queries.append(build(state, query))
        return queries

    def _draft_query(self, state: MaskedState, query: WindowQuery) -> WindowQuery:
        start, stop = _block_bounds(state, query.rows)
        positions = query.positions[: len(query.rows)]
        undecided = gather_tokens(state.canvas, query, torch.as_tensor(query.rows)) == state.mask_id
        undecided &= positions >= start
        first_mask = torch.where(undecided, positions, stop).amin(1, keepdim=True)
        in_block = (positions >= (first_mask if self.causal else start)).unsqueeze(2) & (positions < stop).unsqueeze(1)
        visible = _visible_before(state, positions, self.causal, start) | in_block
        return query.with_fields(visible=_per_branch(visible, query), store=_store_final(query, positions < start))

    def _verify_query(self, state: MaskedState, query: WindowQuery) -> WindowQuery:
        """Build the causal call over the block with its drafts, and the masks that verify them."""
        assert query.forwarded is not None
        window, index, rows = state.window, query.window.index, torch.as_tensor(query.rows)
        drafts = state.memory.read(window.rows, window.positions.shape[1])["drafts"]
        current, canvas = window.read(state.canvas), torch.full_like(state.canvas, state.mask_id)
        window.write(canvas, torch.where(window.undecided(current, state.mask_id), drafts, canvas[:1, :1]))
        draft_tokens = _per_branch(gather_tokens(canvas, query, rows), query)
        block_start, _ = _block_bounds(state, query.rows)
        positions, window_positions = query.positions[: len(rows)], window.positions[torch.as_tensor(index)]
        count, width = positions.shape[1], window_positions.shape[1]
        visible = torch.eye(count + width, dtype=torch.bool).repeat(len(positions), 1, 1)
        visible[:, :count, :count] = _visible_before(state, positions, self.causal, block_start)
        visible[:, count:, :count] = window_positions.unsqueeze(2) > positions.unsqueeze(1)
        is_real = torch.ones_like(window_positions, dtype=torch.bool)
        if window.valid is not None:
            is_real = window.valid[torch.as_tensor(index)]
        is_valid = torch.ones_like(query.positions, dtype=torch.bool) if query.valid is None else query.valid
        probe_positions, store = _per_branch(window_positions, query), _store_final(query, positions < block_start)
        if store is not None:
            store = store.with_fields(slots=torch.cat((store.slots, torch.full_like(probe_positions, -1)), 1))
        tokens = torch.where(draft_tokens == state.mask_id, query.tokens.narrow(1, 0, count), draft_tokens)
        return query.with_fields(
            tokens=torch.cat((tokens, torch.full_like(probe_positions, state.mask_id)), 1),
            positions=torch.cat((query.positions, probe_positions), 1),
            valid=torch.cat((is_valid, _per_branch(is_real, query)), 1),
            visible=_per_branch(visible, query),
            wanted=torch.arange(count, count + width).expand(len(query.positions), -1),
            forwarded=query.forwarded + is_real.sum(1).numpy(),
            window=VerifyLogits(index),
            store=store,
        )

    def draw_uniform(self, state: Any, query: WindowQuery, positions: Tensor, count: int) -> Tensor:
        keys = state.keys[torch.as_tensor(query.rows)]
        return rng.uniform(keys, torch.as_tensor(state.row_step[query.rows]), positions, count, rng.TOKEN_STREAM)

    def read_candidates(
        self, state: Any, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute tokens [R, W]; also quantities: "confidence", "write" (positions to commit), and the new memory."""
        window, index = state.window, torch.as_tensor(query.window.index)
        positions = window.positions[index]
        masks = window.undecided(window.read(state.canvas), state.mask_id)[index]
        memory = {name: value[index] for name, value in state.memory.read(window.rows, positions.shape[1]).items()}
        first_mask = masks.long().argmax(1, keepdim=True)
        column = torch.arange(masks.shape[1])
        span = masks & ((~masks & (column > first_mask)).long().cumsum(1) == 0)  # the first run of masks
        request = state.request
        if request.temperature:
            logits = filter_logits(apply_temperature(logits, request.temperature), *request.filters)
        probs = logits.softmax(-1)
        if isinstance(query.window, VerifyLogits):
            return self._verify(state, query, probs, positions, masks, span, memory)
        if request.temperature:
            tokens = draw(probs, self.draw_uniform(state, query, positions, 1)[..., 0])
        else:
            tokens = probs.argmax(-1)
        p = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
        verifies, is_on = self._route(probs, p, masks, span, memory["is_on"])
        write = ~verifies.unsqueeze(1) & self._fill(state, p, masks, masks & False, memory["step"])
        updates = {"verifies": verifies.long(), "is_on": is_on, "step": memory["step"] + (~verifies).long()}
        return tokens, {"confidence": p, "write": write, "drafts": tokens, "draft_p": probs.float(), **updates}

    def _route(self, probs: Tensor, p: Tensor, masks: Tensor, span: Tensor, was_on: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the rows whose drafts are verified [R] bool; also return the state of the hysteresis [R] int64."""
        if self.route == "span":
            return span.sum(1) >= self.min_span, was_on
        if self.estimator == "entropy":
            entropy = -torch.xlogy(probs, probs).sum(-1).double()
            acceptance = torch.exp(-entropy / np.log(probs.shape[-1]))
        else:
            best = probs.topk(2, -1).values
            acceptance = (best[..., 0] - best[..., 1] > MARGIN).double()
        expected = (torch.where(span, acceptance, 1.0).cumprod(1) * span).sum(1)
        cost = self.cost * ((p > self.threshold) & masks).sum(1) if self.dynamic else self.cost
        score = expected - cost
        if self.route == "score":
            return ~(score < self.tau), was_on
        is_on = torch.where(was_on > 0, ~(score < self.off), score > self.on)
        return is_on, is_on.long()

    def _verify(
        self,
        state: Any,
        query: WindowQuery,
        q: Tensor,
        positions: Tensor,
        masks: Tensor,
        span: Tensor,
        memory: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        drafts, draft_p = memory["drafts"], memory["draft_p"]
        p_draft, q_draft = (probs.gather(-1, drafts.unsqueeze(-1)).squeeze(-1).double() for probs in (draft_p, q))
        uniform = self.draw_uniform(state, query, positions, 2)
        passes_test = ~span | (uniform[..., 0] < (q_draft / p_draft).clamp(max=1))
        is_rejected = span & ~passes_test
        first_rejected = is_rejected & (is_rejected.long().cumsum(1) == 1)
        accepted = span & (is_rejected.long().cumsum(1) == 0)
        residual_weights = (q - draft_p.to(q.dtype)).clamp(min=0)
        residual_weights = torch.where(residual_weights.amax(-1, keepdim=True) > 0, residual_weights, q)
        tokens = torch.where(first_rejected, draw(residual_weights, uniform[..., 1]), drafts)
        write = self._fill(state, p_draft, masks, accepted | first_rejected, memory["step"])
        zeros = torch.zeros_like(memory["is_on"])
        updates = {"verifies": zeros, "is_on": memory["is_on"], "step": memory["step"] + 1}
        confidence = torch.where(q[..., 0].isnan(), torch.nan, p_draft)
        return tokens, {"confidence": confidence, "write": write, "drafts": drafts, "draft_p": draft_p, **updates}

    def _fill(self, state: Any, p: Tensor, masks: Tensor, decided: Tensor, step: Tensor) -> Tensor:
        """Choose positions to commit [R, W] bool: `decided`, and masks that the schedule or `confident_too` adds."""
        block = state.facts.block_length
        steps = block if self.block_steps is None else min(self.block_steps, block)
        num_required = block // steps + (step < block % steps).long()
        undecided, num_missing = masks & ~decided, (num_required - decided.sum(1)).clamp(min=0)
        confident = undecided & (p > self.threshold)
        has_enough = confident.sum(1) >= num_missing
        best = top_by_rank(torch.where(undecided, p, -torch.inf), num_missing.cpu().numpy()) & undecided
        chosen = torch.where(has_enough.unsqueeze(1), confident, best)
        is_filled = (num_missing > 0) | (decided.any(1) & self.confident_too)
        return decided | chosen & is_filled.unsqueeze(1)

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> MaskedProposal:
        proposal = super().propose(state, outputs, queries)
        for name in self.memory():
            proposal.updates[name] = proposal.quantities.pop(name)
        return proposal

    def select(self, view: View) -> Tensor:
        return view.quantities["write"] > 0


def _block_bounds(state: MaskedState, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """Return the start of the model's block around each row's open block, and the open block's end: both [R, 1]."""
    start, stop = state.block_start[rows, None], state.block_end[rows, None]
    return torch.as_tensor(state.facts.block_bounds(start, stop, start)[0]), torch.as_tensor(stop)


def _visible_before(state: Any, positions: Tensor, causal: bool, block_start: Tensor) -> Tensor:
    """Compute whether a column (dim 1) attends to another (dim 2): [R, Q, Q] bool. positions: [R, Q], of the columns.
    Attention is causal, but if `causal` is False, positions before `block_start` [R, 1] also see their whole block."""
    visible = positions.unsqueeze(2) >= positions.unsqueeze(1)
    if causal:
        return visible
    block = state.facts.block_numbers(positions)
    final = (positions < block_start).unsqueeze(2) & (positions < block_start).unsqueeze(1)
    return visible | final & (block.unsqueeze(2) >= block.unsqueeze(1))


def _store_final(query: WindowQuery, final: Tensor) -> Any:
    """Return the query's store call, changed to store only the columns where `final` [R, Q] is True."""
    if query.store is None or query.store.slots is None:
        return query.store
    return query.store.with_fields(slots=torch.where(_per_branch(final, query), query.store.slots, -1))


def _per_branch(values: Tensor, query: WindowQuery) -> Tensor:
    return values.repeat(query.branches, *[1] * (values.ndim - 1))

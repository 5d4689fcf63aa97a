"""S2D2: drafts of a block, verified by the same block-causal model in blocks of one, where that seems worth a call.

"S2D2: Fast Decoding for Diffusion LLMs via Training-Free Self-Speculation", arXiv 2603.25702, and the public code for
SDAR (phymhan/S2D2, generate_ssd_policy.py). `sampler="self_speculative"` is the exact form.
"""

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
from paradec.core.checks import check_bool, check_choice, check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.core.query import WindowLogits, WindowQuery
from paradec.kernels.token_stats import draw
from paradec.request import Request, request_for
from paradec.samplers.distributions import filter_logits, tempered
from paradec.samplers.masked.ahead.draft_layout import rows_of_part
from paradec.samplers.masked.loop import MaskedProposal, MaskedSampler, MaskedState, Needs, View, build_query, tokens_of
from paradec.samplers.statistics import top_by_rank

ROUTES = ("span", "score", "hysteresis")
ESTIMATORS = ("entropy", "margin")
MARGIN = 0.05
"""By how much the best token must be likelier than the second for the "margin" to expect that a draft stands."""


@dataclass
class VerifyLogits(WindowLogits):
    """The logits of masks beside drafts, which verify these."""


@dataclass(frozen=True)
class S2D2(MaskedSampler):
    """A step drafts all masks of the open block. Where the route says so, the next step verifies the first run of them:
    one call over the block with its drafts, which is causal, and a mask for each position, which sees the tokens before
    it. With p of the draft call and q of this one a draft is accepted with min(1, q / p); the first one that is not is
    drawn again from max(0, q - p). Where a step has written fewer tokens than it is due, other masks of the block
    follow by their confidence.

    Not lossless: only with temperature > 0, `block_steps` None and a route that always verifies ("span" with 1), the
    answers have the distribution of the model in blocks of one. At temperature 0, as in the published scripts, drafts
    are the best tokens and are judged by probabilities: answers are random and have the distribution of no model.

    Args:
        route: "span", "score" or "hysteresis" decides when a call verifies. The score is the number of drafts that are
            expected to be accepted, less `cost`.
        min_span: "span" verifies runs of this many masks and more.
        tau: "score" verifies where the score is not below it.
        on, off: "hysteresis" verifies from a score above `on` until one below `off`.
        cost: of a call that verifies, in tokens.
        dynamic: whether the cost is multiplied by the number of masks above `threshold`.
        estimator: how likely a draft is to be accepted: "entropy", exp(-H / ln V) of its distribution, or "margin",
            1 where the best token is likelier than the second by more than 0.05.
        threshold: confidence of masks that are filled without being verified.
        block_steps: steps of a block; None is one for each position.
        confident_too: whether masks above `threshold` are filled beside verified ones in any case.
        causal: whether final tokens, and those that begin the block, see nothing to their right (SDAR's settings).
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
        if self.off > self.on:
            raise ValueError(f"off={self.off} must be at most on={self.on}")
        check_number("threshold", self.threshold, low=0, high=1)
        for name in ("dynamic", "confident_too", "causal"):
            check_bool(name, getattr(self, name))
        object.__setattr__(self, "needs", replace(self.needs, causal_keys=self.causal))

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        if facts.prompt_aligned:
            raise ValueError(f"sampler {self.name!r} needs blocks counted from position 0; {facts.name} has others")

    def memory(self) -> Mapping[str, MemorySpec]:
        return {
            "verifies": MemorySpec(dtype=torch.int64),
            "turn": MemorySpec(dtype=torch.int64),
            "hot": MemorySpec(dtype=torch.int64, reset="sequence"),
            "drafts": MemorySpec(("window",), torch.int64),
            "draft_p": MemorySpec(("window", "vocab"), torch.float32),
        }

    def start(
        self, model: Any, prompt: Any, request: Request | None = None, *, attention_mask: Any = None, **arguments: Any
    ) -> MaskedState:
        """Make the state of one request: see `MaskedSampler.start`."""
        state = super().start(model, prompt, request_for(self, request, arguments), attention_mask=attention_mask)
        # a step drafts or verifies: a block takes two for each of its positions at most
        state.steps_per_block = np.full(state.batch, 2 * state.canvas.shape[1])
        return state

    # ---- calls ----------------------------------------------------------------------------------------------------

    def query(self, state: MaskedState) -> list[WindowQuery]:
        verifies = state.memory["verifies"].cpu().numpy()[state.window.rows] > 0
        found = []
        for part in state.cache.plan(state, None):
            for kind in (False, True):
                chosen = verifies[part.index] == kind
                if chosen.any():
                    query = build_query(state, rows_of_part(part, chosen))
                    found.append(self._verifying(state, query) if kind else self._drafting(state, query))
        return found

    def _drafting(self, state: MaskedState, query: WindowQuery) -> WindowQuery:
        """The block, which sees itself and all before it."""
        first, stop = _bounds_of(state, query.rows)
        at = query.positions[: len(query.rows)]
        undecided = (tokens_of(state.canvas, query, torch.as_tensor(query.rows)) == state.mask_id) & (at >= first)
        begins = torch.where(undecided, at, stop).amin(1, keepdim=True)  # its first mask
        in_block = (at >= (begins if self.causal else first)).unsqueeze(2) & (at < stop).unsqueeze(1)
        sees = _before(state, at, self.causal, first) | in_block
        return query.with_fields(visible=_of_branches(sees, query), store=_final_alone(query, at < first))

    def _verifying(self, state: MaskedState, query: WindowQuery) -> WindowQuery:
        """The block with its drafts, which is causal, and masks beside it."""
        assert query.forwarded is not None
        window, index, rows = state.window, query.window.index, torch.as_tensor(query.rows)
        drafts = state.memory.read(window.rows, window.positions.shape[1])["drafts"]
        current, canvas = window.read(state.canvas), torch.full_like(state.canvas, state.mask_id)
        window.write(canvas, torch.where(window.undecided(current, state.mask_id), drafts, canvas[:1, :1]))
        drafted = _of_branches(tokens_of(canvas, query, rows), query)
        first, _ = _bounds_of(state, query.rows)
        at, masks = query.positions[: len(rows)], window.positions[torch.as_tensor(index)]
        count, width = at.shape[1], masks.shape[1]
        whole = torch.eye(count + width, dtype=torch.bool).repeat(len(at), 1, 1)
        whole[:, :count, :count] = _before(state, at, self.causal, first)
        whole[:, count:, :count] = masks.unsqueeze(2) > at.unsqueeze(1)
        there = torch.ones_like(masks, dtype=torch.bool)
        if window.valid is not None:
            there = window.valid[torch.as_tensor(index)]
        own = torch.ones_like(query.positions, dtype=torch.bool) if query.valid is None else query.valid
        beside, store = _of_branches(masks, query), _final_alone(query, at < first)
        if store is not None:
            store = store.with_fields(slots=torch.cat((store.slots, torch.full_like(beside, -1)), 1))
        tokens = torch.where(drafted == state.mask_id, query.tokens.narrow(1, 0, count), drafted)
        return query.with_fields(
            tokens=torch.cat((tokens, torch.full_like(beside, state.mask_id)), 1),
            positions=torch.cat((query.positions, beside), 1),
            valid=torch.cat((own, _of_branches(there, query)), 1),
            visible=_of_branches(whole, query),
            wanted=torch.arange(count, count + width).expand(len(query.positions), -1),
            forwarded=query.forwarded + there.sum(1).numpy(),
            window=VerifyLogits(index),
            store=store,
        )

    # ---- one step -------------------------------------------------------------------------------------------------

    def numbers(self, state: Any, query: WindowQuery, positions: Tensor, count: int) -> Tensor:
        """[R, W, count] uniform numbers in (0, 1)."""
        keys = state.keys[torch.as_tensor(query.rows)]
        return rng.uniform(keys, torch.as_tensor(state.row_step[query.rows]), positions, count, rng.TOKEN_STREAM)

    def distribution(self, state: Any, logits: Tensor) -> Tensor:
        """[R, W, V]: what tokens are drawn from; at temperature 0 softmax."""
        request = state.request
        if request.temperature:
            logits = tempered(logits, request.temperature)
            logits = filter_logits(logits, request.top_p, request.top_k)
        return logits.softmax(-1)

    def read(
        self, state: Any, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Tokens [R, W], and what becomes of them: "write" of 0 or 1; what is remembered."""
        window, index = state.window, torch.as_tensor(query.window.index)
        positions = window.positions[index]
        masks = window.undecided(window.read(state.canvas), state.mask_id)[index]
        memory = {name: value[index] for name, value in state.memory.read(window.rows, positions.shape[1]).items()}
        first = masks.long().argmax(1, keepdim=True)
        column = torch.arange(masks.shape[1])
        span = masks & ((~masks & (column > first)).long().cumsum(1) == 0)
        found = self.distribution(state, logits)
        if isinstance(query.window, VerifyLogits):
            return self._verified(state, query, found, positions, masks, span, memory)
        if state.request.temperature:
            tokens = draw(found, self.numbers(state, query, positions, 1)[..., 0])
        else:
            tokens = found.argmax(-1)
        p = found.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
        verifies, hot = self._routes(found, p, masks, span, memory["hot"])
        write = torch.where(verifies.unsqueeze(1), False, self._filled(state, p, masks, masks & False, memory["turn"]))
        kept = {"verifies": verifies.long(), "hot": hot, "turn": memory["turn"] + (~verifies).long()}
        return tokens, {"confidence": p, "write": write, "drafts": tokens, "draft_p": found.float(), **kept}

    def _routes(self, found: Tensor, p: Tensor, masks: Tensor, span: Tensor, hot: Tensor) -> tuple[Tensor, Tensor]:
        """[R] bool: whose drafts are verified; and the state of the hysteresis, [R] int64."""
        if self.route == "span":
            return span.sum(1) >= self.min_span, hot
        if self.estimator == "entropy":
            entropy = -torch.xlogy(found, found).sum(-1).double()
            stands = torch.exp(-entropy / np.log(found.shape[-1]))
        else:
            best = found.topk(2, -1).values
            stands = (best[..., 0] - best[..., 1] > MARGIN).double()
        expected = (torch.where(span, stands, 1.0).cumprod(1) * span).sum(1)
        cost = self.cost * ((p > self.threshold) & masks).sum(1) if self.dynamic else self.cost
        score = expected - cost
        if self.route == "score":
            return ~(score < self.tau), hot
        now = torch.where(hot > 0, ~(score < self.off), score > self.on)
        return now, now.long()

    def _verified(
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
        p, now = (each.gather(-1, drafts.unsqueeze(-1)).squeeze(-1).double() for each in (draft_p, q))
        uniform = self.numbers(state, query, positions, 2)
        stands = ~span | (uniform[..., 0] < (now / p).clamp(max=1))
        falls = span & ~stands
        rejected = falls & (falls.long().cumsum(1) == 1)
        accepted = span & (falls.long().cumsum(1) == 0)
        left = (q - draft_p.to(q.dtype)).clamp(min=0)
        left = torch.where(left.amax(-1, keepdim=True) > 0, left, q)
        tokens = torch.where(rejected, draw(left, uniform[..., 1]), drafts)
        write = self._filled(state, p, masks, accepted | rejected, memory["turn"])
        nothing = torch.zeros_like(memory["hot"])
        kept = {"verifies": nothing, "hot": memory["hot"], "turn": memory["turn"] + 1}
        sure = torch.where(q[..., 0].isnan(), torch.nan, p)
        return tokens, {"confidence": sure, "write": write, "drafts": drafts, "draft_p": draft_p, **kept}

    def _filled(self, state: Any, p: Tensor, masks: Tensor, done: Tensor, turn: Tensor) -> Tensor:
        """[R, W] bool: what is written: what is `done` already, and other masks until the quota is full."""
        block = state.facts.block_length
        steps = block if self.block_steps is None else min(self.block_steps, block)
        due = block // steps + (turn < block % steps).long()
        others, left = masks & ~done, (due - done.sum(1)).clamp(min=0)
        sure = others & (p > self.threshold)
        enough = sure.sum(1) >= left
        best = top_by_rank(torch.where(others, p, -torch.inf), left.cpu().numpy()) & others
        chosen = torch.where(enough.unsqueeze(1), sure, best)
        wanted = (left > 0) | (done.any(1) & self.confident_too)
        return done | chosen & wanted.unsqueeze(1)

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> MaskedProposal:
        proposal = super().propose(state, outputs, queries)
        for name in self.memory():
            proposal.updates[name] = proposal.quantities.pop(name)
        return proposal

    def select(self, view: View) -> Tensor:
        return view.quantities["write"] > 0


def _bounds_of(state: MaskedState, rows: np.ndarray) -> tuple[Tensor, Tensor]:
    """[R, 1] int64 both: where the model's block begins that the open one of each row is in, and where that ends."""
    start, stop = state.block_start[rows, None], state.block_end[rows, None]
    return torch.as_tensor(state.facts.block_bounds(start, stop, start)[0]), torch.as_tensor(stop)


def _before(state: Any, at: Tensor, causal: bool, first: Tensor) -> Tensor:
    """[R, Q, Q] bool: what columns at positions `at` [R, Q] see of each other if the block is causal.

    Args:
        causal: whether those before the block are; else they see their own block. first: [R, 1], where it begins.
    """
    sees = at.unsqueeze(2) >= at.unsqueeze(1)
    if causal:
        return sees
    own = state.facts.block_numbers(at)
    final = (at < first).unsqueeze(2) & (at < first).unsqueeze(1)
    return sees | final & (own.unsqueeze(2) >= own.unsqueeze(1))


def _final_alone(query: WindowQuery, final: Tensor) -> Any:
    """What the call asks of the store, where final columns alone are kept."""
    if query.store is None or query.store.slots is None:
        return query.store
    return query.store.with_fields(slots=torch.where(_of_branches(final, query), query.store.slots, -1))


def _of_branches(values: Tensor, query: WindowQuery) -> Tensor:
    """[R, ...] -> [branches * R, ...]."""
    return values.repeat(query.branches, *[1] * (values.ndim - 1))

"""The loop of the methods that draft a window of tokens one after the other and verify all of them in one forward.

A step evaluates the last final token and the drafts after it over the key/value store. The drafts are accepted up to
the first rejection, that one is resampled (`paradec.samplers.causal.verification`), and the store's slots after what
is final are given back. A method is one decision, `accept`; where the next drafts come from is the subclass's
(`paradec.samplers.causal.window`, `paradec.samplers.causal.drafting`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_int
from paradec.core.family_queries import CausalQuery
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Commit, Proposal
from paradec.core.trace import Notes
from paradec.kernels.token_stats import argmax, draw
from paradec.samplers.causal.base import CausalSampler, proposed, read_logits
from paradec.samplers.causal.state import CausalState, Spans
from paradec.samplers.causal.verification import (
    UNIFORM,
    DraftDistributions,
    DraftWindow,
    Verified,
    probability,
    verify,
)

WINDOW = 16
"""Of SJD's scripts."""


@dataclass(frozen=True)
class ChainSampler(CausalSampler):
    """Base of the methods that verify a window of drafts. A subclass implements `accept`, and `_draft`, which fills the
    next window.

    Every draft carries the distribution q that it was really drawn from. So the output has the distribution of
    token-by-token decoding whenever `accept` is min(1, p / q), at any temperature, top-k, top-p, guidance and
    structure, which make p and are never applied again.

    Args:
        window: slots evaluated at once, the next token and `window - 1` drafts; 1 is token-by-token decoding. None is
            16, on models of any order all.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        check_int("window", self.window, low=1, none=True)

    @property
    def compared_by(self) -> str:
        """What `accept` compares the model's tokens by: "token_embeddings", "codebook" or nothing."""
        return ""

    def accept(self, window: DraftWindow) -> Tensor:
        """The method's own decision: the probability [R, W] that each draft is accepted, given that those before it
        are."""
        raise NotImplementedError

    # ---- start ----------------------------------------------------------------------------------------------------

    def _width(self, new: int) -> int:
        return min(self.window or WINDOW, new)

    def memory(self) -> dict[str, MemorySpec]:
        return {
            "drafts": MemorySpec(("slot",), torch.int64, reset="sequence"),
            "draft_source": MemorySpec(("slot",), torch.int64, UNIFORM, reset="sequence"),
            "draft_distribution": MemorySpec(("slot", "vocab"), None, reset="sequence"),
        }

    def _open(self, state: CausalState, model: Any) -> None:
        state.embeddings = self._embeddings(model, state.context.device)
        self._first_drafts(state, model)

    def _embeddings(self, model: Any, device: torch.device) -> Tensor | None:
        if not (source := self.compared_by):
            return None
        found = getattr(model, source, lambda: None)()
        if found is None:
            raise ValueError(f"sampler {self.name!r} needs a model with {source}; {model.facts.name} has none")
        if found.ndim != 2 or len(found) != model.facts.vocab_size:
            raise ValueError(
                f"{source} of {model.facts.name} has shape {tuple(found.shape)}; expected one row for each of "
                f"{model.facts.vocab_size} tokens"
            )
        return found.detach().to(device)

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: CausalState) -> list[CausalQuery]:
        """The last final token and the drafts after it, over the store; whole rows at first and without a store."""
        rows, committed = state.rows, state.committed[state.rows]
        drafts = state.memory.read(rows)["drafts"]
        fresh = state.row_step[rows] == 0
        begin = np.where(fresh, state.reused[rows], committed - 1)
        stop = committed - 1 + self._evaluated(state)
        spans = Spans(rows, drafts, begin, stop, committed - 1, state.width, fresh)
        return state.calls(state.store, state.pads, spans)

    def _evaluated(self, state: CausalState) -> np.ndarray:
        """[R] int64: slots of each running row's window that this step evaluates."""
        return np.minimum(state.slots(state.rows), 1 + state.drafted[state.rows])

    def propose(self, state: CausalState, outputs: list[Tensor], queries: list[CausalQuery]) -> Proposal:
        """The target distribution of every slot and a token drawn from it. outputs: logits [branches * R, W, V], one
        per query.

        Quantities: "p" [R, W, V], the target distributions; "uniform" [R, W, 2], the numbers that verify each draft and
        that resample a rejected one; "guesses" [R, .], those of `_uniform`; "top_logit" [R, W]; with `logprobs` "log_p"
        [R, W, V], with `rollout` "logits" [R, W, V], without a constraint.
        """
        rows, logits = state.rows, read_logits(state, outputs, queries)
        positions, guided = state.positions(rows), logits
        if state.masks is not None:
            logits = state.masks.of_chain(state, logits, rows, state.memory.read(rows)["drafts"])
        p = state.distribution(logits, rows, positions)
        uniform, guesses = self._uniform(state, positions)
        fresh = self._fresh(state, p, positions, uniform[..., 0])
        answered = state.answered(self._evaluated(state))
        available = torch.as_tensor(np.arange(state.width) < answered[:, None], device=p.device)
        quantities = {"p": p, "uniform": uniform[..., 1:], "guesses": guesses}
        # at temperature 0 that of the fresh token, where this is the best one of all
        chosen = state.allowed is not None or state.masks is not None or state.prescribes or state.request.temperature
        quantities["top_logit"] = logits.amax(-1) if chosen else probability(logits, fresh)
        if state.logprobs is not None:
            quantities["log_p"] = state.log_distribution(p, logits, rows, positions)
        if state.rollout is not None:
            quantities["logits"] = guided
        return proposed(state, queries, fresh, positions, probability(p, fresh), available, quantities)

    def _uniform(self, state: CausalState, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers [R, W, 3] of a step, for positions [R, W]: for the fresh token, u, and for the residual's; and those
        of guesses after the step, which some methods draw at once."""
        found = state.uniform(state.rows, positions, 3, rng.TOKEN_STREAM)
        return found, found[:, :0, 0]

    def _fresh(self, state: CausalState, p: Tensor, positions: Tensor, uniform: Tensor) -> Tensor:
        """Tokens [R, W] drawn from p [R, W, V] with uniform [R, W]."""
        return argmax(p) if state.request.temperature == 0 else draw(p, uniform)

    def observe(self, state: CausalState, proposal: Proposal) -> Notes:
        """As for all; and the drafts that are evaluated, from windows as well as trees."""
        notes, rows = super().observe(state, proposal), proposal.rows
        notes.drafts, notes.blocks = set(), [None] * state.batch
        ends = np.minimum(proposal.positions.amax(1).cpu().numpy() + 1, state.length[rows])
        for row, first, last in zip(rows.tolist(), state.final(rows).tolist(), ends.tolist(), strict=True):
            notes.blocks[row] = (first, last)
        for query in proposal.cost.queries:
            count = len(query.rows)
            drafted = state.drafts_in(query)
            if query.valid is not None:
                drafted &= query.valid[:count].cpu().numpy()
            index, column = drafted.nonzero()
            positions, tokens = (each[:count].cpu().numpy()[index, column] for each in (query.positions, query.tokens))
            rows = query.rows[index]
            notes.drafts.update(zip(rows.tolist(), positions.tolist(), tokens.tolist(), strict=True))
        return notes

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, state: CausalState, proposal: Proposal) -> Commit:
        """Verify the drafts, write those accepted and one token more, and draft the next window.

        Raises:
            FloatingPointError: the model returned NaN or infinite logits. Nothing is written then.
            ValueError: a proposal made from an earlier state.
        """
        state.check_current(proposal)
        rows = proposal.rows
        window = self._window(state, proposal)
        drafted = self._drafted(state, proposal)
        found = self._verify(window, drafted, self.accept(window), proposal.quantities["uniform"])
        count, written = self._written(state, proposal, found.tokens, self._final(state, proposal, found))
        selected = torch.arange(state.width, device=count.device) < count
        self._write(state, proposal.positions, rows, torch.where(selected, found.tokens, -1))
        state.committed[rows] += written
        said = self._note(state, proposal, found.tokens, selected)
        self._advance(state, proposal)
        self._draft(state, proposal, window, found, count)
        state.close(rows)
        scores = probability(window.p, found.tokens)
        return Commit(rows, found.tokens, proposal.positions, selected, scores, proposal.kind, said)

    def _window(self, state: CausalState, proposal: Proposal) -> DraftWindow:
        memory = state.memory.read(proposal.rows)
        q = DraftDistributions(memory["drafts"], memory["draft_distribution"], memory["draft_source"], state.guess)
        return DraftWindow(proposal.quantities["p"], q, proposal.values, state.embeddings)

    def _drafted(self, state: CausalState, proposal: Proposal) -> Tensor:
        """[R, W] bool: slots whose drafts this step verifies."""
        return state.verified(proposal.available)

    def _verify(self, window: DraftWindow, drafted: Tensor, chance: Tensor, uniform: Tensor) -> Verified:
        return verify(window, drafted, chance, uniform)

    def _final(self, state: CausalState, proposal: Proposal, found: Verified) -> Tensor:
        """[R, 1] int64: how many tokens of each window become final, as far as the row does not end before."""
        return found.accepted + 1

    def _first_drafts(self, state: CausalState, model: Any) -> None:
        """Fill the first window."""
        raise NotImplementedError

    def _draft(
        self, state: CausalState, proposal: Proposal, window: DraftWindow, found: Verified, count: Tensor
    ) -> None:
        """Fill the next window of the proposal's rows, after `count` [R, 1] tokens of this one became final."""
        raise NotImplementedError

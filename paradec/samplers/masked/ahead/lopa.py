"""LoPA: beside the row as it is, copies with one token more are evaluated, and the one that promises most goes on.

"LoPA", arXiv 2512.16229, and the public code's scale_dream_d2f.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Commit, NotFinite
from paradec.core.query import WindowQuery
from paradec.request import Request, request_for
from paradec.samplers.masked.ahead.draft_layout import Ahead, draft_queries
from paradec.samplers.masked.ahead.wrapped import DraftingSampler, DraftProposal, base_sampler, picked, why_not_a_base
from paradec.samplers.masked.loop import MaskedProposal, MaskedState, finish_step, to_host
from paradec.samplers.masked.view import Decision

TOKENS, SURE, OPEN = "ahead_tokens", "ahead_confidence", "ahead_open"
"""In the memory, each [B, window]: what the last winner's logits said, and where something was open then."""


@dataclass(kw_only=True)
class BranchProposal(DraftProposal):
    """A proposal whose drafts are the branches."""

    promise: Tensor
    """[K, R] float64: what each branch promises; -inf where a row has no such branch."""


@dataclass(frozen=True)
class LoPA(DraftingSampler):
    """Take the steps of another sampler, `base`, in the order of positions that makes the rest most confident. Since
    the method searches for an order, tokens may differ from the base's.

    A step evaluates the row and, as separate rows with the same keys and values, `branches` copies of it with one more
    token each. The copies add the last step's candidate at the first, second, ... most confident position that this
    step left undecided in the open blocks. A branch's score is alpha * (the confidence of its token; 1 for the row
    itself) + (1 - alpha) * (mean confidence of the least confident share `tail` of what it leaves undecided; 1 if
    nothing is left). The branch with the highest score replaces the row, and the base decides from its logits.
    Ties go to the branch with the most confident token, and to the row itself last, as in the public code. A block's
    first step has no branches; with a cache, neither has the first step after the first open block was filled.

    Args:
        base: the sampler whose steps are taken: a name, a masked sampler, or its `to_dict`; the paper's is D2F's rule,
            `threshold` in `paradec.PipelinedBlocks(32, forced="active")`.
        branches: k, branches beside the row itself, from 0 (the base alone) to 64. Published scripts have 2 to 4.
        alpha: weight of the added token's own confidence, in [0, 1]. 0 as in the published scripts; with the public
            code's default, 0.5, the row itself is nearly always taken.
        tail: share of the undecided positions that are averaged, in (0, 1], at least one position; 1 as in the scripts
            (the code's default is 0.5).
        confidence: the quantity that is averaged and ranks positions: "minus_entropy" (the scripts'), "confidence" (the
            code's default) or "margin".

    A step costs one call and up to 1 + k rows; `row_forwards` and forwarded tokens count all rows. It pays on devices
    that evaluate more rows at little cost. Refused are caches whose plan depends on the number of steps, stops that the
    logits decide, `logprobs` and `rng="reference"`.

    Raises:
        ValueError: a setting out of its range, or a base that drafts, takes tokens back, has a schedule or a step of
            its own, or ends its blocks by the logits.
    """

    base: Any = "threshold"
    branches: int = 4
    alpha: float = 0.0
    tail: float = 1.0
    confidence: str = "minus_entropy"

    name = "lopa"
    paper = "LoPA"
    arxiv = "2512.16229"
    summary = "the steps of another sampler, from the best of several rows with one token more"
    sweep = ({"branches": 2}, {"branches": 4, "base": {"sampler": "threshold", "threshold": 0.7}})

    def __post_init__(self) -> None:
        check_int("branches", self.branches, low=0, high=64)
        check_number("alpha", self.alpha, low=0, high=1)
        check_number("tail", self.tail, low=0, high=1, open_low=True)
        check_choice("confidence", self.confidence, ("minus_entropy", "confidence", "margin"))
        base = base_sampler(self.base)
        why = why_not_a_base(base)
        if base.uses_steps or base.needs.may_wait:
            why = why or "its schedule counts tokens, and a branch adds one"
        if why is not None:
            raise ValueError(f"base={base.name!r} does not work with sampler 'lopa': {why}")
        read = base.needs
        reads = (*read.reads, self.confidence)
        needs = replace(self.needs, reads=reads, score=read.score, score_from=read.score_from)
        needs = replace(needs, decided_logits=read.decided_logits, extra_quantities=read.extra_quantities)
        vars(self).update(base=base, needs=needs, draws=base.draws)

    def memory(self) -> Mapping[str, MemorySpec]:
        kept = dict(self.base.memory())
        if self.branches:
            kept[TOKENS] = MemorySpec(("window",), torch.int64)
            kept[SURE] = MemorySpec(("window",), torch.float64)
            kept[OPEN] = MemorySpec(("window",), torch.bool)
        return kept

    def start(
        self, model: Any, prompt: Any, request: Request | None = None, *, attention_mask: Any = None, **arguments: Any
    ) -> MaskedState:
        """Make the state of one request: see `MaskedSampler.start`.

        Raises:
            ValueError, TypeError: an argument out of its range, `rng="reference"`, `logprobs`, or a model that reads
                the order of tokens; the message names it.
        """
        request = request_for(self, request, arguments)
        if request.rng == "reference":
            raise ValueError(
                "rng='reference' does not work with sampler 'lopa': it draws from one stream in the order of the "
                "steps, and branches draw beside each other; use rng='counter'"
            )
        if request.logprobs is not None:
            raise ValueError(
                f"logprobs={request.logprobs} does not work with sampler 'lopa': tokens that a branch adds are of an "
                "earlier step; leave logprobs out"
            )
        if self.branches and getattr(model, "reads_order", False):
            raise ValueError(
                f"sampler 'lopa' does not work with {model.facts.name}, which reads the order of tokens: what a branch "
                "adds and what is read from it are decided in one step; use its base, or branches=0"
            )
        return super().start(model, prompt, request, attention_mask=attention_mask)

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: MaskedState) -> list[WindowQuery]:
        """One query per part of the cache's plan, two where only some of its rows have branches."""
        branches, copies = self._branches(state)
        return draft_queries(state, branches, copies, tree=False)

    def _branches(self, state: MaskedState) -> tuple[list[Ahead], np.ndarray]:
        """The row as it is and its branches, and how many of these each row has [R] int64."""
        rows, now = state.window.rows, state.window.read(state.canvas)
        branches, copies = [Ahead(state, 0, now)], np.ones(len(rows), np.int64)
        if not self.branches:
            return branches, copies
        memory = state.memory.read(rows, now.shape[1])
        may = memory[OPEN] & state.window.undecided(now, state.mask_id)
        most = may.sum(1).clamp(max=self.branches).cpu().numpy()
        if state.store is not None:  # drafts are not kept, and what a block begins with is
            most = np.where(state.block_step[rows] == 0, 0, most)
        order = memory[SURE].masked_fill(~may, -torch.inf).argsort(dim=1, descending=True, stable=True)
        for rank in range(int(most.max())):
            column = order[:, rank : rank + 1]
            branches.append(Ahead(state, 0, now.scatter(1, column, memory[TOKENS].gather(1, column))))
        return branches, copies + most

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> BranchProposal:
        """The base's step from every branch, and what each promises. outputs: logits [R, W, V], one per query."""
        branches, taken, copies = self.take_steps(self, state, outputs, queries, chain=False)
        promises = []
        for number, (branch, step) in enumerate(zip(branches, taken, strict=True)):
            future = self._future(branch, step.quantities[self.confidence])
            confidence = torch.ones_like(future)
            if number:
                added = branch.tokens != branches[0].tokens
                confidence = torch.where(added, state.memory.read(state.window.rows, added.shape[1])[SURE], 0).sum(1)
            there = torch.as_tensor(number < copies, device=future.device)
            promises.append((self.alpha * confidence + (1 - self.alpha) * future).where(there, -torch.inf))
        first = vars(taken[0].proposal)
        return BranchProposal(**first, drafts=branches, taken=taken, promise=torch.stack(promises), copies=copies)

    def _future(self, branch: Ahead, sure: Tensor) -> Tensor:
        """[R] float64: the mean of the lowest share `tail` of `sure` [R, W] over what a branch leaves undecided in the
        open blocks, at least one position; 1 where that is nothing."""
        open_ = branch.candidates
        count = open_.sum(1, keepdim=True)
        lowest = (count.double() * self.tail).long().clamp(min=1)
        ordered = sure.masked_fill(~open_, torch.inf).sort(dim=1).values
        within = torch.arange(ordered.shape[1], device=ordered.device) < lowest
        mean = torch.where(within, ordered, 0).sum(1) / lowest[:, 0]
        return torch.where(count[:, 0] > 0, mean, 1.0)

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, state: MaskedState, proposal: MaskedProposal) -> Commit:
        """Let the best branch of each row be the row, and write the base's step from it.

        Raises:
            FloatingPointError: the model returned NaN or infinite logits for a branch. Nothing is written.
            RuntimeError: the base committed nothing where it must.
        """
        assert isinstance(proposal, BranchProposal)
        state.check_current(proposal)
        window, rows, taken = state.window, proposal.rows, proposal.taken
        # the row itself is last among equals
        best = (proposal.promise.roll(-1, 0).argmax(0) + 1) % len(taken)
        written = picked([step.written for step in taken], best)
        # of branches that a row does not have, those of its last one
        sure = torch.stack([step.proposal.quantities["confidence"] for step in taken])
        cut = None if taken[0].cut is None else picked([step.cut for step in taken if step.cut is not None], best)
        found = to_host(tokens=written, before=proposal.current, sure=sure.sum(0), cut=cut)
        committed = (found["tokens"] != found["before"]).sum(1)
        if len(broken := rows[~np.isfinite(found["sure"]).all(1)]):
            raise NotFinite.at_steps(broken, state.row_step[broken])
        if 0 in committed.tolist():
            raise RuntimeError(f"sampler {self.base.name!r} committed nothing for row {int(rows[committed.argmin()])}")

        window.write(state.canvas, written)
        for name in self.base.memory():
            state.memory.write(name, rows, picked([step.memory[name] for step in taken], best))
        if self.branches:
            self._carry(state, proposal, best, written)
        scores = picked([step.proposal.scores for step in taken], best)
        changed = written != proposal.current
        finish_step(self, state, proposal, Decision(written, changed, changed), found, committed)
        return Commit(rows, written, window.positions, changed, scores, proposal.kind)

    def _carry(self, state: MaskedState, proposal: BranchProposal, best: Tensor, written: Tensor) -> None:
        """Keep what the winners' logits say of what is undecided: the next branches are made of it."""
        steps = [step.proposal for step in proposal.taken]
        for name, value in (
            (TOKENS, picked([step.values for step in steps], best)),
            (SURE, picked([step.quantities[self.confidence] for step in steps], best)),
            (OPEN, state.window.undecided(written, state.mask_id)),
        ):
            state.memory.write(name, proposal.rows, value)

"""LoPA (arXiv 2512.16229, and the public code's scale_dream_d2f.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Commit, NotFinite
from paradec.core.query import WindowQuery
from paradec.samplers.masked.ahead.draft_layout import DraftState, build_queries
from paradec.samplers.masked.ahead.wrapped import DraftingSampler, DraftProposal, base_sampler, pick_step
from paradec.samplers.masked.loop import MaskedProposal, MaskedState, finish_step, to_host
from paradec.samplers.masked.view import StepDecision

TOKENS, CONFIDENCE, OPEN = "ahead_tokens", "ahead_confidence", "ahead_open"
"""Names of memory tensors [B, window]: candidates of the last best branch, their confidence, undecided positions."""


@dataclass(kw_only=True)
class BranchProposal(DraftProposal):
    branch_scores: Tensor
    """[K, R] float64: -inf where a row has no such branch."""


@dataclass(frozen=True)
class LoPA(DraftingSampler):
    """Run the steps of another sampler, `base`, from the branch with the highest confidence at its undecided positions.
    A branch is a copy of the row with one additional token. Tokens may differ from the base's.

    A step evaluates the row and `branches` branches, as separate rows with the same keys and values. Their additional
    tokens are the previous step's candidates at the most confident positions that the previous step left undecided in
    the open blocks; the first branch gets the most confident of these tokens, and so on. A branch's score is alpha * c
    + (1 - alpha) * m. c is the confidence of its additional token, or 1 for the row itself. m is the mean confidence of
    the least confident share `tail` of its undecided positions, or 1 if it has none. The branch with the highest score
    replaces the row, and the base decides from that branch's logits. Among equal scores, the most confident additional
    token wins; the row itself comes last, as in the public code. A block's first step has no branches. With a cache,
    the first step after the first open block was filled has no branches either.

    Args:
        base: the sampler whose steps are run: a name, a masked sampler, or its `to_dict`; the paper's is D2F's rule,
            `threshold` in `paradec.PipelinedBlocks(32, forced="active")`.
        branches: k, branches besides the row itself, from 0 (only the base) to 64. Published scripts have 2 to 4.
        alpha: weight of the additional token's confidence, in [0, 1]; 0 as in the published scripts. With the public
            code's default, 0.5, the row itself nearly always has the highest score.
        tail: share of the undecided positions to average, in (0, 1], at least one position; 1 as in the scripts (the
            code's default is 0.5).
        confidence: the quantity to average, which also ranks positions: "minus_entropy" (as in the scripts),
            "confidence" (the code's default) or "margin".

    A step costs one call with up to 1 + k rows; `row_forwards` and forwarded tokens count all rows. Not supported:
    caches whose plan depends on the number of steps, stops that depend on logits, `logprobs` and `rng="reference"`.

    Raises ValueError for a setting out of its range, or a base that drafts, takes tokens back, has a schedule or a
    custom step, or has blocks that depend on logits.
    """

    base: Any = "threshold"
    branches: int = 4
    alpha: float = 0.0
    tail: float = 1.0
    confidence: str = "minus_entropy"

    name = "lopa"
    paper = "LoPA"
    arxiv = "2512.16229"
    summary = "the steps of another sampler, from the best of several branches with one more token"
    unsupported = (*DraftingSampler.unsupported, "logprobs")
    sweep = ({"branches": 2}, {"branches": 4, "base": {"sampler": "threshold", "threshold": 0.7}})

    def __post_init__(self) -> None:
        check_int("branches", self.branches, low=0, high=64)
        check_number("alpha", self.alpha, low=0, high=1)
        check_number("tail", self.tail, low=0, high=1, open_low=True)
        check_choice("confidence", self.confidence, ("minus_entropy", "confidence", "margin"))
        base = base_sampler(self.base)
        has_schedule = base.uses_steps or base.needs.may_wait
        why = "its schedule counts tokens, and a branch adds one" if has_schedule else None
        reads = (*base.needs.reads, self.confidence)
        self._adopt(base, why, reads=reads, extra_quantities=base.needs.extra_quantities)

    def memory(self) -> Mapping[str, MemorySpec]:
        specs = dict(self.base.memory())
        if self.branches:
            specs[TOKENS] = MemorySpec(("window",), torch.int64)
            specs[CONFIDENCE] = MemorySpec(("window",), torch.float64)
            specs[OPEN] = MemorySpec(("window",), torch.bool)
        return specs

    def check_model(self, model: Any) -> None:
        super().check_model(model)
        if self.branches and getattr(model, "reads_order", False):
            name = model.facts.name
            raise ValueError(f"sampler 'lopa' does not work with {name}, which reads decision orders: set branches=0")

    def query(self, state: MaskedState) -> list[WindowQuery]:
        rows, current = state.window.rows, state.window.read(state.canvas)
        branches, num_drafts = [DraftState(state, 0, current)], np.ones(len(rows), np.int64)
        if not self.branches:
            return build_queries(state, branches, num_drafts, tree=False)
        memory = state.memory.read(rows, current.shape[1])
        is_open = memory[OPEN] & state.window.undecided(current, state.mask_id)
        max_added = is_open.sum(1).clamp(max=self.branches).cpu().numpy()
        if state.store is not None:  # a block's first call must be stored, and calls with drafts are not
            max_added = np.where(state.block_step[rows] == 0, 0, max_added)
        order = memory[CONFIDENCE].masked_fill(~is_open, -torch.inf).argsort(dim=1, descending=True, stable=True)
        for rank in range(int(max_added.max())):
            column = order[:, rank : rank + 1]
            branches.append(DraftState(state, 0, current.scatter(1, column, memory[TOKENS].gather(1, column))))
        return build_queries(state, branches, num_drafts + max_added, tree=False)

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> BranchProposal:
        branches, base_steps, num_drafts = self.take_steps(self, state, outputs, queries, chain=False)
        scores = []
        for branch_number, (branch, base_step) in enumerate(zip(branches, base_steps, strict=True)):
            future = self._future_confidence(branch, base_step.quantities[self.confidence])
            confidence = torch.ones_like(future)
            if branch_number:
                added = branch.tokens != branches[0].tokens
                memory = state.memory.read(state.window.rows, added.shape[1])
                confidence = torch.where(added, memory[CONFIDENCE], 0).sum(1)
            is_present = torch.as_tensor(branch_number < num_drafts, device=future.device)
            scores.append((self.alpha * confidence + (1 - self.alpha) * future).where(is_present, -torch.inf))
        fields = dict(drafts=branches, base_steps=base_steps, branch_scores=torch.stack(scores), num_drafts=num_drafts)
        return BranchProposal(**vars(base_steps[0].proposal), **fields)  # type: ignore[arg-type]

    def _future_confidence(self, branch: DraftState, confidence: Tensor) -> Tensor:
        """Average the lowest share `tail` of `confidence` [R, W] at undecided positions: [R] float64; 1 without any."""
        undecided = branch.undecided_window
        count = undecided.sum(1, keepdim=True)
        num_lowest = (count.double() * self.tail).long().clamp(min=1)
        ordered = confidence.masked_fill(~undecided, torch.inf).sort(dim=1).values
        is_lowest = torch.arange(ordered.shape[1], device=ordered.device) < num_lowest
        mean = torch.where(is_lowest, ordered, 0).sum(1) / num_lowest[:, 0]
        return torch.where(count[:, 0] > 0, mean, 1.0)

    def commit(self, state: MaskedState, proposal: MaskedProposal) -> Commit:
        """Replace each row by its best branch, and write the base's step from this branch."""
        assert isinstance(proposal, BranchProposal)
        state.check_current(proposal)
        window, rows, steps = state.window, proposal.rows, proposal.base_steps
        # branch 0, the row itself, loses ties
        best = (proposal.branch_scores.roll(-1, 0).argmax(0) + 1) % len(steps)
        written = pick_step([step.written for step in steps], best)
        # the sum is NaN if any branch is; a row with fewer branches counts its last branch several times
        confidence = torch.stack([step.proposal.quantities["confidence"] for step in steps])
        cuts = [step.cut for step in steps if step.cut is not None]
        cut = pick_step(cuts, best) if cuts else None
        arrays = to_host(tokens=written, before=proposal.current, confidence=confidence.sum(0), cut=cut)
        committed = (arrays["tokens"] != arrays["before"]).sum(1)
        if len(broken := rows[~np.isfinite(arrays["confidence"]).all(1)]):
            raise NotFinite.at_steps(broken, state.row_step[broken])
        if 0 in committed.tolist():
            raise RuntimeError(f"sampler {self.base.name!r} committed nothing for row {int(rows[committed.argmin()])}")

        window.write(state.canvas, written)
        for name in self.base.memory():
            state.memory.write(name, rows, pick_step([step.memory[name] for step in steps], best))
        if self.branches:
            for name, values in (  # for the branches of the next step
                (TOKENS, [step.proposal.values for step in steps]),
                (CONFIDENCE, [step.proposal.quantities[self.confidence] for step in steps]),
                (OPEN, [state.window.undecided(written, state.mask_id)]),
            ):
                state.memory.write(name, rows, pick_step(values, best))
        scores = pick_step([step.proposal.scores for step in steps], best)
        changed = written != proposal.current
        decision = StepDecision(values=written, selected=changed, filled=changed)
        finish_step(self, state, proposal, decision, arrays, committed)
        return Commit(rows, written, window.positions, changed, scores, proposal.kind)

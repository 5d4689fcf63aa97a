"""FreeDave ("Free Draft-and-Verification", arXiv 2510.00294, and the public code's generation/core.py).

The public code writes the tokens of a model call (forward) only after the next forward has verified them. Here the
first step of a forward is committed at once. The results are equal, but a row needs no forward after its last mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_choice, check_int, short_repr
from paradec.core.logprobs import StepLogProbs
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Commit, NotFinite
from paradec.core.query import WindowQuery
from paradec.samplers.features.pipelined_blocks import PipelinedBlocks
from paradec.samplers.masked.ahead.draft_layout import DraftState, build_queries
from paradec.samplers.masked.ahead.wrapped import BaseStep, DraftingSampler, DraftProposal, base_sampler, pick_step
from paradec.samplers.masked.blocks import NEVER, close_blocks, find_ends, trim_rows
from paradec.samplers.masked.loop import UNCUT, MaskedProposal, MaskedState, to_host
from paradec.samplers.masked.view import StepDecision

LAST_FORWARD = "last_forward_"
"""Prefix of memory names for candidates and quantities of the last forward, from which the next drafts are made."""


def accept_drafts(
    drafts: np.ndarray, written: np.ndarray, num_drafts: np.ndarray, mask: int, subset: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Count the accepted drafts after the first one, which is the row itself.

    drafts: [K, R, W] int64 windows, each an extension of the previous one.
    written: [K, R, W] int64: the windows after the base's step from each draft.
    num_drafts: [R] int64: number of evaluated drafts per row. mask: the mask id.
    subset: False accepts a draft that equals the base's step from the previous accepted draft; True accepts the
        furthest draft whose tokens are all in the base's step from an accepted draft.
    Returns the number of accepted drafts [R] int64; and for each draft, the index of the accepted draft whose step was
        compared with the next draft [K, R] int64."""
    count = len(drafts)
    depth, rows = np.arange(count)[:, None], np.arange(drafts.shape[1])
    judge_of_draft = np.broadcast_to(depth, (count, len(rows)))
    if not subset:
        agrees = (written[:-1] == drafts[1:]).all(-1) & (depth[1:] < num_drafts)
        return np.cumprod(agrees, axis=0).sum(0), judge_of_draft
    # [judging draft, judged draft, R]
    is_within = ((drafts[None] == mask) | (drafts[None] == written[:, None])).all(-1) & (depth < num_drafts)
    num_accepted = np.zeros(len(rows), np.int64)
    for _ in range(count - 1):
        furthest = np.where(is_within[num_accepted, :, rows].T & (depth > num_accepted), depth, num_accepted).max(0)
        judge_of_draft = np.where((depth >= num_accepted) & (depth < furthest), num_accepted, judge_of_draft)
        num_accepted = furthest
    return num_accepted, judge_of_draft


@dataclass(frozen=True)
class FreeDave(DraftingSampler):
    """Run several steps of another sampler, `base`, per forward, as long as the steps' tokens equal their drafts.

    The base decides a step from the logits of a forward. Then, with this step's tokens written, it decides further
    steps from the same logits; the rows after these steps are the drafts. The next forward evaluates the row and its
    drafts together, and the base decides a step from the logits of each. As long as a step's result equals the next
    draft, this draft's logits are those that the base would have computed. The first step in a block has no drafts.

    Lossless: tokens equal those of the base with the same cache. This also holds at temperature > 0, because a draft
    uses the random numbers of its step (the public code gives only the same distribution). Rows end and blocks open
    at the same steps as with the base. Except in float64, near-ties may be decided differently, as with any change of
    batch.

    Args:
        base: the sampler whose steps are run: a name, a masked sampler, or its `to_dict`. The default commits one token
            per step, as in the paper.
        draft_steps: K, number of steps that a forward evaluates, including the row's current step; 1 (only the base) to
            64. The public code has 4 for LLaDA, and 8 for Dream and TraDo.
        draft_mode: "batch" evaluates each draft as a row, which reads a copy of the stored keys and values. "tree" (the
            public code's default) puts a row's drafts into one row, which reads the store once. There, each draft
            attends only to itself; the model's attention must accept a mask for this. The result is the same.
        agreement: "exact" is lossless. "subset" is FreeDave++ for threshold rules: a draft is accepted if the step from
            an accepted draft commits all the draft's tokens. This saves forwards, but tokens differ from the base's.
            Preset "freedave++" has "subset" and 0.95, the threshold of the paper's code.

    The method pays off with few rows and short windows, where K times the positions cost hardly more. Forwarded tokens
    count every draft. Not supported: caches whose plan depends on the number of steps, blocks and early stops
    that depend on logits, and `rng="reference"`. The public code's eager mode, which drafts into the next block, is not
    implemented.

    Raises ValueError for a setting out of its range, or a base that takes tokens back, drafts by itself, or has blocks
    that depend on logits; with "subset" also for a base with a memory or a schedule.
    """

    base: Any = "low_confidence"
    draft_steps: int = 4
    draft_mode: str = "batch"
    agreement: str = "exact"

    name = "freedave"
    paper = "FreeDave"
    arxiv = "2510.00294"
    summary = "several steps of another sampler per forward, drafted and verified; the same tokens"
    sweep = ({"draft_steps": 2}, {"draft_steps": 8})
    presets = {"freedave++": {"base": {"sampler": "threshold", "threshold": 0.95}, "agreement": "subset"}}

    def __post_init__(self) -> None:
        check_int("draft_steps", self.draft_steps, low=1, high=64)
        check_choice("draft_mode", self.draft_mode, ("batch", "tree"))
        check_choice("agreement", self.agreement, ("exact", "subset"))
        base, why = base_sampler(self.base), None
        if self.agreement == "subset" and (base.memory() or base.uses_steps or base.needs.may_wait):
            why = "agreement='subset' skips steps, which the base's memory or schedule counts"
        self._adopt(base, why, may_wait=base.needs.may_wait)
        object.__setattr__(self, "uses_steps", base.uses_steps)

    def memory(self) -> Mapping[str, MemorySpec]:
        specs = dict(self.base.memory())
        if self.draft_steps == 1:
            return specs
        readings = {name: torch.float64 for name in self.needs.reads} | {"tokens": torch.int64}
        return specs | {LAST_FORWARD + name: MemorySpec(("window",), dtype) for name, dtype in readings.items()}

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        if isinstance(blocks, PipelinedBlocks):
            raise ValueError(
                f"sampler 'freedave' drafts one block, not blocks={short_repr(blocks)}; use sampler='lopa'"
            )
        super().check(facts, blocks, cache, longest)

    def check_model(self, model: Any) -> None:
        super().check_model(model)
        if self.draft_mode == "tree" and not model.supports_store:
            raise ValueError(f"draft_mode='tree' does not work with {model.facts.name}: use draft_mode='batch'")

    def query(self, state: MaskedState) -> list[WindowQuery]:
        rows = state.window.rows
        # no more drafts than steps left: at most one per mask (unless steps may commit nothing), and no unplanned ones
        num_drafts = np.full(len(rows), self.draft_steps)
        if not self.needs.may_wait:
            num_drafts = np.minimum(num_drafts, state.remaining[rows])
        if self.uses_steps:
            planned = state.planned_steps(rows) - state.block_step[rows]
            num_drafts = np.where(planned > 0, np.minimum(num_drafts, planned), num_drafts)
        num_drafts = np.where(state.block_step[rows] == 0, 1, num_drafts)
        drafts = self._make_drafts(state, num_drafts.max())
        return build_queries(state, drafts, num_drafts, tree=self.draft_mode == "tree")

    def _make_drafts(self, state: MaskedState, count: int) -> list[DraftState]:
        drafts = [DraftState(state, 0, state.window.read(state.canvas))]
        if count == 1:
            return drafts
        memory = state.memory.read(state.window.rows, state.window.positions.shape[1])
        readings = {name.removeprefix(LAST_FORWARD): memory[name] for name in memory if name.startswith(LAST_FORWARD)}
        tokens = readings.pop("tokens")
        base_memory: Mapping[str, Tensor] = {name: memory[name] for name in self.base.memory()}
        for steps in range(1, count):
            updates = {**base_memory, **readings} if self.base.needs.processes_logits else {}
            base_step = self.take_step(drafts[-1], tokens, readings, updates, base_memory, [])
            base_memory = base_step.memory
            drafts.append(DraftState(state, steps, base_step.written))
        return drafts

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> DraftProposal:
        drafts, steps, num_drafts = self.take_steps(self.base, state, outputs, queries, chain=True)
        return DraftProposal(**vars(steps[0].proposal), drafts=drafts, base_steps=steps, num_drafts=num_drafts)

    def commit(self, state: MaskedState, proposal: MaskedProposal) -> Commit:
        """Accept drafts, and write the base's steps up to the step from the last accepted draft."""
        assert isinstance(proposal, DraftProposal)
        window, rows, steps = state.window, proposal.rows, proposal.base_steps
        state.check_current(proposal)
        cuts = [step.cut for step in steps if step.cut is not None]
        arrays = to_host(
            drafts=torch.stack([draft.tokens for draft in proposal.drafts]),
            written=torch.stack([step.written for step in steps]),
            confidence=torch.stack([step.proposal.quantities["confidence"] for step in steps]),
            cut=torch.stack(cuts) if cuts else None,
        )
        drafts, written = arrays["drafts"], arrays["written"]
        subset = self.agreement == "subset"
        num_accepted, judge_of_draft = accept_drafts(drafts, written, proposal.num_drafts, state.facts.mask_id, subset)
        # the window after each step: the accepted drafts, then the base's step from the last accepted draft
        depth = np.arange(len(steps))[:, None]
        windows = np.where((depth < num_accepted)[..., None], np.roll(drafts, -1, 0), written)
        changed = windows != np.concatenate((drafts[:1], windows[:-1]))
        counts = changed.sum(-1)
        full = counts.cumsum(0) == state.remaining[rows]
        num_steps = np.minimum(num_accepted, np.where(full.any(0), full.argmax(0), num_accepted)) + 1
        cuts_by_step = arrays["cut"] if cuts else np.full(counts.shape, UNCUT)
        is_shorter = cuts_by_step < state.length[rows]  # drafts after a cut were evaluated on the uncut row
        num_steps = np.minimum(num_steps, np.where(is_shorter.any(0), is_shorter.argmax(0) + 1, num_steps))
        self._check_steps(state, rows, np.isfinite(arrays["confidence"]).all(-1), counts, depth < num_steps)

        num_steps, ends = self._write_steps(state, windows, counts, num_steps)
        index, first_step = np.arange(len(rows)), state.row_step[rows]
        final = windows[num_steps - 1, index]
        last_step = torch.as_tensor(num_steps - 1, device=window.positions.device)
        for name in self.base.memory():
            state.memory.write(name, rows, pick_step([step.memory[name] for step in steps], last_step))
        if self.draft_steps > 1:
            self._remember_readings(state, rows, steps, last_step)
        # a token's score comes from the step that committed it
        step_of_token = (changed & (depth < num_steps)[..., None]).argmax(0)
        scores = torch.stack([step.proposal.scores for step in steps])
        judging_draft, values, selected = (
            torch.as_tensor(array, device=scores.device)
            for array in (judge_of_draft[step_of_token, index[:, None]], final, final != drafts[0])
        )
        logprobs = [step.proposal.logprobs for step in steps if step.proposal.logprobs is not None]
        decision = StepDecision(
            values=values,
            selected=selected,
            filled=selected,
            logprobs=StepLogProbs.select_steps(logprobs, judging_draft) if logprobs else None,
            steps=torch.as_tensor(first_step[:, None] + step_of_token, device=scores.device),
        )
        state.count(proposal.cost)
        state.cache.on_commit(state, final)
        state.advance(rows, (final != drafts[0]).sum(-1))
        has_cuts = bool(is_shorter[num_steps - 1, index].any())
        block_changed = has_cuts
        for feature in state.features.values():
            block_changed |= feature.on_close(state, proposal, decision, final, ends)
        state.row_step[rows] += num_steps - 1
        state.block_step[rows] += num_steps - 1
        if has_cuts:
            trim_rows(state, cuts_by_step[num_steps - 1, index], final)
        close_blocks(state, rows, ends, changed=block_changed)
        score = scores.gather(0, judging_draft[None])[0]
        return Commit(rows, values, window.positions, selected, score, proposal.kind, decision.logprobs)

    def _check_steps(
        self, state: MaskedState, rows: np.ndarray, finite: np.ndarray, num_committed: np.ndarray, is_taken: np.ndarray
    ) -> None:
        broken = is_taken & ~finite
        if broken.any():
            is_broken = broken.any(0)
            raise NotFinite.at_steps(rows[is_broken], state.row_step[rows[is_broken]] + broken[:, is_broken].argmax(0))
        idle = is_taken & (num_committed == 0)
        if self.needs.may_wait:
            steps = state.block_step[rows] + np.arange(1, len(num_committed) + 1)[:, None]
            idle &= steps >= state.planned_steps(rows)
        if idle.any():
            row = int(rows[idle.any(0).argmax()])
            raise RuntimeError(f"sampler {self.base.name!r} committed nothing for row {row}")

    def _write_steps(
        self, state: MaskedState, windows: np.ndarray, num_committed: np.ndarray, num_steps: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Write the windows [K, R, W] of each row's first `num_steps` [R] steps, or fewer if a stop rule ends the row.
        Returns the number of written steps [R]; and the ends [R], None if no row ends."""
        window, rows, index = state.window, state.window.rows, np.arange(len(num_steps))
        ends = np.full(len(num_steps), NEVER)
        last_step = int(num_steps.max()) - 1
        # stop rules may read counters, and must see their values after the base's commit
        counters = state.decided.copy(), state.remaining.copy(), state.row_step.copy(), state.block_step.copy()
        for step in range(last_step + 1) if state.stop_rules else [last_step]:
            tokens = windows[np.minimum(step, num_steps - 1), index]
            window.write(state.canvas, torch.as_tensor(tokens, device=state.canvas.device))
            if not state.stop_rules:
                continue
            committed = np.where(step < num_steps, num_committed[step], 0)
            state.decided[rows] += committed
            state.remaining[rows] -= committed
            state.row_step[rows] += step < num_steps
            state.block_step[rows] += step < num_steps
            rule_ends = find_ends(state.stop_rules, state, tokens)
            if rule_ends is not None:
                stops = (rule_ends < NEVER) & (ends == NEVER)
                num_steps = np.where(stops, np.minimum(num_steps, step + 1), num_steps)
                ends = np.where(stops, rule_ends, ends)
        state.decided[:], state.remaining[:], state.row_step[:], state.block_step[:] = counters
        return num_steps, ends if (ends < NEVER).any() else None

    def _remember_readings(
        self, state: MaskedState, rows: np.ndarray, steps: list[BaseStep], last_step: Tensor
    ) -> None:
        memory, reads, base_memory = state.memory, self.needs.reads, self.base.memory()
        readings = [{"tokens": step.proposal.values} for step in steps]
        for values, step in zip(readings, steps, strict=True):
            values.update({name: value for name, value in step.proposal.quantities.items() if name in reads})
            values.update({name: value for name, value in step.proposal.updates.items() if name not in base_memory})
        for name in readings[0]:
            value = pick_step([values[name] for values in readings], last_step)
            if LAST_FORWARD + name not in memory:  # the names of updates are known only after the first logits stage
                shape = list(value.shape[1:])
                is_wide = shape[:1] == [steps[0].written.shape[1]]
                dims: tuple[str | int, ...] = ("window", *shape[1:]) if is_wide else tuple(shape)
                memory.specs[LAST_FORWARD + name] = MemorySpec(dims, value.dtype)
                if is_wide:
                    shape[0] = memory[LAST_FORWARD + "tokens"].shape[1]
                memory[LAST_FORWARD + name] = value.new_zeros((state.batch, *shape))
            memory.write(LAST_FORWARD + name, rows, value)

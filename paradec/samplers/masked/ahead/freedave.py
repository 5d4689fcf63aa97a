"""FreeDave: the sampler's own next steps are drafted from one forward and verified, all of them, in the next.

"Free Draft-and-Verification", arXiv 2510.00294, and the public code's generation/core.py. The public code keeps what a
forward found until the next one has verified it; here its first step is committed at once, so that the next forward
evaluates the row as it is, and drafts beyond it. Tokens and forwards are the same, but none is spent on rows that
have no mask left, and with one draft a step it is the base itself, forward for forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_choice, check_int, shown
from paradec.core.logprobs import StepLogProbs
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Commit, NotFinite
from paradec.core.query import WindowQuery
from paradec.request import Request, request_for
from paradec.samplers.features.pipelined_blocks import PipelinedBlocks
from paradec.samplers.masked.ahead.draft_layout import Ahead, draft_queries
from paradec.samplers.masked.ahead.wrapped import (
    DraftingSampler,
    DraftProposal,
    Taken,
    base_sampler,
    picked,
    take,
    why_not_a_base,
)
from paradec.samplers.masked.blocks import NEVER, close_blocks, find_ends, trim_rows
from paradec.samplers.masked.loop import UNCUT, MaskedProposal, MaskedState, to_host
from paradec.samplers.masked.view import Decision

CARRIED = "carried_"
"""Before the names of what a forward found and the next drafts are made of, in the memory."""


def accept(
    drafts: np.ndarray, written: np.ndarray, copies: np.ndarray, mask: int, subset: bool
) -> tuple[np.ndarray, np.ndarray]:
    """How many drafts are accepted beyond the first one, which is the row itself.

    Args:
        drafts: [K, R, W] int64 windows, each an extension of the one before.
        written: [K, R, W] int64: what the base made of each of them in one step.
        copies: [R] int64: how many of a row's drafts were evaluated.
        mask: the mask id.
        subset: False accepts a draft that is what the base made of the accepted one before it; True the furthest one
            that holds nothing else than what the base made of an accepted one.

    Returns:
        The number accepted [R] int64, and per draft the accepted one that judged its successor [K, R] int64.
    """
    count = len(drafts)
    depth, rows = np.arange(count)[:, None], np.arange(drafts.shape[1])
    judge = np.broadcast_to(depth, (count, len(rows)))
    if not subset:
        agrees = (written[:-1] == drafts[1:]).all(-1) & (depth[1:] < copies)
        return np.cumprod(agrees, axis=0).sum(0), judge
    # [judging, judged, R]
    within = ((drafts[None] == mask) | (drafts[None] == written[:, None])).all(-1) & (depth < copies)
    best = np.zeros(len(rows), np.int64)
    for _ in range(count - 1):
        furthest = np.where(within[best, :, rows].T & (depth > best), depth, best).max(0)
        judge = np.where((depth >= best) & (depth < furthest), best, judge)
        best = furthest
    return best, judge


@dataclass(frozen=True)
class FreeDave(DraftingSampler):
    """Take several steps of another sampler, `base`, per forward, as long as they equal their drafts.

    The logits of a forward give the base's decision in this step. Read again with these tokens written, they also draft
    the steps after it. The next forward evaluates the row and those drafts together, and the base decides from the
    logits of each. While its decision turns one draft into the next, the next draft's logits are those that the base
    would have seen. The first step in a block has no drafts.

    Lossless: tokens equal those of the base with the same cache, at every temperature, because random numbers belong to
    a step and a draft uses those of its own step (the public code is exact in distribution there). Schedules count the
    accepted steps, the base's memory follows the accepted drafts, and rows end and blocks open at the same steps as
    with the base. Outside float64, near-ties may be decided differently, as in any other batch.

    Args:
        base: the sampler whose steps are taken: a name, a masked sampler, or its `to_dict`. The default is one token
            per step, as in the paper.
        draft_steps: K, the number of steps that a forward evaluates, the row's own included: from 1 (the base alone) to
            64. The public code has 4 for LLaDA, 8 for Dream and TraDo.
        draft_mode: "batch" evaluates drafts as rows of their own, each reading a copy of the stored keys and values.
            "tree" puts a row's drafts into one row that reads the store once, each seeing itself alone (the public
            code's default); only for models whose attention takes such a mask. The result is the same.
        agreement: "exact" is lossless. "subset" is FreeDave++ for threshold rules: a draft is accepted if it holds
            only tokens that an accepted one's step would commit, even if it holds fewer. This takes fewer forwards, and
            gives other tokens than the base. Preset "freedave++" uses it with 0.95, the threshold of the paper's code.

    The method pays if a call with K times the positions costs hardly more: with few rows and short windows.
    `row_forwards` and forwarded tokens count every draft. Refused are caches whose plan depends on the number of steps,
    blocks and early stops that the logits decide, and `rng="reference"`. The public code's eager mode, which drafts
    into the next block, is not implemented.

    Raises:
        ValueError: a setting out of its range, or a base whose steps cannot be drafted: one that takes tokens back,
            drafts by itself, or ends its blocks by the logits; for "subset", one with a memory or a schedule.
    """

    base: Any = "low_confidence"
    draft_steps: int = 4
    draft_mode: str = "batch"
    agreement: str = "exact"

    name = "freedave"
    paper = "FreeDave"
    arxiv = "2510.00294"
    summary = "the steps of another sampler, several per forward: drafted, verified, the same tokens"
    sweep = ({"draft_steps": 2}, {"draft_steps": 8})
    presets = {"freedave++": {"base": {"sampler": "threshold", "threshold": 0.95}, "agreement": "subset"}}

    def __post_init__(self) -> None:
        check_int("draft_steps", self.draft_steps, low=1, high=64)
        check_choice("draft_mode", self.draft_mode, ("batch", "tree"))
        check_choice("agreement", self.agreement, ("exact", "subset"))
        base = base_sampler(self.base)
        why = why_not_a_base(base)
        if self.agreement == "subset" and (base.memory() or base.uses_steps or base.needs.may_wait):
            why = why or "agreement='subset' skips steps, and it has a memory or a schedule that counts them"
        if why is not None:
            raise ValueError(f"base={base.name!r} does not work with sampler 'freedave': {why}")
        read = base.needs
        needs = replace(self.needs, reads=read.reads, score=read.score, score_from=read.score_from)
        needs = replace(needs, may_wait=read.may_wait, decided_logits=read.decided_logits)
        vars(self).update(base=base, needs=needs, draws=base.draws, uses_steps=base.uses_steps)

    def memory(self) -> Mapping[str, MemorySpec]:
        kept = dict(self.base.memory())
        if self.draft_steps == 1:
            return kept
        found = {name: torch.float64 for name in self.needs.reads} | {"tokens": torch.int64}
        return kept | {CARRIED + name: MemorySpec(("window",), dtype) for name, dtype in found.items()}

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        if isinstance(blocks, PipelinedBlocks):
            raise ValueError(
                f"sampler 'freedave' does not work with blocks={shown(blocks)}: it drafts later steps of one block; "
                "use paradec.FixedBlocks, or sampler='lopa'"
            )
        super().check(facts, blocks, cache, longest)

    def start(
        self, model: Any, prompt: Any, request: Request | None = None, *, attention_mask: Any = None, **arguments: Any
    ) -> MaskedState:
        """Make the state of one request: see `MaskedSampler.start`.

        Raises:
            ValueError, TypeError: an argument out of its range, `rng="reference"`, or draft_mode="tree" with a model
                that has no use for a mask per position; the message names it.
        """
        request = request_for(self, request, arguments)
        if request.rng == "reference":
            raise ValueError(
                "rng='reference' does not work with sampler 'freedave': it draws from one stream in the order of the "
                "steps, and drafts of later steps draw beside each other; use rng='counter'"
            )
        if self.draft_mode == "tree" and not model.supports_store:
            raise ValueError(
                f"draft_mode='tree' of sampler 'freedave' needs a model that takes an attention mask per position; "
                f"{model.facts.name} does not: use draft_mode='batch'"
            )
        return super().start(model, prompt, request, attention_mask=attention_mask)

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: MaskedState) -> list[WindowQuery]:
        """One query per part of the cache's plan, two where only some of its rows have drafts."""
        copies = self._copies(state)
        drafts = self._drafts(state, copies.max())
        return draft_queries(state, drafts, copies, tree=self.draft_mode == "tree")

    def _copies(self, state: MaskedState) -> np.ndarray:
        """[R] int64: steps to evaluate of each row, as many as its block may still take. All but those of methods that
        may wait fill something, and most schedules end with their planned steps."""
        rows = state.window.rows
        copies = np.full(len(rows), self.draft_steps)
        if not self.needs.may_wait:
            copies = np.minimum(copies, state.remaining[rows])
        if self.uses_steps:
            planned = state.planned_steps(rows) - state.block_step[rows]
            copies = np.where(planned > 0, np.minimum(copies, planned), copies)
        return np.where(state.block_step[rows] == 0, 1, copies)

    def _drafts(self, state: MaskedState, count: int) -> list[Ahead]:
        """The row as it is and `count` - 1 steps on, by what the last forward found."""
        drafts = [Ahead(state, 0, state.window.read(state.canvas))]
        if count == 1:
            return drafts
        memory = state.memory.read(state.window.rows, state.window.positions.shape[1])
        found = {name.removeprefix(CARRIED): memory[name] for name in memory if name.startswith(CARRIED)}
        tokens = found.pop("tokens")
        kept: Mapping[str, Tensor] = {name: memory[name] for name in self.base.memory()}
        for steps in range(1, count):
            updates = {**kept, **found} if self.base.needs.processes_logits else {}
            taken = take(self.base, drafts[-1], tokens, found, updates, kept, [])
            kept = taken.memory
            drafts.append(Ahead(state, steps, taken.written))
        return drafts

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> DraftProposal:
        """The base's step from every draft. outputs: logits [R, W, V], one per query."""
        drafts, taken, copies = self.take_steps(self.base, state, outputs, queries, chain=True)
        return DraftProposal(**vars(taken[0].proposal), drafts=drafts, taken=taken, copies=copies)

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, state: MaskedState, proposal: MaskedProposal) -> Commit:
        """Accept drafts, and write the base's steps up to and with that from the last accepted one.

        Raises:
            FloatingPointError: the model returned NaN or infinite logits for an accepted draft. Nothing is written.
            RuntimeError: the base committed nothing where it must.
        """
        assert isinstance(proposal, DraftProposal)
        window, rows, steps = state.window, proposal.rows, proposal.taken
        state.check_current(proposal)
        cuts = [step.cut for step in steps if step.cut is not None]
        found = to_host(
            drafts=torch.stack([ahead.tokens for ahead in proposal.drafts]),
            written=torch.stack([step.written for step in steps]),
            confidence=torch.stack([step.proposal.quantities["confidence"] for step in steps]),
            cut=torch.stack(cuts) if cuts else None,
        )
        drafts, written = found["drafts"], found["written"]
        subset = self.agreement == "subset"
        best, judge = accept(drafts, written, proposal.copies, state.facts.mask_id, subset)
        # the base's windows one by one: the accepted drafts, then what it made of the last of them
        depth = np.arange(len(steps))[:, None]
        windows = np.where((depth < best)[..., None], np.roll(drafts, -1, 0), written)
        changed = windows != np.concatenate((drafts[:1], windows[:-1]))
        counts = changed.sum(-1)
        full = counts.cumsum(0) == state.remaining[rows]
        taken = np.minimum(best, np.where(full.any(0), full.argmax(0), best)) + 1
        cut = found["cut"] if cuts else np.full(counts.shape, UNCUT)
        shorter = cut < state.length[rows]  # drafts beyond were evaluated with the longer row
        taken = np.minimum(taken, np.where(shorter.any(0), shorter.argmax(0) + 1, taken))
        self._check(state, rows, np.isfinite(found["confidence"]).all(-1), counts, depth < taken)

        taken, ends = self._write(state, windows, counts, taken)
        index, began = np.arange(len(rows)), state.row_step[rows]
        final = windows[taken - 1, index]
        last = torch.as_tensor(taken - 1, device=window.positions.device)
        for name in self.base.memory():
            state.memory.write(name, rows, picked([step.memory[name] for step in steps], last))
        if self.draft_steps > 1:
            self._carry(state, rows, steps, last)
        # each token with the score that it had when the base took it
        when = (changed & (depth < taken)[..., None]).argmax(0)
        scores = torch.stack([step.proposal.scores for step in steps])
        judged, values, selected = (
            torch.as_tensor(array, device=scores.device)
            for array in (judge[when, index[:, None]], final, final != drafts[0])
        )
        every = [step.proposal.logprobs for step in steps if step.proposal.logprobs is not None]
        decision = Decision(
            values=values,
            selected=selected,
            filled=selected,
            logprobs=StepLogProbs.select_steps(every, judged) if every else None,
            steps=torch.as_tensor(began[:, None] + when, device=scores.device),
        )
        state.count(proposal.cost)
        state.cache.committed(state, final)
        state.advance(rows, (final != drafts[0]).sum(-1))
        moved = bool(shorter[taken - 1, index].any())
        for feature in state.features.values():
            moved |= feature.on_close(state, proposal, decision, final, ends)
        state.row_step[rows] += taken - 1
        state.block_step[rows] += taken - 1
        if shorter[taken - 1, index].any():
            trim_rows(state, cut[taken - 1, index], final)
        close_blocks(state, rows, ends, moved=moved)
        score = scores.gather(0, judged[None])[0]
        return Commit(rows, values, window.positions, selected, score, proposal.kind, decision.logprobs)

    def _check(
        self, state: MaskedState, rows: np.ndarray, finite: np.ndarray, counts: np.ndarray, within: np.ndarray
    ) -> None:
        """Raise where the base would have, in the steps `within` [K, R]. finite, counts: [K, R]."""
        broken = within & ~finite
        if broken.any():
            wrong = broken.any(0)
            raise NotFinite.at_steps(rows[wrong], state.row_step[rows[wrong]] + broken[:, wrong].argmax(0))
        idle = within & (counts == 0)
        if self.needs.may_wait:
            steps = state.block_step[rows] + np.arange(1, len(counts) + 1)[:, None]
            idle &= steps >= state.planned_steps(rows)
        if idle.any():
            row = int(rows[idle.any(0).argmax()])
            raise RuntimeError(f"sampler {self.base.name!r} committed nothing for row {row}")

    def _write(
        self, state: MaskedState, windows: np.ndarray, counts: np.ndarray, taken: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Write the windows [K, R, W] of `taken` [R] steps, which commit `counts` [K, R] tokens each, one after the
        other, up to that in which a stop rule ends a row. Returns the steps that are left of `taken`, and the ends as a
        `StopRule` says them."""
        window, rows, index = state.window, state.window.rows, np.arange(len(taken))
        ends = np.full(len(taken), NEVER)
        last = int(taken.max()) - 1
        # a rule may read what is counted: it sees it as the base's commit would leave it
        before = state.decided.copy(), state.remaining.copy(), state.row_step.copy(), state.block_step.copy()
        for step in range(last + 1) if state.stop_rules else [last]:
            tokens = windows[np.minimum(step, taken - 1), index]
            window.write(state.canvas, torch.as_tensor(tokens, device=state.canvas.device))
            if not state.stop_rules:
                continue
            committed = np.where(step < taken, counts[step], 0)
            state.decided[rows] += committed
            state.remaining[rows] -= committed
            state.row_step[rows] += step < taken
            state.block_step[rows] += step < taken
            found = find_ends(state.stop_rules, state, tokens)
            if found is not None:
                stops = (found < NEVER) & (ends == NEVER)
                taken = np.where(stops, np.minimum(taken, step + 1), taken)
                ends = np.where(stops, found, ends)
        state.decided[:], state.remaining[:], state.row_step[:], state.block_step[:] = before
        return taken, ends if (ends < NEVER).any() else None

    def _carry(self, state: MaskedState, rows: np.ndarray, steps: list[Taken], last: Tensor) -> None:
        """Keep what was read from the last step's logits: the next drafts are made of it."""
        memory, read, remembered = state.memory, self.needs.reads, self.base.memory()
        found = [{"tokens": step.proposal.values} for step in steps]
        for values, step in zip(found, steps, strict=True):
            values.update({name: value for name, value in step.proposal.quantities.items() if name in read})
            values.update({name: value for name, value in step.proposal.updates.items() if name not in remembered})
        for name in found[0]:
            value = picked([values[name] for values in found], last)
            if CARRIED + name not in memory:  # what a logits stage finds is known once it has run
                shape = list(value.shape[1:])
                wide = shape[:1] == [steps[0].written.shape[1]]
                memory.specs[CARRIED + name] = MemorySpec(("window", *shape[1:]) if wide else tuple(shape), value.dtype)
                if wide:
                    shape[0] = memory[CARRIED + "tokens"].shape[1]
                memory[CARRIED + name] = value.new_zeros((state.batch, *shape))
            memory.write(CARRIED + name, rows, value)

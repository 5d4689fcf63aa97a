"""Optional features of a masked request that take few lines each, as hooks of the decode loop (`Tracker`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Part
from paradec.caches.kept import Reuse
from paradec.caches.parts import outward
from paradec.caches.suffix import Suffix
from paradec.core.blocks import Opening
from paradec.core.contract import AttentionState, CanvasState
from paradec.core.logprobs import LogProbs, StepLogProbs
from paradec.core.protocol import CallCost
from paradec.core.query import WindowQuery
from paradec.core.rows import ROWS, row_layout
from paradec.core.trace import TraceStep
from paradec.kernels.token_stats import path_for
from paradec.samplers.masked.queries import tokens_of
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.stopping import EarlyRule
from paradec.samplers.masked.trackers import Ends, TrackedState, Tracker
from paradec.samplers.masked.views import Decision, MaskedProposal


@dataclass
class BlockEnds(Tracker):
    """Which rows have opened a block whose end is not read yet (`paradec.AdaptiveBlocks`)."""

    opening: np.ndarray = field(metadata=ROWS)

    host_only = "blocks={state.blocks} end where the host reads it from the logits"

    def opened(self, state: MaskedState, rows: np.ndarray) -> None:
        self.opening[rows] = True

    def reads_window(self, state: MaskedState) -> bool:
        return bool(self.opening.any())

    def proposed(self, state: MaskedState, proposal: MaskedProposal) -> None:
        """Let a proposal end where its candidates say that blocks do."""
        confidence, available = proposal.quantities["confidence"], proposal.available
        proposal.block_end = self._read(state, proposal.values, confidence, available)
        if proposal.block_end is not None:
            proposal.available = available & (proposal.positions < proposal.block_end.unsqueeze(1))

    def committed(self, state: MaskedState, proposal: MaskedProposal, found: dict[str, np.ndarray]) -> None:
        """Let the blocks that were read end where the proposal has it."""
        if proposal.block_end is None:
            return
        read = self.opening[proposal.rows]
        rows, end = proposal.rows[read], found["block_end"][read]
        if (end > state.block_end[rows]).any():
            raise RuntimeError(f"blocks={state.blocks} cut a block that is longer than what it read")
        state.block_end[rows] = end
        masks = state.masks_before[rows, end] - state.masks_before[rows, state.block_start[rows]]
        state.masks_at_open[rows] = state.remaining[rows] = masks
        self.opening[rows] = False

    def _read(self, state: MaskedState, tokens: Tensor, confidence: Tensor, available: Tensor) -> Tensor | None:
        """Where each running row's block ends, [R] int64, if the candidates [R, W] decide it for any; else None."""
        rows = state.window.rows
        index = self.opening[rows].nonzero()[0]
        if not len(index):
            return None
        opened, device = rows[index], tokens.device
        start, end = torch.as_tensor(np.stack((state.block_start[rows], state.block_end[rows])), device=device)
        at = torch.as_tensor(index, device=device)
        opening = Opening(
            tokens=tokens[at],
            confidence=confidence[at],
            available=available[at],
            start=state.block_start[opened],
            prompt_length=state.prompt_length[opened],
            length=state.length[opened],
        )
        # the block reaches what can be committed, where given text comes first
        size = state.blocks.cut(opening).maximum(opening.available.int().argmax(1) + 1)
        return end.index_copy(0, at, start[at] + size)


@dataclass
class DecisionOrder(Tracker):
    """The row's step after which each position took its token, -1 where it was given or is undecided; for models whose
    answers depend on it (`Model.reads_order`)."""

    decided_at: Tensor = field(metadata=row_layout(columns=1, fill=-1))

    def asks(self, state: MaskedState, part: Part, query: WindowQuery, now: dict[str, Any]) -> None:
        rows = torch.as_tensor(query.rows, device=self.decided_at.device)
        now["decided_at"] = tokens_of(self.decided_at, query, rows).repeat(state.branches, 1)

    def writes(self, state: MaskedState, tokens: Tensor) -> None:
        before, step = state.window.read(state.canvas), torch.as_tensor(state.row_step[state.window.rows, None])
        when = torch.where(tokens == state.mask_id, -1, step.to(tokens.device))
        when = torch.where(tokens == before, state.window.read(self.decided_at), when)
        state.window.write(self.decided_at, when)


@dataclass
class EarlyStops(Tracker):
    """The early rules of a request. With them the window reaches beyond the block, to the end of every row."""

    early_rules: tuple[EarlyRule, ...]
    watched: tuple[str, ...]

    host_only = "stop rules other than the end token are asked on the host"

    def reads_window(self, state: MaskedState) -> bool:
        return True

    def proposed(self, state: MaskedState, proposal: MaskedProposal) -> None:
        """Say which rows end now."""
        satisfied = [rule.satisfied(state, proposal) for rule in self.early_rules]
        # what has no logits at this step cannot be filled
        proposal.early = torch.stack(satisfied).any(0) & self._evaluated(state, proposal)

    def decided(self, state: MaskedState, proposal: MaskedProposal, decision: Decision) -> None:
        """Take the candidates of all that is undecided in rows that end now."""
        assert proposal.early is not None
        early = proposal.early.unsqueeze(1)
        undecided = state.window.undecided(proposal.current, state.mask_id)
        decision.values = torch.where(early, proposal.values, decision.values)
        decision.selected = torch.where(early, undecided, decision.selected)
        decision.filled = torch.where(early, undecided.to(decision.filled.dtype), decision.filled)
        if decision.hold_block is not None:
            decision.hold_block = decision.hold_block & ~proposal.early

    def closing(self, state: MaskedState, proposal: MaskedProposal, tokens: np.ndarray, ends: Ends) -> bool:
        """Make the open block the last one of rows with nothing undecided: the window reaches to their end."""
        window = state.window
        masks = tokens == state.facts.mask_id
        if window.host_valid is not None:
            masks &= window.host_valid
        rows = window.rows[~masks.any(1)]
        state.block_end[rows], state.remaining[rows] = state.length[rows], 0
        return False

    def _evaluated(self, state: MaskedState, proposal: MaskedProposal) -> Tensor:
        """[R] bool: rows of which everything undecided has logits at this step."""
        undecided = state.window.undecided(proposal.current, state.mask_id)
        found = torch.ones(len(undecided), dtype=torch.bool, device=undecided.device)
        for query in proposal.cost.queries:
            if query.window.available is not None:
                index = torch.as_tensor(query.window.index, device=found.device)
                found[index] = ~(undecided[index] & ~query.window.available).any(1)
        return found


class Holes(Tracker):
    """Where end tokens are not proposed (`holes_eos_inf`): a request has it if a row of it has something given after a
    mask."""

    def attach(self, state: TrackedState) -> None:
        state.holes = self

    def reads_window(self, state: TrackedState) -> bool:
        return True

    def keep_ends_out(self, state: CanvasState, logits: Tensor, index: np.ndarray | None) -> None:
        """Exclude end tokens of logits [N, W, V] in the holes of the running rows `index` [N] (None: all), in place."""
        holes = state.while_blocks_stay("holes", lambda: self._inside(state))
        if holes is not None and index is not None and len(index) < len(holes):
            holes = holes.index_select(0, torch.as_tensor(index, device=holes.device))
        if holes is not None:
            keep_ends_out(state, logits, holes)

    def _inside(self, state: CanvasState) -> Tensor | None:
        """[R, W] bool: where windows lie in holes; None where they do nowhere."""
        # that takes in what was given between them, for which nothing is proposed
        inside = state.window.host_positions < state.answer_start[state.window.rows, None]
        return torch.as_tensor(inside, device=state.canvas.device) if inside.any() else None


def keep_ends_out(state: CanvasState, logits: Tensor, holes: Tensor) -> None:
    """Exclude end tokens of logits [R, W, V] in `holes` [R, W], in place; of [R, n * W, V] in each of n windows."""
    if holes.shape[1] < logits.shape[1]:
        holes = holes.repeat(1, logits.shape[1] // holes.shape[1])
    ends = logits.index_select(-1, state.ends)
    logits.index_copy_(-1, state.ends, ends.masked_fill_(holes.unsqueeze(-1), -torch.inf))


@dataclass
class KeptLogProbs(Tracker):
    """Keeps the log-probabilities of what is written."""

    logprobs: LogProbs = field(metadata=ROWS)

    host_only = "logprobs are kept step by step"

    def reads_window(self, state: MaskedState) -> bool:
        return True

    def written(self, state: MaskedState, proposal: MaskedProposal, decision: Decision) -> None:
        if proposal.logprobs is None:
            return
        found = proposal.logprobs.but(decision.values == state.facts.mask_id)  # taken back
        step = state.row_step[proposal.rows]
        self.logprobs.write(proposal.rows, proposal.positions, decision.selected, found, step)
        decision.logprobs = found


def trackers_of(state: MaskedState, sampler: Any, model: Any) -> list[Tracker]:
    """What keeps the log-probabilities, and the rollout, that a request asks for.

    Raises:
        ValueError: a rollout that cannot be recorded.
    """
    count = state.request.logprobs or 0
    kept = KeptLogProbs(LogProbs.empty(state.batch, state.canvas.shape[1], count, model.device))
    if not state.request.rollout:
        return [kept]
    from paradec.samplers.masked.rollouts import RecordedRollout

    return [kept, RecordedRollout.of(state, sampler, model)]


def step_logprobs(state: CanvasState, logits: Tensor, tokens: Tensor, count: int, known: Tensor | None) -> StepLogProbs:
    """Of a query's tokens [N, W] under softmax(logits [N, W, V]), with the `count` likeliest; for rollouts at the
    request's temperature as well. known: as `known_probabilities` gives it."""
    found, temperature = StepLogProbs.of_logits(logits, tokens, count, known), state.request.temperature
    if not state.request.rollout or temperature == 0:
        return found
    found.tempered = found.chosen
    if temperature != 1:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found.tempered = StepLogProbs.of_logits(wide / temperature, tokens, 0).chosen
    return found


def known_probabilities(sampler: Any, state: CanvasState, logits: Tensor, confidence: Tensor) -> Tensor | None:
    """The probabilities [N, W] of a query's tokens under softmax(logits [N, W, V]), where its confidences are just
    these; None where they are something else, and in small vocabularies, which are read again at no cost."""
    changed = sampler.needs.processes_logits or sampler.needs.score_from != "raw"
    if changed or state.generator is not None or not logits.is_cpu or path_for(logits) == "float64":
        return None
    return confidence if confidence.shape == logits.shape[:2] and bool((confidence > 0).all()) else None


@dataclass
class PrefixReuse(Tracker):
    """What a request takes over, and whether it counts what it leaves; one of the two may be None."""

    reuse: Reuse | None
    settled: np.ndarray | None

    fixed = "a prefix that is taken over or kept is laid out for all rows"
    host_only = "a prefix that is taken over or kept is laid out on the host"

    def committed(self, state: MaskedState, proposal: MaskedProposal, found: dict[str, np.ndarray]) -> None:
        rows = proposal.rows
        if self.settled is not None:
            self.settled[rows] = outward(state, rows, state.block_start[rows], state.block_end[rows])[0]


def take_over(state: MaskedState, reuse: Reuse, model: Any) -> None:
    """Put the prefix of a request into its store. One that is evaluated for that is a forward of every row's, whose
    positions are the first row's."""
    called = reuse.fill(state.store, model, state.stored_cache, state.causal_keys)
    state.reused, state.reuses = reuse.counts, True
    if not called:
        return
    once = (np.arange(state.batch) == 0).astype(np.int64)
    state._calls.append(CallCost(np.arange(state.batch), 1, once, np.full(state.batch, reuse.start) * once, False))
    if state.trace is not None:
        state.trace.steps.append(TraceStep([], (reuse.start * once).tolist(), "prefix", [1] * state.batch))


@dataclass
class SparseAttention(Tracker):
    """Tells the attention method (`paradec.attention`) which calls were made for a step that counts."""

    attention_state: AttentionState

    fixed = "sparse attention keeps a pattern of all rows"
    host_only = "sparse attention keeps its pattern on the host"

    def asks(self, state: MaskedState, part: Part, query: WindowQuery, now: dict[str, Any]) -> None:
        now["attention"] = self.attention_state.plan(state, part)

    def committed(self, state: MaskedState, proposal: MaskedProposal, found: dict[str, np.ndarray]) -> None:
        self.attention_state.committed(state, proposal.cost.queries)


@dataclass
class SuffixWindow(Tracker):
    """What exists of each row while its open block is open (`paradec.Suffix`)."""

    suffix: Suffix
    present: np.ndarray = field(metadata=row_layout(columns=1))

    host_only = "what exists of a suffix changes with the blocks, on the host"

    def opened(self, state: MaskedState, rows: np.ndarray) -> None:
        """Choose what exists of `rows` [N] while the blocks that they have opened are open."""
        if not len(rows):
            return
        masks = np.diff(state.masks_before[rows], axis=1) > 0
        start, end, column = state.block_start[rows], state.block_end[rows], state.columns[0]
        keys = state.keys[torch.as_tensor(rows, device=state.keys.device)]
        kept = self.suffix.kept(masks, start, end, keys, state.generator, state.facts.prediction)
        there = (~masks | (column < end[:, None]) | kept) & (column < state.length[rows, None])
        self.present[rows] = there
        if state.store is not None:
            for branch in range(state.branches):
                state.store.hide(rows + branch * state.batch, ~there)

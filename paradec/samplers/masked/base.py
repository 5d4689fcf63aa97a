"""The masked family: positions start as masks, and each step makes some of them final.

A method of this family is one decision, `select`: which undecided positions of the window become final, given their
scores. Everything around it is here, in this order: the query, the logits stage (guidance, suppression, the method's
own `process_logits`), the choice of a candidate token and its statistics, the selection, the write, and the stop at the
end of the text. Rows are independent: each has its own block, step and end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache, Part
from paradec.core.blocks import BlockPolicy
from paradec.core.contract import CanvasState
from paradec.core.logprobs import StepLogProbs
from paradec.core.protocol import Commit, Sampler
from paradec.core.query import Cost, WindowQuery
from paradec.core.trace import Notes
from paradec.request import Request, request_for
from paradec.samplers.features.pipelined_blocks import open_starts, with_progress
from paradec.samplers.masked import commit as stages
from paradec.samplers.masked import draws, reference
from paradec.samplers.masked.commit import view_of
from paradec.samplers.masked.features import known_probabilities, step_logprobs
from paradec.samplers.masked.logits import candidates, in_row_order, own_stage, proposable, spread
from paradec.samplers.masked.needs import Needs, declare
from paradec.samplers.masked.queries import part_query, reads_window, undecided_alone
from paradec.samplers.masked.start import start_state
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.views import LAST, UNCUT, Decision, MaskedProposal, Revision, Stage, View, selection

__all__ = ["LAST", "UNCUT", "MaskedProposal", "MaskedSampler", "MaskedState", "Needs", "Revision", "Stage", "View"]


@dataclass(frozen=True)
class MaskedSampler(Sampler):
    """Base of the family. A subclass declares what it reads and implements `select` (and `quota` if it has a schedule).

    Class attributes:
        needs: what the method reads and does (`Needs`); what follows from the methods that it overrides goes without
            saying.
        draws: whether positions are drawn (`View.draw`, `View.choose`), at temperature 0 too (see `Sampler`).
        uses_steps: whether `steps` means something to the method (see `Sampler`).
        device_step: whether `select` waits for no device and takes counts from tensors, and nothing else is the class's
            own, so that the device step can take it. Subclasses say so again for themselves.
        sweep: what `paradec compare` measures beside the defaults, two entries at least: settings of the method, and
            arguments of the request. A fraction for `steps` is that share of the undecided positions.
    """

    family: ClassVar[str] = "masked"
    models: ClassVar[tuple[str, ...]] = ("text", "codes", "masked image")
    needs: ClassVar[Needs] = Needs()
    draws: ClassVar[bool] = False
    device_step: ClassVar[bool] = False
    sweep: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        declare(cls, MaskedSampler)

    # ---- the method's own decisions -------------------------------------------------------------------------------

    def select(self, view: View) -> Tensor:
        """Which candidates become final: [R, W] bool. A pure function of the view."""
        raise NotImplementedError(f"sampler class {type(self).__name__} has no select")

    def quota(self, state: CanvasState, rows: np.ndarray) -> Any:
        """What `view.quota` is for `rows` [R] at this step."""
        return None

    def blocks(self, block_length: int | None) -> BlockPolicy | None:
        """The block policy that is part of the method, for requests that give none (a length at most)."""
        return None

    def preview(self, state: CanvasState) -> np.ndarray:
        """[R, K] int64: positions that this step will commit, in order, -1 where a row has fewer. Changes nothing.
        Caches that evaluate little else ask for it."""
        raise NotImplementedError

    def told(self, state: CanvasState) -> np.ndarray | None:
        """What a cache is told that asks the sampler before it plans (`Cache.evaluates`): [R, K] int64 positions."""
        return self.preview(state)

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        """New values [R, ...] of the declared memory, after a selection."""
        return {}

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The method's own logits stage [R, W, V] -> [R, W, V], the last one before a token is chosen. Changes nothing
        in place.

        The second value is what it found, each [R, ...]: `select` sees it as `view.updates`, and the commit writes what
        bears the name of a declared memory there.
        """
        return logits, {}

    def extra_quantities(self, state: CanvasState, proposal: MaskedProposal) -> Mapping[str, Tensor]:
        """What the method finds out about a proposal beside the logits' statistics (a trained filter's opinion), each
        [R, W]: `select` and `trim` see it in `view.quantities`. Changes nothing."""
        return {}

    def revise(self, view: View, selected: Tensor) -> Revision:
        """What to take back of `view.editable`, after a selection; for methods that need `decided_logits`."""
        return Revision()

    def most_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        """[R] int64: the bound on a block's steps for methods that `revises`, at least `masks_at_open`. What would
        leave more undecided than there are steps left is not taken back, and a block stays open no longer."""
        return 2 * masks_at_open

    def trim(self, view: View, selected: Tensor) -> Tensor | None:
        """Where rows are cut off after this step: [R] int64 positions, `UNCUT` where they are not; None cuts none.

        What comes after it becomes padding and is evaluated no more; the row is decided up to there. A cut lies within
        the window and after everything given. Requests with `eos_early_stop=False` do not ask.
        """
        return None

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        """Raise ValueError where the method's settings do not fit a request. Called before any work.

        Args:
            facts: of the model. longest: positions of the longest answer.
        """

    def rules_of(self, view: View) -> dict[tuple[int, int], str]:
        """Which rules choose what of a view, by (row, column): for traces of methods that declare `names_rules`."""
        return {}

    # ---- start ----------------------------------------------------------------------------------------------------

    @torch.inference_mode(False)  # else only inference mode could go on with the state
    @torch.no_grad()
    def start(
        self, model: Any, prompt: Any, request: Request | None = None, *, attention_mask: Any = None, **arguments: Any
    ) -> MaskedState:
        """Make the state of one request.

        Args:
            prompt, attention_mask: as in `paradec.generate`.
            request: a `paradec.Request`; or its fields by name instead.

        Raises:
            ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        """
        return start_state(self, model, prompt, request_for(self, request, arguments), attention_mask)

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: MaskedState) -> list[WindowQuery]:
        """One query per part of the cache's plan; each wants the logits of its rows' windows, or of what is undecided
        there where nothing reads the others."""
        picks = self.told(state) if state.cache.facts.evaluates in ("picks", "targets") else None
        queries = [self.query_part(state, part) for part in state.cache.plan(state, picks)]
        if reads_window(self, state):
            return queries
        return [undecided_alone(state, query) for query in queries]

    def query_part(self, state: MaskedState, part: Part) -> WindowQuery:
        """The model call of one part of the cache's plan."""
        return part_query(state, part)

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> MaskedProposal:
        """A candidate token and its scores for every window position; where a query leaves decided ones out, the
        token there and 0. outputs: logits [R, W, V], one per query, or [R, K, V] of its `columns`."""
        window = state.window
        generator = None if state.generator is None else reference.copy_generator(state.generator)
        current = window.read(state.canvas)
        available = window.undecided(current, state.mask_id)
        for query in queries:
            if query.window.available is not None:
                index = torch.as_tensor(query.window.index, device=available.device)
                available = available.index_copy(0, index, available[index] & query.window.available)
        if "early_stops" in state.features:  # the window reaches beyond the block
            available = available & (window.positions < state.block_ends)
        constraint: Any = state.features.get("constraint")
        kept: Any = state.features.get("logprobs")
        parts, said = [], []
        for logits, query in zip(outputs, queries, strict=True):
            logits = proposable(self, state, logits, query)
            staged, found = own_stage(self, state, logits, query, available, current)
            read = (constraint.candidates if constraint else type(self).read)(self, state, staged, query, generator)
            parts.append((*(read if query.window.columns is None else spread(*read, query, current)), found))
            if kept is not None:
                own = logits[:, : window.positions.shape[1]]  # those of mask probes may follow
                plain = type(self).read is MaskedSampler.read and constraint is None
                known = known_probabilities(self, state, own, parts[-1][1]["confidence"]) if plain else None
                said.append(step_logprobs(state, own, parts[-1][0], kept.logprobs.count, known))
        tokens, quantities, updates, order = (*parts[0], None) if len(parts) == 1 else in_row_order(parts, queries)
        proposal = MaskedProposal(
            rows=window.rows,
            values=tokens,
            cost=Cost(queries, state.batch),
            positions=window.positions,
            scores=self.ranked(state, tokens, quantities),
            available=available,
            current=current,
            quantities=quantities,
            updates=updates,
            made_at=state.commits,
            kind=queries[0].kind if len(queries) == 1 else "+".join(dict.fromkeys(query.kind for query in queries)),
            generator_state=None if generator is None else generator.get_state(),
            logprobs=StepLogProbs.joined(said, order) if said else None,
        )
        for feature in state.features.values():
            feature.on_propose(state, proposal)
        if self.needs.extra_quantities:
            proposal.quantities.update(self.extra_quantities(state, proposal))
        return proposal

    def guidance(self, state: CanvasState, rows: np.ndarray) -> float | Tensor:
        """The guidance scale of `rows` [R] at this step, for requests with guidance: a number, or [R, 1, 1]."""
        return state.request.guidance_scale

    def weighs_mask(self, state: CanvasState) -> bool:
        """Whether the mask's logit counts in probabilities, although it is never proposed (`reference.read`)."""
        return state.generator is not None

    def read(
        self, state: CanvasState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Candidate tokens [R, W] and quantities [R, W] of one query's rows."""
        return candidates(self, state, logits, query, generator)

    def ranked(self, state: CanvasState, tokens: Tensor, quantities: Mapping[str, Tensor]) -> Tensor:
        """[R, W] float64: the scores that candidates are ranked by."""
        scores = quantities[self.needs.score]
        if state.request.confidence_eos_eot_inf and len(state.ends):
            scores = scores.masked_fill(torch.isin(tokens, state.ends), LAST)
        return scores

    def draw_tokens(
        self, state: CanvasState, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> Tensor:
        """Draw tokens [R, W] from softmax(logits [R, W, V])."""
        return draws.tokens(self, state, logits, query, generator)

    def position_noise(self, state: CanvasState, generator: torch.Generator | None) -> Tensor:
        """[R, W] float64 uniform numbers for choosing positions."""
        return draws.position_noise(self, state, generator)

    def observe(self, state: MaskedState, proposal: MaskedProposal) -> Notes:
        return complete_notes(self, state, proposal, super().observe(state, proposal))

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, state: MaskedState, proposal: MaskedProposal) -> Commit:
        """Select, write, remember; then close full blocks and finished rows.

        Raises:
            FloatingPointError: the model returned NaN or infinite logits. Nothing is written then.
            RuntimeError: the method committed nothing where it must.
        """
        state.check_current(proposal)
        rows, available = proposal.rows, proposal.available
        generator = None if state.generator is None else reference.after(state.generator, proposal.generator_state)
        memory = state.memory.read(rows, available.shape[1]) if state.memory.specs else {}
        view = stages.view_of(self, state, proposal, memory, generator)
        picked = self.selected(view)
        decision = Decision(proposal.values, picked, picked)
        if self.needs.revises:
            decision = stages.revised(self, state, view, picked)
        for feature in state.features.values():
            feature.on_commit(state, proposal, decision)
        cut = self.trim(view, decision.selected) if state.request.eos_early_stop else None
        written = torch.where(decision.selected, decision.values, proposal.current)
        decided = stages.to_host(
            filled=decision.filled,
            tokens=written,
            confidence=proposal.quantities["confidence"],
            selected=decision.selected if self.needs.revises else None,
            hold_block=decision.hold_block,
            cut=cut,
            block_end=proposal.block_end,
            available=available if state.cache.facts.hears else None,
        )
        committed = np.add.reduce(decided["filled"], 1, dtype=np.int64)
        stages.check(self, state, rows, decided["confidence"], committed)  # nothing has changed until here

        if state.generator is not None and generator is not None:
            state.generator.set_state(generator.get_state())
        state.window.write(state.canvas, written)
        if state.memory.specs:
            stages.remember(self, state, proposal, view, picked)
        if proposal.block_end is not None:
            stages.cut_blocks(state, rows, decided["block_end"])
        if state.cache.facts.hears:
            state.cache.heard(state, decided["confidence"], decided["available"])
        stages.count(state, rows, proposal.cost, decided["tokens"], committed)
        stages.close(self, state, proposal, decision, decided)
        selected, scores = decision.selected, proposal.scores
        return Commit(rows, decision.values, proposal.positions, selected, scores, proposal.kind, decision.logprobs)

    def selected(self, view: View) -> Tensor:
        """[R, W] bool: the candidates that become final, in several open blocks too."""
        selected = selection(self, view) & view.candidates
        return selected if view.leading is None else with_progress(selected, view)


EARLY = "early stop"
"""Names, in a trace's `rules`, what a stop rule fills at once."""


def complete_notes(sampler: Any, state: MaskedState, proposal: MaskedProposal, notes: Notes) -> Notes:
    """Add the open blocks, and which rule of a combination chooses what."""
    rows, ends = proposal.rows.tolist(), state.block_end[proposal.rows].tolist()
    if proposal.block_end is not None:
        ends = proposal.block_end.tolist()
    notes.blocks = [None] * state.batch
    for row, end in zip(rows, ends, strict=True):
        notes.blocks[row] = (int(state.block_start[row]), end)
    if "pipelined_blocks" in state.features:
        notes.starts = [
            None if span is None else open_starts(state, row, *span) for row, span in enumerate(notes.blocks)
        ]
    rules: dict[tuple[int, int], str] = {}
    positions = proposal.positions.tolist()
    if sampler.needs.names_rules:
        memory = state.memory.read(proposal.rows, proposal.available.shape[1]) if state.memory.specs else {}
        # a copy of the generator: the commit draws the same numbers
        generator = None if state.generator is None else reference.after(state.generator, proposal.generator_state)
        view = view_of(sampler, state, proposal, memory, generator)
        for (index, column), name in sampler.rules_of(view).items():
            rules[rows[index], positions[index][column]] = name
    if proposal.early is not None:
        for index in proposal.early.nonzero().flatten().tolist():
            rules |= {(rows[index], position): EARLY for position in positions[index]}
    notes.rules = rules or None
    return notes

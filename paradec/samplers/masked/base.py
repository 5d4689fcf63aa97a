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
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Commit, Sampler
from paradec.core.query import Cost, Query
from paradec.core.trace import Notes
from paradec.kernels.token_stats import path_for
from paradec.request import Request, request_for
from paradec.samplers.masked import adaptive, draws, early, noting, pipeline, reference, revising
from paradec.samplers.masked import commit as stages
from paradec.samplers.masked.declaring import declare
from paradec.samplers.masked.logits import candidates, own_stage, proposable, spread
from paradec.samplers.masked.queries import part_query, undecided_alone
from paradec.samplers.masked.start import start_state
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.views import LAST, UNCUT, Decision, MaskedProposal, Revision, Stage, View, selection
from paradec.samplers.statistics import (
    Raised,
)

__all__ = ["LAST", "UNCUT", "MaskedProposal", "MaskedSampler", "MaskedState", "Revision", "Stage", "View", "reference"]


@dataclass(frozen=True)
class MaskedSampler(Sampler):
    """Base of the family. A subclass declares what it reads and implements `select` (and `quota` if it has a schedule).

    Class attributes:
        reads: quantities computed from the logits (`paradec.samplers.statistics.QUANTITIES`); always "confidence" too.
        score: the one of them that ranks positions.
        score_from: "raw" computes them from softmax(logits) whatever the temperature (LLaDA), "sampled" from the
            tempered and filtered distribution that tokens are drawn from (Dream).
        draws: whether positions are drawn (`View.draw`, `View.choose`), at temperature 0 too (see `Sampler`).
        uses_steps: whether `steps` means something to the method (see `Sampler`).
        least_by_steps: whether the schedule of `steps` says only what a step commits at least, beside what the rule
            finds without it; then pipelined blocks take the method, without `steps`.
        may_wait: whether a step may commit nothing; then the method's schedule must bound the steps.
        reference_draws: whether the public code draws position noise for the whole "canvas" or the "masked" positions.
        needs_decided_logits: whether the method reads the logits of decided positions of the block as well (to edit or
            remask). Without it, and without a `process_logits`, `extra_quantities` or `revise`, large vocabularies have
            none there.
        mask_probes: whether it evaluates masks beside the row that the rest of the row does not see.
        multi_step: whether it evaluates drafts of later steps, and promises the result of taking them one by one.
        ends_with_block: whether stop rules of a method that `revises` see a block only when it closes.
        device_step: whether `select` waits for no device and takes counts from tensors, and nothing else is the class's
            own, so that the device step can take it. Subclasses say so again for themselves.
        sweep: what `paradec compare` measures beside the defaults, two entries at least: settings of the method, and
            arguments of the request. A fraction for `steps` is that share of the undecided positions.
        names_rules: whether a selection is several rules' (`rules_of`).

    Class attributes that follow from what a class overrides, unless it says otherwise:
        previews: whether `preview` says what a step will commit before the model is called.
        processes_logits: whether the method has a logits stage of its own, `process_logits`.
        has_extra_quantities: whether it finds out more about a proposal, by `extra_quantities`.
        revises: whether the method takes back what it decided in the open block (`revise`). Then stop rules count a
            token as decided when a step has left it as it is, or its block has closed.
        draws_tokens: whether counter-based draws of tokens go through the method's own `draw_tokens`.
    """

    family: ClassVar[str] = "masked"
    models: ClassVar[tuple[str, ...]] = ("text", "codes", "masked image")
    reads: ClassVar[tuple[str, ...]] = ("confidence",)
    score: ClassVar[str] = "confidence"
    score_from: ClassVar[str] = "raw"
    draws: ClassVar[bool] = False
    least_by_steps: ClassVar[bool] = False
    may_wait: ClassVar[bool] = False
    reference_draws: ClassVar[str] = "canvas"
    needs_decided_logits: ClassVar[bool] = False
    mask_probes: ClassVar[bool] = False
    multi_step: ClassVar[bool] = False
    ends_with_block: ClassVar[bool] = False
    device_step: ClassVar[bool] = False
    sweep: ClassVar[tuple[Mapping[str, Any], ...]] = ()
    names_rules: ClassVar[bool] = False
    previews: ClassVar[bool] = False
    processes_logits: ClassVar[bool] = False
    has_extra_quantities: ClassVar[bool] = False
    revises: ClassVar[bool] = False
    draws_tokens: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        declare(cls)

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

    def memory(self) -> Mapping[str, MemorySpec]:
        """Tensors that the method keeps between steps."""
        return {}

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

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor | Raised, Mapping[str, Tensor]]:
        """The method's own logits stage [R, W, V] -> [R, W, V], the last one before a token is chosen. Changes nothing
        in place. A stage that raises a few tokens only may leave them unwritten (`statistics.raise_tokens`).

        The second value is what it found, each [R, ...]: `select` sees it as `view.updates`, and the commit writes what
        bears the name of a declared memory there.
        """
        return logits, {}

    def extra_quantities(self, state: CanvasState, proposal: MaskedProposal) -> Mapping[str, Tensor]:
        """What the method finds out about a proposal beside the logits' statistics (a trained filter's opinion), each
        [R, W]: `select` and `trim` see it in `view.quantities`. Changes nothing."""
        return {}

    def revise(self, view: View, selected: Tensor) -> Revision:
        """What to take back of `view.editable`, after a selection; for methods that declare `needs_decided_logits`."""
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

    def query(self, state: MaskedState) -> list[Query]:
        """One query per part of the cache's plan; each wants the logits of its rows' windows, or of what is undecided
        there where nothing reads the others."""
        picks = self.told(state) if state.cache.evaluates in ("picks", "targets") else None
        queries = [self.query_part(state, part) for part in state.cache.plan(state, picks)]
        if self._reads_window(state):
            return queries
        return [undecided_alone(state, query) for query in queries]

    def query_part(self, state: MaskedState, part: Part) -> Query:
        """The model call of one part of the cache's plan."""
        return part_query(state, part)

    def _reads_window(self, state: MaskedState) -> bool:
        """Whether this step reads the logits of decided positions as well: the method, or something else that has more
        to do with them than to choose candidates."""
        own = self.needs_decided_logits or self.revises or self.processes_logits
        own = own or self.has_extra_quantities or self.mask_probes or self.multi_step
        # the public codes draw for whole windows
        others = state.generator is not None or state.logprobs is not None or bool(state.early_rules)
        return own or others or state.guards_holes or (state.reads_blocks and bool(state.opening.any()))

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[Query]) -> MaskedProposal:
        """A candidate token and its scores for every window position; where a query leaves decided ones out, the
        token there and 0. outputs: logits [R, W, V], one per query, or [R, K, V] of its `columns`."""
        window = state.window
        generator = None if state.generator is None else reference.copy_generator(state.generator)
        current = window.read(state.canvas)
        undecided = available = window.undecided(current, state.mask_id)
        for query in queries:
            if query.available is not None:
                index = torch.as_tensor(query.index, device=available.device)
                available = available.index_copy(0, index, available[index] & query.available)
        evaluated = available
        if state.early_rules:  # the window reaches beyond the block
            available = available & (window.positions < state.block_ends)
        parts, said = [], []
        for logits, query in zip(outputs, queries, strict=True):
            logits = proposable(self, state, logits, query)
            staged, found = own_stage(self, state, logits, query, available, current)
            read = self.read(state, staged, query, generator)
            parts.append((*(read if query.columns is None else spread(*read, query, current)), found))
            if state.logprobs is not None:
                own = logits[:, : window.positions.shape[1]]  # those of mask probes may follow
                known = self._known(state, own, parts[-1][1]["confidence"])
                said.append(StepLogProbs.of_logits(own, parts[-1][0], state.logprobs.count, known))
        tokens, quantities, updates = parts[0]
        order = None
        if len(parts) > 1:
            places = np.argsort(np.concatenate([query.index for query in queries]))
            order = torch.as_tensor(places, device=window.positions.device)
            tokens = torch.cat([part[0] for part in parts])[order]
            quantities = {name: torch.cat([part[1][name] for part in parts])[order] for name in quantities}
            updates = {name: torch.cat([part[2][name] for part in parts])[order] for name in updates}
        block_end = adaptive.read(state, tokens, quantities["confidence"], available) if state.reads_blocks else None
        if block_end is not None:
            available = available & (window.positions < block_end.unsqueeze(1))
        proposal = MaskedProposal(
            rows=window.rows,
            values=tokens,
            cost=Cost(queries, state.batch),
            positions=window.positions,
            scores=self.ranked(state, tokens, quantities),
            available=available,
            current=current,
            block_end=block_end,
            quantities=quantities,
            updates=updates,
            made_at=state.commits,
            kind=queries[0].kind if len(queries) == 1 else "+".join(dict.fromkeys(query.kind for query in queries)),
            generator_state=None if generator is None else generator.get_state(),
            logprobs=StepLogProbs.joined(said, order) if said else None,
        )
        if state.early_rules:
            satisfied = [rule.satisfied(state, proposal) for rule in state.early_rules]
            # what has no logits at this step cannot be filled
            proposal.early = torch.stack(satisfied).any(0) & (evaluated == undecided).all(1)
        if self.has_extra_quantities:
            proposal.quantities.update(self.extra_quantities(state, proposal))
        return proposal

    def _known(self, state: MaskedState, logits: Tensor, confidence: Tensor) -> Tensor | None:
        """The probabilities of a query's tokens under softmax(logits), where its confidences are just these; what small
        vocabularies are read for again costs nothing."""
        changed = self.processes_logits or self.score_from != "raw" or type(self).read is not MaskedSampler.read
        if changed or state.generator is not None or not logits.is_cpu or path_for(logits) == "float64":
            return None
        return confidence if confidence.shape == logits.shape[:2] and bool((confidence > 0).all()) else None

    def guidance(self, state: CanvasState, rows: np.ndarray) -> float | Tensor:
        """The guidance scale of `rows` [R] at this step, for requests with guidance: a number, or [R, 1, 1]."""
        return state.request.guidance_scale

    def weighs_mask(self, state: CanvasState) -> bool:
        """Whether the mask's logit counts in probabilities, although it is never proposed (`reference.read`)."""
        return state.generator is not None

    def read(
        self, state: CanvasState, logits: Tensor | Raised, query: Query, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Candidate tokens [R, W] and quantities [R, W] of one query's rows."""
        return candidates(self, state, logits, query, generator)

    def ranked(self, state: CanvasState, tokens: Tensor, quantities: Mapping[str, Tensor]) -> Tensor:
        """[R, W] float64: the scores that candidates are ranked by."""
        scores = quantities[self.score]
        if state.request.confidence_eos_eot_inf and len(state.ends):
            scores = scores.masked_fill(torch.isin(tokens, state.ends), LAST)
        return scores

    def draw_tokens(
        self, state: CanvasState, logits: Tensor, query: Query, generator: torch.Generator | None
    ) -> Tensor:
        """Draw tokens [R, W] from softmax(logits [R, W, V])."""
        return draws.tokens(self, state, logits, query, generator)

    def position_noise(self, state: CanvasState, generator: torch.Generator | None) -> Tensor:
        """[R, W] float64 uniform numbers for choosing positions."""
        return draws.position_noise(self, state, generator)

    def observe(self, state: MaskedState, proposal: MaskedProposal) -> Notes:
        return noting.complete(self, state, proposal, super().observe(state, proposal))

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
        if self.revises:
            decision = revising.revised(self, state, view, picked)
        if proposal.early is not None:
            early.fill(state, proposal, decision)
        cut = self.trim(view, decision.selected) if state.request.eos_early_stop else None
        written = torch.where(decision.selected, decision.values, proposal.current)
        decided = stages.to_host(
            filled=decision.filled,
            tokens=written,
            confidence=proposal.quantities["confidence"],
            selected=decision.selected if self.revises else None,
            hold_block=decision.hold_block,
            cut=cut,
            block_end=proposal.block_end,
            available=available if state.cache.hears else None,
        )
        committed = np.add.reduce(decided["filled"], 1, dtype=np.int64)
        stages.check(self, state, rows, decided["confidence"], committed)  # nothing has changed until here

        if state.generator is not None and generator is not None:
            state.generator.set_state(generator.get_state())
        state.write(written)
        said = None if state.logprobs is None else stages.note(state, proposal, decision)
        if state.memory.specs:
            stages.remember(self, state, proposal, view, picked)
        if proposal.block_end is not None:
            adaptive.settle(state, rows, decided["block_end"])
        if state.cache.hears:
            state.cache.heard(state, decided["confidence"], decided["available"])
        stages.count(state, rows, proposal.cost, decided["tokens"], committed)
        stages.close(self, state, proposal, decided)
        selected, scores = decision.selected, proposal.scores
        return Commit(rows, decision.values, proposal.positions, selected, scores, proposal.kind, said)

    def selected(self, view: View) -> Tensor:
        """[R, W] bool: the candidates that become final, in several open blocks too."""
        selected = selection(self, view) & view.candidates
        return selected if view.leading is None else pipeline.with_progress(selected, view)

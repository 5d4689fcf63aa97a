"""The masked family: positions start as masks, and each step makes some of them final.

A method of this family is one decision, `select`: which undecided positions of the window become final, given their
scores. Everything around it is here, in this order: the query, the logits stage (guidance, suppression, the method's
own `process_logits`), the choice of a candidate token and its statistics, the selection, the write, and the stop at the
end of the text. Rows are independent: each has its own block, step and end.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache, Part
from paradec.core import rng
from paradec.core.blocks import BlockPolicy
from paradec.core.contract import CanvasState
from paradec.core.logprobs import StepLogProbs
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Commit, Sampler
from paradec.core.query import Cost, Query
from paradec.core.registry import unknown
from paradec.core.trace import Notes
from paradec.kernels.token_stats import GumbelDraws, read_stats
from paradec.request import Request, request_for
from paradec.samplers.distributions import tempered
from paradec.samplers.filters import filter_logits
from paradec.samplers.guidance import guided
from paradec.samplers.masked import commit as stages
from paradec.samplers.masked import noting, pipeline, reference, revising
from paradec.samplers.masked.queries import owners, part_query, positions_of, undecided_alone
from paradec.samplers.masked.start import start_state
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.stopping import WATCHED
from paradec.samplers.masked.views import LAST, UNCUT, Decision, MaskedProposal, Revision, Stage, View, selection
from paradec.samplers.statistics import QUANTITIES, Raised, token_statistics, top_by_rank

__all__ = ["LAST", "UNCUT", "MaskedProposal", "MaskedSampler", "MaskedState", "Revision", "Stage", "View", "reference"]

DERIVED = {
    "previews": "preview",
    "processes_logits": "process_logits",
    "has_extra_quantities": "extra_quantities",
    "revises": "revise",
}
"""Class attributes that say whether a class has a decision of its own, and the method that this is seen by."""

FORMER = {
    "announce": "preview",
    "assess": "extra_quantities",
    "drafts": "multi_step",
    "frontier": "sweep",
    "fuse": "process_logits",
    "rereads": "needs_decided_logits",
    "shadows": "mask_probes",
    "unserved": "unsupported",
}
"""What a subclass may have been written with, and its name now."""


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

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        for name in FORMER.keys() & vars(cls).keys():
            raise TypeError(f"sampler class {cls.__name__} defines {name}, which is called {FORMER[name]} now")
        line = cls.__mro__
        for flag, method in DERIVED.items():
            said, made = (next(at for at, base in enumerate(line) if name in vars(base)) for name in (flag, method))
            if made < said:  # overridden nearer than anything is said
                setattr(cls, flag, True)
        cls.device_step = vars(cls).get("device_step", False)
        _check_declared(cls)

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
            logits = self._proposable(state, logits, query)
            staged, found = self._logits_stage(state, logits, query, available, current)
            read = self._read(state, staged, query, generator)
            parts.append((*(read if query.columns is None else _spread(*read, query, current)), found))
            if state.logprobs is not None:
                own = logits[:, : window.positions.shape[1]]  # those of mask probes may follow
                said.append(StepLogProbs.of_logits(own, parts[-1][0], state.logprobs.count))
        tokens, quantities, updates = parts[0]
        order = None
        if len(parts) > 1:
            places = np.argsort(np.concatenate([query.index for query in queries]))
            order = torch.as_tensor(places, device=window.positions.device)
            tokens = torch.cat([part[0] for part in parts])[order]
            quantities = {name: torch.cat([part[1][name] for part in parts])[order] for name in quantities}
            updates = {name: torch.cat([part[2][name] for part in parts])[order] for name in updates}
        block_end = state.read_blocks(tokens, quantities["confidence"], available) if state.reads_blocks else None
        if block_end is not None:
            available = available & (window.positions < block_end.unsqueeze(1))
        proposal = MaskedProposal(
            rows=window.rows,
            values=tokens,
            cost=Cost(queries, state.batch),
            positions=window.positions,
            scores=self._ranked(state, tokens, quantities),
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

    def _proposable(self, state: MaskedState, logits: Tensor, query: Query) -> Tensor:
        """The logits [R, W, V] before the method's own stage: guided, without the tokens that are not proposed."""
        logits = self._guided(state, logits, query)
        if state.guards_holes and (holes := state.holes_of(query.index)) is not None:
            self._keep_ends_out(state, logits, holes)
        return logits

    def _logits_stage(
        self, state: MaskedState, logits: Tensor, query: Query, available: Tensor, current: Tensor
    ) -> tuple[Tensor | Raised, dict[str, Tensor]]:
        """The logits [R, W, V] that tokens are chosen from, and what stop rules and `process_logits` read off them."""
        watched: dict[str, Tensor] = {}
        if state.watched:
            watched = {WATCHED + name: found for name, found in token_statistics(logits, state.watched)[1].items()}
        if not self.processes_logits:
            return logits, watched
        seen = [available, state.window.positions, current]
        if len(query.rows) < len(available):
            index = torch.as_tensor(query.index, device=available.device)
            seen = [tensor.index_select(0, index) for tensor in seen]
        available, positions, current = seen
        memory = state.memory.read(query.rows, available.shape[1])
        processed, found = self.process_logits(logits, Stage(available, positions, memory, current))
        return processed, watched | dict(found)

    def guidance(self, state: CanvasState, rows: np.ndarray) -> float | Tensor:
        """The guidance scale of `rows` [R] at this step, for requests with guidance: a number, or [R, 1, 1]."""
        return state.request.guidance_scale

    def _guided(self, state: CanvasState, logits: Tensor, query: Query) -> Tensor:
        """The logits stage up to `process_logits`: guidance, and the tokens that are never proposed."""
        request = state.request
        if request.guidance_scale != 1.0:
            logits = guided(logits, self.guidance(state, query.rows))
        elif request.temperature > 0:
            # scaled logits can leave the range of float16
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # in place: the logits are this step's own, and can be large
        if not self._weighs_mask(state):
            logits.select(-1, state.mask_id).fill_(-torch.inf)
        if state.suppressed is not None:
            if state.suppressed.ndim == 1:
                logits.index_fill_(-1, state.suppressed, -torch.inf)
            else:  # of each row its own
                own = state.suppressed[torch.as_tensor(owners(query, len(logits)), device=logits.device)]
                logits.scatter_(-1, own.unsqueeze(1).expand(-1, logits.shape[1], -1), -torch.inf)
        return logits

    def _keep_ends_out(self, state: CanvasState, logits: Tensor, holes: Tensor) -> None:
        """Exclude end tokens of logits [R, W, V] in `holes` [R, W], in place; of [R, n * W, V] in each of n windows."""
        if holes.shape[1] < logits.shape[1]:
            holes = holes.repeat(1, logits.shape[1] // holes.shape[1])
        ends = logits.index_select(-1, state.ends)
        logits.index_copy_(-1, state.ends, ends.masked_fill_(holes.unsqueeze(-1), -torch.inf))

    def _weighs_mask(self, state: CanvasState) -> bool:
        """Whether the mask's logit counts in probabilities, although it is never proposed (`reference.read`)."""
        return state.generator is not None

    def _ranked(self, state: CanvasState, tokens: Tensor, quantities: Mapping[str, Tensor]) -> Tensor:
        """[R, W] float64: the scores that candidates are ranked by."""
        scores = quantities[self.score]
        if state.request.confidence_eos_eot_inf and len(state.ends):
            scores = scores.masked_fill(torch.isin(tokens, state.ends), LAST)
        return scores

    def _read(
        self, state: CanvasState, logits: Tensor | Raised, query: Query, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Candidate tokens [R, W] and quantities [R, W] of one query's rows."""
        request = state.request
        statistics = token_statistics if generator is None else reference.statistics
        filtered = any(each is not None for each in (request.top_p, request.top_k, request.top_n_sigma))
        if isinstance(logits, Raised):
            if request.temperature == 0 and not filtered and generator is None and self.reads == ("confidence",):
                tokens, confidence = logits.statistics()
                return tokens, {"confidence": confidence}
            logits = logits.written()
        if generator is not None and self._weighs_mask(state):
            return reference.read(self, state, logits, query, generator)
        if request.temperature == 0 and not (filtered and self.score_from == "sampled"):
            return statistics(logits, self.reads)
        drawn_from = logits if request.temperature in (0, 1) else tempered(logits, request.temperature)
        drawn_from = filter_logits(drawn_from, request.top_p, request.top_k, request.top_n_sigma)
        drawn = None if request.temperature == 0 else self._draw(state, drawn_from, query, generator)
        return statistics(drawn_from if self.score_from == "sampled" else logits, self.reads, drawn)

    def _draw(self, state: CanvasState, logits: Tensor, query: Query, generator: torch.Generator | None) -> Tensor:
        """Draw tokens [R, W] from softmax(logits [R, W, V]) by the Gumbel-max trick, in float64."""
        rows, positions = query.rows, positions_of(state, query)
        if generator is None:
            steps = torch.as_tensor(state.row_step[rows], device=positions.device)
            keys = state.keys[torch.as_tensor(rows, device=positions.device)]
            sample = read_stats(logits, frozenset(), draws=GumbelDraws(keys, steps, positions)).sample
            assert sample is not None  # asked for with `draws`
            return sample
        if self.score_from == "sampled":
            return reference.categorical(state, logits, positions, rows, generator)
        noise = reference.gumbel_uniform(state, logits.shape[-1], rows, positions, generator)
        return (logits.double() + rng.gumbel(noise)).argmax(-1)

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
        view = self._view(state, proposal, memory, generator)
        picked = self.selected(view)
        decision = Decision(proposal.values, picked, picked)
        if self.revises:
            decision = revising.revised(self, state, view, picked)
        if proposal.early is not None:
            stages.fill_early(state, proposal, decision)
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
        said = stages.note(state, proposal, decision)
        if state.memory.specs:
            stages.remember(self, state, proposal, view, picked)
        if proposal.block_end is not None:
            state.settle_blocks(rows, decided["block_end"])
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

    def _view(
        self,
        state: CanvasState,
        proposal: MaskedProposal,
        memory: Mapping[str, Tensor],
        generator: torch.Generator | None,
    ) -> View:
        """What `select` sees of a proposal, with what the method remembers of its rows."""
        draw = functools.partial(self._position_noise, state, generator)
        return View(
            scores=torch.where(proposal.available, proposal.scores, -torch.inf),
            candidates=proposal.available,
            tokens=proposal.values,
            positions=proposal.positions,
            quantities=proposal.quantities,
            quota=self.quota(state, proposal.rows),
            memory=memory,
            updates=proposal.updates,
            current=proposal.current,
            editable=revising.editable(state, proposal) if self.revises else state.nothing,
            top=top_by_rank if generator is None else lambda scores, count: reference.top(state, scores, count),
            draw=draw if generator is None else functools.cache(draw),  # a generator moves on with every reading
            choose=lambda scores, count: self._choose(state, scores, count, generator),
            ends=state.ends,
            leading=pipeline.leading_blocks(state, proposal.current) if state.pipelined else None,
        )

    def _position_noise(self, state: CanvasState, generator: torch.Generator | None) -> Tensor:
        """[R, W] float64 uniform numbers for choosing positions."""
        if generator is not None:
            return reference.position_noise(state, self.reference_draws, generator)
        window = state.window
        steps = torch.as_tensor(state.row_step[window.rows], device=window.positions.device)
        keys = state.keys[window.row_index[:, 0]]
        return rng.uniform(keys, steps, window.positions, 1, rng.POSITION_STREAM).squeeze(-1)

    def _choose(
        self, state: CanvasState, scores: Tensor, count: np.ndarray, generator: torch.Generator | None
    ) -> Tensor:
        """Draw `count` positions of each row without replacement, with the probabilities softmax(scores)."""
        if generator is not None:
            return reference.choose(state, scores.softmax(-1).nan_to_num(), count, generator)
        # Gumbel-top-k draws the same distribution, also of positions whose probability is too small for a number
        return top_by_rank(scores + rng.gumbel(self._position_noise(state, None)), count)


def _check_declared(cls: type[MaskedSampler]) -> None:
    """Raise ValueError for quantities that a class declares and nothing computes."""
    reads, score, source = cls.reads, cls.score, cls.score_from
    named = not isinstance(reads, property)  # of another sampler's
    if named and not isinstance(reads, (tuple, list)):
        raise ValueError(f"reads={reads!r} of class {cls.__name__} must be a tuple of {', '.join(QUANTITIES)}")
    if wrong := [value for value in reads if value not in QUANTITIES] if named else []:
        raise ValueError(f"reads={reads!r} of class {cls.__name__}: {unknown('quantity', wrong[0], QUANTITIES)}")
    if named and "confidence" not in reads:  # which every commit looks at
        cls.reads = ("confidence", *reads)
    if named and not isinstance(score, property) and score not in cls.reads:
        raise ValueError(f"score={score!r} of class {cls.__name__} must be one of its reads={cls.reads!r}")
    if not isinstance(source, property) and source not in ("raw", "sampled"):
        raise ValueError(f"score_from={source!r} of class {cls.__name__} must be 'raw' or 'sampled'")


def _spread(
    tokens: Tensor, quantities: Mapping[str, Tensor], query: Query, current: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Candidates and quantities [N, K] of a query's columns as those of the whole window [N, W]; of the others the
    token there (`current` [R, W]), and 0."""
    columns = query.columns
    assert columns is not None
    if len(columns) < len(current):
        current = current[torch.as_tensor(query.index, device=current.device)]
    spread = {name: value.new_zeros(current.shape).scatter_(1, columns, value) for name, value in quantities.items()}
    return current.scatter(1, columns, tokens), spread

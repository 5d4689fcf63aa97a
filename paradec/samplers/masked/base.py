"""The masked family: positions start as masks, and each step makes some of them final.

A method of this family is one decision, `select`: which undecided positions of the window become final, given their
scores. Everything around it is here, in this order: the query, the logits stage (guidance, suppression, the method's
own `fuse`), the choice of a candidate token and its statistics, the selection, the write, and the stop at the end of
the text. Rows are independent: each has its own block, step and end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec import rng
from paradec.blocks import BlockPolicy
from paradec.caches.base import Cache
from paradec.kernels.token_stats import Draws, read_stats
from paradec.protocol import Commit, Cost, MemorySpec, Proposal, Query, Sampler
from paradec.request import Request, request_for
from paradec.samplers.masked import reference
from paradec.samplers.masked.queries import part_query
from paradec.samplers.masked.start import start_state
from paradec.samplers.masked.state import MaskedState, put_rows, rows_of
from paradec.samplers.masked.stopping import NEVER, WATCHED, first_end
from paradec.samplers.statistics import Raised, filter_logits, guided, tempered, token_statistics, top_by_rank

LAST = torch.finfo(torch.float64).min
"""Score of a candidate that is to be committed after all others."""
UNCUT = 2**31 - 1
"""The end of a row that a method does not cut off."""


@dataclass(kw_only=True)
class MaskedProposal(Proposal):
    """A proposal of this family. Shapes: `R` running rows, `W` window positions each."""

    current: Tensor
    """[R, W] int64: what stands at the positions now."""
    block_end: Tensor | None = None
    """[R] int64: where each row's block ends, when a block policy read this step's logits to decide it."""
    early: Tensor | None = None
    """[R] bool: rows of which everything undecided becomes final now, since a stop rule is satisfied."""
    updates: dict[str, Tensor] = field(default_factory=dict)
    """What the method's logits stage found, by name, each [R, ...]: its memory's new values, numbers for `select`."""
    generator_state: Tensor | None = None
    """State of the caller's `torch.Generator` after this step's draws (`rng="reference"`); commit adopts it."""


@dataclass
class View:
    """What `select` sees: tensors of the window, nothing of the model.

    Shapes: `R` rows, `W` positions.
    """

    scores: Tensor
    """[R, W] float64, -inf where a position may not be committed."""
    candidates: Tensor
    """[R, W] bool: undecided and evaluated this step."""
    tokens: Tensor
    """[R, W] int64 candidate tokens."""
    positions: Tensor
    """[R, W] int64."""
    quantities: Mapping[str, Tensor]
    """What the method declared in `reads`, each [R, W] float64."""
    quota: Any
    """[R] int64 on the host: tokens the schedule grants this step; None for methods without one, a tuple of the rules'
    for combinations."""
    memory: Mapping[str, Tensor]
    """The method's own tensors, each [R, ...]."""
    updates: Mapping[str, Tensor]
    """What the method's `fuse` found in this step, each [R, ...]."""
    current: Tensor
    """[R, W] int64: what stands at the positions now."""
    editable: Tensor
    """[R, W] bool: decided in this block by the method itself, and evaluated this step; False unless the method
    `revises`."""
    top: Callable[[Tensor, np.ndarray | Tensor], Tensor]
    """The count [R] highest of scores [R, W] -> [R, W] bool; ties go to the lower position (`rng="reference"`: to
    whichever torch.topk takes, as in the public code)."""
    draw: Callable[[], Tensor]
    """Uniform numbers [R, W] in (0, 1), one per position."""
    choose: Callable[[Tensor, np.ndarray], Tensor]
    """Draw count [R] positions without replacement with the probabilities softmax([R, W]), -inf where there is none ->
    [R, W] bool."""
    ends: Tensor
    """[E] int64: ids that end an answer."""


@dataclass
class Stage:
    """What `fuse` sees beside the logits. Shapes: `R` rows (of one call), `W` positions."""

    undecided: Tensor
    """[R, W] bool: undecided and evaluated this step."""
    positions: Tensor
    """[R, W] int64."""
    memory: Mapping[str, Tensor]
    """The method's own tensors, each [R, ...]; "window" dimensions are W wide."""


@dataclass
class Revision:
    """What a method takes back in one step. Shapes: `R` rows, `W` positions; None is nothing."""

    remask: Tensor | None = None
    """[R, W] bool: editable positions that become undecided again."""
    edit: Tensor | None = None
    """[R, W] bool: editable positions that take this step's candidate token."""
    linger: Tensor | None = None
    """[R] bool: rows whose block stays open for another step although nothing in it is undecided."""


@dataclass(frozen=True)
class MaskedSampler(Sampler):
    """Base of the family. A subclass declares what it reads and implements `select` (and `quota` if it has a schedule).

    Class attributes:
        reads: quantities computed from the logits (`paradec.samplers.statistics.QUANTITIES`); always "confidence" too.
        score: the one of them that ranks positions.
        score_from: "raw" computes them from softmax(logits) whatever the temperature (LLaDA), "sampled" from the
            tempered and filtered distribution that tokens are drawn from (Dream).
        uses_steps: whether `steps` means something to the method (see `Sampler`).
        may_wait: whether a step may commit nothing; then the method's schedule must bound the steps.
        reference_draws: whether the public code draws position noise for the whole "canvas" or the "masked" positions.
        announces: whether `announce` says what a step will commit before the model is called.
        targets: whether `announce` says which undecided positions a step reads at all (none: all of them).
        rereads: whether the method reads the logits of decided positions of the block as well (to edit or remask).
        fuses: whether the method has a logits stage of its own, `fuse`.
        revises: whether the method takes back what it decided in the open block (`revise`). Then stop rules count a
            token as decided when a step has left it as it stands, or its block has closed.
        shadows: whether the window is evaluated a second time beside itself, as masks: the shadow of a position sees
            all shadows, and everything else but what stands at its own position. `view.updates["shadow_confidence"]`
            [R, W] float64 is the probability that it gives to what stands there.
        frontier: what `paradec compare` measures beside the defaults, two entries at least: settings of the method, and
            arguments of the request. A fraction for `steps` is that share of the undecided positions.
        drafts: whether the method evaluates drafts of later steps, and promises the result of taking them one by one.
    """

    family: ClassVar[str] = "masked"
    models: ClassVar[tuple[str, ...]] = ("text", "codes", "masked image")
    reads: ClassVar[tuple[str, ...]] = ("confidence",)
    score: ClassVar[str] = "confidence"
    score_from: ClassVar[str] = "raw"
    may_wait: ClassVar[bool] = False
    reference_draws: ClassVar[str] = "canvas"
    announces: ClassVar[bool] = False
    targets: ClassVar[bool] = False
    rereads: ClassVar[bool] = False
    fuses: ClassVar[bool] = False
    revises: ClassVar[bool] = False
    shadows: ClassVar[bool] = False
    drafts: ClassVar[bool] = False
    frontier: ClassVar[tuple[Mapping[str, Any], ...]] = ()

    # ---- the method's own decisions -------------------------------------------------------------------------------

    def select(self, view: View) -> Tensor:
        """Which candidates become final: [R, W] bool. A pure function of the view."""
        raise NotImplementedError

    def quota(self, state: MaskedState, rows: np.ndarray) -> Any:
        """What `view.quota` is for `rows` [R] at this step."""
        return None

    def blocks(self, block_length: int | None) -> BlockPolicy | None:
        """The block policy that is part of the method, for requests that give none (a length at most)."""
        return None

    def memory(self) -> Mapping[str, MemorySpec]:
        """Tensors that the method keeps between steps."""
        return {}

    def announce(self, state: MaskedState) -> np.ndarray:
        """[R, K] int64: positions that this step will commit, in order, -1 where a row has fewer. Changes nothing.
        For methods that declare `announces`; caches that evaluate little else ask for it."""
        raise NotImplementedError

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        """New values [R, ...] of the declared memory, after a selection."""
        return {}

    def fuse(self, logits: Tensor, stage: Stage) -> tuple[Tensor | Raised, Mapping[str, Tensor]]:
        """The method's own logits stage [R, W, V] -> [R, W, V], the last one before a token is chosen; for methods that
        declare `fuses`. Changes nothing in place. A stage that raises a few words only may leave them unwritten
        (`statistics.raise_words`).

        The second value is what it found, each [R, ...]: `select` sees it as `view.updates`, and the commit writes what
        bears the name of a declared memory there.
        """
        return logits, {}

    def assess(self, state: MaskedState, proposal: MaskedProposal) -> Mapping[str, Tensor]:
        """What the method finds out about a proposal beside the logits' statistics (a trained filter's opinion), each
        [R, W]: `select` and `trim` see it in `view.quantities`. Changes nothing."""
        return {}

    def revise(self, view: View, selected: Tensor) -> Revision:
        """What to take back of `view.editable`, after a selection; for methods that declare `revises` and `rereads`."""
        return Revision()

    def most_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        """[R] int64: the bound on a block's steps for methods that `revises`, at least `masks_at_open`. What would
        leave more undecided than there are steps left is not taken back, and a block does not linger beyond it."""
        return 2 * masks_at_open

    def trim(self, view: View, selected: Tensor) -> Tensor | None:
        """Where rows are cut off after this step: [R] int64 positions, `UNCUT` where they are not; None cuts none.

        What lies behind becomes padding and is evaluated no more; the row is decided up to there. A cut lies within the
        window and behind everything given. Requests with `eos_early_stop=False` do not ask.
        """
        return None

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        """Raise ValueError where the method's settings do not fit a request. Called before any work.

        Args:
            facts: of the model. longest: positions of the longest answer.
        """

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
        """One query per part of the cache's plan; each wants the logits of its rows' windows."""
        picks = self.announce(state) if state.cache.evaluates in ("picks", "targets") else None
        return [part_query(state, part) for part in state.cache.plan(state, picks)]

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[Query]) -> MaskedProposal:
        """A candidate token and its scores for every window position. outputs: logits [R, W, V], one per query."""
        window = state.window
        generator = None if state.generator is None else reference.copy_generator(state.generator)
        current = window.read(state.canvas)
        undecided = available = window.undecided(current, state.facts.mask_id)
        for query in queries:
            if query.available is not None:
                index = torch.as_tensor(query.index, device=available.device)
                available = available.index_copy(0, index, available[index] & query.available)
        evaluated = available
        if state.early_rules:  # the window reaches beyond the block
            available = available & (window.positions < state.block_ends)
        parts = []
        for logits, query in zip(outputs, queries, strict=True):
            staged, found = self._logits_stage(state, logits, query, available)
            parts.append((*self._read(state, staged, query, generator), found))
        tokens, quantities, updates = parts[0]
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
        )
        if state.early_rules:
            satisfied = [rule.satisfied(state, proposal) for rule in state.early_rules]
            # what has no logits at this step cannot be filled
            proposal.early = torch.stack(satisfied).any(0) & (evaluated == undecided).all(1)
        proposal.quantities.update(self.assess(state, proposal))
        return proposal

    def _logits_stage(
        self, state: MaskedState, logits: Tensor, query: Query, available: Tensor
    ) -> tuple[Tensor | Raised, dict[str, Tensor]]:
        """The logits [R, W, V] that tokens are chosen from, and what the shadow, stop rules and `fuse` say."""
        logits = self._guided(state, logits, query)
        holes = state.holes_of(query.index)
        if holes is not None:
            self._keep_ends_out(state, logits, torch.cat((holes, holes), 1) if self.shadows else holes)
        watched: dict[str, Tensor] = {}
        index = torch.as_tensor(query.index, device=available.device) if self.fuses or self.shadows else None
        if self.shadows:
            logits, shadow = logits.split(available.shape[1], 1)
            current = state.window.read(state.canvas)[index]
            watched["shadow_confidence"] = token_statistics(shadow, ("confidence",), current)[1]["confidence"]
        if state.watched:
            watched |= {WATCHED + name: found for name, found in token_statistics(logits, state.watched)[1].items()}
        if not self.fuses:
            return logits, watched
        memory = rows_of(state.memory, query.rows, available.shape[1])
        fused, found = self.fuse(logits, Stage(available[index], state.window.positions[index], memory))
        return fused, watched | dict(found)

    def guidance(self, state: MaskedState, rows: np.ndarray) -> float | Tensor:
        """The guidance scale of `rows` [R] at this step, for requests with guidance: a number, or [R, 1, 1]."""
        return state.request.guidance_scale

    def _guided(self, state: MaskedState, logits: Tensor, query: Query) -> Tensor:
        """The logits stage up to `fuse`: guidance, and the words that are never proposed."""
        request = state.request
        if request.guidance_scale != 1.0:
            logits = guided(logits, self.guidance(state, query.rows))
        elif request.temperature > 0:
            # scaled logits can leave the range of float16
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # in place: the logits are this step's own, and can be large
        if not self._weighs_mask(state):
            logits.select(-1, state.facts.mask_id).fill_(-torch.inf)
        if state.suppressed is not None:
            logits.index_fill_(-1, state.suppressed, -torch.inf)
        return logits

    def _keep_ends_out(self, state: MaskedState, logits: Tensor, holes: Tensor) -> None:
        """Exclude end tokens of logits [R, W, V] in `holes` [R, W], in place."""
        ends = logits.index_select(-1, state.ends)
        logits.index_copy_(-1, state.ends, ends.masked_fill_(holes.unsqueeze(-1), -torch.inf))

    def _weighs_mask(self, state: MaskedState) -> bool:
        """Whether the mask's logit counts in probabilities, although it is never proposed (`reference.read`)."""
        return state.generator is not None

    def _ranked(self, state: MaskedState, tokens: Tensor, quantities: Mapping[str, Tensor]) -> Tensor:
        """[R, W] float64: the scores that candidates are ranked by."""
        scores = quantities[self.score]
        if state.request.confidence_eos_eot_inf and len(state.ends):
            scores = scores.masked_fill(torch.isin(tokens, state.ends), LAST)
        return scores

    def _read(
        self, state: MaskedState, logits: Tensor | Raised, query: Query, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Candidate tokens [R, W] and quantities [R, W] of one query's rows."""
        request = state.request
        statistics = token_statistics if generator is None else reference.statistics
        filtered = request.top_p is not None or request.top_k is not None
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
        drawn_from = filter_logits(drawn_from, request.top_p, request.top_k)
        drawn = None if request.temperature == 0 else self._draw(state, drawn_from, query, generator)
        return statistics(drawn_from if self.score_from == "sampled" else logits, self.reads, drawn)

    def _draw(self, state: MaskedState, logits: Tensor, query: Query, generator: torch.Generator | None) -> Tensor:
        """Draw tokens [R, W] from softmax(logits [R, W, V]) by the Gumbel-max trick, in float64."""
        rows = query.rows
        positions = state.window.positions[torch.as_tensor(query.index, device=logits.device)]
        if generator is None:
            steps = torch.as_tensor(state.row_step[rows], device=positions.device)
            keys = state.keys[torch.as_tensor(rows, device=positions.device)]
            sample = read_stats(logits, frozenset(), draws=Draws(keys, steps, positions)).sample
            assert sample is not None  # asked for with `draws`
            return sample
        if self.score_from == "sampled":
            return reference.categorical(state, logits, positions, rows, generator)
        noise = reference.gumbel_uniform(state, logits.shape[-1], rows, positions, generator)
        return (logits.double() + rng.gumbel(noise)).argmax(-1)

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, state: MaskedState, proposal: MaskedProposal) -> Commit:
        """Select, write, remember; then close full blocks and finished rows.

        Raises:
            FloatingPointError: the model returned NaN or infinite logits. Nothing is written then.
            RuntimeError: the method committed nothing where it must.
        """
        window, rows = state.window, proposal.rows
        state.check_current(proposal)
        generator = None
        if state.generator is not None:
            assert proposal.generator_state is not None  # `propose` drew from it
            generator = reference.copy_generator(state.generator)
            generator.set_state(proposal.generator_state)
        available, positions = proposal.available, proposal.positions
        view = self._view(state, proposal, rows_of(state.memory, rows, available.shape[1]), generator)
        picked = selected = self.select(view) & available
        values, filled, linger = proposal.values, selected, None
        if self.revises:
            values, selected, filled, linger = self._revised(state, view, selected)
        if proposal.early is not None:
            early = proposal.early.unsqueeze(1)
            undecided = window.undecided(proposal.current, state.facts.mask_id)
            values, selected = torch.where(early, proposal.values, values), torch.where(early, undecided, selected)
            filled = torch.where(early, undecided.to(filled.dtype), filled)
            linger = None if linger is None else linger & ~proposal.early
        cut = self.trim(view, selected) if state.request.eos_early_stop else None
        written = torch.where(selected, values, proposal.current)
        # the one wait for the device of the step; a NaN or infinite logit makes the confidence NaN
        wanted = [filled, written, proposal.quantities["confidence"]]
        if self.shadows:
            wanted[2] = wanted[2] + proposal.updates["shadow_confidence"]
        if self.revises:
            wanted.append(selected)
        if linger is not None:
            wanted.append(linger.unsqueeze(1).expand_as(written))
        if cut is not None:
            wanted.append(cut.unsqueeze(1).expand_as(written))
        if proposal.block_end is not None:
            wanted.append(proposal.block_end.unsqueeze(1).expand_as(written))
        chosen, tokens, health, *others = _to_host(*wanted)
        touched = others.pop(0) if self.revises else None
        lingers = None if linger is None else others.pop(0)[:, 0]
        cuts = None if cut is None else others.pop(0)[:, 0]
        committed = np.add.reduce(chosen, 1, dtype=np.int64)
        if not math.isfinite(np.add.reduce(health, None)):
            row = int(rows[np.isfinite(health).all(1).argmin()])
            raise FloatingPointError(
                f"the model returned NaN or infinite logits for row {row} at its step {int(state.row_step[row])}"
            )
        # a method that may wait must have filled the block by its last planned step
        idle = (committed < self._least(state, rows)).any() if self.revises else 0 in committed.tolist()
        if idle and not self.may_wait or self.may_wait and _overdue(state, rows, committed):
            raise RuntimeError(f"sampler {self.name!r} committed nothing for row {int(rows[committed.argmin()])}")

        if state.generator is not None and generator is not None:
            state.generator.set_state(generator.get_state())
        window.write(state.canvas, written)
        if state.memory.specs:
            kept = {name: value for name, value in proposal.updates.items() if name in state.memory}
            for name, value in {**kept, **self.remember(view, picked)}.items():
                put_rows(state.memory, name, rows, value)
        state.count(proposal.cost)
        for end in others:
            state.settle_blocks(rows, end[:, 0])
        state.cache.committed(state, tokens)
        if state.attention_state is not None:
            state.attention_state.committed(state, proposal.cost.queries)
        state.advance(rows, committed)
        if lingers is not None:
            lingers = lingers.astype(bool) & (state.block_step[rows] < self.most_steps(state.masks_at_open[rows]))
        standing = tokens
        if touched is not None:  # what may be taken back ends nothing before a step has left it as it is
            closes = (state.remaining[rows] <= 0) & (True if lingers is None else ~lingers)
            standing = np.where(touched.astype(bool) & ~closes[:, None], state.facts.mask_id, tokens)
        ends = first_end(state.stop_rules, state, standing) if state.stop_rules else None
        moved = bool(others)
        if cuts is not None and (cuts < state.length[rows]).any():
            state.trim(cuts, tokens)
            moved = True
        if proposal.early is not None:
            state.close_full_rows(tokens)
        self._advance(state, rows, ends, lingers, moved)
        return Commit(rows, values, positions, selected, proposal.scores, proposal.kind)

    def _view(
        self,
        state: MaskedState,
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
            editable=_editable(state, proposal) if self.revises else torch.zeros_like(proposal.available),
            top=top_by_rank if generator is None else lambda scores, count: reference.top(state, scores, count),
            draw=draw if generator is None else functools.cache(draw),  # a generator moves on with every reading
            choose=lambda scores, count: self._choose(state, scores, count, generator),
            ends=state.ends,
        )

    def _revised(
        self, state: MaskedState, view: View, selected: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Values [R, W], what is written [R, W], what that adds to what is decided [R, W] (-1, 0 or 1), and the rows
        [R] that linger."""
        revision = self.revise(view, selected)
        values, written, filled = view.tokens, selected, selected.long()
        if revision.edit is not None:
            written = written | revision.edit & view.editable
        if revision.remask is not None:
            remask = revision.remask & view.editable
            left = torch.as_tensor(self._least(state, state.window.rows), device=remask.device)
            remask = remask & (filled.sum(1) - remask.sum(1) >= left).unsqueeze(1)
            values = values.masked_fill(remask, state.facts.mask_id)
            written, filled = written | remask, filled - remask.long()
        return values, written, filled, revision.linger

    def _least(self, state: MaskedState, rows: np.ndarray) -> np.ndarray:
        """[R] int64: how many positions more than before must be decided after this step, so that the steps left
        suffice for the others."""
        left = self.most_steps(state.masks_at_open[rows]) - state.block_step[rows] - 1
        return state.remaining[rows] - left

    def _advance(
        self,
        state: MaskedState,
        rows: np.ndarray,
        ends: np.ndarray | None,
        lingers: np.ndarray | None = None,
        moved: bool = False,
    ) -> None:
        """Finish the rows that a stop rule ends (`ends` as `StopRule` says them); open the block after a full one.

        `lingers`: [R] bool, rows that stay in a full block. `moved`: whether a block ends elsewhere than before this
        step.
        """
        left = state.remaining if state.window.whole else state.remaining[rows]
        if ends is None and not moved and 0 not in left.tolist():
            return
        full = left == 0
        if lingers is not None:
            full &= ~lingers
            if ends is None and not moved and not full.any():
                return
        if ends is not None:
            stopped = ends < NEVER
            full &= ~stopped
            last = state.length.copy()
            last[rows[stopped]] = ends[stopped]
            state.end = np.minimum(state.end, last)
            state.stopped[rows[stopped]] = ends[stopped] <= state.asked[rows[stopped]]
            column = torch.arange(state.canvas.shape[1], device=state.canvas.device)
            tail = column >= torch.as_tensor(last, device=column.device).unsqueeze(1)
            state.canvas.masked_fill_(tail, state.facts.fill_token_id)
            state.finish(rows[stopped])
        state.open_blocks(rows[full])

    def _position_noise(self, state: MaskedState, generator: torch.Generator | None) -> Tensor:
        """[R, W] float64 uniform numbers for choosing positions."""
        if generator is not None:
            return reference.position_noise(state, self.reference_draws, generator)
        window = state.window
        steps = torch.as_tensor(state.row_step[window.rows], device=window.positions.device)
        keys = state.keys[window.row_index[:, 0]]
        return rng.uniform(keys, steps, window.positions, 1, rng.POSITION_STREAM).squeeze(-1)

    def _choose(
        self, state: MaskedState, scores: Tensor, count: np.ndarray, generator: torch.Generator | None
    ) -> Tensor:
        """Draw `count` positions of each row without replacement, with the probabilities softmax(scores)."""
        if generator is not None:
            return reference.choose(state, scores.softmax(-1).nan_to_num(), count, generator)
        # Gumbel-top-k draws the same law, also of positions whose probability is too small for a number
        return top_by_rank(scores + rng.gumbel(self._position_noise(state, None)), count)


def _to_host(*tensors: Tensor) -> list[np.ndarray]:
    """[R, W] tensors as numpy arrays, with one transfer for all of them."""
    if tensors[0].is_cpu:
        return [tensor.numpy() for tensor in tensors]
    # float64 holds flags, ids and logits exactly
    arrays = torch.stack([tensor.double() for tensor in tensors]).cpu().numpy()
    kinds = {torch.bool: bool, torch.int64: np.int64}
    return [array.astype(kinds.get(tensor.dtype, np.float64)) for tensor, array in zip(tensors, arrays, strict=True)]


def _editable(state: MaskedState, proposal: MaskedProposal) -> Tensor:
    """[R, W] bool: decided by the method in the open block."""
    window = state.window
    editable = (proposal.current != state.facts.mask_id) & ~window.read(state.given)
    if proposal.block_end is not None:
        editable = editable & (window.positions < proposal.block_end.unsqueeze(1))
    return editable if window.valid is None else editable & window.valid


def _overdue(state: MaskedState, rows: np.ndarray, committed: np.ndarray) -> bool:
    """Whether a row committed nothing although its planned steps are over."""
    return bool(((committed == 0) & (state.block_step[rows] + 1 >= state.planned_steps(rows))).any())

"""The masked family: positions start as masks, and each step makes some of them final.

A method of this family is one decision, `select`: which undecided positions of the window become final, given their
scores. Everything around it is here, in this order: the query, the logits stage (guidance, suppression, the method's
own `fuse`), the choice of a candidate token and its statistics, the selection, the write, and the stop at the end of
the text. Rows are independent: each has its own block, step and end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec import rng
from paradec.blocks import BlockPolicy
from paradec.caches.base import Cache
from paradec.protocol import Commit, Cost, MemorySpec, Proposal, Query, Sampler
from paradec.samplers import reference
from paradec.samplers.masked_state import MaskedState, part_query, put_rows, rows_of, start_state
from paradec.samplers.statistics import filter_logits, token_statistics, top_by_rank

LAST = torch.finfo(torch.float64).min
"""Score of a candidate that is to be committed after all others."""


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
    quota: np.ndarray | None
    """[R] on the host: tokens the schedule grants this step, for methods that have one."""
    memory: Mapping[str, Tensor]
    """The method's own tensors, each [R, ...]."""
    top: Callable[[Tensor, np.ndarray | Tensor], Tensor]
    """The count [R] highest of scores [R, W] -> [R, W] bool; ties go to the lower position (`rng="reference"`: to
    whichever torch.topk takes, as in the public code)."""
    draw: Callable[[], Tensor]
    """Uniform numbers [R, W] in (0, 1), one per position."""
    choose: Callable[[Tensor, np.ndarray], Tensor]
    """Draw count [R] positions without replacement with the probabilities [R, W] -> [R, W] bool."""


@dataclass(frozen=True)
class MaskedSampler(Sampler):
    """Base of the family. A subclass declares what it reads and implements `select` (and `quota` if it has a schedule).

    Class attributes:
        reads: quantities computed from the logits (`paradec.samplers.statistics.QUANTITIES`); always "confidence" too.
        score: the one of them that ranks positions.
        score_from: "raw" computes them from softmax(logits) whatever the temperature (LLaDA), "sampled" from the
            tempered and filtered distribution that tokens are drawn from (Dream).
        uses_steps: whether `steps` means something to the method.
        may_wait: whether a step may commit nothing; then the method's schedule must bound the steps.
        reference_draws: whether the public code draws position noise for the whole "canvas" or the "masked" positions.
    """

    family: ClassVar[str] = "masked"
    reads: ClassVar[tuple[str, ...]] = ("confidence",)
    score: ClassVar[str] = "confidence"
    score_from: ClassVar[str] = "raw"
    uses_steps: ClassVar[bool] = False
    may_wait: ClassVar[bool] = False
    reference_draws: ClassVar[str] = "canvas"

    # ---- the method's own decisions -------------------------------------------------------------------------------

    def select(self, view: View) -> Tensor:
        """Which candidates become final: [R, W] bool. A pure function of the view."""
        raise NotImplementedError

    def quota(self, state: MaskedState, rows: np.ndarray) -> np.ndarray | None:
        """[R] int64 tokens that the schedule grants each row at this step; None for methods without a schedule."""
        return None

    def memory(self) -> Mapping[str, MemorySpec]:
        """Tensors that the method keeps between steps."""
        return {}

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        """New values [R, ...] of the declared memory, after a selection."""
        return {}

    def fuse(self, logits: Tensor, memory: Mapping[str, Tensor]) -> Tensor:
        """The method's own logits stage [R, W, V] -> [R, W, V]; the last one before a token is chosen."""
        return logits

    # ---- start ----------------------------------------------------------------------------------------------------

    def start(
        self,
        model: Any,
        prompt: Any,
        *,
        attention_mask: Any = None,
        chat: bool | None = None,
        max_new_tokens: int | None = None,
        blocks: BlockPolicy | None = None,
        block_length: int | None = None,
        cache: str | Cache | None = None,
        seed: int | Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        trace: bool = False,
        **request: Any,
    ) -> MaskedState:
        """Make the state of one request. Arguments as in `paradec.generate`; all are checked before any work.

        Raises:
            ValueError, TypeError: an argument out of its range; the message names it.
        """
        return start_state(
            self,
            model,
            prompt,
            attention_mask,
            chat,
            max_new_tokens,
            blocks,
            block_length,
            cache,
            seed,
            generator,
            trace,
            request,
        )

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: MaskedState) -> list[Query]:
        """One query per part of the cache's plan; each wants the logits of its rows' windows."""
        return [part_query(state, part) for part in state.cache.plan(state)]

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[Query]) -> Proposal:
        """A candidate token and its scores for every window position. outputs: logits [R, W, V], one per query."""
        window = state.window
        generator = None if state.generator is None else reference.copy_generator(state.generator)
        parts = []
        for logits, query in zip(outputs, queries, strict=True):
            logits = self._logits_stage(state, logits, query)
            parts.append(self._read(state, logits, query, generator))
        if len(parts) == 1:
            tokens, quantities = parts[0]
        else:
            order = np.argsort(np.concatenate([query.index for query in queries]))
            order = torch.as_tensor(order, device=window.positions.device)
            tokens = torch.cat([part[0] for part in parts])[order]
            quantities = {name: torch.cat([part[1][name] for part in parts])[order] for name in self.reads}
        current = window.read(state.canvas)
        available = current == state.facts.mask_token_id
        if window.valid is not None:
            available = available & window.valid
        for query in queries:
            if query.available is not None:
                index = torch.as_tensor(query.index, device=available.device)
                available = available.index_copy(0, index, available[index] & query.available)
        scores = quantities[self.score]
        if state.request.confidence_eos_eot_inf and len(state.ends):
            scores = scores.masked_fill(torch.isin(tokens, state.ends), LAST)
        return Proposal(
            rows=window.rows,
            values=tokens,
            cost=Cost(queries, state.batch),
            positions=window.positions,
            scores=scores,
            available=available,
            current=current,
            quantities=quantities,
            made_at=state.commits,
            kind=queries[0].kind if len(queries) == 1 else "+".join(dict.fromkeys(query.kind for query in queries)),
            generator_state=None if generator is None else generator.get_state(),
        )

    def _logits_stage(self, state: MaskedState, logits: Tensor, query: Query) -> Tensor:
        request = state.request
        if request.guidance_scale != 1.0 or request.temperature > 0:
            # scaled logits can leave the range of float16
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if request.guidance_scale != 1.0:
            conditional, unconditional = logits.chunk(2)
            logits = unconditional + request.guidance_scale * (conditional - unconditional)
        # in place: the logits are this step's own, and can be large
        logits.select(-1, state.facts.mask_token_id).fill_(-torch.inf)
        if state.suppressed is not None:
            logits.index_fill_(-1, state.suppressed, -torch.inf)
        if not state.memory.specs:
            return logits
        return self.fuse(logits, rows_of(state.memory, query.rows))

    def _read(
        self, state: MaskedState, logits: Tensor, query: Query, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Candidate tokens [R, W] and quantities [R, W] of one query's rows."""
        request = state.request
        statistics = token_statistics if generator is None else reference.statistics
        filtered = request.top_p is not None or request.top_k is not None
        if request.temperature == 0 and not (filtered and self.score_from == "sampled"):
            return statistics(logits, self.reads)
        drawn_from = logits if request.temperature == 0 else logits / request.temperature
        drawn_from = filter_logits(drawn_from, request.top_p, request.top_k)
        tokens = None if request.temperature == 0 else self._draw(state, drawn_from, query, generator)
        if self.score_from == "sampled":
            return statistics(drawn_from, self.reads, tokens)
        return statistics(logits, self.reads, tokens)

    def _draw(self, state: MaskedState, logits: Tensor, query: Query, generator: torch.Generator | None) -> Tensor:
        """Draw tokens [R, W] from softmax(logits [R, W, V]) by the Gumbel-max trick, in float64."""
        rows = query.rows
        positions = state.window.positions[torch.as_tensor(query.index, device=logits.device)]
        if generator is None:
            steps = torch.as_tensor(state.row_step[rows], device=positions.device)
            keys = state.keys[torch.as_tensor(rows, device=positions.device)]
            noise = rng.uniform(keys, steps, positions, logits.shape[-1], rng.TOKEN_STREAM)
        elif self.score_from == "sampled":
            return reference.categorical(state, logits, positions, rows, generator)
        else:
            noise = reference.gumbel_uniform(state, logits.shape[-1], rows, positions, generator)
        return (logits.double() + rng.gumbel(noise)).argmax(-1)

    # ---- commit ---------------------------------------------------------------------------------------------------

    def commit(self, state: MaskedState, proposal: Proposal) -> Commit:
        """Select, write, remember; then close full blocks and finished rows.

        Raises:
            FloatingPointError: the model returned NaN or infinite logits. Nothing is written then.
            RuntimeError: the method committed nothing where it must.
        """
        window, rows = state.window, proposal.rows
        if proposal.made_at != state.commits:
            raise ValueError("this proposal was made from an earlier state; call step again before commit")
        generator = None if state.generator is None else reference.copy_generator(state.generator)
        if generator is not None:
            generator.set_state(proposal.generator_state)
        available, positions = proposal.available, proposal.positions
        view = View(
            scores=torch.where(available, proposal.scores, -torch.inf),
            candidates=available,
            tokens=proposal.values,
            positions=positions,
            quantities=proposal.quantities,
            quota=self.quota(state, rows),
            memory=rows_of(state.memory, rows),
            top=top_by_rank if generator is None else lambda scores, count: reference.top(state, scores, count),
            draw=lambda: self._position_noise(state, generator),
            choose=lambda weights, count: self._choose(state, weights, count, generator),
        )
        selected = self.select(view) & available
        written = torch.where(selected, proposal.values, proposal.current)
        # the one wait for the device of the step; a NaN or infinite logit makes the confidence NaN
        chosen, tokens, health = _to_host(selected, written, proposal.quantities["confidence"])
        committed = np.add.reduce(chosen, 1, dtype=np.int64)
        if not np.isfinite(np.add.reduce(health, None)):
            row = int(rows[np.isfinite(health).all(1).argmin()])
            raise FloatingPointError(
                f"the model returned NaN or infinite logits for row {row} at its step {int(state.row_step[row])}"
            )
        # a method that may wait must have filled the block by its last planned step
        if not committed.all() and not self.may_wait or self.may_wait and _overdue(state, rows, committed):
            raise RuntimeError(f"sampler {self.name!r} committed nothing for row {int(rows[committed.argmin()])}")

        if generator is not None:
            state.generator.set_state(generator.get_state())
        window.write(state.canvas, written)
        for name, value in self.remember(view, selected).items():
            state.memory[name] = put_rows(state.memory[name], rows, value)
        state.count(proposal.cost)
        state.advance(rows, committed)
        self._advance(state, rows, _end_of_text(state, tokens))
        return Commit(rows, proposal.values, positions, selected, proposal.scores, proposal.kind)

    def _advance(self, state: MaskedState, rows: np.ndarray, stop: np.ndarray | None) -> None:
        """Finish rows at their end of text (window column `stop` [R], -1 for none); open the block after a full one."""
        full = state.remaining[rows] == 0
        if stop is None and not full.any():
            return
        if stop is not None:
            stopped = stop >= 0
            full &= ~stopped
            end = np.full(state.batch, state.canvas.shape[1])
            end[rows[stopped]] = state.block_start[rows[stopped]] + stop[stopped] + 1
            column = torch.arange(state.canvas.shape[1], device=state.canvas.device)
            tail = column >= torch.as_tensor(end, device=column.device).unsqueeze(1)
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
        self, state: MaskedState, weights: Tensor, count: np.ndarray, generator: torch.Generator | None
    ) -> Tensor:
        """Draw `count` positions of each row without replacement, with probabilities proportional to `weights`."""
        if generator is not None:
            return reference.choose(state, weights, count, generator)
        # Gumbel-top-k draws the same law
        return top_by_rank(weights.log() + rng.gumbel(self._position_noise(state, None)), count)


def _to_host(*tensors: Tensor) -> list[np.ndarray]:
    """[R, W] tensors as numpy arrays, with one transfer for all of them."""
    if tensors[0].is_cpu:
        return [tensor.numpy() for tensor in tensors]
    # float64 holds flags, ids and logits exactly
    arrays = torch.stack([tensor.double() for tensor in tensors]).cpu().numpy()
    kinds = {torch.bool: bool, torch.int64: np.int64}
    return [array.astype(kinds.get(tensor.dtype, np.float64)) for tensor, array in zip(tensors, arrays, strict=True)]


def _end_of_text(state: MaskedState, tokens: np.ndarray) -> np.ndarray | None:
    """[R] int64: window column of the first end token with nothing undecided before it, or -1; None if no row has one.

    Args:
        tokens: [R, W] int64, the window after the write.
    """
    if not state.request.eos_early_stop:
        return None
    ends = state.facts.eos_token_ids
    if not ends:
        return None
    is_end = tokens == ends[0]
    for end in ends[1:]:  # one or two; np.isin takes ten times as long
        is_end |= tokens == end
    if not is_end.any():
        return None
    if state.window.host_valid is not None:
        is_end &= state.window.host_valid
    first = (is_end | (tokens == state.facts.mask_token_id)).argmax(1)  # the first of either
    stop = np.where(is_end[np.arange(len(first)), first], first, -1)
    return stop if (stop >= 0).any() else None


def _overdue(state: MaskedState, rows: np.ndarray, committed: np.ndarray) -> bool:
    """Whether a row committed nothing although its planned steps are over."""
    return bool(((committed == 0) & (state.block_step[rows] + 1 >= state.planned_steps(rows))).any())

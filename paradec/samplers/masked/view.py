"""Interface between the loop and a masked method: its declared needs, its input (`View`) and its decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, unknown_name
from paradec.core.facts import TOPOLOGIES
from paradec.core.logprobs import StepLogProbs
from paradec.core.protocol import Proposal
from paradec.kernels.token_stats import QUANTITIES
from paradec.samplers.features.pipelined_blocks import best_of_blocks

LAST = torch.finfo(torch.float64).min
"""Score of a candidate that must be committed after all others."""
UNCUT = 2**31 - 1
"""Value of `MaskedSampler.trim` for a row that is not cut off."""


@dataclass(frozen=True)
class Needs:
    """Declared needs of a method, such as the quantities that it `reads`, or that a step `may_wait` (commit nothing).
    Raises ValueError for unknown quantities, sources, draws or topologies.

    `previews`, `processes_logits`, `extra_quantities`, `revises` and `draws_tokens` are set if the class overrides
    `preview`, `process_logits`, `extra_quantities`, `revise` or `draw_tokens`.
    """

    reads: tuple[str, ...] = ()
    """Quantities of the logits (`paradec.kernels.token_stats.QUANTITIES`); "confidence" and `score` are added."""
    score: str = "confidence"
    """The quantity that ranks positions."""
    score_from: str = "raw"
    """"raw": softmax(logits) at any temperature (LLaDA); "sampled": the tempered and filtered distribution (Dream)."""
    reference_draws: str = "canvas"
    """Positions for which the public code draws position noise: the whole "canvas", or only "masked" positions."""
    decided_logits: bool = False
    """Whether `select` also reads decided positions. (`process_logits`, `extra_quantities`, `revise` always may.)"""
    topologies: tuple[str, ...] = ()
    """Supported topologies of models; () is all."""
    may_wait: bool = False
    """Whether a step may commit nothing; then the method's schedule must bound the steps."""
    least_by_steps: bool = False
    """Whether `steps` only sets a minimum of commits per step. Then requests without `steps` may pipeline blocks."""
    mask_probes: bool = False
    """Whether calls also evaluate masks that the row's other positions do not attend to."""
    stores_final: bool = False
    """Whether only keys and values of final blocks are stored, which needs a cache with `reads_final_only`."""
    causal_keys: bool = False
    """Whether stored keys of final tokens are those of causal attention. Samplers that differ in it share no prefix."""
    multi_step: bool = False
    """Whether the method evaluates several drafts of a row in one call."""
    moves: bool = False
    """Whether a method that `revises` may also move decided tokens in the open block, so that a step leaves more
    positions undecided than before; then its last step must fill the block."""
    ends_with_block: bool = False
    """Whether stop rules of a method that `revises` see a block only when it closes."""
    previews: bool = False
    processes_logits: bool = False
    extra_quantities: bool = False
    revises: bool = False
    """Whether the method takes back or replaces tokens of the open block. Then stop rules see a token only after a step
    has left it unchanged, or its block has closed."""
    draws_tokens: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.reads, (tuple, list)):
            raise ValueError(f"reads={self.reads!r} must be a tuple of {', '.join(QUANTITIES)}")
        reads = tuple(dict.fromkeys(("confidence", *self.reads, self.score)))  # commits check "confidence"
        if unknown_reads := [name for name in reads if name not in QUANTITIES]:
            setting = f"score={self.score!r}" if unknown_reads[0] == self.score else f"reads={self.reads!r}"
            raise ValueError(f"{setting}: {unknown_name('quantity', unknown_reads[0], QUANTITIES)}")
        check_choice("score_from", self.score_from, ("raw", "sampled"))
        check_choice("reference_draws", self.reference_draws, ("canvas", "masked"))
        object.__setattr__(self, "reads", reads)
        for topology in self.topologies:
            check_choice("topologies", topology, TOPOLOGIES)

    def why_unsupported(self, facts: Any) -> str | None:
        """Return why the method does not support models of these facts; None if it does."""
        if facts.whole_blocks and (self.mask_probes or self.multi_step):
            extra = "additional masks" if self.mask_probes else "several drafts"
            return f"it evaluates {extra} in one call; {facts.name} chooses experts for whole blocks of a call"
        if not self.topologies or facts.topology in self.topologies:
            return None
        needed = " or ".join(topology.replace("_", "-") for topology in self.topologies)
        return f"it needs a {needed} model; {facts.name} is {facts.topology.replace('_', '-')}"


@dataclass(kw_only=True)
class MaskedProposal(Proposal):
    """A proposal of this family. Shapes: `R` running rows, `W` window positions each."""

    current: Tensor
    """[R, W] int64: the current tokens."""
    block_end: Tensor | None = None
    """[R] int64: end of each row's block, if a block policy computed it from this step's logits."""
    early: Tensor | None = None
    """[R] bool: rows that an early stop rule fills in this step."""
    updates: dict[str, Tensor] = field(default_factory=dict)
    """Second value of `process_logits`, each [R, ...]."""
    generator_state: Tensor | None = None
    """State of the caller's generator after this step's draws (`rng="reference"`)."""


@dataclass
class View:
    """Input of `select`. Shapes: `R` rows, `W` window positions.

    Attributes:
        scores: [R, W] float64, -inf where a position may not be committed.
        candidates: [R, W] bool: undecided and evaluated this step.
        tokens: [R, W] int64 candidate tokens.
        positions: [R, W] int64.
        quantities: the quantities that the method `reads`, each [R, W] float64.
        quota: [R] int64 on the host: tokens granted by the schedule, None without one; a tuple for a combination.
        memory: the method's memory, each [R, ...].
        updates: tensors [R, ...] that `process_logits` returned, by name.
        current: [R, W] int64: the current tokens.
        editable: [R, W] bool: decided in this block by a method that `revises`, and evaluated this step.
        top: top(scores [R, W], count [R] or an int) selects the `count` highest scores of each row: [R, W] bool. Ties:
            the lower position (`rng="reference"`: torch.topk).
        draw: draw() draws uniform numbers [R, W] in (0, 1), one per position.
        choose: choose(scores [R, W], count [R] or an int) draws `count` positions of each row without replacement from
            softmax(scores): [R, W] bool.
        ends: [E] int64: ids that end an answer.
        leading: [R, W] int64: number of the position's block if this block must commit a token in this step, else -1;
            None without pipelined blocks.
    """

    scores: Tensor
    candidates: Tensor
    tokens: Tensor
    positions: Tensor
    quantities: Mapping[str, Tensor]
    quota: Any
    memory: Mapping[str, Tensor]
    updates: Mapping[str, Tensor]
    current: Tensor
    editable: Tensor
    top: Callable[[Tensor, np.ndarray | Tensor | int], Tensor]
    draw: Callable[[], Tensor]
    choose: Callable[[Tensor, np.ndarray | int], Tensor]
    ends: Tensor
    leading: Tensor | None = None

    def best(self, scores: Tensor | None = None) -> Tensor:
        """Select the position with the highest of `scores` (None: the view's), the lowest on ties: [R, W] bool. With
        pipelined blocks: one position of every block that must make progress."""
        scores = self.scores if scores is None else scores
        if self.leading is not None:
            return best_of_blocks(scores, self.leading, self.candidates)
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.argmax(-1, keepdim=True), True)

    def scheduled(self, scores: Tensor | None = None) -> Tensor:
        """Select the `quota` highest of `scores` (None: the view's): [R, W] bool. With pipelined blocks: `best`."""
        scores = self.scores if scores is None else scores
        if self.quota is None:
            raise ValueError("view.scheduled needs a schedule: set uses_steps = True and define quota in the sampler")
        return self.top(scores, self.quota) if self.leading is None else self.best(scores)


@dataclass
class Stage:
    """Input of `process_logits` besides the logits. Shapes: `R` rows (of one call), `W` positions."""

    undecided: Tensor
    """[R, W] bool: undecided and evaluated this step."""
    positions: Tensor
    """[R, W] int64."""
    memory: Mapping[str, Tensor]
    """The method's memory, each [R, ...]; "window" dimensions are W wide."""
    current: Tensor | None = None
    """[R, W] int64: the current tokens; never None while decoding."""


@dataclass
class StepDecision:
    """Tokens that a step writes. Shapes: `R` rows, `W` positions."""

    values: Tensor
    """[R, W] int64: tokens, written where `selected`."""
    selected: Tensor
    """[R, W] bool: positions to write."""
    filled: Tensor
    """[R, W] bool: newly decided positions. With `revise` int64: 1 where decided, -1 where taken back, else 0."""
    hold_block: Tensor | None = None
    """[R] bool: rows whose full block stays open."""
    logprobs: StepLogProbs | None = None
    steps: Tensor | None = None
    """[R, W] int64: number of the row's step that decides each position; None is the current step."""


def run_select(sampler: Any, view: View) -> Tensor:
    """Call the `select` of a method: [R, W] bool. Raises ValueError unless it returns a mask over the window."""
    selected, shape = sampler.select(view), list(view.candidates.shape)
    if not isinstance(selected, Tensor) or selected.dtype != torch.bool or list(selected.shape) != shape:
        what = _describe(selected)
        raise ValueError(f"select of {sampler.name!r} returned {what}; it must return torch.bool [R, W], here {shape}")
    return selected


def run_process_logits(sampler: Any, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Call the `process_logits` of a method. Raises ValueError unless it returns logits of the window and a mapping."""
    result, shape = sampler.process_logits(logits, stage), [len(logits), stage.positions.shape[1], logits.shape[-1]]
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    first, is_pair = values[0] if values else None, len(values) == 2 and isinstance(values[1], Mapping)
    if not is_pair or not isinstance(first, Tensor) or not first.is_floating_point() or list(first.shape) != shape:
        what = ", ".join(map(_describe, values)) or "nothing"
        expected = f"(logits, {{}}) with float logits [R, W, V], here {shape}"
        raise ValueError(f"process_logits of {sampler.name!r} returned {what}; it must return {expected}")
    return first, values[1]


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"

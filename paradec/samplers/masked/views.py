"""What a method of the masked family is shown, and what it answers: a `Stage` of the logits, a `View` of a proposal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.logprobs import StepLogProbs
from paradec.core.protocol import Proposal
from paradec.samplers.features.pipelined_blocks import best_of_blocks
from paradec.samplers.statistics import best_one

LAST = torch.finfo(torch.float64).min
"""Score of a candidate that is to be committed after all others."""
UNCUT = 2**31 - 1
"""The end of a row that a method does not cut off."""


@dataclass(kw_only=True)
class MaskedProposal(Proposal):
    """A proposal of this family. Shapes: `R` running rows, `W` window positions each."""

    current: Tensor
    """[R, W] int64: the tokens at the positions now."""
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
    """What the method's `process_logits` found in this step, each [R, ...]."""
    current: Tensor
    """[R, W] int64: the tokens at the positions now."""
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
    leading: Tensor | None = None
    """[R, W] int64, with pipelined blocks (`paradec.PipelinedBlocks`): in blocks that must make progress, their number;
    -1 elsewhere. None where the window is one block, which must."""

    def best(self, scores: Tensor | None = None) -> Tensor:
        """[R, W] bool: the position to commit whatever its score, the one with the highest of `scores` (None: the
        view's), the lowest on ties; with pipelined blocks that of every block that must make progress."""
        scores = self.scores if scores is None else scores
        return best_one(scores) if self.leading is None else best_of_blocks(scores, self.leading, self.candidates)

    def scheduled(self, scores: Tensor | None = None) -> Tensor:
        """[R, W] bool: the `quota` highest of `scores` (None: the view's); with pipelined blocks, which no schedule
        counts through, `best`."""
        scores = self.scores if scores is None else scores
        return self.top(scores, self.quota) if self.leading is None else self.best(scores)


@dataclass
class Stage:
    """What `process_logits` sees beside the logits. Shapes: `R` rows (of one call), `W` positions."""

    undecided: Tensor
    """[R, W] bool: undecided and evaluated this step."""
    positions: Tensor
    """[R, W] int64."""
    memory: Mapping[str, Tensor]
    """The method's own tensors, each [R, ...]; "window" dimensions are W wide."""
    current: Tensor | None = None
    """[R, W] int64: the tokens at the positions now. They are always there in a decoding."""


@dataclass
class Revision:
    """What a method takes back in one step. Shapes: `R` rows, `W` positions; None is nothing."""

    remask: Tensor | None = None
    """[R, W] bool: editable positions that become undecided again."""
    edit: Tensor | None = None
    """[R, W] bool: editable positions that take this step's candidate token."""
    text: Tensor | None = None
    """[R, W] int64: what all positions hold after the step, masks included, for methods that declare `Needs.moves`;
    positions that were given stay."""
    hold_block: Tensor | None = None
    """[R] bool: rows whose block stays open for another step although nothing in it is undecided."""


@dataclass
class Decision:
    """What a step is about to write. Shapes: `R` rows, `W` positions."""

    values: Tensor
    """[R, W] int64."""
    selected: Tensor
    """[R, W] bool: where they are written."""
    filled: Tensor
    """[R, W]: what that adds to what is decided: bool; -1, 0 or 1 where the method takes tokens back."""
    hold_block: Tensor | None = None
    """[R] bool: rows whose block stays open although nothing in it is undecided."""
    logprobs: StepLogProbs | None = None
    """Of what was written, where the request asks for them."""
    steps: Tensor | None = None
    """[R, W] int64: the row's steps that decide the positions; None is the step that is committed."""


def selection(sampler: Any, view: View) -> Tensor:
    """What a method's `select` says of a view.

    Raises:
        ValueError: it is no mask over the window.
    """
    found, shape = sampler.select(view), list(view.candidates.shape)
    if not isinstance(found, Tensor) or found.dtype != torch.bool or list(found.shape) != shape:
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(f"select of {sampler.name!r} returned {what}; it must return torch.bool [R, W], here {shape}")
    return found

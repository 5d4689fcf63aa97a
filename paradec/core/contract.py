"""What may be read of a masked decoding: the contract between states and all that they are handed to.

Samplers, caches, stop rules and attention methods read a `CanvasState`. It is the plain loop's `MaskedState`, the same
some steps ahead (`freedave`), or the device step's `Engine`. What is declared here is there in all of them, but for the
lower part, which the device step does not have: methods and caches with `device_step` keep to the upper one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from paradec.core.facts import ModelFacts
from paradec.core.logprobs import LogProbs
from paradec.core.memory import Memory
from paradec.core.trace import Trace

Numbers: TypeAlias = Any
"""Integers or flags of rows: a numpy array on the host; in the device step a tensor."""
Kept: TypeAlias = Any
"""What a cache keeps of a request, in a form that it alone knows: nothing, an array or tensor of B rows, or a
dataclass whose fields say which have rows (`paradec.core.rows`)."""


class AttentionState(Protocol):
    """What an attention method keeps of a request (`paradec.attention`)."""

    def plan(self, state: CanvasState, part: Any) -> Any:
        """What the attention of one part of the cache's plan does (`Query.attention`); None attends to everything."""
        ...

    def committed(self, state: CanvasState, queries: list[Any]) -> None:
        """The calls of a step that is about to be counted."""
        ...

    def report(self) -> Any:
        """What was computed, for `paradec.Output`."""
        ...

    def release(self) -> None:
        """Give the memory back."""
        ...


@dataclass
class Window:
    """The positions that may become final now: the open block of every running row; with early rules, all after it too.

    Shapes: `R` running rows, `W` positions (the widest block; narrower rows are padded with `valid` False).
    """

    rows: Numbers
    """[R] int64 on the host: the state's rows."""
    positions: Tensor
    """[R, W] int64; distinct within a row, padding included."""
    flat: Tensor
    """[R, W] int64: the same as indices into a flattened canvas."""
    valid: Tensor | None
    """[R, W] bool, or None when all are valid."""
    host_positions: Numbers
    host_valid: Numbers | None
    """[R, W]: the same on the host."""
    whole: bool
    """Whether the running rows are all rows of the state."""

    @cached_property
    def row_index(self) -> Tensor:
        """[R, 1] int64: the rows on the device, ready to index."""
        return torch.as_tensor(self.rows, device=self.positions.device).unsqueeze(1)

    def undecided(self, current: Tensor, mask: int) -> Tensor:
        """[R, W] bool: where a window that holds `current` [R, W] is undecided, padding excluded."""
        undecided = current == mask
        return undecided if self.valid is None else undecided & self.valid

    def read(self, tensor: Tensor) -> Tensor:
        """The window [R, W] of a canvas-shaped tensor [B, L]."""
        return tensor.take(self.flat)

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Write the window [R, W] of a canvas-shaped tensor [B, L], in place."""
        tensor.put_(self.flat, values)


class TextState(Protocol):
    """What the entry points of text read of a state, masked or causal: `generate`, streamers. `B` rows, a canvas of
    `L` positions, all numbers of rows on the host."""

    batch: int
    facts: ModelFacts
    trace: Trace | None
    logprobs: LogProbs | None
    max_new_tokens: int
    store: Any

    @property
    def attention_state(self) -> AttentionState | None: ...

    @property
    def canvas(self) -> Tensor: ...
    @property
    def given(self) -> Tensor: ...
    @property
    def undecided(self) -> Tensor: ...
    @property
    def prompt_length(self) -> Numbers: ...
    @property
    def answer_start(self) -> Numbers: ...
    @property
    def block_start(self) -> Numbers: ...
    @property
    def length(self) -> Numbers: ...
    @property
    def asked(self) -> Numbers: ...
    @property
    def end(self) -> Numbers: ...
    @property
    def stopped(self) -> Numbers: ...
    @property
    def running(self) -> Numbers: ...
    @property
    def decided(self) -> Numbers: ...
    @property
    def reused(self) -> Numbers: ...
    @property
    def revises(self) -> bool: ...
    @property
    def cache(self) -> Any: ...
    @property
    def nfe(self) -> Numbers: ...
    @property
    def row_forwards(self) -> Numbers: ...
    @property
    def forwarded_tokens(self) -> Numbers: ...
    @property
    def full_forwards(self) -> Numbers: ...
    @property
    def progress(self) -> tuple[int, int]: ...
    @property
    def done(self) -> bool: ...

    def cache_advice(self) -> str | None: ...
    def freed_store(self) -> AbstractContextManager[None]: ...
    def kept_prefix(self, model: Any) -> Any: ...


class CanvasState:
    """The state of `B` rows on a canvas of `L` positions; the window has `R` running rows and `W` positions."""

    # ---- everywhere -----------------------------------------------------------------------------------------------

    batch: int
    facts: ModelFacts
    mask_id: int
    request: Any
    """The `paradec.Request`."""
    window: Window
    canvas: Tensor
    """[B, L] int64 ids; the mask id is at undecided positions and nowhere else."""
    keys: Tensor
    """[B, 2] int64 random keys."""
    generator: torch.Generator | None = None
    """The caller's, for `rng="reference"`."""
    suppressed: Tensor | None
    """[S] int64 ids that are never proposed, beside the mask id; None when there are none. [B, S] where rows have their
    own, filled up with the mask id."""
    ends: Tensor
    """[E] int64 ids that end an answer."""
    length: Numbers
    """[B]: positions of each row."""
    block_start: Numbers
    block_end: Numbers
    """[B] each: the open block."""
    masks_at_open: Numbers
    """[B]: undecided positions of the open block when it opened."""
    remaining: Numbers
    """[B]: undecided positions of the open block."""
    block_step: Numbers
    row_step: Numbers
    """[B] each: steps taken in the open block, and by the row."""
    decided: Numbers
    """[B]: positions that decoding has made final."""
    end: Numbers
    """[B]: the position after each row's last token."""
    steps_per_block: Numbers | None
    """[B]: steps planned for each block of a row; None plans one token a step."""
    longest_plan: int = 0
    """In the device step alone, for tables: no block's plan has more steps."""

    def planned_steps(self, rows: Numbers) -> Numbers:
        """[R]: steps planned for the open block of `rows` [R] (one token a step without a plan)."""
        return self.masks_at_open[rows] if self.steps_per_block is None else self.steps_per_block[rows]

    def while_rows_stay(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that holds while the same rows run, made on first use. On the device the key says how many."""
        raise NotImplementedError

    # ---- on the host ----------------------------------------------------------------------------------------------

    nothing: Tensor
    """[R, W] bool: no position of the window. Not to be written to."""
    branches: int
    """Rows of the model per row of the state: 2 under guidance."""
    memory: Memory
    """What the method remembers."""
    logprobs: LogProbs | None
    """What was kept of the tokens' log-probabilities; None unless the request asks for it."""
    given: Tensor
    """[B, L] bool: what the user gave."""
    commits: int
    """Steps that were committed."""
    prompt_length: Numbers
    """[B]: the position of each row's first mask; all before it was given."""
    answer_start: Numbers
    """[B]: the position after the last one that was given."""
    masks_before: Numbers
    """[B, L + 1]: undecided positions before each position, as they were at the start."""
    total: Numbers
    """[B]: positions that decoding is to make final."""
    columns: Numbers
    """[B, L]: the position of every entry of the canvas."""
    blocks: Any
    """The `paradec.core.blocks.BlockPolicy`."""
    features: Any
    """The request's optional features (`paradec.samplers.features`) by name."""
    level: bool
    """Whether all rows have one length."""
    most_calls: int = 3
    """Calls of one kind that a step may make, so that rows of unequal lengths are not padded far."""
    pads: bool
    """Whether the model takes rows of several lengths in one call."""
    reuses: bool = False
    """Whether the first tokens of the rows were taken over from a prefix."""
    reused: Numbers
    """[B]: how many positions of each row were."""
    present: Numbers | None = None
    """[B, L]: positions that exist while the block is open (`paradec.Suffix`): the others are neither evaluated nor
    seen. None: all of a row's do."""
    causal_keys: bool = False
    """Whether final tokens attended causally when their keys and values were stored, whatever the model's topology."""
    seeding: Numbers | None = None
    """[B] bool, on models of causal context: rows whose block begins with a token that the causal call before it
    predicts; None on all others."""
    settled: Numbers | None = None
    """[B]: on block-causal models, all that is on the left was evaluated after its blocks were full; None unless it is
    to be kept."""
    cache: Any
    """The `paradec.caches.base.Cache`."""
    store: Any
    """The key/value store, or None."""
    cache_state: Kept
    """What the cache keeps."""

    @property
    def undecided(self) -> Tensor:
        """[B, L] bool: positions that are not final yet."""
        raise NotImplementedError

    @property
    def block_ends(self) -> Tensor:
        """[R, 1] int64: where the running rows' blocks end, on the device."""
        raise NotImplementedError

    def while_blocks_stay(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that holds until a block moves, made on first use."""
        raise NotImplementedError

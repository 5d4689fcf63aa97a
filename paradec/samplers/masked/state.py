"""State of the masked family."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.caches.cost import why_not_worthwhile
from paradec.caches.stored import StoredCache
from paradec.core.checks import short_repr
from paradec.core.facts import ModelFacts
from paradec.core.protocol import State
from paradec.core.query import WindowQuery
from paradec.core.rows import ROWS, RowLayout, has_rows, row_layout
from paradec.request import Request


@dataclass
class Window:
    """Positions of the open block of each running row; with early stops, all from the block's start to the row's end.
    Shapes: `R` rows, `W` positions of the widest row."""

    rows: Any
    """[R] int64 on the host (in the device step a tensor): rows of the state."""
    positions: Tensor
    """[R, W] int64; distinct within a row, padding included."""
    flat: Tensor
    """[R, W] int64: indices into a flattened canvas."""
    valid: Tensor | None
    """[R, W] bool: False for padding; None without padding."""
    host_positions: Any
    host_valid: np.ndarray | None
    """`positions` and `valid` on the host."""

    @cached_property
    def row_index(self) -> Tensor:
        return torch.as_tensor(self.rows, device=self.positions.device).unsqueeze(1)

    def undecided(self, current: Tensor, mask_id: int) -> Tensor:
        """Find the undecided positions, without padding: [R, W] bool. current: [R, W], the window's tokens."""
        undecided = current == mask_id
        return undecided if self.valid is None else undecided & self.valid

    def query_positions(self, query: WindowQuery) -> Tensor:
        """Return the positions of a query's logits [N, K, V]: [N, K] int64."""
        positions = self.positions[torch.as_tensor(query.window.index, device=self.positions.device)]
        return positions if query.window.columns is None else positions.gather(1, query.window.columns)

    def read(self, tensor: Tensor) -> Tensor:
        """Read the window [R, W] of a canvas-shaped tensor [B, L]."""
        return tensor.take(self.flat)

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Write the window [R, W] of a canvas-shaped tensor [B, L], in place."""
        tensor.put_(self.flat, values)


@dataclass
class MaskedState(State):
    """State of a masked sampler. `B` rows, canvas of `L` positions; row r uses the first `length[r]`.

    Tensors are on the model's device, arrays on the host. Methods and caches with `device_step` must also work on a
    `DeviceEngine`, which has only some of these fields, all as tensors.
    """

    facts: ModelFacts
    request: Request
    cache: Cache
    blocks: Any
    pads: bool
    """Whether the model accepts rows of several lengths in one call."""
    canvas: Tensor = field(metadata={"rows": lambda state, _: RowLayout(columns=1, fill=state.facts.fill_token_id)})
    """[B, L] int64 ids; the mask id exactly at undecided positions."""
    is_prompt: Tensor = field(metadata=row_layout(columns=1))
    """[B, L] bool: prompt tokens (masked in the unconditional branch of guidance)."""
    prompt_length: np.ndarray = field(metadata=ROWS)
    """[B] int64: position of each row's first mask."""
    answer_start: np.ndarray = field(metadata=ROWS)
    """[B] int64: the position after the last prompt token; more than `prompt_length` if masks precede prompt tokens."""
    length: np.ndarray = field(metadata=ROWS)
    """[B] int64: positions of each row; a method's `trim` lowers it."""
    requested_end: np.ndarray = field(metadata=ROWS)
    """[B] int64: end of the requested positions; less than `length` if a block-causal model's last block is longer."""
    max_new_tokens: int
    keys: Tensor = field(metadata=ROWS)
    """[B, 2] int64 random keys."""
    suppressed: Tensor | None = field(
        metadata={"rows": lambda state, _: RowLayout(fill=state.mask_id) if state.suppressed.ndim == 2 else None}
    )
    """[S] int64: ids besides the mask id that are never proposed; [B, S] if rows have different ids; None for no id."""
    ends: Tensor
    """[E] int64 ids that end an answer."""
    revises: bool = False
    causal_keys: bool = False
    """`revises` and `causal_keys` are the sampler's, as in `Needs`."""
    stop_rules: tuple[Any, ...] = field(default=(), metadata=ROWS)
    generator: torch.Generator | None = None
    """The caller's generator, for `rng="reference"`."""
    store: Any = field(default=None, metadata=ROWS)
    cache_state: Any = field(default=None, metadata=ROWS)
    """See `paradec.caches.base.Cache.begin`."""

    window: Window = field(init=False, repr=False)
    block_start: np.ndarray = field(init=False, metadata=ROWS)
    block_end: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64 each: bounds of the open block, or of all open pipelined blocks."""
    remaining: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64: undecided positions of the open block."""
    masks_at_open: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64: undecided positions of the open block when it opened."""
    running: np.ndarray = field(init=False, metadata=ROWS)
    """[B] bool: rows that take part in the next step."""
    decided: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64: positions decided so far."""
    end: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64: end of each row; less than `requested_end` if a stop rule ended the row earlier."""
    stopped: np.ndarray = field(init=False, metadata=ROWS)
    """[B] bool: rows that a stop rule ended."""
    reused: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64: leading positions whose keys and values came from a prefix; no step evaluates them."""
    reuses: bool = field(init=False, default=False)
    """Whether any row has reused positions."""
    steps_per_block: np.ndarray | None = field(init=False, default=None, metadata=ROWS)
    """[B] int64: steps planned per block; None plans one token a step."""
    masked: np.ndarray = field(init=False, metadata=row_layout(columns=1))
    """[B, L] bool: positions that were undecided at the start."""
    _steps: np.ndarray = field(init=False, repr=False, metadata=row_layout(axis=1))

    max_calls: int = field(init=False, default=3)
    """Maximum number of calls of one kind per step; several calls need less padding of rows of unequal lengths."""
    # values of optional features, None without the feature
    logprobs: ClassVar[Any] = property(  # type: ignore[misc]
        lambda self: self._read_feature("logprobs", "logprobs")
    )
    log_weight: ClassVar[Any] = property(lambda self: self._read_feature("constraint", "log_weight"))
    """[B] float64: see `paradec.Output.log_weight`."""
    present: ClassVar[Any] = property(lambda self: self._read_feature("suffix_window", "present"))
    """[B, L] bool: positions that are evaluated and attended to while the block is open (`paradec.Suffix`)."""
    seeding: ClassVar[Any] = property(lambda self: self._read_feature("causal_context", "seeding"))
    """[B] bool: rows that decide only the first token of their block in the next step (`causal_context`)."""
    attention_state: ClassVar[Any] = property(lambda self: self._read_feature("sparse_attention", "attention_state"))
    rollout: ClassVar[Any] = property(lambda self: self.features.get("rollout"))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.block_start = self.prompt_length.copy()
        self.block_end = self.prompt_length.copy()
        self.remaining = np.zeros(self.batch, np.int64)
        self.masks_at_open = np.zeros(self.batch, np.int64)
        self.mask_id = self.facts.mask_id
        self.branches = 2 if self.request.guidance_scale != 1.0 else 1
        self._steps = np.zeros((2, self.batch), np.int64)
        self.running = np.ones(self.batch, bool)
        self.decided = np.zeros(self.batch, np.int64)
        self.end = self.requested_end.copy()
        self.stopped = np.zeros(self.batch, bool)
        self.reused = np.zeros(self.batch, np.int64)
        self.masked = (self.canvas == self.mask_id).cpu().numpy()
        self._derive_row_values()

    def __getstate__(self) -> dict[str, Any]:
        # `block_step` and `row_step` are views of `_steps`, and would be pickled as copies
        return self.__dict__ | {"block_step": None, "row_step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.block_step, self.row_step = self._steps

    def _read_feature(self, name: str, attribute: str) -> Any:
        feature = self.features.get(name)
        return None if feature is None else getattr(feature, attribute)

    @property
    def stored_cache(self) -> StoredCache:
        assert isinstance(self.cache, StoredCache)
        return self.cache

    @property
    def undecided(self) -> Tensor:
        """[B, L] bool."""
        return self.canvas == self.facts.mask_id

    @property
    def done(self) -> bool:
        return not len(self.rows)

    @property
    def progress(self) -> tuple[int, int]:
        return int(self.decided[self.running].sum() + self.total[~self.running].sum()), int(self.total.sum())

    @property
    def block_ends(self) -> Tensor:
        return torch.as_tensor(self.block_end[self.window.rows, None], device=self.canvas.device)

    def per_branch(self, array: np.ndarray) -> Tensor:
        """Copy an array [N, ...] to the device, once per branch: [branches * N, ...]."""
        tensor = torch.as_tensor(array, device=self.canvas.device)
        return torch.cat((tensor, tensor)) if self.branches == 2 else tensor

    def planned_steps(self, rows: Any) -> Any:
        """Return the planned steps of the open block of `rows` [R]: [R]; without a plan, one token per step."""
        return self.masks_at_open[rows] if self.steps_per_block is None else self.steps_per_block[rows]

    def advance(self, rows: np.ndarray, committed: np.ndarray) -> None:
        """Count one step of all running rows. committed: [R] int64, tokens that each of `rows` [R] committed."""
        self.commits += 1
        self._steps += self.running
        self.decided[rows] += committed
        self.remaining[rows] -= committed

    def make_window(self) -> None:
        self.rows = rows = self.running.nonzero()[0]
        if not len(rows):
            return
        start = self.block_start[rows]
        end = (self.length if "early_stops" in self.features else self.block_end)[rows]
        width = (end - start).max()
        positions = start[:, None] + np.arange(width)
        valid = None
        if (end - start).min() < width:
            valid = positions < end[:, None]
            positions %= self.canvas.shape[1]  # padding wraps around: a row's positions stay distinct
        if self.memory.specs:
            self.memory.grow("window", int(width))
        device = self.canvas.device
        self.window = Window(
            rows=rows,
            host_positions=positions,
            host_valid=valid,
            positions=torch.as_tensor(positions, device=device),
            flat=torch.as_tensor(positions + rows[:, None] * self.canvas.shape[1], device=device),
            valid=None if valid is None else torch.as_tensor(valid, device=device),
        )

    def why_rows_fixed(self) -> str | None:
        for feature in self.features.values():
            if feature.why_rows_fixed is not None:
                return str(feature.why_rows_fixed)
        if self.trace is not None:
            return "a trace records the same rows from its first to its last step"
        if self.cache_state is not None and not has_rows(self.cache_state, self.batch):
            kind = type(self.cache_state).__name__
            return f"cache {self.cache.name!r} keeps a {kind}, which has no field with rows (`paradec.core.rows`)"
        for rule in self.stop_rules:
            if not has_rows(rule):
                return f"stop={short_repr(rule)} has no field with rows (`paradec.core.rows`)"
        return None

    def before_row_change(self, other: Self | None) -> None:
        super().before_row_change(other)
        if other is None:
            return
        self.reuses |= other.reuses
        first, second = self.suppressed, other.suppressed
        if first is None or second is None:
            is_same = first is second
        else:
            is_same = first.ndim == second.ndim == 1 and first.equal(second)
        if not is_same:  # one list per row from here on
            for state in (self, other):
                ids = torch.tensor([state.mask_id]).to(state.canvas) if state.suppressed is None else state.suppressed
                state.suppressed = ids.expand(state.batch, -1).clone()

    def after_row_change(self) -> None:
        super().after_row_change()
        self._derive_row_values()
        self.make_window()

    def _derive_row_values(self) -> None:
        size = self.canvas.shape[1]
        self.block_step, self.row_step = self._steps  # views, [B] int64 each: steps in the open block, and of the row
        self.has_equal_lengths = bool((self.length == size).all())  # whether all rows have one length
        self.columns = np.tile(np.arange(size), (self.batch, 1))  # [B, L]: position of every entry of the canvas
        # [B, L + 1]: number of initially undecided positions before each position
        self.masks_before = np.zeros((self.batch, size + 1), np.int64)
        self.masks_before[:, 1:] = self.masked.cumsum(1)
        self.total = self.masks_before[:, -1]  # [B]: number of initially undecided positions

    def set_running_rows(self, rows: np.ndarray) -> None:
        """Run only the unfinished `rows` [N] in the next steps. The caller must remember the other unfinished rows."""
        running = np.zeros(self.batch, bool)
        running[rows] = True
        if (running != self.running).any():
            self.running = running
            self.commits += 1
            self.make_window()

    def finish(self, rows: np.ndarray) -> None:
        self.running[rows] = False

    def final_ends(self, rows: np.ndarray) -> np.ndarray:
        undecided = self.undecided[torch.as_tensor(rows, device=self.canvas.device)].cpu().numpy()
        undecided &= np.arange(undecided.shape[1]) < self.end[rows, None]
        final = np.where(undecided.any(1), undecided.argmax(1), self.end[rows])
        if self.revises:  # tokens of an open block may be taken back
            final = np.where(self.running[rows], np.minimum(final, self.block_start[rows]), final)
        return np.asarray(final)

    def num_columns(self, rows: np.ndarray) -> int:
        return int(np.maximum(self.length[rows], self.requested_end[rows]).max())

    def stores(self) -> tuple[Any, ...]:
        return self.store, self.attention_state

    def kept_prefix(self, model: Any) -> Any:
        """Return the `KeptPrefix` for the next request; None unless requested. Call it before the store is freed."""
        feature = self.features.get("prefix_reuse")
        return None if feature is None else feature.kept_prefix(self, model)

    def cache_advice(self) -> str | None:
        if self.reuses or not self.cache.facts.uses_store:
            return None
        return why_not_worthwhile(self.cache, self.batch, int(self.length.max()), self.canvas.device.type)

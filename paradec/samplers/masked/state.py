"""What changes while a masked sampler decodes: the canvas, each row's open block, the method's memory, the counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.caches.cost import advice
from paradec.caches.kept import KeptPrefix, keep_prefix
from paradec.caches.stored import StoredCache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import shown
from paradec.core.contract import CanvasState, Kept, Window
from paradec.core.facts import ModelFacts
from paradec.core.protocol import State
from paradec.core.rows import ROWS, RowLayout, has_rows, row_layout
from paradec.request import Request
from paradec.samplers.features.feature import Feature
from paradec.samplers.masked.stopping import NEVER, StopRule


@dataclass
class MaskedState(CanvasState, State):
    """What changes while a masked sampler decodes. `B` rows, canvas of `L` positions; row r uses the first `length[r]`.

    Tensors live on the model's device; [B] bookkeeping is numpy on the host, fed by one transfer per step.
    """

    facts: ModelFacts
    request: Request
    cache: Cache
    blocks: BlockPolicy
    pads: bool
    canvas: Tensor = field(metadata={"rows": lambda state, _: RowLayout(columns=1, fill=state.facts.fill_token_id)})
    """[B, L] int64 ids; the mask id is at undecided positions and nowhere else."""
    given: Tensor = field(metadata=row_layout(columns=1))
    """[B, L] bool: what the user gave (masked in the unconditional branch of guidance)."""
    prompt_length: np.ndarray = field(metadata=ROWS)
    """[B] int64: the position of each row's first mask; all before it was given."""
    answer_start: np.ndarray = field(metadata=ROWS)
    """[B] int64: the position after the last one that was given; beyond `prompt_length` where the prompt has holes."""
    length: np.ndarray = field(metadata=ROWS)
    """[B] int64: positions of each row; fewer than there were once the method has cut it off."""
    asked: np.ndarray = field(metadata=ROWS)
    """[B] int64: the position after the last one that was asked for; before `length` where a block-causal model's last
    block reaches beyond it."""
    max_new_tokens: int
    """Masks that were appended to every row."""
    keys: Tensor = field(metadata=ROWS)
    """[B, 2] int64 random keys."""
    suppressed: Tensor | None = field(
        metadata={"rows": lambda state, _: RowLayout(fill=state.mask_id) if state.suppressed.ndim == 2 else None}
    )
    """[S] int64 ids that are never proposed, beside the mask id; None when there are none. [B, S] where rows have their
    own, filled up with the mask id."""
    ends: Tensor
    """[E] int64 ids that end an answer."""
    revises: bool = False
    """Whether the sampler may take back what it decided in an open block."""
    causal_keys: bool = False
    stop_rules: tuple[StopRule, ...] = field(default=(), metadata=ROWS)
    generator: torch.Generator | None = None
    """The caller's, for `rng="reference"`."""
    store: Any = field(default=None, metadata=ROWS)
    cache_state: Kept = field(default=None, metadata=ROWS)
    """What the cache keeps (see `paradec.caches.base.Cache.begin`); it changes in commits."""

    block_start: np.ndarray = field(init=False, metadata=ROWS)
    block_end: np.ndarray = field(init=False, metadata=ROWS)
    remaining: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64: undecided positions of the open block."""
    masks_at_open: np.ndarray = field(init=False, metadata=ROWS)
    running: np.ndarray = field(init=False, metadata=ROWS)
    decided: np.ndarray = field(init=False, metadata=ROWS)
    end: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64: the position after each row's last token; before `asked` where a stop rule ended it."""
    stopped: np.ndarray = field(init=False, metadata=ROWS)
    """[B] bool: rows that a stop rule ended."""
    reused: np.ndarray = field(init=False, metadata=ROWS)
    """[B] int64: positions on the left that no step evaluates, since their keys and values came from a prefix."""
    logprobs: ClassVar[Any] = property(lambda self: self._read_feature("logprobs", "logprobs"))
    """The `LogProbs` of what was decided; None unless the request asks for them."""
    log_weight: ClassVar[Any] = property(lambda self: self._read_feature("constraint", "log_weight"))
    """[B] float64: see `paradec.Output.log_weight`; None without draws from a constraint."""
    present: ClassVar[Any] = property(lambda self: self._read_feature("suffix_window", "present"))
    """[B, L] bool: positions that exist while the block is open (`paradec.Suffix`); None: all of a row's."""
    reuse: ClassVar[Any] = property(lambda self: self._read_feature("prefix_reuse", "reuse"))
    """The `Reuse` of a prefix, or None."""
    settled: ClassVar[Any] = property(lambda self: self._read_feature("prefix_reuse", "settled"))
    """[B] int64: positions that the next request can take over; None unless they are to be kept."""
    seeding: ClassVar[Any] = property(lambda self: self._read_feature("causal_context", "seeding"))
    """[B] bool: rows that are about to draw the first token of their block; None but over causal context."""
    attention_state: ClassVar[Any] = property(lambda self: self._read_feature("sparse_attention", "attention_state"))
    """What the attention method keeps; None where every call attends to everything."""
    rollout: ClassVar[Any] = property(lambda self: self.features.get("rollout"))
    """The `RecordedRollout`, or None."""
    steps_per_block: np.ndarray | None = field(init=False, default=None, metadata=ROWS)
    """[B] int64: steps planned for each block of a row; None plans one token a step."""
    masked: np.ndarray = field(init=False, metadata=row_layout(columns=1))
    """[B, L] bool: positions that were undecided at the start."""
    _steps: np.ndarray = field(init=False, repr=False, metadata=row_layout(axis=1))

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
        self._running_rows = np.arange(self.batch).tobytes()
        self.decided = np.zeros(self.batch, np.int64)
        self.end = self.asked.copy()
        self.stopped = np.zeros(self.batch, bool)
        self.reused = np.zeros(self.batch, np.int64)
        self._made_for_blocks: dict[Any, Any] = {}
        self._made_for_rows: dict[Any, Any] = {}
        if self.request.steps is not None:
            counts = block_counts(self.request.steps, self.blocks, self.prompt_length, self.length)
            self.steps_per_block = -(-self.request.steps // counts)
        self.masked = self.undecided.cpu().numpy()
        self._follow_rows()

    def _read_feature(self, name: str, attribute: str) -> Any:
        """An attribute of a feature; None where the request has no such feature."""
        feature = self.features.get(name)
        return None if feature is None else getattr(feature, attribute)

    def start(self, features: dict[str, Feature]) -> None:
        """Open the first blocks, with the features of the request."""
        self.features = features
        self.open_blocks(np.arange(self.batch))

    def __getstate__(self) -> dict[str, Any]:
        # what is made on first use is made again, and copies of views would be no views
        left_out: dict[str, Any] = {"_made_for_blocks": {}, "_made_for_rows": {}, "block_step": None, "row_step": None}
        return self.__dict__ | left_out

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.block_step, self.row_step = self._steps

    @property
    def stored_cache(self) -> StoredCache:
        """The cache of a request that has a store."""
        assert isinstance(self.cache, StoredCache)
        return self.cache

    @property
    def undecided(self) -> Tensor:
        """[B, L] bool: positions that are not final yet."""
        return self.canvas == self.facts.mask_id

    @property
    def done(self) -> bool:
        return not self._running_rows

    @property
    def progress(self) -> tuple[int, int]:
        return int(self.decided[self.running].sum() + self.total[~self.running].sum()), int(self.total.sum())

    def open_blocks(self, rows: np.ndarray) -> None:
        """Move `rows` to their next block that has something undecided; rows without one are finished."""
        opened = rows
        while len(rows):
            self.block_start[rows] = self.block_end[rows]
            rows = rows[self.block_start[rows] < self.length[rows]]
            if not len(rows):
                break
            start = self.block_start[rows]
            self.block_end[rows] = self.blocks.open(start, self.prompt_length[rows], self.length[rows])
            masks = self.masks_before[rows, self.block_end[rows]] - self.masks_before[rows, start]
            self.masks_at_open[rows] = self.remaining[rows] = masks
            self.block_step[rows] = 0
            self.memory.reset(rows, "block")
            rows = rows[masks == 0]
        self.running &= self.block_start < self.length
        for feature in self.features.values():
            feature.on_start(self, opened[self.running[opened]])
        self._make_window()

    def advance(self, rows: np.ndarray, committed: np.ndarray) -> None:
        """Count one step of the running rows, of which `rows` [R] committed so many tokens each."""
        self.commits += 1
        self._steps += self.running
        if not self.window.whole:
            committed, of_running = np.zeros(self.batch, np.int64), committed
            committed[rows] = of_running
        self.decided += committed
        self.remaining -= committed

    def close(
        self, rows: np.ndarray, ends: np.ndarray | None, held: np.ndarray | None = None, moved: bool = False
    ) -> None:
        """Finish the rows that a stop rule ends (`ends` as `StopRule` says them); open the block after a full one.

        Args:
            held: [R] bool, rows that stay in a full block. moved: whether a block ends elsewhere than before this
                step.
        """
        left = self.remaining if self.window.whole else self.remaining[rows]
        if ends is None and not moved and 0 not in left.tolist():
            return
        full = left == 0
        if held is not None:
            full &= ~held
            if ends is None and not moved and not full.any():
                return
        if ends is not None:
            stopped = ends < NEVER
            full &= ~stopped
            last = self.length.copy()
            last[rows[stopped]] = ends[stopped]
            self.end = np.minimum(self.end, last)
            self.stopped[rows[stopped]] = ends[stopped] <= self.asked[rows[stopped]]
            column = torch.arange(self.canvas.shape[1], device=self.canvas.device)
            tail = column >= torch.as_tensor(last, device=column.device).unsqueeze(1)
            self.canvas.masked_fill_(tail, self.facts.fill_token_id)
            self.finish(rows[stopped])
        self.open_blocks(rows[full])

    def finish(self, rows: np.ndarray) -> None:
        """Take rows out of the decoding."""
        self.running[rows] = False

    def _make_window(self) -> None:
        self.rows = rows = self.running.nonzero()[0]
        self._made_for_blocks = {}
        if (names := rows.tobytes()) != self._running_rows:
            self._made_for_rows, self._running_rows = {}, names
        if not len(rows):
            return
        start, end = self.block_start[rows], (self.length if "early_stops" in self.features else self.block_end)[rows]
        size = end - start
        width = size.max()
        positions = start[:, None] + np.arange(width)
        valid = None
        if size.min() < width:
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
            whole=len(rows) == self.batch,
        )
        self.nothing = torch.zeros_like(self.window.positions, dtype=torch.bool)

    # ---- rows that come and go ------------------------------------------------------------------------------------

    def fixed(self) -> str | None:
        for feature in self.features.values():
            if feature.why_rows_stay is not None:
                return feature.why_rows_stay
        if self.trace is not None:
            return "a trace is of the rows that it began with"
        if self.cache_state is not None and not has_rows(self.cache_state, self.batch):
            kept = type(self.cache_state).__name__
            return f"cache {self.cache.name!r} keeps a {kept}, which has no field with rows (`paradec.core.rows`)"
        for rule in self.stop_rules:
            if not has_rows(rule):
                return f"stop={shown(rule)} has no field with rows (`paradec.core.rows`)"
        return None

    def before_row_change(self, other: Self | None) -> None:
        super().before_row_change(other)
        if other is None:
            return
        self.reuses |= other.reuses
        own, new = self.suppressed, other.suppressed
        same = own is new if own is None or new is None else own.ndim == new.ndim == 1 and torch.equal(own, new)
        if not same:  # each row has its own from here on
            for state in (self, other):
                own = torch.tensor([state.mask_id]).to(state.canvas) if state.suppressed is None else state.suppressed
                state.suppressed = own.expand(state.batch, -1).clone()

    def after_row_change(self) -> None:
        super().after_row_change()
        self._follow_rows()
        self.forget_made()
        self._make_window()

    def _follow_rows(self) -> None:
        """Make what follows from the rows that there are."""
        size = self.canvas.shape[1]
        self.block_step, self.row_step = self._steps  # views
        self.level = bool((self.length == size).all())
        self.columns = np.tile(np.arange(size), (self.batch, 1))
        self.masks_before = np.zeros((self.batch, size + 1), np.int64)
        self.masks_before[:, 1:] = self.masked.cumsum(1)
        self.total = self.masks_before[:, -1]

    def let_run(self, rows: np.ndarray) -> None:
        """Let `rows` [N] alone take part in the next steps, and the others wait. For hosts that have not the
        logits of all rows: none of them may be done, and it is theirs to remember who waits."""
        running = np.zeros(self.batch, bool)
        running[rows] = True
        if (running != self.running).any():
            self.running = running
            self.commits += 1
            self.forget_made()
            self._make_window()

    def final(self, rows: np.ndarray) -> np.ndarray:
        undecided = self.undecided[torch.as_tensor(rows, device=self.canvas.device)].cpu().numpy()
        undecided &= np.arange(undecided.shape[1]) < self.end[rows, None]
        final = np.where(undecided.any(1), undecided.argmax(1), self.end[rows])
        if self.revises:  # tokens of an open block may be taken back
            final = np.where(self.running[rows], np.minimum(final, self.block_start[rows]), final)
        found: np.ndarray = final
        return found

    def extent(self, rows: np.ndarray) -> int:
        return int(np.maximum(self.length[rows], self.asked[rows]).max())

    @property
    def block_ends(self) -> Tensor:
        """[R, 1] int64: where the running rows' blocks end, on the device."""
        rows, device = self.window.rows, self.canvas.device
        return self.while_blocks_stay("ends", lambda: torch.as_tensor(self.block_end[rows, None], device=device))

    def while_blocks_stay(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that holds until a block moves, made on first use."""
        if key not in self._made_for_blocks:
            self._made_for_blocks[key] = make()
        return self._made_for_blocks[key]

    def forget_made(self) -> None:
        """Make again what was made for the running rows and their blocks: a row is another one than it was."""
        self._made_for_rows, self._made_for_blocks = {}, {}

    def while_rows_stay(self, key: Any, make: Callable[[], Any]) -> Any:
        """A value that holds while the same rows run, made on first use."""
        if key not in self._made_for_rows:
            self._made_for_rows[key] = make()
        return self._made_for_rows[key]

    def stores(self) -> tuple[Any, ...]:
        return self.store, self.attention_state

    def kept_prefix(self, model: Any) -> KeptPrefix | None:
        """What the next request can take over, if that was asked for; to be taken before the store is freed."""
        if self.settled is None:
            return None
        return keep_prefix(self, model, None if self.reuse is None else self.reuse.kept)

    def cache_advice(self) -> str | None:
        """Why the cache cannot win for this request, if it cannot."""
        if self.reuses or not self.cache.facts.uses_store:
            return None  # it has won already, or there is none
        return advice(self.cache, self.batch, int(self.length.max()), self.canvas.device.type)


def block_counts(steps: int, policy: BlockPolicy, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[B] int64: how many blocks each row will have, to spread `steps` over. starts, lengths: [B] positions."""
    counts = [policy.count(int(start), int(length)) for start, length in zip(starts, lengths, strict=True)]
    if None in counts:
        raise ValueError(
            f"steps={steps} cannot be spread over {shown(policy)}: only decoding shows how many blocks there are; "
            "leave steps out"
        )
    return np.array(counts, np.int64)

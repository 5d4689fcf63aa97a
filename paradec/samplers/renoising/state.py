"""State of a request on canvases: each row's open canvas, its encoded tokens and counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from paradec.caches.kept_prefix import KeptPrefix
from paradec.core import rng
from paradec.core.checks import check_int, check_number
from paradec.core.facts import ModelFacts
from paradec.core.protocol import State
from paradec.request import Request
from paradec.samplers.masked.blocks import NEVER, StopRule, find_ends
from paradec.samplers.masked.state import Window


@dataclass
class DenoisingState(State):
    """`B` rows of up to `L` positions; row r has canvases of `C` positions at `starts[r]`, one of them open.

    Memory of the open canvas: "noisy" [B, C], the ids that the model reads; "soft" [B, C, D], the expected embeddings
    from the last step, zeros before the first step and at prompt positions; "unchanged" [B], number of consecutive
    steps with unchanged best tokens.
    """

    facts: ModelFacts
    request: Request
    rule: Any
    """The masked sampler whose `select` keeps positions."""
    steps: int
    temperatures: tuple[float, float]
    """t_min and t_max."""
    stability_rule: StabilityRule | None
    encode_wait: int
    canvas: Tensor
    """[B, L] int64 ids: final tokens; in open canvases the best tokens of the last step."""
    is_prompt: Tensor
    """[B, L] bool: prompt tokens."""
    starts: list[np.ndarray]
    """Starts of each row's canvases, ascending."""
    prompt_length: np.ndarray
    """[B] int64: start of the first canvas."""
    answer_start: np.ndarray
    """[B] int64: the position after the last prompt token."""
    length: np.ndarray
    """[B] int64: the end of each row's last canvas."""
    requested_end: np.ndarray
    """[B] int64: end of the requested positions."""
    max_new_tokens: int
    keys: Tensor
    """[B, 2] int64 random keys."""
    generator: torch.Generator | None
    """The caller's generator, for `rng="reference"`; then rows advance in lock step, as in transformers."""
    suppressed: Tensor | None
    """[S] int64 ids that are never proposed, or None."""
    ends: Tensor
    """[E] int64 ids that end an answer."""
    stop_rules: Sequence[StopRule] = ()
    images: list[Tensor | None] = field(default_factory=list)
    """Per row, the embeddings [N, D] at the image tokens of the prompt, or None."""
    store: Any = None

    attention_state: ClassVar[None] = None
    cache: ClassVar[SimpleNamespace] = SimpleNamespace(name="canvas")
    revises: ClassVar[bool] = True
    constraint: ClassVar[Any] = property(lambda self: self.features.get("constraint"))

    def __post_init__(self) -> None:
        super().__post_init__()
        batch = self.batch
        self.block_start = np.array([row[0] for row in self.starts], np.int64)
        """[B] int64: start of each row's open canvas."""
        self.canvas_index = np.zeros(batch, np.int64)
        """[B] int64: index of the open canvas."""
        self.encoded = np.zeros(batch, np.int64)
        """[B] int64: number of leading positions whose keys and values are in the store."""
        self.num_waits = np.zeros(batch, np.int64)
        """[B] int64: number of steps that a row has waited to be encoded together with other rows."""
        self.canvas_step = np.zeros(batch, np.int64)
        """[B] int64: completed steps of the open canvas."""
        self.row_step = np.zeros(batch, np.int64)
        """[B] int64: completed steps of the row, in all canvases."""
        self.running = np.ones(batch, bool)
        self.converged = np.zeros(batch, bool)
        """[B] bool: rows whose canvas has converged; in lock step it waits for the other rows' canvases."""
        self.decided = np.zeros(batch, np.int64)
        self.end = self.requested_end.copy()
        """[B] int64: the position after each row's last token; before `requested_end` where a stop rule ended it."""
        self.stopped = np.zeros(batch, bool)
        self.reused = np.zeros(batch, np.int64)
        """[B] int64: number of leading positions whose keys and values came from a prefix."""
        self.encoder_calls = np.zeros(batch, np.int64)
        self.denoising_calls = np.zeros(batch, np.int64)
        """[B] int64 each: number of encodings and denoising steps of a row, without steps in which its canvas waits."""
        column = np.arange(self.canvas.shape[1])
        in_canvas = np.zeros(self.canvas.shape, bool)
        for row, starts in enumerate(self.starts):
            for start in starts:
                in_canvas[row, start : start + self.width] = True
        is_prompt = self.is_prompt.cpu().numpy()
        self._final = ~in_canvas | (column >= self.length[:, None]) | is_prompt
        self.total = (~self._final).sum(1)
        self.has_prompt_in_canvas = bool((in_canvas & is_prompt).any())
        self._write_initial_noise(np.arange(batch))

    # ---- values ---------------------------------------------------------------------------------------------------

    @property
    def width(self) -> int:
        """C: number of positions of a canvas."""
        width = self.facts.block_length
        assert width is not None  # models with canvases set it
        return width

    @property
    def lock_step(self) -> bool:
        """Whether the canvases of all rows close together, as in transformers' generate."""
        return self.generator is not None

    @property
    def undecided(self) -> Tensor:
        """[B, L] bool."""
        return torch.as_tensor(~self._final, device=self.canvas.device)

    @property
    def rows(self) -> np.ndarray:  # type: ignore[override]
        """[R] int64: rows of the next step. In lock step, these include ended rows while any row runs."""
        return np.arange(self.batch) if self.lock_step and self.running.any() else self.running.nonzero()[0]

    @property
    def done(self) -> bool:
        return not self.running.any()

    @property
    def progress(self) -> tuple[int, int]:
        return int(np.where(self.running, self.decided, self.total).sum()), int(self.total.sum())

    @property
    def block_end(self) -> np.ndarray:
        """[B] int64: end of each row's open canvas."""
        return self.block_start + self.width

    def cache_advice(self) -> None:
        """Return None: encoded tokens are always stored."""

    def draft_end(self) -> np.ndarray:
        """[B] int64: end of each row's tokens to display; an open canvas is included after its first step."""
        draft_end = np.where(self.canvas_step > 0, np.minimum(self.block_end, self.requested_end), self.block_start)
        return np.where(self.running, draft_end, self.end)

    def positions_to_fill(self, row: int) -> list[int]:
        """List the positions of a row that decoding makes final."""
        in_canvas = [position for start in self.starts[row] for position in range(int(start), int(start) + self.width)]
        is_prompt = self.is_prompt[row].cpu().numpy()
        return [position for position in in_canvas if not is_prompt[position]]

    def choose_rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows to encode at this step, and the rows to denoise, which include the rows to encode."""
        rows = self.rows
        needs_encoding = self.encoded[rows] < self.block_start[rows]
        ready = needs_encoding & (needs_encoding.all() or self.num_waits[rows].max(initial=0) >= self.encode_wait)
        return rows[ready], rows[~needs_encoding | ready]

    def positions(self, rows: np.ndarray) -> Tensor:
        """[R, C] int64: positions of the rows' open canvases."""
        return torch.as_tensor(self.block_start[rows, None] + np.arange(self.width), device=self.canvas.device)

    def index(self, rows: np.ndarray) -> Tensor:
        """Copy row numbers to the device."""
        return torch.as_tensor(rows, device=self.canvas.device)

    def noisy(self, rows: np.ndarray) -> Tensor:
        """[R, C] int64: the ids that the model reads in the rows' open canvases."""
        return self.memory["noisy"].index_select(0, self.index(rows))

    def read(self, tensor: Tensor, rows: np.ndarray, positions: Tensor) -> Tensor:
        """Read [R, C] of a canvas-shaped tensor [B, L]."""
        return tensor[self.index(rows).unsqueeze(1), positions]

    def temperature(self, rows: np.ndarray) -> Tensor:
        """[R] float32: the temperatures of the rows' steps."""
        steps_left = torch.as_tensor(self.steps - self.canvas_step[rows], dtype=torch.int32, device=self.canvas.device)
        return anneal_temperature(steps_left / self.steps, *self.temperatures)

    def kept_prefix(self, model: Any) -> KeptPrefix | None:
        """Return the `KeptPrefix` for the next request, if requested; call this before the store is freed."""
        if not self.request.keep_prefix:
            return None
        counts = np.minimum(self.encoded, self.end)
        canvas = self.canvas.cpu()
        tokens = [canvas[row, :count].tolist() for row, count in enumerate(counts)]
        return KeptPrefix(model.module, tokens, self.store.read_prefix(int(counts.max())), True)

    def stores(self) -> tuple[Any, ...]:
        return (self.store,)

    # ---- changes by commits ---------------------------------------------------------------------------------------

    def draw_noise(self, rows: np.ndarray, positions: Tensor, generator: torch.Generator | None, stream: int) -> Tensor:
        """Draw random tokens [R, C] int64, from the generator if there is one."""
        vocab = self.facts.vocab_size
        if generator is not None:
            shape = (len(rows), self.width)
            return torch.randint(vocab, shape, generator=generator, device=generator.device).to(positions.device)
        index = self.index(rows)
        return draw_noise_tokens(self.keys[index], self.index(self.row_step[rows]), positions, vocab, stream)

    def _write_initial_noise(self, rows: np.ndarray) -> None:
        if not len(rows):
            return
        positions = self.positions(rows)
        noise = self.draw_noise(rows, positions, self.generator, FIRST_STREAM)
        is_prompt = self.read(self.is_prompt, rows, positions)
        self.memory.write("noisy", rows, torch.where(is_prompt, self.read(self.canvas, rows, positions), noise))

    def close(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Make the open canvases of `rows` [R] final, with tokens [R, C] on the host; open the next, or end rows."""
        if not len(rows):
            return
        positions = self.block_start[rows, None] + np.arange(self.width)
        is_running = self.running[rows]
        self.decided[rows] += np.where(is_running, (~self._final[rows[:, None], positions]).sum(1), 0)
        self._final[rows[:, None], positions] = True
        self._stop(rows[is_running], positions[is_running], tokens[is_running])
        if self.facts.pad_token_id is not None:  # without a padding id, transformers does not pad
            self._fill_after_end(rows[~is_running])
        has_next = self.canvas_index[rows] + 1 < np.array([len(self.starts[row]) for row in rows])
        self.running[rows[~has_next]] = False
        opens_next = has_next & np.isin(rows, self.rows)
        self._fill_after_end(rows[~opens_next])
        rows = rows[opens_next]
        self.canvas_index[rows] += 1
        self.block_start[rows] = [self.starts[row][self.canvas_index[row]] for row in rows]
        self.canvas_step[rows] = self.num_waits[rows] = 0
        self.converged[rows] = False
        self.memory.reset(rows, "block")
        self._write_initial_noise(rows)

    def _stop(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> None:
        """Apply the stop rules to running rows [R] that have closed canvases at `positions` [R, C]."""
        if not len(rows) or not self.stop_rules:
            return
        self.window = Window(  # stop rules read closed canvases as a window
            rows=rows,
            host_positions=positions,
            host_valid=None,
            positions=torch.as_tensor(positions, device=self.canvas.device),
            flat=torch.as_tensor(positions + rows[:, None] * self.canvas.shape[1], device=self.canvas.device),
            valid=None,
        )
        ends: Any = find_ends(self.stop_rules, self, tokens)  # type: ignore[arg-type]
        if ends is None:
            return
        stopped = ends < NEVER
        rows, ends = rows[stopped], ends[stopped]
        self.end[rows] = np.minimum(self.end[rows], ends)
        self.stopped[rows] = ends <= self.requested_end[rows]
        self.running[rows] = False
        if not self.lock_step or self.facts.pad_token_id is not None:
            self._fill_after_end(rows)

    def _fill_after_end(self, rows: np.ndarray) -> None:
        rows = rows[self.stopped[rows]]
        if len(rows):
            column = torch.arange(self.canvas.shape[1], device=self.canvas.device)
            tail = column >= self.index(self.end[rows]).unsqueeze(1)
            index = self.index(rows)
            self.canvas[index] = self.canvas[index].masked_fill(tail, self.facts.fill_token_id)
            self._final[rows] = True


Fraction = TypeVar("Fraction", float, Tensor)


def anneal_temperature(fraction_left: Fraction, t_min: float, t_max: float) -> Fraction:
    """Compute the temperature when `fraction_left` of the steps remain, including this one: t_max at the first step."""
    return t_min + (t_max - t_min) * fraction_left


FIRST_STREAM, NOISE_STREAM = 4, 5
"""Random streams (`paradec.core.rng`) of a canvas's initial tokens and of later noise."""


def draw_noise_tokens(keys: Tensor, step: Tensor, positions: Tensor, vocab: int, stream: int) -> Tensor:
    """Draw a uniform token per position: [R, C] int64. keys [R, 2], step [R], positions [R, C]: see `rng.uniform`."""
    uniform = rng.uniform(keys, step, positions, 1, stream).squeeze(-1)
    return (uniform * vocab).long()


@dataclass(frozen=True)
class StabilityRule:
    """Rule that closes a canvas early (transformers' `StableAndConfidentStoppingCriteria`): its best tokens equal those
    of the last `stability` steps, and the mean entropy of its distributions, in nats, is below `entropy`."""

    stability: int = 1
    entropy: float = 0.005

    def __post_init__(self) -> None:
        check_int("stability_threshold", self.stability, low=0)
        check_number("confidence_threshold", self.entropy, low=0, open_low=True)

    def is_stable(self, unchanged: np.ndarray, entropy: np.ndarray) -> np.ndarray:
        """Find rows whose canvas closes: [R] bool. unchanged: [R], steps with unchanged best tokens. entropy: [R]."""
        return (unchanged >= self.stability) & (entropy < self.entropy)

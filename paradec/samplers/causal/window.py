"""Speculative Jacobi decoding: the model drafts for itself, from what it thought of the window in the step before.

After a step the slots of the window that were not committed are drafts of the next: `refresh` says how they are renewed
from this step's p, and slots that are new to the window get a guess (`init`). The q of each is this step's p, whether
its token stayed or changed; of a guess it is `guess_distribution`, or one-hot where a neighbour was copied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec import rng
from paradec.checks import check_choice
from paradec.models.images.grid import Grid
from paradec.protocol import MemorySpec, Proposal
from paradec.samplers.causal.base import DRAFT_STREAM, NOISE_STREAM
from paradec.samplers.causal.chain import ChainSampler
from paradec.samplers.causal.state import CausalState, JacobiState
from paradec.samplers.causal.verification import ONE_HOT, UNIFORM, Verified, Window, at_slots, verify
from paradec.samplers.statistics import argmax, log_of

__all__ = ["INITS", "REFRESHES", "Jacobi", "JacobiSampler", "JacobiState"]

INITS = ("random", "repeat_horizontal", "sample_horizontal", "repeat_vertical", "sample_vertical")
REFRESHES = ("resample", "maximal", "gumbel", "keep")
GUESS_DISTRIBUTIONS = ("uniform", "one_hot")


@dataclass(frozen=True)
class JacobiSampler(ChainSampler):
    """Base of the methods whose window of drafts is renewed by the model itself. A subclass implements `accept`.

    Args:
        window: slots evaluated at once, the next token and `window - 1` drafts; 1 is token-by-token decoding.
        init: guesses for slots that are new to the window: "random" (uniform over what may be drawn there), or a copy
            of the left neighbour ("repeat_horizontal") or of the one above ("repeat_vertical", needs a grid), or what
            the model thought likeliest there ("sample_horizontal", "sample_vertical"). A neighbour that is new itself
            is replaced by the nearest known one in that direction; where there is none the guess is random. Tokens that
            the grid prescribes are put in as they are.
        refresh: what becomes of the drafts behind the first rejection: `paradec.samplers.causal.verification.verify`.
        guess_distribution: q of random guesses: "uniform", what they were drawn from, or "one_hot" on the guess, as in
            the public code. Both are exact; uniform ones are accepted more often.
    """

    init: str = "random"
    refresh: str = "resample"
    guess_distribution: str = "uniform"

    renamed = {"random_law": "guess_distribution"}
    resamples: ClassVar[bool] = True
    """Whether a rejected draft is resampled from norm(max(0, p - q)); else the fresh token takes its place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("init", self.init, INITS)
        check_choice("refresh", self.refresh, REFRESHES)
        check_choice("guess_distribution", self.guess_distribution, GUESS_DISTRIBUTIONS)

    # ---- start ----------------------------------------------------------------------------------------------------

    def _new_tokens(self, model: Any, grid: Grid | None, new: int | None) -> int:
        if grid is None and self.init.endswith("vertical"):
            raise ValueError(f"init={self.init!r} needs a grid; text has no rows: use 'random' or a horizontal init")
        return super()._new_tokens(model, grid, new)

    def _memory(self, dtype: torch.dtype) -> dict[str, MemorySpec]:
        specs = super()._memory(dtype)
        if self.refresh == "gumbel":
            specs["noise"] = MemorySpec(("slot", "vocab"), dtype, reset="sequence")
        if self.init.startswith("sample"):
            specs["best"] = MemorySpec(("position",), torch.int64, -1, reset="sequence")
        return specs

    def _first_drafts(self, state: CausalState, model: Any) -> None:
        rows = state.rows
        self._put_noise(state, rows, np.full(state.batch, state.width))
        known = torch.zeros((state.batch, 1), dtype=torch.int64, device=state.context.device)
        guess, source = self._guess(state, rows, known, state.memory["drafts"])
        state.memory.write("drafts", rows, guess)
        state.memory.write("draft_source", rows, source)

    # ---- step and commit ------------------------------------------------------------------------------------------

    def _fresh(self, state: CausalState, p: Tensor, positions: Tensor, uniform: Tensor) -> Tensor:
        if self.refresh != "gumbel":
            return super()._fresh(state, p, positions, uniform)
        noise = at_slots(state.memory.read(state.rows)["noise"], positions % state.width)
        return argmax(log_of(p) + noise)

    def _verify(self, window: Window, drafted: Tensor, chance: Tensor, uniform: Tensor) -> Verified:
        return verify(window, drafted, chance, uniform, self.refresh, self.resamples)

    def _draft(self, state: CausalState, proposal: Proposal, window: Window, found: Verified, count: Tensor) -> None:
        """What was not committed is drafted next, with this step's p as its q; slots new to the window are guessed."""
        rows, p, drafts = proposal.rows, window.p, window.drafts
        self._put_noise(state, rows, state.accepted[-1][rows])
        slot = torch.arange(state.width, device=p.device)
        dense, source = p, slot.expand(len(rows), -1)
        if found.kept is not None:
            old, held = drafts.source, found.kept
            dense = torch.where((held & (old >= 0)).unsqueeze(-1), drafts.at(source), p)
            source = torch.where(held & (old < 0), old, source)
        state.memory.write("draft_distribution", rows, dense)
        if "best" in state.memory:
            # of every slot, final or not: inits that look at it ask for the neighbours'
            best, index = state.memory["best"], torch.as_tensor(rows, device=p.device).unsqueeze(1)
            best[index, proposal.positions % best.shape[1]] = argmax(p)
        # the window moves on by count
        known, at = slot + count < state.width, (slot + count).clamp(max=state.width - 1)
        moved = found.tokens.gather(1, at)
        guess, guessed_from = self._guess(state, rows, known.sum(1, keepdim=True), moved)
        state.memory.write("drafts", rows, torch.where(known, moved, guess))
        state.memory.write("draft_source", rows, torch.where(known, source.gather(1, at), guessed_from))

    # ---- guesses --------------------------------------------------------------------------------------------------

    def _guess(self, state: CausalState, rows: np.ndarray, known: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Guesses for every slot of the next window, of which the first known [R, 1] hold drafts [R, W]; and which
        distributions they have, as `DraftDistributions.source`."""
        positions = state.positions(rows)
        noise = state.uniform(rows, positions, 1, DRAFT_STREAM).squeeze(-1)
        size = len(state.guess_ids)
        guess = state.guess_ids[(noise * size).long().clamp(max=size - 1)]
        source = torch.full_like(guess, UNIFORM if self.guess_distribution == "uniform" else ONE_HOT)
        if self.init != "random":
            copied = self._copied(state, rows, positions, known, drafts)
            guess, source = torch.where(copied >= 0, copied, guess), torch.where(copied >= 0, ONE_HOT, source)
        if state.layout is not None:
            forced = state.forced(rows, positions)
            guess, source = torch.where(forced >= 0, forced, guess), torch.where(forced >= 0, ONE_HOT, source)
        return guess, source

    def _copied(self, state: CausalState, rows: np.ndarray, positions: Tensor, known: Tensor, drafts: Tensor) -> Tensor:
        """[R, W] int64: the neighbour's token, -1 where there is none. Arguments as in `_guess`; positions [R, W]."""
        index = torch.as_tensor(rows, device=drafts.device)
        slot = torch.arange(state.width, device=drafts.device)
        if self.init.startswith("sample"):
            tokens = state.memory["best"][index]
        else:
            tokens = state.canvas[index]
            place = positions % tokens.shape[1]
            tokens = tokens.scatter(1, place, torch.where(slot < known, drafts, tokens.gather(1, place)))
        start = torch.as_tensor(state.prompt_length[rows, None], device=drafts.device)
        last = positions[:, :1] + known - 1
        if self.init.endswith("horizontal"):
            at = last.expand_as(positions)
        else:
            assert state.grid is not None  # `_new_tokens` has seen to it
            stride = state.grid.stride
            at = positions - stride * torch.div(positions - last + stride - 1, stride, rounding_mode="floor")
        found = tokens.gather(1, at.clamp(min=0, max=tokens.shape[1] - 1))
        if state.grid is None:
            return found
        # image tokens alone are copied, and none into the first column from its left
        usable = (at >= start) & (state.forced(rows, at.clamp(min=0).maximum(start)) < 0)
        if self.init.endswith("horizontal"):
            usable &= (positions - start - len(state.grid.head)) % state.grid.stride > 0
        return torch.where(usable, found, -1)

    def _put_noise(self, state: CausalState, rows: np.ndarray, new: np.ndarray) -> None:
        """Gumbel noise of the last new [R] positions of the rows' windows: one vector per position, for good."""
        if "noise" not in state.memory:
            return
        noise, device = state.memory["noise"], state.context.device
        index, slot = np.nonzero(np.arange(state.width) >= state.width - new[:, None])
        at = torch.as_tensor(rows[index], device=device)
        position = torch.as_tensor(state.committed[rows[index]] + slot, device=device)
        drawn = rng.uniform(state.keys[at], torch.zeros_like(at), position.unsqueeze(1), noise.shape[-1], NOISE_STREAM)
        noise[at, position % state.width] = rng.gumbel(drawn).squeeze(1).to(noise.dtype)


@dataclass(frozen=True)
class Jacobi(JacobiSampler):
    """Jacobi decoding: a draft is accepted when it is the very token that this step draws at its slot.

    Lossless at every temperature: what is committed is always this step's own draw from p. With fresh draws at every
    iteration (`refresh="resample"`) it saves next to nothing at a temperature above 0; the noise of a position is
    therefore kept (`refresh="gumbel"`), so that the iteration has a fixed point.
    """

    refresh: str = "gumbel"

    name = "jacobi"
    paper = "Jacobi decoding"
    arxiv = "2305.10427"
    summary = "a draft is accepted when it equals the token that this step draws at its slot; lossless"
    resamples = False

    def accept(self, window: Window) -> Tensor:
        return (window.drafts.tokens == window.fresh).to(window.p.dtype)

"""Speculative Jacobi decoding: the model drafts for itself, from what it thought of the window in the step before.

After a step the slots of the window that were not committed are drafts of the next: `refresh` says how they are renewed
from this step's p, and slots that are new to the window get a guess (`init`). The q of each is this step's p, whether
its token stayed or changed; of a guess it is `guess_distribution`, or one-hot where a neighbour was copied.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_choice, check_int
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Proposal
from paradec.kernels.token_stats import argmax
from paradec.models.images.grid import Grid
from paradec.samplers.causal.base import DRAFT_STREAM, NOISE_STREAM
from paradec.samplers.causal.chain import ChainSampler
from paradec.samplers.causal.pool import PooledChain
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.verification import ONE_HOT, UNIFORM, DraftWindow, Verified, at_slots, verify
from paradec.samplers.distributions import log_of

__all__ = ["EARLY_EXITS", "INITS", "REFRESHES", "Jacobi", "JacobiSampler"]

INITS = ("random", "repeat_horizontal", "sample_horizontal", "repeat_vertical", "sample_vertical")
REFRESHES = ("resample", "maximal", "gumbel", "keep")
GUESS_DISTRIBUTIONS = ("uniform", "one_hot")
EARLY_EXITS = ("prefix", "published")


@dataclass(frozen=True)
class JacobiSampler(ChainSampler):
    """Base of the methods whose window of drafts is renewed by the model itself. A subclass implements `accept`.

    Args:
        window: slots evaluated at once, the next token and `window - 1` drafts; 1 is token-by-token decoding. None is
            16, and on models of any order all that is undecided.
        init: guesses for slots that are new to the window: "random" (uniform over what may be drawn there), or a copy
            of the left neighbour ("repeat_horizontal") or of the one above ("repeat_vertical", needs a grid), or what
            the model thought likeliest there ("sample_horizontal", "sample_vertical"). A neighbour that is new itself
            is replaced by the nearest known one in that direction; where there is none the guess is random. Tokens that
            the grid prescribes are put in as they are. "model" drafts what the model says of them, on models of any
            order, which answer for all undecided positions; these take no other. None is "model" there, else "random".
        refresh: what becomes of the drafts after the first rejection: `paradec.samplers.causal.verification.verify`.
            "gumbel" draws a position's token with the same noise at every step, a number for each token of the
            vocabulary, so that the draw moves no further than p does; one number a draw would move it past tokens that
            p has left alone.
        guess_distribution: q of random guesses: "uniform", what they were drawn from, or "one_hot" on the guess, as in
            the public code. Both are exact; uniform ones are accepted more often.
    """

    init: str | None = None
    refresh: str = "resample"
    guess_distribution: str = "uniform"

    orders = True
    resamples: ClassVar[bool] = True
    """Whether a rejected draft is resampled from norm(max(0, p - q)); else the fresh token takes its place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init is not None:
            check_choice("init", self.init, (*INITS, "model"))
        check_choice("refresh", self.refresh, REFRESHES)
        check_choice("guess_distribution", self.guess_distribution, GUESS_DISTRIBUTIONS)

    # ---- start ----------------------------------------------------------------------------------------------------

    def check_model(self, model: Any) -> None:
        """As for all; ValueError for the model's own guesses from one that answers for its drafts alone."""
        super().check_model(model)
        if self.init == "model" and not getattr(model, "any_order", False):
            raise ValueError(f"init='model' needs a model of any order; {model.facts.name} says nothing of what is new")

    @property
    def _copies(self) -> str:
        """The init, where it copies a neighbour; else an empty text."""
        return "" if self.init in (None, "random", "model") else str(self.init)

    def _new_tokens(self, model: Any, grid: Grid | None, new: int | None) -> int:
        if grid is None and self._copies.endswith("vertical"):
            raise ValueError(f"init={self.init!r} needs a grid; text has no rows: use 'random' or a horizontal init")
        return super()._new_tokens(model, grid, new)

    def memory(self) -> dict[str, MemorySpec]:
        specs = super().memory()
        if self.refresh == "gumbel":
            specs["noise"] = MemorySpec(("slot", "vocab"), None, reset="sequence")
        if self._copies.startswith("sample"):
            specs["best"] = MemorySpec(("position",), torch.int64, -1, reset="sequence")
        return specs

    def _first_drafts(self, state: CausalState, model: Any) -> None:
        rows = state.rows
        self._put_noise(state, rows, np.full(state.batch, state.width))
        known = torch.zeros((state.batch, 1), dtype=torch.int64, device=state.context.device)
        guess, source = self._guess(state, rows, known, state.memory["drafts"])
        state.memory.write("drafts", rows, guess)
        state.memory.write("draft_source", rows, source)
        if state.masks is not None:
            state.masks.put_certain(state, rows)

    # ---- step and commit ------------------------------------------------------------------------------------------

    def _uniform(self, state: CausalState, positions: Tensor) -> tuple[Tensor, Tensor]:
        """As for all; and numbers [R, 2 W] for guesses, since the next window begins within this one or after it: few
        numbers take as long as several times as many."""
        if not state.guesses:
            return super()._uniform(state, positions)
        rows, width = state.rows, state.width
        ranks = state.committed[rows, None] + np.arange(2 * width)
        after = torch.as_tensor(state.places(rows[:, None], ranks), device=positions.device)
        ahead = np.arange(3 * width) >= width
        stream = torch.as_tensor(np.where(ahead, DRAFT_STREAM, rng.TOKEN_STREAM), device=positions.device)
        found = state.uniform(rows, torch.cat((positions, after), 1), 3, stream, ahead)
        return found[:, :width], found[:, width:, 0]

    def _fresh(self, state: CausalState, p: Tensor, positions: Tensor, uniform: Tensor) -> Tensor:
        if self.refresh != "gumbel" or state.request.temperature == 0:
            return super()._fresh(state, p, positions, uniform)
        noise = at_slots(state.memory.read(state.rows)["noise"], positions % state.width)
        return argmax(log_of(p) + noise)

    def _verify(self, window: DraftWindow, drafted: Tensor, chance: Tensor, uniform: Tensor) -> Verified:
        return verify(window, drafted, chance, uniform, self.refresh, self.resamples)

    def _draft(
        self, state: CausalState, proposal: Proposal, window: DraftWindow, found: Verified, count: Tensor
    ) -> None:
        """What was not committed is drafted next, with this step's p as its q; slots new to the window are guessed."""
        rows, p, drafts = proposal.rows, window.p, window.drafts
        if state.guesses:
            self._put_noise(state, rows, state.last_accepted[rows])
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
        # the window moves on by count; what was not evaluated is no draft
        evaluated = proposal.available.sum(1, keepdim=True)
        known, at = slot + count < evaluated, (slot + count).clamp(max=state.width - 1)
        moved = found.tokens.gather(1, at)
        noise = proposal.quantities.get("guesses") if state.guesses else None
        noise = None if noise is None else noise.gather(1, slot + count)
        guess, guessed_from = self._guess(state, rows, known.sum(1, keepdim=True), moved, noise)
        state.memory.write("drafts", rows, torch.where(known, moved, guess))
        state.memory.write("draft_source", rows, torch.where(known, source.gather(1, at), guessed_from))
        if state.masks is not None:
            state.masks.put_certain(state, rows)

    # ---- guesses --------------------------------------------------------------------------------------------------

    def _guess(
        self, state: CausalState, rows: np.ndarray, known: Tensor, drafts: Tensor, noise: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Guesses for every slot of the next window, of which the first known [R, 1] hold drafts [R, W]; and which
        distributions they have, as `DraftDistributions.source`. noise: their numbers [R, W], where these are drawn."""
        if not state.guesses:
            return drafts, torch.full_like(drafts, ONE_HOT)
        if noise is None:
            noise = state.uniform(rows, state.positions(rows), 1, DRAFT_STREAM).squeeze(-1)
        guess = self._random(state, rows, noise)
        source = torch.full_like(guess, UNIFORM if self.guess_distribution == "uniform" else ONE_HOT)
        if not self._copies and not state.prescribes:
            return guess, source
        positions = state.positions(rows)
        if self._copies:
            copied = self._copied(state, rows, positions, known, drafts)
            guess, source = torch.where(copied >= 0, copied, guess), torch.where(copied >= 0, ONE_HOT, source)
        if state.prescribes:
            forced = state.forced(rows, positions)
            guess, source = torch.where(forced >= 0, forced, guess), torch.where(forced >= 0, ONE_HOT, source)
        return guess, source

    def _random(self, state: CausalState, rows: np.ndarray, noise: Tensor) -> Tensor:
        """Tokens [R, W] for random guesses, of uniform noise [R, W]."""
        size = len(state.guess_ids)
        return state.guess_ids[(noise * size).long().clamp(max=size - 1)]

    def _copied(self, state: CausalState, rows: np.ndarray, positions: Tensor, known: Tensor, drafts: Tensor) -> Tensor:
        """[R, W] int64: the neighbour's token, -1 where there is none. Arguments as in `_guess`; positions [R, W]."""
        index = torch.as_tensor(rows, device=drafts.device)
        slot = torch.arange(state.width, device=drafts.device)
        if self._copies.startswith("sample"):
            tokens = state.memory["best"][index]
        else:
            tokens = state.canvas[index]
            place = positions % tokens.shape[1]
            tokens = tokens.scatter(1, place, torch.where(slot < known, drafts, tokens.gather(1, place)))
        start = torch.as_tensor(state.prompt_length[rows, None], device=drafts.device)
        last = positions[:, :1] + known - 1
        if self._copies.endswith("horizontal"):
            at = last.expand_as(positions)
        else:
            assert state.grid is not None  # `_new_tokens` has seen to it
            stride, _ = state.grid.line(positions - start)
            at = positions - stride * torch.div(positions - last + stride - 1, stride, rounding_mode="floor")
        found = tokens.gather(1, at.clamp(min=0, max=tokens.shape[1] - 1))
        if state.grid is None:
            return found
        # image tokens alone are copied, none into the first column from its left, and none from another raster
        stride, first = state.grid.line(positions - start)
        usable = (at >= start + first) & (state.forced(rows, at.clamp(min=0).maximum(start)) < 0)
        if self._copies.endswith("horizontal"):
            usable &= (positions - start - first) % stride > 0
        return torch.where(usable, found, -1)

    def _put_noise(self, state: CausalState, rows: np.ndarray, new: np.ndarray) -> None:
        """Gumbel noise of the last new [R] positions of the rows' windows: one vector per position, for good. None at
        temperature 0, where p is one-hot."""
        if "noise" not in state.memory or state.request.temperature == 0:
            return
        noise, device = state.memory["noise"], state.context.device
        index, slot = np.nonzero(np.arange(state.width) >= state.width - new[:, None])
        at = torch.as_tensor(rows[index], device=device)
        places = state.places(rows[index], state.committed[rows[index]] + slot)
        position = torch.as_tensor(places, device=device)
        drawn = rng.uniform(state.keys[at], torch.zeros_like(at), position.unsqueeze(1), noise.shape[-1], NOISE_STREAM)
        noise[at, position % state.width] = rng.gumbel(drawn).squeeze(1).to(noise.dtype)


@dataclass(frozen=True)
class Jacobi(PooledChain, JacobiSampler):
    """Jacobi decoding: a draft is accepted if it equals the token that this step draws at its slot.

    Lossless at every temperature: what is committed is always this step's own draw from p. With fresh draws at every
    iteration (`refresh="resample"`) it saves next to nothing at a temperature above 0; the noise of a position is
    therefore kept (`refresh="gumbel"`), so that the iteration has a fixed point.

    By default the window slides: every step commits the tokens that are known to be right. With `group` whole blocks
    are decoded instead, as CEED-VLA does (Song et al., arXiv 2506.13725, and its public code). The prompt is evaluated
    by itself and gives a block's first token. Then iterations evaluate the block and replace each token by the one that
    the token before it predicts, until an iteration changes nothing; that takes at most `group` iterations. The last
    one also gives the next block's first token. After i iterations the first i + 1 tokens are those of token-by-token
    decoding. A block's keys and values leave the store after every iteration except its last. In the public code the
    line that does so is commented out, so that its fixed point differs. A row ends its block as soon as an end token is
    among the tokens that are known to be right.

    With `pool`, that many n-grams of earlier steps are further drafts beside the sliding window
    (`paradec.samplers.causal.pool`): the same tokens in fewer forwards, each with `pool * (ngram - 1)` more slots.

    Args:
        group: tokens of a block; None slides a window over the answer. At temperatures above 0 a fixed point needs
            fixed noise at the positions: `refresh` must be "gumbel".
        max_iterations: the most iterations of a block, with `group`; None is as many as the block has tokens, after
            which it does not change any more.
        early_exit: what happens to a block that still changes in its last iteration. "prefix" commits the tokens that
            are known to be right, and the others begin the next block: lossless. "published" commits the whole block as
            this iteration leaves it, with the keys and values of the tokens that it evaluated, which are different
            tokens: lossless only if `max_iterations` is `group` or more. Needs a key/value store.
        init: see `JacobiSampler`; with `group`, "random" draws from the row's own text so far (prompt and answer) if
            that has tokens that may be drawn.
        pool, ngram, pool_size: see `PooledChain`; needs `refresh` "gumbel", whose draws all branches share.
    """

    refresh: str = "gumbel"
    group: int | None = None
    max_iterations: int | None = None
    early_exit: str = "prefix"

    name = "jacobi"
    paper = "Jacobi decoding"
    arxiv = "2305.10427"
    summary = "a draft is accepted when it equals the token that this step draws at its slot; lossless"
    presets = {"ceed": {"group": 36, "max_iterations": 22, "early_exit": "published"}}
    resamples = False
    lossless = property(  # type: ignore[assignment]
        lambda self: self.early_exit == "prefix" or self._limit >= (self.group or 0)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("group", self.group, low=1, none=True)
        check_int("max_iterations", self.max_iterations, low=1, none=True)
        check_choice("early_exit", self.early_exit, EARLY_EXITS)
        own = {field.name: field.default for field in dataclasses.fields(self)}
        if self.pool and self.group is not None:
            raise ValueError(f"pool={self.pool} has no meaning with group={self.group}: leave it out")
        if self.pool and self.refresh != "gumbel":
            raise ValueError(f"refresh={self.refresh!r}: pool={self.pool} needs 'gumbel', whose draws branches share")
        if self.group is None:
            for name in ("max_iterations", "early_exit"):
                if getattr(self, name) != own[name]:
                    raise ValueError(f"{name}={getattr(self, name)!r} has no meaning without group: leave it out")
            return
        if self.window != own["window"]:
            raise ValueError(f"window={self.window} has no meaning with group={self.group}: leave it out")
        if self.refresh != "gumbel":
            raise ValueError(f"refresh={self.refresh!r}: group={self.group} needs 'gumbel', which has a fixed point")

    @property
    def _limit(self) -> int:
        """Iterations of a block at most; 0 where there are no blocks."""
        return (self.group if self.max_iterations is None else self.max_iterations) or 0

    def accept(self, window: DraftWindow) -> Tensor:
        return (window.drafts.tokens == window.fresh).to(window.p.dtype)

    # ---- blocks ---------------------------------------------------------------------------------------------------

    def check_model(self, model: Any) -> None:
        """As for all; ValueError for the published early exit without a key/value store."""
        super().check_model(model)
        if self.early_exit == "published" and not model.supports_store:
            raise ValueError(
                f"early_exit='published' keeps keys and values of other tokens than it commits: {model.facts.name} has "
                "no key/value store; use 'prefix'"
            )

    def _width(self, new: int) -> int:
        return super()._width(new) if self.group is None else min(self.group, new)

    def memory(self) -> dict[str, MemorySpec]:
        iteration = {} if self.group is None else {"iteration": MemorySpec((), torch.int64, reset="sequence")}
        return super().memory() | iteration

    def _evaluated(self, state: CausalState) -> np.ndarray:
        found = super()._evaluated(state)
        # a block begins with a known token, and the first one with what the prompt says
        return found if self.group is None else np.where(state.row_step[state.rows] == 0, 1, found)

    def _final(self, state: CausalState, proposal: Proposal, found: Verified) -> Tensor:
        right = super()._final(state, proposal, found)
        if self.group is None:
            return right
        whole = proposal.available.sum(1, keepdim=True)
        closes = right == whole
        if len(state.ends):
            slot = torch.arange(state.width, device=right.device)
            closes |= (torch.isin(found.tokens, state.ends) & (slot < right)).any(1, keepdim=True)
        last = state.memory.read(proposal.rows)["iteration"].unsqueeze(1) + 1 >= self._limit
        exits = right if self.early_exit == "prefix" else whole
        return torch.where(closes, right, torch.where(last, exits, 0))

    def _draft(
        self, state: CausalState, proposal: Proposal, window: DraftWindow, found: Verified, count: Tensor
    ) -> None:
        super()._draft(state, proposal, window, found, count)
        if self.group is not None:
            before = state.memory.read(proposal.rows)["iteration"]
            state.memory.write("iteration", proposal.rows, torch.where(count.squeeze(1) > 0, 0, before + 1))

    def _random(self, state: CausalState, rows: np.ndarray, noise: Tensor) -> Tensor:
        guess = super()._random(state, rows, noise)
        if self.group is None:
            return guess
        device, size = noise.device, len(state.guess)
        length = torch.as_tensor(state.committed[rows, None], device=device)
        at = (noise * length).long().minimum(length - 1)
        text = state.canvas[torch.as_tensor(rows, device=device)].gather(1, at)
        # prompts may hold ids that have no logit
        fits = (text < size) & (state.guess[text.clamp(max=size - 1)] > 0)
        return torch.where(fits, text, guess)

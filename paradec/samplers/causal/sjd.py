"""Speculative Jacobi decoding: an autoregressive model verifies its own guesses of the next tokens, all at once.

Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi Decoding",
arXiv 2410.01699, section 3. With p the model's target distribution at a slot, given the drafts before it, q the
distribution that its draft x was drawn from, and u uniform in (0, 1):

    accept x     if  u < min(1, p(x) / q(x))
    resample it  else, from the residual norm(max(0, p - q))

Drafts are accepted up to the first rejection (as in Leviathan et al., arXiv 2211.17192, algorithm 1). The slots after
it are drafted from what the model thought of them in this step. `CausalSampler.commit` calls `SJD.verify`, then
`SJD.draft_window`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice
from paradec.core.memory import MemorySpec
from paradec.core.protocol import Proposal
from paradec.kernels.token_stats import draw
from paradec.models.images.grid import Grid
from paradec.samplers.causal.loop import CausalSampler
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.window import (
    GUESS_DISTRIBUTIONS,
    INITS,
    REFRESHES,
    DraftWindow,
    Verified,
    guess_drafts,
    move_window,
    put_noise,
    read_window,
    window_memory,
)
from paradec.samplers.distributions import at_slots, residual


def verify(
    window: DraftWindow,
    drafted: Tensor,
    chance: Tensor,
    uniform: Tensor,
    refresh: str = "resample",
    resample: bool = True,
) -> Verified:
    """Verify a window of drafts.

    Args:
        window: p, the drafts with q, and fresh tokens from p. The slot after the last draft takes its fresh token.
        drafted: [R, W] bool, False where a slot holds no draft (its last one never does).
        chance: [R, W]: probability that a draft is accepted, given that those before it are: the method's `accept`.
        uniform: [R, W, 2] in (0, 1): u, and the number that a rejected draft is resampled with.
        refresh: of the slots after the first rejection: "resample" takes `fresh`, drawn from this step's p; "maximal"
            is `coupled`; "keep" leaves draft and q alone. "gumbel" is "resample": `fresh` shares its noise with the
            drafts.
        resample: False takes the fresh token where a draft is rejected (methods that accept a draft only where it
            equals it).
    """
    p, drafts, fresh = window.p, window.drafts, window.fresh
    slot = torch.arange(p.shape[1], device=p.device)
    accept = drafted & (uniform[..., 0] < chance)  # u < min(1, p(x) / q(x))
    accepted = accept.long().cumprod(1).sum(1, keepdim=True)  # those before the first rejection
    rejected = drafted & (slot == accepted)
    tokens = resampled = fresh
    if refresh == "maximal":
        tokens, resampled = coupled(window, drafted, uniform)
    elif resample:
        weights = residual(at_slots(p, accepted), drafts.at(accepted))  # max(0, p - q) of that slot
        resampled = draw(weights, uniform[..., 1].gather(1, accepted))  # from norm(max(0, p - q))
    tokens = torch.where(rejected, resampled if resample else fresh, tokens)
    kept = drafted & (slot > accepted) if refresh == "keep" else None
    stays = slot < accepted if kept is None else (slot < accepted) | kept
    return Verified(torch.where(stays, drafts.tokens, tokens), accepted, kept)


def coupled(window: DraftWindow, drafted: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """SCD's maximal coupling (arXiv 2510.24211): each slot's draft becomes a token from p that differs as rarely as the
    two distributions allow. It keeps the draft with probability min(1, p / q), else it resamples from the residual.

    Returns:
        [R, W] int64: the tokens, and what each slot resamples.
    """
    resampled = draw(residual(window.p, window.drafts.at()), uniform[..., 1])
    tokens = torch.where(uniform[..., 0] < window.ratio(), window.drafts.tokens, resampled)
    return torch.where(drafted, tokens, window.fresh), resampled


@dataclass(frozen=True)
class SJD(CausalSampler):
    """A draft x is accepted with probability min(1, p(x) / q(x)); the first rejected one is resampled from norm(max(0,
    p - q)), and the window after it is drawn again from p.

    Lossless: the output has the distribution of token-by-token decoding, in batches too and with every filter. The
    public code is lossless for one row at temperature 1 without top-p: in a batch it verifies tokens twice against an
    old q, and it applies temperature and top-p to the residual again.

    Args:
        window: slots evaluated at once, the next token and `window - 1` drafts; 1 is token-by-token decoding. None is
            16, and on models of any order all that is undecided.
        init: guesses for slots that are new to the window: "random" (uniform over what may be drawn there), or a copy
            of the left neighbour ("repeat_horizontal") or of the one above ("repeat_vertical", needs a grid), or what
            the model thought likeliest there ("sample_horizontal", "sample_vertical"). A neighbour that is new itself
            is replaced by the nearest known one in that direction; where there is none the guess is random. Tokens that
            the grid prescribes are put in as they are. "model" drafts what the model says of them, on models of any
            order, which answer for all undecided positions; these take no other. None is "model" there, else "random".
        refresh: what becomes of the drafts after the first rejection: see `verify`. "gumbel" draws a position's token
            with the same noise at every step, a number for each token of the vocabulary, so that the draw moves no
            further than p does; one number a draw would move it past tokens that p has left alone.
        guess_distribution: q of random guesses: "uniform", what they were drawn from, or "one_hot" on the guess, as in
            the public code. Both are exact; uniform ones are accepted more often.
    """

    init: str | None = None
    refresh: str = "resample"
    guess_distribution: str = "uniform"

    name = "sjd"
    paper = "SJD"
    arxiv = "2410.01699"
    summary = "a causal model verifies a window of its own drafts in one forward; lossless"
    orders = True
    guesses = True
    resamples: ClassVar[bool] = True
    """Whether a rejected draft is resampled from norm(max(0, p - q)); else the fresh token takes its place."""

    def accept(self, window: DraftWindow) -> Tensor:
        return window.ratio().clamp(max=1)  # min(1, p(x) / q(x))

    def verify(self, state: CausalState, proposal: Proposal) -> Verified:
        window, drafted = read_window(state, proposal)
        chance, uniform = self.accept(window), proposal.quantities["uniform"]
        return verify(window, drafted, chance, uniform, self.refresh, self.resamples)

    def draft_window(self, state: CausalState, proposal: Proposal, verified: Verified, count: Tensor) -> None:
        rows, guesses = proposal.rows, proposal.quantities.get("guesses")
        if state.guesses:
            put_noise(state, rows, state.last_accepted[rows])
        known, tokens, source = move_window(state, proposal, verified, count)  # q is this step's p
        if guesses is not None:
            guesses = guesses.gather(1, count + torch.arange(state.width, device=count.device))
        self._write_drafts(state, rows, known, tokens, source, guesses)
        if self.branches is not None:
            self.branches.draft(state, rows, proposal.quantities)

    def open(self, state: CausalState, model: Any) -> None:
        put_noise(state, state.rows, np.full(state.batch, state.width))
        drafts, source = state.memory["drafts"], state.memory["draft_source"]
        self._write_drafts(state, state.rows, torch.zeros_like(drafts, dtype=torch.bool), drafts, source)
        if self.branches is not None:
            self.branches.draft(state, state.rows, {})

    def guess(
        self, state: CausalState, rows: np.ndarray, known: Tensor, tokens: Tensor, numbers: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Guesses for slots that are new to the window: see `guess_drafts`."""
        return guess_drafts(state, rows, known, tokens, numbers, self.init, self.guess_distribution)

    def _write_drafts(
        self,
        state: CausalState,
        rows: np.ndarray,
        known: Tensor,
        tokens: Tensor,
        source: Tensor,
        guesses: Tensor | None = None,
    ) -> None:
        """Write the next window: tokens [R, W] and their `source` [R, W] where `known` [R, W], else guesses."""
        guess, guess_source = self.guess(state, rows, known.sum(1, keepdim=True), tokens, guesses)
        state.memory.write("drafts", rows, torch.where(known, tokens, guess))
        state.memory.write("draft_source", rows, torch.where(known, source, guess_source))
        if state.constraint is not None:
            state.constraint.put_certain(state, rows)

    # ---- settings -------------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init is not None:
            check_choice("init", self.init, (*INITS, "model"))
        check_choice("refresh", self.refresh, REFRESHES)
        check_choice("guess_distribution", self.guess_distribution, GUESS_DISTRIBUTIONS)

    def check_model(self, model: Any) -> None:
        """As for all; ValueError for the model's own guesses from one that answers for its drafts alone."""
        super().check_model(model)
        if self.init == "model" and not getattr(model, "any_order", False):
            raise ValueError(f"init='model' needs a model of any order; {model.facts.name} says nothing of what is new")
        if self.branches is not None:
            self.branches.check_model(model)

    def check_request(self, model: Any, grid: Grid | None) -> None:
        if grid is None and str(self.init).endswith("vertical"):
            raise ValueError(f"init={self.init!r} needs a grid; text has no rows: use 'random' or a horizontal init")

    def memory(self) -> dict[str, MemorySpec]:
        more = {} if self.branches is None else self.branches.memory()
        return super().memory() | window_memory(self.init, self.refresh) | more

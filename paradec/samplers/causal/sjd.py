"""Speculative Jacobi decoding (SJD): an autoregressive model verifies its own drafts of the next tokens in one forward.

Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi Decoding",
arXiv 2410.01699, section 3. An iteration evaluates the last final token and the drafts x after it; q is the
distribution that x was drawn from. `CausalSampler` runs the iteration; `SJD` below implements its parts:

    predict    p of every slot in one forward, given the drafts before it; draw from p    `CausalSampler.propose`
    verify     accept x if u < min(1, p(x) / q(x)), u uniform, up to the first rejection  `verify`
    resample   draw the rejected slot from norm(max(0, p - q)); this token is final too   `verify`
    draft      later slots use the tokens drawn from p as drafts; p is their next q       `verify`
               move the window; its new slots get guesses (`init`)                        `SJD.draft_window`

Verification up to the first rejection is algorithm 1 of Leviathan et al., arXiv 2211.17192.
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
    VerifiedWindow,
    draw_noise,
    guess_drafts,
    move_window,
    read_window,
)
from paradec.samplers.distributions import residual, select_slots


def verify(
    window: DraftWindow,
    has_draft: Tensor,
    acceptance: Tensor,
    uniform: Tensor,
    refresh: str = "resample",
    resample: bool = True,
) -> VerifiedWindow:
    """Verify a window of drafts, resample the first rejected draft, and redraw the slots after it.

    has_draft: [R, W] bool: slots with a draft; slots without one use the token sampled from p.
    acceptance: [R, W]: probability that a draft is accepted if all drafts before it are accepted (`accept`).
    uniform: [R, W, 2] in (0, 1): u, and the number that resamples a rejected draft.
    refresh: new drafts of the slots after the first rejection. "resample" and "gumbel" use the token sampled from p;
        "maximal" draws a token jointly with the old draft (`couple_maximally`); "keep" leaves draft and q unchanged.
    resample: whether a rejected draft is resampled; if not, the token sampled from p replaces it."""
    p, drafts, sampled = window.p, window.drafts, window.sampled
    slot = torch.arange(p.shape[1], device=p.device)
    accept = has_draft & (uniform[..., 0] < acceptance)  # u < min(1, p(x) / q(x))
    accepted = accept.long().cumprod(1).sum(1, keepdim=True)  # drafts before the first rejection
    rejected = has_draft & (slot == accepted)
    tokens = resampled = sampled
    if refresh == "maximal":
        tokens, resampled = couple_maximally(window, has_draft, uniform)
    elif resample:
        # max(0, p - q) at the rejected draft
        weights = residual(select_slots(p, accepted), drafts.distributions(accepted))
        resampled = draw(weights, uniform[..., 1].gather(1, accepted))  # from norm(max(0, p - q))
    tokens = torch.where(rejected, resampled if resample else sampled, tokens)
    unverified = has_draft & (slot > accepted) if refresh == "keep" else None
    unchanged = slot < accepted if unverified is None else (slot < accepted) | unverified
    return VerifiedWindow(torch.where(unchanged, drafts.tokens, tokens), accepted, unverified)


@dataclass(frozen=True)
class SJD(CausalSampler):
    """A draft x is accepted with probability min(1, p(x) / q(x)). The first rejected draft is resampled from
    norm(max(0, p - q)), and the slots after it are drawn again from p.

    Lossless: the output has the distribution of token-by-token decoding, also in batches and with every filter. The
    public code is lossless only for one row at temperature 1 without top-p. In a batch it verifies some tokens twice,
    the second time against an outdated q. It also applies temperature and top-p to the residual again.

    Args:
        window: slots evaluated at once: the next token and `window - 1` drafts. 1 is token-by-token decoding. None
            means 16, and for models of any order all undecided positions.
        init: guesses for slots that are new to the window. "random": uniform over the allowed tokens. "repeat_*": the
            token of the left neighbour ("horizontal") or of the upper one ("vertical", needs a grid). "sample_*": the
            likeliest token at that neighbour (not a draw). A neighbour that is new too is replaced by the nearest known
            token in the same direction, or by a random one. Tokens that the grid prescribes replace guesses.
            "model": the model's draws, only for models of any order. None: "model" for such models, else "random".
        refresh: drafts after the first rejection (see `verify`). "gumbel" draws a position with the same noise (one
            number for each token) in every step, so its token changes only if p changes enough.
        guess_distribution: q of random guesses: "uniform", or "one_hot" at the guess, as in the public code. Both are
            exact; "uniform" guesses are accepted more often.
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
    """Whether a rejected draft is resampled from norm(max(0, p - q)); if not, the sampled token replaces it."""
    guesses_from_text: ClassVar[bool] = False
    """Whether random guesses are drawn from the row's prompt and answer so far."""

    def accept(self, window: DraftWindow) -> Tensor:
        return window.ratio().clamp(max=1)  # min(1, p(x) / q(x))

    def verify(self, state: CausalState, proposal: Proposal) -> VerifiedWindow:
        window, has_draft = read_window(state, proposal)
        uniform = proposal.quantities["uniform"]
        return verify(window, has_draft, self.accept(window), uniform, self.refresh, self.resamples)

    def draft_window(self, state: CausalState, proposal: Proposal, verified: VerifiedWindow, count: Tensor) -> None:
        rows, guesses = proposal.rows, proposal.quantities.get("guesses")
        if state.guesses:
            draw_noise(state, rows, state.last_accepted[rows])
        is_drafted, tokens, source = move_window(state, proposal, verified, count)  # q is this step's p
        if guesses is not None:
            guesses = guesses.gather(1, count + torch.arange(state.width, device=count.device))
        self._write_drafts(state, rows, is_drafted, tokens, source, guesses)
        if self.branches is not None:
            self.branches.draft(state, rows, proposal.quantities)

    def open(self, state: CausalState, model: Any) -> None:
        draw_noise(state, state.rows, np.full(state.batch, state.width))
        drafts, source = state.memory["drafts"], state.memory["draft_source"]
        self._write_drafts(state, state.rows, torch.zeros_like(drafts, dtype=torch.bool), drafts, source)
        if self.branches is not None:
            self.branches.draft(state, state.rows, {})

    def guess(
        self, state: CausalState, rows: np.ndarray, num_known: Tensor, tokens: Tensor, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Guess tokens for slots that are new to the window: see `guess_drafts`."""
        settings = self.init, self.guess_distribution, self.guesses_from_text
        return guess_drafts(state, rows, num_known, tokens, uniform, *settings)

    def _write_drafts(
        self,
        state: CausalState,
        rows: np.ndarray,
        is_drafted: Tensor,
        tokens: Tensor,
        source: Tensor,
        guesses: Tensor | None = None,
    ) -> None:
        """Write the next window: tokens and their `source` where `is_drafted`, else guesses. All are [R, W]."""
        guess, guess_source = self.guess(state, rows, is_drafted.sum(1, keepdim=True), tokens, guesses)
        state.memory.write("drafts", rows, torch.where(is_drafted, tokens, guess))
        state.memory.write("draft_source", rows, torch.where(is_drafted, source, guess_source))
        if state.constraint is not None:
            state.constraint.draft_certain(state, rows)

    # ---- settings -------------------------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init is not None:
            check_choice("init", self.init, (*INITS, "model"))
        check_choice("refresh", self.refresh, REFRESHES)
        check_choice("guess_distribution", self.guess_distribution, GUESS_DISTRIBUTIONS)

    def check_model(self, model: Any) -> None:
        """As in the base class. Also raise ValueError for init="model" unless the model is of any order."""
        super().check_model(model)
        if self.init == "model" and not getattr(model, "any_order", False):
            raise ValueError(f"init='model' needs a model of any order; {model.facts.name} is not one")
        if self.branches is not None:
            self.branches.check_model(model)

    def check_request(self, model: Any, grid: Grid | None) -> None:
        if grid is None and str(self.init).endswith("vertical"):
            raise ValueError(f"init={self.init!r} needs a grid; text has no rows: use 'random' or a horizontal init")

    def memory(self) -> dict[str, MemorySpec]:
        specs = super().memory()
        if self.refresh == "gumbel":
            specs["noise"] = MemorySpec(("slot", "vocab"), None, reset="sequence")
        if str(self.init).startswith("sample"):
            specs["best"] = MemorySpec(("position",), torch.int64, -1, reset="sequence")
        return specs if self.branches is None else specs | self.branches.memory()


def couple_maximally(window: DraftWindow, has_draft: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """SCD's maximal coupling (arXiv 2510.24211): each slot keeps its draft with probability min(1, p / q), else it is
    resampled from the residual. Returns [R, W] int64: the tokens, and the resampled token of each slot."""
    resampled = draw(residual(window.p, window.drafts.distributions()), uniform[..., 1])
    tokens = torch.where(uniform[..., 0] < window.ratio(), window.drafts.tokens, resampled)
    return torch.where(has_draft, tokens, window.sampled), resampled

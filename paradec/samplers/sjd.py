"""Speculative Jacobi decoding: an autoregressive model verifies its own guesses of the next tokens, all at once.

Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi Decoding",
arXiv 2410.01699, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from paradec.checks import check_choice
from paradec.samplers.draft_verify import DraftVerifySampler

INITS = ("uniform", "repeat")


@dataclass(frozen=True)
class SJD(DraftVerifySampler):
    """A draft x stands with probability min(1, p(x) / q(x)), so that the output has the law of token-by-token decoding.

    The drafts are the last iteration's own draws: slots after the first fallen draft are drawn anew from this
    iteration's p, which is what they are judged against at the next one.

    Args:
        window: slots evaluated at once, the next token and `window - 1` drafts; 1 is token-by-token decoding.
        init: tokens that are new to the window: "uniform" over the vocabulary, with that law as q (the public code
            draws them so too but takes q as certain of the drawn token, which is also exact and accepts fewer);
            "repeat" copies the last known token, certain of it. Any of them leaves the output's law as it is.
    """

    init: str = "uniform"

    name = "sjd"
    paper = "SJD"
    arxiv = "2410.01699"
    summary = "a causal model judges a window of its own drafts in one forward; the output's law does not change"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("init", self.init, INITS)

    def accept(self, law: Tensor, draft_law: Tensor, drafts: Tensor) -> Tensor:
        p, q = (tensor.gather(-1, drafts.unsqueeze(-1)).squeeze(-1) for tensor in (law, draft_law))
        return (p / q).clamp(max=1)

    def draft(self, noise: Tensor, last: Tensor, vocab: int) -> tuple[Tensor, Tensor]:
        if self.init == "repeat":
            tokens = last.expand(noise.shape)
            return tokens, one_hot(tokens, vocab).double()
        tokens = (noise * vocab).long().clamp(max=vocab - 1)
        return tokens, torch.full((*noise.shape, vocab), 1 / vocab, dtype=torch.float64, device=noise.device)

"""Speculative Jacobi decoding: an autoregressive model verifies its own guesses of the next tokens, all at once.

Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi Decoding",
arXiv 2410.01699, section 3. The verification of the window is `paradec.samplers.causal.verification.verify`, the loop
around it `paradec.samplers.causal.chain`, and how drafts are renewed `paradec.samplers.causal.window`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradec.samplers.causal.verification import DraftWindow
from paradec.samplers.causal.window import JacobiSampler


@dataclass(frozen=True)
class SJD(JacobiSampler):
    """A draft x is accepted with probability min(1, p(x) / q(x)); the first rejected one is resampled from norm(max(0,
    p - q)), and the window after it is drawn again from p.

    Lossless: the output has the distribution of token-by-token decoding, in batches too and with every filter. The
    public code is lossless for one row at temperature 1 without top-p: in a batch it verifies tokens twice against an
    old q, and it applies temperature and top-p to the residual again.

    Args:
        window, init, refresh, guess_distribution: see `JacobiSampler` in `window.py`. The public code's random guesses
            are guess_distribution="one_hot".
    """

    name = "sjd"
    paper = "SJD"
    arxiv = "2410.01699"
    summary = "a causal model verifies a window of its own drafts in one forward; lossless"

    def accept(self, window: DraftWindow) -> Tensor:
        """min(1, p(x) / q(x))."""
        return window.ratio().clamp(max=1)

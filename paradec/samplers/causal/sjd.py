"""Speculative Jacobi decoding: an autoregressive model verifies its own guesses of the next tokens, all at once.

Teng et al., "Accelerating Auto-regressive Text-to-Image Generation with Training-free Speculative Jacobi Decoding",
arXiv 2410.01699, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.causal.base import JacobiSampler


@dataclass(frozen=True)
class SJD(JacobiSampler):
    """A draft x stands with probability min(1, p(x) / q(x)); behind the first that falls the window is drawn anew from
    p.

    Lossless: the output has the law of token-by-token decoding, in batches too and with every filter of the law. The
    public code is so for one row at temperature 1 without top-p: in a batch it judges tokens twice against an old q,
    and it runs temperature and top-p again over what is left of a fallen draft's law.

    Args:
        window, init, refresh, random_law: see `JacobiSampler` in `base.py`. The public code's random
            guesses are random_law="one_hot".
    """

    name = "sjd"
    paper = "SJD"
    arxiv = "2410.01699"
    summary = "a causal model judges a window of its own drafts in one forward; lossless"

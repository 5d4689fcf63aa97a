"""Stable and confident: when a canvas may close before its last step.

transformers' `StableAndConfidentStoppingCriteria` (DiffusionGemma).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paradec.core.checks import check_int, check_number


@dataclass(frozen=True)
class Settled:
    """A canvas closes once its best tokens have been unchanged for so many steps, and its mean entropy is below a
    bound.

    Args:
        stability: steps of the canvas, before this one, whose best tokens equal this step's; 0 asks for the entropy
            alone.
        entropy: the bound in nats, on the mean over the canvas of the distributions that tokens are drawn from. These
            are tempered: the same model settles earlier at a lower t_min.
    """

    stability: int = 1
    entropy: float = 0.005

    def __post_init__(self) -> None:
        check_int("stability_threshold", self.stability, low=0)
        check_number("confidence_threshold", self.entropy, low=0, open_low=True)

    def satisfied(self, unchanged: np.ndarray, entropy: np.ndarray) -> np.ndarray:
        """[R] bool: the rows whose canvas closes. unchanged: [R] int64, how many steps in a row, this one included, had
        the best tokens of the step before. entropy: [R] mean entropies of this step."""
        return (unchanged >= self.stability) & (entropy < self.entropy)

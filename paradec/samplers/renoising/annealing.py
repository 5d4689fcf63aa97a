"""The temperature of a step: it falls in equal parts from t_max."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Share = TypeVar("Share", float, Tensor)


def annealed(left: Share, t_min: float, t_max: float) -> Share:
    """The temperature where the share `left` of the steps, this one included, is to be done: t_max at the first step.
    t_min would be reached after the last."""
    return t_min + (t_max - t_min) * left

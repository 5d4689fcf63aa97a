"""The temperature of a step: it falls in equal parts from t_max."""

from __future__ import annotations


def annealed(left: float, t_min: float, t_max: float) -> float:
    """The temperature where the share `left` of the steps, this one included, is to be done: t_max at the first step.
    t_min would be reached after the last."""
    return t_min + (t_max - t_min) * left

"""Class labels, which requests for pictures by class begin from."""

from __future__ import annotations

from collections.abc import Sequence

from paradec.core.checks import check_int


def labels_of(prompt: Sequence[int] | int, last: int) -> list[int]:
    """Labels from 0 to `last`, one per picture.

    Raises:
        ValueError: none, or one out of its range.
    """
    labels = [prompt] if isinstance(prompt, int) else list(prompt)
    if not labels:
        raise ValueError("prompt is empty; give one class label at least")
    for label in labels:
        check_int("label", label, low=0, high=last)
    return labels

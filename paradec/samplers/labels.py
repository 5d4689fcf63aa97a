"""Class labels, which requests for pictures by class begin from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paradec.core.checks import check_int
from paradec.core.protocol import Sampler
from paradec.core.trace import Trace
from paradec.request import Request


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


def trace_of_labels(sampler: Sampler, request: Request, labels: list[int], size: int, **asked: Any) -> Trace | None:
    """What a request for pictures of `size` tokens is recorded in, if it asks for that; `asked` is what a trace has of
    it beside the sampler and the labels."""
    if not request.trace:
        return None
    return Trace([[None] * size for _ in labels], sampler.to_dict() | {"labels": labels} | asked, family=sampler.family)

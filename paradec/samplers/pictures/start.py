"""The start of a request for pictures: what its families share besides the start of all families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paradec.core.checks import check_int
from paradec.core.protocol import Sampler
from paradec.core.trace import Trace
from paradec.request import FIELDS, Request


def unsupported_for_pictures(*supported: str) -> tuple[str, ...]:
    """List the fields of a request that a family of samplers for pictures does not support; it does a few, and those
    `supported`."""
    common = ("sampler", "guidance_scale", "seed", "generator", "callback", "trace", "progress")
    return tuple(name for name in FIELDS if name not in (*common, *supported))


def labels_of(prompt: Sequence[int] | int, last: int) -> list[int]:
    """Labels from 0 to `last`, one per picture. Raises ValueError: none, or one out of its range."""
    labels = [prompt] if isinstance(prompt, int) else list(prompt)
    if not labels:
        raise ValueError("prompt is empty; give one class label at least")
    for label in labels:
        check_int("label", label, low=0, high=last)
    return labels


def trace_of_labels(sampler: Sampler, request: Request, labels: list[int], size: int, **settings: Any) -> Trace | None:
    """Make the trace of a request for pictures of `size` tokens; None where it asks for none."""
    if not request.trace:
        return None
    recorded = sampler.to_dict() | {"labels": labels} | settings
    return Trace([[None] * size for _ in labels], recorded, family=sampler.family)


def guidance_at(schedule: str, scale: float, count: Any, total: int) -> Any:
    """The guidance scale after `count`, a number or a tensor, of `total`: "linear" grows from 1 to `scale`; or
    "constant"."""
    return scale if schedule == "constant" else 1 + (scale - 1) * count / total

"""Functions for the start of a request for pictures, shared by the families of picture samplers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paradec.core.checks import check_int
from paradec.core.protocol import Sampler
from paradec.core.trace import Trace
from paradec.request import FIELDS, Request


def unsupported_for_pictures(*supported: str) -> tuple[str, ...]:
    """Return the names of all request fields that are neither common to picture samplers nor in `supported`."""
    common = ("sampler", "guidance_scale", "seed", "generator", "callback", "trace", "progress")
    return tuple(name for name in FIELDS if name not in (*common, *supported))


def check_labels(prompt: Sequence[int] | int, last: int) -> list[int]:
    """Return the labels as a list. Raises ValueError if there is no label, or a label that is not from 0 to `last`."""
    labels = [prompt] if isinstance(prompt, int) else list(prompt)
    if not labels:
        raise ValueError("prompt is empty; give at least one class label")
    for label in labels:
        check_int("label", label, low=0, high=last)
    return labels


def make_label_trace(sampler: Sampler, request: Request, labels: list[int], size: int, **settings: Any) -> Trace | None:
    """Make the trace of a request for pictures of `size` tokens; None if the request has no trace."""
    if not request.trace:
        return None
    recorded = sampler.to_dict() | {"labels": labels} | settings
    return Trace([[None] * size for _ in labels], recorded, family=sampler.family)


def scheduled_guidance(schedule: str, scale: float, count: Any, total: int) -> Any:
    """Return the guidance scale after `count` of `total` tokens or scales. `schedule` is "linear", which grows from 1
    to `scale`, or "constant". count: a number or a tensor."""
    return scale if schedule == "constant" else 1 + (scale - 1) * count / total

"""How a request begins: what the starts of several families share, beside the canvas that each lays out itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.checks import check_int
from paradec.core.protocol import Sampler
from paradec.core.trace import Trace
from paradec.request import FIELDS, Request
from paradec.samplers.masked.start import randomness


def unsupported_for_pictures(*supported: str) -> tuple[str, ...]:
    """List the fields of a request that a family of samplers for pictures does not support; it does a few, and those
    `supported`."""
    common = ("sampler", "guidance_scale", "seed", "generator", "callback", "trace", "progress")
    return tuple(name for name in FIELDS if name not in (*common, *supported))


def keys_of(
    request: Request, rows: list[list[int]], device: torch.device, before: Sequence[int] | None = None
) -> tuple[Tensor, list[int]]:
    """Random keys [B, 2] int64 of the rows, and the seeds [B] that they are made of.

    Args:
        before: how many equal rows come before each; None counts them among `rows`.
    """
    _, seeds = randomness(request, rows)
    return torch.as_tensor(rng.row_keys(seeds, rows, before), device=device), seeds


def padded(rows: list[list[int]], columns: int, fill: int) -> np.ndarray:
    """[B, columns] int64: the rows from column 0 on, and `fill` after them."""
    out = np.full((len(rows), columns), fill, np.int64)
    for row, ids in zip(out, rows, strict=True):
        row[: len(ids)] = ids
    return out


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

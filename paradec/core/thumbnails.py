"""Conversion of tensors to pillow images and data URIs, and previews for traces."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.trace import Notes, Trace

MAX_SIDE = 512
"""Pixels along the longer side of a final image."""
MAX_LATENT_SIDE = 64
"""Pixels along the longer side of a latent's preview."""
MAX_STEP_SIDE = 128
"""Pixels along the longer side of an image's preview after a step."""
MAX_ROWS = 8
"""Number of rows with a preview after each step."""
MAX_STEPS = 200
"""Number of steps with a preview of the latent."""
MAX_PNG_PIXELS = 2**16
"""Larger images are JPEGs."""
PREFIX = "data:image/"
RAMP = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Colours from dark blue to yellow, in even steps of brightness."""


def import_pillow() -> Any:
    """Import `PIL.Image`. Raises ImportError with advice."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(
            "pictures need pillow: pip install pillow (output_type='pt' gives tensors without it)"
        ) from error
    return Image


def to_pil(images: Tensor) -> list[Any]:
    """Convert [B, 1 or 3, H, W] float in [0, 1] to B PIL images, "L" or "RGB". Raises ImportError without pillow."""
    library = import_pillow()
    pixels = (images * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [library.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image) for image in pixels]


def to_uri(image: Any, side: int = MAX_SIDE) -> str:
    """Encode a PIL image, reduced to `side` pixels if larger: PNG if small, else JPEG."""
    if image.mode not in ("L", "RGB"):
        image = image.convert("RGB")
    if max(image.size) > side:
        image.thumbnail((side, side))
    kind = "png" if image.width * image.height <= MAX_PNG_PIXELS else "jpeg"
    data = io.BytesIO()
    image.save(data, format=kind, **({"optimize": True} if kind == "png" else {"quality": 85}))
    return f"{PREFIX}{kind};base64,{base64.b64encode(data.getvalue()).decode()}"


def from_uri(text: str) -> Any:
    """Decode a PIL image; None for other texts."""
    if not text.startswith(PREFIX):
        return None
    try:
        return import_pillow().open(io.BytesIO(base64.b64decode(text.partition(",")[2]))).convert("RGB")
    except (ValueError, OSError, SyntaxError):  # Pillow raises any of these for a broken file
        return None


def images_to_uris(images: Any) -> list[str] | None:
    """Encode PIL images or a tensor [B, C, H, W] in [0, 1]; None for anything else."""
    if isinstance(images, Tensor):
        if images.ndim != 4 or images.shape[1] not in (1, 3):
            return None
        images = to_pil(images)
    return [to_uri(image.copy()) for image in images]


def trace_from_steps(steps: Any, images: Any, sampler: Any) -> Trace:
    """Make a trace from final images and `steps` [B, h, w] int64, the step that decided each token (from 0; -1: none).
    In this trace, `forwarded` counts the tokens that a step decided."""
    rows, height, width = steps.shape
    flat = steps.reshape(rows, -1)
    trace = Trace([[None] * (height * width) for _ in range(rows)], sampler.to_dict(), family="masked")  # type: ignore[list-item]
    trace.grid, trace.cells = (height, width), [list(range(height * width)) for _ in range(rows)]
    trace.unit, trace.images = "tokens", images_to_uris(images)
    for index in range(int(flat.max(initial=-1)) + 1):
        commits = [(int(row), int(cell), 1, 1.0) for row, cell in np.argwhere(flat == index)]
        counts = np.bincount([row for row, *_ in commits], minlength=rows).tolist()
        trace.add(commits, counts, "full", Notes([1] * rows))
    return trace


def preview_images(images: Tensor) -> list[str]:
    """Encode the first `MAX_ROWS` images of [B, C, H, W] in [0, 1]."""
    return [to_uri(image, MAX_STEP_SIDE) for image in to_pil(images[:MAX_ROWS])]


def preview_latent(latent: Tensor, step: int) -> list[str] | None:
    """Encode the first `MAX_ROWS` rows of a latent [B, C, H, W], each scaled to its own range. The first three channels
    become colours; of fewer, the first becomes grey. None for other shapes, after `MAX_STEPS`, and without pillow."""
    try:
        library = import_pillow()
    except ImportError:
        return None
    if latent.ndim != 4 or step >= MAX_STEPS:
        return None
    rows = latent[:MAX_ROWS, : 3 if latent.shape[1] >= 3 else 1].float().cpu().numpy()
    uris = []
    for row in rows:
        low, high = float(row.min()), float(row.max())
        pixels = np.round((row - low) / max(high - low, 1e-12) * 255).astype(np.uint8).transpose(1, 2, 0)
        image = library.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels)
        uris.append(to_uri(image, MAX_LATENT_SIDE))
    return uris

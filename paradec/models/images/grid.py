"""The layout of an image's tokens in a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paradec.core.checks import check_int, short_repr


@dataclass(frozen=True)
class Grid:
    """The layout of all tokens after the prompt: `head`, then `height` rows of `width` image tokens, each followed by
    `row_end` unless None, then `tail`. Offsets count from the end of the prompt. Samplers choose only the image tokens.

    image_ids: ids of image tokens, in the order of the codebook: `image_ids[c]` is the id of code c.
    row_end: id after every row, or None. head, tail: ids before the first row and after the last.
    Raises ValueError for an argument out of its range."""

    height: int
    width: int
    image_ids: Sequence[int]
    row_end: int | None = None
    head: tuple[int, ...] = ()
    tail: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("height", "width"):
            check_int(name, getattr(self, name), low=1)
        check_int("row_end", self.row_end, low=0, none=True)
        object.__setattr__(
            self, "image_ids", self.image_ids if isinstance(self.image_ids, range) else tuple(self.image_ids)
        )
        if len(self.image_ids) == 0:
            raise ValueError("image_ids is empty; give the ids of the image tokens")
        for name in ("image_ids", "head", "tail"):
            ids = getattr(self, name)
            for entry in (min(ids), max(ids)) if isinstance(ids, range) else ids:
                check_int(name, entry, low=0)
        if len(set(self.image_ids)) != len(self.image_ids):
            raise ValueError(f"image_ids={short_repr(self.image_ids)} has an id twice")

    @property
    def stride(self) -> int:
        """Offset from an image token to the image token below it."""
        return self.width + (self.row_end is not None)

    @property
    def rasters(self) -> tuple[tuple[int, int, int], ...]:
        """Each raster as (offset of its first image token, rows, columns), in sequence order."""
        return ((len(self.head), self.height, self.width),)

    def line(self, offsets: Tensor) -> tuple[Any, Any]:
        """Strides of the rasters at `offsets` (int64 of any shape), and the offsets at which these rasters begin."""
        return self.stride, len(self.head)

    @property
    def length(self) -> int:
        return len(self.head) + self.height * self.stride + len(self.tail)

    @cached_property
    def layout(self) -> Tensor:
        """[length] int64: the fixed id at each offset; -1 for image tokens."""
        row = [-1] * self.width + ([] if self.row_end is None else [self.row_end])
        return torch.tensor([*self.head, *row * self.height, *self.tail])

    @cached_property
    def cell_offsets(self) -> Tensor:
        """[height * width] int64: offsets of the image tokens, in raster order."""
        return (self.layout < 0).nonzero().squeeze(1)

    def allowed(self, vocab_size: int) -> Tensor:
        """[vocab_size] bool: whether an id is an image token's. Raises ValueError for ids outside the vocabulary."""
        ids = [*self.image_ids, *self.head, *self.tail] + ([] if self.row_end is None else [self.row_end])
        if max(ids) >= vocab_size:
            raise ValueError(f"the grid holds id {max(ids)}, outside the vocabulary (0 to {vocab_size - 1})")
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[torch.tensor(self.image_ids)] = True
        return mask

    def codes(self, tokens: Tensor) -> Tensor:
        """Codebook indices [B, height, width] int64 of sequences [B, length]. Raises ValueError for ids that are not in
        `image_ids`."""
        image_ids = torch.tensor(self.image_ids, device=tokens.device)
        order = image_ids.argsort()
        cell_ids = tokens[:, self.cell_offsets.to(tokens.device)]
        index = torch.searchsorted(image_ids[order], cell_ids).clamp(max=len(image_ids) - 1)
        if (image_ids[order][index] != cell_ids).any():
            raise ValueError("an id in the image is not in the grid's image_ids")
        return order[index].unflatten(1, (self.height, self.width))


def pixels_to_codes(name: str, pixels: int | None, default: int, scale: int) -> int:
    """Number of codes along one side; `default` for None. Raises ValueError unless `scale` divides `pixels`."""
    check_int(name, pixels, low=1, none=True)
    if pixels is not None and pixels % scale:
        raise ValueError(f"{name}={short_repr(pixels)} must be a multiple of {scale}, the side of one token in pixels")
    return default if pixels is None else pixels // scale

"""Pictures as `paradec.generate_images` gives them: the output, PIL images, sheets of many, which step made what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from paradec.core.checks import check_int, count, per_forward
from paradec.core.thumbnails import RAMP, pillow
from paradec.core.trace import Trace
from paradec.models.images.grid import Grid

OUTPUT_TYPES = ("pil", "pt", "latent")
MOST_IMAGES = 100_000
"""Pictures that one prompt or class can become."""


@dataclass(repr=False)
class ImageOutput:
    """What `generate_images` returns. `B` pictures of `h` x `w` tokens, answers of `N` tokens (structure included).
    Models of continuous tokens (MAR) have no codes: `C'` numbers for each token instead."""

    images: Any
    """A list of B PIL images ("pil"), a float32 tensor [B, C, H, W] in [0, 1] ("pt"), or the codes again ("latent"; for
    continuous tokens [B, C', h, w]); None after an interrupt, when some picture is not whole."""
    codes: Tensor | None
    """[B, h, w] int64: indices into the codebook, row by row; None after an interrupt, and for continuous tokens."""
    tokens: Tensor
    """[B, N] int64: the answers as the model writes them; [B, N, C'] float where they are continuous."""
    grid: Grid
    row_nfe: list[int]
    """Forward calls that each row took part in."""
    row_forwards: int
    """Rows evaluated, all calls together (a guidance pair counts 2)."""
    forwarded_tokens: int
    """Positions evaluated, all rows together, padding excluded."""
    accepted: np.ndarray
    """[steps, B] int64: tokens that became final at each step of each row; 0 where a row had ended. From
    `generate_many` less those that were taken back."""
    seconds: float
    """Wall time of the decoding loop, without the VQ decoder."""
    prompt_lengths: list[int]
    trace: Trace | None = None
    draft_nfe: list[int] = field(default_factory=list)
    """Forward calls of the smaller model that drafted for each row, which `row_nfe` leaves out; 0 without one."""
    in_order: bool = True
    """Whether each row was written in order, so that `accepted` says which step made which token."""
    index: int | None = None
    """From `generate_many`: which prompt this is the picture of, from 0."""
    id: Any = None
    """From `generate_many`: what the caller named the prompt."""
    error: Exception | None = None
    """From `generate_many`: why there is no whole picture; the other fields hold what was decoded until then."""

    def __repr__(self) -> str:
        rows, size = len(self.row_nfe), f"{self.grid.height} x {self.grid.width}"
        what = "no pictures yet" if self.images is None else f"{count(rows, 'picture')} of {size} tokens"
        return (
            f"ImageOutput({what}: {count(self.nfe, 'forward')}, {self.tokens_per_forward:.2f} {per_forward(rows)}, "
            f"{self.seconds:.2f} s{', trace' * (self.trace is not None)})"
        )

    @property
    def prior_token_ids(self) -> Tensor:
        """[B, 4 h w] int64: what GlmImagePipeline takes, from GLM-Image's prior.

        Raises:
            ValueError: another model's pictures, or one that is not whole.
        """
        if not hasattr(self.grid, "prior_token_ids") or self.codes is None:
            raise ValueError("prior_token_ids: only whole pictures of GLM-Image's prior have them")
        return self.grid.prior_token_ids(self.tokens)

    @property
    def nfe(self) -> int:
        """Number of function evaluations: the forwards that the pictures took, of several rows those of the row with
        most."""
        return max(self.row_nfe)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per forward, of several rows per row call (`sum(row_nfe)`); after an interrupt, of those that were
        final."""
        tokens = self.tokens.shape[:2].numel()
        return min(tokens, int(self.accepted.sum())) / max(1, sum(self.row_nfe))

    @property
    def steps(self) -> np.ndarray:
        """[B, h, w] int64: the step, from 0, at which each image token became final; -1 where none did.

        Read from the trace where there is one, else from `accepted`, as if each row was written in order (the samplers
        of autoregressive models but `zipar` do).

        Raises:
            ValueError: tokens that are not written in order, without a trace.
        """
        if self.trace is None and self.tokens.ndim == 3:
            raise ValueError("continuous tokens are not written in order: make the pictures with trace=True")
        if self.trace is None and not self.in_order:
            raise ValueError("masked tokens are not written in order: make the pictures with generate_images")
        offsets = self.grid.cell_offsets.numpy()
        if self.trace is None:
            ends = self.accepted.cumsum(0)  # [steps, B]
            steps = np.stack([np.searchsorted(row, offsets, side="right") for row in ends.T])
            steps[steps == len(ends)] = -1
        else:
            written = np.full((len(self.prompt_lengths), max(self.prompt_lengths) + self.grid.length), -1)
            for index, step in enumerate(self.trace.steps):
                for row, position, _, _ in step.commits:
                    written[row, position] = index
            steps = np.stack([row[first + offsets] for row, first in zip(written, self.prompt_lengths)])
        return steps.reshape(-1, self.grid.height, self.grid.width)


def contact_sheet(images: Sequence[Any], columns: int | None = None, gap: int = 2, enlarge: int = 1) -> Any:
    """One PIL image with all of them, row by row on white.

    Args:
        images: PIL images of one size.
        columns: pictures in a row; by default about as many as rows.
        gap: pixels between them.
        enlarge: pixels that a pixel becomes, along each side.

    Raises:
        ValueError: no images, or an argument out of its range.
    """
    if not images:
        raise ValueError("images is empty; give at least one")
    columns = int(np.ceil(len(images) ** 0.5)) if columns is None else columns
    for name, value, low in (("columns", columns, 1), ("gap", gap, 0), ("enlarge", enlarge, 1)):
        check_int(name, value, low=low)
    library = pillow()
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    width, height = (side * enlarge for side in images[0].size)
    mode = images[0].mode
    size = (columns * (width + gap) - gap, rows * (height + gap) - gap)
    sheet = library.new(mode, size, 255 if mode == "L" else (255, 255, 255))
    for index, image in enumerate(images):
        place = (index % columns * (width + gap), index // columns * (height + gap))
        sheet.paste(image.resize((width, height), library.Resampling.NEAREST), place)
    return sheet


def step_pictures(output: ImageOutput | np.ndarray, pixels: int = 8) -> list[Any]:
    """For every picture, which step made which token final: dark first, yellow last, black what no step did.

    Tokens of one colour were committed together.

    Args:
        output: of `generate_images`, or steps as its `steps` has them: [B, h, w] int64.
        pixels: along the side of a token.

    Returns:
        B PIL images of [w * pixels, h * pixels].
    """
    check_int("pixels", pixels, low=1)
    library = pillow()
    steps = output if isinstance(output, np.ndarray) else output.steps
    last = max(1, int(steps.max()))
    share = np.clip(steps, 0, None)[..., None] / last * (len(RAMP) - 1)
    low = np.clip(share.astype(int), 0, len(RAMP) - 2)
    ramp = np.array(RAMP, float)
    colours = ramp[low[..., 0]] + (share - low) * (ramp[low[..., 0] + 1] - ramp[low[..., 0]])
    colours[steps < 0] = 0
    pictures = colours.round().astype(np.uint8).repeat(pixels, 1).repeat(pixels, 2)
    return [library.fromarray(picture) for picture in pictures]

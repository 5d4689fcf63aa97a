"""GLM-Image's prior (zai-org/GLM-Image, folder `vision_language_encoder`) on transformers' class. It makes a small
raster of codes, then a large raster. A DiT (not in this file) makes the picture from the codes of the large raster."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paradec.core.checks import check_int
from paradec.core.query import Query
from paradec.core.rows import ROWS
from paradec.models.images.base import ImageRequest, exact_prompts, request_rows
from paradec.models.images.grid import Grid, pixels_to_codes
from paradec.models.images.text_to_image import TextToImageModel, load_pretrained

SCALE = 32
"""Pixels along one side of a code of the large raster."""
PREVIEW = 16
"""Codes along one side of the small raster of a square picture."""


@dataclass(frozen=True)
class PreviewGrid(Grid):
    """A small raster of `preview` = (rows, columns), or none for (0, 0), then the large raster of `height` x `width`.
    `codes` returns codes of the large raster. Raises ValueError for a head, tail or row end."""

    preview: tuple[int, int] = field(default=(0, 0))

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in self.preview:
            check_int("preview", side, low=min(1, max(self.preview)))
        if self.head or self.tail or self.row_end is not None:
            raise ValueError("a grid with a preview has no head, tail or row_end; leave them out")

    @property
    def preview_length(self) -> int:
        return self.preview[0] * self.preview[1]

    @property
    def rasters(self) -> tuple[tuple[int, int, int], ...]:
        large = (self.preview_length, self.height, self.width)
        return ((0, *self.preview), large) if self.preview_length else (large,)

    def line(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        in_preview = offsets < self.preview_length
        stride, start = (torch.full_like(offsets, value) for value in (self.width, self.preview_length))
        return stride.masked_fill(in_preview, self.preview[1]), start.masked_fill(in_preview, 0)

    @property
    def length(self) -> int:
        return self.preview_length + self.height * self.width

    @cached_property
    def layout(self) -> Tensor:
        return torch.full((self.length,), -1)

    @cached_property
    def cell_offsets(self) -> Tensor:
        return torch.arange(self.preview_length, self.length)

    def prior_token_ids(self, tokens: Tensor) -> Tensor:
        """Sequences [B, length] -> GlmImagePipeline's ids [B, 4 * height * width] int64: each code repeated 2 x 2."""
        return self.codes(tokens).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


def token_positions(row: Sequence[int], sources: Sequence[tuple[int, int]], start: int, grid: Grid) -> Tensor:
    """[len(row) + grid.length, 3] int64: time, row and column of every token of a prompt and its answer.

    A text token at time p has (p, p, p). A picture that starts at time p has (p, p + i, p + j) at row i and column j,
    and the token after the picture has time p + max(rows, columns).

    row: ids of the prompt. sources: (rows, columns) of each picture in it. A picture follows an id `start`."""
    chunks, base, index, source_sizes = [], 0, 0, iter(sources)
    while index < len(row):
        chunks.append(torch.full((1, 3), base))
        base, index = base + 1, index + 1
        size = next(source_sizes, None) if row[index - 1] == start else None
        if size is not None:
            chunks.append(_raster(base, *size))
            base, index = base + max(size), index + size[0] * size[1]
    for _, height, width in grid.rasters:
        chunks.append(_raster(base, height, width))
        base += max(height, width)
    return torch.cat(chunks)


def _raster(base: int, height: int, width: int) -> Tensor:
    cell = torch.arange(height * width)
    return torch.stack((torch.full_like(cell, base), base + cell // width, base + cell % width), 1)


@dataclass(init=False, eq=False, repr=False)
class GlmImageModel(TextToImageModel):
    """The adapter of transformers' `GlmImageForConditionalGeneration`, without guidance. Its pictures are codes
    (`output_type="latent"`); GlmImagePipeline accepts `out.prior_token_ids`. An end token is never drawn.

    tokenizer: the checkpoint's processor (`GlmImageProcessor`); if None, prompts must be ids."""

    _token_positions: Tensor | None = field(default=None, metadata=ROWS)
    """[B, L, 3] int64: `token_positions` of a request's B rows of at most L tokens."""

    defaults = {"guidance_scale": 1.0, "top_k": None, "temperature": 0.9, "top_p": 0.75}

    def __init__(self, module: Any, tokenizer: Any = None, name: str | None = None):
        config = module.config
        super().__init__(module, config.text_config.vision_vocab_size, tokenizer, name)
        if config.vq_config.num_embeddings > self.facts.vocab_size:
            raise ValueError(
                f"the codebook has {config.vq_config.num_embeddings} entries; {self.facts.name} has "
                f"{self.facts.vocab_size} ids"
            )
        self.image_ids = range(config.vq_config.num_embeddings)
        self.start, self.end = config.image_start_token_id, config.image_end_token_id

    def grid(self, height: int | None = None, width: int | None = None) -> PreviewGrid:
        large = (pixels_to_codes("height", height, 36, SCALE), pixels_to_codes("width", width, 24, SCALE))
        ratio = large[0] / large[1]
        small = (int(math.sqrt(ratio) * PREVIEW), int(math.sqrt(1 / ratio) * PREVIEW))
        if not min(small):
            raise ValueError(
                f"height={height}, width={width} leaves no cell for the preview; one side may be at most {PREVIEW**2} "
                "times the other"
            )
        return self.make_grid(large, small)

    def make_grid(self, large: tuple[int, int], small: tuple[int, int] | None) -> PreviewGrid:
        return PreviewGrid(*large, self.image_ids, preview=small or (0, 0))

    def request(self, conditions: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        """Make a request. conditions: one or several captions, or rows of ids of prompts up to the picture's start."""
        self.refuse_negative_prompt(negative_prompt)
        rows = [row for row in self._rows("prompts", conditions, grid) for _ in range(num_images)]
        if any(self.end in row for row in rows):
            raise ValueError(
                "prompts hold pictures, whose rows and columns are unknown: to edit pictures, use the pipeline and "
                "paradec.accelerate(pipe, prior=...)"
            )
        return self.lay_out(rows, [()] * len(rows), grid)

    def lay_out(self, rows: list[list[int]], sources: Sequence[Sequence[tuple[int, int]]], grid: Grid) -> ImageRequest:
        """Build a request from rows of ids and, for each row, the (rows, columns) of its source pictures."""
        self._check_prompts(rows, grid)
        positions = [token_positions(row, sizes, self.start, grid) for row, sizes in zip(rows, sources, strict=True)]
        table = torch.nn.utils.rnn.pad_sequence(positions, batch_first=True).to(self.device)
        return ImageRequest(self._copy_with(_token_positions=table), exact_prompts(rows))

    def begin(self, sampler: Any, image_request: ImageRequest, grid: Grid, request: Any) -> Any:
        if request.guidance_scale != 1:
            raise ValueError(f"guidance_scale={request.guidance_scale} must be 1; guide the DiT, not {self.facts.name}")
        return super().begin(sampler, image_request, grid, request)

    def check_decodes(self) -> None:
        raise ValueError(
            f"{self.facts.name} makes codes, and a DiT draws the picture: request output_type='latent', and "
            "give out.prior_token_ids to GlmImagePipeline; or call paradec.accelerate(pipe, prior=...)"
        )

    # ---- prompts from the pipeline's processor ----------------------------------------------------------------------

    def insert_codes(self, ids: Tensor, grids: Tensor, counts: Tensor | None, pixels: Tensor | None) -> Tensor:
        """Replace the image placeholders in ids [B, L] by the codes of the source pictures.

        grids: [G, 3] int64: time, rows and columns of each of G source and target pictures, in the order of the batch.
        counts: [B] int64: each row's number of pictures; None for one row. pixels: the sources' pixels, or None."""
        if pixels is None:
            return ids
        model = self.module.model
        sizes = model.get_image_grids_for_generation(counts, grids)
        with torch.no_grad():
            features = model.get_image_features(pixels, sizes, return_dict=True).pooler_output
            codes = model.get_image_tokens(features)
        return ids.masked_scatter(ids == self.module.config.image_token_id, codes.flatten().to(ids))

    def read_grids(
        self, rows: list[list[int]], grids: Tensor, counts: Tensor | None
    ) -> tuple[PreviewGrid, list[list[tuple[int, int]]]]:
        """Return the grid of all rows' targets, and the sizes of each row's source pictures; arguments as in
        `insert_codes`. Raises ValueError if rows have different targets."""
        sizes = [(int(height), int(width)) for _, height, width in grids.tolist()]
        per_row = [len(sizes)] if counts is None else counts.tolist()
        target_sets, sources, start = set(), [], 0
        for row, count in zip(rows, per_row, strict=True):
            num_sources = row.count(self.end)
            sources.append(sizes[start : start + num_sources])
            target_sets.add(tuple(sizes[start + num_sources : start + count]))
            start += count
        targets = next(iter(target_sets))
        if len(target_sets) != 1 or not 1 <= len(targets) <= 2:
            raise ValueError(f"image_grid_thw={grids.tolist()} has targets of several sizes; request them one by one")
        return self.make_grid(targets[0], targets[1] if len(targets) == 2 else None), sources

    # ---- the network ----------------------------------------------------------------------------------------------

    def _prompt(self, text: str, grid: Grid) -> list[int]:
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        prompt = self.tokenizer.apply_chat_template([message], tokenize=False)
        input_ids = self.tokenizer(text=prompt, target_h=grid.height * SCALE, target_w=grid.width * SCALE)["input_ids"]
        return list(input_ids[0])

    def _positions(self, query: Query) -> Tensor:
        """[3, R, Q] int64: the positions of a call's columns."""
        if (table := self._token_positions) is None:
            raise ValueError(f"{self.facts.name} needs a request's token positions: call the model of request()")
        table = table[request_rows(query, len(table)).to(table.device)]
        index = query.positions.clamp(0, table.shape[1] - 1)
        return table.gather(1, index.unsqueeze(-1).expand(-1, -1, 3)).permute(2, 0, 1)


def load_glm_image(
    source: str | os.PathLike[str], *, dtype: Any = None, device: Any = None, revision: str | None = None
) -> GlmImageModel:
    """Read GLM-Image's prior from a folder or hub repository, or from the pipeline's `vision_language_encoder`. A
    processor in that folder, or in `processor` next to it, is read too. Raises CheckpointError for wrong files."""
    module, _ = load_pretrained(source, "GlmImageForConditionalGeneration", dtype, revision)
    processor, path = None, os.fspath(source)
    for folder in (path, os.path.join(path, os.pardir, "processor")):
        if os.path.isfile(os.path.join(folder, "processor_config.json")):
            from transformers import AutoProcessor

            processor = AutoProcessor.from_pretrained(folder)  # a tokenizer would not add the picture's size to prompts
            break
    return GlmImageModel(module if device is None else module.to(device), processor)

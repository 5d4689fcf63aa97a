"""GLM-Image's prior (zai-org/GLM-Image, folder `vision_language_encoder`) on transformers' class: a small raster of
codes, then the large one, which a DiT draws."""

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
from paradec.models.images.text_to_image import TextToImageModel, pretrained

SCALE = 32
"""Pixels along one side of a code of the large raster."""
PREVIEW = 16
"""Codes along one side of the small raster, where it is a square."""


@dataclass(frozen=True)
class PreviewGrid(Grid):
    """A small raster of `preview` rows and columns, then the large one of `height` and `width`. `codes` and `steps` are
    the large one's.

    Args:
        preview: rows and columns of the small raster; (0, 0) has none.

    Raises:
        ValueError: an argument out of its range, or tokens beside the rasters.
    """

    preview: tuple[int, int] = field(default=(0, 0))

    def __post_init__(self) -> None:
        super().__post_init__()
        for side in self.preview:
            check_int("preview", side, low=min(1, max(self.preview)))
        if self.head or self.tail or self.row_end is not None:
            raise ValueError("a grid with a preview has nothing beside its rasters; leave head, tail and row_end out")

    @property
    def before(self) -> int:
        """Tokens of the small raster."""
        return self.preview[0] * self.preview[1]

    @property
    def rasters(self) -> tuple[tuple[int, int, int], ...]:
        large = (self.before, self.height, self.width)
        return ((0, *self.preview), large) if self.before else (large,)

    def line(self, offsets: Tensor) -> tuple[Tensor, Tensor]:
        small = offsets < self.before
        stride, first = (torch.full_like(offsets, value) for value in (self.width, self.before))
        return stride.masked_fill(small, self.preview[1]), first.masked_fill(small, 0)

    @property
    def length(self) -> int:
        return self.before + self.height * self.width

    @cached_property
    def layout(self) -> Tensor:
        return torch.full((self.length,), -1)

    @cached_property
    def cell_offsets(self) -> Tensor:
        return torch.arange(self.before, self.length)

    def prior_token_ids(self, tokens: Tensor) -> Tensor:
        """GlmImagePipeline's ids of sequences [B, length]: [B, 4 height width] int64, every code twice along both
        sides."""
        return self.codes(tokens).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1)


def places(row: Sequence[int], sources: Sequence[tuple[int, int]], start: int, grid: Grid) -> Tensor:
    """[len(row) + grid.length, 3] int64: time, row and column of every token of a prompt and its answer.

    A text's token has one number three times; a picture whose first cell has the number p has (p, p + i, p + j) at row
    i and column j; what follows begins at p + max(rows, columns).

    Args:
        row: ids of the prompt, with a picture of each of `sources` (rows, columns) after an id `start`.
    """
    found, base, at, given = [], 0, 0, iter(sources)
    while at < len(row):
        found.append(torch.full((1, 3), base))
        base, at = base + 1, at + 1
        size = next(given, None) if row[at - 1] == start else None
        if size is not None:
            found.append(_raster(base, *size))
            base, at = base + max(size), at + size[0] * size[1]
    for _, height, width in grid.rasters:
        found.append(_raster(base, height, width))
        base += max(height, width)
    return torch.cat(found)


def _raster(base: int, height: int, width: int) -> Tensor:
    """[height * width, 3] int64: places of a picture's cells."""
    cell = torch.arange(height * width)
    return torch.stack((torch.full_like(cell, base), base + cell // width, base + cell % width), 1)


@dataclass(init=False, eq=False, repr=False)
class GlmImageModel(TextToImageModel):
    """The adapter of transformers' `GlmImageForConditionalGeneration`.

    Its pictures are codes alone (`output_type="latent"`); `out.prior_token_ids` is what GlmImagePipeline takes. Only
    codes are drawn, never an end token. There is no guidance. The adapter gives positions, and leaves the module's
    table alone.

    Args:
        tokenizer: the checkpoint's processor (`GlmImageProcessor`); None takes prompts as ids alone.

    Raises:
        ValueError: a codebook larger than what the output names.
    """

    _places: Tensor | None = field(default=None, metadata=ROWS)
    """[B, L, 3] int64 of a request's rows."""

    defaults = {"guidance_scale": 1.0, "top_k": None, "temperature": 0.9, "top_p": 0.75}

    def __init__(self, module: Any, tokenizer: Any = None, name: str | None = None):
        config = module.config
        super().__init__(module, config.text_config.vision_vocab_size, tokenizer, name)
        if config.vq_config.num_embeddings > self.facts.vocab_size:
            raise ValueError(
                f"the codebook has {config.vq_config.num_embeddings} entries; {self.facts.name} names "
                f"{self.facts.vocab_size} ids"
            )
        self.cells = range(config.vq_config.num_embeddings)
        self.start, self.end = config.image_start_token_id, config.image_end_token_id

    def grid(self, height: int | None = None, width: int | None = None) -> PreviewGrid:
        large = (pixels_to_codes("height", height, 36, SCALE), pixels_to_codes("width", width, 24, SCALE))
        ratio = large[0] / large[1]
        small = (int(math.sqrt(ratio) * PREVIEW), int(math.sqrt(1 / ratio) * PREVIEW))
        if not min(small):
            raise ValueError(
                f"height={height}, width={width} leaves the preview no cell; one side may be {PREVIEW**2} times the "
                "other at most"
            )
        return self.grid_of(large, small)

    def grid_of(self, large: tuple[int, int], small: tuple[int, int] | None) -> PreviewGrid:
        """The grid of rasters with these rows and columns; `small` is None for an edit."""
        return PreviewGrid(*large, self.cells, preview=small or (0, 0))

    def request(self, given: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        """`given`: captions, one or several; or rows of ids, then of whole prompts: up to the start of the picture."""
        self.no_negative_prompt(negative_prompt)
        rows = [row for row in self._rows("prompts", given, grid) for _ in range(num_images)]
        if any(self.end in row for row in rows):
            raise ValueError(
                "prompts hold pictures, whose rows and columns ids do not tell: edit with the pipeline, "
                "paradec.accelerate(pipe, prior=...)"
            )
        return self.laid(rows, [()] * len(rows), grid)

    def laid(self, rows: list[list[int]], sources: Sequence[Sequence[tuple[int, int]]], grid: Grid) -> ImageRequest:
        """One request: rows of ids, and for each the rows and columns of the pictures in it."""
        longest = max(map(len, rows)) + grid.length
        most = self.facts.max_length
        if most is not None and longest > most:
            raise ValueError(
                f"a prompt and its picture have {longest} tokens, more than {self.facts.name} takes ({most}); "
                "shorten the prompt, or give a smaller height or width"
            )
        found = [places(row, sizes, self.start, grid) for row, sizes in zip(rows, sources, strict=True)]
        table = torch.nn.utils.rnn.pad_sequence(found, batch_first=True).to(self.device)
        return ImageRequest(self._bound(_places=table), exact_prompts(rows))

    def begin(self, sampler: Any, laid: ImageRequest, grid: Grid, request: Any) -> Any:
        if request.guidance_scale != 1:
            raise ValueError(f"guidance_scale={request.guidance_scale}: {self.facts.name} is not guided; guide the DiT")
        return super().begin(sampler, laid, grid, request)

    def check_decodes(self) -> None:
        raise ValueError(
            f"{self.facts.name} makes codes, and a DiT draws the picture: give output_type='latent', and "
            "out.prior_token_ids to GlmImagePipeline; or attach to it with paradec.accelerate(pipe, prior=...)"
        )

    # ---- what the pipeline's processor makes of prompts -------------------------------------------------------------

    def codes_in(self, ids: Tensor, grids: Tensor, counts: Tensor | None, pixels: Tensor | None) -> Tensor:
        """Ids [B, L] with the codes of source pictures in the places that the processor left for them.

        Args:
            grids: [G, 3] int64: time, rows and columns of every source and target, row by row of the batch.
            counts: [B] int64: how many of them each row has; None for one row. pixels: of the sources, from the
                processor, or None.
        """
        if pixels is None:
            return ids
        own = self.module.model
        sizes = own.get_image_grids_for_generation(counts, grids)
        with torch.no_grad():
            features = own.get_image_features(pixels, sizes, return_dict=True).pooler_output
            codes = own.get_image_tokens(features)
        return ids.masked_scatter(ids == self.module.config.image_token_id, codes.flatten().to(ids))

    def grids(
        self, rows: list[list[int]], grids: Tensor, counts: Tensor | None
    ) -> tuple[PreviewGrid, list[list[tuple[int, int]]]]:
        """The grid of all rows, and each row's source pictures, as in `codes_in`. Raises ValueError for unlike
        targets."""
        sizes = [(int(height), int(width)) for _, height, width in grids.tolist()]
        per_row = [len(sizes)] if counts is None else counts.tolist()
        found, sources, at = set(), [], 0
        for row, count in zip(rows, per_row, strict=True):
            given = row.count(self.end)
            sources.append(sizes[at : at + given])
            found.add(tuple(sizes[at + given : at + count]))
            at += count
        targets = next(iter(found))
        if len(found) != 1 or not 1 <= len(targets) <= 2:
            raise ValueError(f"image_grid_thw={grids.tolist()} asks for unlike pictures; give them one by one")
        return self.grid_of(targets[0], targets[1] if len(targets) == 2 else None), sources

    @property
    def _table(self) -> Tensor:
        if self._places is None:
            raise ValueError(f"{self.facts.name} places its tokens by request: call the model that request() gives")
        return self._places

    # ---- the network ----------------------------------------------------------------------------------------------

    def _prompt(self, text: str, grid: Grid) -> list[int]:
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        laid = self.tokenizer.apply_chat_template([message], tokenize=False)
        found = self.tokenizer(text=laid, target_h=grid.height * SCALE, target_w=grid.width * SCALE)["input_ids"]
        return list(found[0])

    @property
    def _language_model(self) -> Any:
        return self.module.model.language_model

    def _positions(self, query: Query) -> Tensor:
        """[3, R, Q] int64: the places of a call's columns."""
        table = self._table
        table = table[request_rows(query, len(table)).to(table.device)]
        at = query.positions.clamp(0, table.shape[1] - 1)
        return table.gather(1, at.unsqueeze(-1).expand(-1, -1, 3)).permute(2, 0, 1)


def load_glm_image(
    source: str | os.PathLike[str], *, dtype: Any = None, device: Any = None, revision: str | None = None
) -> GlmImageModel:
    """Read GLM-Image's prior from a folder or hub repository, or from the pipeline's `vision_language_encoder`. Its
    processor is read from there, or from `processor` beside it; without one prompts are ids. Raises CheckpointError."""
    module, _ = pretrained(source, "GlmImageForConditionalGeneration", dtype, revision)
    processor, here = None, os.fspath(source)
    for place in (here, os.path.join(here, os.pardir, "processor")):
        if os.path.isfile(os.path.join(place, "processor_config.json")):
            from transformers import AutoProcessor

            processor = AutoProcessor.from_pretrained(place)  # a tokenizer by itself does not write sizes
            break
    return GlmImageModel(module if device is None else module.to(device), processor)

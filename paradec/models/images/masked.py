"""The adapter of masked image models: a class token, then all codes of a picture, of which the undecided are masked.

Chang et al., "MaskGIT: Masked Generative Image Transformer", arXiv 2202.04200. Such a model decodes by everything that
decodes masked text; `paradec.generate_images` is the function that takes classes and gives pictures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import shown
from paradec.core.registry import unknown
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.adapter import labels_of, pixels_to_codes
from paradec.models.images.base import ImageRequest, PictureModel, Reading, tokens_of
from paradec.models.images.grid import Grid
from paradec.models.images.uvit import UViT, UViTModel, load_uvit
from paradec.models.images.vq import VQModel, load_vq

DEFAULTS = {"steps": None, "guidance_scale": 1.0, "temperature": 1.0, "top_k": None, "top_p": None}


class MaskedImageModel(PictureModel, UViTModel):
    """Prompts are one class token; answers are all codes of a picture, as one block. Guidance masks the class token.

    Args:
        module: the network. Its last class is none of the others.
        vq: its VQ autoencoder; None gives codes alone.
        defaults: what requests are given that do not say otherwise: `steps`, `guidance_scale`, `temperature`, `top_k`,
            `top_p`.
        name: what messages call it.

    Raises:
        ValueError: another codebook than the network's, or an unknown default.
    """

    makes = "masked image"
    family = "masked"
    default_sampler = "maskgit"

    def __init__(
        self,
        module: UViT,
        vq: VQModel | None = None,
        defaults: Mapping[str, Any] | None = None,
        name: str | None = None,
    ):
        super().__init__(module)
        self.facts = self.facts if name is None else replace(self.facts, name=name)
        if vq is not None and vq.config.codebook_size != module.codebook_size:
            raise ValueError(
                f"the codebook has {vq.config.codebook_size} entries; {self.facts.name} writes {module.codebook_size} "
                "codes"
            )
        for key in defaults or ():
            if key not in DEFAULTS:
                raise ValueError(unknown("default of requests", key, DEFAULTS))
        self.vq, self.defaults = vq, DEFAULTS | dict(defaults or {})

    def prompts(self, class_labels: Any, num_images: int = 1) -> list[list[int]]:
        """Input ids: `num_images` rows of one class token for every label, copies side by side.

        Raises:
            ValueError: no such class. TypeError: no integers.
        """
        labels = labels_of(class_labels, self.module.classes - 1)
        return [[self.class_token(label)] for label in labels for _ in range(num_images)]

    def defaults_with(self, sampler: Any) -> dict[str, Any]:
        """As for all; and the cache of samplers that choose a group's targets in a full step, which evaluates those."""
        return super().defaults_with(sampler) | ({"cache": "recap"} if hasattr(sampler, "targets") else {})

    def request(self, given: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        """`given`: class labels, an int or several."""
        self.no_negative_prompt(negative_prompt)
        return ImageRequest(self, self.prompts(given, num_images))

    def begin(self, sampler: Any, laid: ImageRequest, grid: Grid, request: Any) -> Any:
        """The state of one request for all codes of a picture, with a trace: they are not written in order."""
        own = {"max_new_tokens": grid.length, "suppress_tokens": self.suppressed, "trace": True}
        return sampler.start(laid.model, laid.prompts, replace(request, **own))

    def read(self, state: Any, grid: Grid) -> Reading:
        tokens = tokens_of(state, grid)
        steps = [] if state.trace is None else state.trace.steps
        accepted = np.zeros((len(steps), state.batch), np.int64)
        for index, step in enumerate(steps):
            rows = [row for row, _, token, _ in step.commits if token != self.facts.mask_token_id]
            accepted[index] = np.bincount(rows, minlength=state.batch)
        whole = not tokens.eq(self.facts.mask_id).any()
        return Reading(tokens, whole, accepted, state.prompt_length.tolist(), [0] * state.batch)

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Ids that are no codes."""
        return tuple(range(self.module.codebook_size, self.facts.vocab_size))

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        """The raster of a picture.

        Raises:
            ValueError: another size in pixels than the model's.
        """
        side, scale = self.module.size, 16 if self.vq is None else self.vq.config.scale
        for name, pixels in (("height", height), ("width", width)):
            if pixels_to_codes(name, pixels, side, scale) != side:
                raise ValueError(f"{name}={shown(pixels)} must be {side * scale}, the model's only size")
        return Grid(side, side, range(self.module.codebook_size))

    def check_decodes(self) -> None:
        """Raise ValueError where there is nothing to make pixels with."""
        if self.vq is None:
            raise ValueError(f"{self.facts.name} has no VQ decoder; load it with vq=..., or take output_type='latent'")

    def decode(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Tokens of whole answers [B, grid.length] -> images [B, C, H, W] float32 in [0, 1]."""
        self.check_decodes()
        assert self.vq is not None
        with torch.no_grad():
            images = self.vq.decode(grid.codes(tokens.to(self.device)))
        return (images.float() / 2 + 0.5).clamp(0, 1)


def load_masked_image(
    source: str | os.PathLike[str],
    *,
    vq: str | os.PathLike[str] | VQModel | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> MaskedImageModel:
    """Read a folder.

    Args:
        source: holds `config.json` ("heads"; if there are such, "vq", the file of the VQ beside it, and "defaults" of
            requests) and `model.safetensors`, with the names of MaskGIT-r's checkpoints. Those are single files, which
            `paradec.models.images.uvit.load_uvit` reads.
        vq: the VQ autoencoder, or its file, where the folder names none.
        dtype: of the network's parameters; float32 by default, whatever the file's.

    Raises:
        CheckpointError: files that are missing or do not fit.
    """
    path = Path(source)
    try:
        fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
        heads = fields["heads"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"config.json of {str(path)!r} is not a masked image model's: {error}") from error
    named = path / str(fields.get("vq", "vq.safetensors"))
    if vq is None and named.is_file():
        vq = named
    if not isinstance(vq, (VQModel, type(None))):
        vq = load_vq(vq)
    try:
        module = load_uvit(path / "model.safetensors", heads).module.to(dtype or torch.float32)
        if device is not None:
            module, vq = module.to(device), None if vq is None else vq.to(device)
        vq = None if vq is None else vq.eval().requires_grad_(False)
        return MaskedImageModel(module.requires_grad_(False), vq, fields.get("defaults"), path.name)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{str(path)!r} is not a masked image model: {error}") from error

"""Anole (Chern et al., arXiv 2407.06135) and Lumina-mGPT (Liu et al., arXiv 2408.02657): image models with the network
of Chameleon (arXiv 2405.09818), on transformers' class.

The class suppresses image tokens in its forward, so the adapter calls its parts. Its VQ has no decoder:
`paradec.models.images.vq` reads Chameleon's `vqgan.ckpt`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paradec.core.checks import check_choice
from paradec.models.images.grid import Grid, pixels_to_codes
from paradec.models.images.text_to_image import TextToImageModel, load_pretrained, order_ids
from paradec.models.images.vq import VQModel, check_codebook, load_vq


@dataclass(frozen=True)
class ChameleonLayout:
    """A family's token layout of pictures.

    start, end: ids around a picture. row_end: id after every row, or None.
    side: image tokens along one side by default.
    turn_end: id between a caption and its picture, or None. end_of_text: id after the end of the picture, or None.
    first_size: after `start`, ids first_size + height and first_size + width state the size in units of 32 pixels; None
        allows only the default square.
    guidance_scale, top_k: the authors' settings.
    instruction: the text before a caption; `{width}` and `{height}` are pixels."""

    start: int
    end: int
    side: int
    row_end: int | None = None
    turn_end: int | None = None
    end_of_text: int | None = None
    first_size: int | None = None
    guidance_scale: float = 3.0
    top_k: int | None = 2000
    instruction: str = ""


ANOLE = ChameleonLayout(start=8197, end=8196, side=32, turn_end=8710, guidance_scale=7.0)
LUMINA_MGPT = ChameleonLayout(
    start=8197,
    end=8196,
    side=48,
    row_end=8803,
    turn_end=8710,
    end_of_text=8710,
    first_size=8804,
    instruction="Generate an image of {width}x{height} according to the following prompt:\n",
)
LAYOUTS = {"anole": ANOLE, "lumina-mgpt": LUMINA_MGPT}
PIXELS_PER_SIZE = 32


class ChameleonModel(TextToImageModel):
    """The adapter of transformers' `ChameleonForConditionalGeneration`. A prompt is a caption and `opening`; the
    guidance branch's prompt is only `opening`. Raises ValueError for a wrong codebook or vocabulary.

    layout: `ANOLE`, `LUMINA_MGPT`, or a custom layout.
    vq: the VQ autoencoder with its decoder; None makes only tokens. tokenizer: if None, prompts must be ids."""

    def __init__(
        self,
        module: Any,
        layout: ChameleonLayout = ANOLE,
        vq: VQModel | None = None,
        tokenizer: Any = None,
        name: str | None = None,
    ):
        super().__init__(module, module.config.vocab_size, tokenizer, name)
        size = module.config.vq_config.num_embeddings
        check_codebook(vq, size, self.facts.name)
        self.layout, self.vq = layout, vq
        self.image_ids = order_ids(module.model.vocabulary_mapping.img2bpe, size, "vocabulary_map")
        self.scale = self.scale if vq is None else vq.config.scale
        self.defaults = {**self.defaults, "guidance_scale": layout.guidance_scale, "top_k": layout.top_k}

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        layout, sides = self.layout, []
        for name, value in (("height", height), ("width", width)):
            side = pixels_to_codes(name, value, layout.side, self.scale)
            if layout.first_size is None and side != layout.side:
                pixels = layout.side * self.scale
                raise ValueError(f"{name}={value} must be {pixels}: {self.facts.name} makes {pixels} x {pixels} pixels")
            if layout.first_size is not None and side * self.scale % PIXELS_PER_SIZE:
                raise ValueError(f"{name}={value} must be a multiple of {PIXELS_PER_SIZE}, the unit of sizes")
            sides.append(side)
        tail = (layout.end,) if layout.end_of_text is None else (layout.end, layout.end_of_text)
        rows, columns = sides
        return self._check_length(Grid(rows, columns, self.image_ids, row_end=layout.row_end, tail=tail), self.scale)

    def opening(self, grid: Grid) -> list[int]:
        """The ids between a caption and the picture's first token: the start token, and the size if the layout states
        one."""
        layout = self.layout
        if layout.first_size is None:
            return [layout.start]
        sizes = (side * self.scale // PIXELS_PER_SIZE for side in (grid.height, grid.width))
        return [layout.start, *(layout.first_size + size for size in sizes)]

    def _prompt(self, text: str, grid: Grid) -> list[int]:
        height, width = grid.height * self.scale, grid.width * self.scale
        text = self.layout.instruction.format(height=height, width=width) + text
        ids = self.tokenizer(text)["input_ids"]
        turn_end = [] if self.layout.turn_end is None else [self.layout.turn_end]
        return [*ids, *turn_end, *self.opening(grid)]

    def _unconditional(self, prompt: list[int], grid: Grid) -> list[int]:
        return self.opening(grid)

    @property
    def _language_model(self) -> Any:
        return self.module.model

    def codebook(self) -> Tensor | None:
        return super().codebook() if self.vq is None else self._codes_of_ids(self.vq.quantize.codes, self.image_ids)

    def check_decodes(self) -> None:
        if self.vq is None:
            raise ValueError(
                f"{self.facts.name} was made without a VQ decoder, which transformers' Chameleon does not have; give "
                "vq= (Chameleon's vqgan.ckpt), or request output_type='latent'"
            )


def load_chameleon(
    source: str | os.PathLike[str],
    *,
    layout: str | ChameleonLayout | None = None,
    vq: str | os.PathLike[str] | VQModel | None = None,
    dtype: Any = None,
    device: Any = None,
    revision: str | None = None,
) -> ChameleonModel:
    """Read an Anole or a Lumina-mGPT from a folder or hub repository in transformers' format. Raises CheckpointError
    for another checkpoint, ValueError for an unknown layout.

    layout: "anole", "lumina-mgpt" or a custom one; None chooses by the source's name.
    vq: the VQ autoencoder, or Chameleon's `vqgan.ckpt`."""
    if layout is None:
        layout = "lumina-mgpt" if "lumina" in os.path.basename(os.fspath(source)).lower() else "anole"
    if isinstance(layout, str):
        check_choice("layout", layout, LAYOUTS)
        layout = LAYOUTS[layout]
    if not isinstance(vq, (VQModel, type(None))):
        vq = load_vq(vq, "chameleon")
    # the encoder is never used, the codebook only without `vq`
    unused_weights = r"model\.vqmodel\.(?!quantize\.)" if vq is None else r"model\.vqmodel\."
    module, tokenizer = load_pretrained(source, "ChameleonForConditionalGeneration", dtype, revision, unused_weights)
    if device is not None:
        module, vq = module.to(device), None if vq is None else vq.to(device)
    return ChameleonModel(module, layout, vq, tokenizer)

"""Emu3 (Wang et al., arXiv 2409.18869) on transformers' class: text and picture share a vocabulary, and a token ends
every row of the picture. Checkpoints: BAAI/Emu3-Gen-hf."""

from __future__ import annotations

import os
from typing import Any

from paradec.models.images.grid import Grid, pixels_to_codes
from paradec.models.images.text_to_image import TextToImageModel, load_pretrained, order_ids

DEFAULT_SIDE = 90
"""Tokens along one side of a picture of 720 x 720 pixels."""


class Emu3Model(TextToImageModel):
    """The adapter of transformers' `Emu3ForConditionalGeneration`. A prompt is a caption and the picture's size in
    tokens. The guidance branch's caption is the negative prompt, by default empty. The end tokens of frame, image and
    text follow the last row. Without a tokenizer, prompts must be ids. Raises ValueError for a vocabulary that lacks a
    token."""

    defaults = {"guidance_scale": 3.0, "top_k": 2048, "temperature": 1.0, "top_p": None}

    def __init__(self, module: Any, tokenizer: Any = None, name: str | None = None):
        super().__init__(module, module.config.get_text_config().vocab_size, tokenizer, name)
        self.vq, size = module.model.vqmodel, module.config.vq_config.codebook_size
        self.image_ids = order_ids(module.vocabulary_mapping.img2bpe, size, "vocabulary_map")
        self.row_end = self._token("<|extra_200|>")
        eos = self.text_config.eos_token_id
        eos = next(iter(eos), None) if isinstance(eos, (list, tuple)) else eos
        if eos is None:
            raise ValueError(f"the text config of {self.facts.name} has no eos_token_id")
        self.tail = (self._token("<|extra_201|>"), self._token("<|image end|>"), eos)

    def _token(self, text: str) -> int:
        vocabulary_map = self.module.config.vocabulary_map
        if text in vocabulary_map:
            return vocabulary_map[text]
        vocabulary = {} if self.tokenizer is None else self.tokenizer.get_vocab()
        if text not in vocabulary:
            raise ValueError(f"neither vocabulary_map nor the tokenizer of {self.facts.name} has {text!r}")
        return vocabulary[text]

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        rows = pixels_to_codes("height", height, DEFAULT_SIDE, self.scale)
        columns = pixels_to_codes("width", width, DEFAULT_SIDE, self.scale)
        return self._check_length(Grid(rows, columns, self.image_ids, row_end=self.row_end, tail=self.tail), self.scale)

    def _prompt(self, text: str, grid: Grid) -> list[int]:
        start, token = "<|image start|>", "<|image token|>"
        bos = self.tokenizer.bos_token or ""
        layout = f"{bos}{text}{start}{grid.height}*{grid.width}{token}"
        return self.tokenizer(layout, add_special_tokens=False)["input_ids"]

    def _unconditional(self, prompt: list[int], grid: Grid) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"{self.facts.name} has no tokenizer: guidance needs a negative_prompt of ids")
        return self._prompt("", grid)

    @property
    def _language_model(self) -> Any:
        return self.module.model.text_model


def load_emu3(
    source: str | os.PathLike[str], *, dtype: Any = None, device: Any = None, revision: str | None = None
) -> Emu3Model:
    """Read an Emu3 from a folder or hub repository. Raises CheckpointError for another checkpoint."""
    module, tokenizer = load_pretrained(source, "Emu3ForConditionalGeneration", dtype, revision)
    return Emu3Model(module if device is None else module.to(device), tokenizer)

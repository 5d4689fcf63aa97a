"""Janus (Wu et al., arXiv 2410.13848) and Janus-Pro (Chen et al., arXiv 2501.17811) on transformers' class: image
tokens have separate embeddings, output matrix and ids. Checkpoints: deepseek-community/Janus-Pro-1B and -7B."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from paradec.core.query import Query
from paradec.models.images.grid import Grid
from paradec.models.images.text_to_image import TextToImageModel, load_pretrained


class JanusModel(TextToImageModel):
    """The adapter of transformers' `JanusForConditionalGeneration`. For samplers, image ids are 0 to V - 1, and
    text id t (only in prompts) is V + t. In the guidance branch's prompt, padding replaces all ids except the
    beginning-of-text and beginning-of-image ids. Without a tokenizer, prompts must be ids."""

    defaults = {"guidance_scale": 5.0, "top_k": None, "temperature": 1.0, "top_p": None}

    def __init__(self, module: Any, tokenizer: Any = None, name: str | None = None):
        super().__init__(module, module.config.vq_config.num_embeddings, tokenizer, name)
        generation = module.generation_config
        token_ids: dict[str, Any] = {
            "boi_token_id": (getattr(generation, "generation_kwargs", None) or {}).get("boi_token_id")
        }
        for field in ("bos_token_id", "pad_token_id"):
            value = getattr(generation, field, None)
            token_ids[field] = getattr(self.text_config, field, None) if value is None else value
        for field, value in token_ids.items():
            if value is None:
                raise ValueError(f"the generation_config of {self.facts.name} has no {field}")
        self.boi, self.bos, self.pad = token_ids.values()
        self.vq = module.model.vqmodel

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        side = self.vq.quantize.quant_state_dims[0]
        return self.square_grid(side, self.facts.vocab_size, height, width, self.scale)

    def _prompt(self, text: str, grid: Grid) -> list[int]:
        return [*self.tokenizer(text)["input_ids"], self.boi]

    def _unconditional(self, prompt: list[int], grid: Grid) -> list[int]:
        return [token if token in (self.bos, self.boi) else self.pad for token in prompt]

    def _from_text_ids(self, ids: list[int]) -> list[int]:
        return [self.facts.vocab_size + token for token in ids]

    def _embed(self, ids: Tensor, query: Query | None) -> Tensor:
        size = self.facts.vocab_size
        image = self.module.prepare_embeddings_for_image_generation(ids.clamp(max=size - 1))
        text = self.module.get_input_embeddings()((ids - size).clamp(min=0))
        return torch.where((ids < size).unsqueeze(-1), image, text)

    def head(self, hidden: Tensor) -> Tensor:
        return self.module.model.generation_head(hidden)

    def codebook(self) -> Tensor:
        return self.vq.quantize.embedding.weight

    def _pixels(self, latent: Tensor) -> Tensor:
        return self.vq.decode(latent.flatten(1))


def load_janus(
    source: str | os.PathLike[str], *, dtype: Any = None, device: Any = None, revision: str | None = None
) -> JanusModel:
    """Read a Janus or Janus-Pro from a folder or hub repository. Raises CheckpointError for another checkpoint."""
    module, tokenizer = load_pretrained(source, "JanusForConditionalGeneration", dtype, revision)
    return JanusModel(module if device is None else module.to(device), tokenizer)

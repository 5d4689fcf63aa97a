"""The adapter of autoregressive image models: a causal model, the raster that it writes, and the way back to pixels.

Samplers see token ids below `facts.vocab_size`, those that the model's output can name. Prompts may hold ids from
there on, which only the model's own embedding understands: a class label, a place in a caption, the text of a model
whose image tokens have a vocabulary of their own. What a model knows of one request's rows it holds in a copy of the
adapter, made by `request`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paradec.core.facts import ModelFacts
from paradec.core.query import Query, WindowQuery, take_columns
from paradec.models.decoder import Decoder, keeps_hidden
from paradec.models.images.base import ImageRequest, PictureModel, Reading, tokens_of
from paradec.models.images.grid import Grid


class ImageModel(PictureModel, Decoder):
    """Base of the families. A family says how ids become embeddings (`_embed`), runs its backbone (`_backbone`) and its
    output matrix (`_head`), lays out requests (`request`) and grids (`grid`), and decodes codes (`_pixels`).

    Args:
        module: the network.
        facts: topology "causal", prediction "shifted".
    """

    makes = "image"
    family = "draft_verify"
    default_sampler = "sjd"
    decoder_option = "vq"
    vq: Any = None
    conditions = "prompts"
    defaults: Mapping[str, Any] = {"guidance_scale": 1.0, "top_k": None, "temperature": 1.0, "top_p": None}

    def __init__(self, module: nn.Module, facts: ModelFacts, tokenizer: Any = None):
        super().__init__(module, facts, tokenizer, default_max_new_tokens=1)

    pads = True
    supports_store = True
    supports_visibility = True
    has_head = True

    # ---- what a family says ---------------------------------------------------------------------------------------

    def codebook(self) -> Tensor | None:
        """[vocab_size, d] float: the code of every id, NaN for ids that are no image tokens; None without VQ."""
        return None if self.vq is None else self.vq.quantize.codes

    def token_embeddings(self) -> Tensor:
        """[vocab_size, d]: the input embeddings of the ids that samplers see."""
        return self._embed(torch.arange(self.facts.vocab_size, device=self.device).unsqueeze(0), None)[0]

    def head(self, hidden: Tensor) -> Tensor:
        """The output matrix alone: hidden states [R, W, d] -> [R, W, vocab_size]."""
        return self._head(hidden)

    def _embed(self, ids: Tensor, query: Query | None) -> Tensor:
        """ids [R, Q] int64 -> [R, Q, d]. `query` is None for ids below the vocabulary's size."""
        raise NotImplementedError

    def _backbone(self, embeddings: Tensor, query: Query, mask: Tensor | None, cache: Any) -> Tensor:
        """[R, Q, d] -> last hidden states [R, Q, d]. mask [R, 1, Q, K] bool, or None: causal over the call."""
        raise NotImplementedError

    def _head(self, hidden: Tensor) -> Tensor:
        """[R, W, d] -> logits [R, W, V]."""
        raise NotImplementedError

    # ---- what all share -------------------------------------------------------------------------------------------

    def begin(self, sampler: Any, laid: ImageRequest, grid: Grid, request: Any) -> Any:
        """The state of one request over the grid, guided by the unconditional prompts."""
        if request.top_k is not None and request.top_k >= self.facts.vocab_size:
            request = replace(request, top_k=None)
        guided = {} if request.guidance_scale == 1 else {"negative_prompt": laid.unconditional}
        return sampler.start(laid.model, laid.prompts, request, grid=grid, **guided)

    def read(self, state: Any, grid: Grid) -> Reading:
        return Reading(
            tokens=tokens_of(state, grid),
            whole=state.done,
            accepted=np.array(state.accepted, np.int64).reshape(-1, state.batch),
            prompt_lengths=[int(length) for length in state.prompt_length],
            draft_nfe=state.draft_nfe.tolist(),
        )

    def _call(self, query: Query, store: Any) -> Tensor:
        cache = None if store is None else store.bind(query)
        mask = self._visible(query) if store is None else self._over_store(query, store)
        hidden = self._backbone(self._embed(query.tokens, query), query, mask, cache)
        if keeps_hidden(query):
            query.hidden = hidden
        return self._head(hidden if query.wanted is None else take_columns(hidden, query.wanted))

    def _over_store(self, query: Query, store: Any) -> Tensor:
        """[R, 1, Q, K] bool: stored keys, and the call's own, up to each column's position."""
        mask, keys = store.visible(query)
        causal = (query.positions.unsqueeze(-1) >= keys.unsqueeze(-2)).unsqueeze(1)
        return causal if mask is None else causal & mask

    def _bound(self, **held: Any) -> Any:
        """A copy of the adapter with these attributes; the module is shared."""
        bound = object.__new__(type(self))
        bound.__dict__ = self.__dict__ | held
        return bound


def branch_rows(query: Query, batch: int) -> Tensor:
    """[R] int64: where each row of a call is among a request's `batch` rows, the guidance branch's after them."""
    rows = torch.as_tensor(query.rows, device=query.tokens.device)
    if isinstance(query, WindowQuery) and query.window.copies is not None:
        rows = rows.repeat_interleave(torch.as_tensor(query.window.copies, device=rows.device))
    return torch.cat([rows + branch * batch for branch in range(query.branches)])

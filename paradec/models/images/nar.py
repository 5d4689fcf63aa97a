"""NAR (He et al., arXiv 2503.10696): LlamaGen with one more layer and head, which makes pictures diagonal by diagonal.
LlamaGen's head predicts a cell's right neighbour; the new head (`medusa_*`, as published) predicts the lower one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.query import Query
from paradec.models.images.base import widen
from paradec.models.images.llamagen import Block, Format, LlamaGen, LlamaGenConfig, LlamaGenModel, RMSNorm, angles


class NARConfig(LlamaGenConfig):
    """Sizes of a NAR; `n_layer` does not count the layer of the second head."""

    num_hidden_layers = property(lambda self: self.n_layer + 1)


class NAR(LlamaGen):
    """The network, without the codebook."""

    config: NARConfig

    def __init__(self, config: NARConfig):
        super().__init__(config)
        self.layers.append(Block(config, config.n_layer))
        self.medusa_norm = RMSNorm(config.dim, config.norm_eps)
        self.medusa_output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def backbone(self, embeddings: Tensor, cells: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        """As `LlamaGen.backbone`, but [R, Q, 2, dim]: before both output matrices, the right neighbour's first."""
        rotation = angles(cells, self.config)
        x = embeddings
        for layer in self.layers[:-1]:
            x = layer(x, rotation, mask, cache)
        below = self.layers[-1](x, rotation, mask, cache)
        return torch.stack((self.norm(x), self.medusa_norm(below)), -2)

    def head(self, hidden: Tensor) -> Tensor:
        """[..., 2, dim] -> logits [..., 2, vocab_size] of the right and the lower neighbour, float32 or wider."""
        right, below = hidden.unbind(-2)
        return widen(torch.stack((self.output(right), self.medusa_output(below)), -2))


NAR_FORMAT = Format(
    "NAR",
    NARConfig,
    NAR,
    required_weights=("medusa_norm.weight", "medusa_output.weight"),
    sizes=lambda state, config: {"n_layer": config.n_layer - 1},
)


class NARModel(LlamaGenModel):
    """The adapter of NAR. Conditions, prompt ids and arguments are those of `LlamaGenModel`. A call returns logits
    [R, W, 2, V] of the right and the lower neighbour. A cell sees the condition and all cells up to its own diagonal.

    The public code accepts files without a second head, and initialises it at random. `load_nar` raises an error for
    such files. (The authors' link to the 256-pixel text model leads to LlamaGen's file.)"""

    makes = "neighbour image"
    family = "groups"
    default_sampler = "nar"
    default_name = "NAR"
    format = NAR_FORMAT
    caption_top_k = None
    module: NAR

    @property
    def hidden_size(self) -> int:
        """Width of the concatenated hidden states of both heads: the right neighbour's, then the lower neighbour's."""
        return 2 * self.module.config.dim

    def _backbone(self, embeddings: Tensor, query: Query, mask: Tensor | None, cache: Any) -> Tensor:
        return super()._backbone(embeddings, query, mask, cache).flatten(-2)

    def head(self, hidden: Tensor) -> Tensor:
        return self.module.head(hidden.unflatten(-1, (2, -1)))

    def _visible(self, query: Query, store: Any = None) -> Tensor:
        """[R, 1, Q, Q] bool: which of the call's columns each column sees."""
        rank = self._rank(query, query.positions)
        visible = rank.unsqueeze(-1) >= rank.unsqueeze(-2)
        if query.valid is not None:
            # a padding column sees itself, so that its softmax is defined
            diagonal = torch.eye(visible.shape[-1], dtype=torch.bool, device=visible.device)
            visible = visible & query.valid.unsqueeze(1) | diagonal
        return visible.unsqueeze(1)

    def _store_mask(self, query: Query, store: Any) -> Tensor:
        mask, keys = store.visible(query)
        keys = keys.expand(len(query.positions), -1)
        visible = self._rank(query, query.positions).unsqueeze(-1) >= self._rank(query, keys).unsqueeze(-2)
        return visible.unsqueeze(1) if mask is None else visible.unsqueeze(1) & mask

    def _rank(self, query: Query, positions: Tensor) -> Tensor:
        """[R, K] int64: the diagonal of each of `positions` [R, K]; for the condition, ascending negative numbers."""
        cells = positions - (query.positions - self.cells(query))[:, :1]
        side = self.module.config.grid
        return torch.where(cells < 0, cells, cells // side + cells % side)


load_nar = NARModel.load

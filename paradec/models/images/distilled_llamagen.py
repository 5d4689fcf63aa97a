"""The student of a class-conditional LlamaGen (Distilled Decoding; Liu et al., arXiv 2412.17153); its inputs are code
vectors, not ids. Parameter names are the published checkpoints' (`llamagen-B.pt`, `llamagen-L.pt`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.checks import check_choice, check_int
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.base import check_same_fields
from paradec.models.images.distilled import ContinuousHead, DistilledFacts, DistilledModel, Stages
from paradec.models.images.grid import Grid
from paradec.models.images.llamagen import (
    Block,
    Format,
    LabelEmbedding,
    LlamaGenConfig,
    LlamaGenModel,
    RMSNorm,
    angles,
    read_network,
)
from paradec.models.images.vq import VQModel, check_codebook
from paradec.models.weights import NESTED

SPLITS = {768: 80, 1024: 130}
"""The published students' `split`, by their widths (B and L)."""
SECOND = 80
"""The published students' second stage, for 256 tokens."""


@dataclass(frozen=True)
class DistilledLlamaGenConfig(LlamaGenConfig):
    """Sizes of a student.

    codebook_dim: width of a code vector.
    second, split: as in `Stages`. None: `second` is 5/16 of the tokens, `split` is as published or else `second`."""

    codebook_dim: int = 8
    second: int | None = None
    split: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("codebook_dim", self.codebook_dim, low=1)
        check_choice("condition", self.condition, ("c2i",))  # students read class labels
        tokens, has_published_grid = self.grid**2, self.grid == 16
        second = max(1, SECOND * tokens // 256) if self.second is None else self.second
        split = self.split
        if split is None:
            split = SPLITS.get(self.dim, second) if has_published_grid else second
        for name, value in (("second", second), ("split", split)):
            check_int(name, value, low=name == "second", high=tokens)
            object.__setattr__(self, name, value)


class DistilledLlamaGen(nn.Module):
    """The network, without the codebook."""

    def __init__(self, config: DistilledLlamaGenConfig):
        super().__init__()
        self.config = config
        self.cls_embedding = LabelEmbedding(config)
        self.tok_embeddings = nn.Linear(config.codebook_dim, config.dim)
        self.n_d_embed = nn.Embedding(2, config.dim)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.final_layer_conti = ContinuousHead(config.dim, config.codebook_dim)

    def forward(self, labels: Tensor, tokens: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:
        """Code vectors [B, N, codebook_dim] of the continuous head, and logits [B, N, vocab_size].

        labels: [B] int64. tokens: [B, N, codebook_dim]: in raster order, `num_codes` normalised codes, then noise."""
        condition = self.cls_embedding.embedding_table(labels)
        x = torch.cat((condition.unsqueeze(1), self.tok_embeddings(tokens)), 1)
        column = torch.arange(x.shape[1], device=x.device)
        x = x + self.n_d_embed((column <= num_codes).long())  # noise 0; class and code vectors 1
        rotation = angles((column - 1).expand(len(x), -1), self.config)
        for layer in self.layers:
            x = layer(x, rotation, None, None)
        x = x[:, 1:]
        return self.final_layer_conti(x, condition), self.output(self.norm(x))


class DistilledLlamaGenModel(DistilledModel):
    """The adapter of a `DistilledLlamaGen`. Its stages (`Stages`) are cells: K(t) = t. Raises ValueError without `vq`
    or for a codebook of the wrong size.

    vq: LlamaGen's VQ autoencoder, whose code vectors a student reads after its first call.
    defaults: `steps` of requests (1 or 2), and with a teacher `guidance_scale`, `top_k`, `top_p`, `temperature`."""

    module: DistilledLlamaGen
    teacher_defaults = {"guidance_scale": 2.0, "top_k": 8000, "top_p": None, "temperature": 1.0}

    def __init__(
        self,
        module: DistilledLlamaGen,
        vq: VQModel | None,
        name: str = "LlamaGen-DD",
        defaults: Mapping[str, Any] | None = None,
    ):
        config = module.config
        if vq is None:
            raise ValueError(f"{name} reads code vectors: give vq=..., LlamaGen's VQ autoencoder")
        check_codebook(vq, config.vocab_size, name, config.codebook_dim)
        assert config.second is not None and config.split is not None
        stages = Stages(tuple(range(config.grid**2 + 1)), config.second, config.split)
        facts = DistilledFacts(name, stages, config.num_classes, config.vocab_size, config.codebook_dim)
        super().__init__(module, facts, defaults)
        self.vq = vq

    def codes(self) -> Tensor:
        return self.vq.quantize.codes

    def check_teacher(self, teacher: Any) -> None:
        if type(teacher) is not LlamaGenModel:
            raise TypeError(f"teacher must be a LlamaGen, as {self.facts.name} is the student of a LlamaGen")
        fields = ("condition", "grid", "vocab_size", "num_classes")
        check_same_fields("teacher", teacher, self, teacher.module.config, self.module.config, fields)

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        return self.square_grid(self.module.config.grid, self.facts.vocab_size, height, width)

    def latent(self, tokens: Tensor, grid: Grid) -> Tensor:
        """Vectors [B, N, C] -> [B, C, h, w], the decoder's input."""
        return tokens.unflatten(1, (grid.height, grid.width)).permute(0, 3, 1, 2)

    def _pixels(self, latent: Tensor) -> Tensor:
        projection = self.vq.post_quant_conv  # not `vq.decode`: vectors need not be codes
        return self.vq.decoder(projection(latent.to(projection.weight.dtype)))


FORMAT = Format(
    "student of LlamaGen",
    DistilledLlamaGenConfig,
    DistilledLlamaGen,
    required_weights=("n_d_embed.weight", "tok_embeddings.bias", "final_layer_conti.linear.weight"),
    sizes=lambda state, config: {"codebook_dim": state["tok_embeddings.weight"].shape[1]},
    grid=16,
    nested=("ema", *NESTED),
)


def load_distilled_llamagen(
    source: str | os.PathLike[str],
    *,
    vq: str | os.PathLike[str] | VQModel | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    grid: int | None = None,
    n_head: int | None = None,
    second: int | None = None,
    split: int | None = None,
) -> DistilledLlamaGenModel:
    """Read a student of LlamaGen. Raises CheckpointError or ValueError for a wrong file, codebook or stage.

    source: a published `.pt` file (its averaged weights, "ema"), a `.safetensors` file with the same names, or a
        folder, as in `paradec.models.images.llamagen.load_llamagen`.
    vq: LlamaGen's VQ autoencoder, or its file (`vq_ds16_c2i.pt`), if the folder has none.
    dtype: of the network's parameters; codes and decoding stay float32 at least.
    grid, n_head: for a single file: codes along one side (None: 16), heads (None: the published size of this width).
    second, split: see `DistilledLlamaGenConfig`."""
    module, codebook, _, name, defaults = read_network(FORMAT, source, vq, None, dtype, device, grid, n_head)
    if codebook is None:
        raise CheckpointError(f"{name} needs LlamaGen's VQ autoencoder: give vq=..., the file vq_ds16_c2i.pt")
    codebook = codebook.to(torch.promote_types(dtype or torch.float32, torch.float32))
    stages = {name: value for name, value in (("second", second), ("split", split)) if value is not None}
    module.config = replace(module.config, **stages)
    return DistilledLlamaGenModel(module, codebook, name, defaults)

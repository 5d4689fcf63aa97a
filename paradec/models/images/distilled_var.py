"""The student of a VAR (Distilled Decoding; Liu et al., arXiv 2412.17153); its inputs are code vectors of all scales.
Parameter names are the published checkpoints' (`VAR-DD/var-d16.pth` to `d24`)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.checks import check_type
from paradec.models.images.base import check_same_fields
from paradec.models.images.distilled import ContinuousHead, DistilledFacts, DistilledModel, Stages
from paradec.models.images.multi_scale_vq import PUBLISHED_SCALES, MultiScaleVQ
from paradec.models.images.var import VAR, ScalePictures, VARModel, read_network
from paradec.models.images.vq import check_codebook
from paradec.models.weights import NESTED

SECOND_STAGES = {1024: 5, 1280: 4, 1536: 4}
"""Width of a published student (d16, d20, d24) -> its second stage, which is also its `split`."""
EXTRA_WEIGHTS = ("n_d_embed.weight", "layerwise_n_d_embed.0.weight", "final_layer_conti.linear.weight")


class DistilledVAR(VAR):
    """A VAR with code vectors as inputs. The class is an additional level before scale 0. Arguments: as in `VAR`."""

    def __init__(self, scales: Sequence[int] = PUBLISHED_SCALES[256], **sizes: Any):
        super().__init__(scales, **sizes)
        self.pos_1LC = nn.Parameter(torch.zeros(1, 1 + self.ends[-1], self.width))
        self.lvl_embed = nn.Embedding(1 + len(self.scales), self.width)
        self.n_d_embed = nn.Embedding(2, self.width)
        self.layerwise_n_d_embed = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(len(self.blocks) + 1))
        self.final_layer_conti = ContinuousHead(self.width, self.code_dim)

    def forward(self, labels: Tensor, tokens: Tensor, num_codes: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Code vectors [B, L, code_dim] of the continuous head, and logits [B, L, V], for the L tokens of all scales.

        labels: [B] int64. tokens: [B, L, code_dim], scale by scale: `num_codes` code vectors, then noise."""
        condition = self.class_emb(labels)
        x = torch.cat((condition.unsqueeze(1) + self.pos_start, self.word_embed(tokens)), 1)
        column = torch.arange(x.shape[1], device=x.device)
        level = nn.functional.pad(1 + self.levels(0, self.ends[-1]), (1, 0))  # the class is level 0
        mark = self.n_d_embed((column <= num_codes).long())  # [1 + L, width]: noise 0, class and code vectors 1
        x = x + self.lvl_embed(level) + self.pos_1LC + mark
        # a token sees coarser scales and itself
        mask = (level.unsqueeze(1) > level) | (column.unsqueeze(1) == column)
        shared = self.shared_ada_lin(condition).unflatten(-1, (1, 6, -1)) if self.shared_adaln else condition
        for layer, block in enumerate(self.blocks):
            x = block(x, shared, mask, None, layer, 0, self.layerwise_n_d_embed[layer](mark))
        x = (x + self.layerwise_n_d_embed[-1](mark))[:, 1:]
        return self.final_layer_conti(x, condition), self.head(self.head_nm(x, condition))


class DistilledVARModel(ScalePictures, DistilledModel):
    """The adapter of a `DistilledVAR`. Its stages (`Stages`) are scales: K(t) counts the tokens of the first t scales.

    vq: the multi-scale VQ autoencoder of its teacher.
    defaults: `steps` of requests (1 or 2); if there is a teacher, also `top_k`, `top_p`, `temperature` and
        `guidance_scale` (3 is the public code's cfg of 2).
    second, split: as in `Stages`. None: `second` is as published, or else half of the scales; `split` is `second`.
    Raises TypeError for another kind of module or autoencoder, ValueError for a codebook of the wrong size, a wrong
    stage or an unknown default."""

    module: DistilledVAR
    teacher_defaults = {"guidance_scale": 3.0, "top_k": 900, "top_p": 0.95, "temperature": 1.0}

    def __init__(
        self,
        module: DistilledVAR,
        vq: MultiScaleVQ,
        name: str = "VAR-DD",
        defaults: Mapping[str, Any] | None = None,
        second: int | None = None,
        split: int | None = None,
    ):
        check_type("module", module, DistilledVAR)
        check_type("vq", vq, MultiScaleVQ, f": {name} reads code vectors")
        check_codebook(vq, module.codebook_size, name, module.code_dim)
        published_second = SECOND_STAGES.get(module.width) if module.scales == tuple(PUBLISHED_SCALES[256]) else None
        second = published_second or max(1, len(module.scales) // 2) if second is None else second
        split = second if split is None else split
        stages = Stages((0, *module.ends), second, split, scales=True)
        facts = DistilledFacts(name, stages, module.classes, module.codebook_size, module.code_dim)
        super().__init__(module, facts, defaults)
        self.vq = vq.eval()

    def codes(self) -> Tensor:
        return self.vq.codes

    def check_teacher(self, teacher: Any) -> None:
        if not isinstance(teacher, VARModel):
            raise TypeError(f"teacher must be a VAR, as {self.facts.name} is the student of a VAR")
        fields = ("scales", "classes", "codebook_size", "code_dim")
        check_same_fields("teacher", teacher, self, teacher.module, self.module, fields)
        if not torch.equal(teacher.codes.float().cpu(), self.codes().float().cpu()):
            raise ValueError(f"teacher {teacher.facts.name} has other codes than its student: load both with one vq")


def load_distilled_var(
    source: str | os.PathLike[str],
    *,
    vq: str | os.PathLike[str] | MultiScaleVQ | None = None,
    scales: Sequence[int] | None = None,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    second: int | None = None,
    split: int | None = None,
) -> DistilledVARModel:
    """Read a student of VAR. Raises CheckpointError or ValueError for wrong files, scales, sizes or stages.

    source: a published `.pth` file (its averaged weights, "ema_parameters" of "trainer"), a `.safetensors` file with
        the same names, or a folder with `model.safetensors` and `config.json`: `scales`, `heads`, and optionally
        `second`, `split`, `vq` (the autoencoder's file) and `defaults` of requests.
    vq: the autoencoder or its file (`vae_ch160v4096z32.pth`), if the folder states none.
    scales, heads, dtype, device: as in `paradec.models.images.var.load_var`. second, split: see `DistilledVARModel`."""
    nested = ("trainer.ema_parameters", *NESTED)
    parts = read_network(
        DistilledVAR, "student of VAR", source, vq, scales, heads, dtype, device, EXTRA_WEIGHTS, nested, drop_class_row
    )
    module, vq, name, fields, _ = parts
    second, split = fields.get("second") if second is None else second, fields.get("split") if split is None else split
    return DistilledVARModel(module, vq, name, fields.get("defaults"), second, split)


def drop_class_row(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A student's weights without the class's row, so that they have the sizes of its teacher's."""
    return weights | {"pos_1LC": weights["pos_1LC"][:, 1:], "lvl_embed.weight": weights["lvl_embed.weight"][1:]}

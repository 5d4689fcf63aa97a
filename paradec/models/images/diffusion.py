"""Adapter around diffusers' class-conditional transformers, which evaluates a `LatentQuery`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from paradec.core.checks import check_type
from paradec.core.family_queries import LatentQuery
from paradec.models.base import Adapter
from paradec.models.images.base import list_labels


class DiffusionModel(Adapter):
    """A diffusers `DiTTransformer2DModel` for samplers of the forecast family. Raises TypeError for another kind of
    module, ValueError for a module in training mode."""

    makes = "latent"
    module: Any

    def __init__(self, module: Any):
        from diffusers import DiTTransformer2DModel

        check_type("module", module, DiTTransformer2DModel)
        if module.training:
            raise ValueError("module is in training mode, which drops class labels at random; call module.eval()")
        super().__init__(module)
        self.channels: int = module.config.in_channels
        self.null_label: int = module.config.num_embeds_ada_norm
        """The label of the unconditional branch, after the classes."""

    def positions(self, latent: Tensor) -> int:
        """Number of patches of each of the latents [B, C, H, W]."""
        patch = self.module.config.patch_size
        return (latent.shape[-2] // patch) * (latent.shape[-1] // patch)

    def conditions(self, latent: Tensor, values: Mapping[str, Any], branches: int) -> dict[str, Tensor]:
        """Check a request's latent and conditions: "class_labels" [branches * B] int64. Raises ValueError for another
        condition or shape, or a label out of range.

        latent: [B, C, H, W]. branches: 1; 2 appends the unconditional rows.
        values: "class_labels", an int for all rows or one per row; the label after the last class is unconditional."""
        size = self.module.config.sample_size
        if tuple(latent.shape[1:]) != (self.channels, size, size):
            raise ValueError(f"latent has shape {tuple(latent.shape)}, not [batch, {self.channels}, {size}, {size}]")
        if set(values) != {"class_labels"}:
            raise ValueError(f"conditions {sorted(values)} must be: class_labels")
        labels = list_labels(values["class_labels"], self.null_label + 1)
        labels = labels * len(latent) if not isinstance(values["class_labels"], (Sequence, Tensor)) else labels
        if len(labels) != len(latent):
            raise ValueError(f"class_labels has {len(labels)} entries for {len(latent)} rows; give one, or one per row")
        labels = labels + [self.null_label] * len(labels) * (branches - 1)
        return {"class_labels": torch.tensor(labels, device=self.device)}

    def __call__(self, query: LatentQuery) -> Tensor:
        """Evaluate one query: [R, C, H, W] in the module's dtype, without a learned variance."""
        with self.evaluation_context():
            output = self.module(
                query.latent.to(self.module.dtype),
                timestep=torch.as_tensor(query.timestep, device=self.device).expand(len(query.latent)),
                class_labels=query.conditions["class_labels"],
            ).sample
        return output[:, : self.channels]

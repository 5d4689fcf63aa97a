"""The multi-scale VQ autoencoder of VAR (Tian et al., arXiv 2404.02905, section 3.2, algorithms 1 and 2). A picture is
a pyramid of code maps; each map encodes what coarser maps leave over. One autoencoder serves any list of scales.

`B` pictures, `V` codes of width `C`, feature maps with sides of `s`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from paradec.core.checks import check_int, short_repr
from paradec.models.checkpoint import check_fit, checkpoint_errors
from paradec.models.images.vq import Codebook, ConvDecoder, ConvEncoder, VQConfig, decoder_sizes, from_taming
from paradec.models.weights import read_weights

CONVOLUTIONS = 4
"""Number of convolutions that smooth the upsampled codes; neighbouring scales share a convolution."""
PUBLISHED_SCALES = {256: (1, 2, 3, 4, 5, 6, 8, 10, 13, 16), 512: (1, 2, 3, 4, 6, 9, 13, 18, 24, 32)}
"""Sides of the code maps of the published models, by the side of their pictures in pixels."""
UNUSED = re.compile(r"^quantize\.ema_vocab_hit_SV$|^loss\.")


@dataclass(frozen=True)
class MultiScaleVQConfig(VQConfig):
    """Sizes; the defaults are those of the published file (`vae_ch160v4096z32.pth`)."""

    codebook_size: int = 4096
    codebook_embed_dim: int = 32
    l2_norm: bool = False
    channels: int = 160
    z_channels: int = 32
    encoder: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.z_channels != self.codebook_embed_dim:
            raise ValueError(
                f"z_channels={self.z_channels} must be codebook_embed_dim={self.codebook_embed_dim}: codes are "
                "not projected"
            )


class Smoothing(nn.Module):
    """The mean of an upsampled code map and its convolution (phi of the paper)."""

    def __init__(self, channels: int):
        super().__init__()
        self.qresi_ls = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(CONVOLUTIONS))

    def forward(self, codes: Tensor, fraction: float) -> Tensor:
        """codes: [B, C, h, w]. fraction: relative position of the scale, from 0 (the coarsest) to 1."""
        ticks = np.linspace(1 / 3 / CONVOLUTIONS, 1 - 1 / 3 / CONVOLUTIONS, CONVOLUTIONS)
        nearest = int(np.abs(ticks - fraction).argmin())
        return codes * 0.5 + self.qresi_ls[nearest](codes) * 0.5


class MultiScaleCodebook(Codebook):
    """The codes and the smoothing, which all scales share."""

    def __init__(self, size: int, dim: int):
        super().__init__(size, dim, l2_norm=False)
        self.quant_resi = Smoothing(dim)


class MultiScaleVQ(nn.Module):
    """The autoencoder, or its decoding half (`config.encoder=False`). A feature map f [B, C, s, s] is the sum over
    scales of smoothed, upsampled code maps. Scales are the sides of these maps, ascending; the last is s."""

    def __init__(self, config: MultiScaleVQConfig):
        super().__init__()
        self.config = config
        self.quantize = MultiScaleCodebook(config.codebook_size, config.codebook_embed_dim)
        self.post_quant_conv = nn.Conv2d(config.z_channels, config.z_channels, 3, padding=1)
        self.decoder = ConvDecoder(config)
        if config.encoder:
            self.encoder = ConvEncoder(config)
            self.quant_conv = nn.Conv2d(config.z_channels, config.z_channels, 3, padding=1)

    @property
    def codes(self) -> Tensor:
        """The code vectors [V, C]."""
        return self.quantize.codes

    def add(self, features: Tensor, codes: Tensor, index: int, scales: Sequence[int]) -> Tensor:
        """Add codes [B, n * n, C], in raster order, of scale `index` with side n to features [B, C, s, s]."""
        return features + self.smooth_codes(codes, index, scales)

    def smooth_codes(self, codes: Tensor, index: int, scales: Sequence[int]) -> Tensor:
        """Upsample and smooth codes [B, n * n, C] of scale `index` -> their term of the sum, [B, C, s, s]."""
        side, full = scales[index], scales[-1]
        code_map = rearrange(codes, "b (h w) c -> b c h w", h=side)
        if index < len(scales) - 1:
            code_map = interpolate(code_map, size=(full, full), mode="bicubic")
        return self.quantize.quant_resi(code_map, index / max(len(scales) - 1, 1))

    def downsample(self, features: Tensor, side: int) -> Tensor:
        """Average features [B, C, s, s] over areas: the input [B, side * side, C] of the scale with this side."""
        return rearrange(interpolate(features, size=(side, side), mode="area"), "b c h w -> b (h w) c")

    def features(self, images: Tensor) -> Tensor:
        """Images [B, channels, H, W] in [-1, 1] -> features [B, C, s, s]. Raises ValueError without an encoder."""
        if not self.config.encoder:
            raise ValueError("this VQ model has no encoder (config.encoder=False); it only decodes")
        return self.quant_conv(self.encoder(images))

    def quantise(self, features: Tensor, scales: Sequence[int]) -> list[Tensor]:
        """Features [B, C, s, s] -> ids [B, n * n] int64 of every scale, the coarsest first."""
        check_scales(scales)
        if features.shape[-1] != scales[-1] or features.shape[-2] != scales[-1]:
            raise ValueError(
                f"the last of scales={short_repr(tuple(scales))} must be the side of the features, {features.shape[-1]}"
            )
        all_ids = []
        for index, side in enumerate(scales):
            ids = self.quantize.nearest(self.downsample(features, side))
            features = features - self.smooth_codes(self.codes[ids], index, scales)
            all_ids.append(ids)
        return all_ids

    def encode(self, images: Tensor, scales: Sequence[int]) -> list[Tensor]:
        """Images [B, channels, H, W] in [-1, 1] -> ids [B, n * n] int64 of every scale, the coarsest first."""
        return self.quantise(self.features(images), scales)

    def inputs(self, codes: Tensor, scales: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Compute the inputs for teacher forcing: code vectors of all scales [B, L, C] -> inputs of all scales except
        the first [B, L - 1, C], and features [B, C, s, s]. If `codes` has only some scales, there are fewer inputs."""
        features = codes.new_zeros(len(codes), codes.shape[-1], scales[-1], scales[-1])
        outputs, begin = [], 0
        for index, side in enumerate(scales):
            if begin == codes.shape[1]:
                break
            features = self.add(features, codes[:, begin : begin + side**2], index, scales)
            begin += side**2
            if index < len(scales) - 1:
                outputs.append(self.downsample(features, scales[index + 1]))
        return torch.cat(outputs, 1) if outputs else codes[:, :0], features

    def decode(self, features: Tensor) -> Tensor:
        """Features [B, C, s, s] -> images [B, channels, H, W], about [-1, 1]."""
        return self.decoder(self.post_quant_conv(features))

    def forward(
        self, images: Tensor, scales: Sequence[int], commitment: float = 0.25
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """For training: (reconstructions, codebook loss, ids of every scale), with straight-through gradients."""
        features = self.features(images)
        residual, total = features.detach(), torch.zeros_like(features)
        loss, all_ids = features.new_zeros(()), []
        for index, side in enumerate(scales):
            ids = self.quantize.nearest(self.downsample(residual, side))
            total = self.add(total, self.codes[ids], index, scales)
            residual = (features - total).detach()
            loss = loss + mse_loss(total, features.detach()) + commitment * mse_loss(features, total.detach())
            all_ids.append(ids)
        return self.decode(features + (total - features).detach()), loss / len(scales), all_ids


def check_scales(scales: Sequence[int]) -> None:
    """Raise ValueError unless scales are integers from 1 to 4096, ascending."""
    if not isinstance(scales, (tuple, list)) or not scales:
        raise ValueError(f"scales={short_repr(scales)} must be a list of the sides of code maps")
    for side in scales:
        check_int("scales", side, low=1, high=2**12)
    if any(a >= b for a, b in zip(scales, scales[1:], strict=False)):
        raise ValueError(f"scales={short_repr(tuple(scales))} must ascend")


def load_multi_scale_vq(source: str | os.PathLike[str], norm_groups: int | None = None) -> MultiScaleVQ:
    """Read a published file (`vae_ch160v4096z32.pth`), or safetensors with the same names. Raises CheckpointError for a
    wrong file.

    norm_groups: groups of the group norms; None: the number in the safetensors metadata, or else 32."""
    state, metadata = read_weights(source, UNUSED.pattern)
    state = from_published({name: tensor for name, tensor in state.items() if not UNUSED.search(name)})
    stored_config = metadata.get("config", {})
    groups = norm_groups or stored_config.get("norm_groups") or stored_config.get("group_norm_groups") or 32
    with checkpoint_errors(f"{os.fspath(source)!r} holds no multi-scale VQ", LookupError, ValueError):
        config = read_sizes(state, groups)
    module = MultiScaleVQ(config)
    unused = () if config.encoder else ("encoder.", "quant_conv.")
    check_fit(module.state_dict(), state, os.fspath(source), unused=unused)
    module.load_state_dict(state, strict=False)
    return module.eval().requires_grad_(False)


def from_published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename published weights to `MultiScaleVQ`'s names (see `from_taming`), and split the qkv matrix in three."""
    renamed = {}
    for name, tensor in from_taming(state).items():
        if ".qkv." in name:
            for letter, matrix in zip("qkv", tensor.chunk(3), strict=True):
                renamed[name.replace(".qkv.", f".{letter}.")] = matrix
        else:
            renamed[name] = tensor
    return renamed


def read_sizes(state: Mapping[str, Tensor], norm_groups: int = 32) -> MultiScaleVQConfig:
    """Infer the sizes from weights with `MultiScaleVQ`'s names. Raises KeyError for a missing tensor, ValueError for a
    wrong size."""
    size, dim = state["quantize.embedding.weight"].shape
    return MultiScaleVQConfig(
        codebook_size=size,
        codebook_embed_dim=dim,
        norm_groups=norm_groups,
        encoder="encoder.conv_in.weight" in state,
        **decoder_sizes(state),
    )

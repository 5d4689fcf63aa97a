"""Convolutional VQ autoencoders: code ids to images, and back.

Esser et al., "Taming Transformers", arXiv 2012.09841, with the normalised codebook of Yu et al., arXiv 2110.04627, as
in LlamaGen (2406.06525), whose parameter names are used. `KLDecoder` is the decoding half of latent diffusion's KL
autoencoders (Rombach et al., arXiv 2112.10752; MAR's `kl16.ckpt`): the same layers without a codebook."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import mse_loss, normalize, scaled_dot_product_attention, silu

from paradec.core.checks import check_bool, check_choice, check_divides, check_int, short_repr, unknown_name
from paradec.models.checkpoint import CheckpointError, check_fit, checkpoint_errors
from paradec.models.images.loading import count_blocks
from paradec.models.weights import read_weights


@dataclass(frozen=True)
class VQConfig:
    """Sizes of a VQ autoencoder; the defaults are LlamaGen's `vq_ds16`.

    codebook_size, codebook_embed_dim: number of codes, and width of a code vector.
    l2_norm: whether codes and latents are compared on the unit sphere, and codes normalised when looked up.
    channels, channel_mult: level i has channels * channel_mult[i] feature maps, at half the resolution of level i - 1.
    res_blocks: blocks in a level of the encoder; a level of the decoder has one more.
    attention: whether the lowest resolution has attention after each block (the middle part always has it).
    z_channels: feature maps between the codebook's projection and the convolutions.
    image_channels: 3, or 1 for grey images. norm_groups: groups of every group norm; must divide all widths.
    encoder: whether the model has an encoder; decoding needs none."""

    codebook_size: int = 16384
    codebook_embed_dim: int = 8
    l2_norm: bool = True
    channels: int = 128
    channel_mult: tuple[int, ...] = (1, 1, 2, 2, 4)
    res_blocks: int = 2
    attention: bool = True
    z_channels: int = 256
    image_channels: int = 3
    norm_groups: int = 32
    encoder: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("l2_norm", "attention", "encoder"):
                check_bool(field.name, value)
            elif field.name != "channel_mult":
                check_int(field.name, value, low=1)
        if not isinstance(self.channel_mult, (tuple, list)) or not self.channel_mult:
            raise ValueError(
                f"channel_mult={short_repr(self.channel_mult)} must be a tuple with a factor for every level"
            )
        object.__setattr__(self, "channel_mult", tuple(self.channel_mult))
        for factor in self.channel_mult:
            check_int("channel_mult", factor, low=1)
            check_divides("norm_groups", self.norm_groups, "channels * channel_mult", self.channels * factor)

    @property
    def scale(self) -> int:
        """Pixels along one side of a code."""
        return 2 ** (len(self.channel_mult) - 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"channel_mult": list(self.channel_mult)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> VQConfig:
        """Inverse of `to_dict`. Raises ValueError for an unknown field or a value out of its range."""
        for name in data:
            if name not in cls.__dataclass_fields__:
                raise ValueError(unknown_name("field of a VQ configuration", name, cls.__dataclass_fields__))
        return cls(**data)


PUBLISHED = {
    "vq_ds16": VQConfig(),
    "vq_ds8": VQConfig(channel_mult=(1, 2, 2, 4)),
    "chameleon": VQConfig(codebook_size=8192, codebook_embed_dim=256, l2_norm=False, attention=False),
}
"""LlamaGen's vq_ds16_c2i.pt, vq_ds16_t2i.pt and vq_ds8_c2i.pt; Chameleon's vqgan.ckpt (for Anole and Lumina-mGPT)."""


class ResidualBlock(nn.Module):
    def __init__(self, width: int, out: int, groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, width, eps=1e-6)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out, eps=1e-6)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        if width != out:
            self.nin_shortcut = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(silu(self.norm2(self.conv1(silu(self.norm1(x))))))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttentionBlock(nn.Module):
    """Attention of one head over all cells of a feature map."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, width, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (rearrange(projection(h), "b c h w -> b 1 (h w) c") for projection in (self.q, self.k, self.v))
        h = scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(rearrange(h, "b 1 (h w) c -> b c h w", h=x.shape[2]))


class Level(nn.Module):
    """Blocks at one resolution, then resampling to the next."""

    def __init__(self, width: int, out: int, blocks: int, attention: bool, groups: int):
        super().__init__()
        widths = [width, *[out] * blocks]
        self.res = nn.ModuleList(ResidualBlock(a, b, groups) for a, b in zip(widths[:-1], widths[1:], strict=True))
        self.attn = nn.ModuleList(AttentionBlock(out, groups) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[index](x)
        for resample in ("upsample", "downsample"):
            if hasattr(self, resample):
                x = getattr(self, resample)(x)
        return x


def _middle(width: int, groups: int) -> nn.ModuleList:
    return nn.ModuleList(
        (ResidualBlock(width, width, groups), AttentionBlock(width, groups), ResidualBlock(width, width, groups))
    )


class ConvDecoder(nn.Module):
    """Latents [B, z_channels, h, w] -> images [B, C, h * scale, w * scale]. `conv_blocks`: lowest resolution first."""

    def __init__(self, config: VQConfig):
        super().__init__()
        groups = config.norm_groups
        widths = [config.channels * factor for factor in reversed(config.channel_mult)]
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = _middle(widths[0], groups)
        self.conv_blocks = nn.ModuleList()
        for index, (width, out) in enumerate(zip([widths[0], *widths[:-1]], widths, strict=True)):
            level = Level(width, out, config.res_blocks + 1, config.attention and index == 0, groups)
            if index < len(widths) - 1:
                conv = nn.Conv2d(out, out, 3, padding=1)
                level.upsample = nn.Sequential(OrderedDict(resize=nn.Upsample(scale_factor=2.0), conv=conv))
            self.conv_blocks.append(level)
        self.norm_out = nn.GroupNorm(groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], config.image_channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            x = block(x)
        return self.conv_out(silu(self.norm_out(x)))


class ConvEncoder(nn.Module):
    """Images [B, C, H, W] -> latents [B, z_channels, H / scale, W / scale]. `conv_blocks`: full resolution first."""

    def __init__(self, config: VQConfig):
        super().__init__()
        groups = config.norm_groups
        widths = [config.channels * factor for factor in config.channel_mult]
        self.conv_in = nn.Conv2d(config.image_channels, config.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for index, (width, out) in enumerate(zip([config.channels, *widths[:-1]], widths, strict=True)):
            level = Level(width, out, config.res_blocks, config.attention and index == len(widths) - 1, groups)
            if index < len(widths) - 1:
                conv = nn.Conv2d(out, out, 3, stride=2)
                level.downsample = nn.Sequential(OrderedDict(pad=nn.ZeroPad2d((0, 1, 0, 1)), conv=conv))
            self.conv_blocks.append(level)
        self.mid = _middle(widths[-1], groups)
        self.norm_out = nn.GroupNorm(groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(silu(self.norm_out(x)))


class Codebook(nn.Module):
    """The code vectors; `embedding.weight` [codebook_size, codebook_embed_dim] has them as stored."""

    def __init__(self, size: int, dim: int, l2_norm: bool):
        super().__init__()
        self.embedding = nn.Embedding(size, dim)
        self.l2_norm = l2_norm

    @property
    def codes(self) -> Tensor:
        """[codebook_size, codebook_embed_dim]: the code vectors, normalised with `l2_norm`."""
        return normalize(self.embedding.weight, dim=-1) if self.l2_norm else self.embedding.weight

    def nearest(self, latents: Tensor) -> Tensor:
        """Latents [..., dim] -> ids [...] int64 of the closest codes."""
        latents = normalize(latents, dim=-1) if self.l2_norm else latents
        return torch.cdist(latents.flatten(0, -2), self.codes).argmin(-1).view(latents.shape[:-1])


class VQModel(nn.Module):
    """A VQ autoencoder, or its decoding half (`config.encoder=False`)."""

    def __init__(self, config: VQConfig):
        super().__init__()
        self.config = config
        self.quantize = Codebook(config.codebook_size, config.codebook_embed_dim, config.l2_norm)
        self.post_quant_conv = nn.Conv2d(config.codebook_embed_dim, config.z_channels, 1)
        self.decoder = ConvDecoder(config)
        if config.encoder:
            self.encoder = ConvEncoder(config)
            self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_embed_dim, 1)

    def decode(self, codes: Tensor) -> Tensor:
        """Ids [B, h, w] int64 -> images [B, C, h * scale, w * scale], about [-1, 1]. Raises ValueError for a wrong
        shape or id."""
        if codes.ndim != 3:
            raise ValueError(f"codes have shape {tuple(codes.shape)}; expected [batch, height, width]")
        if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < self.config.codebook_size:
            raise ValueError(
                f"codes are from {int(codes.min())} to {int(codes.max())}; the codebook has "
                f"{self.config.codebook_size} entries"
            )
        return self.decoder(self.post_quant_conv(rearrange(self.quantize.codes[codes], "b h w c -> b c h w")))

    def encode(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] in [-1, 1] -> ids [B, H / scale, W / scale] int64. Raises ValueError without encoder."""
        if not self.config.encoder:
            raise ValueError("this VQ model has no encoder (config.encoder=False); it only decodes")
        return self.quantize.nearest(self.latents(images))

    def latents(self, images: Tensor) -> Tensor:
        """Images [B, C, H, W] -> latents [B, H / scale, W / scale, dim], before the codebook."""
        return rearrange(self.quant_conv(self.encoder(images)), "b c h w -> b h w c")

    def forward(self, images: Tensor, commitment: float = 0.25) -> tuple[Tensor, Tensor, Tensor]:
        """For training: (reconstructions, codebook loss, ids [B, h, w]), with straight-through gradients."""
        latents = self.latents(images)
        if self.config.l2_norm:
            latents = normalize(latents, dim=-1)
        ids = self.quantize.nearest(latents.detach())
        codes = self.quantize.codes[ids]
        loss = mse_loss(codes, latents.detach()) + commitment * mse_loss(latents, codes.detach())
        codes = latents + (codes - latents).detach()
        return self.decoder(self.post_quant_conv(rearrange(codes, "b h w c -> b c h w"))), loss, ids


def from_taming(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename taming-transformers' weights (Chameleon's `vqgan.ckpt`) to the names of `VQModel`. `decoder.up` begins at
    full resolution, `decoder.conv_blocks` of `VQModel` at the lowest resolution."""
    levels = count_blocks(state, "decoder.up")
    middle = {"block_1": "0", "attn_1": "1", "block_2": "2"}
    renamed = {}
    for name, tensor in state.items():
        name = re.sub(r"\.mid\.(block_1|attn_1|block_2)\.", lambda m: f".mid.{middle[m[1]]}.", name)
        name = re.sub(r"^decoder\.up\.(\d+)\.", lambda m: f"decoder.conv_blocks.{levels - 1 - int(m[1])}.", name)
        name = re.sub(r"^encoder\.down\.", "encoder.conv_blocks.", name)
        renamed[re.sub(r"(conv_blocks\.\d+)\.block\.", r"\1.res.", name)] = tensor
    return renamed


def decoder_sizes(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Infer fields of `VQConfig` from a decoder's weights, except the codebook's and `norm_groups`. Raises KeyError for
    a missing tensor."""
    levels = max(1, count_blocks(state, "decoder.conv_blocks"))  # without blocks, `widths` below raises KeyError
    lowest = re.compile(r"decoder\.conv_blocks\.0\.res\.\d+\.conv1\.weight")
    widths = [state[f"decoder.conv_blocks.{level}.res.0.conv1.weight"].shape[0] for level in range(levels)][::-1]
    return {
        "channels": widths[0],
        "channel_mult": tuple(width // widths[0] for width in widths),
        "res_blocks": sum(lowest.fullmatch(name) is not None for name in state) - 1,
        "attention": "decoder.conv_blocks.0.attn.0.norm.weight" in state,
        "z_channels": state["decoder.conv_in.weight"].shape[1],
        "image_channels": state["decoder.conv_out.weight"].shape[0],
    }


UNUSED = ("quantize.codebook_used", "loss.", "encoder.", "quant_conv.")
"""Prefixes of names of tensors that are not needed: the encoder's weights, and tensors for training."""
NO_WEIGHTS = r"^quantize\.codebook_used$|^loss\."


def load_vq(source: str | os.PathLike[str], config: VQConfig | str | None = None) -> VQModel:
    """Read a VQ autoencoder from a file. Raises CheckpointError for a wrong file, ValueError for an unknown name.

    source: `.safetensors`, or LlamaGen's `.pt` or taming's `.ckpt`, of which only tensors are read.
    config: sizes, or a name of `PUBLISHED`; None: the sizes in the safetensors file's metadata, or else "vq_ds16"."""
    state, metadata = read_weights(source, NO_WEIGHTS)
    if config is None:
        config = VQConfig.from_dict(metadata["config"]) if "config" in metadata else PUBLISHED["vq_ds16"]
    elif isinstance(config, str):
        check_choice("config", config, PUBLISHED)
        config = PUBLISHED[config]
    state = from_taming(state)
    model = VQModel(config)
    codebook = state.get("quantize.embedding.weight")
    if codebook is not None and tuple(codebook.shape) != (config.codebook_size, config.codebook_embed_dim):
        raise CheckpointError(
            f"the codebook of {os.fspath(source)!r} has shape {list(codebook.shape)}; this configuration has "
            f"[{config.codebook_size}, {config.codebook_embed_dim}]"
        )
    check_fit(model.state_dict(), state, os.fspath(source), unused=UNUSED)
    model.load_state_dict(state, strict=False)
    return model.eval().requires_grad_(False)


def open_vq(vq: str | os.PathLike[str] | VQModel | None, device: Any = None) -> VQModel | None:
    """Move a VQ autoencoder to a device, reading it first if `vq` is a file. Returns None for None."""
    if vq is None:
        return None
    return (vq if isinstance(vq, VQModel) else load_vq(vq)).to(device).eval().requires_grad_(False)


def check_codebook(vq: Any, size: int, name: str, dim: int | None = None) -> None:
    """Raise ValueError unless the codebook of `vq` has `size` codes of width `dim`, as the model `name` needs."""
    if vq is None:
        return
    if vq.config.codebook_size != size:
        raise ValueError(f"the codebook has {vq.config.codebook_size} entries; {name} predicts {size} codes")
    if dim not in (None, vq.config.codebook_embed_dim):
        raise ValueError(f"codes have {vq.config.codebook_embed_dim} numbers; {name} reads {dim}")


DECODING = ("decoder.", "post_quant_conv.")
"""Prefixes of the decoder's names; checkpoints also hold the encoder, and sometimes tensors of training."""


class KLDecoder(nn.Module):
    """A decoder of continuous latents to images.

    config: sizes; `z_channels` is the latents' width, and the codebook's sizes are unused.
    latent_scale: factor that the latents of `decode` include; 0.2325 is MAR's for KL-16."""

    def __init__(self, config: VQConfig, latent_scale: float = 0.2325):
        super().__init__()
        self.config, self.latent_scale = config, latent_scale
        self.post_quant_conv = nn.Conv2d(config.z_channels, config.z_channels, 1)
        self.decoder = ConvDecoder(config)

    def decode(self, latents: Tensor) -> Tensor:
        """Scaled latents [B, z_channels, h, w] -> images [B, C, h * scale, w * scale], about [-1, 1]."""
        return self.decoder(self.post_quant_conv(latents / self.latent_scale))


def have_same_latents(vae_a: KLDecoder, vae_b: KLDecoder) -> bool:
    """Whether two decoders read the same latents: their sizes and first layers are equal, up to rounding."""
    if vae_a is vae_b:
        return True
    if (vae_a.config, vae_a.latent_scale) != (vae_b.config, vae_b.latent_scale):
        return False
    weight_a, weight_b = (vae.post_quant_conv.weight.float().cpu() for vae in (vae_a, vae_b))
    return torch.allclose(weight_a, weight_b, rtol=0.01, atol=0.001)


def load_kl(source: str | os.PathLike[str], norm_groups: int = 32) -> KLDecoder:
    """Read a decoder from a file with latent diffusion's names: `.safetensors`, or a `.ckpt` of which only tensors are
    read. Raises CheckpointError for a wrong file."""
    weights = from_taming(read_weights(source, rf"^(?!{'|'.join(map(re.escape, DECODING))})")[0])
    weights = {name: tensor for name, tensor in weights.items() if name.startswith(DECODING)}
    with checkpoint_errors(f"{os.fspath(source)!r} holds no decoder of a KL autoencoder", KeyError, ValueError):
        config = VQConfig(norm_groups=norm_groups, **decoder_sizes(weights))
    model = KLDecoder(config)
    check_fit(model.state_dict(), weights, os.fspath(source))
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)

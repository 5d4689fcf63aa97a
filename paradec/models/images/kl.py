"""The decoding half of latent diffusion's KL autoencoders: continuous latents to images.

Rombach et al., "High-Resolution Image Synthesis with Latent Diffusion Models", arXiv 2112.10752. MAR's `kl16.ckpt` is
one. Its layers are those of the VQ decoder (`paradec.models.images.vq`), without a codebook.
"""

from __future__ import annotations

import os
import re

import torch
from torch import Tensor, nn

from paradec.models.checkpoint import CheckpointError, check_fit
from paradec.models.images.vq import Decoder, VQConfig, from_taming
from paradec.models.weights import read_weights

KEPT = ("decoder.", "post_quant_conv.")
"""What decodes; checkpoints also hold the encoder, and sometimes what training needed."""


class KLDecoder(nn.Module):
    """Latents to images.

    Args:
        config: sizes, of which `z_channels` is the latents' width; those of a codebook are not read.
        latent_scale: what models multiply the latents with; 0.2325 is MAR's for KL-16.
    """

    def __init__(self, config: VQConfig, latent_scale: float = 0.2325):
        super().__init__()
        self.config, self.latent_scale = config, latent_scale
        self.post_quant_conv = nn.Conv2d(config.z_channels, config.z_channels, 1)
        self.decoder = Decoder(config)

    def decode(self, latents: Tensor) -> Tensor:
        """Scaled latents [B, z_channels, h, w] -> images [B, C, h * scale, w * scale], about [-1, 1]."""
        return self.decoder(self.post_quant_conv(latents / self.latent_scale))


def same_latents(one: KLDecoder, other: KLDecoder) -> bool:
    """Whether two decoders read the same latents: by their sizes, and by the layer that latents enter, which is told
    apart in any type."""
    if one is other:
        return True
    if (one.config, one.latent_scale) != (other.config, other.latent_scale):
        return False
    first, second = (vae.post_quant_conv.weight.float().cpu() for vae in (one, other))
    return torch.allclose(first, second, rtol=0.01, atol=0.001)


def load_kl(source: str | os.PathLike[str], norm_groups: int = 32) -> KLDecoder:
    """Read a decoder from a file with latent diffusion's names; its sizes are those of the tensors.

    Args:
        source: `.safetensors`, or a `.ckpt` of which tensors alone are read.
        norm_groups: of its group norms, which no tensor tells.

    Raises:
        CheckpointError: no such file, or one that does not hold such a decoder.
    """
    weights = from_taming(read_weights(source, rf"^(?!{'|'.join(map(re.escape, KEPT))})")[0])
    weights = {name: tensor for name, tensor in weights.items() if name.startswith(KEPT)}
    try:
        levels = 1 + max(int(found[1]) for name in weights if (found := re.match(r"decoder\.conv_blocks\.(\d+)", name)))
        blocks = [f"decoder.conv_blocks.{level}.res" for level in range(levels)]  # the lowest resolution first
        widths = [weights[f"{block}.0.conv1.weight"].shape[0] for block in reversed(blocks)]
        config = VQConfig(
            channels=widths[0],
            channel_mult=tuple(width // widths[0] for width in widths),
            res_blocks=sum(name.startswith(f"{blocks[0]}.") and name.endswith("conv1.weight") for name in weights) - 1,
            attention="decoder.conv_blocks.0.attn.0.norm.weight" in weights,
            z_channels=weights["decoder.conv_in.weight"].shape[1],
            image_channels=weights["decoder.conv_out.weight"].shape[0],
            norm_groups=norm_groups,
        )
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{os.fspath(source)!r} does not hold the decoder of a KL autoencoder: {error}"
        ) from error
    model = KLDecoder(config)
    needed = model.state_dict()
    check_fit(needed, weights, os.fspath(source))
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)

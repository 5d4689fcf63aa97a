"""MAR (Li et al., arXiv 2406.11838): a masked autoencoder over continuous image tokens, which a diffusion head draws.

Parameter names are those of the published checkpoints. Encoder and decoder can evaluate any subset of the positions,
with the keys and values of other positions from an earlier evaluation (ReCAP, arXiv 2505.19089)."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from paradec.core.checks import check_divides, check_int, check_type
from paradec.models.base import Adapter
from paradec.models.checkpoint import CheckpointError, check_fit, checkpoint_errors
from paradec.models.images.base import PictureModel, Snapshot, merge_defaults
from paradec.models.images.blocks import Block
from paradec.models.images.continuous import (
    ContinuousAnswer,
    ContinuousQuery,
    DiffusionHead,
    Keys,
    ReusedKeys,
    TokenDistribution,
)
from paradec.models.images.grid import Grid
from paradec.models.images.loading import count_blocks, find_files
from paradec.models.images.vq import KLDecoder, have_same_latents, load_kl
from paradec.models.weights import read_weights

PRESETS = {
    "mar_base": {"width": 768, "depth": 12, "heads": 12, "head_depth": 6, "head_width": 1024},
    "mar_large": {"width": 1024, "depth": 16, "heads": 16, "head_depth": 8, "head_width": 1280},
    "mar_huge": {"width": 1280, "depth": 20, "heads": 16, "head_depth": 12, "head_width": 1536},
}
"""Sizes of the published models (class-conditional ImageNet, 256 pixels: 16 x 16 tokens of KL-16's 16 channels)."""
PUBLISHED_WIDTHS = {
    768: {"heads": 12, "guidance_scale": 2.9},
    1024: {"heads": 16, "guidance_scale": 3.0},
    1280: {"heads": 16, "guidance_scale": 3.2},
}
"""Width -> numbers that the weights do not state: heads, and the authors' guidance."""


class MAR(nn.Module):
    """Encoder, decoder and diffusion head. Raises ValueError for a size out of its range.

    Args:
        side: tokens per side of the image. channels: of a token. width, depth, heads: of encoder and decoder each.
        classes: number of classes; the label `classes` is unconditional (for guidance).
        buffer: number of class tokens, which precede the image's tokens.
        head_depth, head_width: residual blocks of the diffusion head, and their width.
        eps: of the blocks' norms. decoder_depth: by default `depth`."""

    def __init__(
        self,
        side: int = 16,
        channels: int = 16,
        width: int = 1024,
        depth: int = 16,
        heads: int = 16,
        classes: int = 1000,
        buffer: int = 64,
        head_depth: int = 3,
        head_width: int = 1024,
        eps: float = 1e-6,
        decoder_depth: int | None = None,
    ):
        super().__init__()
        sizes = {"side": side, "channels": channels, "width": width, "heads": heads, "classes": classes}
        for name, value in {**sizes, "buffer": buffer, "head_width": head_width}.items():
            check_int(name, value, low=1)
        check_int("depth", depth, low=0)
        check_int("decoder_depth", decoder_depth, low=0, none=True)
        check_int("head_depth", head_depth, low=0)
        check_divides("heads", heads, "width", width)
        self.side, self.channels, self.classes, self.buffer = side, channels, classes, buffer
        self.positions = positions = side**2
        self.class_emb = nn.Embedding(classes, width)
        self.fake_latent = nn.Parameter(torch.zeros(1, width))
        self.z_proj = nn.Linear(channels, width)
        self.z_proj_ln = nn.LayerNorm(width, eps=1e-6)
        self.encoder_pos_embed_learned = nn.Parameter(torch.zeros(1, buffer + positions, width))
        self.encoder_blocks = nn.ModuleList(Block(width, heads, layer, eps) for layer in range(depth))
        self.encoder_norm = nn.LayerNorm(width, eps=eps)
        self.decoder_embed = nn.Linear(width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_pos_embed_learned = nn.Parameter(torch.zeros(1, buffer + positions, width))
        decoder_depth = depth if decoder_depth is None else decoder_depth
        self.decoder_blocks = nn.ModuleList(Block(width, heads, layer, eps) for layer in range(decoder_depth))
        self.decoder_norm = nn.LayerNorm(width, eps=eps)
        self.diffusion_pos_embed_learned = nn.Parameter(torch.zeros(1, positions, width))
        self.diffloss = DiffusionHead(channels, width, head_width, head_depth)

    def encode(
        self, tokens: Tensor, positions: Tensor, labels: Tensor, past: Keys | None = None, with_buffer: bool = True
    ) -> tuple[Tensor, Keys]:
        """Encode `buffer` class tokens, then N known tokens, of R rows: [R, buffer + N, width], and keys and values.

        Args:
            tokens: [R, N, channels]. positions: [R, N] int64, in the image, in raster order. labels: [R] int64.
            past: keys and values of other tokens to attend to. with_buffer: False leaves out the class tokens."""
        position = self.encoder_pos_embed_learned[0]
        x = self.z_proj(tokens) + position[self.buffer + positions]
        if with_buffer:
            null = (labels == self.classes).unsqueeze(-1)
            label = torch.where(null, self.fake_latent, self.class_emb(labels.clamp(max=self.classes - 1)))
            x = torch.cat((label.unsqueeze(1) + position[: self.buffer], x), 1)
        x, keys = run(self.encoder_blocks, self.z_proj_ln(x), past)
        return self.encoder_norm(x), keys

    def decode(
        self, encoded: Tensor, columns: Tensor, positions: Tensor, past: Keys | None = None, with_buffer: bool = True
    ) -> tuple[Tensor, Keys]:
        """Compute the diffusion head's conditions [R, M, width] at M positions, keys and values (class tokens first).

        Args:
            encoded: from `encode`. columns: [R, N] int64: the tokens' indices in `positions`.
            positions: [R, M] int64, in the image; positions without a token get the mask token.
            past: as for `encode`. with_buffer: as it was for `encode`."""
        position = self.decoder_pos_embed_learned[0]
        x = self.decoder_embed(encoded)
        start = self.buffer if with_buffer else 0
        image = self.mask_token.expand(len(positions), positions.shape[1], -1)
        # under autocast, the dtype of x differs from the parameter's
        image = image.scatter(1, columns.unsqueeze(-1).expand(-1, -1, image.shape[-1]), x[:, start:].to(image.dtype))
        image = image + position[self.buffer + positions]
        if with_buffer:
            image = torch.cat((x[:, :start] + position[:start], image), 1)
        x, keys = run(self.decoder_blocks, image, past)
        return self.decoder_norm(x)[:, start:] + self.diffusion_pos_embed_learned[0][positions], keys


class CallStore:
    """Keys and values of a call's columns by layer (`keys`). The columns also attend to the keys in `past`."""

    def __init__(self, past: Keys | None):
        self.past = past
        self.keys: Keys = []

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        self.keys.append((key, value))
        if self.past is None:
            return key, value
        return torch.cat((self.past[layer][0], key), 2), torch.cat((self.past[layer][1], value), 2)


def run(blocks: nn.ModuleList, x: Tensor, past: Keys | None) -> tuple[Tensor, Keys]:
    """Run blocks on x [R, n, width], whose columns also attend to `past`. Returns the output, and keys and values."""
    store = CallStore(past)
    for block in blocks:
        x = block(x, None, store)
    return x, store.keys


# ---- the adapter ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MARFacts:
    name: str
    classes: int


class MARModel(PictureModel, Adapter):
    """The adapter of a `MAR`.

    vae: a `paradec.models.images.vq.KLDecoder`; None makes only latents.
    defaults: `steps` and `guidance_scale` of requests.
    Raises TypeError for another kind of module, ValueError for a VAE of the wrong width or an unknown default."""

    makes = "continuous image"
    family = "continuous"
    default_sampler = "mar"
    sampler_names = {"recap": ("mar", "recap")}
    sampler_settings = ("temperature",)
    decoder_option = "vae"
    title = "MAR (mar, recap or cspd)"
    module: MAR

    def __init__(
        self,
        module: MAR,
        vae: KLDecoder | None = None,
        defaults: Mapping[str, Any] | None = None,
        name: str | None = None,
    ):
        check_type("module", module, MAR)
        if vae is not None:
            check_type("vae", vae, KLDecoder)
        if vae is not None and vae.config.z_channels != module.channels:
            raise ValueError(f"vae decodes {vae.config.z_channels} channels; the tokens have {module.channels}")
        super().__init__(module.eval())
        self.vae, self.facts = vae, MARFacts(name or "MAR", module.classes)
        self.defaults = merge_defaults({"steps": min(64, module.positions), "guidance_scale": 1.0}, defaults)

    def __call__(self, query: ContinuousQuery) -> ContinuousAnswer:
        with self.evaluation_context():
            module = self.module

            def repeat(x: Tensor) -> Tensor:
                return x.repeat(query.branches, *[1] * (x.ndim - 1))

            null = torch.full_like(query.labels, module.classes)
            labels = torch.cat((query.labels, *[null] * (query.branches - 1)))
            with_buffer = query.reused_keys is None or not query.keep_buffer
            tokens, known, targets, columns = map(repeat, (query.tokens, query.known, query.targets, query.columns))
            past = (None, None) if query.reused_keys is None else (query.reused_keys.encoder, query.reused_keys.decoder)
            encoded, encoder = module.encode(tokens.to(module.mask_token.dtype), known, labels, past[0], with_buffer)
            decoded, decoder = module.decode(encoded, columns, targets, past[1], with_buffer)
            index = repeat(query.wanted).unsqueeze(-1).expand(-1, -1, decoded.shape[-1])
            conditions = decoded.gather(1, index)  # [R, W, width]
            noise = query.noise.to(torch.promote_types(conditions.dtype, torch.float32)).flatten(0, 1)
            flat = conditions.flatten(0, 1)
            output = module.diffloss.distribution(flat, noise, query.temperature, query.guidance, query.sections)
            fields = (output.mean, output.std, output.half_log_variance)
            distribution = TokenDistribution(*(field.unflatten(0, query.wanted.shape) for field in fields))
            reused_keys = None
            if query.drop is not None:
                reused_keys = self._select_reused_keys(encoder, decoder, repeat(query.drop), query.keep_buffer)
            return ContinuousAnswer(distribution.mean, conditions, reused_keys, distribution)

    def _select_reused_keys(self, encoder: Keys, decoder: Keys, drop: Tensor, keep_buffer: bool) -> ReusedKeys:
        """Select keys and values of a full step for later calls: the decoder's without positions `drop` [R, U].
        Without `keep_buffer`, class tokens are left out of both the encoder's and the decoder's."""
        num_buffer, num_positions = self.module.buffer, self.module.positions
        dropped = torch.zeros(len(drop), num_positions, dtype=torch.int, device=drop.device).scatter(1, drop, 1)
        index = num_buffer + dropped.argsort(dim=1, stable=True)[:, : num_positions - drop.shape[1]]
        if keep_buffer:
            index = torch.cat((torch.arange(num_buffer, device=drop.device).expand(len(drop), -1), index), 1)

        def gather(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            gather_index = index[:, None, :, None].expand(-1, pair[0].shape[1], -1, pair[0].shape[3])
            return pair[0].gather(2, gather_index), pair[1].gather(2, gather_index)

        if not keep_buffer:
            encoder = [(key[:, :, num_buffer:], value[:, :, num_buffer:]) for key, value in encoder]
        return ReusedKeys(encoder, [gather(pair) for pair in decoder])

    def check_draft(self, draft: MARModel) -> None:
        """Raise ValueError unless `draft` makes the same kind of tokens as this model."""
        draft_name, name = draft.facts.name, self.facts.name
        for field, unit in (("positions", "tokens"), ("channels", "channels"), ("classes", "classes")):
            draft_count, count = getattr(draft.module, field), getattr(self.module, field)
            if draft_count != count:
                raise ValueError(f"draft {draft_name} has {draft_count} {unit}, {name} has {count}; they must be equal")
        if draft.device != self.device:
            raise ValueError(f"draft {draft_name} is on {draft.device}, {name} on {self.device}; use one device")
        if self.vae is not None and draft.vae is not None and not have_same_latents(self.vae, draft.vae):
            raise ValueError(f"draft {draft_name} has another VAE than {name}, so its tokens mean different pictures")

    def read(self, state: Any, grid: Grid) -> Snapshot:
        num_written = -np.diff(state.num_left[: state.index + 1])  # the same for all rows
        accepted = num_written.reshape(-1, 1).repeat(state.batch, 1)
        return Snapshot(state.tokens.cpu(), state.done, accepted, [0] * state.batch, state.draft_nfe.tolist())

    def latent(self, tokens: Tensor, grid: Grid) -> Tensor:
        return self.image(tokens)

    def image(self, tokens: Tensor) -> Tensor:
        """Tokens [B, positions, channels] -> latent [B, channels, side, side], which includes the VAE's `latent_scale`
        (0.2325 for KL-16)."""
        return rearrange(tokens, "b (h w) c -> b c h w", h=self.module.side)

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        return self.square_grid(self.module.side, 1, height, width)  # one id stands for all continuous tokens

    def _pixels(self, latent: Tensor) -> Tensor:
        assert self.vae is not None
        return self.vae.decode(latent.to(self.vae.post_quant_conv.weight.dtype))


def load_mar(
    source: str | os.PathLike[str],
    *,
    vae: str | os.PathLike[str] | KLDecoder | None = None,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> MARModel:
    """Read a published MAR checkpoint: safetensors, or a `.pth` (only its tensors are read; averaged weights,
    "model_ema", if it has them). Raises CheckpointError for wrong files.

    source: the file, or a folder with `model.safetensors` and `config.json` ("heads"; optionally "eps", "vae", the
        VAE's file, and "defaults" of requests).
    vae: the VAE that decodes the tokens, or its file (`kl16.ckpt`), if the folder states none.
    heads: of encoder and decoder; None: those of config.json, or else of the published model of the same width.
    dtype: of the network's parameters; float32 by default. Tokens are float32 at least."""
    name, path, fields, vae = find_files(source, "vae", vae)
    weights = read_weights(path, nested=("model_ema", "model"), mmap=True)[0]
    published = PUBLISHED_WIDTHS.get(weights["mask_token"].shape[-1] if "mask_token" in weights else 0, {})
    with checkpoint_errors(f"{str(path)!r} does not hold the weights of a MAR", LookupError, TypeError):
        sizes: dict[str, Any] = read_sizes(weights) | ({"eps": fields["eps"]} if "eps" in fields else {})
        heads = fields.get("heads", published.get("heads")) if heads is None else heads
        if heads is None:
            raise CheckpointError(f"no published MAR has the width {sizes['width']}; give heads=...")
        module = MAR(heads=heads, **sizes)
    check_fit(module.state_dict(), weights, str(path), "a MAR")
    module.load_state_dict(weights)
    module = module.to(device=device, dtype=dtype or torch.float32).requires_grad_(False)
    if vae is not None and not isinstance(vae, KLDecoder):
        vae = load_kl(vae, fields.get("norm_groups", 32))
    vae = None if vae is None else vae.to(device)
    guidance = {"guidance_scale": published["guidance_scale"]} if published else {}
    return MARModel(module, vae, guidance | fields.get("defaults", {}), name)


def read_sizes(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """The sizes of a `MAR`, except `heads` and `eps`, from its weights. Raises KeyError for a missing tensor."""
    positions, width = weights["diffusion_pos_embed_learned"].shape[1:]
    return {
        "side": math.isqrt(positions),
        "channels": weights["z_proj.weight"].shape[1],
        "width": width,
        "depth": count_blocks(weights, "encoder_blocks"),
        "decoder_depth": count_blocks(weights, "decoder_blocks"),
        "classes": weights["class_emb.weight"].shape[0],
        "buffer": weights["encoder_pos_embed_learned"].shape[1] - positions,
        "head_depth": count_blocks(weights, "diffloss.net.res_blocks"),
        "head_width": weights["diffloss.net.input_proj.weight"].shape[0],
    }

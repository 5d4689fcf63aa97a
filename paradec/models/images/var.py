"""VAR (Tian et al., "Visual Autoregressive Modeling", arXiv 2404.02905): pictures scale by scale, one scale per step.

Parameter names are those of the published checkpoints (`var_d16.pth` to `var_d36.pth`)."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear, normalize, scaled_dot_product_attention

from paradec.core.checks import check_bool, check_divides, check_int, check_type, short_repr
from paradec.models.base import Adapter
from paradec.models.checkpoint import CheckpointError, check_fit, checkpoint_errors
from paradec.models.images.base import PictureModel, Snapshot, merge_defaults
from paradec.models.images.blocks import mlp
from paradec.models.images.grid import Grid
from paradec.models.images.loading import count_blocks, find_files
from paradec.models.images.multi_scale_vq import PUBLISHED_SCALES, MultiScaleVQ, check_scales, load_multi_scale_vq
from paradec.models.images.vq import check_codebook
from paradec.models.weights import NESTED, read_weights

HEAD = 64
"""Head width of the published models."""
BUFFERS = ("lvl_1L", "attn_bias_for_masking")
"""Tensors of published files that are not read, since they follow from the scales."""
MAX_LOG_QUERY_FACTOR = math.log(100)
"""Bound of `scale_mul_1H11`, the logarithm of the factor of normalised queries."""
DEFAULTS = {"guidance_scale": 1.0, "temperature": 1.0, "top_k": None, "top_p": None}
PUBLISHED_DEFAULTS = {"guidance_scale": 2.5, "top_k": 900, "top_p": 0.96}
"""Settings of the authors' figures; their cfg of 1.5 corresponds to guidance_scale = 1 + cfg."""


def scale_ends(scales: Sequence[int]) -> list[int]:
    """Number of tokens up to the end of each scale; the last is the number of all tokens."""
    return list(accumulate(side**2 for side in scales))


class ScaleStore:
    """Keys and values of the evaluated scales, in order. The first call allocates 2 * layers * rows * heads * length *
    head_dim numbers; `length` excludes the last scale, whose keys and values are never read."""

    def __init__(
        self, layers: int, rows: int, heads: int, length: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ):
        self.shape = (layers, 2, rows, heads, length, head_dim)
        self.dtype, self.device = dtype, device
        self.data: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def release(self) -> None:
        self.data = None

    def append(self, layer: int, begin: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [R, heads, n, head_dim] of a layer (the last scale's are not stored). Returns all keys
        and values, [R, heads, begin + n, head_dim]."""
        if self.data is None:
            self.data = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        stored, stop = self.data[layer], begin + keys.shape[2]
        if stop <= stored.shape[3]:
            stored[0, :, :, begin:stop], stored[1, :, :, begin:stop] = keys, values
            return stored[0, :, :, :stop], stored[1, :, :, :stop]
        past = stored[:, :, :, :begin]
        return torch.cat((past[0], keys.to(self.dtype)), 2), torch.cat((past[1], values.to(self.dtype)), 2)


@dataclass
class ScaleQuery:
    """One call for `B` rows, which evaluates the scales from `first` to `last`. Under guidance (`branches == 2`) every
    row is also evaluated without its class. A token sees its own scale and all coarser scales."""

    rows: np.ndarray
    """[B] int64, on the host."""
    inputs: Tensor
    """[B, n, C]: inputs of the evaluated scales except scale 0, whose input is the class. C is the codes' width."""
    labels: Tensor
    """[B] int64."""
    first: int
    last: int
    """The scale whose logits are returned."""
    store: ScaleStore
    """Holds the scales before `first`; the call appends the evaluated scales."""
    branches: int = 1
    wanted: int = 1
    """Number of branches whose logits are returned."""
    masked: bool = True
    """Whether finer scales of the call are hidden from coarser ones."""
    is_draft: bool = False
    """Whether the query is for the drafter instead of the model."""
    forwarded: np.ndarray | None = None
    """[B] int64, on the host: number of positions evaluated for each row in one branch."""
    kind: str = "window"
    positions: Tensor | None = field(default=None)
    """[B, n] int64: evaluated positions, for traces."""


@dataclass
class ScaleAnswer:
    logits: Tensor
    """[wanted * B, n, V]: logits of the query's last scale, of n tokens."""
    codes: Tensor
    """[V, C]: the codebook."""
    add_scale: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor | None]]
    """Function (features [B, C, s, s], code vectors [B, n, C] of a scale, its index) -> features with this scale, and
    the input [B, n', C] of the next scale (None after the last scale)."""


class VAR(nn.Module):
    """The network. Raises ValueError for a size out of its range.

    Args:
        scales: sides of the code maps, ascending. depth: number of blocks. width, heads: of a block.
        classes: number of classes; label `classes` is unconditional (for guidance).
        codebook_size, code_dim: of the VQ autoencoder. mlp_ratio: feed-forward width divided by `width`.
        shared_adaln: whether one layer modulates all blocks (the 512-pixel model); otherwise each block has a layer.
        l2_norm: whether queries and keys are normalised (all published models)."""

    def __init__(
        self,
        scales: Sequence[int] = PUBLISHED_SCALES[256],
        depth: int = 16,
        width: int = 1024,
        heads: int = 16,
        classes: int = 1000,
        codebook_size: int = 4096,
        code_dim: int = 32,
        mlp_ratio: float = 4.0,
        shared_adaln: bool = False,
        l2_norm: bool = True,
        eps: float = 1e-6,
    ):
        super().__init__()
        check_scales(scales)
        sizes = {"width": width, "heads": heads, "classes": classes, "code_dim": code_dim}
        for name, value in {**sizes, "depth": depth, "codebook_size": codebook_size}.items():
            check_int(name, value, low=1)
        check_bool("shared_adaln", shared_adaln)
        check_bool("l2_norm", l2_norm)
        check_divides("heads", heads, "width", width)
        self.scales, self.width, self.heads, self.classes = tuple(scales), width, heads, classes
        self.codebook_size, self.code_dim, self.eps, self.shared_adaln = codebook_size, code_dim, eps, shared_adaln
        self.ends = scale_ends(self.scales)
        self.word_embed = nn.Linear(code_dim, width)
        self.class_emb = nn.Embedding(classes + 1, width)
        self.pos_start = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_1LC = nn.Parameter(torch.zeros(1, self.ends[-1], width))
        self.lvl_embed = nn.Embedding(len(self.scales), width)
        if shared_adaln:
            self.shared_ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        hidden = round(width * mlp_ratio)
        self.blocks = nn.ModuleList(Block(width, heads, hidden, shared_adaln, l2_norm, eps) for _ in range(depth))
        self.head_nm = HeadNorm(width, eps)
        self.head = nn.Linear(width, codebook_size)

    def begin(self, scale: int) -> int:
        """Count the tokens before a scale."""
        return self.ends[scale - 1] if scale else 0

    def embed(self, condition: Tensor, inputs: Tensor, first: int, last: int) -> Tensor:
        """Embed the n tokens of scales `first` to `last`: [R, n, width]. condition: [R, width] of the class. inputs:
        [R, n', code_dim] of the n' tokens that are not in scale 0."""
        begin, stop = self.begin(first), self.ends[last]
        x = self.word_embed(inputs)
        if first == 0:
            x = torch.cat((condition.unsqueeze(1) + self.pos_start, x), 1)
        level = self.lvl_embed(self.levels(begin, stop))
        return x + level + self.pos_1LC[:, begin:stop]

    def levels(self, begin: int, stop: int) -> Tensor:
        """[stop - begin] int64: the scale of each token."""
        device = self.pos_1LC.device
        return torch.bucketize(
            torch.arange(begin, stop, device=device), torch.tensor(self.ends, device=device), right=True
        )

    def visible(self, first: int, last: int) -> Tensor | None:
        """Mask [n, begin + n] bool for the n tokens of scales `first` to `last`, which see their own and coarser
        scales. None means that all tokens are visible."""
        if first == last:
            return None
        levels = self.levels(0, self.ends[last])
        return levels[self.begin(first) :].unsqueeze(1) >= levels

    def forward(
        self,
        labels: Tensor,
        inputs: Tensor,
        first: int = 0,
        last: int | None = None,
        store: ScaleStore | None = None,
        wanted: int | None = None,
        masked: bool = True,
    ) -> Tensor:
        """Evaluate scales `first` to `last` (by default all): logits [R, n, V], or fewer with `wanted`.

        Args:
            labels: [R] int64; label `classes` is unconditional. inputs: [R, n', code_dim] of the scales except scale 0.
            store: has the scales before `first`; the call appends the evaluated scales.
            wanted: return only logits of the first `wanted` rows and of the scale `last`; None: of all rows and scales.
            masked: whether finer scales of the call are hidden from coarser ones, as in training."""
        last = len(self.scales) - 1 if last is None else last
        condition = self.class_emb(labels)
        x = self.embed(condition, inputs, first, last)
        begin, mask = self.begin(first), self.visible(first, last) if masked else None
        shared = self.shared_ada_lin(condition).unflatten(-1, (1, 6, -1)) if self.shared_adaln else None
        for layer, block in enumerate(self.blocks):
            x = block(x, condition if shared is None else shared, mask, store, layer, begin)
        if wanted is not None:
            x, condition = x[:wanted, -(self.scales[last] ** 2) :], condition[:wanted]
        return self.head(self.head_nm(x, condition))


class Block(nn.Module):
    """A pre-norm block; the class scales, shifts and gates attention and feed-forward."""

    def __init__(self, width: int, heads: int, hidden: int, shared_adaln: bool, l2_norm: bool, eps: float):
        super().__init__()
        self.eps = eps
        self.attn = Attention(width, heads, l2_norm)
        self.ffn = mlp(width, hidden, width, "tanh")
        if shared_adaln:
            self.ada_gss = nn.Parameter(torch.zeros(1, 1, 6, width))
        else:
            self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        mask: Tensor | None,
        store: ScaleStore | None,
        layer: int,
        begin: int,
        addend: Tensor | None = None,
    ) -> Tensor:
        """x [R, n, width]; condition [R, width], or [R, 1, 6, width] with shared_adaln; addend [n, width] is added
        after attention."""
        if hasattr(self, "ada_gss"):
            modulation = self.ada_gss + condition
        else:
            modulation = self.ada_lin(condition).unflatten(-1, (1, 6, -1))
        gate_attn, gate_ffn, scale_attn, scale_ffn, shift_attn, shift_ffn = modulation.unbind(2)  # [R, 1, width] each
        size = (x.shape[-1],)
        attention_output = self.attn(
            torch.addcmul(shift_attn, layer_norm(x, size, eps=self.eps), scale_attn + 1), mask, store, layer, begin
        )
        x = torch.addcmul(x, gate_attn, attention_output)
        x = x if addend is None else x + addend
        return torch.addcmul(
            x, gate_ffn, self.ffn(torch.addcmul(shift_ffn, layer_norm(x, size, eps=self.eps), scale_ffn + 1))
        )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, l2_norm: bool):
        super().__init__()
        self.heads = heads
        self.mat_qkv = nn.Linear(width, 3 * width, bias=False)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.zero_k_bias: Tensor
        self.register_buffer("zero_k_bias", torch.zeros(width))
        self.proj = nn.Linear(width, width)
        self.scale = 1.0 if l2_norm else 0.25 / math.sqrt(width // heads)
        if l2_norm:
            self.scale_mul_1H11 = nn.Parameter(torch.full((1, heads, 1, 1), math.log(4.0)))

    def forward(self, x: Tensor, mask: Tensor | None, store: ScaleStore | None, layer: int, begin: int) -> Tensor:
        """x [R, n, width]; mask [n, begin + n] bool."""
        bias = torch.cat((self.q_bias, self.zero_k_bias, self.v_bias))
        qkv = linear(x, self.mat_qkv.weight, bias)
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [R, heads, n, d] each
        if hasattr(self, "scale_mul_1H11"):
            query = normalize(query, dim=-1) * self.scale_mul_1H11.clamp(max=MAX_LOG_QUERY_FACTOR).exp()
            key = normalize(key, dim=-1)
        if store is not None:
            key, value = store.append(layer, begin, key, value)
        output = scaled_dot_product_attention(query.to(value.dtype), key, value, mask, scale=self.scale)
        return self.proj(output.transpose(1, 2).flatten(2))


class HeadNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.ada_lin = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.ada_lin(condition).unflatten(-1, (1, 2, -1)).unbind(2)
        return torch.addcmul(shift, layer_norm(x, x.shape[-1:], eps=self.eps), scale + 1)


# ---- the adapter ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaleFacts:
    name: str
    scales: tuple[int, ...]
    classes: int
    vocab_size: int
    code_dim: int

    @property
    def ends(self) -> list[int]:
        return scale_ends(self.scales)


class ScalePictures(PictureModel):
    """Conversion of codes of all scales to pictures, for `VAR` and its students."""

    decoder_option = "vq"
    vq: Any

    def latent(self, tokens: Tensor, grid: Grid | None = None) -> Tensor:
        """Return `features(tokens)` on the host."""
        return self.features(tokens).cpu()

    @torch.no_grad()
    def features(self, tokens: Tensor) -> Tensor:
        """Tokens [B, L] int64 of all scales, or their code vectors [B, L, C] float -> features [B, C, s, s]."""
        codes = tokens.to(self.device)
        codes = codes.to(self.vq.codes.dtype) if codes.is_floating_point() else self.vq.codes[codes]
        return self.vq.inputs(codes, self.module.scales)[1]

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        return self.square_grid(self.module.scales[-1], self.module.codebook_size, height, width)

    def _pixels(self, latent: Tensor) -> Tensor:
        return self.vq.decode(latent.to(self.device))


class VARModel(ScalePictures, Adapter):
    """The adapter of a `VAR`.

    vq: its multi-scale VQ autoencoder. Sampling needs it: the codes of a scale are the input of the next scale.
    defaults: `guidance_scale`, `temperature`, `top_k`, `top_p` of requests.
    Raises TypeError for another kind of module, ValueError for a codebook of the wrong size or an unknown default."""

    makes = "scale image"
    family = "scales"
    default_sampler = "var"
    module: VAR

    def __init__(
        self, module: VAR, vq: MultiScaleVQ, defaults: Mapping[str, Any] | None = None, name: str | None = None
    ):
        check_type("module", module, VAR)
        check_type("vq", vq, MultiScaleVQ, ": the codes of a scale are the input of the next")
        super().__init__(module.eval())
        check_codebook(vq, module.codebook_size, name or "VAR", module.code_dim)
        self.vq = vq.eval()
        self.facts = ScaleFacts(name or "VAR", module.scales, module.classes, module.codebook_size, module.code_dim)
        self.defaults = merge_defaults(DEFAULTS, defaults)

    @property
    def shared(self) -> dict[str, Any]:
        return {"vq": self.vq}

    @property
    def codes(self) -> Tensor:
        return self.vq.codes.detach()

    def defaults_with(self, sampler: Any) -> dict[str, Any]:
        """As in the base class, with the defaults of the sampler's authors."""
        return super().defaults_with(sampler) | dict(sampler.request_defaults)

    def __call__(self, query: ScaleQuery, store: Any = None) -> ScaleAnswer:
        with self.evaluation_context():
            null = torch.full_like(query.labels, self.module.classes)
            labels = torch.cat((query.labels, *[null] * (query.branches - 1)))
            inputs = query.inputs.repeat(query.branches, 1, 1).to(self.module.word_embed.weight.dtype)
            num_wanted = query.wanted * len(query.labels)
            logits = self.module(labels, inputs, query.first, query.last, query.store, num_wanted, query.masked)
        return ScaleAnswer(logits, self.codes, self.add_scale)

    def store(self, rows: int, scales: int) -> ScaleStore:
        """Make an empty store for the first `scales` scales. rows: (rows of a call) * (its branches). Under autocast,
        stored keys are rounded to the parameters' dtype."""
        module = self.module
        length = module.begin(scales)
        return ScaleStore(
            len(module.blocks), rows, module.heads, length, module.width // module.heads, self.dtype, self.device
        )

    @torch.no_grad()
    def add_scale(self, features: Tensor, codes: Tensor, index: int) -> tuple[Tensor, Tensor | None]:
        scales = self.module.scales
        features = self.vq.add(features, codes.to(features.dtype), index, scales)
        is_last = index == len(scales) - 1
        return features, None if is_last else self.vq.downsample(features, scales[index + 1])

    def read(self, state: Any, grid: Grid) -> Snapshot:
        sides = self.module.scales[: state.index]
        accepted = np.array([[side**2] * state.batch for side in sides], np.int64).reshape(-1, state.batch)
        tokens = state.tokens if state.codes is None else state.codes
        prompt_lengths = [self.module.begin(len(self.module.scales) - 1)] * state.batch
        return Snapshot(tokens.cpu(), state.done, accepted, prompt_lengths, state.draft_nfe.tolist())

    def stages(self, tokens: Tensor) -> Iterable[Tensor]:
        for stop in self.module.ends:
            yield self.decode(tokens[:, :stop])

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Images [B, channels, H, W] in [0, 1] -> tokens [B, L] int64. Raises ValueError for another size."""
        side = self.module.scales[-1] * self.vq.config.scale
        if images.ndim != 4 or images.shape[-2:] != (side, side):
            raise ValueError(f"images have shape {tuple(images.shape)}; expected [batch, channels, {side}, {side}]")
        images = images.to(self.device, self.vq.codes.dtype) * 2 - 1
        return torch.cat(self.vq.encode(images, self.module.scales), 1)


def load_var(
    source: str | os.PathLike[str],
    *,
    vq: str | os.PathLike[str] | MultiScaleVQ | None = None,
    scales: Sequence[int] | None = None,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> VARModel:
    """Read a published checkpoint (`var_d16.pth` to `var_d36.pth`), or a folder. Raises CheckpointError or ValueError
    for wrong files, scales or sizes.

    source: the file, or a folder with `model.safetensors` and `config.json`: `scales`, `heads`, and optionally `vq`,
        the autoencoder's file, and `defaults` of requests.
    vq: the autoencoder or its file (`vae_ch160v4096z32.pth`), if the folder states none.
    scales: sides of the code maps; None: config.json's, or else those of the published models (680 or 2240 tokens).
    heads: number of heads; None: config.json's, or else that of the weight `scale_mul_1H11`, or else width // 64.
    dtype: of the network's parameters; float32 by default."""
    module, vq, name, fields, is_published = read_network(VAR, "VAR", source, vq, scales, heads, dtype, device)
    return VARModel(module, vq, (PUBLISHED_DEFAULTS if is_published else {}) | fields.get("defaults", {}), name)


def read_network(
    network: type[VAR],
    kind: str,
    source: str | os.PathLike[str],
    vq: str | os.PathLike[str] | MultiScaleVQ | None,
    scales: Sequence[int] | None,
    heads: int | None,
    dtype: torch.dtype | None,
    device: str | torch.device | None,
    extra: Sequence[str] = (),
    nested: Sequence[str] = NESTED,
    to_var_weights: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict,
) -> tuple[Any, MultiScaleVQ, str, dict[str, Any], bool]:
    """Read the parts of the adapter of a VAR or its student: network, VQ, name of the model, fields of config.json, and
    whether the scales were inferred from the weights. Raises as `load_var`.

    kind: the network's name in messages. extra: names of required weights that a VAR lacks. nested: as in
    `read_weights`. to_var_weights: converts the weights to those of a VAR, for `read_sizes`."""
    name, path, fields, vq = find_files(source, "vq", vq)
    if vq is None:
        raise CheckpointError(f"{name} needs its multi-scale VQ: give vq=..., the file vae_ch160v4096z32.pth")
    weights, metadata = read_weights(path, "|".join(BUFFERS), nested)
    weights = {key: tensor for key, tensor in weights.items() if key not in BUFFERS}
    if missing := [key for key in extra if key not in weights]:
        raise CheckpointError(f"{str(path)!r} holds no {kind}: it lacks {', '.join(missing)}")
    config = fields or metadata.get("config", {})
    scales = scales or config.get("scales") or config.get("patch_nums")
    with checkpoint_errors(f"{str(path)!r} holds no {kind}", LookupError, ValueError):
        sizes = read_sizes(to_var_weights(weights), scales, heads or config.get("heads") or config.get("num_heads"))
        module = network(**sizes).to(dtype or torch.float32)  # before loading: the file may have a wider dtype
    # buffers, which are zeros, may be missing in files
    check_fit(module.state_dict(), weights, str(path), optional={key for key, _ in module.named_buffers()})
    module.load_state_dict(weights, strict=False)
    vq = vq if isinstance(vq, MultiScaleVQ) else load_multi_scale_vq(vq)
    # codes are at least float32
    vq = vq.to(device=device, dtype=torch.promote_types(dtype or torch.float32, torch.float32))
    return module.to(device).requires_grad_(False), vq, name, fields, scales is None


def read_sizes(
    weights: Mapping[str, Tensor], scales: Sequence[int] | None = None, heads: int | None = None
) -> dict[str, Any]:
    """Infer the arguments of `VAR` from its weights; `scales` and `heads` only if they are None. Raises KeyError for a
    missing tensor, ValueError for scales that do not fit."""
    length, width = weights["pos_1LC"].shape[1:]
    if scales is None:
        scales = next((sides for sides in PUBLISHED_SCALES.values() if scale_ends(sides)[-1] == length), None)
        if scales is None:
            raise ValueError(f"its pictures have {length} tokens, unlike any published model's; give scales=...")
    check_scales(scales)
    levels = weights["lvl_embed.weight"].shape[0]
    if len(scales) != levels or scale_ends(scales)[-1] != length:
        raise ValueError(
            f"scales={short_repr(tuple(scales))} are {len(scales)} maps of {scale_ends(scales)[-1]} tokens; the "
            f"weights have {levels} maps of {length}"
        )
    scale = weights.get("blocks.0.attn.scale_mul_1H11")
    if heads is None:
        heads = width // HEAD if scale is None else scale.shape[1]
    return {
        "scales": tuple(scales),
        "depth": count_blocks(weights, "blocks"),
        "width": width,
        "heads": heads,
        "classes": weights["class_emb.weight"].shape[0] - 1,
        "codebook_size": weights["head.weight"].shape[0],
        "code_dim": weights["word_embed.weight"].shape[1],
        "mlp_ratio": weights["blocks.0.ffn.fc1.weight"].shape[0] / width,
        "shared_adaln": "shared_ada_lin.1.weight" in weights,
        "l2_norm": scale is not None,
    }

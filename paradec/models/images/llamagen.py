"""LlamaGen (Sun et al., arXiv 2406.06525): a Llama with two-dimensional rotary angles that makes codes row by row.

Parameter names are those of the published checkpoints. Unlike a plain Llama, the published code

- rotates pairs of adjacent components of a head: half of the pairs by the row, half by the column of the token's cell;
- multiplies queries and keys of condition tokens by 0 (cosine and sine are 0), so their attention scores are 0;
- pads captions on the left. `LlamaGen` does not pad them, with equal results: angles depend only on the cell."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad, rms_norm, scaled_dot_product_attention, silu

from paradec.core.checks import check_choice, check_divides, check_int, check_number
from paradec.core.facts import ModelFacts
from paradec.core.query import Query
from paradec.core.rows import row_layout
from paradec.models.checkpoint import CheckpointError, check_fit, checkpoint_errors
from paradec.models.images.base import (
    ImageModel,
    ImageRequest,
    exact_prompts,
    list_labels,
    merge_defaults,
    request_rows,
    widen,
)
from paradec.models.images.blocks import mlp
from paradec.models.images.grid import Grid
from paradec.models.images.loading import NOT_SIZES, count_blocks, find_files
from paradec.models.images.vq import VQModel, check_codebook, open_vq
from paradec.models.weights import NESTED, PICKLES, read_weights

# ---- network --------------------------------------------------------------------------------------------------------

CONDITIONS = ("c2i", "t2i")


@dataclass(frozen=True)
class LlamaGenConfig:
    """Sizes of a LlamaGen.

    dim, n_layer, n_head: width, layers, heads (a head's width must be a multiple of 4).
    n_kv_head: heads of keys and values; None: `n_head`.
    ffn_dim: width of the feed-forward; None: 8/3 dim, rounded up to a multiple of `multiple_of`.
    grid: codes along one side of the (square) training images.
    condition: "c2i" (a class label; label `num_classes` is unconditional) or "t2i" (features of a caption).
    caption_dim, caption_length: for t2i, width of a feature and maximum number of features of a caption."""

    dim: int
    n_layer: int
    n_head: int
    n_kv_head: int | None = None
    ffn_dim: int | None = None
    multiple_of: int = 256
    vocab_size: int = 16384
    grid: int = 16
    condition: str = "c2i"
    num_classes: int = 1000
    caption_dim: int = 2048
    caption_length: int = 120
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        sizes = (
            "dim n_layer n_head multiple_of vocab_size grid num_classes caption_dim caption_length n_kv_head ffn_dim"
        )
        for name in sizes.split():
            check_int(name, getattr(self, name), low=1, none=name in ("n_kv_head", "ffn_dim"))
        check_choice("condition", self.condition, CONDITIONS)
        for name in ("rope_base", "norm_eps"):
            check_number(name, getattr(self, name), low=0, open_low=True)
        if self.dim % self.n_head or self.head_dim % 4:
            raise ValueError(f"n_head={self.n_head} must divide dim={self.dim} into widths that are multiples of 4")
        check_divides("n_kv_head", self.num_key_value_heads, "n_head", self.n_head)

    head_dim = property(lambda self: self.dim // self.n_head)
    # sizes for stores, by transformers' names
    num_hidden_layers = property(lambda self: self.n_layer)
    num_attention_heads = property(lambda self: self.n_head)
    num_key_value_heads = property(lambda self: self.n_kv_head or self.n_head)
    hidden_size = property(lambda self: self.dim)

    @property
    def inner(self) -> int:
        return self.ffn_dim or self.multiple_of * math.ceil(int(8 * self.dim / 3) / self.multiple_of)


PRESETS: dict[str, dict[str, int]] = {
    "B": {"dim": 768, "n_layer": 12, "n_head": 12},
    "L": {"dim": 1024, "n_layer": 24, "n_head": 16},
    "XL": {"dim": 1280, "n_layer": 36, "n_head": 20},
    "XXL": {"dim": 1536, "n_layer": 48, "n_head": 24},
    "XXXL": {"dim": 2560, "n_layer": 48, "n_head": 40},
    "1B": {"dim": 2048, "n_layer": 22, "n_head": 32},
    "3B": {"dim": 3200, "n_layer": 24, "n_head": 32},
    "7B": {"dim": 4096, "n_layer": 32, "n_head": 32},
}
"""Sizes by the authors' names; published checkpoints are B, L, XL, XXL and 3B."""


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(widen(x), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, config: LlamaGenConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads, self.kv_heads = config.n_head, config.num_key_value_heads
        self.wqkv = nn.Linear(config.dim, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        qkv = self.wqkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # [R, heads, Q, head_dim]
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), 1)
        q, k = rotate(qk, rotation).split((self.heads, self.kv_heads), 1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        h = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.heads != self.kv_heads
        )
        return self.wo(h.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.inner, bias=False)
        self.w3 = nn.Linear(config.dim, config.inner, bias=False)
        self.w2 = nn.Linear(config.inner, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaGenConfig, layer: int):
        super().__init__()
        self.attention = Attention(config, layer)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, rotation: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


class LabelEmbedding(nn.Module):
    """Embeddings of the classes, and of the unconditional label after them."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.embedding_table = nn.Embedding(config.num_classes + 1, config.dim)


class CaptionEmbedding(nn.Module):
    """Projection of captions' features, and learned features for the unconditional branch."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.cap_proj = mlp(config.caption_dim, config.dim, config.dim, "tanh", bias=False)
        self.uncond_embedding = nn.Parameter(torch.zeros(config.caption_length, config.caption_dim))


class LlamaGen(nn.Module):
    """The network, without the codebook."""

    def __init__(self, config: LlamaGenConfig):
        super().__init__()
        self.config = config
        self.cls_embedding: LabelEmbedding | CaptionEmbedding = (
            LabelEmbedding(config) if config.condition == "c2i" else CaptionEmbedding(config)
        )
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config, index) for index in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def backbone(self, embeddings: Tensor, cells: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        """Hidden states [R, Q, dim] before the output matrix.

        embeddings: [R, Q, dim] of R rows with Q tokens. cells: [R, Q] int64: the raster index of each token's cell;
            negative for the condition.
        mask: [R, 1, Q, K] bool, True where visible; None is causal over the call's Q tokens.
        cache: `update(keys, values, layer)` returns keys and values [R, kv_heads, K, head_dim] to attend to."""
        rotation = angles(cells, self.config)
        x = embeddings
        for layer in self.layers:
            x = layer(x, rotation, mask, cache)
        return self.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """[..., dim] -> logits [..., vocab_size], float32 or wider."""
        return widen(self.output(hidden))


def angles(cells: Tensor, config: LlamaGenConfig) -> Tensor:
    """Rotations of pairs for cells [R, Q] (clamped), complex [R, 1, Q, head_dim / 2]; 0 for the condition."""
    table = _angles(config.grid, config.head_dim // 2, config.rope_base, cells.device)
    return embedding(cells.clamp(-1, len(table) - 2) + 1, table).unsqueeze(1)


@lru_cache(maxsize=16)
def _angles(grid: int, half: int, base: float, device: torch.device) -> Tensor:
    """Rotations [1 + grid * grid, half] of the condition, then of all cells. Cached, since every call needs them."""
    with torch.inference_mode(False):  # gradients may flow through rotated tensors
        cells = torch.arange(grid * grid, device=device)
        frequency = base ** -(torch.arange(0, half, 2, device=device).float() / half)
        coordinates = cells // grid, cells % grid
        angle = torch.cat([coordinate.unsqueeze(-1) * frequency for coordinate in coordinates], -1)
        return pad(torch.complex(angle.cos(), angle.sin()), (0, 0, 1, 0))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the adjacent pairs of [R, heads, Q, head_dim]."""
    pairs = torch.view_as_complex(widen(x).unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class Format:
    """A file format: LlamaGen's, or that of a network derived from it."""

    name: str
    config: type[LlamaGenConfig]
    network: type[nn.Module]
    required_weights: tuple[str, ...] = ()
    """Weights that this network must have and a LlamaGen lacks."""
    sizes: Callable[[Mapping[str, Tensor], LlamaGenConfig], dict[str, Any]] | None = None
    """Function (weights, `LlamaGenConfig` read from them) -> the fields of `config` that differ from it."""
    grid: int | None = None
    """The grid of all published files, if their names do not state it."""
    nested: tuple[str, ...] = NESTED


LLAMAGEN = Format("LlamaGen", LlamaGenConfig, LlamaGen)


# ---- adapter --------------------------------------------------------------------------------------------------------


@dataclass(init=False, eq=False, repr=False)
class LlamaGenModel(ImageModel):
    """The adapter of LlamaGen. Prompts are ids: for c2i, `vocab_size` + label; for t2i, `vocab_size` + j for a
    caption's feature j.

    vq: its VQ autoencoder; None makes only tokens.
    text_encoder: for t2i, (tokenizer, transformers' T5 encoder); if None, captions must be given as features.
    defaults: "guidance_scale", "temperature", "top_k", "top_p" of requests; replace the published defaults.
    Raises ValueError if the codebook's size differs from the network's vocabulary."""

    default_name: ClassVar[str] = "LlamaGen"
    format: ClassVar[Format] = LLAMAGEN
    caption_top_k: ClassVar[int | None] = 1000
    """The published `top_k` for captions."""
    module: LlamaGen

    _captions: Tensor | None = field(default=None, metadata=row_layout(axis=1))
    """[2, B, T, dim]: projected features of a request's captions; index 1 is the unconditional branch."""
    _prompt_length: Tensor | None = field(default=None, metadata=row_layout(axis=1))
    """[2, B] int64: number of features of each caption; None for classes."""

    def __init__(
        self,
        module: LlamaGen,
        vq: VQModel | None = None,
        text_encoder: Any = None,
        name: str | None = None,
        defaults: Mapping[str, Any] | None = None,
    ):
        config, name = module.config, name or self.default_name
        check_codebook(vq, config.vocab_size, name)
        prompt = 1 if config.condition == "c2i" else config.caption_length
        facts = ModelFacts(
            vocab_size=config.vocab_size,
            max_length=prompt + config.grid**2,
            prediction="shifted",
            topology="causal",
            name=name,
        )
        super().__init__(module.eval(), facts)
        self.vq, self.text_encoder = vq, text_encoder
        self.conditions = "class_labels" if config.condition == "c2i" else "prompts"
        guidance, top_k = (4.0, 2000) if config.condition == "c2i" else (7.5, self.caption_top_k)
        published = {"guidance_scale": guidance, "top_k": top_k, "temperature": 1.0, "top_p": None}
        self.defaults = merge_defaults(published, defaults)

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str],
        *,
        vq: str | os.PathLike[str] | VQModel | None = None,
        text_encoder: str | tuple[Any, Any] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        grid: int | None = None,
        n_head: int | None = None,
    ) -> Self:
        """Read a LlamaGen. Raises CheckpointError for a wrong file or unknown sizes, ValueError for a wrong codebook.

        source: a published `.pt` file, a `.safetensors` file with the same names, or a folder with `config.json`
            (`LlamaGenConfig`'s fields; "vq", the VQ's file; "defaults" of requests), `model.safetensors` and, to
            decode, `vq.safetensors`.
        vq: the VQ autoencoder, or its file; needed for pixels if the folder has none.
        text_encoder: for t2i: a folder or hub id of flan-t5-xl's encoder in safetensors, or (tokenizer, encoder).
        grid: for a single file: codes along one side (16 for 256 pixels); None reads its name (c2i_B_256.pt).
        n_head: for a single file: number of heads; None: that of the published size of the same width."""
        return cls(*read_network(cls.format, source, vq, text_encoder, dtype, device, grid, n_head))

    def request(self, conditions: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        """Make a request. conditions: one or several class labels or captions (texts, or features [T, caption_dim])."""
        if negative_prompt is not None:
            raise ValueError("LlamaGen has no negative_prompt: its unconditional input is fixed; leave it out")
        vocab = self.facts.vocab_size
        if self.conditions == "class_labels":
            classes = self.module.config.num_classes
            rows = [[vocab + label] for label in list_labels(conditions, classes, num_images)]
            return ImageRequest(self, exact_prompts(rows), exact_prompts([[vocab + classes] for _ in rows]))
        captions = [caption for caption in self._features(conditions) for _ in range(num_images)]
        embedding = self.module.cls_embedding
        assert isinstance(embedding, CaptionEmbedding)
        uncond_features, project = embedding.uncond_embedding, embedding.cap_proj
        # the published code pads captions on the left: T features are paired with the last T unconditional features
        branches = captions + [uncond_features[-len(caption) :] for caption in captions]
        with torch.no_grad():
            adapter = self._copy_with(
                _captions=project(nn.utils.rnn.pad_sequence(branches, batch_first=True)).unflatten(0, (2, -1)),
                _prompt_length=torch.tensor([len(features) for features in branches], device=self.device).view(2, -1),
            )
        rows = [list(range(vocab, vocab + len(caption))) for caption in captions]
        return ImageRequest(adapter, exact_prompts(rows), exact_prompts(rows))

    def _features(self, captions: Any) -> list[Tensor]:
        config = self.module.config
        if isinstance(captions, str) or (isinstance(captions, Sequence) and captions and isinstance(captions[0], str)):
            texts = [captions] if isinstance(captions, str) else list(captions)
            if self.text_encoder is None:
                raise ValueError(
                    f"{self.facts.name} reads features of flan-t5-xl, not text: give load(..., text_encoder=...), or "
                    f"features [tokens, {config.caption_dim}]"
                )
            return self._encode(texts)
        if not isinstance(captions, Sequence) and getattr(captions, "ndim", 2) != 3:
            captions = [captions]
        if len(captions) == 0:
            raise ValueError("prompts is empty; give at least one")
        for features in captions:
            shape = tuple(getattr(features, "shape", ()))
            if len(shape) != 2 or shape[1] != config.caption_dim or not 1 <= shape[0] <= config.caption_length:
                raise ValueError(
                    f"prompts hold features of shape {shape}; expected [1 to {config.caption_length}, "
                    f"{config.caption_dim}]"
                )
        return [torch.as_tensor(features).to(self.device, self.dtype) for features in captions]

    def _encode(self, texts: list[str]) -> list[Tensor]:
        """Encode captions in lower case, as in training. (Training also removed links and the like.)"""
        tokenizer, encoder = self.text_encoder
        tokens = tokenizer(
            [text.strip().lower() for text in texts],
            max_length=self.module.config.caption_length,
            padding=True,
            truncation=True,
            return_tensors="pt",
        ).to(encoder.device)
        with torch.no_grad():
            output = encoder(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
        features = output.last_hidden_state.to(self.device, self.dtype)
        return [row[mask.bool()] for row, mask in zip(features, tokens["attention_mask"].to(self.device))]

    def _rows(self, query: Query) -> Tensor:
        if self._prompt_length is None:
            raise ValueError(f"{self.facts.name} needs a request's captions: call the model that request() returns")
        return request_rows(query, self._prompt_length.shape[1])

    def _embed(self, ids: Tensor, query: Query | None) -> Tensor:
        vocab, network = self.facts.vocab_size, self.module
        tokens = network.tok_embeddings(ids.clamp(max=vocab - 1))
        is_prompt = ids >= vocab
        if query is None or not is_prompt.any():
            return tokens
        if isinstance(network.cls_embedding, LabelEmbedding):
            prompt_embeddings = network.cls_embedding.embedding_table((ids - vocab).clamp(min=0))
        else:
            rows = self._rows(query)
            assert self._captions is not None
            table = self._captions.flatten(0, 1)[rows]
            index = (ids - vocab).clamp(0, table.shape[1] - 1).unsqueeze(-1)
            prompt_embeddings = table.gather(1, index.expand(-1, -1, table.shape[-1]))
        return torch.where(is_prompt.unsqueeze(-1), prompt_embeddings, tokens)

    def cells(self, query: Query) -> Tensor:
        """[R, Q] int64: the raster index of each column's cell; negative for the condition's columns."""
        # a class label is one token; captions differ in length
        start = 1 if self._prompt_length is None else self._prompt_length.flatten()[self._rows(query)].unsqueeze(1)
        return query.positions - start

    def _backbone(self, embeddings: Tensor, query: Query, mask: Tensor | None, cache: Any) -> Tensor:
        return self.module.backbone(embeddings, self.cells(query), mask, cache)

    def head(self, hidden: Tensor) -> Tensor:
        return self.module.head(hidden)


# ---- files ----------------------------------------------------------------------------------------------------------

UNUSED = re.compile(r"freqs_cis$|\.kv_cache\.")
SIZES = {"256": 16, "384": 24, "512": 32}
"""Pixels in the names of published files -> codes along a side (16 pixels per code)."""


def read_network(
    format: Format,
    source: str | os.PathLike[str],
    vq: str | os.PathLike[str] | VQModel | None = None,
    text_encoder: str | tuple[Any, Any] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    grid: int | None = None,
    n_head: int | None = None,
) -> tuple[Any, VQModel | None, Any, str, Mapping[str, Any] | None]:
    """Read the parts of an adapter: network, VQ, text encoder, name, and defaults of requests. See `load_llamagen`."""
    name, path, fields, vq = find_files(source, "vq", vq)
    try:
        weights = read_weights(path, UNUSED.pattern, format.nested)[0]
    except CheckpointError as error:
        if os.path.isdir(source):
            raise
        raise CheckpointError(
            f"{str(path)!r} is neither a folder with a checkpoint nor a {format.name}: {error}"
        ) from error
    state = {key: tensor for key, tensor in weights.items() if not UNUSED.search(key)}
    if missing := [key for key in format.required_weights if key not in state]:
        raise CheckpointError(f"{str(path)!r} holds no {format.name}: it lacks {', '.join(missing)}")
    if os.path.isdir(source):
        with checkpoint_errors(f"config.json of {os.fspath(source)!r} is not a {format.name}'s", ValueError, TypeError):
            config = format.config(**{key: value for key, value in fields.items() if key not in NOT_SIZES})
    else:
        config = _config(path, state, format.grid if grid is None else grid, n_head, format)
    module = format.network(config)
    check_fit(module.state_dict(), state, str(path))
    if dtype is None:
        dtype = state["tok_embeddings.weight"].dtype if path.suffix in PICKLES else torch.float32
    module = module.to(dtype)
    module.load_state_dict(state)
    if isinstance(text_encoder, str):
        from paradec.models.images.text_to_image import load_pretrained

        encoder, tokenizer = load_pretrained(text_encoder, "T5EncoderModel", None, None)
        if tokenizer is None:
            raise CheckpointError(f"{text_encoder!r} has no readable tokenizer, which its T5 encoder needs")
        text_encoder = (tokenizer, encoder)
    if device is not None:
        module = module.to(device)
    return module.requires_grad_(False), open_vq(vq, device), text_encoder, name, fields.get("defaults")


def _config(
    path: Path, state: Mapping[str, Tensor], grid: int | None, n_head: int | None, format: Format
) -> LlamaGenConfig:
    with checkpoint_errors(f"{str(path)!r} holds no {format.name}", KeyError, ValueError):
        vocab, dim = state["output.weight"].shape
        width = state["layers.0.attention.wqkv.weight"].shape[0]
        inner = state["layers.0.feed_forward.w1.weight"].shape[0]
    if n_head is None:
        n_head = next((sizes["n_head"] for sizes in PRESETS.values() if sizes["dim"] == dim), None)
        if n_head is None:
            raise CheckpointError(f"no published size has the width {dim} of {str(path)!r}; give n_head")
    if grid is None:
        match = re.search(r"_(256|384|512)(?!\d)", path.name)
        if match is None:
            raise CheckpointError(
                f"the name of {str(path)!r} does not state the size of its pictures (c2i_B_256.pt does); give grid, "
                "the number of codes along one side"
            )
        grid = SIZES[match[1]]
    head_dim = dim // n_head
    condition: dict[str, Any] = {"condition": "t2i"}
    if "cls_embedding.embedding_table.weight" in state:
        classes = state["cls_embedding.embedding_table.weight"].shape[0] - 1
        condition = {"condition": "c2i", "num_classes": classes}
    elif "cls_embedding.uncond_embedding" in state:
        length, caption = state["cls_embedding.uncond_embedding"].shape
        condition |= {"caption_length": length, "caption_dim": caption}
    with checkpoint_errors(f"{str(path)!r} holds no {format.name}", KeyError, ValueError):
        base = LlamaGenConfig(
            dim=dim,
            n_layer=count_blocks(state, "layers"),
            n_head=n_head,
            n_kv_head=(width // head_dim - n_head) // 2,
            ffn_dim=inner,
            vocab_size=vocab,
            grid=grid,
            **condition,
        )
        overrides = {} if format.sizes is None else format.sizes(state, base)
        config = format.config(**{name: getattr(base, name) for name in base.__dataclass_fields__} | overrides)
    return config


load_llamagen = LlamaGenModel.load

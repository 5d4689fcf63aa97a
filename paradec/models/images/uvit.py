"""The U-ViT of the MaskGIT-r checkpoints (AutoNAT, ReCAP): transformer blocks with long skip connections over a class
token and image tokens. Parameter names are those of the files. diffusers' `UVit2DModel` is another network.

All samplers of masked text models decode it (Chang et al., "MaskGIT", arXiv 2202.04200)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from paradec.core.checks import check_divides, check_int
from paradec.core.facts import ModelFacts
from paradec.core.query import Query, take_columns
from paradec.models.checkpoint import check_fit, checkpoint_errors
from paradec.models.decoder import Decoder, needs_hidden
from paradec.models.images.base import ImageRequest, PictureModel, Snapshot, list_labels, merge_defaults, picture_tokens
from paradec.models.images.blocks import Block
from paradec.models.images.grid import Grid
from paradec.models.images.loading import count_blocks, find_files
from paradec.models.images.vq import VQModel, check_codebook, open_vq
from paradec.models.weights import read_weights

DEFAULTS = {"steps": None, "guidance_scale": 1.0, "temperature": 1.0, "top_k": None, "top_p": None}


class UViT(nn.Module):
    """Class token at position 0, image tokens at positions 1 to size ** 2. Ids below codebook_size are image tokens,
    codebook_size is the mask, codebook_size + 1 + c is class c. A mask at position 0 means the null class (for
    guidance), which is the last class.

    size: tokens per side. codebook_size: number of image ids. classes: number of classes, including the null class.
    width, depth, heads: of the transformer; depth is the number of blocks besides the middle one, half on each side."""

    def __init__(
        self, size: int = 16, codebook_size: int = 1024, classes: int = 1001, width: int = 768, depth: int = 24,
        heads: int = 8,
    ):  # fmt: skip
        super().__init__()
        for name, value in {"size": size, "codebook_size": codebook_size, "classes": classes, "width": width}.items():
            check_int(name, value, low=1)
        check_int("heads", heads, low=1)
        check_divides("heads", heads, "width", width)
        check_int("depth", depth, low=0)
        if depth % 2:
            raise ValueError(f"depth={depth} must be even")
        self.size, self.codebook_size, self.classes, self.heads = size, codebook_size, classes, heads
        self.token_emb = Embeddings(codebook_size + 1, size**2, width)
        self.context_embed = Embeddings(classes, 1, width)
        half = depth // 2
        self.in_blocks = nn.ModuleList(Block(width, heads, layer, bias=False) for layer in range(half))
        self.mid_block = Block(width, heads, half, bias=False)
        self.out_blocks = nn.ModuleList(SkipBlock(width, heads, layer) for layer in range(half + 1, depth + 1))
        self.norm = nn.LayerNorm(width)
        self.mlm_layer = Head(width, codebook_size + 1)
        self.config = SimpleNamespace(  # for key/value stores
            num_hidden_layers=depth + 1, num_attention_heads=heads, hidden_size=width, model_type="uvit"
        )

    @property
    def vocab_size(self) -> int:
        return self.codebook_size + 1 + self.classes

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """Logits `.logits` [R, Q, vocab_size] of any subset of the positions; arguments as for `states`."""
        return SimpleNamespace(logits=self.head(self.states(input_ids, attention_mask, position_ids, past_key_values)))

    def states(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
    ) -> Tensor:
        """Last hidden states [R, Q, width] of any subset of the positions.

        input_ids: [R, Q] int64. position_ids: [R, Q]; None is 0 to Q - 1.
        attention_mask: [R, 1, Q or 1, K] bool, True where visible; None sees everything.
        past_key_values: a store whose `update(keys, values, layer)` returns keys and values to attend to."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        x = self.embed(input_ids, position_ids)
        skips = []
        for block in self.in_blocks:
            x = block(x, attention_mask, past_key_values)
            skips.append(x)
        x = self.mid_block(x, attention_mask, past_key_values)
        for block in self.out_blocks:
            x = block(x, attention_mask, past_key_values, skips.pop())
        return self.norm(x)

    def head(self, x: Tensor) -> Tensor:
        """Last hidden states [R, W, width] -> logits [R, W, vocab_size]. Ids that are not codes have the dtype's finite
        minimum, since guidance subtracts logits."""
        logits = self.mlm_layer(x, self.token_emb.word_embeddings.weight)[..., : self.codebook_size]
        num_others = self.vocab_size - self.codebook_size
        return nn.functional.pad(logits, (0, num_others), value=torch.finfo(logits.dtype).min)

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """[R, Q, width]: class embeddings at position 0, token embeddings elsewhere."""
        is_class = position_ids == 0
        null = input_ids == self.codebook_size
        label = torch.where(null, self.classes - 1, input_ids - self.codebook_size - 1).clamp(min=0)
        label = torch.where(is_class, label, 0)
        tokens = torch.where(is_class, 0, input_ids.clamp(max=self.codebook_size))
        image = self.token_emb(tokens, (position_ids - 1).clamp(min=0))
        return torch.where(is_class.unsqueeze(-1), self.context_embed(label, torch.zeros_like(label)), image)


class Embeddings(nn.Module):
    """Embedding of a token plus that of its position, normalised."""

    def __init__(self, tokens: int, positions: int, width: int):
        super().__init__()
        self.word_embeddings = nn.Embedding(tokens, width)
        self.position_embeddings = nn.Embedding(positions, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.LayerNorm(self.word_embeddings(ids) + self.position_embeddings(positions))


class SkipBlock(Block):
    """A block after the middle one. Its input is concatenated with the output of its counterpart before the middle."""

    def __init__(self, width: int, heads: int, layer: int):
        super().__init__(width, heads, layer, bias=False)
        self.skip_linear = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor | None, store: Any, skip: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.skip_linear(torch.cat((x, skip), -1)), mask, store)


class Head(nn.Module):
    def __init__(self, width: int, tokens: int):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.ln = nn.LayerNorm(width, eps=1e-5)
        self.bias = nn.Parameter(torch.zeros(1, 1, tokens))

    def forward(self, x: Tensor, embeddings: Tensor) -> Tensor:
        return linear(self.ln(gelu(self.fc(x))), embeddings) + self.bias


class UViTModel(Decoder):
    """The adapter of a `UViT`. A prompt is one class token; an answer is all image tokens, by default one block."""

    makes = "codes"
    has_head = True
    module: UViT

    def __init__(self, module: UViT):
        facts = ModelFacts(
            vocab_size=module.vocab_size,
            mask_token_id=module.codebook_size,
            max_length=module.size**2 + 1,
            name=type(module).__name__,
        )
        super().__init__(module.eval(), facts, default_max_new_tokens=module.size**2)

    def _evaluate(self, query: Query, **arguments: Any) -> Tensor:
        arguments.pop("use_cache")
        hidden = self.module.states(**arguments)
        if needs_hidden(query):
            query.hidden = hidden
        return self.module.head(hidden if query.wanted is None else take_columns(hidden, query.wanted))

    def token_embeddings(self) -> Tensor:
        """[vocab_size, width]: embeddings of image tokens, mask and classes, without positions."""
        parts = (self.module.token_emb, self.module.context_embed)
        return torch.cat([part.word_embeddings.weight for part in parts])

    def head(self, hidden: Tensor) -> Tensor:
        return self.module.head(hidden)

    def class_token(self, label: int) -> int:
        """The id of a class. Raises ValueError for an unknown class."""
        check_int("label", label, low=0, high=self.module.classes - 1)
        return self.module.codebook_size + 1 + label


def load_uvit(source: str | os.PathLike[str], heads: int = 8) -> UViTModel:
    """Read a checkpoint by its parameter names; the weights imply all sizes except the number of heads. Raises
    CheckpointError for a wrong file, ValueError for wrong `heads`.

    source: a safetensors file, or a `.pth` (only its tensors are read). heads: 8 in the published models."""
    weights, _ = read_weights(source)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with checkpoint_errors(f"{str(source)!r} does not hold a U-ViT's weights", KeyError):
        positions, width = shapes["token_emb.position_embeddings.weight"]
        tokens, classes = (shapes[f"{part}.word_embeddings.weight"][0] for part in ("token_emb", "context_embed"))
    depth = 2 * count_blocks(weights, "in_blocks")
    module = UViT(round(positions**0.5), tokens - 1, classes, width, depth, heads)
    check_fit(module.state_dict(), weights, str(source), "a U-ViT")
    module.load_state_dict(weights)
    return UViTModel(module)


class MaskedImageModel(PictureModel, UViTModel):
    """A `UViTModel` whose answers are all codes of a picture, as one block. Guidance masks the class token. Raises
    ValueError for a codebook of the wrong size or an unknown default.

    module: the network, whose last class is the null class. vq: its VQ autoencoder; None makes only codes.
    defaults: `steps`, `guidance_scale`, `temperature`, `top_k`, `top_p` of requests."""

    makes = "masked image"
    family = "masked"
    default_sampler = "maskgit"
    decoder_option = "vq"

    def __init__(
        self,
        module: UViT,
        vq: VQModel | None = None,
        defaults: Mapping[str, Any] | None = None,
        name: str | None = None,
    ):
        super().__init__(module)
        self.facts = self.facts if name is None else replace(self.facts, name=name)
        check_codebook(vq, module.codebook_size, self.facts.name)
        self.vq, self.defaults = vq, merge_defaults(DEFAULTS, defaults)

    def defaults_with(self, sampler: Any) -> dict[str, Any]:
        """As in the base class. Samplers that choose a group's targets in a full step also get the cache "recap"."""
        return super().defaults_with(sampler) | ({"cache": "recap"} if hasattr(sampler, "targets") else {})

    def request(self, conditions: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        self.refuse_negative_prompt(negative_prompt)
        labels = list_labels(conditions, self.module.classes - 1, num_images)
        return ImageRequest(self, [[self.class_token(label)] for label in labels])

    def begin(self, sampler: Any, image_request: ImageRequest, grid: Grid, request: Any) -> Any:
        """Start a request for all codes of a picture. Its trace records the order in which codes are decided."""
        overrides = {"max_new_tokens": grid.length, "suppress_tokens": self.non_code_ids, "trace": True}
        return sampler.start(image_request.model, image_request.prompts, replace(request, **overrides))

    def read(self, state: Any, grid: Grid) -> Snapshot:
        tokens = picture_tokens(state, grid)
        steps = [] if state.trace is None else state.trace.steps
        accepted = np.zeros((len(steps), state.batch), np.int64)
        for index, step in enumerate(steps):
            rows = [row for row, _, token, _ in step.commits if token != self.facts.mask_token_id]
            accepted[index] = np.bincount(rows, minlength=state.batch)
        is_complete = not tokens.eq(self.facts.mask_id).any()
        return Snapshot(tokens, is_complete, accepted, state.prompt_length.tolist(), [0] * state.batch)

    @property
    def non_code_ids(self) -> tuple[int, ...]:
        """Ids that are not codes."""
        return tuple(range(self.module.codebook_size, self.facts.vocab_size))

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        return self.square_grid(self.module.size, self.module.codebook_size, height, width)


def load_masked_image(
    source: str | os.PathLike[str],
    *,
    vq: str | os.PathLike[str] | VQModel | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> MaskedImageModel:
    """Read a masked image model from a folder. Raises CheckpointError for files that are missing or do not fit.

    source: the folder, with `config.json` ("heads"; optionally "vq", the VQ's file, and "defaults" of requests) and
        `model.safetensors` with MaskGIT-r's names. (`load_uvit` reads the published single files.)
    vq: the VQ autoencoder, or its file, if the folder states none. dtype: of the parameters; float32 by default."""
    name, path, fields, vq = find_files(source, "vq", vq)
    with checkpoint_errors(f"{os.fspath(source)!r} is not a masked image model", TypeError, ValueError, KeyError):
        module = load_uvit(path, fields["heads"]).module.to(device=device, dtype=dtype or torch.float32)
        model = MaskedImageModel(module.requires_grad_(False), open_vq(vq, device), fields.get("defaults"), name)
    return model

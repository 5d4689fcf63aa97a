"""LlamaGen: a Llama with two-dimensional rotary angles that writes the codes of a picture row by row.

Sun et al., "Autoregressive Model Beats Diffusion: Llama for Scalable Image Generation", arXiv 2406.06525. transformers
has no class for it; the network is in `paradec.models.images.llamagen_network`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.facts import ModelFacts
from paradec.core.query import Query
from paradec.core.rows import row_layout
from paradec.models.checkpoint import CheckpointError, check_fit
from paradec.models.images.adapter import ImageModel, branch_rows
from paradec.models.images.base import ImageRequest, exact_prompts, labels_of, merge_defaults
from paradec.models.images.grid import Grid
from paradec.models.images.llamagen_network import PRESETS, CaptionEmbedding, LabelEmbedding, LlamaGen, LlamaGenConfig
from paradec.models.images.loading import find_files
from paradec.models.images.vq import VQModel, check_codebook, open_vq
from paradec.models.weights import NESTED, PICKLES, read_weights


@dataclass(init=False, eq=False, repr=False)
class LlamaGenModel(ImageModel):
    """The adapter of LlamaGen. Prompt id `vocab_size + label` is a class; `vocab_size + j` the caption's feature j.

    Args:
        module: the network.
        vq: its VQ autoencoder; None gives tokens alone.
        text_encoder: for t2i: (tokenizer, transformers' T5 encoder), or None; then captions are given as features.
        defaults: "guidance_scale", "temperature", "top_k", "top_p" of requests that name none, where they differ from
            the published models'.

    Raises:
        ValueError: a codebook of another size than the network's vocabulary.
    """

    module: LlamaGen

    _captions: Tensor | None = field(default=None, metadata=row_layout(axis=1))
    """[2, B, T, dim] of a request for captions, the unconditional branch after the other."""
    _prompt_length: Tensor | None = field(default=None, metadata=row_layout(axis=1))
    """[2, B] int64; None for classes."""

    def __init__(
        self,
        module: LlamaGen,
        vq: VQModel | None = None,
        text_encoder: Any = None,
        name: str = "LlamaGen",
        defaults: Mapping[str, Any] | None = None,
    ):
        config = module.config
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
        guidance, top_k = (4.0, 2000) if config.condition == "c2i" else (7.5, 1000)
        published = {"guidance_scale": guidance, "top_k": top_k, "temperature": 1.0, "top_p": None}
        self.defaults = merge_defaults(published, defaults)

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        return self.square_grid(self.module.config.grid, self.facts.vocab_size, height, width)

    def request(self, given: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        """`given`: class labels (an int or several), or captions: texts, or features [T, caption_dim], or lists."""
        if negative_prompt is not None:
            raise ValueError("negative_prompt: LlamaGen has an unconditional input of its own; leave it out")
        vocab = self.facts.vocab_size
        if self.conditions == "class_labels":
            classes = self.module.config.num_classes
            labels = [label for label in labels_of(given, classes) for _ in range(num_images)]
            rows, uncond = [[vocab + label] for label in labels], [[vocab + classes] for _ in labels]
            return ImageRequest(self, exact_prompts(rows), exact_prompts(uncond))
        captions = [caption for caption in self._features(given) for _ in range(num_images)]
        embedding = self.module.cls_embedding
        assert isinstance(embedding, CaptionEmbedding)
        learned, project = embedding.uncond_embedding, embedding.cap_proj
        # captions are at the end of the published code's columns, and so do the learned features that replace them
        both = captions + [learned[-len(caption) :] for caption in captions]
        with torch.no_grad():
            bound = self._bound(
                _captions=project(nn.utils.rnn.pad_sequence(both, batch_first=True)).unflatten(0, (2, -1)),
                _prompt_length=torch.tensor([len(features) for features in both], device=self.device).view(2, -1),
            )
        rows = [list(range(vocab, vocab + len(caption))) for caption in captions]
        return ImageRequest(bound, exact_prompts(rows), exact_prompts(rows))

    def _features(self, given: Any) -> list[Tensor]:
        """Features [T, caption_dim] of every caption."""
        config = self.module.config
        if isinstance(given, str) or (isinstance(given, Sequence) and given and isinstance(given[0], str)):
            texts = [given] if isinstance(given, str) else list(given)
            if self.text_encoder is None:
                raise ValueError(
                    f"{self.facts.name} reads features of flan-t5-xl, not text: give load(..., text_encoder=...) or "
                    f"features [tokens, {config.caption_dim}]"
                )
            return self._encode(texts)
        several = list(given) if isinstance(given, Sequence) or getattr(given, "ndim", 2) == 3 else [given]
        if not several:
            raise ValueError("prompts is empty; give at least one")
        for features in several:
            shape = tuple(getattr(features, "shape", ()))
            if len(shape) != 2 or shape[1] != config.caption_dim or not 1 <= shape[0] <= config.caption_length:
                raise ValueError(
                    f"prompts hold features of shape {shape}; expected [1 to {config.caption_length}, "
                    f"{config.caption_dim}]"
                )
        return [torch.as_tensor(features).to(self.device, self.dtype) for features in several]

    def _encode(self, texts: list[str]) -> list[Tensor]:
        """Features of captions in lower case, as in training; the rest of its cleaning (of links, file names and the
        like, in captions from the web) is left out."""
        tokenizer, encoder = self.text_encoder
        found = tokenizer(
            [text.strip().lower() for text in texts],
            max_length=self.module.config.caption_length,
            padding=True,
            truncation=True,
            return_tensors="pt",
        ).to(encoder.device)
        with torch.no_grad():
            features = encoder(input_ids=found["input_ids"], attention_mask=found["attention_mask"]).last_hidden_state
        features = features.to(self.device, self.dtype)
        return [row[keep.bool()] for row, keep in zip(features, found["attention_mask"].to(self.device))]

    def _rows(self, query: Query) -> Tensor:
        if self._prompt_length is None:
            raise ValueError(f"{self.facts.name} reads captions: call it through the model that request() gives")
        return branch_rows(query, self._prompt_length.shape[1])

    def _embed(self, ids: Tensor, query: Query | None) -> Tensor:
        vocab, network = self.facts.vocab_size, self.module
        tokens = network.tok_embeddings(ids.clamp(max=vocab - 1))
        prompt = ids >= vocab
        if query is None or not prompt.any():
            return tokens
        if isinstance(network.cls_embedding, LabelEmbedding):
            given = network.cls_embedding.embedding_table((ids - vocab).clamp(min=0))
        else:
            rows = self._rows(query)
            assert self._captions is not None
            table = self._captions.flatten(0, 1)[rows]
            index = (ids - vocab).clamp(0, table.shape[1] - 1).unsqueeze(-1)
            given = table.gather(1, index.expand(-1, -1, table.shape[-1]))
        return torch.where(prompt.unsqueeze(-1), given, tokens)

    def cells(self, query: Query) -> Tensor:
        """[R, Q] int64: the raster index of each column's cell; negative for the condition's."""
        # a class label is one token; captions have lengths of their own
        first = 1 if self._prompt_length is None else self._prompt_length.flatten()[self._rows(query)].unsqueeze(1)
        return query.positions - first

    def _backbone(self, embeddings: Tensor, query: Query, mask: Tensor | None, cache: Any) -> Tensor:
        return self.module.backbone(embeddings, self.cells(query), mask, cache)

    def _head(self, hidden: Tensor) -> Tensor:
        return self.module.head(hidden)


# ---- files ----------------------------------------------------------------------------------------------------------

UNUSED = re.compile(r"freqs_cis$|\.kv_cache\.")
NOT_SIZES = ("model_type", "vq", "defaults")
"""What else a folder's config.json may hold."""
SIZES = {"256": 16, "384": 24, "512": 32}
"""Codes along a side, by the pixels that the published files are named after (16 pixels a code)."""


def load_llamagen(
    source: str | os.PathLike[str],
    *,
    vq: str | os.PathLike[str] | VQModel | None = None,
    text_encoder: str | tuple[Any, Any] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    grid: int | None = None,
    n_head: int | None = None,
) -> LlamaGenModel:
    """Read a LlamaGen.

    Args:
        source: a published `.pt` file, a `.safetensors` file with the same names, or a folder with `config.json`
            (`LlamaGenConfig`'s fields; "vq", where the VQ is another file; "defaults" of requests), `model.safetensors`
            and, if it decodes, `vq.safetensors`.
        vq: the VQ autoencoder, or its file; needed for pixels where the folder has none.
        text_encoder: for t2i: a folder or hub id of the T5 encoder (flan-t5-xl) with safetensors, or (tokenizer,
            encoder).
        grid: codes along one side (16 for 256 pixels); read from the file's name (c2i_B_256.pt) when left out.
        n_head: heads; known from the width for the published sizes.

    Raises:
        CheckpointError: a file that is missing, corrupt, of another format, or does not say what is asked for here.
        ValueError: a codebook of another size than the vocabulary.
    """
    return LlamaGenModel(*read_network(LLAMAGEN, source, vq, text_encoder, dtype, device, grid, n_head))


@dataclass(frozen=True)
class Format:
    """Which checkpoints a kind of network of LlamaGen's blocks has."""

    name: str
    config: type[LlamaGenConfig]
    network: type[nn.Module]
    marks: tuple[str, ...] = ()
    """Weights that no LlamaGen has and this kind must have."""
    sizes: Callable[[Mapping[str, Tensor], LlamaGenConfig], dict[str, Any]] | None = None
    """Fields of the configuration that differ from what the weights would tell of a LlamaGen."""
    grid: int | None = None
    """Where the published files' names do not say it."""
    nested: tuple[str, ...] = NESTED


LLAMAGEN = Format("LlamaGen", LlamaGenConfig, LlamaGen)


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
    """What an adapter is made of: network, VQ autoencoder, text encoder, name, and defaults of requests. See
    `load_llamagen`."""
    name, path, fields, vq = find_files(source, "vq", vq)
    try:
        weights = read_weights(path, UNUSED.pattern, format.nested)[0]
    except CheckpointError as error:
        if os.path.isdir(source):
            raise
        raise CheckpointError(
            f"{str(path)!r} is not a folder with a checkpoint, and no {format.name}: {error}"
        ) from error
    state = {key: tensor for key, tensor in weights.items() if not UNUSED.search(key)}
    if missing := [key for key in format.marks if key not in state]:
        raise CheckpointError(f"{str(path)!r} holds no {format.name}: {', '.join(missing)} missing")
    if os.path.isdir(source):
        try:
            config = format.config(**{key: value for key, value in fields.items() if key not in NOT_SIZES})
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"config.json of {os.fspath(source)!r} is not a {format.name}'s: {error}") from error
    else:
        config = _config(path, state, format.grid if grid is None else grid, n_head, format)
    module = format.network(config)
    check_fit(module.state_dict(), state, str(path))
    kept = state["tok_embeddings.weight"].dtype if path.suffix in PICKLES or dtype is not None else torch.float32
    module = module.to(dtype or kept)
    module.load_state_dict(state)
    if isinstance(text_encoder, str):
        from paradec.models.images.text_to_image import pretrained

        encoder, tokenizer = pretrained(text_encoder, "T5EncoderModel", None, None)
        if tokenizer is None:
            raise CheckpointError(f"{text_encoder!r} has no tokenizer that can be read, and its T5 encoder needs one")
        text_encoder = (tokenizer, encoder)
    if device is not None:
        module = module.to(device)
    return module.requires_grad_(False), open_vq(vq, device), text_encoder, name, fields.get("defaults")


def _config(
    path: Path, state: Mapping[str, Tensor], grid: int | None, n_head: int | None, format: Format
) -> LlamaGenConfig:
    """Sizes from the shapes of a single file's weights."""
    try:
        vocab, dim = state["output.weight"].shape
        width = state["layers.0.attention.wqkv.weight"].shape[0]
        inner = state["layers.0.feed_forward.w1.weight"].shape[0]
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} holds no {format.name}: {error} is missing or misshapen") from error
    if n_head is None:
        n_head = next((sizes["n_head"] for sizes in PRESETS.values() if sizes["dim"] == dim), None)
        if n_head is None:
            raise CheckpointError(f"{str(path)!r} is {dim} wide, which no published size is; give n_head")
    if grid is None:
        named = re.search(r"_(256|384|512)(?!\d)", path.name)
        if named is None:
            raise CheckpointError(
                f"the name of {str(path)!r} does not say how large its pictures are (c2i_B_256.pt does); give grid, "
                "the codes along one side"
            )
        grid = SIZES[named[1]]
    head = dim // n_head
    condition: dict[str, Any] = {"condition": "t2i"}
    if "cls_embedding.embedding_table.weight" in state:
        classes = state["cls_embedding.embedding_table.weight"].shape[0] - 1
        condition = {"condition": "c2i", "num_classes": classes}
    elif "cls_embedding.uncond_embedding" in state:
        length, caption = state["cls_embedding.uncond_embedding"].shape
        condition |= {"caption_length": length, "caption_dim": caption}
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("layers."))
    try:
        found = LlamaGenConfig(
            dim=dim,
            n_layer=layers,
            n_head=n_head,
            n_kv_head=(width // head - n_head) // 2,
            ffn_dim=inner,
            vocab_size=vocab,
            grid=grid,
            **condition,
        )
        own = {} if format.sizes is None else format.sizes(state, found)
        return format.config(**{name: getattr(found, name) for name in found.__dataclass_fields__} | own)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{str(path)!r} holds no {format.name}: {error}") from error

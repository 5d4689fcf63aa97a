"""DiffusionGemma (google/diffusiongemma-26B-A4B-it) on transformers' class.

A causal encoder stores keys and values of final tokens. A bidirectional decoder reads these and a canvas of tokens,
without mask tokens. Encoder and decoder share weights, except a scalar per layer and the decoder's self-conditioning,
which reads expected embeddings of the previous step. Logits row i predicts token i."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number, short_repr
from paradec.core.facts import ModelFacts
from paradec.core.family_queries import CanvasQuery
from paradec.core.memory import check_memory
from paradec.models.base import Model
from paradec.models.cache_argument import cache_keyword
from paradec.models.checkpoint import CheckpointError, check_stored_dtypes, checkpoint_errors, read_json, read_module
from paradec.models.family import tokenizer_size

MODEL_TYPE = "diffusion_gemma"
CLASS = "DiffusionGemmaForBlockDiffusion"
ATTENTION = ("sdpa", "eager")
"""Attention functions that accept custom masks."""
DEFAULTS: Mapping[str, Any] = {
    "entropy_bound": 0.1,
    "max_denoising_steps": 48,
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
}
"""transformers' defaults, for fields that neither the request nor generation_config.json sets."""
DEFAULT_NEW_TOKENS = 256
TURN_ENDS = ("<turn|>", "<end_of_turn>")


class DiffusionGemmaModel(Model):
    """`DiffusionGemmaForBlockDiffusion`, called by queries of two kinds: "encode" and "canvas".

    denoising: values that replace `DEFAULTS`.
    processor: a transformers processor, for prompts with images; only stored."""

    kind = "canvas"
    makes = "canvas"

    def __init__(
        self,
        module: Any,
        facts: ModelFacts,
        tokenizer: Any = None,
        default_max_new_tokens: int = DEFAULT_NEW_TOKENS,
        denoising: Mapping[str, Any] | None = None,
        processor: Any = None,
    ):
        super().__init__(module, facts, tokenizer, default_max_new_tokens)
        self.denoising = {**DEFAULTS, **(denoising or {})}
        self.processor = processor

    _accepts_masks = True
    supports_visibility = shares_prefix = False

    @property
    def soft_dtype(self) -> torch.dtype:
        """Dtype of expected embeddings (`soften`)."""
        return self.module.model.decoder.embed_tokens.weight.dtype

    def make_store(self, rows: int, length: int, max_memory: int | None = None) -> Any:
        """Make an empty store for `rows` rows of `length` final positions. Raises ValueError if it exceeds `max_memory`
        bytes or the device's memory."""
        from paradec.caches.canvas_store import CanvasStore, canvas_store_bytes

        config = self.text_config
        num_bytes = canvas_store_bytes(config, rows, length, self.dtype)
        check_memory(num_bytes, self.device, max_memory, f"the key/value store of {rows} x {length} positions")
        windows = [config.sliding_window if kind == "sliding_attention" else None for kind in config.layer_types]
        return CanvasStore(rows, length, self.device, windows)

    def embed_images(self, rows: list[list[int]], pixel_values: Any, image_position_ids: Any) -> list[Tensor | None]:
        """The embeddings [N, D] of each row's N image tokens, in reading order; None for a row without images. Raises
        ValueError if the images do not match the prompts' image tokens.

        rows: prompts' ids, with an image token for each soft token of an image.
        pixel_values, image_position_ids: from the model's processor, all images in the order of the rows."""
        token = self.module.config.image_token_id
        counts = [row.count(token) for row in rows]
        if pixel_values is None:
            if any(counts):
                raise ValueError(
                    f"the prompt of row {next(i for i, n in enumerate(counts) if n)} has image tokens (id {token}) and "
                    "no pixel_values: give all that the processor returns"
                )
            return [None] * len(rows)
        encoder = self.module.model.encoder
        with torch.inference_mode():
            positions = None if image_position_ids is None else torch.as_tensor(image_position_ids).to(self.device)
            pixels = torch.as_tensor(pixel_values).to(self.device, self.dtype)
            features = encoder.get_image_features(pixels, positions, return_dict=True).pooler_output
        features = features.reshape(-1, features.shape[-1])
        if len(features) != sum(counts):
            raise ValueError(
                f"pixel_values make {len(features)} image tokens, and the prompts have {sum(counts)} of id {token}"
            )
        return [part if len(part) else None for part in features.split(counts)]

    @torch.no_grad()
    def soften(self, logits: Tensor) -> Tensor:
        """Compute expected embeddings under softmax(logits), rounded as in transformers: [..., V] -> [..., D]."""
        embedding = self.module.model.decoder.embed_tokens
        weight = embedding.weight
        distribution = logits.to(weight.device, weight.dtype).softmax(-1, dtype=torch.float32).to(weight.dtype)
        return distribution @ weight * embedding.embed_scale.to(weight.dtype)

    def _logits(self, query: CanvasQuery, store: Any) -> Tensor:  # type: ignore[override]
        if store is None:
            raise ValueError(f"{self.facts.name} reads final tokens from a store: create one with make_store")
        query.soften = self.soften
        store.bind(query)
        masks = self._masks(query, store)
        if query.kind == "encode":
            self._encode(query, store, masks)
            return torch.empty((len(query.tokens), 0, self.facts.vocab_size), device=query.tokens.device)
        hidden = self._decode(query, store, masks)
        # as the module's forward, but in place: with a large vocabulary each copy takes 256 MiB per row
        logits = self.module.lm_head(hidden).to(torch.float32)
        cap = self.module.final_logit_softcapping
        return logits.div_(cap).tanh_().mul_(cap)

    def _decode(self, query: CanvasQuery, store: Any, masks: dict[str, Tensor | None]) -> Tensor:
        """Hidden states [R, Q, D] of a canvas, by the decoder's parts in the order of its forward."""
        decoder, types = self.module.model.decoder, self.text_config.layer_types
        hidden = decoder.embed_tokens(query.tokens)
        hidden = decoder.self_conditioning(
            hidden, torch.zeros_like(hidden) if query.soft_embeddings is None else query.soft_embeddings
        )
        angles = {kind: decoder.rotary_emb(hidden, query.positions, kind) for kind in decoder.unique_layer_types}
        cache = cache_keyword(decoder, store)
        for kind, layer in zip(types, decoder.layers):
            hidden = layer(
                hidden,
                position_embeddings=angles[kind],
                attention_mask=masks[kind],
                position_ids=query.positions,
                **cache,
            )
        return decoder.norm(hidden)

    def _encode(self, query: CanvasQuery, store: Any, masks: dict[str, Tensor | None]) -> None:
        encoder = self.module.model.encoder
        common = {"attention_mask": masks, "position_ids": query.positions, **cache_keyword(encoder, store)}
        if query.images is None:
            encoder(input_ids=query.tokens, **common)
            return
        # images are inserted before the call, since not every release of transformers accepts encoded images
        embedded = encoder.get_input_embeddings()(query.tokens)
        images = query.images.to(embedded.device, embedded.dtype)
        embedded = embedded.masked_scatter(self._image_tokens(query).unsqueeze(-1), images)
        encoder.language_model(inputs_embeds=embedded, **common)

    def _image_tokens(self, query: CanvasQuery) -> Tensor:
        """[R, Q] bool: image tokens. (Padding repeats the token before it.)"""
        is_image = query.tokens == self.module.config.image_token_id
        return is_image if query.valid is None else is_image & query.valid

    def _masks(self, query: CanvasQuery, store: Any) -> dict[str, Tensor | None]:
        """The mask of each kind of layer: [R, 1, Q or 1, K]; None shows everything."""
        window = self.text_config.sliding_window
        widths = {"full_attention": None, "sliding_attention": window}
        assert query.store is not None  # checked by `bind`
        if query.kind == "canvas" and query.store.begin == query.store.visible_length:
            return dict.fromkeys(widths)  # every row's canvas begins where its keys end
        return {kind: self._mask(query, store.first_visible(width), width) for kind, width in widths.items()}

    def _mask(self, query: CanvasQuery, first: int, window: int | None) -> Tensor:
        positions = query.positions
        assert query.store is not None and query.store.visible_length is not None  # set for canvases
        keys = torch.arange(first, query.store.visible_length, device=positions.device)
        if query.kind == "encode":
            queries = positions.unsqueeze(-1)
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            if query.images is not None:
                visible |= self._same_image(query)[..., first:]
        else:
            start = positions[:, :1].unsqueeze(-1)
            visible = keys < start
            if window is not None:  # all columns of a canvas see the same context
                visible &= keys >= start - (window - 1)
            canvas = visible.new_ones(len(positions), 1, positions.shape[1])
            visible = torch.cat((visible.expand(len(positions), 1, -1), canvas), -1)
        visible = visible.unsqueeze(1)
        if self.text_config._attn_implementation == "sdpa":
            return visible
        return torch.zeros_like(visible, dtype=self.dtype).masked_fill_(~visible, torch.finfo(self.dtype).min)

    def _same_image(self, query: CanvasQuery) -> Tensor:
        """[R, Q, Q] bool: pairs of columns of one image, which see each other if `use_bidirectional_attention` is
        "vision". Rows start at position 0."""
        is_image = self._image_tokens(query)
        if self.text_config.use_bidirectional_attention != "vision":
            is_image = torch.zeros_like(is_image)
        is_start = is_image & ~torch.nn.functional.pad(is_image, (1, -1))
        group = torch.where(is_image, is_start.int().cumsum(1), 0)
        return (group.unsqueeze(-1) == group.unsqueeze(1)) & is_image.unsqueeze(-1)


def read_denoising(generation: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Values of `DEFAULTS` in a generation config (`sampler_config` has the entropy bound). Raises CheckpointError for
    a wrong value or sampler."""
    values = {name: generation[name] for name in DEFAULTS if generation.get(name) is not None}
    sampler = generation.get("sampler_config")
    if sampler is not None:
        sampler = sampler if isinstance(sampler, Mapping) else sampler.to_dict()
        kind = sampler.get("_cls_name", "EntropyBoundSamplerConfig")
        if kind != "EntropyBoundSamplerConfig":
            raise CheckpointError(
                f"{source}: sampler_config={short_repr(kind)} is not supported; supported: EntropyBoundSamplerConfig"
            )
        if sampler.get("entropy_bound") is not None:
            values["entropy_bound"] = sampler["entropy_bound"]
    with checkpoint_errors(source):
        for name in ("t_min", "t_max", "entropy_bound", "confidence_threshold"):
            check_number(name, values.get(name), low=0, none=True)
        check_int("max_denoising_steps", values.get("max_denoising_steps"), low=1, none=True)
        check_int("stability_threshold", values.get("stability_threshold"), low=0, none=True)
    return values


def check_module(module: Any, source: str) -> None:
    """Raise CheckpointError for unsupported attention of a module. source: the module's name in the message."""
    text = module.config.get_text_config()
    if text.use_bidirectional_attention == "all":
        raise CheckpointError(
            f"{source}: use_bidirectional_attention='all' is not supported: final tokens could not be stored; "
            "supported: None, 'vision'"
        )
    for config in (text, module.config):
        name = getattr(config, "_attn_implementation", None)
        if name is not None and name not in ATTENTION:
            raise CheckpointError(
                f"{source}: attn_implementation={name!r} accepts no masks, which canvases over a sliding window need; "
                f"call module.set_attn_implementation('sdpa') first ({' or '.join(map(repr, ATTENTION))})"
            )


def adapt_module(
    module: Any,
    tokenizer: Any,
    *,
    name: str,
    eos_token_id: Any = None,
    pad_token_id: int | None = None,
    max_length: int | None = None,
    processor: Any = None,
) -> DiffusionGemmaModel:
    """Make a model of a `DiffusionGemmaForBlockDiffusion`. Values that are None come from its configs. Raises
    CheckpointError for an unsupported module or value."""
    check_module(module, name)
    generation = module.generation_config.to_dict()
    text = module.config.get_text_config()
    eos_ids = generation.get("eos_token_id") if eos_token_id is None else eos_token_id
    eos_ids = list(eos_ids) if isinstance(eos_ids, (list, tuple)) else [] if eos_ids is None else [eos_ids]
    vocabulary = {} if tokenizer is None or eos_token_id is not None else tokenizer.get_vocab()
    eos_ids += [vocabulary[token] for token in TURN_ENDS if token in vocabulary]
    with checkpoint_errors(name):
        facts = ModelFacts(
            vocab_size=text.vocab_size,
            eos_token_ids=tuple(dict.fromkeys(eos_ids)),
            pad_token_id=generation.get("pad_token_id") if pad_token_id is None else pad_token_id,
            max_length=text.max_position_embeddings if max_length is None else max_length,
            topology="canvas",
            block_length=module.config.canvas_length,
            name=name,
            tokenizer_size=tokenizer_size(tokenizer),
        )
    max_new_tokens = generation.get("max_new_tokens")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        max_new_tokens = DEFAULT_NEW_TOKENS
    return DiffusionGemmaModel(module, facts, tokenizer, max_new_tokens, read_denoising(generation, name), processor)


def load_diffusion_gemma(
    source: str,
    revision: str | None,
    *,
    dtype: Any,
    device: torch.device | None,
    attn_implementation: str,
    tokenizer: Any = None,
    **options: Any,
) -> DiffusionGemmaModel:
    """Load a checkpoint in transformers' format. tokenizer: replaces the checkpoint's. options: for `from_pretrained`,
    unless None. Raises CheckpointError for files that cannot be read, or wrong weights or values."""
    import transformers

    cls = getattr(transformers, CLASS, None)
    if cls is None:
        raise CheckpointError(
            f"{source!r} has model_type={MODEL_TYPE!r}, which transformers {transformers.__version__} does not have; "
            "install a newer one"
        )
    if attn_implementation not in ATTENTION:
        raise ValueError(
            f"attn_implementation={attn_implementation!r} is not for models with canvases; allowed: "
            f"{', '.join(map(repr, ATTENTION))}"
        )
    arguments = {"dtype": dtype or "auto", "attn_implementation": attn_implementation, **options}
    if dtype == torch.float64:
        arguments["experts_implementation"] = "eager"  # the grouped product has no float64
    check_stored_dtypes(source, read_json(source, "config.json", revision), revision)
    with checkpoint_errors(f"{source!r} cannot be loaded"):
        module = read_module(cls, source, revision, **arguments)
    if device is not None:
        module = module.to(device)
    processor = _read_processor(transformers.AutoProcessor, source, revision)
    if tokenizer is None:
        tokenizer = getattr(processor, "tokenizer", processor)
    if tokenizer is None:
        tokenizer = _read_processor(transformers.AutoTokenizer, source, revision)
    name = os.path.basename(source.rstrip("/")) or source
    return adapt_module(module, tokenizer, name=name, processor=processor)


def _read_processor(cls: Any, source: str, revision: str | None) -> Any:
    from paradec.models.checkpoint import fetch

    if not any(fetch(source, name, revision) for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return cls.from_pretrained(source, revision=revision)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError):
        return None

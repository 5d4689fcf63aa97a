"""Base classes of image models.

Samplers of autoregressive models (`ImageModel`) see token ids below `facts.vocab_size`, the model's outputs. Prompts
may also have larger ids, which only the model's embedding knows: a class label, a position in a caption, other text.
`request` puts further data of its rows into a copy of the adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from paradec.core.checks import check_int, short_repr, unknown_name
from paradec.core.facts import ModelFacts
from paradec.core.prompts import Prompts
from paradec.core.query import Query, WindowQuery, take_columns
from paradec.models.decoder import Decoder, needs_hidden
from paradec.models.images.grid import Grid, pixels_to_codes


def widen(x: Tensor) -> Tensor:
    """Cast to float32, unless the dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass
class ImageRequest:
    """The rows of one request, ready for a sampler's `start`."""

    model: Any
    """The adapter, or a copy of it for this request's rows."""
    prompts: Any
    unconditional: Any = None
    """Prompts of the guidance branch, one per row, of any length; None if guidance needs no prompts."""


@dataclass
class Snapshot:
    """The `B` pictures of a state, with `N` tokens each, after `S` steps."""

    tokens: Tensor
    """[B, N] int64 on the host; [B, N, channels] float if tokens are continuous."""
    is_complete: bool
    """Whether all tokens are final."""
    accepted: np.ndarray
    """[S, B] int64: number of tokens that became final at each step."""
    prompt_lengths: list[int]
    draft_nfe: list[int]
    """Forward calls of the draft model for each row; 0 without one."""


class PictureModel:
    """Base of all image models. A subclass sets the attributes below and implements `grid` and `read`; it may override
    other methods."""

    makes: ClassVar[str] = ""
    """The kind, one of `paradec.core.checks.MODELS`."""
    family: ClassVar[str] = ""
    """The family of its samplers."""
    default_sampler: ClassVar[str] = ""
    sampler_names: ClassVar[Mapping[str, tuple[str, str | None]]] = {}
    """Aliases of samplers for this kind of model -> (sampler, preset)."""
    sampler_settings: ClassVar[tuple[str, ...]] = ()
    """Arguments of a request that the family's samplers take as settings."""
    title: ClassVar[str] = ""
    """The model's name in messages about samplers; by default `facts.name`."""
    conditions: str = "class_labels"
    """The conditions of a request: "prompts" or "class_labels"."""
    defaults: Mapping[str, Any] = {}
    """The authors' settings: fields of `paradec.Request`."""
    decoder_option: ClassVar[str | None] = None
    """Name of the attribute with the decoder, and of its option in `paradec.load`: "vq" or "vae"; None without one."""
    other_sizes: ClassVar[str] = ""
    """A hint for messages: how to get pictures of another size."""
    module: Any
    evaluation_context: Any
    device: torch.device
    facts: Any

    @property
    def decoder(self) -> Any:
        """The decoder of pixels, or None."""
        return None if self.decoder_option is None else getattr(self, self.decoder_option)

    @property
    def shared(self) -> dict[str, Any]:
        """Arguments of `paradec.load` for a draft model or teacher of this model."""
        return {}

    def defaults_with(self, sampler: Any) -> dict[str, Any]:
        """Default fields of a request that uses this sampler."""
        return {name: value for name, value in self.defaults.items() if name != "steps" or sampler.uses_steps}

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        """The raster of a picture of this size in pixels; None: the default. Raises ValueError for a wrong size."""
        raise NotImplementedError

    def square_grid(
        self, side: int, codes: int, height: int | None, width: int | None, scale: int | None = None
    ) -> Grid:
        """The raster of a model with a single size: `side` x `side` tokens of the first `codes` ids. Raises ValueError
        for another size. scale: pixels along one side of a token; None: the decoder's, or 16 without a decoder."""
        if scale is None:
            scale = 16 if self.decoder is None else self.decoder.config.scale
        for name, value in (("height", height), ("width", width)):
            if pixels_to_codes(name, value, side, scale) != side:
                pixels = side * scale
                raise ValueError(
                    f"{name}={short_repr(value)} must be {pixels}: {self.facts.name} makes {pixels} x {pixels} pixels"
                    f"{self.other_sizes}"
                )
        return Grid(side, side, range(codes))

    def request(self, conditions: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        """Make one request, with `num_images` adjacent rows for every prompt or label. In this base class, conditions
        are class labels below `facts.classes`, an int or several. Raises ValueError or TypeError for other values."""
        self.refuse_negative_prompt(negative_prompt)
        return ImageRequest(self, list_labels(conditions, self.facts.classes, num_images))

    def begin(self, sampler: Any, image_request: ImageRequest, grid: Grid, request: Any) -> Any:
        """Start one request: `sampler.start`, with this kind of model's additions to a `paradec.Request`."""
        return sampler.start(image_request.model, image_request.prompts, request)

    def read(self, state: Any, grid: Grid) -> Snapshot:
        """Read the pictures of a state, finished or not."""
        raise NotImplementedError

    def check_decodes(self) -> None:
        """Raise ValueError if the model's decoder was not loaded."""
        if (option := self.decoder_option) is not None and self.decoder is None:
            raise ValueError(
                f"{self.facts.name} has no {option.upper()} decoder; load it with {option}=..., or request "
                "output_type='latent'"
            )

    def latent(self, tokens: Tensor, grid: Grid) -> Tensor:
        """The decoder's input: codes [B, h, w] int64, row by row; or a float latent."""
        return grid.codes(tokens)

    def decode(self, tokens: Tensor, grid: Grid | None = None) -> Tensor:
        """Tokens of whole answers [B, grid.length] -> images [B, C, H, W] float32 in [0, 1]."""
        self.check_decodes()
        with self.evaluation_context():
            images = self._pixels(self.latent(tokens.to(self.device), grid or self.grid()))
        return (images.float() / 2 + 0.5).clamp(0, 1)

    def _pixels(self, latent: Tensor) -> Tensor:
        """The output of `latent` -> images [B, C, H, W] float, about [-1, 1]."""
        return self.decoder.decode(latent)

    def stages(self, tokens: Tensor) -> Iterable[Tensor]:
        """Yield the pictures after each step, [B, C, H, W] in [0, 1], for traces. Only models whose steps change all
        pixels yield pictures."""
        return ()

    def refuse_negative_prompt(self, negative_prompt: Any) -> None:
        if negative_prompt is not None:
            raise ValueError(f"{self.facts.name} has no negative_prompt; it is conditioned on {self.conditions}")


class ImageModel(PictureModel, Decoder):
    """Base of autoregressive image models (topology "causal", prediction "shifted"). A family implements `_embed`,
    `_backbone`, `head` and `request`; it may override `grid` and `_pixels`."""

    makes = "image"
    family = "draft_verify"
    default_sampler = "sjd"
    decoder_option = "vq"
    vq: Any = None
    conditions = "prompts"
    defaults: Mapping[str, Any] = {"guidance_scale": 1.0, "top_k": None, "temperature": 1.0, "top_p": None}

    def __init__(self, module: nn.Module, facts: ModelFacts, tokenizer: Any = None):
        super().__init__(module, facts, tokenizer, default_max_new_tokens=1)

    pads = True
    supports_store = True
    supports_visibility = True
    has_head = True

    # ---- for subclasses -------------------------------------------------------------------------------------------

    def codebook(self) -> Tensor | None:
        """[vocab_size, d] float: the code vector of every id, NaN for ids of other tokens; None without VQ."""
        return None if self.vq is None else self.vq.quantize.codes

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        return self.square_grid(self.module.config.grid, self.facts.vocab_size, height, width)

    def token_embeddings(self) -> Tensor:
        """[vocab_size, d]: the input embeddings of the ids that samplers see."""
        return self._embed(torch.arange(self.facts.vocab_size, device=self.device).unsqueeze(0), None)[0]

    def _embed(self, ids: Tensor, query: Query | None) -> Tensor:
        """Embed ids: [R, Q] int64 -> [R, Q, d]. `query` may be None if all ids are below `vocab_size`."""
        raise NotImplementedError

    def _backbone(self, embeddings: Tensor, query: Query, mask: Tensor | None, cache: Any) -> Tensor:
        """[R, Q, d] -> last hidden states [R, Q, d]. mask [R, 1, Q, K] bool, or None: causal over the call."""
        raise NotImplementedError

    def head(self, hidden: Tensor) -> Tensor:
        """Apply the output matrix: hidden states [R, W, d] -> logits [R, W, V]."""
        raise NotImplementedError

    # ---- shared ---------------------------------------------------------------------------------------------------

    def begin(self, sampler: Any, image_request: ImageRequest, grid: Grid, request: Any) -> Any:
        """The state of one request over the grid, guided by the unconditional prompts."""
        if request.top_k is not None and request.top_k >= self.facts.vocab_size:
            request = replace(request, top_k=None)
        guided = {} if request.guidance_scale == 1 else {"negative_prompt": image_request.unconditional}
        return sampler.start(image_request.model, image_request.prompts, request, grid=grid, **guided)

    def read(self, state: Any, grid: Grid) -> Snapshot:
        return Snapshot(
            tokens=picture_tokens(state, grid),
            is_complete=state.done,
            accepted=np.array(state.accepted, np.int64).reshape(-1, state.batch),
            prompt_lengths=[int(length) for length in state.prompt_length],
            draft_nfe=state.draft_nfe.tolist(),
        )

    def _call(self, query: Query, store: Any) -> Tensor:
        cache = None if store is None else store.bind(query)
        mask = self._visible(query) if store is None else self._store_mask(query, store)
        hidden = self._backbone(self._embed(query.tokens, query), query, mask, cache)
        if needs_hidden(query):
            query.hidden = hidden
        return self.head(hidden if query.wanted is None else take_columns(hidden, query.wanted))

    def _store_mask(self, query: Query, store: Any) -> Tensor:
        """[R, 1, Q, K] bool: which keys of store and call each column sees (those at positions up to its own)."""
        mask, keys = store.visible(query)
        causal = (query.positions.unsqueeze(-1) >= keys.unsqueeze(-2)).unsqueeze(1)
        return causal if mask is None else causal & mask

    def _copy_with(self, **attributes: Any) -> Any:
        adapter = object.__new__(type(self))
        adapter.__dict__ = self.__dict__ | attributes
        return adapter


def picture_tokens(state: Any, grid: Grid) -> Tensor:
    """[B, grid.length] int64 on the host: the tokens after each row's prompt in a state's canvas."""
    start = torch.as_tensor(state.prompt_length, device=state.canvas.device).unsqueeze(1)
    return state.canvas.gather(1, start + torch.arange(grid.length, device=state.canvas.device)).cpu()


def list_labels(class_labels: Any, classes: int, copies: int = 1) -> list[int]:
    """List class labels, each `copies` times. Raises ValueError for no labels or a label out of its range, TypeError
    for other values."""
    if hasattr(class_labels, "tolist"):
        class_labels = class_labels.tolist()
    if not isinstance(class_labels, Sequence) or isinstance(class_labels, (str, bytes)):
        class_labels = [class_labels]
    if not class_labels:
        raise ValueError("class_labels is empty; give at least one")
    for label in class_labels:
        check_int("class_labels", label, low=0, high=classes - 1)
    return [int(label) for label in class_labels for _ in range(copies)]


def exact_prompts(rows: list[list[int]]) -> Prompts:
    """Build prompts whose rows are exactly these ids."""
    return Prompts(rows, single=len(rows) == 1, starts=[0] * len(rows))


def merge_defaults(published: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Merge a request's defaults into the published ones. Raises ValueError for an unknown field."""
    for name in overrides or ():
        if name not in published:
            raise ValueError(unknown_name("default of requests", name, published))
    return {**published, **(overrides or {})}


def check_same_fields(role: str, peer: Any, model: Any, peer_config: Any, config: Any, fields: Sequence[str]) -> None:
    """Raise ValueError unless a peer model's configuration equals the model's in these fields."""
    for name in fields:
        if getattr(peer_config, name) != getattr(config, name):
            raise ValueError(
                f"{role} {peer.facts.name} has {name}={short_repr(getattr(peer_config, name))}; {model.facts.name} has "
                f"{short_repr(getattr(config, name))}"
            )


def request_rows(query: Query, batch: int) -> Tensor:
    """[R] int64: the request's row for each row of a call; for the guidance branch `batch` is added."""
    rows = torch.as_tensor(query.rows, device=query.tokens.device)
    if isinstance(query, WindowQuery) and query.window.num_drafts is not None:
        rows = rows.repeat_interleave(torch.as_tensor(query.window.num_drafts, device=rows.device))
    return torch.cat([rows + branch * batch for branch in range(query.branches)])

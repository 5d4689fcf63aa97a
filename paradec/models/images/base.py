"""Base classes of image models: which samplers decode with one, how a request becomes rows, and how a state becomes
pictures. `paradec.generate_images` reads no more than `PictureModel`; adapters name samplers as text.

Samplers of autoregressive models (`ImageModel`) see token ids below `facts.vocab_size`, the model's outputs. Prompts
may hold ids from there on, which the model's embedding alone understands: a class label, a place in a caption, text
with another vocabulary. What belongs to a request's rows is in a copy of the adapter, made by `request`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from paradec.core.checks import check_int, shown
from paradec.core.facts import ModelFacts
from paradec.core.prompts import Prompts
from paradec.core.query import Query, WindowQuery, take_columns
from paradec.core.registry import unknown
from paradec.models.decoder import Decoder, keeps_hidden
from paradec.models.images.grid import Grid, pixels_to_codes


@dataclass
class ImageRequest:
    """The rows of one request, ready for a sampler's `start`."""

    model: Any
    """What is decoded with: the adapter, or a copy of it that knows this request's rows."""
    prompts: Any
    """What `start` takes for the rows."""
    unconditional: Any = None
    """Prompts of the guidance branch, one per row, of any length, for models that are guided by other prompts."""


@dataclass
class Reading:
    """What a state holds of its pictures. `B` pictures of `N` tokens, `S` steps."""

    tokens: Tensor
    """[B, N] int64 on the host; [B, N, C'] float where they are continuous."""
    whole: bool
    """Whether every token of every picture is there."""
    accepted: np.ndarray
    """[S, B] int64: tokens that became final at each step."""
    prompt_lengths: list[int]
    draft_nfe: list[int]
    """Forward calls of a model that drafted for each row; 0 without one."""


class PictureModel:
    """Base of all image models. A kind of model states its samplers and conditions, and implements `grid` and `read`,
    and `request`, `begin`, `latent` and `_pixels` where they differ."""

    makes: ClassVar[str] = ""
    """What it is, one of `paradec.core.checks.MODELS`."""
    family: ClassVar[str] = ""
    """Of the samplers that decode with it."""
    default_sampler: ClassVar[str] = ""
    sampler_names: ClassVar[Mapping[str, tuple[str, str | None]]] = {}
    """Names of samplers that mean another one for this kind of model: that one's name, and its preset."""
    sampler_settings: ClassVar[tuple[str, ...]] = ()
    """Arguments of a request that are settings of these samplers."""
    title: ClassVar[str] = ""
    """What messages about samplers call the model; by default its own name."""
    conditions: str = "class_labels"
    """What a request gives: "prompts" or "class_labels"."""
    defaults: Mapping[str, Any] = {}
    """What the model's authors sample with: fields of `paradec.Request`."""
    decoder_option: ClassVar[str | None] = None
    """The attribute that holds what makes pixels, or None, and the option of `paradec.load` for it: "vq" or "vae"."""
    other_sizes: ClassVar[str] = ""
    """How to get pictures of another size, for messages."""
    module: Any
    evaluating: Any
    device: torch.device
    facts: Any

    @property
    def decoder(self) -> Any:
        """What makes pixels, if there is such."""
        return None if self.decoder_option is None else getattr(self, self.decoder_option)

    @property
    def shared(self) -> dict[str, Any]:
        """Options that a model which drafts for this one is loaded with."""
        return {}

    def defaults_with(self, sampler: Any) -> dict[str, Any]:
        """The fields of a request that names no more than its sampler."""
        return {name: value for name, value in self.defaults.items() if name != "steps" or sampler.uses_steps}

    def grid(self, height: int | None = None, width: int | None = None) -> Grid:
        """The raster of a picture in pixels; by default the model's own size. Raises ValueError for an impossible
        size."""
        raise NotImplementedError

    def square_grid(
        self, side: int, codes: int, height: int | None, width: int | None, scale: int | None = None
    ) -> Grid:
        """The raster of a model of one size: `side` x `side` tokens of the first `codes` ids. Raises ValueError for
        another size.

        Args:
            scale: pixels along one side of a token; None asks the decoder, and is 16 without one.
        """
        if scale is None:
            scale = 16 if self.decoder is None else self.decoder.config.scale
        for name, value in (("height", height), ("width", width)):
            if pixels_to_codes(name, value, side, scale) != side:
                pixels = side * scale
                raise ValueError(
                    f"{name}={shown(value)} is not what {self.facts.name} makes: {pixels} x {pixels} pixels"
                    f"{self.other_sizes}"
                )
        return Grid(side, side, range(codes))

    def request(self, given: Any, grid: Grid, num_images: int = 1, negative_prompt: Any = None) -> ImageRequest:
        """Lay out one request: `num_images` rows for every prompt or label, copies side by side; here for class labels
        (`given`: an int or several) of the `facts.classes`.

        Raises:
            ValueError, TypeError: conditions that the model does not take; the message names them.
        """
        self.no_negative_prompt(negative_prompt)
        return ImageRequest(self, [label for label in labels_of(given, self.facts.classes) for _ in range(num_images)])

    def begin(self, sampler: Any, laid: ImageRequest, grid: Grid, request: Any) -> Any:
        """The state of one request: `sampler.start`, with what this kind of model adds to a `paradec.Request`."""
        return sampler.start(laid.model, laid.prompts, request)

    def read(self, state: Any, grid: Grid) -> Reading:
        """What a state holds of its pictures, also of one that is not done."""
        raise NotImplementedError

    def check_decodes(self) -> None:
        """Raise ValueError where there is nothing to make pixels with."""
        if (option := self.decoder_option) is not None and self.decoder is None:
            raise ValueError(
                f"{self.facts.name} has no {option.upper()} decoder; load it with {option}=..., or take "
                "output_type='latent'"
            )

    def latent(self, tokens: Tensor, grid: Grid) -> Tensor:
        """What the decoder reads: codes [B, h, w] int64, row by row; or a float latent where there are none."""
        return grid.codes(tokens)

    def decode(self, tokens: Tensor, grid: Grid | None = None) -> Tensor:
        """Tokens of whole answers [B, grid.length] -> images [B, C, H, W] float32 in [0, 1]."""
        self.check_decodes()
        with self.evaluating():
            images = self._pixels(self.latent(tokens.to(self.device), grid or self.grid()))
        return (images.float() / 2 + 0.5).clamp(0, 1)

    def _pixels(self, latent: Tensor) -> Tensor:
        """What `latent` gives -> images [B, C, H, W] float, about [-1, 1]."""
        return self.decoder.decode(latent)

    def stages(self, tokens: Tensor) -> Iterable[Tensor]:
        """The pictures as they are after each step, [B, C, H, W] in [0, 1], for traces: nothing, unless every step
        changes the whole of them."""
        return ()

    def no_negative_prompt(self, negative_prompt: Any) -> None:
        """Raise ValueError where one is given."""
        if negative_prompt is not None:
            raise ValueError(f"{self.facts.name} does not take negative_prompt; it is conditioned on {self.conditions}")


class ImageModel(PictureModel, Decoder):
    """Base of autoregressive image models. A family implements `_embed`, `_backbone`, `_head`, `request`, `grid` and
    `_pixels`.

    Args:
        facts: topology "causal", prediction "shifted".
    """

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

    # ---- what a family says ---------------------------------------------------------------------------------------

    def codebook(self) -> Tensor | None:
        """[vocab_size, d] float: the code of every id, NaN for ids that are no image tokens; None without VQ."""
        return None if self.vq is None else self.vq.quantize.codes

    def token_embeddings(self) -> Tensor:
        """[vocab_size, d]: the input embeddings of the ids that samplers see."""
        return self._embed(torch.arange(self.facts.vocab_size, device=self.device).unsqueeze(0), None)[0]

    def head(self, hidden: Tensor) -> Tensor:
        """The output matrix alone: hidden states [R, W, d] -> [R, W, vocab_size]."""
        return self._head(hidden)

    def _embed(self, ids: Tensor, query: Query | None) -> Tensor:
        """ids [R, Q] int64 -> [R, Q, d]. `query` is None for ids below the vocabulary's size."""
        raise NotImplementedError

    def _backbone(self, embeddings: Tensor, query: Query, mask: Tensor | None, cache: Any) -> Tensor:
        """[R, Q, d] -> last hidden states [R, Q, d]. mask [R, 1, Q, K] bool, or None: causal over the call."""
        raise NotImplementedError

    def _head(self, hidden: Tensor) -> Tensor:
        """[R, W, d] -> logits [R, W, V]."""
        raise NotImplementedError

    # ---- what all share -------------------------------------------------------------------------------------------

    def begin(self, sampler: Any, laid: ImageRequest, grid: Grid, request: Any) -> Any:
        """The state of one request over the grid, guided by the unconditional prompts."""
        if request.top_k is not None and request.top_k >= self.facts.vocab_size:
            request = replace(request, top_k=None)
        guided = {} if request.guidance_scale == 1 else {"negative_prompt": laid.unconditional}
        return sampler.start(laid.model, laid.prompts, request, grid=grid, **guided)

    def read(self, state: Any, grid: Grid) -> Reading:
        return Reading(
            tokens=tokens_of(state, grid),
            whole=state.done,
            accepted=np.array(state.accepted, np.int64).reshape(-1, state.batch),
            prompt_lengths=[int(length) for length in state.prompt_length],
            draft_nfe=state.draft_nfe.tolist(),
        )

    def _call(self, query: Query, store: Any) -> Tensor:
        cache = None if store is None else store.bind(query)
        mask = self._visible(query) if store is None else self._over_store(query, store)
        hidden = self._backbone(self._embed(query.tokens, query), query, mask, cache)
        if keeps_hidden(query):
            query.hidden = hidden
        return self._head(hidden if query.wanted is None else take_columns(hidden, query.wanted))

    def _over_store(self, query: Query, store: Any) -> Tensor:
        """[R, 1, Q, K] bool: stored keys, and the call's own, up to each column's position."""
        mask, keys = store.visible(query)
        causal = (query.positions.unsqueeze(-1) >= keys.unsqueeze(-2)).unsqueeze(1)
        return causal if mask is None else causal & mask

    def _bound(self, **held: Any) -> Any:
        """A copy of the adapter with these attributes; the module is shared."""
        bound = object.__new__(type(self))
        bound.__dict__ = self.__dict__ | held
        return bound


def tokens_of(state: Any, grid: Grid) -> Tensor:
    """[B, grid.length] int64 on the host: what follows each row's prompt in a state's canvas."""
    first = torch.as_tensor(state.prompt_length, device=state.canvas.device).unsqueeze(1)
    return state.canvas.gather(1, first + torch.arange(grid.length, device=state.canvas.device)).cpu()


def labels_of(given: Any, classes: int) -> list[int]:
    """List class labels. Raises ValueError for none, or one out of its range; TypeError for other than integers."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    labels = list(given) if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) else [given]
    if not labels:
        raise ValueError("class_labels is empty; give at least one")
    for label in labels:
        check_int("class_labels", label, low=0, high=classes - 1)
    return [int(label) for label in labels]


def exact_prompts(rows: list[list[int]]) -> Prompts:
    """Rows of ids as prompts: nothing is put before them."""
    return Prompts(rows, single=len(rows) == 1, starts=[0] * len(rows))


def merge_defaults(published: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Defaults of requests: those `given` over the published ones. Raises ValueError for an unknown field."""
    for name in given or ():
        if name not in published:
            raise ValueError(unknown("default of requests", name, published))
    return {**published, **(given or {})}


def check_alike(role: str, other: Any, model: Any, theirs: Any, ours: Any, fields: Sequence[str]) -> None:
    """Raise ValueError unless `theirs` of a model, the `role` of another one, equals `ours` in these fields."""
    for name in fields:
        if getattr(theirs, name) != getattr(ours, name):
            raise ValueError(
                f"{role} {other.facts.name} has {name}={shown(getattr(theirs, name))}; {model.facts.name} has "
                f"{shown(getattr(ours, name))}"
            )


def request_rows(query: Query, batch: int) -> Tensor:
    """[R] int64: where each row of a call is among a request's `batch` rows, the guidance branch's after them."""
    rows = torch.as_tensor(query.rows, device=query.tokens.device)
    if isinstance(query, WindowQuery) and query.window.copies is not None:
        rows = rows.repeat_interleave(torch.as_tensor(query.window.copies, device=rows.device))
    return torch.cat([rows + branch * batch for branch in range(query.branches)])

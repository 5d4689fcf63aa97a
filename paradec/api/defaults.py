"""Samplers, caches and block lengths for requests that name none, by the model's topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paradec import caches
from paradec.caches.table import REFUSED, verdict


@dataclass(frozen=True)
class Defaults:
    """Defaults of one topology.

    sampler: None is the request's default. cache, block_length: of `chat` and `serve`, whose models have no block
        length of their own; other entry points use no cache and the model's block length."""

    sampler: str | None = None
    cache: str | None = None
    block_length: int | None = None


BY_TOPOLOGY = {
    "bidirectional": Defaults(cache="dual", block_length=32),
    "block_causal": Defaults(cache="block"),
    "causal_context": Defaults(cache="block"),
    "causal": Defaults(sampler="sjd"),
    "canvas": Defaults(sampler="diffusion_gemma"),
}


def find_defaults(model: Any) -> Defaults:
    """Defaults of a model's topology; those of the request for a model without one."""
    return BY_TOPOLOGY.get(getattr(getattr(model, "facts", None), "topology", ""), Defaults())


def model_defaults(model: Any) -> dict[str, Any]:
    """Fields of a request whose default differs for this model."""
    sampler = getattr(model, "default_sampler", None) or find_defaults(model).sampler
    return {} if sampler is None else {"sampler": sampler}


def choose_cache(model: Any, sampler: Any) -> Any:
    """The cache of `chat` and `serve`; None for samplers with a store of their own and where the cache is refused."""
    name = find_defaults(model).cache
    if name is None or sampler.family != "masked":
        return None
    cache = caches.create(name)
    return None if verdict(sampler, cache, model.facts, model.supports_store).status == REFUSED else cache

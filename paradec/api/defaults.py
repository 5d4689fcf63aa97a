"""Default samplers, caches and block lengths by the model's topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paradec import caches
from paradec.caches.suffix import Suffix
from paradec.caches.table import APPROXIMATE, REFUSED, verdict


@dataclass(frozen=True)
class Defaults:
    """Defaults of one topology.

    sampler: None is the default of `paradec.Request`. cache: of `chat` and `serve`; other entry points use no cache.
    block_length: of `chat` and `serve`, for models that have none."""

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
    """Find the defaults for a model's topology; empty defaults for a model without a topology."""
    return BY_TOPOLOGY.get(getattr(getattr(model, "facts", None), "topology", ""), Defaults())


def model_defaults(model: Any) -> dict[str, Any]:
    """Return the model's defaults for fields of a request, where they differ from those of `paradec.Request`."""
    sampler = getattr(model, "default_sampler", None) or find_defaults(model).sampler
    return {} if sampler is None else {"sampler": sampler}


def choose_cache(model: Any, sampler: Any) -> Any:
    """Make the default cache of `chat` and `serve`; None where the sampler or the model does not support it."""
    name = find_defaults(model).cache
    if name is None or sampler.family != "masked":
        return None
    cache = caches.create(name)
    return None if verdict(sampler, cache, model.facts, model.supports_store).status == REFUSED else cache


def choose_packaged_suffix(model: Any, sampler: Any, cache: Any) -> Suffix | None:
    """Make the default suffix of `serve` for the packaged model, which was trained on at most 72 new tokens and must
    not see more masks; None where the sampler or the cache does not support it."""
    suffix = Suffix(32)
    return None if suffix.why_unsupported(sampler, model, cache or caches.create("none"), has_holes=False) else suffix


def describe_settings(batch: Any, max_answer: int) -> dict[str, Any]:
    """Convert the default settings of a `Batch` to JSON data. block_length: None is the whole answer. max_new_tokens,
    max_answer: default and maximum answer length. max_length: the model's limit of prompt and answer, or None."""
    model, request, sampler = batch.model, batch.request, batch.sampler
    is_masked = sampler.family == "masked"
    cache = caches.create(request.cache) if isinstance(request.cache, str) else request.cache
    status = None if cache is None else verdict(sampler, cache, model.facts, model.supports_store).status
    suffix = Suffix.from_value(request.suffix)
    block_length = request.block_length or model.facts.block_length or model.default_block_length
    return {
        "sampler": sampler.name,
        "cache": cache.name if cache is not None else "none" if is_masked else "the sampler's",
        "is_approximate": status == APPROXIMATE,
        "block_length": block_length if is_masked else None,
        "suffix": None if suffix is None else suffix.to_dict(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_new_tokens": min(max_answer, request.max_new_tokens or model.default_max_new_tokens),
        "max_answer": min(max_answer, model.facts.max_length or max_answer),
        "max_length": model.facts.max_length,
    }

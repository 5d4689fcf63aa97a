"""Valid combinations of samplers, caches and models, and whether results equal those without a cache. Verdicts are
derived from `samplers.masked.view.Needs`, `CacheFacts` and `ModelFacts`, so they cover plugins too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paradec import caches
from paradec.core.checks import short_repr
from paradec.core.registry import Registry

if TYPE_CHECKING:  # the command line imports this module, and no torch
    from paradec.caches.base import Cache
    from paradec.core.blocks import BlockPolicy

EXACT, APPROXIMATE, REFUSED = "exact", "approximate", "refused"
MODELS = (
    ("bidirectional", "same"),
    ("bidirectional", "shifted"),
    ("block_causal", "same"),
    ("block_causal", "shifted"),
    ("causal_context", "same"),
)
"""(topology, prediction) of the masked family's models."""


@dataclass(frozen=True)
class Verdict:
    """Verdict on a combination: `status` is EXACT, APPROXIMATE or REFUSED."""

    status: str
    why: str = ""
    """Why the combination is refused, or when an approximate one is exact."""


def verdict(sampler: Any, cache: Any, facts: Any, stores: bool = True) -> Verdict:
    """Decide whether a sampler works with a cache on a model, and whether the results are exact.

    sampler: a sampler or its class. facts: the model's `topology`, `prediction`, `whole_blocks` and `name`.
    stores: whether the model supports a key/value store."""
    if sampler.family != "masked":
        return Verdict(REFUSED, f"samplers of family {sampler.family!r} have their own store; caches are for 'masked'")
    if (reason := sampler.needs.why_unsupported(facts)) is not None:
        return Verdict(REFUSED, reason)
    if sampler.needs.mask_probes and facts.prediction != "same":
        return Verdict(REFUSED, f"the sampler needs a model that predicts in place ('same'); {facts.name} does not")
    if facts.topology == "causal_context" and (sampler.needs.multi_step or sampler.needs.mask_probes):
        return Verdict(
            REFUSED, "the sampler puts several steps in one call, but a block's first token needs a separate call"
        )
    if not cache.facts.uses_store:
        return Verdict(EXACT)
    if not stores:
        return Verdict(REFUSED, f"the cache needs a key/value store, which {facts.name} cannot use: use cache='none'")
    if facts.topology not in cache.facts.topologies:
        needed = " or ".join(topology.replace("_", "-") for topology in cache.facts.topologies)
        return Verdict(REFUSED, f"the cache needs a {needed} model; {facts.name} is {facts.topology.replace('_', '-')}")
    if facts.prediction not in cache.facts.predictions:
        return Verdict(REFUSED, f"the cache needs a model that predicts in place ('same'); {facts.name} does not")
    if cache.facts.evaluates == "picks" and not sampler.needs.previews:
        return Verdict(
            REFUSED, "the cache must know a step's positions before the forward; this sampler chooses them after it"
        )
    if cache.facts.evaluates == "targets" and not hasattr(sampler, "targets"):
        return Verdict(REFUSED, "the cache needs a sampler that chooses positions in advance: use sampler 'recap'")
    if sampler.needs.decided_logits and cache.facts.evaluates != "block":
        return Verdict(
            REFUSED, "the sampler reads logits of decided positions, which the cache does not evaluate: use 'dual'"
        )
    if sampler.needs.moves and not cache.facts.stateless:
        return Verdict(REFUSED, "the sampler moves tokens, but the cache tracks changes by position: use 'block'")
    if facts.whole_blocks and not cache.facts.reads_final_only:
        return Verdict(REFUSED, f"{facts.name} chooses experts for whole blocks; the cache cuts these: use 'block'")
    if sampler.needs.stores_final and not cache.facts.reads_final_only:
        return Verdict(REFUSED, "the sampler stores only finished blocks; the cache also reads other keys: use 'block'")
    if sampler.needs.multi_step and not cache.facts.stateless and not cache.exact_for(facts.topology):
        return Verdict(
            REFUSED,
            "the sampler runs several steps in one call, with the result of single steps; what this cache evaluates "
            "depends on the number of earlier calls: use 'dual', 'prefix' or 'block'",
        )
    if cache.exact_for(facts.topology):
        return Verdict(EXACT)
    return Verdict(APPROXIMATE, f"exact when {cache.exact_when}" if cache.exact_when else "")


def prefix_verdict(cache: Any, facts: Any) -> Verdict:
    """Decide whether a cache works with a prefix from an earlier request or a separate forward."""
    if not cache.facts.uses_store:
        return Verdict(REFUSED, "the cache keeps no keys and values")
    if facts.topology not in cache.facts.topologies:
        return Verdict(REFUSED, f"the cache does not work with {facts.topology.replace('_', '-')} models")
    if facts.topology == "causal_context":
        return Verdict(REFUSED, "a prefix may end within a block, because blocks begin where a row's prompt ends")
    if facts.topology == "block_causal":
        return Verdict(EXACT) if cache.exact_for(facts.topology) else Verdict(APPROXIMATE, "the cache is approximate")
    return Verdict(APPROXIMATE, "the prefix was evaluated without later tokens; exact when the model has one layer")


@dataclass(frozen=True)
class _Facts:
    topology: str
    prediction: str
    whole_blocks = False
    name = "this model"


def table(samplers: Registry, caches: Registry) -> Iterator[tuple[str, str, str, str, Verdict]]:
    """Yield (sampler, cache, topology, prediction, verdict) of every registered combination, with default settings."""
    for sampler_name in samplers.names():
        sampler = samplers.get(sampler_name)
        for cache_name in caches.names():
            for topology, prediction in MODELS:
                result = verdict(sampler, caches.create(cache_name), _Facts(topology, prediction))
                yield sampler_name, cache_name, topology, prediction, result


def summary(samplers: Registry, caches: Registry) -> list[dict[str, str]]:
    """Summarize the table for `paradec caches`: one entry per cache and group of samplers with equal verdicts. Keys:
    "cache", "samplers" ("all", "all but ..." or names), the topologies, "prefix reuse" and "why"."""
    masked = [name for name in samplers.names() if getattr(samplers.get(name), "family", None) == "masked"]
    results_of_pair: dict[tuple[str, str], list[tuple[str, str, Verdict]]] = {}
    for sampler, cache, topology, prediction, result in table(samplers, caches):
        if sampler in masked:
            results_of_pair.setdefault((sampler, cache), []).append((topology, prediction, result))
    groups: dict[tuple[str, tuple[tuple[str, str, Verdict], ...]], list[str]] = {}
    for (sampler, cache), results in results_of_pair.items():
        groups.setdefault((cache, tuple(results)), []).append(sampler)
    ordered = sorted(groups.items(), key=lambda item: caches.names().index(item[0][0]))
    return [
        {"cache": cache, "samplers": _names(members, masked)} | _columns(verdicts, caches.create(cache))
        for (cache, verdicts), members in ordered
    ]


def _names(names: list[str], all_names: list[str]) -> str:
    if len(names) == len(all_names):
        return "all"
    others = [name for name in all_names if name not in names]
    return ", ".join(names) if len(names) <= len(others) else "all but " + ", ".join(others)


def _columns(results: tuple[tuple[str, str, Verdict], ...], cache: Any) -> dict[str, str]:
    """Make a column per topology (a verdict per prediction if these differ), and columns "prefix reuse" and "why"."""
    columns: dict[str, str] = {}
    reasons: list[str] = []
    for topology in dict.fromkeys(topology for topology, _, _ in results):
        verdicts = {prediction: verdict for name, prediction, verdict in results if name == topology}
        statuses = {verdict.status for verdict in verdicts.values()}
        columns[topology] = (
            statuses.pop()
            if len(statuses) == 1
            else ", ".join(f"{verdict.status} ({prediction})" for prediction, verdict in verdicts.items())
        )
        reasons += [verdict.why for verdict in verdicts.values() if verdict.why]
    prefix_statuses = {topology: prefix_verdict(cache, _Facts(topology, "same")).status for topology in columns}
    reuse = ", ".join(f"{status} ({name})" for name, status in prefix_statuses.items() if status != REFUSED) or REFUSED
    return columns | {"prefix reuse": reuse, "why": "; ".join(dict.fromkeys(reasons))}


def make_cache(request: Any, sampler: Any, model: Any, blocks: BlockPolicy) -> Cache:
    """Make the cache of a request. Raises ValueError if it does not work with this sampler, model or block policy."""
    cache: Cache = caches.create(request.cache) if isinstance(request.cache, str) else request.cache
    if cache.facts.uses_store:
        result = verdict(sampler, cache, model.facts, stores=model.supports_store)
        if result.status == REFUSED:
            raise ValueError(f"cache={cache.name!r} does not work with sampler {sampler.name!r} here: {result.why}")
    if cache.facts.evaluates == "picks" and getattr(blocks, "reads_logits", False):
        raise ValueError(
            f"cache={cache.name!r} does not work with blocks={short_repr(blocks)}: positions must be chosen before the "
            "forward, and a block's end depends on the forward's logits; use paradec.FixedBlocks or another cache"
        )
    if cache.facts.evaluates == "picks" and request.rng == "reference" and request.temperature > 0:
        raise ValueError(
            f"cache={cache.name!r} needs positions before the forward, but rng='reference' draws tokens first "
            "and then positions, from one stream: use temperature=0 or rng='counter'"
        )
    return cache

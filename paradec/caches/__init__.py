"""Caches: each is a plan of what is recomputed at a step. `create(name, **settings)` makes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paradec.core.registry import Registry

if TYPE_CHECKING:  # the classes of the registry, for editors and type checkers
    from paradec.caches.block import BlockCache as BlockCache
    from paradec.caches.d2 import D2Cache as D2Cache
    from paradec.caches.delayed import DelayedCache as DelayedCache
    from paradec.caches.dkv_decode import DkvDecode as DkvDecode
    from paradec.caches.dkv_greedy import DkvGreedy as DkvGreedy
    from paradec.caches.dkv_pd import DkvPD as DkvPD
    from paradec.caches.dkv_prefill import DkvPrefill as DkvPrefill
    from paradec.caches.dual import DualCache as DualCache
    from paradec.caches.hierarchical import HierarchicalCache as HierarchicalCache
    from paradec.caches.none import NoCache as NoCache
    from paradec.caches.prefix import PrefixCache as PrefixCache
    from paradec.caches.recap import RecapCache as RecapCache
    from paradec.caches.vicinity import VicinityCache as VicinityCache

registry = Registry(
    "cache",
    {
        "none": "paradec.caches.none:NoCache",
        "prefix": "paradec.caches.prefix:PrefixCache",
        "dual": "paradec.caches.dual:DualCache",
        "vicinity": "paradec.caches.vicinity:VicinityCache",
        "delayed": "paradec.caches.delayed:DelayedCache",
        "dkv_decode": "paradec.caches.dkv_decode:DkvDecode",
        "dkv_greedy": "paradec.caches.dkv_greedy:DkvGreedy",
        "dkv_prefill": "paradec.caches.dkv_prefill:DkvPrefill",
        "dkv_pd": "paradec.caches.dkv_pd:DkvPD",
        "d2": "paradec.caches.d2:D2Cache",
        "block": "paradec.caches.block:BlockCache",
        "hierarchical": "paradec.caches.hierarchical:HierarchicalCache",
        "recap": "paradec.caches.recap:RecapCache",
    },
)

names = registry.names
get = registry.get
register = registry.register


def create(name: str, **settings: Any) -> Any:
    """Make a cache by name.

    Raises:
        ValueError: unknown name or setting, or a setting out of its range.
    """
    return registry.create(name, **settings)


def __getattr__(name: str) -> Any:
    """A class of the registry by its own name: `paradec.caches.DualCache()`."""
    return registry.named(name, __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *registry.classes()})

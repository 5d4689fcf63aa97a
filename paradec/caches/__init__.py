"""Caches: each is a plan of what is recomputed at a step. `create(name, **settings)` makes one."""

from __future__ import annotations

from typing import Any

from paradec.registry import Registry

registry = Registry(
    "cache",
    {
        "none": "paradec.caches.none:NoCache",
        "prefix": "paradec.caches.prefix:PrefixCache",
        "dual": "paradec.caches.dual:DualCache",
        "vicinity": "paradec.caches.vicinity:VicinityCache",
        "dkv_decode": "paradec.caches.dkv_decode:DkvDecode",
        "dkv_greedy": "paradec.caches.dkv_greedy:DkvGreedy",
        "dkv_prefill": "paradec.caches.dkv_prefill:DkvPrefill",
        "dkv_pd": "paradec.caches.dkv_pd:DkvPD",
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

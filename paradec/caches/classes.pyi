"""The registered caches, by the names of their files; read by type checkers and by `Registry.from_stub`."""

# ruff: noqa: I001 - in the order of listings

from paradec.caches.none import NoCache as NoCache
from paradec.caches.prefix import PrefixCache as PrefixCache
from paradec.caches.dual import DualCache as DualCache
from paradec.caches.vicinity import VicinityCache as VicinityCache
from paradec.caches.delayed import DelayedCache as DelayedCache
from paradec.caches.dkv_decode import DkvDecode as DkvDecode
from paradec.caches.dkv_greedy import DkvGreedy as DkvGreedy
from paradec.caches.dkv_prefill import DkvPrefill as DkvPrefill
from paradec.caches.dkv_pd import DkvPD as DkvPD
from paradec.caches.d2 import D2Cache as D2Cache
from paradec.caches.block import BlockCache as BlockCache
from paradec.caches.hierarchical import HierarchicalCache as HierarchicalCache
from paradec.caches.recap import RecapCache as RecapCache

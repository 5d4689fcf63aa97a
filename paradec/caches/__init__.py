"""Caches: plans of the positions that each step recomputes. `create(name, **settings)` makes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paradec.core.registry import Registry

if TYPE_CHECKING:
    from paradec.caches.classes import *  # noqa: F403

registry = Registry.from_stub("cache", __file__)
names = registry.names
get = registry.get
register = registry.register


def create(name: str, **settings: Any) -> Any:
    """Make a cache by name. Raises ValueError for an unknown name or setting, or one out of its range."""
    return registry.create(name, **settings)


def __getattr__(name: str) -> Any:
    return registry.attribute(name, __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *registry.classes()})

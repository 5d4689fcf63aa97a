"""Samplers: one file per method. `create(name, **settings)` makes one. Defaults are the paper's, where it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paradec.core.registry import Registry

if TYPE_CHECKING:
    from paradec.samplers.classes import *  # noqa: F403

registry = Registry.from_stub(
    "sampler",
    __file__,
    Jacobi="jacobi",
    LanternPlusPlus="lantern++",
    Union="union",
    Intersection="intersection",
    MAR="mar",
    VAR="var",
    CoDe="code",
    TaylorSeer="taylorseer",
)
names = registry.names
get = registry.get
register = registry.register
create = registry.create


def __getattr__(name: str) -> Any:
    """Return a class of the registry by its name: `paradec.samplers.Threshold(threshold=0.8)`."""
    return registry.attribute(name, __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *registry.classes()})

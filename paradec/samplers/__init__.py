"""Samplers: one file per method. `create(name, **settings)` makes one; every setting has the paper's default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paradec.core.checks import shown
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
)
names = registry.names
get = registry.get
register = registry.register
create = registry.create


def __getattr__(name: str) -> Any:
    """A class of the registry by its own name: `paradec.samplers.Threshold(threshold=0.8)`."""
    return registry.named(name, __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *registry.classes()})


def resolve(sampler: Any, family: str, user: str) -> Any:
    """A sampler of one family, from a name or a sampler.

    Args:
        user: what takes it, for the message: a model's name.

    Raises:
        TypeError: neither. ValueError: an unknown name, or another family; the message lists those of this one.
    """
    from paradec.core.protocol import Sampler

    method = create(sampler) if isinstance(sampler, str) else sampler
    if not isinstance(method, Sampler):
        raise TypeError(f"sampler={shown(sampler)} must be a name or made by paradec.samplers.create")
    if method.family != family:
        allowed = ", ".join(name for name in names() if get(name).family == family)
        raise ValueError(
            f"sampler {method.name!r} is of family {method.family!r}; {user} takes the {family!r} family: {allowed}"
        )
    return method

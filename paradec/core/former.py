"""Names that parts of one's own may have been written with."""

from __future__ import annotations

from collections.abc import Mapping


def check_former(kind: str, cls: type, former: Mapping[str, str]) -> None:
    """Raise TypeError for a class of a sampler or cache that defines a name of before; `former` says what is written
    now."""
    for name in sorted(former.keys() & vars(cls).keys()):
        raise TypeError(f"{kind} class {cls.__name__} defines {name}, which is now {former[name]}")

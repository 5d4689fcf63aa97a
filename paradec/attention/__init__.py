"""Sparse attention: `create(name, **settings)` makes a method for `generate(attention=...)`."""

from __future__ import annotations

from typing import Any

from paradec.core.registry import Registry

registry = Registry("attention", {"sparsed": "paradec.attention.sparsed:SparseD"})

names = registry.names
get = registry.get


def create(name: str, *, preset: str | None = None, **settings: Any) -> Any:
    """Make an attention method by name. Raises ValueError for an unknown name, preset or setting, or a setting out of
    its range."""
    return registry.create(name, preset=preset, **settings)

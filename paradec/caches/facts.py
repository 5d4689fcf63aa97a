"""What a cache says of itself, in one value: `facts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CacheFacts:
    """What a cache is for and what it asks; `paradec.caches.table` derives from it what it can be combined with."""

    uses_store: bool = True
    """Whether keys and values are kept."""
    topologies: tuple[str, ...] = ("bidirectional", "block_causal")
    predictions: tuple[str, ...] = ("same", "shifted")
    """The models that it is for (see `paradec.core.facts`)."""
    exact_on: tuple[str, ...] = ()
    """Topologies on which every step's logits equal those without a cache, whatever the settings."""
    evaluates: str = "block"
    """What a step inside a block always evaluates: "block" (all of it), "undecided" (what is undecided in it), "some"
    (a part of that, one position at least), "picks" (what the sampler previewed) or "targets" (the same, where that is
    a set chosen before)."""
    steady: bool = True
    """Whether a step depends on nothing but the canvas and the block: not on which steps led there."""
    final_alone: bool = False
    """Whether what a step reads of the store is of finished blocks alone."""
    suffixes: bool = False
    """Whether it works with `paradec.Suffix`: its parts come from `whole_rows`, `spans` and `subsets`, which leave out
    what does not exist for now, and it keeps nothing beyond a block about what is after it."""
    hears: bool = False
    """Whether commits tell it how confident the model was (`heard`)."""


def declare(cls: Any) -> None:
    """Check what a subclass of `Cache` says of itself.

    Raises:
        TypeError: `facts` that are no `CacheFacts`.
    """
    if not isinstance(cls.facts, CacheFacts):
        raise TypeError(f"facts={cls.facts!r} of cache class {cls.__name__} must be a paradec.caches.facts.CacheFacts")
    cls.device_step = vars(cls).get("device_step", False)

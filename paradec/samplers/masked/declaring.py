"""What a class of the masked family declares: what follows from what it overrides, and what is wrong with it."""

from __future__ import annotations

from typing import Any

from paradec.core.registry import unknown
from paradec.samplers.statistics import QUANTITIES

DERIVED = {
    "previews": "preview",
    "processes_logits": "process_logits",
    "has_extra_quantities": "extra_quantities",
    "revises": "revise",
    "draws_tokens": "draw_tokens",
}
"""Class attributes that say whether a class has a decision of its own, and the method that this is seen by."""

FORMER = {
    "announce": "preview",
    "assess": "extra_quantities",
    "drafts": "multi_step",
    "frontier": "sweep",
    "fuse": "process_logits",
    "rereads": "needs_decided_logits",
    "shadows": "mask_probes",
    "unserved": "unsupported",
}
"""What a subclass may have been written with, and its name now."""


def declare(cls: Any) -> None:
    """Set the class attributes that follow from others, and check what is said.

    Raises:
        TypeError: a name that the family had before. ValueError: quantities that nothing computes.
    """
    for name in FORMER.keys() & vars(cls).keys():
        raise TypeError(f"sampler class {cls.__name__} defines {name}, which is called {FORMER[name]} now")
    line = cls.__mro__
    for flag, method in DERIVED.items():
        said, made = (next(at for at, base in enumerate(line) if name in vars(base)) for name in (flag, method))
        if made < said:  # overridden nearer than anything is said
            setattr(cls, flag, True)
    cls.device_step = vars(cls).get("device_step", False)
    _check_declared(cls)


def _check_declared(cls: Any) -> None:
    """Raise ValueError for quantities that a class declares and nothing computes."""
    reads, score, source = cls.reads, cls.score, cls.score_from
    named = not isinstance(reads, property)  # of another sampler's
    if named and not isinstance(reads, (tuple, list)):
        raise ValueError(f"reads={reads!r} of class {cls.__name__} must be a tuple of {', '.join(QUANTITIES)}")
    if wrong := [value for value in reads if value not in QUANTITIES] if named else []:
        raise ValueError(f"reads={reads!r} of class {cls.__name__}: {unknown('quantity', wrong[0], QUANTITIES)}")
    if named and "confidence" not in reads:  # which every commit looks at
        cls.reads = ("confidence", *reads)
    if named and not isinstance(score, property) and score not in cls.reads:
        raise ValueError(f"score={score!r} of class {cls.__name__} must be one of its reads={cls.reads!r}")
    if not isinstance(source, property) and source not in ("raw", "sampled"):
        raise ValueError(f"score_from={source!r} of class {cls.__name__} must be 'raw' or 'sampled'")

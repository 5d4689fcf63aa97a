"""Samplers: one file per method. `create(name, **settings)` makes one; every setting has the paper's default."""

from __future__ import annotations

from typing import Any

from paradec.registry import Registry

registry = Registry(
    "sampler",
    {
        "low_confidence": "paradec.samplers.low_confidence:LowConfidence",
        "random": "paradec.samplers.random:Random",
        "origin": "paradec.samplers.origin:Origin",
        "maskgit_plus": "paradec.samplers.maskgit_plus:MaskGitPlus",
        "topk_margin": "paradec.samplers.topk_margin:TopKMargin",
        "entropy": "paradec.samplers.entropy:Entropy",
        "threshold": "paradec.samplers.threshold:Threshold",
        "factor": "paradec.samplers.factor:Factor",
        "sjd": "paradec.samplers.sjd:SJD",
        "taylorseer": "paradec.samplers.taylorseer:TaylorSeer",
    },
)

names = registry.names
get = registry.get
register = registry.register


def create(name: str, *, preset: str | None = None, **settings: Any) -> Any:
    """Make a sampler by name; a preset changes the defaults, explicit settings win.

    Raises:
        ValueError: unknown name, preset or setting, or a setting out of its range.
    """
    return registry.create(name, preset=preset, **settings)

"""Samplers: one file per method. `create(name, **settings)` makes one; every setting has the paper's default."""

from __future__ import annotations

from typing import Any

from paradec.checks import shown
from paradec.registry import Registry

JOINING = "+&>("
"""Signs of a combination written as text."""


class SamplerRegistry(Registry):
    """The registry of samplers, which also makes combinations."""

    def create(self, name: str, *, preset: str | None = None, **settings: Any) -> Any:
        """Make a sampler by name; a preset changes the defaults, explicit settings win.

        Several names make a combination, with settings in parentheses: "credit(threshold=0.95)+localleap" commits what
        one of them would, "threshold&klass" what both would, "credit>>factor" puts credit's logits stage before factor
        (`paradec.samplers.combination.parse`).

        Raises:
            ValueError: unknown name, preset or setting, a setting out of its range, or names that cannot be joined.
        """
        if isinstance(name, str) and name not in self and any(sign in name for sign in JOINING):
            from paradec.samplers.combination import parse

            if preset is not None or settings:
                first = "preset" if preset is not None else next(iter(settings))
                raise ValueError(
                    f"{first}=...: say whose, in parentheses: 'credit(threshold=0.95)+localleap', not {name!r}"
                )
            return parse(name)
        return super().create(name, preset=preset, **settings)


registry = SamplerRegistry(
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
        "margin": "paradec.samplers.margin:Margin",
        "hierarchy": "paradec.samplers.hierarchy:Hierarchy",
        "entropy_bound": "paradec.samplers.entropy_bound:EntropyBound",
        "entropy_threshold": "paradec.samplers.entropy_threshold:EntropyThreshold",
        "localleap": "paradec.samplers.localleap:LocalLeap",
        "adablock": "paradec.samplers.adablock:AdaBlock",
        "learn2pd": "paradec.samplers.learn2pd:Learn2PD",
        "wino": "paradec.samplers.wino:Wino",
        "editing": "paradec.samplers.editing:Editing",
        "saber": "paradec.samplers.saber:Saber",
        "freedave": "paradec.samplers.freedave:FreeDave",
        "credit": "paradec.samplers.credit:Credit",
        "ccd": "paradec.samplers.ccd:CCD",
        "ccd_agree": "paradec.samplers.ccd_agree:CCDAgree",
        "klass": "paradec.samplers.klass:KLASS",
        "persistence": "paradec.samplers.persistence:Persistence",
        "union": "paradec.samplers.combination:Union",
        "intersection": "paradec.samplers.combination:Intersection",
        "maskgit": "paradec.samplers.maskgit:MaskGIT",
        "halton": "paradec.samplers.halton:Halton",
        "recap": "paradec.samplers.recap:Recap",
        "sjd": "paradec.samplers.sjd:SJD",
        "scd": "paradec.samplers.scd:SCD",
        "gsd": "paradec.samplers.gsd:GSD",
        "lantern": "paradec.samplers.lantern:Lantern",
        "lantern++": "paradec.samplers.lantern:LanternPlusPlus",
        "jacobi": "paradec.samplers.jacobi:Jacobi",
        "speculative": "paradec.samplers.speculative:Speculative",
        "zipar": "paradec.samplers.zipar:ZipAR",
        "taylorseer": "paradec.samplers.taylorseer:TaylorSeer",
        "mar": "paradec.samplers.mar:MAR",
    },
)

names = registry.names
get = registry.get
register = registry.register
create = registry.create


def resolve(sampler: Any, family: str, user: str) -> Any:
    """A sampler of one family, from a name or a sampler.

    Args:
        user: what takes it, for the message: a model's name.

    Raises:
        TypeError: neither. ValueError: an unknown name, or another family; the message lists those of this one.
    """
    from paradec.protocol import Sampler

    method = create(sampler) if isinstance(sampler, str) else sampler
    if not isinstance(method, Sampler):
        raise TypeError(f"sampler={shown(sampler)} must be a name or made by paradec.samplers.create")
    if method.family != family:
        allowed = ", ".join(name for name in names() if get(name).family == family)
        raise ValueError(
            f"sampler {method.name!r} is of family {method.family!r}; {user} takes the {family!r} family: {allowed}"
        )
    return method

"""Samplers: one file per method. `create(name, **settings)` makes one; every setting has the paper's default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paradec.core.checks import shown
from paradec.core.registry import Registry

if TYPE_CHECKING:  # the classes of the registry, for editors and type checkers
    from paradec.samplers.causal.gsd import GSD as GSD
    from paradec.samplers.causal.lantern import Lantern as Lantern
    from paradec.samplers.causal.lantern import LanternPlusPlus as LanternPlusPlus
    from paradec.samplers.causal.scd import SCD as SCD
    from paradec.samplers.causal.self_speculative import SelfSpeculative as SelfSpeculative
    from paradec.samplers.causal.sjd import SJD as SJD
    from paradec.samplers.causal.sjd_pac import SJDPAC as SJDPAC
    from paradec.samplers.causal.speculative import Speculative as Speculative
    from paradec.samplers.causal.window import Jacobi as Jacobi
    from paradec.samplers.causal.zipar import ZipAR as ZipAR
    from paradec.samplers.continuous.cspd import CSpD as CSpD
    from paradec.samplers.continuous.mar import MAR as MAR
    from paradec.samplers.distilled.distilled import Distilled as Distilled
    from paradec.samplers.forecast.taylorseer import TaylorSeer as TaylorSeer
    from paradec.samplers.groups.groups import Groups as Groups
    from paradec.samplers.groups.nar import NAR as NAR
    from paradec.samplers.masked.ahead.freedave import FreeDave as FreeDave
    from paradec.samplers.masked.ahead.lopa import LoPA as LoPA
    from paradec.samplers.masked.rules.adablock import AdaBlock as AdaBlock
    from paradec.samplers.masked.rules.ccd import CCD as CCD
    from paradec.samplers.masked.rules.ccd_agree import CCDAgree as CCDAgree
    from paradec.samplers.masked.rules.combination import Intersection as Intersection
    from paradec.samplers.masked.rules.combination import Union as Union
    from paradec.samplers.masked.rules.credit import Credit as Credit
    from paradec.samplers.masked.rules.editing import Editing as Editing
    from paradec.samplers.masked.rules.entropy import Entropy as Entropy
    from paradec.samplers.masked.rules.entropy_bound import EntropyBound as EntropyBound
    from paradec.samplers.masked.rules.entropy_threshold import EntropyThreshold as EntropyThreshold
    from paradec.samplers.masked.rules.factor import Factor as Factor
    from paradec.samplers.masked.rules.halton import Halton as Halton
    from paradec.samplers.masked.rules.hierarchy import Hierarchy as Hierarchy
    from paradec.samplers.masked.rules.klass import KLASS as KLASS
    from paradec.samplers.masked.rules.learn2pd import Learn2PD as Learn2PD
    from paradec.samplers.masked.rules.levenshtein import Levenshtein as Levenshtein
    from paradec.samplers.masked.rules.localleap import LocalLeap as LocalLeap
    from paradec.samplers.masked.rules.low_confidence import LowConfidence as LowConfidence
    from paradec.samplers.masked.rules.lpd import LPD as LPD
    from paradec.samplers.masked.rules.margin import Margin as Margin
    from paradec.samplers.masked.rules.maskgit import MaskGIT as MaskGIT
    from paradec.samplers.masked.rules.maskgit_plus import MaskGitPlus as MaskGitPlus
    from paradec.samplers.masked.rules.origin import Origin as Origin
    from paradec.samplers.masked.rules.persistence import Persistence as Persistence
    from paradec.samplers.masked.rules.random import Random as Random
    from paradec.samplers.masked.rules.recap import Recap as Recap
    from paradec.samplers.masked.rules.s2d2 import S2D2 as S2D2
    from paradec.samplers.masked.rules.saber import Saber as Saber
    from paradec.samplers.masked.rules.threshold import Threshold as Threshold
    from paradec.samplers.masked.rules.topk_margin import TopKMargin as TopKMargin
    from paradec.samplers.masked.rules.wino import Wino as Wino
    from paradec.samplers.renoising.canvas import Canvas as Canvas
    from paradec.samplers.renoising.diffusion_gemma import DiffusionGemma as DiffusionGemma
    from paradec.samplers.scales.code import CoDe as CoDe
    from paradec.samplers.scales.var import VAR as VAR

registry = Registry(
    "sampler",
    {
        "low_confidence": "paradec.samplers.masked.rules.low_confidence:LowConfidence",
        "random": "paradec.samplers.masked.rules.random:Random",
        "origin": "paradec.samplers.masked.rules.origin:Origin",
        "maskgit_plus": "paradec.samplers.masked.rules.maskgit_plus:MaskGitPlus",
        "topk_margin": "paradec.samplers.masked.rules.topk_margin:TopKMargin",
        "entropy": "paradec.samplers.masked.rules.entropy:Entropy",
        "threshold": "paradec.samplers.masked.rules.threshold:Threshold",
        "factor": "paradec.samplers.masked.rules.factor:Factor",
        "margin": "paradec.samplers.masked.rules.margin:Margin",
        "hierarchy": "paradec.samplers.masked.rules.hierarchy:Hierarchy",
        "entropy_bound": "paradec.samplers.masked.rules.entropy_bound:EntropyBound",
        "entropy_threshold": "paradec.samplers.masked.rules.entropy_threshold:EntropyThreshold",
        "localleap": "paradec.samplers.masked.rules.localleap:LocalLeap",
        "adablock": "paradec.samplers.masked.rules.adablock:AdaBlock",
        "learn2pd": "paradec.samplers.masked.rules.learn2pd:Learn2PD",
        "wino": "paradec.samplers.masked.rules.wino:Wino",
        "editing": "paradec.samplers.masked.rules.editing:Editing",
        "levenshtein": "paradec.samplers.masked.rules.levenshtein:Levenshtein",
        "saber": "paradec.samplers.masked.rules.saber:Saber",
        "freedave": "paradec.samplers.masked.ahead.freedave:FreeDave",
        "lopa": "paradec.samplers.masked.ahead.lopa:LoPA",
        "credit": "paradec.samplers.masked.rules.credit:Credit",
        "ccd": "paradec.samplers.masked.rules.ccd:CCD",
        "ccd_agree": "paradec.samplers.masked.rules.ccd_agree:CCDAgree",
        "klass": "paradec.samplers.masked.rules.klass:KLASS",
        "persistence": "paradec.samplers.masked.rules.persistence:Persistence",
        "union": "paradec.samplers.masked.rules.combination:Union",
        "intersection": "paradec.samplers.masked.rules.combination:Intersection",
        "maskgit": "paradec.samplers.masked.rules.maskgit:MaskGIT",
        "halton": "paradec.samplers.masked.rules.halton:Halton",
        "recap": "paradec.samplers.masked.rules.recap:Recap",
        "lpd": "paradec.samplers.masked.rules.lpd:LPD",
        "s2d2": "paradec.samplers.masked.rules.s2d2:S2D2",
        "diffusion_gemma": "paradec.samplers.renoising.diffusion_gemma:DiffusionGemma",
        "canvas": "paradec.samplers.renoising.canvas:Canvas",
        "sjd": "paradec.samplers.causal.sjd:SJD",
        "scd": "paradec.samplers.causal.scd:SCD",
        "sjd_pac": "paradec.samplers.causal.sjd_pac:SJDPAC",
        "gsd": "paradec.samplers.causal.gsd:GSD",
        "lantern": "paradec.samplers.causal.lantern:Lantern",
        "lantern++": "paradec.samplers.causal.lantern:LanternPlusPlus",
        "jacobi": "paradec.samplers.causal.window:Jacobi",
        "speculative": "paradec.samplers.causal.speculative:Speculative",
        "self_speculative": "paradec.samplers.causal.self_speculative:SelfSpeculative",
        "zipar": "paradec.samplers.causal.zipar:ZipAR",
        "taylorseer": "paradec.samplers.forecast.taylorseer:TaylorSeer",
        "mar": "paradec.samplers.continuous.mar:MAR",
        "nar": "paradec.samplers.groups.nar:NAR",
        "distilled": "paradec.samplers.distilled.distilled:Distilled",
        "var": "paradec.samplers.scales.var:VAR",
        "code": "paradec.samplers.scales.code:CoDe",
        "groups": "paradec.samplers.groups.groups:Groups",
        "cspd": "paradec.samplers.continuous.cspd:CSpD",
    },
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

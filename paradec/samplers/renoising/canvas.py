"""Rules of masked samplers on canvases of noise: selected positions keep their tokens, all others become noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paradec.core.checks import short_repr
from paradec.core.registry import Registry
from paradec.samplers.masked.loop import MaskedSampler
from paradec.samplers.renoising import rules
from paradec.samplers.renoising.base import CanvasSampler


@dataclass(frozen=True)
class Canvas(CanvasSampler):
    """At every step, keep the positions that the rule selects among all positions.

    Args:
        rule: a masked sampler or its name. Scores are those of the best tokens under the tempered distribution, from
            which the tokens of selected positions are drawn. A rule with a schedule (`low_confidence`) keeps the
            ceil(C k / N) most confident of C positions at step k of N. Rules with memory, drafts, revisions or blocks
            are not supported. A masked sampler in a request becomes the rule on a model with canvases.
    """

    rule: Any = "threshold"

    name = "canvas"
    summary = "on canvases of noise: keep positions that the rule selects, renew others, close when nothing changes"

    def __post_init__(self) -> None:
        super().__post_init__()
        registry = Registry.by_kind["sampler"]
        rule = registry.from_dict(self.rule) if isinstance(self.rule, Mapping) else self.rule
        rule = registry.create(rule) if isinstance(rule, str) else rule
        if not isinstance(rule, MaskedSampler):
            raise ValueError(f"rule={short_repr(self.rule)} must be a sampler of the masked family, or the name of one")
        object.__setattr__(self, "rule", rules.check_rule(rule, self.name))

    def rule_for(self, defaults: Mapping[str, Any]) -> MaskedSampler:
        return self.rule

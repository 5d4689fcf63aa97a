"""Speculative coupled decoding (SCD, first called MC-SJD; arXiv 2510.24211). SJD redraws the slots after a rejected
draft even where their distribution has not moved; here old and new token are drawn jointly and stay equal more often.
"""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.causal.siblings import Siblings
from paradec.samplers.causal.sjd import SJD


@dataclass(frozen=True)
class SCD(SJD):
    """SJD with coupled drafts: "gumbel" keeps one noise vector per position, "maximal" keeps the draft of every slot
    with probability min(1, p / q) (`paradec.samplers.causal.sjd.coupled`).

    Lossless as SJD is: a coupling does not change a draft's own distribution. The q of a kept draft is this step's p;
    the public code of the maximal coupling keeps the old q and is therefore biased.

    Args:
        refresh: the coupling. See `SJD` for the rest.
        siblings, branching: drafts of each of the next window's first `branching` slots (SJD-PAC): see
            `paradec.samplers.causal.siblings.Siblings`.
    """

    refresh: str = "gumbel"
    siblings: int = 1
    branching: int = 1

    name = "scd"
    paper = "SCD / MC-SJD"
    arxiv = "2510.24211"
    summary = "SJD whose drafts after a rejected one are coupled with the old ones instead of drawn anew; lossless"

    def __post_init__(self) -> None:
        super().__post_init__()
        Siblings(self.siblings, self.branching, self.refresh)  # checks them

    @property
    def branches(self) -> Siblings | None:
        return Siblings(self.siblings, self.branching, self.refresh) if self.siblings > 1 else None

"""Speculative coupled decoding (SCD, first called MC-SJD): drafts that change as rarely as their distributions do.

arXiv 2510.24211. In SJD the slots after a rejected draft are drawn anew, which changes them even where their
distribution has not moved. Drawing old and new token jointly, each from its own distribution, keeps them equal more
often.
"""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.causal.siblings import Siblings
from paradec.samplers.causal.sjd import SJD


@dataclass(frozen=True)
class SCD(SJD):
    """SJD with coupled drafts: "gumbel" keeps one noise vector per position, "maximal" keeps the draft of every slot
    with probability min(1, p / q) (`paradec.samplers.causal.sjd.coupled`).

    Lossless under the conditions of SJD, since a coupling does not change each draft's own distribution. The q of a
    kept draft is this step's p; the public code of the maximal coupling keeps the old q and is therefore biased.

    With `siblings` each of the next window's first `branching` slots has several drafts (SJD-PAC,
    `paradec.samplers.causal.siblings`).

    Args:
        refresh: the coupling. See `SJD` for the rest.
        siblings, branching: see `paradec.samplers.causal.siblings.Siblings`.
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

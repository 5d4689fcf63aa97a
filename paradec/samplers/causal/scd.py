"""Speculative coupled decoding (SCD, first called MC-SJD; arXiv 2510.24211). SJD redraws the slots after a rejected
draft even if their distribution did not change. SCD draws old and new tokens jointly, so that they agree more often."""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.causal.siblings import Siblings
from paradec.samplers.causal.sjd import SJD


@dataclass(frozen=True)
class SCD(SJD):
    """SJD with coupled drafts. "gumbel" reuses one noise vector per position. "maximal" keeps the draft of every slot
    with probability min(1, p / q) (`paradec.samplers.causal.sjd.couple_maximally`).

    Lossless: a coupling does not change the distribution of a single draft. The q of every draft is this step's p. The
    public code of the maximal coupling keeps the old q of drafts that stay, and is therefore biased.

    Args:
        refresh: the coupling, "gumbel" or "maximal".
        siblings, branching: see `paradec.samplers.causal.siblings.Siblings` (SJD-PAC).
        window, init, guess_distribution: see `SJD`.
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
        Siblings(self.siblings, self.branching, self.refresh)  # checks the settings

    @property
    def branches(self) -> Siblings | None:
        return Siblings(self.siblings, self.branching, self.refresh) if self.siblings > 1 else None

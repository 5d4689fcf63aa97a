"""Speculative coupled decoding (SCD, first called MC-SJD): drafts that change as rarely as their laws do.

arXiv 2510.24211. In SJD the slots behind a fallen draft are drawn anew, which changes them even where their law
has not moved. Drawing old and new token jointly, each from its own law, keeps them equal more often.
"""

from __future__ import annotations

from dataclasses import dataclass

from paradec.checks import check_choice
from paradec.samplers.causal.base import JacobiSampler

COUPLINGS = ("gumbel", "maximal")


@dataclass(frozen=True)
class SCD(JacobiSampler):
    """SJD with coupled drafts: "gumbel" keeps one noise vector per position, "maximal" judges every slot by min(1, p /
    q).

    Lossless under the conditions of SJD: a coupling leaves each draft's own law alone. The q of a draft that was kept
    is this step's p; the public code of the maximal coupling leaves the old q there and is therefore biased.

    Args:
        refresh: the coupling. See `paradec.samplers.causal.base.JacobiSampler` for the rest.
    """

    refresh: str = "gumbel"

    name = "scd"
    paper = "SCD / MC-SJD"
    arxiv = "2510.24211"
    summary = "SJD whose drafts behind a fallen one are coupled with the old ones instead of drawn anew; lossless"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("refresh", self.refresh, COUPLINGS)

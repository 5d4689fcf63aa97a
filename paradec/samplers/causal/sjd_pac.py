"""SJD-PAC: SCD's maximal coupling, with siblings of the drafts that come next.

Kang et al., arXiv 2603.18599: "adaptive continuation" is SCD's maximal coupling (`paradec.samplers.causal.scd`), and
"proactive drafting" the siblings of `paradec.samplers.causal.siblings`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.causal.siblings import Siblings
from paradec.samplers.causal.sjd import SJD


@dataclass(frozen=True)
class SJDPAC(SJD):
    """SCD with siblings in the first slots of each window.

    Lossless. The public code is not: docs/fidelity.md says in which four ways. Not the paper's numbers but a wide,
    shallow tree is the default, which costs fewer evaluated positions for as many forwards (docs/samplers.md has the
    measurement). The paper's are siblings=4, branching=3, window=64.

    Args:
        refresh: the coupling, as in `paradec.samplers.causal.scd.SCD`.
        siblings, branching: see `paradec.samplers.causal.siblings.Siblings`.
        window, init, guess_distribution: see `SJD`.
    """

    refresh: str = "maximal"
    siblings: int = 8
    branching: int = 1

    name = "sjd_pac"
    paper = "SJD-PAC"
    arxiv = "2603.18599"
    summary = "SCD whose next drafts have siblings, all verified in one forward; lossless"

    def __post_init__(self) -> None:
        super().__post_init__()
        Siblings(self.siblings, self.branching, self.refresh)  # checks them

    @property
    def branches(self) -> Siblings | None:
        return Siblings(self.siblings, self.branching, self.refresh) if self.siblings > 1 else None

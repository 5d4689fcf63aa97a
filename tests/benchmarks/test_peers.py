"""What the benchmarks beside other libraries share: turns, differences, checkouts, other processes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # the module would put it there for good
    yield importlib.import_module("common")
    del sys.modules["common"]


def test_turns_begin_with_another_one_each_time(common: Any) -> None:
    order: list[str] = []
    racing = [common.Contestant(name, lambda name=name: order.append(name)) for name in "abc"]
    common.alternate(racing, turns=3, warm_up=1)
    assert "".join(order) == "abc" + "bca" + "cab" + "abc"
    assert all(len(one.times.cpu) == len(one.times.wall) == 3 for one in racing)
    assert all(value >= 0 for one in racing for value in one.times.wall)


def test_ratios_are_taken_within_a_turn(common: Any) -> None:
    assert common.ratios([2.0, 40.0, 3.0], [1.0, 10.0, 1.0]) == [2.5, 3.0, 3.5]
    assert common.quartiles([5.0]) == [5.0, 5.0, 5.0]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_turn_s_most_memory(common: Any) -> None:
    """What was freed before its end counts, what another one held does not."""
    large = common.Contestant("large", lambda: float(torch.ones(48 * 2**20 // 4).sum()))
    small = common.Contestant("small", lambda: 0.0)
    common.alternate([large, small], turns=3, warm_up=0)
    assert 40 < large.peak / 2**20 < 80 and small.peak / 2**20 < 8
    assert common.report([large], (), {})["large"]["peak_mib"] > 40


def test_differences(common: Any) -> None:
    mine = torch.tensor([1.0, 2.0])
    assert common.difference(mine, mine.clone()) == {"equal": True, "largest_difference": 0.0}
    assert common.difference(mine, torch.tensor([1.0, 2.5])) == {"equal": False, "largest_difference": 0.5}
    assert not common.difference(mine, torch.tensor([1.0]))["equal"]
    tokens = common.difference([[1, 2, 3], [4]], [[1, 2, 5], [4, 6]])
    assert tokens == {"equal": False, "agreeing": 3 / 5, "agreeing_from_the_left": [2, 1]}
    assert common.difference(torch.tensor([[1, 2]]).tolist(), [[1, 2]])["equal"]


def test_two_checkouts_of_one_name(common: Any, tmp_path: Path) -> None:
    """Each has its own modules, what it imports late too, and what was there before comes back."""
    found = []
    for name in ("old", "new"):
        package = tmp_path / name / "model"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"NAME = {name!r}\n")
        (package / "late.py").write_text("from model import NAME as LATE\n")
        found.append(common.Checkout(tmp_path / name, "model"))
    for checkout, name in zip(found, ("old", "new"), strict=True):
        with checkout:
            assert checkout.load("model").NAME == name
    for checkout, name in zip(found, ("old", "new"), strict=True):
        with checkout:
            assert importlib.import_module("model.late").LATE == name
            with pytest.raises(ImportError, match="json"):
                checkout.load("json")
    assert "model" not in sys.modules and not any(str(tmp_path) in entry for entry in sys.path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        common.Checkout(tmp_path / "nowhere", "model")


def test_another_process(common: Any, tmp_path: Path) -> None:
    script = tmp_path / "theirs.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT / 'benchmarks' / 'peers')!r})\n"
        "import common\n"
        "turns = []\n"
        "def run():\n"
        "    print('noise')\n"
        "    turns.append(1)\n"
        "    if len(turns) == 3:\n"
        "        raise SystemExit(3)\n"
        "    return [[len(turns), int(sys.argv[1])]]\n"
        "common.serve(run, version='7')\n"
    )
    with common.Elsewhere("theirs", sys.executable, script, "5") as theirs:
        common.alternate([theirs], turns=1, warm_up=1)
        assert theirs.version == "7" and theirs.result == [[2, 5]] and len(theirs.times.cpu) == 1
        with pytest.raises(RuntimeError, match=r"theirs: its process ended \(exit code 3\)"):
            theirs.turn()

"""`python tests/replays.py` over small sets of recorded cases, copied from the packaged ones and changed."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import recorded
from places import GOLDEN, ROOT
from recorded import NearTie, replay
from replay import decision_gap
from replays import FAMILIES, main


def run(family: str, folder: Path) -> tuple[int, list[str]]:
    """The exit status, and the lines of the report."""
    command = [sys.executable, "tests/replays.py", family, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def change(path: Path, edit: Any) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def test_an_empty_folder_fails(tmp_path: Path) -> None:
    status, lines = run("sjd", tmp_path)
    assert status == 1 and lines[-1] == "0 replayed, 0 near ties, 0 refused, 0 wrong"


def test_right_wrong_tied_and_unknown_cases_are_told_apart(tmp_path: Path) -> None:
    """Of the folder alone; a token that the case does not have, one whose uniform lies on the bound, a new field."""
    names = ["sjd-00", "sjd-02", "sjd-04", "sjd-06"]
    for name in names:
        shutil.copy(GOLDEN / "sjd" / f"{name}.json", tmp_path)
    change(tmp_path / "sjd-02.json", lambda case: case["expected"]["tokens"][0].reverse())

    def tie(case: dict[str, Any]) -> None:
        """The first fresh token drawn on the bound between two, and recorded as the other one."""
        place = next(
            (row, slot)
            for row, slots in enumerate(case["u_fresh"])
            for slot in range(len(slots))
            if slot + 1 == case["expected"]["first_reject_slot"][row] == case["settings"]["window"]
        )
        row, slot = place
        token = case["expected"]["tokens"][row][slot]
        total = math.fsum(case["p"][row][slot])
        case["u_fresh"][row][slot] = math.fsum(case["p"][row][slot][: token + 1]) / total + 1e-12

    tied = next(path for path in sorted((GOLDEN / "sjd").glob("*.json")) if _accepts_all(path))
    shutil.copy(tied, tmp_path / "tied.json")
    change(tmp_path / "tied.json", tie)
    change(tmp_path / "sjd-04.json", lambda case: case.update(method="other"))
    change(tmp_path / "sjd-06.json", lambda case: case.update(surprise=1))
    status, lines = run("sjd", tmp_path)
    assert status == 1 and lines[-1] == "2 replayed, 1 near ties, 1 refused, 1 wrong"
    assert [line.split(":")[1].strip().split("/")[-1] for line in lines if line.startswith("wrong")] == ["sjd-02"]
    assert any(line.startswith("near tie") and "/tied: scores" in line for line in lines)
    assert any(line.startswith("refused: sjd-04.json") for line in lines)
    assert any("not compared: surprise (1 in .): unknown to this reader" in line for line in lines)


def _accepts_all(path: Path) -> bool:
    """Whether a row accepts its whole window, so that its last token is a fresh draw."""
    case = json.loads(path.read_text())
    return case["settings"]["window"] in case["expected"]["first_reject_slot"]


@pytest.mark.full
def test_checkpoints_of_other_names(tmp_path: Path) -> None:
    """The folder's are taken, whatever they are called, before packaged ones of the same name."""
    source = GOLDEN / "autumn"
    shutil.copytree(source / "llada22" / "llada22-tiny", tmp_path / "llada22" / "one")
    shutil.copytree(source / "nld" / "nld-tiny", tmp_path / "nld" / "two")
    shutil.copytree(source / "s2d2" / "sdar-tiny", tmp_path / "s2d2" / "sdar-moe-tiny")
    name = "sdar-tiny__b4__greedy_exact.json"
    shutil.copy(source / "s2d2" / name, tmp_path / "s2d2" / "some.json")
    change(tmp_path / "s2d2" / "some.json", lambda trace: trace.update(model="sdar-moe-tiny"))
    status, lines = run("autumn", tmp_path)
    assert status == 0, lines[-5:]
    assert lines[-1].endswith(", 0 near ties, 0 refused, 0 wrong") and int(lines[-1].split()[0]) > 30


def test_folders_of_tests_golden_have_families() -> None:
    folders = {path.name for path in GOLDEN.iterdir() if not (path / "config.json").exists()}
    assert {folder for selected, _ in FAMILIES.values() for folder in selected} == folders
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    assert all(f"`{family}`" in page for family in FAMILIES)


def test_a_wrong_call_shows_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["trace", "."], ["traces", "nowhere"]):
        assert main(arguments) == 2
        assert "FAMILY FOLDER" in capsys.readouterr().out


def test_the_worst_outcome_of_a_case_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "OUTCOMES", found := {})
    with pytest.raises(AssertionError), replay("x"):
        raise AssertionError("other tokens")
    with replay("x"):
        pass
    with replay("y"):
        raise NearTie("scores 1e-9 apart")
    assert {name: outcome.rank for name, outcome in found.items()} == {"x": "wrong", "y": "near tie"}
    assert "other tokens" in found["x"].reason


def test_the_gap_of_a_decision() -> None:
    scores = {4: 0.5, 5: 0.5 + 2e-8, 6: 0.9}
    assert decision_gap([(5, 1), (6, 1)], [(4, 1), (6, 1)], scores, None) == pytest.approx(2e-8)
    assert decision_gap([(6, 1)], [(4, 1), (6, 1)], scores, 0.5 + 1e-9) == pytest.approx(1e-9)
    assert decision_gap([(6, 1)], [(4, 1)], scores, None) == pytest.approx(0.4)
    assert decision_gap([(6, 1)], [(6, 2)], scores, None) == math.inf

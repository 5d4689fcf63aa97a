"""The command `python tests/replays.py` on changed copies of packaged recordings."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import GOLDEN, ROOT, TESTS, load_script


def run_replays(family: str, folder: Path) -> tuple[int, list[str]]:
    """Return the exit status and the lines of the report."""
    command = [sys.executable, "tests/replays.py", family, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines()


def edit_json(path: Path, edit: Any) -> None:
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def test_the_named_tests_exist() -> None:
    for _, tests in load_script("tests/replays.py").FAMILIES.values():
        for file, names in tests.items():
            source = (TESTS / file).read_text(encoding="utf-8")
            assert all(f"def test_{name}(" in source for name in names.split()), file


@pytest.mark.full
def test_an_empty_folder_fails(tmp_path: Path) -> None:
    status, lines = run_replays("sjd", tmp_path)
    assert status == 1 and lines[-1] == "0 replayed, 0 near ties, 0 refused, 0 wrong"


def test_right_wrong_tied_and_unknown_cases_are_distinguished(tmp_path: Path) -> None:
    """sjd-00 is unchanged. The other cases get reversed tokens, a tie, an unknown method and an unknown field."""
    names = ["sjd-00", "sjd-02", "sjd-04", "sjd-06"]
    for name in names:
        shutil.copy(GOLDEN / "sjd" / f"{name}.json", tmp_path)
    edit_json(tmp_path / "sjd-02.json", lambda case: case["expected"]["tokens"][0].reverse())

    def make_tie(case: dict[str, Any]) -> None:
        """Move the uniform number of a draw after a full window just past the recorded token's interval."""
        row, slot = next(
            (row, slot)
            for row, slots in enumerate(case["u_fresh"])
            for slot in range(len(slots))
            if slot + 1 == case["expected"]["first_reject_slot"][row] == case["settings"]["window"]
        )
        token = case["expected"]["tokens"][row][slot]
        total = math.fsum(case["p"][row][slot])
        case["u_fresh"][row][slot] = math.fsum(case["p"][row][slot][: token + 1]) / total + 1e-12

    path = next(path for path in sorted((GOLDEN / "sjd").glob("*.json")) if has_accepted_window(path))
    shutil.copy(path, tmp_path / "tied.json")
    edit_json(tmp_path / "tied.json", make_tie)
    edit_json(tmp_path / "sjd-04.json", lambda case: case.update(method="other"))
    edit_json(tmp_path / "sjd-06.json", lambda case: case.update(surprise=1))
    status, lines = run_replays("sjd", tmp_path)
    assert status == 1 and lines[-1] == "2 replayed, 1 near ties, 1 refused, 1 wrong"
    assert [line.split(":")[1].strip().split("/")[-1] for line in lines if line.startswith("wrong")] == ["sjd-02"]
    assert any(line.startswith("near tie") and "/tied: scores" in line for line in lines)
    assert any(line.startswith("refused: sjd-04.json") for line in lines)
    assert any("not compared: surprise (1 in .): not known to tests/replays.py" in line for line in lines)


def has_accepted_window(path: Path) -> bool:
    """Return whether some row of the case accepts its whole window, so that its last token is a fresh draw."""
    case = json.loads(path.read_text())
    return case["settings"]["window"] in case["expected"]["first_reject_slot"]

"""Recorded cases of other checkpoints, ids, numbers and names are replayed by the same tests: their folder is all that
these are told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from another_set import SETS, text
from places import GOLDEN, ROOT, variable
from replays import REPLAYS, main, replay
from scripts import load_script


def test_one_file_of_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, one file and one case, by the tests, imported anew."""
    text(tmp_path / "traces", methods=("llada",), files=1, count=1)
    monkeypatch.setenv(variable("traces"), str(tmp_path / "traces"))
    monkeypatch.delitem(sys.modules, "replay", raising=False)
    tests = load_script("tests/samplers/masked/test_traces.py")
    assert tests.NAMES == ["llada/of first 0"]
    tests.test_every_folder_is_replayed_by_some_file()
    tests.test_trace(*tests.NAMES, "float64")
    tests.test_logits("first", "half")


@pytest.mark.full
@pytest.mark.parametrize("family", SETS)
def test_every_family(family: str, tmp_path: Path) -> None:
    make, shown = SETS[family]
    make(tmp_path / "set")
    done = replay(family, tmp_path / "set", "-v", "-k", "not float32", capture_output=True)
    assert done.returncode == 0, done.stdout[-3000:]
    for part in shown:
        assert any(part in line and " PASSED" in line for line in done.stdout.splitlines()), part


def test_every_family_has_tests_and_is_documented() -> None:
    """Of all folders of tests/golden but the checkpoints."""
    page = (ROOT / "docs" / "fidelity.md").read_text(encoding="utf-8")
    assert all(f"`{family}`" in page and f"`{variable(family)}`" in page for family in SETS)
    folders = {path.name for path in GOLDEN.iterdir() if not (path / "config.json").exists()}
    assert SETS.keys() == REPLAYS.keys() == folders


def test_a_wrong_call_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["trace", "."], ["traces", "nowhere"]):
        assert main(arguments) == 2
        assert "FAMILY FOLDER" in capsys.readouterr().out

"""How the suite is shared out among processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from places import ROOT, SUPPORT
from shares import LONG, missing

LAST = max(LONG)
"""Of the files that are to come first, the one that is collected last."""


def test_a_file_runs_in_one_process_and_long_ones_come_first(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from shares import *\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for name in ("tests/test_a.py", "tests/test_b.py", "tests/test_c.py", LAST):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(
            "import pytest, time\n@pytest.mark.parametrize('i', range(4))\ndef test(i): time.sleep(0.05)\n"
        )
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadgroup", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(SUPPORT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"\[gw(\d)\] .* PASSED (\S+)::", done.stdout)
    assert len(found) == 16
    for file in {file for _, file in found}:
        assert len({worker for worker, other in found if other == file}) == 1, found
    assert LAST in {file for _, file in found[:2]}, found


def test_files_that_are_said_to_take_long_are_there() -> None:
    assert missing(ROOT) == [] and len(set(LONG)) == len(LONG)

"""The examples run offline with `--tiny`, in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = ["llada_generate", "dream_generate", "infill"]
# one process for all of them: most of their time is the import of transformers
RUN_EACH = """
import runpy, sys
for path in sys.argv[1:]:
    print("=" * 9)
    sys.argv = [path, "--tiny"]
    runpy.run_path(path, run_name="__main__")
"""


def test_examples_run_offline() -> None:
    files = [str(EXAMPLES / f"{name}.py") for name in NAMES]
    done = subprocess.run([sys.executable, "-c", RUN_EACH, *files], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    _, llada, dream, infill = done.stdout.split("=" * 9)
    # the packaged model solves these: both runs of the first example, and the hole of the last
    assert llada.count("kiwi apple fig pear") == 2
    assert "low_confidence" in llada and "threshold" in llada
    assert "noise" in dream and "16 forwards" in dream
    assert "kiwi apple fig pear" in infill and "hole 1: 'apple fig'" in infill

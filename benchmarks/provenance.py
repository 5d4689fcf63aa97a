"""Results are written with the commit of the code that they were measured on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any


def commit() -> str:
    """The checkout's commit, with "-dirty" where files of the package or of the benchmarks differ from it; "unknown"
    outside a checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "paradec", "benchmarks/*.py")
    except OSError:  # no git
        return "unknown"
    return f"{found}{'-dirty' if changed else ''}" if found else "unknown"


COMMIT = commit()
"""When the script began: files may change while it runs."""


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, the commit first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"commit": COMMIT} | result, indent=1) + "\n", encoding="utf-8")

"""Result files of benchmarks: JSON with the commit of the measured code, and a line per table row."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def commit() -> str:
    """Read the checkout's commit, with "-dirty" if the package or the benchmarks have uncommitted changes; "unknown"
    outside of a checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        process = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
        return process.stdout.strip() if process.returncode == 0 else ""

    try:
        revision = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "paradec", "benchmarks/*.py")
    except OSError:  # no git
        return "unknown"
    return f"{revision}{'-dirty' if changed else ''}" if revision else "unknown"


COMMIT = commit()
"""The commit when this module was imported, since files may change during a run."""


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as JSON, with the commit as its first field; `read_result` reads it.

    A list of dicts becomes {"columns": names, "rows": lists}, with a row per line, and null for missing fields. Other
    lists are on one line.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_to_text({"commit": COMMIT} | result, "") + "\n", encoding="utf-8")


def read_result(path: Path) -> Any:
    """Read a file of `write_result`; tables become lists of dicts again."""

    def to_rows(value: dict[str, Any]) -> Any:
        if value.keys() != {"columns", "rows"}:
            return value
        return [dict(zip(value["columns"], row, strict=True)) for row in value["rows"]]

    return json.loads(path.read_text(encoding="utf-8"), object_hook=to_rows)


def _to_text(value: Any, indent: str) -> str:
    inner = indent + " "
    if isinstance(value, dict) and value:
        lines = [f"{json.dumps(name)}: {_to_text(entry, inner)}" for name, entry in value.items()]
        return "{\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and value and all(isinstance(row, dict) for row in value):
        names = list(dict.fromkeys(name for row in value for name in row))
        rows = ",\n".join(f"{inner} {json.dumps([row.get(name) for name in names])}" for row in value)
        return f'{{\n{inner}"columns": {json.dumps(names)},\n{inner}"rows": [\n{rows}\n{inner}]\n{indent}}}'
    return json.dumps(value)

"""How much of the package a plain decode runs through, and how large the package is.

    python benchmarks/core_size.py [--tree FOLDER] [--missed FILE] [--long]

Two requests are traced, each in its second, warm run: `generate` of one prompt with `credit`, and `generate_many` of
three. Of every file of the package in which a line runs: its lines, and how many of the statements inside its functions
run (docstrings and imports are no statements here). Lines of code are without blanks, comments and docstrings.

With --tree another checkout is measured as well, in a process of its own, and the table says before -> now. --missed
prints the statements of a file that the first request does not run; --long the longest functions and files.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ["Sort: pear fig apple", "Reverse: pear fig apple kiwi", "Sort: plum fig"]
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> set[int]:
    """The lines of a file that hold code: no blanks, no comments, no docstrings."""
    tree = ast.parse(text)
    prose: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, node.end_lineno + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            found.update(range(token.start[0], token.end[0] + 1))
    return found - prose


def functions(text: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def statements(text: str) -> set[int]:
    """The first lines of the statements inside functions."""
    found: set[int] = set()
    for function in functions(text):
        for node in ast.walk(function):
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.stmt) and node is not function and not docstring:
                if not isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.add(node.lineno)
    return found


def traced(package: Path, run: Callable[[], Any]) -> dict[str, set[int]]:
    """The lines of each file of a package that run inside of functions."""
    prefix, found = f"{package}{os.sep}", dict[str, set[int]]()

    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found[frame.f_code.co_filename].add(frame.f_lineno)
        return local

    def entered(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(prefix) or frame.f_code.co_name == "<module>":
            return None
        found.setdefault(file, set())
        return local

    sys.settrace(entered)
    try:
        run()
    finally:
        sys.settrace(None)
    return {file: lines for file, lines in found.items() if lines}


def measured(tree: Path) -> dict[str, Any]:
    """All figures of the package of this process."""
    import torch

    import paradec

    package = Path(paradec.__file__).resolve().parent
    assert package.parent == tree, package
    torch.set_num_threads(1)
    model = paradec.load()
    requests = {
        "generate": lambda: paradec.generate(model, PROMPTS[0], max_new_tokens=8, sampler="credit"),
        "generate_many": lambda: list(paradec.generate_many(model, PROMPTS, max_new_tokens=8, sampler="credit")),
    }
    texts = {str(path): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    found: dict[str, Any] = {"missed": {}}
    for name, run in requests.items():
        run()
        lines = traced(package, run)
        inside = {file: statements(texts[file]) for file in lines}
        ran = sum(len(inside[file] & lines[file]) for file in lines)
        total = sum(map(len, inside.values()))
        found[name] = {
            "files": len(lines),
            "lines": sum(texts[file].count("\n") for file in lines),
            "statements": total,
            "run": ran,
            "not run": total - ran,
            "share run, %": round(100 * ran / total, 1),
        }
        if name == "generate":
            for file in sorted(lines):
                found["missed"][str(Path(file).relative_to(tree))] = sorted(inside[file] - lines[file])
    code = {file: code_lines(text) for file, text in texts.items()}
    names = {file: str(Path(file).relative_to(tree)) for file in texts}
    longest = []
    for file, text in texts.items():
        for node in functions(text):
            own = code[file].intersection(range(node.lineno, node.end_lineno + 1))
            longest.append((len(own), f"{names[file]}:{node.name}"))
    longest.sort(reverse=True)
    files = sorted(((text.count("\n"), names[file]) for file, text in texts.items()), reverse=True)
    found["package"] = {
        "files": len(texts),
        "lines": sum(lines for lines, _ in files),
        "lines of code": sum(map(len, code.values())),
        "files over 550 lines": sum(lines > 550 for lines, _ in files),
        "functions over 70 lines of code": sum(lines > 70 for lines, _ in longest),
        "state: Any": sum(text.count("state: Any") for text in texts.values()),
    }
    found["long"] = [entry for entry in longest if entry[0] > 70] + [entry for entry in files if entry[0] > 550]
    return found


def in_a_process(tree: Path) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, str(Path(__file__).resolve()), "--json", str(tree)]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, help="another checkout, measured before this one")
    parser.add_argument("--missed", help="print what the first request does not run, of files with this in their path")
    parser.add_argument("--long", action="store_true", help="print long functions and files")
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps(measured(arguments.json)))
        return
    now = in_a_process(ROOT)
    before = in_a_process(arguments.tree.resolve()) if arguments.tree else None
    for part in ("generate", "generate_many", "package"):
        print(part)
        for name, value in now[part].items():
            print(f"  {name:32} {value if before is None else f'{before[part][name]} -> {value}'}")
    if arguments.missed:
        for file, lines in now["missed"].items():
            text = (ROOT / file).read_text(encoding="utf-8").splitlines()
            if arguments.missed in file:
                print(f"\n{file}: {len(lines)}", *(f"{line:5} {text[line - 1]}" for line in lines), sep="\n")
    if arguments.long:
        print(*(f"{lines:5} {name}" for lines, name in now["long"]), sep="\n")


if __name__ == "__main__":
    main()

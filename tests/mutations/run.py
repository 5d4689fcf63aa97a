"""Plants bugs one at a time and says which the tests notice.

    python tests/mutations/run.py [--jobs 2] [--only TEXT] [--floor 0.9] [--out FILE]

The bugs are data: every `*.toml` beside this file holds `[[mutation]]` tables with `name`, `at` (the qualified name of
a definition, in whatever file it is), `before` (code that is in it exactly once, however it is written), `after`,
`tests` (arguments of pytest), `why` (what a user would see), and, where no test can tell the difference, `equivalent`
with the reason. A mutation is killed when its tests fail with it; they must pass without. Each runs in a process of its
own, forked after the heavy imports, over a copy of the package.

Exit status: 0, or 1 if fewer than the floor are killed, or tests fail without any mutation.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 600
"""Seconds; a mutant that hangs is noticed, too."""


@dataclass(frozen=True)
class Mutation:
    """One planted bug."""

    name: str
    at: str
    """The definition that it is planted in: a qualified name ("Batch.step"), after the end of a module's name where
    several modules have such a definition ("credit:Credit.select"), or the path of a file that is not Python."""
    before: str
    after: str
    tests: list[str]
    why: str
    equivalent: str = ""
    package: str = field(default="", compare=False)
    """The data file that has it."""


@dataclass(frozen=True)
class Result:
    """What became of a mutation."""

    mutation: Mutation
    outcome: str
    """"killed", "survived", "timeout" (counts as killed) or "broken" (its tests could not be run)."""
    seconds: float
    killed_by: str = ""
    """The first test that failed."""
    output: str = ""


def load(folder: Path = Path(__file__).parent) -> list[Mutation]:
    """All mutations, in the order of their files.

    Raises:
        ValueError: a table with a missing or an unknown key, a name that stands twice, or `before` == `after`.
    """
    found: list[Mutation] = []
    for path in sorted(folder.glob("*.toml")):
        for table in tomllib.loads(path.read_text(encoding="utf-8")).get("mutation", []):
            try:
                found.append(Mutation(**table, package=path.stem))
            except TypeError as error:
                raise ValueError(f"{path.name}, {table.get('name')!r}: {error}") from None
    names = [mutation.name for mutation in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"mutations that stand twice: {twice}")
    idle = [mutation.name for mutation in found if mutation.before == mutation.after]
    if idle:
        raise ValueError(f"mutations that change nothing: {idle}")
    return found


def find(at: str, root: Path = ROOT) -> tuple[Path, ast.AST]:
    """The file of the definition `at`, and its node.

    Raises:
        ValueError: no such definition, or several.
    """
    module, _, name = at.rpartition(":")
    end = tuple(module.split(".")) if module else ()
    found = [
        (path, node)
        for path, node in definitions(root).get(name, [])
        if not end or path.with_suffix("").parts[-len(end) :] == end
    ]
    if len(found) != 1:
        raise ValueError(f"{at}: {len(found)} definitions are called so: {[str(path) for path, _ in found]}")
    return found[0]


@lru_cache
def definitions(root: Path) -> dict[str, list[tuple[Path, ast.AST]]]:
    """Functions, classes and constants of the package and of the scripts beside it, by their qualified names."""
    found: dict[str, list[tuple[Path, ast.AST]]] = {}

    def enter(owner: Any, path: Path, prefix: str) -> None:
        for node in owner.body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.setdefault(prefix + node.name, []).append((path, node))
                enter(node, path, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(owner, (ast.Module, ast.ClassDef)):
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(prefix + target.id, []).append((path, node))
            elif isinstance(node, (ast.If, ast.Try, ast.With)):  # definitions under a condition
                enter(node, path, prefix)

    for folder in ("paradec", "benchmarks", "examples"):
        for path in sorted((root / folder).rglob("*.py")):
            enter(ast.parse(path.read_text(encoding="utf-8")), path, "")
    return found


def is_expression(code: str) -> bool:
    """Whether code has a value, and can so be anywhere in a statement."""
    statements = ast.parse(textwrap.dedent(code)).body
    return len(statements) == 1 and isinstance(statements[0], ast.Expr)


def places(within: ast.AST, wanted: str, expression: bool) -> list[list[ast.AST]]:
    """Where the code `wanted` is in a definition, however it is written: an expression, or a run of statements."""
    code = ast.parse(textwrap.dedent(wanted)).body
    if expression:
        text = ast.dump(code[0].value)  # type: ignore[attr-defined]
        return [[node] for node in ast.walk(within) if isinstance(node, ast.expr) and ast.dump(node) == text]
    texts = [ast.dump(statement) for statement in code]
    found: list[list[ast.AST]] = []
    for node in [ast.Module([within], []), *ast.walk(within)]:
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and all(isinstance(statement, ast.stmt) for statement in body):
                dumps = [ast.dump(statement) for statement in body]
                found += [body[i : i + len(code)] for i in range(len(body)) if dumps[i : i + len(code)] == texts]
    return found


def mutated(mutation: Mutation, root: Path = ROOT) -> tuple[Path, str]:
    """A file of the package, and its text with the bug in it.

    Raises:
        ValueError: no such definition, or `before` is not in it exactly once.
    """
    if "/" in mutation.at:  # a page's script
        path = root / mutation.at
        text = path.read_text(encoding="utf-8")
        if text.count(mutation.before) != 1:
            raise ValueError(f"{mutation.name}: its text is {text.count(mutation.before)} times in {path}, not once")
        return path, text.replace(mutation.before, mutation.after)
    path, within = find(mutation.at, root)
    expression = is_expression(mutation.before) and is_expression(mutation.after)
    found = places(within, mutation.before, expression)
    if len(found) != 1:
        raise ValueError(f"{mutation.name}: its code is {len(found)} times in {mutation.at} ({path}), not once")
    first, last = found[0][0], found[0][-1]
    lines = path.read_text(encoding="utf-8").encode().splitlines(keepends=True)  # offsets are bytes
    head = b"".join(lines[: first.lineno - 1]) + lines[first.lineno - 1][: first.col_offset]
    tail = lines[last.end_lineno - 1][last.end_col_offset :] + b"".join(lines[last.end_lineno :])
    after = textwrap.dedent(mutation.after).strip() or "pass"
    if not expression:
        alone = not lines[first.lineno - 1][: first.col_offset].strip()  # else after "if ...:"
        lead = " " * first.col_offset
        after = textwrap.indent(after, lead).lstrip() if alone else "; ".join(after.splitlines())
    else:
        after = f"({after})"
    return path, (head + after.encode() + tail).decode()


def run_tests(folder: Path, tests: list[str]) -> tuple[int | None, str]:
    """pytest's exit status (None: it took too long) and output, with the package of `folder`; in a forked process."""
    log = folder / "log"
    child = os.fork()
    if child == 0:
        status = 3
        try:
            os.setsid()
            with open(log, "w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            os.chdir(folder)
            os.environ["PYTHONPATH"] = str(folder)
            sys.path.insert(0, str(folder))
            import pytest

            places = [str(ROOT / test) if test.startswith("tests/") else test for test in tests]
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not full", "--rootdir", str(ROOT)]
            status = int(pytest.main([*options, "-c", str(ROOT / "pyproject.toml"), *places]))
            sys.stdout.flush()
        finally:
            os._exit(status)
    deadline = time.monotonic() + TIMEOUT
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None, log.read_text(errors="replace")
        time.sleep(0.05)


def copy_code(folder: Path) -> None:
    """The package and the scripts beside it, which `tests/support/scripts.py` looks for there."""
    for name in ("paradec", "benchmarks", "examples", "docs/notebooks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))


def run(mutation: Mutation) -> Result:
    """Plant one bug in a copy of the package and run its tests."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_code(folder)
        path, text = mutated(mutation)
        (folder / path.relative_to(ROOT)).write_text(text, encoding="utf-8")
        status, output = run_tests(folder, mutation.tests)
    seconds = time.monotonic() - begin
    if status is None:
        return Result(mutation, "timeout", seconds)
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    killed_by = "tests/" + first[1].rpartition("tests/")[2] if first else "(the process ended)"
    # 1: tests failed; negative: the process died of a signal; 2 with ERROR: the mutant cannot even be imported
    if status == 1 or status < 0 or (status == 2 and first):
        return Result(mutation, "killed", seconds, killed_by)
    return Result(mutation, "survived" if status == 0 else "broken", seconds, output=output[-2000:])


def passes_unchanged(mutations: list[Mutation]) -> tuple[bool, str]:
    """Whether all tests named by the mutations pass without any."""
    tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests if test.startswith("tests/")))
    with tempfile.TemporaryDirectory() as name:
        copy_code(Path(name))
        status, output = run_tests(Path(name), tests)
    return status == 0, output


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant bugs one at a time and say which the tests notice.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="mutations whose name, file or data file has this text")
    parser.add_argument("--floor", type=float, default=0.95, help="least share of kills")
    parser.add_argument("--out", type=Path, help="write the results here, as JSON")
    parser.add_argument("--skip-unchanged", action="store_true", help="do not run the tests without mutation first")
    options = parser.parse_args()
    mutations = [m for m in load() if options.only in f"{m.package} {m.name} {m.at}"]
    for mutation in mutations:
        mutated(mutation)  # raises before any work is done

    os.environ.setdefault("TRITON_INTERPRET", "1")
    import diffusers  # noqa: F401  (imported once, inherited by every process)
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    torch.set_num_threads(1)
    if not options.skip_unchanged:
        good, output = passes_unchanged(mutations)
        if not good:
            print(output[-4000:])
            print("tests fail without any mutation")
            return 1
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(run, mutations):
            results.append(result)
            name = result.mutation.name + (" (equivalent)" if result.mutation.equivalent else "")
            print(f"{result.outcome:9}{result.seconds:6.0f} s  {name}  {result.killed_by}", flush=True)
            if result.outcome == "broken":
                print(result.output)
    judged = [result for result in results if not result.mutation.equivalent]
    killed = [result for result in judged if result.outcome in ("killed", "timeout")]
    broken = [result for result in results if result.outcome == "broken"]
    if options.out:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        found = [asdict(r) | {"mutation": r.mutation.name, "at": r.mutation.at} for r in results]
        options.out.write_text(json.dumps({"commit": commit, "results": found}, indent=1) + "\n")
    share = len(killed) / len(judged) if judged else 1.0
    print(f"{len(killed)} of {len(judged)} mutations killed ({share:.1%}); {len(results) - len(judged)} equivalent")
    for result in judged:
        if result not in killed:
            print(f"{result.outcome}: {result.mutation.name} ({result.mutation.at}): {result.mutation.why}")
    return 0 if share >= options.floor and not broken else 1


if __name__ == "__main__":
    sys.exit(main())

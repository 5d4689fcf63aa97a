"""Count lines of code, all lines, files, functions and raises of each package, of tests, docs and benchmarks.

    python benchmarks/size.py [FOLDER]

A line of code has a token that is neither comment nor docstring, after ruff has formatted the file at 120 columns.
Files that git tracks in FOLDER (by default this checkout) are counted.
"""

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path

IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
COLUMNS = ("code", "lines", "files", "functions", "raises")


def count_python(source: str) -> Counter[str]:
    """Count one Python file."""
    command = [sys.executable, "-m", "ruff", "format", "--isolated", "--line-length", "120", "-"]
    source = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    nodes = [*ast.walk(ast.parse(source))]
    strings = [node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
    docstrings = {number for node in strings for number in range(node.lineno, (node.end_lineno or 0) + 1)}
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in IGNORED:
            code.update(range(token.start[0], token.end[0] + 1))
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    raises = sum(isinstance(node, ast.Raise) for node in nodes)
    return Counter(code=len(code - docstrings), lines=source.count("\n"), files=1, functions=functions, raises=raises)


def main(root: Path) -> None:
    """Print one row for each package and for each other folder."""
    names = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split("\n")
    rows: dict[str, Counter[str]] = {}
    for path in map(Path, filter(None, names)):
        if path.suffix not in {".py", ".pyi", ".md"} or len(path.parts) == 1 or not (root / path).is_file():
            continue
        text = (root / path).read_text(encoding="utf-8")
        counts = count_python(text) if path.suffix != ".md" else Counter(lines=text.count("\n"), files=1)
        for row in {path.parts[0], "/".join(path.parts[:2]) if path.parts[0] == "paradec" else path.parts[0]}:
            rows.setdefault(row, Counter()).update(counts)
    print(f"{'':28}" + "".join(f"{column:>10}" for column in COLUMNS))
    for row in sorted(rows):
        print(f"{row:28}" + "".join(f"{rows[row][column]:>10,}" for column in COLUMNS))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve())

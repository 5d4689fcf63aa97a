"""Runs the notebooks of this folder, and writes what they show into them.

    python docs/notebooks/run.py            # all of them, or those that are named
    python docs/notebooks/run.py --check    # change nothing; fail where a cell fails or prints something else

Needs the extra `notebooks`. Pages (of traces) are left out: they are large; so is
standard error: it is about the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
KEPT = ("image/png", "text/plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="without the ending (default: all)")
    parser.add_argument("--check", action="store_true", help="compare what cells print with what the files hold")
    args = parser.parse_args()
    paths = [FOLDER / f"{name}.ipynb" for name in args.names] or sorted(FOLDER.glob("*.ipynb"))
    differing = []
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        before = texts(notebook)
        with tempfile.TemporaryDirectory() as place:  # what cells write goes with it
            NotebookClient(notebook, timeout=300, resources={"metadata": {"path": place}}).execute()
        for cell in notebook.cells:
            cell.metadata = {}
            if cell.cell_type == "code":
                cell.execution_count = None
                cell.outputs = joined([small(output) for output in cell.outputs if output.get("name") != "stderr"])
        if args.check:
            pairs = list(zip(before, texts(notebook), strict=True))
            differing += [f"{path.name}, cell {i}: {a!r} became {b!r}" for i, (a, b) in enumerate(pairs) if a != b]
        else:
            notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
            nbformat.write(notebook, path)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells ran")
    if differing:
        sys.exit("\n".join(differing))


def small(output: Any) -> Any:
    """An output without pages, and of a picture the picture alone."""
    if "data" in output:
        kept = next(kind for kind in KEPT if kind in output.data)
        output.data = {kept: output.data[kept]}
        output.metadata = {}
    if output.output_type == "execute_result":
        output.execution_count = None
    return output


def joined(outputs: list[Any]) -> list[Any]:
    """What was printed piece by piece, in one piece."""
    found: list[Any] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def texts(notebook: Any) -> list[str]:
    """What each cell prints and says, in whatever pieces it came; pictures are not compared."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    said = [[output.get("text") or output.get("data", {}).get("text/plain", "") for output in c.outputs] for c in cells]
    return ["".join(pieces) for pieces in said]


if __name__ == "__main__":
    main()

"""Run the notebooks of this folder, and write their outputs into them.

    python docs/notebooks/run.py            # all notebooks; names select some
    python docs/notebooks/run.py --check    # change nothing; fail if a cell fails or its printed text has changed

Needs the extra `notebooks`. Two kinds of outputs are left out: HTML pages of traces, because they are large, and
standard error, because it depends on the machine.
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
MIME_TYPES = ("image/png", "text/plain")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks, without .ipynb (default: all)")
    parser.add_argument("--check", action="store_true", help="compare printed texts with those in the files")
    args = parser.parse_args()
    paths = [FOLDER / f"{name}.ipynb" for name in args.names] or sorted(FOLDER.glob("*.ipynb"))
    differing = []
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        before = cell_texts(notebook)
        with tempfile.TemporaryDirectory() as folder:  # for files that cells write
            NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
        for cell in notebook.cells:
            cell.metadata = {}
            if cell.cell_type == "code":
                cell.execution_count = None
                outputs = [strip_output(output) for output in cell.outputs if output.get("name") != "stderr"]
                cell.outputs = join_streams(outputs)
        if args.check:
            pairs = list(zip(before, cell_texts(notebook), strict=True))
            differing += [f"{path.name}, cell {i}: {a!r} became {b!r}" for i, (a, b) in enumerate(pairs) if a != b]
        else:
            notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
            nbformat.write(notebook, path)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells ran")
    if differing:
        sys.exit("\n".join(differing))


def strip_output(output: Any) -> Any:
    """Keep only the picture, or else the text, of an output with several formats; remove metadata and counters."""
    if "data" in output:
        mime_type = next(kind for kind in MIME_TYPES if kind in output.data)
        output.data = {mime_type: output.data[mime_type]}
        output.metadata = {}
    if output.output_type == "execute_result":
        output.execution_count = None
    return output


def join_streams(outputs: list[Any]) -> list[Any]:
    """Join consecutive outputs of printed text into one."""
    joined: list[Any] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def cell_texts(notebook: Any) -> list[str]:
    """Return the text output of each code cell; pictures are ignored."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in c.outputs)
        for c in cells
    ]


if __name__ == "__main__":
    main()

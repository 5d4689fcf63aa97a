"""What a matrix stored column by column in memory saves on a CPU (`paradec.models.layout`), by positions and size.

    python benchmarks/layout.py [--repeats 21]

One thread, float32: a product of M positions with a matrix [out, in] stored column by column, over the same product
with the matrix as `nn.Linear` keeps it. Both take turns; processor time, medians of ratios within a turn with their
quartiles. Writes benchmarks/results/layout.json.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

import torch
from provenance import write_result
from token_stats import in_turns, summary

from paradec.models.layout import columns_first

RESULT = Path(__file__).resolve().parent / "results" / "layout.json"
POSITIONS = (1, 4, 8, 16, 32, 64, 256)
MATRICES = ((384, 384), (384, 1024), (1024, 384), (768, 2048), (2048, 768), (2048, 2048), (384, 32_000), (4096, 4096))
"""in, out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    linear, rows = torch.nn.functional.linear, []
    for width, out in MATRICES:
        weight = torch.randn(out, width)
        columns = columns_first(weight)
        found: dict[str, Any] = {}
        for positions in POSITIONS:
            hidden = torch.randn(positions, width)
            with torch.inference_mode():
                times = in_turns(
                    {
                        "rows": lambda hidden=hidden: linear(hidden, weight),  # type: ignore[misc]  # noqa: B023
                        "columns": lambda hidden=hidden: linear(hidden, columns),  # type: ignore[misc]  # noqa: B023
                    },
                    repeats,
                )
            found[str(positions)] = summary(times["columns"], times["rows"])["times_base"]
        rows.append({"in": width, "out": out, "positions": found})
        print(width, out, " ".join(f"{m}: {each:.2f}" for m, each in found.items()), flush=True)
    device = f"cpu ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()}), 1 thread"
    write_result(RESULT, {"device": device, "torch": torch.__version__, "repeats": repeats, "rows": rows})


if __name__ == "__main__":
    main()

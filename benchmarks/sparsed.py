"""SparseD's portable path on the CPU, compared with PyTorch's dense attention.

    python benchmarks/sparsed.py [--repeats 5]

One thread, float32, 4 heads of 64 over 4 key/value heads, an answer of 512 positions, blocks of 128. Queries and keys
are random, so the lists of key blocks are random too; only their lengths matter. The attentions run `--repeats` times
in turns, and the fastest run of each counts, in CPU seconds of the thread, which other processes influence less than
wall time. "speed-up" is dense attention's time over that with the lists, "ideal" the same ratio for multiplications.
"estimation" is the time to find the lists (once per request and layer), as a multiple of dense attention's time. Prints
a table and writes benchmarks/results/sparsed.json.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from provenance import RESULTS, write_result
from tables import sparsed_table

from paradec.kernels.block_sparse import block_means, generation_block, select_blocks, sparse_attention

HEADS, WIDTH, NEW, SIZE = 4, 64, 512, 128
SHARES = (0.1, 0.3, 0.5)


def fastest(runs: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """Measure for each function the CPU seconds of the fastest of `repeats` runs, after a warm-up, in turns."""
    best = dict.fromkeys(runs, float("inf"))
    for turn in range(repeats + 1):
        for name, run in runs.items():
            begin = time.thread_time()
            run()
            if turn:
                best[name] = min(best[name], time.thread_time() - begin)
    return best


def measure(length: int, repeats: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(length)
    query, key, value = torch.randn(3, 1, HEADS, length, WIDTH, generator=generator)
    lengths = np.array([length])
    first = generation_block(lengths, np.array([NEW]), SIZE)

    def estimate() -> torch.Tensor:
        return block_means(query, key, SIZE, first=first, backend="torch")

    means = estimate()
    lists = {share: select_blocks(means, share, SIZE, lengths=lengths, first=first) for share in SHARES}
    runs: dict[Any, Callable[[], Any]] = {
        "dense": lambda: F.scaled_dot_product_attention(query, key, value),
        "estimation": estimate,
    }
    for share, index in lists.items():
        runs[share] = lambda index=index: sparse_attention(query, key, value, index, backend="torch")
    seconds = fastest(runs, repeats)
    rows = []
    for share, index in lists.items():
        density = float(index.count.double().mean()) / (-(-length // SIZE))
        rows.append(
            {
                "length": length,
                "select": share,
                "density": density,
                "speed_up": seconds["dense"] / seconds[share],
                "ideal": 1 / density,
                "estimation": seconds["estimation"] / seconds["dense"],
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = [row for length in (2048, 4096, 8192) for row in measure(length, options.repeats)]
    device = f"cpu ({platform.machine()}), 1 thread"
    shape = {"heads": HEADS, "head_dim": WIDTH, "new": NEW, "block_size": SIZE, "dtype": "float32"}
    write_result(RESULTS / "sparsed.json", {"device": device, "torch": torch.__version__, **shape, "rows": rows})
    print(sparsed_table({"rows": rows}))


if __name__ == "__main__":
    main()

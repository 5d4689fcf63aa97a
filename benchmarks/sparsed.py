"""SparseD's portable path on the CPU, beside PyTorch's dense attention.

    python benchmarks/sparsed.py [--lengths 2048 4096 8192] [--repeats 5]

One thread, one run, float32, 4 heads of 64 over 4 key/value heads, an answer of 512 positions, blocks of 128. Queries
and keys are random, so lists are random too: what counts is how many blocks they hold. Each path runs `--repeats` times
in turns with the others, and the fastest counts, in CPU seconds of the thread, which others disturb less than wall
time. "speed-up" is dense attention's time over that of the lists, "ideal" the same in multiplications; "estimation" is
the time to find the lists (once per request and layer) in dense attentions; "steps to gain" is how many sparse steps
that takes to pay back. Prints a table and writes benchmarks/results/sparsed.json.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from provenance import write_result

from paradec.kernels.block_sparse import block_means, generation_block, select_blocks, sparse_attention

RESULTS = Path(__file__).resolve().parent / "results" / "sparsed.json"
HEADS, WIDTH, NEW, SIZE = 4, 64, 512, 128
SHARES = (0.1, 0.3, 0.5)


def fastest(runs: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, float]:
    """CPU seconds of the fastest of so many runs of each, taken in turns after one that does not count."""
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
    found = []
    for share, index in lists.items():
        density = float(index.count.double().mean()) / (-(-length // SIZE))
        saved = seconds["dense"] - seconds[share]
        found.append(
            {
                "length": length,
                "select": share,
                "density": density,
                "dense_seconds": seconds["dense"],
                "sparse_seconds": seconds[share],
                "speed_up": seconds["dense"] / seconds[share],
                "ideal": 1 / density,
                "estimation": seconds["estimation"] / seconds["dense"],
                "steps_to_gain": seconds["estimation"] / saved if saved > 0 else None,
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        rows = [row for length in options.lengths for row in measure(length, options.repeats)]
    device = f"cpu ({platform.machine()}), 1 thread"
    shape = {"heads": HEADS, "head_dim": WIDTH, "new": NEW, "block_size": SIZE, "dtype": "float32"}
    write_result(RESULTS, {"device": device, "torch": torch.__version__, **shape, "rows": rows})
    print("| positions | select | blocks read | speed-up | ideal | estimation, dense attentions | steps to gain |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        gain = "never" if row["steps_to_gain"] is None else f"{row['steps_to_gain']:.1f}"
        print(
            f"| {row['length']} | {row['select']} | {row['density']:.0%} | {row['speed_up']:.2f} | {row['ideal']:.2f} "
            f"| {row['estimation']:.2f} | {gain} |"
        )


if __name__ == "__main__":
    main()

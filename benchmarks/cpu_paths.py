"""What the second paths on a CPU are worth: processor time of ours beside that of the plain torch code that GPUs take.

    python benchmarks/cpu_paths.py [--turns 9] [--out benchmarks/results/cpu_paths.json]

Alternate turns, one thread, medians; 32 positions of float32 logits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from provenance import write_result
from torch import Tensor

from paradec.core import rng
from paradec.core.rng import counter
from paradec.samplers.distributions import argmax, ascending
from paradec.samplers.filters import _filter_by_rank, filter_logits
from paradec.samplers.guidance import guided

ROWS = 32


def plain_uniform(keys: Tensor, step: Tensor, position: Tensor, vocab: int) -> Tensor:
    """`rng.uniform` as it is off the CPU."""
    place = [each.expand(*position.shape).reshape(-1, 1) for each in (position, step.unsqueeze(1))]
    place += [each.expand(*position.shape).reshape(-1, 1) for each in keys.T.unsqueeze(-1)]
    bits = torch.stack(counter._bits(torch.arange((vocab + 1) // 2), place, 0), -1)
    return (bits.double() + 0.5) * 2.0**-53


def plain_guided(logits: Tensor, scale: float) -> Tensor:
    """`guided` with the limits of excluded tokens always worked out."""
    conditional, unconditional = logits.chunk(2)
    mixed = (conditional - unconditional).mul_(scale).add_(unconditional)
    out, gone = conditional == -torch.inf, unconditional == -torch.inf
    mixed = torch.where(gone, scale * conditional, mixed)
    lost = (gone & ~out).any(-1, keepdim=True) & ~gone & (mixed < torch.inf)
    lost |= out & (unconditional < torch.inf)
    return mixed.masked_fill(lost, -torch.inf)


def cases(vocabulary: int) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """What is compared: ours, and the plain code."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, vocabulary, generator=generator)
    pair = torch.randn(2, ROWS // 2, vocabulary, generator=generator)
    keys, step = torch.randint(2**31, (1, 2), generator=generator), torch.zeros(1, dtype=torch.int64)
    position = torch.arange(ROWS).unsqueeze(0)
    return {
        "sort": (lambda: ascending(logits), lambda: logits.sort(-1).values),
        "argmax": (lambda: argmax(logits), lambda: logits.argmax(-1)),
        "top-k 50": (lambda: filter_logits(logits, None, 50), lambda: _filter_by_rank(logits, None, 50)),
        "top-p 0.95": (lambda: filter_logits(logits, 0.95, None), lambda: _filter_by_rank(logits, 0.95, None)),
        "random numbers": (
            lambda: rng.uniform(keys, step, position, vocabulary, 0),
            lambda: plain_uniform(keys, step, position, vocabulary),
        ),
        "guidance": (lambda: guided(pair, 2.0), lambda: plain_guided(pair, 2.0)),
    }


def spent(run: Callable[[], Any]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'what':16} {'vocabulary':>10} {'ours, ms':>9} {'plain, ms':>10} {'plain / ours':>13}")
    for vocabulary in (1000, 126_464):
        for name, (ours, plain) in cases(vocabulary).items():
            ours(), plain()
            found = []
            for turn in range(arguments.turns):
                first, second = (ours, plain) if turn % 2 else (plain, ours)
                times = (spent(first), spent(second))
                found.append(times if turn % 2 else times[::-1])
            mine, other = (1e3 * statistics.median(column) for column in zip(*found, strict=True))
            ratio = statistics.median(b / a for a, b in found)
            print(f"{name:16} {vocabulary:10,d} {mine:9.2f} {other:10.2f} {ratio:12.1f}x")
            rows.append({"what": name, "vocabulary": vocabulary, "ours_ms": mine, "plain_ms": other, "ratio": ratio})
    if arguments.out:
        write_result(arguments.out, {"device": "cpu, 1 thread", "torch": torch.__version__, "rows": rows})


if __name__ == "__main__":
    main()

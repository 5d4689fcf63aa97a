"""Token statistics on the CPU: the chunked path against float64, in time and in memory.

    python benchmarks/token_stats.py [--repeats 5]

One thread, one run. For float32 logits [32, V] of the vocabularies of LLaDA (126,464) and Dream (152,064) each path
gives the same outputs: the best token, its probability, the probability of a given token, and the entropy. "float64" is
what the references of the threshold rules write: softmax in float64, argmax, gather, entropy, all rows at once. Both
run in turns. The extra memory is the highest resident size during one call in a fresh process, less that before it,
the least of three (Linux; pages of libraries that are read for the first time count too). Prints a table and writes
benchmarks/results/token_stats.json.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from provenance import write_result
from torch import Tensor

from paradec.kernels.token_stats import token_stats

ROOT = Path(__file__).resolve().parent.parent
ROWS, VOCABULARIES = 32, (126_464, 152_064)
FIELDS = ("token", "prob", "entropy")


def plain(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """The float64 path as the public codes have it."""
    p = logits.double().softmax(-1)
    token = logits.argmax(-1)
    prob = p.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    given = p.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return token, prob, given, torch.special.entr(p).sum(-1)


def chunked(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    found = token_stats(logits, fields=FIELDS, ids=ids)
    return found.token, found.prob, found.ids_prob, found.entropy


def inputs(vocabulary: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    return logits, torch.randint(vocabulary, (rows,), generator=generator)


def peak_memory(name: str, vocabulary: int) -> int:
    """Bytes that one call adds to the resident size of a process of its own, at most; the least of three."""
    command = [sys.executable, __file__, "--memory-of", name, str(vocabulary)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(3)]
    return min(int(done.stdout) for done in runs)


def report(name: str, vocabulary: str) -> None:
    function = {"plain": plain, "chunked": chunked}[name]
    logits, ids = inputs(int(vocabulary))
    function(*inputs(10_000, 2))  # what libraries set up once
    # a child starts with its parent's peak, which this sets back; Linux only
    Path("/proc/self/clear_refs").write_text("5")
    before = resident_peak()
    function(logits, ids)
    print(resident_peak() - before)


def resident_peak() -> int:
    """Bytes that this process had resident at most."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def measure(vocabulary: int, repeats: int) -> dict[str, float]:
    logits, ids = inputs(vocabulary)
    expected, found = plain(logits, ids), chunked(logits, ids)
    worst = max(float(((a - b).abs() / a).max()) for a, b in zip(expected[1:], found[1:]))
    assert torch.equal(expected[0], found[0]) and worst < 1e-5, "the two paths differ"
    seconds: dict[str, list[float]] = {"plain": [], "chunked": []}
    for _ in range(repeats):
        for name, function in (("plain", plain), ("chunked", chunked)):
            begin = time.perf_counter()
            function(logits, ids)
            seconds[name].append(time.perf_counter() - begin)
    return {
        "vocabulary": vocabulary,
        "rows": ROWS,
        "float64_ms": 1e3 * statistics.median(seconds["plain"]),
        "chunked_ms": 1e3 * statistics.median(seconds["chunked"]),
        "speed_up": statistics.median(a / b for a, b in zip(seconds["plain"], seconds["chunked"])),
        "largest_relative_difference": worst,
        "float64_extra_mb": peak_memory("plain", vocabulary) / 1e6,
        "chunked_extra_mb": peak_memory("chunked", vocabulary) / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--memory-of", nargs=2, metavar=("PATH", "VOCABULARY"), help="print what one call adds, in bytes"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_of:
        report(*arguments.memory_of)
        return
    rows = [measure(vocabulary, arguments.repeats) for vocabulary in VOCABULARIES]
    print(f"{'vocabulary':>10} {'float64':>10} {'chunked':>10} {'speed-up':>9} {'extra memory':>24}")
    for row in rows:
        print(
            f"{row['vocabulary']:10,d} {row['float64_ms']:7.1f} ms {row['chunked_ms']:7.1f} ms {row['speed_up']:8.1f}x "
            f"{row['float64_extra_mb']:8.1f} / {row['chunked_extra_mb']:4.1f} MB"
        )
    path = ROOT / "benchmarks" / "results" / "token_stats.json"
    path.parent.mkdir(exist_ok=True)
    device = f"cpu ({platform.machine()}), 1 thread"
    write_result(path, {"device": device, "torch": torch.__version__, "rows": rows})
    print(f"written to {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

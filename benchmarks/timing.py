"""Shared parts of benchmarks: times, the process's memory, and sections that continue after failures."""

from __future__ import annotations

import gc
import platform
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def time_call(run: Callable[[], Any]) -> tuple[Any, float, float]:
    """Call run(); return its result, CPU seconds of the process, and wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    return result, time.process_time() - cpu, time.perf_counter() - wall


def resident(name: str = "VmRSS") -> int:
    """Read this process's resident bytes: now ("VmRSS"), or the maximum since `forget_peak` ("VmHWM"). Returns 0 on
    systems other than Linux."""
    file = Path("/proc/self/status")
    lines = file.read_text().splitlines() if file.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def processor() -> str:
    """Read the processor's name from /proc/cpuinfo, or else from `platform`."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def forget_peak() -> None:
    """Reset the process's "VmHWM" (peak memory) to its current memory."""
    file = Path("/proc/self/clear_refs")
    if file.exists():
        file.write_text("5")


def milliseconds(run: Callable[[int], Any], device: torch.device, repeats: int = 20, warm_up: int = 3) -> float:
    """Measure the median milliseconds of run(i) on the device; i counts the calls, so that inputs can change."""
    for index in range(warm_up):
        run(index)
    if device.type != "cuda":
        seconds = []
        for index in range(repeats):
            begin = time.perf_counter()
            run(index)
            seconds.append(time.perf_counter() - begin)
        return 1e3 * statistics.median(seconds)
    pairs = []
    for index in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(index)
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize(device)
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


class Section:
    """Part of a benchmark with a time limit, after which no measurement starts. A measurement that fails is recorded in
    `problems` and the next one follows, since device time is scarce."""

    def __init__(self, seconds: float):
        self.begin, self.seconds = time.monotonic(), seconds
        self.problems: list[str] = []

    def attempt(self, what: str, run: Callable[[], Any]) -> Any:
        """Call run() and return its result. If it fails or the time is over, record a problem and return None."""
        if time.monotonic() - self.begin > self.seconds:
            self.problems.append(f"{what}: not started, the section's {self.seconds:.0f} s were over")
            return None
        try:
            return run()
        except Exception as error:
            traceback.print_exc()
            self.problems.append(f"{what}: {type(error).__name__}: {error}")
            return None
        finally:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def close(self, **results: Any) -> dict[str, Any]:
        """Build the section's entry of the result file."""
        return {**results, "problems": self.problems, "seconds": time.monotonic() - self.begin}


def markdown(rows: Iterable[dict[str, Any]]) -> str:
    """Format rows as a Markdown table. Columns are the fields of all rows; missing values are empty."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |", "|" + "---|" * len(names)]
    return "\n".join([*lines, *("| " + " | ".join(cell(row.get(name)) for name in names) + " |" for row in rows)])

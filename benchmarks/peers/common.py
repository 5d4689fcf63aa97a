"""Shared parts of the comparisons with other libraries: contestants that take turns, and reports.

A contestant has a name and a function that does the whole task once and returns its result (a tensor). In every turn
each contestant does the task once, in a new order, so that other load on the machine affects all alike. Ratios are
computed within a turn; their median and quartiles are reported, next to those of the times. CPU time and peak memory
are measured in the contestant's process; the peak is that of the last turn, above the memory before it.

`Elsewhere(name, python, script)` is a library that needs another environment, for example an older transformers: its
script calls `serve` and takes the turns in a separate process. No code of the other libraries is copied: scripts call
their public functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

BENCHMARKS = Path(__file__).resolve().parent.parent
if str(BENCHMARKS) not in sys.path:
    sys.path.insert(0, str(BENCHMARKS))  # `python benchmarks/peers/...` finds provenance and timing

from timing import forget_peak, processor, resident, time_call  # noqa: E402


def checkout_commit(folder: Path) -> str:
    """Read the commit of a checkout; "unknown" if it has no git history.

    Raises:
        FileNotFoundError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder")
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


@dataclass
class Contestant:
    """One participant of a comparison. `version` is a release or a commit; `facts` are further fields of its row in the
    report. Every turn runs in the context `around`; entering it is not timed."""

    name: str
    run: Callable[[], Any]
    version: str = ""
    around: contextlib.AbstractContextManager[Any] = field(default_factory=contextlib.nullcontext)
    facts: dict[str, Any] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=lambda: {"cpu": [], "wall": []})
    """Seconds of every turn."""
    result: Any = None
    peak: int = 0
    """Peak bytes of the process during the last turn, above those before the turn: without the model, and without
    imports and compilation in the first turn."""

    def turn(self) -> tuple[float, float]:
        """Do the task once; return seconds of CPU time and of wall time."""
        with self.around:
            gc.collect()  # garbage of other contestants must not count
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory freed by other contestants must not be reused
            before = resident("VmRSS")
            forget_peak()
            self.result, cpu, wall = time_call(self.run)
            self.peak = resident("VmHWM") - before
            return cpu, wall


def alternate(contestants: Sequence[Contestant], turns: int, warm_up: int = 1) -> None:
    """Let all contestants take turns. The first `warm_up` turns are not counted."""
    for turn in range(warm_up + turns):
        start = turn % len(contestants)
        for contestant in [*contestants[start:], *contestants[:start]]:
            cpu, wall = contestant.turn()
            if turn >= warm_up:
                contestant.times["cpu"].append(cpu)
                contestant.times["wall"].append(wall)


def quartiles(values: Sequence[float]) -> list[float]:
    """Compute the first quartile, the median and the third quartile."""
    if len(values) < 2:
        return [float(values[0])] * 3
    return list(statistics.quantiles(values, n=4, method="inclusive"))


def difference(mine: Tensor, reference: Tensor) -> dict[str, Any]:
    """Compare two results: whether they are equal, and their largest difference."""
    if mine.shape != reference.shape:
        return {"equal": False, "shapes": [list(mine.shape), list(reference.shape)]}
    gap = float((mine.double() - reference.double()).abs().max())
    return {"equal": torch.equal(mine, reference), "largest_difference": gap}


def ratios_beyond(mine: Sequence[float], theirs: Sequence[float], shared: Sequence[float]) -> list[float]:
    """Compute quartiles over turns of (mine - shared) / (theirs - shared); `shared` are the times of the work that both
    contestants must do. Other load on the machine changes these less than plain ratios."""
    return quartiles([(a - c) / (b - c) for a, b, c in zip(mine, theirs, shared, strict=True)])


def report(
    contestants: Sequence[Contestant], baselines: Sequence[str], aims: dict[str, str], shared: str = ""
) -> list[dict[str, Any]]:
    """Build the result: a row for each contestant.

    Args:
        baselines: names of the contestants whose times are the denominators of the ratios.
        aims: {contestant: name of the contestant with whose result its result is compared}.
        shared: name of the contestant that does only the work that all contestants must do.
    """
    known = {contestant.name: contestant for contestant in contestants}
    entries = []
    for contestant in contestants:
        entry: dict[str, Any] = {"name": contestant.name, "version": contestant.version} | contestant.facts
        entry["peak_mib"] = round(contestant.peak / 2**20, 1)
        for clock in ("cpu", "wall"):
            times = contestant.times[clock]
            entry[f"{clock}_seconds"] = quartiles(times)
            for base in baselines:
                if base in known:
                    theirs = known[base].times[clock]
                    entry[f"{clock}_over_{base}"] = quartiles([a / b for a, b in zip(times, theirs, strict=True)])
                    if shared in known and contestant.name != shared:
                        entry[f"{clock}_beyond_{base}"] = ratios_beyond(times, theirs, known[shared].times[clock])
        if aims.get(contestant.name) in known:
            aim = aims[contestant.name]
            entry["compared_with"] = {"name": aim} | difference(contestant.result, known[aim].result)
        entries.append(entry)
    return entries


def show(title: str, entries: list[dict[str, Any]], baselines: Sequence[str]) -> str:
    """Format a report as text, with a line for each contestant."""
    lines = [f"{title:<28} {'CPU, s':>9} " + " ".join(f"{'/ ' + base + ' [quartiles]':>32}" for base in baselines)]
    for entry in entries:
        cells = []
        for base in baselines:
            low, middle, high = entry.get(f"cpu_over_{base}", [float("nan")] * 3)
            cells.append(f"{middle:>14.3f} [{low:.3f}, {high:.3f}]".rjust(32))
        same = entry.get("compared_with", {})
        verdict = f"  {'equals' if same['equal'] else 'differs from'} {same['name']}" if same else ""
        lines.append(f"{entry['name']:<28} {entry['cpu_seconds'][1]:>9.3f} " + " ".join(cells) + verdict)
        lines[-1] += f"  {entry['peak_mib']:.0f} MiB"
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """Describe the machine and its software."""
    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    return about | {"processor": processor()}


def load() -> float:
    """Read the machine's load average over the last minute."""
    return round(os.getloadavg()[0], 2)


# ---- another environment --------------------------------------------------------------------------------------------


class Elsewhere(Contestant):
    """Contestant in another interpreter. The context starts its process on entry and ends it on exit.

    Args:
        python: path of the interpreter.
        script: a script that calls `serve`.
        arguments: the script's command line.
    """

    def __init__(self, name: str, python: str, script: Path, *arguments: str):
        super().__init__(name, lambda: None)
        self.command = [python, str(script), *arguments]
        self.process: Any = None

    def __enter__(self) -> Elsewhere:
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["version"]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.stdin.close()
        self.process.wait()

    def turn(self) -> tuple[float, float]:
        self.process.stdin.write("turn\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.result, self.peak = torch.load(answer["result"], weights_only=True), answer["peak"]
        Path(answer["result"]).unlink()
        return answer["cpu"], answer["wall"]

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name}: its process ended (exit code {self.process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        return answer


def serve(run: Callable[[], Any], version: str = "") -> None:
    """Take the turns of an `Elsewhere` in this process, one for each line on standard input. What `run` prints goes to
    standard error."""
    out, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps({"version": version}), file=out, flush=True)
    served = Contestant("", run)
    for _ in sys.stdin:
        cpu, wall = served.turn()
        with tempfile.NamedTemporaryFile(suffix=".pt", delete=False) as file:
            torch.save(served.result, file)
        reply = {"cpu": cpu, "wall": wall, "peak": served.peak, "result": file.name}
        print(json.dumps(reply), file=out, flush=True)

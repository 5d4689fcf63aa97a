"""Commands in the processes that torchrun started: a model is spread over them, and the first one prints.

`torchrun --nproc-per-node 2 -m paradec generate ...` runs the command in every process. All decode together; what the
others would print or write is left to rank 0, but for errors of their own.
"""

from __future__ import annotations

import os
import sys
from typing import Any

SPREAD = ("generate", "infill")
"""Commands that decode with a model that is spread."""
ALIKE = ("samplers", "caches", "tasks", "trace", None)
"""Commands that load no model."""


def count() -> int:
    """How many processes run the command, by what launchers such as torchrun leave in the environment."""
    try:
        there = "RANK" in os.environ and "MASTER_ADDR" in os.environ
        return max(1, int(os.environ["WORLD_SIZE"])) if there else 1
    except (KeyError, ValueError):
        return 1


def speaks() -> bool:
    """Whether this process prints and writes files."""
    return count() == 1 or os.environ["RANK"] == "0"


def begin(command: str | None) -> None:
    """Before a command: leave printing to rank 0.

    Raises:
        ValueError: a command that runs in one process alone.
    """
    if count() == 1:
        return
    if not speaks():
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the process ends)
    if command not in SPREAD and command not in ALIKE:
        raise ValueError(
            f"paradec {command} runs in one process, and was started in {count()}: start it without torchrun; "
            f"{' and '.join(SPREAD)} spread a model"
        )


def check_prompt(argument: str | None) -> None:
    """Raise ValueError for a prompt on standard input, which several processes would read at once."""
    if argument == "-" and count() > 1:
        raise ValueError(f"{count()} processes cannot all read standard input: give the prompt in quotes, or --in FILE")


def plan(device: str | None) -> dict[str, Any]:
    """What `paradec.load` is told beside the source and the dtype.

    Raises:
        ValueError: a device, where each process has its own.
    """
    if count() == 1:
        return {"device": device}
    if device is not None:
        raise ValueError(f"--device {device} is for one process; of {count()} each takes a GPU of its own, or the CPU")
    return {"tp_plan": "auto"}


def report(text: str) -> None:
    """Print an error: rank 0's, and of other ranks what they alone can know, once they have met."""
    if speaks():
        print(text, file=sys.stderr)
        return
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        print(f"rank {os.environ['RANK']}: {text}", file=sys.__stderr__)

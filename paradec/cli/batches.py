"""How many rows are decoded together: batches that fit memory, and the rows of one that is interrupted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from paradec.api.output import Output
from paradec.core.prompts import Prompts
from paradec.core.protocol import Interrupted

MOST_ROWS = 256
"""Rows decoded together at most: results are printed batch by batch, and larger ones gain little."""
CPU_BYTES = 2**30
"""What a batch may take on the CPU, where memory that is free is not known to be ours."""
LOGIT_BYTES = 24
"""Bytes that one logit takes, about: float32, and what is computed from it in float64."""
ACTIVATIONS = 24
"""Numbers of the hidden size that a position takes at once, about."""


def rows_that_fit(model: Any, positions: int, branches: int) -> int:
    """Estimate how many rows of so many positions, each evaluated so many times, are decoded together."""
    config = getattr(model, "text_config", None) or getattr(model.module, "config", None)
    hidden, layers = getattr(config, "hidden_size", None) or 1024, getattr(config, "num_hidden_layers", None) or 1
    numbers = hidden * (ACTIVATIONS + 2 * layers)  # keys and values of every layer
    read = model.facts.block_length if model.facts.topology == "canvas" else positions  # logits of the open canvas
    row = branches * (read * LOGIT_BYTES * model.facts.vocab_size + positions * 4 * numbers)
    return max(1, min(MOST_ROWS, _free_bytes(model.device) // row))


def _free_bytes(device: torch.device) -> int:
    """Half of what is free on the device."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (torch.cuda.mem_get_info(device)[0] + unused) // 2
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return min(CPU_BYTES, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
    return CPU_BYTES


def in_batches(
    decode: Callable[[Prompts], Output], prompts: Prompts, size: int
) -> Iterator[tuple[Prompts, Output, bool]]:
    """Decode `size` rows after the other, fewer where they do not fit. Yields each batch with its output and whether it
    was interrupted, which ends them."""
    first, interrupted = 0, False
    while first < len(prompts.rows) and not interrupted:
        batch = prompts.part(first, first + size)
        try:
            output = decode(batch)
        except Interrupted as interrupt:
            output, interrupted = interrupt.output, True
        except torch.OutOfMemoryError:
            if len(batch.rows) == 1:
                raise
            size = len(batch.rows) // 2
            continue
        yield batch, output, interrupted
        first += len(batch.rows)


def completed(output: Output) -> list[int]:
    """The rows of an interrupted batch that were done."""
    holes = output.filled.sum(1).tolist()
    rows = zip(output.finished, output.tokens, holes, strict=True)
    return [row for row, (finished, tokens, filled) in enumerate(rows) if finished or tokens == filled]

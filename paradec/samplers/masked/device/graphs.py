"""What outlives a step on the device: the layout that fixes a step's shapes, and the CUDA graph that holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from paradec.caches.base import Cache
from paradec.core.facts import ModelFacts
from paradec.request import Request
from paradec.samplers.masked.loop import MaskedSampler
from paradec.samplers.masked.state import MaskedState

COLUMNS = 64
"""Canvases are padded to a multiple of this, so that requests of other lengths find graphs of theirs. Where all rows
are just as long, attention needs no mask."""


class NotCapturable(RuntimeError):
    """A step does something that no CUDA graph can hold. The request's state is as it was."""


@dataclass(frozen=True)
class StepLayout:
    """All that is fixed in a captured step; graphs serve every request with an equal one."""

    sampler: MaskedSampler
    request: Request
    cache: Cache
    facts: ModelFacts
    batch: int
    columns: int
    """Positions of the canvas, padding included."""
    widest: int
    """Positions of the widest block."""
    blocks: int
    """Entries of the table of blocks, per row."""
    planned: int
    """Steps of the longest plan of a block."""
    level: bool
    """Whether all rows fill the canvas."""
    stops: bool
    """Whether rows end at their end token."""
    suppressed: tuple[int, ...]
    holes: bool
    """Whether end tokens are kept out of holes."""
    device: torch.device
    capture: bool

    @classmethod
    def of(cls, sampler: MaskedSampler, state: MaskedState, table: np.ndarray, capture: bool) -> StepLayout:
        """The layout of a request whose blocks are `table` (see `block_table`)."""
        exact, widest = state.canvas.shape[1], int((table[..., 1] - table[..., 0]).max())
        columns = exact
        if getattr(state.cache, "max_memory", None) is None:  # a bound that may leave no space for padding
            columns = -(-exact // COLUMNS) * COLUMNS
            if state.facts.max_length is not None:
                columns = max(exact, min(columns, state.facts.max_length))
        return cls(
            sampler=sampler,
            request=Request(**state.request.sampling()),
            cache=state.cache,
            facts=state.facts,
            batch=state.batch,
            columns=columns,
            widest=widest,
            blocks=1 << (table.shape[1] - 1).bit_length(),
            planned=widest if state.steps_per_block is None else int(state.steps_per_block.max()),
            level=state.level and columns == exact,
            stops=bool(state.stop_rules),
            suppressed=() if state.suppressed is None else tuple(state.suppressed.tolist()),
            holes="holes" in state.features,
            device=state.canvas.device,
            capture=capture,
        )

    def refilled(self, slots: int) -> StepLayout:
        """Of so many slots that requests like this one come and go in. What they differ in is rounded up, so that the
        next ones fit too."""
        return replace(
            self,
            batch=slots,
            widest=min(1 << (self.widest - 1).bit_length(), self.columns),
            planned=1 << (self.planned - 1).bit_length(),
            level=False,
        )

    def holding(self, other: StepLayout) -> StepLayout:
        """This one, made as large as another one of the same slots asks for."""
        sizes = {name: max(getattr(self, name), getattr(other, name)) for name in SIZES}
        return replace(self, **sizes, holes=self.holes or other.holes)


SIZES = ("columns", "widest", "blocks", "planned")
"""The fields of a layout that may be larger than a row needs."""


def block_table(state: MaskedState) -> tuple[np.ndarray, np.ndarray]:
    """The blocks that a request's rows will open, as `MaskedState.open_blocks` opens them one by one.

    Returns:
        [B, K, 3] int64: start, end, and undecided positions of each; zeros after a row's last. [B] int64: how many.
    """
    masks_before = np.zeros((state.batch, state.canvas.shape[1] + 1), np.int64)
    masks_before[:, 1:] = state.undecided.cpu().numpy().cumsum(1)
    start = state.prompt_length.copy()
    found: list[list[tuple[int, int, int]]] = [[] for _ in range(state.batch)]
    while len(rows := np.flatnonzero(start < state.length)):
        end = state.blocks.open(start[rows], state.prompt_length[rows], state.length[rows])
        masks = masks_before[rows, end] - masks_before[rows, start[rows]]
        for row, block in zip(rows.tolist(), zip(start[rows].tolist(), end.tolist(), masks.tolist())):
            if block[2]:
                found[row].append(block)
        start[rows] = end
    count = np.array([len(blocks) for blocks in found], np.int64)
    table = np.zeros((state.batch, max(1, int(count.max())), 3), np.int64)
    for row, blocks in enumerate(found):
        table[row, : len(blocks)] = blocks if blocks else np.empty((0, 3))
    return table, count


def captured(engine: Any, step: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of one step of a `DeviceEngine`, ready to be replayed.

    Raises:
        NotCapturable: the step waits for the device, or does what no graph can hold.
    """
    device = engine.device
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    if engine.pool is None:
        # graphs of one engine never run side by side and leave nothing for each other: they share memory, which
        # takes one stream; another than that of the warm-up, so that cuBLAS puts its workspace there as well
        engine.pool, engine.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(2):  # what libraries set up, and compile, at first use
            step()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # what other threads do on the device is no business of the capture
        with torch.cuda.graph(graph, pool=engine.pool, stream=engine.stream, capture_error_mode="thread_local"):
            step()
    except RuntimeError as error:
        torch.cuda.set_stream(current)  # a capture that breaks off leaves its own
        raise NotCapturable(f"a step of {engine.facts.name} cannot be captured: {error}") from error
    return graph.replay

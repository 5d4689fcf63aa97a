"""Layout with the fixed shapes of a device step, and the capture of a step in a CUDA graph."""

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

COLUMN_MULTIPLE = 64
"""Canvases are padded to a multiple of this, so that requests share graphs."""


class NotCapturable(RuntimeError):
    """A step cannot be captured in a CUDA graph. The request's state is unchanged."""


@dataclass(frozen=True)
class StepLayout:
    """All values that are fixed in a captured step. Graphs serve all requests with an equal layout."""

    sampler: MaskedSampler
    request: Request
    cache: Cache
    facts: ModelFacts
    batch: int
    columns: int
    max_block_length: int
    max_blocks: int
    """Maximum number of blocks per row, in the block table."""
    longest_plan: int
    """Maximum number of planned steps per block."""
    rows_fill_canvas: bool
    """Whether all rows fill the canvas, so that they need no attention mask."""
    stops: bool
    """Whether rows end at their first end token."""
    suppressed: tuple[int, ...]
    holes: bool
    """Whether end tokens are excluded at masks before prompt tokens."""
    device: torch.device
    capture: bool

    @classmethod
    def from_state(cls, sampler: MaskedSampler, state: MaskedState, table: np.ndarray, capture: bool) -> StepLayout:
        """Make the layout of a request. table: its blocks, from `block_table`."""
        width, max_block_length = state.canvas.shape[1], int((table[..., 1] - table[..., 0]).max())
        columns = width
        if getattr(state.cache, "max_memory", None) is None:  # a memory limit may leave no space for padding
            columns = -(-width // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
            if state.facts.max_length is not None:
                columns = max(width, min(columns, state.facts.max_length))
        return cls(
            sampler=sampler,
            request=Request(**state.request.sampling()),
            cache=state.cache,
            facts=state.facts,
            batch=state.batch,
            columns=columns,
            max_block_length=max_block_length,
            max_blocks=1 << (table.shape[1] - 1).bit_length(),
            longest_plan=max_block_length if state.steps_per_block is None else int(state.steps_per_block.max()),
            rows_fill_canvas=state.has_equal_lengths and columns == width,
            stops=bool(state.stop_rules),
            suppressed=() if state.suppressed is None else tuple(state.suppressed.tolist()),
            holes="holes" in state.features,
            device=state.canvas.device,
            capture=capture,
        )

    def for_slots(self, num_slots: int) -> StepLayout:
        """Make the layout for slots that are refilled: sizes are rounded up, so that later requests fit."""
        return replace(
            self,
            batch=num_slots,
            max_block_length=min(1 << (self.max_block_length - 1).bit_length(), self.columns),
            longest_plan=1 << (self.longest_plan - 1).bit_length(),
            rows_fill_canvas=False,
        )


SIZES = ("columns", "max_block_length", "max_blocks", "longest_plan")
"""Fields of a layout that may be larger than a row needs."""


def block_table(state: MaskedState) -> tuple[np.ndarray, np.ndarray]:
    """Tabulate the blocks that a request will open: [B, K, 3] int64 with start, end and number of undecided positions,
    zeros after a row's last block; and the number of blocks [B] int64."""
    masks_before = np.zeros((state.batch, state.canvas.shape[1] + 1), np.int64)
    masks_before[:, 1:] = state.undecided.cpu().numpy().cumsum(1)
    start = state.prompt_length.copy()
    blocks_by_row: list[list[tuple[int, int, int]]] = [[] for _ in range(state.batch)]
    while len(rows := np.flatnonzero(start < state.length)):
        end = state.blocks.open(start[rows], state.prompt_length[rows], state.length[rows])
        masks = masks_before[rows, end] - masks_before[rows, start[rows]]
        for row, block in zip(rows.tolist(), zip(start[rows].tolist(), end.tolist(), masks.tolist())):
            if block[2]:
                blocks_by_row[row].append(block)
        start[rows] = end
    num_blocks = np.array([len(blocks) for blocks in blocks_by_row], np.int64)
    table = np.zeros((state.batch, max(1, int(num_blocks.max())), 3), np.int64)
    for row, blocks in enumerate(blocks_by_row):
        table[row, : len(blocks)] = blocks if blocks else np.empty((0, 3))
    return table, num_blocks


def capture_graph(engine: Any, step: Callable[[], None]) -> Callable[[], None]:
    """Capture a step in a CUDA graph, and return its replay. Raises NotCapturable if CUDA cannot capture the step."""
    device = engine.device
    current_stream, warmup_stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    if engine.pool is None:
        # graphs of one engine never overlap and pass no tensors to each other, so that they can share memory. They also
        # share a stream, which is not the warm-up's, so that cuBLAS's workspace is in this memory, too.
        engine.pool, engine.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    warmup_stream.wait_stream(current_stream)
    with torch.cuda.stream(warmup_stream):
        for _ in range(2):  # libraries initialise and compile at first use
            step()
    current_stream.wait_stream(warmup_stream)
    graph = torch.cuda.CUDAGraph()
    try:
        # other threads may use the device during the capture
        with torch.cuda.graph(graph, pool=engine.pool, stream=engine.stream, capture_error_mode="thread_local"):
            step()
    except RuntimeError as error:
        torch.cuda.set_stream(current_stream)  # a failed capture leaves its stream current
        raise NotCapturable(f"a step of {engine.facts.name} cannot be captured: {error}") from error
    return graph.replay

"""Blocks that end where a step's logits say (`paradec.AdaptiveBlocks`)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paradec.core.blocks import Opening
from paradec.core.rows import ROWS
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.trackers import Tracker
from paradec.samplers.masked.views import MaskedProposal


@dataclass
class BlockEnds(Tracker):
    """Which rows have opened a block whose end is not read yet."""

    opening: np.ndarray = field(metadata=ROWS)

    host_only = "blocks={state.blocks} end where the host reads it from the logits"

    def opened(self, state: MaskedState, rows: np.ndarray) -> None:
        self.opening[rows] = True

    def reads_window(self, state: MaskedState) -> bool:
        return bool(self.opening.any())

    def proposed(self, state: MaskedState, proposal: MaskedProposal) -> None:
        """Let a proposal end where its candidates say that blocks do."""
        confidence, available = proposal.quantities["confidence"], proposal.available
        proposal.block_end = self._read(state, proposal.values, confidence, available)
        if proposal.block_end is not None:
            proposal.available = available & (proposal.positions < proposal.block_end.unsqueeze(1))

    def committed(self, state: MaskedState, proposal: MaskedProposal, found: dict[str, np.ndarray]) -> None:
        """Let the blocks that were read end where the proposal has it."""
        if proposal.block_end is None:
            return
        read = self.opening[proposal.rows]
        rows, end = proposal.rows[read], found["block_end"][read]
        if (end > state.block_end[rows]).any():
            raise RuntimeError(f"blocks={state.blocks} cut a block that is longer than what it read")
        state.block_end[rows] = end
        masks = state.masks_before[rows, end] - state.masks_before[rows, state.block_start[rows]]
        state.masks_at_open[rows] = state.remaining[rows] = masks
        self.opening[rows] = False

    def _read(self, state: MaskedState, tokens: Tensor, confidence: Tensor, available: Tensor) -> Tensor | None:
        """Where each running row's block ends, [R] int64, if the candidates [R, W] decide it for any; else None."""
        rows = state.window.rows
        index = self.opening[rows].nonzero()[0]
        if not len(index):
            return None
        opened, device = rows[index], tokens.device
        start, end = torch.as_tensor(np.stack((state.block_start[rows], state.block_end[rows])), device=device)
        at = torch.as_tensor(index, device=device)
        opening = Opening(
            tokens=tokens[at],
            confidence=confidence[at],
            available=available[at],
            start=state.block_start[opened],
            prompt_length=state.prompt_length[opened],
            length=state.length[opened],
        )
        # the block reaches what can be committed, where given text comes first
        size = state.blocks.cut(opening).maximum(opening.available.int().argmax(1) + 1)
        return end.index_copy(0, at, start[at] + size)

"""Blocks that end where the logits of their first step say (`paradec.AdaptiveBlocks`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.blocks import Opening
from paradec.core.rows import ROWS
from paradec.samplers.features.feature import Ends, Feature


@dataclass
class AdaptiveBlockEnds(Feature):
    """The rows that have opened a block whose end is not read yet."""

    opening: np.ndarray = field(metadata=ROWS)
    """[B] bool. Until the end is read, a block reaches as far as its policy reads."""

    host_only = "blocks={state.blocks} end where the host reads it from the logits"

    def reads_window(self, state: Any) -> bool:
        return bool(self.opening.any())

    def on_start(self, state: Any, rows: np.ndarray) -> None:
        self.opening[rows] = True

    def on_propose(self, state: Any, proposal: Any) -> None:
        """End the proposal where its candidates say that blocks do."""
        proposal.block_end = self._read_ends(state, proposal)
        if proposal.block_end is not None:
            proposal.available = proposal.available & (proposal.positions < proposal.block_end.unsqueeze(1))

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        if proposal.block_end is None:
            return False
        self.opening[proposal.rows] = False
        return True

    def _read_ends(self, state: Any, proposal: Any) -> Tensor | None:
        """[R] int64: where each running row's block ends; None where no row has just opened one."""
        rows = state.window.rows
        index = self.opening[rows].nonzero()[0]
        if not len(index):
            return None
        opened, device = rows[index], proposal.values.device
        start, end = torch.as_tensor(np.stack((state.block_start[rows], state.block_end[rows])), device=device)
        chosen = torch.as_tensor(index, device=device)
        opening = Opening(
            tokens=proposal.values[chosen],
            confidence=proposal.quantities["confidence"][chosen],
            available=proposal.available[chosen],
            start=state.block_start[opened],
            prompt_length=state.prompt_length[opened],
            length=state.length[opened],
        )
        # the block reaches what can be committed, where given text comes first
        size = state.blocks.cut(opening).maximum(opening.available.int().argmax(1) + 1)
        return end.index_copy(0, chosen, start[chosen] + size)

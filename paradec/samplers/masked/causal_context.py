"""Open blocks over causal context: what a request over such a model asks of each call.

A block begins with a seed. Its first step makes a causal call over what is final and not stored yet, which is stored,
and the last row of it predicts the block's first token. The other steps evaluate the block alone, which sees itself and
all that is stored; they store nothing. (Nemotron-Labs-Diffusion, arXiv 2607.05722.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Part
from paradec.caches.table import REFUSED, verdict
from paradec.core.checks import shown
from paradec.core.query import WindowQuery
from paradec.core.rows import ROWS
from paradec.request import Request
from paradec.samplers.features.feature import Ends, Feature
from paradec.samplers.features.pipelined_blocks import PipelinedBlocks
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import Decision, MaskedProposal


@dataclass
class CausalContext(Feature):
    """Which rows are about to draw the first token of their block."""

    seeding: np.ndarray = field(metadata=ROWS)
    """[B] bool."""
    before: dict[str, Tensor] = field(default_factory=dict)
    """What the method remembered of the running rows before the step that is being committed."""

    host_only = "blocks over causal context are seeded on the host"

    @classmethod
    def of(cls, sampler: Any, state: MaskedState, early: tuple[Any, ...], request: Request) -> Self:
        """For a request; `early` are its stop rules that read beyond the open block.

        Raises:
            ValueError: what does not work with blocks that are seeded.
        """
        blocks, facts, why = state.blocks, state.facts, None
        if (found := verdict(sampler, state.cache, facts)).status == REFUSED:
            why = f"sampler {sampler.name!r} does not work here: {found.why}"
        elif getattr(blocks, "reads_logits", False):
            why = f"blocks={shown(blocks)} end where the logits of a whole block say, before there are any"
        elif isinstance(blocks, PipelinedBlocks):
            why = f"blocks={shown(blocks)} open a block before the one before it is final"
        elif early:
            why = f"stop={shown(request.stop)} reads what is after the open block, which no call answers"
        elif request.suffix is not None:
            why = f"suffix={shown(request.suffix)} leaves out what is after the block, which is never evaluated"
        if why is not None:
            raise ValueError(f"{facts.name} decodes blocks over causal context, each from a seed: {why}")
        return cls(np.zeros(state.batch, bool))

    def on_start(self, state: MaskedState, rows: np.ndarray) -> None:
        start = state.block_start[rows]
        masked = state.masks_before[rows, start + 1] > state.masks_before[rows, start]
        self.seeding[rows] = masked & (start > 0)  # nothing predicts the first position of a text

    def on_query(self, state: MaskedState, part: Part, query: WindowQuery) -> None:
        """Let the columns before the block be causal, and those of the block see it whole and be stored nowhere; rows
        that seed want the last column before the block."""
        rows = state.window.rows[part.index]
        first, stop, seeds = state.block_start[rows, None], state.block_end[rows, None], self.seeding[rows]
        column, inside = part.positions, part.positions >= first
        sees = column[:, :, None] >= column[:, None, :]
        sees = sees | inside[:, :, None] & (column < stop)[:, None, :]
        device, branches = query.tokens.device, state.branches
        query.visible = torch.as_tensor(sees, device=device).repeat(branches, 1, 1)
        if query.store is not None:
            assert query.store.slots is not None
            query.store.slots = query.store.slots.masked_fill(
                torch.as_tensor(inside, device=device).repeat(branches, 1), -1
            )
            query.store.visible_length = int(first.max())
        if not seeds.any():
            return
        wanted = query.wanted
        assert wanted is not None  # windows say which columns they want
        last = np.argmax(column == first - 1, 1)
        chosen = torch.as_tensor(seeds[:, None], device=device).repeat(branches, 1)
        last_column = torch.as_tensor(last[:, None], device=device).repeat(branches, 1)
        query.wanted = torch.where(chosen, last_column, wanted)
        available = state.window.positions[torch.as_tensor(part.index, device=device)] == torch.as_tensor(first)
        available = available | ~chosen[: len(rows)]
        if query.window.available is not None:
            available = available & (query.window.available | chosen[: len(rows)])
        query.window.available = available

    def on_commit(self, state: MaskedState, proposal: MaskedProposal, decision: Decision) -> None:
        """Rows that seed write their seed, whatever the method says."""
        self.before = {}
        if not (seeds := self._seeds(state)).any():
            return
        if state.memory.specs:
            read = state.memory.read(proposal.rows, proposal.available.shape[1])
            self.before = {name: value[seeds].clone() for name, value in read.items()}
        own = torch.as_tensor(seeds[:, None], device=proposal.available.device)
        decision.values = torch.where(own, proposal.values, decision.values)
        decision.selected = torch.where(own, proposal.available, decision.selected)
        decision.filled = torch.where(own, proposal.available.to(decision.filled.dtype), decision.filled)
        if decision.hold_block is not None:
            decision.hold_block = decision.hold_block & ~own.squeeze(1)

    def on_close(
        self, state: MaskedState, proposal: MaskedProposal, decision: Decision, tokens: np.ndarray, ends: Ends
    ) -> bool:
        """Forget what the method made of columns that no row of their own answered. The seed is no step of the block's
        schedule."""
        rows = proposal.rows[self._seeds(state)]
        for name, value in self.before.items():
            state.memory.write(name, rows, value)
        state.block_step[rows] = 0
        state.masks_at_open[rows] = state.remaining[rows]
        self.seeding[rows] = False
        return bool(len(rows))

    def _seeds(self, state: MaskedState) -> np.ndarray:
        return np.asarray(self.seeding[state.window.rows])

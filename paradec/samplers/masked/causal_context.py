"""Blocks over causal context (Nemotron-Labs-Diffusion, arXiv 2607.05722).

The first token of a block is its seed. The block's first step makes a causal call over the final tokens that are not
stored yet, stores their keys and values, and predicts the seed from the last of these tokens. The other steps evaluate
only the block, which attends to itself and to the store, and store nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Part
from paradec.caches.table import REFUSED, verdict
from paradec.core.checks import short_repr
from paradec.core.query import WindowQuery
from paradec.core.rows import ROWS
from paradec.request import Request
from paradec.samplers.features.feature import Ends, Feature
from paradec.samplers.features.pipelined_blocks import PipelinedBlocks
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import MaskedProposal, StepDecision


@dataclass
class CausalContext(Feature):
    """Seeds of blocks: the first step of a block decides only its first token."""

    seeding: np.ndarray = field(metadata=ROWS)
    """[B] bool: rows that decide a seed in the next step."""
    memory_before: dict[str, Tensor] = field(default_factory=dict)
    """The sampler's memory of the seeding rows before the commit."""

    why_host_only = "blocks over causal context are seeded on the host"

    @classmethod
    def from_request(cls, sampler: Any, state: MaskedState, early_rules: tuple[Any, ...], request: Request) -> Self:
        """Make the feature. early_rules: stop rules that read logits. Raises ValueError for an unsupported argument."""
        blocks, facts, why = state.blocks, state.facts, None
        if (compatibility := verdict(sampler, state.cache, facts)).status == REFUSED:
            why = f"sampler {sampler.name!r} does not work here: {compatibility.why}"
        elif getattr(blocks, "reads_logits", False):
            why = f"blocks={short_repr(blocks)} read logits of a whole block, which do not exist when it opens"
        elif isinstance(blocks, PipelinedBlocks):
            why = f"blocks={short_repr(blocks)} open a block before the previous one is final"
        elif early_rules:
            why = f"stop={short_repr(request.stop)} reads logits after the open block, and no call computes these"
        elif request.suffix is not None:
            why = f"suffix={short_repr(request.suffix)} omits positions after the block, which no step evaluates anyway"
        if why is not None:
            raise ValueError(f"{facts.name} decodes blocks over causal context, from a seed: {why}")
        return cls(np.zeros(state.batch, bool))

    def on_start(self, state: MaskedState, rows: np.ndarray) -> None:
        start = state.block_start[rows]
        is_masked = state.masks_before[rows, start + 1] > state.masks_before[rows, start]
        self.seeding[rows] = is_masked & (start > 0)  # no token predicts the first position of a text

    def on_query(self, state: MaskedState, part: Part, query: WindowQuery) -> None:
        rows = state.window.rows[part.index]
        first, stop, seeds = state.block_start[rows, None], state.block_end[rows, None], self.seeding[rows]
        positions, in_block = part.positions, part.positions >= first
        visible = positions[:, :, None] >= positions[:, None, :]
        visible = visible | in_block[:, :, None] & (positions < stop)[:, None, :]
        query.visible = state.per_branch(visible)
        if query.store is not None:
            assert query.store.slots is not None
            query.store.slots = query.store.slots.masked_fill(state.per_branch(in_block), -1)
            query.store.visible_length = int(first.max())
        if not seeds.any():
            return
        wanted = query.wanted
        assert wanted is not None  # `build_query` sets it
        last_before = np.argmax(positions == first - 1, 1)
        is_seeding = state.per_branch(seeds[:, None])
        query.wanted = torch.where(is_seeding, state.per_branch(last_before[:, None]), wanted)
        index = torch.as_tensor(part.index, device=wanted.device)
        available = state.window.positions[index] == torch.as_tensor(first)
        available = available | ~is_seeding[: len(rows)]
        if query.window.available is not None:
            available = available & (query.window.available | is_seeding[: len(rows)])
        query.window.available = available

    def on_commit(self, state: MaskedState, proposal: MaskedProposal, decision: StepDecision) -> None:
        """In seeding rows, replace the sampler's selection by the seed."""
        self.memory_before = {}
        if not (seeding := self.seeding[state.window.rows]).any():
            return
        if state.memory.specs:
            memory = state.memory.read(proposal.rows, proposal.available.shape[1])
            self.memory_before = {name: value[seeding].clone() for name, value in memory.items()}
        is_seeding = torch.as_tensor(seeding[:, None], device=proposal.available.device)
        decision.values = torch.where(is_seeding, proposal.values, decision.values)
        decision.selected = torch.where(is_seeding, proposal.available, decision.selected)
        decision.filled = torch.where(is_seeding, proposal.available.to(decision.filled.dtype), decision.filled)
        if decision.hold_block is not None:
            decision.hold_block = decision.hold_block & ~is_seeding.squeeze(1)

    def on_close(
        self, state: MaskedState, proposal: MaskedProposal, decision: StepDecision, tokens: np.ndarray, ends: Ends
    ) -> bool:
        """Restore the memory of seeding rows. Schedules do not count the step that decides the seed."""
        rows = proposal.rows[self.seeding[state.window.rows]]
        for name, value in self.memory_before.items():
            state.memory.write(name, rows, value)
        state.block_step[rows] = 0
        state.masks_at_open[rows] = state.remaining[rows]
        self.seeding[rows] = False
        return bool(len(rows))

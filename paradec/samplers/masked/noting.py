"""What a trace notes of a step of the masked family before its commit (`Sampler.observe`)."""

from __future__ import annotations

from typing import Any

from paradec.core.trace import Notes
from paradec.samplers.masked import reference
from paradec.samplers.masked.commit import view_of
from paradec.samplers.masked.pipeline import open_starts
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.views import MaskedProposal

EARLY = "early stop"
"""Names, in a trace's `rules`, what a stop rule fills at once."""


def complete(sampler: Any, state: MaskedState, proposal: MaskedProposal, notes: Notes) -> Notes:
    """Add the open blocks, and which rule of a combination chooses what."""
    rows, ends = proposal.rows.tolist(), state.block_end[proposal.rows].tolist()
    if proposal.block_end is not None:
        ends = proposal.block_end.tolist()
    notes.blocks = [None] * state.batch
    for row, end in zip(rows, ends, strict=True):
        notes.blocks[row] = (int(state.block_start[row]), end)
    if state.pipelined:
        notes.starts = [
            None if span is None else open_starts(state, row, *span) for row, span in enumerate(notes.blocks)
        ]
    rules: dict[tuple[int, int], str] = {}
    positions = proposal.positions.tolist()
    if sampler.needs.names_rules:
        memory = state.memory.read(proposal.rows, proposal.available.shape[1]) if state.memory.specs else {}
        # a copy of the generator: the commit draws the same numbers
        generator = None if state.generator is None else reference.after(state.generator, proposal.generator_state)
        view = view_of(sampler, state, proposal, memory, generator)
        for (index, column), name in sampler.rules_of(view).items():
            rules[rows[index], positions[index][column]] = name
    if proposal.early is not None:
        for index in proposal.early.nonzero().flatten().tolist():
            rules |= {(rows[index], position): EARLY for position in positions[index]}
    notes.rules = rules or None
    return notes

"""Recording a decoding in a trace, step by step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from paradec.core.family_queries import LatentProposal
from paradec.core.thumbnails import preview_latent
from paradec.core.trace import Span, Trace, to_spans


def record_step(sampler: Any, model: Any, state: Any, trace: Trace) -> Any:
    """Run one step with its commit, and append it to the trace."""
    start = time.perf_counter()
    proposal = sampler.step(model, state)
    notes = sampler.observe(state, proposal) if state.has_notes else None
    commit = sampler.commit(state, proposal)
    commits, pictures = commit.to_list(), None
    seconds = time.perf_counter() - start
    if notes is not None and isinstance(proposal, LatentProposal) and commit.positions is None:
        pictures = preview_latent(commit.values, len(trace.steps))
    forwarded = proposal.cost.forwarded.tolist()
    trace.add(commits, forwarded, commit.kind, notes, seconds, pictures, commit.logprobs_list())
    return commit


def evaluated_spans(queries: Sequence[Any], batch: int) -> list[list[Span]] | None:
    """List the positions of each row that model calls evaluate; None without positions. Waits for the device."""
    positions: list[set[int]] = [set() for _ in range(batch)]
    has_positions = False
    for query in queries:
        columns = getattr(query, "positions", getattr(query, "targets", None))
        if columns is None:
            continue
        has_positions = True
        count = len(query.rows)  # all branches and drafts evaluate the same positions
        valid = getattr(query, "valid", None)
        is_real = np.ones(columns[:count].shape, bool) if valid is None else valid[:count].cpu().numpy()
        for row, row_positions, row_is_real in zip(
            query.rows.tolist(), columns[:count].cpu().numpy(), is_real, strict=True
        ):
            positions[row].update(row_positions[row_is_real].tolist())
    return [to_spans(row_positions) for row_positions in positions] if has_positions else None

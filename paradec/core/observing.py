"""What a trace notes of a step; nothing of it runs where no trace is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from paradec.core.latents import LatentProposal
from paradec.core.thumbnails import of_latent
from paradec.core.trace import Span, Trace


def traced(sampler: Any, model: Callable[..., Tensor], state: Any, trace: Trace) -> Any:
    """One step with its commit, written down."""
    begin = time.perf_counter()
    proposal = sampler.step(model, state)
    notes = sampler.observe(state, proposal) if state.noted else None
    commit = sampler.commit(state, proposal)
    commits, pictures = commit.to_list(), None
    seconds = time.perf_counter() - begin
    if notes is not None and isinstance(proposal, LatentProposal) and commit.positions is None:
        pictures = of_latent(commit.values, len(trace.steps))
    forwarded = proposal.cost.forwarded.tolist()
    trace.add(commits, forwarded, commit.kind, notes, seconds, pictures, commit.logprobs_list())
    return commit


def evaluated(queries: Sequence[Any], batch: int) -> list[list[Span]] | None:
    """The positions of each of `batch` rows that model calls evaluate; None where they have no positions. Waits for the
    device."""
    found: list[list[np.ndarray]] = [[] for _ in range(batch)]
    said = False
    for query in queries:
        positions = getattr(query, "positions", getattr(query, "targets", None))
        if positions is None:
            continue
        said = True
        count = len(query.rows)  # of every branch and draft the same
        at, valid = positions[:count].cpu().numpy(), getattr(query, "valid", None)
        real = np.ones(at.shape, bool) if valid is None else valid[:count].cpu().numpy()
        for row, columns, kept in zip(query.rows.tolist(), at, real, strict=True):
            found[row].append(columns[kept])
    return [_runs(parts) for parts in found] if said else None


def _runs(parts: list[np.ndarray]) -> list[Span]:
    """Runs of neighbours among positions, which may be there several times."""
    at = np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)
    if not len(at):
        return []
    breaks = np.flatnonzero(np.diff(at) != 1)
    first, last = at[np.r_[0, breaks + 1]].tolist(), at[np.r_[breaks, len(at) - 1]].tolist()
    return [(start, stop + 1) for start, stop in zip(first, last, strict=True)]

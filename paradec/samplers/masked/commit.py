"""The stages of a commit beside the method's own, in the order in which `MaskedSampler.commit` runs them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.contract import CanvasState
from paradec.core.protocol import NotFinite
from paradec.core.query import Cost
from paradec.samplers.masked import draws, pipeline, reference, revising
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.stopping import first_end
from paradec.samplers.masked.views import MaskedProposal, View
from paradec.samplers.statistics import top_by_rank


def to_host(**tensors: Tensor | None) -> dict[str, np.ndarray]:
    """The tensors that are not None as numpy arrays under their names, with one transfer for all: the step's one wait
    for the device. The others are as long as the first, or lack its last dimension."""
    found = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            if not tensor.is_cpu:
                return _transferred({name: tensor for name, tensor in tensors.items() if tensor is not None})
            found[name] = tensor.numpy()
    return found


def _transferred(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    first = next(iter(tensors.values()))
    # float64 holds flags, ids and logits exactly
    wide = [
        (tensor if tensor.ndim == first.ndim else tensor.unsqueeze(-1).expand_as(first)).double()
        for tensor in tensors.values()
    ]
    kinds = {torch.bool: bool, torch.int64: np.int64}
    found = {}
    for (name, tensor), array in zip(tensors.items(), torch.stack(wide).cpu().numpy(), strict=True):
        found[name] = array.astype(kinds.get(tensor.dtype, np.float64))
        if tensor.ndim < first.ndim:
            found[name] = found[name][..., 0]
    return found


def check(sampler: Any, state: MaskedState, rows: np.ndarray, confidence: np.ndarray, committed: np.ndarray) -> None:
    """Raise where the model's answer [R, W] is not finite, or too little becomes final: `committed` [R] int64."""
    if not math.isfinite(np.add.reduce(confidence, None)):  # a NaN or infinite logit makes it NaN
        broken = rows[~np.isfinite(confidence).all(1)]
        row = int(broken[0])
        raise NotFinite(
            f"the model returned NaN or infinite logits for row {row} at its step {int(state.row_step[row])}", broken
        )
    needs = sampler.needs
    if needs.may_wait:  # but must have filled the block by its last planned step
        idle = ((committed == 0) & (state.block_step[rows] + 1 >= state.planned_steps(rows))).any()
    else:
        idle = (committed < revising.least(sampler, state, rows)).any() if needs.revises else 0 in committed.tolist()
    if idle:
        raise RuntimeError(f"sampler {sampler.name!r} committed nothing for row {int(rows[committed.argmin()])}")


def remember(sampler: Any, state: MaskedState, proposal: MaskedProposal, view: View, picked: Tensor) -> None:
    """Keep what `process_logits` found under the name of a memory, and what `remember` makes of the selection."""
    kept = {name: value for name, value in proposal.updates.items() if name in state.memory}
    for name, value in {**kept, **sampler.remember(view, picked)}.items():
        state.memory.write(name, proposal.rows, value)


def count(state: MaskedState, rows: np.ndarray, cost: Cost, tokens: np.ndarray, committed: np.ndarray) -> None:
    """Count forwards, the step and what it committed; the cache hears of the window's new `tokens` [R, W]."""
    state.count(cost)
    state.cache.committed(state, tokens)
    state.advance(rows, committed)


def close(sampler: Any, state: MaskedState, proposal: MaskedProposal, decided: dict[str, np.ndarray]) -> None:
    """Close full blocks and the rows that have ended. decided: what `to_host` gave of the step."""
    rows, tokens = proposal.rows, decided["tokens"]
    held, shown = None, tokens
    if sampler.needs.revises:
        held, shown = revising.shown_to_stop_rules(sampler, state, rows, decided)
    ends = first_end(state.stop_rules, state, shown) if state.stop_rules else None
    moved = proposal.block_end is not None
    for tracker in state.trackers:
        moved |= tracker.closing(state, proposal, tokens, ends)
    if "cut" in decided and (decided["cut"] < state.length[rows]).any():
        trim_rows(state, decided["cut"], tokens)
        moved = True
    state.close(rows, ends, held, moved)


def view_of(
    sampler: Any,
    state: CanvasState,
    proposal: MaskedProposal,
    memory: Mapping[str, Tensor],
    generator: torch.Generator | None,
) -> View:
    """What `select` sees of a proposal, with what the method remembers of its rows."""
    draw = functools.partial(sampler.position_noise, state, generator)
    return View(
        scores=torch.where(proposal.available, proposal.scores, -torch.inf),
        candidates=proposal.available,
        tokens=proposal.values,
        positions=proposal.positions,
        quantities=proposal.quantities,
        quota=sampler.quota(state, proposal.rows),
        memory=memory,
        updates=proposal.updates,
        current=proposal.current,
        editable=revising.editable(state, proposal) if sampler.needs.revises else state.nothing,
        top=top_by_rank if generator is None else lambda scores, count: reference.top(state, scores, count),
        draw=draw if generator is None else functools.cache(draw),  # a generator moves on with every reading
        choose=lambda scores, count: draws.choose(sampler, state, scores, count, generator),
        ends=state.ends,
        leading=pipeline.leading_blocks(state, proposal.current) if state.pipelined else None,
    )


def trim_rows(state: MaskedState, cut: np.ndarray, tokens: np.ndarray) -> None:
    """Cut the running rows off at `cut` [R]; the window [R, W] holds `tokens`, and is to be made again."""
    window = state.window
    shorter = cut < state.length[window.rows]
    rows, cut = window.rows[shorter], cut[shorter]
    state.length[rows], state.level = cut, False
    state.end[rows] = np.minimum(state.end[rows], cut)
    state.block_end[rows] = np.minimum(state.block_end[rows], cut)
    left = tokens[shorter] == state.facts.mask_id
    left &= window.host_positions[shorter] < state.block_end[rows, None]
    if window.host_valid is not None:
        left &= window.host_valid[shorter]
    state.remaining[rows] = left.sum(1)
    state.forget_made()
    if state.store is not None:
        for branch in range(state.branches):
            state.store.forget(rows + branch * state.batch, cut)
    column = torch.arange(state.canvas.shape[1], device=state.canvas.device)
    tail = column >= torch.as_tensor(state.length, device=column.device).unsqueeze(1)
    state.canvas.masked_fill_(tail, state.facts.fill_token_id)

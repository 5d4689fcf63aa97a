"""The stages of a commit beside the method's own, in the order in which `MaskedSampler.commit` runs them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.blocks import LONGEST_BLOCK
from paradec.core.contract import CanvasState
from paradec.core.protocol import NotFinite
from paradec.core.query import Cost
from paradec.samplers.features.pipelined_blocks import leading_blocks
from paradec.samplers.masked import draws, reference
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.stopping import first_end
from paradec.samplers.masked.views import Decision, MaskedProposal, Revision, View
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
        raise NotFinite.at_steps(broken, state.row_step[broken])
    needs = sampler.needs
    if needs.may_wait:  # but must have filled the block by its last planned step
        idle = ((committed == 0) & (state.block_step[rows] + 1 >= state.planned_steps(rows))).any()
    else:
        idle = (committed < least(sampler, state, rows)).any() if needs.revises else 0 in committed.tolist()
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


def close(
    sampler: Any, state: MaskedState, proposal: MaskedProposal, decision: Decision, decided: dict[str, np.ndarray]
) -> None:
    """Close full blocks and the rows that have ended. decided: what `to_host` gave of the step."""
    rows, tokens = proposal.rows, decided["tokens"]
    held, shown = None, tokens
    if sampler.needs.revises:
        held, shown = shown_to_stop_rules(sampler, state, rows, decided)
    ends = first_end(state.stop_rules, state, shown) if state.stop_rules else None
    moved = False
    for feature in state.features.values():
        moved |= feature.on_close(state, proposal, decision, tokens, ends)
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
        editable=editable(state, proposal) if sampler.needs.revises else state.nothing,
        top=top_by_rank if generator is None else lambda scores, count: reference.top(state, scores, count),
        draw=draw if generator is None else functools.cache(draw),  # a generator moves on with every reading
        choose=lambda scores, count: draws.choose(sampler, state, scores, count, generator),
        ends=state.ends,
        leading=leading_blocks(state, proposal.current) if "pipelined_blocks" in state.features else None,
    )


def cut_blocks(state: MaskedState, rows: np.ndarray, end: np.ndarray) -> None:
    """End the blocks of `rows` [R], which have just opened, at `end` [R].

    Raises:
        RuntimeError: an end after that of the block.
    """
    if (end > state.block_end[rows]).any():
        raise RuntimeError(f"blocks={state.blocks} cut a block that is longer than what it read")
    shorter = end < state.block_end[rows]
    rows, end = rows[shorter], end[shorter]
    state.block_end[rows] = end
    masks = state.masks_before[rows, end] - state.masks_before[rows, state.block_start[rows]]
    state.masks_at_open[rows] = state.remaining[rows] = masks


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


def editable(state: CanvasState, proposal: MaskedProposal) -> Tensor:
    """[R, W] bool: decided by the method in the open block."""
    window = state.window
    found = (proposal.current != state.facts.mask_id) & ~window.read(state.given)
    if proposal.block_end is not None:
        found = found & (window.positions < proposal.block_end.unsqueeze(1))
    return found if window.valid is None else found & window.valid


def revised(sampler: Any, state: MaskedState, view: View, selected: Tensor) -> Decision:
    """The selection [R, W] bool with what the method takes back; no more than it has steps left to decide again."""
    revision = sampler.revise(view, selected)
    if revision.text is not None:
        return _moved(state, view, revision)
    values, written, filled = view.tokens, selected, selected.long()
    if revision.edit is not None:
        written = written | revision.edit & view.editable
    if revision.remask is not None:
        remask = revision.remask & view.editable
        left = torch.as_tensor(least(sampler, state, state.window.rows), device=remask.device)
        remask = remask & (filled.sum(1) - remask.sum(1) >= left).unsqueeze(1)
        values = values.masked_fill(remask, state.facts.mask_id)
        written, filled = written | remask, filled - remask.long()
    return Decision(values, written, filled, revision.hold_block)


def _moved(state: MaskedState, view: View, revision: Revision) -> Decision:
    """The decision where text moves: what changes at open positions is written."""
    assert revision.text is not None
    mask_id, text = state.facts.mask_id, revision.text
    written = (view.candidates | view.editable) & (text != view.current)
    filled = (view.current == mask_id).long() - (text == mask_id).long()
    return Decision(text, written, filled.masked_fill(~written, 0), revision.hold_block)


def block_width(blocks: Any) -> int:
    """The positions of a block where text moves, which takes blocks of one length."""
    width: int = blocks.length
    return width


def most_steps(sampler: Any, state: MaskedState, rows: np.ndarray) -> np.ndarray:
    """[R] int64: the bound on the steps of the rows' open blocks. Where text moves, it is that of a block of masks."""
    opened = state.masks_at_open[rows]
    bound: np.ndarray = sampler.most_steps(
        np.full_like(opened, block_width(state.blocks)) if sampler.needs.moves else opened
    )
    return bound


def least(sampler: Any, state: MaskedState, rows: np.ndarray) -> np.ndarray:
    """[R] int64: how many positions more than before must be decided after this step, so that the steps left suffice
    for the others; where text moves, the last step fills the block."""
    left: np.ndarray = most_steps(sampler, state, rows) - state.block_step[rows] - 1
    if sampler.needs.moves:
        return np.where(left > 0, -LONGEST_BLOCK, state.remaining[rows])
    return state.remaining[rows] - left


def shown_to_stop_rules(
    sampler: Any, state: MaskedState, rows: np.ndarray, decided: dict[str, np.ndarray]
) -> tuple[np.ndarray | None, np.ndarray]:
    """Which rows [R] hold their block, and the window [R, W] as stop rules see it: what may be taken back ends
    nothing before a step has left it as it is."""
    held = decided.get("hold_block")
    closes = state.remaining[rows] <= 0
    if held is not None:
        held = held & (state.block_step[rows] < most_steps(sampler, state, rows))
        closes = closes & ~held
    open_still = ~closes[:, None] if sampler.needs.ends_with_block else decided["selected"] & ~closes[:, None]
    return held, np.where(open_still, state.facts.mask_id, decided["tokens"])

"""The log-probabilities of a rollout under a model's weights as they are now, with gradients.

A decision is asked for in the state of its step: what was given and what earlier steps wrote is there, everything else
is a mask. So a row has as many states as steps. Of a bidirectional model each is a row of a call. A block-causal model
sees nothing after a block, and a decision depends on the final tokens before its block and on the earlier decisions in
it: all states of all blocks go in one row, of the final tokens and, for each step of a block, a copy of the block with
masks; copies see the final blocks before their own, and themselves (as TraceRL trains, arXiv 2509.06949).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_bool, check_int, check_model, check_number, shown
from paradec.core.query import WindowLogits, WindowQuery
from paradec.core.rollouts import GIVEN, NEVER, Rollout
from paradec.models.base import Model
from paradec.models.gradients import with_gradients
from paradec.samplers.guidance import guided


def replay(
    model: Any,
    rollout: Rollout,
    shrink: int = 1,
    *,
    temperature: float = 1.0,
    batch_size: int = 16,
    one_forward: bool | None = None,
) -> Tensor:
    """The log-probability of every decision of a rollout, in the state of its step.

    Without changes of the weights it is `rollout.logp`. What a rollout names as its `approximation` is another policy,
    which is warned of: correct for it by the ratio with `rollout.logp`. The module is called in evaluation mode;
    `torch.no_grad()` spares the gradients.

    Args:
        model: from `load` or `wrap`: bidirectional or block-causal text models.
        shrink: so many neighbouring steps of a row (of a block, on block-causal models) are replayed as one, in the
            state of the first of them: fewer calls, another distribution.
        temperature: of the softmax, above 0; `rollout.logp_drawn` is at the request's.
        batch_size: states in a call (rows of the rollout in a call, where they are in one forward).
        one_forward: all states of a row in one row of a call: for block-causal models that take masks, and blocks that
            were decoded one after the other. None where that is so; False replays state by state, which is slower.

    Returns:
        [B, C] on the model's device, in float32 at least: NaN where nothing was decided.

    Raises:
        TypeError, ValueError: an argument out of its range, a model or a sampler that has no such states, or a rollout
            of another model.
    """
    check_int("shrink", shrink, low=1)
    check_int("batch_size", batch_size, low=1)
    check_number("temperature", temperature, low=0, open_low=True)
    if one_forward is not None:
        check_bool("one_forward", one_forward)
    check_replayed(model, rollout)
    if not rollout.exact:
        warnings.warn(
            f"the rollout was decoded with {rollout.approximation}, another policy than the model on whole rows: "
            "correct by the ratio of replay to rollout.logp",
            stacklevel=2,
        )
    states = rollout.to(model.device)
    asked = _asked_at(model, states, shrink)
    why = _split(model, states, asked)
    if one_forward and why is not None:
        raise ValueError(f"one_forward=True does not work with {why}")
    together = why is None and one_forward is not False
    scale = float(rollout.settings.get("guidance_scale", 1.0))
    found = torch.full(states.tokens.shape, torch.nan, dtype=_wide(model), device=model.device)
    parts = (_together if together else _apart)(model, states, asked)
    for some in _batches(list(parts), batch_size, model.pads):
        rows, place, chosen = _answer(model, states, some, scale, temperature)
        found = found.index_put((rows, place), chosen.to(found.dtype))
    return found


def check_replayed(model: Any, rollout: Any) -> None:
    """Raise TypeError or ValueError for models and rollouts that have no replay."""
    if not isinstance(rollout, Rollout):
        raise TypeError(f"rollout={shown(rollout)} must be a paradec.Rollout, as generate(..., rollout=True) has it")
    check_model("replay", model, ("text",))
    facts = model.facts
    why = None
    if not isinstance(model, Model):
        why = f"{facts.name}, a model of one's own, of which it cannot be told how it is called with gradients"
    elif facts.topology not in ("bidirectional", "block_causal"):
        kind = facts.topology.replace("_", "-")
        why = f"{facts.name}, which is {kind}: a bidirectional or block-causal model is needed"
    elif model.reads_order:
        why = f"{facts.name}, whose answers depend on the order of what is decided as well"
    elif model.ranks is not None:
        why = f"{facts.name} over several processes (tp_plan), which have no gradients: load it whole"
    elif rollout.writes is not None:
        why = (
            f"sampler {rollout.settings.get('sampler')!r}, which takes back what it has written: rollout.writes has "
            "every write, and rollout.writes_logp its log-probability"
        )
    if why is not None:
        raise ValueError(f"replay does not work with {why}")
    if int(rollout.tokens.max()) >= facts.vocab_size or not (rollout.suppressed == facts.mask_token_id).any(1).all():
        raise ValueError(
            f"rollout is of {rollout.settings.get('model')}, not of {facts.name}: its tokens or its mask are others"
        )


def _wide(model: Any) -> torch.dtype:
    return torch.promote_types(model.dtype, torch.float32)


def _asked_at(model: Any, states: Rollout, shrink: int) -> Tensor:
    """[B, C] int64: the step whose state a decision is asked in; -1 given, -2 never decided."""
    if shrink == 1:
        return states.step_map
    steps = states.step_map.cpu().numpy()
    asked = steps.copy()
    for row, blocks in enumerate(_blocks(model, states).cpu().numpy()):
        for block in np.unique(blocks):
            here = (blocks == block) & (steps[row] >= 0)
            own, which = np.unique(steps[row, here], return_inverse=True)
            asked[row, here] = own[which // shrink * shrink]
    return torch.as_tensor(asked, device=states.tokens.device)


def _blocks(model: Any, states: Rollout) -> Tensor:
    """[B, C] int64: the block of each position; one for all on bidirectional models."""
    positions = torch.arange(states.tokens.shape[1], device=states.tokens.device).expand_as(states.tokens)
    if model.facts.topology != "block_causal":
        return torch.zeros_like(positions)
    found: Tensor = model.facts.block_numbers(positions, states.prompt_length.unsqueeze(1))
    return found


def _split(model: Any, states: Rollout, asked: Tensor) -> str | None:
    """Why the states of a row cannot be one row of a call; None where they can."""
    facts = model.facts
    if facts.topology != "block_causal" or not model.supports_visibility:
        return f"{facts.name}: a block-causal model that takes masks is needed"
    if facts.whole_blocks:
        return f"{facts.name}, which chooses experts for whole blocks of a call"
    for row, blocks in enumerate(_blocks(model, states)):
        own = asked[row] >= 0
        numbers, steps = blocks[own], asked[row][own]  # blocks in ascending order
        latest = torch.cummax(torch.cat((steps.new_full((1,), -1), steps)), 0).values[:-1]
        first = numbers != torch.cat((numbers.new_full((1,), -2), numbers))[:-1]
        begin = torch.where(first, latest, -1).cummax(0).values if len(steps) else steps
        if (steps <= begin).any():
            return "blocks that were open at the same time"
    return None


class _Part(NamedTuple):
    """A row of a call. `Q` columns, `N` decisions."""

    row: int
    tokens: Tensor
    """[Q] int64."""
    given: Tensor
    """[Q] bool."""
    positions: Tensor
    """[Q] int64."""
    wanted: Tensor
    """[N] int64: the columns that say of the decisions."""
    place: Tensor
    """[N] int64: their positions."""
    visible: Tensor | None = None
    """[Q, Q] bool."""


def _apart(model: Any, states: Rollout, asked: Tensor) -> Iterator[_Part]:
    """Each state as a row: on block-causal models up to the end of the last block that it decides in."""
    facts, blocks = model.facts, _blocks(model, states)
    for row in range(len(states)):
        length = int(states.length[row])
        own, tokens, block = asked[row, :length], states.tokens[row, :length], blocks[row, :length]
        for step in own[own >= 0].unique().tolist():
            place = (own == step).nonzero().squeeze(1)
            end = int((block <= block[place[-1]]).sum())
            known = (own != NEVER) & (own < step)
            yield _Part(
                row,
                torch.where(known, tokens, facts.mask_id)[:end],
                own[:end] == GIVEN,
                torch.arange(end, device=tokens.device),
                (place - facts.shift).clamp(min=0),
                place,
            )


def _together(model: Any, states: Rollout, asked: Tensor) -> Iterator[_Part]:
    """All states of a row: its final tokens, then for each rank of a step in its block the blocks that have it, with
    masks."""
    mask, shift, every = model.facts.mask_id, model.facts.shift, _blocks(model, states)
    for row in range(len(states)):
        length = int(states.length[row])
        steps, block, tokens = asked[row, :length], every[row, :length], states.tokens[row, :length]
        if not (steps >= 0).any():
            continue
        own = steps.clone()
        for number in block[steps >= 0].unique():
            here = (block == number) & (steps >= 0)
            own[here] = steps[here].unique(return_inverse=True)[1]
        _, number, sizes = block.unique_consecutive(return_inverse=True, return_counts=True)
        most = torch.full_like(sizes, -1).scatter_reduce(0, number, own.clamp(min=-1), "amax")[number]
        clean = torch.arange(length, device=tokens.device)
        places, copies = [clean], [torch.full_like(clean, -1)]
        for rank in range(int(most.max()) + 1):
            places.append((most >= rank).nonzero().squeeze(1))
            copies.append(torch.full_like(places[-1], rank))
        place, copy = torch.cat(places), torch.cat(copies)
        known = (own[place] != NEVER) & ((copy < 0) | (own[place] < copy))
        of_block = block[place]
        before = of_block[:, None] > of_block
        same = (of_block[:, None] == of_block) & (copy[:, None] == copy)
        # where each position of each copy is; what a shifted model says of a block's first token is left of the block
        column = torch.full((int(copy.max()) + 2, length), -1, device=tokens.device)
        column[copy + 1, place] = torch.arange(len(place), device=tokens.device)
        decided = (own >= 0).nonzero().squeeze(1)
        left = (decided - shift).clamp(min=0)
        in_copy = torch.where(block[left] == block[decided], own[decided] + 1, 0)
        yield _Part(
            row,
            torch.where(known, tokens[place], mask),
            (own == GIVEN)[place],
            place,
            column[in_copy, left],
            decided,
            (before & (copy < 0)) | same,
        )


def _batches(parts: list[_Part], size: int, pads: bool) -> Iterator[list[_Part]]:
    """Parts that share a call, the longest first: of one length where the model does not pad."""
    parts = sorted(parts, key=lambda part: -len(part.tokens))
    while parts:
        end = min(size, len(parts))
        if not pads:
            end = min(end, sum(len(part.tokens) == len(parts[0].tokens) for part in parts))
        yield parts[:end]
        parts = parts[end:]


def _answer(
    model: Any, states: Rollout, parts: list[_Part], scale: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and positions of the parts' decisions [M], and their log-probabilities."""
    mask, count = model.facts.mask_token_id, len(parts)

    def padded(name: str) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence([getattr(part, name) for part in parts], batch_first=True)

    tokens, given, positions, wanted = (padded(name) for name in ("tokens", "given", "positions", "wanted"))
    sizes = torch.tensor([len(part.tokens) for part in parts], device=tokens.device)
    valid = torch.arange(tokens.shape[1], device=tokens.device) < sizes.unsqueeze(1)
    visible = None
    if parts[0].visible is not None:
        visible = torch.zeros((count, *[tokens.shape[1]] * 2), dtype=torch.bool, device=tokens.device)
        for at, part in enumerate(parts):
            assert part.visible is not None
            visible[at, : len(part.tokens), : len(part.tokens)] = part.visible
    rows = torch.tensor([part.row for part in parts], device=tokens.device)
    branches = 1 if scale == 1 else 2
    if branches == 2:
        tokens = torch.cat((tokens, tokens.masked_fill(given, mask)))

    def twice(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or branches == 1 else torch.cat((tensor, tensor))

    everything = twice(positions), twice(wanted)
    assert everything[0] is not None
    query = WindowQuery(
        rows=np.arange(count),
        tokens=tokens,
        positions=everything[0],
        wanted=everything[1],
        valid=None if valid.all() else twice(valid),
        visible=twice(visible),
        branches=branches,
        forwarded=sizes.cpu().numpy(),
        window=WindowLogits(np.arange(count)),
        origin=twice(states.prompt_length[rows].unsqueeze(1)) if model.facts.prompt_aligned else None,
    )
    logits = with_gradients(model, query)
    logits = guided(logits, scale) if branches == 2 else logits.to(_wide(model))
    sources = torch.cat([torch.full_like(part.place, at) for at, part in enumerate(parts)])
    columns = torch.cat([torch.arange(len(part.place), device=tokens.device) for part in parts])
    place, of_rows = torch.cat([part.place for part in parts]), rows[sources]
    chosen = logits[sources, columns]
    out = torch.zeros_like(chosen, dtype=torch.bool).scatter(1, states.suppressed[of_rows], True)
    said = (chosen.masked_fill(out, -torch.inf) / temperature).log_softmax(-1)
    return of_rows, place, said.gather(1, states.tokens[of_rows, place].unsqueeze(1)).squeeze(1)

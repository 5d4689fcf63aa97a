"""Log-probabilities of a rollout under a model's current weights, with gradients.

Each decision is evaluated in the state of its step: the prompt and the tokens of earlier steps, and masks elsewhere.

- Bidirectional models: each state is a row of a call of the model. Causal models: the final tokens are a row.
- Block-causal models: a decision depends only on earlier blocks (with final tokens) and on earlier steps in its block.
  So all states of a row share one row of a call. It has the final tokens, and for each step of a block a copy of the
  block in the step's state. A copy attends to itself and to earlier blocks (TraceRL, arXiv 2509.06949)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_bool, check_int, check_model, check_number, short_repr
from paradec.core.family_queries import CausalQuery
from paradec.core.query import WindowLogits, WindowQuery
from paradec.core.rollouts import FORCED, GIVEN, NEVER, Rollout
from paradec.models.base import Model
from paradec.samplers.distributions import apply_guidance


def replay(
    model: Any,
    rollout: Rollout,
    shrink: int = 1,
    *,
    temperature: float = 1.0,
    batch_size: int = 16,
    one_forward: bool | None = None,
    writes: bool = False,
) -> Tensor:
    """Compute the log-probability of every decision of a rollout, in the state of its step.

    With unchanged weights the result equals `rollout.logp`, unless the rollout was decoded with an approximation. Then
    the policy differs, and a warning is given: correct by the ratio of the result to `rollout.logp`. The module is
    called in evaluation mode.

    Args:
        model: a bidirectional, block-causal or causal text model from `load` or `wrap`.
        shrink: number of consecutive steps that are replayed in the state of the first of them: fewer calls, but
            another distribution. Steps are those of a row, or for block-causal models of a block. 1 for causal models.
        temperature: temperature of the softmax, above 0. (`rollout.logp_drawn` has the request's temperature.)
        batch_size: number of states in a call; with `one_forward`, of rows of the rollout.
        one_forward: whether all states of a row share one row of a call. Possible only for block-causal models that
            accept attention masks, with blocks that were decoded one after the other. None: if possible. False: each
            state is a row, which is slower. Causal models always use one row.
        writes: whether to return every write of samplers that revise, not only the last write at each position.

    Returns:
        [B, C] like `rollout.tokens`, on the model's device, float32 or wider; NaN where nothing was decided. If
        `writes`: one value per write, like `rollout.writes_logp`; NaN for a token that was moved or removed.

    Raises:
        TypeError, ValueError: an argument out of its range, an unsupported model, or a rollout of another model.
    """
    check_int("shrink", shrink, low=1)
    check_int("batch_size", batch_size, low=1)
    check_number("temperature", temperature, low=0, open_low=True)
    check_bool("writes", writes)
    if one_forward is not None:
        check_bool("one_forward", one_forward)
    check_replayed(model, rollout)
    causal = model.facts.topology == "causal"
    if causal and (shrink > 1 or one_forward is False):
        name, value = ("shrink", shrink) if shrink > 1 else ("one_forward", False)
        raise ValueError(f"{name}={value} does not work with {model.facts.name}, which is causal")
    if writes and rollout.writes is None:
        raise ValueError(f"writes=True: sampler {rollout.settings.get('sampler')!r} never revises; leave writes out")
    if not rollout.exact:
        warnings.warn(
            f"the rollout was decoded with {rollout.approximation}, a policy other than the model on whole rows: "
            "correct by the ratio of replay to rollout.logp",
            stacklevel=2,
        )
    states = rollout.to("cpu")
    why = None if causal else _why_not_one_row(model, states)
    if one_forward and why is not None:
        raise ValueError(f"one_forward=True does not work with {why}")
    shares_row = why is None and one_forward is not False
    build_rows = _causal_row if causal else _row_with_copies if shares_row else _row_per_state
    scale, shape = float(rollout.settings.get("guidance_scale", 1.0)), rollout.tokens.shape
    size = len(states.writes) if writes and states.writes is not None else states.tokens.numel()
    logp = torch.full((size,), torch.nan, dtype=_logits_dtype(model), device=model.device)
    parts = [
        part
        for row in range(len(states))
        for part in build_rows(model, states, row, _select_decisions(model, states, row, shrink, writes))
    ]
    for batch in _group_parts(parts, batch_size, model.pads):
        targets, batch_logp = _evaluate_parts(model, states, batch, scale, temperature)
        logp = logp.index_put((targets,), batch_logp.to(logp.dtype))
    return logp if writes else logp.view(shape)


def check_replayed(model: Any, rollout: Any) -> None:
    """Raise TypeError or ValueError for a model or a rollout that replay does not support."""
    if not isinstance(rollout, Rollout):
        raise TypeError(f"rollout={short_repr(rollout)} must be a paradec.Rollout, made by generate(..., rollout=True)")
    check_model("replay", model, ("text",))
    facts = model.facts
    why = None
    if not isinstance(model, Model):
        why = f"{facts.name}, a custom model, which replay cannot call with gradients"
    elif facts.topology not in ("bidirectional", "block_causal", "causal"):
        kind = facts.topology.replace("_", "-")
        why = f"{facts.name}, which is {kind}: a bidirectional, block-causal or causal model is needed"
    elif model.reads_order or model.any_order:
        why = f"{facts.name}, whose logits also depend on the order of decisions"
    if why is not None:
        raise ValueError(f"replay does not work with {why}")
    is_of_other_model = rollout.settings.get("topology", facts.topology) != facts.topology
    if facts.topology == "causal":
        order = rollout.step_map.where(rollout.step_map != NEVER, torch.iinfo(torch.int64).max)
        decided_later = torch.nn.functional.pad(order, (1, 0), value=torch.iinfo(torch.int64).max)[:, :-1] > order
        is_of_other_model |= bool((decided_later & rollout.decided).any())  # not from left to right
    else:
        is_of_other_model |= not bool((rollout.suppressed == facts.mask_token_id).any(1).all())
    if is_of_other_model or int(rollout.tokens.max()) >= facts.vocab_size:
        raise ValueError(
            f"rollout is of {rollout.settings.get('model')}, not of {facts.name}: vocabulary, mask token or topology "
            "differ"
        )


def _logits_dtype(model: Any) -> torch.dtype:
    return torch.promote_types(model.dtype, torch.float32)


class _Decisions(NamedTuple):
    """`N` decisions of a row to evaluate. All fields are [N] int64."""

    step: Tensor
    """The step in whose state a decision is evaluated."""
    positions: Tensor
    token: Tensor
    targets: Tensor
    """Indices of the decisions' log-probabilities in the flat result."""


def _select_decisions(model: Any, states: Rollout, row: int, shrink: int, writes: bool) -> _Decisions:
    if writes and states.writes is not None and states.writes_logp is not None:
        targets = ((states.writes[:, 0] == row) & ~states.writes_logp.isnan()).nonzero().squeeze(1)
        step, positions, token = states.writes[targets, 1:].unbind(1)
    else:
        decided = states.step_map[row] >= 0
        if states.writes is not None:  # tokens that were moved have no probability
            decided &= ~states.logp[row].isnan()
        positions = decided.nonzero().squeeze(1)
        step, token = states.step_map[row, positions], states.tokens[row, positions]
        targets = row * states.tokens.shape[1] + positions
    if shrink > 1:
        step, blocks = step.clone(), _block_numbers(model, states, row)[positions]
        for block in blocks.unique():
            block_steps, step_index = step[blocks == block].unique(return_inverse=True)
            step[blocks == block] = block_steps[step_index // shrink * shrink]
    return _Decisions(step, positions, token, targets)


def _list_writes(states: Rollout, row: int) -> Tensor:
    """Return [N, 3] int64: step, position and token of each of a row's writes, in the order of steps."""
    if states.writes is not None:
        return states.writes[states.writes[:, 0] == row, 1:]
    steps = states.step_map[row]
    positions = (steps >= 0).nonzero().squeeze(1)
    positions = positions[steps[positions].argsort(stable=True)]
    return torch.stack((steps[positions], positions, states.tokens[row, positions]), 1)


def _build_canvases(model: Any, states: Rollout, row: int) -> tuple[Tensor, Tensor]:
    """Return the steps [S] of a row, and tokens [S + 1, L]: the state before each step, and the final state."""
    length, step_map = int(states.length[row]), states.step_map[row]
    positions = (step_map <= FORCED).nonzero().squeeze(1)
    # tokens that were forced before step t belong to its state, so treat them as writes of step t - 1
    forced = torch.stack((FORCED - step_map[positions] - 1, positions, states.tokens[row, positions]), 1)
    writes = torch.cat((_list_writes(states, row), forced))
    writes = writes[writes[:, 0].argsort(stable=True)]
    canvas = states.tokens[row, :length].masked_fill(states.step_map[row, :length] != GIVEN, model.facts.mask_id)
    steps, counts = writes[:, 0].unique_consecutive(return_counts=True)
    canvases = [canvas]
    for _, positions, token in (step_writes.unbind(1) for step_writes in writes.split(counts.tolist())):
        canvases.append(canvases[-1].index_put((positions,), token))
    return steps, torch.stack(canvases)


def _block_numbers(model: Any, states: Rollout, row: int) -> Tensor:
    """Return [C] int64: the block number of each position; all 0 unless the model is block-causal."""
    positions = torch.arange(states.tokens.shape[1])
    if model.facts.topology != "block_causal":
        return torch.zeros_like(positions)
    numbers: Tensor = model.facts.block_numbers(positions[None], states.prompt_length[row, None, None])[0]
    return numbers


def _why_not_one_row(model: Any, states: Rollout) -> str | None:
    """Return why the states of a row cannot share one row of a call; None if they can."""
    facts = model.facts
    if facts.topology != "block_causal" or not model.supports_visibility:
        return f"{facts.name}: a block-causal model that accepts attention masks is needed"
    if facts.whole_blocks:
        return f"{facts.name}, which chooses experts for whole blocks of a call"
    for row in range(len(states)):
        writes, latest = _list_writes(states, row), -1
        blocks = _block_numbers(model, states, row)[writes[:, 1]]
        for block in blocks.unique():
            steps = writes[blocks == block, 0]
            if steps.min() <= latest:
                return "blocks that were open at the same time"
            latest = int(steps.max())
    return None


class _Part(NamedTuple):
    """A row of a call of the model, with `Q` columns and `N` decisions."""

    row: int  # of the rollout
    tokens: Tensor
    """[Q] int64."""
    is_prompt: Tensor
    """[Q] bool."""
    positions: Tensor
    """[Q] int64."""
    columns: Tensor
    """[N] int64: the columns whose logits predict the decisions."""
    decisions: _Decisions
    visible: Tensor | None = None
    """[Q, Q] bool."""

    def without_prompt(self, model: Any) -> _Part:
        """Return the row of the unconditional branch of guidance."""
        if model.facts.topology != "causal":
            return self._replace(tokens=self.tokens.masked_fill(self.is_prompt, model.facts.mask_id))
        start = int(self.is_prompt.sum()) - 1  # keep only the prompt's last id
        tokens = self.tokens[start:]
        return self._replace(tokens=tokens, positions=torch.arange(len(tokens)), columns=self.columns - start)


def _causal_row(model: Any, states: Rollout, row: int, decisions: _Decisions) -> Iterator[_Part]:
    """Yield one row: the final tokens before the last decision."""
    end = int(decisions.positions.max()) if len(decisions.positions) else 0
    if end:
        tokens, is_prompt = states.tokens[row, :end], states.step_map[row, :end] == GIVEN
        yield _Part(row, tokens, is_prompt, torch.arange(end), decisions.positions - 1, decisions)


def _row_per_state(model: Any, states: Rollout, row: int, decisions: _Decisions) -> Iterator[_Part]:
    """Yield a row for each state with decisions. For block-causal models a row ends after the decisions' last block."""
    (steps, canvases), blocks = _build_canvases(model, states, row), _block_numbers(model, states, row)
    for step, canvas in zip(steps.tolist(), canvases, strict=False):
        step_decisions = _Decisions(*(field[decisions.step == step] for field in decisions))
        if len(step_decisions.positions):
            end = int((blocks[: len(canvas)] <= blocks[step_decisions.positions.max()]).sum())
            is_prompt = states.step_map[row, :end] == GIVEN
            yield _Part(
                row,
                canvas[:end],
                is_prompt,
                torch.arange(end),
                (step_decisions.positions - model.facts.shift).clamp(min=0),
                step_decisions,
            )


def _row_with_copies(model: Any, states: Rollout, row: int, decisions: _Decisions) -> Iterator[_Part]:
    """Yield one row for all states: the final tokens, then a copy of the block for each of its steps."""
    if not len(decisions.positions):
        return
    steps, canvases = _build_canvases(model, states, row)
    length = canvases.shape[1]
    block = _block_numbers(model, states, row)[:length]
    # copies: pairs of block and step; copy_index: each decision's copy
    copies, copy_index = torch.stack((block[decisions.positions], decisions.step), 1).unique(dim=0, return_inverse=True)
    copy_positions, tokens, begins = [torch.arange(length)], [canvases[-1]], [0]
    for block_index, step in copies.tolist():
        begins.append(sum(map(len, copy_positions)))
        copy_positions.append((block == block_index).nonzero().squeeze(1))
        tokens.append(canvases[(steps == step).nonzero()[0, 0], copy_positions[-1]])
    positions = torch.cat(copy_positions)
    copy = torch.arange(-1, len(copies)).repeat_interleave(torch.tensor([len(part) for part in copy_positions]))
    column_blocks = block[positions]
    is_earlier = column_blocks[:, None] > column_blocks
    is_same_copy = (column_blocks[:, None] == column_blocks) & (copy[:, None] == copy)
    # a shifted model predicts a block's first token in the column left of the block
    source = (decisions.positions - model.facts.shift).clamp(min=0)
    first = torch.tensor([int(part[0]) for part in copy_positions])[copy_index + 1]
    in_copy = torch.tensor(begins)[copy_index + 1] + source - first
    yield _Part(
        row,
        torch.cat(tokens),
        (states.step_map[row] == GIVEN)[positions],
        positions,
        torch.where(source >= first, in_copy, source),
        decisions,
        (is_earlier & (copy < 0)) | is_same_copy,
    )


def _group_parts(parts: list[_Part], size: int, pads: bool) -> Iterator[list[_Part]]:
    """Group parts into calls, the longest parts first. If the model cannot pad, parts of a call have equal lengths."""
    parts = sorted(parts, key=lambda part: -len(part.tokens))
    while parts:
        end = min(size, len(parts))
        if not pads:
            end = min(end, sum(len(part.tokens) == len(parts[0].tokens) for part in parts))
        yield parts[:end]
        parts = parts[end:]


def _evaluate_parts(
    model: Any, states: Rollout, parts: list[_Part], scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the indices of the parts' M decisions in the flat result, and their log-probabilities, both [M]."""
    count, device, causal = len(parts), model.device, model.facts.topology == "causal"
    branch_parts = parts if scale == 1 else [*parts, *(part.without_prompt(model) for part in parts)]

    def pad_field(name: str) -> Tensor:
        values = [getattr(part, name) for part in branch_parts]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True).to(device)

    tokens = pad_field("tokens")
    sizes = torch.tensor([len(part.tokens) for part in branch_parts])
    valid = torch.arange(tokens.shape[1]) < sizes.unsqueeze(1)
    visible = None
    if parts[0].visible is not None:
        visible = torch.zeros((len(branch_parts), *[tokens.shape[1]] * 2), dtype=torch.bool)
        for index, part in enumerate(branch_parts):
            assert part.visible is not None
            visible[index, : len(part.tokens), : len(part.tokens)] = part.visible
    fields: dict[str, Any] = {
        "rows": np.arange(count),
        "tokens": tokens,
        "positions": pad_field("positions"),
        "wanted": pad_field("columns"),
        "valid": None if valid.all() else valid.to(device),
        "visible": None if visible is None else visible.to(device),
        "branches": len(branch_parts) // count,
        "forwarded": sizes[:count].numpy(),
    }
    origin = None
    if model.facts.prompt_aligned:
        origin = states.prompt_length[[part.row for part in branch_parts]].unsqueeze(1).to(device)
    query: Any = (
        CausalQuery(**fields) if causal else WindowQuery(**fields, window=WindowLogits(np.arange(count)), origin=origin)
    )
    logits = model.evaluate(query)
    logits = apply_guidance(logits, scale) if scale != 1 else logits.to(_logits_dtype(model))
    counts = torch.tensor([len(part.columns) for part in parts])
    sources = torch.arange(count).repeat_interleave(counts)
    columns = torch.cat([torch.arange(size) for size in counts.tolist()])
    chosen = logits[sources.to(device), columns.to(device)]
    suppressed = states.suppressed[[part.row for part in parts]][sources]
    suppressed = torch.where(suppressed < 0, chosen.shape[-1], suppressed).to(device)
    size = (len(chosen), chosen.shape[-1] + 1)  # the last column is for padding of `suppressed`
    is_suppressed = torch.zeros(size, dtype=torch.bool, device=device).scatter(1, suppressed, True)[:, :-1]
    logp = (chosen.masked_fill(is_suppressed, -torch.inf) / temperature).log_softmax(-1)
    token, targets = (
        torch.cat([getattr(part.decisions, name) for part in parts]).to(device) for name in ("token", "targets")
    )
    return targets, logp.gather(1, token.unsqueeze(1)).squeeze(1)

"""Log-probabilities of rollouts, with separate module calls for each row and each state of the canvas."""

import math

import torch
from small_models import MASK, full_mask
from torch import Tensor

from paradec.core.rollouts import Rollout
from paradec.models.adapter import Model


def masked_logp(model: Model, rollout: Rollout, shrink: int = 1, temperature: float = 1.0) -> Tensor:
    """Return the log-probabilities of a masked rollout. Each call replays `shrink` consecutive steps of a block."""
    facts, scale = model.facts, rollout.settings.get("guidance_scale", 1.0)
    logp = torch.full(rollout.tokens.shape, math.nan, dtype=torch.float64)
    for row, length in enumerate(rollout.length.tolist()):
        steps, tokens = rollout.step_map[row, :length].tolist(), rollout.tokens[row, :length]
        blocks = [position // facts.block_length if facts.block_length else 0 for position in range(length)]
        first = list(steps)  # for each position, the first step of its call
        for block in set(blocks):
            block_steps = sorted({step for step, b in zip(steps, blocks, strict=True) if b == block and step >= 0})
            first = [
                block_steps[block_steps.index(step) // shrink * shrink] if b == block and step >= 0 else unchanged
                for step, b, unchanged in zip(steps, blocks, first, strict=True)
            ]
        block_ids = torch.tensor(blocks)
        attention = block_ids[:, None] >= block_ids if facts.block_length else full_mask(length)
        mask = attention.view(1, 1, length, length)
        for step in {step for step in first if step >= 0}:
            decided = torch.tensor([-1 <= earlier < step for earlier in first])
            branches = []
            for is_visible in (decided, decided & (torch.tensor(steps) >= 0)):  # guidance hides the prompt
                ids = torch.where(is_visible, tokens, facts.mask_id)[None]
                with torch.no_grad():
                    branches.append(model.module(ids, attention_mask=mask).logits[0].double())
            logits = branches[0] if scale == 1 else branches[1] + scale * (branches[0] - branches[1])
            logits[:, rollout.suppressed[row]] = -math.inf
            for position in (position for position in range(length) if first[position] == step):
                predicting = max(position - facts.shift, 0)
                logp[row, position] = (logits[predicting] / temperature).log_softmax(-1)[tokens[position]]
    return logp


def writes_logp(model: Model, rollout: Rollout, joined: bool) -> Tensor:
    """Return each write's log-probability given the canvas before its step; if `joined`, before the first write."""
    logp, facts = torch.full((len(rollout.writes),), math.nan, dtype=torch.float64), model.facts
    for row, length in enumerate(rollout.length.tolist()):
        canvas = rollout.tokens[row, :length].masked_fill(rollout.step_map[row, :length] != -1, facts.mask_id)
        block = torch.arange(length) // (facts.block_length or length)
        attention, writes = block[:, None] >= block, (rollout.writes[:, 0] == row).nonzero().squeeze(1)
        logits = None
        for step in sorted({*rollout.writes[writes, 1].tolist()}):
            if logits is None or not joined:
                with torch.no_grad():
                    logits = model.module(canvas[None], attention_mask=attention.view(1, 1, length, length)).logits[0]
                logits[:, rollout.suppressed[row]] = -math.inf
            for index in writes[rollout.writes[writes, 1] == step].tolist():
                position, token = rollout.writes[index, 2:].tolist()
                if not rollout.writes_logp[index].isnan():
                    logp[index] = logits[position].log_softmax(-1)[token]
                canvas[position] = token
    return logp


def causal_logp(model: Model, rollout: Rollout, temperature: float = 1.0) -> torch.Tensor:
    """Return a causal rollout's log-probabilities. The guidance branch of a row starts at its last prompt token."""
    logp, scale = torch.full_like(rollout.logp, torch.nan), rollout.settings.get("guidance_scale", 1.0)
    for row, begin in enumerate(rollout.prompt_length.tolist()):
        tokens = rollout.tokens[row, : begin + int(rollout.decided[row].sum())]
        with torch.no_grad():
            branches = [model.module(ids[None]).logits[0] for ids in (tokens, tokens[begin - 1 :])]
        logits = branches[1][:-1] + scale * (branches[0][begin - 1 : -1] - branches[1][:-1])
        logits[:, [MASK, *rollout.settings.get("suppress_tokens", [])]] = -torch.inf
        chosen = (logits / temperature).log_softmax(-1).gather(1, tokens[begin:, None]).squeeze(1)
        logp[row, begin : len(tokens)] = chosen
    return logp

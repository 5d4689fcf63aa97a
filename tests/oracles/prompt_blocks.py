"""D2F's block-causal decoding after a bidirectional prompt, as a plain loop without a cache."""

from typing import Any

import torch
from torch import Tensor

from paradec.models.adapter import Model

BLOCK = 4


def plain_logits(model: Model, ids: list[int], prompt_length: int) -> Tensor:
    """Return logits [len(ids), vocabulary], whose row i predicts token i.

    The prompt attends to itself. A block of `BLOCK` tokens attends to itself and to everything before it."""
    size = len(ids)
    block = [-1 if i < prompt_length else (i - prompt_length) // BLOCK for i in range(size)]
    mask = torch.tensor([[block[q] >= block[k] for k in range(size)] for q in range(size)])[None, None]
    with torch.no_grad():
        # with a four-dimensional mask the module does not add its causal mask
        logits = model.module(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]
    return torch.cat((logits[:1], logits[:-1])) if model.facts.shift else logits


def plain_loop(
    model: Model, prompt: list[int], max_new_tokens: int, threshold: float, add: float
) -> list[list[tuple[int, int]]]:
    """Return the (position, token) pairs that each forward of D2F's loop commits in one row.

    Each open block commits its positions with a confidence of at least `threshold`. The first block with masks
    commits at least its most confident position. The next block opens when the share `add` of the last open block is
    decided, or when no open block has masks."""
    mask = model.facts.mask_id
    ids = [*prompt, *[mask] * (-(-max_new_tokens // BLOCK) * BLOCK)]
    start, num_open, steps = len(prompt), 1, []

    def masked_positions(block: int) -> list[int]:
        return [i for i in range(start + block * BLOCK, start + (block + 1) * BLOCK) if ids[i] == mask]

    while mask in ids:
        logits = plain_logits(model, ids, start)
        logits[:, mask] = -torch.inf
        confidence, token = logits.softmax(-1).max(-1)
        chosen = {i for block in range(num_open) for i in masked_positions(block) if confidence[i] >= threshold}
        first_masks = next(masked_positions(block) for block in range(num_open) if masked_positions(block))
        if not chosen & set(first_masks):
            chosen.add(max(first_masks, key=lambda i: (float(confidence[i]), -i)))
        steps.append([(i, int(token[i])) for i in sorted(chosen)])
        for i in chosen:
            ids[i] = int(token[i])
        num_decided = BLOCK - len(masked_positions(num_open - 1))
        all_decided = all(not masked_positions(block) for block in range(num_open))
        if start + num_open * BLOCK < len(ids) and (all_decided or num_decided >= add * BLOCK):
            num_open += 1
    return steps


def commits(out: Any, row: int) -> list[list[tuple[int, int]]]:
    """Return the sorted (position, token) pairs of each step of a row's trace, without steps that commit nothing."""
    steps = [sorted(entry[1:3] for entry in step.commits if entry[0] == row) for step in out.trace.steps]
    return [entries for entries in steps if entries]

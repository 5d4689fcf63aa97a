"""Block-causal decoding after a bidirectional prompt, as a plain loop."""

from typing import Any

import torch
from torch import Tensor

from paradec.models.adapter import Model

BLOCK = 4


def plain_logits(model: Model, ids: list[int], prompt: int) -> Tensor:
    """Logits [L, V]; row i predicts token i. The prompt sees the prompt; a block sees itself and everything before."""
    size = len(ids)
    block = [-1 if i < prompt else (i - prompt) // BLOCK for i in range(size)]
    mask = torch.tensor([[block[q] >= block[k] for k in range(size)] for q in range(size)])[None, None]
    with torch.no_grad():
        # the module's attention is causal without a four-dimensional mask
        logits = model.module(input_ids=torch.tensor([ids]), attention_mask=mask, use_cache=False).logits[0]
    return torch.cat((logits[:1], logits[:-1])) if model.facts.shift else logits


def plain_loop(model: Model, prompt: list[int], new: int, threshold: float, add: float) -> list[list[tuple[int, int]]]:
    """D2F's loop for one row: the (position, token) pairs that each forward commits.

    Every open block commits positions above the threshold; the first unfinished block commits at least its best
    position. The next block opens when the share `add` of the last one is decided."""
    mask = model.facts.mask_id
    ids = [*prompt, *[mask] * (-(-new // BLOCK) * BLOCK)]
    first, opened, calls = len(prompt), 1, []

    def cells(block: int) -> list[int]:
        return [i for i in range(first + block * BLOCK, first + (block + 1) * BLOCK) if ids[i] == mask]

    while mask in ids:
        p = plain_logits(model, ids, first)
        p[:, mask] = -torch.inf
        sure, token = p.softmax(-1).max(-1)
        chosen = {i for block in range(opened) for i in cells(block) if sure[i] >= threshold}
        first_masks = next(cells(block) for block in range(opened) if cells(block))
        if not chosen & set(first_masks):
            chosen.add(max(first_masks, key=lambda i: (float(sure[i]), -i)))
        calls.append([(i, int(token[i])) for i in sorted(chosen)])
        for i in chosen:
            ids[i] = int(token[i])
        full = all(not cells(block) for block in range(opened))
        if first + opened * BLOCK < len(ids) and (full or BLOCK - len(cells(opened - 1)) >= add * BLOCK):
            opened += 1
    return calls


def commits(out: Any, row: int) -> list[list[tuple[int, int]]]:
    """The sorted (position, token) pairs of each step of a row's trace, without idle steps."""
    steps = [sorted(entry[1:3] for entry in step.commits if entry[0] == row) for step in out.trace.steps]
    return [entries for entries in steps if entries]

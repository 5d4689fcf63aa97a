"""Causal language models, decoded token by token by plain loops over the module: no store, no batch, no drafts."""

from typing import Any

import torch
from transformers import LlamaForCausalLM

from paradec.models.images.grid import Grid


def greedy(
    module: Any, prompts: list[list[int]], new: int, scale: float = 1.0, negative: list[list[int]] | None = None
) -> list[list[int]]:
    """The likeliest token after each text, `new` times, under guidance of `scale` against a negative prompt."""
    answers = []
    for prompt, other in zip(prompts, prompts if negative is None else negative, strict=True):
        ids: list[int] = []
        for _ in range(new):
            with torch.inference_mode():
                logits = module(torch.tensor([prompt + ids])).logits[0, -1]
                if scale != 1:
                    without = module(torch.tensor([other + ids])).logits[0, -1]
                    logits = without + scale * (logits - without)
            ids.append(int(logits.argmax()))
        answers.append(ids)
    return answers


def zipar_by_hand(module: LlamaForCausalLM, prompt: list[int], grid: Grid, window: int) -> tuple[list[int], int]:
    """Greedy ZipAR with a forward for every token, over what is known at its step; and the number of steps. For one
    layer, whose keys and values follow from the token alone."""
    layout, first = grid.layout.tolist(), len(grid.head)
    known = dict(enumerate(layout[:first]))  # what is evaluated, by offset
    stand_in: dict[int, int] = {}
    done, steps = [0] * grid.height, 0
    while done[-1] < grid.width:
        steps, before, found = steps + 1, list(done), {}
        for row in range(grid.height):
            if row and before[row - 1] < min(window, grid.width):
                break
            if before[row] == grid.width:
                continue
            at = first + row * grid.stride + before[row]
            if row and not before[row]:
                if grid.row_end is not None:
                    known[at - 1] = grid.row_end
                elif before[row - 1] < grid.width:
                    stand_in[at - 1] = known[at - grid.width - 1 + before[row - 1]]
            done[row] += 1
            found[at] = None
        for at in found:
            seen = {offset: token_id for offset, token_id in (stand_in | known).items() if offset < at}
            order = sorted(seen)
            ids = torch.tensor([[*prompt, *(seen[offset] for offset in order)]])
            positions = torch.tensor([[*range(len(prompt)), *(len(prompt) + offset for offset in order)]])
            with torch.inference_mode():
                logits = module(ids, position_ids=positions).logits[0, -1]
            found[at] = max(grid.cells, key=lambda token_id: float(logits[token_id]))
        known |= found
        for row in range(grid.height):
            if done[row] == grid.width and grid.row_end is not None:
                known[first + (row + 1) * grid.stride - 1] = grid.row_end
    return [known.get(offset, token_id) for offset, token_id in enumerate(layout)], steps

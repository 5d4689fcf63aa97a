"""The first step of canvases whose texts are given but for the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core import rng
from paradec.core.facts import HOLE
from paradec.core.family_queries import CanvasQuery
from paradec.core.query import StoreCall
from paradec.samplers.renoising.state import FIRST_STREAM, noise


def first_step(model: Any, rows: Sequence[Sequence[int]], starts: Sequence[int], seeds: int) -> Tensor:
    """Logits of canvases in which given tokens stay where they are, and all other slots hold noise; of rows of which
    each is evaluated with noises of seeds 0, 1, ..., that depend on its prompt alone.

    Args:
        rows: ids, `HOLE` where nothing is given. starts: where the canvas of each begins; its prompt is before it.

    Returns:
        [R, seeds, C, V].
    """
    prompts = list(dict.fromkeys(tuple(row[:start]) for row, start in zip(rows, starts, strict=True)))
    which = torch.tensor([prompts.index(tuple(row[:start])) for row, start in zip(rows, starts, strict=True)])
    longest, device, width = max(map(len, prompts)), model.device, model.facts.block_length
    store = model.make_store(len(prompts), longest)
    model(_encoding(model, prompts), store)

    begin = torch.tensor(starts).repeat_interleave(seeds)
    positions = begin.unsqueeze(1) + torch.arange(width)
    every = [prompt for prompt in prompts for _ in range(seeds)]
    keys = torch.as_tensor(rng.row_keys([*range(seeds)] * len(prompts), every)).view(len(prompts), seeds, 2)
    fresh = noise(keys[which].view(-1, 2), torch.zeros_like(begin), positions, model.facts.vocab_size, FIRST_STREAM)
    given = torch.full((len(rows), width), HOLE)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        given[index, : len(row) - start] = torch.tensor(row[start:])
    given = given.repeat_interleave(seeds, 0)
    at = which.repeat_interleave(seeds).to(device)
    query = CanvasQuery(
        rows=np.arange(len(begin)),
        tokens=torch.where(given == HOLE, fresh, given).to(device),
        positions=positions.to(device),
        store=StoreCall(at, visible_length=int(begin.max()), begin=int(begin.min())),
        forwarded=np.full(len(begin), width),
        kind="canvas",
    )
    logits: Tensor = model(query, store)
    return logits.unflatten(0, (len(rows), seeds))


def _encoding(model: Any, prompts: Sequence[Sequence[int]]) -> CanvasQuery:
    """The call that fills a store with the keys and values of prompts."""
    lengths = np.array([len(prompt) for prompt in prompts])
    column = torch.arange(int(lengths.max()))
    valid = column < torch.as_tensor(lengths).unsqueeze(1)
    tokens = torch.zeros(valid.shape, dtype=torch.int64)
    for index, prompt in enumerate(prompts):
        tokens[index] = prompt[-1]  # padding repeats the last one
        tokens[index, : len(prompt)] = torch.tensor(prompt)
    rows, device = np.arange(len(prompts)), model.device
    slots = torch.where(valid, column, -1).to(device)
    return CanvasQuery(
        rows=rows,
        tokens=tokens.to(device),
        positions=torch.minimum(column, torch.as_tensor(lengths - 1).unsqueeze(1)).to(device),
        wanted=torch.empty((len(prompts), 0), dtype=torch.int64, device=device),
        valid=None if valid.all() else valid.to(device),
        store=StoreCall(torch.arange(len(prompts), device=device), slots, rows, int(lengths.max())),
        forwarded=lengths,
        kind="encode",
    )

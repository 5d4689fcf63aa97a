"""A model call of whole rows of any lengths, for those who read what a model says of given positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paradec.core.query import StoreCall, WindowLogits, WindowQuery


def whole_rows(
    model: Any,
    rows: Sequence[Sequence[int]],
    at: Sequence[Sequence[int]],
    prompts: Sequence[int],
    begin: int = 0,
) -> WindowQuery:
    """One call that evaluates rows of ids, padded on the right, on the model's device.

    Args:
        rows: the ids of each. at: the positions of each whose tokens are to be predicted, padded with any.
        prompts: how many tokens of each are its prompt, for models whose blocks begin after it.
        begin: positions before it are in the row 0 of a store, and are evaluated by none.
    """
    facts, device = model.facts, model.device
    width, most = max(map(len, rows)), max(map(len, at))
    tokens = torch.full((len(rows), width), facts.fill_token_id, dtype=torch.int64)
    valid = torch.zeros(len(rows), width, dtype=torch.bool)
    wanted = torch.zeros(len(rows), most, dtype=torch.int64)
    for index, (row, places) in enumerate(zip(rows, at, strict=True)):
        tokens[index, : len(row)] = torch.tensor(row)
        valid[index, : len(row)] = True
        wanted[index, : len(places)] = torch.tensor(places)
    tokens, valid = tokens[:, begin:], valid[:, begin:]
    shift = 1 if facts.topology == "causal" else facts.shift
    query = WindowQuery(
        rows=np.arange(len(rows)),
        tokens=tokens.to(device),
        positions=torch.arange(begin, width, device=device).expand(len(rows), -1),
        wanted=(wanted - shift - begin).clamp(min=0).to(device),
        valid=None if valid.all() else valid.to(device),
        window=WindowLogits(np.arange(len(rows))),
        origin=torch.tensor(prompts, device=device).unsqueeze(1) if facts.prompt_aligned else None,
        forwarded=np.array([len(row) - begin for row in rows]),
    )
    if begin:
        query.store = StoreCall(torch.zeros(len(rows), dtype=torch.int64, device=device), visible_length=begin)
    return query

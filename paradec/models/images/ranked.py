"""What a model that is asked by masks at positions says in any order: one call of tokens and queries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.core.query import Query, StoreCall
from paradec.models.images.grouped import RankedQuery


def answer(module: Any, query: RankedQuery, store: Any) -> Tensor:
    """Logits [N, W', V + 1] of the wanted positions, guided, each given the tokens of lower rank; -inf for the mask,
    and 0 where nothing is asked. W' is as many as the query's rows have slots.

    A token sees the tokens of its own rank and below, a query those below and itself. Keys and values of tokens are
    written at their ranks.

    Args:
        module: with `embed`, `backbone` and `logits`, as `paradec.models.images.lpd.LPD` has them, and its `config`.
    """
    assert query.wanted is not None and query.store is not None and query.store.index is not None
    blank, rows = module.config.vocab_size, query.store.index
    known = query.tokens != blank
    if query.valid is not None:
        known &= query.valid
    count, asked = int(known.sum(1).max()), query.asked
    front = (~known).int().argsort(dim=1, stable=True)[:, :count]
    wanted = query.wanted[:, : asked.shape[1]]
    columns = torch.cat((front, wanted), 1)
    positions, ranks = query.positions.gather(1, columns), query.ranks.gather(1, columns)
    tokens = torch.cat((query.tokens.gather(1, front), torch.full_like(wanted, blank)), 1)
    real = torch.cat((known.gather(1, front), asked), 1)
    is_token = torch.arange(columns.shape[1], device=columns.device) < count
    visible = is_token & (ranks.unsqueeze(1) < (ranks + is_token).unsqueeze(2))
    visible = visible | torch.eye(len(is_token), dtype=torch.bool, device=columns.device)
    slots = torch.where(real & is_token, ranks, -1)
    index = np.concatenate([rows + branch * (store.rows // query.branches) for branch in range(query.branches)])
    at = torch.as_tensor(index, device=columns.device)
    both = [each.repeat(query.branches, *[1] * (each.ndim - 1)) for each in (tokens, positions, ranks, real, visible)]
    tokens, positions, ranks, real, visible = both
    if query.branches == 2:
        others = tokens[len(rows) :]
        others.masked_fill_(others > blank, blank + 1 + module.config.num_classes)
    call = StoreCall(at, slots.repeat(query.branches, 1), index, query.store.visible_length, step=query.store.step)
    # by rank, since slots are ranks: what is evaluated here is not read from the store
    over = Query(query.rows, tokens, ranks, valid=real, visible=visible, store=call, branches=query.branches)
    cache = store.bind(over)
    mask, _ = store.visible(over)
    hidden = module.backbone(module.embed(tokens, positions), mask, cache)[:, count:]
    logits = module.logits(hidden)
    if query.branches == 2:
        given, without = logits.chunk(2)
        logits = without + query.scale.to(logits.dtype).unsqueeze(-1) * (given - without)
    logits = torch.where(asked.unsqueeze(-1), logits, 0)
    found = pad(logits, (0, 0, 0, query.wanted.shape[1] - wanted.shape[1]))
    return pad(found, (0, 1), value=-torch.inf)

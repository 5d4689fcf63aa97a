"""The model call that evaluates final tokens and a tree of drafts after them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from paradec.core.family_queries import CausalQuery
from paradec.core.query import StoreCall
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.trees import TreeLayout

if TYPE_CHECKING:
    from paradec.caches.store import KeyValueStore


def tree_query(
    state: CausalState,
    store: KeyValueStore | None,
    rows: np.ndarray,
    tree: TreeLayout,
    drafts: Tensor,
    begin: np.ndarray,
    known: int,
    wanted: np.ndarray,
) -> CausalQuery:
    """Evaluate final tokens, which the store takes in, and after them drafts of a tree, which it does not.

    Args:
        rows: [R]. drafts: [R, N] int64, -1 where a node has none.
        begin: [branches, R] int64: the first final token to evaluate, by its position in each branch; the last final
            token is the tree's root.
        known: drafts to evaluate, counted from node 1.
        wanted: [W] int64: nodes whose logits are wanted; the root only where it is evaluated.
    """
    device, branches = state.context.device, state.branches
    committed = (state.committed[rows] + state.shift[:, rows]).reshape(-1)
    fresh = committed - begin.reshape(-1)
    width, count = int(fresh.max()), len(committed)
    # the final tokens end at column `width`, however many a row has
    final = committed[:, None] - width + np.arange(width)
    below = torch.as_tensor(committed[:, None] - 1, device=device)
    below = below + tree.depths[:, 1 : known + 1].to(device).repeat(branches if len(tree.parents) > 1 else 1, 1)
    at_rows = state.every(rows)
    at = torch.as_tensor(at_rows, device=device)
    positions = torch.cat((torch.as_tensor(final, device=device), below), 1).clamp(0, state.context.shape[1] - 1)
    nodes = drafts[:, 1 : known + 1].repeat(branches, 1)
    real_final = final >= begin.reshape(-1, 1)
    end = torch.as_tensor((state.length[rows] + state.shift[:, rows]).reshape(-1, 1), device=device)
    real = torch.cat((torch.as_tensor(real_final, device=device), (below < end) & (nodes >= 0)), 1)
    tokens = torch.cat((state.context[at.unsqueeze(1), positions[:, :width]], nodes.clamp(min=0)), 1)
    trees = tree.ancestors[:, 1 : known + 1, 1 : known + 1].to(device)
    sees = torch.ones((width + known, width + known), dtype=torch.bool, device=device).tril().repeat(len(trees), 1, 1)
    sees[:, width:, width:] = trees
    slots = np.concatenate((np.where(real_final, final, -1), np.full((count, known), -1)), 1)
    return CausalQuery(
        rows=rows,
        tokens=tokens,
        positions=positions,
        wanted=torch.as_tensor(wanted + width - 1, device=device).expand(count, -1),
        valid=real,
        visible=sees.repeat(branches, 1, 1) if len(trees) > 1 else sees.expand(count, -1, -1),
        store=StoreCall(at, torch.as_tensor(slots, device=device), at_rows, int(committed.max()), step=state.commits),
        branches=branches,
        forwarded=fresh[: len(rows)] + known,
        index=np.arange(len(rows)),
        kind="window" if begin.any() else "full",
    )

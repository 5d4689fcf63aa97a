"""LLaDA2.2's choice of experts: a few for each block, of which every position of the block takes its own.

Each expert of a layer has the largest score that any position of the block gives it; the `capacity` best are allowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from paradec.core.query import Query
from paradec.models.calls import ModuleCall, thread
from paradec.models.decoder import Decoder


class BlockRouter(Glm4MoeTopkRouter):
    """A router of Glm4Moe that chooses among experts of whole blocks."""

    capacity: int
    block: int

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, length = hidden_states.shape[:2]
        flat = hidden_states.reshape(-1, self.hidden_dim)
        logits = functional.linear(flat.type(torch.float32), self.weight.type(torch.float32))
        scores = logits.sigmoid()
        choice = scores + self.e_score_correction_bias
        groups, votes = self._groups(rows, length, flat.device)
        cast = choice if votes is None else choice.masked_fill(~votes.view(-1, 1), -torch.inf)
        best = torch.full_like(choice, -torch.inf)
        best.scatter_reduce_(0, groups.view(-1, 1).expand_as(cast), cast, "amax")
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(self.capacity, -1).indices, True)
        chosen = choice.masked_fill(~allowed[groups.view(-1)], -torch.inf).topk(self.top_k, -1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, chosen

    def _groups(self, rows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """[R, Q] int64 below R * Q, one number for each block of each row; and which columns are no padding."""
        call = thread.call
        own = torch.arange(rows, device=device).unsqueeze(1) * length
        if call is None or call.blocks is None:  # a call of the owner's: whole rows from position 0
            return own + torch.arange(length, device=device) // self.block, None
        blocks, valid = call.blocks[0].to(device), call.blocks[1]
        known, valid = blocks, None if valid is None else valid.to(device)
        if valid is not None:
            known = blocks.masked_fill(~valid, torch.iinfo(torch.int64).max)
        # the columns of a call are neighbours or whole rows, so that there are fewer blocks than columns
        return own + (blocks - known.amin(1, keepdim=True)).clamp(0, length - 1), valid


class BlockRouted(Decoder):
    """A decoder whose experts are chosen for whole blocks: calls hold these whole."""

    def __init__(self, module: Any, *others: Any, **named: Any):
        super().__init__(module, *others, **named)
        for part in module.modules():
            if isinstance(part, Glm4MoeTopkRouter):
                part.__class__ = BlockRouter
                part.capacity, part.block = module.config.expert_capacity, self.facts.block_unit

    def _logits(self, query: Query, store: Any, call: ModuleCall) -> Tensor:
        if query.visible is not None:
            raise ValueError(f"{self.facts.name} chooses experts for whole blocks: a call cannot say who sees whom")
        call.blocks = self.facts.block_numbers(query.positions), query.valid
        return super()._logits(query, store, call)

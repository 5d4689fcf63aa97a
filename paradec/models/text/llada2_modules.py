"""LLaDA2 on transformers' Glm4Moe: `query_key_value` becomes three matrices, and LLaDA2.2's routers work by blocks.

This file is imported only for such a checkpoint, since it imports Glm4Moe's code. transformers finds weight
conversions by class name, so a subclass with its own name has those for these files. In LLaDA2.2 an expert's score for
a block is its maximum over the block's positions, and every position chooses among the `capacity` experts with the
best scores for its block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Glm4MoeForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

from paradec.core.query import Query
from paradec.models.decoder import Decoder


class SplitRows(ConversionOps):
    """Conversion that splits a matrix into several, with the row counts of the module's parameters."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str,
        model: Any,
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        (matrices,) = input_dict.values()
        matrix = matrices[0] if isinstance(matrices, list) else matrices
        names = [full_layer_name.replace(target_patterns[0], target) for target in target_patterns]
        rows = [model.get_submodule(name.rpartition(".")[0]).out_features for name in names]
        # copies, since a view would keep the whole matrix in memory
        return {target: part.clone() for target, part in zip(target_patterns, matrix.split(rows), strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        return Concatenate(0)


class LLaDA2MoeReader(Glm4MoeForCausalLM):
    """Glm4Moe under another name, with routers of the loaded dtype (transformers 5.24 reads routers as float32)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._keep_in_fp32_modules_strict = {"e_score_correction_bias"}
        for router in self.modules():
            if isinstance(router, Glm4MoeTopkRouter):
                router.weight = nn.Parameter(router.weight.to(torch.get_default_dtype()))

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers searches the source file of this class for experts; they are in Glm4Moe's file


def register_reader(fused: Mapping[str, tuple[str, ...]]) -> type:
    """Register the conversions of the class that reads the files; return it. fused: as in `Family`."""
    stack = get_checkpoint_conversion_mapping("glm4_moe")
    split = [WeightConverter(matrix, list(parts), [SplitRows()]) for matrix, parts in fused.items()]
    register_checkpoint_conversion_mapping(LLaDA2MoeReader.__name__, [*stack, *split], overwrite=True)
    return LLaDA2MoeReader


class BlockRouter(Glm4MoeTopkRouter):
    """Glm4Moe's router, which first chooses `capacity` experts for each block."""

    capacity: int
    block: int
    blocks: tuple[Tensor, Tensor | None] | None = None
    """[R, Q] int64 and bool: each column's block, and whether it is valid. None: rows begin at 0, without padding."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, length = hidden_states.shape[:2]
        flat = hidden_states.reshape(-1, self.hidden_dim)
        logits = functional.linear(flat.type(torch.float32), self.weight.type(torch.float32))
        scores = logits.sigmoid()
        biased_scores = scores + self.e_score_correction_bias
        groups, valid = self._groups(rows, length, flat.device)
        valid_scores = biased_scores if valid is None else biased_scores.masked_fill(~valid.view(-1, 1), -torch.inf)
        block_scores = torch.full_like(biased_scores, -torch.inf)
        block_scores.scatter_reduce_(0, groups.view(-1, 1).expand_as(valid_scores), valid_scores, "amax")
        candidates = block_scores.topk(self.capacity, -1).indices
        excluded = torch.ones_like(block_scores, dtype=torch.bool).scatter(1, candidates, False)
        biased_scores = biased_scores.masked_fill(excluded[groups.view(-1)], -torch.inf)
        expert_ids = biased_scores.topk(self.top_k, -1, sorted=False).indices
        weights = scores.gather(1, expert_ids)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, expert_ids

    def _groups(self, rows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """[R, Q] int64: numbers below R * Q, equal within a block of a row. [R, Q] bool: valid columns; None: all."""
        row_start = torch.arange(rows, device=device).unsqueeze(1) * length
        if self.blocks is None:
            return row_start + torch.arange(length, device=device) // self.block, None
        blocks, valid = self.blocks[0].to(device), None if self.blocks[1] is None else self.blocks[1].to(device)
        valid_blocks = blocks if valid is None else blocks.masked_fill(~valid, torch.iinfo(torch.int64).max)
        # a row's valid columns are consecutive positions, so they are in at most as many blocks as there are columns
        return row_start + (blocks - valid_blocks.amin(1, keepdim=True)).clamp(0, length - 1), valid


class BlockRoutedDecoder(Decoder):
    """A decoder with `BlockRouter`s; a call must have complete blocks."""

    def __init__(self, module: Any, *args: Any, **kwargs: Any):
        super().__init__(module, *args, **kwargs)
        self._routers = [child for child in module.modules() if isinstance(child, Glm4MoeTopkRouter)]
        for router in self._routers:
            router.__class__ = BlockRouter
            router.capacity, router.block = module.config.expert_capacity, self.facts.block_unit

    def _logits(self, query: Query, store: Any) -> Tensor:
        if query.visible is not None:
            raise ValueError(f"{self.facts.name} chooses experts for whole blocks: a query cannot set `visible`")
        blocks = self.facts.block_numbers(query.positions), query.valid
        try:
            for router in self._routers:
                router.blocks = blocks
            return super()._logits(query, store)
        finally:
            for router in self._routers:
                router.blocks = None

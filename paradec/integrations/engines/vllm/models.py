"""Subclasses of vLLM's model classes for the checkpoints, with the model state of this package.

LLaDA2's published weight names are converted to vLLM's. The logits of Fast-dLLM v2 are shifted by one position, so
`LeftShift` moves its hidden states to the predicted positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.glm4_moe import Glm4MoeForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from paradec.integrations.engines.vllm.sampler import LeftShift
from paradec.models.checkpoint import rename_weight
from paradec.models.text.llada2 import FUSED, KEY_MAPPING


class _BlockModel:
    """Base of the four model classes."""

    @staticmethod
    def get_model_state_cls() -> Any:
        """Return the model state class; vLLM calls this once the model is loaded."""
        from paradec.integrations.engines.vllm.model_state import BlockModelState

        return BlockModelState


class SDAR(_BlockModel, Qwen3ForCausalLM):
    """SDAR and TraDo."""


class SDARMoe(_BlockModel, Qwen3MoeForCausalLM):
    """SDAR's mixtures of experts."""


class LLaDA2(_BlockModel, Glm4MoeForCausalLM):
    """LLaDA2.0 and 2.1."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the published weights. Their names differ from vLLM's, and queries, keys and values share a matrix."""
        config: Any = self.config
        width = config.head_dim
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        loaded: set[str] = super().load_weights(_rename_to_glm(weights, [count * width for count in heads]))
        return loaded


def _rename_to_glm(weights: Iterable[tuple[str, Tensor]], rows: list[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield LLaDA2's weights with Glm4Moe's names. rows: matrix rows of the queries, the keys and the values."""
    for published, tensor in weights:
        name = rename_weight(published, KEY_MAPPING)
        for fused, parts in FUSED.items():
            if name.endswith(fused):
                for part, piece in zip(parts, tensor.split(rows), strict=True):
                    yield name.removesuffix(fused) + part, piece
                break
        else:
            yield name, tensor


class FastDLLM(_BlockModel, Qwen2ForCausalLM):
    """Fast-dLLM v2."""

    def __init__(self, *, vllm_config: Any, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.shift: LeftShift | None = None

    def make_shift(self, requests: int, tokens: int, device: torch.device) -> None:
        """Create `shift` for at most `requests` requests and `tokens` tokens of a batch, after loading."""
        config: Any = self.config
        dtype = next(self.parameters()).dtype
        self.shift = LeftShift(requests, tokens, config.hidden_size, dtype, device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute hidden states [N, D]. Those of a position come from its left neighbour, once `shift` exists."""
        hidden = super().forward(*args, **kwargs)
        return hidden if self.shift is None else self.shift(hidden)

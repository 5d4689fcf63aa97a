"""Runs of the pipelines of diffusers with one of our schedulers."""

from __future__ import annotations

from typing import Any

from tiny_models import END, MASK
from torch import Tensor

from paradec import schedulers
from paradec.integrations.diffusers.hooks.block_cache import BlockCausalModule

TEXT = [
    getattr(schedulers, name)
    for name in schedulers.__all__
    if issubclass(getattr(schedulers, name), schedulers.BlockScheduler) and name != "BlockScheduler"
]
BLOCK = 4


class BlockCausal(BlockCausalModule):
    """A Llama that sees whole blocks up to its own, as LLaDA2's model does, and counts its calls."""

    calls = 0

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = False,
    ) -> Any:
        self.calls += 1
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, use_cache)


def run(pipe: Any, ids: Tensor, **arguments: Any) -> Tensor:
    defaults = {"gen_length": 10, "num_inference_steps": 2, "mask_token_id": MASK, "eos_token_id": END}
    settings = {**defaults, "output_type": "seq", "eos_early_stop": False, **arguments}
    return pipe(input_ids=ids, **settings).sequences

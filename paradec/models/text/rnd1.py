"""RND1 checkpoints (radicalnumerics/RND1-Base-0910) on transformers' Qwen3Moe: Qwen3-30B-A3B after further training
as a masked diffusion model. Bidirectional; logits row i - 1 predicts token i. https://www.radicalnumerics.ai/assets/rnd1_report.pdf"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradec.models.family import Family
from paradec.models.text.qwen import qwen3_moe_config


def rnd1_config(config: Mapping[str, Any]) -> Any:
    """As `qwen3_moe_config`. The published configuration class writes `rope_scaling: false` for no scaling."""
    return qwen3_moe_config({**config, "rope_scaling": config.get("rope_scaling") or None})


FAMILY = Family(
    module="Qwen3MoeForCausalLM", config=rnd1_config, prediction="shifted", qwen2_tokenizer=True, experts=True
)

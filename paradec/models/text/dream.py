"""Dream checkpoints (Dream-org/Dream-v0-7B, Dream-Coder, apple/DiffuCoder-7B and kin) on transformers' Qwen2.

Same blocks and names as Qwen2.5, without a causal mask; logits row i - 1 predicts token i. Ye et al., "Dream 7B",
arXiv 2508.15487.
"""

from __future__ import annotations

from paradec.models.family import Family
from paradec.models.text.qwen import qwen2_config

FAMILY = Family(
    module="Qwen2ForCausalLM",
    config=qwen2_config,
    prediction="shifted",
    qwen2_tokenizer=True,
)

"""Dream (Dream-org/Dream-v0-7B, Dream-Coder, apple/DiffuCoder-7B, ...) and Fast-dLLM v2 checkpoints on transformers'
Qwen2. Dream has Qwen2.5's blocks and names, without a causal mask; logits row i - 1 predicts token i. Ye et al., "Dream
7B", arXiv 2508.15487."""

from __future__ import annotations

from paradec.models.family import Family
from paradec.models.text.qwen import qwen2_config

FAMILY = Family(module="Qwen2ForCausalLM", config=qwen2_config, prediction="shifted", qwen2_tokenizer=True)
FAST_DLLM_V2 = Family(
    module="Qwen2ForCausalLM",
    config=qwen2_config,
    prediction="shifted",
    block_name="bd_size",
    mask_token="|<MASK>|",
    qwen2_tokenizer=True,
)
"""Fast-dLLM v2 (Efficient-Large-Model/Fast_dLLM_v2_1.5B and _7B; Wu et al., arXiv 2509.26328): Qwen2.5's blocks and
names; logits row i - 1 predicts token i; block-causal over blocks of 32 counted from position 0. The public `generate`
always sets a block's first token to its argmax; paradec decides it like other tokens. `block_length=8` gives the
public code's inner blocks."""

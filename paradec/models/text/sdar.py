"""SDAR and TraDo (JetLM/SDAR-8B-Chat, Gen-Verse/TraDo-8B-Instruct, ...) on transformers' Qwen3, and SDAR's mixtures of
experts (JetLM/SDAR-30B-A3B-Chat, ...) on Qwen3Moe.

Cheng et al., "SDAR", arXiv 2510.06303; Wang et al. (TraDo), arXiv 2509.06949. Block-causal over blocks counted from
position 0, so a prompt's last block may contain the first undecided positions. The answer's last block is decoded
completely, then truncated. Logits row i predicts token i."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paradec.models.family import Family
from paradec.models.text.qwen import qwen3_config, qwen3_moe_config

PUBLISHED = re.compile(r"(?:SDAR-[\d.]+B(?:-A[\d.]+B)?-(?:Chat(?:-b(\d+))?|Sci)|TraDo-[\d.]+B-Instruct)")
"""Published names, since config.json may not state the block length: `-b16` means 16, no number means 4."""

BLOCK_NAME = "block_size"
I_DLM = re.compile(r"\bI-DLM\b|^IDLM", re.IGNORECASE)
"""Names of I-DLM's checkpoints (arXiv 2604.11035), whose config.json has SDAR's model_type."""
ARGUMENT_BLOCK = "block_length"
"""The field in which `load` stores its argument `block_length`; no published config.json has it."""
MIN_BLOCK = 4
"""The smallest block length of a published SDAR; I-DLM's config.json states 1 to 3."""


def is_i_dlm(config: Mapping[str, Any], source: str) -> bool:
    """Whether a checkpoint of SDAR's model_type is I-DLM's, by its names or its block length."""
    block_length = config.get(BLOCK_NAME)
    is_short = isinstance(block_length, int) and 0 < block_length < MIN_BLOCK and config.get(ARGUMENT_BLOCK) is None
    architectures = config.get("architectures")
    architecture_names = [*architectures] if isinstance(architectures, list) else []
    names = (os.path.basename(source.rstrip("/")), config.get("_name_or_path"), *architecture_names)
    return is_short or any(I_DLM.search(name) for name in names if isinstance(name, str))


FAMILY = Family(
    module="Qwen3ForCausalLM",
    config=qwen3_config,
    prediction="same",
    block_name=BLOCK_NAME,
    published_names=PUBLISHED,
    published_block=4,
    mask_token="<|MASK|>",
    qwen2_tokenizer=True,
)
FAMILY_MOE = replace(FAMILY, module="Qwen3MoeForCausalLM", config=qwen3_moe_config, experts=True)

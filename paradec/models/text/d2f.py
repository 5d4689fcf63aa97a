"""D2F checkpoints (SJTU-Deng-Lab/D2F_Dream_Base_7B_Lora, D2F_LLaDA_Instruct_8B_Lora and kin): LoRA adapters over Dream
and LLaDA that were trained with other attention.

The prompt is one block, which sees itself; the answer is cut into blocks from the prompt's end, each of which sees the
prompt, the blocks before it and itself. Nothing in the files says so. Blocks had 16 positions in the training; the
published scripts decode with 32, 48 and 64, so that the length is a choice. Wang et al., "Diffusion LLMs can do
faster-than-AR inference via discrete diffusion forcing", arXiv 2508.09192.
"""

from __future__ import annotations

import os
import re

PUBLISHED = re.compile(r"D2F_(?:Dream|LLaDA)_\w+_Lora")
"""How its adapters are named."""
BLOCK_LENGTH = 32
"""What most of the published scripts decode with."""
STATED = "prompt_block_length"
"""The field of config.json that `save_pretrained` states the block in: no published file has one."""


def is_published(source: str | None) -> bool:
    """Whether an adapter is D2F's, by its published name."""
    return source is not None and PUBLISHED.fullmatch(os.path.basename(source.rstrip("/"))) is not None

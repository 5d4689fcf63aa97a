"""From what users type (text, chat messages, ids, padded batches) to rows of ids."""

from paradec.core.prompts.encode import encode, ids_of
from paradec.core.prompts.masks import check_placeholder
from paradec.core.prompts.rows import Prompts, check_rows, right_aligned

__all__ = ["Prompts", "check_placeholder", "check_rows", "encode", "ids_of", "right_aligned"]

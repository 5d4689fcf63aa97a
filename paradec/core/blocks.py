"""Protocol of block policies; `paradec.samplers.masked.blocks` has the policies."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor


class BlockPolicy(Protocol):
    """Policy that cuts a sequence into blocks. With `reads_logits`, `open` returns the range to read, the block's first
    step proposes tokens for the whole range, and `cut` returns the block's length. No token after the block is
    committed. A block always includes the first position that may be committed. An optional `for_model(model)` returns
    the policy for a model."""

    reads_logits: ClassVar[bool] = False

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        """End (exclusive) of the block, or of the range to read, from `start`. All arrays: [R] int64 positions."""
        ...

    def count(self, prompt_length: int, length: int) -> int | None:
        """Number of blocks of a row; None if unknown in advance."""
        ...

    def cut(self, opening: Any) -> Tensor:
        """[R] int64: lengths of the blocks, from the first position of the range to read, for `reads_logits`."""
        raise TypeError(f"{type(self).__name__} reads no logits")

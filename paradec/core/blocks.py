"""Protocol of block policies; `paradec.samplers.masked.blocks` has the policies."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor


class BlockPolicy(Protocol):
    """Policy that cuts a sequence into blocks. A block always includes the first position that may be committed.

    With `reads_logits`, `open` returns the end of a range, the block's first step proposes tokens for the whole range,
    and `cut` then returns the block's length. Tokens beyond the block are not committed.
    An optional method `for_model(model)` returns the policy for a model."""

    reads_logits: ClassVar[bool] = False

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        """Return the end (exclusive) of the block at `start`, or of the range to read. All arrays: [R] int64."""
        ...

    def count(self, prompt_length: int, length: int) -> int | None:
        """Return the number of blocks of a row; None if unknown in advance."""
        ...

    def cut(self, opening: Any) -> Tensor:
        """Return the blocks' lengths [R] int64, from the first position of the range to read."""
        raise TypeError(f"{type(self).__name__} reads no logits")

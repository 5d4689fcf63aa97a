"""What a block policy is: how a sequence is cut into blocks. `paradec.samplers.masked.blocks` has the policies."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor


class BlockPolicy(Protocol):
    """Says where the next block of each row ends.

    A policy that decides from the model's prediction sets `reads_logits`. Then `open` says how far it wants to read,
    the step that opens a block proposes tokens for all of that, and `cut` says how much of it is the block; nothing
    beyond is committed. That step is the block's first one: reading costs no forward of its own. A block always reaches
    the first position that may be committed. A policy may also have `for_model(model)`, which returns the policy to use
    with that model.
    """

    reads_logits: ClassVar[bool] = False

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        """End (exclusive) of the block that begins at `start`, or of what is read. All arrays: [R] int64 positions."""
        ...

    def count(self, prompt_length: int, length: int) -> int | None:
        """How many blocks a row will have; None when only decoding shows."""
        ...

    def cut(self, opening: Any) -> Tensor:
        """[R] int64: lengths of the blocks that begin at the opening's column 0; only for `reads_logits`."""
        raise TypeError(f"{type(self).__name__} reads no logits")

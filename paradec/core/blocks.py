"""How a sequence is cut into blocks: a value given to `generate`, separate from the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from torch import Tensor

from paradec.core.checks import LARGEST_INT, check_choice, check_int

LONGEST_BLOCK = LARGEST_INT


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

    def cut(self, opening: Opening) -> Tensor:
        """[R] int64: lengths of the blocks that begin at the opening's column 0; only for `reads_logits`."""
        raise TypeError(f"{type(self).__name__} reads no logits")


@dataclass
class Opening:
    """What a policy with `reads_logits` sees of rows that open a block.

    Shapes: `R` rows, `W` positions from the start of each row's block on (the widest row's; see `available`).
    """

    tokens: Tensor
    """[R, W] int64: candidate tokens."""
    confidence: Tensor
    """[R, W] float64: their probabilities."""
    available: Tensor
    """[R, W] bool: undecided, evaluated this step, and no padding."""
    start: np.ndarray
    prompt_length: np.ndarray
    length: np.ndarray
    """[R] int64 on the host: where the block starts, the prompt ends and the row ends."""


@dataclass(frozen=True)
class FixedBlocks(BlockPolicy):
    """Blocks of one length, decoded left to right (LLaDA, arXiv 2502.09992, "semi-autoregressive remasking").

    Args:
        length: positions per block, at least 1; the last block of a row may be shorter.
        align: "prompt" counts blocks from the end of the prompt (LLaDA), "absolute" from position 0 (SDAR, LLaDA2), so
            that the first block may begin inside the prompt's last one.
    """

    length: int
    align: str = "prompt"

    def __post_init__(self) -> None:
        check_int("length", self.length, low=1, high=LONGEST_BLOCK)
        check_choice("align", self.align, ("prompt", "absolute"))

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        if self.align == "absolute":
            return np.minimum((start // self.length + 1) * self.length, length)
        return np.minimum(start + self.length, length)

    def count(self, prompt_length: int, length: int) -> int:
        first = prompt_length // self.length * self.length if self.align == "absolute" else prompt_length
        return -(-(length - first) // self.length)


@dataclass(frozen=True)
class WholeCanvas(BlockPolicy):
    """One block that holds everything after the prompt (Dream)."""

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        return length.copy()

    def count(self, prompt_length: int, length: int) -> int:
        return 1

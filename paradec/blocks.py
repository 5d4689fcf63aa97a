"""How a sequence is cut into blocks: a value given to `generate`, separate from the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paradec.checks import check_choice, check_int


class BlockPolicy(Protocol):
    """Says where the next block of each row ends."""

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        """End (exclusive) of the block that begins at `start`. All arrays: [R] int64 positions."""
        ...

    def count(self, prompt_length: int, length: int) -> int:
        """How many blocks a row will have."""
        ...


@dataclass(frozen=True)
class FixedBlocks:
    """Blocks of one length, decoded left to right (LLaDA, arXiv 2502.09992, "semi-autoregressive remasking").

    Args:
        length: positions per block, at least 1; the last block of a row may be shorter.
        align: "prompt" counts blocks from the end of the prompt (LLaDA), "absolute" from position 0 (SDAR, LLaDA2), so
            that the first block may begin inside the prompt's last one.
    """

    length: int
    align: str = "prompt"

    def __post_init__(self) -> None:
        check_int("length", self.length, low=1, high=2**31 - 1)
        check_choice("align", self.align, ("prompt", "absolute"))

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        if self.align == "absolute":
            return np.minimum((start // self.length + 1) * self.length, length)
        return np.minimum(start + self.length, length)

    def count(self, prompt_length: int, length: int) -> int:
        first = prompt_length // self.length * self.length if self.align == "absolute" else prompt_length
        return -(-(length - first) // self.length)


@dataclass(frozen=True)
class WholeCanvas:
    """One block that holds everything after the prompt (Dream)."""

    def open(self, start: np.ndarray, prompt_length: np.ndarray, length: np.ndarray) -> np.ndarray:
        return length.copy()

    def count(self, prompt_length: int, length: int) -> int:
        return 1

"""AdaBlock: the threshold rule over semantic blocks (AdaBlock-dLLM, arXiv 2509.26432, and its generate_adablock.py)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paradec.core.checks import check_at_most, check_int, check_number
from paradec.samplers.features.adaptive_blocks import AdaptiveBlocks
from paradec.samplers.masked.blocks import LONGEST_BLOCK
from paradec.samplers.masked.loop import MaskedSampler, View


@dataclass(frozen=True)
class AdaBlock(MaskedSampler):
    """Commit as `threshold` does, but in blocks of `paradec.AdaptiveBlocks`. These blocks are the paper's contribution.

    A request's `block_length` replaces `init_block_length`, and a request's `blocks` replaces these blocks. Each row of
    a batch has its own blocks (the public code decodes one row).

    Args:
        threshold: probability that a token must reach, in [0, 1]; 1 commits hardly more than one token per step.
        init_block_length, delimiter_threshold, delimiters, delimiter_match, window, min_block_length: the settings of
            `AdaptiveBlocks`. The defaults are the paper's values for LLaDA. Preset "dream" has those for Dream.
    """

    threshold: float = 0.9
    init_block_length: int = 32
    delimiter_threshold: float = 0.3
    delimiters: tuple[str | int, ...] = ("\n",)
    delimiter_match: str = "exact"
    window: float = 0.25
    min_block_length: int = 1

    name = "adablock"
    paper = "AdaBlock-dLLM"
    arxiv = "2509.26432"
    summary = "the threshold rule, in blocks that end where a delimiter is predicted"
    sweep = ({"threshold": 0.7}, {"threshold": 0.5})
    presets = {
        "llada": {"delimiter_threshold": 0.3, "delimiter_match": "exact"},
        "dream": {"delimiter_threshold": 0.5, "delimiter_match": "ends"},
    }

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)
        check_int("init_block_length", self.init_block_length, low=1, high=LONGEST_BLOCK)
        check_int("min_block_length", self.min_block_length, low=1)
        check_at_most("min_block_length", self.min_block_length, "init_block_length", self.init_block_length)
        object.__setattr__(self, "delimiters", self.blocks().delimiters)

    def blocks(self, block_length: int | None = None) -> AdaptiveBlocks:
        length = self.init_block_length if block_length is None else block_length
        return AdaptiveBlocks(
            length=length,
            delimiter_threshold=self.delimiter_threshold,
            delimiters=self.delimiters,
            delimiter_match=self.delimiter_match,
            window=self.window,
            min_length=min(self.min_block_length, length),
        )

    def select(self, view: View) -> Tensor:
        return (view.scores >= self.threshold) | view.best()

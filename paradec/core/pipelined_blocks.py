"""Fixed blocks of which several are open at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paradec.core.blocks import LONGEST_BLOCK, FixedBlocks
from paradec.core.checks import check_choice, check_int, check_number


@dataclass(frozen=True)
class PipelinedBlocks(FixedBlocks):
    """Fixed blocks of which several are open at once: the next one is added before the last one is full.

    "D2F", arXiv 2508.09192; "d3LLM", arXiv 2601.07568, and the public code of both. What a step may commit are the
    undecided positions of all open blocks. Before a step the next block is added where at least `add` of the last one's
    positions are decided: one a step, and none after an end of the text. The sampler's rule sees all open blocks
    together; the token that it commits in any case is the best one of the first block that is not full, not of all.

    Works with the samplers that need no schedule over steps and take nothing back, on all models, with the usual block
    caches, and with `delayed`, which is made for it. `PipelinedBlocks(n, add=1, full=1)` is `FixedBlocks(n)`.

    Args:
        length: positions per block, as for `FixedBlocks`.
        align: "model" counts blocks from where the model's begin: position 0 for block-causal models, else the end of
            the prompt. "prompt" and "absolute" as for `FixedBlocks`.
        add: share of the last open block's positions that must be decided for the next block, in [0, 1]. The published
            scripts have 0.1 (d3LLM) and 0.1 to 0.7 (D2F); their code's default is 0.5.
        full: share of a block's positions, in [0, 1], from which on the block after it is fully active; the first open
            block always is. 0.95 in the published scripts. With `forced="first"` nothing depends on it.
        forced: which blocks commit at least one token in every step: "first" the first open one (d3LLM), "active" every
            fully active one that is not full (D2F). Blocks that were merely added commit what the rule passes.

    What was given within a block (holes) counts neither as decided nor as undecided. d3LLM's code for LLaDA also
    commits the surest position of all open blocks whatever its score; here no rule does that across blocks.
    """

    align: str = "model"
    add: float = 0.1
    full: float = 0.95
    forced: str = "first"

    def __post_init__(self) -> None:
        check_int("length", self.length, low=1, high=LONGEST_BLOCK)
        check_choice("align", self.align, ("model", "prompt", "absolute"))
        check_number("add", self.add, low=0, high=1)
        check_number("full", self.full, low=0, high=1)
        check_choice("forced", self.forced, ("first", "active"))

    def for_model(self, model: Any) -> PipelinedBlocks:
        """The policy with its blocks counted from where the model's are."""
        own = model.facts.block_align if model.facts.topology == "block_causal" else "prompt"
        return replace(self, align=own) if self.align == "model" else self

"""Every block policy by its name."""

from __future__ import annotations

from paradec.core.adaptive_blocks import AdaptiveBlocks
from paradec.core.blocks import FixedBlocks, WholeCanvas
from paradec.core.pipelined_blocks import PipelinedBlocks

POLICIES = {
    "fixed": FixedBlocks,
    "whole": WholeCanvas,
    "adaptive": AdaptiveBlocks,
    "pipelined": PipelinedBlocks,
}
"""Names of policies, for `blocks="adaptive"` and the command line."""

"""Token editing (LLaDA2.1, arXiv 2602.08676: mask-to-token and token-to-token thresholds), as in diffusers'
LLaDA2Pipeline and dllm's LLaDA2.1 sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.samplers.masked.loop import MaskedSampler, Needs, Revision, View
from paradec.samplers.masked.rules.threshold import select_at_least


@dataclass(frozen=True)
class Editing(MaskedSampler):
    """Per row and step, commit every masked position of the block with confidence > threshold, and always the best one.
    Also replace each decided token (prompt tokens excepted) if the position's candidate is a different token with
    confidence > editing_threshold. When no mask is left, steps continue in the block until a step edits nothing.

    Args:
        threshold: confidence above which a mask is filled (mask to token), in [0, 1].
        editing_threshold: confidence above which a token is replaced (token to token), in [0, 1]; 1 edits nothing and
            needs no extra step. (diffusers turns editing off with 0; here 0 replaces every token that is not the best.)
        max_post_steps: maximum number of a block's steps after its last mask is filled.
        least: a step fills at least this many masks, the best ones; at least 1 (the code's `num_to_transfer`).
        end: "step" ends a row at an end token once a step has left all tokens up to it unchanged. "block" ends the row
            once the end token's block is closed, as in the model's code; until then later steps may replace the token.

    n masks need at most n + max_post_steps steps. Defaults are those of diffusers. Preset "llada2.1" has the settings
    of the model's code for blocks of 32; "dllm" is the same with end="step"; "sglang" has the thresholds of SGLang.
    diffusers runs one step more than max_post_steps, and ends a row at an end token once no mask precedes the token.
    The method needs a model that was trained to edit.
    """

    threshold: float = 0.7
    editing_threshold: float = 0.5
    max_post_steps: int = 16
    least: int = 1
    end: str = "step"

    name = "editing"
    paper = "LLaDA2.1"
    arxiv = "2602.08676"
    summary = "all tokens above a confidence; replaces decided tokens when the model is sure of others"
    needs = Needs(decided_logits=True)
    presets = {
        "llada2.1": {"threshold": 0.95, "editing_threshold": 0.9, "max_post_steps": 16, "end": "block"},
        "dllm": {"threshold": 0.95, "editing_threshold": 0.9, "max_post_steps": 16},
        "sglang": {"threshold": 0.5, "editing_threshold": 0.0, "max_post_steps": 16},
    }
    sweep = ({"threshold": 0.95, "editing_threshold": 0.9}, {"threshold": 0.5})

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)
        check_number("editing_threshold", self.editing_threshold, low=0, high=1)
        check_int("max_post_steps", self.max_post_steps, low=0, high=1_000_000)
        check_int("least", self.least, low=1, high=1_000_000)
        check_choice("end", self.end, ("step", "block"))
        needs = replace(self.needs, revises=self.editing_threshold < 1, ends_with_block=self.end == "block")
        object.__setattr__(self, "needs", needs)

    def memory(self) -> Mapping[str, MemorySpec]:
        return {"post_steps": MemorySpec(dtype=torch.int64)}

    def select(self, view: View) -> Tensor:
        confident = view.scores > self.threshold
        return confident | view.best() if self.least == 1 else select_at_least(view, confident, self.least)

    def revise(self, view: View, selected: Tensor) -> Revision:
        confident = view.quantities["confidence"] > self.editing_threshold
        edit = view.editable & confident & (view.tokens != view.current)
        # a block stays open after a step that has masks to fill or edits a token
        changed = view.candidates.any(1) | edit.any(1)
        return Revision(edit=edit, hold_block=changed & (self.post_steps(view) < self.max_post_steps))

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        return {"post_steps": self.post_steps(view)}

    def max_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        return masks_at_open + self.max_post_steps

    def post_steps(self, view: View) -> Tensor:
        """Count the block's steps without masks, including this one: [R] int64."""
        return view.memory["post_steps"] + ~view.candidates.any(1)

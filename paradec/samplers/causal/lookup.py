"""Prompt lookup: what followed the same tokens earlier in the row's own text is drafted again; no model drafts.

Saxena, "Prompt Lookup Decoding" (2023); transformers has it as `prompt_lookup_num_tokens`. It pays where answers repeat
their prompts: summaries, edits, code, questions about a document.

The last n tokens of the text so far are looked for in it, from `max_matching_ngram_size` down to 1 of them. The first
place from the left that something follows is taken, and so are the tokens after it as drafts, up to
`prompt_lookup_num_tokens` of them. A draft x was not drawn, so its q is one-hot: it is accepted with probability p(x),
and a rejected one is resampled from p without it, which keeps the model's distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int
from paradec.samplers.causal.drafts.source import NamedDrafter
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.verification import ONE_HOT


@dataclass(frozen=True)
class PromptLookup(NamedDrafter):
    """A drafter without a network: `create("speculative", drafter="prompt_lookup")`, or `drafter=PromptLookup(...)`.

    The candidates are those of transformers' `PromptLookupCandidateGenerator` on each row by itself: drafts stop before
    an end token and before one that may not be drawn, and a place with such a token first is passed over where it may
    not be drawn.

    Args:
        prompt_lookup_num_tokens: drafts at most.
        max_matching_ngram_size: tokens that must agree at most; shorter matches are tried after longer ones.
    """

    prompt_lookup_num_tokens: int = 10
    max_matching_ngram_size: int = 2

    name: ClassVar[str] = "prompt_lookup"

    def __post_init__(self) -> None:
        check_int("prompt_lookup_num_tokens", self.prompt_lookup_num_tokens, low=1)
        check_int("max_matching_ngram_size", self.max_matching_ngram_size, low=1)

    @property
    def slots(self) -> int:
        """Slots of a window: the next token and all drafts."""
        return self.prompt_lookup_num_tokens + 1

    def fill(self, state: CausalState, rows: np.ndarray, features: Tensor | None = None) -> None:
        """Draft for rows [R]: see `paradec.samplers.causal.drafts.source.DraftSource`."""
        index = torch.as_tensor(rows, device=state.canvas.device)
        tokens = state.canvas[index]
        length = torch.as_tensor(state.committed[rows, None], device=tokens.device)
        # prompts may hold ids that have no logit
        usable = state.guess[tokens.clamp(max=len(state.guess) - 1)] > 0
        usable &= tokens < len(state.guess)
        size, most = self.max_matching_ngram_size, state.width - 1
        drafts, count = look_up(tokens, length, usable, state.ends, size, min(most, self.prompt_lookup_num_tokens))
        state.memory.write("drafts", rows, torch.nn.functional.pad(drafts, (0, state.width - drafts.shape[1])))
        state.memory.write("draft_source", rows, torch.full((len(rows), state.width), ONE_HOT, device=tokens.device))
        state.drafted[rows] = count.cpu().numpy()
        if state.masks is not None:
            state.masks.put_certain(state, rows)


def look_up(
    tokens: Tensor, length: Tensor, usable: Tensor, ends: Tensor, size: int, most: int
) -> tuple[Tensor, Tensor]:
    """What followed the last tokens of rows where they occurred before.

    Args:
        tokens: [R, L] int64. length: [R, 1] int64: real tokens of each row, from the left.
        usable: [R, L] bool: which tokens may be drafted. ends: [E] int64: ids that no draft goes beyond.
        size: the longest match, at least 1. most: drafts at most.

    Returns:
        [R, most] int64 drafts, 0 where there are none, and how many each row has, [R] int64.
    """
    column = torch.arange(tokens.shape[1], device=tokens.device)
    # [R, L] bool: whether the n tokens left of a column are the row's last n; the column must hold a token
    same = (column < length).expand_as(tokens)
    start = torch.full_like(length, -1)
    for n in range(1, size + 1):
        before, last = tokens.roll(n, 1), tokens.gather(1, (length - n).clamp(min=0))
        same = same & (before == last) & (column >= n)
        places = same & usable
        start = torch.where(places.any(1, keepdim=True), places.int().argmax(1, keepdim=True), start)
    at = start + torch.arange(most, device=tokens.device)
    inside = (start >= 0) & (at < length)
    at = at.clamp(0, tokens.shape[1] - 1)
    found = tokens.gather(1, at)
    good = inside & usable.gather(1, at) & ~torch.isin(found, ends)
    good = good.long().cumprod(1)
    return found * good, good.sum(1)

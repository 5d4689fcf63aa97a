"""LLaDA2.2's rule: beside filling masks and exchanging tokens, delete positions of the open block and split them.

Bie et al., "LLaDA2.1", arXiv 2602.08676, describe the exchange; deleting and splitting are LLaDA2.2's, as SGLang runs
it (`JointThresholdInDel`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_int, check_number, shown
from paradec.core.memory import MemorySpec
from paradec.core.query import WindowQuery
from paradec.samplers.masked.blocks import FixedBlocks
from paradec.samplers.masked.loop import MaskedProposal, MaskedSampler, MaskedState, Needs, Revision, View
from paradec.samplers.statistics import top_by_rank


@dataclass(frozen=True)
class Levenshtein(MaskedSampler):
    """Every step fills masks with confidence > threshold, one more than there are new masks at least, and exchanges
    each decided token (not those that the user gave) for the best one with confidence > editing_threshold. The model
    may also predict that a position is deleted, or that a mask comes in before it (split): then text moves, between
    the positions that the user gave. A block keeps its length: new masks fill it up at its end, and what is pushed over
    its end is lost. It closes when a step would write nothing, or after `max_post_steps` steps without the masks that
    it opened with.

    Text that comes back to what it was: the least sure change then takes a token that its position has not had.
    A block of B positions takes at most B + max_post_steps + 1 steps.

    Args:
        threshold: confidence that fills a mask, in [0, 1].
        editing_threshold: confidence that exchanges a token, in [0, 1].
        max_post_steps: most steps of a block after the last of its own masks; 0 closes it at once.
        delete_token_id, split_token_id: the ids that mean so; None takes the model's.

    Defaults are SGLang's. The model's own loop differs: it fills by a schedule, and escapes at random.
    """

    threshold: float = 0.5
    editing_threshold: float = 0.0
    max_post_steps: int = 16
    delete_token_id: int | None = None
    split_token_id: int | None = None

    name = "levenshtein"
    paper = "LLaDA2.1"
    arxiv = "2602.08676"
    summary = "all above a confidence; exchanges, deletes and inserts tokens of the open block"
    needs = Needs(decided_logits=True, moves=True, ends_with_block=True, topologies=("block_causal",))
    unsupported = (*MaskedSampler.unsupported, "temperature", "rng", "logprobs")
    sweep = ({"threshold": 0.9, "editing_threshold": 0.9}, {"max_post_steps": 4})

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)
        check_number("editing_threshold", self.editing_threshold, low=0, high=1)
        check_int("max_post_steps", self.max_post_steps, low=0, high=10_000)
        for name in ("delete_token_id", "split_token_id"):
            check_int(name, getattr(self, name), low=0, none=True)

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        if not isinstance(blocks, FixedBlocks):
            raise ValueError(f"sampler {self.name!r} moves text inside blocks of one length: blocks={shown(blocks)}")
        for name, value in zip(("delete_token_id", "split_token_id"), self.control_ids(facts), strict=True):
            if value is None:
                raise ValueError(
                    f"sampler {self.name!r} needs a model that deletes and splits; {facts.name} has no {name}"
                )
            check_int(name, value, low=0, high=facts.vocab_size - 1)

    def control_ids(self, facts: Any) -> tuple[Any, Any]:
        """The ids that delete and split; None where nothing says them."""
        delete = facts.delete_token_id if self.delete_token_id is None else self.delete_token_id
        return delete, facts.split_token_id if self.split_token_id is None else self.split_token_id

    def memory(self) -> Mapping[str, MemorySpec]:
        return {
            "original": MemorySpec(("window",), torch.bool),
            "step": MemorySpec(dtype=torch.int64),
            "post_steps": MemorySpec(dtype=torch.int64),
            "written": MemorySpec(("window", "vocab"), torch.bool),
            "seen": MemorySpec(("steps", "window"), torch.int64, fill=-1),
        }

    def most_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        return masks_at_open + self.max_post_steps + 1

    def weighs_mask(self, state: Any) -> bool:
        return True

    def read(
        self, state: Any, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The best tokens [R, W]; what the open positions hold after the step ("text"), whether the block stays open
        ("open"), and what is remembered."""
        window, index, mask_id = state.window, torch.as_tensor(query.window.index), state.mask_id
        delete, split = self.control_ids(state.facts)
        current = window.read(state.canvas)
        free = ~window.read(state.given) if window.valid is None else window.valid & ~window.read(state.given)
        current, free = current[index], (free & (window.positions < state.block_ends))[index]
        memory = {name: value[index] for name, value in state.memory.read(window.rows, current.shape[1]).items()}
        masks, first = free & (current == mask_id), memory["step"] == 0
        original = torch.where(first.unsqueeze(1), masks, memory["original"])
        wide = logits if logits.dtype == torch.float64 else logits.float()
        # more tokens are never left out at once than the mask and both control ids
        best = wide.topk(min(4, wide.shape[-1]), -1)
        x = best.indices[..., 0]
        p = wide.softmax(-1).gather(-1, best.indices)
        sure = p[..., 0]

        old, new = (masks & original).sum(1), (masks & ~original).sum(1)
        step, post = memory["step"] + 1, memory["post_steps"] + (old == 0)
        last = old == 0 if self.max_post_steps == 0 else post >= self.max_post_steps
        last = last | (step > state.blocks.length + self.max_post_steps)
        other, other_p = _best_without(best.indices, p, (mask_id,))
        avoids = masks & original & (x == mask_id) & ~last.unsqueeze(1)
        x, sure = torch.where(avoids, other, x), torch.where(avoids, other_p, sure)
        above = masks & (sure > self.threshold)
        least = top_by_rank(torch.where(masks, sure.double(), -torch.inf), (1 + new).cpu().numpy()) & masks
        fill = torch.where((above.sum(1) > new).unsqueeze(1), above, least)
        fill = torch.where((last | (old == 0)).unsqueeze(1), masks, fill)
        if self.max_post_steps == 0:
            last = last | ~(masks & original & ~fill).any(1)
            fill = torch.where(last.unsqueeze(1), masks, fill)
        writes = fill | free & (current != mask_id) & (sure > self.editing_threshold) & (x != current)
        plain, _ = _best_without(best.indices, p, (mask_id, delete, split))
        control = (x == mask_id) | (x == delete) | (x == split)
        x = torch.where(last.unsqueeze(1) & control, plain, x)

        text = torch.where(free, current, -1)
        there = torch.arange(memory["seen"].shape[1]) < memory["step"].unsqueeze(1)
        again = ((memory["seen"] == text.unsqueeze(1)).all(2) & there).any(1) & ~last
        changes = writes & (x != current)
        if again.any():
            x = self._escaped(wide, x, sure, changes & again.unsqueeze(1), memory["written"], original & masks, mask_id)
        is_now = torch.arange(memory["seen"].shape[1]) == memory["step"].unsqueeze(1)
        seen = torch.where(is_now.unsqueeze(2), text.unsqueeze(1), memory["seen"])
        written = memory["written"].scatter(
            2, x.unsqueeze(2), memory["written"].gather(2, x.unsqueeze(2)) | writes.unsqueeze(2)
        )
        text, original = _moved(
            torch.where(writes, x, current), current, original, free, writes, delete, split, mask_id
        )
        kept = {"original": original, "step": step, "post_steps": post, "written": written, "seen": seen}
        return x, {"confidence": sure.double(), "text": text, "open": writes.any(1) & ~last, **kept}

    def _escaped(
        self, logits: Tensor, x: Tensor, sure: Tensor, changes: Tensor, written: Tensor, masked: Tensor, mask_id: int
    ) -> Tensor:
        """The tokens [R, W] where the least sure of the `changes` takes one that its position has not had."""
        lowest = torch.where(changes, sure.double(), torch.inf)
        row = changes.any(1).nonzero()[:, 0]
        at = lowest.argmin(1)[row]
        barred = written[row, at].clone()
        barred[:, mask_id] |= masked[row, at]
        left, best = logits[row, at].softmax(-1).masked_fill(barred, 0).max(-1)
        x = x.clone()
        x[row, at] = torch.where(left > 0, best, x[row, at])
        return x

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> MaskedProposal:
        proposal = super().propose(state, outputs, queries)
        for name in (*self.memory(), "text", "open"):
            proposal.updates[name] = proposal.quantities.pop(name)
        return proposal

    def select(self, view: View) -> Tensor:
        return torch.zeros_like(view.candidates)

    def revise(self, view: View, selected: Tensor) -> Revision:
        return Revision(text=view.updates["text"], hold_block=view.updates["open"])


def _best_without(tokens: Tensor, p: Tensor, barred: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of tokens [R, W, K] in descending order the first ones [R, W] that are not barred, and their p."""
    allowed = torch.stack([tokens != token for token in barred]).all(0)
    at = allowed.long().argmax(-1, keepdim=True)
    return tokens.gather(-1, at).squeeze(-1), p.gather(-1, at).squeeze(-1)


def _moved(
    text: Tensor, current: Tensor, original: Tensor, free: Tensor, writes: Tensor, delete: int, split: int, mask_id: int
) -> tuple[Tensor, Tensor]:
    """[R, W] both: the text after what was written has moved it, and which of its masks are the block's own.

    Every run of free positions keeps its length; a deleted position leaves it, a split one is a new mask and then what
    stood there before.
    """
    gone, twice = writes & (text == delete), writes & (text == split)
    column = torch.arange(text.shape[1]).expand_as(text)
    begin = torch.where(free, -1, column).cummax(1).values + 1
    stop = torch.where(free, text.shape[1], column).flip(1).cummin(1).values.flip(1)
    count = 1 - gone.long() + twice.long()
    before = torch.nn.functional.pad(count.cumsum(1), (1, 0))
    to = torch.where(free, begin + before[:, :-1] - before.gather(1, begin.clamp(max=text.shape[1] - 1)), column)
    token, own = torch.where(twice, current, text), torch.where(free, original, False)
    to, there = to + twice.long(), free & ~gone
    there = there & (to < stop)
    spare = torch.full((len(text), text.shape[1] + 1), mask_id)
    place = torch.where(there, to, text.shape[1])
    moved = spare.scatter(1, place, token)[:, :-1]
    flags = torch.zeros_like(spare, dtype=torch.bool).scatter(1, place, own)[:, :-1]
    return torch.where(free, moved, current), flags & free

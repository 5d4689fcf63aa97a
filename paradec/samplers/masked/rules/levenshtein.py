"""LLaDA2.2's rule (LLaDA2.1, arXiv 2602.08676; deleting and splitting as in SGLang's `JointThresholdInDel`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_int, check_number, short_repr
from paradec.core.memory import MemorySpec
from paradec.core.query import WindowQuery
from paradec.samplers.masked.blocks import FixedBlocks
from paradec.samplers.masked.loop import MaskedProposal, MaskedSampler, MaskedState, Needs, Revision, View
from paradec.samplers.statistics import top_by_rank


@dataclass(frozen=True)
class Levenshtein(MaskedSampler):
    """Every step fills the masks with confidence > threshold, but at least one more than the masks that the model has
    inserted; once the block's initial masks are filled, all masks. It also replaces each decided token (prompt tokens
    excepted) by the best token, if this has confidence > editing_threshold. The model may also predict that a position
    is deleted, or that a mask is inserted before it (a split). Then the tokens after this position move, up to the next
    prompt position. A block keeps its length: deletions add masks at its end, and tokens that splits push over its end
    are lost. The block closes when a step would change nothing, or after `max_post_steps` steps without initial masks.

    If the block has the same tokens as before an earlier step, the least confident change gets a token that was not yet
    written at its position. A block of B positions needs at most B + max_post_steps + 1 steps.

    Args:
        threshold: confidence above which a mask is filled, in [0, 1].
        editing_threshold: confidence above which a token is replaced, in [0, 1].
        max_post_steps: maximum number of steps of a block after its initial masks are filled; 0 closes it at once.
        delete_token_id, split_token_id: ids that predict a deletion and a split; None uses the model's.

    Defaults are SGLang's. The model's own loop fills masks by a schedule, and breaks repetitions at a random position.
    """

    threshold: float = 0.5
    editing_threshold: float = 0.0
    max_post_steps: int = 16
    delete_token_id: int | None = None
    split_token_id: int | None = None

    name = "levenshtein"
    paper = "LLaDA2.1"
    arxiv = "2602.08676"
    summary = "all tokens above a confidence; replaces, deletes and inserts tokens of the open block"
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
            raise ValueError(f"sampler {self.name!r} needs paradec.FixedBlocks, not blocks={short_repr(blocks)}")
        for name, value in zip(("delete_token_id", "split_token_id"), self.control_ids(facts), strict=True):
            if value is None:
                raise ValueError(f"sampler {self.name!r} needs {name}, which {facts.name} does not have: set it")
            check_int(name, value, low=0, high=facts.vocab_size - 1)

    def control_ids(self, facts: Any) -> tuple[Any, Any]:
        delete = facts.delete_token_id if self.delete_token_id is None else self.delete_token_id
        return delete, facts.split_token_id if self.split_token_id is None else self.split_token_id

    def memory(self) -> Mapping[str, MemorySpec]:
        return {
            "original": MemorySpec(("window",), torch.bool),  # the block's initial masks, filled or not
            "step": MemorySpec(dtype=torch.int64),
            "post_steps": MemorySpec(dtype=torch.int64),
            "written": MemorySpec(("window", "vocab"), torch.bool),  # tokens written so far at each position
            "seen": MemorySpec(("steps", "window"), torch.int64, fill=-1),  # the block's tokens before each step
        }

    def max_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        return masks_at_open + self.max_post_steps + 1

    def weighs_mask(self, state: Any) -> bool:
        return True

    def read_candidates(
        self, state: Any, logits: Tensor, query: WindowQuery, generator: torch.Generator | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute tokens [R, W]; also "text" (tokens after the step), "open" (block stays open) and the new memory."""
        window, index, mask_id = state.window, torch.as_tensor(query.window.index), state.mask_id
        delete, split = self.control_ids(state.facts)
        current = window.read(state.canvas)
        free = ~window.read(state.is_prompt) if window.valid is None else window.valid & ~window.read(state.is_prompt)
        current, free = current[index], (free & (window.positions < state.block_ends))[index]
        memory = {name: value[index] for name, value in state.memory.read(window.rows, current.shape[1]).items()}
        masks, is_first_step = free & (current == mask_id), memory["step"] == 0
        original = torch.where(is_first_step.unsqueeze(1), masks, memory["original"])
        precise = logits if logits.dtype == torch.float64 else logits.float()
        # at most three tokens are excluded: the mask and both control ids
        top = precise.topk(min(4, precise.shape[-1]), -1)
        tokens = top.indices[..., 0]
        p = precise.softmax(-1).gather(-1, top.indices)
        confidence = p[..., 0]

        num_original, num_inserted = (masks & original).sum(1), (masks & ~original).sum(1)
        step, post_steps = memory["step"] + 1, memory["post_steps"] + (num_original == 0)
        is_last = num_original == 0 if self.max_post_steps == 0 else post_steps >= self.max_post_steps
        is_last = is_last | (step > state.blocks.length + self.max_post_steps)
        best_unmasked, best_unmasked_p = _best_allowed(top.indices, p, (mask_id,))
        avoids_mask = masks & original & (tokens == mask_id) & ~is_last.unsqueeze(1)
        tokens = torch.where(avoids_mask, best_unmasked, tokens)
        confidence = torch.where(avoids_mask, best_unmasked_p, confidence)
        confident = masks & (confidence > self.threshold)
        mask_scores = torch.where(masks, confidence.double(), -torch.inf)
        least = top_by_rank(mask_scores, (1 + num_inserted).cpu().numpy()) & masks
        filled = torch.where((confident.sum(1) > num_inserted).unsqueeze(1), confident, least)
        filled = torch.where((is_last | (num_original == 0)).unsqueeze(1), masks, filled)
        if self.max_post_steps == 0:
            is_last = is_last | ~(masks & original & ~filled).any(1)
            filled = torch.where(is_last.unsqueeze(1), masks, filled)
        writes = filled | free & (current != mask_id) & (confidence > self.editing_threshold) & (tokens != current)
        best_plain, _ = _best_allowed(top.indices, p, (mask_id, delete, split))
        control = (tokens == mask_id) | (tokens == delete) | (tokens == split)
        tokens = torch.where(is_last.unsqueeze(1) & control, best_plain, tokens)

        block_tokens = torch.where(free, current, -1)
        is_past = torch.arange(memory["seen"].shape[1]) < memory["step"].unsqueeze(1)
        is_repeated = ((memory["seen"] == block_tokens.unsqueeze(1)).all(2) & is_past).any(1) & ~is_last
        changes = writes & (tokens != current)
        if is_repeated.any():
            changes &= is_repeated.unsqueeze(1)
            rows = changes.any(1).nonzero()[:, 0]
            column = torch.where(changes, confidence.double(), torch.inf).argmin(1)[rows]
            excluded = memory["written"][rows, column].clone()
            excluded[:, mask_id] |= (original & masks)[rows, column]
            best_p, best = precise[rows, column].softmax(-1).masked_fill(excluded, 0).max(-1)
            tokens = tokens.clone()
            tokens[rows, column] = torch.where(best_p > 0, best, tokens[rows, column])
        is_current = torch.arange(memory["seen"].shape[1]) == memory["step"].unsqueeze(1)
        seen = torch.where(is_current.unsqueeze(2), block_tokens.unsqueeze(1), memory["seen"])
        written = memory["written"].scatter(
            2, tokens.unsqueeze(2), memory["written"].gather(2, tokens.unsqueeze(2)) | writes.unsqueeze(2)
        )
        text, original = _move_text(
            torch.where(writes, tokens, current), current, original, free, writes, delete, split, mask_id
        )
        updates = {"original": original, "step": step, "post_steps": post_steps, "written": written, "seen": seen}
        return tokens, {"confidence": confidence.double(), "text": text, "open": writes.any(1) & ~is_last, **updates}

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> MaskedProposal:
        proposal = super().propose(state, outputs, queries)
        for name in (*self.memory(), "text", "open"):
            proposal.updates[name] = proposal.quantities.pop(name)
        return proposal

    def select(self, view: View) -> Tensor:
        return torch.zeros_like(view.candidates)

    def revise(self, view: View, selected: Tensor) -> Revision:
        return Revision(text=view.updates["text"], hold_block=view.updates["open"])


def _best_allowed(tokens: Tensor, p: Tensor, excluded: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Select the first token that is not excluded, and its p: [R, W] each. tokens, p: [R, W, K], by descending p."""
    allowed = torch.stack([tokens != token for token in excluded]).all(0)
    index = allowed.long().argmax(-1, keepdim=True)
    return tokens.gather(-1, index).squeeze(-1), p.gather(-1, index).squeeze(-1)


def _move_text(
    text: Tensor, current: Tensor, original: Tensor, free: Tensor, writes: Tensor, delete: int, split: int, mask_id: int
) -> tuple[Tensor, Tensor]:
    """Apply deletions and splits; return the new tokens, and which of them were initial masks, both [R, W]. Only `free`
    positions change, and each run of free positions keeps its length. A split inserts a mask before its token."""
    is_deleted, is_split = writes & (text == delete), writes & (text == split)
    column = torch.arange(text.shape[1]).expand_as(text)
    begin = torch.where(free, -1, column).cummax(1).values + 1
    stop = torch.where(free, text.shape[1], column).flip(1).cummin(1).values.flip(1)
    count = 1 - is_deleted.long() + is_split.long()
    offset = torch.nn.functional.pad(count.cumsum(1), (1, 0))
    target = torch.where(free, begin + offset[:, :-1] - offset.gather(1, begin.clamp(max=text.shape[1] - 1)), column)
    token, is_original = torch.where(is_split, current, text), torch.where(free, original, False)
    target, stays = target + is_split.long(), free & ~is_deleted
    stays = stays & (target < stop)
    canvas = torch.full((len(text), text.shape[1] + 1), mask_id)
    target_or_spare = torch.where(stays, target, text.shape[1])
    moved = canvas.scatter(1, target_or_spare, token)[:, :-1]
    flags = torch.zeros_like(canvas, dtype=torch.bool).scatter(1, target_or_spare, is_original)[:, :-1]
    return torch.where(free, moved, current), flags & free

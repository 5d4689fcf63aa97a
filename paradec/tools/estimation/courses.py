"""Which positions the steps of a decoding evaluate: a cache's own plan, followed over one row, with no model.

Caches say in `plan` what they evaluate, from a state that they may read; here is such a state whose tokens come evenly
and from left to right. So whatever is registered is followed as it is, with its settings, and no table says it again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paradec.attention.sparsed import ESTIMATE, SPARSE, SparseD
from paradec.caches.suffix import Suffix
from paradec.core.blocks import FixedBlocks
from paradec.core.contract import CanvasState, Window
from paradec.core.facts import ModelFacts
from paradec.kernels.block_sparse import budget, generation_block
from paradec.tools.estimation.shapes import Shape

MASK, TOKEN = 0, 1


@dataclass(frozen=True)
class Evaluation:
    """What one forward evaluates of one row.

    Args:
        kind: "whole" (every position) or "part" (the others are in the store).
        positions: evaluated. wanted: of which logits are wanted. seen: keys that each attends to.
        share: of these keys that attention reads (SparseD); 1 where it reads all.
    """

    kind: str
    positions: int
    wanted: int
    seen: int
    share: float = 1.0


class Course(CanvasState):
    """One row whose tokens come evenly, from left to right: what caches may read of a state.

    Args:
        shape: of the model. cache: the cache, which plans. prompt, answer: positions. block: positions of a block.
        suffix: which masks after the block exist; of those that are drawn, one draw.
    """

    def __init__(self, shape: Shape, cache: Any, prompt: int, answer: int, block: int, suffix: Suffix | None = None):
        length = prompt + answer
        self.facts = ModelFacts(
            vocab_size=2,
            mask_token_id=MASK,
            prediction=shape.prediction,
            topology=shape.topology,
            block_length=shape.block_length,
            block_align="prompt" if shape.topology == "causal_context" else "absolute",
            name=shape.name,
        )
        self.mask_id, self.batch, self.branches = MASK, 1, 1
        self.level, self.pads, self.store = True, True, None
        self.cache = cache
        self.canvas = torch.full((1, length), MASK)
        self.canvas[:, :prompt] = TOKEN
        self.blocks = FixedBlocks(block, align="absolute" if shape.topology == "block_causal" else "prompt")
        self.columns = np.arange(length)[None]
        self.length, self.end = np.array([length]), np.array([length])
        self.prompt_length, self.answer_start, self.total = np.array([prompt]), np.array([prompt]), np.array([answer])
        self.block_start, self.block_end = np.array([prompt]), np.array([prompt])
        self.row_step, self.decided, self.reused = np.array([0]), np.array([0]), np.array([0])
        self.block_step, self.remaining, self.masks_at_open = np.array([0]), np.array([0]), np.array([0])
        self.steps_per_block = None
        self.suffix = suffix
        self.seeding = np.array([False]) if shape.topology == "causal_context" else None
        self.open_block()
        self.cache_state = cache.begin(self)

    @property
    def undecided(self) -> torch.Tensor:
        return self.canvas == MASK

    def while_rows_stay(self, key: Any, make: Any) -> Any:
        return make()

    def while_blocks_stay(self, key: Any, make: Any) -> Any:
        return make()

    def open_block(self) -> None:
        """Go on to the next block."""
        self.block_start = self.block_end.copy()
        self.block_end = self.blocks.open(self.block_start, self.prompt_length, self.length)
        self.remaining = self.block_end - self.block_start
        self.masks_at_open, self.block_step = self.remaining.copy(), np.array([0])
        if self.seeding is not None:
            self.seeding[:] = True
        if self.suffix is not None:
            masks, key = self.columns >= self.prompt_length[:, None], torch.zeros(1, 2, dtype=torch.int64)
            kept = self.suffix.kept(masks, self.block_start, self.block_end, key, None, self.facts.prediction)
            self.present = (self.columns < self.block_end[:, None]) | kept
        host = np.arange(self.block_start[0], self.block_end[0])[None]
        positions = torch.as_tensor(host)
        self.window = Window(np.array([0]), positions, positions, None, host, None, True)

    def evaluated(self, picks: int) -> tuple[str, int, int]:
        """What this step evaluates: "whole" or "part", positions, and keys seen. picks: tokens that it will decide."""
        ahead = self.block_end - self.remaining
        told = ahead[:, None] + np.arange(picks) if self.cache.facts.evaluates == "picks" else None
        (part,) = self.cache.plan(self, told)
        positions, last = int(part.sizes[0]), int(part.positions.max())
        seen = int(self.length[0] if self.present is None else self.present.sum())
        block = self.facts.block_length
        if self.facts.topology == "block_causal" and block is not None:
            seen = min(seen, (last // block + 1) * block)
        if self.seeding is not None:  # nothing after the block is seen
            seen = last + 1
        if not self.cache.facts.uses_store:
            seen = positions
        return "whole" if part.kind == "full" and positions == self.length[0] else "part", positions, seen

    def decide(self, count: int) -> None:
        """The next `count` tokens of the block are final."""
        first = int(self.block_end[0] - self.remaining[0])
        self.canvas[:, first : first + count] = TOKEN
        self.cache.committed(self, self.window.read(self.canvas).numpy())
        self.decided += count
        self.remaining = self.remaining - count
        self.row_step += 1
        self.block_step += 1


def masked_course(
    shape: Shape,
    cache: Any,
    attention: SparseD | None,
    prompt: int,
    answer: int,
    block: int,
    tokens_per_forward: float,
    suffix: Suffix | None = None,
) -> Counter[Evaluation]:
    """How often each kind of forward is made for one row of a masked model.

    A step stays in its block, so that a block takes at least one step and at most one for each of its positions; as far
    as that allows, the answer takes answer / tokens_per_forward steps. Over causal context a block takes one more.
    """
    course, found, taken = Course(shape, cache, prompt, answer, block, suffix), Counter[Evaluation](), 0
    sparse = None if attention is None else _Sparse(attention, course)
    while True:
        if course.seeding is not None:  # a call of its own makes a block's first token
            kind, positions, seen = course.evaluated(1)
            found[Evaluation(kind, positions, 1, seen)] += 1
            course.decide(1)
            course.seeding[:], taken = False, taken + 1
        size = int(course.remaining[0])
        due = round((int(course.decided[0]) + size) / tokens_per_forward)
        steps = max(min(1, size), due - taken)
        for step in range(steps):
            count = (step + 1) * size // steps - step * size // steps
            kind, positions, seen = course.evaluated(count)
            share = 1.0 if sparse is None else sparse.share(kind)
            found[Evaluation(kind, positions, size, seen, share)] += 1
            course.decide(count)
        taken += steps
        if course.block_end[0] == course.length[0]:
            return found
        course.open_block()


class _Sparse:
    """How much of the keys SparseD's attention reads, step by step: its own rule of what is dense."""

    def __init__(self, settings: SparseD, course: Course):
        # unscheduled: dense until a share of the tokens is decided, as for samplers that plan no steps
        self.state, self.course = settings.begin(course, scheduled=False), course
        size = settings.block_size
        blocks = -(-course.length // size)
        first = generation_block(course.length, course.length - course.prompt_length, size)
        prompt = budget(first if settings.selection == "isolated" else blocks, settings.select)
        kept = np.minimum(prompt, first) + budget(blocks - first, settings.select)
        self.listed = float(min(1.0, kept[0] / blocks[0]))
        """Share of the keys that lists keep."""

    def share(self, kind: str) -> float:
        """Of the keys, what this step's attention reads."""
        (mode,) = self.state.modes(self.course, np.array([0]), kind == "whole")
        if mode == ESTIMATE:
            self.state.found_at[:] = self.course.row_step
        return self.listed if mode == SPARSE else 1.0


def causal_course(prompt: int, answer: int, drafted: int, tokens_per_forward: float) -> Counter[Evaluation]:
    """How often each kind of forward is made for one row of a causal model: the prompt, which gives the first token,
    then `drafted` tokens at a time, of which tokens_per_forward are accepted. A drafter's forwards are not counted."""
    found = Counter[Evaluation]()
    found[Evaluation("whole", prompt, 1, prompt)] += 1
    steps = max(1, round((answer - 1) / tokens_per_forward)) if answer > 1 else 0
    for step in range(steps):
        known = prompt + 1 + step * (answer - 1) // steps
        found[Evaluation("part", drafted, drafted, known - 1 + drafted)] += 1
    return found

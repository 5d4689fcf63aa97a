"""Prophet ("Diffusion Language Models Know the Answer Before Decoding", arXiv 2508.19982)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_at_most, check_int, check_number, short_repr
from paradec.samplers.features.early_stops import EARLY_PREFIX
from paradec.samplers.masked.state import MaskedState

AnswerPositions = Sequence[int] | Callable[[np.ndarray, int], Sequence[int] | None]


@dataclass(frozen=True)
class Prophet:
    """Stop rule: a row ends once the gap between the two best logits, averaged over the answer's positions, reaches a
    threshold that falls during decoding. Then every undecided position gets its candidate (the likeliest token; above
    temperature 0, the drawn one).

    Args:
        gaps: thresholds of the mean gap at the beginning, in the middle and at the end of decoding; at least 0.
        stages: shares of decided positions in the row, in [0, 1], at which the middle and the end of decoding begin.
        answer: positions to average over, counted from the first position to fill: a sequence, e.g. `range(40, 45)`, or
            a function that returns a sequence, or None while the positions are unknown. The function's arguments are a
            row's current ids [N] int64 (mask ids where undecided) and the first position to fill. None averages over
            all undecided positions, including end tokens that pad long answers.

    The paper's answer is a few tokens after a known prefix ("The answer is"), which needs knowledge of the task. Answer
    positions in closed blocks do not count; if all of the answer lies in closed blocks, the row ends. The paper
    measures progress in steps of a fixed schedule, where progress equals the share of decided positions.
    """

    gaps: tuple[float, float, float] = (7.5, 5.0, 2.5)
    stages: tuple[float, float] = (0.33, 0.67)
    answer: AnswerPositions | None = None

    reads: ClassVar[tuple[str, ...]] = ("logit_gap",)

    def __post_init__(self) -> None:
        for name, count, high in (("gaps", 3, 1e6), ("stages", 2, 1.0)):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)) or len(value) != count:
                raise ValueError(f"{name}={short_repr(value)} must be {count} numbers")
            for entry in value:
                check_number(name, entry, low=0, high=high)
            object.__setattr__(self, name, tuple(value))
        check_at_most("stages[0]", self.stages[0], "stages[1]", self.stages[1])
        if self.answer is not None and not callable(self.answer):
            object.__setattr__(self, "answer", _positions(self.answer))

    def satisfied(self, state: MaskedState, proposal: Any) -> Tensor:
        window, gap = state.window, proposal.updates[EARLY_PREFIX + "logit_gap"]
        mask_id = state.facts.mask_token_id
        assert mask_id is not None  # models of this family have a mask token
        undecided = window.undecided(proposal.current, mask_id)
        progress = state.decided[window.rows] / state.total[window.rows]
        stage = (progress[:, None] >= np.array(self.stages)).sum(1)
        threshold = torch.as_tensor(np.array(self.gaps)[stage], device=gap.device)
        if self.answer is None:
            # a method that revises may stay in a block without undecided positions: then there is no gap
            span, is_known = undecided, undecided.any(1)
        else:
            span, is_known = (torch.as_tensor(array, device=gap.device) for array in self._span(state))
        count = span.sum(1)
        mean = torch.where(span, gap, 0).sum(1) / count.clamp(min=1)
        return is_known & ((mean >= threshold) | (count == 0))

    def _span(self, state: MaskedState) -> tuple[np.ndarray, np.ndarray]:
        """Find the window's positions in the answer [R, W] bool, and the rows whose answer is known [R] bool."""
        window = state.window
        start = state.prompt_length[window.rows]
        answers: list[Any] = [self.answer] * len(window.rows)
        if callable(self.answer):
            ids = state.canvas.cpu().numpy()
            answers = [
                self.answer(ids[row, : state.length[row]].copy(), int(first_position))
                for row, first_position in zip(window.rows, start, strict=True)
            ]
        in_answer = np.zeros((len(start), state.canvas.shape[1]), bool)
        is_known = np.zeros(len(start), bool)
        for index, (row, answer) in enumerate(zip(window.rows, answers, strict=True)):
            if answer is not None:
                positions = start[index] + np.array(_positions(answer))
                positions = positions[positions < state.length[row]]
                in_answer[index, positions] = True
                is_known[index] = len(positions) > 0  # an answer beyond the row's end stays unknown
        span = np.take_along_axis(in_answer, window.host_positions, 1)
        return span if window.host_valid is None else span & window.host_valid, is_known


def _positions(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)) or len(value) == 0:
        raise ValueError(f"answer={short_repr(value)} must be a function, or offsets from the first position to fill")
    for entry in value:
        check_int("answer", entry, low=0)
    return tuple(int(entry) for entry in value)

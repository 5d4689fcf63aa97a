"""Prophet ("Diffusion Language Models Know the Answer Before Decoding", arXiv 2508.19982)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_at_most, check_int, check_number, short_repr
from paradec.samplers.features.early_stops import WATCHED
from paradec.samplers.masked.state import MaskedState

Span = Sequence[int] | Callable[[np.ndarray, int], Sequence[int] | None]


@dataclass(frozen=True)
class Prophet:
    """Stop rule: once the mean gap between the two best logits over the answer reaches a threshold, which falls during
    decoding, every undecided position gets its candidate (the likeliest token; at a temperature, the drawn one).

    Args:
        gaps: thresholds, in logits, for the beginning, the middle and the end of the decoding; at least 0.
        stages: where the middle and the end begin: shares of the row's positions that are final, in [0, 1].
        answer: positions of the mean, counted from the first position to fill: a sequence, e.g. `range(40, 45)`, or a
            function that returns a sequence, or None while it is unknown. Its arguments are a row's current ids [N]
            int64 (mask ids where undecided) and the first position to fill. None is all undecided positions.

    The paper's span is a few tokens after a known prefix of the answer ("The answer is"), which needs knowledge of the
    task. By default, end tokens that pad long answers count too. Positions of the span that were decided in an earlier
    block count as certain. The paper measures progress in steps of a fixed schedule, where it equals our share of
    positions.
    """

    gaps: tuple[float, float, float] = (7.5, 5.0, 2.5)
    stages: tuple[float, float] = (0.33, 0.67)
    answer: Span | None = None

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
        window, gap = state.window, proposal.updates[WATCHED + "logit_gap"]
        mask_id = state.facts.mask_token_id
        assert mask_id is not None  # models of this family have one
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
        """Find the window's positions in the answer [R, W] bool, and whether the answer is known [R] bool."""
        window = state.window
        start = state.prompt_length[window.rows]
        answers: list[Any] = [self.answer] * len(window.rows)
        if callable(self.answer):
            ids = state.canvas.cpu().numpy()
            answers = [
                self.answer(ids[row, : state.length[row]].copy(), int(answer_start))
                for row, answer_start in zip(window.rows, start, strict=True)
            ]
        in_answer = np.zeros((len(start), state.canvas.shape[1]), bool)
        is_known = np.zeros(len(start), bool)
        for index, (row, answer) in enumerate(zip(window.rows, answers, strict=True)):
            if answer is not None:
                positions = start[index] + np.array(_positions(answer))
                positions = positions[positions < state.length[row]]
                in_answer[index, positions] = True
                is_known[index] = len(positions) > 0  # a span beyond the end of the row is never reached
        span = np.take_along_axis(in_answer, window.host_positions, 1)
        return span if window.host_valid is None else span & window.host_valid, is_known


def _positions(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)) or len(value) == 0:
        raise ValueError(
            f"answer={short_repr(value)} must be positions counted from the start of the answer, or a function"
        )
    for entry in value:
        check_int("answer", entry, low=0)
    return tuple(int(entry) for entry in value)

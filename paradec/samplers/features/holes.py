"""Holes without end tokens (`holes_eos_inf`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.samplers.features.feature import Feature


class Holes(Feature):
    """Exclusion of end tokens from holes, which are masks before a prompt token."""

    def reads_window(self, state: Any) -> bool:
        return True

    def exclude_ends(self, state: Any, logits: Tensor, index: np.ndarray | None) -> None:
        """Exclude end tokens from logits [N, W, V] in holes, in place. index: [N] in the running rows; None for all."""
        # also true at prompt tokens between holes, which have no candidates
        is_hole = state.window.host_positions < state.answer_start[state.window.rows, None]
        if index is not None:
            is_hole = is_hole[index]
        if is_hole.any():
            exclude_ends(state, logits, torch.as_tensor(is_hole, device=logits.device))


def exclude_ends(state: Any, logits: Tensor, holes: Tensor) -> None:
    """Exclude end tokens in place, at `holes` [R, W] bool, from logits [R, W, V], or [R, n * W, V] for n windows."""
    if holes.shape[1] < logits.shape[1]:
        holes = holes.repeat(1, logits.shape[1] // holes.shape[1])
    end_logits = logits.index_select(-1, state.ends)
    logits.index_copy_(-1, state.ends, end_logits.masked_fill_(holes.unsqueeze(-1), -torch.inf))

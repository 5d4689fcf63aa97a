"""ReCAP (arXiv 2505.19089, and its public code for MaskGIT-r)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_choice, check_int
from paradec.core.memory import MemorySpec
from paradec.core.query import WindowQuery
from paradec.samplers.masked.loop import MaskedProposal, MaskedState, View
from paradec.samplers.masked.rules.halton import halton_ranks
from paradec.samplers.masked.rules.maskgit import MaskGIT, noisy_scores
from paradec.samplers.masked.rules.ordered import check_grid


@dataclass(frozen=True)
class Recap(MaskGIT):
    """`maskgit` in groups of steps: a full step, then `local_steps` local steps. The full step evaluates all positions
    and ranks the undecided ones as `maskgit` does. The group's targets are the best n positions, where n is the number
    that the group's steps commit together. The full step commits the first targets in this order, and each local step
    the next targets. The tokens of local steps are drawn from logits that depend on the group's earlier tokens.

    With `cache="recap"`, local steps evaluate only the targets, with the keys and values of the full step. With
    `cache="none"` the targets are chosen in the same way, and the logits of local steps are exact.

    Args:
        local_steps: l, at least 0; 0 is `maskgit` with preset "maskgit-r". The paper's experiments have 1.
        full_groups: number of groups without local steps at the start, at least 0. Local steps are worthwhile once many
            tokens are decided. The public scripts have 10 full steps of 20, and 12 of 32.
        order: "confidence" ranks as `maskgit`; "halton" takes the next positions in Halton order as targets.
        height, width: as in `halton`, for order="halton".
        schedule, choice_temperature, final_temperature, guidance_start: as in `maskgit`, with MaskGIT-r's defaults. The
            noise falls from group to group, the temperature from step to step. A local step has the guidance scale
            scheduled for the step before it, as in the public code.

    Set `steps` (16 to 32) and `temperature=1`. For l > 1, the public code's groups lose or repeat some tokens, and its
    last steps may commit a negative number. Here groups are as described, and every step commits at least 1 token.
    """

    schedule: str = "power"
    choice_temperature: float = 5.5
    final_temperature: float | None = 0.65
    local_steps: int = 1
    full_groups: int = 0
    order: str = "confidence"
    height: int | None = None
    width: int | None = None

    name = "recap"
    paper = "ReCAP"
    arxiv = "2505.19089"
    summary = "as maskgit, but chooses positions of several steps at once; later steps evaluate only these"
    presets = {"maskgit-r-32": {"full_groups": 12, "final_temperature": 0.75}, "maskgit-r-16": {"full_groups": 8}}
    sweep = ({"steps": 1 / 4}, {"steps": 1 / 8})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("local_steps", self.local_steps, low=0, high=2**16)
        check_int("full_groups", self.full_groups, low=0)
        check_choice("order", self.order, ("confidence", "halton"))
        check_grid(self.height, self.width)

    def check(self, facts: Any, blocks: BlockPolicy, cache: Cache, longest: int) -> None:
        check_grid(self.height, self.width, longest)

    def index_in_group(self, step: np.ndarray) -> np.ndarray:
        """Compute the index of steps [R] in their groups: [R] int64; 0 for full steps."""
        return np.where(step < self.full_groups, 0, (step - self.full_groups) % (self.local_steps + 1))

    def group_index(self, step: np.ndarray) -> np.ndarray:
        """Compute the index of the groups of steps [R]: [R] int64."""
        later_group = self.full_groups + (step - self.full_groups) // (self.local_steps + 1)
        return np.where(step < self.full_groups, step, later_group)

    def noise_at(self, step: np.ndarray, steps: np.ndarray) -> np.ndarray:
        return self.choice_temperature * (1 - (self.group_index(step) + 1) / (self.group_index(steps - 1) + 1))

    def guidance(self, state: MaskedState, rows: np.ndarray) -> float | Tensor:
        if self.guidance_start is None:
            return super().guidance(state, rows)
        step, steps = self.block_progress(state, rows)
        return self.guidance_at(state, np.where(self.index_in_group(step) > 0, step - 1, step), steps)

    def group_size(self, state: MaskedState, rows: np.ndarray) -> np.ndarray:
        """Count the positions that this step and the later steps of its group commit: [R] int64."""
        step, steps = self.block_progress(state, rows)
        size = np.zeros(len(rows), np.int64)
        for offset in range(self.local_steps + 1):
            in_group = (step + offset < steps) & (self.group_index(step + offset) == self.group_index(step))
            size += np.where(in_group, self.quota_at(state, rows, np.minimum(step + offset, steps - 1), steps), 0)
        return size

    def memory(self) -> Mapping[str, MemorySpec]:
        return {"rank": MemorySpec(("window",), torch.int64, fill=-1)}  # among the targets; -1 for other positions

    def positions_for_cache(self, state: MaskedState) -> np.ndarray | None:
        return self.targets(state) if state.cache.facts.evaluates == "targets" else None

    def targets(self, state: MaskedState) -> np.ndarray:
        """Return all targets of local steps, even decided ones: [R, K] int64, padded with -1; all -1 in full steps."""
        window = state.window
        rank = state.memory["rank"][window.row_index[:, 0], : window.positions.shape[1]].cpu().numpy()
        step, _ = self.block_progress(state, window.rows)
        target = (rank >= 0) & (self.index_in_group(step) > 0)[:, None]
        order = (~target).argsort(1, kind="stable")[:, : max(int(target.sum(1).max()), 1)]
        return np.where(np.take_along_axis(target, order, 1), np.take_along_axis(window.host_positions, order, 1), -1)

    def propose(self, state: MaskedState, outputs: list[Tensor], queries: list[WindowQuery]) -> MaskedProposal:
        proposal = super().propose(state, outputs, queries)
        rows, device = proposal.rows, proposal.values.device
        step, _ = self.block_progress(state, rows)
        sizes = np.where(self.index_in_group(step) == 0, self.group_size(state, rows), 0)
        size = torch.as_tensor(sizes, device=device).double().unsqueeze(1)
        proposal.quantities["group_size"] = size.expand(proposal.values.shape)
        if self.order == "halton":
            ranks = halton_ranks(state, self.height, self.width)
            proposal.quantities["order"] = torch.as_tensor(ranks, device=device).double()
        return proposal

    def ranks(self, view: View) -> Tensor:
        """Rank the targets of each row's group: [R, W] int64, -1 for other positions."""
        size = view.quantities["group_size"].long()
        if self.order == "halton":
            scores = (-view.quantities["order"]).masked_fill(~view.candidates, -torch.inf)
        else:
            scores = noisy_scores(view)
        order = scores.argsort(dim=-1, descending=True, stable=True)
        column = torch.arange(order.shape[1], device=order.device).expand_as(order)
        rank = torch.empty_like(order).scatter_(1, order, column)
        target_rank = torch.where((rank < size) & view.candidates, rank, -1)
        return torch.where(size > 0, target_rank, view.memory["rank"])

    def select(self, view: View) -> Tensor:
        rank = self.ranks(view)
        return view.top((-rank.double()).masked_fill((rank < 0) | ~view.candidates, -torch.inf), view.quota)

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        return {"rank": self.ranks(view)}

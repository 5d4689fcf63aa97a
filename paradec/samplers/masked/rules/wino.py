"""WINO: commit many tokens, take back those that the text does not support (arXiv 2507.18578; LLaDA/decoding.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from paradec.core.checks import check_at_most, check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.core.query import WindowQuery
from paradec.kernels.token_stats import token_statistics
from paradec.samplers.masked.loop import MaskedProposal, MaskedSampler, MaskedState, Needs, Revision, Stage, View


@dataclass(frozen=True)
class Wino(MaskedSampler):
    """Per row, commit every masked position of the block with confidence > threshold (tau_1), and always the best one.
    Then take back decided positions whose token has a probability < threshold_back (tau_2) at the position's shadow.

    The shadow of a position is a further mask with the same position id. It sees all tokens except the token at this
    position, so that it cannot copy this token. Every position of the block has a shadow. Only shadows see shadows.

    Args:
        threshold: tau_1, in [0, 1].
        threshold_back: tau_2, in [0, 1]; 0 takes nothing back and evaluates no shadows.
        cap_share, cap_low, cap_high: a step commits at most n positions, the most confident ones. n is cap_share times
            the block's masks, truncated and clamped to [cap_low, cap_high].

    A step takes back the positions with the lowest probability at the shadow, fewer than the previous step committed.
    If a step commits only one position, it takes none back. Hence n masks need at most n steps. A committed token can
    be taken back from the next step on, until the block is full. In the public code, the cap and the best position are
    those of the whole batch; here each row has its own. The method needs a decoder that predicts in place. Every step
    evaluates the block twice, once as shadows.
    """

    threshold: float = 0.6
    threshold_back: float = 0.9
    cap_share: float = 0.7
    cap_low: int = 5
    cap_high: int = 20

    name = "wino"
    paper = "WINO"
    arxiv = "2507.18578"
    summary = "all tokens above a low confidence; takes back tokens that the rest of the text does not support"
    needs = Needs(decided_logits=True, mask_probes=True)
    sweep = ({"threshold": 0.8}, {"threshold": 0.6, "threshold_back": 0.5})

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)
        check_number("threshold_back", self.threshold_back, low=0, high=1)
        check_number("cap_share", self.cap_share, low=0, high=1)
        check_int("cap_high", self.cap_high, low=1)
        check_int("cap_low", self.cap_low, low=1)
        check_at_most("cap_low", self.cap_low, "cap_high", self.cap_high)
        if self.threshold_back == 0:  # no shadows and no extra quantities
            object.__setattr__(self, "needs", Needs(decided_logits=True))

    def query(self, state: MaskedState) -> list[WindowQuery]:
        queries = super().query(state)
        return [add_shadow(state, query) for query in queries] if self.needs.mask_probes else queries

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        assert stage.current is not None
        logits, shadow = logits.split(stage.positions.shape[1], 1)
        quantities = token_statistics(shadow, ("confidence",), stage.current)[1]
        return logits, {"shadow_confidence": quantities["confidence"]}

    def extra_quantities(self, state: MaskedState, proposal: MaskedProposal) -> Mapping[str, Tensor]:
        """Set confidence to NaN where the shadow's confidence is not finite, so that the commit raises `NotFinite`."""
        shadow = proposal.updates["shadow_confidence"]
        return {"confidence": proposal.quantities["confidence"].masked_fill(~shadow.isfinite(), torch.nan)}

    def memory(self) -> Mapping[str, MemorySpec]:
        return {"accepted": MemorySpec(dtype=torch.int64)}

    def select(self, view: View) -> Tensor:
        cap = (view.candidates.sum(1) * self.cap_share).long().clamp(self.cap_low, self.cap_high)
        return view.top(view.scores, cap) & (view.scores > self.threshold) | view.best()

    def revise(self, view: View, selected: Tensor) -> Revision:
        shadow = view.updates["shadow_confidence"]
        is_doubted = view.editable & (shadow < self.threshold_back)
        max_remasked = torch.where(selected.sum(1) > 1, view.memory["accepted"] - 1, 0)
        return Revision(remask=view.top(torch.where(is_doubted, -shadow, -torch.inf), max_remasked))

    def remember(self, view: View, selected: Tensor) -> Mapping[str, Tensor]:
        return {"accepted": selected.sum(1)}

    def max_steps(self, masks_at_open: np.ndarray) -> np.ndarray:
        return masks_at_open


def add_shadow(state: MaskedState, query: WindowQuery) -> WindowQuery:
    """Append shadows of the window to the query: Q columns become Q + W, and 2 W logits are requested. Shadows are not
    stored. They see each other and all columns except that of their own position; other columns do not see them."""
    assert query.wanted is not None and query.forwarded is not None
    window, device, columns = state.window, state.canvas.device, query.positions.shape[1]
    window_positions = window.host_positions[query.window.index]
    is_real = np.ones_like(window_positions, bool)
    if window.host_valid is not None:
        is_real = window.host_valid[query.window.index]
    shadow = state.per_branch(window_positions)  # [R, W]
    rows, width = shadow.shape
    positions = torch.cat((query.positions, shadow), 1)
    valid = None
    if query.valid is not None or window.host_valid is not None:
        is_valid = torch.ones_like(query.positions, dtype=torch.bool) if query.valid is None else query.valid
        valid = torch.cat((is_valid, state.per_branch(is_real)), 1)
    visible = torch.ones((rows, columns + width, columns + width), dtype=torch.bool, device=device)
    visible[:, :columns, columns:] = False
    visible[:, columns:, :columns] = shadow.unsqueeze(2) != query.positions.unsqueeze(1)
    if state.facts.topology == "block_causal":
        block = state.facts.block_numbers(positions, query.origin)
        visible &= block.unsqueeze(2) >= block.unsqueeze(1)
    store = query.store
    if store is not None and store.slots is not None:
        store = store.with_fields(slots=torch.cat((store.slots, torch.full_like(shadow, -1)), 1))
    shadow_columns = torch.arange(columns, columns + width, device=device).expand(rows, width)
    return query.with_fields(
        tokens=pad(query.tokens, (0, width), value=state.mask_id),
        positions=positions,
        valid=valid,
        visible=visible,
        wanted=torch.cat((query.wanted, shadow_columns), 1),
        store=store,
        forwarded=query.forwarded + is_real.sum(1),
    )

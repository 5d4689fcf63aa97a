"""Self-speculation: a model fills a block of masks, and verifies its drafts token by token with the same weights.

Models with a masked and a causal mode (Nemotron-Labs-Diffusion, arXiv 2607.05722) draft with the checkpoint's adapter;
in this call the last final token and the masks after it attend to each other. They verify in the causal mode.
Block-causal models (as SDAR) verify with blocks of one token. The verifying call then has a column per draft and, if
predictions are not shifted, a mask per slot. A column attends to earlier tokens. This is S2D2 (arXiv 2603.25702), but
exact at every temperature; `paradec.samplers.masked.rules.s2d2` follows the paper.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_number
from paradec.core.family_queries import CausalQuery, VisibleQuery
from paradec.core.protocol import Proposal, Sampler
from paradec.core.query import Cost, StoreCall
from paradec.core.trace import Notes
from paradec.kernels.token_stats import draw
from paradec.samplers.causal.drafts.block import draft_in_order
from paradec.samplers.causal.drafts.source import record_nan_rows, write_drafts
from paradec.samplers.causal.loop import CausalSampler
from paradec.samplers.causal.sjd import verify
from paradec.samplers.causal.state import DRAFT_STREAM, CausalState, Drafting, read_logits
from paradec.samplers.causal.window import DraftWindow, VerifiedWindow, read_window
from paradec.samplers.distributions import probability

RULES = ("ratio", "match")


@dataclass(frozen=True)
class SelfSpeculative(CausalSampler):
    """The model fills a block of masks with drafts and verifies them itself.

    Lossless at any temperature, top-k and top-p: the output has the distribution of the model's causal mode, or of a
    block-causal model with blocks of one token. `nfe` counts the calls that verify, `state.draft_nfe` the calls that
    draft.

    Args:
        window: slots evaluated at once: the next token and `window - 1` drafts. None means the model's block length.
        rule: "ratio" accepts a draft x with probability min(1, p(x) / q(x)). "match" accepts it if it equals a token
            drawn from p, as in the published code; this accepts less often.
        threshold: None fills all masks in one call. A number fills them over several calls: each call fills the masks
            whose token has at least this probability, and the mask with the most probable token. Such drafts depend on
            each other, which needs rule="match".
        adapter: whether to draft with the checkpoint's adapter; None: if the checkpoint has one.
    """

    rule: str = "ratio"
    threshold: float | None = None
    adapter: bool | None = None

    models: ClassVar[tuple[str, ...]] = ("text",)

    name = "self_speculative"
    paper = "Nemotron-Labs-Diffusion"
    arxiv = "2607.05722"
    summary = "the model drafts a block of masks and verifies it token by token, with the same weights; lossless"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("rule", self.rule, RULES)
        check_number("threshold", self.threshold, low=0, high=1, none=True)
        if self.adapter not in (None, True, False):
            raise ValueError(f"adapter={self.adapter!r} must be True, False or None")
        if self.threshold is not None and self.rule != "match":
            raise ValueError(
                f"threshold={self.threshold} makes drafts that depend on each other, for which rule={self.rule!r} is "
                "not exact: give rule='match'"
            )

    def accept(self, window: DraftWindow) -> Tensor:
        """Return min(1, p(x) / q(x)); with rule="match", 1 where the token drawn from p equals the draft, else 0."""
        if self.rule == "ratio":
            return window.ratio().clamp(max=1)
        return (window.sampled == window.drafts.tokens).to(window.p.dtype)

    # ---- start ----------------------------------------------------------------------------------------------------

    def check_model(self, model: Any) -> None:
        """Raise TypeError for a model of another kind, ValueError for one that cannot draft, or lacks the adapter."""
        Sampler.check_model(self, model)
        facts, self_drafting = model.facts, getattr(model, "self_drafting", None)
        reason = None
        if facts.topology in ("causal", "causal_context"):
            if self_drafting is None or facts.mask_token_id is None:
                reason = "it has no masked mode or no mask id"
        elif facts.topology != "block_causal":
            reason = f"it is {facts.topology.replace('_', '-')}"
        elif facts.whole_blocks:
            reason = "it chooses experts for whole blocks, and the verified blocks differ from its own"
        elif self_drafting is not None:
            reason = "in this mode it is not causal: load it with topology='causal' or with the default"
        if reason is None and not (model.supports_store and model.supports_visibility and model.pads):
            reason = "it supports no key/value store with attention masks"
        if reason is not None:
            raise ValueError(
                f"sampler {self.name!r} needs a model that also decodes blocks of masks (Nemotron-Labs-Diffusion, or a "
                f"block-causal one); {facts.name} cannot: {reason}"
            )
        if self.adapter and (self_drafting is None or self_drafting.adapter is None):
            raise ValueError(f"adapter=True: {facts.name} has no adapter for drafts")

    def num_slots(self, model: Any, num_new: int) -> int:
        self_drafting = getattr(model, "self_drafting", None)
        block = model.facts.block_length if self_drafting is None else self_drafting.block_length
        return min(self.window or block, num_new)

    def open(self, state: CausalState, model: Any) -> None:
        """Start without drafts: the first step evaluates the prompt. Raises ValueError for a prompt with masks."""
        mask = model.facts.mask_id
        if bool(((state.canvas == mask) & state.is_prompt).any()):
            raise ValueError(f"the prompt contains the mask id {mask}; sampler {self.name!r} only continues prompts")
        state.drafting = Drafting(model, *np.zeros((2, state.batch), np.int64))
        state.num_drafts[:] = 0

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: CausalState) -> list[CausalQuery]:
        """As in the base class. For block-causal models, the call has causal columns for the unstored final tokens and
        for the drafts, which are then stored. It also has a mask per slot, which attends to itself and the tokens
        before it. With shifted predictions there are no masks: the logits of the causal columns suffice."""
        if state.facts.topology != "block_causal":
            return super().query(state)
        is_first, evaluated = state.row_step[state.rows] == 0, state.num_evaluated()
        groups = (np.flatnonzero(is_first), np.flatnonzero(~is_first))  # a separate call for prompts
        return [_make_verify_query(state, group, evaluated[group]) for group in groups if len(group)]

    def observe(self, state: CausalState, proposal: Proposal) -> Notes:
        notes, mask = super().observe(state, proposal), state.facts.mask_token_id
        if state.facts.topology == "block_causal" and notes.drafts is not None:
            notes.drafts = {draft for draft in notes.drafts if draft[2] != mask}
        return notes

    def verify(self, state: CausalState, proposal: Proposal) -> VerifiedWindow:
        window, has_draft = read_window(state, proposal)
        uniform = proposal.quantities["uniform"]
        return verify(window, has_draft, self.accept(window), uniform, resample=self.rule == "ratio")

    def draft_window(self, state: CausalState, proposal: Proposal, verified: VerifiedWindow, count: Tensor) -> None:
        rows = proposal.rows[state.end[proposal.rows] - state.committed[proposal.rows] > 1]
        state.num_drafts[proposal.rows] = 0
        if len(rows) and state.width > 1:
            self._draft_block(state, rows)

    def _draft_block(self, state: CausalState, rows: np.ndarray) -> None:
        """Fill a window of masks after the last final token; the call reads the model's store but does not write to it.
        With neither threshold nor constraint, each draft is drawn independently from the q of its mask's logits."""
        masks = torch.full((len(rows), state.width - 1), state.facts.mask_id, device=state.context.device)
        q = None
        if self.threshold is None:
            positions, logits = state.positions(rows)[:, :-1], self._compute_logits(state, rows, masks)
            if state.constraint is None:
                q = record_nan_rows(state.drafting, rows, state.distribution(logits, rows, positions))
                drafts = draw(q, state.uniform(rows, positions, 1, DRAFT_STREAM).squeeze(-1))
            else:
                drafts, q = draft_in_order(state, rows, positions, lambda slot, _: logits[:, slot])
        else:
            drafts = self._fill_by_confidence(state, rows, masks)
        write_drafts(state, rows, drafts, q)
        state.num_drafts[rows] = state.width - 1
        if state.constraint is not None:
            state.constraint.draft_certain(state, rows)

    def _fill_by_confidence(self, state: CausalState, rows: np.ndarray, tokens: Tensor) -> Tensor:
        """Fill masks [R, W - 1] over several calls, the most confident first."""
        assert self.threshold is not None
        is_masked, tokens = torch.ones_like(tokens, dtype=torch.bool), tokens.clone()
        while len(active := np.flatnonzero(is_masked.any(1).cpu().numpy())):
            index = torch.as_tensor(active, device=tokens.device)
            logits = self._compute_logits(state, rows[active], tokens[index])
            positions = state.positions(rows[active])[:, :-1]
            q = record_nan_rows(state.drafting, rows[active], state.distribution(logits, rows[active], positions))
            sampled = draw(q, state.uniform(rows[active], positions, 1, DRAFT_STREAM).squeeze(-1))
            confidence = probability(logits.double().softmax(-1), sampled).masked_fill(~is_masked[index], -1)
            selected = (confidence >= self.threshold) | (confidence == confidence.amax(1, keepdim=True))
            selected &= is_masked[index]
            tokens[index] = torch.where(selected, sampled, tokens[index])
            is_masked[index] &= ~selected
        return tokens

    def _compute_logits(self, state: CausalState, rows: np.ndarray, tokens: Tensor) -> Tensor:
        """Compute guided logits [R, W - 1, V] of the window. tokens: [R, W - 1], masks and the drafts drawn so far."""
        drafting = state.drafting
        model: Any = drafting.model
        query = _make_draft_query(state, rows, tokens)
        self_drafting = getattr(model, "self_drafting", None)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.adapter is not False and self_drafting is not None and self_drafting.adapter is not None:
                stack.enter_context(self_drafting.adapter.apply_to(model.module))
            logits = model(query, state.store)
        drafting.nfe += Cost([query], state.batch).nfe
        return read_logits(state, [logits], [query])


def _make_draft_query(state: CausalState, rows: np.ndarray, tokens: Tensor) -> CausalQuery:
    """Make the query of the last final token and the window's tokens [R, W - 1], which see each other and all final
    tokens in the store. It covers the whole window, also past a row's end, so that drafts do not depend on the end."""
    device, store_rows = state.context.device, state.context_rows(rows)
    last_position = (state.committed[rows] - 1 + state.shift[:, rows]).reshape(-1)
    row_index, position = torch.as_tensor(store_rows, device=device), last_position[:, None] + np.arange(state.width)
    last_token = state.context[row_index, torch.as_tensor(last_position, device=device)].unsqueeze(1)
    # with shifted predictions the last final token predicts the first draft
    first_column = 0 if _has_shifted_blocks(state) else 1
    wanted_columns = torch.arange(first_column, first_column + state.width - 1, device=device).expand(
        len(store_rows), -1
    )
    return VisibleQuery(
        rows=rows,
        tokens=torch.cat((last_token, tokens.repeat(state.branches, 1)), 1),
        positions=torch.as_tensor(position, device=device),
        wanted=wanted_columns,
        store=StoreCall(row_index, None, store_rows, int(last_position.max()), step=state.commits),
        branches=state.branches,
        forwarded=np.full(len(rows), state.width),
        index=np.arange(len(rows)),
        kind="window",
    )


def _has_shifted_blocks(state: CausalState) -> bool:
    """Whether the model is block-causal with shifted predictions, as models adapted from causal ones are."""
    return state.facts.topology == "block_causal" and state.facts.prediction == "shifted"


def _make_verify_query(state: CausalState, index: np.ndarray, evaluated: np.ndarray) -> CausalQuery:
    rows, device = state.rows[index], state.context.device
    store_rows, shift = state.context_rows(rows), state.shift[:, rows]
    count = np.tile(evaluated, state.branches)[:, None]
    last_position = (state.committed[rows] - 1 + shift).reshape(-1, 1)
    begin = np.where(state.row_step[rows] == 0, 0, state.committed[rows] - 1 + shift).reshape(-1, 1)
    column = begin + np.arange(int((last_position + count - begin).max()))
    num_masks = 0 if _has_shifted_blocks(state) else int(count.max())
    slot = np.arange(num_masks)
    position = np.concatenate((column, last_position + 1 + slot[None]), 1)
    valid = np.concatenate((column < last_position + count, slot < count), 1)
    is_mask = np.arange(position.shape[1]) >= column.shape[1]
    visible = (position[:, :, None] - is_mask[:, None] >= position[:, None, :]) & ~is_mask
    visible |= np.eye(len(is_mask), dtype=bool)
    row_index = torch.as_tensor(store_rows, device=device)
    drafts = state.memory.read(rows)["drafts"].repeat(state.branches, 1)
    draft_slot = torch.as_tensor(column - last_position - 1, device=device)
    final = state.context[row_index.unsqueeze(1), torch.as_tensor(np.minimum(column, last_position), device=device)]
    tokens = torch.where(draft_slot < 0, final, drafts.gather(1, draft_slot.clamp(0, drafts.shape[1] - 1)))
    first_column = column.shape[1] if num_masks else last_position - begin
    wanted_columns = first_column + np.minimum(np.arange(state.width), count - 1)
    return VisibleQuery(
        rows=rows,
        tokens=torch.cat((tokens, tokens.new_full((len(store_rows), num_masks), state.facts.mask_id)), 1),
        positions=torch.as_tensor(position, device=device),
        wanted=torch.as_tensor(wanted_columns, device=device),
        valid=torch.as_tensor(valid, device=device),
        visible=torch.as_tensor(visible, device=device),
        store=StoreCall(
            row_index,
            torch.as_tensor(np.where(valid & ~is_mask, position, -1), device=device),
            store_rows,
            int(begin.max()),
            step=state.commits,
        ),
        branches=state.branches,
        forwarded=-(-valid.sum(1).reshape(state.branches, -1).sum(0) // state.branches),
        index=index,
        kind="window" if begin.any() else "full",
    )

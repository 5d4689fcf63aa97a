"""Self-speculation: a model fills a block of masks, and verifies what it wrote there token by token, with one set of
weights.

Of models that were trained for both (Nemotron-Labs-Diffusion, arXiv 2607.05722), drafts come from a call in which the
last final token and masks after it see each other, with the adapter that the checkpoint has for it; the causal mode
verifies them. Block-causal models (SDAR and its kin) verify in blocks of one: a call of two columns a position, the
tokens, which are causal, and masks, each of which sees the tokens before it. This is what S2D2 (arXiv 2603.25702) does,
made exact at every temperature; `paradec.samplers.masked.rules.s2d2` follows the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_number
from paradec.core.family_queries import CausalQuery
from paradec.core.protocol import Proposal, Sampler
from paradec.core.trace import Notes
from paradec.request import Request
from paradec.samplers.causal.chain import ChainSampler
from paradec.samplers.causal.drafts.own_block import OwnBlock, verifying
from paradec.samplers.causal.state import CausalState, Drafting
from paradec.samplers.causal.verification import DraftWindow, Verified, verify

RULES = ("ratio", "match")


@dataclass(frozen=True)
class SelfSpeculative(ChainSampler):
    """The model drafts a block of masks, and verifies the drafts itself.

    Lossless at any temperature, top-k and top-p: the output has the distribution of the model's causal mode, of a
    block-causal model that of blocks of one over a store of single tokens. `nfe` counts the calls that verify,
    `state.draft_nfe` those that draft.

    Args:
        window: slots evaluated at once: the next token and `window - 1` drafts. None is the model's block.
        rule: "ratio" accepts a draft x with min(1, p(x) / q(x)); "match" where a token drawn from p equals it, which
            accepts less often, and is what the published code does.
        threshold: None drafts in one call. With a number masks are filled over several calls, in each those whose
            token has at least this probability, and the surest; drafts then depend on each other and need rule="match".
        adapter: whether drafts are made with the checkpoint's adapter; None is yes where there is one.
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
        """min(1, p(x) / q(x)), or whether the token drawn from p is the draft."""
        if self.rule == "ratio":
            return window.ratio().clamp(max=1)
        return (window.fresh == window.drafts.tokens).to(window.p.dtype)

    # ---- start ----------------------------------------------------------------------------------------------------

    def check_model(self, model: Any) -> None:
        """Raise TypeError for a model of another kind, ValueError for one that does not fill blocks of masks, or has no
        adapter that was asked for."""
        Sampler.check_model(self, model)
        facts, own = model.facts, getattr(model, "own_drafts", None)
        why = None
        if facts.topology in ("causal", "causal_context"):
            why = "it does not say what a mask is" if own is None or facts.mask_token_id is None else None
        elif facts.topology != "block_causal":
            why = f"it is {facts.topology.replace('_', '-')}"
        elif facts.whole_blocks:
            why = "it chooses experts for whole blocks, and would for other ones than its own"
        elif own is not None:
            why = "in this mode it is not causal: load it with topology='causal' or as it is by default"
        if why is None and not (model.supports_store and model.supports_visibility and model.pads):
            why = "it does not run over a key/value store with masks of attention"
        if why is not None:
            raise ValueError(
                f"sampler {self.name!r} needs a model that also decodes blocks of masks (Nemotron-Labs-Diffusion, or a "
                f"block-causal one); {facts.name} cannot: {why}"
            )
        if self.adapter and (own is None or own.adapter is None):
            raise ValueError(f"adapter=True: {facts.name} has no adapter for drafts")

    @torch.inference_mode(False)  # else only inference mode could go on with the state
    @torch.no_grad()
    def start(self, model: Any, prompt: Any, request: Request | None = None, **arguments: Any) -> CausalState:
        """Make the state of one request: see `paradec.samplers.causal.base.CausalSampler.start`.

        Raises:
            TypeError, ValueError: a model that cannot do this, or a prompt with masks.
        """
        self.check_model(model)
        own = getattr(model, "own_drafts", None)
        block = model.facts.block_length if own is None else own.block_length
        method = self if self.window is not None else replace(self, window=block)
        state = super(SelfSpeculative, method).start(model, prompt, request, **arguments)
        mask = model.facts.mask_id
        if bool(((state.canvas == mask) & state.given).any()):
            raise ValueError(f"the prompt holds the mask id {mask}; sampler {self.name!r} goes on after prompts alone")
        return state

    def _first_drafts(self, state: CausalState, model: Any) -> None:
        """None: the first step evaluates the prompt, and makes one token."""
        state.drafting = Drafting(model, *np.zeros((3, state.batch), np.int64))
        state.drafted[:] = 0

    # ---- step -----------------------------------------------------------------------------------------------------

    def query(self, state: CausalState) -> list[CausalQuery]:
        """As `ChainSampler.query`; of block-causal models the tokens, and masks beside them."""
        if state.facts.topology != "block_causal":
            return super().query(state)
        return verifying(state, self._evaluated(state))

    def observe(self, state: CausalState, proposal: Proposal) -> Notes:
        notes, mask = super().observe(state, proposal), state.facts.mask_token_id
        if state.facts.topology == "block_causal" and notes.drafts is not None:
            notes.drafts = {draft for draft in notes.drafts if draft[2] != mask}
        return notes

    def _verify(self, window: DraftWindow, drafted: Tensor, chance: Tensor, uniform: Tensor) -> Verified:
        return verify(window, drafted, chance, uniform, resample=self.rule == "ratio")

    def _draft(
        self, state: CausalState, proposal: Proposal, window: DraftWindow, found: Verified, count: Tensor
    ) -> None:
        rows = proposal.rows[state.end[proposal.rows] - state.committed[proposal.rows] > 1]
        state.drafted[proposal.rows] = 0
        if len(rows) and state.width > 1:
            OwnBlock(self.threshold, self.adapter is not False).fill(state, rows, None)

"""What a rollout records of a masked decoding (`paradec.core.rollouts`), and what cannot be recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from paradec.caches.table import EXACT, verdict
from paradec.core.checks import shown
from paradec.core.rollouts import FORCED, GIVEN, NEVER, Rollout, settings_of
from paradec.core.rows import row_layout
from paradec.samplers.features.feature import Ends, Feature
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import Decision, MaskedProposal


def check_recorded(sampler: Any, model: Any, state: MaskedState) -> None:
    """Raise ValueError where a decision's log-probability is not one of a state that the rollout says."""
    request, why = state.request, None
    rules = getattr(sampler, "members", ()) or (sampler,)
    holes = bool((state.answer_start > state.prompt_length).any())
    if sampler.needs.multi_step:
        why = f"sampler {sampler.name!r}, which takes several steps in one call"
    elif _overrides(sampler, "commit") or _overrides(sampler, "propose"):
        why = f"sampler {sampler.name!r}, whose steps are its own"
    elif any(_overrides(rule, "guidance") for rule in rules):
        why = f"sampler {sampler.name!r}, whose guidance changes from step to step"
    elif any(_overrides(rule, "weighs_mask") for rule in rules):
        why = f"sampler {sampler.name!r}, whose distribution has the mask in it"
    elif request.eos_early_stop and any(_overrides(rule, "trim") for rule in rules):
        why = f"sampler {sampler.name!r}, which cuts rows off on the way; give eos_early_stop=False"
    elif request.rng == "reference":
        why = "rng='reference', whose distributions have the mask in them"
    elif getattr(model, "reads_order", False):
        why = f"{model.facts.name}, whose answers depend on the order of what is decided as well"
    elif holes and request.holes_eos_inf and model.facts.eos_token_ids:
        why = "holes that end tokens are kept out of; give holes_eos_inf=False"
    if why is not None:
        raise ValueError(f"rollout=True does not work with {why}")


def _overrides(sampler: Any, name: str) -> bool:
    """Whether a sampler has a method of the base's in a way of its own. (The base imports what imports this.)"""
    method: str = getattr(type(sampler), name).__qualname__
    return method != f"MaskedSampler.{name}"


@dataclass
class RecordedRollout(Feature):
    """Keeps what is written, whatever becomes of it at a row's end, with its log-probabilities."""

    tokens: Tensor = field(metadata=row_layout(columns=1))
    steps: Tensor = field(metadata=row_layout(columns=1, fill=GIVEN))
    logp: Tensor = field(metadata=row_layout(columns=1, fill=torch.nan))
    drawn: Tensor = field(metadata=row_layout(columns=1, fill=torch.nan))
    kept_writes: list[list[Tensor]] | None = field(metadata=row_layout(fill=[]))
    """Of samplers that take back: what steps wrote, row by row, [n, 5] float64 tensors of step, position, token and
    its two log-probabilities."""
    told: dict[str, Any]
    """The request's settings."""
    version: int
    """Of the weights when it began."""
    approximation: str | None
    """What about the cache lets steps evaluate something else than whole rows."""

    host_only = "rollouts are recorded step by step"

    @classmethod
    def of(cls, state: MaskedState, sampler: Any, model: Any) -> Self:
        """That of a request that begins.

        Raises:
            ValueError: a rollout that cannot be recorded.
        """
        check_recorded(sampler, model, state)
        canvas = state.canvas
        column = torch.arange(canvas.shape[1], device=canvas.device)
        outside = column >= torch.as_tensor(state.length, device=canvas.device).unsqueeze(1)
        steps = torch.full_like(canvas, NEVER).masked_fill(state.given | outside, GIVEN)
        writes: list[list[Tensor]] | None = [[] for _ in range(state.batch)] if sampler.needs.revises else None
        told = settings_of(state.request, Rollout.named(state.facts, sampler))
        why = None if verdict(sampler, state.cache, state.facts).status == EXACT else f"cache={state.cache.name!r}"
        logp, version = torch.full_like(canvas, torch.nan, dtype=torch.float64), getattr(model, "weights_version", 0)
        return cls(canvas.masked_fill(outside, 0), steps, logp, logp.clone(), writes, told, version, why)

    def on_close(
        self, state: MaskedState, proposal: MaskedProposal, decision: Decision, tokens: np.ndarray, ends: Ends
    ) -> bool:
        window, found = state.window, proposal.logprobs
        assert found is not None
        # what was moved or taken back has no probability of its own
        strange = decision.values != proposal.values
        chosen, drawn = (
            (found.chosen if each is None else each).masked_fill(strange, torch.nan)
            for each in (found.chosen, found.tempered)
        )
        step = (
            torch.as_tensor(state.row_step[proposal.rows] - 1, device=chosen.device).unsqueeze(1).expand(chosen.shape)
        )
        steps = step.masked_fill(decision.values == state.facts.mask_id, NEVER)
        values = ((self.tokens, decision.values), (self.steps, steps), (self.logp, chosen), (self.drawn, drawn))
        for own, new in values:
            window.write(own, torch.where(decision.selected, new, window.read(own)))
        if self.kept_writes is not None:
            every = torch.stack((step, window.positions, decision.values), -1).double()
            every = torch.cat((every, chosen.unsqueeze(-1), drawn.unsqueeze(-1)), -1).cpu()
            for row, own, selected in zip(proposal.rows, every, decision.selected.cpu(), strict=True):
                self.kept_writes[row].append(own[selected])
        return False

    def record_forced(self, state: MaskedState, row: int, positions: Tensor, tokens: Tensor) -> None:
        """Record tokens [n] that are written at positions [n] of a row before its next step, without a forward."""
        self.tokens[row, positions] = tokens
        self.steps[row, positions] = FORCED - int(state.row_step[row])

    def read(self, model: Any, state: MaskedState) -> Rollout:
        """What was recorded until now."""
        length = torch.as_tensor(state.length).clone()
        width, tempered = int(length.max()), state.request.temperature > 0
        suppressed = torch.full((state.batch, 1), state.mask_id)
        if state.suppressed is not None:
            own = state.suppressed.cpu()
            suppressed = torch.cat((suppressed, own if own.ndim == 2 else own.expand(state.batch, -1)), 1)
        writes: Tensor | None = None
        if self.kept_writes is not None:
            rows = enumerate(self.kept_writes)
            every = [torch.nn.functional.pad(each, (1, 0), value=row) for row, own in rows for each in own]
            writes = torch.cat([torch.empty(0, 6, dtype=torch.float64), *every])
        approximation = self.approximation or approximation_of(state)
        if getattr(model, "weights_version", 0) != self.version:
            approximation = "weights that changed on the way"
        return Rollout(
            tokens=self.tokens[:, :width].cpu().clone(),
            step_map=self.steps[:, :width].cpu().clone(),
            logp=self.logp[:, :width].cpu().clone(),
            logp_drawn=self.drawn[:, :width].cpu().clone() if tempered else None,
            length=length,
            prompt_length=torch.as_tensor(state.prompt_length).clone(),
            suppressed=suppressed,
            settings=dict(self.told),
            version=self.version,
            approximation=approximation,
            writes=None if writes is None else writes[:, :4].long(),
            writes_logp=None if writes is None else writes[:, 4].clone(),
            writes_logp_drawn=None if writes is None or not tempered else writes[:, 5].clone(),
        )


def approximation_of(state: MaskedState) -> str | None:
    """What beside the cache lets steps evaluate something else than whole rows; None where nothing does."""
    if "suffix_window" in state.features:
        return f"suffix={shown(state.request.suffix)}"
    if "sparse_attention" in state.features:
        return "sparse attention"
    feature = state.features.get("prefix_reuse")
    reuse = None if feature is None else feature.reuse
    if reuse is not None and not (state.facts.topology == "block_causal" and getattr(reuse.kept, "exact", True)):
        return "keys and values of a prefix"
    return None

"""What a rollout records of a masked decoding (`paradec.core.rollouts`), and what cannot be recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paradec.core.rollouts import GIVEN, NEVER, Rollout
from paradec.request import Request
from paradec.samplers.masked.base import MaskedSampler
from paradec.samplers.masked.kept_logprobs import KeptLogProbs
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.views import Decision, MaskedProposal


def check(sampler: Any, model: Any, request: Request, gaps: bool) -> None:
    """Raise ValueError where a decision's log-probability is not one of a state that the rollout says.

    Args:
        gaps: whether something given follows a mask.
    """
    kind, name, why = type(sampler), model.facts.name, None
    rules = (sampler, *getattr(sampler, "members", ()))
    if sampler.needs.revises:
        why = f"sampler {sampler.name!r}, which takes back what it has written; trace=True has every write"
    elif sampler.needs.multi_step or kind.commit is not MaskedSampler.commit or kind.propose is not MaskedSampler.propose:
        why = f"sampler {sampler.name!r}, which takes several steps in one call"
    elif any(type(rule).guidance is not MaskedSampler.guidance for rule in rules):
        why = f"sampler {sampler.name!r}, whose guidance changes from step to step"
    elif any(type(rule).weighs_mask is not MaskedSampler.weighs_mask for rule in rules):
        why = f"sampler {sampler.name!r}, whose distribution has the mask in it"
    elif request.eos_early_stop and "learn2pd" in (rule.name for rule in rules):
        why = f"sampler {sampler.name!r}, which cuts rows off on the way; give eos_early_stop=False"
    elif request.rng == "reference":
        why = "rng='reference', whose distributions have the mask in them"
    elif model.reads_order:
        why = f"{name}, whose answers depend on the order of what is decided as well"
    elif gaps and request.holes_eos_inf and model.facts.eos_token_ids:
        why = "holes that end tokens are kept out of; give holes_eos_inf=False"
    if why is not None:
        raise ValueError(f"rollout=True does not work with {why}")


@dataclass
class RecordedRollout(KeptLogProbs):
    """Keeps what is written, whatever becomes of it at a row's end, with its log-probabilities."""

    rollout_tokens: Tensor
    rollout_drawn: Tensor | None

    per_row = {"logprobs": None, "rollout_tokens": 0, "rollout_drawn": torch.nan}
    host_only = "rollouts are recorded step by step"

    def written(self, state: MaskedState, proposal: MaskedProposal, decision: Decision) -> None:
        super().written(state, proposal, decision)
        window = state.window
        kept = [(self.rollout_tokens, decision.values)]
        if self.rollout_drawn is not None and proposal.logprobs is not None:
            assert proposal.logprobs.tempered is not None
            kept.append((self.rollout_drawn, proposal.logprobs.tempered))
        for own, new in kept:
            window.write(own, torch.where(decision.selected, new.to(own.dtype), window.read(own)))


def rollout_of(model: Any, state: MaskedState) -> Rollout:
    """What a state has recorded, in the columns of its canvas."""
    tracker = next(tracker for tracker in state.trackers if isinstance(tracker, RecordedRollout))
    request, found = state.request, tracker.logprobs
    length = torch.as_tensor(state.length)
    width = int(length.max())
    row_end = torch.arange(width) >= length.unsqueeze(1)
    given = state.given.cpu()[:, :width] | row_end
    step = torch.where(found.step.cpu() < 0, NEVER, found.step.cpu())[:, :width].masked_fill(given, GIVEN)
    suppressed = torch.full((state.batch, 1), state.mask_id)
    if state.suppressed is not None:
        own = state.suppressed.cpu()
        suppressed = torch.cat((suppressed, own if own.ndim == 2 else own.expand(state.batch, -1)), 1)
    approximate = state.suffix is not None or state.attention_state is not None
    approximate |= not state.cache.exact_for(state.facts.topology) and state.cache.name != "none"
    reuse = state.reuse
    drawn = tracker.rollout_drawn
    return Rollout(
        tokens=tracker.rollout_tokens.cpu()[:, :width].masked_fill(row_end, 0),
        step_map=step,
        logp=found.chosen.cpu()[:, :width].clone(),
        logp_drawn=None if drawn is None else drawn.cpu()[:, :width].clone(),
        length=length.clone(),
        prompt_length=torch.as_tensor(state.prompt_length).clone(),
        suppressed=suppressed,
        settings=request.to_dict() | {"model": state.facts.name},
        version=model.weights_version,
        exact=not approximate and (reuse is None or state.facts.topology == "block_causal"),
    )

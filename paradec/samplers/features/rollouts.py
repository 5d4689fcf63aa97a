"""Rollouts (`rollout`): all writes of a request with their steps and log-probabilities (`paradec.core.rollouts`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from paradec.caches.table import EXACT, verdict
from paradec.core.checks import short_repr
from paradec.core.logprobs import StepLogProbs, write_columns
from paradec.core.rollouts import FORCED, GIVEN, NEVER, Rollout, request_settings
from paradec.core.rows import row_layout
from paradec.samplers.features.feature import Ends, Feature, overrides
from paradec.samplers.features.logprobs import step_logprobs


@dataclass
class RecordedRollout(Feature):
    """Record of all writes of a request with their log-probabilities, including those after a row's end."""

    tokens: Tensor = field(metadata=row_layout(columns=1))
    steps: Tensor = field(metadata=row_layout(columns=1, fill=GIVEN))
    logp: Tensor = field(metadata=row_layout(columns=1, fill=torch.nan))
    logp_drawn: Tensor = field(metadata=row_layout(columns=1, fill=torch.nan))
    writes: list[list[Tensor]] | None = field(metadata=row_layout(fill=[]))
    """Each row's writes, [n, 5] float64: step, position, token, two log-probabilities. None if the method takes no
    tokens back."""
    settings: dict[str, Any]
    version: int
    """Version of the weights at the start."""
    approximation: str | None
    """The request's argument that makes logits differ from those of whole rows, or None."""

    why_host_only = "rollouts are recorded step by step"

    @classmethod
    def from_request(cls, sampler: Any, model: Any, state: Any) -> Self:
        """Make a request's empty record. Raises ValueError if a replay cannot compute the log-probabilities."""
        masked = sampler.family == "masked"
        reasons = _masked_reasons(sampler, model, state) if masked else _causal_reasons(sampler, model, state)
        if (why := next((reason for reason, holds in reasons.items() if holds), None)) is not None:
            raise ValueError(f"rollout=True does not work with {why}")
        canvas = state.canvas
        column = torch.arange(canvas.shape[1], device=canvas.device)
        is_outside = column >= torch.as_tensor(state.length, device=canvas.device).unsqueeze(1)
        logp = torch.full_like(canvas, torch.nan, dtype=torch.float64)
        exact = not masked or verdict(sampler, state.cache, state.facts).status == EXACT
        return cls(
            tokens=canvas.masked_fill(is_outside, 0),
            steps=torch.full_like(canvas, NEVER).masked_fill(state.is_prompt | is_outside, GIVEN),
            logp=logp,
            logp_drawn=logp.clone(),
            writes=[[] for _ in range(state.batch)] if masked and sampler.needs.revises else None,
            settings=request_settings(
                state.request, {"model": state.facts.name, "sampler": sampler.name, "topology": state.facts.topology}
            ),
            version=getattr(model, "weights_version", 0),
            approximation=None if exact else f"cache={state.cache.name!r}",
        )

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        # tokens that were moved or taken back have no probability
        logprobs = proposal.logprobs.fill(decision.values != proposal.values)
        self._write(state, proposal, decision.values, decision.selected, logprobs, state.row_step[proposal.rows] - 1)
        return False

    def record_causal(self, state: Any, proposal: Any, tokens: Tensor, selected: Tensor) -> None:
        """Record the tokens [R, W] that a step of a causal model writes at positions `selected` [R, W] bool."""
        logits = proposal.quantities["logits"]
        if state.allowed is not None:
            logits = logits.masked_fill(~state.allowed, -torch.inf)
        logprobs = step_logprobs(state.request, logits, tokens.clamp(min=0), 0)
        self._write(state, proposal, tokens, selected, logprobs, state.row_step[proposal.rows])

    def _write(
        self, state: Any, proposal: Any, values: Tensor, selected: Tensor, logprobs: StepLogProbs, steps: np.ndarray
    ) -> None:
        rows, positions = proposal.rows, proposal.positions
        drawn_logp = logprobs.chosen if logprobs.at_temperature is None else logprobs.at_temperature
        step = torch.as_tensor(steps, device=values.device).unsqueeze(1).expand(values.shape)
        new_steps = step if self.writes is None else step.masked_fill(values == state.facts.mask_id, NEVER)
        targets = self.tokens, self.steps, self.logp, self.logp_drawn
        for target, values_to_write in zip(targets, (values, new_steps, logprobs.chosen, drawn_logp), strict=True):
            write_columns(target, rows, positions, selected, values_to_write)
        if self.writes is not None:
            columns = torch.stack((step, positions, values, logprobs.chosen, drawn_logp), -1).double().cpu()
            for row, columns_of_row, is_selected in zip(rows, columns, selected.cpu(), strict=True):
                self.writes[row].append(columns_of_row[is_selected])

    def record_forced(self, state: Any, row: int, positions: Tensor, tokens: Tensor) -> None:
        """Record tokens [n] that are written at positions [n] of a row without a forward, before its next step."""
        self.tokens[row, positions] = tokens
        self.steps[row, positions] = FORCED - int(state.row_step[row])

    def read(self, model: Any, state: Any) -> Rollout:
        length = torch.as_tensor(state.length).clone()
        width, tempered = int(length.max()), state.request.temperature > 0
        writes: Tensor | None = None
        if self.writes is not None:
            padded = [
                torch.nn.functional.pad(entries, (1, 0), value=row)
                for row, row_writes in enumerate(self.writes)
                for entries in row_writes
            ]
            writes = torch.cat([torch.empty(0, 6, dtype=torch.float64), *padded])
        approximation = self.approximation or _approximation(state)
        if getattr(model, "weights_version", 0) != self.version:
            approximation = "weights that changed while decoding"
        return Rollout(
            tokens=self.tokens[:, :width].cpu().clone(),
            step_map=self.steps[:, :width].cpu().clone(),
            logp=self.logp[:, :width].cpu().clone(),
            logp_drawn=self.logp_drawn[:, :width].cpu().clone() if tempered else None,
            length=length,
            prompt_length=torch.as_tensor(state.prompt_length).clone(),
            suppressed=_suppressed(state),
            settings=dict(self.settings),
            version=self.version,
            approximation=approximation,
            writes=None if writes is None else writes[:, :4].long(),
            writes_logp=None if writes is None else writes[:, 4].clone(),
            writes_logp_drawn=None if writes is None or not tempered else writes[:, 5].clone(),
        )


def _masked_reasons(sampler: Any, model: Any, state: Any) -> dict[str, bool]:
    request, name, rules = state.request, sampler.name, getattr(sampler, "members", ()) or (sampler,)
    has_holes = request.holes_eos_inf and bool((state.answer_start > state.prompt_length).any())
    trims = request.eos_early_stop and any(overrides(rule, "trim") for rule in rules)
    reads_order = getattr(model, "reads_order", False)
    return {
        f"sampler {name!r}, which runs several steps in one call": sampler.needs.multi_step,
        f"sampler {name!r}, which overrides the step": overrides(sampler, "commit") or overrides(sampler, "propose"),
        f"sampler {name!r}, whose guidance changes from step to step": any(overrides(r, "guidance") for r in rules),
        f"sampler {name!r}, whose distributions include the mask": any(overrides(r, "weighs_mask") for r in rules),
        f"sampler {name!r}, which shortens rows during decoding; give eos_early_stop=False": trims,
        "rng='reference', whose distributions include the mask": request.rng == "reference",
        f"{model.facts.name}, whose logits also depend on the order of decisions": reads_order,
        "holes without end tokens; give holes_eos_inf=False": has_holes and bool(model.facts.eos_token_ids),
    }


def _causal_reasons(sampler: Any, model: Any, state: Any) -> dict[str, bool]:
    """Return the reasons why tokens may not follow the model's distribution, with whether each reason holds."""
    name, topology, has_negative_prompt = model.facts.name, model.facts.topology, False
    if state.branches == 2:
        last = torch.as_tensor(state.prompt_length).to(state.context).unsqueeze(1) - 1
        last_token = state.context[: state.batch].gather(1, last)
        is_longer = (state.shift[1] != 1 - state.prompt_length).any()
        has_negative_prompt = bool(is_longer or (last_token != state.context[state.batch :, :1]).any())
    kind = topology.replace("_", "-")
    return {
        f"pictures ({name}), whose layouts prescribe tokens": state.grid is not None,
        f"{name}, a model of any order": getattr(model, "any_order", False),
        f"sampler {sampler.name!r} on {name}, which is {kind}: a replay has another distribution": topology != "causal",
        f"sampler {sampler.name!r}, which is not lossless and draws from another distribution": not sampler.lossless,
        "negative_prompt, which a rollout does not store": has_negative_prompt,
    }


def _suppressed(state: Any) -> Tensor:
    """List the ids that were never proposed: [B, S] int64."""
    if hasattr(state, "allowed"):  # causal models
        excluded = torch.empty(0, dtype=torch.int64) if state.allowed is None else (~state.allowed).nonzero().squeeze(1)
        return excluded.cpu().expand(state.batch, -1).clone()
    suppressed = torch.full((state.batch, 1), state.mask_id)
    if state.suppressed is None:
        return suppressed
    return torch.cat((suppressed, state.suppressed.cpu().expand(state.batch, -1)), 1)


def _approximation(state: Any) -> str | None:
    """Return the feature (the cache aside) that makes logits differ from those of whole rows, or None."""
    if "suffix_window" in state.features:
        return f"suffix={short_repr(state.request.suffix)}"
    if "sparse_attention" in state.features:
        return "sparse attention"
    reuse = state.features["prefix_reuse"].reuse if "prefix_reuse" in state.features else None
    if reuse is not None and not (state.facts.topology == "block_causal" and getattr(reuse.kept, "exact", True)):
        return "keys and values of a prefix"
    return None

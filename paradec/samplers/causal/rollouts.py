"""What a rollout records of a decoding of a causal model (`paradec.core.rollouts`), and what cannot be recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from paradec.core.logprobs import LogProbs, StepLogProbs
from paradec.core.protocol import Proposal
from paradec.core.rollouts import GIVEN, NEVER, Rollout, settings_of
from paradec.core.rows import ROWS
from paradec.samplers.causal.state import CausalState


def check_recorded(sampler: Any, model: Any, state: CausalState) -> None:
    """Raise ValueError where a token is drawn from something else than the model says of the tokens before it."""
    facts, why = model.facts, None
    if state.grid is not None:
        why = f"pictures ({facts.name}), whose layouts prescribe tokens"
    elif getattr(model, "any_order", False):
        why = f"{facts.name}, a model of any order"
    elif facts.topology != "causal":
        kind = facts.topology.replace("_", "-")
        why = f"sampler {sampler.name!r} on {facts.name}, which is {kind}: it decodes another distribution than replays"
    elif not sampler.lossless:
        why = f"sampler {sampler.name!r}, which is not lossless: it draws from another distribution than the model's"
    elif state.branches == 2:
        own = state.context[: state.batch].gather(
            1, torch.as_tensor(state.prompt_length).to(state.context)[:, None] - 1
        )
        if (state.shift[1] != 1 - state.prompt_length).any() or (own != state.context[state.batch :, :1]).any():
            why = "negative_prompt, which a rollout does not hold"
    if why is not None:
        raise ValueError(f"rollout=True does not work with {why}")


@dataclass
class RecordedTokens:
    """Keeps the log-probabilities of the tokens that become final."""

    said: LogProbs = field(metadata=ROWS)
    """At temperature 1."""
    drawn: LogProbs = field(metadata=ROWS)
    """At the temperature of the request."""
    told: dict[str, Any]
    """The request's settings."""
    version: int
    """Of the weights when it began."""

    @classmethod
    def of(cls, sampler: Any, model: Any, state: CausalState) -> Self:
        """That of a request that begins.

        Raises:
            ValueError: a rollout that cannot be recorded.
        """
        check_recorded(sampler, model, state)
        told = settings_of(state.request, Rollout.named(model.facts, sampler))
        columns, device = state.context.shape[1], state.context.device
        said, drawn = (LogProbs.empty(state.batch, columns, 0, device) for _ in range(2))
        return cls(said, drawn, told, getattr(model, "weights_version", 0))

    def note(self, state: CausalState, proposal: Proposal, tokens: Tensor, selected: Tensor) -> None:
        """Keep what a step said of the tokens [R, W] that it writes where `selected` [R, W]. The proposal has the
        guided logits of their slots in "logits" [R, W, V]."""
        logits: Tensor = proposal.quantities["logits"]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if state.allowed is not None:
            logits = logits.masked_fill(~state.allowed, -torch.inf)
        rows, steps = proposal.rows, state.row_step[proposal.rows]
        for own, temperature in ((self.said, 1.0), (self.drawn, state.request.temperature or 1.0)):
            found = StepLogProbs.of_logits(logits / temperature, tokens.clamp(min=0), 0)
            own.write(rows, proposal.positions, selected, found, steps)

    def read(self, model: Any, state: CausalState) -> Rollout:
        """What was recorded until now."""
        length, begin = (torch.as_tensor(each).clone() for each in (state.length, state.prompt_length))
        width = int(length.max())
        column, steps = torch.arange(width), self.said.step[:, :width].cpu()
        outside = column >= length.unsqueeze(1)
        given = (column < begin.unsqueeze(1)) | outside
        never = torch.where(given, GIVEN, NEVER)
        out = torch.empty(0, dtype=torch.int64) if state.allowed is None else (~state.allowed).nonzero().squeeze(1)
        changed = getattr(model, "weights_version", 0) != self.version
        return Rollout(
            tokens=state.canvas[:, :width].cpu().masked_fill(outside, 0),
            step_map=torch.where(steps >= 0, steps, never),
            logp=self.said.chosen[:, :width].cpu().clone(),
            logp_drawn=self.drawn.chosen[:, :width].cpu().clone() if state.request.temperature > 0 else None,
            length=length,
            prompt_length=begin,
            suppressed=out.cpu().expand(state.batch, -1).clone(),
            settings=dict(self.told),
            version=self.version,
            approximation="weights that changed on the way" if changed else None,
        )

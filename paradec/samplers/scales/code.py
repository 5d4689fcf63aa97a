"""CoDe: a large model makes the first scales, a small one the rest.

Chen et al., "Collaborative Decoding Makes Visual Auto-Regressive Modeling Efficient", arXiv 2411.17787, and its public
code. Training-free with two models that share their codes; the authors' own pairs are tuned for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from paradec.core.checks import check_int, check_model, shown
from paradec.core.protocol import Commit
from paradec.core.query import Cost
from paradec.core.trace import Notes
from paradec.models.images.scales import ScaleQuery
from paradec.request import Request
from paradec.samplers.scales.base import ScaleProposal, ScaleSampler, ScaleState

WARM, WARM_SHARE = 1.1, 0.7
"""The temperature of the first scales in the public code, 7 of 10; it is 1 at the others."""
SPLIT_SHARE = 0.8


@dataclass(frozen=True)
class CoDe(ScaleSampler):
    """`drafter`, the large model, makes the first `split` scales with its own store. The small model gets the features
    and inputs of these scales. It rebuilds its context in one call, which also gives the logits of scale `split`, and
    makes the other scales. Nothing is verified.

    `nfe` counts the small model's forwards, `state.draft_nfe` the large one's.

    Args:
        drafter: a model of scales with the same scales, classes and codes, the larger one. `to_dict` names it only.
        split: scales that the drafter makes, 0 to all of them; None is 8 of 10, or the same share. The paper's are 6 to
            9.
        temperatures: as for `var`; None is 1.1 at the first 7 of 10 scales and 1 at the others, as published.
        guidance_schedule, top_ks, smooth: as for `var`. The public code has top_k=600 at all scales.

    The public code draws tokens for the drafted scales once more, from the small model's unguided logits, and discards
    them; that is left out. With one seed for both models the small one repeats the large one's random numbers in the
    public code; here each scale has its own.
    """

    drafter: Any = None
    split: int | None = None

    name = "code"
    paper = "CoDe"
    arxiv = "2411.17787"
    summary = "a large model makes the first scales, a small one the rest"
    request_defaults: ClassVar[Mapping[str, Any]] = {"temperature": 1.0, "top_k": 600}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("split", self.split, low=0, high=2**10, none=True)
        if self.drafter is not None:
            check_model(f"drafter of {self.name!r}", self.drafter, self.models)

    def split_of(self, scales: int) -> int:
        """Scales that the drafter makes of so many."""
        return round(SPLIT_SHARE * scales) if self.split is None else self.split

    @torch.inference_mode(False)
    def start(self, model: Any, prompt: Any, request: Request | None = None, /, **arguments: Any) -> ScaleState:
        """As for `var`.

        Raises:
            ValueError: no drafter, one with other scales, classes or codes, or a split that is out of range.
        """
        self.check_model(model)
        self.check_pair(model)
        state = super().start(model, prompt, request, **arguments)
        split = self.split_of(len(state.scales))
        if split:  # neither has memory before its first call
            state.after, state.store = state.store, self.drafter.store(state.branches * state.batch, split - 1)
        return state

    def check_pair(self, model: Any) -> None:
        """Raise ValueError unless the drafter and `model` can make one picture."""
        if self.drafter is None:
            raise ValueError(
                f"sampler 'code' needs drafter=..., the larger model, whose scales {model.facts.name} ends"
            )
        for name in ("scales", "classes", "vocab_size", "code_dim"):
            ours, other = getattr(model.facts, name), getattr(self.drafter.facts, name)
            if ours != other:
                raise ValueError(
                    f"drafter={self.drafter.facts.name} has {name}={shown(other)}; {model.facts.name} has {shown(ours)}"
                )
        if not torch.equal(model.codes.cpu(), self.drafter.codes.to("cpu", model.codes.dtype)):
            raise ValueError(f"drafter={self.drafter.facts.name} has another codebook than {model.facts.name}")
        if self.split_of(len(model.facts.scales)) > len(model.facts.scales):
            raise ValueError(f"split={self.split} must be an integer from 0 to {len(model.facts.scales)}, the scales")

    def query(self, state: ScaleState) -> list[ScaleQuery]:
        return [replace(query, drafting=self.drafts(state)) for query in super().query(state)]

    def drafts(self, state: ScaleState) -> bool:
        """Whether the drafter makes the next scale."""
        return state.index < self.split_of(len(state.scales))

    def step(self, model: Callable[..., Any], state: ScaleState) -> ScaleProposal:
        return super().step(self.drafter if self.drafts(state) else model, state)

    def temperature(self, state: ScaleState) -> float:
        if self.temperatures is not None:
            return super().temperature(state)
        warm = state.index < math.ceil(WARM_SHARE * len(state.scales))
        return state.request.temperature * (WARM if warm else 1.0)

    def commit(self, state: ScaleState, proposal: ScaleProposal) -> Commit:
        drafted = self.drafts(state)
        commit = super().commit(state, proposal)
        if drafted and not self.drafts(state) and not state.done:
            state.store, state.after, state.stored = state.after, None, 0
        return commit

    def count(self, state: ScaleState, cost: Cost) -> None:
        if self.drafts(state):
            state.draft_counts = state.draft_counts + cost.counts
        else:
            super().count(state, cost)

    def observe(self, state: ScaleState, proposal: ScaleProposal) -> Notes:
        drafted = self.drafts(state)
        notes = super().observe(state, proposal)
        notes.draft_nfe = (state.draft_nfe + drafted).tolist()
        return replace(notes, nfe=[0] * state.batch) if drafted else notes

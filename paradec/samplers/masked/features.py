"""Log-probabilities of what is written, and the rollout that is recorded, where a request asks for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.logprobs import LogProbs, StepLogProbs
from paradec.core.rows import ROWS
from paradec.kernels.token_stats import path_for
from paradec.samplers.features.feature import Ends, Feature
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import Decision, MaskedProposal


@dataclass
class KeptLogProbs(Feature):
    """Keeps the log-probabilities of what is written."""

    logprobs: LogProbs = field(metadata=ROWS)

    host_only = "logprobs are kept step by step"

    def reads_window(self, state: MaskedState) -> bool:
        return True

    def on_close(
        self, state: MaskedState, proposal: MaskedProposal, decision: Decision, tokens: np.ndarray, ends: Ends
    ) -> bool:
        if decision.logprobs is None:
            assert proposal.logprobs is not None
            decision.logprobs = proposal.logprobs.but(decision.values == state.facts.mask_id)  # taken back
        steps: np.ndarray | Tensor = state.row_step[proposal.rows] - 1 if decision.steps is None else decision.steps
        self.logprobs.write(proposal.rows, proposal.positions, decision.selected, decision.logprobs, steps)
        return False


def logprobs_features(state: MaskedState, sampler: Any, model: Any) -> dict[str, Feature]:
    """Make what keeps the log-probabilities, and the rollout, that a request asks for.

    Raises:
        ValueError: a rollout that cannot be recorded.
    """
    count = state.request.logprobs or 0
    features: dict[str, Feature] = {
        "logprobs": KeptLogProbs(LogProbs.empty(state.batch, state.canvas.shape[1], count, model.device))
    }
    if state.request.rollout:
        from paradec.samplers.masked.rollouts import RecordedRollout

        features["rollout"] = RecordedRollout.of(state, sampler, model)
    return features


def step_logprobs(state: MaskedState, logits: Tensor, tokens: Tensor, count: int, known: Tensor | None) -> StepLogProbs:
    """Of a query's tokens [N, W] under softmax(logits [N, W, V]), with the `count` likeliest; for rollouts at the
    request's temperature as well. known: as `known_probabilities` gives it."""
    found, temperature = StepLogProbs.of_logits(logits, tokens, count, known), state.request.temperature
    if not state.request.rollout or temperature == 0:
        return found
    found.tempered = found.chosen
    if temperature != 1:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        found.tempered = StepLogProbs.of_logits(wide / temperature, tokens, 0).chosen
    return found


def known_probabilities(sampler: Any, state: MaskedState, logits: Tensor, confidence: Tensor) -> Tensor | None:
    """The probabilities [N, W] of a query's tokens under softmax(logits [N, W, V]), where its confidences are just
    these; None where they are something else, and in small vocabularies, which are read again at no cost."""
    changed = sampler.needs.processes_logits or sampler.needs.score_from != "raw"
    if changed or state.generator is not None or not logits.is_cpu or path_for(logits) == "float64":
        return None
    return confidence if confidence.shape == logits.shape[:2] and bool((confidence > 0).all()) else None

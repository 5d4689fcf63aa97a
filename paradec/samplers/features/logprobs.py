"""Log-probabilities of committed tokens (`logprobs`), of a step and of a request."""

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


@dataclass
class RecordedLogProbs(Feature):
    """Record of the log-probabilities of all committed tokens."""

    logprobs: LogProbs = field(metadata=ROWS)

    why_host_only = "logprobs are recorded step by step"

    def reads_window(self, state: Any) -> bool:
        return True

    def on_close(self, state: Any, proposal: Any, decision: Any, tokens: np.ndarray, ends: Ends) -> bool:
        if decision.logprobs is None:
            decision.logprobs = proposal.logprobs.fill(decision.values == state.facts.mask_id)  # masked again
        steps: np.ndarray | Tensor = state.row_step[proposal.rows] - 1 if decision.steps is None else decision.steps
        self.logprobs.write(proposal.rows, proposal.positions, decision.selected, decision.logprobs, steps)
        return False


def step_logprobs(
    request: Any, logits: Tensor, tokens: Tensor, count: int, known: Tensor | None = None
) -> StepLogProbs:
    """Compute log-probabilities of tokens [N, W] and of the `count` likeliest ids under softmax(logits [N, W, V]); for
    rollouts also at the request's temperature. known: from `known_probabilities`."""
    values = StepLogProbs.from_logits(logits, tokens, count, known)
    if request.rollout and request.temperature > 0:
        values.at_temperature = values.chosen
        if request.temperature != 1:
            upcast = logits.to(torch.promote_types(logits.dtype, torch.float32))
            values.at_temperature = StepLogProbs.from_logits(upcast / request.temperature, tokens, 0).chosen
    return values


def known_probabilities(sampler: Any, state: Any, logits: Tensor, confidence: Tensor) -> Tensor | None:
    """Return a masked sampler's confidences [N, W] if they are the tokens' probabilities under softmax(logits [N, W,
    V]); otherwise None. Also None on accelerators and for small vocabularies: computing them again is cheap."""
    is_changed = sampler.needs.processes_logits or sampler.needs.score_from != "raw"
    if is_changed or state.generator is not None or not logits.is_cpu or path_for(logits) == "float64":
        return None
    return confidence if confidence.shape == logits.shape[:2] and bool((confidence > 0).all()) else None

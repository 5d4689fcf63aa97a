"""KLASS ("KL-Guided Fast Inference in Masked Diffusion Models", arXiv 2511.05664, and its public code)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.samplers.distributions import divergence
from paradec.samplers.masked.loop import Needs, Stage, View
from paradec.samplers.masked.rules.low_confidence import LowConfidence


@dataclass(frozen=True)
class KLASS(LowConfidence):
    """Per row, commit every ready position. A masked position is ready if its confidence is > confidence_threshold and
    its distribution was stable, KL(p_t || p_(t-1)) < kl_threshold, in each of the last `history` steps. If none is
    ready, commit as many of the most confident positions as the linear schedule grants; without `steps`, commit one.

    Args:
        confidence_threshold: in [0, 1].
        kl_threshold: in nats, above 0; infinity makes every position stable.
        history: h, required number of consecutive stable steps, at least 1.

    In a block's first step the previous distribution is all zeros, as in the public code. With 1e-12 in the logarithm,
    the KL is then at least 27.6 - ln V, so no position is stable, and step h + 1 is the first with ready positions. A
    position that a cache does not evaluate in a step keeps its last distribution and its number of stable steps. With
    pipelined blocks (without `steps`), a block that must make progress and has no ready position commits its most
    confident one.

    Presets are "llada" (GSM8K; the paper uses blocks of 64) and "dream". `steps` plans the schedule but does not bound
    the model calls: a step with one ready position commits only this position, as in the public code. The last
    distribution is stored in float32, 4 bytes * vocabulary per position of the block: 16 MB per row at 32 positions and
    126,464 tokens. (The public code stores the last distributions of the whole canvas in float64.)
    """

    confidence_threshold: float = 0.9
    kl_threshold: float = 0.01
    history: int = 2

    name = "klass"
    paper = "KLASS"
    arxiv = "2511.05664"
    needs = Needs(least_by_steps=True)
    summary = "every confident token whose distribution has stopped changing, else the most confident ones"
    may_exceed_plan = True
    sweep = (
        {"confidence_threshold": 0.6, "kl_threshold": 0.015},
        {"confidence_threshold": 0.5, "kl_threshold": 0.1, "history": 1},
    )
    presets = {
        "llada": {"confidence_threshold": 0.6, "kl_threshold": 0.015},
        "dream": {"confidence_threshold": 0.9, "kl_threshold": 0.001},
    }

    def __post_init__(self) -> None:
        check_number("confidence_threshold", self.confidence_threshold, low=0, high=1)
        if self.kl_threshold != float("inf"):
            check_number("kl_threshold", self.kl_threshold, low=0, open_low=True)
        check_int("history", self.history, low=1)

    def memory(self) -> Mapping[str, MemorySpec]:
        return {"previous": MemorySpec(("window", "vocab")), "stable": MemorySpec(("window",), torch.int64)}

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        is_evaluated, previous = stage.undecided, stage.memory["previous"]
        p, kl = divergence(logits, previous)  # [R, W, V], [R, W]
        if is_evaluated.is_cpu:  # on an accelerator, indexing by a mask waits for the device
            p[~is_evaluated] = previous[~is_evaluated]
        else:
            p = torch.where(is_evaluated.unsqueeze(-1), p, previous)
        stable_before = stage.memory["stable"]  # [R, W] int64: number of consecutive stable steps
        stable = torch.where(is_evaluated, torch.where(kl < self.kl_threshold, stable_before + 1, 0), stable_before)
        return logits, {"previous": p, "stable": stable}

    def select(self, view: View) -> Tensor:
        ready = (view.scores > self.confidence_threshold) & (view.updates["stable"] >= self.history)
        return torch.where(ready.any(-1, keepdim=True), ready, view.scheduled())

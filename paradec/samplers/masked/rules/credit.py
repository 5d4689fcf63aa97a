"""CreditDecoding (arXiv 2510.06133: trace credit, credit fusion), and dInfer's CreditThresholdParallelDecoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paradec.core.checks import check_choice, check_int, check_number
from paradec.core.memory import MemorySpec
from paradec.samplers.masked.loop import MaskedSampler, Stage, View
from paradec.samplers.statistics import best_with_probability

MAX_SLOTS = 1024


@dataclass(frozen=True)
class Credit(MaskedSampler):
    """The threshold rule on logits with credit. C(i, v) is the credit of token v at position i. A step computes

            C(i, v) <- decay * C(i, v), then for the best token v*
            C(i, v*) <- C(i, v*) + p_i(v*) ** exponent,
            z~(i, v) = z(i, v) + fusion * ln(1 + C(i, v)),

    where p = softmax(z). It commits the masked positions whose best token has probability >= threshold under
    softmax(z~), and always the most confident position. Every step, even the first, adds credit before it reads credit.
    Credit is bounded: at constant p it tends to p ** exponent / (1 - decay).

    Args:
        threshold: tau, in [0, 1].
        decay: beta, in [0, 1].
        exponent: gamma, at least 0; a smaller exponent makes credit depend less on confidence.
        fusion: lambda (dInfer: alpha), at least 0; 0 gives the sampler `threshold`.
        storage: "dense" stores C, 4 bytes * vocabulary per position of the block (16 MB per row at 32 positions and
            126,464 tokens). "slots" stores `slots` tokens per position, 8 bytes each (2 KB per row at 8 slots). The
            result is the same unless a position has more than `slots` different best tokens within a block.
        slots: tokens per position under "slots", 1 to 1024; when full, the token with the least credit is replaced.

    Each row's credit starts at 0 in every block. The best token gets credit, even if another token is drawn at
    temperature > 0. At positions that a cache does not evaluate in a step, credit neither grows nor decays.

    The defaults are those that third parties report for the paper's final version, except `threshold` (0.95 in it).
    Presets "dinfer" and "sglang" have the settings of these projects. Unlike this class, SGLang's code compares the
    larger of the raw and the fused probability with the threshold, and a token that takes over a slot gets its credit.
    """

    threshold: float = 0.9
    decay: float = 0.7
    exponent: float = 0.2
    fusion: float = 0.65
    storage: str = "slots"
    slots: int = 8

    name = "credit"
    paper = "CreditDecoding"
    arxiv = "2510.06133"
    summary = "as threshold, with credit for tokens that stay the best over several steps"
    sweep = ({"threshold": 0.7}, {"threshold": 0.5})
    presets = {
        "dinfer": {"threshold": 0.9, "decay": 0.8, "exponent": 0.2, "fusion": 0.7, "storage": "dense"},
        "sglang": {"threshold": 0.95, "decay": 0.65, "exponent": 0.5, "fusion": 0.7, "storage": "slots", "slots": 8},
    }

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)
        check_number("decay", self.decay, low=0, high=1)
        check_number("exponent", self.exponent, low=0)
        check_number("fusion", self.fusion, low=0, high=1e6)
        check_choice("storage", self.storage, ("dense", "slots"))
        check_int("slots", self.slots, low=1, high=MAX_SLOTS)

    def memory(self) -> Mapping[str, MemorySpec]:
        if self.storage == "dense":
            return {"credit": MemorySpec(("window", "vocab"))}
        return {
            "credit": MemorySpec(("window", self.slots)),
            "tokens": MemorySpec(("window", self.slots), torch.int32, fill=-1),
        }

    def process_logits(self, logits: Tensor, stage: Stage) -> tuple[Tensor, Mapping[str, Tensor]]:
        best_token, p = best_with_probability(logits)  # [R, W]
        best_index, gain = best_token.unsqueeze(-1), (p**self.exponent).float().unsqueeze(-1)
        # a copy, at least float32: bfloat16 would lose small credit
        fused = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        is_evaluated = stage.undecided.unsqueeze(-1)
        credit = stage.memory["credit"]
        decayed = credit * self.decay
        if self.storage == "dense":
            credit = torch.where(is_evaluated, decayed.scatter_add_(-1, best_index, gain), credit)
            return fused.add_(credit.log1p().mul_(self.fusion)), {"credit": credit}
        tokens = stage.memory["tokens"]
        is_same = tokens == best_index
        is_stored = is_same.any(-1, keepdim=True)
        # empty slots have credit 0 and are used first
        slot = torch.where(is_stored, is_same.int().argmax(-1, keepdim=True), credit.argmin(-1, keepdim=True))
        value = torch.where(is_stored, decayed.gather(-1, slot), 0) + gain
        credit = torch.where(is_evaluated, decayed.scatter(-1, slot, value), credit)
        tokens = torch.where(is_evaluated, tokens.scatter(-1, slot, best_index.int()), tokens)
        bonus = credit.log1p().mul_(self.fusion).where(tokens >= 0, 0).to(fused.dtype)
        return fused.scatter_add_(-1, tokens.long().clamp_(min=0), bonus), {"credit": credit, "tokens": tokens}

    def select(self, view: View) -> Tensor:
        return (view.scores >= self.threshold) | view.best()

"""Rules that end a chain of drafts before its window is full. A `StopRule` is called after each draft, which is
then verified in any case; `Unconfident` does not read the draft. So no draft decides whether it is verified: exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from paradec.core.checks import check_int, check_number, short_repr
from paradec.samplers.causal.state import CausalState
from paradec.samplers.causal.window import read_drafts

StopRule = Callable[[Tensor, Tensor], Tensor]
"""Function of q [R, k, V] and the drafts so far [R, k] int64. Returns whether each row's window ends here, [R] bool;
this may depend only on the row itself."""


@dataclass(frozen=True)
class Unsure:
    """Stop after a draft x with q(x) < threshold, as transformers' `assistant_confidence_threshold` and SWIFT (arXiv
    2410.06916). With `product`, stop after k drafts if 1 - q(x_1) ... q(x_k) > threshold. This is the criterion of
    SpecDec++ (arXiv 2405.19715), which has a trained head instead of q.

    Args:
        threshold: from 0 to 1. product: see above. least: minimal number of drafts (2 in SpecDec++).
    """

    threshold: float = 0.4
    product: bool = False
    least: int = 1

    name: ClassVar[str] = "unsure"

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)
        check_int("least", self.least, low=1)

    def __call__(self, q: Tensor, drafts: Tensor) -> Tensor:
        chance = q.gather(-1, drafts.unsqueeze(-1)).squeeze(-1)
        is_unsure = 1 - chance.prod(1) > self.threshold if self.product else chance[:, -1] < self.threshold
        return is_unsure & (drafts.shape[1] >= self.least)

    def to_dict(self) -> dict[str, Any]:
        return {"stop": self.name} | asdict(self)


@dataclass(frozen=True)
class Unconfident:
    """Stop before the first draft with a confidence below the threshold (DSpark: needs a drafter with a confidence
    head). The first draft is always verified. threshold: from 0 to 1."""

    threshold: float = 0.5

    name: ClassVar[str] = "unconfident"

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, low=0, high=1)

    def to_dict(self) -> dict[str, Any]:
        return {"stop": self.name} | asdict(self)


RULES: dict[str, Any] = {rule.name: rule for rule in (Unsure, Unconfident)}


def make_stop_rule(setting: Any) -> Any:
    """Make a rule from the setting `stop`: a name, the data of `to_dict` or a callable. Raises ValueError for anything
    else."""
    if setting is None or isinstance(setting, Unconfident) or callable(setting):
        return setting
    data = {"stop": setting} if isinstance(setting, str) else setting
    if not isinstance(data, Mapping) or data.get("stop") not in RULES:
        raise ValueError(
            f"stop={short_repr(setting)} must be a callable of q and drafts, {' or '.join(map(repr, RULES))} (see "
            "paradec.samplers.causal.drafts.stopping)"
        )
    try:
        return RULES[data["stop"]](**{key: value for key, value in data.items() if key != "stop"})
    except TypeError as error:
        raise ValueError(f"stop={short_repr(setting)}: {error}") from None


def apply_rule(rule: StopRule, q: Tensor, drafts: Tensor) -> np.ndarray:
    """Return the rule's result for each row, [R] bool on the host. Raises ValueError for another type or shape."""
    result = rule(q, drafts)
    if not isinstance(result, Tensor) or result.shape != drafts.shape[:1] or result.dtype != torch.bool:
        raise ValueError(
            f"stop={short_repr(rule)} returned {short_repr(result)}; it must return [R] bool, R={len(drafts)}"
        )
    return result.cpu().numpy()


def shorten_windows(state: CausalState, rows: np.ndarray, rule: Any) -> None:
    """Shorten the full windows of rows by a rule."""
    max_drafts = state.width - 1
    if isinstance(rule, Unconfident):
        is_confident = state.memory.read(rows)["confidence"][:, 1:max_drafts] >= rule.threshold
        state.num_drafts[rows] = 1 + is_confident.long().cumprod(1).sum(1).cpu().numpy()
        return
    drafts = read_drafts(state, rows)
    q = drafts.distributions()
    count, active = np.full(len(rows), max_drafts), np.arange(len(rows))
    for k in range(1, max_drafts):
        index = torch.as_tensor(active, device=q.device)
        is_stopped = apply_rule(rule, q[index, :k], drafts.tokens[index, :k])
        count[active[is_stopped]] = k
        if not len(active := active[~is_stopped]):
            break
    state.num_drafts[rows] = count

"""Which masked samplers can say what a canvas keeps, and their schedules there."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from paradec.samplers.masked.loop import MaskedSampler
from paradec.samplers.masked.rules.combination import Combination
from paradec.samplers.masked.rules.origin import Origin
from paradec.samplers.masked.rules.random import Random

STAGES = ("query", "propose", "commit", "ranking_scores", "read_candidates", "draw_tokens")
"""Methods around `select` in the masked family that do not run here."""


def why_unsupported(rule: MaskedSampler) -> str | None:
    """Why a sampler cannot say what a canvas keeps, as a clause; None where it can."""
    if isinstance(rule, Combination):
        why_member = next((why for member in rule.members if (why := why_unsupported(member))), None)
        return why_member or ("its stages change logits from step to step" if rule.needs.processes_logits else None)
    if "text" not in rule.models:
        return "it is made for pictures"
    if rule.needs.multi_step or rule.needs.mask_probes:
        return "it evaluates drafts or mask probes, which a canvas has none of"
    if rule.needs.extra_quantities and not rule.needs.revises:
        return "it was trained on masks"
    if rule.needs.revises or rule.needs.decided_logits:
        return "it takes back what it decided, and in a canvas nothing is decided before it closes"
    memory = rule.memory()
    if any("vocab" in spec.dims for spec in memory.values()):
        return "it remembers a number for every token of every position: 256 MiB for a row of DiffusionGemma"
    if memory or rule.needs.processes_logits:
        return "it remembers what earlier steps decided, and on a canvas every step decides all anew"
    if any(getattr(type(rule), name) is not getattr(MaskedSampler, name) for name in STAGES):
        return "its scores, or its draws, are made in a step of its own"
    if rule.blocks(None) is not None:
        return "it cuts blocks of its own, and a canvas has the model's length"
    if isinstance(rule, Origin):
        return "its schedule is a probability for masks that are left"
    if isinstance(rule, Random) and rule.order == "block":
        return "order='block' is drawn once for a block of masks; use order='step'"
    return None


def check_rule(rule: MaskedSampler, user: str) -> MaskedSampler:
    """The rule, or ValueError with the reason."""
    why = why_unsupported(rule)
    if why is not None:
        raise ValueError(f"sampler {rule.name!r} cannot say what sampler {user!r} keeps of a canvas: {why}")
    return rule


def quota(rule: MaskedSampler, num_undecided: Tensor, step: np.ndarray, steps: int) -> Any:
    """`view.quota` of rules with a schedule: ceil(num_undecided [R] * step [R] / steps); a tuple for combinations."""
    if isinstance(rule, Combination):
        return tuple(quota(member, num_undecided, step, steps) for member in rule.rules)
    if type(rule).quota is MaskedSampler.quota or not rule.uses_steps:
        return None
    return -(-num_undecided.cpu().numpy() * step // steps)

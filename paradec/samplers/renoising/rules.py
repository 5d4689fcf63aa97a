"""Masked samplers that can select the kept positions of a canvas, and the schedules of such samplers on a canvas."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from paradec.samplers.masked.loop import MaskedSampler
from paradec.samplers.masked.rules.combination import Combination
from paradec.samplers.masked.rules.origin import Origin
from paradec.samplers.masked.rules.random import Random

STAGES = ("query", "propose", "commit", "ranking_scores", "read_candidates", "draw_tokens")
"""Methods around `select` in the masked family that do not run on canvases."""


def why_unsupported(rule: MaskedSampler) -> str | None:
    """Return why a sampler cannot select the kept positions of a canvas, as a clause; None if it can."""
    if isinstance(rule, Combination):
        why_member = next((why for member in rule.members if (why := why_unsupported(member))), None)
        return why_member or ("its stages change logits from step to step" if rule.needs.processes_logits else None)
    if "text" not in rule.models:
        return "it is made for pictures"
    if rule.needs.multi_step or rule.needs.mask_probes:
        return "it evaluates drafts or mask probes, which a canvas does not have"
    if rule.needs.extra_quantities and not rule.needs.revises:
        return "it was trained on masks"
    if rule.needs.revises or rule.needs.decided_logits:
        return "it reads or takes back decided tokens, and a canvas has none before it closes"
    memory = rule.memory()
    if any("vocab" in spec.dims for spec in memory.values()):
        return "it stores a number for every token of every position: 256 MiB for a row of DiffusionGemma"
    if memory or rule.needs.processes_logits:
        return "it remembers earlier steps, and on a canvas every step decides all positions anew"
    if any(getattr(type(rule), name) is not getattr(MaskedSampler, name) for name in STAGES):
        return "it overrides how scores or draws are made"
    if rule.blocks(None) is not None:
        return "it has a block policy, and a canvas has the model's length"
    if isinstance(rule, Origin):
        return "its schedule is a probability for the remaining masks"
    if isinstance(rule, Random) and rule.order == "block":
        return "order='block' is drawn once for a block of masks; use order='step'"
    return None


def check_rule(rule: MaskedSampler, user: str) -> MaskedSampler:
    """Return the rule, or raise ValueError with the reason. user: name of the sampler that needs the rule."""
    why = why_unsupported(rule)
    if why is not None:
        raise ValueError(f"sampler {rule.name!r} cannot be the rule of sampler {user!r} on a canvas: {why}")
    return rule


def quota(rule: MaskedSampler, num_undecided: Tensor, step: np.ndarray, steps: int) -> Any:
    """Compute `view.quota`: ceil(num_undecided [R] * step [R] / steps), or None; a tuple of these for a combination."""
    if isinstance(rule, Combination):
        return tuple(quota(member, num_undecided, step, steps) for member in rule.rules)
    if type(rule).quota is MaskedSampler.quota or not rule.uses_steps:
        return MaskedSampler.quota(rule, None, np.empty(0))  # type: ignore[arg-type]
    return -(-num_undecided.cpu().numpy() * step // steps)

"""Which masked samplers a test of all of them can run on a model; views, scores and rollouts to compare."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from tiny_models import MASK
from torch import Tensor

import paradec
from paradec.core.rollouts import Rollout
from paradec.models.adapter import Model
from paradec.samplers.masked.loop import LAST, View
from paradec.samplers.masked.view import Needs
from paradec.samplers.statistics import top_by_rank

UNREADY = {"learn2pd"}
"""They need something that was trained for the model."""
MASKED = [
    name for name in paradec.samplers.names() if paradec.samplers.get(name).family == "masked" and name not in UNREADY
]


def fits(name: str, model: Model) -> bool:
    """Whether the model can give what the sampler asks for: some evaluate masks beside the row (`mask_probes`), some
    are for some topologies."""
    needs = getattr(paradec.samplers.get(name), "needs", Needs())
    if needs.why_unsupported(model.facts) is not None or needs.moves and model.facts.delete_token_id is None:
        return False
    return not needs.mask_probes or (model.supports_visibility and model.facts.prediction == "same")


def topology_of(name: str) -> str:
    """The topology of models that a sampler is tested with: bidirectional, where it takes these."""
    topologies = paradec.samplers.get(name).needs.topologies
    return "bidirectional" if not topologies or "bidirectional" in topologies else topologies[0]


def facts_of(name: str, block_length: int) -> dict[str, object]:
    """The facts of a model of that topology, beside its defaults."""
    topology = topology_of(name)
    if topology == "bidirectional":
        return {}
    return {"topology": topology, "block_length": block_length, "delete_token_id": 5, "split_token_id": 7}


def taken(sampler: Any, request: dict[str, Any]) -> dict[str, Any]:
    """What of a request the sampler, or the one of that name, takes: some are for temperature 0."""
    method = paradec.samplers.create(sampler) if isinstance(sampler, str) else sampler
    return {key: value for key, value in request.items() if key not in method.unsupported}


INF = math.inf


def view_of(scores: Tensor) -> View:
    """A view of scores [R, W] whose candidates are those above -inf."""
    rows, width = scores.shape
    seen = {
        "scores": scores,
        "candidates": scores > -INF,
        "tokens": torch.zeros(rows, width, dtype=torch.int64),
        "positions": torch.arange(width).expand(rows, width) + 7,
        "quantities": {"confidence": scores},
        "top": top_by_rank,
    }
    # of the rest a rule without memory, schedule and draws has no use
    return View(**{field.name: None for field in fields(View)} | seen)


def random_scores(seed: int, entropies: bool = False) -> Tensor:
    """[12, W] scores, some with equal values, some positions decided; every row has a candidate, some only one."""
    generator = torch.Generator().manual_seed(seed)
    width = int(torch.randint(1, 40, (1,), generator=generator))
    scores = torch.rand(12, width, generator=generator, dtype=torch.float64)
    scores[::2] = (scores[::2] * 10).round() / 10
    if entropies:
        scores = -(3 * scores**3)
        scores[0] = LAST  # end tokens that are to come last
    decided = torch.rand(12, width, generator=generator) < torch.rand(12, 1, generator=generator)
    decided[torch.arange(12), torch.randint(width, (12,), generator=generator)] = False
    return scores.masked_fill(decided, -INF)


def by_trace(output: Any, mask: int = MASK) -> list[dict[int, tuple[int, int]]]:
    """Of each row, token and step by position: what the trace says was written last, and not taken back."""
    found: list[dict[int, tuple[int, int]]] = [{} for _ in output.trace.canvas]
    steps = [0] * len(found)
    for step in output.trace.steps:
        for row, position, token, _ in step.commits:
            found[row][position] = (token, steps[row])
            if token == mask:
                del found[row][position]
        steps = [count + (evaluated > 0) for count, evaluated in zip(steps, step.forwarded, strict=True)]
    return found


def assert_same(a: Rollout, b: Rollout) -> None:
    for name in ("tokens", "step_map", "length", "prompt_length", "suppressed"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("logp", "logp_drawn", "writes", "writes_logp", "writes_logp_drawn"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), equal_nan=True, rtol=0, atol=1e-12)
    assert (a.settings, a.version, a.approximation) == (b.settings, b.version, b.approximation)

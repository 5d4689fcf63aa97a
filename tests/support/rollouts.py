"""What the tests of rollouts share."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import MASK

from paradec.core.rollouts import Rollout


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

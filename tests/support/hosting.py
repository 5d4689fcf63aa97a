"""An engine in ten lines: it knows a model and the ids of its rows, and no sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.core.query import Query
from paradec.models.adapter import Model


def block_logits(model: Model, ids: list[int], start: int) -> Tensor:
    """[W, V]: what the model says of the tokens from `start` on, where nothing stands after `ids`."""
    tokens = torch.tensor([ids])
    logits = model(Query(rows=np.zeros(1, np.int64), tokens=tokens, positions=torch.arange(len(ids)).unsqueeze(0)))[0]
    source = (torch.arange(start, len(ids)) - model.facts.shift).clamp(min=0)
    return logits[source]


class Engine:
    """Requests over a model: their final ids are the engine's own copy, and grow by whole blocks."""

    def __init__(self, model: Model, hosted: Any):
        self.model, self.hosted = model, hosted
        self.ids: dict[Any, list[int]] = {}
        self.calls = 0

    def add(self, key: Any, prompt: list[int], new: int, **fields: Any) -> None:
        self.hosted.open(key, prompt, new, **fields)
        self.ids[key] = prompt[: self.hosted.window(key)[0]]

    def round(self, keys: list[Any]) -> dict[Any, Any]:
        """One forward and one step of some rows."""
        logits = {}
        for key in keys:
            start, window = self.hosted.window(key)
            assert start == len(self.ids[key]), "a window begins where the last one ended"
            logits[key] = block_logits(self.model, self.ids[key] + window.tolist(), start)
            self.calls += 1
        done = self.hosted.step(logits)
        for key, stepped in done.items():
            if stepped.closed:
                self.ids[key] += stepped.tokens.tolist()
        return done

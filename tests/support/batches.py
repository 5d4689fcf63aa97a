"""Batches that are filled and stepped, beside the plain loop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.batching.batch import Batch
from paradec.batching.slots import Ticket
from paradec.models.adapter import Model

ROWS = [[draw.randrange(36) for _ in range(draw.randint(1, 9))] for draw in map(random.Random, range(6))]
REQUEST: dict[str, Any] = {"max_new_tokens": 6, "block_length": 3, "temperature": 0.8, "seed": 2}


def drained(batch: Batch) -> list[Ticket]:
    ended = []
    while batch.occupied or batch.waiting:
        ended += batch.step()
    return ended + batch.step()


def tokens(ticket: Ticket) -> list[int]:
    assert ticket.output is not None
    return ticket.output.new_tokens[0].tolist()


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.pieces: list[list[int]] = []
        self.drafts: list[list[int]] = []
        self.ends = 0

    def put(self, ids: Tensor) -> None:
        assert ids.shape[0] == 1 and not self.ends
        self.pieces.append(ids[0].tolist())

    def put_draft(self, ids: Tensor) -> None:
        self.drafts.append(ids[0].tolist())

    def end(self) -> None:
        self.ends += 1


class Failing:
    """A model that fails for rows in which a token stands, or once it has been called so often. It raises `error`, or
    returns NaN where there is none."""

    def __init__(self, model: Model, token: int = -1, calls: int = -1, error: BaseException | None = None):
        self.model, self.token, self.left, self.error = model, token, calls, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, query: Any, *store: Any) -> Tensor:
        self.left -= 1
        if self.left == -1 and self.error is not None:
            raise self.error
        poisoned = (query.tokens == self.token).any(1)
        if poisoned.any() and self.error is not None:
            raise self.error
        if store and poisoned.any():  # what it writes is no better
            found = self.model(query, *store)
            for layers in (store[0].layer_keys, store[0].layer_values):
                for tensor in layers.values():
                    tensor[query.store_rows[poisoned]] = torch.nan
        else:
            found = self.model(query, *store)
        return found.masked_fill(poisoned.view(-1, 1, 1), torch.nan)


def values_below(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every list, array and tensor below a state, by path."""
    if isinstance(value, (list, np.ndarray, Tensor)):
        yield path, value
    if isinstance(value, dict):
        entries: Any = value.items()
    elif isinstance(value, (list, tuple)):
        entries = enumerate(value)
    elif type(value).__module__.startswith("paradec") and hasattr(value, "__dict__"):
        entries = vars(value).items()
    else:
        return
    for name, entry in entries:
        if depth < 5 and name not in ("facts", "request", "cache", "blocks", "model"):
            yield from values_below(entry, f"{path}.{name}", depth + 1)


def forgotten(state: Any, sizes: set[int]) -> list[str]:
    """Paths of the values below a state that have one of these sizes."""
    found = ((path, (len(value),) if isinstance(value, list) else value.shape) for path, value in values_below(state))
    return [path for path, shape in found if sizes & {*shape}]

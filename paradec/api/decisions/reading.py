"""The model's log-probabilities of given tokens at given positions of rows, in as few calls as rows fit into."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.api.decisions.canvases import first_step
from paradec.core.protocol import NotFinite
from paradec.core.query import StoreCall
from paradec.models.whole_rows import whole_rows

Row = tuple[int, ...]
SHORTEST = 16
"""Tokens that rows must have in common for a call of its own to evaluate them."""


@dataclass
class Reading:
    """What is to be read, and what was."""

    wanted: dict[Row, dict[int, set[int]]] = field(default_factory=dict)
    """By row and position: ids."""
    prompts: dict[Row, int] = field(default_factory=dict)
    """How many tokens of a row are its prompt."""
    found: dict[tuple[Row, int], dict[int, float]] = field(default_factory=dict)
    """By row and position: log-probabilities among all tokens."""
    forwards: int = 0

    def want(self, row: Row, at: int, ids: Sequence[int], prompt: int) -> None:
        """Read `ids` at the position `at` of a row, which is evaluated once for all that is wanted of it."""
        self.prompts[row] = prompt
        self.wanted.setdefault(row, {}).setdefault(at, set()).update(ids)

    def read(self, model: Any, batch_size: int, seeds: int, before_call: Callable[[], None] | None = None) -> None:
        """Evaluate all rows.

        Args:
            batch_size: rows of a call. seeds: of canvases, whose probabilities are means over noises of as many seeds.
            before_call: called before each; what it raises ends the reading.

        Raises:
            FloatingPointError: NaN or +inf among the logits.
        """
        rows, asks = sorted(self.wanted, key=len), before_call or (lambda: None)
        with torch.inference_mode():
            if model.facts.topology == "canvas":
                size = max(1, batch_size // seeds)
                for first in range(0, len(rows), size):
                    asks()
                    some = rows[first : first + size]
                    logits = first_step(model, some, [self.prompts[row] for row in some], seeds)
                    self.forwards += 2  # prompts, and canvases
                    for row, own in zip(some, logits, strict=True):
                        places = sorted(self.wanted[row])
                        self._note(model, row, places, own[:, [at - self.prompts[row] for at in places]])
                return
            begin = self._begin(model, rows)
            store = None if not begin else self._shared(model, rows[0][:begin])
            for part in _batches(rows, batch_size, model.pads):
                asks()
                at = [sorted(self.wanted[row]) for row in part]
                query = whole_rows(model, part, at, [self.prompts[row] for row in part], begin)
                logits = model(query) if store is None else model(query, store)
                self.forwards += 1
                for row, places, own in zip(part, at, logits, strict=True):
                    self._note(model, row, places, own.unsqueeze(0))

    def _begin(self, model: Any, rows: Sequence[Row]) -> int:
        """How many leading tokens all rows have in common, whose keys and values depend on nothing after them. 0 where
        a call for them would not pay."""
        facts = model.facts
        if len(rows) == 1 or not model.supports_store or facts.topology not in ("causal", "block_causal"):
            return 0
        if facts.prompt_aligned:  # the whole prompt is one block
            return 0
        # rows are wanted from some position on, and a shifted prediction is read one to the left of it
        most = min(min(self.wanted[row]) for row in rows) - 1
        low, high = min(rows), max(rows)
        common = next((at for at in range(most) if low[at] != high[at]), most)
        common -= common % facts.block_unit
        return common if common >= SHORTEST else 0

    def _shared(self, model: Any, prefix: Row) -> Any:
        """A store with the keys and values of what all rows begin with."""
        store = model.make_store(1, len(prefix))
        query = whole_rows(model, [prefix], [[len(prefix) - 1]], [len(prefix)])
        slots = torch.arange(len(prefix), device=model.device).unsqueeze(0)
        own = torch.zeros(1, dtype=torch.int64, device=model.device)
        query.store = StoreCall(own, slots, np.zeros(1, np.int64), len(prefix))
        model(query, store)
        self.forwards += 1
        return store

    def _note(self, model: Any, row: Row, places: Sequence[int], logits: Tensor) -> None:
        """Keep what logits [S, W, V] say of a row, the mean probability over S noises. places: those of the first of
        the W columns."""
        logits = logits[:, : len(places)]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = logits.logsumexp(-1)
        if not total.isfinite().all():
            raise NotFinite(f"{model.facts.name} returned NaN or +inf for a row of {len(row)} tokens", np.zeros(1, int))
        for column, at in enumerate(places):
            ids = sorted(self.wanted[row][at])
            chosen = logits[:, column, ids] - total[:, column, None]
            said = (chosen.logsumexp(0) - math.log(len(chosen))).double().tolist()
            self.found[row, at] = dict(zip(ids, said, strict=True))


def _batches(rows: Sequence[Row], size: int, pads: bool) -> Iterator[Sequence[Row]]:
    """Rows that go into one call, in order: at most `size`, of one length where the model takes no padding."""
    first = 0
    while first < len(rows):
        stop = first + size
        part = [row for row in rows[first:stop] if pads or len(row) == len(rows[first])]
        yield part
        first += len(part)

"""The key/value store: preallocated per layer, written at given slots, handed to transformers as its `Cache`.

Keys are stored after the rotary embedding at their absolute positions, which never change. A position's slot is the
position itself. Importing this module imports transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from paradec.protocol import Query


class KeyValueStore(Cache):
    """Keys and values of `rows` rows of up to `length` positions, allocated layer by layer at the first forward.

    One slot more than `length` is kept for padding, which is written there and never seen.

    Args:
        rows: rows of the store; guidance branches have their own.
        length: positions per row.
        device: where the masks live (keys and values live where their layer computes them).
    """

    def __init__(self, rows: int, length: int, device: torch.device):
        super().__init__(layers=[])
        self.length = length
        self.filled = torch.zeros(rows, length + 1, dtype=torch.bool, device=device)
        """[rows, length + 1] bool: slots that hold something."""
        self.layer_keys: dict[int, Tensor] = {}
        self.layer_values: dict[int, Tensor] = {}
        self._rows: Tensor | None = None
        self._slots: Tensor | None = None
        self._whole = False

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for layers in (self.layer_keys, self.layer_values) for t in layers.values())

    def bind(self, query: Query) -> KeyValueStore:
        """Say which rows and slots the next forward writes and reads; returns itself as `past_key_values`."""
        self._rows = query.store_rows.unsqueeze(1)
        self._slots = torch.where(query.slots < 0, self.length, query.slots)
        self._whole = len(query.store_rows) == len(self.filled)
        self.filled[self._rows, self._slots] = True
        self.filled[:, self.length] = False
        return self

    def visible(self, query: Query) -> Tensor:
        """[R, 1, 1, length] bool: the slots that a forward of this query sees, its own writes included."""
        filled = self.filled[query.store_rows]
        slots = torch.where(query.slots < 0, self.length, query.slots)
        return filled.scatter(1, slots, True)[:, None, None, : self.length]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write [R, kv_heads, Q, head_dim] at the bound slots; return [R, kv_heads, length, head_dim] of the rows."""
        if layer_idx not in self.layer_keys:
            shape = (len(self.filled), key_states.shape[1], self.length + 1, key_states.shape[3])
            self.layer_keys[layer_idx] = torch.zeros(shape, dtype=value_states.dtype, device=key_states.device)
            self.layer_values[layer_idx] = torch.zeros(shape, dtype=value_states.dtype, device=value_states.device)
        rows, slots = self._rows.to(key_states.device), self._slots.to(key_states.device)
        found = []
        for store, fresh in ((self.layer_keys[layer_idx], key_states), (self.layer_values[layer_idx], value_states)):
            store[rows, :, slots] = fresh.transpose(1, 2).to(store.dtype)
            read = store if self._whole else store[rows[:, 0]]
            found.append(read[:, :, : self.length])
        return tuple(found)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots per row; positions are always given, so nothing is derived from this."""
        return self.length

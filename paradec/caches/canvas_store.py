"""Key/value store of models with canvases: the encoder writes final tokens, the canvas decoder reads them. Layers may
have different numbers of heads. Layers with sliding windows read only their window, as in transformers, but store all
positions, so that a later request can reuse any prefix. Imports transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paradec.caches.store import KeyValueStore


class CanvasStore(KeyValueStore):
    """Keys and values of `rows` rows of up to `length` final positions. "encode" calls write and see their slots;
    "canvas" calls only read, through `layers`.

    windows: per layer the number of positions that a position sees, including itself; None sees all."""

    is_compileable = False  # transformers would assume the layout of its own caches

    def __init__(self, rows: int, length: int, device: torch.device, windows: Sequence[int | None]):
        super().__init__(rows, length, device)
        self.windows = tuple(windows)
        self.layers = [_Layer(self, index) for index in range(len(windows))]

    def first_visible(self, window: int | None) -> int:
        """Return the first position that the bound query reads in layers with this window."""
        return 0 if window is None else max(0, self._bound_call().begin - (window - 1))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write [R, kv_heads, Q, head_dim] at the bound slots; return the keys and values that the layer reads."""
        if layer_idx not in self.layer_keys:
            self._allocate(key_states, value_states, layer_idx)
        flat = self._bound_call().flat
        assert flat is not None  # an "encode" call has slots
        for buffer, fresh in ((self.layer_keys[layer_idx], key_states), (self.layer_values[layer_idx], value_states)):
            by_position = fresh.transpose(1, 2).to(buffer.dtype)
            buffer.flatten(0, 1).index_copy_(0, flat.to(buffer.device), by_position.flatten(0, 1))
        return self.read(layer_idx, self.layer_keys), self.read(layer_idx, self.layer_values)

    def read(self, layer: int, layers: dict[int, Tensor]) -> Tensor:
        """Read the bound rows of `layers` (keys or values) in a layer's window: [R, kv_heads, K, head_dim]."""
        call, buffer = self._bound_call(), layers[layer]
        part = slice(self.first_visible(self.windows[layer]), call.visible_length)
        if call.selection is not None:
            return buffer[call.selection, part].transpose(1, 2)
        return buffer[:, part].index_select(0, call.rows.to(buffer.device)).transpose(1, 2)


class _Layer:
    """One layer as the canvas decoder reads it."""

    is_compileable = False

    def __init__(self, store: CanvasStore, index: int):
        self.store, self.index = store, index

    @property
    def keys(self) -> Tensor:
        return self.store.read(self.index, self.store.layer_keys)

    @property
    def values(self) -> Tensor:
        return self.store.read(self.index, self.store.layer_values)


def canvas_store_bytes(config: Any, rows: int, length: int, dtype: torch.dtype) -> int:
    """Compute the bytes of a `CanvasStore` for a text configuration of DiffusionGemma."""
    widths = (layer.num_key_value_heads * layer.head_dim for layer in config.per_layer_config)
    return 2 * rows * (length + 1) * sum(widths) * dtype.itemsize

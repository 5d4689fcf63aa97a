"""Key/value store: preallocated per layer, written at given slots, passed to transformers as `Cache`. Keys are stored
after the rotary embedding at their absolute positions. A position's slot is the position minus the shared prefix's
length (0 without one). Imports transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from paradec.caches.kept_prefix import KeptPrefix, SharedPrefix
from paradec.core.query import Query, StoreCall
from paradec.core.rows import ROWS, row_layout


@dataclass(init=False, eq=False, repr=False)
class KeyValueStore(Cache):
    """Keys and values of `rows` rows of up to `length` positions, allocated per layer at the first forward. An extra
    slot receives padding, which no position sees.

    A call reads the slots below its `visible_length`:

    - with `slots` and without `visible`: the call writes its slots, then sees all filled slots;
    - without `slots`: the call writes nothing. Its keys and values follow those of the store; stored keys at the same
    positions are hidden, since a draft replaces them. Several rows of the call may read one row of the store;
    - with `visible` [R, Q, Q]: as without `slots`, but columns see each other as in `visible` (trees, shadow blocks).
    Columns whose slot is at least 0 are written.

    rows, length: rows (of all guidance branches) and positions per row. device: of `token_at_write`, `step_at_write`.
    dtype: of keys and values; None is the layer's own.
    start: length of the shared prefix (`shared`), whose positions have no slots."""

    token_at_write: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[rows, slots + 1] int64: token of each slot, -1 where it is empty."""
    step_at_write: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[rows, slots + 1] int32: `State.commits` when the slot was written."""
    layer_keys: dict[int, Tensor] = field(metadata=row_layout(columns=1))
    """Per layer [rows, slots + 1, kv_heads, head_dim]."""
    layer_values: dict[int, Tensor] = field(metadata=row_layout(columns=1))
    _filled_to: np.ndarray = field(metadata=ROWS)
    """[rows] int64 on the host: all slots below this one are filled."""
    _loaded: np.ndarray = field(metadata=ROWS)
    """[rows] int64 on the host: number of slots filled from a prefix."""

    def __init__(self, rows: int, length: int, device: torch.device, dtype: torch.dtype | None = None, start: int = 0):
        super().__init__(layers=[])
        self.length, self.start = length, start
        self.slots = length - start
        """Slots per row, without padding."""
        self.dtype = dtype
        self.token_at_write = torch.full((rows, self.slots + 1), -1, dtype=torch.int64, device=device)
        self.step_at_write = torch.full((rows, self.slots + 1), -1, dtype=torch.int32, device=device)
        self.layer_keys, self.layer_values = {}, {}
        self.peak_bytes = 0
        """Peak bytes of keys and values; `release` does not reset it."""
        self._filled_to, self._loaded = np.zeros((2, rows), np.int64)
        self.shared: SharedPrefix | None = None
        """Positions [0, start), which all rows read in place; set before the first forward."""
        self._call: _Call | None = None

    @property
    def rows(self) -> int:
        return len(self.token_at_write)

    @property
    def valid(self) -> Tensor:
        """[rows, slots] bool: filled slots."""
        return self.token_at_write[:, : self.slots] >= 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, including the shared prefix."""
        slot_bytes = sum(tensor.nbytes for layers in (self.layer_keys, self.layer_values) for tensor in layers.values())
        return slot_bytes + (0 if self.shared is None else self.shared.nbytes)

    # ---- one call -------------------------------------------------------------------------------------------------

    def bind(self, query: Query) -> KeyValueStore:
        """Bind the store to the next forward. Returns the store, to pass to the module as its cache."""
        store_call = query.store
        if store_call is None:
            raise ValueError("query.store is None; it must name the rows of the store that the call reads")
        side_by_side = query.visible is not None or store_call.slots is None
        limit = store_call.visible_length
        num_visible = (self.length if limit is None else min(limit, self.length)) - self.start
        self._call = call = _Call(store_call, self._as_slice(store_call.index), num_visible, side_by_side)
        if store_call.slots is not None:
            self._record_write(query, store_call.slots, call)
        return self

    def visible(self, query: Query) -> tuple[Tensor | None, Tensor]:
        """Return the bound query's attention mask (without that of the topology), and the positions of its `K` keys.
        The mask is [R, 1, Q or 1, K] bool, or None if all keys are seen. The positions are [R or 1, K] int64: the
        visible slots, then the call's columns if `side_by_side`."""
        call = self._bound_call()
        num_visible = call.visible_length
        keys = torch.arange(self.start, self.start + num_visible, device=query.positions.device).unsqueeze(0)
        if call.side_by_side:
            keys = torch.cat((keys.expand(len(query.positions), num_visible), query.positions), 1)
            return self._side_by_side_mask(query, call), keys
        if call.index is not None and (self._filled_to[call.index] >= num_visible).all():  # known on the host
            return None, keys
        return self.valid[:, :num_visible].index_select(0, call.rows)[:, None, None], keys

    def _as_slice(self, index: np.ndarray | None) -> slice | None:
        """Convert rows to a slice, for reads without a copy; None unless the host knows that they are neighbours."""
        if index is None or len(index) > 1 and (index[1:] - index[:-1] != 1).any():
            return None
        return slice(int(index[0]), int(index[-1]) + 1)

    def _bound_call(self) -> _Call:
        if self._call is None:
            raise RuntimeError("call bind(query) before the forward: it sets the slots to read and write")
        return self._call

    def _record_write(self, query: Query, slots: Tensor, call: _Call) -> None:
        rows = call.rows.unsqueeze(1)
        is_padded = query.valid is not None or query.visible is not None
        if self.start:
            slots = slots - self.start
        if is_padded:
            slots = torch.where(slots < 0, self.slots, slots)
        call.flat = flat = (rows * (self.slots + 1) + slots).view(-1)
        self.token_at_write.view(-1).index_copy_(0, flat, query.tokens.reshape(-1))
        self.step_at_write.view(-1).index_fill_(0, flat, call.step)
        if is_padded:
            self.token_at_write[:, self.slots] = -1
        is_whole = query.kind in ("full", "rest") and query.visible is None  # kinds: see `caches.base.Part.kind`
        if is_whole and call.index is not None and query.forwarded is not None:
            filled = np.tile(query.forwarded, query.branches)
            self._filled_to[call.index] = self._loaded[call.index] + filled

    def _side_by_side_mask(self, query: Query, call: _Call) -> Tensor:
        """Make the mask over the store's slots, then the call's columns: [R, 1, Q, visible length + Q] bool."""
        (count, width), num_visible = query.tokens.shape, call.visible_length
        is_real = torch.ones_like(query.tokens, dtype=torch.bool) if query.valid is None else query.valid
        stored = self.valid[:, :num_visible].index_select(0, call.rows)
        # positions that the call evaluates are hidden in the store; padding hides nothing
        slots = query.positions - self.start
        slots = torch.where(is_real & (slots < num_visible), slots, num_visible)
        is_hidden = stored.new_zeros((count, num_visible + 1)).scatter_(1, slots, True)
        stored = (stored & ~is_hidden[:, :num_visible])[:, None, :].expand(count, width, num_visible)
        in_call = is_real[:, None, :].expand(count, width, width)
        if query.visible is not None:
            in_call = in_call & query.visible
        # a padding column sees itself, so that its softmax is defined
        in_call = in_call | (torch.eye(width, dtype=torch.bool, device=in_call.device) & ~is_real[:, None, :])
        return torch.cat((stored, in_call), -1)[:, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write [R, kv_heads, Q, head_dim] at the bound slots, if any; return [R, kv_heads, K, head_dim] to read."""
        if layer_idx not in self.layer_keys:
            self._allocate(key_states, value_states, layer_idx)
        call, outputs = self._bound_call(), []
        for buffer, fresh in ((self.layer_keys[layer_idx], key_states), (self.layer_values[layer_idx], value_states)):
            by_position = fresh.transpose(1, 2)
            if call.flat is not None:
                flat = call.flat if call.flat.device == buffer.device else call.flat.to(buffer.device)
                buffer.flatten(0, 1).index_copy_(0, flat, by_position.to(buffer.dtype).flatten(0, 1))
            outputs.append(self._read(buffer, by_position, call, value_states.dtype).transpose(1, 2))
        return tuple(outputs)

    def _read(self, buffer: Tensor, fresh: Tensor, call: _Call, dtype: torch.dtype) -> Tensor:
        """Read the visible slots, then the call's columns if `call.side_by_side`: [R, K, kv_heads, head_dim]."""
        if call.selection is not None:
            stored = buffer[call.selection, : call.visible_length]
        else:
            stored = buffer[:, : call.visible_length].index_select(0, call.rows.to(buffer.device))
        stored = stored.to(dtype)
        return torch.cat((stored, fresh.to(dtype)), 1) if call.side_by_side else stored

    def _allocate(self, keys: Tensor, values: Tensor, layer: int) -> None:
        for layers, fresh in ((self.layer_keys, keys), (self.layer_values, values)):
            shape = (self.rows, self.slots + 1, fresh.shape[1], fresh.shape[3])
            with torch.inference_mode(False):  # else writes outside inference mode would fail
                # rotary embeddings may give float32 keys; the values have the model's dtype
                layers[layer] = torch.zeros(shape, dtype=self.dtype or values.dtype, device=fresh.device)
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    # ---- from one request to the next -----------------------------------------------------------------------------

    def load(self, prefix: KeptPrefix, source: np.ndarray, counts: np.ndarray) -> None:
        """Fill the first `counts` [rows] slots of each row from the rows `source` [rows] of a prefix."""
        index, width, device = torch.as_tensor(source), int(counts.max()), self.token_at_write.device
        for layer, pair in prefix.layers.items():
            # [rows, kv_heads, width, head_dim], the layout of transformers
            keys, values = (part.index_select(0, index.to(part.device))[:, :width].transpose(1, 2) for part in pair)
            self._allocate(keys, values, layer)
            self.layer_keys[layer][:, :width] = keys.transpose(1, 2)
            self.layer_values[layer][:, :width] = values.transpose(1, 2)
        tokens = np.full((self.rows, width), -1)
        for row, (source_row, count) in enumerate(zip(source, counts, strict=True)):
            tokens[row, :count] = prefix.tokens[source_row][:count]
        self.token_at_write[:, :width] = torch.as_tensor(tokens, device=device)
        self._loaded, self._filled_to = counts.copy(), counts.copy()

    def count_intact(self, canvas: Tensor) -> np.ndarray:
        """[rows] int64 on the host: number of leading positions whose stored tokens equal the canvas [rows, length].
        Waits for the device."""
        is_equal = self.token_at_write[:, : self.slots] == canvas[:, self.start :]
        return self.start + is_equal.int().cumprod(1).sum(1).cpu().numpy()

    def read_prefix(self, count: int, copy: bool = True) -> dict[int, tuple[Tensor, Tensor]]:
        """Read keys and values of the first `count` positions, per layer [rows, count, kv_heads, head_dim]. Without
        `copy` they are views, unless the store has a shared prefix."""
        layers = {}
        with torch.inference_mode(False):
            for layer, keys in self.layer_keys.items():
                pair = [part[:, : max(count - self.start, 0)] for part in (keys, self.layer_values[layer])]
                if self.shared is not None:
                    shared = self.shared.layers[layer]
                    expanded = [part[:count].expand(self.rows, -1, -1, -1) for part in shared]
                    pair = [torch.cat(parts, 1) for parts in zip(expanded, pair, strict=True)]
                elif copy:
                    pair = [part.clone() for part in pair]
                layers[layer] = (pair[0], pair[1])
        return layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the positions per row. Has no effect in transformers, since calls pass positions."""
        return self.length

    # ---- rows -----------------------------------------------------------------------------------------------------

    def clear_from(self, rows: np.ndarray, start: np.ndarray) -> None:
        """Empty the slots of `rows` [N] from `start` [N] on."""
        slots, device = start - self.start, self.token_at_write.device
        is_cleared = torch.arange(self.slots + 1, device=device) >= torch.as_tensor(slots[:, None], device=device)
        if (neighbours := self._as_slice(rows)) is not None:
            self.token_at_write[neighbours].masked_fill_(is_cleared, -1)
        else:
            index = torch.as_tensor(rows, device=device)
            self.token_at_write[index] = self.token_at_write[index].masked_fill(is_cleared, -1)
        self._filled_to[rows] = np.minimum(self._filled_to[rows], slots)

    def clear_absent(self, rows: np.ndarray, absent: np.ndarray) -> None:
        """Empty the slots of `rows` [N] where `absent` [N, length] bool is True."""
        is_absent, device = absent[:, self.start :], self.token_at_write.device
        index = torch.as_tensor(rows, device=device)
        tokens = self.token_at_write[index]
        tokens[:, : self.slots].masked_fill_(torch.as_tensor(is_absent, device=device), -1)
        self.token_at_write[index] = tokens
        first = np.where(is_absent.any(1), is_absent.argmax(1), self.slots)
        self._filled_to[rows] = np.minimum(self._filled_to[rows], first)

    def before_row_change(self, other: KeyValueStore | None) -> None:
        """Empty the padding slots, which may become positions. Rows over a shared prefix cannot change."""
        for store in (self,) if other is None else (self, other):
            assert store.shared is None and not store.start
            for values in (*store.layer_keys.values(), *store.layer_values.values()):
                values[:, store.slots] = 0
            for numbers in (store.token_at_write, store.step_at_write):
                numbers[:, store.slots] = -1

    def after_row_change(self) -> None:
        self._call = None
        self.length = self.slots = self.token_at_write.shape[1] - 1
        self._filled_to, self._loaded = (np.minimum(ends, self.slots) for ends in (self._filled_to, self._loaded))
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def release(self) -> None:
        """Free the memory. Later forwards start with an empty store, without a shared prefix."""
        self.layer_keys, self.layer_values, self.shared, self._call = {}, {}, None, None
        self.token_at_write.fill_(-1)
        self.step_at_write.fill_(-1)
        self._filled_to[:] = self._loaded[:] = 0


class _Call:
    def __init__(self, call: StoreCall, selection: slice | None, visible_length: int, side_by_side: bool):
        self.rows, self.index, self.step, self.begin = call.rows, call.index, call.step, call.begin
        self.selection, self.visible_length, self.side_by_side = selection, visible_length, side_by_side
        self.flat: Tensor | None = None


def store_bytes(config: Any, rows: int, length: int, dtype: torch.dtype) -> int:
    """Compute the bytes of a `KeyValueStore` for a transformers configuration. It has num_hidden_layers,
    num_attention_heads and hidden_size, and may have num_key_value_heads and head_dim."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * rows * heads * (length + 1) * width * dtype.itemsize

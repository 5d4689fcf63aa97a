"""The key/value store: preallocated per layer, written at given slots, handed to transformers as its `Cache`.

Keys are stored after the rotary embedding at their absolute positions, which never change. A position's slot is the
position itself, less what all rows read from a shared prefix. Importing this module imports transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache

from paradec.caches.kept import KeptPrefix, SharedPrefix
from paradec.core.query import Query, StoreCall
from paradec.core.rows import ROWS, row_layout


@dataclass(init=False, eq=False, repr=False)
class KeyValueStore(Cache):
    """Keys and values of `rows` rows of up to `length` positions, allocated in full at the first forward, each layer
    where it computes.

    One slot more takes the padding, which is never seen. A call reads the slots below its `visible_length`, its
    own writes included. Three kinds of call:

    - plain (`slots` given, `visible` None): keys and values are written, and the query sees all filled slots;
    - `slots` None: nothing is written. The call's own keys and values are beside the store's, which are hidden at the
      positions that the call evaluates (a draft replaces what is stored there). Several rows of the call may read one
      row of the store;
    - `visible` [R, Q, Q] given: as the former, the columns see each other as it says (trees, shadow blocks), and those
      with a slot of at least 0 are written.

    Args:
        rows: rows of the store; guidance branches have their own.
        length: positions per row.
        device: where the masks live.
        dtype: what keys and values are kept in; None keeps the layer's own.
        start: positions left of this one are in `shared`, and have no slots here.
    """

    token_at_write: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[rows, slots + 1] int64: the token whose key and value a slot holds, -1 where there is none."""
    step_at_write: Tensor = field(metadata=row_layout(columns=1, fill=-1))
    """[rows, slots + 1] int32: the commits that the state had seen when the slot was written."""
    layer_keys: dict[int, Tensor] = field(metadata=row_layout(columns=1))
    """Per layer [rows, slots + 1, kv_heads, head_dim]: position by position, as projections make them."""
    layer_values: dict[int, Tensor] = field(metadata=row_layout(columns=1))
    _filled_to: np.ndarray = field(metadata=ROWS)
    """[rows] int64 on the host: slots below are known to be filled."""
    _loaded: np.ndarray = field(metadata=ROWS)
    """[rows] int64 on the host: slots of these that were filled from outside."""

    def __init__(self, rows: int, length: int, device: torch.device, dtype: torch.dtype | None = None, start: int = 0):
        super().__init__(layers=[])
        self.length, self.start = length, start
        self.slots = length - start
        """Slots per row, without the one for padding."""
        self.dtype = dtype
        self.token_at_write = torch.full((rows, self.slots + 1), -1, dtype=torch.int64, device=device)
        self.step_at_write = torch.full((rows, self.slots + 1), -1, dtype=torch.int32, device=device)
        self.layer_keys, self.layer_values = {}, {}
        self.peak_bytes = 0
        """Bytes of keys and values held at most; stays after `release`."""
        self._filled_to, self._loaded = np.zeros((2, rows), np.int64)
        self.shared: SharedPrefix | None = None
        """Keys and values of positions 0 to `start`, which all rows read in place; given before the first forward."""
        self._call: _Call | None = None

    @property
    def rows(self) -> int:
        return len(self.token_at_write)

    @property
    def valid(self) -> Tensor:
        """[rows, slots] bool: slots that hold something."""
        return self.token_at_write[:, : self.slots] >= 0

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held, a shared prefix once."""
        own = sum(tensor.nbytes for layers in (self.layer_keys, self.layer_values) for tensor in layers.values())
        return own + (0 if self.shared is None else self.shared.nbytes)

    # ---- one call -------------------------------------------------------------------------------------------------

    def bind(self, query: Query) -> KeyValueStore:
        """Say what the next forward writes and reads; returns itself, the cache to call a module with."""
        asked = query.store
        if asked is None:
            raise ValueError("a query over a store says in `store` which of its rows it reads")
        joined = query.visible is not None or asked.slots is None
        visible = (self.length if asked.visible_length is None else min(asked.visible_length, self.length)) - self.start
        self._call = call = _Call(asked, self._selection(asked.index), visible, joined)
        if asked.slots is not None:
            self._note(query, asked.slots, call)
        return self

    def visible(self, query: Query) -> tuple[Tensor | None, Tensor]:
        """What the bound query sees, whatever the model's topology allows besides.

        Returns:
            [R, 1, Q or 1, K] bool, or None when it sees every key; and the keys' positions [R or 1, K] int64: the slots
            below the visible length, then the call's own columns where these are beside them.
        """
        call = self._bound()
        visible = call.visible_length
        keys = torch.arange(self.start, self.start + visible, device=query.positions.device).unsqueeze(0)
        if call.joined:
            keys = torch.cat((keys.expand(len(query.positions), visible), query.positions), 1)
            return self._joined_mask(query, call), keys
        if call.index is not None and (self._filled_to[call.index] >= visible).all():  # known on the host
            return None, keys
        return self.valid[:, :visible].index_select(0, call.rows)[:, None, None], keys

    def _selection(self, index: np.ndarray | None) -> slice | None:
        """The call's rows as a slice of the store's, where the host knows them to be one: views need no copy."""
        if index is None or len(index) > 1 and (index[1:] - index[:-1] != 1).any():
            return None
        return slice(int(index[0]), int(index[-1]) + 1)

    def _bound(self) -> _Call:
        if self._call is None:
            raise RuntimeError("bind(query) says what a forward reads and writes; call it first")
        return self._call

    def _note(self, query: Query, slots: Tensor, call: _Call) -> None:
        rows = call.rows.unsqueeze(1)
        padded = query.valid is not None or query.visible is not None
        if self.start:
            slots = slots - self.start
        if padded:
            slots = torch.where(slots < 0, self.slots, slots)
        call.flat = flat = (rows * (self.slots + 1) + slots).view(-1)
        self.token_at_write.view(-1).index_copy_(0, flat, query.tokens.reshape(-1))
        self.step_at_write.view(-1).index_fill_(0, flat, call.step)
        if padded:
            self.token_at_write[:, self.slots] = -1
        whole = query.kind in ("full", "rest") and query.visible is None
        if whole and call.index is not None and query.forwarded is not None:
            filled = np.tile(query.forwarded, query.branches)
            self._filled_to[call.index] = self._loaded[call.index] + filled

    def _joined_mask(self, query: Query, call: _Call) -> Tensor:
        """[R, 1, Q, visible length + Q] bool: the store's slots, then the call's own columns."""
        (count, width), visible = query.tokens.shape, call.visible_length
        real = torch.ones_like(query.tokens, dtype=torch.bool) if query.valid is None else query.valid
        seen = self.valid[:, :visible].index_select(0, call.rows)
        # what the call evaluates itself is not read from the store; padding hides nothing
        slots = query.positions - self.start
        here = torch.where(real & (slots < visible), slots, visible)
        hidden = torch.zeros((count, visible + 1), dtype=torch.bool, device=seen.device).scatter_(1, here, True)
        seen = (seen & ~hidden[:, :visible])[:, None, :].expand(count, width, visible)
        own = real[:, None, :].expand(count, width, width)
        if query.visible is not None:
            own = own & query.visible
        # a padding column sees itself, so that its softmax is defined
        own = own | (torch.eye(width, dtype=torch.bool, device=own.device) & ~real[:, None, :])
        return torch.cat((seen, own), -1)[:, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write [R, kv_heads, Q, head_dim] at the bound slots; return [R, kv_heads, K, head_dim] to attend over."""
        if layer_idx not in self.layer_keys:
            self._allocate(key_states, value_states, layer_idx)
        call, found = self._bound(), []
        for store, fresh in ((self.layer_keys[layer_idx], key_states), (self.layer_values[layer_idx], value_states)):
            by_position = fresh.transpose(1, 2)
            if call.flat is not None:
                flat = call.flat if call.flat.device == store.device else call.flat.to(store.device)
                store.flatten(0, 1).index_copy_(0, flat, by_position.to(store.dtype).flatten(0, 1))
            found.append(self._read(store, by_position, call, value_states.dtype).transpose(1, 2))
        return tuple(found)

    def _read(self, store: Tensor, fresh: Tensor, call: _Call, dtype: torch.dtype) -> Tensor:
        """[R, K, kv_heads, head_dim]: the rows' slots below the visible length, and the call's own columns where they
        join."""
        if call.selection is not None:
            kept = store[call.selection, : call.visible_length]
        else:
            kept = store[:, : call.visible_length].index_select(0, call.rows.to(store.device))
        kept = kept.to(dtype)
        return torch.cat((kept, fresh.to(dtype)), 1) if call.joined else kept

    def _allocate(self, keys: Tensor, values: Tensor, layer: int) -> None:
        for layers, fresh in ((self.layer_keys, keys), (self.layer_values, values)):
            shape = (self.rows, self.slots + 1, fresh.shape[1], fresh.shape[3])
            with torch.inference_mode(False):  # else only inference mode could write to it later
                # rotary angles may be kept in float32: the values' dtype is the model's
                layers[layer] = torch.zeros(shape, dtype=self.dtype or values.dtype, device=fresh.device)
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    # ---- from one request to the next -----------------------------------------------------------------------------

    def load(self, kept: KeptPrefix, source: np.ndarray, counts: np.ndarray) -> None:
        """Fill the first `counts` [rows] slots of every row from the rows `source` [rows] of what was kept."""
        index, longest, device = torch.as_tensor(source), int(counts.max()), self.token_at_write.device
        for layer, pair in kept.layers.items():
            # [rows, kv_heads, N, head_dim], as layers give them
            keys, values = (part.index_select(0, index.to(part.device))[:, :longest].transpose(1, 2) for part in pair)
            self._allocate(keys, values, layer)
            self.layer_keys[layer][:, :longest] = keys.transpose(1, 2)
            self.layer_values[layer][:, :longest] = values.transpose(1, 2)
        tokens = np.full((self.rows, longest), -1)
        for row, (at, count) in enumerate(zip(source, counts, strict=True)):
            tokens[row, :count] = kept.tokens[at][:count]
        self.token_at_write[:, :longest] = torch.as_tensor(tokens, device=device)
        self._loaded, self._filled_to = counts.copy(), counts.copy()

    def intact(self, canvas: Tensor) -> np.ndarray:
        """[rows] int64 on the host: leading positions whose slots hold what the canvas [rows, length] has. Waits for
        the device."""
        same = self.token_at_write[:, : self.slots] == canvas[:, self.start :]
        return self.start + same.int().cumprod(1).sum(1).cpu().numpy()

    def leading(self, count: int, copy: bool = True) -> dict[int, tuple[Tensor, Tensor]]:
        """Keys and values of the first `count` positions, per layer [rows, count, kv_heads, head_dim]; a shared prefix
        is copied for every row."""
        found = {}
        with torch.inference_mode(False):
            for layer, own in self.layer_keys.items():
                pair = [part[:, : max(count - self.start, 0)] for part in (own, self.layer_values[layer])]
                if self.shared is not None:
                    common = self.shared.layers[layer]
                    wide = [part[:count].expand(self.rows, -1, -1, -1) for part in common]
                    pair = [torch.cat(parts, 1) for parts in zip(wide, pair, strict=True)]
                elif copy:
                    pair = [part.clone() for part in pair]
                found[layer] = (pair[0], pair[1])
        return found

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots per row; positions are always given, so nothing is derived from this."""
        return self.length

    # ---- rows -----------------------------------------------------------------------------------------------------

    def forget(self, rows: np.ndarray, start: np.ndarray) -> None:
        """Empty the slots of `rows` [N] from `start` [N] on: these positions are no part of the sequence any more."""
        slots, device = start - self.start, self.token_at_write.device
        gone = torch.arange(self.slots + 1, device=device) >= torch.as_tensor(slots[:, None], device=device)
        if (neighbours := self._selection(rows)) is not None:
            self.token_at_write[neighbours].masked_fill_(gone, -1)
        else:
            index = torch.as_tensor(rows, device=device)
            self.token_at_write[index] = self.token_at_write[index].masked_fill(gone, -1)
        self._filled_to[rows] = np.minimum(self._filled_to[rows], slots)

    def hide(self, rows: np.ndarray, absent: np.ndarray) -> None:
        """Empty the slots of `rows` [N] that are `absent` [N, length] bool: positions that do not exist for now."""
        gone, device = absent[:, self.start :], self.token_at_write.device
        index = torch.as_tensor(rows, device=device)
        held = self.token_at_write[index]
        held[:, : self.slots].masked_fill_(torch.as_tensor(gone, device=device), -1)
        self.token_at_write[index] = held
        first = np.where(gone.any(1), gone.argmax(1), self.slots)
        self._filled_to[rows] = np.minimum(self._filled_to[rows], first)

    def before_row_change(self, other: KeyValueStore | None) -> None:
        """Empty the slots for padding, which may become those of positions. What is shared has no rows."""
        for store in (self,) if other is None else (self, other):
            assert store.shared is None and not store.start
            for values in (*store.layer_keys.values(), *store.layer_values.values()):
                values[:, store.slots] = 0
            for numbers in (store.token_at_write, store.step_at_write):
                numbers[:, store.slots] = -1

    def after_row_change(self) -> None:
        """Follow the tensors' sizes. What was bound is of other rows."""
        self._call = None
        self.length = self.slots = self.token_at_write.shape[1] - 1
        self._filled_to, self._loaded = (np.minimum(each, self.slots) for each in (self._filled_to, self._loaded))
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def release(self) -> None:
        """Give the memory back. A forward after this starts with an empty store; what was shared is missing then."""
        self.layer_keys, self.layer_values, self.shared, self._call = {}, {}, None, None
        self.token_at_write.fill_(-1)
        self.step_at_write.fill_(-1)
        self._filled_to[:] = self._loaded[:] = 0


class _Call:
    """What one bound forward writes and reads."""

    def __init__(self, asked: StoreCall, selection: slice | None, visible_length: int, joined: bool):
        self.rows, self.index, self.step, self.begin = asked.rows, asked.index, asked.step, asked.begin
        self.selection, self.visible_length, self.joined = selection, visible_length, joined
        self.flat: Tensor | None = None


def store_bytes(config: Any, rows: int, length: int, dtype: torch.dtype) -> int:
    """Bytes that a `KeyValueStore` will take for a transformers configuration, before it is made.

    Args:
        config: has num_hidden_layers, num_attention_heads, hidden_size, and num_key_value_heads and head_dim where they
            differ from what follows.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * rows * heads * (length + 1) * width * dtype.itemsize

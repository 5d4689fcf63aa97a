"""The key/value stores of decoders: made empty, for as many rows and positions as there is memory for."""

from __future__ import annotations

from typing import Any

import torch


class OverStore:
    """A model that may run over a key/value store."""

    def store_bytes(self: Any, rows: int, length: int, store_dtype: str | None = None) -> int:
        """Bytes that a store of `rows` rows and `length` positions will take, in this process."""
        from paradec.caches.store import store_bytes

        dtype = self.dtype if store_dtype is None else getattr(torch, store_dtype)
        return store_bytes(self.text_config, rows, length, dtype)

    def make_store(
        self: Any,
        rows: int,
        length: int,
        store_dtype: str | None = None,
        max_memory: int | None = None,
        start: int = 0,
    ) -> Any:
        """An empty key/value store of `rows` rows and `length` positions, of which all rows share those before `start`.

        Raises:
            ValueError: it would not fit into `max_memory` bytes, or into what the device has.
        """
        from paradec.caches.store import KeyValueStore, check_memory

        dtype = None if store_dtype is None else getattr(torch, store_dtype)
        needed = self.store_bytes(rows, length - start, store_dtype)
        what = f"the key/value store of {rows} x {length - start} positions"
        if start:
            needed += self.store_bytes(1, start - 1, store_dtype)
            what += f" and {start} that all rows share"
        try:
            check_memory(needed, self.device, max_memory, what)
        except ValueError:
            if max_memory is not None or not self.engines:
                raise
            self.engines.clear()  # these hold memory for requests that may never come
            check_memory(needed, self.device, max_memory, what)
        return KeyValueStore(rows, length, self.device, dtype, start)

"""Decoders: transformers' causal language models, with any attention mask and over a key/value store."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.checks import check_memory
from paradec.core.facts import ModelFacts
from paradec.core.query import Query, WindowQuery
from paradec.models.base import Model
from paradec.models.cache_argument import cache_keyword
from paradec.models.calls import ModuleCall
from paradec.models.visibility import beyond_plain, visible_keys

EVERYTHING = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A mask that hides nothing. transformers hands a mask of four dimensions on as it is; without one it makes its own."""


class Decoder(Model):
    """A transformers causal language model, or a module of its form: it may run with any mask, and over a store."""

    kind = "decoder"

    def __init__(self, module: nn.Module, facts: ModelFacts, *others: Any, **named: Any):
        super().__init__(module, facts, *others, **named)
        self._masks_itself = getattr(getattr(module, "config", None), "is_causal", True) is not False
        """Whether a causal module needs no mask of ours to be so (the modules that `load` makes do)."""

    @property
    def _takes_masks(self) -> bool:
        if self.facts.topology != "causal":
            return True
        # causal modules keep their own attention, of which only the plain one is what such a mask replaces
        name = self.attn_implementation or self.module.config._attn_implementation
        return name == "sdpa" and not beyond_plain(self.module)

    def _logits(self, query: Query, store: Any, call: ModuleCall) -> Tensor:
        extra = (
            {} if store is None and getattr(query, "attention", None) is None else handed_on(self.module, query, store)
        )
        mask = self._visible(query, store)
        if mask is None and self._unmasked:
            mask = EVERYTHING
        logits = self.module(
            input_ids=query.tokens,
            attention_mask=mask,
            position_ids=query.positions,
            use_cache=store is not None,
            **extra,
        ).logits
        if self._unmasked and not call.attended:
            raise RuntimeError(unattended(self.facts, self._wrap is not None))
        if extra:
            check_followed(self.facts.name, extra)
        return logits

    def _visible(self, query: Query, store: Any = None) -> Tensor | None:
        """[R, 1, Q or 1, K] bool: which keys each column sees, or None when it sees all.

        Keys are the call's own columns (K = Q), or what a store says.
        """
        if self.facts.topology == "bidirectional" and store is None and query.valid is None and query.visible is None:
            return None
        return visible_keys(self.facts, query, store, self._masks_itself)

    def store_bytes(self, rows: int, length: int, store_dtype: str | None = None) -> int:
        """Bytes that a store of `rows` rows and `length` positions will take, in this process."""
        from paradec.caches.store import store_bytes

        dtype = self.dtype if store_dtype is None else getattr(torch, store_dtype)
        return store_bytes(self.text_config, rows, length, dtype)

    def make_store(
        self,
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
        from paradec.caches.store import KeyValueStore

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


def handed_on(module: nn.Module, query: Query, store: Any) -> dict[str, Any]:
    """The module's keyword arguments for a call over a store, or with a plan for its attention."""
    extra: dict[str, Any] = {}
    if store is not None:
        extra = cache_keyword(module, store.bind(query))
        if store.shared is not None:
            extra["shared_prefix"] = store.shared.begin()
    plan = query.attention if isinstance(query, WindowQuery) else None
    if plan is not None:
        plan.attended = False
        if query.visible is None:
            extra["attention_plan"] = plan
        else:
            warnings.warn("a call with a mask per position attends to everything the mask allows", stacklevel=4)
    return extra


def check_followed(name: str, extra: Mapping[str, Any]) -> None:
    """Raise RuntimeError where the model of this name has not passed on what it was handed."""
    shared, plan = extra.get("shared_prefix"), extra.get("attention_plan")
    if shared is not None:
        shared.check_read(name)
    if plan is not None and not plan.attended:
        raise RuntimeError(
            f"{name} does not pass its keyword arguments on to its attention, which a request with attention=... "
            "needs; leave that out"
        )


def unattended(facts: ModelFacts, wrapped: bool) -> str:
    """Why a call has not run through an attention function of ours."""
    if not wrapped:
        return f"{facts.name} was unwrapped, and attends as its module does; wrap the module again"
    return (
        f"{facts.name} does not attend through transformers' AttentionInterface, and cannot be evaluated with "
        f"topology={facts.topology!r}"
    )

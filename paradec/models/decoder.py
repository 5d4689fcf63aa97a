"""Decoders: transformers' causal language models, with any attention mask and over a key/value store."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.facts import ModelFacts
from paradec.core.query import Query
from paradec.models.base import Model
from paradec.models.calls import ModuleCall
from paradec.models.followed import check_followed, handed_on, unattended
from paradec.models.stores import OverStore
from paradec.models.visibility import beyond_plain, visible_keys

EVERYTHING = torch.ones(1, 1, 1, 1, dtype=torch.bool)
"""A mask that hides nothing. transformers hands a mask of four dimensions on as it is; without one it makes its own."""


class Decoder(OverStore, Model):
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

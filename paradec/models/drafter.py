"""Drafters that read a model's hidden states: what EAGLE's and DFlash's have in common."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

import torch

from paradec.caches.store import KeyValueStore, check_memory, store_bytes
from paradec.checks import check_model, shown
from paradec.models.adapter import Model
from paradec.models.facts import ModelFacts


class FeatureDrafter:
    """A network that drafts from what the model it was trained for computes. A subclass says what it reads and how it
    is called."""

    makes: ClassVar[str] = "drafts"
    reads_features: ClassVar[bool] = True
    """Whether drafts go on from the model's hidden states (`Query.keep_hidden`)."""
    keep_layers: tuple[int, ...] | None = None
    """Layers of the model that are read; None reads its last hidden states."""
    pads = supports_store = supports_visibility = True
    module: Any
    base: Any
    """The model that it drafts for."""
    facts: ModelFacts

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        name = type(self).__name__
        return f"{name}({self.facts.name!r}: drafts for {self.base.facts.name!r}, {kind} on {self.device})"

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        found: torch.device = next(self.module.parameters()).device
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' dtype."""
        found: torch.dtype = next(self.module.parameters()).dtype
        return found

    def make_store(self, rows: int, length: int) -> KeyValueStore:
        """An empty store of the layers' keys and values of what was read; a token's slot is its position.

        Raises:
            ValueError: it would not fit into what the device has.
        """
        needed = store_bytes(self.module.config, rows, length, self.dtype)
        check_memory(needed, self.device, None, f"the drafter's key/value store of {rows} x {length} positions")
        return KeyValueStore(rows, length, self.device)

    def bound(self, model: Model) -> Self:
        """The drafter over what `base` became for one request (image models know its rows in a copy).

        Raises:
            ValueError: another model.
        """
        if getattr(model, "module", None) is not self.base.module:
            raise ValueError(
                f"drafter {self.facts.name} was loaded for {self.base.facts.name}, whose features it reads, and cannot "
                f"draft for {model.facts.name}: load it again with base= this model"
            )
        bound = copy.copy(self)
        bound.base = model
        return bound


def check_base(base: Any) -> None:
    """Raise TypeError for a model of another kind, ValueError unless such a drafter can draft for it."""
    facts = getattr(base, "facts", None)
    if facts is None:
        raise ValueError(f"base={shown(base)} must be a model from paradec.load or paradec.wrap")
    check_model("load_drafter(base=...)", base, ("text", "image"))
    if (facts.topology, facts.prediction) != ("causal", "shifted"):
        raise ValueError(f"base {facts.name} must be causal and predict the next token; it is {facts.topology!r}")
    if getattr(base, "hidden_size", None) is None:
        raise ValueError(f"base {facts.name} gives no hidden states, which a drafter reads")
    if not getattr(base, "has_head", True):
        raise ValueError(f"base {facts.name} names no output matrix, which makes a drafter's logits")
    if not (base.supports_store and base.supports_visibility):
        raise ValueError(f"base {facts.name} does not run over a key/value store, which a drafter needs")
    if getattr(base, "ranks", None) is not None:
        raise ValueError(f"base {facts.name} is spread over processes, and a drafter needs a whole one")

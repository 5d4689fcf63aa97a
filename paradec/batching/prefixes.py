"""Prefix sharing in a batch: new rows reuse keys and values of ended or running rows (`paradec.caches.prefix_tree`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from paradec.batching.slots import Group, Ticket
from paradec.caches.base import Cache
from paradec.caches.kept_prefix import KeptPrefix, evaluate
from paradec.caches.prefix_tree import Layers, PrefixTree
from paradec.caches.table import EXACT, prefix_verdict
from paradec.core.protocol import CallCost
from paradec.core.weights import fingerprint_weights

__all__ = ["Prefixes"]

CAUSAL_BLOCK = 16  # tokens per block of the tree, for causal models


class Prefixes:
    """Prefixes that rows of a batch share; answers are unchanged. budget: in bytes; None is set by `raise_budget`."""

    def __init__(self, model: Any, budget: int | None):
        facts = model.facts
        self.model = model
        self.tree = PrefixTree(facts.block_length if facts.topology == "block_causal" else CAUSAL_BLOCK, budget or 0)
        self.hits = self.saved_positions = 0  # rows that reused a prefix, and positions that were not evaluated again
        self._has_default_budget = budget is None
        self._fingerprint = 0
        self._start_weights: dict[int, int] = {}  # ticket number -> fingerprint of the weights when its row started
        self._prefix_keys: dict[int, Hashable] = {}  # ticket number -> result of `_prefix_key`

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes

    def raise_budget(self, nbytes: int) -> None:
        """Raise the default budget to a quarter of `nbytes`, the bytes of all rows."""
        if self._has_default_budget:
            self.tree.budget = max(self.tree.budget, nbytes // 4)

    # ---- new rows -------------------------------------------------------------------------------------------------

    def begin(self, state: Any, tickets: Sequence[Ticket], waiting: Sequence[Ticket], groups: Sequence[Group]) -> None:
        """Fill new rows with prefixes from the tree or from running rows. If several new or waiting prompts share a
        prefix that is not stored, this prefix is evaluated once beforehand."""
        if why_unshared(self.model, state) is not None:
            return
        if (fingerprint := fingerprint_weights(self.model.module)) != self._fingerprint:
            self.tree.clear()
            self._fingerprint = fingerprint
        self._start_weights |= dict.fromkeys([ticket.number for ticket in tickets], fingerprint)
        first_keys = {self._prefix_key(ticket) for ticket in tickets}
        for group in groups:
            if why_unshared(self.model, group.state) is not None:
                continue
            matching = [
                slot
                for slot, candidate in enumerate(group.tickets)
                if candidate is not None and self._prefix_key(candidate) in first_keys
            ]
            self.store_rows(group, [slot for slot in matching if self._extends_tree(group, slot, state, tickets)])
        candidates = dict.fromkeys(
            (*tickets, *(candidate for candidate in waiting if self._prefix_key(candidate) in first_keys))
        )
        counts, layers_of_row = np.zeros(state.batch, np.int64), list[Layers]()
        for row, ticket in enumerate(tickets):
            # number of tokens before the position that predicts the first undecided token
            limit = 0 if ticket.prompts.images is not None else int(state.prompt_length[row]) - state.facts.shift
            tokens, scope = ticket.prompts.rows[0][: max(limit, 0)], sharing_key(state, ticket)
            others = [candidate for candidate in candidates if candidate is not ticket]
            num_shared = max((self._count_common(tokens, other, scope, state) for other in others), default=0)
            if num_shared > self.tree.count(tokens, scope):
                dtype = getattr(state.cache, "store_dtype", None)
                if self.model.store_bytes(1, num_shared, dtype) <= self.tree.budget:
                    self._evaluate_prefix(state, row, tokens[:num_shared], scope)
            counts[row], layers = self.tree.find(tokens, scope)
            layers_of_row.append(layers)
        if counts.any():
            self.hits += int((counts > 0).sum())
            self.saved_positions += int(counts.sum())
            self._load_layers(state, [ticket.prompts.rows[0] for ticket in tickets], counts, layers_of_row)

    def _prefix_key(self, ticket: Ticket) -> Hashable:
        """Return a key that is equal for prompts with the same first block and `cache_salt`."""
        key = self._prefix_keys.get(ticket.number)
        if key is None:
            key = ticket.cache_salt, tuple(ticket.prompts.rows[0][: self.tree.block])
            self._prefix_keys[ticket.number] = key
        return key

    def _extends_tree(self, group: Group, slot: int, state: Any, tickets: Sequence[Ticket]) -> bool:
        """Whether a running row shares a longer prefix with one of the `tickets` than the tree stores."""
        ticket = group.tickets[slot]
        assert ticket is not None
        tokens, scope = ticket.prompts.rows[0], sharing_key(group.state, ticket)
        num_shared = max(self._count_common(tokens, candidate, scope, state) for candidate in tickets)
        return num_shared > self.tree.count(tokens, scope)

    def _count_common(self, tokens: list[int], candidate: Ticket, scope: Hashable, state: Any) -> int:
        """Count the leading tokens shared with another prompt, in whole blocks; 0 if that prompt has another scope."""
        block, other_tokens, count = self.tree.block, candidate.prompts.rows[0], 0
        if sharing_key(state, candidate) != scope:
            return 0
        while count + block <= len(tokens) and tokens[count : count + block] == other_tokens[count : count + block]:
            count += block
        return count

    def _load_layers(self, state: Any, rows: list[list[int]], counts: np.ndarray, layers_of_row: list[Layers]) -> None:
        """Load each row's cached layers into the state's store. rows: prompts. counts: [B] int64, cached tokens."""
        longest, layers = int(counts.max()), {}
        for layer, pair in next(row_layers for row_layers in layers_of_row if row_layers).items():
            keys, values = (part.new_zeros((len(rows), longest, *part.shape[1:])) for part in pair)
            for row, cached in enumerate(layers_of_row):
                if cached:
                    keys[row, : counts[row]], values[row, : counts[row]] = cached[layer]
            layers[layer] = (keys, values)
        tokens = [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]
        prefix = KeptPrefix(self.model.module, tokens, layers, True)
        state.store.load(prefix, np.arange(len(rows)), counts)
        state.reused, state.reuses = counts, True

    def _evaluate_prefix(self, state: Any, row: int, tokens: list[int], scope: Hashable) -> None:
        """Evaluate a shared prefix in one call, and add it to the tree. The call's cost is counted for `row`."""
        count, layers = self.tree.find(tokens, scope)
        store = self.model.make_store(1, len(tokens), state.store.dtype)
        if count:
            cached = {layer: (keys.unsqueeze(0), values.unsqueeze(0)) for layer, (keys, values) in layers.items()}
            prefix = KeptPrefix(self.model.module, [tokens[:count]], cached, True)
            store.load(prefix, np.zeros(1, np.int64), np.array([count]))
        evaluate(self.model, store, tokens, count, state.causal_keys)
        self.tree.add(tokens, _read_row(store, 0, 0, len(tokens)), 0, scope)
        state._calls.append(CallCost(np.array([row]), 1, None, np.array([len(tokens) - count]), False))

    # ---- decoded rows ---------------------------------------------------------------------------------------------

    def store_rows(self, group: Group, slots: Sequence[int]) -> None:
        """Add keys and values of the slots' final tokens to the tree. Call this between two steps."""
        state = group.state
        if not slots or why_unshared(self.model, state) is not None:
            return
        # keys after the first slot whose stored token differs from the canvas may depend on a mask or a rejected draft
        intact = np.minimum(state.store.count_intact(state.canvas), state.end)
        for slot in slots:
            ticket = group.tickets[slot]
            if ticket is None or self._start_weights.get(ticket.number) != self._fingerprint:
                continue
            count = int(intact[slot]) if ticket.prompts.images is None else 0
            tokens, scope = state.canvas[slot, :count].tolist(), sharing_key(state, ticket)
            num_cached = self.tree.count(tokens, scope)
            self.tree.add(tokens, _read_row(state.store, slot, num_cached, count), num_cached, scope)

    def forget(self, ticket: Ticket) -> None:
        self._start_weights.pop(ticket.number, None)
        self._prefix_keys.pop(ticket.number, None)


def why_unshared(model: Any, state: Any) -> str | None:
    """Return why rows of this state cannot share prefixes; None if they can."""
    facts = model.facts
    if facts.prompt_aligned:
        return f"the prompt of {facts.name} is one block, in which every key depends on all of it"
    if state.store is None:
        return "nothing is stored: use cache='block'" if facts.topology == "block_causal" else "nothing is stored"
    if facts.topology == "block_causal" and not isinstance(state.cache, Cache):
        return "drafts are verified over a separate store"
    if facts.topology == "block_causal" and prefix_verdict(state.cache, facts).status != EXACT:
        return f"cache={state.cache.name!r} keeps keys and values that are not exact"
    if getattr(model, "any_order", False):
        return f"each row of {facts.name} has its own order"
    if state.branches > 1:
        return "the second branch of guidance has the prompt masked"
    if getattr(getattr(getattr(state, "drafting", None), "model", None), "reads_features", False):
        return "the drafter reads the hidden states of the whole prompt"
    if state.request.compile:
        return "steps on the device (compile=True) cannot reuse a prefix"
    return None


def sharing_key(state: Any, ticket: Ticket) -> Hashable:
    """Return a key that is equal for rows that may share prefixes."""
    return ticket.cache_salt, str(state.store.dtype), state.causal_keys


def _read_row(store: Any, row: int, start: int, stop: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Read keys and values [stop - start, kv_heads, head_dim] of one row of a store, per layer."""
    return {
        layer: (keys[row, start:stop], store.layer_values[layer][row, start:stop])
        for layer, keys in store.layer_keys.items()
    }

"""What the prompts of a batch begin with is evaluated once: keys and values go from rows that have ended, or that are
being decoded, to those that begin (`paradec.caches.prefix_tree`)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from paradec.batching.slots import Group, Ticket
from paradec.caches.base import Cache
from paradec.caches.kept import KeptPrefix, evaluate
from paradec.caches.prefix_tree import Layers, PrefixTree
from paradec.caches.table import EXACT, prefix_verdict
from paradec.core.protocol import CallCost
from paradec.core.weights import weights_of

__all__ = ["Prefixes"]

CAUSAL_BLOCK = 16
"""Tokens of a block of the tree, of models that see what is left of a position alone."""


class Prefixes:
    """Keys and values that the rows of a batch leave for each other. The answers stay what they are.

    Args:
        model: what the batch decodes with.
        budget: bytes that are kept at most; None is a quarter of what the batch's rows take.
    """

    def __init__(self, model: Any, budget: int | None):
        facts = model.facts
        self.model = model
        self.tree = PrefixTree(facts.block_length if facts.topology == "block_causal" else CAUSAL_BLOCK, budget or 0)
        self.hits = 0
        """Rows that took something over."""
        self.saved = 0
        """Positions that these did not evaluate."""
        self._follows = budget is None
        self._weights = 0
        self._began: dict[int, int] = {}  # ticket -> the weights that its row began with
        self._firsts: dict[int, Hashable] = {}  # of tickets that began, or waited when one did

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return self.tree.nbytes

    def allow(self, nbytes: int) -> None:
        """The rows of the batch take so many bytes."""
        if self._follows:
            self.tree.budget = max(self.tree.budget, nbytes // 4)

    # ---- rows that begin ------------------------------------------------------------------------------------------

    def begin(self, state: Any, tickets: Sequence[Ticket], waiting: Sequence[Ticket], groups: Sequence[Group]) -> None:
        """Give the rows of a new state what the tree or a row that is being decoded has of their prompts. What several
        prompts begin with, those that wait among them, and neither has, is evaluated once before."""
        if why_unshared(self.model, state) is not None:
            return
        if (weights := weights_of(self.model.module)) != self._weights:
            self.tree.clear()
            self._weights = weights
        self._began |= dict.fromkeys([ticket.number for ticket in tickets], weights)
        first = {self._first(ticket) for ticket in tickets}
        for group in groups:
            if why_unshared(self.model, group.state) is not None:
                continue
            alike = [slot for slot, each in enumerate(group.tickets) if each is not None and self._first(each) in first]
            self.keep(group, [slot for slot in alike if self._helps(group, slot, state, tickets)])
        others = dict.fromkeys((*tickets, *(each for each in waiting if self._first(each) in first)))
        counts, found = np.zeros(state.batch, np.int64), list[Layers]()
        for row, ticket in enumerate(tickets):
            tokens, scope = self._usable(state, row, ticket), scope_of(state, ticket)
            shared = [self._common(tokens, each, scope, state) for each in others if each is not ticket]
            most = max(shared, default=0)
            if most > self.tree.count(tokens, scope) and self._fits(state, most):
                self._evaluate(state, row, tokens[:most], scope)
            counts[row], layers = self.tree.find(tokens, scope)
            found.append(layers)
        if counts.any():
            self.hits, self.saved = self.hits + int((counts > 0).sum()), self.saved + int(counts.sum())
            self._fill(state, [ticket.prompts.rows[0] for ticket in tickets], counts, found)

    def _first(self, ticket: Ticket) -> Hashable:
        """What prompts have alike that share a block at least."""
        found = self._firsts.get(ticket.number)
        if found is None:
            found = ticket.cache_salt, tuple(ticket.prompts.rows[0][: self.tree.block])
            self._firsts[ticket.number] = found
        return found

    def _helps(self, group: Group, slot: int, state: Any, tickets: Sequence[Ticket]) -> bool:
        """Whether a row begins as one of these prompts does, further than the tree knows."""
        ticket = group.tickets[slot]
        assert ticket is not None
        row, scope = ticket.prompts.rows[0], scope_of(group.state, ticket)
        return max(self._common(row, each, scope, state) for each in tickets) > self.tree.count(row, scope)

    def _common(self, tokens: list[int], other: Ticket, scope: Hashable, state: Any) -> int:
        """How many leading tokens another prompt of this state shares, in whole blocks."""
        block, row, shared = self.tree.block, other.prompts.rows[0], 0
        if scope_of(state, other) != scope:
            return 0
        while shared + block <= len(tokens) and tokens[shared : shared + block] == row[shared : shared + block]:
            shared += block
        return shared

    def _usable(self, state: Any, row: int, ticket: Ticket) -> list[int]:
        """The tokens of a prompt that need not be evaluated if they are known: those before the position that has the
        logits of the first undecided one."""
        if ticket.prompts.images is not None:
            return []
        return ticket.prompts.rows[0][: max(int(state.prompt_length[row]) - state.facts.shift, 0)]

    def _fits(self, state: Any, count: int) -> bool:
        """Whether so many tokens of one row may be kept."""
        return self.model.store_bytes(1, count, getattr(state.cache, "store_dtype", None)) <= self.tree.budget

    def _fill(self, state: Any, rows: list[list[int]], counts: np.ndarray, found: list[Layers]) -> None:
        """Put the layers found for each row, of its leading `counts` [B] tokens, into the state's store."""
        longest, layers = int(counts.max()), {}
        for layer, pair in next(each for each in found if each).items():
            keys, values = (part.new_zeros((len(rows), longest, *part.shape[1:])) for part in pair)
            for row, own in enumerate(found):
                if own:
                    keys[row, : counts[row]], values[row, : counts[row]] = own[layer]
            layers[layer] = (keys, values)
        tokens = [row[:count] for row, count in zip(rows, counts.tolist(), strict=True)]
        kept = KeptPrefix(self.model.module, tokens, layers, True)
        state.store.load(kept, np.arange(len(rows)), counts)
        state.reused, state.reuses = counts, True

    def _evaluate(self, state: Any, row: int, tokens: list[int], scope: Hashable) -> None:
        """Add tokens that several prompts begin with to the tree: one call, which is counted with `row`."""
        count, layers = self.tree.find(tokens, scope)
        store = self.model.make_store(1, len(tokens), state.store.dtype)
        if count:
            known = {layer: (keys.unsqueeze(0), values.unsqueeze(0)) for layer, (keys, values) in layers.items()}
            kept = KeptPrefix(self.model.module, [tokens[:count]], known, True)
            store.load(kept, np.zeros(1, np.int64), np.array([count]))
        evaluate(self.model, store, tokens, count, state.causal_keys)
        self.tree.add(tokens, _row_of(store, 0, 0, len(tokens)), 0, scope)
        state._calls.append(CallCost(np.array([row]), 1, None, np.array([len(tokens) - count]), False))

    # ---- rows that are decoded ------------------------------------------------------------------------------------

    def keep(self, group: Group, slots: Sequence[int]) -> None:
        """Between two steps: add what is final of the rows in these slots."""
        state = group.state
        if not slots or why_unshared(self.model, state) is not None:
            return
        # keys that saw a mask or a rejected draft lie right of a slot that was written as one
        whole = np.minimum(state.store.intact(state.canvas), state.end)
        for slot in slots:
            ticket = group.tickets[slot]
            if ticket is None or self._began.get(ticket.number) != self._weights:
                continue
            count = int(whole[slot]) if ticket.prompts.images is None else 0
            tokens, scope = state.canvas[slot, :count].tolist(), scope_of(state, ticket)
            have = self.tree.count(tokens, scope)
            self.tree.add(tokens, _row_of(state.store, slot, have, count), have, scope)

    def forget(self, ticket: Ticket) -> None:
        """A prompt has ended."""
        self._began.pop(ticket.number, None)
        self._firsts.pop(ticket.number, None)


def why_unshared(model: Any, state: Any) -> str | None:
    """Say why rows of such a state have nothing to share; None where they have."""
    facts = model.facts
    if facts.prompt_aligned:
        return f"the prompt of {facts.name} is one block, in which every key depends on all of it"
    if state.store is None:
        return "nothing is stored: use cache='block'" if facts.topology == "block_causal" else "nothing is stored"
    if facts.topology == "block_causal" and not isinstance(state.cache, Cache):
        return "drafts are verified over a store of their own"
    if facts.topology == "block_causal" and prefix_verdict(state.cache, facts).status != EXACT:
        return f"cache={state.cache.name!r} keeps keys and values that are not exact"
    if getattr(model, "any_order", False):
        return f"{facts.name} has no order that its prompts share"
    if state.branches > 1:
        return "the second branch of guidance has the prompt masked"
    if getattr(getattr(getattr(state, "drafting", None), "model", None), "reads_features", False):
        return "the drafter reads the hidden states of the whole prompt"
    if state.request.compile:
        return "steps on the device take over no prefix"
    return None


def scope_of(state: Any, ticket: Ticket) -> Hashable:
    """Only rows with an equal one share."""
    return ticket.cache_salt, str(state.store.dtype), state.causal_keys


def _row_of(store: Any, row: int, start: int, stop: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values [stop - start, kv_heads, head_dim] of one row of a store, per layer."""
    return {
        layer: (keys[row, start:stop], store.layer_values[layer][row, start:stop])
        for layer, keys in store.layer_keys.items()
    }

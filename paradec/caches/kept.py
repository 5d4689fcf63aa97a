"""Keys and values that outlive a request, or that its rows share: what a conversation or a batch begins with.

The attention of many rows over one shared prefix is Juravsky et al., "Hydragen", arXiv 2402.05099 (see
`paradec.attention.shared_prefix`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.caches.base import Cache
from paradec.caches.stored import StoredCache
from paradec.caches.table import EXACT, prefix_verdict
from paradec.core.checks import check_bool, shown
from paradec.core.query import Query, StoreCall
from paradec.core.weights import fingerprint_weights


class KeptPrefix:
    """What a request leaves for the next one: for each row the leading tokens whose keys and values are kept.

    From `generate(..., keep_prefix=True).prefix`; give it to the next request as `prefix`. Its rows are looked up by
    their tokens: each new row takes over what it has in common with the one that it shares most with. It is good for
    the module that it was made with, as long as that and its weights stay as they are. A copy is good for the same
    module; a pickle holds none, and is good for looking at.

    Attributes:
        tokens: one list of ids per row.
        layers: per layer keys and values [rows, longest, kv_heads, head_dim]; what is beyond a row's tokens is no
            part.
        exact: whether taking it over changes no logits: block-causal models, and a cache that is exact for them.
        causal_keys: whether its keys and values are those of causal calls (`samplers.masked.view.Needs`); requests of
            samplers that store others refuse it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        tokens: list[list[int]],
        layers: Mapping[int, tuple[Tensor, Tensor]],
        exact: bool,
        causal_keys: bool = False,
    ):
        self.tokens = tokens
        self.exact, self.causal_keys = exact, causal_keys
        self.layers: Mapping[int, tuple[Tensor, Tensor]] = dict(layers)
        self._module: weakref.ref[torch.nn.Module] | None = weakref.ref(module)
        self._weights = fingerprint_weights(module)
        self._ids = [np.array(row, np.int64) for row in tokens]
        self._released = False

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_module": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptPrefix:
        other = object.__new__(KeptPrefix)
        other.__dict__ = copy.deepcopy(self.__dict__, memo)
        return other

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self.nbytes} bytes, {'exact' if self.exact else 'approximate'}"
        return f"KeptPrefix({len(self.tokens)} rows of {list(map(len, self.tokens))} tokens, {state})"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)

    @property
    def dtype(self) -> torch.dtype | None:
        """What keys and values are kept in; None when nothing is."""
        return next((keys.dtype for keys, _ in self.layers.values()), None)

    def row(self, index: int) -> KeptPrefix:
        """One row by itself, in memory of its own."""
        size = len(self.tokens[index])
        layers = {
            at: tuple(part[index : index + 1, :size].clone() for part in pair) for at, pair in self.layers.items()
        }
        other = object.__new__(KeptPrefix)
        other.__dict__ = self.__dict__ | {"tokens": [self.tokens[index]], "_ids": [self._ids[index]], "layers": layers}
        return other

    def release(self) -> None:
        """Give the memory back now; it can be given to no request after this."""
        self.layers, self._released = {}, True

    def check(self, model: Any, cache: StoredCache, causal_keys: bool = False) -> None:
        """Raise ValueError where its keys and values are not what this model and cache would compute and store, for a
        sampler with such `causal_keys`."""
        if self._released:
            raise ValueError("prefix was released; keep a new one with keep_prefix=True")
        module = None if self._module is None else self._module()
        if module is None or module is not model.module:
            raise ValueError(f"prefix={self!r} was kept with another model than this {model.facts.name}")
        if self._weights != fingerprint_weights(module):
            raise ValueError(f"prefix={self!r} was kept before the weights of {model.facts.name} changed or moved")
        if self.causal_keys != causal_keys:
            ways = ("the attention of the model", "causal attention")
            raise ValueError(
                f"prefix={self!r} holds keys and values of {ways[self.causal_keys]}, and this sampler stores those of "
                f"{ways[causal_keys]}: leave prefix out, or use the sampler that kept it"
            )
        wanted = model.dtype if cache.store_dtype is None else getattr(torch, cache.store_dtype)
        if self.dtype not in (None, wanted):
            raise ValueError(
                f"prefix={self!r} is kept in {self.dtype} and cache={cache.name!r} would store {wanted}: use the same "
                "store_dtype in both requests"
            )

    def common(self, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """For each row of ids, the kept row that shares most with it, the first of several, and how many leading tokens
        that are: both [B] int64."""
        ids = [np.array(row, np.int64) for row in rows]
        counts = np.array([[common_length(row, kept) for kept in self._ids] for row in ids])
        return counts.argmax(1), counts.max(1)


@dataclass
class Reuse:
    """What the rows of one request need not evaluate. `B` rows."""

    counts: np.ndarray
    """[B] int64: leading positions of each row."""
    kept: KeptPrefix | None
    """Where their keys and values are; None: they are the rows' common prefix, which is to be evaluated first."""
    source: np.ndarray
    """[B] int64: rows of `kept`."""
    shared: bool
    """Whether all rows read one row of it, in place; otherwise each gets a copy."""
    tokens: list[int]
    """What is read in place."""

    @property
    def start(self) -> int:
        """Positions that the rows' own store leaves out."""
        return len(self.tokens)

    def fill(self, store: Any, model: Any, cache: StoredCache, causal_keys: bool) -> bool:
        """Give the store its keys and values; whether the model was called for that."""
        if not self.shared:
            store.load(self.kept, self.source, self.counts)
            return False
        kept = prefill(model, self.tokens, cache, causal_keys) if self.kept is None else self.kept
        row, size = int(self.source[0]), self.start
        store.shared = SharedPrefix({at: (k[row, :size], v[row, :size]) for at, (k, v) in kept.layers.items()})
        return self.kept is None


class SharedPrefix:
    """Keys and values of a prefix that all rows of a store read in place, each pair [P, kv_heads, head_dim]."""

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]]):
        self.layers = layers
        self.unread: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's pair; notes that its attention has asked."""
        self.unread.discard(layer)
        return self.layers[layer]

    def begin(self) -> SharedPrefix:
        """Before a forward: no layer has read yet."""
        self.unread = set(self.layers)
        return self

    def check_read(self, name: str) -> None:
        """After a forward. Raises RuntimeError where a layer's attention left the prefix out."""
        if self.unread:
            raise RuntimeError(f"layers {sorted(self.unread)} of {name} did not attend to the shared prefix")


def plan_reuse(
    prefix: Any,
    share: Any,
    keep: Any,
    model: Any,
    cache: Cache,
    branches: int,
    rows: list[list[int]],
    starts: np.ndarray,
    causal_keys: bool = False,
) -> Reuse | None:
    """Check the three arguments of a request, and say what it takes over.

    Block-causal models take over whole blocks; a position that holds the logits of the first undecided one is evaluated
    in any case.

    Args:
        prefix, share, keep: `prefix`, `share_prefix` and `keep_prefix` as given.
        branches: 2 under guidance. rows: the prompts' ids. starts: [B] int64, where decoding starts in each.
        causal_keys: of the sampler.

    Raises:
        ValueError: an argument that does not fit the request; the message names it.
    """
    check_bool("share_prefix", share)
    check_bool("keep_prefix", keep)
    named = {"prefix": prefix is not None, "share_prefix=True": share, "keep_prefix=True": keep}
    given = [name for name, there in named.items() if there]
    if not given:
        return None
    if prefix is not None and not isinstance(prefix, KeptPrefix):
        raise ValueError(f"prefix={shown(prefix)} must be the `prefix` of an output made with keep_prefix=True")
    if prefix is not None and share:
        raise ValueError("prefix and share_prefix=True both say what rows begin with; give one of them")
    if not isinstance(cache, StoredCache):
        raise ValueError(f"{given[0]} needs a cache that keeps keys and values; cache={cache.name!r} keeps none")
    if branches > 1:
        raise ValueError(f"{given[0]} does not work with guidance_scale: its second branch has the prompt masked")
    if model.facts.prompt_aligned:
        one = "its prompt is one block, in which every key depends on all of it"
        why = one if model.facts.topology == "block_causal" else "its blocks begin where its prompt ends"
        raise ValueError(f"{given[0]} does not work with {model.facts.name}: {why}")
    if share and not model.shares_prefix:
        raise ValueError(
            f"share_prefix=True needs attn_implementation 'sdpa' or 'eager'; {model.facts.name} has another"
        )
    limit = np.maximum(starts - model.facts.shift, 0)
    if prefix is not None:
        prefix.check(model, cache, causal_keys)
        source, counts = prefix.common(rows)
    elif share:
        first = np.array(rows[0], np.int64)
        counts = np.full(len(rows), min(common_length(first, np.array(row, np.int64)) for row in rows))
        counts, source = np.minimum(counts, limit.min()) * (len(rows) > 1), np.zeros(len(rows), np.int64)
    else:
        return None
    block = model.facts.block_length if model.facts.topology == "block_causal" else 1
    counts = np.minimum(counts, limit) // block * block
    if not counts.any():
        return None
    alike = len(rows) > 1 and (source == source[0]).all() and (counts == counts[0]).all()
    shared = share or bool(alike and model.shares_prefix)
    return Reuse(counts, prefix, source, shared, rows[0][: counts[0]] if shared else [])


def keep_prefix(state: Any, model: Any, before: KeptPrefix | None) -> KeptPrefix:
    """Of each row what the next request can take over: on block-causal models the blocks that were evaluated once more
    after they were full, else the leading positions that were evaluated as the tokens they hold.

    Args:
        state: a masked state with `num_reusable` counted, at its last commit. before: what it took over itself.
    """
    facts, store = state.facts, state.store
    counts = np.minimum(store.intact(state.canvas), state.end)
    if facts.topology == "block_causal":
        num_reusable = state.features["prefix_reuse"].num_reusable
        counts = np.minimum(counts, num_reusable) // facts.block_length * facts.block_length
    exact = prefix_verdict(state.cache, facts).status == EXACT
    canvas = state.canvas.cpu()
    tokens = [canvas[row, :count].tolist() for row, count in enumerate(counts)]
    layers = store.leading(int(counts.max()))
    exact = exact and (before is None or before.exact)
    return KeptPrefix(model.module, tokens, layers, exact, state.causal_keys)


def prefill(model: Any, tokens: list[int], cache: StoredCache, causal_keys: bool = False) -> KeptPrefix:
    """Evaluate `tokens` once, by themselves, and keep all of them."""
    store = model.make_store(1, len(tokens), cache.store_dtype, cache.max_memory)
    evaluate(model, store, tokens, 0, causal_keys)
    return KeptPrefix(model.module, [tokens], store.leading(len(tokens), copy=False), False, causal_keys)


def evaluate(model: Any, store: Any, tokens: list[int], start: int, causal_keys: bool) -> None:
    """Evaluate the `tokens` from `start` on, by themselves, over a store of one row that has those before.

    Args:
        causal_keys: whether they attend causally, whatever the model's topology.
    """
    count, causal = len(tokens) - start, causal_keys and model.facts.topology != "causal"
    positions = torch.arange(start, len(tokens), device=model.device).unsqueeze(0)
    row = np.zeros(1, np.int64)
    query = Query(
        rows=row,
        tokens=torch.tensor([tokens[start:]], device=model.device),
        positions=positions,
        wanted=positions[:, -1:] - start,
        store=StoreCall(torch.zeros(1, dtype=torch.int64, device=model.device), positions, row),
        forwarded=np.array([count]),
        visible=torch.ones((1, count, count), dtype=torch.bool, device=model.device).tril() if causal else None,
    )
    with torch.inference_mode():
        model(query, store)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading ids two rows share."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size

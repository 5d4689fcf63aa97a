"""Keys and values of prefixes, for later requests or shared by rows (Juravsky et al., "Hydragen", arXiv 2402.05099; see
`paradec.attention.shared_prefix`)."""

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
from paradec.core.checks import check_bool, short_repr
from paradec.core.query import Query, StoreCall
from paradec.core.weights import fingerprint_weights


class KeptPrefix:
    """Leading tokens of each row with their keys and values, for later requests.

    Returned as `generate(..., keep_prefix=True).prefix`, and passed to a later request as `prefix`. Each new row reuses
    the longest prefix that it shares with a stored row. A `KeptPrefix` and its deep copies are valid only for the same
    module object with unchanged weights; an unpickled one is never valid.

    Attributes:
        tokens: one list of ids per row.
        layers: per layer keys and values [rows, longest, kv_heads, head_dim].
        exact: whether reusing the prefix leaves logits unchanged.
        causal_keys: whether the tokens attended causally when they were stored; a new sampler must have the same value
            (`samplers.masked.view.Needs.causal_keys`).
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
        clone = object.__new__(KeptPrefix)
        clone.__dict__ = copy.deepcopy(self.__dict__, memo)
        return clone

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self.nbytes} bytes, {'exact' if self.exact else 'approximate'}"
        return f"KeptPrefix({len(self.tokens)} rows of {list(map(len, self.tokens))} tokens, {state})"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)

    @property
    def dtype(self) -> torch.dtype | None:
        """dtype of keys and values; None if no layer is stored."""
        return next((keys.dtype for keys, _ in self.layers.values()), None)

    def row(self, index: int) -> KeptPrefix:
        """Copy one row."""
        size = len(self.tokens[index])
        layers = {
            layer: tuple(part[index : index + 1, :size].clone() for part in pair) for layer, pair in self.layers.items()
        }
        clone = object.__new__(KeptPrefix)
        clone.__dict__ = self.__dict__ | {"tokens": [self.tokens[index]], "_ids": [self._ids[index]], "layers": layers}
        return clone

    def release(self) -> None:
        """Free the memory. Later requests with this prefix raise ValueError."""
        self.layers, self._released = {}, True

    def check(self, model: Any, cache: StoredCache, causal_keys: bool = False) -> None:
        """Raise ValueError if this model, cache and `causal_keys` would compute or store other keys and values."""
        if self._released:
            raise ValueError("prefix was released; keep a new one with keep_prefix=True")
        module = None if self._module is None else self._module()
        if module is None or module is not model.module:
            raise ValueError(f"prefix={self!r} was kept with another model than this {model.facts.name}")
        if self._weights != fingerprint_weights(module):
            raise ValueError(f"prefix={self!r} was kept before the weights of {model.facts.name} changed or moved")
        if self.causal_keys != causal_keys:
            sources = ("the model's own attention", "causal attention")
            raise ValueError(
                f"prefix={self!r} holds keys and values of tokens under {sources[self.causal_keys]}, but this sampler "
                f"stores those under {sources[causal_keys]}: leave prefix out, or use the sampler that kept it"
            )
        dtype = model.dtype if cache.store_dtype is None else getattr(torch, cache.store_dtype)
        if self.dtype not in (None, dtype):
            raise ValueError(
                f"prefix={self!r} is kept in {self.dtype} and cache={cache.name!r} would store {dtype}: use the same "
                "store_dtype in both requests"
            )

    def match_rows(self, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Find the stored row with the longest common prefix for each row of ids, and the length: both [B] int64."""
        ids = [np.array(row, np.int64) for row in rows]
        counts = np.array([[common_length(row, stored) for stored in self._ids] for row in ids])
        return counts.argmax(1), counts.max(1)


@dataclass
class Reuse:
    """Leading positions that the `B` rows of a request do not evaluate again."""

    counts: np.ndarray
    """[B] int64: number of leading positions of each row."""
    prefix: KeptPrefix | None
    """Source of keys and values; None: the rows' common prefix, which is evaluated first."""
    source: np.ndarray
    """[B] int64: row of `prefix` for each row."""
    shared: bool
    """Whether all rows read one stored row in place; otherwise each row has a copy."""
    tokens: list[int]
    """Tokens of the stored row that is read in place; empty for copies."""

    @property
    def start(self) -> int:
        """Number of leading positions without slots in the request's store."""
        return len(self.tokens)

    def fill(self, store: Any, model: Any, cache: StoredCache, causal_keys: bool) -> bool:
        """Fill the store. Returns whether the model was called."""
        if not self.shared:
            store.load(self.prefix, self.source, self.counts)
            return False
        prefix = prefill(model, self.tokens, cache, causal_keys) if self.prefix is None else self.prefix
        row, size = int(self.source[0]), self.start
        store.shared = SharedPrefix({layer: (k[row, :size], v[row, :size]) for layer, (k, v) in prefix.layers.items()})
        return self.prefix is None


class SharedPrefix:
    """A prefix of `P` positions that all rows of a store read in place. layers: [P, kv_heads, head_dim] pairs."""

    def __init__(self, layers: Mapping[int, tuple[Tensor, Tensor]]):
        self.layers = layers
        self.unread: set[int] = set()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pair in self.layers.values() for tensor in pair)

    def read_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's pair, and mark it as read."""
        self.unread.discard(layer)
        return self.layers[layer]

    def begin(self) -> SharedPrefix:
        """Mark all layers as unread before a forward."""
        self.unread = set(self.layers)
        return self

    def check_read(self, name: str) -> None:
        """Raise RuntimeError after a forward if a layer's attention left the prefix out."""
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
    """Check `prefix`, `share_prefix` and `keep_prefix` of a request, and plan the positions to reuse: whole blocks on
    block-causal models; never the position that predicts the first undecided token.

    Args:
        branches: 2 under guidance. rows: prompt ids. starts: [B] int64, first undecided position.
        causal_keys: whether the sampler stores keys of causal attention, as in `KeptPrefix`.

    Returns None if nothing is reused. Raises ValueError for an argument that does not fit the request.
    """
    check_bool("share_prefix", share)
    check_bool("keep_prefix", keep)
    arguments = {"prefix": prefix is not None, "share_prefix=True": share, "keep_prefix=True": keep}
    names = [name for name, is_set in arguments.items() if is_set]
    if not names:
        return None
    if prefix is not None and not isinstance(prefix, KeptPrefix):
        raise ValueError(f"prefix={short_repr(prefix)} must be the `prefix` of an output made with keep_prefix=True")
    if prefix is not None and share:
        raise ValueError("prefix and share_prefix=True both choose the rows' prefix; give one of them")
    if not isinstance(cache, StoredCache):
        raise ValueError(f"{names[0]} needs a cache that keeps keys and values; cache={cache.name!r} keeps none")
    if branches > 1:
        raise ValueError(f"{names[0]} does not work with guidance_scale: its second branch has the prompt masked")
    if model.facts.prompt_aligned:
        reason = "its prompt is one block, in which every key depends on all of it"
        why = reason if model.facts.topology == "block_causal" else "its blocks begin where its prompt ends"
        raise ValueError(f"{names[0]} does not work with {model.facts.name}: {why}")
    if share and not model.shares_prefix:
        raise ValueError(
            f"share_prefix=True needs attn_implementation 'sdpa' or 'eager'; {model.facts.name} has another"
        )
    limit = np.maximum(starts - model.facts.shift, 0)
    if prefix is not None:
        prefix.check(model, cache, causal_keys)
        source, counts = prefix.match_rows(rows)
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
    is_common = len(rows) > 1 and (source == source[0]).all() and (counts == counts[0]).all()
    shared = share or bool(is_common and model.shares_prefix)
    return Reuse(counts, prefix, source, shared, rows[0][: counts[0]] if shared else [])


def keep_prefix(state: Any, model: Any, previous: KeptPrefix | None) -> KeptPrefix:
    """Copy the keys and values that the next request can reuse: those of all leading positions evaluated with their
    final tokens; on block-causal models, only of whole blocks that were evaluated when they were full. state: of a
    masked sampler, after the last commit. previous: the prefix that this request reused."""
    facts, store = state.facts, state.store
    counts = np.minimum(store.count_intact(state.canvas), state.end)
    if facts.topology == "block_causal":
        num_reusable = state.features["prefix_reuse"].num_reusable
        counts = np.minimum(counts, num_reusable) // facts.block_length * facts.block_length
    exact = prefix_verdict(state.cache, facts).status == EXACT
    canvas = state.canvas.cpu()
    tokens = [canvas[row, :count].tolist() for row, count in enumerate(counts)]
    layers = store.read_prefix(int(counts.max()))
    exact = exact and (previous is None or previous.exact)
    return KeptPrefix(model.module, tokens, layers, exact, state.causal_keys)


def prefill(model: Any, tokens: list[int], cache: StoredCache, causal_keys: bool = False) -> KeptPrefix:
    """Evaluate `tokens` in a separate forward, and return their keys and values."""
    store = model.make_store(1, len(tokens), cache.store_dtype, cache.max_memory)
    evaluate(model, store, tokens, 0, causal_keys)
    return KeptPrefix(model.module, [tokens], store.read_prefix(len(tokens), copy=False), False, causal_keys)


def evaluate(model: Any, store: Any, tokens: list[int], start: int, causal_keys: bool) -> None:
    """Evaluate the `tokens` from `start` on. store: one row, which holds the tokens before `start`. causal_keys: True
    makes attention causal on models of any topology."""
    count, is_causal = len(tokens) - start, causal_keys and model.facts.topology != "causal"
    positions = torch.arange(start, len(tokens), device=model.device).unsqueeze(0)
    row = np.zeros(1, np.int64)
    query = Query(
        rows=row,
        tokens=torch.tensor([tokens[start:]], device=model.device),
        positions=positions,
        wanted=positions[:, -1:] - start,
        store=StoreCall(torch.zeros(1, dtype=torch.int64, device=model.device), positions, row),
        forwarded=np.array([count]),
        visible=torch.ones((1, count, count), dtype=torch.bool, device=model.device).tril() if is_causal else None,
    )
    with torch.inference_mode():
        model(query, store)


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size

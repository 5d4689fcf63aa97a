"""What a cache is: a plan of the positions that are recomputed at each step."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from paradec.core import rows as of_rows
from paradec.core.checks import LARGEST_INT64, check_choice, check_int
from paradec.core.contract import CanvasState
from paradec.core.registry import check_declared

STORE_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass
class Part:
    """Rows that are evaluated in one call, and which positions of each.

    Shapes: `N` rows, `Q` positions (the widest row's; the others are padded with `valid` False).
    """

    index: np.ndarray
    """[N] int64: which of the running rows."""
    positions: np.ndarray
    """[N, Q] int64, ascending; padding repeats the last one."""
    valid: np.ndarray | None
    """[N, Q] bool; None when nothing is padding."""
    kind: str
    """"full" (from end to end: column = position), "rest" (all but what a kept prefix has, and what a suffix leaves
    out) or "window" (a part)."""
    lasts: bool = True
    """Whether the next step is likely to ask for the same part; what is derived from it is kept then."""

    @property
    def sizes(self) -> np.ndarray:
        """[N] int64: positions of each row, padding excluded."""
        if self.valid is None:
            return np.full(len(self.positions), self.positions.shape[1])
        return self.valid.sum(1)

    @classmethod
    def span(cls, index: np.ndarray, start: np.ndarray, stop: np.ndarray, kind: str, width: int | None = None) -> Part:
        """The positions from `start` to `stop` (exclusive) of each row. All arrays: [N] int64."""
        size = stop - start
        width = size.max() if width is None else width
        positions = start[:, None] + np.arange(width)
        if size.min() == width:
            return cls(index, positions, None, kind)
        return cls(index, np.minimum(positions, stop[:, None] - 1), positions < stop[:, None], kind)

    @classmethod
    def subset(cls, index: np.ndarray, chosen: np.ndarray, width: int | None = None) -> Part:
        """The positions where `chosen` [N, L] bool is True; at least one per row."""
        size = chosen.sum(1)
        width = size.max() if width is None else width
        if len(index) == 1 and size[0] == width:
            return cls(index, np.flatnonzero(chosen[0])[None], None, "window", lasts=False)
        positions = np.argsort(~chosen, axis=1, kind="stable")[:, :width]
        if size.min() == width:
            return cls(index, positions, None, "window", lasts=False)
        valid = np.arange(width) < size[:, None]
        last = np.take_along_axis(positions, size[:, None] - 1, 1)
        return cls(index, np.where(valid, positions, last), valid, "window", lasts=False)


@dataclass(frozen=True)
class Cache:
    """A cache method: an immutable, validated value, like a sampler. Everything that changes is in the state.

    Class attributes, from which `paradec.caches.table` derives what a cache can be combined with:
        uses_store: whether keys and values are kept.
        topologies, predictions: the models that it is for (see `paradec.core.facts`).
        exact_on: topologies on which every step's logits equal those without a cache, whatever the settings.
        exact_when: when they do elsewhere, in words.
        evaluates: what a step inside a block always evaluates: "block" (all of it), "undecided" (what is undecided
            in it), "some" (a part of that, one position at least), "picks" (what the sampler previewed) or "targets"
            (the same, where that is a set chosen before).
        steady: whether a step depends on nothing but the canvas and the block: not on which steps led there.
        costly_rows: whether partial steps gather positions one by one, which a single short row does not repay.
        suffixes: whether it works with `paradec.Suffix`: its parts come from `whole_rows`, `spans` and `subsets`, which
            leave out what does not exist for now, and it keeps nothing beyond a block about what is after it.
        hears: whether commits tell it how confident the model was (`heard`).
        device_step: whether the device step can ask for `range` with tensors in the place of arrays, or needs none.
            Subclasses say so again for themselves.
    """

    name: ClassVar[str] = ""
    family: ClassVar[str] = "cache"
    paper: ClassVar[str] = ""
    arxiv: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    uses_store: ClassVar[bool] = True
    topologies: ClassVar[tuple[str, ...]] = ("bidirectional", "block_causal")
    predictions: ClassVar[tuple[str, ...]] = ("same", "shifted")
    exact_on: ClassVar[tuple[str, ...]] = ()
    exact_when: ClassVar[str] = ""
    evaluates: ClassVar[str] = "block"
    steady: ClassVar[bool] = True
    costly_rows: ClassVar[bool] = False
    suffixes: ClassVar[bool] = False
    hears: ClassVar[bool] = False
    device_step: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        cls.device_step = vars(cls).get("device_step", False)

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        check_declared("cache", cls)
        return super().__new__(cls)

    def exact_for(self, topology: str) -> bool:
        """Whether this cache, with its settings, changes no logits of a model of this topology."""
        return topology in self.exact_on

    def plan(self, state: CanvasState, picks: np.ndarray | None = None) -> list[Part]:
        """What to evaluate now, one part per shape bucket; together they cover every running row once.

        Args:
            picks: [R, K] int64 positions that the sampler will commit, in its order, -1 where there are fewer; given
                to caches that evaluate "picks".
        """
        raise NotImplementedError

    def begin(self, state: CanvasState) -> Any:
        """What the cache keeps per request, in `state.cache_state`; `plan` reads it and `committed` changes it. Batches
        that are refilled take an array or tensor of B rows, or what is `paradec.core.rows.Rows`."""
        return None

    def heard(self, state: CanvasState, confidence: np.ndarray, available: np.ndarray) -> None:
        """Called by a commit before `committed`, where a cache `hears`: the confidence [R, W] float64 of the window's
        candidates, good where they were `available` [R, W] bool."""

    def committed(self, state: CanvasState, tokens: np.ndarray) -> None:
        """Called by a commit once the window [R, W] holds `tokens`, before steps are counted and blocks move."""

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Every setting with its default."""
        return {f.name: f.default for f in dataclasses.fields(cls)}

    def to_dict(self) -> dict[str, Any]:
        """The cache as plain data."""
        return {"cache": self.name} | {key: getattr(self, key) for key in self.settings()}


@dataclass(frozen=True)
class StoredCache(Cache):
    """Base of the caches that keep keys and values: rows that are refreshed are evaluated whole, the others in part.

    Args:
        store_dtype: what keys and values are kept in, one of `STORE_DTYPES`; None keeps the model's own.
        max_memory: bytes that the store may take; None asks the device what is free.
        shape_multiple: widths of the calls and of the store's visible part are rounded up to this with padding, so
            that shapes repeat (for captured graphs and compiled models); 1 pads nothing.
    """

    _: KW_ONLY
    store_dtype: str | None = None
    max_memory: int | None = None
    shape_multiple: int = 1

    def __post_init__(self) -> None:
        if self.store_dtype is not None:
            check_choice("store_dtype", self.store_dtype, STORE_DTYPES)
        check_int("max_memory", self.max_memory, low=1, high=LARGEST_INT64, none=True)
        check_int("shape_multiple", self.shape_multiple, low=1, high=2**20)

    def plan(self, state: CanvasState, picks: np.ndarray | None = None) -> list[Part]:
        fresh = self.refreshes(state, state.window.rows)
        whole, rest = np.flatnonzero(fresh), np.flatnonzero(~fresh)
        if not len(rest):
            return whole_rows(state, whole, multiple=self.shape_multiple)
        if not len(whole):
            return self.partial(state, rest, picks, 3)
        # three calls a step in all: two of whichever kind is less even
        ways = [
            whole_rows(state, whole, most, self.shape_multiple) + self.partial(state, rest, picks, 3 - most)
            for most in ((1, 2) if len(whole) > 1 else (1,))
        ]
        return min(ways, key=lambda parts: sum(part.positions.size for part in parts))

    def refreshes(self, state: CanvasState, rows: np.ndarray) -> np.ndarray:
        """[R] bool: which of the state's `rows` [R] are evaluated from end to end at this step."""
        raise NotImplementedError

    def partial(self, state: CanvasState, chosen: np.ndarray, picks: np.ndarray | None, most: int) -> list[Part]:
        """Parts for the `chosen` [N] running rows, in at most `most` buckets."""
        raise NotImplementedError


class RangeCache(StoredCache):
    """A cache whose partial steps evaluate one contiguous range per row."""

    def partial(self, state: CanvasState, chosen: np.ndarray, picks: np.ndarray | None, most: int) -> list[Part]:
        rows = state.window.rows[chosen]
        start, stop = self.range(state, rows)
        # the logits of position p are at p - shift
        start = np.maximum(np.minimum(start, state.block_start[rows] - state.facts.shift), 0)
        return spans(state, chosen, start, np.minimum(stop, state.length[rows]), "window", most, self.shape_multiple)

    def range(self, state: CanvasState, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Start and stop [N] int64 of what is evaluated; may reach beyond the row."""
        raise NotImplementedError


class SubsetCache(StoredCache):
    """A cache whose partial steps evaluate any set of positions, chosen by what changed when."""

    costly_rows = True

    def begin(self, state: CanvasState) -> ChangeLog:
        return ChangeLog(state)

    def committed(self, state: CanvasState, tokens: np.ndarray) -> None:
        state.cache_state.note(state, tokens)

    def partial(self, state: CanvasState, chosen: np.ndarray, picks: np.ndarray | None, most: int) -> list[Part]:
        rows = state.window.rows[chosen]
        needed = self.needed(state, rows, None if picks is None else picks[chosen])
        needed &= np.arange(needed.shape[1]) < state.length[rows, None]
        return subsets(state, chosen, needed, most, self.shape_multiple)

    def needed(self, state: CanvasState, rows: np.ndarray, picks: np.ndarray | None) -> np.ndarray:
        """[N, L] bool: which positions of the state's `rows` are evaluated; may reach beyond a row."""
        raise NotImplementedError


class ChangeLog:
    """The host's copy of the canvas, and after which step each position took the token that it has now."""

    def __init__(self, state: CanvasState):
        self.canvas = state.canvas.cpu().numpy().copy()
        """[B, L] int64."""
        self.changed_at = np.full_like(self.canvas, -1)
        """[B, L] int64: the row's step; -1 for what was there from the start."""
        self.mask_id = state.facts.mask_token_id

    def note(self, state: CanvasState, tokens: np.ndarray) -> None:
        """The window [R, W] of the running rows now holds `tokens`."""
        rows, positions = state.window.rows[:, None], state.window.host_positions
        changed = self.canvas[rows, positions] != tokens
        self.changed_at[rows, positions] = np.where(changed, state.row_step[rows], self.changed_at[rows, positions])
        self.canvas[rows, positions] = tokens

    def taken(self, rows: np.ndarray, columns: int | None = None) -> ChangeLog:
        """A copy of the `rows` [N] alone, with so many columns."""
        other = copy.copy(self)
        size = self.canvas.shape[1] if columns is None else columns
        other.canvas = of_rows.fitted(self.canvas[rows], size, -1)
        other.changed_at = of_rows.fitted(self.changed_at[rows], size, -1)
        return other

    def put(self, slots: np.ndarray, other: ChangeLog) -> None:
        """Replace the rows `slots` [N] by those of another request, which has as many columns at most."""
        wide = other.taken(np.arange(len(slots)), self.canvas.shape[1])
        self.canvas[slots], self.changed_at[slots] = wide.canvas, wide.changed_at

    def undecided(self, rows: np.ndarray) -> np.ndarray:
        """[N, L] bool."""
        return self.canvas[rows] == self.mask_id

    def settled(self, state: CanvasState, rows: np.ndarray, delay: int = 1) -> np.ndarray:
        """[N, L] bool: decided, and unchanged since `delay` steps before this one began."""
        return ~self.undecided(rows) & (self.changed_at[rows] < state.row_step[rows, None] - delay)


def whole_rows(state: CanvasState, chosen: np.ndarray, most: int = 3, multiple: int = 1) -> list[Part]:
    """Parts that evaluate the `chosen` running rows from end to end, but for what was taken over from a prefix."""
    if state.level and multiple == 1 and not state.reuses and state.present is None:
        return [Part(chosen, state.columns[: len(chosen)], None, "full")]
    length = state.length[state.window.rows[chosen]]
    return spans(state, chosen, np.zeros_like(length), length, "rest" if state.reuses else "full", most, multiple)


def spans(
    state: CanvasState,
    chosen: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    kind: str,
    most: int = 3,
    multiple: int = 1,
) -> list[Part]:
    """Parts for the contiguous ranges [start, stop) of the `chosen` running rows, in at most `most` buckets.

    Args:
        chosen: [N] int64 indices into the running rows.
        start, stop: [N] int64 positions; what was taken over from a prefix is left out, and what does not exist for
            now. Rows with gaps become subsets.
        multiple: widths are rounded up to this, as far as the canvas goes.
    """
    if state.reuses:
        start = np.maximum(start, state.reused[state.window.rows[chosen]])
    if state.present is not None:
        there = _there(state, chosen, start, stop)
        first, size = there.argmax(1), there.sum(1)
        if (there.shape[1] - there[:, ::-1].argmax(1) - first > size).any():
            parts = subsets(state, chosen, there, most, multiple)
            return [replace(part, lasts=True) for part in parts]
        if kind == "full" and (first + size < stop).any():
            kind = "rest"
        start, stop = first, first + size
    groups = buckets(stop - start, exact=not state.pads, most=min(most, state.most_calls))
    if multiple == 1:
        return [Part.span(chosen[g], start[g], stop[g], kind) for g in groups]
    return [
        Part.span(chosen[g], start[g], stop[g], kind, _rounded(state, stop[g] - start[g], multiple)) for g in groups
    ]


def subsets(state: CanvasState, chosen: np.ndarray, needed: np.ndarray, most: int = 3, multiple: int = 1) -> list[Part]:
    """Parts for the positions `needed` [N, L] of the `chosen` running rows, in at most `most` buckets; what was taken
    over from a prefix is left out."""
    if state.reuses:
        needed = needed & (np.arange(needed.shape[1]) >= state.reused[state.window.rows[chosen], None])
    if state.present is not None:
        needed = needed & state.present[state.window.rows[chosen]]
    sizes = needed.sum(1)
    groups = buckets(sizes, exact=not state.pads, most=min(most, state.most_calls))
    if multiple == 1:
        return [Part.subset(chosen[g], needed[g]) for g in groups]
    return [Part.subset(chosen[g], needed[g], _rounded(state, sizes[g], multiple)) for g in groups]


def _there(state: CanvasState, chosen: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """[N, L] bool: the positions in [start, stop) of the `chosen` running rows that exist for now."""
    assert state.present is not None
    column = np.arange(state.present.shape[1])
    there: np.ndarray = state.present[state.window.rows[chosen]] & (column >= start[:, None]) & (column < stop[:, None])
    return there


def _rounded(state: CanvasState, sizes: np.ndarray, multiple: int) -> int:
    return int(min(-(-sizes.max() // multiple) * multiple, state.canvas.shape[1]))


def outward(state: CanvasState, rows: np.ndarray, start: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ranges of `rows` [N], widened to whole blocks of a block-causal model: inside one, positions see each other."""
    if state.facts.topology != "block_causal":
        return start, stop
    return state.facts.block_bounds(start, stop, state.prompt_length[rows])


def buckets(sizes: np.ndarray, exact: bool, most: int = 3, waste: float = 1.1) -> list[Any]:
    """Group rows by how many positions they need, so that none is padded far beyond its own need.

    Args:
        sizes: [R] int64 positions per row.
        exact: only rows of one size share a bucket (models that cannot be padded).
        most: at most so many buckets otherwise.
        waste: more buckets are made while those there are evaluate more than this many times the rows' own positions.

    Returns:
        Index arrays that partition range(R), widest bucket first.
    """
    if exact:
        return [np.flatnonzero(sizes == size) for size in np.unique(sizes)[::-1]]
    widest, total = sizes.max(), sizes.sum()
    if widest * len(sizes) <= waste * total or most == 1:
        return [np.arange(len(sizes))]
    order = np.argsort(-sizes, kind="stable")
    ordered, count = sizes[order], len(sizes)
    # best[i]: positions evaluated for ordered[i:] in one bucket; then in one bucket more, ordered[i:j] being the first
    best = np.append(ordered * (count - np.arange(count)), 0)
    first = np.arange(count + 1)
    widths = np.append(ordered, 0)[:, None] * (first[None, :] - first[:, None])
    widths = np.where(first[None, :] > first[:, None], widths, np.iinfo(np.int64).max // 2)
    cuts: list[np.ndarray] = []
    while len(cuts) < most - 1 and best[0] > waste * total:
        options = widths + best
        cuts.append(options.argmin(1))
        best = np.append(options.min(1)[:-1], 0)
    groups, begin = [], 0
    for cut in reversed(cuts):
        if begin < count:
            groups.append(np.sort(order[begin : cut[begin]]))
            begin = int(cut[begin])
    return groups if begin >= count else [*groups, np.sort(order[begin:])]

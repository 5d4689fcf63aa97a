"""Automata over a model's tokens. Tokens of one class have the same transitions in every state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, takewhile

import numpy as np

MAX_STATES, MAX_EDGES = 2**16, 2**20
"""Limits of an automaton over tokens. Its tables then take at most about 130 MB."""
MAX_TABLE_BYTES = 2**28
"""Limit of a table with one entry per state and position of an answer."""


class ConstraintSizeError(ValueError):
    """A constraint whose tables or compilation would exceed a limit of memory or time."""


STRETCH = 2048
"""Number of consecutive ids in a stretch. Their logits fit a core's L1 cache."""


class KeyGroups:
    """Groups of E entries by key. `order` [E] sorts the entries by key. `keys` [K] are the distinct keys, `starts` [K]
    the index of each key's first sorted entry."""

    def __init__(self, keys: np.ndarray):
        self.order = np.argsort(keys, kind="stable")
        self.keys, self.starts, sizes = np.unique(keys[self.order], return_index=True, return_counts=True)
        self.owner = np.repeat(np.arange(len(sizes)), sizes)
        """[E]: index of each sorted entry's key."""


class Runs:
    """Runs of tokens, for sums over classes and over stretches. A run is the tokens of one class in one stretch of ids.

    `tokens` [A] int32 are the ids that occur in texts, sorted by run, then by id. Run p is
    `tokens[begins[p] : begins[p + 1]]`, of class `classes[p]`. `stretches` holds the index of each stretch's first run,
    and last the number of runs P. `by_class` groups the runs by class.
    """

    def __init__(self, class_of: np.ndarray):
        ids = np.flatnonzero(class_of >= 0)
        classes, stretch = class_of[ids], ids // STRETCH
        order = np.lexsort((classes, stretch))  # stable: ids ascend
        self.tokens, classes, stretch = ids[order].astype(np.int32), classes[order], stretch[order]
        first = np.append(True, (classes[1:] != classes[:-1]) | (stretch[1:] != stretch[:-1]))[: len(ids)]
        self.begins = np.append(np.flatnonzero(first), len(ids))
        self.classes, run_stretches = classes[first], stretch[first]
        self.stretches = np.append(np.unique(run_stretches, return_index=True)[1], len(run_stretches))
        self.by_class = KeyGroups(self.classes)


class TokenAutomaton:
    """Automaton over tokens with S states, C token classes and E edges. State 0 is the start; every state can be
    reached and leads to an accepting state. S is 0 if no token sequence is in the language.

    Args:
        vocab_size: V.
        members: the ids of each class; an id is in at most one class.
        edges: [E, 3] int64: state, class, next state.
        accept: [S] bool: accepting states.
        end: the state after an end token; -1 without end tokens.
        free: [S] bool: states in the free text or inside the marker (`Constraint.after`); None without a marker.
    """

    def __init__(
        self,
        vocab_size: int,
        members: Sequence[np.ndarray],
        edges: np.ndarray,
        accept: np.ndarray,
        end: int = -1,
        free: np.ndarray | None = None,
    ):
        edges, state_ids = _trim(edges, accept)
        class_ids = np.unique(edges[:, 1])
        self.vocab_size = vocab_size
        self.members = [np.sort(members[index]) for index in class_ids]
        self.accept = accept[state_ids >= 0]
        self.free = np.zeros_like(self.accept) if free is None else free[state_ids >= 0]
        self.end = int(state_ids[end]) if end >= 0 else -1
        edges = np.stack((state_ids[edges[:, 0]], np.searchsorted(class_ids, edges[:, 1]), state_ids[edges[:, 2]]), 1)
        self.edges = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
        self._begins = np.searchsorted(self.edges[:, 0], np.arange(self.states + 1))
        self.class_of = np.full(vocab_size, -1, np.int32)
        for index, ids in enumerate(self.members):
            self.class_of[ids] = index

    @property
    def states(self) -> int:
        return len(self.accept)

    @property
    def classes(self) -> int:
        return len(self.members)

    @cached_property
    def sizes(self) -> np.ndarray:
        """[C] int64: number of tokens in each class."""
        return np.array([len(ids) for ids in self.members], np.int64)

    def transitions(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the classes [k] of a state's edges, ascending, and the next states [k]."""
        _, classes, following = self.edges[self._begins[state] : self._begins[state + 1]].T
        return classes, following

    @cached_property
    def runs(self) -> Runs:
        return Runs(self.class_of)

    @cached_property
    def by_state(self) -> KeyGroups:
        return KeyGroups(self.edges[:, 0])

    @cached_property
    def by_class(self) -> KeyGroups:
        return KeyGroups(self.edges[:, 1])

    @cached_property
    def by_next(self) -> KeyGroups:
        return KeyGroups(self.edges[:, 2])

    @property
    def nbytes(self) -> int:
        """Upper bound of the tables' bytes."""
        # includes the cached properties: three groups with 32 bytes per edge, runs, distances
        tokens = 12 * int(self.sizes.sum()) + 56 * len(self.runs.classes)
        return 5 * self.edges.nbytes + tokens + self.class_of.nbytes + 10 * self.states

    @cached_property
    def distance(self) -> np.ndarray:
        """[S] int64: minimum number of tokens from each state to an accepting state."""
        return _distances(self.edges[:, 2], self.edges[:, 0], self.accept)

    def reach(self, count: int) -> np.ndarray:
        """[S] bool: states from which exactly `count` tokens lead to an accepting state."""
        if self.end >= 0:  # end tokens fill the remaining slots
            return self.distance <= count
        states = self.accept
        for _ in range(count):
            sources = self.edges[states[self.edges[:, 2]], 0]
            states = np.zeros(self.states, bool)
            states[sources] = True
        return states

    def within_budget(self, budget: int) -> np.ndarray:
        """[S] bool: states that obey a limit on free text. budget: number of tokens that may still precede the marker.
        It is -k if the limit was reached k tokens ago: the state must then be at least k tokens into the marker."""
        return ~self.free | (self.distance <= self.distance[self.free].max(initial=0) + budget)

    def free_length(self, tokens: Sequence[int]) -> int:
        """Count the `tokens` up to the end of the marker."""
        states = accumulate(tokens, self.step, initial=0)
        return min(len(tokens), sum(1 for _ in takewhile(lambda state: state >= 0 and self.free[state], states)))

    def step(self, state: int, token: int) -> int:
        """Return the state after a token; -1 if the token cannot follow or the state is -1."""
        index = self.class_of[token] if 0 <= token < self.vocab_size else -1
        if state < 0 or index < 0:
            return -1
        classes, following = self.transitions(state)
        edge = int(np.searchsorted(classes, index))
        return int(following[edge]) if edge < len(classes) and classes[edge] == index else -1

    def with_end_tokens(self, ids: Iterable[int]) -> TokenAutomaton:
        """Allow any number of the end tokens `ids` after a text, but none inside it."""
        ids = np.unique(np.array([*ids], np.int64))
        texts = self.without_tokens(ids)
        if not len(ids) or not texts.states:
            return texts
        end, index = texts.states, texts.classes
        accepted = np.append(np.flatnonzero(texts.accept), end)
        end_edges = np.stack((accepted, np.full_like(accepted, index), np.full_like(accepted, end)), 1)
        edges, free = np.concatenate((texts.edges, end_edges)), np.append(texts.free, False)
        return TokenAutomaton(self.vocab_size, [*texts.members, ids], edges, np.append(texts.accept, True), end, free)

    def without_tokens(self, ids: Iterable[int]) -> TokenAutomaton:
        """Remove the texts that contain one of the tokens `ids`."""
        removed = np.zeros(self.vocab_size, bool)
        removed[[*ids]] = True
        if not self.states or not removed[self.runs.tokens].any():
            return self
        members = [tokens[~removed[tokens]] for tokens in self.members]
        nonempty = np.array([len(tokens) > 0 for tokens in members])
        edges = self.edges[nonempty[self.edges[:, 1]]]
        return TokenAutomaton(self.vocab_size, members, edges, self.accept, self.end, self.free)


def _trim(edges: np.ndarray, accept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep the edges on paths from the start to acceptance. Returns these edges and new state ids [S] (-1: removed)."""
    is_start = np.zeros(len(accept), bool)
    is_start[:1] = True
    from_start, to_accept = _distances(edges[:, 0], edges[:, 2], is_start), _distances(edges[:, 2], edges[:, 0], accept)
    is_useful = np.maximum(from_start, to_accept) < UNREACHED
    if not is_useful[:1].any():
        is_useful[:] = False
    edges = edges[is_useful[edges[:, 0]] & is_useful[edges[:, 2]]]
    return edges, np.where(is_useful, np.cumsum(is_useful) - 1, -1)


UNREACHED = np.iinfo(np.int64).max


def _distances(sources: np.ndarray, targets: np.ndarray, is_start: np.ndarray) -> np.ndarray:
    """[S] int64: length of the shortest path to each state from the states `is_start` [S] bool, along the edges
    sources [E] -> targets [E]; `UNREACHED` without a path."""
    order = np.argsort(sources, kind="stable")
    targets, starts = targets[order], np.searchsorted(sources[order], np.arange(len(is_start) + 1))
    distance = np.full(len(is_start), UNREACHED)
    states, count = np.flatnonzero(is_start), 0
    while len(states):
        distance[states] = count
        count += 1
        sizes = starts[states + 1] - starts[states]
        edges = np.arange(sizes.sum()) + np.repeat(starts[states] - (np.cumsum(sizes) - sizes), sizes)
        states = targets[edges]
        states = np.unique(states[distance[states] == UNREACHED])
    return distance

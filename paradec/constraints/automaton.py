"""Automata over the tokens of one model: which token leads where, by classes of tokens that lead everywhere alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

STRETCH = 2048
"""Ids whose logits a core's first cache holds."""


class Grouped:
    """Entries in the order of a key, so that those of equal keys are together."""

    def __init__(self, keys: np.ndarray):
        self.order = np.argsort(keys, kind="stable")
        self.keys, self.starts, sizes = np.unique(keys[self.order], return_index=True, return_counts=True)
        self.owner = np.repeat(np.arange(len(sizes)), sizes)
        """[E]: the place among the keys of each entry, in order."""


class Runs:
    """Tokens of one class within one stretch of ids: sums over runs [P] give those over classes and over stretches.

    Attributes:
        tokens: [A] int32: all ids that some text has, run by run, ascending in each. begins: [P + 1], where each run
            begins there. classes: [P]. stretches: where the runs of each stretch begin, and P. by_class: the runs of
            each class, of lower ids first.
    """

    def __init__(self, class_of: np.ndarray):
        ids = np.flatnonzero(class_of >= 0)
        classes, stretch = class_of[ids], ids // STRETCH
        order = np.lexsort((classes, stretch))  # stable: ids ascend
        self.tokens, classes, stretch = ids[order].astype(np.int32), classes[order], stretch[order]
        first = np.append(True, (classes[1:] != classes[:-1]) | (stretch[1:] != stretch[:-1]))[: len(ids)]
        self.begins = np.append(np.flatnonzero(first), len(ids))
        self.classes, of_runs = classes[first], stretch[first]
        self.stretches = np.append(np.unique(of_runs, return_index=True)[1], len(of_runs))
        self.by_class = Grouped(self.classes)


class TokenAutomaton:
    """States 0 (where texts begin) to S - 1, of which each is reached and leads to an accepting one; S is 0 where no
    sequence of tokens is in the language. `C` classes of tokens, `E` edges.

    Args:
        vocab_size: V.
        members: the ids of each class; an id is in one class at most.
        edges: [E, 3] int64: state, class, next state.
        accept: [S] bool.
        end: the state after an end token; -1 where there is none.
    """

    def __init__(
        self, vocab_size: int, members: Sequence[np.ndarray], edges: np.ndarray, accept: np.ndarray, end: int = -1
    ):
        edges, number = _useful(edges, accept)
        kept = np.unique(edges[:, 1])
        self.vocab_size = vocab_size
        self.members = [np.sort(members[index]) for index in kept]
        self.accept = accept[number >= 0]
        self.end = int(number[end]) if end >= 0 else -1
        edges = np.stack((number[edges[:, 0]], np.searchsorted(kept, edges[:, 1]), number[edges[:, 2]]), 1)
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
        """[C] int64: tokens in each class."""
        return np.array([len(ids) for ids in self.members], np.int64)

    def after(self, state: int) -> tuple[np.ndarray, np.ndarray]:
        """The classes [k] that lead on from a state, ascending, and where each leads [k]."""
        _, classes, following = self.edges[self._begins[state] : self._begins[state + 1]].T
        return classes, following

    @cached_property
    def runs(self) -> Runs:
        return Runs(self.class_of)

    @cached_property
    def by_state(self) -> Grouped:
        return Grouped(self.edges[:, 0])

    @cached_property
    def by_class(self) -> Grouped:
        return Grouped(self.edges[:, 1])

    @cached_property
    def by_next(self) -> Grouped:
        return Grouped(self.edges[:, 2])

    @property
    def nbytes(self) -> int:
        """Bytes of the tables that decoding reads."""
        groups, runs = (self.by_state, self.by_class, self.by_next, self.runs.by_class), self.runs
        arrays = [self.edges, self.class_of, self.accept, *self.members, runs.tokens, runs.begins]
        return sum(array.nbytes for array in arrays) + sum(2 * group.order.nbytes for group in groups)

    def reach(self, most: int) -> np.ndarray:
        """[>= most + 1, S] bool: from which states so many tokens lead to an accepting one. It is kept."""
        known = self.__dict__.get("_reach", self.accept[None])
        if len(known) <= most:
            more, source, target = [known[-1]], self.edges[:, 0], self.edges[:, 2]
            for _ in range(most + 1 - len(known)):
                found = np.zeros(self.states, bool)
                found[source[more[-1][target]]] = True
                more.append(found)
            known = np.concatenate((known, np.stack(more[1:])))
            self.__dict__["_reach"] = known
        return known

    def step(self, state: int, token: int) -> int:
        """The state after a token; -1 where the token is in no text, or the state is -1."""
        index = self.class_of[token] if 0 <= token < self.vocab_size else -1
        if state < 0 or index < 0:
            return -1
        classes, following = self.after(state)
        at = int(np.searchsorted(classes, index))
        return int(following[at]) if at < len(classes) and classes[at] == index else -1

    def ended(self, ids: Iterable[int]) -> TokenAutomaton:
        """The same where a text may be followed by any number of the end tokens `ids`, and has none of them in it."""
        ids = np.unique(np.array([*ids], np.int64))
        texts = self.without(ids)
        if not len(ids) or not texts.states:
            return texts
        end, index = texts.states, texts.classes
        accepted = np.append(np.flatnonzero(texts.accept), end)
        more = np.stack((accepted, np.full_like(accepted, index), np.full_like(accepted, end)), 1)
        edges = np.concatenate((texts.edges, more))
        return TokenAutomaton(self.vocab_size, [*texts.members, ids], edges, np.append(texts.accept, True), end)

    def without(self, ids: Iterable[int]) -> TokenAutomaton:
        """The same language without the texts that have one of the tokens `ids`."""
        gone = np.zeros(self.vocab_size, bool)
        gone[[*ids]] = True
        if not self.states or not gone[self.runs.tokens].any():
            return self
        members = [found[~gone[found]] for found in self.members]
        left = np.array([len(found) > 0 for found in members])
        return TokenAutomaton(self.vocab_size, members, self.edges[left[self.edges[:, 1]]], self.accept, self.end)


def _useful(edges: np.ndarray, accept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The edges on ways from the beginning to acceptance, and the new number of every state (-1: on none)."""
    begin = np.zeros(len(accept), bool)
    begin[:1] = True
    useful = _spread(edges[:, 0], edges[:, 2], begin) & _spread(edges[:, 2], edges[:, 0], accept.copy())
    if not useful[:1].any():
        useful[:] = False
    edges = edges[useful[edges[:, 0]] & useful[edges[:, 2]]]
    return edges, np.where(useful, np.cumsum(useful) - 1, -1)


def _spread(source: np.ndarray, target: np.ndarray, found: np.ndarray) -> np.ndarray:
    """[S] bool: what is reached from `found` along edges from source to target, each [E]."""
    while True:
        known = np.count_nonzero(found)
        found[target[found[source]]] = True
        if np.count_nonzero(found) == known:
            return found

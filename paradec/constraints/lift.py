"""An automaton over bytes becomes one over a model's tokens: a token leads where its bytes do.

Every token is walked letter by letter from all states at once, all tokens together: after each letter, tokens that have
come from every state to the same one go on as one. So the work is that of the distinct maps between states, of which
there are few, and tokens with one map are a class.
"""

from __future__ import annotations

import numpy as np

from paradec.constraints.automaton import MAX_EDGES, MAX_STATES, TokenAutomaton
from paradec.constraints.byte_automaton import ByteAutomaton
from paradec.constraints.spelling import Spelling

MOST_ENTRIES = 2**22
"""States of maps that are looked at together."""
MAX_ENTRIES = 2**23
"""States of all maps, those of beginnings of tokens included."""


def lift(source: ByteAutomaton, spelling: Spelling, vocab_size: int) -> TokenAutomaton:
    """The automaton of the sequences of tokens that read a text of the language, without end tokens.

    Its states are those of bytes, times the places in which tokens read differently.

    Raises:
        ValueError: it would have more than `MAX_STATES` states or `MAX_EDGES` edges.
    """
    size, places = len(source.accept), len(spelling.texts)
    if not size:
        return TokenAutomaton(vocab_size, [], np.zeros((0, 3), np.int64), np.zeros(0, bool))
    # the beginning of a text has a place of its own, in which it has one state
    states = [np.arange(size) if places == 1 or place else np.zeros(1, np.int64) for place in range(places)]
    offsets = np.cumsum([0, *map(len, states)])
    _check(int(offsets[-1]), "states", MAX_STATES)
    maps, chosen = [], np.full((vocab_size, places), -1, np.int64)
    for place, begin in enumerate(states):
        ids, found, columns = _walked(source, begin, spelling.arrays[place])
        inside = ids < vocab_size
        chosen[ids[inside], place] = found[inside]
        maps.append(columns)
    tokens = np.flatnonzero((chosen >= 0).any(1))
    after = np.array([spelling.after[token] for token in tokens.tolist()], np.int64)
    kinds, kind = np.unique(np.column_stack((chosen[tokens], after)), axis=0, return_inverse=True)
    order = np.argsort(kind.ravel(), kind="stable")
    members = np.split(tokens[order], np.cumsum(np.bincount(kind.ravel(), minlength=len(kinds)))[:-1])
    count = 0
    for at, place_maps in enumerate(maps):
        map_numbers = kinds[:, at]
        count += int(place_maps.sizes(map_numbers[map_numbers >= 0]).sum())
    _check(count, "edges", MAX_EDGES)
    edges = [np.zeros((0, 3), np.int64)]
    for index, (*numbers, following) in enumerate(kinds.tolist()):
        for place, number in enumerate(numbers):
            if number >= 0:
                live, to = maps[place].of(number)
                parts = (offsets[place] + live, np.full(len(live), index), offsets[following] + to)
                edges.append(np.stack(parts, 1))
    accept = np.concatenate([source.accept[begin] for begin in states])
    return TokenAutomaton(vocab_size, members, np.concatenate(edges), accept)


def _check(count: int, name: str, limit: int) -> None:
    if count > limit:
        raise ValueError(f"the constraint needs an automaton of more than {limit} {name} over the model's tokens")


class _Maps:
    """Maps from states to states, each of them as the states that it maps and where to: most map few."""

    def __init__(self, begin: np.ndarray):
        self.source, self.target = np.arange(len(begin), dtype=np.int32), begin.astype(np.int32)
        self.begins = np.array([0, len(begin)], np.int64)

    def sizes(self, number: np.ndarray) -> np.ndarray:
        return self.begins[number + 1] - self.begins[number]

    def of(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The states [k] that a map maps, and where to."""
        inside = slice(self.begins[number], self.begins[number + 1])
        return self.source[inside], self.target[inside]

    def stepped(
        self, number: np.ndarray, letter: np.ndarray, step: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The maps `number` [n] and a letter [n] more each: states, where to, and how many of each, [n]."""
        sizes = self.sizes(number)
        at = np.arange(sizes.sum()) + np.repeat(self.begins[number] - (np.cumsum(sizes) - sizes), sizes)
        target = step[self.target[at], np.repeat(letter, sizes)]
        live = target >= 0
        owner = np.repeat(np.arange(len(number)), sizes)[live]
        return self.source[at[live]], target[live], np.bincount(owner, minlength=len(number))

    def add(self, maps: list[tuple[np.ndarray, np.ndarray]]) -> None:
        sources, targets = zip(*maps, strict=True)
        self.source = np.concatenate((self.source, *sources))
        self.target = np.concatenate((self.target, *targets))
        self.begins = np.append(self.begins, self.begins[-1] + np.cumsum([len(each) for each in sources]))


def _walked(
    source: ByteAutomaton, begin: np.ndarray, texts: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, _Maps]:
    """Walk texts from the states `begin` [s]: ids [N], the number of each one's map (-1: from no state to any), and the
    maps, which are of places in `begin`."""
    ids, length, joined, starts = texts
    letters, count, known = source.letter_of[joined], source.step.shape[1], dict[bytes, int]()
    maps, number = _Maps(begin), np.zeros(len(ids), np.int64)
    for at in range(int(length.max(initial=0))):
        live = np.flatnonzero(number[: np.searchsorted(-length, -at, side="left")] >= 0)
        pair, back = np.unique(number[live] * count + letters[starts[live] + at], return_inverse=True)
        found, fresh, first = (
            np.full(len(pair), -1, np.int64),
            list[tuple[np.ndarray, np.ndarray]](),
            len(maps.begins) - 1,
        )
        chunks = np.cumsum(maps.sizes(pair // count)) // MOST_ENTRIES
        for some in np.split(np.arange(len(pair)), np.flatnonzero(np.diff(chunks)) + 1):
            states, targets, sizes = maps.stepped(pair[some] // count, pair[some] % count, source.step)
            ends = np.cumsum(sizes)
            for place, stop, size in zip(some.tolist(), ends.tolist(), sizes.tolist(), strict=True):
                if not size:
                    continue
                one = states[stop - size : stop], targets[stop - size : stop]
                key = one[0].tobytes() + one[1].tobytes()
                if key not in known:
                    known[key] = first + len(fresh)
                    fresh.append(one)
                found[place] = known[key]
        if fresh:
            maps.add(fresh)
            _check(len(maps.source), "edges", MAX_ENTRIES)
        number[live] = found[back]
    return ids, number, maps

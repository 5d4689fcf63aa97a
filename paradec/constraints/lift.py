"""An automaton over bytes becomes one over a model's tokens: a token leads where its bytes do.

Every token is walked letter by letter from all states at once, all tokens together: after each letter, tokens that have
come from every state to the same one go on as one. So the work is that of the distinct maps between states, of which
there are few, and tokens with one map are a class.
"""

from __future__ import annotations

import numpy as np

from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.byte_automaton import ByteAutomaton
from paradec.constraints.spelling import Spelling

MOST_ENTRIES = 2**22
"""States of maps that are looked at together."""


def lift(source: ByteAutomaton, spelling: Spelling, vocab_size: int) -> TokenAutomaton:
    """The automaton of the sequences of tokens that read a text of the language, without end tokens.

    Its states are those of bytes, times the places in which tokens read differently.
    """
    size, places = len(source.accept), len(spelling.texts)
    if not size:
        return TokenAutomaton(vocab_size, [], np.zeros((0, 3), np.int64), np.zeros(0, bool))
    # the beginning of a text has a place of its own, in which it has one state
    states = [np.arange(size) if places == 1 or place else np.zeros(1, np.int64) for place in range(places)]
    offsets = np.cumsum([0, *map(len, states)])
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
    edges = [np.zeros((0, 3), np.int64)]
    for index, (*numbers, following) in enumerate(kinds.tolist()):
        for place, number in enumerate(numbers):
            if number >= 0:
                to = maps[place][number]
                live = np.flatnonzero(to >= 0)
                edges.append(
                    np.stack((offsets[place] + live, np.full_like(live, index), offsets[following] + to[live]), 1)
                )
    accept = np.concatenate([source.accept[begin] for begin in states])
    return TokenAutomaton(vocab_size, members, np.concatenate(edges), accept)


def _walked(
    source: ByteAutomaton, begin: np.ndarray, texts: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Walk texts from the states `begin` [s]: ids [N], the number of each one's map (-1: from no state to any), and the
    maps [M, s] int32, -1 where there is no way."""
    ids, length, joined, starts = texts
    letters = source.letter_of[joined]
    count = source.step.shape[1]
    step = np.concatenate((source.step, np.full((1, count), -1, np.int32)))  # -1 stays -1
    known: dict[bytes, int] = {}
    maps = begin.astype(np.int32)[None]
    number = np.zeros(len(ids), np.int64)
    for at in range(int(length.max(initial=0))):
        live = np.flatnonzero(number[: np.searchsorted(-length, -at, side="left")] >= 0)
        pair, back = np.unique(number[live] * count + letters[starts[live] + at], return_inverse=True)
        found = np.empty(len(pair), np.int64)
        fresh: list[np.ndarray] = []
        for some in np.array_split(np.arange(len(pair)), -(-len(pair) * len(begin) // MOST_ENTRIES) or 1):
            reached = step[maps[pair[some] // count], (pair[some] % count)[:, None]]
            for place, row in zip(some.tolist(), reached, strict=True):
                if (row < 0).all():
                    found[place] = -1
                    continue
                key = row.tobytes()
                if key not in known:
                    known[key] = len(maps) + len(fresh)
                    fresh.append(row)
                found[place] = known[key]
        if fresh:
            maps = np.concatenate((maps, np.stack(fresh)))
        number[live] = found[back]
    return ids, number, maps

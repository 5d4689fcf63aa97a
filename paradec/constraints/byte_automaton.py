"""Minimal deterministic automata of expressions, over the bytes of UTF-8 texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paradec.constraints.dfa import to_dfa
from paradec.constraints.expressions import Node


@dataclass(frozen=True)
class ByteAutomaton:
    """States 0 (where texts begin) to S - 1, of which each leads to an accepting one; S is 0 where no text matches.

    With a marker before the texts, states below `begin` are those of free bytes; the marker leads to `begin` - 1, whose
    place `begin` takes.
    """

    step: np.ndarray
    """[S, L] int32: the next state after each letter, -1 where there is none."""
    letter_of: np.ndarray
    """[256] int32: the letter of each byte; bytes that no state tells apart are one letter."""
    accept: np.ndarray
    """[S] bool."""
    begin: int = 0

    def accepts(self, text: bytes) -> bool:
        state = 0 if len(self.accept) else -1
        for byte in text:
            if state < 0:
                return False
            state = int(self.step[state, self.letter_of[byte]])
            state += state == self.begin - 1 >= 0
        return state >= 0 and bool(self.accept[state])


def byte_automaton(node: Node, after: str | None = None) -> ByteAutomaton:
    """Build the minimal automaton of an expression. Raises ValueError if it is too large (`dfa.MOST_STATES`).

    after: a marker; then free bytes up to the first one come before the texts (automaton of Knuth, Morris and Pratt).
    """
    dfa = to_dfa(node, over_bytes=True)
    moves = np.array([(s, *move) for s, row in enumerate(dfa.rows) for move in row], np.int64).reshape(-1, 4)
    marks = np.unique(np.concatenate(([0], moves[:, 1], moves[:, 2] + 1)))
    marks = marks[marks < 256]
    letter_of = np.searchsorted(marks, np.arange(256), side="right") - 1
    source, low, high, target = moves.T
    first, sizes = letter_of[low], letter_of[high] - letter_of[low] + 1
    letters = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes - first, sizes)
    step = np.full((len(dfa.rows), len(marks)), -1, np.int32)
    step[np.repeat(source, sizes), letters] = np.repeat(target, sizes)
    columns = {column.tobytes(): index for index, column in reversed([*enumerate(step.T)])}
    distinct = sorted(columns.values())
    letter = np.array([distinct.index(columns[column.tobytes()]) for column in step.T])
    step, letter_of, accept = step[:, distinct], letter[letter_of].astype(np.int32), np.array(dfa.accept, bool)
    if after is None or not len(accept):
        return ByteAutomaton(step, letter_of, accept)
    marker = after.encode()
    pairs = np.stack((letter_of, [marker.find(byte) for byte in range(256)]))
    (old_letters, _), letter_of = np.unique(pairs, axis=1, return_inverse=True)
    letter_of, begin, fallback = letter_of.ravel().astype(np.int32), len(marker) + 1, 0
    free = np.zeros((begin, len(old_letters)), np.int32)
    for state, new_letter in enumerate(letter_of[[*marker]]):
        free[state] = free[fallback]
        fallback, free[state, new_letter] = int(free[fallback, new_letter]), state + 1
    free[-1] = -1
    step = np.concatenate((free, np.where(step < 0, -1, step + begin).astype(np.int32)[:, old_letters]))
    return ByteAutomaton(step, letter_of, np.append(np.zeros(begin, bool), accept), begin)

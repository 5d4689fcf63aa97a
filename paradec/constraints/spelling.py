"""The bytes of each token of a model, at the beginning of a text and after other tokens.

The bytes of a token depend on its place: SentencePiece leaves out a text's first space, others put spaces between
tokens. Three ways of joining tokens are tried, and the one that agrees with `decode` on random sequences is taken.

`lift` converts an automaton over bytes to tokens. All tokens are walked byte by byte from all states at once; tokens
whose maps between states are equal so far continue as one, and in the end are a class.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from paradec.constraints.automaton import MAX_EDGES, MAX_STATES, TokenAutomaton
from paradec.constraints.byte_automaton import ByteAutomaton

MOST_PAIRED = 400
"""Tokens of a vocabulary that is looked at pair by pair."""
SAMPLES, LONGEST_SAMPLE = 400, 6
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Spelling:
    """How tokens read, by what comes before them: nothing (place 0), or a token of one of the other places."""

    texts: tuple[dict[int, bytes], ...]
    """In each place, by id; ids that read nothing, and special ones, are left out. Of one place alone: everywhere."""
    after: dict[int, int]
    """By id: the place after a token."""

    def read(self, ids: Iterable[int]) -> bytes | None:
        """What tokens read together; None where one of them reads nothing."""
        place, found = 0, b""
        for token in ids:
            if token not in self.texts[place]:
                return None
            found += self.texts[place][token]
            place = self.after[token]
        return found

    @cached_property
    def arrays(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], ...]:
        """For each place: ids [N], the longest first; their lengths [N], their bytes one after the other, and where
        those of each begin [N]."""
        return tuple(_arrays(texts) for texts in self.texts)


def _arrays(texts: dict[int, bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    ids = sorted(texts, key=lambda token: -len(texts[token]))
    length = np.array([len(texts[token]) for token in ids], np.int64)
    joined = np.frombuffer(b"".join(texts[token] for token in ids), np.uint8)
    return np.array(ids, np.int64), length, joined, np.cumsum(length) - length


_KNOWN: weakref.WeakKeyDictionary[Any, Spelling | None] = weakref.WeakKeyDictionary()


def spelling_of(tokenizer: Any) -> Spelling | None:
    """How the tokens of a tokenizer read; None where `decode` joins them in a way that is not known."""
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = next(_agreeing(tokenizer), None)
    return _KNOWN[tokenizer]


def _agreeing(tokenizer: Any) -> Iterator[Spelling]:
    special = {*tokenizer.all_special_ids}
    special |= {token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special}
    names = tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])
    known = {token: name for token, name in enumerate(names) if isinstance(name, str) and token not in special}
    ways: list[Callable[[], Spelling]] = [
        lambda: _plain({token: _of_byte_level(name) for token, name in known.items()}),
        lambda: _stripped({token: _of_sentence_piece(name) for token, name in known.items()}),
        lambda: _plain({token: _of_sentence_piece(name) for token, name in known.items()}),
    ]
    if len(known) <= MOST_PAIRED:
        ways.append(lambda: _in_pairs(tokenizer, [*known]))
    for way in ways:
        found = way()
        if _agrees(tokenizer, found):
            yield found


def _agrees(tokenizer: Any, spelling: Spelling) -> bool:
    """Whether random sequences read what `decode` says, and most of them something; sequences that are no UTF-8 are no
    part of any language."""
    draw, ids, unread = np.random.default_rng(0), np.array([*spelling.after]), 0
    if not len(ids):
        return False
    for sample in range(SAMPLES):
        chosen = draw.choice(ids, 1 + sample % LONGEST_SAMPLE).tolist()
        if (read := spelling.read(chosen)) is None:
            unread += 1
            continue
        try:
            text = read.decode()
        except UnicodeDecodeError:
            continue
        if tokenizer.decode(chosen, skip_special_tokens=True) != text:
            return False
    return unread <= SAMPLES // 2


def _plain(texts: dict[int, bytes]) -> Spelling:
    """Tokens that read the same everywhere."""
    return Spelling(({token: text for token, text in texts.items() if text},), dict.fromkeys(texts, 0))


def _stripped(texts: dict[int, bytes]) -> Spelling:
    """Tokens whose first space is left out at the beginning of a text."""
    first = {token: text.removeprefix(b" ") for token, text in texts.items()}
    kept = tuple({token: text for token, text in place.items() if text} for place in (first, texts))
    return Spelling(kept, dict.fromkeys(texts, 1))


def _in_pairs(tokenizer: Any, ids: list[int]) -> Spelling:
    """What every token reads after every other one; tokens after which all read the same are one place."""
    first = {token: tokenizer.decode([token], skip_special_tokens=True) for token in ids}
    places: dict[tuple[str | None, ...], int] = {}
    after = {}
    for before, text in first.items():
        pairs = [tokenizer.decode([before, token], skip_special_tokens=True) for token in ids]
        reads = tuple(pair[len(text) :] if pair.startswith(text) else None for pair in pairs)
        after[before] = places.setdefault(reads, len(places) + 1)
    later = [{token: text.encode() for token, text in zip(ids, reads, strict=True) if text} for reads in places]
    return Spelling(({token: text.encode() for token, text in first.items() if text}, *later), after)


def _of_sentence_piece(name: str) -> bytes:
    byte = BYTE.fullmatch(name)
    return bytes([int(byte.group(1), 16)]) if byte else name.replace("\u2581", " ").encode()


def _of_byte_level(name: str) -> bytes:
    """What a token of GPT-2's alphabet reads, which has a visible character for every byte; others are themselves."""
    if all(sign in _ALPHABET for sign in name):
        return bytes(_ALPHABET[sign] for sign in name)
    return name.encode()


def _alphabet() -> dict[str, int]:
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _alphabet()


MOST_ENTRIES = 2**22
"""States of maps that are looked at together."""
MAX_ENTRIES = 2**23
"""States of all maps, those of beginnings of tokens included."""


def lift(source: ByteAutomaton, spelling: Spelling, vocab_size: int) -> TokenAutomaton:
    """Build the automaton of the token sequences of a language, without end tokens.

    Its states are those of bytes times the places of a `Spelling`. Raises ValueError above `MAX_STATES` or `MAX_EDGES`.
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
        found, fresh = np.full(len(pair), -1, np.int64), list[tuple[np.ndarray, np.ndarray]]()
        first = len(maps.begins) - 1
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

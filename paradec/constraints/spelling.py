"""What each token of a model reads, as bytes: at the beginning of a text, and after other tokens.

Answers are what the tokenizer's `decode` makes of all their tokens at once, so that a token may read otherwise in
different places: SentencePiece leaves out a text's first space, others put spaces between tokens. Three ways of joining
tokens are known, and the one that agrees with `decode` on random sequences is taken.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

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

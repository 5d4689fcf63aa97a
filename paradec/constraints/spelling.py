"""The bytes of each token of a model, by the context before it.

SentencePiece drops a text's first space; other tokenizers put spaces between tokens. `find_spelling` tries several ways
of joining tokens, and returns the first that agrees with `decode` on random sequences.

`build_token_automaton` converts an automaton over bytes to one over tokens. It walks all tokens byte by byte from all
states at once; tokens with equal maps between states form one class.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from paradec.constraints.automaton import MAX_EDGES, MAX_STATES, TokenAutomaton
from paradec.constraints.dfa import ByteAutomaton

MAX_PAIRED_TOKENS = 400
"""Maximum size of a vocabulary whose tokens are decoded pair by pair."""
NUM_SAMPLES, MAX_SAMPLE_LENGTH = 400, 6
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Spelling:
    """Bytes of tokens by context. Context 0 is the beginning of a text; other contexts follow a token."""

    texts: tuple[dict[int, bytes], ...]
    """For each context, bytes by id, without special ids and ids without bytes. A single context applies everywhere."""
    after: dict[int, int]
    """Context after each token, by id."""
    special: dict[int, bytes] = field(default_factory=dict)
    """Names of special ids. Only free text before a marker may contain them; they do not change the context."""

    def read(self, ids: Iterable[int], context: int = 0) -> bytes | None:
        """Concatenate the bytes of tokens, of which the first is in `context`; None if a token has no bytes."""
        text = b""
        for token in ids:
            if token not in self.texts[context]:
                return None
            text += self.texts[context][token]
            context = self.after[token]
        return text

    @cached_property
    def arrays(self) -> tuple[Texts, ...]:
        return tuple(_to_arrays(texts) for texts in self.texts)


Texts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Ids [N], longest first; lengths [N]; concatenated bytes; offset of each id's bytes [N]."""


def _to_arrays(texts: dict[int, bytes]) -> Texts:
    ids = sorted(texts, key=lambda token: -len(texts[token]))
    length = np.array([len(texts[token]) for token in ids], np.int64)
    joined = np.frombuffer(b"".join(texts[token] for token in ids), np.uint8)
    return np.array(ids, np.int64), length, joined, np.cumsum(length) - length


_SPELLINGS: weakref.WeakKeyDictionary[Any, Spelling | None] = weakref.WeakKeyDictionary()


def find_spelling(tokenizer: Any) -> Spelling | None:
    """Find the spelling of a tokenizer; None if no known way of joining tokens agrees with `decode`."""
    if tokenizer not in _SPELLINGS:
        _SPELLINGS[tokenizer] = next(_matching_spellings(tokenizer), None)
    return _SPELLINGS[tokenizer]


def _matching_spellings(tokenizer: Any) -> Iterator[Spelling]:
    special = {*tokenizer.all_special_ids}
    special |= {token for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items() if added.special}
    names = tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])
    names_by_id = {token: name for token, name in enumerate(names) if isinstance(name, str) and token not in special}
    byte_level = {token: _byte_level_bytes(name) for token, name in names_by_id.items()}
    plain = {token: _sentence_piece_bytes(name) for token, name in names_by_id.items()}
    stripped = {token: text.removeprefix(b" ") for token, text in plain.items()}  # at the start of a text
    builders: list[Callable[[], Spelling]] = [
        lambda: Spelling(_nonempty(byte_level), dict.fromkeys(byte_level, 0)),
        lambda: Spelling(_nonempty(stripped, plain), dict.fromkeys(plain, 1)),
        lambda: Spelling(_nonempty(plain), dict.fromkeys(plain, 0)),
    ]
    if len(names_by_id) <= MAX_PAIRED_TOKENS:
        builders.append(lambda: _pairwise_spelling(tokenizer, [*names_by_id]))
    special_names = {token: str(name).encode() for token, name in enumerate(names) if token in special}
    for build in builders:
        spelling = replace(build(), special=special_names)
        if _matches_decode(tokenizer, spelling):
            yield spelling


def _matches_decode(tokenizer: Any, spelling: Spelling) -> bool:
    """Whether the spelling agrees with `decode` on random sequences. At least half of them must have bytes."""
    rng, ids, num_unreadable = np.random.default_rng(0), np.array([*spelling.after]), 0
    if not len(ids):
        return False
    for sample in range(NUM_SAMPLES):
        sample_ids = rng.choice(ids, 1 + sample % MAX_SAMPLE_LENGTH).tolist()
        if (encoded := spelling.read(sample_ids)) is None:
            num_unreadable += 1
            continue
        try:
            text = encoded.decode()
        except UnicodeDecodeError:  # no text, nothing to compare
            continue
        if tokenizer.decode(sample_ids, skip_special_tokens=True) != text:
            return False
    return num_unreadable <= NUM_SAMPLES // 2


def _nonempty(*contexts: dict[int, bytes]) -> tuple[dict[int, bytes], ...]:
    return tuple({token: text for token, text in texts.items() if text} for texts in contexts)


def _pairwise_spelling(tokenizer: Any, ids: list[int]) -> Spelling:
    """Build a spelling from all pairs of tokens; tokens after which every token has the same text share a context."""
    first = {token: tokenizer.decode([token], skip_special_tokens=True) for token in ids}
    contexts: dict[tuple[str | None, ...], int] = {}
    context_after = {}
    for previous, text in first.items():
        pairs = [tokenizer.decode([previous, token], skip_special_tokens=True) for token in ids]
        following = tuple(pair[len(text) :] if pair.startswith(text) else None for pair in pairs)
        context_after[previous] = contexts.setdefault(following, len(contexts) + 1)
    texts = [{token: text.encode() for token, text in zip(ids, context, strict=True) if text} for context in contexts]
    return Spelling(({token: text.encode() for token, text in first.items() if text}, *texts), context_after)


def _sentence_piece_bytes(name: str) -> bytes:
    byte = BYTE.fullmatch(name)
    return bytes([int(byte.group(1), 16)]) if byte else name.replace("\u2581", " ").encode()


def _byte_level_bytes(name: str) -> bytes:
    """Bytes of a token name in GPT-2's byte alphabet; other names are plain text."""
    if all(char in _ALPHABET for char in name):
        return bytes(_ALPHABET[char] for char in name)
    return name.encode()


_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_INVISIBLE = [byte for byte in range(256) if byte not in _VISIBLE]
_ALPHABET = {chr(byte): byte for byte in _VISIBLE} | {chr(256 + i): byte for i, byte in enumerate(_INVISIBLE)}


MAX_NEXT_BYTES, MAX_PREFIXES = 8, 64
"""Limits of literals: number of next bytes at each state inside, and of prefixes followed from each first state."""
LITERAL_CONTEXTS = "", "\n", "a", '"'
MAX_ENTRIES = 2**23
"""Maximum number of entries of all maps between states, including the maps of token prefixes."""


def build_token_automaton(
    source: ByteAutomaton, spelling: Spelling, vocab_size: int, encode: Encode | None = None
) -> TokenAutomaton:
    """Build the automaton of the token sequences of a language, without end tokens.

    The states are pairs of a byte state and a context of the `Spelling`. No token spans the end of a marker.

    Args:
        encode: tokenises texts (`spell_texts`), so that literals (`find_literals`) have the tokenizer's spelling and no
            token joins a literal with other text. If it is None or cannot spell a literal, any spelling is allowed.

    Raises:
        ValueError: more than `MAX_STATES` or `MAX_EDGES`.
    """
    size, num_contexts, begin = len(source.accept), len(spelling.texts), source.begin
    if not size:
        return TokenAutomaton(vocab_size, [], np.zeros((0, 3), np.int64), np.zeros(0, bool))
    # context 0 is the beginning of a text; only special tokens, which occur up to state `begin`, keep it
    states = [np.arange(size if num_contexts == 1 or context else begin + 1) for context in range(num_contexts)]
    offsets = np.cumsum([0, *map(len, states)])
    _check_size(int(offsets[-1]), "states", MAX_STATES)
    spelled = None
    if encode is not None:
        without_literals, literals = find_literals(source)
        spelled = _spell_literals(literals, spelling, offsets, encode, vocab_size, begin)
        source = source if spelled is None else without_literals
    arrays = spelling.arrays if not begin else [_to_arrays(texts | spelling.special) for texts in spelling.texts]
    maps, map_of_token = [], np.full((vocab_size, num_contexts), -1, np.int64)
    for context, context_states in enumerate(states):
        map_ids, context_map = _walk_texts(source, context_states, arrays[context])
        ids = arrays[context][0]
        map_of_token[ids[ids < vocab_size], context] = map_ids[ids < vocab_size]
        maps.append(context_map)
    literal_edges, num_states = spelled or ([], int(offsets[-1]))
    _check_size(num_states, "states", MAX_STATES)
    literal_tokens = np.unique(np.array([token for _, token, _ in literal_edges], np.int64))
    tokens = np.union1d(np.flatnonzero((map_of_token >= 0).any(1)), literal_tokens)
    context_after = np.array([spelling.after.get(token, -1) for token in tokens.tolist()], np.int64)
    # each token of a literal is a class by itself
    literal_classes = np.where(np.isin(tokens, literal_tokens), tokens, -1)
    keys = np.column_stack((map_of_token[tokens], context_after, literal_classes))
    class_keys, classes = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(classes.ravel(), kind="stable")
    members = np.split(tokens[order], np.cumsum(np.bincount(classes.ravel(), minlength=len(class_keys)))[:-1])
    count = len(literal_edges)
    for context_maps, map_ids in zip(maps, class_keys.T, strict=False):
        count += sum(len(context_maps[map_id][0]) for map_id in map_ids[map_ids >= 0].tolist())
    _check_size(count, "edges", MAX_EDGES)
    class_of = {int(token): index for index, token in enumerate(class_keys[:, -1]) if token >= 0}
    rows = [(state, class_of[token], target) for state, token, target in literal_edges]
    edges = [np.array(rows, np.int64).reshape(-1, 3)]
    for index, (*class_maps, following, _) in enumerate(class_keys.tolist()):
        for context, map_id in enumerate(class_maps):
            if map_id >= 0:
                sources, targets = maps[context][map_id]
                targets = np.where(targets == begin - 1, begin, targets)
                next_offset = offsets[context if following < 0 else following]
                parts = (offsets[context] + sources, np.full(len(sources), index), next_offset + targets)
                # special tokens occur only in free text
                edges.append(np.stack(parts, 1)[sources < (begin if following < 0 else size)])
    accept = np.concatenate([source.accept[context_states] for context_states in states])
    accept = np.append(accept, np.zeros(num_states - len(accept), bool))
    is_free = np.append(np.concatenate(states) < begin, np.zeros(num_states - offsets[-1], bool))
    return TokenAutomaton(vocab_size, members, np.concatenate(edges), accept, free=is_free)


Literals = dict[int, list[tuple[bytes, int]]]
"""For each byte state, the literals that start in it, each with the state after the literal."""
Encode = Callable[[list[str]], list[list[list[int]]]]
"""Converts each text to token sequences that may spell it."""


def spell_texts(tokenizer: Any, texts: list[str]) -> list[list[list[int]]]:
    """Tokenise each text alone and after the texts `LITERAL_CONTEXTS`, whose tokens are removed."""

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    starts = {prefix: encode(prefix) for prefix in LITERAL_CONTEXTS}
    return [
        [ids[len(start) :] for prefix, start in starts.items() if (ids := encode(prefix + text))[: len(start)] == start]
        for text in texts
    ]


def find_literals(source: ByteAutomaton) -> tuple[ByteAutomaton, Literals]:
    """Split an automaton into literals and the rest.

    A literal is a text on a path of states with few next bytes, such as a key, punctuation or an enumeration's value.
    Returns the automaton without the literals' moves, and the literals.
    """
    bytes_of = [np.flatnonzero(source.letter_of == letter) for letter in range(source.step.shape[1])]
    byte_of = [int(values[0]) if len(values) == 1 else -1 for values in bytes_of]
    moves = [
        [(byte_of[letter], int(row[letter])) for letter in np.flatnonzero(row >= 0).tolist()] for row in source.step
    ]
    is_literal = [
        not accept and 0 < len(row) <= MAX_NEXT_BYTES and all(byte >= 0 for byte, _ in row)
        for row, accept in zip(moves, source.accept.tolist(), strict=True)
    ]
    step, literals, heads = source.step.copy(), Literals(), [*dict.fromkeys((0, source.begin))]
    known = {*heads}
    for head in heads:  # `heads` grows
        prefixes = [(b"", head)] if is_literal[head] else []
        prefixes += [] if is_literal[head] else [(bytes([b]), to) for b, to in moves[head] if b >= 0 and is_literal[to]]
        text_ends, seen = list[tuple[bytes, int]](), {head}
        for text, state in prefixes:  # breadth first: `prefixes` grows
            if not is_literal[state] or text and state in seen or len(prefixes) > MAX_PREFIXES:
                text_ends.append((text, state))
            else:
                prefixes += [(text + bytes([byte]), target) for byte, target in moves[state]]
            seen.add(state)
        literals[head] = text_ends
        step[head, [source.letter_of[text[0]] for text, _ in text_ends]] = -1
        targets = [state for _, state in text_ends] + [int(state) for state in step[head][step[head] >= 0]]
        new = [state for state in dict.fromkeys(targets) if state not in known]
        heads += new
        known.update(new)
    return replace(source, step=step), literals


def _spell_literals(
    literals: Literals, spelling: Spelling, offsets: np.ndarray, encode: Encode, vocab_size: int, begin: int
) -> tuple[list[tuple[int, int, int]], int] | None:
    """Build the edges (state, token, next state) of literals in the tokenizer's spelling. Returns the edges and the
    new number of states; None if the tokenizer cannot spell a literal, or a printable ASCII byte is not a token."""
    single_bytes = [{text for text in texts.values() if len(text) == 1} for texts in spelling.texts]
    try:
        texts = sorted({text.decode() for entries in literals.values() for text, _ in entries})
    except UnicodeDecodeError:
        return None
    if not all(bytes([byte]) in known for known in single_bytes for byte in range(0x21, 0x7F)):
        return None
    spellings = dict(zip(texts, encode(texts), strict=True))
    edges, ids, count = list[tuple[int, int, int]](), dict[Any, int](), int(offsets[-1])
    todo = list[tuple[int, frozenset[tuple[tuple[int, ...], int]]]]()
    for context in range(len(spelling.texts)):
        for head, entries in literals.items():
            if len(spelling.texts) > 1 and not context and head > begin:
                continue  # no text begins in this state
            spelled = set[tuple[tuple[int, ...], int]]()
            for text, state in entries:
                readable = [c for c in spellings[text.decode()] if c and spelling.read(c, context) == text]
                if not readable or max(readable[0]) >= vocab_size:
                    return None
                spelled.add((tuple(readable[0]), int(offsets[spelling.after[readable[0][-1]]]) + state))
            todo.append((int(offsets[context]) + head, frozenset(spelled)))
    for source, sequences in todo:  # `todo` grows; literals with equal remaining tokens share a state
        tails_of: dict[int, set[tuple[tuple[int, ...], int]]] = {}
        for tokens, target in sequences:
            tails_of.setdefault(tokens[0], set()).add((tokens[1:], target))
        for token, tails in tails_of.items():
            (first, target), *more = tails
            if not first and not more:
                edges.append((source, token, target))
                continue
            key = frozenset(tails)
            if key not in ids:
                ids[key] = count
                todo.append((count, key))
                count += 1
            edges.append((source, token, ids[key]))
    return edges, count


def _check_size(count: int, name: str, limit: int) -> None:
    if count > limit:
        raise ValueError(f"the constraint needs an automaton of more than {limit} {name} over the model's tokens")


Map = tuple[np.ndarray, np.ndarray]
"""A sparse map from states to states: sources [k] and targets [k]."""


def _walk_texts(source: ByteAutomaton, start_states: np.ndarray, texts: Texts) -> tuple[np.ndarray, list[Map]]:
    """Walk N texts from all `start_states` [s]. Returns the index [N] of each text's map (-1: empty map), and the maps,
    whose sources are indices into `start_states`."""
    ids, length, joined, starts = texts
    letters, num_letters, map_by_bytes = source.letter_of[joined], source.step.shape[1], dict[bytes, int]()
    maps, map_ids = [(np.arange(len(start_states), dtype=np.int32), start_states)], np.zeros(len(ids), np.int64)
    size = len(start_states)
    columns = np.ascontiguousarray(source.step.T)
    for position in range(int(length.max(initial=0))):
        live = np.flatnonzero(map_ids[: np.searchsorted(-length, -position, side="left")] >= 0)
        pairs, back = np.unique(map_ids[live] * num_letters + letters[starts[live] + position], return_inverse=True)
        stepped = np.full(len(pairs), -1, np.int64)
        for index, pair in enumerate(pairs.tolist()):
            sources, targets = maps[pair // num_letters]
            targets = columns[pair % num_letters][targets]
            alive = (targets >= 0).nonzero()[0]
            if not len(alive):
                continue
            sources, targets = sources[alive], targets[alive]
            stepped[index] = map_by_bytes.setdefault(sources.tobytes() + targets.tobytes(), len(maps))
            if stepped[index] == len(maps):
                maps.append((sources, targets))
                size += len(sources)
                _check_size(size, "edges", MAX_ENTRIES)
        map_ids[live] = stepped[back]
    return map_ids, maps

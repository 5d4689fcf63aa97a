"""Grammars for causal models, by llguidance (the extra `grammar`).

A token is allowed if some text of the grammar continues with it. A grammar has no finite list of states, so lengths and
sums over texts are unknown. If only one text can follow, llguidance allows only its tokenisation by the tokenizer.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paradec.constraints.spelling import Spelling, find_spelling
from paradec.core.checks import short_repr

MAX_MATCHERS = 256
"""Maximum number of token prefixes whose matcher is cached."""
Tokens = tuple[int, ...]

_TOKENIZERS: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def import_llguidance() -> Any:
    """Import llguidance. Raises ModuleNotFoundError, which names the extra, if it is not installed."""
    try:
        import llguidance
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "paradec.Grammar needs llguidance: install paradec's extra 'grammar', e.g. pip install -e '.[grammar]'",
            name="llguidance",
        ) from None
    return llguidance


def check_grammar(text: str) -> None:
    """Raise ValueError, with the position, unless a text is a Lark grammar; ModuleNotFoundError without llguidance."""
    matcher = import_llguidance().LLMatcher
    if message := matcher.validate_grammar(matcher.grammar_from_lark(text)):
        raise ValueError(f"grammar={short_repr(text)}: {' '.join(message.split())}")


class _Vocabulary:
    """A tokenizer in llguidance's interface."""

    def __init__(self, tokenizer: Any, spelling: Spelling, size: int, ends: tuple[int, ...]):
        texts = {token: text for token, text in spelling.texts[0].items() if token not in ends}
        self.tokens = [texts.get(token, b"") for token in range(size)]
        self.special_token_ids = [token for token, text in enumerate(self.tokens) if not text]
        self.eos_token_id, self.bos_token_id = ends[0], None
        self._tokenizer, self._longest = tokenizer, max(map(len, self.tokens))
        self._ids = {text: token for token, text in reversed(texts.items()) if token < size}

    def __call__(self, text: str) -> list[int]:
        """Tokenise a text with the tokenizer. If its tokens do not spell the text, take the longest tokens greedily."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if all(token < len(self.tokens) for token in ids) and b"".join(self.tokens[i] for i in ids) == text.encode():
            return ids
        ids, remaining = [], text.encode()
        while remaining:
            size = next((n for n in range(min(self._longest, len(remaining)), 0, -1) if remaining[:n] in self._ids), 0)
            if not size:
                break
            ids.append(self._ids[remaining[:size]])
            remaining = remaining[size:]
        return ids


def _make_tokenizer(tokenizer: Any, size: int, ends: tuple[int, ...]) -> Any:
    """Convert a tokenizer for llguidance, cached. ValueError: a token's text is unknown or depends on its context."""
    cache = _TOKENIZERS.setdefault(tokenizer, {})
    if (size, ends) not in cache:
        spelling = find_spelling(tokenizer)
        if spelling is None or len(spelling.texts) != 1:
            raise ValueError(
                "the text of a token depends on its position in this tokenizer, which llguidance does not support; "
                "paradec.Regex and paradec.JsonSchema work with it"
            )
        llguidance = import_llguidance()
        vocabulary = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, spelling, size, ends))
        cache[size, ends] = llguidance.LLTokenizer(vocabulary, n_vocab=size, eos_token=[*ends])
    return cache[size, ends]


class GrammarTexts:
    """Texts of a grammar in a model's tokens, with the methods of `paradec.samplers.features.constraints.SpanTexts`. A
    state is the tuple of the tokens so far.

    Raises:
        ValueError: the tokenizer does not fit, there is no end token, or llguidance refuses the grammar.
    """

    begin: Tokens = ()

    def __init__(self, grammar: str, tokenizer: Any, size: int, ends: tuple[int, ...]):
        self.grammar, self.tokenizer, self.size, self.ends = grammar, tokenizer, size, ends
        if not ends:
            raise ValueError("a grammar needs an end token, and the model has none")
        self._matchers: OrderedDict[Tokens, Any] = OrderedDict()
        first = self._new_matcher()
        if first.is_error():
            raise ValueError(f"grammar={short_repr(grammar)}: {' '.join(first.get_error().split())}")

    def __reduce__(self) -> Any:  # matchers are neither pickled nor copied
        return type(self), (self.grammar, self.tokenizer, self.size, self.ends)

    def __deepcopy__(self, memo: Any) -> GrammarTexts:
        return type(self)(self.grammar, self.tokenizer, self.size, self.ends)

    def _new_matcher(self) -> Any:
        matcher = import_llguidance().LLMatcher
        source = matcher.grammar_from_lark(self.grammar)
        return matcher(_make_tokenizer(self.tokenizer, self.size, self.ends), source, log_level=0)

    def _get_matcher(self, tokens: Tokens) -> Any:
        """Return the matcher after these tokens; it is in an error state if no text begins with them."""
        prefix_length = next((end for end in range(len(tokens), 0, -1) if tokens[:end] in self._matchers), 0)
        if prefix_length == len(tokens) and prefix_length:
            self._matchers.move_to_end(tokens)
            return self._matchers[tokens]
        matcher = self._matchers[tokens[:prefix_length]].deep_copy() if prefix_length else self._new_matcher()
        for token in tokens[prefix_length:]:
            matcher.consume_token(token)
        self._matchers[tokens] = matcher
        if len(self._matchers) > MAX_MATCHERS:
            self._matchers.popitem(last=False)
        return matcher

    def after(self, state: Tokens, token: int) -> Tokens | None:
        """Return the state after a token; None if no text continues with the token."""
        tokens = (*state, token)
        return None if token < 0 or not self.fits(state)[token] or self._get_matcher(tokens).is_error() else tokens

    def fits(self, state: Tokens) -> np.ndarray:
        """[V] bool: tokens that may follow. After an end token, only end tokens may."""
        allowed = np.zeros(self.size, bool)
        if state and state[-1] in self.ends:
            allowed[[*self.ends]] = True
            return allowed
        bits = np.frombuffer(self._get_matcher(state).compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self.size].astype(bool)

    def excluded(self, state: Tokens, num_read: int, device: torch.device) -> Tensor:
        """[V] bool: tokens that may not follow. num_read: unused, but part of the interface of `SpanTexts`."""
        return torch.as_tensor(~self.fits(state), device=device)

    def accepts(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` are a complete text."""
        return bool(self._get_matcher((*tokens,)).is_accepting())

    def certain(self, state: Tokens, num_read: int) -> int | None:
        """Return the token that must follow; None unless exactly one may follow."""
        tokens = np.flatnonzero(self.fits(state))
        return int(tokens[0]) if len(tokens) == 1 else None

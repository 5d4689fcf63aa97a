"""Constraints: `paradec.Choice`, `paradec.Regex`, `paradec.JsonSchema`, `paradec.Grammar`."""

from __future__ import annotations

import json
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar, Self

import numpy as np

from paradec.constraints.automaton import MAX_STATES, TokenAutomaton
from paradec.constraints.dfa import ByteAutomaton, byte_automaton
from paradec.constraints.expressions import Node, either, sequence
from paradec.constraints.expressions import text as text_node
from paradec.constraints.json_schema import MAX_LENGTHS, read_schema
from paradec.constraints.regex import parse
from paradec.constraints.spelling import Encode, Spelling, build_token_automaton, find_spelling, spell_texts
from paradec.core.checks import check_choice, check_int, check_text, short_repr, unknown_name
from paradec.core.packaged import vocabulary_hint

MAX_CACHED_BYTES = 2**28
"""Limit of the bytes of automata cached per tokenizer."""
MAX_DEPTH = 8
"""Maximum `depth` of a schema."""


@dataclass(frozen=True)
class Constraint:
    """A set of texts; immutable and hashable.

    Args:
        after: a marker, e.g. "</think>": answers are free text, the first marker, then a text of the constraint.
        thinking_budget: maximum number of tokens of free text, after which the marker follows in the fewest tokens.
            None: free text ends when only the marker and the shortest text still fit.

    Raises:
        ValueError: a marker that is empty or longer than 256 characters, or a budget without a marker.
    """

    after: str | None = field(default=None, kw_only=True, repr=False)
    thinking_budget: int | None = field(default=None, kw_only=True, repr=False)
    spells_literals: ClassVar[bool] = False
    """Whether literals (`find_literals`) have the tokenizer's spelling."""

    def __post_init__(self) -> None:
        if self.after is not None:
            if not isinstance(self.after, str) or not 0 < len(self.after) <= 256:
                raise ValueError(f"after={short_repr(self.after)} must be a text of 1 to 256 characters")
            check_text("after", self.after)
        if self.thinking_budget is not None:
            check_int("thinking_budget", self.thinking_budget, low=0)
            if self.after is None:
                raise ValueError(f"thinking_budget={self.thinking_budget} needs after, the marker that ends free text")

    def marker_dict(self) -> dict[str, Any]:
        """The entries of `to_dict` for the marker."""
        marker = {"after": self.after, "thinking_budget": self.thinking_budget}
        return {name: value for name, value in marker.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON data that `parse_constraint` reads."""
        raise NotImplementedError

    def node(self) -> Node:
        """Build the expression of the texts. Raises ValueError for a language that is not regular or too large."""
        raise NotImplementedError

    def accepts(self, text: str) -> bool:
        """Whether `text` is one of the constraint's texts; needs no model.

        Raises ValueError: as `node`, or `text` is not a string.
        """
        if not isinstance(text, str):
            raise ValueError(f"text={short_repr(text)} must be a text")
        check_text("text", text)
        return _byte_automaton(self).accepts(text.encode())

    def to_token_automaton(self, tokenizer: Any, vocab_size: int) -> TokenAutomaton:
        """Build the automaton of the token sequences that spell the texts.

        Raises ValueError: as `node`, or the tokenizer joins tokens in an unknown way.
        """
        spelling = find_spelling(tokenizer)
        if spelling is None:
            raise ValueError(
                f"constraint={short_repr(self)}: paradec does not know how this tokenizer joins tokens to texts; only "
                "paradec.Choice works with it, without after"
            )
        return self.build_token_automaton(spelling, vocab_size, partial(spell_texts, tokenizer))

    def build_token_automaton(self, spelling: Spelling, vocab_size: int, encode: Encode) -> TokenAutomaton:
        """Build the automaton over tokens, for a tokenizer with this spelling. Raises ValueError if it is too large."""
        encode_literals = encode if self.spells_literals else None
        return build_token_automaton(_byte_automaton(self), spelling, vocab_size, encode_literals)


@lru_cache(maxsize=2)
def _byte_automaton(value: Constraint) -> ByteAutomaton:
    return byte_automaton(value.node(), value.after)


@dataclass(frozen=True)
class Regex(Constraint):
    """Texts that match a pattern as a whole: `re.fullmatch(pattern, text, re.ASCII)`.

    Args:
        pattern: a pattern of Python's `re` without lookaround, backreferences, atomic groups, possessive repetitions,
            word boundaries, inline flags, octal escapes and comments; "^" and "$" only at the two ends.

    Raises:
        ValueError: an unsupported pattern; the message names the feature and its position.
    """

    pattern: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.node()

    def to_dict(self) -> dict[str, Any]:
        return {"regex": self.pattern} | self.marker_dict()

    def node(self) -> Node:
        return parse(self.pattern)


@dataclass(frozen=True)
class Choice(Constraint):
    """One of several texts, only in the tokenizer's own tokens; with `after`, a text may be tokenised in several parts.

    Raises:
        ValueError: no text, an empty text, or a duplicate.
    """

    choices: tuple[str, ...]
    spells_literals = True

    def __new__(cls, *choices: Any, **_: Any) -> Self:
        if len(choices) > 1:
            raise TypeError(f"Choice takes its texts in one list: write Choice({short_repr([*choices])})")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = self.choices
        texts = () if isinstance(choices, str) or not isinstance(choices, Sequence) else tuple(choices)
        if not texts or not all(isinstance(text, str) and text for text in texts) or len({*texts}) < len(texts):
            raise ValueError(
                f'choices={short_repr(choices)} must be distinct, non-empty texts: write Choice(["yes", "no"])'
            )
        for text in texts:
            check_text("choices", text)
        object.__setattr__(self, "choices", texts)

    def to_dict(self) -> dict[str, Any]:
        return {"choice": [*self.choices]} | self.marker_dict()

    def node(self) -> Node:
        return either(text_node(choice) for choice in self.choices)

    def to_token_automaton(self, tokenizer: Any, vocab_size: int) -> TokenAutomaton:
        """Build the automaton of the token sequences into which the tokenizer splits the texts.

        Raises ValueError for a text that the tokenizer cannot write, or for too many tokens.
        """
        if self.after is not None:
            return super().to_token_automaton(tokenizer, vocab_size)

        def spell_choices() -> Iterator[list[int]]:
            for text in self.choices:
                ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
                if tokenizer.decode(ids, skip_special_tokens=True) != text:
                    hint = vocabulary_hint(text.split(), tokenizer)
                    raise ValueError(f"choices: the tokenizer cannot write {text!r}{hint}")
                yield ids

        return build_sequence_automaton(spell_choices(), vocab_size)


def build_sequence_automaton(sequences: Iterable[Sequence[int]], vocab_size: int) -> TokenAutomaton:
    """Build the automaton of some sequences of ids. Raises ValueError for more than `MAX_STATES` states."""
    transitions: dict[tuple[int, int], int] = {}
    accept, classes = [False], dict[int, int]()
    for ids in sequences:
        state = 0
        for token in ids:
            edge = (state, classes.setdefault(token, len(classes)))
            if edge not in transitions:
                if len(accept) == MAX_STATES:
                    raise ValueError(f"choices take more than {MAX_STATES} states: give fewer or shorter texts")
                transitions[edge] = len(accept)
                accept.append(False)
            state = transitions[edge]
        accept[state] = True
    edges = np.array([(state, index, target) for (state, index), target in transitions.items()], np.int64)
    return TokenAutomaton(vocab_size, [np.array([token]) for token in classes], edges, np.array(accept))


@dataclass(frozen=True)
class JsonSchema(Constraint):
    """JSON texts of a schema: keys in the schema's order, one space or none after ":" and ",".

    Args:
        schema: a mapping, its JSON text, or a pydantic class; docs/structured.md lists the supported keywords. Unknown
            keywords are ignored with a warning.
        depth: number of levels of arrays and objects where the schema does not fix them, or refers to itself.
        spelling: "tokenizer": keys, punctuation and enumerations have the tokens that the tokenizer gives them, so that
            models that decode in any order write a key at once. "any": they may have any tokens, as other text may.
        after, thinking_budget: as for every `Constraint`.

    Raises:
        ValueError: a keyword that an automaton cannot express (the message has its path), or no text is left.
    """

    schema: Any
    depth: int = 3
    spelling: str = "tokenizer"

    def __post_init__(self) -> None:
        super().__post_init__()
        schema = self.schema
        check_int("depth", self.depth, low=0, high=MAX_DEPTH)
        check_choice("spelling", self.spelling, ("tokenizer", "any"))
        if hasattr(schema, "model_json_schema"):
            schema = schema.model_json_schema()
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"schema={short_repr(schema)} is not JSON: {error}") from None
        if not isinstance(schema, (Mapping, bool)):
            raise ValueError(
                f"schema={short_repr(schema)} must be a JSON schema: a mapping, its text or a pydantic class"
            )
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"schema={short_repr(schema)} cannot be written as JSON: {error}") from None
        check_text("schema", text)
        object.__setattr__(self, "schema", text)
        object.__setattr__(self, "depth", int(self.depth))
        if ignored := read_schema(text, self.depth)[1]:
            warnings.warn(f"schema: ignored unknown keywords or formats: {', '.join(ignored)}", stacklevel=2)

    def to_dict(self) -> dict[str, Any]:
        spelling = {} if self.spelling == "tokenizer" else {"spelling": self.spelling}
        return {"json_schema": json.loads(self.schema), "depth": self.depth} | spelling | self.marker_dict()

    def build_token_automaton(self, spelling: Spelling, vocab_size: int, encode: Encode) -> TokenAutomaton:
        """Build the automaton over tokens. If it is too large, strings are limited to shorter lengths."""
        encode_literals = encode if self.spelling == "tokenizer" else None
        for max_length in MAX_LENGTHS[::2]:
            try:
                source = byte_automaton(read_schema(self.schema, self.depth, max_length)[0], self.after)
                return build_token_automaton(source, spelling, vocab_size, encode_literals)
            except ValueError as error:
                last_error = error
        raise last_error

    def node(self) -> Node:
        return read_schema(self.schema, self.depth)[0]


@dataclass(frozen=True)
class Grammar(Constraint):
    """Texts of a context-free grammar, for causal models only; needs llguidance (the extra `grammar`).

    Args:
        grammar: a grammar in llguidance's variant of Lark, with a rule or terminal `start`.

    Raises:
        ValueError: an invalid grammar; the message has the position. ModuleNotFoundError: llguidance is missing.
    """

    grammar: str

    def __post_init__(self) -> None:
        from paradec.constraints.grammar import check_grammar

        if {*self.marker_dict()}:
            raise ValueError("after does not work with a grammar: let `start` begin with free text and the marker")
        if not isinstance(self.grammar, str):
            raise ValueError(f"grammar={short_repr(self.grammar)} must be a text")
        check_text("grammar", self.grammar)
        check_grammar(self.grammar)

    def to_dict(self) -> dict[str, Any]:
        return {"grammar": self.grammar}

    def accepts(self, text: str) -> bool:
        raise ValueError(f"constraint={short_repr(self)}: accepts works with Choice, Regex and JsonSchema only")

    def to_token_automaton(self, tokenizer: Any, vocab_size: int) -> TokenAutomaton:
        raise ValueError(
            f"constraint={short_repr(self)} is for causal models: a grammar has no finite automaton, which decoding in "
            "any order needs; give a paradec.Regex or paradec.JsonSchema"
        )


def parse_constraint(name: str, value: Any) -> Any:
    """Read a constraint, or a list with a constraint or None for each hole (`paradec.infill`). A constraint is a
    `Constraint`, the data of `to_dict`, a JSON schema with a type, or a pydantic class.

    Raises ValueError or TypeError for anything else.
    """
    if isinstance(value, (list, tuple)):
        return tuple(parse_one_constraint(name, entry, value) for entry in value)
    return parse_one_constraint(name, value)


def parse_one_constraint(name: str, value: Any, holes: Any = None) -> Constraint | None:
    """Read a constraint or None. Raises ValueError or TypeError for others. holes: the whole list, for messages."""
    if value is None or isinstance(value, Constraint):
        return value
    if hasattr(value, "model_json_schema") or isinstance(value, Mapping) and "type" in value:
        return JsonSchema(value)
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{name}={short_repr(holes or value)} must be paradec.Choice([...]), paradec.Regex, paradec.JsonSchema, "
            "paradec.Grammar, a pydantic class or a JSON schema with a type; for infill a list of these and None"
        )
    classes = {"regex": Regex, "choice": Choice, "json_schema": JsonSchema, "grammar": Grammar}
    kind = next((key for key in classes if key in value), None)
    known = {*classes} if kind is None else {kind, *(("depth", "spelling") if kind == "json_schema" else ())}
    for key in value:
        if kind is None or key not in known | {"after", "thinking_budget"}:
            raise ValueError(unknown_name(f"key of {name}", key, known))
    if kind is None:
        raise ValueError(f"{name}={short_repr(value)} must have one of the keys {', '.join(classes)}")
    return classes[kind](value[kind], **{key: option for key, option in value.items() if key != kind})


@dataclass(frozen=True)
class ToolCalls(Constraint):
    """A call of one of several tools, in Hermes' format. Raises ValueError for unsupported schemas of parameters."""

    tools: tuple[tuple[str, str], ...]
    """The name of each tool, and the JSON schema of its arguments as text."""
    spells_literals = True

    @classmethod
    def from_functions(cls, functions: Sequence[Mapping[str, Any]], after: str | None = None) -> ToolCalls:
        """Build a constraint from the "function" objects of OpenAI's `tools`."""
        tools = []
        for function in functions:
            try:
                schema = JsonSchema(function.get("parameters") or {"type": "object", "additionalProperties": False})
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise ValueError(f"parameters of {short_repr(function['name'])}: {error}") from error
            tools.append((function["name"], schema.schema))
        return cls(tuple(tools), after=after)

    def node(self) -> Node:
        calls = []
        for name, parameters in self.tools:
            prefix = f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
            calls.append(sequence((text_node(prefix), read_schema(parameters, 3)[0], text_node("}\n</tool_call>"))))
        return either(calls)


_CACHE: weakref.WeakKeyDictionary[Any, dict[Any, TokenAutomaton]] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def token_automaton(
    value: Constraint, tokenizer: Any, vocab_size: int, ends: tuple[int, ...], suppressed: tuple[int, ...]
) -> TokenAutomaton:
    """Build the automaton of a constraint over a model's tokens, or return the one cached for the tokenizer.

    Args:
        ends: end tokens, any number of which may follow a text; () if texts fill all their slots.
        suppressed: ids that no text may contain.

    Raises:
        ValueError: the automaton is too large, or the tokenizer does not fit.
    """
    key = (value, vocab_size, ends, suppressed)
    automaton = _CACHE.get(tokenizer, {}).get(key)
    if automaton is None and not ends and not suppressed:
        automaton = value.to_token_automaton(tokenizer, vocab_size)
    elif automaton is None:
        automaton = token_automaton(value, tokenizer, vocab_size, (), ())
        automaton = automaton.without_tokens(suppressed).with_end_tokens(ends)
    cache_automaton(tokenizer, key, automaton)
    return automaton


def has_automaton(value: Constraint, tokenizer: Any, vocab_size: int) -> bool:
    """Whether the automaton of a constraint is cached."""
    return (value, vocab_size, (), ()) in _CACHE.get(tokenizer, {})


def cache_automaton(tokenizer: Any, key: tuple[Any, ...], automaton: TokenAutomaton) -> None:
    """Cache an automaton as the most recent one, and drop the oldest ones above `MAX_CACHED_BYTES`.

    key: constraint, vocabulary size, end tokens and suppressed ids.
    """
    with _LOCK:
        cache = _CACHE.setdefault(tokenizer, {})
        cache.pop(key, None)
        cache[key] = automaton
        size = sum(entry.nbytes for entry in cache.values())
        while size > MAX_CACHED_BYTES and len(cache) > 1:
            size -= cache.pop(next(iter(cache))).nbytes

"""`Regex`, `Choice` and `JsonSchema`: accepted texts, errors, tokenizations, markers, limits and compilation."""

import copy
import datetime
import itertools
import json
import math
import pickle
import re
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from decoding import refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from structured import nested_arrays, nested_objects
from tokenized_models import TOKENIZER, VOCAB, encode
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import paradec
from paradec.constraints import passes, spelling, values
from paradec.constraints.automaton import ConstraintSizeError, TokenAutomaton
from paradec.constraints.compiler import Compiler
from paradec.constraints.dfa import ByteAutomaton, byte_automaton
from paradec.constraints.spelling import find_spelling
from paradec.constraints.values import Constraint, JsonSchema, Regex, parse_constraint, token_automaton
from paradec.request import Request
from paradec.samplers.features.spans import TextSpan


def matches(automaton: ByteAutomaton, text: str) -> bool:
    state = 0 if len(automaton.accept) else -1
    for byte in text.encode():
        state = automaton.step[state, automaton.letter_of[byte]] if state >= 0 else -1
    return state >= 0 and bool(automaton.accept[state])


def some_text(automaton: ByteAutomaton, draw: np.random.Generator, max_bytes: int = 400) -> str | None:
    """Draw an accepted text by a random walk, which after some steps takes a shortest path to acceptance.

    Return None if the text exceeds `max_bytes`."""
    distance = np.where(automaton.accept, 0, 10**9)
    for _ in range(len(distance)):
        next_distance = np.where(automaton.step >= 0, distance[automaton.step], 10**9).min(1) + 1
        distance = np.minimum(distance, next_distance)
    state, result, steps_before_end = 0, bytearray(), int(draw.integers(0, 40))
    bytes_of = [np.flatnonzero(automaton.letter_of == letter) for letter in range(automaton.step.shape[1])]
    while len(result) < max_bytes:
        if automaton.accept[state] and steps_before_end <= 0:
            return result.decode()
        letters = np.flatnonzero(automaton.step[state] >= 0)
        if not len(letters):
            return result.decode()
        if steps_before_end <= 0:
            letters = letters[distance[automaton.step[state, letters]] < distance[state]]
        letter = draw.choice(letters)
        result.append(draw.choice(bytes_of[letter]))
        state, steps_before_end = int(automaton.step[state, letter]), steps_before_end - 1
    return None


PART = st.sampled_from(["a", "b", "é", r"\d", r"\w", r"\s", ".", "[^a]", "[a-cé]", r"\.", "(?:ab|b)", "(a|)", r"\x41"])
COUNT = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,}", "{,2}", "{1,3}", "*?"])


def join_patterns(inner: Any) -> Any:
    alternatives = st.tuples(inner, inner).map("|".join).map("({})".format)
    return st.one_of(st.lists(inner, min_size=1, max_size=3).map("".join), alternatives)


PATTERNS = st.recursive(st.tuples(PART, COUNT).map("".join), join_patterns, max_leaves=5)


@settings(deadline=None, max_examples=60)
@given(pattern=PATTERNS, text=st.text(st.sampled_from("abcéA1. _\n"), max_size=6), seed=st.integers(0, 2**20))
def test_patterns_match_like_python(pattern: str, text: str, seed: int) -> None:
    automaton = byte_automaton(paradec.Regex(pattern).node())
    assert matches(automaton, text) == bool(re.fullmatch(pattern, text, re.ASCII))
    sample = some_text(automaton, np.random.default_rng(seed)) if len(automaton.accept) else None
    assert sample is None or re.fullmatch(pattern, sample, re.ASCII)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a(?=b)", "lookahead at 1"), ("(?<!a)b", "negative lookbehind at 0"), (r"(a)\1", "a backreference at 3"),
        (r"a\012", "an octal escape at 1"), ("(?#note)a", "a comment at 0"),
        (r"\bword", "a word boundary at 0"), ("(?i)a", "an inline flag at 0"), ("(?>a)", "an atomic group at 0"),
        ("a++", "a possessive repetition at 1"), ("a^b", "an anchor inside a pattern at 1"),
        ("(", "is not a regular expression"), ("(a*a*){500}(b|a){2000}c{3000}x{4000}", "more than 65536 states"),
        ("(.*a.{20}){3}", "more than 65536 states"), ("(" * 3000 + ")" * 3000, "nested too deeply"),
    ],
)  # fmt: skip
def test_unsupported_patterns_are_refused(pattern: str, message: str) -> None:
    refuses(lambda: byte_automaton(paradec.Regex(pattern).node()), message)


SCHEMAS: list[Any] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 5},
            "age": {"type": "integer", "minimum": -3, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["x", "y z", 3, None]}, "maxItems": 3},
            "score": {"type": ["number", "null"]},
            "ok": {"type": "boolean"},
        },
        "required": ["age", "ok"],
    },
    {"$defs": {"t": {"type": "object", "properties": {"v": {"type": "integer"}, "n": {"$ref": "#/$defs/t"}}}},
     "$ref": "#/$defs/t"},
    {"type": "array", "prefixItems": [{"const": "a\"b"}, {"type": "integer", "exclusiveMinimum": 9}], "minItems": 2},
    {"type": "string", "pattern": "^[a-c]{2}\\.\\d+$"},
    {"type": "string", "pattern": "b\"?"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"anyOf": [{"type": "integer", "maximum": 105, "minimum": 98}, {"type": "string", "format": "date"}]},
    {"allOf": [{"type": "array", "items": {"type": "boolean"}, "minItems": 1}]},
    {"type": "string", "format": "uuid"},
    pytest.param({}, marks=pytest.mark.full),
]  # fmt: skip


def is_valid_value(value: Any, schema: Any, root: Any) -> bool:
    """Return whether a value is valid, by checking every keyword. root: the schema that contains `$defs`."""
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}

    def has_kind(kind: str) -> bool:
        if kind in kinds:
            return isinstance(value, kinds[kind])
        return not isinstance(value, bool) and isinstance(value, int if kind == "integer" else (int, float))

    if "$ref" in schema:
        result = root
        for name in schema["$ref"].split("/")[1:]:
            result = result[name]
        return is_valid_value(value, result, root)
    passed = [True]
    if "type" in schema:
        passed.append(any(map(has_kind, [schema["type"]] if isinstance(schema["type"], str) else schema["type"])))
    passed.append("enum" not in schema or value in schema["enum"])
    passed.append("const" not in schema or value == schema["const"])
    passed.append("anyOf" not in schema or any(is_valid_value(value, part, root) for part in schema["anyOf"]))
    passed += [is_valid_value(value, part, root) for part in schema.get("allOf", ())]
    if isinstance(value, dict):
        properties, additional = schema.get("properties", {}), schema.get("additionalProperties", {})
        passed += [key in value for key in schema.get("required", ())]
        passed += [is_valid_value(inner, properties.get(key, additional), root) for key, inner in value.items()]
        passed.append(not properties or value.keys() <= properties.keys())
    if isinstance(value, list):
        front = schema.get("prefixItems", [])
        passed += [is_valid_value(inner, rule, root) for inner, rule in zip(value, front)]
        passed += [is_valid_value(inner, schema.get("items", {}), root) for inner in value[len(front) :]]
        passed += [len(value) >= schema.get("minItems", 0), len(value) <= schema.get("maxItems", 99)]
    if isinstance(value, str):
        passed += [len(value) >= schema.get("minLength", 0), len(value) <= schema.get("maxLength", 10**9)]
        passed.append("pattern" not in schema or re.search(schema["pattern"], value) is not None)
        parse = {"date": datetime.date.fromisoformat, "uuid": uuid.UUID}.get(schema.get("format", ""), str)
        passed.append(parse(value) is not None)
    if has_kind("number"):
        passed += [value >= schema.get("minimum", -math.inf), value <= schema.get("maximum", math.inf)]
        passed += [value > schema.get("exclusiveMinimum", -math.inf), value < schema.get("exclusiveMaximum", math.inf)]
    return all(passed)


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_texts_of_schemas_are_valid(schema: Any) -> None:
    value = paradec.JsonSchema(schema, depth=2)
    automaton = byte_automaton(value.node())
    draw, num_texts = np.random.default_rng(0), 0
    for _ in range(40):
        text = some_text(automaton, draw)
        if text is not None:
            assert is_valid_value(json.loads(text), schema, schema), text
            num_texts += 1
    assert num_texts > 10


BOUNDS = [{}, {"minimum": 7}, {"maximum": -3}]
BOUNDS += [{"minimum": a, "maximum": b} for a, b in ((0, 0), (-12, 7), (98, 105), (-205, -98), (999, 12_000))]


@pytest.mark.parametrize("bounds", BOUNDS)
def test_bounds_of_integers(bounds: dict[str, int]) -> None:
    automaton = byte_automaton(paradec.JsonSchema({"type": "integer"} | bounds).node())
    for number in (*range(-210, 210), 998, 999, 1000, 9999, 10_000, 11_999, 12_000, 12_001, 99_999):
        inside = bounds.get("minimum", -math.inf) <= number <= bounds.get("maximum", math.inf)
        assert matches(automaton, str(number)) == inside
    assert not any(matches(automaton, text) for text in ("01", "", "1.0", "+1", "--1"))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems is True, and must be false"),
        ({"properties": {"a": {"unevaluatedProperties": False}}},
            r"properties\.a\.unevaluatedProperties is not supported"),
        ({"type": "string", "not": {"format": "word"}}, "allows no text"),
        ({"type": "array", "items": {"type": "integer"}, "not": {"uniqueItems": True}}, r"not\.uniqueItems is True"),
        ({"$ref": "http://x/y"}, "is not in the schema"),
        ({"$ref": "#"}, "allows no text"),
        ({"type": "word"}, "must be one of object"),
        ("{", "is not JSON"),
        ("[" * 10**5, "is not JSON"),
        (3, "must be a JSON schema"),
        ({"enum": []}, "must be a list of values"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "allows no text"),
    ],
)  # fmt: skip
def test_unsupported_schemas_are_refused(schema: Any, message: str) -> None:
    refuses(lambda: paradec.JsonSchema(schema), message)


@pytest.mark.parametrize("limits", [{}, {"minItems": 1}, {"maxItems": 2}, {"minItems": 2, "maxItems": 3}])
def test_schemas_of_arrays_accept_exactly_the_valid_texts(limits: dict[str, int]) -> None:
    schema = nested_arrays(2, **limits)
    automaton = byte_automaton(paradec.JsonSchema(schema).node())
    for size in range(1, 8):
        for parts in itertools.product(("[", "]", ",", "null"), repeat=size):
            text = "".join(parts)
            try:
                is_valid = is_valid_value(json.loads(text), schema, schema)
            except ValueError:
                is_valid = False
            assert matches(automaton, text) == is_valid, text


def test_sixty_levels_of_arrays_compile_in_two_seconds() -> None:
    begin = time.process_time()
    automaton = byte_automaton(paradec.JsonSchema(nested_arrays(60)).node())
    assert time.process_time() - begin < 2
    assert matches(automaton, "[" * 60 + "null, null,null" + "]" * 60) and matches(automaton, "[[],[[]]]")
    assert not matches(automaton, "[" * 61 + "]" * 61)


HOSTILE: dict[str, Any] = {
    "deep": nested_objects(300),
    "recursive": {"$defs": {"t": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/t"}] * 9}}},
                  "$ref": "#/$defs/t"},
    "referred": {"$ref": "#/$defs/d0", "$defs": {"d40": True} |
                 {f"d{at}": {"anyOf": [{"$ref": f"#/$defs/d{at + 1}"}] * 2} for at in range(40)}},
    "counted arrays": nested_arrays(60, minItems=2),
    "optional fields": nested_objects(60, a={"type": "null"}),
    "many optional fields": {"type": "object", "properties": {f"p{at}": {"type": "null"} for at in range(5000)}},
    "exponential": {"type": "string", "pattern": "(a|aa)*(b?.){60}c"},
    "empty parts": {"type": "string", "pattern": "(((((a|b)?){9}){9}){9}){9}"},
    "long": {"type": "string", "maxLength": 10**9},
    "wide": {"type": "array", "items": {"type": "string", "maxLength": 4000}, "maxItems": 4000},
    "cyclic": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}},
               "type": "array", "items": {"$ref": "#/$defs/a"}},
    "all ways": {"allOf": [{"anyOf": [{"required": [f"p{at}"]}, {"required": [f"q{at}"]}]} for at in range(30)]},
    "one of many": {"oneOf": [{"properties": {f"p{at}": {"type": "integer"}}} for at in range(60)]},
    "one of numbers": {"oneOf": [{"type": "integer", "multipleOf": at} for at in range(2, 60)]},
    "patterns": {"type": "object", "patternProperties": {f"a.{{{at}}}b": {"type": "null"} for at in range(12)}},
    "many divisors": {"allOf": [{"type": "integer", "multipleOf": at} for at in (997, 1009, 1013)]},
    "huge count": {"type": "array", "minItems": 10**15},
    "huge length": {"type": "string", "minLength": 10**15},
    "huge bound": {"type": "number", "minimum": 1e299, "multipleOf": 1e-17},
    "many values": {"enum": [f"x{at:025d}" for at in range(30_000)]},
}  # fmt: skip


@pytest.mark.thinned
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_take_bounded_work(name: str) -> None:
    """Hostile schemas are refused or have a small automaton, within 5 seconds."""
    begin = time.process_time()
    try:
        automaton = byte_automaton(paradec.JsonSchema(HOSTILE[name], depth=8).node())
    except ValueError as error:
        assert re.search("more than|nested too deeply|too many|at most", str(error)), str(error)
    else:
        assert automaton.step.nbytes < 2**24
    assert time.process_time() - begin < 5


def test_constraints_are_saved_in_presets() -> None:
    for value in (
        paradec.Choice(["a", "b"]),
        paradec.Regex("a+"),
        paradec.JsonSchema({"type": "null"}, depth=2),
        paradec.JsonSchema('{"type": "null"}'),
        paradec.JsonSchema('{"type": "null"}', after="</think>", thinking_budget=0),
        paradec.Choice(["a", "b"], after="</think>"),
        paradec.Regex("a+", after="<", thinking_budget=9),
    ):
        assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
        assert parse_constraint("constraint", json.loads(json.dumps(value.to_dict()))) == value
        request = Request(constraint=value)
        assert Request.from_arguments({}, json.loads(json.dumps(request.to_dict()))).constraint == value
        assert hash(value) == hash(parse_constraint("constraint", value.to_dict()))
    request = Request(constraint=[None, paradec.Regex("a")])  # one per row
    saved = json.loads(json.dumps(request.to_dict()))
    assert Request.from_arguments({}, saved).constraint == (None, paradec.Regex("a"))
    for wrong, error in (("a", TypeError), ({"rexeg": "a"}, ValueError), ({}, ValueError), ([3], TypeError)):
        refuses(partial(Request, constraint=wrong), "constraint", error)
    for choices in ("abc", [], [""], ["a", "a"], [3]):
        refuses(partial(paradec.Choice, choices), "choices=")


def accepts(automaton: TokenAutomaton, ids: list[int]) -> bool:
    state = 0 if automaton.states else -1
    for token in ids:
        state = automaton.step(state, token)
    return state >= 0 and bool(automaton.accept[state])


def spell(text: str) -> list[int]:
    """Encode a text character by character."""
    return [token for character in text for token in encode(character)]


def compile_tokens(value: Constraint) -> TokenAutomaton:
    return token_automaton(value, TOKENIZER, len(TOKENIZER), (TOKENIZER.eos_token_id,), ())


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_tokens_are_accepted_if_their_text_matches(data: st.DataObject) -> None:
    pattern = data.draw(st.sampled_from([r"(one|two|three)( (one|two))*\.?", r"\w+ ?\w*", "é*.?x?", r"[^\d]{0,4}"]))
    automaton = compile_tokens(paradec.Regex(pattern))
    ids = data.draw(st.lists(st.integers(3, len(TOKENIZER) - 1), max_size=3))
    ids = data.draw(st.sampled_from([ids, encode("one two"), encode("éx"), [*encode("one"), *ids]]))
    spelling = find_spelling(TOKENIZER)
    assert spelling is not None
    raw = spelling.read(ids) or b""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        assert not accepts(automaton, ids)
        return
    assert text == TOKENIZER.decode(ids)
    assert accepts(automaton, ids) == bool(re.fullmatch(pattern, text, re.ASCII))
    assert accepts(automaton, [*ids, *[TOKENIZER.eos_token_id] * 2]) == bool(re.fullmatch(pattern, text, re.ASCII))


def test_choices_accept_only_the_tokenizers_own_tokenization() -> None:
    automaton = compile_tokens(paradec.Choice(["one two", "three"]))
    assert accepts(automaton, encode("one two")) and accepts(automaton, encode("three"))
    letters = spell("three")
    assert TOKENIZER.decode(letters) == "three" and not accepts(automaton, letters)
    assert accepts(compile_tokens(paradec.Regex("three")), letters)


def test_with_an_unknown_kind_of_tokenizer_only_choices_work() -> None:
    """It is unknown how the texts of tokens are joined, so patterns are refused."""

    class Reversed:
        all_special_ids: list[int] = []

        def __len__(self) -> int:
            return 300

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return TOKENIZER.convert_ids_to_tokens(ids)

        def decode(self, ids: list[int], **_: Any) -> str:
            return TOKENIZER.decode(list(ids)[::-1])

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": encode(text)[::-1]}

    tokenizer = Reversed()
    with pytest.raises(ValueError, match="does not know how this tokenizer joins"):
        token_automaton(paradec.Regex("one"), tokenizer, 300, (), ())
    assert token_automaton(paradec.Choice(["one two"]), tokenizer, 300, (), ()).states
    compiler = Compiler(tokenizer, 300)
    assert compiler.compile(paradec.Choice, ["two"]) == paradec.Choice(["two"])
    assert values.has_automaton(paradec.Choice(["two"]), tokenizer, 300)
    refuses(lambda: compiler.compile(paradec.Regex, "one"), "does not know how this tokenizer joins")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"after": ""}, "after='' must be a text of 1 to 256 characters"),
        ({"after": 3}, "after=3 must be a text of 1 to 256 characters"),
        ({"after": "a" * 257}, "must be a text of 1 to 256 characters"),
        ({"after": "\ud800"}, "after='.*' is not UTF-8 text"),
        ({"after": "a", "thinking_budget": -1}, "thinking_budget=-1 must be an integer"),
        ({"after": "a", "thinking_budget": 1.5}, "thinking_budget=1.5 must be an integer"),
        ({"thinking_budget": 1}, "thinking_budget=1 needs after"),
    ],
)
def test_wrong_markers_and_thinking_budgets_are_refused(arguments: dict[str, Any], message: str) -> None:
    for value in ({"regex": "a"}, {"choice": ["a"]}, {"json_schema": {"type": "null"}}):
        refuses(partial(parse_constraint, "constraint", value | arguments), message)
    grammar = {"grammar": 'start: "a"', "after": "x"} | arguments
    refuses(partial(parse_constraint, "constraint", grammar), "after does not work with a grammar|thinking_budget")


MARKER_TOKENS = ["<unk>", "</t>", "\u2581a", "a", "b", "</", "t>", "\u2581b", "<0x3C>", "t>b", "</t"]


@pytest.mark.thinned
@pytest.mark.parametrize("special", [(0,), (0, 1)])
@pytest.mark.parametrize("drops_space", [False, True])
def test_a_marker_is_found_in_every_tokenization(drops_space: bool, special: tuple[int, ...]) -> None:
    """Check all sequences of up to 4 tokens. The marker may be a special token; the decoder may drop leading spaces."""
    vocabulary = {text: token for token, text in enumerate(MARKER_TOKENS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    sentence_piece = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    sentence_piece += [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(sentence_piece) if drops_space else decoders.Fuse()
    names = [MARKER_TOKENS[token] for token in special]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", extra_special_tokens=names[1:])
    automaton = token_automaton(paradec.Regex("a?b| a|<", after="</t>"), fast, len(MARKER_TOKENS) + 3, (), ())
    assert automaton.free[0] and not automaton.free[automaton.accept].any()

    def read(ids: tuple[int, ...]) -> str:
        text, has_begun = "", False
        for token in ids:
            name = MARKER_TOKENS[token]
            if drops_space and token not in special:
                name = name.replace("\u2581", " ").replace("<0x3C>", "<")
                name, has_begun = name if has_begun else name.removeprefix(" "), True
            text += name
        return text

    def free_length(ids: tuple[int, ...]) -> int | None:
        """Count tokens up to the end of the first marker. None without a marker, or if no token ends at its end."""
        count = next((n for n in range(len(ids) + 1) if "</t>" in read(ids[:n])), 0)
        return count if read(ids[:count]).endswith("</t>") else None

    num_texts = 0
    for ids in itertools.chain.from_iterable(itertools.product(range(len(MARKER_TOKENS)), repeat=n) for n in range(5)):
        count = free_length(ids)
        answer = "" if count is None else read(ids)[len(read(ids[:count])) :]
        is_allowed = count is not None and not {*ids[count:]} & {*special} and answer in ("ab", "b", " a", "<")
        assert accepts(automaton, [*ids]) == is_allowed, ids
        if is_allowed:
            num_texts += 1
            assert automaton.free_length(ids) == count
            assert fast.decode(ids, skip_special_tokens=True).endswith(answer.strip() if count == 1 else answer)
    assert num_texts > 100


def test_text_after_a_marker_has_the_tokenizers_own_tokenization() -> None:
    """Text up to the marker may have every tokenization. After it, literals have only the tokenizer's own."""
    schema = {"type": "object", "properties": {"one": {"enum": ["two", "three"]}}, "required": ["one"]}
    plain, marked = compile_tokens(paradec.JsonSchema(schema)), compile_tokens(paradec.JsonSchema(schema, after="then"))
    free = [encode("one then"), [*encode("<"), 2, *encode("th"), *encode("en")], spell("then")]
    answers = [encode('{"one":"two"}'), encode('{"one": "three"}'), spell('{"one":"two"}')]
    for answer in answers:
        for begin in free:
            assert accepts(marked, [*begin, *answer]) == accepts(plain, answer)
            assert marked.free_length([*begin, *answer]) == len(begin)
        assert not accepts(marked, answer)
    assert [accepts(plain, answer) for answer in answers] == [True, True, False]
    repeated = compile_tokens(paradec.Regex("( ?one| then)*", after="then"))  # the answer may contain the marker
    assert accepts(repeated, encode("two then then one then one"))
    assert not accepts(repeated, encode("two then two then one"))
    value = paradec.Choice(["one", "one two"], after="then")
    assert accepts(compile_tokens(value), encode("then") + encode("one two")) and value.accepts("a thenone two")
    assert not value.accepts("one two") and not value.accepts("then one two") and not value.accepts("thenone thenone")


def many_texts(count: int, length: int) -> list[str]:
    draw = np.random.default_rng(0)
    return ["".join(draw.choice([*"abcdefghij"], length)) for _ in range(count)]


@pytest.mark.parametrize("pattern", ["a(ba)*", "(one|two)( three)?", "[a-d]{3}(x{4})*", "(aa|bbb){1,3}"])
@pytest.mark.parametrize("ends", [(), (TOKENIZER.eos_token_id,)])
def test_reach_gives_the_states_that_accept_after_n_tokens(pattern: str, ends: tuple[int, ...]) -> None:
    automaton = token_automaton(paradec.Regex(pattern), TOKENIZER, len(TOKENIZER), ends, ())
    expected, reached = automaton.accept, []
    for count in range(20):
        assert (automaton.reach(count) == expected).all()
        reached.append(bool(expected[0]))
        expected = np.array([expected[automaton.transitions(state)[1]].any() for state in range(automaton.states)])
    assert passes.lengths(automaton, 19).tolist() == reached


def test_automata_of_large_vocabularies_take_little_memory() -> None:
    """500 texts over 126,000 tokens take less than 2.5 MB, including all derived arrays."""
    texts = many_texts(500, 24)
    for ends in ((), (TOKENIZER.eos_token_id,)):
        automaton = token_automaton(paradec.Choice(texts), TOKENIZER, 126_000, ends, ())
        assert automaton.states > 5000
    span = TextSpan(automaton, 0, 4096, None)
    assert span.after(0)[0] and not span.after(4090)[0] and span.after(4096)[automaton.end]
    automaton.by_state, automaton.by_class, automaton.by_next  # noqa: B018 - computes the arrays, which are lazy
    arrays = [*automaton.members, *(a for a in vars(automaton).values() if isinstance(a, np.ndarray))]
    groups = [automaton.by_state, automaton.by_class, automaton.by_next, automaton.runs, automaton.runs.by_class]
    arrays += [a for group in groups for a in vars(group).values() if isinstance(a, np.ndarray)]
    assert sum(a.nbytes for a in arrays) <= automaton.nbytes < 2.5e6


def test_choices_have_a_limit_of_states_and_compile_in_bounded_time() -> None:
    begin = time.process_time()
    refuses(lambda: compile_tokens(paradec.Choice(many_texts(4000, 28))), "choices take more than 65536 states")
    automaton = compile_tokens(paradec.Choice(["a" * 3 + "bc" * 5000]))
    assert automaton.states > 5000 and automaton.reach(automaton.states)[0]
    assert time.process_time() - begin < 5


def test_patterns_have_a_limit_of_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    value = paradec.Regex("[a-z]*e[a-z]{6}")
    edges = len(compile_tokens(value).edges)
    monkeypatch.setattr(spelling, "MAX_EDGES", edges // 2)
    refuses(lambda: value.to_token_automaton(TOKENIZER, len(TOKENIZER)), f"more than {edges // 2} edges")


def test_cached_automata_are_limited_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    cached = values._CACHE.setdefault(TOKENIZER, {})
    cached.clear()
    automata = [token_automaton(paradec.Choice([text]), TOKENIZER, 9000, (), ()) for text in ("one", "two", "three")]
    monkeypatch.setattr(values, "MAX_CACHED_BYTES", sum(automaton.nbytes for automaton in automata) + 1000)
    assert token_automaton(paradec.Choice(["one"]), TOKENIZER, 9000, (), ()) is automata[0]
    token_automaton(paradec.Choice(["nine"]), TOKENIZER, 9000, (), ())
    assert sum(automaton.nbytes for automaton in cached.values()) <= values.MAX_CACHED_BYTES
    assert [key[0].choices for key in cached] == [("three",), ("one",), ("nine",)]
    monkeypatch.setattr(values, "MAX_CACHED_BYTES", 1)
    token_automaton(paradec.Choice(["seven"]), TOKENIZER, 9000, (), ())
    assert [key[0].choices for key in cached] == [("seven",)]


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    instance = Compiler(TOKENIZER, VOCAB, seconds=2, max_bytes=2**28)
    yield instance
    instance.close()


def test_automata_of_the_compiler_equal_those_compiled_in_process(compiler: Compiler, monkeypatch: Any) -> None:
    pattern, schema = "[ab]{2,5}c?", {"type": "array", "items": {"enum": [1, "two"]}}
    for make, argument in ((Regex, pattern), (JsonSchema, schema)):
        value: Constraint = make(argument)
        expected = value.to_token_automaton(TOKENIZER, VOCAB)
        assert compiler.compile(make, argument) == value
        monkeypatch.setattr(type(value), "to_token_automaton", None)  # the compiler's automaton is in the cache
        actual = token_automaton(value, TOKENIZER, VOCAB, (), ())
        for name in ("edges", "accept", "class_of"):
            np.testing.assert_array_equal(getattr(actual, name), getattr(expected, name))
    monkeypatch.setattr(compiler, "_compile_in_subprocess", None)
    assert compiler.compile(Regex, pattern) == Regex(pattern)  # from the cache


def test_slow_or_large_compilations_are_refused_without_blocking_others(compiler: Compiler) -> None:
    with ThreadPoolExecutor(4) as pool:
        slow = pool.submit(compiler.compile, time.sleep, 60)
        large = pool.submit(compiler.compile, bytearray, 2**29)
        assert compiler.compile(Regex, "a{3}") == Regex("a{3}")
        refuses(lambda: large.result(), "more than 256 MiB", ConstraintSizeError)
        refuses(lambda: slow.result(), "more than 2 s or 256 MiB: give a smaller one", ConstraintSizeError)
    assert compiler.compile(Regex, "b{3}") == Regex("b{3}")
    refuses(lambda: compiler.compile(Regex, "("), "cannot be read|position|unbalanced|[(]")

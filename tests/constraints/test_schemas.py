"""JSON schemas compared with the validator `oracles.json_schema`: keywords, small vocabularies, random schemas."""

from __future__ import annotations

import itertools
import json
import random
import time
import warnings
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from decoding import refuses
from oracles.json_schema import is_valid
from test_values import matches, some_text
from tokenized_models import TOKENIZER, encode

import paradec
from paradec.constraints import spelling
from paradec.constraints.automaton import TokenAutomaton
from paradec.constraints.dfa import ByteAutomaton, byte_automaton
from paradec.constraints.values import parse_constraint


def automaton_of(schema: Any, depth: int = 3) -> ByteAutomaton:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return byte_automaton(paradec.JsonSchema(schema, depth).node())


def accepts(automaton: ByteAutomaton, value: Any) -> bool:
    """Return whether a value is accepted with and without spaces; both must agree."""
    spaced, compact = json.dumps(value), json.dumps(value, separators=(",", ":"))
    assert matches(automaton, spaced) == matches(automaton, compact)
    return matches(automaton, spaced)


CLOSED = {"type": "object", "additionalProperties": False}
AB = {"a": {"type": "integer"}, "b": {"type": "string"}}
# name -> (schema, accepted values, rejected values)
CASES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "bounds of numbers": ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 2}, [-1.5, 0, 1.99], [-1.51, 2, 2.5]),
    "draft 4's bounds": ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
    "multiples": ({"type": "number", "multipleOf": 25, "maximum": 100}, [50, -75, 0], [30, 125, 0.25]),
    "pattern and length": ({"type": "string", "pattern": "^a+", "maxLength": 3, "minLength": 2}, ["aa", "ab", "abc"],
                           ["a", "ba", "aaaa"]),
    "format and length": ({"type": "string", "format": "ipv4", "maxLength": 7}, ["1.2.3.4"], ["1.2.3.40"]),
    "two patterns": ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$"}]}, ["ab", "axb"], ["a", "b"]),
    "unlisted required": ({"type": "object", "properties": AB, "required": ["z"]}, [{"z": [1]}, {"a": 1, "z": None}],
                          [{"a": 1}]),
    "no type": ({"properties": AB, "required": ["a"]}, [{"a": 1}], [{"a": "x"}, {}, 3]),
    "keywords of another type": ({"type": "integer", "minLength": 3, "format": "date", "additionalItems": False}, [3],
        ["abc"]),
    "all of objects": ({"allOf": [{"properties": AB}, {"required": ["b"]}, {"properties": {"b": {"maxLength": 1}}}]},
                       [{"b": "x"}, {"a": 1, "b": ""}], [{"a": 1}, {"b": "xx"}]),
    "next to a reference": ({"$defs": {"s": {"type": "string"}}, "$ref": "#/$defs/s", "minLength": 2}, ["ab"], ["a"]),
    "next to anyOf": ({"type": "object", "properties": AB, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
                      [{"a": 1}, {"b": ""}, {"a": 1, "b": ""}], [{}]),
    "one of required": ({"type": "object", "properties": AB, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
                        [{"a": 1}, {"b": ""}], [{}, {"a": 1, "b": ""}]),
    "one of overlapping": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, [1, 2.5, -3], [2, 3,
        1.5]),
    "one of constants": ({"oneOf": [{"properties": {"k": {"const": k}, "v": {"type": t}}, "required": ["k"]}
                                    for k, t in (("x", "integer"), ("y", "string"))]},
                         [{"k": "x", "v": 1}, {"k": "y", "v": "1"}, {"k": "y"}], [{"k": "x", "v": "1"}, {"k": "z"},
                             {}]),
    "one of closed objects": ({"oneOf": [{**CLOSED, "properties": {"a": {"type": "integer"}}},
                                         {**CLOSED, "properties": {"b": {"type": "string"}}}]}, [{"a": 1}, {"b": ""}],
                              [{}, {"a": 1, "b": ""}]),
    "not": ({"not": {"type": ["integer", "object"]}}, ["a", None, 0.5, [1]], [1, {}]),
    "not an enumeration": ({"type": ["integer", "string"], "not": {"enum": [1, "a"]}}, [2, 10, "b", "aa", ""], [1,
        "a"]),
    "not required": ({"type": "object", "properties": AB, "not": {"required": ["a", "b"]}}, [{}, {"a": 1}, {"b": ""}],
                     [{"a": 1, "b": ""}]),
    "if": ({"type": "object", "properties": AB, "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
            "then": {"required": ["b"]}, "else": {"properties": {"b": False}}},
           [{"a": 1, "b": ""}, {"a": 2}, {}], [{"a": 1}, {"b": ""}, {"a": 2, "b": ""}]),
    "pattern properties": ({**CLOSED, "patternProperties": {"^x": {"type": "integer"}, "y$": {"minimum": 3}}},
                           [{}, {"x": 1, "xa": 2}, {"xy": 3}, {"ay": 4}], [{"a": 1}, {"xy": 1}, {"x": "a"}]),
    "patterns and lists": ({**CLOSED, "properties": {"xa": {}}, "patternProperties": {"^x": {"type": "integer"}}},
                           [{"xa": 1, "xb": 2}], [{"xa": "a"}, {"y": 1}]),
    "additional schema": ({"properties": {"a": {}}, "additionalProperties": {"type": "null"}},
                          [{"a": 1, "b": None, "c": None}, {}], [{"b": 1}]),
    "some property": ({**CLOSED, "properties": {n: {"type": "null"} for n in "abc"}, "minProperties": 1},
                      [{"a": None}, {"b": None, "c": None}], [{}]),
    "no property": ({"additionalProperties": {"type": "null"}, "not": {"minProperties": 1}}, [{}], [{"q": None}]),
    "front": ({"type": "array", "items": [{"type": "integer"}, {"type": "string"}],
        "additionalItems": {"type": "null"}},
              [[], [1], [1, "a"], [1, "a", None]], [["a"], [1, 1], [1, "a", 1]]),
    "list index": ({"prefixItems": [{"type": "null"}, {"$ref": "#/prefixItems/0"}], "type": "array"}, [[None, None]],
                   [[None, 1]]),
    "constants of structures": ({"enum": [{"a": [1, {}]}, [True], 2.0]}, [{"a": [1, {}]}, [True], 2.0, 2],
        [{"a": [1]}, [1]]),
    "not a structure": ({"enum": [{"a": 1}, [1, 2], 3], "not": {"const": {"a": 1.0}}}, [[1, 2], 3], [{"a": 1}]),
    "escapes": ({"type": "string", "pattern": "^[é\"\\n]$"}, ["é", '"', "\n"], ["e"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_keywords(name: str) -> None:
    """The automaton accepts and rejects the values of the case, and all texts drawn from it are valid."""
    schema, accepted, rejected = CASES[name]
    automaton = automaton_of(schema)
    dumped = json.dumps(schema).replace('"exclusiveMinimum": true', '"exclusiveMinimum": 3')  # the form after draft 4
    plain = json.loads(dumped.replace('"format"', '"other"'))  # the validator ignores formats here
    for value in accepted:
        assert accepts(automaton, value) and is_valid(value, plain, plain), value
    for value in rejected:
        assert not accepts(automaton, value), value
    draw = np.random.default_rng(0)
    for _ in range(15):
        if (text := some_text(automaton, draw)) is not None:
            assert is_valid(json.loads(text, parse_float=Decimal), plain, plain), text


TOKENS = ["{", "}", "[", "]", '"a":', '"b":', '"a"', "1", "2", "null", ","]
SMALL: dict[str, Any] = {
    "optional keys": {**CLOSED, "properties": {"a": {"enum": [1, 2]}, "b": {"type": "null"}}},
    "some key": {**CLOSED, "properties": {"a": {"const": 1}, "b": {"const": 2}}, "minProperties": 1},
    "one of": {**CLOSED, "properties": {"a": {"const": 1}, "b": {"const": 2}}, "oneOf": [{"required": ["a"]},
        {"required": ["b"]}]},
    "front": {"type": "array", "prefixItems": [{"const": 1}, {"const": 2}], "items": {"const": None}, "maxItems": 3},
    "recursive": {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}},
        "$ref": "#/$defs/t"},
    "any of": {"anyOf": [{**CLOSED, "properties": {"a": {"const": 1}}}, {"type": "array", "items": {"type": "null"}}]},
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_all_texts_of_a_small_vocabulary(name: str) -> None:
    """Texts of up to seven parts are accepted if valid, with every key once and in the order of the schema."""
    schema, automaton, num_accepted = SMALL[name], automaton_of(SMALL[name], depth=8), 0

    def extend(text: str, state: int, size: int) -> None:
        for part in TOKENS:
            next_state = state
            for byte in part.encode():
                next_state = int(automaton.step[next_state, automaton.letter_of[byte]]) if next_state >= 0 else -1
            check(text + part, next_state >= 0 and bool(automaton.accept[next_state]))
            if size > 1 and (next_state >= 0 or size > 4):  # rejected texts of up to three parts are extended too
                extend(text + part, next_state, size - 1)

    def check(text: str, accepted: bool) -> None:
        nonlocal num_accepted
        try:
            pairs = json.loads(text, object_pairs_hook=list)
            value = json.loads(text)
        except ValueError:
            assert not accepted, text
            return
        keys = [pair[0] for pair in pairs if isinstance(pair, tuple)] if isinstance(pairs, list) else []
        in_order = keys == [key for key in ("a", "b") if key in keys]
        assert accepted == (in_order and is_valid(value, schema, schema)), text
        num_accepted += accepted

    extend("", 0, 7)
    assert num_accepted >= 2


NAMES, SIMPLE = ["a", "b", "ab", "c"], [1, "a", None, 0.5, True, {}]


def random_schema(draw: random.Random, depth: int) -> Any:
    """Draw a schema whose parts are nested at most `depth` deep."""
    if not depth or draw.random() < 0.15:
        values = draw.sample([1, 2, "a", "b", None, True, False, 0.5, [1], {"a": 1}], 3)
        kinds = ("string", "integer", "number", "boolean", "null")
        return draw.choice([*({"type": kind} for kind in kinds), True, {}, {"const": values[0]}, {"enum": values}])

    def inner() -> Any:
        return random_schema(draw, depth - 1)

    def draw_some(**entries: Any) -> dict[str, Any]:
        return {key: make() for key, make in entries.items() if draw.random() < 0.35}

    def names() -> list[str]:
        return draw.sample(NAMES, draw.randint(0, 2))

    match draw.choice(["object"] * 3 + ["array"] * 2 + ["string", "number"] + ["combination"] * 4):
        case "object":
            return {"type": "object", "properties": {name: inner() for name in draw.sample(NAMES, 2)}} | draw_some(
                required=names, additionalProperties=lambda: draw.choice([False, True, inner()]),
                patternProperties=lambda: {draw.choice(["^a", "b", "."]): inner()},
                minProperties=lambda: draw.randint(0, 1),
            )  # fmt: skip
        case "array":
            return {"type": "array"} | draw_some(
                items=inner, prefixItems=lambda: [inner()], minItems=lambda: draw.randint(0, 2),
                maxItems=lambda: draw.randint(0, 3),
            )  # fmt: skip
        case "string":
            patterns = ["^a", "b$", "^[ab]*$", "a.", "^(a|bb)$"]
            return draw_some(minLength=lambda: draw.randint(0, 2), maxLength=lambda: draw.randint(0, 3),
                        pattern=lambda: draw.choice(patterns))  # fmt: skip
        case "number":
            bounds = {key: lambda: draw.choice([0, 1, 2, -1, 0.5, 1.5]) for key in (
                "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")}  # fmt: skip
            kind = draw.choice(["integer", "number"])
            return {"type": kind} | draw_some(**bounds, multipleOf=lambda: draw.choice([1, 2, 3]))
    parts: dict[str, Any] = {
        "not": inner, "anyOf": lambda: [inner(), inner()], "oneOf": lambda: [inner(), inner(), inner()],
        "allOf": lambda: [inner(), inner()],
    }  # fmt: skip
    chosen: dict[str, Any] = {key: parts[key]() for key in draw.sample([*parts], draw.randint(1, 2))}
    return chosen | ({"if": inner(), "then": inner(), "else": inner()} if draw.random() < 0.3 else {})


@pytest.mark.parametrize(("seed", "count"), [(1, 15), *(pytest.param(n, 40, marks=pytest.mark.full) for n in range(8))])
def test_random_schemas_accept_valid_values_only(seed: int, count: int) -> None:
    draw, steps, num_schemas, num_accepted = random.Random(seed), np.random.default_rng(seed), 0, 0
    values: list[Any] = [None, True, False, 0, 1, 2, 3, -1, 0.5, 1.5, 2.0, "", "a", "b", "ab", "bb", "aab", [], [[1]]]
    values += [[*items] for size in (1, 2) for items in itertools.product(SIMPLE[:4], repeat=size)] + [[1, "a", 1]]
    for keys in map(str.split, ("a", "b", "a b", "ab", "c", "a c", "a b c", "zz", "a zz", "ab c")):
        values += [dict(zip(keys, items * 2, strict=False)) for items in itertools.product(SIMPLE[:5], repeat=2)]
    for _ in range(count):
        schema = random_schema(draw, 3)
        try:
            automaton = automaton_of(schema, depth=1)
        except ValueError:
            continue
        num_schemas += 1
        for value in values:
            if matches(automaton, json.dumps(value)):
                assert is_valid(value, schema, schema), (schema, value)
                num_accepted += 1
        for _ in range(4):
            if (text := some_text(automaton, steps)) is not None:
                assert is_valid(json.loads(text, parse_float=Decimal), schema, schema), (schema, text)
    assert num_schemas > count / 2 and num_accepted > 10 * count


@pytest.mark.parametrize(
    ("schema", "accepted", "rejected"),
    [
        ({"$defs": {"x": {"$anchor": "n", "type": "null"}}, "$ref": "#n"}, None, 1),
        ({"definitions": {"x": {"$id": "#n", "type": "null"}}, "allOf": [{"$ref": "#n"}]}, None, 1),
        ({"$id": "http://x/root", "$defs": {"x": {"$id": "part", "type": "null"}}, "$ref": "part"}, None, 1),
        ({"$id": "http://x/root", "$defs": {"x": {"type": "null"}}, "$ref": "http://x/root#/$defs/x"}, None, 1),
        (
            {"$defs": {"i": {"type": "integer"}}, "allOf": [
                {"$id": "http://x/inner", "$defs": {"i": {"type": "null"}}, "anyOf": [{"$ref": "#/$defs/i"}]}]},
            None, 1,
        ),
        ({"properties": {"a~b/c%": {"type": "null"}}, "anyOf": [{"$ref": "#/properties/a~0b~1c%25"}]}, None, 1),
        ({"id": "http://x/y", "definitions": {"x": {"type": "null"}}, "anyOf": [{"$ref": "#/definitions/x"}]}, None, 1),
    ],
)  # fmt: skip
def test_references_by_anchor_id_and_path(schema: Any, accepted: Any, rejected: Any) -> None:
    automaton = automaton_of(schema)
    assert accepts(automaton, accepted) and not accepts(automaton, rejected)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": [1]}, "schema: properties is .1., and must be an object of schemas"),
        ({"items": {"allOf": {"a": 1}}}, r"schema: items\.allOf is .*, and must be a list of schemas"),
        ({"type": None}, "type is None, and must be one of object"),
        ({"properties": {"a": {"required": True}}}, r"properties\.a\.required is True, and must be a list of names"),
        ({"pattern": 3}, "pattern is 3, and must be a text"),
        ({"minLength": -1}, "minLength is -1, and must be a whole number from 0"),
        ({"minimum": "3"}, "minimum is '3', and must be a number"),
        ({"multipleOf": 0}, "multipleOf is 0, and must be a number above 0"),
        ({"patternProperties": {"(": {}}}, r"patternProperties\.\( is not supported: regex='\('"),
        ({"dependencies": {"a": ["b"]}}, "dependencies is not supported"),
        ({"items": {"dependentRequired": {"a": ["b"]}}}, r"items\.dependentRequired is not supported"),
        ({"$ref": "#nowhere"}, "'#nowhere' is not in the schema"),
        ({"$ref": "#/enum/0", "enum": [3]}, "is 3, not a schema"),
        ({"$ref": "#/examples/5", "examples": [{}]}, "is not in the schema"),
        ({"$dynamicRef": "#x"}, "dynamicRef is not supported"),
        ({"multipleOf": 0.25}, r"multipleOf is 0\.25, and must be a whole number of at most 4096"),
        ({"minProperties": 2}, "minProperties is 2, and must be 0 or 1"),
        ({"maxProperties": 2}, "maxProperties is not supported"),
        ({"not": {"format": "ipv4"}, "type": "string"}, "values that violate not.format"),
        ({"type": "array", "contains": {"const": 1}}, "contains is not supported"),
        ({"properties": {"a": {"propertyNames": {"maxLength": 3}}}}, r"properties\.a\.propertyNames is not supported"),
        ({"items": {"enum": [1, 2]}, "not": {"items": {"const": 1}}}, "values that violate not.items"),
        ({"$id": "http://x/y/", "$defs": {"p": {"$id": "z/p", "$ref": "q"}, "q": {"$id": "q"}, "r": {"$id": "z/q"}},
            "allOf": [
            {"$ref": "z/p"}]}, "different meanings in the drafts"),
    ],
)  # fmt: skip
def test_malformed_or_unsupported_schemas_are_refused_with_keyword_and_path(schema: Any, message: str) -> None:
    refuses(lambda: automaton_of(schema), message)


def test_large_schemas_stay_small_and_fast() -> None:
    inner = {"type": "object", "properties": {f"m{index}": {"type": "boolean"} for index in range(12)}}
    nested = automaton_of({"type": "object", "properties": {f"k{index}": inner for index in range(12)}})
    assert len(nested.accept) < 2500  # the 12 equal objects are not stored for every path
    begin = time.process_time()
    levels = {f"t{index}": {"type": "object", "properties": {name: {"$ref": f"#/$defs/t{index + 1}"} for name in "abc"}}
              for index in range(5)}  # fmt: skip
    automaton_of({"$defs": levels | {"t5": {"type": "null"}}, "$ref": "#/$defs/t0"})
    assert len(automaton_of({"type": "string", "maxLength": 500}).accept) < 8003
    assert len(automaton_of({"type": "string", "pattern": "^[0-9]{0,500}$"}).accept) == 503
    assert time.process_time() - begin < 5
    strings = {f"p{index}": {"type": "string", "maxLength": 30_000} for index in range(20)}
    long = automaton_of({"type": "object", "properties": strings})
    assert accepts(long, {"p0": "x" * 64}) and not accepts(long, {"p0": "x" * 20_000})


def test_unknown_keywords_are_listed_in_one_warning() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "colour": 1, "format": "slug"}}, "colour": 2}
    with pytest.warns(UserWarning, match="ignored unknown keywords or formats: colour, format 'slug'") as caught:
        value = paradec.JsonSchema(schema)
    assert len(caught) == 1 and value.accepts('{"a": "x y"}')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draft = {"$schema": "http://json-schema.org/draft-07/schema#"}
        paradec.JsonSchema(draft | {"id": "x", "title": "t", "type": "null"})


def test_accepts_checks_finished_texts_without_a_model() -> None:
    assert paradec.Regex("a+b?").accepts("aab") and not paradec.Regex("a+b?").accepts("aabb")
    assert paradec.Choice(["yes", "no"]).accepts("no") and not paradec.Choice(["yes", "no"]).accepts("n")
    schema = paradec.JsonSchema({"type": "object", "properties": {"é": {"type": "integer"}}})
    assert [schema.accepts(text) for text in ('{"é": 3}', "{}", '{"é": 3', "")] == [True, True, False, False]
    refuses(lambda: schema.accepts(3), "text=3 must be a text")  # type: ignore[arg-type]
    refuses(lambda: schema.accepts("\ud800"), "not UTF-8")


def test_dicts_and_pydantic_models_are_converted_to_constraints() -> None:
    pydantic = pytest.importorskip("pydantic")
    person = pydantic.create_model("Person", name=(str, ...), age=(int | None, None))
    request = paradec.Request(constraint=person)
    assert request.constraint == paradec.JsonSchema(person)
    assert request.constraint.accepts('{"name": "x", "age": null}')  # type: ignore[union-attr]
    assert paradec.Request(constraint={"type": "null"}).constraint == paradec.JsonSchema({"type": "null"})
    assert paradec.Request(constraint=[None, person]).constraint == (None, paradec.JsonSchema(person))
    model = paradec.load()
    for name in ("json_schema", "response_format", "choice", "regex"):
        with pytest.raises(TypeError, match=f"unknown argument: '{name}'; write constraint=paradec"):
            paradec.generate(model, "x", **{name: {}})


def compile_schema(schema: Any, spelling: str = "tokenizer") -> TokenAutomaton:
    return paradec.JsonSchema(schema, spelling=spelling).to_token_automaton(TOKENIZER, len(TOKENIZER))


def accepted_sequences(automaton: TokenAutomaton, max_tokens: int) -> list[list[int]]:
    """List all accepted sequences of at most `max_tokens` tokens."""
    result, todo = list[list[int]](), [(list[int](), 0)]
    for ids, state in todo:
        if automaton.accept[state]:
            result.append(ids)
        for index, target in zip(*automaton.transitions(state), strict=True):
            if len(ids) < max_tokens:
                todo += [([*ids, token], int(target)) for token in automaton.members[index].tolist()]
    return result


def test_literals_have_the_tokenizer_s_spelling() -> None:
    """A schema of literals accepts only the tokenizer's tokenization of a text; with spelling="any" it accepts all."""
    schema = {**CLOSED, "properties": {"one": {"enum": [True, "two"]}, "three": {"const": None}}, "required": ["one"]}
    strict, free = compile_schema(schema), compile_schema(schema, "any")
    actual = accepted_sequences(strict, 60)
    texts = [TOKENIZER.decode(ids) for ids in actual]
    value = paradec.JsonSchema(schema)
    assert len({*texts}) == len(texts) == 20 and all(map(value.accepts, texts))
    assert actual == [encode(text) for text in texts]
    for ids in actual:
        letters = [token for letter in TOKENIZER.decode(ids) for token in encode(letter)]
        assert is_accepted(free, ids) and is_accepted(free, letters)
        assert not is_accepted(strict, letters) or letters == ids


def test_free_text_has_any_spelling_between_literals() -> None:
    """All tokenizations of strings are accepted, but only one tokenization of the text around them."""
    schema = {**CLOSED, "properties": {"one": {"type": "string", "pattern": "^[a-z]{1,4}$"}}, "required": ["one"]}
    strict, free = compile_schema(schema), compile_schema(schema, "any")
    for text in ("one", "t", "twoo", "three", ""):
        for ids in all_spellings(text):
            assert is_accepted(strict, [*encode('{"one": "'), *ids, *encode('"}')]) == (1 <= len(text) <= 4)
    for head in all_spellings('{"one":"'):
        assert is_accepted(free, [*head, *encode("t"), *encode('"}')])
        assert is_accepted(strict, [*head, *encode("t"), *encode('"}')]) == (head == encode('{"one":"'))


def all_spellings(text: str) -> list[list[int]]:
    if not text:
        return [[]]
    parts = {token: TOKENIZER.decode([token]) for token in range(3, len(TOKENIZER))}
    return [[token, *ids] for token, part in parts.items() if part and text.startswith(part)
            for ids in all_spellings(text[len(part) :])]  # fmt: skip


def test_strings_are_shortened_to_fit_the_edge_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = {"type": "string", "maxLength": 1000}
    edges = len(compile_schema({"type": "string", "maxLength": 300}).edges)
    monkeypatch.setattr(spelling, "MAX_EDGES", edges)
    automaton = compile_schema(schema)
    assert is_accepted(automaton, encode(json.dumps("x" * 256))) and len(automaton.edges) <= edges
    monkeypatch.setattr(spelling, "MAX_EDGES", 100)
    refuses(lambda: compile_schema(schema), "more than 100 edges")


def test_the_spelling_is_saved_and_compared() -> None:
    value = paradec.JsonSchema({"type": "null"}, spelling="any")
    loaded = parse_constraint("constraint", json.loads(json.dumps(value.to_dict())))
    assert loaded == value != paradec.JsonSchema({"type": "null"})
    refuses(lambda: paradec.JsonSchema({"type": "null"}, spelling="own"), "spelling")


def is_accepted(automaton: TokenAutomaton, ids: list[int]) -> bool:
    state = 0
    for token in ids:
        state = automaton.step(state, token)
    return state >= 0 and bool(automaton.accept[state])

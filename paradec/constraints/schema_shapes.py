"""The values that a JSON schema allows, as alternatives (`Shape`) of one type each.

A goal is a set of subschemas, each with a sign. A value meets the goal if all positive subschemas allow it and all
negative ones exclude it. The alternatives of a goal are those of its subschemas, merged pair by pair. So `allOf`,
neighbouring keywords and `$ref` are unions of goals, and `not`, `oneOf` and `if` only need signs. A keyword's rule may
leave out valid values (docs/structured.md lists them), but never allows a value that the schema excludes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

from paradec.constraints import languages
from paradec.constraints.dfa import Dfa, complement, difference, intersect, to_dfa, to_node
from paradec.constraints.expressions import either
from paradec.constraints.regex import ecma_search
from paradec.constraints.schema_document import CONSTRAINING, SchemaDocument, is_number

Literal = tuple[bool, int]
"""A sign and the id of a subschema."""
Goal = frozenset[Literal]
OPEN: Goal = frozenset()
"""Any value."""
NO_VALUE: Goal = frozenset({(True, 0)})
TYPES = ("object", "array", "string", "number", "boolean", "null")
MAX_ALTERNATIVES, MAX_GOALS = 2**9, 2**14
"""Maximum number of alternatives of one goal, and of goals."""


@dataclass(frozen=True, eq=False)
class Members:
    """The goals that one subschema sets for the values of an object (by key) or of an array (by index)."""

    listed: Mapping[Any, Goal] = field(default_factory=dict)
    patterns: tuple[tuple[Dfa, Goal], ...] = ()
    others: Goal = OPEN
    """The goal of keys that are not listed and match no pattern."""
    writes_others: bool = False
    """Whether the subschema has `additionalProperties`. If so, answers may contain other keys."""
    is_negative: bool = False
    """Whether the subschema is negated. Answers never contain its keys as optional keys."""

    def goal(self, key: str) -> Goal:
        goals = [self.listed[key]] if key in self.listed else []
        goals += [goal for language, goal in self.patterns if language.accepts(map(ord, key))]
        return frozenset().union(*goals) if goals else self.others


@dataclass(frozen=True)
class Shape:
    """Values of one type."""

    kind: str
    is_explicit: bool = False
    """Whether a keyword names the type, or applies only to it."""
    language: Dfa | None = None
    """Texts of a scalar; a string's text is its content, without the quotes and before escaping. None: all texts."""
    members: tuple[Members, ...] = ()
    min_count: int = 0
    max_count: int | None = None
    """Limits of the number of items; None is no limit. Of properties: only "at least 1" and "none" are supported."""
    required: tuple[str, ...] = ()
    implied: frozenset[str] = frozenset()
    """Required names that only a negative subschema requires."""
    demands: tuple[Members, ...] = ()
    """For each entry, at least one key must have a value that meets the entry's goal for this key."""

    def listed_names(self) -> dict[str, None]:
        """Names of the listed and required keys, in order."""
        names = {name: None for part in self.members if not part.is_negative for name in part.listed}
        return names | dict.fromkeys(self.required)


ANYTHING = tuple(Shape(kind) for kind in TYPES)


def merge(first: Shape, second: Shape) -> Shape | None:
    """Intersect two shapes of one type; None if no value has both shapes."""
    is_explicit = first.is_explicit or second.is_explicit
    for shape, other in ((first, second), (second, first)):
        if shape == (EXPLICIT if shape.is_explicit else PLAIN_SHAPES)[shape.kind]:
            return other if other.is_explicit == is_explicit else dataclasses.replace(other, is_explicit=is_explicit)
    language = first.language or second.language
    if first.language is not None and second.language is not None:
        language = intersect(first.language, second.language)
    if language is not None and not language.rows:
        return None
    max_count = min((limit for limit in (first.max_count, second.max_count) if limit is not None), default=None)
    required = tuple(dict.fromkeys((*first.required, *second.required)))
    min_count = max(first.min_count, second.min_count)
    if max_count is not None and max_count < max(min_count, len(required)):
        return None
    plain = {*first.required} - first.implied | {*second.required} - second.implied
    return Shape(
        first.kind,
        is_explicit,
        language,
        tuple(dict.fromkeys((*first.members, *second.members))),
        min_count,
        max_count,
        required,
        (first.implied | second.implied) - plain,
        tuple(dict.fromkeys((*first.demands, *second.demands))),
    )


PLAIN_SHAPES = {shape.kind: shape for shape in ANYTHING}
EXPLICIT = {kind: Shape(kind, True) for kind in TYPES}
SCALARS = {
    "string": languages.length_language(0, None),
    "number": intersect(languages.PLAIN, languages.SHORT_DIGITS),
    "boolean": languages.BOOLEANS,
    "null": languages.texts_language(["null"]),
}
"""Texts of each scalar type. Numbers have no exponents, and at most 15 digits, so that they differ as doubles too."""


def restrict(kind: str, **facts: Any) -> tuple[Shape, ...]:
    """Make a shape for each type: with the `Shape` fields `facts` for `kind` (none if no text is left), else free."""
    return (*(shape for shape in ANYTHING if shape.kind != kind), *make_shapes(kind, **facts))


def make_shapes(kind: str, **facts: Any) -> tuple[Shape, ...]:
    language = facts.get("language")
    return () if language is not None and not language.rows else (Shape(kind, True, **facts),)


class Goals:
    """The alternatives of the goals of a document.

    Args:
        max_length: the largest string length that is counted; a larger `maxLength` is read as this one.
        exact: the exact goals whose loose version this object is; None if it holds exact goals. Loose goals allow too
            many values and leave none out, so they show which branches of `oneOf` exclude each other.
    """

    def __init__(self, document: SchemaDocument, max_length: int, exact: Goals | None = None):
        self.document, self.max_length, self.is_loose = document, max_length, exact is not None
        self.left_out: dict[str, None] = {}
        """Descriptions of the values that were left out, with paths of keywords."""
        self._schemas: dict[int, Any] = {0: False} if exact is None else exact._schemas
        self._literals: dict[Literal, tuple[Shape, ...]] = {}
        self._shapes: dict[Goal, tuple[Shape, ...]] = {}
        self._possible: dict[Goal, bool] = {}
        self._value_schemas: dict[int, dict[str, Any]] = {} if exact is None else exact._value_schemas
        self.loose = Goals(document, languages.MAX_COUNT, self) if exact is None else self

    def goal(self, schema: Any, sign: bool = True) -> Goal:
        """The goal of a subschema (sign True) or of its negation (False), with references resolved."""
        seen = set[int]()
        while isinstance(schema, Mapping) and "$ref" in schema and not CONSTRAINING & (schema.keys() - {"$ref"}):
            self.document.check(schema)
            if id(schema) in seen:
                return NO_VALUE
            seen.add(id(schema))
            schema = self.document.resolve(schema)
        if isinstance(schema, Mapping) and not CONSTRAINING & schema.keys():
            self.document.check(schema)
            schema = True
        if isinstance(schema, bool):
            return OPEN if schema == sign else NO_VALUE
        self._schemas[id(schema)] = schema
        return frozenset({(sign, id(schema))})

    def shapes(self, goal: Goal) -> tuple[Shape, ...]:
        if goal not in self._shapes:
            if len(self._shapes) > MAX_GOALS:
                raise ValueError(f"the schema has more than {MAX_GOALS} parts")
            shapes: Sequence[Shape] = ANYTHING
            for sign, index in sorted(goal, key=lambda literal: not literal[0]):
                shapes = self.merge_pairs(shapes, self.literal(sign, self._schemas[index]))
            candidates = self.make_explicit(choice for shape in shapes for choice in self._choose_keys(shape))
            # leave out types that no keyword names or restricts
            candidates = [shape for shape in candidates if shape.is_explicit or self.is_loose]
            listed = [shape for shape in candidates if self.is_loose or not shape.implied - {*self._names(shape)}]
            self._shapes[goal] = tuple(dict.fromkeys(listed or candidates))
        return self._shapes[goal]

    def _choose_keys(self, shape: Shape) -> list[Shape]:
        """Replace each demand of `shape.demands` by alternatives, one for each listed key that can meet the demand."""
        choices = [dataclasses.replace(shape, demands=())]
        for demand in shape.demands:
            present = [part for name in self._names(shape) for part in self.present(name, demand.goal(name))]
            choices = self.merge_pairs(choices, present)
        return choices

    def _names(self, shape: Shape) -> dict[str, None]:
        return {name: None for part in shape.members if not part.is_negative for name in part.listed}

    def is_possible(self, goal: Goal) -> bool:
        """Whether a goal may have values. If False it has none; if True it may still have none."""
        if goal not in self._possible:
            self._possible[goal] = True  # for recursive goals
            self._possible[goal] = any(map(self.is_possible_shape, self.shapes(goal)))
        return self._possible[goal]

    def is_possible_shape(self, shape: Shape) -> bool:
        if shape.kind == "object":
            return all(self.is_possible(self.key_goal(shape, name)) for name in shape.required)
        if shape.kind == "array" and shape.min_count:
            return all(self.is_possible(self.item_goal(shape, index)) for index in range(min(shape.min_count, 16)))
        return True

    def key_goal(self, shape: Shape, name: str) -> Goal:
        return frozenset().union(*(part.goal(name) for part in shape.members))

    def item_goal(self, shape: Shape, index: int) -> Goal:
        return frozenset().union(*(part.listed.get(index, part.others) for part in shape.members))

    def merge_pairs(self, first: Iterable[Shape], second: Iterable[Shape]) -> list[Shape]:
        others = [*second]
        shapes = dict[Shape, None]()
        for shape in first:
            for other in others:
                if shape.kind == other.kind and (merged := merge(shape, other)) is not None:
                    shapes[merged] = None
            if len(shapes) > MAX_ALTERNATIVES:
                raise ValueError(f"the schema has more than {MAX_ALTERNATIVES} alternatives for one value")
        return [*shapes]

    def literal(self, sign: bool, schema: Any) -> tuple[Shape, ...]:
        """The alternatives of a subschema (sign True) or of its negation (False)."""
        if isinstance(schema, bool):
            return ANYTHING if schema == sign else ()
        key = (sign, id(schema))
        if key not in self._literals:
            self._schemas[id(schema)] = schema
            self.document.check(schema)
            if self.is_loose and not sign:
                return ANYTHING
            # a schema that refers only to itself has no value
            self._literals[key] = ANYTHING if self.is_loose else ()
            self._literals[key] = tuple(self.positive(schema) if sign else self.negative(schema))
        return self._literals[key]

    def positive(self, schema: Mapping[str, Any]) -> list[Shape]:
        shapes, done = [*ANYTHING], set[Rule]()
        for key in schema:
            if (rule := RULES.get(key)) is not None and rule not in done:
                done.add(rule)
                shapes = self.merge_pairs(shapes, rule(self, schema, True))
        return shapes

    def negative(self, schema: Mapping[str, Any]) -> list[Shape]:
        if "$ref" in schema:  # up to draft 7 `$ref` disables the keywords next to it
            return [*self.literal(False, self.document.resolve(schema))]
        rules = dict.fromkeys(RULES[key] for key in schema if key in RULES)
        return [shape for rule in rules for shape in rule(self, schema, False)]

    def leave_out(self, schema: Any, key: str) -> tuple[Shape, ...]:
        """Return no shapes, and record that values which violate this keyword are left out."""
        path = self.document.error(schema, key, "").args[0].removeprefix("schema: ").strip()
        self.left_out[f"values that violate {path}"] = None
        return ()

    def make_explicit(self, shapes: Iterable[Shape]) -> list[Shape]:
        """Make all types of a branch explicit if none of them is."""
        alternatives = [*shapes]
        if self.is_loose or any(shape.is_explicit for shape in alternatives):
            return alternatives
        return [dataclasses.replace(shape, is_explicit=True) for shape in alternatives]

    def type(self, schema: Any, sign: bool) -> Iterable[Shape]:
        kinds = {schema["type"]} if isinstance(schema["type"], str) else {*schema["type"]}
        shapes = [EXPLICIT[kind] for kind in TYPES if (kind in kinds) == sign]
        if "integer" not in kinds or "number" in kinds:
            return shapes
        language = languages.INTEGER if sign else difference(languages.EXACT, languages.INTEGRAL)
        integers = Shape("number", True, None if self.is_loose else language)
        return [*(shape for shape in shapes if shape.kind != "number"), integers]

    def enum(self, schema: Any, sign: bool, key: str) -> Iterable[Shape]:
        values = [schema["const"]] if key == "const" else schema["enum"]
        numbers = [value for value in values if is_number(value)]
        nested = [self._value_schema(schema, value) for value in values if isinstance(value, (Mapping, list))]
        texts = {
            "string": [value for value in values if isinstance(value, str)],
            "number": [text for value in numbers for text in languages.number_texts(value)],
            "boolean": [str(value).lower() for value in values if isinstance(value, bool)],
            "null": ["null"] if None in values else [],
        }
        languages_of = {kind: languages.texts_language(entries) for kind, entries in texts.items() if entries}
        if sign:
            shapes = [Shape(kind, True, language) for kind, language in languages_of.items()]
            if self.is_loose:  # one number has many texts
                shapes = [EXPLICIT["number"] if shape.kind == "number" else shape for shape in shapes]
            return shapes + [shape for value in nested for shape in self.literal(True, value)]
        if numbers:
            languages_of["number"] = to_dfa(either(to_node(languages.equal_to(value)) for value in numbers))
        shapes = self.merge_pairs([EXPLICIT["object"], EXPLICIT["array"]], self.every(nested, False))
        for kind in texts:
            language = languages_of.get(kind)
            shapes += make_shapes(kind, language=language and difference(SCALARS[kind], language))
        return shapes

    def _value_schema(self, schema: Any, value: Any) -> Mapping[str, Any]:
        """Build a schema that only `value`, an object or array in `schema`, matches; cached."""
        key = id(value)
        if key not in self._value_schemas:
            if isinstance(value, Mapping):
                keywords: dict[str, Any] = {"required": [*value], "additionalProperties": False}
                keywords["properties"] = {name: {"const": part} for name, part in value.items()}
            else:
                keywords = {"prefixItems": [{"const": part} for part in value], "items": False, "minItems": len(value)}
            self._value_schemas[key] = keywords | {"type": "object" if isinstance(value, Mapping) else "array"}
        value_schema = self._value_schemas[key]
        self.document.paths.setdefault(id(value_schema), self.document.paths.get(id(schema), ""))
        return value_schema

    def every(self, parts: Iterable[Any], sign: bool) -> list[Shape]:
        """Shapes of the values that all subschemas allow (sign True), or that all exclude (False)."""
        shapes: list[Shape] = [*ANYTHING]
        for part in parts:
            shapes = self.merge_pairs(shapes, self.literal(sign, part))
        return shapes

    def some(self, parts: Iterable[Any], sign: bool) -> list[Shape]:
        """Shapes of the values that at least one subschema allows (sign True), or at least one excludes (False)."""
        branches = [self.literal(sign, part) for part in parts]
        return [shape for branch in branches for shape in (self.make_explicit(branch) if sign else branch)]

    def one_of(self, schema: Any, sign: bool) -> Iterable[Shape]:
        parts = schema["oneOf"]
        if self.is_loose:
            return [shape for part in parts for shape in self.literal(True, part)]
        positive = [self.make_explicit(self.literal(True, part)) for part in parts]
        if not sign:
            pairs = [self.merge_pairs(first, second) for first, second in combinations(positive, 2)]
            return [*self.every(parts, False), *(shape for pair in pairs for shape in pair)]
        alternatives = list[Shape]()
        for i, branch in enumerate(positive):
            shapes = branch
            for j, part in enumerate(parts):
                overlap = self.merge_pairs(branch, self.loose.literal(True, part)) if i != j else []
                if any(map(self.loose.is_possible_shape, overlap)):
                    shapes = self.merge_pairs(shapes, self.literal(False, part))
            alternatives += self.make_explicit(shapes)
        return alternatives

    def condition(self, schema: Any, sign: bool) -> Iterable[Shape]:
        if "if" not in schema:
            return ANYTHING if sign else ()
        met = self.merge_pairs(self.literal(True, schema["if"]), self.literal(sign, schema.get("then", True)))
        unmet = self.merge_pairs(self.literal(False, schema["if"]), self.literal(sign, schema.get("else", True)))
        return [*met, *unmet]

    def scalar(self, schema: Any, sign: bool, kind: str, read: Callable[[Goals, Any], Dfa]) -> Iterable[Shape]:
        """Shapes of a scalar type with the texts that a keyword allows (sign True), or with other texts (False)."""
        language = read(self, schema)
        if sign:
            return restrict(kind, language=language)
        return make_shapes(kind, language=difference(SCALARS[kind], language))

    def limits(self, schema: Any, noun: str) -> tuple[int, int | None]:
        """Values of the keywords min{noun} and max{noun}. Raises ValueError for a minimum above `MAX_COUNT`."""
        low, high = int(schema.get(f"min{noun}", 0)), schema.get(f"max{noun}")
        if low > languages.MAX_COUNT:
            raise self.document.error(schema, f"min{noun}", f"is {low}, and may be at most {languages.MAX_COUNT}")
        return low, None if high is None else int(high)

    def length(self, schema: Any, sign: bool) -> Iterable[Shape]:
        low, high = self.limits(schema, "Length")
        if sign:
            counted = high if high is None or high < low else min(high, max(self.max_length, low))
            return restrict("string", language=languages.length_language(low, counted))
        if high is not None and high >= languages.MAX_COUNT:
            self.leave_out(schema, "maxLength")
            high = None
        return make_shapes("string", language=complement(languages.length_language(low, high)))

    def search(self, schema: Any, key: str, pattern: str) -> Dfa:
        try:
            return ecma_search(pattern)
        except ValueError as error:
            raise self.document.error(schema, key, f"is not supported: {error}") from None

    def format(self, schema: Any, sign: bool) -> Iterable[Shape]:
        language = languages.format_language(schema["format"])
        if language is None:
            self.document.unknown[f"format {schema['format']!r}"] = None
            return ANYTHING if sign else ()
        if not sign:
            return self.leave_out(schema, "format")
        return ANYTHING if self.is_loose else restrict("string", language=language)

    def bounds(self, schema: Any) -> Dfa:
        language = languages.PLAIN
        for side, make in (("Minimum", languages.at_least), ("Maximum", languages.at_most)):
            bound, strict = schema.get(side.lower()), schema.get(f"exclusive{side}")
            is_flag = isinstance(strict, bool)  # in draft 4
            for value, is_strict in ((bound, strict is True), (None if is_flag else strict, True)):
                if value is not None and not abs(value) < 1e300:
                    raise self.document.error(schema, "minimum", "and the other bounds must be below 1e300")
                if value is not None:
                    language = intersect(language, make(value, is_strict))
        return language

    def multiple(self, schema: Any) -> Dfa:
        divisor = schema["multipleOf"]
        if divisor != int(divisor) or divisor > languages.MAX_COUNT:
            why = f"is {divisor}, and must be a whole number of at most {languages.MAX_COUNT}"
            raise self.document.error(schema, "multipleOf", why)
        return languages.multiples(int(divisor))

    def properties(self, schema: Any, sign: bool) -> Iterable[Shape]:
        listed = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        languages_of = {name: self.search(schema, f"patternProperties.{name}", name) for name in patterns}
        others = schema.get("additionalProperties", True)
        if sign:
            members = Members(
                {name: self.goal(part) for name, part in listed.items()},
                tuple((languages_of[name], self.goal(part)) for name, part in patterns.items()),
                self.goal(others),
                "additionalProperties" in schema,
            )
            return restrict("object", members=(members,))
        shapes = [shape for name, part in listed.items() for shape in self.present(name, self.goal(part, False))]
        known = tuple((language, NO_VALUE) for language in languages_of.values())
        demand = Members(dict.fromkeys(listed, NO_VALUE), known, self.goal(others, False))
        keys = [("additionalProperties", demand)] if demand.others != NO_VALUE else []
        for name, part in patterns.items():
            if (goal := self.goal(part, False)) != NO_VALUE:
                keys.append(("patternProperties", Members({}, ((languages_of[name], goal),), NO_VALUE)))
        for key, demand in keys:
            self.leave_out(schema, key)
            shapes += make_shapes("object", demands=(demand,), min_count=1)
        return shapes

    def present(self, name: str, goal: Goal = OPEN) -> tuple[Shape, ...]:
        """Shapes of objects with the key `name`, whose value meets `goal`."""
        if goal == NO_VALUE:
            return ()
        members = (Members({name: goal}, is_negative=True),)
        return make_shapes("object", members=members, required=(name,), implied=frozenset({name}), min_count=1)

    def required(self, schema: Any, sign: bool) -> Iterable[Shape]:
        names = tuple(dict.fromkeys(schema["required"]))
        if sign:
            return restrict("object", required=names) if names else ANYTHING
        absent = [Members({name: NO_VALUE}, is_negative=True) for name in names]
        return [shape for part in absent for shape in make_shapes("object", members=(part,))]

    def count(self, schema: Any, sign: bool, kind: str, noun: str) -> Iterable[Shape]:
        low, high = self.limits(schema, noun)
        if sign and high is not None and high < low:
            return [shape for shape in ANYTHING if shape.kind != kind]
        if sign:
            return restrict(kind, min_count=low, max_count=high)
        shapes = [*make_shapes(kind, max_count=low - 1)] if low else []
        if high is not None and high < languages.MAX_COUNT:
            shapes += make_shapes(kind, min_count=high + 1)
        return shapes

    def items(self, schema: Any, sign: bool) -> Iterable[Shape]:
        items = schema.get("items", True)
        if isinstance(items, list):
            front, others = items, schema.get("additionalItems", True)
        else:
            front, others = schema.get("prefixItems", []), items
        if sign:
            listed = {index: self.goal(part) for index, part in enumerate(front)}
            return restrict("array", members=(Members(listed, others=self.goal(others)),))
        return self.leave_out(schema, "items")


Rule = Callable[[Goals, Any, bool], Iterable[Shape]]
BOUNDS: Rule = partial(Goals.scalar, kind="number", read=Goals.bounds)
RULES: dict[str, Rule] = {
    "$ref": lambda goals, schema, sign: goals.literal(sign, goals.document.resolve(schema)),
    "type": Goals.type,
    "enum": partial(Goals.enum, key="enum"),
    "const": partial(Goals.enum, key="const"),
    "allOf": lambda goals, schema, sign: (goals.every if sign else goals.some)(schema["allOf"], sign),
    "anyOf": lambda goals, schema, sign: (goals.some if sign else goals.every)(schema["anyOf"], sign),
    "oneOf": Goals.one_of,
    "not": lambda goals, schema, sign: goals.literal(not sign, schema["not"]),
    **dict.fromkeys(("if", "then", "else"), Goals.condition),
    **dict.fromkeys(("minLength", "maxLength"), Goals.length),
    "pattern": partial(
        Goals.scalar, kind="string", read=lambda goals, schema: goals.search(schema, "pattern", schema["pattern"])
    ),
    "format": Goals.format,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), BOUNDS),
    "multipleOf": partial(Goals.scalar, kind="number", read=Goals.multiple),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties"), Goals.properties),
    "required": Goals.required,
    **dict.fromkeys(("minProperties", "maxProperties"), partial(Goals.count, kind="object", noun="Properties")),
    **dict.fromkeys(("items", "prefixItems", "additionalItems"), Goals.items),
    **dict.fromkeys(("minItems", "maxItems"), partial(Goals.count, kind="array", noun="Items")),
}
"""The rule of each keyword; a rule reads all of its keywords together."""

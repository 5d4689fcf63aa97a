"""Languages of JSON's strings and numbers: lengths, formats, bounds and multiples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache

from paradec.constraints.dfa import Dfa, Row, difference, explore, intersect, minimize, to_dfa, to_node
from paradec.constraints.expressions import ANY, either, sequence, text
from paradec.constraints.regex import parse

MAX_COUNT = 2**12
"""Maximum length that an automaton counts, and maximum divisor of `multipleOf`."""
INTEGER_NODE = parse("-?(?:0|[1-9][0-9]*)")
NUMBER = sequence((INTEGER_NODE, parse(r"(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?")))
INTEGER = to_dfa(INTEGER_NODE)
PLAIN = to_dfa(parse(r"(?:0|[1-9][0-9]*)(?:\.[0-9]+)?|-(?:(?:0\.[0-9]*[1-9]|[1-9][0-9]*(?:\.[0-9]+)?)[0-9]*)"))
"""Numbers without exponents and without negative zeros. Answers have this form for numbers with bounds or divisors, and
for numbers that remain after exclusions."""
INTEGRAL = to_dfa(parse(r"-?(?:0|[1-9][0-9]*)(?:\.0+)?"))
BOOLEANS = to_dfa(parse("true|false"))
SHORT_DIGITS = to_dfa(parse(r"-?(?:[0-9]\.?){1,15}"))
"""Numbers of at most 15 digits: two different numbers of this form are different doubles, too."""
EXACT = intersect(PLAIN, to_dfa(either((INTEGER_NODE, to_node(SHORT_DIGITS)))))
"""Integers, and numbers of at most 15 digits. Validators that read numbers as doubles agree on these."""

TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
DATE = (
    r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
)
BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
HOST = "[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
HEX, GROUP = "[0-9a-fA-F]", "[0-9a-fA-F]{1,4}"
IPV4 = rf"{BYTE}(?:\.{BYTE}){{3}}"
IPV6 = "|".join([
    f"(?:{GROUP}:){{7}}{GROUP}", f"(?:{GROUP}:){{6}}{IPV4}", "::",
    *(f"(?:{GROUP}(?::{GROUP}){{0,{before - 1}}})?::{GROUP}(?::{GROUP}){{0,{6 - before}}}" for before in range(1, 7)),
    f"::{GROUP}(?::{GROUP}){{0,6}}", f"(?:{GROUP}(?::{GROUP}){{0,6}})::", f"::(?:{GROUP}:){{0,5}}{IPV4}",
])  # fmt: skip


def _uri(extra: str) -> dict[str, str]:
    """Patterns of URIs and of relative references. extra: allowed characters beyond ASCII."""
    part = rf"(?:[A-Za-z0-9._~!$&'()*+,;=@{extra}-]|%[0-9A-Fa-f]{{2}})"
    path, query = f"(?:{part}|[:/])*", rf"(?:\?(?:{part}|[:/?])*)?(?:#(?:{part}|[:/?])*)?"
    host = rf"(?:[A-Za-z0-9._~{extra}-]|%[0-9A-Fa-f]{{2}})*"
    authority = f"//(?:[A-Za-z0-9._~-]+@)?{host}(?::[0-9]{{0,5}})?"
    tail = rf"(?:{authority}(?:/{path})?|/(?:(?:{part}|:){path})?)"
    return {
        "uri": f"[A-Za-z][A-Za-z0-9+.-]*:(?:{tail}|(?:{part}|:){path}){query}",
        "reference": f"(?:{tail}|{part}+(?:/{path})?)?{query}",
    }


BEYOND_ASCII = "\xa0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
FORMATS = {
    "time": TIME,
    "uuid": f"{HEX}{{8}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{4}}-{HEX}{{12}}",
    "ipv4": IPV4,
    "ipv6": IPV6,
    "email": rf"[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{HOST}(?:\.{HOST})+",
    "hostname": rf"{HOST}(?:\.{HOST})*",
    "uri": _uri("")["uri"],
    "uri-reference": "|".join(_uri("").values()),
    "iri": _uri(BEYOND_ASCII)["uri"],
    "iri-reference": "|".join(_uri(BEYOND_ASCII).values()),
    "json-pointer": "(?:/(?:[^/~]|~[01])*)*",
    "relative-json-pointer": "(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~]|~[01])*)*)",
    "duration": (
        rf"P(?:[0-9]+W|{DURATION_TIME}|(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
        rf"(?:{DURATION_TIME})?)"
    ),
}
"""Patterns of the formats. Every text of a pattern is valid; some valid texts of a format do not match its pattern."""


@lru_cache(maxsize=64)
def format_language(name: str) -> Dfa | None:
    """Texts of a format; None for an unknown format."""
    if name in ("date", "date-time"):
        # Python's datetime has no year 0000
        date = difference(to_dfa(parse(DATE)), to_dfa(parse("0000.*")))
        if name == "date":
            return date
        return to_dfa(sequence((to_node(date), parse("T" + TIME))))
    if name == "hostname":  # at most 8 labels of 30 characters: DNS allows 253 in all and 63 per label
        return intersect(to_dfa(parse(r"(?:[^.]{1,30}\.){0,7}[^.]{1,30}")), to_dfa(parse(FORMATS[name])))
    return to_dfa(parse(FORMATS[name])) if name in FORMATS else None


@lru_cache(maxsize=1024)
def length_language(low: int, high: int | None) -> Dfa:
    """Texts of `low` to `high` characters (None: any number)."""
    if high is not None and high < low:
        return Dfa([], [])
    rows = list[Row](tuple((a, b, state + 1) for a, b in ANY) for state in range(low if high is None else high))
    rows.append(tuple((a, b, len(rows)) for a, b in ANY) if high is None else ())
    return Dfa(rows, [state >= low for state in range(len(rows))])


def texts_language(texts: list[str]) -> Dfa:
    return to_dfa(either(map(text, texts)))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def _magnitudes(value: Decimal, *orders: int) -> Dfa:
    """Texts of numbers without sign that are below (order -1), equal to (0) or above (1) the magnitude of `value`."""
    integer, _, fraction = format(abs(value), "f").partition(".")
    digits = {False: integer.lstrip("0") or "0", True: fraction.rstrip("0")}

    def after_whole(place: int, order: int) -> int:
        return order if place == len(digits[False]) else 1 if place > len(digits[False]) else -1

    def moves(state: tuple[bool, int, int]) -> Iterator[tuple[int, int, tuple[bool, int, int]]]:
        """Read a digit or the point. State: whether after the point, digits read on this side, the order so far."""
        is_fraction, place, order = state
        if not is_fraction and place:
            yield 46, 46, (True, 0, after_whole(place, order))
        bound, following = int(digits[is_fraction][place : place + 1] or 0), min(place, len(digits[is_fraction])) + 1
        for digit in range(10):
            yield 48 + digit, 48 + digit, (is_fraction, following, order or (digit > bound) - (digit < bound))

    def is_end(state: tuple[bool, int, int]) -> bool:
        is_fraction, place, order = state
        order = order if is_fraction else after_whole(place, order)
        return (order or -bool(digits[True][place if is_fraction else 0 :])) in orders

    return minimize(*explore((False, 0, 0), moves, is_end))


@lru_cache(maxsize=1024)
def _below(value: float | int, or_equal: bool) -> Dfa:
    number, equal = Decimal(str(value)), (0,) * or_equal
    if number < 0:
        return intersect(PLAIN, to_dfa(sequence((text("-"), to_node(_magnitudes(number, 1, *equal))))))
    return intersect(PLAIN, to_dfa(either((parse("-[0-9.]+"), to_node(_magnitudes(number, -1, *equal))))))


def at_most(value: float | int, is_strict: bool = False) -> Dfa:
    """Texts of `PLAIN` for numbers <= `value`; if `is_strict`, < `value`, of at most 15 digits unless `value` is 0."""
    language = _below(value, not is_strict)
    return intersect(language, SHORT_DIGITS) if is_strict and value else language


def at_least(value: float | int, is_strict: bool = False) -> Dfa:
    """Texts of `PLAIN` for numbers >= `value`; if `is_strict`, > `value`, of at most 15 digits unless `value` is 0."""
    language = difference(PLAIN, _below(value, is_strict))
    return intersect(language, SHORT_DIGITS) if is_strict and value else language


@lru_cache(maxsize=1024)
def equal_to(value: float | int) -> Dfa:
    """All texts of `PLAIN` for one number."""
    return difference(_below(value, True), _below(value, False))


def number_texts(value: float | int) -> list[str]:
    """Write a number of a schema as JSON; a float with an integer value also as an integer."""
    integers = [str(int(value))] if isinstance(value, float) and value == int(value) and abs(value) < 1e15 else []
    return [json.dumps(value), *integers]


@lru_cache(maxsize=256)
def multiples(divisor: int) -> Dfa:
    """Texts of `EXACT` with multiples of `divisor`."""

    def moves(remainder: int) -> Iterator[tuple[int, int, int]]:
        for digit in range(10):
            yield 48 + digit, 48 + digit, (10 * remainder + digit) % divisor

    digits = Dfa(*explore(0, moves, lambda remainder: not remainder))
    return intersect(EXACT, to_dfa(sequence((parse("-?"), to_node(digits), parse(r"(?:\.0+)?")))))

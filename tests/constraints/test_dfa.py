"""Deterministic finite automata: sizes, operations, ECMA patterns, lengths, formats and numbers."""

from __future__ import annotations

import itertools
import re
from decimal import Decimal
from ipaddress import AddressValueError, IPv6Address

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paradec.constraints import languages
from paradec.constraints.dfa import Dfa, complement, difference, intersect, to_dfa, to_node
from paradec.constraints.languages import EXACT, INTEGRAL, PLAIN, at_least, at_most, equal_to, multiples
from paradec.constraints.regex import ecma_search, parse


def matches(language: Dfa, text: str) -> bool:
    return language.accepts(map(ord, text))


def all_texts(letters: str, max_length: int) -> list[str]:
    return ["".join(text) for size in range(max_length + 1) for text in itertools.product(letters, repeat=size)]


def count_classes(language: Dfa, letters: str) -> int:
    """Count the states that texts of these letters distinguish (Moore's algorithm)."""
    size = len(language.rows)
    step = np.full((size + 1, len(letters)), size)
    for state, row in enumerate(language.rows):
        for low, high, target in row:
            step[state, [index for index, letter in enumerate(letters) if low <= ord(letter) <= high]] = target
    label = np.array([*language.accept, False], np.int64)
    while True:
        rows = np.column_stack((label, label[step]))
        finer = np.unique(rows, axis=0, return_inverse=True)[1].ravel()
        if finer.max() == label.max():
            return len({*finer[:size].tolist()})
        label = finer


PART = st.sampled_from(["a", "b", "(a|bb)", "a*", "(ab)*", "[ab]", "b?", "(a|ab){1,2}", "(a*b){0,2}", ".{0,2}"])
PATTERNS = st.lists(PART, min_size=1, max_size=4).map("".join)


@settings(deadline=None, max_examples=60)
@given(first=PATTERNS, second=PATTERNS)
def test_operations_match_sets_and_automata_are_minimal(first: str, second: str) -> None:
    a, b = to_dfa(parse(first)), to_dfa(parse(second))
    intersection, without_b, not_a = intersect(a, b), difference(a, b), complement(a)
    for text in all_texts("abc", 5):
        in_a, in_b = bool(re.fullmatch(first, text)), bool(re.fullmatch(second, text))
        assert (matches(a, text), matches(b, text)) == (in_a, in_b)
        assert (matches(intersection, text), matches(without_b, text), matches(not_a, text)) == (
            in_a and in_b, in_a and not in_b, not in_a
        )  # fmt: skip
    for language in (a, intersection, without_b, not_a, to_dfa(to_node(a))):
        assert not language.rows or count_classes(language, "abc\n") == len(language.rows)


def test_automata_of_length_ranges_and_alternatives_are_small() -> None:
    assert len(to_dfa(parse(".{0,300}")).rows) == 301 == len(languages.length_language(0, 300).rows)
    assert len(to_dfa(parse("(x{0,30}y{0,30})z")).rows) < 70
    over_bytes = to_dfa(parse("é{0,40}"), over_bytes=True)
    assert len(over_bytes.rows) == 81 and over_bytes.accepts("éé".encode())
    # the end of the pattern, which several prefixes reach, is stored once
    shared = to_dfa(parse("(a|b|cc|dd)(x{20}|y{20})"))
    assert len(shared.rows) == 43


ECMA = [
    r"^a|b$", r"(^a|b$)", "^$|(^a+$)", "a^b", "(^|,)a($|,)", "[ab]{2}", "a{1,2}?b",
    r"^[^a,]*$", r"(?:a|b)\.?$", r"(?<name>a)b", "$a", "^(a$|^b)",
]  # fmt: skip


@pytest.mark.parametrize("pattern", ECMA)
def test_ecma_patterns_match_anywhere(pattern: str) -> None:
    language, python = ecma_search(pattern), re.compile(pattern.replace("(?<name>", "(?P<name>"))
    for text in all_texts("ab,.", 4):
        assert matches(language, text) == bool(python.search(text)), text


@pytest.mark.parametrize(
    ("pattern", "accepted", "rejected"),
    [
        (r"^\S$", ["a", "é"], ["\xa0", "\u3000", "\ufeff", "\u2028", " "]),
        (r"^\s$", ["\xa0", "\u3000", "\ufeff", "\t"], ["a", "\x1c", "\x85"]),
        (r"^\d$", ["7"], ["\u0663"]),
        (r"^\W$", ["é", "-"], ["a", "_"]),
        ("^.$", ["a", "\x85"], ["\n", "\r", "\u2028", "\u2029"]),
        (r"^\Z\a$", ["Za"], [""]),
        ("^x{,2}$", ["x{,2}"], ["x", "xx"]),
        ("^[]$|^[^]$", ["a", "\n"], [""]),
        (r"^[\w-.]$", ["a", "-", "."], ["/"]),
        (r"^\u{1F600}\x41\cJ\0$", ["\U0001f600A\n\0"], ["\U0001f600A"]),
    ],
)
def test_ecma_patterns_that_python_reads_differently(pattern: str, accepted: list[str], rejected: list[str]) -> None:
    language = ecma_search(pattern)
    assert all(matches(language, text) for text in accepted) and not any(matches(language, text) for text in rejected)


REFUSED = ["(", "a)", "[a", "*a", "\\", "[b-a]", "(?<=a)b", "a(?=b)", "^(?!.*,)", r"\ud83d\ude00", r"\bx", r"(a)\1"]


@pytest.mark.parametrize("pattern", [*REFUSED, r"\p{L}", "(?i)a", "{2}", "a**"])
def test_unsupported_ecma_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"regex=.* at \d+ is not supported"):
        ecma_search(pattern)


BOUNDS = [0, 1, -1, 12, -100, 0.5, -12.25, 99.99, 1e-7, 123456.789, 105, 1e20]
INTEGER_PARTS, FRACTIONS = ["0", "1", "5", "9", "10", "12", "13", "99", "100", "105", "123456", "1" + "0" * 20], [
    "", ".0", ".5", ".25", ".250", ".251", ".24999", ".99", ".990", ".0000001", ".789", ".78900001"
]  # fmt: skip


def test_numeric_bounds_match_decimal() -> None:
    """Compare a grid of numbers with every bound. Exclusive bounds except 0 reject numbers of more than 15 digits."""
    for text in map("".join, itertools.product(("", "-"), INTEGER_PARTS, FRACTIONS)):
        number = Decimal(text)
        assert matches(PLAIN, text) == (number != 0 or text[0] != "-")
        if text[0] == "-" and not number:
            continue
        assert matches(INTEGRAL, text) == (number == int(number))
        is_short = sum(character.isdigit() for character in text) <= 15
        for value in BOUNDS:
            bound = Decimal(str(value))
            assert matches(at_most(value), text) == (number <= bound)
            assert matches(at_least(value), text) == (number >= bound)
            assert matches(equal_to(value), text) == (number == bound)
            if is_short or not value:
                assert matches(at_most(value, True), text) == (number < bound)
                assert matches(at_least(value, True), text) == (number > bound)
            else:
                assert not matches(at_most(value, True), text) and not matches(at_least(value, True), text)
        for divisor in (1, 7, 25, 1000):
            expected = number % Decimal(str(divisor)) == 0 and matches(EXACT, text)
            assert matches(multiples(divisor), text) == expected  # type: ignore[arg-type]


def test_formats_accept_valid_texts_only() -> None:
    cases = {
        "date": (["2024-02-29", "2000-02-29", "9999-12-31"], ["2023-02-29", "1900-02-29", "0000-01-01", "2024-13-01"]),
        "date-time": (["2024-02-29T00:00:00Z", "1999-01-01T12:00:00.5+01:00"], ["0000-01-01T00:00:00Z", "2024-01-01"]),
        "ipv6": (["::", "::1", "1::8", "fe80::1", "1:2:3:4:5:6:7:8", "::ffff:1.2.3.4"], ["1:2", "::1::", "12345::"]),
        "uri": (["http://a.b/c?d#e", "urn:isbn:1", "mailto:a@b.c", "file:///x"], ["a b", "//x", "", "x", "http://a b"]),
        "uri-reference": (["/a/b", "a?b", "#c", "../d"], ["a b", "\\x"]),
        "hostname": (["a-b.c", "x"], ["-a", "a-", "a..b", "", "xn--x", "a" * 64]),
        "duration": (["P1Y", "PT1H", "P1W", "P1DT2S"], ["P", "PT", "1Y", "P1"]),
        "email": (["a.b@c.de"], ["a@b", "@", "a"]),
        "json-pointer": (["", "/a~0/b"], ["a", "/~2"]),
    }
    for name, (accepted, rejected) in cases.items():
        language = languages.format_language(name)
        assert language is not None and all(matches(language, text) for text in accepted), name
        assert not any(matches(language, text) for text in rejected), name
    parts, language = ["", "0", "1", "ab", "ffff"], languages.format_language("ipv6")
    draw = np.random.default_rng(0)
    for _ in range(1500):
        text = ":".join(draw.choice(parts, int(draw.integers(2, 10))).tolist())
        try:
            IPv6Address(text)
        except AddressValueError:
            assert not matches(language, text), text  # type: ignore[arg-type]
        else:
            assert matches(language, text), text  # type: ignore[arg-type]

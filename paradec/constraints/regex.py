"""Expressions of `re` patterns; non-regular features and inner anchors are rejected."""

from __future__ import annotations

import re
from dataclasses import dataclass

from paradec.constraints.expressions import (
    ANY,
    EMPTY,
    Node,
    Ranges,
    characters,
    either,
    merged,
    repeated,
    sequence,
    text,
    without,
)
from paradec.core.checks import shown

DIGITS: Ranges = ((48, 57),)
LETTERS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACES: Ranges = ((9, 13), (32, 32))
SETS = {"d": DIGITS, "w": LETTERS, "s": SPACES} | {
    name: without(ANY, inner) for name, inner in {"D": DIGITS, "W": LETTERS, "S": SPACES}.items()
}
"""As with `re.ASCII`."""
LINE: Ranges = without(ANY, ((10, 10),))
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "a": 7}
COUNT = re.compile(r"\{(?:(\d+)|(\d*),(\d*))\}")
REFUSED_GROUPS = {
    "=": "lookahead",
    "!": "negative lookahead",
    "<=": "lookbehind",
    "<!": "negative lookbehind",
    "P=": "a backreference",
    ">": "an atomic group",
    "(": "a conditional",
}


def parse(pattern: str) -> Node:
    """Parse the language of `re.fullmatch(pattern, text, re.ASCII)`.

    Raises ValueError, with the position, for a malformed or non-regular pattern.
    """
    return either(branch.node for branch in branches(pattern))


@dataclass
class Branch:
    """An alternative of a pattern. begins, ends: whether it is anchored there."""

    node: Node = EMPTY
    begins: bool = False
    ends: bool = False


def branches(pattern: str) -> list[Branch]:
    """Parse the alternatives of a pattern. Raises as `parse`."""
    if not isinstance(pattern, str):
        raise TypeError(f"regex={shown(pattern)} must be a text")
    try:
        re.compile(pattern, re.ASCII)
        return _Reader(pattern).pattern()
    except re.error as error:
        raise ValueError(f"regex={shown(pattern)} is no regular expression: {error}") from None
    except (RecursionError, OverflowError):
        raise ValueError(f"regex={shown(pattern)} is nested too deeply, or repeats too often") from None


@dataclass
class _Reader:
    """Recursive-descent parser of a pattern that `re` accepts."""

    pattern_text: str
    at: int = 0
    depth: int = 0

    def refuse(self, feature: str, position: int) -> ValueError:
        return ValueError(f"regex={shown(self.pattern_text)}: {feature} at {position} is not supported")

    def next_is(self, text: str) -> bool:
        return self.pattern_text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        if not self.next_is(text):
            return False
        self.at += len(text)
        return True

    def pattern(self) -> list[Branch]:
        alternatives = [self.branch()]
        while self.take("|"):
            alternatives.append(self.branch())
        return alternatives

    def branch(self) -> Branch:
        alternative, parts = Branch(), list[Node]()
        while self.at < len(self.pattern_text) and not self.next_is("|") and not self.next_is(")"):
            start = self.at
            if self.take("^") or self.take("\\A"):
                if self.depth or parts:
                    raise self.refuse("an anchor inside a pattern", start)
                alternative.begins = True
            elif self.take("$") or self.take("\\Z"):
                if self.depth or not (self.at == len(self.pattern_text) or self.next_is("|")):
                    raise self.refuse("an anchor inside a pattern", start)
                alternative.ends = True
            else:
                parts.append(self.repeats(self.single()))
        alternative.node = sequence(parts)
        return alternative

    def single(self) -> Node:
        if self.take("("):
            return self.group()
        if self.take("["):
            return characters(self.set_of_characters())
        if self.take("."):
            return characters(LINE)
        if self.take("\\"):
            return characters(self.escape(inside=False))
        self.at += 1
        return text(self.pattern_text[self.at - 1])

    def group(self) -> Node:
        start = self.at - 1
        if self.take("?"):
            for sign, feature in sorted(REFUSED_GROUPS.items(), key=lambda entry: -len(entry[0])):
                if self.next_is(sign):
                    raise self.refuse(feature, start)
            if self.take("#"):
                self.at = self.pattern_text.index(")", self.at) + 1
                return EMPTY
            if self.take("P<"):
                self.at = self.pattern_text.index(">", self.at) + 1
            elif not self.take(":"):
                raise self.refuse("an inline flag", start)
        self.depth += 1
        node = either(branch.node for branch in self.pattern())
        self.depth -= 1
        self.at += 1
        return node

    def repeats(self, node: Node) -> Node:
        """Apply the quantifier after a part, if any."""
        start = self.at
        counted = COUNT.match(self.pattern_text, start)
        low: int
        high: int | None
        if self.take("*"):
            low, high = 0, None
        elif self.take("+"):
            low, high = 1, None
        elif self.take("?"):
            low, high = 0, 1
        elif counted:
            exact, min_count, max_count = counted.groups()
            self.at = counted.end()
            low = int(exact or min_count or 0)
            high = low if exact else int(max_count) if max_count else None
        else:
            return node
        if self.take("+"):
            raise self.refuse("a possessive repetition", start)
        self.take("?")  # lazy: the language is the same
        return repeated(node, low, high)

    def escape(self, inside: bool) -> Ranges:
        """Characters of an escape, after its backslash."""
        start, sign = self.at - 1, self.pattern_text[self.at]
        self.at += 1
        if sign in SETS:
            return SETS[sign]
        if sign in "bB" and not inside:
            raise self.refuse("a word boundary", start)
        if sign.isdigit() and not inside and sign != "0":
            octal = re.compile(r"[0-3][0-7]{2}").match(self.pattern_text, start + 1)
            if octal is None:
                raise self.refuse("a backreference", start)
        if sign in "01234567":
            octal = re.compile(r"0[0-7]{0,2}|[0-7]{1,3}").match(self.pattern_text, start + 1)
            assert octal is not None
            self.at = octal.end()
            return self.one(int(octal.group(), 8))
        for letter, digits in (("x", 2), ("u", 4), ("U", 8)):
            if sign == letter:
                self.at += digits
                return self.one(int(self.pattern_text[self.at - digits : self.at], 16))
        if sign == "N":
            raise self.refuse("a named character", start)
        return self.one(8 if sign == "b" else CONTROLS.get(sign, ord(sign)))

    def one(self, code: int) -> Ranges:
        return ((code, code),)

    def set_of_characters(self) -> Ranges:
        """Characters of a set, after its bracket."""
        negated, ranges, first = self.take("^"), list[tuple[int, int]](), True
        while first or not self.next_is("]"):
            first = False
            member = self.member()
            if self.next_is("-") and not self.next_is("-]") and len(member) == 1 and member[0][0] == member[0][1]:
                self.at += 1
                member = ((member[0][0], self.member()[0][1]),)
            ranges += member
        self.at += 1
        return without(ANY, merged(ranges)) if negated else merged(ranges)

    def member(self) -> Ranges:
        if self.take("\\"):
            return self.escape(inside=True)
        self.at += 1
        return self.one(ord(self.pattern_text[self.at - 1]))

"""Languages of patterns: Python's `re`, and ECMA 262 for JSON schemas; what is not regular is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from paradec.constraints import expressions
from paradec.constraints.dfa import Dfa, difference, intersect, to_dfa, to_node
from paradec.constraints.expressions import ANY, EMPTY, Characters, Node, Ranges, either, merged, repeated, sequence
from paradec.core.checks import shown

DIGITS: Ranges = ((48, 57),)
LETTERS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACES: Ranges = ((9, 13), (32, 32))
SPACES_BEYOND_ASCII = (
    *((0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F)),
    *((0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
"""White space of ECMA 262, which says "digit" and "word character" of ASCII alone, as `re.ASCII` does."""
LINE_ENDS = {False: ((10, 10),), True: ((10, 10), (13, 13), (0x2028, 0x2029))}
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
COUNT = re.compile(r"\{(?:(\d+)|(\d*),(\d*))\}")
PYTHON_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
ECMA_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
LOW_SURROGATE = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
OCTAL, THREE_OCTALS = re.compile("0[0-7]{0,2}|[0-7]{1,3}"), re.compile("[0-3][0-7]{2}")
REFUSED_GROUPS = {
    "<=": "lookbehind",
    "<!": "negative lookbehind",
    "P=": "a backreference",
    "=": "lookahead",
    "!": "negative lookahead",
    ">": "an atomic group",
    "(": "a conditional",
}
BEGIN, END = expressions.LAST_CHARACTER + 1, expressions.LAST_CHARACTER + 2
"""Signs of a text's two ends, for anchors inside a pattern."""


def parse(pattern: str) -> Node:
    """Parse the language of `re.fullmatch(pattern, text, re.ASCII)`.

    Raises ValueError, with the position, for a malformed or non-regular pattern.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"regex={shown(pattern)} must be a text")
    try:
        re.compile(pattern, re.ASCII)
        return either(branch.node for branch in _Reader(pattern).pattern())
    except re.error as error:
        raise ValueError(f"regex={shown(pattern)} is no regular expression: {error}") from None
    except (RecursionError, OverflowError):
        raise ValueError(f"regex={shown(pattern)} is nested too deeply, or repeats too often") from None


@lru_cache(maxsize=512)
def ecma_search(pattern: str) -> Dfa:
    """Texts in which an ECMA 262 pattern matches somewhere.

    Pattern syntax without the flag "u" (annex B). Raises ValueError, with the position, for a malformed or non-regular
    pattern.
    """
    try:
        reader = _Reader(pattern, is_ecma=True)
        branches = reader.pattern()
        if reader.position < len(pattern):
            raise reader.refuse("an unmatched bracket", reader.position)
        return _search(branches)
    except RecursionError:
        raise ValueError(f"regex={shown(pattern)} is nested too deeply") from None


@dataclass
class Branch:
    """An alternative of a pattern. begins, ends: whether it is anchored there."""

    node: Node = EMPTY
    begins: bool = False
    ends: bool = False
    conditions: list[tuple[bool, list[Branch]]] = field(default_factory=list)
    """Lookaheads at the beginning: whether they are negated, and their alternatives."""


def _search(branches: Iterable[Branch], begins: bool = False) -> Dfa:
    """Texts in which one of several branches matches; `begins`: at the beginning."""
    languages = []
    for branch in branches:
        before = Characters(((BEGIN, BEGIN),) if branch.begins or begins else (*ANY, (BEGIN, BEGIN)))
        after = Characters(((END, END),) if branch.ends else (*ANY, (END, END)))
        language = to_dfa(sequence((repeated(before), branch.node, repeated(after))))
        # signs of the ends are kept outside of the text, then erased
        language = to_dfa(to_node(intersect(language, ENDS_OUTSIDE), _erase_ends))
        for is_negated, alternatives in branch.conditions:
            language = (difference if is_negated else intersect)(language, _search(alternatives, begins=True))
        languages.append(language)
    return languages[0] if len(languages) == 1 else to_dfa(either(to_node(language) for language in languages))


def _erase_ends(ranges: Ranges) -> Node:
    plain = expressions.without(ranges, ((BEGIN, END),))
    return either((expressions.characters(plain), *([EMPTY] if plain != ranges else [])))


ENDS_OUTSIDE = to_dfa(sequence(repeated(Characters(part)) for part in (((BEGIN, BEGIN),), ANY, ((END, END),))))


@dataclass
class _Reader:
    """Recursive-descent parser of a pattern that `re` accepts, or of ECMA 262."""

    pattern_text: str
    is_ecma: bool = False
    position: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        spaces = merged((*SPACES, *SPACES_BEYOND_ASCII)) if self.is_ecma else SPACES
        self.sets = {"d": DIGITS, "w": LETTERS, "s": spaces}
        self.sets |= {name.upper(): expressions.without(ANY, inner) for name, inner in self.sets.items()}

    def refuse(self, feature: str, position: int) -> ValueError:
        return ValueError(f"regex={shown(self.pattern_text)}: {feature} at {position} is not supported")

    def next_is(self, text: str) -> bool:
        return self.pattern_text.startswith(text, self.position)

    def take(self, text: str) -> bool:
        if not self.next_is(text):
            return False
        self.position += len(text)
        return True

    def take_sign(self) -> str:
        """The next character. Raises ValueError at the end."""
        if self.position >= len(self.pattern_text):
            raise self.refuse("an end without its closing part", self.position)
        self.position += 1
        return self.pattern_text[self.position - 1]

    def pattern(self) -> list[Branch]:
        alternatives = [self.branch()]
        while self.take("|"):
            alternatives.append(self.branch())
        return alternatives

    def branch(self) -> Branch:
        alternative, parts = Branch(), list[Node]()
        while self.position < len(self.pattern_text) and not self.next_is("|") and not self.next_is(")"):
            start = self.position
            begins = self.take("^") or not self.is_ecma and self.take("\\A")
            if begins or self.take("$") or not self.is_ecma and self.take("\\Z"):
                at_end = self.position == len(self.pattern_text) or self.next_is("|")
                if not self.depth and (not parts if begins else at_end):
                    alternative.begins, alternative.ends = alternative.begins or begins, not begins
                elif not self.is_ecma:
                    raise self.refuse("an anchor inside a pattern", start)
                else:
                    parts.append(expressions.character(BEGIN if begins else END))
            elif self.is_ecma and alternative.begins and not parts and (self.take("(?=") or self.take("(?!")):
                is_negated = self.pattern_text[start + 2] == "!"
                alternative.conditions.append((is_negated, self.inner_alternatives()))
            else:
                parts.append(self.repeats(self.single()))
        alternative.node = sequence(parts)
        return alternative

    def inner_alternatives(self) -> list[Branch]:
        self.depth += 1
        alternatives = self.pattern()
        self.depth -= 1
        self.take_sign()
        return alternatives

    def single(self) -> Node:
        start, sign = self.position, self.take_sign()
        if sign == "(":
            return self.group()
        if sign == "[":
            return expressions.characters(self.set_of_characters())
        if sign == ".":
            return Characters(expressions.without(ANY, LINE_ENDS[self.is_ecma]))
        if sign == "\\":
            return expressions.characters(self.escape(inside=False))
        if sign in "*+?" or COUNT.match(self.pattern_text, start) and not self.next_is(","):
            raise self.refuse("a repetition of nothing", start)
        return expressions.text(sign)

    def group(self) -> Node:
        start = self.position - 1
        if self.take("?"):
            for sign, feature in REFUSED_GROUPS.items():
                if self.next_is(sign):
                    raise self.refuse(feature, start)
            if not self.is_ecma and self.take("#"):
                self.position = self.pattern_text.index(")", self.position) + 1
                return EMPTY
            name = re.compile(r"<\w+>" if self.is_ecma else r"P<\w+>").match(self.pattern_text, self.position)
            if name is not None:
                self.position = name.end()
            elif not self.take(":"):
                raise self.refuse("an inline flag", start)
        return either(branch.node for branch in self.inner_alternatives())

    def repeats(self, node: Node) -> Node:
        """Apply the quantifier after a part, if any."""
        start = self.position
        counted = None if self.is_ecma and self.next_is("{,") else COUNT.match(self.pattern_text, start)
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
            self.position = counted.end()
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
        start, sign = self.position - 1, self.take_sign()
        if sign in self.sets:
            return self.sets[sign]
        if sign in "bB" and not inside:
            raise self.refuse("a word boundary", start)
        if sign in "pP" and self.next_is("{"):
            raise self.refuse("a Unicode property", start)
        if sign.isdigit():
            return self.octal(sign, start, inside)
        if self.is_ecma and sign == "c" and (letter := self.pattern_text[self.position : self.position + 1]).isalpha():
            self.position += 1
            return self.one(ord(letter) % 32)
        if sign == "k" and self.next_is("<") or sign == "N" and not self.is_ecma:
            raise self.refuse("a backreference" if sign == "k" else "a named character", start)
        code = (ECMA_CODE if self.is_ecma else PYTHON_CODE).match(self.pattern_text, start + 1)
        if code is None:
            controls = CONTROLS | ({} if self.is_ecma else {"a": 7}) | {"b": 8}
            return self.one(controls.get(sign, ord(sign)))
        self.position, value = code.end(), int(next(filter(None, code.groups())), 16)
        low = LOW_SURROGATE.match(self.pattern_text, self.position)
        if 0xD800 <= value < 0xDC00 and low is not None and self.is_ecma:
            self.position = low.end()
            value = 0x10000 + (value - 0xD800) * 0x400 + int(low.group(1), 16) - 0xDC00
        if value > expressions.LAST_CHARACTER:
            raise self.refuse("a character beyond U+10FFFF", start)
        return self.one(value)

    def octal(self, sign: str, start: int, inside: bool) -> Ranges:
        """The character of an escape that begins with a digit. Raises ValueError for a backreference."""
        if self.is_ecma:
            if sign != "0" or self.pattern_text[self.position : self.position + 1].isdigit():
                raise self.refuse("a backreference", start)
            return self.one(0)
        digits = OCTAL if inside or sign == "0" else THREE_OCTALS
        if (octal := digits.match(self.pattern_text, start + 1)) is None:
            raise self.refuse("a backreference", start)
        self.position = octal.end()
        return self.one(int(octal.group(), 8))

    def one(self, code: int) -> Ranges:
        return ((code, code),)

    def set_of_characters(self) -> Ranges:
        """Characters of a set, after its bracket."""
        start, negated, ranges = self.position - 1, self.take("^"), list[tuple[int, int]]()
        is_first = not self.is_ecma  # a closing bracket that Python reads as a character
        while is_first or not self.take("]"):
            is_first, member = False, self.member()
            if self.next_is("-") and not self.next_is("-]"):
                self.position += 1
                last = self.member()
                if len(member) == len(last) == 1 and member[0][0] == member[0][1] and last[0][0] == last[0][1]:
                    if last[0][0] < member[0][0]:
                        raise self.refuse("a range out of order", start)
                    member = ((member[0][0], last[0][0]),)
                else:  # a set at one side: the sign itself
                    ranges += [*last, (45, 45)]
            ranges += member
        return expressions.without(ANY, merged(ranges)) if negated else merged(ranges)

    def member(self) -> Ranges:
        sign = self.take_sign()
        return self.escape(inside=True) if sign == "\\" else self.one(ord(sign))

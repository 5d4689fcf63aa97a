"""Parser of regular expressions: Python's `re`, and ECMA 262 for JSON schemas. It rejects non-regular features."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from paradec.constraints import expressions
from paradec.constraints.dfa import Dfa, intersect, to_dfa, to_node
from paradec.constraints.expressions import ANY, EMPTY, Characters, Node, Ranges, either, merge_ranges, repeat, sequence
from paradec.core.checks import short_repr

DIGITS: Ranges = ((48, 57),)
WORD_CHARACTERS: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACES: Ranges = ((9, 13), (32, 32))
SPACES_BEYOND_ASCII = (
    *((0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F)),
    *((0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
"""Further white space of ECMA 262, whose digits and word characters are ASCII, as with `re.ASCII`."""
LINE_ENDS = {False: ((10, 10),), True: ((10, 10), (13, 13), (0x2028, 0x2029))}
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
COUNT = re.compile(r"\{(?:(\d+)|(\d*),(\d*))\}")
PYTHON_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
ECMA_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
REFUSED_GROUPS = {
    "<=": "lookbehind",
    "<!": "negative lookbehind",
    "P=": "a backreference",
    "=": "lookahead",
    "!": "negative lookahead",
    ">": "an atomic group",
    "(": "a conditional",
    "#": "a comment",
}
BEGIN, END = expressions.LAST_CHARACTER + 1, expressions.LAST_CHARACTER + 2
"""Artificial characters at the two ends of a text, which the anchors of ECMA patterns match."""


def parse(pattern: str) -> Node:
    """Parse the language of `re.fullmatch(pattern, text, re.ASCII)`.

    Raises ValueError, with the position, for a malformed or non-regular pattern.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"regex={short_repr(pattern)} must be a text")
    try:
        re.compile(pattern, re.ASCII)
        return _Reader(pattern).pattern()
    except re.error as error:
        raise ValueError(f"regex={short_repr(pattern)} is not a regular expression: {error}") from None
    except (RecursionError, OverflowError):
        raise ValueError(f"regex={short_repr(pattern)} is nested too deeply, or repeats too often") from None


@lru_cache(maxsize=512)
def ecma_search(pattern: str) -> Dfa:
    """Texts in which an ECMA 262 pattern matches somewhere.

    Pattern syntax without the flag "u" (annex B). Raises ValueError, with the position, for a malformed or non-regular
    pattern.
    """
    try:
        reader = _Reader(pattern, is_ecma=True)
        node = reader.pattern()
        if reader.position < len(pattern):
            raise reader.unsupported("an unmatched bracket", reader.position)
        # the characters of the two ends are only allowed around the text, then erased
        before, inside, after = map(repeat, (Characters(((BEGIN, BEGIN),)), Characters(ANY), Characters(((END, END),))))
        language = intersect(
            to_dfa(sequence((before, inside, node, inside, after))), to_dfa(sequence((before, inside, after)))
        )
        return to_dfa(to_node(language, _erase_ends))
    except RecursionError:
        raise ValueError(f"regex={short_repr(pattern)} is nested too deeply") from None


def _erase_ends(ranges: Ranges) -> Node:
    plain = expressions.subtract_ranges(ranges, ((BEGIN, END),))
    return either((expressions.characters(plain), *([EMPTY] if plain != ranges else [])))


@dataclass
class _Reader:
    """Recursive-descent parser of a pattern that `re` accepts, or of ECMA 262."""

    pattern_text: str
    is_ecma: bool = False
    position: int = 0
    depth: int = 0

    def __post_init__(self) -> None:
        spaces = merge_ranges((*SPACES, *SPACES_BEYOND_ASCII)) if self.is_ecma else SPACES
        self.sets = {"d": DIGITS, "w": WORD_CHARACTERS, "s": spaces}
        self.sets |= {name.upper(): expressions.subtract_ranges(ANY, inner) for name, inner in self.sets.items()}

    def unsupported(self, feature: str, position: int) -> ValueError:
        return ValueError(f"regex={short_repr(self.pattern_text)}: {feature} at {position} is not supported")

    def next_is(self, text: str) -> bool:
        return self.pattern_text.startswith(text, self.position)

    def take(self, text: str) -> bool:
        if not self.next_is(text):
            return False
        self.position += len(text)
        return True

    def take_char(self) -> str:
        """Read the next character. Raises ValueError at the end."""
        if self.position >= len(self.pattern_text):
            raise self.unsupported("an incomplete group, set or escape", self.position)
        self.position += 1
        return self.pattern_text[self.position - 1]

    def pattern(self) -> Node:
        branches = [self.branch()]
        while self.take("|"):
            branches.append(self.branch())
        return either(branches)

    def branch(self) -> Node:
        parts = list[Node]()
        while self.position < len(self.pattern_text) and not self.next_is("|") and not self.next_is(")"):
            start = self.position
            begins = self.take("^") or not self.is_ecma and self.take("\\A")
            if not begins and not self.take("$") and (self.is_ecma or not self.take("\\Z")):
                parts.append(self.repeats(self.single()))
            elif self.is_ecma:
                parts.append(expressions.character(BEGIN if begins else END))
            elif self.depth or (parts if begins else self.position < len(self.pattern_text) and not self.next_is("|")):
                raise self.unsupported("an anchor inside a pattern", start)
        return sequence(parts)

    def single(self) -> Node:
        start, char = self.position, self.take_char()
        if char == "(":
            return self.group()
        if char == "[":
            return expressions.characters(self.set_of_characters())
        if char == ".":
            return Characters(expressions.subtract_ranges(ANY, LINE_ENDS[self.is_ecma]))
        if char == "\\":
            return expressions.characters(self.escape(in_set=False))
        if char in "*+?" or COUNT.match(self.pattern_text, start) and not self.next_is(","):
            raise self.unsupported("a repetition of nothing", start)
        return expressions.text(char)

    def group(self) -> Node:
        start = self.position - 1
        if self.take("?"):
            for char, feature in REFUSED_GROUPS.items():
                if self.next_is(char):
                    raise self.unsupported(feature, start)
            name = re.compile(r"<\w+>" if self.is_ecma else r"P<\w+>").match(self.pattern_text, self.position)
            if name is not None:
                self.position = name.end()
            elif not self.take(":"):
                raise self.unsupported("an inline flag", start)
        self.depth += 1
        node = self.pattern()
        self.depth -= 1
        self.take_char()
        return node

    def repeats(self, node: Node) -> Node:
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
            raise self.unsupported("a possessive repetition", start)
        self.take("?")  # lazy: the language is the same
        return repeat(node, low, high)

    def escape(self, in_set: bool) -> Ranges:
        start, char = self.position - 1, self.take_char()
        if char in self.sets:
            return self.sets[char]
        if char in "bB" and not in_set:
            raise self.unsupported("a word boundary", start)
        if char in "pP" and self.next_is("{"):
            raise self.unsupported("a Unicode property", start)
        if char.isdigit():
            if char != "0" or self.pattern_text[self.position : self.position + 1].isdigit():
                raise self.unsupported("an octal escape" if char == "0" else "a backreference", start)
            return self.code_range(0)
        if self.is_ecma and char == "c" and (letter := self.pattern_text[self.position : self.position + 1]).isalpha():
            self.position += 1
            return self.code_range(ord(letter) % 32)
        if char == "k" and self.next_is("<") or char == "N" and not self.is_ecma:
            raise self.unsupported("a backreference" if char == "k" else "a named character", start)
        code = (ECMA_CODE if self.is_ecma else PYTHON_CODE).match(self.pattern_text, start + 1)
        if code is None:
            controls = CONTROLS | ({} if self.is_ecma else {"a": 7}) | {"b": 8}
            return self.code_range(controls.get(char, ord(char)))
        self.position, value = code.end(), int(next(filter(None, code.groups())), 16)
        if value > expressions.LAST_CHARACTER or 0xD800 <= value < 0xE000:
            raise self.unsupported("a surrogate, or a character beyond U+10FFFF,", start)
        return self.code_range(value)

    def code_range(self, code: int) -> Ranges:
        return ((code, code),)

    def set_of_characters(self) -> Ranges:
        start, negated, ranges = self.position - 1, self.take("^"), list[tuple[int, int]]()
        is_first = not self.is_ecma  # Python reads a closing bracket at the start as a character
        while is_first or not self.take("]"):
            is_first, member = False, self.member()
            if self.next_is("-") and not self.next_is("-]"):
                self.position += 1
                last = self.member()
                if len(member) == len(last) == 1 and member[0][0] == member[0][1] and last[0][0] == last[0][1]:
                    if last[0][0] < member[0][0]:
                        raise self.unsupported("a range out of order", start)
                    member = ((member[0][0], last[0][0]),)
                else:  # next to an escape such as \d, the hyphen is a character
                    ranges += [*last, (45, 45)]
            ranges += member
        return expressions.subtract_ranges(ANY, merge_ranges(ranges)) if negated else merge_ranges(ranges)

    def member(self) -> Ranges:
        char = self.take_char()
        return self.escape(in_set=True) if char == "\\" else self.code_range(ord(char))

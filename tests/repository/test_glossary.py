"""docs/glossary.md: the words that its last column rules out do not occur."""

from __future__ import annotations

import re

import pytest
from places import ROOT

PAGE = ROOT / "docs" / "glossary.md"
ROWS = re.findall(r"^\| ([^|\n]+) \| [^|\n]+ \| ([^|\n]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
RULED_OUT = {word: term for term, words in ROWS if words not in ("not", "---") for word in words.split(", ")}

TEXTS = (
    "tools/(evaluation|conformance/targets)|core/(packaged|prompts|trace_texts)|api/decisions/prompts|cli|"
    "integrations/server/handlers"
)
PAGES = "evaluation|packaged_text_model|quick_start|text|command_line|caches"
MEANT = {
    "word": rf"^(paradec/({TEXTS})|docs/({PAGES})\.md|examples/)|word_embed|(force|bad|break_long)_words|"
    r"in words|32-bit words|a word of the|peers_text_words|--size words|\d words, \d rows|word boundar",
    "law": r"[\"`/\[]laws\b|\blaws (or|\|)|law of succession",
    "behind": r"left.behind|nothing behind|interval 6 behind 3",
    "fuse": r"decoders\.Fuse",
}
"""Where a word that is ruled out means something else, and is right: words of a text, in files about texts; the name of
a group of cases; somebody's title."""

FORMER = re.compile(r'^(paradec/samplers/masked/needs\.py:\d+:     "\w+": "|docs/write_a_sampler\.md:\d+: \| `)')
"""The lists of names that have changed."""


def files() -> list[str]:
    found = [*(ROOT / "paradec").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    return [str(path.relative_to(ROOT)) for path in [*found, ROOT / "README.md"] if path != PAGE]


def occurrences(word: str) -> list[str]:
    """Lines with the word, or an identifier that has it among its parts."""
    pattern = re.compile(rf"(?<![A-Za-z]){word}(?:s|es|ed|ing)?(?![A-Za-z])", re.IGNORECASE)
    meant = re.compile(MEANT.get(word, "$^"))
    found = []
    for file in files():
        for number, line in enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), 1):
            where = f"{file}:{number}: {line}"
            if pattern.search(line) and not meant.search(where) and not FORMER.search(where):
                found.append(where)
    return found


def test_the_page_rules_words_out() -> None:
    assert {"word", "law", "behind", "surer", "door", "fuse", "linger"} <= RULED_OUT.keys()


@pytest.mark.parametrize("word", RULED_OUT)
def test_what_the_glossary_rules_out_does_not_occur(word: str) -> None:
    assert occurrences(word) == [], f"docs/glossary.md has a term for it: {RULED_OUT[word]}"

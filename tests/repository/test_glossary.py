"""docs/glossary.md: the words that its last column rules out do not occur."""

from __future__ import annotations

import re

import pytest
from places import ROOT

PAGE = ROOT / "docs" / "glossary.md"
ROWS = re.findall(r"^\| ([^|\n]+) \| [^|\n]+ \| ([^|\n]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
RULED_OUT = {word: term for term, words in ROWS if words not in ("not", "---") for word in words.split(", ")}

MEANT = {
    "word": r"in (?:other )?words|words? of (?:text|a text|its|the text)",
}
"""Where a word that is ruled out means something else, and is right."""


def files() -> list[str]:
    found = [*(ROOT / "paradec").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.py")]
    return [str(path.relative_to(ROOT)) for path in [*found, ROOT / "README.md"] if path != PAGE]


def occurrences(word: str) -> list[str]:
    """Lines with the word, or an identifier that has it among its parts."""
    pattern = re.compile(rf"(?<![A-Za-z]){word}(?:s|es|ed|ing)?(?![A-Za-z])", re.IGNORECASE)
    meant = re.compile(MEANT[word], re.IGNORECASE) if word in MEANT else None
    found = []
    for file in files():
        for number, line in enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), 1):
            if pattern.search(line if meant is None else meant.sub("", line)):
                found.append(f"{file}:{number}: {line.strip()}")
    return found


def test_the_page_rules_words_out() -> None:
    assert {"word", "law", "behind", "surer", "door"} <= RULED_OUT.keys()


@pytest.mark.parametrize("word", RULED_OUT)
def test_what_the_glossary_rules_out_does_not_occur(word: str) -> None:
    assert occurrences(word) == [], f"docs/glossary.md has a term for it: {RULED_OUT[word]}"

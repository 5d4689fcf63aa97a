"""Words and prompts of the packaged text model, without heavy imports. Tasks: `paradec.tools.evaluation.tasks`."""

from __future__ import annotations

import difflib
from collections.abc import Container, Sequence
from typing import Any

WORDS: tuple[str, ...] = tuple(
    """
    ant apple apricot banana bear bee boat cat cherry cow crab date deer dog duck eagle fig fox
    frog goat grape guava hawk horse iguana ivy jackal kiwi koala leek lemon lime lion mango melon
    mole mouse newt nut olive onion orange otter owl panda papaya peach pear pig plum quince rabbit
    radish rose seal sheep tiger viper whale wolf zebra
    """.split()
)
"""Nouns in the lists that the model edits, in alphabetical order."""
SYMBOLS: tuple[str, ...] = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
"""Symbols of the Latin squares."""
LIST_LENGTHS: tuple[int, ...] = (3, 4, 5, 6)
SQUARE_SIZES: tuple[int, ...] = (3, 4)
TEMPLATES: dict[str, str] = {
    "copy": "Copy: {items}",
    "reverse": "Reverse: {items}",
    "sort": "Sort: {items}",
    "insert_at": "Insert {word} at {index}: {items}",
    "insert_after": "Insert {word} after {target}: {items}",
    "remove_at": "Remove at {index}: {items}",
    "remove_name": "Remove {target}: {items}",
    "replace_at": "Replace at {index} with {word}: {items}",
    "replace_name": "Replace {target} with {word}: {items}",
    "rotations": "Rotations: {items}",
    "shuffle": "Shuffle: {items}",
    "insert_random": "Insert {word} anywhere: {items}",
    "remove_random": "Remove any: {items}",
    "replace_random": "Replace any with {word}: {items}",
    "latin_square": "Latin square: {items}",
}
"""Prompt of each task."""
VERBS = ("Copy", "Reverse", "Sort", "Insert", "Remove", "Replace", "Rotations", "Shuffle", "Latin square")
"""First words of the prompts."""
EXAMPLE = {"items": "pear fig apple", "word": "kiwi", "target": "fig", "index": 1}


def example_prompt(task: str) -> str:
    return TEMPLATES[task].format(**EXAMPLE if task != "latin_square" else {"items": "A B C"})


def vocabulary_hint(words: Sequence[str], tokenizer: Any) -> str:
    """Advice on `words` that the packaged model does not know; empty for other tokenizers."""
    vocabulary: Container[str] = getattr(tokenizer, "get_vocab", dict)()
    if not all(word in vocabulary for word in WORDS):
        return ""
    suggestions = [(word, difflib.get_close_matches(word.lower(), WORDS, n=1, cutoff=0.7)) for word in words]
    hints = ", ".join(f"{matches[0]!r} for {word!r}" for word, matches in suggestions if matches)
    return (
        (f". Did you mean {hints}?" if hints else ".")
        + f" The packaged model answers {', '.join(VERBS)} with lists of {LIST_LENGTHS[0]} to {LIST_LENGTHS[-1]} of "
        + f"{len(WORDS)} words ({', '.join(WORDS[:3])}, ... {WORDS[-1]}), such as '{example_prompt('sort')}': "
        + "`paradec tasks` lists them all"
    )


def describe_lengths(task: str) -> str:
    """Describe the list lengths of a task: "3 to 6"."""
    sizes = SQUARE_SIZES if task == "latin_square" else LIST_LENGTHS
    return f"{sizes[0]} to {sizes[-1]}"


def unknown_words_error(tokenizer: Any, text: str) -> ValueError:
    """Make the error that names the words of a text that a tokenizer cannot express."""
    unk = tokenizer.unk_token_id
    plain_text = text
    for special in getattr(tokenizer, "get_added_vocab", dict)():  # a chat template puts special tokens next to words
        plain_text = plain_text.replace(special, " ")
    words = sorted({w for w in plain_text.split() if unk in tokenizer(w, add_special_tokens=False)["input_ids"]})
    quoted = repr(", ".join(words) or text)
    return ValueError(f"prompt has words outside the model's vocabulary: {quoted}{vocabulary_hint(words, tokenizer)}")

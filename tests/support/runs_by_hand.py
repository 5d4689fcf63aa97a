"""Traces made by hand, for what no small model does: hostile texts, long runs, other scripts."""

from __future__ import annotations

import random

from paradec.core.trace import Notes, Trace

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "<!--<script>",
    "@DATA@",
    "@TITLE@",
    "&lt;b&gt;",
    "\u2028\u2029",
    "\ud800",
    "${window.hacked = 1}",
    '"};window.hacked = 1;//',
)
SCRIPTS = ("שלום", "مرحبا", "👩‍👩‍👧", "日本", "e\u0301", "\n", " ", "\t", "naïve")


def hostile() -> Trace:
    """A text whose every token would do harm where it is not escaped, and so for settings, rules and kinds."""
    settings = {"sampler": HOSTILE[0], HOSTILE[1]: HOSTILE[2]}
    trace = Trace([[0, 1, *[99] * len(HOSTILE)]], settings, family="masked", mask_id=99)
    trace.texts = dict(enumerate(HOSTILE))
    for token in range(len(HOSTILE)):
        notes = Notes([1], [[(0, 12)]], [(2, 12)], rules={(0, token + 2): HOSTILE[token % 2]})
        trace.add([(0, token + 2, token, 0.5)], [12], HOSTILE[0], notes, 0.001)
    trace.images = ["javascript:window.hacked=1"]
    return trace


def scripts() -> Trace:
    """Right to left for the most part, with emoji and signs that are not seen; the last token is two ids."""
    texts = [*SCRIPTS, "\ufffd", "\ufffd", "<mask>"]
    ids = [0, 1, 0, 1, *range(2, len(SCRIPTS)), 9, 10]
    trace = Trace([[0, 1, *[11] * len(ids)]], {"sampler": "by hand"}, family="masked", mask_id=11)
    trace.texts, trace.special = dict(enumerate(texts)), [11]
    for step, token in enumerate(ids):
        trace.add([(0, step + 2, token, 1.0)], [len(ids) + 2], "full", Notes([1]), 0.001)
    trace.joined = [[(len(ids), len(ids) + 2, "🦊")]]
    return trace


def long(steps: int, rows: int = 2, length: int = 300, drafts: int = 4) -> Trace:
    """A run of many steps in which every kind of mark occurs."""
    draw = random.Random(0)
    canvas = [[1, 2, *[0] * length] for _ in range(rows)]
    trace = Trace(canvas, {"sampler": "by hand"}, family="masked", mask_id=0)
    trace.texts = {token: f"t{token}" for token in range(50)}
    for _ in range(steps):
        row, place = draw.randrange(rows), draw.randrange(2, length + 2)
        spans = [[(at, at + 1) for at in sorted(draw.sample(range(length), 20))] for _ in range(rows)]
        commits = [(row, place, draw.choice((0, 3, 4, 5)), draw.random())]
        notes = Notes([1] * rows, spans, [(2, 34)] * rows)
        trace.add(commits, [20] * rows, "window", notes, 0.01)
        trace.steps[-1].rejected = [(row, draw.randrange(2, length), draw.randrange(1, 50)) for _ in range(drafts)]
    return trace

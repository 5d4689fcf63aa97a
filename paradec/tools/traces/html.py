"""A trace as a page: one file, without anything from the network, to step through with a slider or the keyboard."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources

from paradec.core.trace import Trace
from paradec.tools.traces.payload import check_runs, run_data

HARMLESS = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What could end the page's data, or begin something else; JSON has escapes for it."""


def page(traces: Sequence[Trace], names: Sequence[str] = (), title: str = "") -> str:
    """The text of a page that shows one run, or several side by side that are stepped through together.

    Args:
        traces: up to 4.
        names: what to call them; by default their samplers.
        title: of the page; by default the names.

    Raises:
        TypeError: something else than traces. ValueError: too many of them, or names that are not as many.
    """
    called = check_runs(traces, names)
    title = title or " beside ".join(called)
    runs = [run_data(trace, name) for trace, name in zip(traces, called, strict=True)]
    data = json.dumps({"runs": runs}, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character, escape in HARMLESS.items():
        data = data.replace(character, escape)
    template = (resources.files("paradec.tools.traces") / "page.html").read_text(encoding="utf-8")
    head, tail = template.split("@DATA@")
    text = head.replace("@TITLE@", html.escape(title)) + data + tail
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written

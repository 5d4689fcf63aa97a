"""Traces as files: what is written follows from the name's suffix."""

from __future__ import annotations

import html
import importlib.util
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from paradec.core.trace import Trace
from paradec.tools.traces.payload import check_runs, run_data

DATA, PAGES, ANIMATIONS = ("", ".json"), (".html", ".htm"), (".gif",)
PLOTS = (".png", ".pdf", ".svg")
HARMLESS = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What could end the page's data, or begin something else; JSON has escapes for it."""


def check_suffix(path: str | os.PathLike[str], what: str = "path") -> None:
    """Raise unless a trace can be written under this name; worth asking before the work. `what`: the argument.

    Raises:
        ValueError: another suffix. ModuleNotFoundError: what draws such files is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (*DATA, *PAGES, *ANIMATIONS, *PLOTS):
        raise ValueError(
            f"{what} {str(path)!r} must end in .json (data), .html (a page), .gif (an animation), or .png, .pdf or "
            ".svg (a plot)"
        )
    if suffix in PLOTS and importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError('plots need matplotlib; install paradec with its extra "bench", or pip install it')
    if suffix in ANIMATIONS and importlib.util.find_spec("PIL") is None:
        raise ModuleNotFoundError("animations need pillow: pip install pillow")


def save(traces: Sequence[Trace], path: str | os.PathLike[str], names: Sequence[str] = ()) -> None:
    """Write one run, or several side by side, which data files cannot hold.

    Raises:
        ValueError, ModuleNotFoundError: as `check_suffix`; several runs in a data file.
    """
    check_suffix(path)
    suffix = Path(path).suffix.lower()
    first, *beside = traces
    if suffix in DATA:
        if beside:
            raise ValueError(f"path {str(path)!r}: a data file holds one run; several go into .html, .gif or a plot")
        first.to_json(path)
    elif suffix in PAGES:
        first.to_html(path, beside=beside, names=names)
    elif suffix in ANIMATIONS:
        first.to_gif(path, beside=beside, names=names)
    else:
        first.plot(beside=beside, names=names).savefig(path, dpi=150)


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

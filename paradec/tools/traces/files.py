"""Traces as files, whose suffix says what is written; and what notebooks show of outputs, reports and traces."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from paradec.core.checks import format_count, throughput_unit
from paradec.core.trace import Trace
from paradec.tools.traces.payload import check_matplotlib, check_runs, run_data

DATA, PAGES, ANIMATIONS = ("", ".json"), (".html", ".htm"), (".gif",)
PLOTS = (".png", ".pdf", ".svg")
HARMLESS = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""What could end the page's data, or begin something else; JSON has escapes for it."""


def check_suffix(path: str | os.PathLike[str], argument: str = "path") -> None:
    """Raise unless a trace can be written under this name; worth asking before the work. `what`: the argument. Raises
    ValueError: another suffix; ModuleNotFoundError: what draws such files is not installed."""
    suffix = Path(path).suffix.lower()
    if suffix not in (*DATA, *PAGES, *ANIMATIONS, *PLOTS):
        raise ValueError(
            f"{argument} {str(path)!r} must end in .json (data), .html (a page), .gif (an animation), or .png, .pdf or "
            ".svg (a plot)"
        )
    if suffix in PLOTS:
        check_matplotlib()
    if suffix in ANIMATIONS and importlib.util.find_spec("PIL") is None:
        raise ModuleNotFoundError("animations need pillow: pip install pillow")


def save(traces: Sequence[Trace], path: str | os.PathLike[str], names: Sequence[str] = ()) -> None:
    """Write one run, or several side by side, which data files cannot hold. Raises ValueError, ModuleNotFoundError: as
    `check_suffix`; several runs in a data file."""
    check_suffix(path)
    suffix = Path(path).suffix.lower()
    first, *other_traces = traces
    if suffix in DATA:
        if other_traces:
            raise ValueError(f"path {str(path)!r}: a data file holds one run; several go into .html, .gif or a plot")
        first.to_json(path)
    elif suffix in PAGES:
        first.to_html(path, beside=other_traces, names=names)
    elif suffix in ANIMATIONS:
        first.to_gif(path, beside=other_traces, names=names)
    else:
        first.plot(beside=other_traces, names=names).savefig(path, dpi=150)


def page(traces: Sequence[Trace], names: Sequence[str] = (), title: str = "") -> str:
    """The text of a page that shows one run, or several side by side that are stepped through together.

    traces: up to 4. names: what to call them; by default their samplers. title: of the page; by default the names.
    Raises TypeError: something else than traces. ValueError: too many of them, or names that are not as many."""
    called = check_runs(traces, names)
    title = title or " beside ".join(called)
    runs = [run_data(trace, name) for trace, name in zip(traces, called, strict=True)]
    data = json.dumps({"runs": runs}, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character, code in HARMLESS.items():
        data = data.replace(character, code)
    template = (resources.files("paradec.tools.traces") / "page.html").read_text(encoding="utf-8")
    head, tail = template.split("@DATA@")
    text = head.replace("@TITLE@", escape(title)) + data + tail
    return text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate cannot be written


FRAME_HEIGHT = 460
"""Pixels of a trace's frame."""
MOST_TEXTS = 20
"""Answers of an output that are shown."""
LONGEST_TEXT = 2000
"""Characters of an answer."""
MOST_CALLS = 200
"""Rows of a report's table."""


def table(rows: Iterable[Sequence[Any]], head: Sequence[str] = ()) -> str:
    """An HTML table of texts, each of them escaped."""

    def line(cells: Sequence[Any], tag: str) -> str:
        style = ' style="text-align:left;vertical-align:top;white-space:pre-wrap"'
        return "<tr>" + "".join(f"<{tag}{style}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th') if head else ''}{''.join(line(row, 'td') for row in rows)}</table>"


def of_trace(trace: Trace) -> str:
    """The trace's page in a frame, which can reach neither the notebook nor the network."""
    return (
        f'<iframe sandbox="allow-scripts" style="width:100%;height:{FRAME_HEIGHT}px;border:1px solid #8888" '
        f'title="trace" srcdoc="{escape(page([trace]))}"></iframe>'
    )


def of_output(output: Any) -> str:
    """An output of `generate`: its answers and what they cost, and its trace where there is one."""
    texts = [] if output.text is None else [output.text] if isinstance(output.text, str) else output.text
    rows = [
        (i + 1, text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + "...", output.tokens[i], output.row_nfe[i])
        for i, text in enumerate(texts[:MOST_TEXTS])
    ]
    more = f"<p>... {len(texts) - MOST_TEXTS} more</p>" if len(texts) > MOST_TEXTS else ""
    cost = (
        f"<p>{format_count(sum(output.tokens), 'token')}, {format_count(output.nfe, 'forward')}, "
        f"{output.tokens_per_forward:.1f} {throughput_unit(len(output.tokens))}, {output.seconds:.2f} s</p>"
    )
    answers = table(rows, ("", "answer", "tokens", "forwards")) if rows else ""
    return f"<div>{answers}{more}{cost}{'' if output.recorded_trace is None else of_trace(output.trace)}</div>"


def of_report(report: Any) -> str:
    """The report of a session of `accelerate`: its summary, and a table of calls."""
    calls = [
        (call.step, call.branch, call.kind, call.evaluated, call.forecast, f"{call.bytes / 1e6:.2f}",
         f"{call.seconds * 1000:.2f}")
        for call in report.calls[:MOST_CALLS]
    ]  # fmt: skip
    more = f"<p>... {len(report.calls) - MOST_CALLS} more</p>" if len(report.calls) > MOST_CALLS else ""
    head = ("step", "branch", "kind", "evaluated", "forecast", "MB", "ms")
    summary = f"<pre>{escape(report.summary)}</pre>"
    return f"<div>{summary}<details><summary>calls</summary>{table(calls, head)}{more}</details></div>"

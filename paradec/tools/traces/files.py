"""Files of traces, in the format of the file's suffix; HTML of traces, outputs and reports for notebooks."""

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
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""JSON escapes of characters that could end the page's script element or a line in it."""


def check_suffix(path: str | os.PathLike[str], argument: str = "path") -> None:
    """Check that traces can be written in the format of a path's suffix. argument: name of the path in the message.
    Raises ValueError: an unknown suffix; ModuleNotFoundError: the format's library is not installed."""
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
    """Write one run, or several side by side. Raises ValueError: several in a .json file; errors of `check_suffix`."""
    check_suffix(path)
    suffix = Path(path).suffix.lower()
    first, *other_traces = traces
    if suffix in DATA:
        if other_traces:
            raise ValueError(f"path {str(path)!r}: a .json file holds one run; write several to .html, .gif or a plot")
        first.to_json(path)
    elif suffix in PAGES:
        first.to_html(path, beside=other_traces, names=names)
    elif suffix in ANIMATIONS:
        first.to_gif(path, beside=other_traces, names=names)
    else:
        first.plot(beside=other_traces, names=names).savefig(path, dpi=150)


def page(traces: Sequence[Trace], names: Sequence[str] = (), title: str = "") -> str:
    """Build the HTML of a page that steps through one run, or through several runs side by side.

    traces: 1 to 4 traces. names: names of the runs; by default their samplers. title: by default the names.
    Raises TypeError: values that are not traces. ValueError: too many traces, or a wrong number of names."""
    run_names = check_runs(traces, names)
    title = title or " beside ".join(run_names)
    runs = [run_data(trace, name) for trace, name in zip(traces, run_names, strict=True)]
    data = json.dumps({"runs": runs}, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character, code in ESCAPES.items():
        data = data.replace(character, code)
    template = (resources.files("paradec.tools.traces") / "page.html").read_text(encoding="utf-8")
    head, tail = template.split("@DATA@")
    text = head.replace("@TITLE@", escape(title)) + data + tail
    return text.encode("utf-8", "replace").decode("utf-8")  # replaces lone surrogates, which cannot be written


FRAME_HEIGHT = 460
"""Height of a trace in a notebook, in pixels."""
MAX_TEXTS = 20
"""Maximum number of answers that a notebook shows."""
MAX_TEXT_LENGTH = 2000
"""Maximum number of characters of an answer."""
MAX_CALLS = 200
"""Maximum number of rows of a report's table."""


def build_table(rows: Iterable[Sequence[Any]], head: Sequence[str] = ()) -> str:
    """Build an HTML table. Texts of cells are escaped."""

    def line(cells: Sequence[Any], tag: str) -> str:
        style = ' style="text-align:left;vertical-align:top;white-space:pre-wrap"'
        return "<tr>" + "".join(f"<{tag}{style}>{escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(head, 'th') if head else ''}{''.join(line(row, 'td') for row in rows)}</table>"


def trace_to_html(trace: Trace) -> str:
    """Build the HTML of a frame with the trace's page. It is sandboxed: it has no access to the notebook."""
    return (
        f'<iframe sandbox="allow-scripts" style="width:100%;height:{FRAME_HEIGHT}px;border:1px solid #8888" '
        f'title="trace" srcdoc="{escape(page([trace]))}"></iframe>'
    )


def output_to_html(output: Any) -> str:
    """Build the HTML of an output of `generate`: the answers, their costs, and the trace if one was recorded."""
    texts = [] if output.text is None else [output.text] if isinstance(output.text, str) else output.text
    cut = [text if len(text) <= MAX_TEXT_LENGTH else text[:MAX_TEXT_LENGTH] + "..." for text in texts[:MAX_TEXTS]]
    rows = [(i + 1, text, output.tokens[i], output.row_nfe[i]) for i, text in enumerate(cut)]
    more = f"<p>... {len(texts) - MAX_TEXTS} more</p>" if len(texts) > MAX_TEXTS else ""
    cost = (
        f"<p>{format_count(sum(output.tokens), 'token')}, {format_count(output.nfe, 'forward')}, "
        f"{output.tokens_per_forward:.1f} {throughput_unit(len(output.tokens))}, {output.seconds:.2f} s</p>"
    )
    answers = build_table(rows, ("", "answer", "tokens", "forwards")) if rows else ""
    return f"<div>{answers}{more}{cost}{'' if output.recorded_trace is None else trace_to_html(output.trace)}</div>"


def report_to_html(report: Any) -> str:
    """Build the HTML of the report of an `accelerate` session: the summary, and a table of calls."""
    calls = [
        (call.step, call.branch, call.kind, call.evaluated, call.forecast, f"{call.bytes / 1e6:.2f}",
         f"{call.seconds * 1000:.2f}")
        for call in report.calls[:MAX_CALLS]
    ]  # fmt: skip
    more = f"<p>... {len(report.calls) - MAX_CALLS} more</p>" if len(report.calls) > MAX_CALLS else ""
    head = ("step", "branch", "kind", "evaluated", "forecast", "MB", "ms")
    summary = f"<pre>{escape(report.summary)}</pre>"
    return f"<div>{summary}<details><summary>calls</summary>{build_table(calls, head)}{more}</details></div>"

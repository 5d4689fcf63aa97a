"""What notebooks show of outputs, reports and traces: HTML that carries nothing from outside of itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from paradec.core.checks import count, per_forward
from paradec.core.trace import Trace
from paradec.tools.traces.files import page

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
        f"<p>{count(sum(output.tokens), 'token')}, {count(output.nfe, 'forward')}, {output.tokens_per_forward:.1f} "
        f"{per_forward(len(output.tokens))}, {output.seconds:.2f} s</p>"
    )
    answers = table(rows, ("", "answer", "tokens", "forwards")) if rows else ""
    return f"<div>{answers}{more}{cost}{'' if output.trace is None else of_trace(output.trace)}</div>"


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

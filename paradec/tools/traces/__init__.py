"""Drawings of traces: HTML pages to step through, animations, plots.

`paradec.core.trace.Trace` is the data. Its drawing methods find their functions in this registry, and so do outputs and
reports for notebooks. A function is imported at its first use.
"""

from __future__ import annotations

from paradec.core.registry import Registry

registry = Registry(
    "drawing",
    {
        "file": "paradec.tools.traces.files:save",
        "page": "paradec.tools.traces.files:page",
        "animation": "paradec.tools.traces.gif:write",
        "plot": "paradec.tools.traces.plot:figure",
        "frame": "paradec.tools.traces.files:of_trace",
        "output": "paradec.tools.traces.files:of_output",
        "report": "paradec.tools.traces.files:of_report",
    },
)
"""Drawing functions, by the kind of drawing."""

"""Drawings of traces: interactive HTML pages, animations, plots.

`paradec.core.trace.Trace` has the data. Methods that draw traces, outputs and reports find their functions in this
registry. A function is imported at its first use.
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
        "frame": "paradec.tools.traces.files:trace_to_html",
        "output": "paradec.tools.traces.files:output_to_html",
        "report": "paradec.tools.traces.files:report_to_html",
    },
)
"""Drawing functions, by the kind of drawing."""

"""Traces one can look at: pages to step through, animations, plots.

`paradec.trace.Trace` is the data. Its methods that draw look their function up here, as outputs and reports do for
notebooks; each is imported when it is first used.
"""

from __future__ import annotations

from paradec.registry import Registry

registry = Registry(
    "drawing",
    {
        "file": "paradec.traces.files:save",
        "page": "paradec.traces.html:page",
        "animation": "paradec.traces.gif:write",
        "plot": "paradec.traces.plot:figure",
        "frame": "paradec.traces.notebook:of_trace",
        "output": "paradec.traces.notebook:of_output",
        "report": "paradec.traces.notebook:of_report",
    },
)
"""Functions that draw, by what they make."""

"""Traces one can look at: pages to step through, animations, plots.

`paradec.core.trace.Trace` is the data. Its methods that draw look their function up here, as outputs and reports do for
notebooks; each is imported when it is first used.
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
"""Functions that draw, by what they make."""

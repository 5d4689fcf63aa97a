"""Traces one can look at: pages to step through, animations, plots.

`paradec.trace.Trace` is the data. Its `to_html`, `to_gif`, `plot` and `save` come here.
"""

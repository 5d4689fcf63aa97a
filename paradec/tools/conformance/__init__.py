"""A conformance kit: do a decoder's answers agree with traces of the published code, and with exact distributions?

The decoder is anybody's. It is asked with plain data and answers with plain data (`paradec.tools.conformance.targets`),
on small checkpoints in the published formats that come with the cases. `paradec verify` is the command; the page
docs/conformance.md says how to take part and how to report a result.

| file | decides |
|---|---|
| `archive.py` | what the data is: a folder or an archive, every file with its hash |
| `cases.py` | what a case is, and which cases there are |
| `traces.py` | what is asked for a recorded trace, and what of it is compared |
| `targets.py` | how a decoder is asked: ours, a Python function, a command |
| `compare.py` | whether an answer agrees, and where it first does not |
| `margins.py` | how near a decision was to its tie |
| `distribution.py` | whether draws follow a distribution |
| `run.py`, `report.py` | the run, and what is printed of it |
"""

from __future__ import annotations

KIT_VERSION = "1.0"
"""Of the cases and of what is compared, whatever paradec's own version is."""

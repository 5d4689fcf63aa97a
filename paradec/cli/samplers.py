"""`paradec samplers`."""

from __future__ import annotations

import paradec
from paradec.cli import options, show


def samplers(as_json: options.AsList = False) -> None:
    """List the samplers and their settings."""
    show.registry(paradec.samplers, as_json)

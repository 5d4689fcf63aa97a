"""Traces as files: what is written follows from the name's suffix."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from paradec.core.trace import Trace

DATA, PAGES, ANIMATIONS = ("", ".json"), (".html", ".htm"), (".gif",)
PLOTS = (".png", ".pdf", ".svg")


def check_suffix(path: str | os.PathLike[str], what: str = "path") -> None:
    """Raise unless a trace can be written under this name; worth asking before the work. `what`: the argument.

    Raises:
        ValueError: another suffix. ModuleNotFoundError: what draws such files is not installed.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in (*DATA, *PAGES, *ANIMATIONS, *PLOTS):
        raise ValueError(
            f"{what} {str(path)!r} must end in .json (data), .html (a page), .gif (an animation), or .png, .pdf or "
            ".svg (a plot)"
        )
    if suffix in PLOTS and importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError('plots need matplotlib; install paradec with its extra "bench", or pip install it')
    if suffix in ANIMATIONS and importlib.util.find_spec("PIL") is None:
        raise ModuleNotFoundError("animations need pillow: pip install pillow")


def save(traces: Sequence[Trace], path: str | os.PathLike[str], names: Sequence[str] = ()) -> None:
    """Write one run, or several side by side, which data files cannot hold.

    Raises:
        ValueError, ModuleNotFoundError: as `check_suffix`; several runs in a data file.
    """
    check_suffix(path)
    suffix = Path(path).suffix.lower()
    first, *beside = traces
    if suffix in DATA:
        if beside:
            raise ValueError(f"path {str(path)!r}: a data file holds one run; several go into .html, .gif or a plot")
        first.to_json(path)
    elif suffix in PAGES:
        first.to_html(path, beside=beside, names=names)
    elif suffix in ANIMATIONS:
        first.to_gif(path, beside=beside, names=names)
    else:
        first.plot(beside=beside, names=names).savefig(path, dpi=150)

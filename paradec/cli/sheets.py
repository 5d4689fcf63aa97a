"""What `paradec image` is asked for, what a pipeline has made of it, and the sheets that are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paradec.core.checks import check_int, check_text

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from paradec.core.trace import Trace

MOST_CLASSES = 100_000
"""Longest range of classes that is written out."""
SHEETS = (".png", ".jpg", ".jpeg", ".webp")
RECORDS = (".html", ".htm", ".gif", ".json")
"""Suffixes of `--trace` that are a `paradec.core.trace.Trace`."""
TRACE_SIDE = 160
"""Pixels along a picture of `--trace`, about."""
SMALL = 128
"""Pixels along the longer side of a picture, below which it is enlarged."""
SEEN = 256
"""Pixels along it then, at most."""


@dataclass
class ImageJob:
    """One command: checked when made, before a model is loaded.

    Raises:
        ValueError: no prompt or class (or both), classes that are no numbers, files that cannot be written.
    """

    out: Path
    trace: Path | None = None
    columns: int | None = None
    enlarge: int | None = None
    """None enlarges pictures that are too small to be seen."""
    prompts: list[str] | None = None
    classes: str | None = None
    conditions: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        for name, file in (("--out", self.out), ("--trace", self.trace)):
            if file is not None and (file.is_dir() or not file.parent.is_dir()):
                raise ValueError(f"cannot write {name} {str(file)!r}: not a file in an existing folder")
            also = RECORDS if name == "--trace" else ()
            if file is not None and file.suffix.lower() not in (*SHEETS, *also):
                allowed = ", ".join((*also, *SHEETS[:-1]))
                raise ValueError(f"{name} {str(file)!r} must end in {allowed} or {SHEETS[-1]}")
        check_int("--columns", self.columns, low=1, none=True)
        check_int("--enlarge", self.enlarge, low=1, high=64, none=True)
        if (self.prompts is None) == (self.classes is None):
            raise ValueError("give either --prompt or --class" + ("" if self.prompts is None else ", not both"))
        for prompt in self.prompts or ():
            check_text("--prompt", prompt)
        if self.prompts is not None:
            self.conditions = {"prompts": self.prompts}
        elif self.classes is not None:
            self.conditions = {"class_labels": read_classes(self.classes)}

    @property
    def sheet_of_steps(self) -> bool:
        """Whether `--trace` is a picture of which step made what, and no record of the run."""
        return self.trace is not None and self.trace.suffix.lower() in SHEETS

    def write(self, images: Sequence[Any] | None, steps: Any = None, record: Trace | None = None) -> None:
        """Write the sheets.

        Args:
            images: None after an interrupt: there are no pictures then.
            steps: [B, h, w] int64, which step made which token final, for `--trace`. record: of the run, for the same.
        """
        from paradec.api.images import contact_sheet, step_pictures

        if images is not None:
            enlarge = seen_size(images[0].size) if self.enlarge is None else self.enlarge
            contact_sheet(images, self.columns, enlarge=enlarge).save(self.out)
        if self.trace is not None and not self.sheet_of_steps:
            if record is not None:
                record.save(self.trace)
        elif self.trace is not None:
            contact_sheet(step_pictures(steps, max(1, TRACE_SIDE // max(steps.shape[1:]))), self.columns).save(
                self.trace
            )


@dataclass
class Made:
    """What a command made. `B` pictures."""

    images: list[Image]
    seconds: float
    told: Any
    """The session's report; None where there was no session."""
    steps: np.ndarray | None = None
    """[B, h, w] int64: the step at which each code became final, for pipelines of codes."""
    plain: list[Image] | None = None
    plain_seconds: float = 0.0

    @property
    def difference(self) -> float:
        """Mean absolute difference of the pixels to the plain run's, from 0 to 1."""
        import numpy as np

        pairs = zip(self.images, self.plain or (), strict=True)
        return float(np.mean([np.abs(np.asarray(a, float) - np.asarray(b, float)).mean() for a, b in pairs]) / 255)


def read_classes(text: str) -> list[int]:
    """ "3,5-7" -> [3, 5, 6, 7].

    Raises:
        ValueError: something else than numbers and ranges.
    """
    classes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--class {text!r} must be numbers and ranges, separated by commas: 3,5-7")
        stop = int(last) if dash else int(first)
        if not int(first) <= stop < int(first) + MOST_CLASSES:
            raise ValueError(f"--class {text!r}: the range {part.strip()} is empty or too long")
        classes += range(int(first), stop + 1)
    return classes


def seen_size(size: tuple[int, int]) -> int:
    """How much a picture of `size` pixels is enlarged, so that it can be seen: 9 times for 28 x 28."""
    longest = max(size)
    return max(1, SEEN // longest) if longest < SMALL else 1

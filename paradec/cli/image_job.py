"""`ImageJob`: checked files and conditions of `paradec image`, and the sheets that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paradec.cli import options
from paradec.core.checks import check_text

MAX_IMAGES = 100_000
SHEETS = (".png", ".jpg", ".jpeg", ".webp")
RECORDS = (".html", ".htm", ".gif", ".json")  # files of `--trace` with all steps
TRACE_SIDE = 160  # approximate longer side of a picture of steps, in pixels
SMALL_SIDE, VISIBLE_SIDE = 128, 256  # longer sides below `SMALL_SIDE` pixels are enlarged to at most `VISIBLE_SIDE`


@dataclass
class ImageJob:
    """Files and conditions of one `paradec image`, which the constructor checks before a model is loaded."""

    out: Path
    trace: Path | None
    columns: int | None
    enlarge: int | None
    """Factor by which each side grows; None: by `enlargement`."""
    prompts: list[str] | None
    classes: str | None
    conditions: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        for name, file, allowed in (("--out", self.out, SHEETS), ("--trace", self.trace, (*RECORDS, *SHEETS))):
            options.check_writable(name, file)
            if file is not None and file.suffix.lower() not in allowed:
                raise ValueError(f"{name} {str(file)!r} must end in {', '.join(allowed[:-1])} or {allowed[-1]}")
        if (self.prompts is None) == (self.classes is None):
            raise ValueError("give either --prompt or --class" + ("" if self.prompts is None else ", not both"))
        for prompt in self.prompts or ():
            check_text("--prompt", prompt)
        if self.classes is not None:
            self.conditions = {"class_labels": read_classes(self.classes)}
        else:
            self.conditions = {"prompts": self.prompts}

    @property
    def has_step_sheet(self) -> bool:
        """Whether `--trace` names a picture file (for the step of each token) instead of a record of the run."""
        return self.trace is not None and self.trace.suffix.lower() in SHEETS

    def write(self, images: Sequence[Any] | None, steps: Any = None, record: Any = None) -> None:
        """Write the sheet of images (None after an interrupt), and the file of `--trace`: `record`, or the sheet of
        `steps` [B, h, w], the step that made each token final."""
        from paradec.api.images import contact_sheet, step_pictures

        if images is not None:
            enlarge = enlargement(images[0].size) if self.enlarge is None else self.enlarge
            contact_sheet(images, self.columns, enlarge=enlarge).save(self.out)
        if self.trace is not None and self.has_step_sheet:
            pictures = step_pictures(steps, max(1, TRACE_SIDE // max(steps.shape[1:])))
            contact_sheet(pictures, self.columns).save(self.trace)
        elif self.trace is not None and record is not None:
            record.save(self.trace)


def read_classes(text: str) -> list[int]:
    """Read class numbers: "3,5-7" gives [3, 5, 6, 7]. Raises ValueError for other texts."""
    classes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--class {text!r} must be numbers and ranges, separated by commas: 3,5-7")
        stop = int(last) if dash else int(first)
        if not int(first) <= stop < int(first) + MAX_IMAGES:
            raise ValueError(f"--class {text!r}: the range {part.strip()} is empty or too long")
        classes += range(int(first), stop + 1)
    return classes


def enlargement(size: tuple[int, int]) -> int:
    """Compute the factor by which a small picture of `size` pixels is enlarged: 9 for 28 x 28."""
    longest = max(size)
    return max(1, VISIBLE_SIDE // longest) if longest < SMALL_SIDE else 1

"""What `paradec image` does around `generate_images`: reading classes, writing the sheets, and the summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paradec.checks import check_int
from paradec.images import ImageOutput, contact_sheet, step_pictures

MOST_CLASSES = 100_000
"""Longest range of classes that is written out."""
TRACE_SIDE = 160
"""Pixels along a picture of `--trace`, about."""


@dataclass
class ImageJob:
    """One command: checked when made, before a model is loaded.

    Raises:
        ValueError: no prompt or class (or both), classes that are no numbers, files that cannot be written.
    """

    out: Path
    trace: Path | None = None
    columns: int | None = None
    enlarge: int = 1
    prompts: list[str] | None = None
    classes: str | None = None
    conditions: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        for name, file in (("--out", self.out), ("--trace", self.trace)):
            if file is not None and (file.is_dir() or not file.parent.is_dir()):
                raise ValueError(f"cannot write {name} {str(file)!r}: not a file in an existing folder")
            if file is not None and file.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
                raise ValueError(f"{name} {str(file)!r} must end in .png, .jpg, .jpeg or .webp")
        check_int("--columns", self.columns, low=1, none=True)
        check_int("--enlarge", self.enlarge, low=1, high=64)
        if (self.prompts is None) == (self.classes is None):
            raise ValueError("give either --prompt or --class" + ("" if self.prompts is None else ", not both"))
        if self.prompts is not None:
            self.conditions = {"prompts": self.prompts}
        else:
            self.conditions = {"class_labels": read_classes(self.classes)}

    def write(self, output: ImageOutput) -> None:
        """Write the sheets; after an interrupt there are no pictures, only the trace."""
        if output.images is not None:
            contact_sheet(output.images, self.columns, enlarge=self.enlarge).save(self.out)
        if self.trace is not None:
            pictures = step_pictures(output, max(1, TRACE_SIDE // max(output.grid.height, output.grid.width)))
            contact_sheet(pictures, self.columns).save(self.trace)

    def summary(self, output: ImageOutput) -> str:
        """One line."""
        count, most = len(output.row_nfe), output.tokens_per_forward
        what = f"{count} picture{'' if count == 1 else 's'} of {output.grid.height} x {output.grid.width} tokens"
        end = f" in {self.out}" if output.images is not None else ", interrupted"
        return f"{what}{end}: {output.nfe} forwards, {most:.2f} tokens per forward, {output.seconds:.2f} s"

    def report(self, output: ImageOutput, sampler: Any) -> dict[str, Any]:
        """The same as data."""
        return {
            "out": None if output.images is None else str(self.out),
            **self.conditions,
            "codes": None if output.codes is None else output.codes.tolist(),
            "nfe": output.nfe,
            "row_nfe": output.row_nfe,
            "row_forwards": output.row_forwards,
            "forwarded_tokens": output.forwarded_tokens,
            "tokens_per_forward": output.tokens_per_forward,
            "accepted": output.accepted.T.tolist(),
            "seconds": output.seconds,
            "sampler": sampler.to_dict(),
            "interrupted": output.images is None,
        }


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

"""What `paradec image` does around `generate_images`: which model it is, reading classes, the sheets, the summary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paradec import caches
from paradec.checks import check_int, check_number, check_temperature, check_text
from paradec.cli.decode import forwards
from paradec.images import ImageOutput, contact_sheet, step_pictures
from paradec.models.checkpoint import CheckpointError, read_json
from paradec.models.images.loading import (
    FAMILIES,
    PACKAGED,
    PACKAGED_PIPELINES,
    file_type,
    image_adapter,
    packaged_image,
)
from paradec.pictures import MOST_IMAGES
from paradec.request import LARGEST_GUIDANCE

MOST = {"steps": 1_000_000, "height": 2**16, "width": 2**16}
"""Largest values of options."""
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
        for prompt in self.prompts or ():
            check_text("--prompt", prompt)
        if self.prompts is not None:
            self.conditions = {"prompts": self.prompts}
        elif self.classes is not None:
            self.conditions = {"class_labels": read_classes(self.classes)}

    def write(self, images: Sequence[Any] | None, steps: Any = None) -> None:
        """Write the sheets.

        Args:
            images: None after an interrupt: there are no pictures then.
            steps: [B, h, w] int64, which step made which token final, for `--trace`.
        """
        if images is not None:
            contact_sheet(images, self.columns, enlarge=self.enlarge).save(self.out)
        if self.trace is not None:
            contact_sheet(step_pictures(steps, max(1, TRACE_SIDE // max(steps.shape[1:]))), self.columns).save(
                self.trace
            )

    def summary(self, output: ImageOutput) -> str:
        """One line."""
        what = f"{count(len(output.row_nfe))} of {output.grid.height} x {output.grid.width} tokens"
        end = f" in {self.out}" if output.images is not None else ", interrupted"
        drafts = f", {forwards(output.draft_nfe)} of the drafter" if any(output.draft_nfe) else ""
        took = f"{forwards(output.row_nfe)}{drafts}, {output.tokens_per_forward:.2f} tokens per forward"
        return f"{what}{end}: {took}, {output.seconds:.2f} s"

    def report(self, output: ImageOutput, sampler: Any) -> dict[str, Any]:
        """The same as data."""
        return {
            "out": None if output.images is None else str(self.out),
            **self.conditions,
            "codes": None if output.codes is None else output.codes.tolist(),
            "nfe": output.nfe,
            "row_nfe": output.row_nfe,
            "draft_nfe": output.draft_nfe,
            "row_forwards": output.row_forwards,
            "forwarded_tokens": output.forwarded_tokens,
            "tokens_per_forward": output.tokens_per_forward,
            "accepted": output.accepted.T.tolist(),
            "seconds": output.seconds,
            "sampler": sampler.to_dict(),
            "interrupted": output.images is None,
        }


def check_options(options: dict[str, Any]) -> None:
    """Check what can be checked without the model. options: arguments of the command.

    Raises:
        ValueError: an option out of its range; the message names it.
    """
    check_int("--num-images", options["num_images"], low=1, high=MOST_IMAGES)
    for name in ("steps", "height", "width"):
        check_int(f"--{name}", options[name], low=1, high=MOST[name], none=True)
    check_int("--seed", options["seed"], low=0, high=2**63 - 1, none=True)
    check_number("--guidance-scale", options["guidance_scale"], low=0, high=LARGEST_GUIDANCE, none=True)
    check_temperature("--temperature", options["temperature"], none=True)
    check_number("--top-p", options["top_p"], low=0, high=1, none=True, open_low=True)
    check_int("--top-k", options["top_k"], low=0, none=True)
    if options["cache"] is not None:
        caches.create(options["cache"])
    if options["negative_prompt"] is not None:
        check_text("--negative-prompt", options["negative_prompt"])


def check_options_of(sampler: Any, source: str, options: dict[str, Any]) -> None:
    """Raise ValueError for an option that models with samplers of this family do not have."""
    others = [name for name in ("steps", "cache", "top_k", "top_p") if name in sampler.unserved]
    for name in others:
        if options[name] is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is not for {source!r}, which has samplers of family {sampler.family!r}")


def count(pictures: int) -> str:
    """ "1 picture", "2 pictures"."""
    return f"{pictures} picture{'' if pictures == 1 else 's'}"


def pipeline_index(source: str) -> dict[str, Any] | None:
    """What `model_index.json` says, if `source` is a diffusers pipeline; None for models of `paradec.load`.

    Raises:
        CheckpointError: neither of them.
    """
    if (source in PACKAGED and not os.path.exists(source)) or os.path.isfile(source):
        return None
    folder = packaged_image(source) if source in PACKAGED_PIPELINES and not os.path.exists(source) else source
    config = read_json(folder, "config.json", None)
    index = {} if config.get("model_type") in FAMILIES else read_json(folder, "model_index.json", None)
    if not config and not index:
        raise CheckpointError(f"{source!r} has neither config.json nor model_index.json")
    return index | {"folder": folder} if index else None


def sampler_for(source: str, sampler: str | None, settings: dict[str, Any]) -> Any:
    """The sampler of one command for a model of `paradec.load`, before its weights are read.

    Raises:
        ValueError: a sampler of a family that this model does not take, or no image model.
    """
    place = packaged_image(source) if source in PACKAGED and not os.path.exists(source) else source
    single = os.path.isfile(place)
    model_type = file_type(place) if single else read_json(place, "config.json", None).get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(
            f"--model {source!r} has model_type={model_type!r}, which makes no pictures; those that do: "
            + ", ".join(FAMILIES)
        )
    from paradec.images import picture_sampler

    return picture_sampler(image_adapter(model_type), sampler, repr(source), **settings)


def check_drafter(sampler: Any, drafter: str | None) -> None:
    """Raise ValueError where a sampler has no drafter and needs one, or has one and takes none."""
    if drafter is None and sampler.name == "speculative":
        raise ValueError("--sampler speculative needs --drafter: a smaller model of the family, or an EAGLE drafter")
    if drafter is not None and "drafter" not in sampler.settings():
        raise ValueError(f"--drafter is for speculative, lantern and lantern++; {sampler.name} takes none")


def load_draft_model(source: str, base: Any, **options: Any) -> Any:
    """A smaller model of the base's family, or an EAGLE drafter for it. options: as for `paradec.load`."""
    from paradec.models.eagle import load_drafter
    from paradec.models.loading import load

    if (source in PACKAGED and not os.path.exists(source)) or os.path.isfile(source):
        return load(source, **options)
    if read_json(source, "config.json", None).get("model_type") in FAMILIES:
        return load(source, **options)
    return load_drafter(source, base=base)


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

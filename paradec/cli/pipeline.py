"""What `paradec image` does with a diffusers pipeline: which class it is, its arguments, plain and accelerated runs.

Imports diffusers, so that the command imports it when it is needed."""

from __future__ import annotations

import inspect
import json
import time
from dataclasses import InitVar, dataclass, field
from typing import Any

import diffusers
import torch
import typer
from PIL.Image import Image

import paradec
import paradec.schedulers  # noqa: F401 - a saved pipeline may hold one of them
from paradec import samplers
from paradec.cli import show
from paradec.cli.sheets import ImageJob, Made
from paradec.core.checks import check_choice
from paradec.core.thumbnails import of_steps
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.adapter import labels_of
from paradec.models.images.pixel_dit import PixelDiTPipeline

AMUSED = ("maskgit", "halton", "lpd", "recap")
"""Samplers of pipelines of codes, as schedulers; the first is the default."""
DTYPES = ("float32", "bfloat16", "float16")


def pipeline_class(index: dict[str, Any]) -> Any:
    """The class that a model_index.json names.

    Raises:
        CheckpointError: diffusers does not have it.
    """
    name = index.get("_class_name")
    found = PixelDiTPipeline if name == "PixelDiTPipeline" else getattr(diffusers, str(name), None)
    if not isinstance(found, type) or not issubclass(found, diffusers.DiffusionPipeline):
        raise CheckpointError(f"model_index.json names {name!r}, which is no pipeline of diffusers")
    return found


def load_pipeline(cls: Any, folder: str, dtype: str | None) -> Any:
    """A pipeline with its weights; `dtype` is one of `DTYPES`, or None for the files' own.

    Raises:
        CheckpointError: it cannot be loaded.
    """
    options = {} if dtype is None else {"torch_dtype": getattr(torch, dtype)}
    try:
        return cls.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(f"{folder!r} cannot be loaded as {cls.__name__}: {reason}") from error


@dataclass
class PipelineJob:
    """One command, checked when made, before weights are read.

    Args:
        job: files and conditions. index: from `pipeline_index`. sampler: a name, or None for the default. settings: of
            the sampler. compare: whether to run without it as well.
        others: as the options of the command.

    Raises:
        ValueError: what this pipeline does not take; the message says what it takes. CheckpointError: a pipeline that
            diffusers does not have.
    """

    job: ImageJob
    index: dict[str, Any]
    sampler: InitVar[str | None]
    settings: InitVar[dict[str, Any]]
    compare: bool = False
    steps: int | None = None
    guidance_scale: float | None = None
    height: int | None = None
    width: int | None = None
    num_images: int = 1
    negative_prompt: str | None = None
    temperature: float | None = None
    seed: int | None = None
    dtype: str | None = None
    device: str | None = None
    method: Any = field(init=False)
    cls: Any = field(init=False)

    def __post_init__(self, sampler: str | None, settings: dict[str, Any]) -> None:
        name = self.index.get("_class_name")
        self.cls = pipeline_class(self.index)
        takes = inspect.signature(self.cls.__call__).parameters
        if "num_frames" in takes or not {"transformer", "unet"} & set(self.index) or "output_type" not in takes:
            raise ValueError(f"{name} makes no pictures; give it to paradec.accelerate in Python")
        self.codes = str(name).startswith("Amused")
        allowed = AMUSED if self.codes else ("taylorseer",)
        sampler = allowed[0] if sampler is None else sampler
        if sampler not in allowed:
            samplers.get(sampler)  # an unknown name says so
            raise ValueError(f"--sampler {sampler} does not work in {name}; it takes {', '.join(allowed)}")
        self.method = samplers.create(sampler, **settings)
        (condition,) = self.job.conditions
        if {"prompts": "prompt"}.get(condition, condition) not in takes:
            other = "--class" if condition == "prompts" else "--prompt"
            raise ValueError(f"{name} does not take {condition}; give {other}")
        for option in ("height", "width", "negative_prompt", "guidance_scale"):
            if getattr(self, option) is not None and option not in takes:
                raise ValueError(f"--{option.replace('_', '-')} is no argument of {name}")
        if not self.codes:
            if self.temperature is not None:
                raise ValueError("--temperature is for models of tokens; leave it out")
            if self.job.sheet_of_steps:
                raise ValueError(
                    "--trace draws which step made which token final; a diffusion model makes all pixels at every step "
                    "(--json has its calls, and --trace FILE.html draws them)"
                )
        elif self.compare:
            raise ValueError(f"--compare is for diffusion pipelines; {name} draws other codes with each sampler")
        if self.dtype is not None:
            check_choice("--dtype", self.dtype, DTYPES)
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {self.device!r} cannot be used: {str(error).splitlines()[0]}") from None

    def run(self, bars: bool = False, as_json: bool = False) -> None:
        """Load the pipeline, make the pictures, write the sheets and print what it took.

        Args:
            bars: whether to show progress. as_json: whether to print it as data.

        Raises:
            CheckpointError: the pipeline cannot be loaded.
        """
        diffusers.utils.logging.set_verbosity_error()
        if not bars:
            diffusers.utils.logging.disable_progress_bar()
        pipe = load_pipeline(self.cls, self.index["folder"], self.dtype)
        pipe = pipe if self.device is None else pipe.to(self.device)
        pipe.set_progress_bar_config(disable=not bars, leave=False)
        call = self._call(pipe)
        base = int(torch.randint(2**62, ())) if self.seed is None else self.seed
        rows = len(next(iter(call.values())))

        def paint() -> tuple[list[Image], float]:
            # one generator for each picture: it depends on its own number alone
            draw = [torch.Generator().manual_seed(base + row) for row in range(rows)]
            begin = time.perf_counter()
            images = pipe(**call, generator=draw).images
            return images, time.perf_counter() - begin

        made = self._paint_codes(pipe, call, paint) if self.codes else self._paint(pipe, paint)
        self.job.columns = rows if made.plain is not None and self.job.columns is None else self.job.columns
        record = None
        if self.job.trace is not None and not self.job.sheet_of_steps:
            record = of_steps(made.steps, made.images, self.method) if self.codes else made.told.trace(made.images)
        self.job.write((made.plain or []) + made.images, made.steps, record)
        if as_json:
            report = show.pipeline_report(self.job.out, self.job.conditions, self.cls.__name__, self.method, made)
            typer.echo(json.dumps(report))
        else:
            typer.echo(show.pipeline_summary(self.job.out, made))

    def _call(self, pipe: Any) -> dict[str, Any]:
        """The pipeline's arguments, what it is conditioned on first, a row for every picture."""
        (given,) = self.job.conditions.values()
        rows = [entry for entry in given for _ in range(self.num_images)]
        if "class_labels" in self.job.conditions:
            classes = pipe.transformer.config.num_embeds_ada_norm
            call: dict[str, Any] = {"class_labels": labels_of(rows, classes)}
        else:
            call = {"prompt": rows}
            if self.negative_prompt is not None:
                call["negative_prompt"] = [self.negative_prompt] * len(rows)
        options = {"num_inference_steps": self.steps, "guidance_scale": self.guidance_scale}
        options |= {"height": self.height, "width": self.width}
        return call | {name: value for name, value in options.items() if value is not None}

    def _paint(self, pipe: Any, paint: Any) -> Made:
        plain, plain_seconds = paint() if self.compare else (None, 0.0)
        with paradec.accelerate(pipe, self.method) as session:
            images, seconds = paint()
            return Made(images, seconds, session.report(), plain=plain, plain_seconds=plain_seconds)

    def _paint_codes(self, pipe: Any, call: dict[str, Any], paint: Any) -> Made:
        """With the sampler as the pipeline's scheduler, and for ReCAP hooks as well."""
        own: dict[str, Any] = {} if self.temperature is None else {"temperature": self.temperature}
        if self.method.name == "recap":
            session = paradec.accelerate(pipe, self.method)
            if own:
                pipe.scheduler.register_to_config(**own)
        else:
            session = None
            schedulers = paradec.schedulers
            scheduler = {"maskgit": schedulers.MaskGITScheduler, "halton": schedulers.HaltonScheduler}
            scheduler["lpd"] = schedulers.LPDScheduler
            settings = {name: getattr(self.method, name) for name in self.method.settings()}
            pipe.scheduler = scheduler[self.method.name].from_config(pipe.scheduler.config, **settings, **own)
        mask, seen = pipe.scheduler.config.mask_token_id, []
        call["callback"] = lambda step, timestep, codes: seen.append(codes.cpu())
        images, seconds = paint()
        masked = torch.stack([codes == mask for codes in seen])  # [T, B, h, w]
        return Made(images, seconds, None if session is None else session.report(), masked.sum(0).numpy())

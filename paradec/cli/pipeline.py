"""`paradec image` with a diffusers pipeline; imports diffusers."""

from __future__ import annotations

import inspect
import json
import time
from contextlib import nullcontext
from dataclasses import InitVar, dataclass, field
from typing import Any

import diffusers
import numpy as np
import torch
import typer

import paradec
import paradec.schedulers  # noqa: F401 - a saved pipeline may have one of them
from paradec import samplers
from paradec.cli.image_job import ImageJob
from paradec.core.checks import check_choice, format_count
from paradec.core.thumbnails import trace_from_steps
from paradec.models.checkpoint import CheckpointError
from paradec.models.images.base import list_labels
from paradec.models.images.pixel_dit import PixelDiTPipeline
from paradec.samplers.forecast.methods import METHODS, sampler_from

AMUSED = ("maskgit", "halton", "lpd", "recap")
"""Samplers of Amused pipelines, which generate codes; the first is the default."""
DTYPES = ("float32", "bfloat16", "float16")
CALL_FIELDS = ("transformer", "step", "branch", "kind", "evaluated", "forecast", "bytes", "seconds")


def pipeline_class(index: dict[str, Any]) -> Any:
    """Find the class that a model_index.json names. Raises CheckpointError if diffusers does not have it."""
    name = index.get("_class_name")
    cls = PixelDiTPipeline if name == "PixelDiTPipeline" else getattr(diffusers, str(name), None)
    if not isinstance(cls, type) or not issubclass(cls, diffusers.DiffusionPipeline):
        raise CheckpointError(f"model_index.json names {name!r}, which is not a pipeline of diffusers")
    return cls


def load_pipeline(cls: Any, folder: str, dtype: str | None, device: str | None, show_bars: bool = False) -> Any:
    """Load a pipeline. show_bars: whether it shows progress. Raises CheckpointError if it cannot be loaded."""
    diffusers.utils.logging.set_verbosity_error()
    if not show_bars:
        diffusers.utils.logging.disable_progress_bar()
    options = {} if dtype is None else {"torch_dtype": getattr(torch, dtype)}
    try:
        pipe = cls.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise CheckpointError(f"{folder!r} cannot be loaded as {cls.__name__}: {reason}") from error
    pipe.set_progress_bar_config(disable=not show_bars, leave=False)
    return pipe if device is None else pipe.to(device)


@dataclass
class PipelineJob:
    """`paradec image` with one pipeline. The constructor checks everything before weights are read. index: from
    `pipeline_index`. compare: also run without the sampler. request: further options."""

    job: ImageJob
    index: dict[str, Any]
    sampler: InitVar[Any]
    settings: InitVar[dict[str, Any]]
    compare: bool
    request: dict[str, Any]
    dtype: str | None
    device: str | None
    method: Any = field(init=False)
    cls: Any = field(init=False)

    def __post_init__(self, sampler: Any, settings: dict[str, Any]) -> None:
        name = self.index.get("_class_name")
        self.cls = pipeline_class(self.index)
        parameters = inspect.signature(self.cls.__call__).parameters
        has_network = bool({"transformer", "unet"} & set(self.index))
        if "num_frames" in parameters or not has_network or "output_type" not in parameters:
            raise ValueError(f"{name} makes no pictures; give it to paradec.accelerate in Python")
        self.makes_codes = str(name).startswith("Amused")
        allowed = AMUSED if self.makes_codes else tuple(method for method in METHODS if method != "recap")
        self.method = sampler = allowed[0] if sampler is None else sampler
        sampler_name = getattr(sampler, "name", sampler)
        if sampler_name in samplers.registry and sampler_name.lower() not in allowed:
            raise ValueError(f"--sampler {sampler_name} does not work in {name}; it takes {', '.join(allowed)}")
        if isinstance(sampler, str):
            self.method = samplers.create(sampler, **settings) if self.makes_codes else sampler_from(sampler, settings)
        (condition,) = self.job.conditions
        if {"prompts": "prompt"}.get(condition, condition) not in parameters:
            needed = "--class" if condition == "prompts" else "--prompt"
            raise ValueError(f"{name} does not take {condition}; give {needed}")
        for option in ("height", "width", "negative_prompt", "guidance_scale"):
            if self.request[option] is not None and option not in parameters:
                raise ValueError(f"--{option.replace('_', '-')} is not an argument of {name}")
        if self.makes_codes and self.compare:
            raise ValueError(f"--compare is for diffusion pipelines; {name} draws other codes with each sampler")
        if not self.makes_codes and self.request["temperature"] is not None:
            raise ValueError("--temperature is for models of tokens; leave it out")
        if not self.makes_codes and self.job.has_step_sheet:
            raise ValueError(
                "--trace FILE.png draws the step of each token; a diffusion model makes all pixels at every step "
                "(--json lists its calls, and --trace FILE.html draws them)"
            )
        if self.dtype is not None:
            check_choice("--dtype", self.dtype, DTYPES)
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"--device {self.device!r} cannot be used: {str(error).splitlines()[0]}") from None

    def run(self, show_bars: bool = False, as_json: bool = False) -> None:
        """Make the pictures, write the sheets and print the cost. show_bars: whether progress is shown."""
        pipe = load_pipeline(self.cls, self.index["folder"], self.dtype, self.device, show_bars)
        arguments = self._build_arguments(pipe)
        base_seed = int(torch.randint(2**62, ())) if self.request["seed"] is None else self.request["seed"]
        num_rows = len(next(iter(arguments.values())))

        def make_pictures() -> tuple[list[Any], float]:
            # one generator per picture, so that a picture depends only on its own seed
            generators = [torch.Generator().manual_seed(base_seed + row) for row in range(num_rows)]
            start = time.perf_counter()
            images = pipe(**arguments, generator=generators).images
            return images, time.perf_counter() - start

        plain_images, plain_seconds = make_pictures() if self.compare else ([], 0.0)
        steps, latents = None, list[torch.Tensor]()
        if self.makes_codes:
            session = self._set_scheduler(pipe)
            arguments["callback"] = lambda step, timestep, codes: latents.append(codes.cpu())
        else:
            session = paradec.accelerate(pipe, self.method)
        with nullcontext() if session is None or self.makes_codes else session:
            images, seconds = make_pictures()
            report: Any = None if session is None else session.report()
        if self.makes_codes:  # [B, h, w]: the step that made each code final
            mask = pipe.scheduler.config.mask_token_id
            steps = torch.stack([codes == mask for codes in latents]).sum(0).numpy()
        self.job.columns = num_rows if plain_images and self.job.columns is None else self.job.columns
        record = None
        if self.job.trace is not None and not self.job.has_step_sheet:
            record = trace_from_steps(steps, images, self.method) if self.makes_codes else report.trace(images)
        self.job.write(plain_images + images, steps, record)
        pairs = zip(images, plain_images, strict=False)
        distances = [np.abs(np.asarray(a, float) - np.asarray(b, float)).mean() for a, b in pairs]
        difference = float(np.mean(distances) / 255) if plain_images else 0.0
        comparison = {"plain_seconds": plain_seconds, "pixel_difference": difference} if plain_images else {}
        if not as_json:
            width, height = images[0].size
            pictures = format_count(len(images), "picture")
            text = f"{pictures} of {height} x {width} pixels in {self.job.out}, {seconds:.2f} s"
            if plain_images:
                text += f" (plain, above: {plain_seconds:.2f} s; pixels {comparison['pixel_difference']:.4f} apart)"
            typer.echo(text if report is None else f"{text}\n{getattr(report, 'summary', str(report))}")
            return
        data: dict[str, Any] = {"out": str(self.job.out), **self.job.conditions, "pipeline": self.cls.__name__}
        data |= {"pictures": len(images), "seconds": seconds, "sampler": self.method.to_dict(), **comparison}
        if hasattr(report, "calls"):
            calls = [{name: getattr(call, name) for name in CALL_FIELDS} for call in report.calls]
            data |= {"full_steps": report.full_steps, "bytes": report.bytes, "calls": calls}
        elif report is not None:
            data |= {"cells": report.cells, "bytes": report.bytes}
        typer.echo(json.dumps(data))

    def _build_arguments(self, pipe: Any) -> dict[str, Any]:
        """Build the pipeline's arguments: the condition first, one row per picture."""
        (values,) = self.job.conditions.values()
        rows = [entry for entry in values for _ in range(self.request["num_images"])]
        if "class_labels" in self.job.conditions:
            classes = pipe.transformer.config.num_embeds_ada_norm
            arguments: dict[str, Any] = {"class_labels": list_labels(rows, classes)}
        else:
            arguments = {"prompt": rows}
            if self.request["negative_prompt"] is not None:
                arguments["negative_prompt"] = [self.request["negative_prompt"]] * len(rows)
        options = {"num_inference_steps": self.request["steps"]}
        options |= {name: self.request[name] for name in ("guidance_scale", "height", "width")}
        return arguments | {name: value for name, value in options.items() if value is not None}

    def _set_scheduler(self, pipe: Any) -> Any:
        """Make the sampler the scheduler of a pipeline of codes. Returns the session of hooks for ReCAP, else None."""
        temperature = self.request["temperature"]
        temperature_setting: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
        if self.method.name == "recap":
            session = paradec.accelerate(pipe, self.method)
            if temperature_setting:
                pipe.scheduler.register_to_config(**temperature_setting)
            return session
        scheduler = {"maskgit": "MaskGITScheduler", "halton": "HaltonScheduler", "lpd": "LPDScheduler"}
        cls = getattr(paradec.schedulers, scheduler[self.method.name])
        settings = {name: getattr(self.method, name) for name in self.method.settings()}
        pipe.scheduler = cls.from_config(pipe.scheduler.config, **settings, **temperature_setting)
        return None

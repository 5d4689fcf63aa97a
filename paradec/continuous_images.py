"""`generate_images` for models of continuous tokens (MAR): classes to pictures, with or without ReCAP's local steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from paradec import samplers
from paradec.checks import check_bool, check_choice, check_int, check_number, shown
from paradec.models.images.adapter import labels_of
from paradec.models.images.mar import MARModel
from paradec.pictures import MOST_IMAGES, OUTPUT_TYPES, ImageOutput, pillow, to_pil
from paradec.protocol import Commit, Interrupted, Sampler, State, decode

NAMES = ("mar", "recap")
"""What a model of continuous tokens is sampled with; "recap" is "mar" with one local step for each full one."""


def continuous_sampler(sampler: str | Sampler | None, **settings: Any) -> Any:
    """The sampler behind a name, with settings.

    Raises:
        ValueError: one of another family. TypeError: no sampler.
    """
    if sampler is None or sampler == "mar":
        return samplers.create("mar", **settings)
    if sampler == "recap":
        return samplers.create("mar", preset="recap", **settings)
    if getattr(sampler, "name", None) == "recap":
        raise ValueError(
            "the sampler 'recap' with settings is that of codes; for MAR say \"recap\", or make one with "
            "paradec.samplers.create('mar', preset='recap', ...)"
        )
    return samplers.resolve(sampler, "continuous", f"MAR ({' or '.join(NAMES)})")


def generate_continuous_images(
    model: MARModel,
    class_labels: Any,
    *,
    sampler: str | Sampler | None = None,
    steps: int | None = None,
    guidance_scale: float | None = None,
    height: int | None = None,
    width: int | None = None,
    num_images: int = 1,
    temperature: float | None = None,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    callback: Callable[[State, Commit], bool | None] | None = None,
    trace: bool = False,
    output_type: str = "pil",
) -> ImageOutput:
    """What `paradec.generate_images` does with a model of continuous tokens; its docstring has the arguments.

    Args:
        sampler: "mar" (the default), "recap", or `paradec.samplers.create("mar", ...)`.
        temperature: scales the noise of the diffusion head's steps; by default the sampler's own.
        output_type: "latent" gives what the VAE decodes, [B, channels, side, side].

    Returns:
        An `ImageOutput` without codes, whose tokens are [B, positions, channels] float.

    Raises: as `generate_images`.
    """
    method = continuous_sampler(sampler)
    if class_labels is None:
        raise ValueError(f"{model.facts.name} needs class_labels")
    check_choice("output_type", output_type, OUTPUT_TYPES)
    check_int("num_images", num_images, low=1, high=MOST_IMAGES)
    check_bool("trace", trace)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback={shown(callback)} must be callable")
    check_number("temperature", temperature, low=0, none=True)
    if temperature is not None:
        method = replace(method, temperature=temperature)
    if output_type == "pil":
        pillow()
    if output_type != "latent":
        model.check_decodes()
    grid = model.grid(height, width)
    labels = [label for label in labels_of(class_labels, model.module.classes) for _ in range(num_images)]
    state = method.start(
        model,
        labels,
        steps=model.defaults["steps"] if steps is None else steps,
        guidance_scale=model.defaults["guidance_scale"] if guidance_scale is None else guidance_scale,
        seed=seed,
        generator=generator,
        trace=trace,
    )
    written: list[int] = []

    def note(state: State, commit: Commit) -> bool | None:
        written.append(commit.values.shape[1])
        return None if callback is None else callback(state, commit)

    begin = time.perf_counter()

    def output() -> ImageOutput:
        nfe, row_forwards, forwarded, _ = state.counts
        return ImageOutput(
            images=None,
            codes=None,
            tokens=state.tokens.cpu(),
            grid=grid,
            row_nfe=nfe.tolist(),
            row_forwards=int(row_forwards.sum()),
            forwarded_tokens=int(forwarded.sum()),
            accepted=np.array(written, np.int64).reshape(-1, 1).repeat(len(labels), 1),
            seconds=time.perf_counter() - begin,
            prompt_lengths=[0] * len(labels),
            trace=state.trace,
            draft_nfe=[0] * len(labels),
        )

    try:
        decode(method, cast(Any, model), state, note)
    except KeyboardInterrupt as interrupt:
        stopped = Interrupted("decoding was interrupted; what was decoded is in .output")
        stopped.output = output()
        raise stopped from interrupt
    if state.tokens.is_cuda:
        torch.cuda.synchronize(state.tokens.device)
    found = output()
    if state.done:
        if output_type == "latent":
            found.images = model.image(found.tokens)
        else:
            images = model.decode(state.tokens).cpu()
            found.images = to_pil(images) if output_type == "pil" else images
    return found

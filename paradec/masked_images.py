"""`generate_images` for masked image models: classes to pictures, by everything that decodes masked tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from paradec import samplers
from paradec.checks import check_bool, check_choice, check_int, check_temperature
from paradec.generate import Output, generate
from paradec.models.images.grid import Grid
from paradec.models.images.masked import MaskedImageModel
from paradec.pictures import MOST_IMAGES, OUTPUT_TYPES, ImageOutput, pillow, to_pil
from paradec.protocol import Interrupted, Sampler
from paradec.registry import unknown

REQUEST = ("guidance_scale", "temperature", "top_k", "top_p", "steps")
"""What a model has defaults for."""


def generate_masked_images(
    model: MaskedImageModel,
    class_labels: Any,
    *,
    sampler: str | Sampler | None = None,
    cache: Any = None,
    height: int | None = None,
    width: int | None = None,
    num_images: int = 1,
    output_type: str = "pil",
    trace: bool = False,
    **request: Any,
) -> ImageOutput:
    """What `paradec.generate_images` does with a masked image model; its docstring has the arguments.

    Args:
        sampler: by default `maskgit`. cache: by default "recap" with the sampler `recap`, and none with others.
        trace: always recorded, for masked models do not write in order.
        request: `guidance_scale`, `temperature`, `top_k`, `top_p`, `steps` (for samplers with a schedule), `seed`,
            `generator`, `callback`.

    Raises: as `generate_images`.
    """
    method = samplers.resolve("maskgit" if sampler is None else sampler, "masked", model.facts.name)
    if class_labels is None:
        raise ValueError(f"{model.facts.name} needs class_labels")
    for name in request:
        if name not in (*REQUEST, "seed", "generator", "callback"):
            raise ValueError(unknown("argument for masked image models", name, (*REQUEST, "seed", "generator")))
    check_choice("output_type", output_type, OUTPUT_TYPES)
    check_int("num_images", num_images, low=1, high=MOST_IMAGES)
    check_bool("trace", trace)
    if output_type == "pil":
        pillow()
    if output_type != "latent":
        model.check_decodes()
    grid = model.grid(height, width)
    prompts = model.prompts(class_labels, num_images)
    law = {name: model.defaults[name] if request.get(name) is None else request[name] for name in REQUEST}
    check_int("top_k", law["top_k"], low=0, none=True)
    check_temperature("temperature", law["temperature"])
    law["top_k"] = law["top_k"] or None
    if request.get("steps") is None and not method.uses_steps:
        law["steps"] = None  # the model's default is for samplers with a schedule
    if cache is None and hasattr(method, "targets"):
        cache = "recap"
    others = {name: value for name, value in request.items() if name not in REQUEST and value is not None}
    try:
        found = generate(
            model,
            input_ids=prompts,
            sampler=method,
            cache=cache,
            max_new_tokens=grid.length,
            suppress_tokens=model.suppressed,
            trace=True,
            **law,
            **others,
        )
    except Interrupted as interrupt:
        interrupt.output = _output(model, interrupt.output, grid, "latent")
        interrupt.output.images = None
        raise
    return _output(model, found, grid, output_type)


def _output(model: MaskedImageModel, found: Output, grid: Grid, output_type: str) -> ImageOutput:
    """Pictures of what was decoded; none where something is still masked."""
    tokens: Tensor = found.new_tokens.cpu()
    whole = not tokens.eq(model.facts.mask_id).any()
    codes = grid.codes(tokens) if whole else None
    images: Any = codes
    if whole and output_type != "latent":
        images = model.decode(tokens, grid).cpu()
        images = to_pil(images) if output_type == "pil" else images
    assert found.trace is not None
    accepted = np.zeros((len(found.trace.steps), len(tokens)), np.int64)
    for index, step in enumerate(found.trace.steps):
        rows = [row for row, _, token, _ in step.commits if token != model.facts.mask_token_id]
        accepted[index] = np.bincount(rows, minlength=len(tokens))
    return ImageOutput(
        images=images,
        codes=codes,
        tokens=tokens,
        grid=grid,
        row_nfe=found.row_nfe,
        row_forwards=found.row_forwards,
        forwarded_tokens=found.forwarded_tokens,
        accepted=accepted,
        seconds=found.seconds,
        prompt_lengths=[1] * len(tokens),
        trace=found.trace,
        draft_nfe=[0] * len(tokens),
    )

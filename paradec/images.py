"""`generate_images`: from prompts or class labels to pictures, with any sampler that fits the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from paradec import samplers
from paradec.checks import check_bool, check_choice, check_int, check_model, check_number, check_temperature, shown
from paradec.continuous_images import generate_continuous_images
from paradec.masked_images import generate_masked_images
from paradec.models.images.adapter import ImageModel
from paradec.models.images.grid import Grid
from paradec.models.images.mar import MARModel
from paradec.models.images.masked import MaskedImageModel
from paradec.pictures import MOST_IMAGES, OUTPUT_TYPES, ImageOutput, contact_sheet, pillow, step_pictures, to_pil
from paradec.protocol import Commit, Interrupted, Sampler, State, decode

__all__ = ["ImageOutput", "contact_sheet", "generate_images", "step_pictures", "to_pil"]


def generate_images(
    model: ImageModel | MaskedImageModel | MARModel,
    prompts: Any = None,
    *,
    class_labels: Any = None,
    sampler: str | Sampler | None = None,
    steps: int | None = None,
    cache: Any = None,
    guidance_scale: float | None = None,
    height: int | None = None,
    width: int | None = None,
    num_images: int = 1,
    negative_prompt: Any = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    callback: Callable[[State, Commit], bool | None] | None = None,
    trace: bool = False,
    output_type: str = "pil",
) -> ImageOutput:
    """Make pictures with an autoregressive or a masked image model, or one of continuous tokens (MAR).

    >>> model = paradec.load("digits-ar")                                        # doctest: +SKIP
    >>> paradec.generate_images(model, class_labels=range(10)).images[3]         # doctest: +SKIP
    >>> model = paradec.load("digits-maskgit")                                   # doctest: +SKIP
    >>> paradec.generate_images(model, class_labels=3, sampler="recap", steps=8) # doctest: +SKIP

    Args:
        model: an image model from `paradec.load` or of `paradec.models`.
        prompts: texts, one or several (for LlamaGen also features of captions).
        class_labels: for class-conditional models instead: an int or several.
        sampler: a name or a sampler of the draft-and-verify family, by default `sjd`; with window=1 it makes one token
            per forward. For masked models one that `paradec.generate` takes, by default `maskgit`.
        steps, cache: for masked models alone: forwards planned for a picture, by default the model's own, for samplers
            with a schedule; and the cache, by default "recap" with the sampler `recap`, none with others.
        guidance_scale: s in uncond + s (cond - uncond); 1 is off. By default what the model's authors use, as are
            `temperature`, `top_k` and `top_p`; top_k=0 takes all tokens, temperature=0 the likeliest one.
        height, width: of a picture in pixels; by default the model's own.
        num_images: pictures for each prompt or label, side by side in the output.
        negative_prompt: for models with text prompts: what guidance leads away from.
        seed: one for all rows or one per row. A row's numbers depend on its seed and prompt, not on its neighbours.
        generator: a torch.Generator instead, from which a seed is drawn.
        callback: `callback(state, commit)` after every step; returning True ends the decoding.
        trace: record every step in `ImageOutput.trace`; always done for masked models.
        output_type: "pil" (needs pillow), "pt" or "latent", as in diffusers.

    Returns:
        An `ImageOutput`.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        ImportError: output_type="pil" without pillow.
        FloatingPointError: the model returned NaN or infinite logits.
        Interrupted (a KeyboardInterrupt): Ctrl-C; its `output` holds the tokens until then.
    """
    check_model("generate_images", model, ("image", "masked image", "continuous image"))
    if isinstance(model, (MaskedImageModel, MARModel)):
        for name, value in (("prompts", prompts), ("negative_prompt", negative_prompt)):
            if value is not None:
                raise ValueError(f"{model.facts.name} does not take {name}; it is conditioned on class_labels")
    if isinstance(model, MARModel):
        for name, value in (("cache", cache), ("top_k", top_k), ("top_p", top_p)):
            if value is not None:
                raise ValueError(
                    f"{name}={shown(value)} is for models of codes; {model.facts.name} has continuous tokens"
                )
        return generate_continuous_images(
            model,
            class_labels,
            sampler=sampler,
            steps=steps,
            guidance_scale=guidance_scale,
            height=height,
            width=width,
            num_images=num_images,
            temperature=temperature,
            seed=seed,
            generator=generator,
            callback=callback,
            trace=trace,
            output_type=output_type,
        )
    if isinstance(model, MaskedImageModel):
        return generate_masked_images(
            model,
            class_labels,
            sampler=sampler,
            cache=cache,
            height=height,
            width=width,
            num_images=num_images,
            output_type=output_type,
            trace=trace,
            steps=steps,
            guidance_scale=guidance_scale,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            generator=generator,
            callback=callback,
        )
    for name, value in (("steps", steps), ("cache", cache)):
        if value is not None:
            also = " and MAR" if name == "steps" else ""
            raise ValueError(f"{name}={shown(value)} is for masked image models{also}; {model.facts.name} is none")
    method = samplers.resolve("sjd" if sampler is None else sampler, "draft_verify", model.facts.name)
    given = {"prompts": prompts, "class_labels": class_labels}
    for name, value in given.items():
        if value is not None and name != model.conditions:
            raise ValueError(f"{model.facts.name} does not take {name}; it is conditioned on {model.conditions}")
    if given[model.conditions] is None:
        raise ValueError(f"{model.facts.name} needs {model.conditions}")
    check_choice("output_type", output_type, OUTPUT_TYPES)
    check_int("num_images", num_images, low=1, high=MOST_IMAGES)
    check_bool("trace", trace)
    if callback is not None and not callable(callback):
        raise TypeError(f"callback={shown(callback)} must be callable")
    law = _law(model, guidance_scale, temperature, top_k, top_p)
    if output_type == "pil":
        pillow()
    if output_type != "latent":
        model.check_decodes()
    grid = model.grid(height, width)
    request = model.request(given[model.conditions], grid, num_images, negative_prompt)
    drafter = getattr(method, "drafter", None)
    if isinstance(drafter, ImageModel):  # it reads the same conditions
        own = drafter.request(given[model.conditions], grid, num_images, negative_prompt).model
        method = replace(method, drafter=own)
    guided = {} if law["guidance_scale"] == 1 else {"negative_prompt": request.unconditional}
    state = method.start(
        request.model, request.prompts, grid=grid, seed=seed, generator=generator, trace=trace, **law, **guided
    )
    begin = time.perf_counter()
    try:
        decode(method, request.model, state, callback)
    except KeyboardInterrupt as interrupt:
        stopped = Interrupted("decoding was interrupted; what was decoded is in .output")
        stopped.output = _output(state, grid, time.perf_counter() - begin)
        raise stopped from interrupt
    if state.canvas.is_cuda:
        torch.cuda.synchronize(state.canvas.device)
    output = _output(state, grid, time.perf_counter() - begin)
    if output.codes is not None:
        output.images = output.codes
        if output_type != "latent":
            images = model.decode(output.tokens, grid)
            output.images = to_pil(images) if output_type == "pil" else images.cpu()
    return output


def _law(model: ImageModel, guidance: Any, temperature: Any, top_k: Any, top_p: Any) -> dict[str, Any]:
    """The model's own settings where the request has none."""
    given = {"guidance_scale": guidance, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    law = {name: model.defaults[name] if value is None else value for name, value in given.items()}
    check_number("guidance_scale", law["guidance_scale"], low=0, high=1e6)
    check_temperature("temperature", law["temperature"])
    check_int("top_k", law["top_k"], low=0, none=True)
    check_number("top_p", law["top_p"], low=0, high=1, none=True, open_low=True)
    law["top_k"] = None if not law["top_k"] or law["top_k"] >= model.facts.vocab_size else law["top_k"]
    return law


def _output(state: Any, grid: Grid, seconds: float) -> ImageOutput:
    first = torch.as_tensor(state.prompt_length, device=state.canvas.device).unsqueeze(1)
    tokens = state.canvas.gather(1, first + torch.arange(grid.length, device=state.canvas.device)).cpu()
    nfe, row_forwards, forwarded, _ = state.counts
    return ImageOutput(
        images=None,
        codes=grid.codes(tokens) if state.done else None,
        tokens=tokens,
        grid=grid,
        row_nfe=nfe.tolist(),
        row_forwards=int(row_forwards.sum()),
        forwarded_tokens=int(forwarded.sum()),
        accepted=np.array(state.accepted, np.int64).reshape(-1, state.batch),
        seconds=seconds,
        prompt_lengths=[int(length) for length in state.prompt_length],
        trace=state.trace,
        draft_nfe=state.draft_nfe.tolist(),
    )


# ---- pictures -------------------------------------------------------------------------------------------------------

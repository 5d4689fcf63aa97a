"""`generate_images`: from prompts or class labels to pictures, with any image model and any sampler that fits it.

What differs from one kind of model to another its adapter says (`paradec.models.images.base.PictureModel`).
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch

from paradec import samplers
from paradec.api.pictures import MOST_IMAGES, OUTPUT_TYPES, ImageOutput, contact_sheet, step_pictures
from paradec.api.streaming import bar
from paradec.core.checks import MODELS, check_choice, check_int, check_model, shown
from paradec.core.protocol import Interrupted, Sampler, State, decode
from paradec.core.thumbnails import of_images, of_stage, pillow, to_pil
from paradec.models.images.base import PictureModel
from paradec.models.images.grid import Grid
from paradec.models.requests import UNSHARED
from paradec.request import Preset, Request, check_names, request_for, warn_of_unused

if TYPE_CHECKING:
    from paradec.arguments import ImageArguments as ImageArguments

__all__ = ["ImageOutput", "contact_sheet", "generate_images", "step_pictures", "to_pil"]


SERVED = (
    *("sampler", "steps", "cache", "guidance_scale", "temperature", "top_k", "top_p", "seed", "generator", "callback"),
    *("trace", "progress"),
)
"""The fields of `paradec.Request` that mean something for pictures; None takes the model's own."""
if not TYPE_CHECKING:
    ImageArguments = TypedDict("ImageArguments", dict.fromkeys(SERVED, Any), total=False)
KINDS = tuple(kind for kind, (_, home) in MODELS.items() if home == "paradec.generate_images")


def generate_images(
    model: PictureModel,
    prompts: Any = None,
    *,
    class_labels: Any = None,
    height: int | None = None,
    width: int | None = None,
    num_images: int = 1,
    negative_prompt: Any = None,
    output_type: str = "pil",
    preset: Preset | None = None,
    **arguments: Unpack[ImageArguments],
) -> ImageOutput:
    """Make pictures with an autoregressive or a masked image model, one of continuous tokens (MAR), or one's own.

    >>> model = paradec.load("digits-ar")                                        # doctest: +SKIP
    >>> paradec.generate_images(model, class_labels=range(10)).images[3]         # doctest: +SKIP
    >>> model = paradec.load("digits-maskgit")                                   # doctest: +SKIP
    >>> paradec.generate_images(model, class_labels=3, sampler="recap", steps=8) # doctest: +SKIP

    Args:
        model: an image model from `paradec.load` or of `paradec.models`.
        prompts: texts, one or several (for LlamaGen also features of captions).
        class_labels: for class-conditional models instead: an int or several.
        height, width: of a picture in pixels; by default the model's own.
        num_images: pictures for each prompt or label, side by side in the output.
        negative_prompt: for models with text prompts: what guidance leads away from.
        output_type: "pil" (needs pillow), "pt" or "latent", as in diffusers.
        preset: a `paradec.Request`, or a file that `Request.save` wrote, whose values arguments override. What a saved
            request leaves out, because it is the default for text, is the model's own here.
        sampler: a name or a sampler of the model's family: autoregressive models decode by draft and verify, by default
            `sjd` (with window=1 it makes one token per forward), masked ones by what `paradec.generate` takes, by
            default `maskgit`, MAR by "mar", "recap", which is `paradec.samplers.create("mar", preset="recap")`, or
            `cspd`, which needs a draft model, VAR by `var` or `code`, LPD by `groups`, NAR by `nar`, students by
            `distilled`.
        steps: forwards planned for a picture, by default the model's own, for samplers with a schedule.
        cache: for masked models: by default "recap" with the sampler `recap`, none with others.
        guidance_scale: s in uncond + s (cond - uncond); 1 is off. By default what the model's authors use, as are
            `temperature`, `top_k` and `top_p`; top_k=0 takes all tokens, temperature=0 the likeliest one.
        seed: one for all rows or one per row. A row's numbers depend on its seed and prompt, not on its neighbours.
        generator: a torch.Generator instead, from which a seed is drawn.
        callback: `callback(state, commit)` after every step; returning True ends the decoding.
        trace: record every step in `ImageOutput.trace`; always done for masked models.
        progress: show tqdm's bar on standard error: tokens that are final, and forwards.

    Returns:
        An `ImageOutput`.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        ImportError: output_type="pil" without pillow.
        FloatingPointError: the model returned NaN or infinite logits.
        Interrupted (a KeyboardInterrupt): Ctrl-C; its `output` holds the tokens until then.
    """
    if not isinstance(model, PictureModel):
        check_model("generate_images", model, KINDS)
        raise TypeError(
            f"generate_images takes adapters that extend {PictureModel.__module__}.PictureModel; "
            f"{type(model).__name__} does not"
        )
    check_names(arguments, [*inspect.signature(generate_images).parameters, *SERVED])
    given = _given(model, {"prompts": prompts, "class_labels": class_labels})
    request = picture_request(model, arguments, preset)
    check_output_type(model, output_type)
    check_int("num_images", num_images, low=1, high=MOST_IMAGES)
    grid = model.grid(height, width)
    laid = model.request(given, grid, num_images, negative_prompt)
    method: Any = request.sampler
    drafter = getattr(method, "drafter", None)
    if isinstance(drafter, PictureModel):  # it reads the same conditions
        method = replace(method, drafter=drafter.request(given, grid, num_images, negative_prompt).model)
    state = model.begin(method, laid, grid, request)
    state.noted = request.trace
    if hint := state.cache_advice():
        warnings.warn(hint, stacklevel=2)
    begin = time.perf_counter()
    try:
        watched = bar(state, request.callback) if request.progress else nullcontext(request.callback)
        with getattr(model, "requests", UNSHARED).slot.lock, state.freed_store(), watched as after_commit:
            decode(method, laid.model, state, after_commit)
    except KeyboardInterrupt as interrupt:
        stopped = Interrupted("decoding was interrupted; what was decoded is in .output")
        stopped.output, _ = output_of(model, state, grid, time.perf_counter() - begin)
        raise stopped from interrupt
    if laid.model.device.type == "cuda":
        torch.cuda.synchronize(laid.model.device)
    output, latent = output_of(model, state, grid, time.perf_counter() - begin)
    if latent is not None:
        output.images = latent
        if output_type != "latent":
            output.images = drawn(model, output.tokens, grid, output_type)
            if state.trace is not None and request.trace:
                state.trace.images = of_images(output.images)
                for step, stage in zip(state.trace.steps, model.stages(output.tokens), strict=False):
                    step.pictures = of_stage(stage)
    return output


def picture_request(model: PictureModel, arguments: Mapping[str, Any], preset: Preset | None = None) -> Request:
    """What `generate_images` decodes: arguments over a preset over the model's own defaults, with its sampler made.

    Args:
        arguments: fields of `SERVED`; None is not given, and top_k=0 is all tokens.

    Raises:
        TypeError: a name that is no argument. ValueError: an argument out of its range, or one that has no meaning for
            the sampler or for pictures.
    """
    asked = {name: value for name, value in arguments.items() if value is not None}
    check_int("top_k", asked.get("top_k"), low=0, none=True)
    asked |= {"top_k": None} if asked.get("top_k") == 0 else {}
    said = Request.merge_arguments(asked, preset)
    for name, value in said.items():
        if name not in SERVED:
            raise ValueError(f"{name}={shown(value)} has no meaning for pictures: leave it out of the preset")
    method = picture_sampler(model, said.pop("sampler", None), model.facts.name)
    if settings := {name: said.pop(name) for name in model.sampler_settings if name in said}:
        method = replace(method, **settings)
    fields = {**model.defaults_with(method), **said}
    fields["top_k"] = fields.get("top_k") or None
    request = request_for(method, Request(sampler=method, **fields), {})
    warn_of_unused(request, method, said)
    return request


def picture_sampler(model: PictureModel | type[PictureModel], sampler: Any, user: str, **settings: Any) -> Any:
    """The sampler that a name, or None, means for a kind of model.

    Args:
        model: an adapter, or the class of it. sampler: a name, a sampler, or None for the default. user: what messages
            call the model. settings: of a sampler that is named.

    Raises:
        TypeError: no sampler. ValueError: an unknown name, a setting out of its range, or one of another family.
    """
    sampler = model.default_sampler if sampler is None else sampler
    names, user = model.sampler_names, model.title or user
    if isinstance(sampler, str):
        name, own_preset = names.get(sampler, (sampler, None))
        sampler = samplers.create(name, preset=own_preset, **settings)
    elif isinstance(sampler, Sampler) and sampler.name in names:
        name, own_preset = names[sampler.name]
        raise ValueError(
            f"the sampler {sampler.name!r} with settings is of family {sampler.family!r}; for {user} say "
            f"{sampler.name!r} alone, or make one with paradec.samplers.create({name!r}, preset={own_preset!r}, ...)"
        )
    return samplers.resolve(sampler, model.family, user)


def check_output_type(model: PictureModel, output_type: Any) -> None:
    """Raise ValueError or ImportError where pictures cannot be given out so."""
    check_choice("output_type", output_type, OUTPUT_TYPES)
    if output_type == "pil":
        pillow()
    if output_type != "latent":
        model.check_decodes()


def drawn(model: PictureModel, tokens: torch.Tensor, grid: Grid, output_type: str) -> Any:
    """The pictures of whole answers [B, N]: `ImageOutput.images`, as "pil" or "pt"."""
    images = model.decode(tokens, grid).cpu()
    return to_pil(images) if output_type == "pil" else images


def _given(model: PictureModel, conditions: Mapping[str, Any]) -> Any:
    """What the model is conditioned on."""
    for name, value in conditions.items():
        if value is not None and name != model.conditions:
            raise ValueError(f"{model.facts.name} does not take {name}; it is conditioned on {model.conditions}")
    if conditions[model.conditions] is None:
        raise ValueError(f"{model.facts.name} needs {model.conditions}")
    return conditions[model.conditions]


def output_of(model: PictureModel, state: State, grid: Grid, seconds: float) -> tuple[ImageOutput, torch.Tensor | None]:
    """The output without pictures, and what they are decoded from: None where one is not whole."""
    found = model.read(state, grid)
    latent = model.latent(found.tokens, grid) if found.whole else None
    nfe, row_forwards, forwarded, _ = state.counts
    if state.trace is not None:
        state.trace.grid = (grid.height, grid.width)
        offsets = grid.cell_offsets.tolist()
        state.trace.cells = [[first + offset for offset in offsets] for first in found.prompt_lengths]
    output = ImageOutput(
        images=None,
        codes=None if latent is None or latent.is_floating_point() else latent,
        tokens=found.tokens,
        grid=grid,
        row_nfe=nfe.tolist(),
        row_forwards=int(row_forwards.sum()),
        forwarded_tokens=int(forwarded.sum()),
        accepted=found.accepted,
        seconds=seconds,
        prompt_lengths=found.prompt_lengths,
        trace=state.trace,
        draft_nfe=found.draft_nfe,
    )
    return output, latent

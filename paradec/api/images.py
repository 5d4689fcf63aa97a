"""`generate_images`: pictures from prompts or class labels, with any image model and a sampler of its family.

Adapters hide the differences between models (`paradec.models.images.base.PictureModel`).
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor

from paradec import samplers
from paradec.api.output import check_recorded
from paradec.api.streaming import progress_callback
from paradec.core.checks import MODELS, check_choice, check_int, check_model, format_count, short_repr, throughput_unit
from paradec.core.protocol import Sampler, State, decode, interruptible
from paradec.core.thumbnails import RAMP, images_to_uris, import_pillow, preview_images, to_pil
from paradec.core.trace import Trace
from paradec.core.weights import weights_lock
from paradec.models.images.base import PictureModel
from paradec.models.images.grid import Grid
from paradec.request import Preset, Request, check_names, request_for, warn_of_unused

if TYPE_CHECKING:
    from paradec.arguments import ImageArguments as ImageArguments

__all__ = ["ImageOutput", "contact_sheet", "generate_images", "step_pictures", "to_pil"]

OUTPUT_TYPES = ("pil", "pt", "latent")
MAX_IMAGES = 100_000
"""Maximum number of pictures for one prompt or class."""
IMAGE_FIELDS = (
    *("sampler", "steps", "cache", "guidance_scale", "temperature", "top_k", "top_p", "seed", "generator", "callback"),
    *("trace", "progress"),
)
"""Fields of `paradec.Request` that apply to pictures; None is the model's own default."""
if not TYPE_CHECKING:
    ImageArguments = TypedDict("ImageArguments", dict.fromkeys(IMAGE_FIELDS, Any), total=False)
KINDS = tuple(kind for kind, (_, home) in MODELS.items() if home == "paradec.generate_images")


@dataclass(repr=False)
class ImageOutput:
    """Result of `generate_images`. `B` pictures of `h` x `w` tokens; answers of `N` tokens, including structure tokens
    such as row ends. Models of continuous tokens (MAR) have `C'` numbers per token instead of codes."""

    images: Any
    """A list of B PIL images ("pil"), a float32 tensor [B, channels, H, W] in [0, 1] ("pt"), or the codes ("latent";
    for continuous tokens [B, C', h, w]). None after an interrupt that left a picture incomplete."""
    codes: Tensor | None
    """[B, h, w] int64: indices into the codebook. None for incomplete pictures, and for continuous tokens."""
    tokens: Tensor
    """[B, N] int64: the generated tokens, in order of positions; [B, N, C'] float for continuous tokens."""
    grid: Grid
    row_nfe: list[int]
    """Forward calls that evaluated each row."""
    row_forwards: int
    """Rows evaluated, summed over all calls (a guidance pair counts 2)."""
    forwarded_tokens: int
    """Positions evaluated, summed over all rows, without padding."""
    accepted: np.ndarray
    """[steps, B] int64: number of tokens that became final at each step of each row; 0 after the row's end. From
    `generate_many`, minus the number of tokens that were masked again."""
    seconds: float
    """Wall time of the decoding loop, without the VQ decoder."""
    prompt_lengths: list[int]
    recorded_trace: Trace | None = None
    draft_nfe: list[int] = field(default_factory=list)
    """Forward calls of the drafter for each row, which `row_nfe` does not count; 0 without a drafter."""
    in_order: bool = True
    """Whether each row was decoded in order of positions, so that `accepted` determines the step of each token."""
    index: int | None = None
    """From `generate_many`: number of the prompt, from 0."""
    id: Any = None
    """From `generate_many`: the caller's name of the prompt."""
    error: Exception | None = None
    """From `generate_many`: why the picture is not complete; the other fields hold the tokens decoded so far."""

    def __repr__(self) -> str:
        rows, size = len(self.row_nfe), f"{self.grid.height} x {self.grid.width}"
        description = "no pictures yet" if self.images is None else f"{format_count(rows, 'picture')} of {size} tokens"
        return (
            f"ImageOutput({description}: {format_count(self.nfe, 'forward')}, {self.tokens_per_forward:.2f} "
            f"{throughput_unit(rows)}, {self.seconds:.2f} s{', trace' * (self.recorded_trace is not None)})"
        )

    @property
    def trace(self) -> Trace:
        """The recorded steps. Raises NoTraceError without `trace=True`."""
        return check_recorded(self.recorded_trace)

    @property
    def prior_token_ids(self) -> Tensor:
        """[B, 4 h w] int64: the argument `prior_token_ids` of GlmImagePipeline, from GLM-Image's prior.

        Raises:
            AttributeError: another model's pictures, or incomplete pictures.
        """
        if not hasattr(self.grid, "prior_token_ids") or self.codes is None:
            raise AttributeError("prior_token_ids: only complete pictures of GLM-Image's prior have them")
        return self.grid.prior_token_ids(self.tokens)

    @property
    def nfe(self) -> int:
        """Number of function evaluations: the maximum of `row_nfe`."""
        return max(self.row_nfe)

    @property
    def tokens_per_forward(self) -> float:
        """Final tokens divided by `sum(row_nfe)`."""
        tokens = self.tokens.shape[:2].numel()
        return min(tokens, int(self.accepted.sum())) / max(1, sum(self.row_nfe))

    @property
    def steps(self) -> np.ndarray:
        """[B, h, w] int64: the step, from 0, at which each image token became final; -1 for undecided tokens.

        Read from the trace. Without a trace, computed from `accepted`, if each row was decoded in order of positions
        (all autoregressive samplers except `zipar`); else raises ValueError."""
        if self.recorded_trace is None and self.tokens.ndim == 3:
            raise ValueError("continuous tokens are not written in order: make the pictures with trace=True")
        if self.recorded_trace is None and not self.in_order:
            raise ValueError("masked tokens are not written in order: make the pictures with generate_images")
        offsets = self.grid.cell_offsets.numpy()
        if self.recorded_trace is None:
            ends = self.accepted.cumsum(0)  # [steps, B]
            steps = np.stack([np.searchsorted(row, offsets, side="right") for row in ends.T])
            steps[steps == len(ends)] = -1
        else:
            last_step = np.full((len(self.prompt_lengths), max(self.prompt_lengths) + self.grid.length), -1)
            for index, step in enumerate(self.trace.steps):
                for row, position, _, _ in step.commits:
                    last_step[row, position] = index
            steps = np.stack([row[first + offsets] for row, first in zip(last_step, self.prompt_lengths)])
        return steps.reshape(-1, self.grid.height, self.grid.width)


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
    """Make pictures with an autoregressive, masked or continuous (MAR) image model, or a custom one.

    >>> model = paradec.load("digits-ar")                                        # doctest: +SKIP
    >>> paradec.generate_images(model, class_labels=range(10)).images[3]         # doctest: +SKIP
    >>> model = paradec.load("digits-maskgit")                                   # doctest: +SKIP
    >>> paradec.generate_images(model, class_labels=3, sampler="recap", steps=8) # doctest: +SKIP

    Args:
        model: an image model from `paradec.load` or of `paradec.models`.
        prompts: one or several texts (for LlamaGen also features of captions).
        class_labels: for class-conditional models, instead of prompts: one or several ints.
        height, width: size of a picture in pixels; by default the model's own.
        num_images: pictures per prompt or label, in neighbouring rows.
        negative_prompt: text for the unconditional branch of guidance, for models with text prompts.
        output_type: "pil" (needs pillow), "pt" or "latent", as in diffusers.
        preset: a `paradec.Request`, or a file that `Request.save` wrote; arguments override its values. Fields
            with the default of `Request` get the model's own default.
        sampler: a name, or a sampler of the model's family. Autoregressive models: draft-and-verify samplers, by
            default `sjd` (with window=1: one token per forward). Masked models: samplers of `paradec.generate`, by
            default `maskgit`. MAR: "mar", "recap" (`paradec.samplers.create("mar", preset="recap")`), or `cspd`, which
            needs a draft model. VAR: `var` or `code`. LPD: `groups`. NAR: `nar`. Students: `distilled`.
        steps: forwards per picture, for samplers with a schedule; by default the model's own.
        cache: for masked models; by default "recap" with the sampler `recap`, else none.
        guidance_scale: s in uncond + s (cond - uncond); 1 is off. Like `temperature`, `top_k` and `top_p`, by default
            the value of the model's authors. top_k=0 allows all tokens; temperature=0 takes the likeliest token.
        seed: one for all rows or one per row. A row's draws depend on its seed and prompt, not on its neighbours.
        generator: a torch.Generator that draws the seed, instead of `seed`.
        callback: `callback(state, commit)` after every step; returning True ends the decoding.
        trace: record every step in `ImageOutput.trace`; always on for masked models.
        progress: show a tqdm bar of final tokens and forwards on standard error.

    Returns:
        An `ImageOutput`.

    Raises:
        ValueError, TypeError: an argument out of its range, before any work is done; the message names it.
        ImportError: output_type="pil" without pillow.
        FloatingPointError: the model returned NaN or infinite logits.
        Interrupted (a KeyboardInterrupt): Ctrl-C; its `output` holds the tokens decoded so far.
    """
    if not isinstance(model, PictureModel):
        check_model("generate_images", model, KINDS)
        raise TypeError(
            f"generate_images takes adapters that extend {PictureModel.__module__}.PictureModel; "
            f"{type(model).__name__} does not"
        )
    allowed = [*inspect.signature(generate_images).parameters, *IMAGE_FIELDS]
    check_names(arguments, allowed, arguments.get("sampler"), model.default_sampler)
    conditions = choose_conditions(model, {"prompts": prompts, "class_labels": class_labels})
    request = picture_request(model, arguments, preset)
    check_output_type(model, output_type)
    check_int("num_images", num_images, low=1, high=MAX_IMAGES)
    grid = model.grid(height, width)
    image_request = model.request(conditions, grid, num_images, negative_prompt)
    sampler: Any = request.sampler
    drafter = getattr(sampler, "drafter", None)
    if isinstance(drafter, PictureModel):  # the drafter reads the same conditions
        sampler = replace(sampler, drafter=drafter.request(conditions, grid, num_images, negative_prompt).model)
    state = model.begin(sampler, image_request, grid, request)
    state.has_notes = request.trace
    if hint := state.cache_advice():
        warnings.warn(hint, stacklevel=2)
    begin = time.perf_counter()

    def output_so_far() -> tuple[ImageOutput, Tensor | None]:
        return build_output(model, state, grid, time.perf_counter() - begin)

    observer: Any = nullcontext(request.callback)
    if request.progress:
        observer = progress_callback(state, request.callback)
    with (
        interruptible(lambda: output_so_far()[0]),
        weights_lock(model),
        state.release_stores_on_exit(),
        observer as after_commit,
    ):
        decode(sampler, image_request.model, state, after_commit)
    if image_request.model.device.type == "cuda":
        torch.cuda.synchronize(image_request.model.device)
    output, latent = output_so_far()
    if latent is not None:
        output.images = latent if output_type == "latent" else make_images(model, output.tokens, grid, output_type)
        if output_type != "latent" and state.trace is not None and request.trace:
            state.trace.images = images_to_uris(output.images)
            for step, stage in zip(state.trace.steps, model.stages(output.tokens), strict=False):
                step.pictures = preview_images(stage)
    return output


def picture_request(model: PictureModel, arguments: Mapping[str, Any], preset: Preset | None = None) -> Request:
    """Make the request of `generate_images`, with its sampler. Arguments override the preset, which overrides the
    model's defaults.

    arguments: fields of `IMAGE_FIELDS`; None is ignored, and top_k=0 means all tokens.
    Raises TypeError: an unknown name. ValueError: an argument out of its range, or without a meaning for the sampler or
    for pictures."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    check_int("top_k", arguments.get("top_k"), low=0, none=True)
    if arguments.get("top_k") == 0:
        arguments["top_k"] = None
    merged = Request.merge_arguments(arguments, preset)
    for name, value in merged.items():
        if name not in IMAGE_FIELDS:
            raise ValueError(f"{name}={short_repr(value)} has no meaning for pictures: leave it out")
    sampler = picture_sampler(model, merged.pop("sampler", None), model.facts.name)
    if settings := {name: merged.pop(name) for name in model.sampler_settings if name in merged}:
        sampler = replace(sampler, **settings)
    fields = {**model.defaults_with(sampler), **merged}
    fields["top_k"] = fields.get("top_k") or None
    request = request_for(sampler, Request(sampler=sampler, **fields), {})
    warn_of_unused(request, sampler, merged)
    return request


def picture_sampler(model: PictureModel | type[PictureModel], sampler: Any, user: str, **settings: Any) -> Any:
    """Make and check the sampler for an image model.

    model: an adapter or its class. sampler: a name, a sampler, or None for the default. user: the model's name in
        messages. settings: settings of a sampler that is given by name.
    Raises TypeError: not a sampler. ValueError: an unknown name, a setting out of its range, or another family."""
    sampler = model.default_sampler if sampler is None else sampler
    names, user = model.sampler_names, model.title or user
    if isinstance(sampler, str):
        name, preset_name = names.get(sampler.lower(), (sampler, None))
        sampler = samplers.create(name, preset=preset_name, **settings)
    elif isinstance(sampler, Sampler) and sampler.name in names:
        name, preset_name = names[sampler.name]
        raise ValueError(
            f"the sampler {sampler.name!r} with settings is of family {sampler.family!r}; for {user} write "
            f"{sampler.name!r} alone, or make one with paradec.samplers.create({name!r}, preset={preset_name!r}, ...)"
        )
    if not isinstance(sampler, Sampler):
        hint = f"; call it: {sampler.__name__}()" if isinstance(sampler, type) else ""
        raise TypeError(f"sampler={short_repr(sampler)} must be a name or made by paradec.samplers.create{hint}")
    if sampler.family != model.family:
        allowed = [name for name in samplers.names() if samplers.get(name).family == model.family]
        raise ValueError(
            f"sampler {sampler.name!r} is of family {sampler.family!r}; {user} takes the {model.family!r} family: "
            f"{', '.join(allowed)}"
        )
    return sampler


def check_output_type(model: PictureModel, output_type: Any) -> None:
    """Raise ValueError or ImportError if the model cannot return pictures of this type."""
    check_choice("output_type", output_type, OUTPUT_TYPES)
    if output_type == "pil":
        import_pillow()
    if output_type != "latent":
        model.check_decodes()


def make_images(model: PictureModel, tokens: Tensor, grid: Grid, output_type: str) -> Any:
    """Decode complete answers [B, N] to `ImageOutput.images`, as "pil" or "pt"."""
    images = model.decode(tokens, grid).cpu()
    return to_pil(images) if output_type == "pil" else images


def choose_conditions(model: PictureModel, conditions: Mapping[str, Any]) -> Any:
    """Return the conditions that the model uses. Raises ValueError if they are missing, or for other conditions."""
    for name, value in conditions.items():
        if value is not None and name != model.conditions:
            raise ValueError(f"{model.facts.name} does not take {name}; it is conditioned on {model.conditions}")
    if conditions[model.conditions] is None:
        raise ValueError(f"{model.facts.name} needs {model.conditions}")
    return conditions[model.conditions]


def build_output(model: PictureModel, state: State, grid: Grid, seconds: float) -> tuple[ImageOutput, Tensor | None]:
    """Read the output of a state, without pictures. Also returns the pictures' latent, None if one is incomplete."""
    answers = model.read(state, grid)
    latent = model.latent(answers.tokens, grid) if answers.is_complete else None
    nfe, row_forwards, forwarded, _ = state.counts
    if state.trace is not None:
        state.trace.grid = (grid.height, grid.width)
        offsets = grid.cell_offsets.tolist()
        state.trace.cells = [[first + offset for offset in offsets] for first in answers.prompt_lengths]
    output = ImageOutput(
        images=None,
        codes=None if latent is None or latent.is_floating_point() else latent,
        tokens=answers.tokens,
        grid=grid,
        row_nfe=nfe.tolist(),
        row_forwards=int(row_forwards.sum()),
        forwarded_tokens=int(forwarded.sum()),
        accepted=answers.accepted,
        seconds=seconds,
        prompt_lengths=answers.prompt_lengths,
        recorded_trace=state.trace,
        draft_nfe=answers.draft_nfe,
    )
    return output, latent


# ---- sheets of pictures ---------------------------------------------------------------------------------------------


def contact_sheet(images: Sequence[Any], columns: int | None = None, gap: int = 2, enlarge: int = 1) -> Any:
    """Arrange images row by row on a white PIL image.

    images: PIL images of one size. columns: images per row; by default about as many as rows.
    gap: pixels between images. enlarge: factor by which width and height grow.
    Raises ValueError: no images, or an argument out of its range."""
    if not images:
        raise ValueError("images is empty; give at least one")
    columns = int(np.ceil(len(images) ** 0.5)) if columns is None else columns
    for name, value, low in (("columns", columns, 1), ("gap", gap, 0), ("enlarge", enlarge, 1)):
        check_int(name, value, low=low)
    library = import_pillow()
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    width, height = (side * enlarge for side in images[0].size)
    mode = images[0].mode
    size = (columns * (width + gap) - gap, rows * (height + gap) - gap)
    sheet = library.new(mode, size, 255 if mode == "L" else (255, 255, 255))
    for index, image in enumerate(images):
        corner = (index % columns * (width + gap), index // columns * (height + gap))
        sheet.paste(image.resize((width, height), library.Resampling.NEAREST), corner)
    return sheet


def step_pictures(output: ImageOutput | np.ndarray, pixels: int = 8) -> list[Any]:
    """Colour each token by the step that made it final: dark first, yellow last, black for undecided tokens.

    output: of `generate_images`, or its `steps` [B, h, w] int64. pixels: width and height of a token.
    Returns B PIL images of [w * pixels, h * pixels]."""
    check_int("pixels", pixels, low=1)
    library = import_pillow()
    steps = output if isinstance(output, np.ndarray) else output.steps
    last = max(1, int(steps.max()))
    level = np.clip(steps, 0, None)[..., None] / last * (len(RAMP) - 1)
    low = np.clip(level.astype(int), 0, len(RAMP) - 2)
    ramp = np.array(RAMP, float)
    colours = ramp[low[..., 0]] + (level - low) * (ramp[low[..., 0] + 1] - ramp[low[..., 0]])
    colours[steps < 0] = 0
    pictures = colours.round().astype(np.uint8).repeat(pixels, 1).repeat(pixels, 2)
    return [library.fromarray(picture) for picture in pictures]

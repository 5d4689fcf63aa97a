"""`generate_images`: from prompts or class labels to pictures, with any image model and any sampler that fits it.

What differs from one kind of model to another its adapter says (`paradec.models.images.base.PictureModel`).
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
from paradec.api.streaming import bar
from paradec.core.checks import MODELS, check_choice, check_int, check_model, format_count, shown, throughput_unit
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
"""Pictures that one prompt or class can become."""
SERVED = (
    *("sampler", "steps", "cache", "guidance_scale", "temperature", "top_k", "top_p", "seed", "generator", "callback"),
    *("trace", "progress"),
)
"""The fields of `paradec.Request` that mean something for pictures; None takes the model's own."""
if not TYPE_CHECKING:
    ImageArguments = TypedDict("ImageArguments", dict.fromkeys(SERVED, Any), total=False)
KINDS = tuple(kind for kind, (_, home) in MODELS.items() if home == "paradec.generate_images")


@dataclass(repr=False)
class ImageOutput:
    """The result of `generate_images`. `B` pictures of `h` x `w` tokens, answers of `N` tokens (structure included).
    Models of continuous tokens (MAR) have no codes: `C'` numbers for each token instead."""

    images: Any
    """A list of B PIL images ("pil"), a float32 tensor [B, C, H, W] in [0, 1] ("pt"), or the codes again ("latent"; for
    continuous tokens [B, C', h, w]); None after an interrupt, when some picture is not whole."""
    codes: Tensor | None
    """[B, h, w] int64: indices into the codebook, row by row; None after an interrupt, and for continuous tokens."""
    tokens: Tensor
    """[B, N] int64: the answers as the model writes them; [B, N, C'] float where they are continuous."""
    grid: Grid
    row_nfe: list[int]
    """Forward calls that each row took part in."""
    row_forwards: int
    """Rows evaluated, all calls together (a guidance pair counts 2)."""
    forwarded_tokens: int
    """Positions evaluated, all rows together, padding excluded."""
    accepted: np.ndarray
    """[steps, B] int64: tokens that became final at each step of each row; 0 where a row had ended. From
    `generate_many` less those that were taken back."""
    seconds: float
    """Wall time of the decoding loop, without the VQ decoder."""
    prompt_lengths: list[int]
    recorded_trace: Trace | None = None
    draft_nfe: list[int] = field(default_factory=list)
    """Forward calls of the smaller model that drafted for each row, which `row_nfe` leaves out; 0 without one."""
    in_order: bool = True
    """Whether each row was written in order, so that `accepted` says which step made which token."""
    index: int | None = None
    """From `generate_many`: which prompt this is the picture of, from 0."""
    id: Any = None
    """From `generate_many`: what the caller named the prompt."""
    error: Exception | None = None
    """From `generate_many`: why there is no whole picture; the other fields hold what was decoded until then."""

    def __repr__(self) -> str:
        rows, size = len(self.row_nfe), f"{self.grid.height} x {self.grid.width}"
        what = "no pictures yet" if self.images is None else f"{format_count(rows, 'picture')} of {size} tokens"
        return (
            f"ImageOutput({what}: {format_count(self.nfe, 'forward')}, {self.tokens_per_forward:.2f} "
            f"{throughput_unit(rows)}, {self.seconds:.2f} s{', trace' * (self.recorded_trace is not None)})"
        )

    @property
    def trace(self) -> Trace:
        """What each step did. Raises NoTraceError without `trace=True`."""
        return check_recorded(self.recorded_trace)

    @property
    def prior_token_ids(self) -> Tensor:
        """[B, 4 h w] int64: what GlmImagePipeline takes, from GLM-Image's prior.

        Raises:
            AttributeError: another model's pictures, or one that is not whole.
        """
        if not hasattr(self.grid, "prior_token_ids") or self.codes is None:
            raise AttributeError("prior_token_ids: only whole pictures of GLM-Image's prior have them")
        return self.grid.prior_token_ids(self.tokens)

    @property
    def nfe(self) -> int:
        """Number of function evaluations: the forwards that the pictures took, of several rows those of the row with
        most."""
        return max(self.row_nfe)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per forward, of several rows per row call (`sum(row_nfe)`); after an interrupt, of those that were
        final."""
        tokens = self.tokens.shape[:2].numel()
        return min(tokens, int(self.accepted.sum())) / max(1, sum(self.row_nfe))

    @property
    def steps(self) -> np.ndarray:
        """[B, h, w] int64: the step, from 0, at which each image token became final; -1 where none did.

        Read from the trace where there is one, else from `accepted`, as if each row was written in order (the samplers
        of autoregressive models but `zipar` do).

        Raises:
            ValueError: tokens that are not written in order, without a trace.
        """
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
            written = np.full((len(self.prompt_lengths), max(self.prompt_lengths) + self.grid.length), -1)
            for index, step in enumerate(self.trace.steps):
                for row, position, _, _ in step.commits:
                    written[row, position] = index
            steps = np.stack([row[first + offsets] for row, first in zip(written, self.prompt_lengths)])
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
    conditions = choose_conditions(model, {"prompts": prompts, "class_labels": class_labels})
    request = picture_request(model, arguments, preset)
    check_output_type(model, output_type)
    check_int("num_images", num_images, low=1, high=MAX_IMAGES)
    grid = model.grid(height, width)
    laid = model.request(conditions, grid, num_images, negative_prompt)
    sampler: Any = request.sampler
    drafter = getattr(sampler, "drafter", None)
    if isinstance(drafter, PictureModel):  # it reads the same conditions
        sampler = replace(sampler, drafter=drafter.request(conditions, grid, num_images, negative_prompt).model)
    state = model.begin(sampler, laid, grid, request)
    state.has_notes = request.trace
    if hint := state.cache_advice():
        warnings.warn(hint, stacklevel=2)
    begin = time.perf_counter()

    def output_so_far() -> tuple[ImageOutput, Tensor | None]:
        return build_output(model, state, grid, time.perf_counter() - begin)

    watched: Any = bar(state, request.callback) if request.progress else nullcontext(request.callback)
    with (
        interruptible(lambda: output_so_far()[0]),
        weights_lock(model),
        state.release_stores_on_exit(),
        watched as after_commit,
    ):
        decode(sampler, laid.model, state, after_commit)
    if laid.model.device.type == "cuda":
        torch.cuda.synchronize(laid.model.device)
    output, latent = output_so_far()
    if latent is not None:
        output.images = latent if output_type == "latent" else make_images(model, output.tokens, grid, output_type)
        if output_type != "latent" and state.trace is not None and request.trace:
            state.trace.images = images_to_uris(output.images)
            for step, stage in zip(state.trace.steps, model.stages(output.tokens), strict=False):
                step.pictures = preview_images(stage)
    return output


def picture_request(model: PictureModel, arguments: Mapping[str, Any], preset: Preset | None = None) -> Request:
    """Make the request of `generate_images`: arguments over a preset over the model's defaults, with its sampler made.

    arguments: fields of `SERVED`; None is not given, and top_k=0 is all tokens.
    Raises TypeError: a name that is no argument. ValueError: an argument out of its range, or one that has no meaning
    for the sampler or for pictures."""
    arguments = {name: value for name, value in arguments.items() if value is not None}
    check_int("top_k", arguments.get("top_k"), low=0, none=True)
    if arguments.get("top_k") == 0:
        arguments["top_k"] = None
    merged = Request.merge_arguments(arguments, preset)
    for name, value in merged.items():
        if name not in SERVED:
            raise ValueError(f"{name}={shown(value)} has no meaning for pictures: leave it out")
    sampler = picture_sampler(model, merged.pop("sampler", None), model.facts.name)
    if settings := {name: merged.pop(name) for name in model.sampler_settings if name in merged}:
        sampler = replace(sampler, **settings)
    fields = {**model.defaults_with(sampler), **merged}
    fields["top_k"] = fields.get("top_k") or None
    request = request_for(sampler, Request(sampler=sampler, **fields), {})
    warn_of_unused(request, sampler, merged)
    return request


def picture_sampler(model: PictureModel | type[PictureModel], sampler: Any, user: str, **settings: Any) -> Any:
    """Make the sampler that a name, or None, means for a kind of model.

    model: an adapter, or the class of it. sampler: a name, a sampler, or None for the default. user: what messages call
        the model. settings: of a sampler that is named.
    Raises TypeError: no sampler. ValueError: an unknown name, a setting out of its range, or one of another family."""
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
    if not isinstance(sampler, Sampler):
        hint = f"; call it: {sampler.__name__}()" if isinstance(sampler, type) else ""
        raise TypeError(f"sampler={shown(sampler)} must be a name or made by paradec.samplers.create{hint}")
    if sampler.family != model.family:
        allowed = [name for name in samplers.names() if samplers.get(name).family == model.family]
        raise ValueError(
            f"sampler {sampler.name!r} is of family {sampler.family!r}; {user} takes the {model.family!r} family: "
            f"{', '.join(allowed)}"
        )
    return sampler


def check_output_type(model: PictureModel, output_type: Any) -> None:
    """Raise ValueError or ImportError where pictures cannot be given out so."""
    check_choice("output_type", output_type, OUTPUT_TYPES)
    if output_type == "pil":
        import_pillow()
    if output_type != "latent":
        model.check_decodes()


def make_images(model: PictureModel, tokens: Tensor, grid: Grid, output_type: str) -> Any:
    """Decode whole answers [B, N] to `ImageOutput.images`, as "pil" or "pt"."""
    images = model.decode(tokens, grid).cpu()
    return to_pil(images) if output_type == "pil" else images


def choose_conditions(model: PictureModel, conditions: Mapping[str, Any]) -> Any:
    """Return the conditions of the model's kind. Raises ValueError where they are missing, or others are given."""
    for name, value in conditions.items():
        if value is not None and name != model.conditions:
            raise ValueError(f"{model.facts.name} does not take {name}; it is conditioned on {model.conditions}")
    if conditions[model.conditions] is None:
        raise ValueError(f"{model.facts.name} needs {model.conditions}")
    return conditions[model.conditions]


def build_output(model: PictureModel, state: State, grid: Grid, seconds: float) -> tuple[ImageOutput, Tensor | None]:
    """Read a state: the output without pictures, and what they are decoded from, None where one is not whole."""
    answers = model.read(state, grid)
    latent = model.latent(answers.tokens, grid) if answers.whole else None
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
    """One PIL image with all of them, row by row on white.

    images: PIL images of one size. columns: pictures in a row; by default about as many as rows.
    gap: pixels between them. enlarge: pixels that a pixel becomes, along each side.
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
        place = (index % columns * (width + gap), index // columns * (height + gap))
        sheet.paste(image.resize((width, height), library.Resampling.NEAREST), place)
    return sheet


def step_pictures(output: ImageOutput | np.ndarray, pixels: int = 8) -> list[Any]:
    """For every picture, which step made which token final: dark first, yellow last, black what no step did.

    Tokens of one colour were committed together.

    output: of `generate_images`, or steps as its `steps` has them: [B, h, w] int64. pixels: along the side of a token.
    Returns B PIL images of [w * pixels, h * pixels]."""
    check_int("pixels", pixels, low=1)
    library = import_pillow()
    steps = output if isinstance(output, np.ndarray) else output.steps
    last = max(1, int(steps.max()))
    share = np.clip(steps, 0, None)[..., None] / last * (len(RAMP) - 1)
    low = np.clip(share.astype(int), 0, len(RAMP) - 2)
    ramp = np.array(RAMP, float)
    colours = ramp[low[..., 0]] + (share - low) * (ramp[low[..., 0] + 1] - ramp[low[..., 0]])
    colours[steps < 0] = 0
    pictures = colours.round().astype(np.uint8).repeat(pixels, 1).repeat(pixels, 2)
    return [library.fromarray(picture) for picture in pictures]

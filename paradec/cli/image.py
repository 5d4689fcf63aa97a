"""`paradec image`: pictures of a model of `paradec.load`, or of a diffusers pipeline (`paradec.cli.pipeline`).

Which of the two it is, and whether they take the options, is known before weights are read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec import caches
from paradec.cli import options, show
from paradec.cli.sheets import ImageJob
from paradec.core.checks import MODELS, check_int, check_text, shown
from paradec.core.interrupts import EXIT_CODE, raise_again
from paradec.request import FIELDS

NEED_A_DRAFTER = {
    "speculative": "a smaller model of the family, or an EAGLE or DFlash drafter",
    "cspd": "a smaller MAR with the same VAE",
    "code": "a larger VAR with the same VQ, which makes the first scales",
}
"""Samplers that draft with another model, and which."""
LONGEST_SIDE = 2**16
"""Pixels that --height and --width may be."""

Out = Annotated[Path, typer.Option(metavar="FILE.png", help="File for the pictures, on one sheet.")]
Model = Annotated[
    str,
    typer.Option(
        help="A folder, a file or a hub id of an image model or a diffusers pipeline; digits-ar, digits-var, "
        "digits-maskgit, digits-lpd and digits-dit are inside the package."
    ),
]
Prompts = Annotated[list[str] | None, typer.Option(help="Text that describes the picture; may be repeated.")]
Classes = Annotated[
    str | None,
    typer.Option("--class", "--class-labels", metavar="N,N,...", help="Classes, separated by commas; N-M is a range."),
]
Sampler = Annotated[
    str | None,
    typer.Option(
        help="Autoregressive models: sjd (the default), scd, ...; masked ones and Amused: maskgit, halton, lpd, recap, "
        "...; MAR: mar, recap, cspd; VAR: var, code; LPD: lpd, groups; NAR: nar; students: distilled; diffusion "
        "pipelines: taylorseer."
    ),
]
Interval = Annotated[int | None, typer.Option(help="For taylorseer: evaluate one step in this many.")]
Order = Annotated[int | None, typer.Option(help="For taylorseer: order of the expansion.")]
Steps = Annotated[int | None, typer.Option(help="Solver steps, or planned forwards; not for autoregressive models.")]
Cache = Annotated[str | None, typer.Option(help="Masked models: a name from `paradec caches`.")]
NumImages = Annotated[int, typer.Option("--num-images", "-n", help="Pictures for each prompt or class.")]
Side = Annotated[int | None, typer.Option(help="In pixels; by default the model's own.")]
NegativePrompt = Annotated[str | None, typer.Option(help="Text that guidance moves the picture away from.")]
GuidanceScale = Annotated[float | None, typer.Option(help="1 is off; by default the authors'.")]
Temperature = Annotated[float | None, typer.Option(help="0 takes the likeliest token.")]
TopK = Annotated[int | None, typer.Option(help="Draw from this many of the likeliest tokens; 0 takes all.")]
Compare = Annotated[bool, typer.Option("--compare", help="Diffusion pipelines: show the plain run's pictures above.")]
Columns = Annotated[int | None, typer.Option(help="Pictures in a row of the sheet.")]
Enlarge = Annotated[
    int | None,
    typer.Option(help="Factor by which each side is enlarged; by default enough to see small pictures."),
]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="For speculative, lantern and cspd: a smaller model of the family, such as digits-ar-drafter, or EAGLE's; "
        "for code: the larger VAR; for distilled: the student's teacher."
    ),
]
VQ = Annotated[str | None, typer.Option(help="The file of the VQ decoder, where the checkpoint has none.")]
VAE = Annotated[str | None, typer.Option(help="The file of MAR's VAE, kl16.ckpt.")]
TracePictures = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Record the step of each token: .png draws it, dark to yellow, .html is a page to step through, "
        ".gif an animation, .json data for `paradec trace`.",
    ),
]


@options.takes("set_ preset top_p seed dtype device as_json")
def image(
    out: Out,
    model: Model = "digits-ar",
    prompt: Prompts = None,
    class_: Classes = None,
    sampler: Sampler = None,
    interval: Interval = None,
    order: Order = None,
    steps: Steps = None,
    cache: Cache = None,
    num_images: NumImages = 1,
    height: Side = None,
    width: Side = None,
    negative_prompt: NegativePrompt = None,
    guidance_scale: GuidanceScale = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    compare: Compare = False,
    columns: Columns = None,
    enlarge: Enlarge = None,
    drafter: Drafter = None,
    vq: VQ = None,
    vae: VAE = None,
    trace: TracePictures = None,
    **shared: Any,
) -> None:
    """Make pictures with an image model or a diffusers pipeline in fewer evaluations, and report the cost."""
    options.check_writable("--out", out)
    options.check_writable("--trace", trace)
    job = ImageJob(out, trace, columns, enlarge, prompt, class_)
    settings = settings_of(shared.pop("set_"), {"interval": interval, "order": order})
    with show.waiting(f"loading {model}"):
        show.quiet_loading()
        index = pipeline_index(model)
    place = {name: shared.pop(name) for name in ("dtype", "device")}
    preset, as_json = shared.pop("preset"), shared.pop("as_json")
    common: dict[str, Any] = {"steps": steps, "guidance_scale": guidance_scale, "height": height, "width": width}
    common |= {"num_images": num_images, "negative_prompt": negative_prompt, "temperature": temperature}
    common["seed"] = shared.pop("seed")
    tokens: dict[str, Any] = {"cache": cache, "top_k": top_k, **shared}
    chosen: Any = sampler
    if preset is not None and index is None:
        said = of_preset(preset)
        chosen = said.pop("sampler", None) if sampler is None else sampler
        if settings and not isinstance(chosen, str | None):
            raise ValueError(f"--set {next(iter(settings))}: --preset has a sampler with settings; give --sampler")
        for asked in (common, tokens):
            asked |= {name: said[name] for name in said if name in asked and asked[name] is None}
    check_options(common | tokens)
    files: dict[str, Any] = {"vq": vq, "vae": vae}
    if index is not None:
        from paradec.cli.pipeline import PipelineJob

        for name, value in (tokens | files | {"drafter": drafter, "preset": preset}).items():
            if value is not None:
                raise ValueError(f"--{name.replace('_', '-')} is not for diffusers pipelines; leave it out")
        work = PipelineJob(job, index, sampler, settings, compare=compare, **place, **common)
        work.run(bars=show.on_terminal(sys.stderr), as_json=as_json)
        return
    if compare:
        raise ValueError(f"--compare is for diffusion pipelines; {model!r} draws other pictures with each sampler")
    given = {name: file for name, file in files.items() if file is not None}
    with show.waiting(f"loading {model}"):
        loaded, method = load_with_sampler(model, chosen, settings, drafter, common | tokens, place, given)
    raise typer.Exit(make_pictures(job, loaded, method, common | tokens, as_json))


def settings_of(pairs: list[str] | None, options_of_taylorseer: dict[str, int | None]) -> dict[str, Any]:
    """The settings of the sampler, of which some have options of their own.

    Raises:
        ValueError: a setting that is given twice, and as `options.settings`.
    """
    settings = options.settings(pairs)
    for name, value in options_of_taylorseer.items():
        if value is not None and name in settings:
            raise ValueError(f"--{name} and --set {name}=... say the same; give one")
        settings |= {} if value is None else {name: value}
    return settings


def of_preset(path: Path) -> dict[str, Any]:
    """What a saved request says of pictures.

    Raises:
        ValueError: no file that `Request.save` wrote, or one with a field that pictures do not have.
    """
    from paradec.api.images import SERVED
    from paradec.request import Request

    options.check_readable("--preset", path)
    said = Request.load(path).changes()
    said.pop("trace", None)  # `--trace` says where it goes
    for name, value in said.items():
        if name not in SERVED:
            raise ValueError(f"{name}={shown(value)} has no meaning for pictures: leave it out of --preset")
    return said


def load_with_sampler(
    source: str,
    sampler: Any,
    settings: dict[str, Any],
    drafter: str | None,
    request: dict[str, Any],
    place: dict[str, Any],
    files: dict[str, Any],
) -> tuple[Any, Any]:
    """A model of `paradec.load` and its sampler, which is checked first.

    Args:
        settings: of the sampler. request: arguments of `generate_images`. place: dtype and device. files: of decoders.

    Raises:
        ValueError: a sampler that this model does not take, or an option that the sampler does not take.
    """
    # a tree cannot be without its drafter, which is loaded last: it may need the model
    late = {"tree": settings.pop("tree")} if drafter is not None and "tree" in settings else {}
    method = sampler_for(source, sampler, settings)
    check_drafter(method, drafter)
    check_options_of(method, source, request)
    loaded = paradec.load(source, **place, **files)
    if drafter is not None:
        late |= {str(drafter_setting(method)): load_draft_model(drafter, loaded, **place)}
        method = dataclasses.replace(method, **late)
    return loaded, method


def make_pictures(job: ImageJob, model: Any, sampler: Any, request: dict[str, Any], as_json: bool) -> int:
    """Run `paradec.generate_images`, write the sheets, print what it took. Returns the exit code."""
    code = 0
    raise_again()
    try:
        with show.Bar() as bar:
            output = paradec.generate_images(
                model,
                **job.conditions,
                **request,
                sampler=sampler,
                trace=job.trace is not None,
                callback=bar.update,
            )
    except paradec.Interrupted as interrupt:
        code, output = EXIT_CODE, interrupt.output
    if job.sheet_of_steps:
        job.write(output.images, output.steps)
    else:
        job.write(output.images, record=output.trace)
    if as_json:
        typer.echo(json.dumps(show.pictures_report(job.out, job.conditions, output, sampler)))
    else:
        typer.echo(show.pictures_summary(job.out, output))
    return code


def check_options(request: dict[str, Any]) -> None:
    """Check what can be checked without the model. request: arguments of `generate_images`.

    Raises:
        ValueError: an option out of its range; the message names it.
    """
    from paradec.api.pictures import MOST_IMAGES

    check_int("--num-images", request["num_images"], low=1, high=MOST_IMAGES)
    for name in ("height", "width"):
        check_int(f"--{name}", request[name], low=1, high=LONGEST_SIDE, none=True)
    check_int("--top-k", request["top_k"], low=0, none=True)
    for name in ("steps", "seed", "guidance_scale", "temperature", "top_p"):
        if request[name] is not None:
            FIELDS[name].metadata["check"]("--" + name.replace("_", "-"), request[name])
    if isinstance(request["cache"], str):
        caches.create(request["cache"])
    if request["negative_prompt"] is not None:
        check_text("--negative-prompt", request["negative_prompt"])


def check_options_of(sampler: Any, source: str, request: dict[str, Any]) -> None:
    """Raise ValueError for an option that models with samplers of this family do not have."""
    others = [name for name in ("steps", "cache", "top_k", "top_p") if name in sampler.unsupported]
    for name in others:
        if request[name] is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} is not for {source!r}, which has samplers of family {sampler.family!r}")


def pipeline_index(source: str) -> dict[str, Any] | None:
    """What `model_index.json` says, if `source` is a diffusers pipeline; None for models of `paradec.load`.

    Raises:
        CheckpointError: neither of them.
    """
    from paradec.models.checkpoint import CheckpointError, read_json
    from paradec.models.images.loading import FAMILIES, PACKAGED, PACKAGED_PIPELINES, packaged_image

    if (source in PACKAGED and not os.path.exists(source)) or os.path.isfile(source):
        return None
    folder = packaged_image(source) if source in PACKAGED_PIPELINES and not os.path.exists(source) else source
    config = read_json(folder, "config.json", None)
    index = {} if config.get("model_type") in FAMILIES else read_json(folder, "model_index.json", None)
    if not config and not index:
        raise CheckpointError(f"{source!r} has neither config.json nor model_index.json")
    return index | {"folder": folder} if index else None


def sampler_for(source: str, sampler: Any, settings: dict[str, Any]) -> Any:
    """The sampler of one command for a model of `paradec.load`, before its weights are read.

    Raises:
        ValueError: a sampler of a family that this model does not take, or no image model.
    """
    from paradec.models.images.loading import FAMILIES, image_adapter

    model_type = image_type(source)
    if model_type not in FAMILIES:
        raise ValueError(
            f"--model {source!r} has model_type={model_type!r}, which makes no pictures; those that do: "
            + ", ".join(FAMILIES)
        )
    from paradec.api.images import picture_sampler

    return picture_sampler(image_adapter(model_type), sampler, repr(source), **settings)


def image_type(source: str) -> Any:
    """The `model_type` of an image model's folder, file or name; of another checkpoint what its config.json says."""
    from paradec.models.checkpoint import read_json
    from paradec.models.images.loading import PACKAGED, file_type, packaged_image

    place = packaged_image(source) if source in PACKAGED and not os.path.exists(source) else source
    return file_type(place) if os.path.isfile(place) else read_json(place, "config.json", None).get("model_type")


def check_drafter(sampler: Any, drafter: str | None) -> None:
    """Raise ValueError where a sampler has no drafter and needs one, or has one and takes none."""
    if drafter is None and sampler.name in NEED_A_DRAFTER:
        raise ValueError(f"--sampler {sampler.name} needs --drafter: {NEED_A_DRAFTER[sampler.name]}")
    if drafter is not None and drafter_setting(sampler) is None:
        raise ValueError(
            f"--drafter is for speculative, lantern, lantern++, cspd, code and distilled; {sampler.name} takes none"
        )


def drafter_setting(sampler: Any) -> str | None:
    """The setting of a sampler that takes another model."""
    return next((name for name in ("drafter", "draft", "teacher") if name in sampler.settings()), None)


def load_draft_model(source: str, base: Any, **options: Any) -> Any:
    """Another model of the base's kind, a student's teacher, or an EAGLE or DFlash drafter. options: as for
    `paradec.load`.

    Raises:
        ValueError: a model of another kind.
    """
    from paradec.models.images.loading import FAMILIES, image_adapter
    from paradec.models.load_drafter import load_drafter
    from paradec.models.loading import load

    model_type = image_type(source)
    if model_type not in FAMILIES:
        return load_drafter(source, base=base)
    kind = image_adapter(model_type).makes
    if kind != base.makes and base.makes != "distilled image":
        raise ValueError(f"--drafter {source!r} is {MODELS[kind][0]}; {base.facts.name} is {MODELS[base.makes][0]}")
    return load(source, **options | base.shared)

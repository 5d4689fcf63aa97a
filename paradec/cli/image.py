"""`paradec image`: pictures from a model of `paradec.load`, or from a diffusers pipeline (`paradec.cli.pipeline`)."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import paradec
from paradec import caches
from paradec.cli import options, show
from paradec.cli.image_job import MAX_IMAGES, ImageJob
from paradec.cli.work import check_drafter, drafter_setting
from paradec.core.checks import MODELS, check_text, format_count, throughput_unit
from paradec.request import FIELDS, Request

if TYPE_CHECKING:
    from paradec.api.images import ImageOutput

MAX_SIDE = 2**16

MODEL = typer.Option(
    help="A folder, a file or a hub id of an image model or a diffusers pipeline; digits-ar, digits-var, "
    "digits-maskgit, digits-lpd and digits-dit are inside the package."
)
CLASSES = typer.Option("--class", "--class-labels", metavar="N,N,...", help="Classes; N-M is a range.")
SAMPLER = typer.Option(
    help="Autoregressive models: sjd (the default), scd, ...; masked ones and Amused: maskgit, halton, lpd, recap, "
    "...; MAR: mar, recap, cspd; VAR: var, code; LPD: lpd, groups; NAR: nar; students: distilled; diffusion "
    "pipelines: taylorseer."
)
PRESET = options.existing_file(options.PRESET + " Pipelines take it too.", metavar="FILE.json")
SIDE = typer.Option(min=1, max=MAX_SIDE, help="In pixels; by default the model's own.")
NUMBER = typer.Option("--num-images", "-n", min=1, max=MAX_IMAGES, help="Pictures for each prompt or class.")
DRAFTER = typer.Option(
    help="For speculative, lantern and cspd: a smaller model of the family, such as digits-ar-drafter, or EAGLE's; for "
    "code: the larger VAR; for distilled: the student's teacher."
)
TRACE = typer.Option(metavar="FILE", help=options.TRACE + " .png draws the step of each token, dark to yellow.")


@options.include("set_ top_p seed dtype device as_json")
def image(
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="File for the pictures, on one sheet.")],
    model: Annotated[str, MODEL] = "digits-ar",
    prompt: list[str] | None = typer.Option(None, help="Text of the picture; may be repeated."),
    class_: Annotated[str | None, CLASSES] = None,
    sampler: Annotated[str | None, SAMPLER] = None,
    preset: Annotated[Path | None, PRESET] = None,
    interval: int | None = typer.Option(None, help="For taylorseer: evaluate one step in this many."),
    order: int | None = typer.Option(None, help="For taylorseer: order of the expansion."),
    steps: int | None = typer.Option(None, help="Solver steps, or planned forwards; not for autoregressive models."),
    cache: str | None = typer.Option(None, help="Masked models: a name from `paradec caches`."),
    num_images: Annotated[int, NUMBER] = 1,
    height: Annotated[int | None, SIDE] = None,
    width: Annotated[int | None, SIDE] = None,
    negative_prompt: str | None = typer.Option(None, help="Text from which guidance moves the picture away."),
    guidance_scale: float | None = typer.Option(None, help="1 is off; by default the authors'."),
    temperature: float | None = typer.Option(None, help="0 takes the likeliest token."),
    top_k: int | None = typer.Option(None, min=0, help="Draw from this many of the likeliest tokens; 0 takes all."),
    compare: bool = typer.Option(False, "--compare", help="Diffusion pipelines: show the plain run's pictures above."),
    columns: int | None = typer.Option(None, min=1, help="Pictures in a row of the sheet."),
    enlarge: int | None = typer.Option(None, min=1, max=64, help="Factor of each side; by default for small pictures."),
    drafter: Annotated[str | None, DRAFTER] = None,
    vq: str | None = typer.Option(None, help="The VQ decoder's file, if the checkpoint has none."),
    vae: str | None = typer.Option(None, help="The file of MAR's VAE, kl16.ckpt."),
    trace: Annotated[Path | None, TRACE] = None,
    **shared: Any,
) -> None:
    """Make pictures with an image model or a diffusers pipeline in fewer evaluations, and report the cost."""
    job = ImageJob(out, trace, columns, enlarge, prompt, class_)
    settings = options.read_settings(shared.pop("set_"))
    for name, value in {"interval": interval, "order": order}.items():
        if value is not None and name in settings:
            raise ValueError(f"--{name} and --set {name}=... set the same value; give one of them")
        settings |= {} if value is None else {name: value}
    with show.waiting(f"loading {model}"):
        show.quiet_loading()
        index = pipeline_index(model)
    placement = {name: shared.pop(name) for name in ("dtype", "device")}
    as_json = shared.pop("as_json")
    common_arguments: dict[str, Any] = {"steps": steps, "guidance_scale": guidance_scale, "height": height}
    common_arguments |= {"width": width, "num_images": num_images, "negative_prompt": negative_prompt}
    common_arguments |= {"temperature": temperature, "seed": shared.pop("seed")}
    token_arguments: dict[str, Any] = {"cache": cache, "top_k": top_k, **shared}
    request = common_arguments | token_arguments
    for name in ("steps", "seed", "guidance_scale", "temperature", "top_p"):
        if request[name] is not None:
            FIELDS[name].metadata["check"]("--" + name.replace("_", "-"), request[name])
    if cache is not None:
        caches.create(cache)
    check_text("--negative-prompt", negative_prompt or "")
    files: dict[str, Any] = {name: file for name, file in (("vq", vq), ("vae", vae)) if file is not None}
    defaults = Request.merge_arguments({}, preset)
    sampler_name: Any = defaults.get("sampler") if sampler is None else sampler
    if settings and not isinstance(sampler_name, str | None):
        raise ValueError(f"--set {next(iter(settings))}: --preset has a sampler with settings; give --sampler")
    if index is not None:
        from paradec.cli.pipeline import PipelineJob

        names = {"sampler", *common_arguments}
        invalid = [f"{name} in --preset" for name in defaults if name not in names or isinstance(defaults[name], list)]
        token_options = (token_arguments | files | {"drafter": drafter}).items()
        invalid += ["--" + name.replace("_", "-") for name, value in token_options if value is not None]
        if invalid:
            raise ValueError(f"{invalid[0]} is not for diffusers pipelines; leave it out")
        common_arguments |= {name: defaults.get(name) for name, value in common_arguments.items() if value is None}
        work = PipelineJob(job, index, sampler_name, settings, compare, common_arguments, **placement)
        work.run(show_bars=show.on_terminal(sys.stderr), as_json=as_json)
        return
    if compare:
        raise ValueError(f"--compare is for diffusion pipelines; {model!r} draws other pictures with each sampler")
    with show.waiting(f"loading {model}"):
        from paradec.api.images import picture_sampler
        from paradec.models.images.loading import FAMILIES, image_adapter

        if (model_type := image_type(model)) not in FAMILIES:
            kind = f"has model_type={model_type!r}, which makes no pictures"
            raise ValueError(f"--model {model!r} {kind}; types that do: {', '.join(FAMILIES)}")
        # the setting `tree` needs the drafter, which is loaded after the model
        draft_settings = {"tree": settings.pop("tree")} if drafter is not None and "tree" in settings else {}
        method = picture_sampler(image_adapter(model_type), sampler_name, repr(model), **settings)
        check_drafter(method, drafter)
        for name in ("steps", "cache", "top_k", "top_p"):
            if name in method.unsupported and request[name] is not None:
                option = "--" + name.replace("_", "-")
                raise ValueError(f"{option} is not for {model!r}, which has samplers of family {method.family!r}")
        loaded = paradec.load(model, **placement, **files)
        if drafter is not None:
            draft_settings |= {str(drafter_setting(method)): load_draft_model(drafter, loaded, **placement)}
            method = dataclasses.replace(method, **draft_settings)
    raise typer.Exit(make_pictures(job, loaded, method, request | {"preset": preset}, as_json))


def make_pictures(job: ImageJob, model: Any, sampler: Any, request: dict[str, Any], as_json: bool) -> int:
    """Run `paradec.generate_images`, write the sheets, print the cost. Returns the exit code."""
    request = request | job.conditions | {"sampler": sampler, "trace": job.trace is not None}
    output, code = show.with_bar(lambda bar: paradec.generate_images(model, **request, callback=bar.update))
    if job.has_step_sheet:
        job.write(output.images, output.steps)
    else:
        job.write(output.images, record=output.recorded_trace)
    if as_json:
        report: dict[str, Any] = {"out": None if output.images is None else str(job.out), **job.conditions}
        report |= {"codes": None if output.codes is None else output.codes.tolist()}
        names = ("nfe", "row_nfe", "draft_nfe", "row_forwards", "forwarded_tokens", "tokens_per_forward", "seconds")
        report |= {name: getattr(output, name) for name in names} | {"accepted": output.accepted.T.tolist()}
        typer.echo(json.dumps(report | {"sampler": sampler.to_dict(), "interrupted": output.images is None}))
    else:
        typer.echo(summary(job.out, output))
    return code


def summary(out: Path, output: ImageOutput) -> str:
    """Describe the cost of the pictures in one line."""
    pictures = f"{format_count(len(output.row_nfe), 'picture')} of {output.grid.height} x {output.grid.width} tokens"
    end = f" in {out}" if output.images is not None else ", interrupted"
    draft_nfe, rate = max(output.draft_nfe, default=0), f"{output.tokens_per_forward:.2f}"
    drafts = f", {show.forwards(draft_nfe, output.draft_nfe)} of the drafter" if draft_nfe else ""
    cost = f"{show.forwards(output.nfe, output.row_nfe)}{drafts}, {rate} {throughput_unit(len(output.row_nfe))}"
    return f"{pictures}{end}: {cost}, {output.seconds:.2f} s"


def pipeline_index(source: str) -> dict[str, Any] | None:
    """Read a pipeline's `model_index.json`; None for models of `paradec.load`. Raises CheckpointError for others."""
    from paradec.models.checkpoint import CheckpointError, read_json
    from paradec.models.images.loading import FAMILIES, PACKAGED, PACKAGED_PIPELINES, packaged_path

    if (source in PACKAGED and not os.path.exists(source)) or os.path.isfile(source):
        return None
    folder = packaged_path(source) if source in PACKAGED_PIPELINES and not os.path.exists(source) else source
    config = read_json(folder, "config.json", None)
    index = {} if config.get("model_type") in FAMILIES else read_json(folder, "model_index.json", None)
    if not config and not index:
        raise CheckpointError(f"{source!r} has neither config.json nor model_index.json")
    return index | {"folder": folder} if index else None


def image_type(source: str) -> Any:
    """Read the `model_type` of a checkpoint: a folder, a file, a hub id or a packaged model's name."""
    from paradec.models.checkpoint import read_json
    from paradec.models.images.loading import PACKAGED, file_type, packaged_path

    folder = packaged_path(source) if source in PACKAGED and not os.path.exists(source) else source
    return file_type(folder) if os.path.isfile(folder) else read_json(folder, "config.json", None).get("model_type")


def load_draft_model(source: str, base: Any, **options: Any) -> Any:
    """Load a drafter for the model `base`: a model of its kind, its teacher if it is a student, or an EAGLE or DFlash
    drafter. Raises ValueError for a model of another kind."""
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

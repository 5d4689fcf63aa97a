"""The command line: `paradec generate`, `infill`, `image`, `compare`, `samplers`, `caches`.

A wrong argument gives one line on standard error and exit code 2, Ctrl-C exit code 130. With `PARADEC_DEBUG=1` in the
environment tracebacks are shown as well.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paradec.checks import check_int, check_text
from paradec.interrupts import EXIT_CODE, debugging, held_back, raise_again

# What paradec, and the libraries that it calls, raise for input that they cannot use.
_INPUT_ERRORS = (ValueError, TypeError, OSError, ImportError, FloatingPointError)


class _OneLineErrors(TyperGroup):
    """A command group that reports every wrong argument, its own or the library's, in one line."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            try:
                # The exit code of a typer.Exit, or what the command returned.
                code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
                if sys.stdout is not None:
                    sys.stdout.flush()
            except typer.Abort:
                code = EXIT_CODE
            except BrokenPipeError:
                code = _closed_pipe()
            except Exception as error:
                code = _fail(error)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # which typer would report in its own way
            ctx.exit(_closed_pipe())
        except KeyboardInterrupt:  # typer makes an exit of it
            if debugging():
                traceback.print_exc()
            raise


def _closed_pipe() -> int:
    """Nobody reads what is printed (`paradec samplers | head -1`): end without a word."""
    # what is still in the buffer would fail once more when Python ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print("warning: " + " ".join(str(message).split()), file=sys.stderr)


def _fail(error: Exception) -> int:
    # Some releases of typer use click's exceptions and some a copy of them: ask for the method, not for the class.
    if hasattr(error, "format_message"):
        text = error.format_message()
    elif isinstance(error, _INPUT_ERRORS):
        text = str(error) or type(error).__name__
    else:
        raise error
    if debugging():
        traceback.print_exception(error)
    print("error: " + " ".join(text.split()), file=sys.stderr)
    return 2


app = typer.Typer(
    name="paradec",
    cls=_OneLineErrors,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Decode with masked-diffusion language models, several tokens per forward.",
)


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        import paradec

        typer.echo(f"paradec {paradec.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


Model = Annotated[str | None, typer.Option(help="A folder or a hub id; by default the small model inside the package.")]
SamplerName = Annotated[
    str,
    typer.Option(
        "--sampler",
        help="A name that `paradec samplers` lists, or several: 'credit+localleap' commits what either would, "
        "'threshold&klass' what both would.",
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the sampler; may be repeated.")
]
CacheName = Annotated[str, typer.Option("--cache", help="A name that `paradec caches` lists.")]
AttentionName = Annotated[
    str | None, typer.Option("--attention", help="dense, or sparsed for prompts from about 8000 tokens on.")
]
AttentionSet = Annotated[
    list[str] | None,
    typer.Option(
        "--attention-set",
        metavar="NAME=VALUE",
        help="A setting of the attention (select, skip, block_size, preset=short, ...); may be repeated.",
    ),
]
BlockLength = Annotated[int | None, typer.Option(help="Tokens per block; by default the model's own.")]
Blocks = Annotated[str | None, typer.Option(help="How the text is cut: fixed, whole or adaptive.")]
Steps = Annotated[int | None, typer.Option(help="Steps, for samplers that follow a schedule.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens with this mass.")]
TopK = Annotated[int | None, typer.Option(help="Draw from this many of the likeliest tokens.")]
GuidanceScale = Annotated[float, typer.Option(help="Classifier-free guidance; 1 is off.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the random draws.")]
Answers = Annotated[int, typer.Option("--num-return-sequences", "-n", help="Answers, each with its own draws.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; by default the checkpoint's.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE.json", help="Write what each step evaluated and made final."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Watch = Annotated[bool, typer.Option("--live", help="Show the tokens being filled in, on a terminal.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from standard input.')],
    model: Model = None,
    sampler: SamplerName = "threshold",
    set_: Set = None,
    cache: CacheName = "none",
    attention: AttentionName = None,
    attention_set: AttentionSet = None,
    blocks: Blocks = None,
    block_length: BlockLength = None,
    steps: Steps = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Length of the canvas after the prompt.")] = None,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    guidance_scale: GuidanceScale = 1.0,
    seed: Seed = None,
    num_return_sequences: Answers = 1,
    eos_early_stop: Annotated[bool, typer.Option(help="Stop when the text before an end token is final.")] = True,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop at this text; may be repeated.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    trace: TraceFile = None,
    live: Watch = False,
    as_json: AsJson = False,
    raw: Annotated[bool, typer.Option("--raw", help="Send the prompt without the chat template.")] = False,
    lines: Annotated[bool, typer.Option("--lines", help="Every line of the prompt is a prompt of its own.")] = False,
) -> None:
    """Answer a prompt, and say what it took."""
    text = _text(prompt)
    _decode(
        "generate",
        [line for line in text.splitlines() if line.strip()] if lines and text.strip() else text,
        source=model,
        sampler=sampler,
        settings=set_,
        dtype=dtype,
        device=device,
        trace=trace,
        live=live,
        as_json=as_json,
        cache=cache,
        attention=attention,
        attention_settings=attention_set,
        blocks=blocks,
        block_length=block_length,
        steps=steps,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        guidance_scale=guidance_scale,
        seed=seed,
        num_return_sequences=num_return_sequences,
        eos_early_stop=eos_early_stop,
        stop_strings=stop,
        chat=False if raw else None,
    )


@app.command()
def infill(
    text: Annotated[str, typer.Argument(help='Text with <mask> in it; "-" reads it from standard input.')],
    prompt: Annotated[
        str | None, typer.Option(help="A user's turn of a chat, to which the text is the assistant's answer.")
    ] = None,
    mask: Annotated[str, typer.Option(help="What stands for one token to fill; <mask:3> stands for three.")] = "<mask>",
    model: Model = None,
    sampler: SamplerName = "threshold",
    set_: Set = None,
    cache: CacheName = "none",
    attention: AttentionName = None,
    attention_set: AttentionSet = None,
    block_length: Annotated[int | None, typer.Option(help="Tokens per block; by default one block.")] = None,
    steps: Steps = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to append to the text.")] = 0,
    holes_eos_inf: Annotated[bool, typer.Option(help="Fill holes without end tokens, which shorten them.")] = True,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    top_k: TopK = None,
    guidance_scale: GuidanceScale = 1.0,
    seed: Seed = None,
    num_return_sequences: Answers = 1,
    dtype: Dtype = None,
    device: Device = None,
    trace: TraceFile = None,
    live: Watch = False,
    as_json: AsJson = False,
) -> None:
    """Fill the masks in a text, and say what it took."""
    text = _text(text)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    _decode(
        "infill",
        text if prompt is None else turns,
        source=model,
        sampler=sampler,
        settings=set_,
        dtype=dtype,
        device=device,
        trace=trace,
        live=live,
        as_json=as_json,
        mask=mask,
        holes_eos_inf=holes_eos_inf,
        cache=cache,
        attention=attention,
        attention_settings=attention_set,
        block_length=block_length,
        steps=steps,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        guidance_scale=guidance_scale,
        seed=seed,
        num_return_sequences=num_return_sequences,
    )


@app.command(short_help="Make pictures, and say what it took.")
def image(
    out: Annotated[Path, typer.Option(metavar="FILE.png", help="Where the pictures go, on one sheet.")],
    model: Annotated[
        str,
        typer.Option(
            help="A folder, a file or a hub id of an image model or a diffusers pipeline; digits-ar, digits-maskgit "
            "and digits-dit are inside the package."
        ),
    ] = "digits-ar",
    prompt: Annotated[list[str] | None, typer.Option(help="What to show; may be repeated.")] = None,
    class_: Annotated[
        str | None,
        typer.Option("--class", "--class-labels", metavar="N,N,...", help="Classes, by commas; N-M is a range."),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            help="Autoregressive models: sjd (the default), scd, ...; masked ones and Amused: maskgit, halton, recap, "
            "...; MAR: mar, recap; diffusion pipelines: taylorseer."
        ),
    ] = None,
    set_: Set = None,
    interval: Annotated[int | None, typer.Option(help="Of taylorseer: evaluate every so many steps.")] = None,
    order: Annotated[int | None, typer.Option(help="Of taylorseer: of the expansion.")] = None,
    steps: Annotated[int | None, typer.Option(help="Solver steps, or forwards planned; not autoregressive.")] = None,
    cache: Annotated[str | None, typer.Option(help="Masked models: a name from `paradec caches`.")] = None,
    num_images: Annotated[int, typer.Option("--num-images", "-n", help="Pictures for each prompt or class.")] = 1,
    height: Annotated[int | None, typer.Option(help="In pixels; by default the model's own.")] = None,
    width: Annotated[int | None, typer.Option(help="In pixels; by default the model's own.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What guidance leads away from.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="1 is off; by default the authors'.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    top_p: TopP = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from so many likeliest tokens; 0 takes all.")] = None,
    seed: Seed = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Diffusion pipelines: the plain run's pictures stand above.")
    ] = False,
    columns: Annotated[int | None, typer.Option(help="Pictures in a row of the sheet.")] = None,
    enlarge: Annotated[int, typer.Option(help="Pixels that a pixel becomes, along each side.")] = 1,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Of speculative and lantern: a smaller model of the family, digits-ar-drafter say, or EAGLE's."
        ),
    ] = None,
    vq: Annotated[str | None, typer.Option(help="The file of the VQ decoder, where the checkpoint has none.")] = None,
    vae: Annotated[str | None, typer.Option(help="The file of MAR's VAE, kl16.ckpt.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw which step made which token final, dark to yellow.")
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Make pictures with an image model or a diffusers pipeline in fewer evaluations, and say what it took."""
    from paradec.cli.image import (
        ImageJob,
        check_drafter,
        check_options,
        check_options_of,
        load_draft_model,
        pipeline_index,
        sampler_for,
    )

    _check_writable("--out", out)
    _check_writable("--trace", trace)
    job = ImageJob(out, trace, columns, enlarge, prompt, class_)
    settings = _settings(set_ or [])
    for name, value in (("interval", interval), ("order", order)):
        if value is not None and name in settings:
            raise ValueError(f"--{name} and --set {name}=... say the same; give one")
        settings |= {} if value is None else {name: value}
    _quiet_loading()
    index = pipeline_index(model)
    common = {"steps": steps, "guidance_scale": guidance_scale, "height": height, "width": width}
    common |= {"num_images": num_images, "negative_prompt": negative_prompt, "temperature": temperature, "seed": seed}
    tokens = {"cache": cache, "top_p": top_p, "top_k": top_k}
    check_options(common | tokens)
    if index is not None:
        from paradec.cli.pipeline import PipelineJob

        for name, value in (tokens | {"vq": vq, "vae": vae, "drafter": drafter}).items():
            if value is not None:
                raise ValueError(f"--{name.replace('_', '-')} is not for diffusers pipelines; leave it out")
        work = PipelineJob(job, index, sampler, settings, compare=compare, dtype=dtype, device=device, **common)
        made = work.run(bars=_on_terminal(sys.stderr))
        typer.echo(json.dumps(work.report(made)) if as_json else work.summary(made))
        return
    if compare:
        raise ValueError(f"--compare is for diffusion pipelines; {model!r} draws other pictures with each sampler")
    import paradec

    # a tree cannot be without its drafter, which is loaded last: it may need the model
    late = {"tree": settings.pop("tree")} if drafter is not None and "tree" in settings else {}
    method = sampler_for(model, sampler, settings)
    check_drafter(method, drafter)
    check_options_of(method, model, common | tokens)
    options = {name: file for name, file in (("vq", vq), ("vae", vae)) if file is not None}
    loaded = paradec.load(model, dtype=dtype, device=device, **options)
    if drafter is not None:
        method = dataclasses.replace(
            method, drafter=load_draft_model(drafter, loaded, dtype=dtype, device=device), **late
        )
    code = 0
    raise_again()
    try:
        with _Bar() as bar:
            output = paradec.generate_images(
                loaded,
                **job.conditions,
                **common,
                **tokens,
                sampler=method,
                trace=trace is not None,
                callback=bar.update,
            )
    except paradec.Interrupted as interrupt:
        code, output = EXIT_CODE, interrupt.output
    job.write(output.images, None if trace is None else output.steps)
    typer.echo(json.dumps(job.report(output, method)) if as_json else job.summary(output))
    raise typer.Exit(code)


def _text(argument: str) -> str:
    """The argument, or what standard input holds, without its last line's end."""
    if argument != "-":
        return argument
    if sys.stdin is None:
        raise ValueError("standard input is closed; give a prompt")
    data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input is no UTF-8 text: {error.reason} at byte {error.start}") from None
    if "\0" in text:
        raise ValueError(f"standard input is no text: it has a zero byte at position {text.index(chr(0))}")
    return text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")


def _check_writable(option: str, file: Path | None) -> None:
    """Raise ValueError unless the file can be written, where there is one."""
    if file is None:
        return
    check_text(option, str(file))  # it is printed as well
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"cannot write {option} {str(file)!r}: not a file in an existing folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"cannot write {option} {str(file)!r}: permission denied")


def _on_terminal(stream: Any) -> bool:
    """Whether lines can be drawn again there; TERM=dumb cannot."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def _decode(
    function: str,
    prompt: Any,
    *,
    source: str | None,
    sampler: str,
    settings: list[str] | None,
    dtype: str | None,
    device: str | None,
    trace: Path | None,
    live: bool,
    as_json: bool,
    attention: str | None,
    attention_settings: list[str] | None,
    num_return_sequences: int,
    **request: Any,
) -> None:
    """Load the model, run `paradec.generate` or `paradec.infill`, and print the result."""
    values = _settings(settings or [])
    _check_writable("--trace", trace)
    texts = [prompt] if isinstance(prompt, str) else prompt
    texts = [text["content"] if isinstance(text, dict) else text for text in texts]
    for text in texts:
        check_text("prompt", text)
        if not text.strip():
            raise ValueError(f"prompt={text!r} is empty; give at least one word")
    for name in ("mask", "stop"):
        for text in [request.get(name) or ""] if name == "mask" else request.get("stop_strings") or ():
            check_text(f"--{name}", text)

    import torch

    import paradec
    from paradec.checks import check_model
    from paradec.cli.decode import Answers, check_options, completed, in_batches, repeats, rows_that_fit
    from paradec.generate import MADE
    from paradec.prompts import encode

    # Everything that can be is checked before the model is loaded, which may take minutes.
    method = paradec.samplers.create(sampler, **values)
    paradec.caches.create(request["cache"])
    request["attention"] = _attention(attention, attention_settings)
    check_options(function, request, num_return_sequences)
    _quiet_loading()
    loaded = paradec.load(source, dtype=dtype, device=device)
    check_model(function, loaded, MADE)

    asked = encode(loaded, prompt, chat=request.pop("chat", None), placeholder=request.get("mask"))
    asked = asked.repeated(num_return_sequences).numbered()
    new = loaded.default_max_new_tokens if request["max_new_tokens"] is None else request["max_new_tokens"]
    size = rows_that_fit(loaded, max(map(len, asked.rows)) + new, 1 if request["guidance_scale"] == 1 else 2)
    if trace is not None and len(asked.rows) > size:
        raise ValueError(f"--trace records one batch, which is {size} answers here, not {len(asked.rows)}")
    if request["seed"] is None:  # one for all batches
        request["seed"] = int(torch.randint(2**63 - 1, (1,)))

    bar = _Bar()
    watched = live and _on_terminal(sys.stdout)

    def decode(batch: Any) -> Any:
        view: Any = bar
        if watched:
            from paradec.cli.live import LiveView

            view = LiveView(loaded.tokenizer)
        else:
            bar.among(len(found.tokens), len(batch.rows), len(asked.rows))
        with view if watched else nullcontext():
            return getattr(paradec, function)(
                loaded, batch, sampler=method, trace=trace is not None, callback=view.update, **request
            )

    found, code = Answers(asked.single), 0
    raise_again()
    try:
        with bar:
            for batch, output, interrupted in in_batches(decode, asked, size):
                code = EXIT_CODE if interrupted else 0
                first, alone = len(found.tokens), len(batch.rows) == len(asked.rows)
                if sys.stdout.isatty():
                    bar.stop()  # what is printed now would go through it
                with held_back():
                    found.add(output, completed(output) if interrupted and not alone else range(len(batch.rows)))
                    for index in range(first, 0 if as_json else len(found.tokens)):
                        typer.echo(found.line(index))
                if not first and not interrupted and request["temperature"] == 0 and repeats(batch, output):
                    bar.stop()
                    warnings.warn(
                        "all answers are equal: temperature 0 takes the likeliest token every time (--temperature 1 "
                        "draws)",
                        stacklevel=1,
                    )
                if trace is not None and output.trace is not None:
                    output.trace.to_json(trace)
    except KeyboardInterrupt:  # between two batches
        code = EXIT_CODE
    if as_json and found.tokens:
        typer.echo(json.dumps(found.report(method, request["cache"], interrupted=code != 0), ensure_ascii=False))
    elif found.tokens:
        missing = f" after {len(found.tokens)} of {len(asked.rows)} answers" if len(asked.rows) > 1 else ""
        typer.echo(found.summary() + (f", interrupted{missing}" if code else ""))
    raise typer.Exit(code)


@app.command(short_help="Compare samplers: right answers beside forwards.")
def compare(
    model: Annotated[
        str | None, typer.Option(help="A folder or a hub id; by default the small model inside the package.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help='Your own prompts, one JSON object a line: {"prompt": ..., "answer": ...}, or "regex" for "answer"; '
            'optionally "task". By default the packaged ones.',
        ),
    ] = None,
    tasks: Annotated[list[str] | None, typer.Option(help="Tasks, separated by commas; by default all.")] = None,
    limit: Annotated[int | None, typer.Option(help="Prompts of each task; by default all.")] = None,
    samplers: Annotated[
        list[str] | None,
        typer.Option(
            help="Samplers, separated by commas, and combinations ('credit+localleap'); by default every masked one."
        ),
    ] = None,
    cache: Annotated[str, typer.Option(help="A name that `paradec caches` lists.")] = "none",
    attention: AttentionName = None,
    attention_set: AttentionSet = None,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(help="Length of the canvas after the prompt.")] = None,
    block_length: Annotated[int | None, typer.Option(help="Tokens per block; by default the model's own.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, ...; by default the checkpoint's.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the results, as they come.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw accuracy over tokens per forward (needs matplotlib).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what --out holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON, not as a table.")] = False,
) -> None:
    """Compare samplers, each with several settings: right answers beside the forwards that they took."""
    _check_writable("--out", out)
    _check_writable("--plot", plot)
    if resume and out is None:
        raise ValueError("--resume goes on with the results in --out FILE.json; give it")

    import paradec
    from paradec import evaluation
    from paradec.evaluation.plot import check_plot, frontier

    # Everything is checked before the model is loaded, which may take minutes.
    if plot is not None:
        check_plot(plot)
    names = _names(samplers)
    evaluation.configurations(names)
    paradec.caches.create(cache)
    attends = _attention(attention, attention_set)
    check_int("batch", batch, low=1)
    check_int("seed", seed, low=0, high=2**63 - 1)
    for name, value in (("max_new_tokens", max_new_tokens), ("block_length", block_length)):
        check_int(name, value, low=1, high=2**31 - 1, none=True)
    if prompts is None:
        questions = evaluation.packaged_questions(_names(tasks), limit)
    else:
        questions = evaluation.read_questions(prompts, _names(tasks), limit)
    earlier = evaluation.Comparison.from_json(out) if resume and out is not None and out.exists() else None
    _quiet_loading()
    loaded = paradec.load(model, dtype=dtype, device=device)

    saved = 0

    def update(comparison: Any, configuration: Any, share: float) -> None:
        nonlocal saved
        if out is not None and len(comparison.results) > saved:
            comparison.to_json(out)
            saved = len(comparison.results)
        bar.work(configuration.name, share)

    bar = _Bar()
    code = 0
    raise_again()
    try:
        with bar:
            found = evaluation.compare(
                loaded,
                questions=questions,
                names=names,
                cache=cache,
                attention=attends,
                batch=batch,
                seed=seed,
                max_new_tokens=max_new_tokens,
                block_length=block_length,
                resume=earlier,
                progress=update,
            )
    except paradec.Interrupted as interrupt:
        code = EXIT_CODE
        found = interrupt.output
    if out is not None and found.results:
        found.to_json(out)
    if plot is not None and found.results:
        frontier(found, plot)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), ensure_ascii=False))
    else:
        _table(found.columns(), found.table())
        if code:
            print("interrupted: the configurations that were not finished are missing", file=sys.stderr)
    raise typer.Exit(code)


learn2pd = typer.Typer(help="Filters for the sampler learn2pd.", rich_markup_mode=None, no_args_is_help=True)
app.add_typer(learn2pd, name="learn2pd")


@learn2pd.callback()
def _learn2pd() -> None:
    pass


@learn2pd.command("train")
def learn2pd_train(
    out: Annotated[Path, typer.Option(metavar="FILE.safetensors", help="Where the filter goes.")],
    model: Model = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='A prompt per line, or JSON lines with a "prompt" each in a file named .jsonl. By default prompts of '
            "the packaged tasks (not those of `paradec compare`).",
        ),
    ] = None,
    per_task: Annotated[int, typer.Option(help="Packaged prompts per task.")] = 28,
    kind: Annotated[str, typer.Option(help="block (the paper's, one block length) or features (any).")] = "block",
    block_length: BlockLength = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Length of the canvas after the prompt.")] = None,
    cache: Annotated[
        list[str] | None, typer.Option("--cache", help="A cache that the filter is to serve; may be repeated.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Prompts decoded together.")] = 16,
    epochs: Annotated[int, typer.Option(help="Passes over all records; 40000 in the paper.")] = 4000,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 3e-3,
    threshold: Annotated[float, typer.Option(help="Acceptance that precision and recall are measured at.")] = 0.96,
    false_accept_weight: Annotated[float, typer.Option(help="How much more a token weighs that is not final.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the split and the weights.")] = 0,
    records: Annotated[
        Path | None,
        typer.Option(metavar="FILE.safetensors", help="Keep what is collected here, and go on with what it holds."),
    ] = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Train a filter: decode prompts one token at a time, replay them greedily, fit a network to what was final."""
    _check_writable("--out", out)
    _check_writable("--records", records)

    from safetensors import SafetensorError

    import paradec
    from paradec.samplers.masked.learn2pd_filter import save_filter
    from paradec.training import learn2pd as training

    # Everything is checked before the model is loaded, and before the hours of collecting.
    training.check_settings(kind, epochs, lr, threshold, false_accept_weight, seed)
    for name in cache or []:
        paradec.caches.create(name)
    check_int("batch", batch, low=1)
    for name, value in (("max_new_tokens", max_new_tokens), ("block_length", block_length)):
        check_int(name, value, low=1, high=2**31 - 1, none=True)

    texts = training.packaged_prompts(per_task, seed) if prompts is None else training.read_prompts(prompts)
    earlier = training.Records.load(records) if records is not None and records.exists() else None
    _quiet_loading()
    loaded = paradec.load(model, dtype=dtype, device=device)

    def save(collected: Any) -> None:
        if records is not None and collected.done:
            collected.save(records)

    bar = _Bar()
    raise_again()
    try:
        with bar:
            collected = training.collect(
                loaded,
                texts,
                block_length=block_length,
                max_new_tokens=max_new_tokens,
                caches=cache or ["none"],
                batch=batch,
                resume=earlier,
                checkpoint=save,
                progress=bar.work,
            )
            save(collected)
            facts, network = training.train(
                collected,
                kind=kind,
                epochs=epochs,
                lr=lr,
                threshold=threshold,
                false_accept_weight=false_accept_weight,
                seed=seed,
                progress=bar.work,
            )
    except paradec.Interrupted as interrupt:
        save(interrupt.output)
        kept = f"; {interrupt.output.done} prompts are kept" if records is not None else ""
        print(f"interrupted{kept}", file=sys.stderr)
        raise typer.Exit(EXIT_CODE) from None
    try:
        save_filter(out, facts, network)
    except SafetensorError as error:  # of the file system; it is no OSError
        raise OSError(f"cannot write --out {str(out)!r}: {error}") from error
    found = facts.held_out
    typer.echo(
        f"{out}: precision {found['precision']:.4f}, recall {found['recall']:.4f} at {threshold:g}, over "
        f"{found['undecided']} undecided positions of prompts kept from training"
    )


def _names(given: list[str] | None) -> list[str] | None:
    """Comma-separated names, in one option or several; commas in parentheses separate settings."""
    if given is None:
        return None
    return [name.strip() for text in given for name in re.split(r",(?![^(]*\))", text)]


@app.command()
def samplers(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the samplers and their settings."""
    import paradec

    _list(paradec.samplers, as_json)


@app.command(short_help="List the caches, and what each works with.")
def caches(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the caches and their settings, and which samplers and models each works with."""
    import paradec
    from paradec.caches.table import summary

    pairs = summary(paradec.samplers.registry, paradec.caches.registry)
    _list(
        paradec.caches,
        as_json,
        {name: {"works_with": [p for p in pairs if p["cache"] == name]} for name in paradec.caches.names()},
    )
    if not as_json:
        typer.echo("")
        _table(tuple(pairs[0]), [tuple(pair.values()) for pair in pairs])


def _list(registry: Any, as_json: bool, more: dict[str, dict[str, Any]] | None = None) -> None:
    """Print a registry: a table on a terminal, tab-separated lines elsewhere."""
    from paradec.protocol import plain

    entries = []
    for name in registry.names():
        cls = registry.get(name)
        entry: dict[str, Any] = {"name": name}
        entry |= {key: getattr(cls, key, "") for key in ("family", "summary", "paper", "arxiv")}
        entry["settings"] = {key: plain(value) for key, value in cls.settings().items()}
        entry |= (more or {}).get(name, {})
        entries.append(entry)
    if as_json:
        typer.echo(json.dumps(entries, indent=2, ensure_ascii=False))
        return

    columns = ("name", "family", "settings", "paper")
    rows = [
        (
            entry["name"],
            entry["family"],
            ", ".join(f"{key}={value}" for key, value in entry["settings"].items()) or "-",
            entry["paper"] + (f" (arXiv:{entry['arxiv']})" if entry["arxiv"] else "") or "-",
        )
        for entry in entries
    ]
    _table(columns, rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: ruled on a terminal, where it is too narrow entry by entry; tab-separated lines elsewhere."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            typer.echo("\t".join(row))
        return
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console, rows = Console(), list(rows)
    table = Table(*columns)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    if Measurement.get(console, console.options.update(max_width=10_000), table).minimum <= console.width:
        console.print(table)
        return
    for row in rows:  # words would be cut
        entry = Table.grid(padding=(0, 1))
        for place, (name, cell) in enumerate(zip(columns, row, strict=True)):
            style = "bold" if place == 0 else ""
            entry.add_row(Text(f"{'' if place == 0 else '  '}{name}", style="dim"), Text(cell, style, overflow="fold"))
        console.print(entry)


class _Bar:
    """A progress bar on standard error, on a terminal only, that appears once the work has lasted a second."""

    delay = 1.0
    interval = 0.1

    def __init__(self) -> None:
        self.enabled = _on_terminal(sys.stderr)
        self.progress: Any = None
        self.task: Any = None
        self.due = time.monotonic() + self.delay
        self.before, self.rows, self.answers = 0, 1, 1

    def __enter__(self) -> _Bar:
        self.due = time.monotonic() + self.delay
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take it off the terminal, until the next update that is a while away."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
            self.due = time.monotonic() + self.delay

    def among(self, before: int, rows: int, answers: int) -> None:
        """From now on `rows` of so many answers are decoded, with so many before them."""
        self.before, self.rows, self.answers = before, rows, answers

    def update(self, state: Any, commit: Any) -> None:
        """Called by `paradec.generate` after every commit."""
        if not self._is_due():
            return
        decided, total = state.progress
        if self.rows == self.answers:
            self._show("decoding", decided, total, 30)
        else:
            self._show("answers", self.before + self.rows * decided // max(1, total), self.answers, 600)

    def work(self, what: str, share: float) -> None:
        """Called by `paradec compare` after every batch."""
        if self._is_due():
            # some configurations take ten times as long as others: judge the time left by a longer past
            self._show(what, round(1000 * share), 1000, 600)

    def _is_due(self) -> bool:
        now = time.monotonic()
        if not self.enabled or now < self.due:
            return False
        self.due = now + self.interval
        return True

    def _show(self, what: str, completed: int, total: int, period: float) -> None:
        if self.progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            console = Console(stderr=True)
            self.progress = Progress(
                *columns, console=console, transient=True, speed_estimate_period=period, redirect_stdout=False
            )
            self.task = self.progress.add_task(what, total=total)
            self.progress.start()
        self.progress.update(self.task, description=what, completed=completed, total=total)


def _attention(name: str | None, pairs: list[str] | None) -> Any:
    """What `paradec.generate` takes as `attention`."""
    import paradec
    from paradec.checks import check_choice

    settings = _settings(pairs or [], "--attention-set")
    if name is not None:
        check_choice("attention", name, ["dense", *paradec.attention.names()])
    if name in (None, "dense"):
        if settings:
            raise ValueError("--attention-set is for an attention with settings: give --attention sparsed")
        return name
    return paradec.attention.create(name, **settings)


def _settings(pairs: Iterable[str], option: str = "--set") -> dict[str, Any]:
    """Read `name=value` pairs."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise ValueError(f"{option} takes NAME=VALUE, got {pair!r}")
        if name in settings:
            raise ValueError(f"{option} gives {name!r} twice")
        settings[name] = _value(text.strip())
    return settings


def _value(text: str) -> Any:
    """A JSON or Python literal (0.9, true, None, [1, 2]), otherwise the text itself."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: brackets without end
            continue
    return text


def _quiet_loading() -> None:
    """Keep the libraries' own progress bars and advice out of logs and pipes; a terminal still shows downloads."""
    from huggingface_hub.utils import disable_progress_bars
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # a hub out of reach would be reported at each of its retries
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not sys.stderr.isatty():
        disable_progress_bars()

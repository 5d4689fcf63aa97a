"""`paradec generate`: prompts are answered in batches that fit memory, and answers are printed batch by batch.

`decode` is what `paradec infill` does as well; `paradec.cli.show` has the lines that are printed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import paradec
from paradec.blocks import LONGEST_BLOCK
from paradec.checks import check_int, check_model, check_text
from paradec.cli import options, show
from paradec.cli.batches import completed, in_batches, repeats, rows_that_fit
from paradec.generate import MADE, Output, own_defaults
from paradec.interrupts import EXIT_CODE, held_back, raise_again
from paradec.models.checkpoint import INDEX, WEIGHTS, fetch, stored_weights
from paradec.prompts import Prompts, check_placeholder, encode
from paradec.request import DEFAULTS, FIELDS, Request
from paradec.traces.files import check_suffix

Blocks = Annotated[str | None, typer.Option(help="How the text is cut: fixed, whole or adaptive.")]
EosEarlyStop = Annotated[bool, typer.Option(help="Stop when the text before an end token is final.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop at this text; may be repeated.")]
Raw = Annotated[bool, typer.Option("--raw", help="Send the prompt without the chat template.")]
Drafter = Annotated[
    str | None,
    typer.Option(help="Of speculative: a smaller causal model of the same vocabulary, or an EAGLE drafter of --model."),
]
Lines = Annotated[bool, typer.Option("--lines", help="Every line of the prompt is a prompt of its own.")]


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help='The prompt; "-" reads it from standard input.')],
    model: options.Model = None,
    sampler: options.Sampler = "threshold",
    set_: options.Set = None,
    preset: options.Preset = None,
    cache: options.Cache = "none",
    attention: options.Attention = None,
    attention_set: options.AttentionSet = None,
    blocks: Blocks = None,
    block_length: options.BlockLength = None,
    steps: options.Steps = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    guidance_scale: options.GuidanceScale = 1.0,
    seed: options.Seed = None,
    num_return_sequences: options.Answers = 1,
    eos_early_stop: EosEarlyStop = True,
    stop: Stop = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    trace: options.TraceFile = None,
    live: options.Live = False,
    as_json: options.AsJson = False,
    raw: Raw = False,
    lines: Lines = False,
    drafter: Drafter = None,
) -> None:
    """Answer a prompt, and say what it took."""
    text = options.read_text(prompt)
    decode(
        "generate",
        [line for line in text.splitlines() if line.strip()] if lines and text.strip() else text,
        source=model,
        preset=preset,
        given=options.given(context),
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
        drafter=drafter,
    )


def decode(
    function: str,
    prompt: Any,
    *,
    source: str | None,
    preset: Path | None,
    given: set[str],
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
    drafter: str | None = None,
    **request: Any,
) -> None:
    """Load the model, run `paradec.generate` or `paradec.infill`, and print the result.

    Args:
        function: "generate" or "infill". prompt: as it takes it. given: options that stand on the command line.
            request: further arguments of the function. The others are options of the command as they were given.
    """
    # Everything that can be is checked before the model is loaded, which may take minutes.
    values = options.settings(settings)
    options.check_writable("--trace", trace)
    if trace is not None:
        check_suffix(trace, "--trace")
    check_texts(prompt, request)
    request |= {"sampler": sampler, "num_return_sequences": num_return_sequences}
    request["attention"] = options.attention_of(attention, attention_settings)
    renamed = {"stop": "stop_strings", "raw": "chat", "attention_set": "attention"}
    request = options.with_preset(request, preset, {renamed.get(name, name) for name in given})
    chosen = request.pop("sampler")
    late = {"tree": values.pop("tree")} if drafter is not None and "tree" in values else {}
    if isinstance(chosen, str):
        method = paradec.samplers.create(chosen, **values)
    elif values:
        raise ValueError(
            f"--set {settings[0] if settings else ''}: --preset has a sampler with settings; give --sampler"
        )
    else:
        method = chosen
    check_drafter(method, drafter)
    if isinstance(request["cache"], str):
        request["cache"] = paradec.caches.create(request["cache"])
    cache_name = "none" if request["cache"] is None else request["cache"].name
    if cache_name == "none" and method.family == "draft_verify":
        request["cache"], cache_name = None, "causal"  # the store is their own
    answers = request.pop("num_return_sequences")
    check_options(function, request, answers)
    show.quiet_loading()
    loaded = paradec.load(source, dtype=dtype, device=device)
    check_model(function, loaded, MADE)
    own = own_defaults(loaded).get("sampler")
    if own is not None and "sampler" not in given and chosen == DEFAULTS["sampler"] and not values:
        method = paradec.samplers.create(own)
    if drafter is not None:
        small = load_draft_model(drafter, loaded, dtype=dtype, device=device)
        method = dataclasses.replace(method, drafter=small, **late)

    asked = encode(loaded, prompt, chat=request.pop("chat", None), placeholder=request.get("mask"))
    asked = asked.repeated(answers).numbered()
    new = loaded.default_max_new_tokens if request["max_new_tokens"] is None else request["max_new_tokens"]
    size = rows_that_fit(loaded, max(map(len, asked.rows)) + new, 1 if request["guidance_scale"] == 1 else 2)
    if trace is not None and len(asked.rows) > size:
        raise ValueError(f"--trace records one batch, which is {size} answers here, not {len(asked.rows)}")
    if request["seed"] is None:  # one for all batches
        request["seed"] = int(torch.randint(2**63 - 1, (1,)))

    def run(batch: Prompts, callback: Callable[[Any, Any], None]) -> Output:
        call = getattr(paradec, function)
        return call(loaded, batch, sampler=method, trace=trace is not None, callback=callback, **request)

    greedy = request["temperature"] == 0
    found, code = print_answers(
        run, asked, size, loaded.tokenizer, live=live, quiet=as_json, trace=trace, greedy=greedy
    )
    if as_json and found.tokens:
        typer.echo(json.dumps(found.report(method, cache_name, interrupted=code != 0), ensure_ascii=False))
    elif found.tokens:
        typer.echo(found.summary(len(asked.rows), interrupted=code != 0))
    raise typer.Exit(code)


def print_answers(
    run: Callable[[Prompts, Callable[[Any, Any], None]], Output],
    asked: Prompts,
    size: int,
    tokenizer: Any,
    *,
    live: bool,
    quiet: bool,
    trace: Path | None,
    greedy: bool,
) -> tuple[show.Answers, int]:
    """Decode batch after batch, and print the answers of each as soon as it has ended.

    Args:
        run: decodes a batch, with a callback after every commit. asked: every row, `size` of them to a batch. live:
            whether to show the tokens being filled in. quiet: whether not to print the answers. trace: where the trace
            goes. greedy: whether no token is drawn.

    Returns:
        What was found, and the exit code. Of a batch that was interrupted the rows that had ended are kept; if it is
        the only one all of them, as they were then.
    """
    found, bar, code = show.Answers(asked.single), show.Bar(), 0
    watched = live and show.on_terminal(sys.stdout)

    def decode(batch: Prompts) -> Output:
        if watched:
            with show.LiveView(tokenizer) as view:
                return run(batch, view.update)
        bar.among(len(found.tokens), len(batch.rows), len(asked.rows))
        return run(batch, bar.update)

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
                    for index in range(first, 0 if quiet else len(found.tokens)):
                        typer.echo(found.line(index))
                if not first and not interrupted and greedy and repeats(batch, output):
                    bar.stop()
                    warnings.warn(show.EQUAL, stacklevel=1)
                if trace is not None and output.trace is not None:
                    output.trace.save(trace)
    except KeyboardInterrupt:  # between two batches
        code = EXIT_CODE
    return found, code


def check_texts(prompt: Any, request: dict[str, Any]) -> None:
    """Raise ValueError for a prompt, mask or stop string that is no text, and for a prompt without a word."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    texts = [text["content"] if isinstance(text, dict) else text for text in texts]
    for text in texts:
        check_text("prompt", text)
        if not text.strip():
            raise ValueError(f"prompt={text!r} is empty; give at least one word")
    check_text("--mask", request.get("mask") or "")
    for text in request.get("stop_strings") or ():
        check_text("--stop", text)


def check_drafter(sampler: Any, drafter: str | None) -> None:
    """Raise ValueError where a sampler has no drafter and needs one, or has one and takes none."""
    if drafter is None and getattr(sampler, "needs_drafter", False) and sampler.drafter is None:
        raise ValueError(f"--sampler {sampler.name} needs --drafter: a smaller causal model of the same vocabulary")
    if drafter is not None and "drafter" not in sampler.settings():
        raise ValueError(f"--drafter is for speculative; {sampler.name} takes none")


def load_draft_model(source: str, base: Any, **options: Any) -> Any:
    """A smaller causal model, or an EAGLE drafter for the base. options: as for `paradec.load`."""
    from paradec.models.eagle import load_drafter

    if source.endswith(".gguf"):
        return paradec.load(source, **options)
    single = fetch(source, WEIGHTS, None) is None and fetch(source, INDEX, None) is None
    if single or "fc.weight" in stored_weights(source, None):  # an EAGLE drafter's, often pickled
        return load_drafter(source, base=base)
    return paradec.load(source, **options)


def check_options(function: str, request: dict[str, Any], answers: int) -> None:
    """Check what can be checked without the model, which may take minutes to load.

    Args:
        function: "generate" or "infill". request: arguments of it. answers: per prompt.

    Raises:
        ValueError: an argument out of its range; the message names it.
    """
    Request(num_return_sequences=answers, **{name: value for name, value in request.items() if name in FIELDS})
    low = 1 if function == "generate" else 0
    check_int("max_new_tokens", request["max_new_tokens"], low=low, high=LONGEST_BLOCK, none=function == "generate")
    check_placeholder(request.get("mask"))

"""`paradec generate` and `paradec infill`: decode and print prompts in batches that fit memory."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paradec.cli import options, show
from paradec.cli.files import FileJob
from paradec.cli.options import existing_file
from paradec.cli.work import Work, check_one_prompt, complete_row_indices, decode_in_batches, prepare
from paradec.core.interrupts import EXIT_CODE, hold_interrupt, restore_interrupt
from paradec.core.text_files import number_lines
from paradec.request import seed_matters

if TYPE_CHECKING:
    from paradec.api.output import Output
    from paradec.core.prompts import Prompts

PROMPT = typer.Argument(metavar="PROMPT", show_default=False, help='The prompt, in quotes; "-" reads standard input.')
IN = existing_file('Prompts, one per line; .jsonl: {"prompt" or "messages": ...}, optional "id", "constraint".', "--in")
ADD = "Pipelined blocks: open the next block when this share of the last open one is decided."
FULL = "Pipelined blocks: when this share of a block is decided, the next one commits at least one token a step."
OUT = typer.Option(metavar="FILE.jsonl", help="File for the answers to --in, one per line, written batch by batch.")
EQUAL = "all answers are equal: temperature 0 takes the likeliest token every time (--temperature 1 draws)"


@options.include(
    "model sampler set_ preset cache suffix attention attention_set block_length steps max_new_tokens temperature "
    "top_p top_k min_p repetition_penalty presence_penalty frequency_penalty min_new_tokens ignore_eos guidance_scale "
    "logprobs choice regex json_schema after thinking_budget seed num_return_sequences eos_early_stop "
    "tokenizer dtype quantization device trace live drafter as_json"
)
def generate(
    context: typer.Context,
    prompt: Annotated[list[str] | None, PROMPT] = None,
    blocks: str | None = typer.Option(None, help="Blocks: fixed, whole, adaptive or pipelined."),
    block_add: float | None = typer.Option(None, help=ADD),
    block_full: float | None = typer.Option(None, help=FULL),
    stop: list[str] | None = typer.Option(None, "--stop", metavar="TEXT", help="Stop at this text; may be repeated."),
    raw: bool = typer.Option(False, "--raw", help="Send the prompt without the chat template."),
    lines: bool = typer.Option(False, "--lines", help="Take every line of the prompt as a separate prompt."),
    in_: Annotated[Path | None, IN] = None,
    out: Annotated[Path | None, OUT] = None,
    batch: int | None = typer.Option(None, min=1, help="Maximum rows decoded together; by default as many as fit."),
    resume: bool = typer.Option(False, "--resume", help="Continue from --out; retry failed prompts."),
    **shared: Any,
) -> None:
    """Answer a prompt and report the forwards and time."""
    outputs = {name: shared.pop(name) for name in ("trace", "live", "as_json")}
    job, text = None, ""
    if in_ is not None:
        excluded = {"a prompt": prompt, "--live": outputs["live"], "--trace": outputs["trace"], "--lines": lines}
        for name, value in excluded.items():
            if value:
                raise ValueError(f"--in reads prompts from a file and writes answers to a file: leave out {name}")
        if out is None:
            raise ValueError(f"--in {str(in_)!r} needs --out FILE.jsonl for the answers")
        job = FileJob(in_, out, resume)
    elif out is not None or resume:
        raise ValueError(f"--{'resume' if out is None else 'out'} needs --in FILE; without it, answers are printed")
    else:
        text = options.read_text(check_one_prompt(prompt, "generate"))
    shared["blocks"], shared["block_length"] = make_blocks(blocks, shared["block_length"], block_add, block_full)
    shared |= options.make_constraint(shared)
    shared |= {"given": options.explicit_options(context), "stop_strings": stop, "chat": False if raw else None}
    if job is not None:
        job.answer(prepare("generate", None, on_settings=job.set_settings, **shared), batch, outputs["as_json"])
    prompts = [line for _, line in number_lines(text)] if lines and text.strip() else text
    decode("generate", prompts, batch=batch, **outputs, **shared)


def make_blocks(name: str | None, length: int | None, add: float | None, full: float | None) -> tuple[Any, int | None]:
    """Make the arguments `blocks` and `block_length`. add, full: --block-add and --block-full, for pipelined blocks."""
    settings: dict[str, Any] = {key: value for key, value in (("add", add), ("full", full)) if value is not None}
    if not settings:
        return name, length
    if name != "pipelined" or length is None:
        raise ValueError(f"--block-{next(iter(settings))} goes with --blocks pipelined --block-length N")
    from paradec.samplers.features.pipelined_blocks import PipelinedBlocks

    # `full` has an effect only with forced="active"
    forced = "first" if full is None else "active"
    return PipelinedBlocks(length, forced=forced, **settings), None


def decode(
    function: str,
    prompt: Any,
    *,
    trace: Path | None,
    live: bool,
    as_json: bool,
    batch: int | None = None,
    **common: Any,
) -> None:
    """Run the function "generate" or "infill" on a prompt, and print the result. common: arguments of `prepare`."""
    options.check_writable("--trace", trace)
    if trace is not None:
        from paradec.tools.traces.files import check_suffix

        check_suffix(trace, "--trace")
    work = prepare(function, prompt, **common)
    if work.num_answers > 1 and not seed_matters(work.method, work.request["temperature"], work.request["suffix"]):
        warnings.warn(EQUAL, stacklevel=1)
        warnings.filterwarnings("ignore", "temperature=0 gave")  # the library's version of this warning
    prompts = work.encode(prompt)
    size = min(work.rows_that_fit(prompts), batch or len(prompts.rows))
    if trace is not None and len(prompts.rows) > size:
        raise ValueError(f"--trace records one batch, which is {size} answers here, not {len(prompts.rows)}")
    answers, code = print_answers(work, prompts, size, live=live, quiet=as_json, trace=trace)
    if as_json and len(answers):
        report = answers.report(work.method, work.cache_name, interrupted=code != 0)
        typer.echo(json.dumps(report, ensure_ascii=False))
    elif len(answers):
        typer.echo(answers.summary(len(prompts.rows), interrupted=code != 0), err=True)
    raise typer.Exit(code)


def print_answers(
    work: Work, prompts: Prompts, size: int, *, live: bool, quiet: bool, trace: Path | None
) -> tuple[show.Answers, int]:
    """Decode `size` rows at a time; print each batch unless `quiet`. Returns the answers and the exit code. Of an
    interrupted batch only complete rows count, or all rows if it is the only batch."""
    from paradec.cli.watch import PACE, LiveView

    answers, bar, code = show.Answers(prompts.single, work.model.tokenizer), show.Bar(), 0
    view = LiveView(work.model.tokenizer, pace=PACE) if live and show.on_terminal(sys.stdout) else None

    def run(batch: Prompts) -> Output:
        bar.set_range(len(answers), len(batch.rows), len(prompts.rows))
        if view is None:
            return work.run(batch, bar.update, trace=trace is not None)
        with view:
            return work.run(batch, view.update, trace=trace is not None)

    restore_interrupt()
    try:
        with bar:
            for batch, output, interrupted in decode_in_batches(run, prompts, size):
                code = EXIT_CODE if interrupted else 0
                output.seconds -= 0.0 if view is None else view.slept
                first, is_only = len(answers), len(batch.rows) == len(prompts.rows)
                complete_rows = complete_row_indices(output) if interrupted and not is_only else range(len(batch.rows))
                texts: Any = [output.text] if prompts.single else output.text
                bar.stop()  # the bar would mix with the answers
                with hold_interrupt():
                    answers.add(output, complete_rows)
                    for row in () if quiet else complete_rows:
                        typer.echo(texts[row] if prompts.single else f"[{first + row + 1}] {texts[row]}")
                        for entry in answers.rows["logprobs"][first + row] if answers.rows["logprobs"] else ():
                            likely = ", ".join(f"{token!r} {value:.3f}" for token, value in entry["likely"])
                            typer.echo(f"{entry['logprob']:10.3f}  {entry['token']!r:<16}  {likely}".rstrip())
                if trace is not None and output.recorded_trace is not None:
                    output.trace.save(trace)
    except KeyboardInterrupt:  # between two batches
        code = EXIT_CODE
    return answers, code


TEXT = typer.Argument(metavar="TEXT", help='Text with <mask> in it, in quotes; "-" reads standard input.')
HOLE = typer.Option("--hole", metavar="N=PATTERN", help="Regex for the N-th hole, from 1; may be repeated.")


@options.include(
    "model sampler set_ preset cache suffix attention attention_set steps holes_eos_inf temperature top_p top_k min_p "
    "guidance_scale logprobs seed num_return_sequences tokenizer dtype quantization device trace live as_json"
)
def infill(
    context: typer.Context,
    text: Annotated[list[str] | None, TEXT] = None,
    prompt: str | None = typer.Option(None, help="A user's turn; the text is then the assistant's answer."),
    mask: str = typer.Option("<mask>", help="Text that represents one token to fill; <mask:3> represents three."),
    block_length: int | None = typer.Option(None, help="Tokens per block; by default one block."),
    max_new_tokens: int = typer.Option(0, help="Tokens to append to the text."),
    hole: Annotated[list[str] | None, HOLE] = None,
    **shared: Any,
) -> None:
    """Fill the masks in a text and report the forwards and time."""
    prompt_text = options.read_text(check_one_prompt(text, "infill"))
    turns: Any = [{"role": "user", "content": prompt}, {"role": "assistant", "content": prompt_text}]
    shared |= read_holes(hole) | {"mask": mask, "block_length": block_length, "max_new_tokens": max_new_tokens}
    decode("infill", prompt_text if prompt is None else turns, given=options.explicit_options(context), **shared)


def read_holes(pairs: list[str] | None) -> dict[str, Any]:
    """Build the argument `constraints` of `paradec.infill` from the values of --hole."""
    from paradec.constraints.values import Regex

    patterns: dict[int, Any] = {}
    for pair in pairs or ():
        hole, equals, pattern = pair.partition("=")
        if not equals or not hole.strip().isdecimal() or int(hole) < 1:
            raise ValueError(f"--hole takes N=PATTERN with a number from 1, got {pair!r}")
        if int(hole) - 1 in patterns:
            raise ValueError(f"--hole {int(hole)} is given twice")
        patterns[int(hole) - 1] = Regex(pattern)
    return {"constraints": patterns} if patterns else {}

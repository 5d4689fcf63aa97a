"""`paradec generate`: prompts are answered in batches that fit memory, and each answer is printed when it has ended.

`decode` is what `paradec infill` does as well. `work` prepares it, `show` has the lines that are printed, `files` does
`--in` and `--out`.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paradec.cli import options, show
from paradec.cli.constraints import Choices, Pattern, Schema, constraint
from paradec.cli.files import FileJob
from paradec.cli.work import Work, one_prompt, prepare
from paradec.core.checks import check_int
from paradec.core.interrupts import EXIT_CODE, held_back, raise_again
from paradec.core.text_files import lines_of

if TYPE_CHECKING:
    from paradec.api.output import Output
    from paradec.core.prompts import Prompts

Prompt = Annotated[
    list[str] | None,
    typer.Argument(metavar="PROMPT", show_default=False, help='The prompt, in quotes; "-" reads standard input.'),
]
Blocks = Annotated[str | None, typer.Option(help="Blocks of the answer: fixed, whole, adaptive or pipelined.")]
BlockAdd = Annotated[
    float | None,
    typer.Option(help="Pipelined blocks: the next one opens when this share of the last open one is decided."),
]
BlockFull = Annotated[
    float | None,
    typer.Option(help="Pipelined blocks: when this share is decided, the next one must progress too."),
]
Stop = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop at this text; may be repeated.")]
Raw = Annotated[bool, typer.Option("--raw", help="Send the prompt without the chat template.")]
Drafter = Annotated[
    str | None,
    typer.Option(
        help="For speculative: a smaller causal model of the same vocabulary, a drafter of --model (EAGLE, DFlash, "
        "DSpark), mtp (the model's own heads), prompt_lookup, or token_recycling (with --set rule=naive)."
    ),
]
Lines = Annotated[bool, typer.Option("--lines", help="Take every line of the prompt as a separate prompt.")]
In = Annotated[
    Path | None,
    typer.Option(
        "--in",
        metavar="FILE",
        help='Prompts of a file in the place of PROMPT: one a line, in .jsonl {"prompt": ...} or {"messages": [...]}, '
        'optionally "constraint".',
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(metavar="FILE.jsonl", help="File for the answers to --in, one per line, written as they end."),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch", help="The most rows decoded together; by default as many as fit.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the answers in --out; retry failed prompts.")]


@options.takes(
    "model sampler set_ preset cache suffix attention attention_set block_length steps max_new_tokens temperature "
    "top_p top_k guidance_scale seed num_return_sequences eos_early_stop dtype device trace live as_json"
)
def generate(
    context: typer.Context,
    prompt: Prompt = None,
    blocks: Blocks = None,
    block_add: BlockAdd = None,
    block_full: BlockFull = None,
    stop: Stop = None,
    choice: Choices = None,
    regex: Pattern = None,
    json_schema: Schema = None,
    raw: Raw = False,
    lines: Lines = False,
    drafter: Drafter = None,
    in_: In = None,
    out: Out = None,
    batch: BatchSize = None,
    resume: Resume = False,
    **shared: Any,
) -> None:
    """Answer a prompt and report the forwards and time."""
    trace, live, as_json = (shared.pop(name) for name in ("trace", "live", "as_json"))
    asked = None if in_ is None else file_job(in_, out, prompt, resume, live=live, trace=trace, lines=lines)
    if asked is None and (out is not None or resume):
        raise ValueError(f"--{'resume' if out is None else 'out'} goes with --in FILE: answers are printed otherwise")
    text = "" if asked is not None else options.read_text(one_prompt(prompt, "generate"))
    check_int("--batch", batch, low=1, none=True)
    shared["blocks"], shared["block_length"] = pipelined(blocks, shared["block_length"], block_add, block_full)
    shared |= constraint(choice, regex, json_schema)
    shared |= {"given": options.given(context), "stop_strings": stop, "chat": False if raw else None}
    if asked is not None:
        work = prepare("generate", None, agree=asked.agree, drafter=drafter, **shared)
        asked.answer(work, batch, as_json=as_json)
    prompts = [line for _, line in lines_of(text)] if lines and text.strip() else text
    decode("generate", prompts, trace=trace, live=live, as_json=as_json, batch=batch, drafter=drafter, **shared)


def pipelined(blocks: str | None, length: int | None, add: float | None, full: float | None) -> tuple[Any, int | None]:
    """The values of `blocks` and `block_length` for these options.

    Raises:
        ValueError: --block-add or --block-full without pipelined blocks of a length, or out of its range.
    """
    given = {"add": add, "full": full}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not settings:
        return blocks, length
    if blocks != "pipelined" or length is None:
        raise ValueError(f"--block-{next(iter(settings))} goes with --blocks pipelined --block-length N")
    from paradec.core.blocks import PipelinedBlocks

    # which blocks must make progress makes a difference of `full`
    forced = "first" if full is None else "active"
    return PipelinedBlocks(length, forced=forced, **settings), None


def file_job(
    source: Path,
    out: Path | None,
    prompt: list[str] | None,
    resume: bool,
    *,
    live: bool,
    trace: Path | None,
    lines: bool,
) -> FileJob:
    """What `--in` asks for.

    Raises:
        ValueError, OSError: files that cannot be used, or options that are for a prompt on the command line.
    """
    others = {"a prompt": prompt, "--live": live, "--trace": trace, "--lines": lines}
    for name, value in others.items():
        if value:
            raise ValueError(f"--in has its own prompts and answers to a file: leave out {name}")
    if out is None:
        raise ValueError(f"--in {str(source)!r} needs --out FILE.jsonl for the answers")
    return FileJob(source, out, resume)


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
    """Load the model, run `paradec.generate` or `paradec.infill`, and print the result.

    Args:
        function: "generate" or "infill". prompt: as it takes it. batch: rows decoded together at most. common: as
            `prepare` takes it. The others are options of the command as they were given.
    """
    options.check_writable("--trace", trace)
    if trace is not None:
        from paradec.tools.traces.files import check_suffix

        check_suffix(trace, "--trace")
    work = prepare(function, prompt, **common)
    asked = work.encode(prompt)
    size = min(work.rows_that_fit(asked), batch or len(asked.rows))
    if trace is not None and len(asked.rows) > size:
        raise ValueError(f"--trace records one batch, which is {size} answers here, not {len(asked.rows)}")
    found, code = print_answers(work, asked, size, live=live, quiet=as_json, trace=trace)
    if as_json and found.tokens:
        report = found.report(work.method, work.cache_name, interrupted=code != 0)
        typer.echo(json.dumps(report, ensure_ascii=False))
    elif found.tokens:
        typer.echo(found.summary(len(asked.rows), interrupted=code != 0), err=True)
    raise typer.Exit(code)


def print_answers(
    work: Work, asked: Prompts, size: int, *, live: bool, quiet: bool, trace: Path | None
) -> tuple[show.Answers, int]:
    """Decode batch after batch, and print each answer as soon as it has ended.

    Args:
        asked: every row, `size` of them to a batch. live: whether to show the tokens being filled in. quiet: whether
            not to print the answers. trace: where the trace goes.

    Returns:
        What was found, and the exit code. Of a batch that was interrupted the rows that had ended are kept; if it is
        the only one all of them, as they were then.
    """
    from paradec.cli.batches import completed, in_batches, repeats
    from paradec.cli.ended import Ended
    from paradec.cli.watch import PACE, LiveView

    found, bar, code = show.Answers(asked.single), show.Bar(), 0
    watched = live and show.on_terminal(sys.stdout)
    traced = {"trace": trace is not None}
    printed: set[int] = set()

    def tell(output: Output, rows: Iterable[int], first: int) -> None:
        """Print `rows` of a batch whose first row is number `first` of all."""
        texts: Any = [output.text] if asked.single else output.text
        for row in rows:
            if not quiet and first + row not in printed:
                if sys.stdout.isatty():
                    bar.stop()  # what is printed now would go through it
                typer.echo(show.numbered(texts[row], None if asked.single else first + row))
                printed.add(first + row)

    def decode(batch: Prompts) -> Output:
        if watched:
            with LiveView(work.model.tokenizer, pace=PACE) as view:
                return view.timed(lambda: work.run(batch, view.update, **traced))
        first = len(found.tokens)
        bar.among(first, len(batch.rows), len(asked.rows))
        if trace is not None or quiet:
            return work.run(batch, bar.update, **traced)
        return work.run(batch, Ended(work.model, batch, lambda output, rows: tell(output, rows, first), bar.update))

    raise_again()
    try:
        with bar:
            for batch, output, interrupted in in_batches(decode, asked, size):
                code = EXIT_CODE if interrupted else 0
                first, alone = len(found.tokens), len(batch.rows) == len(asked.rows)
                with held_back():
                    kept = completed(output) if interrupted and not alone else range(len(batch.rows))
                    found.add(output, kept)
                    tell(output, kept, first)
                if not first and not interrupted and work.request["temperature"] == 0 and repeats(batch, output):
                    bar.stop()
                    warnings.warn(show.EQUAL, stacklevel=1)
                if trace is not None and output.trace is not None:
                    output.trace.save(trace)
    except KeyboardInterrupt:  # between two batches
        code = EXIT_CODE
    return found, code

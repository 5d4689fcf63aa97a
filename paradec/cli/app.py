"""The command `paradec`: a wrong argument gives one line on standard error and exit code 2, Ctrl-C exit code 130.

With `PARADEC_DEBUG=1` in the environment, tracebacks are shown as well.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

import paradec
from paradec.cli import options, show, work
from paradec.cli.chat import chat
from paradec.cli.compare import bench, compare
from paradec.cli.decide import decide
from paradec.cli.design import design
from paradec.cli.eval import evaluate
from paradec.cli.export_folder import export_folder
from paradec.cli.generate import generate, infill
from paradec.cli.image import image
from paradec.cli.learn2pd import learn2pd
from paradec.cli.listings import caches, samplers, tasks
from paradec.cli.serve import serve
from paradec.cli.trace import trace
from paradec.cli.tune import tune
from paradec.core.interrupts import EXIT_CODE, is_debugging
from paradec.core.other_names import LOAD_ARGUMENTS
from paradec.core.request_fields import argument_hint

# errors that paradec and its libraries raise for wrong input
_INPUT_ERRORS = (ValueError, TypeError, OSError, ImportError, FloatingPointError)


class GroupedOptions(TyperCommand):
    """A command whose help lists its options in the sections of `options.SECTIONS`."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # several words are accepted, only to report missing quotes around a prompt: the usage shows one word
        return [
            piece.removesuffix("...") if piece.startswith("[") else piece for piece in super().collect_usage_pieces(ctx)
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {"Arguments": [], **{title: [] for title in options.SECTIONS}, "Options": []}
        order = " ".join(options.SECTIONS.values()).split()
        ranks = {name: rank for rank, name in enumerate(order)}
        for param in sorted(self.get_params(ctx), key=lambda param: ranks.get(param.name, len(ranks))):
            titles = (title for title, names in options.SECTIONS.items() if param.name in names.split())
            title = "Arguments" if param.param_type_name == "argument" else next(titles, "Options")
            if (record := param.get_help_record(ctx)) is not None:
                sections[title].append(tuple(map(options.in_shell_words, record)))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class _OneLineErrors(TyperGroup):
    """A command group that reports errors of the command line and of the library in one line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        others = [
            name for name in self.list_commands(ctx) if name not in {c[1] for group in COMMANDS.values() for c in group}
        ]
        sections = {title: [name for _, name, *_ in entries] for title, entries in COMMANDS.items()}
        for title, names in {**sections, "Others": others}.items():
            with formatter.section(title):
                commands = ((name, self.get_command(ctx, name)) for name in names)
                formatter.write_dl([(name, command.get_short_help_str(100)) for name, command in commands if command])

    def main(self, args: Any = None, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        if not standalone_mode:
            return super().main(args, standalone_mode=False, **extra)
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning
            try:
                # the exit code of typer.Exit, or the command's return value
                code = super().main(args, standalone_mode=False, **extra)
                if sys.stdout is not None:
                    sys.stdout.flush()
            except typer.Abort:
                code = EXIT_CODE
            except BrokenPipeError:  # the reader has closed the pipe (`paradec samplers | head -1`)
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                code = 1
            except Exception as error:
                code = _report_error(error, self, args or sys.argv[1:])
        sys.exit(code if isinstance(code, int) else 0)


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    show.clear_line()
    print("warning: " + " ".join(str(message).split()), file=sys.stderr)


def _name_options(text: str, command: Any, words: Sequence[str]) -> str:
    """Replace names of arguments in a library's error by options of the command in `words`: `block_length=0` becomes
    `--block-length=0`. Settings of a sampler keep their names."""
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    text = text.replace("load(..., tokenizer=...)", "tokenizer=...")
    text = re.sub(r"paradec\.(samplers|caches)\.names\(\) lists all", r"`paradec \1` lists all", text)
    names: dict[str, str] = {param.name: param.opts[0] for param in command.params if param.opts[0][:2] == "--"}
    custom_hint = re.compile(r"(a custom (\w+) is given as) an instance, .*CLASS\)")
    text = custom_hint.sub(lambda match: f"{match[1]} {names.get(match[2], '')} FILE.py:CLASS", text)
    return re.sub(r"(?<!\S)(?<!set )(\w+)(?==)", lambda match: names.get(match[1], match[1]), text)


def _option_hint(error: Any, words: Sequence[str]) -> str | None:
    """Advice for an unknown option that is an argument of another library or of a sampler; None for others."""
    known = {param.name: param.opts[0] for param in error.ctx.command.params}
    name, hint = error.option_name.lstrip("-").replace("-", "_"), None
    sampler = term = (re.findall(r"--sampler[= ]([^\s(]+)", " ".join(words)) or [""])[0]
    if known.keys() & {"sampler", "samplers"}:
        with suppress(ValueError, TypeError):  # an error in the class's file is reported once the option is right
            sampler = options.import_classes("--sampler", term, "sampler")
        hint = argument_hint(name, known, sampler, "jacobi" if "structures" in known else None)
    if (hint := hint or (LOAD_ARGUMENTS.get(name) if "model" in known else None)) is None:
        return None
    option = "sampler" if "sampler" in known else "samplers"
    hint = re.sub(r"sampler=paradec.samplers.create\('(\S+)', (.*)\)", rf'{option}="\1(\2)"', hint)
    hint = hint.replace(f'"{sampler}(', f'"{term}(')
    if term and hint.startswith("it is a setting") and f'"{term}(' not in hint:  # a method for pipelines
        return f"write --set {name}=VALUE"
    hint = re.sub(r"called '(\w+)'", lambda match: f"called {known[match[1]]}", hint)
    return re.sub(r'="(\w+)"', r"=\1", hint).replace("trace=True", "trace=FILE")


def _line_of_custom_class(error: Exception) -> str | None:
    """Find the innermost "FILE.py:LINE" of an error in a class of the user's file; None for other errors."""
    result = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).startswith(options.FILE_MODULE):
            result = f"{os.path.relpath(frame.f_code.co_filename)}:{line}"
    return result


def _report_error(error: Any, group: Any, words: Sequence[str]) -> int:
    # some releases of typer use click's exceptions, others a copy of them: test for the method, not for the class
    if hasattr(error, "format_message"):
        is_unknown_option = {"option_name", "possibilities"} <= vars(error).keys()
        if is_unknown_option:
            error.possibilities = get_close_matches(error.option_name, error.possibilities or (), cutoff=0.75)
        text = error.format_message()
        if "extra argument" in text and "prompt" not in (names := [param.name for param in error.ctx.command.params]):
            text += "; the option for a model is --model" * ("model" in names)
        if is_unknown_option and (hint := _option_hint(error, words)) is not None:
            text = _name_options(f"No such option: {error.option_name}; {hint}", group, words)
    elif not isinstance(error, ValueError) and (line := _line_of_custom_class(error)) is not None:
        text = f"{line}: {type(error).__name__}: {error}"
    elif isinstance(error, _INPUT_ERRORS):
        text = _name_options(str(error), group, words) or type(error).__name__
    else:
        raise error
    if is_debugging():
        traceback.print_exception(error)
    print("error: " + " ".join(text.split()), file=sys.stderr)
    return 2


COMMANDS: dict[str, list[tuple[Any, str, str | None, str]]] = {
    "Make text, pictures and proteins": [
        (generate, "generate", None, '"Sort: pear fig apple" --sampler credit'),
        (infill, "infill", None, '"Sort: pear <mask> apple"'),
        (chat, "chat", "Talk to a model, turn by turn.", "--model GSAI-ML/LLaDA-8B-Instruct --quantization int8"),
        (decide, "decide", None, '"Sort: pear fig apple" --span "=apple|fig|pear"'),
        (image, "image", "Make pictures and report the cost.", "--model digits-ar --class 3 --out three.png"),
        (design, "design", "Design protein sequences for backbones.", "proteinmpnn_v_48_020.pt 1ubi.pdb -n 4"),
        (serve, "serve", "Serve a model at OpenAI's endpoints.", "--model GSAI-ML/LLaDA-8B-Instruct --port 8000"),
    ],
    "Compare and tune": [
        (compare, "compare", "Compare samplers by answers and forwards.", "--limit 4 --samplers threshold,credit"),
        (tune, "tune", "Find settings for a model and its prompts.", "--trials 20 --out tuned.json"),
        (evaluate, "eval", "Score a model with lm-evaluation-harness.", "--tasks gsm8k --limit 20"),
        (trace, "trace", "Draw recorded runs as pages, animations or plots.", "run.json --out run.html"),
    ],
    "Look up and export": [
        (samplers, "samplers", "List the samplers, or describe one.", "threshold"),
        (caches, "caches", "List the caches and what each works with.", "dual"),
        (tasks, "tasks", "Show what the packaged text model can do.", ""),
        (export_folder, "export-folder", "Write code that transformers or diffusers load.", "generate folder"),
    ],
}
"""Commands by section of `paradec --help`: function, name, short help (None: from the docstring), example arguments."""
app = typer.Typer(
    name="paradec",
    cls=_OneLineErrors,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Fast sampling from models that can decode several tokens at once: text from masked-diffusion and from "
    "causal models, and pictures. `paradec COMMAND --help` has the options of a command.",
)


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    command, processes = context.invoked_subcommand, options.num_processes()
    if processes > 1 and command not in ("generate", "infill"):
        raise ValueError(
            f"paradec {command or '--help'} runs in one process, and was started in {processes}: start it without "
            "torchrun; only generate and infill use several processes"
        )
    if processes > 1:
        context.call_on_close(work.release_ranks)
    if version:
        typer.echo(f"paradec {paradec.__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


# Registered in the order of `paradec --help`. Commands import heavy libraries when they run.
for _commands in COMMANDS.values():
    for _function, _name, _short_help, _example in _commands:
        _epilog = f"Example: paradec {_name} {_example}".rstrip()
        app.command(_name, cls=GroupedOptions, short_help=_short_help, epilog=_epilog)(_function)
app.add_typer(bench, name="bench", short_help="Measure what parallel decoding costs.")
app.add_typer(learn2pd, name="learn2pd", short_help="Train a filter for the sampler learn2pd.")

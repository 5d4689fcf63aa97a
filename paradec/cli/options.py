"""Options that several commands have, declared once, and what becomes of the texts that are given for them."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

import paradec
from paradec.cli import ranks
from paradec.core.checks import check_choice, check_text
from paradec.core.text_files import decoded

# Declarations ----------------------------------------------------------------------------------------------------

Model = Annotated[str | None, typer.Option(help="A folder or a hub id; by default the small model inside the package.")]
Sampler = Annotated[
    str,
    typer.Option(
        "--sampler",
        help="A name that `paradec samplers` lists, or several: 'credit+localleap' commits what either would, "
        "'threshold&klass' what both would.",
    ),
]
Preset = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="A request that `paradec tune` or `Request.save` wrote; options that are given win over what is in it.",
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the sampler; may be repeated.")
]
Cache = Annotated[str, typer.Option("--cache", help="A name that `paradec caches` lists.")]
Suffix = Annotated[
    str | None,
    typer.Option(
        "--suffix",
        metavar="WINDOW",
        help="Evaluate no masks further after the open block than this: 64; or thinned out, gaussian:256.",
    ),
]
Attention = Annotated[
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
Steps = Annotated[int | None, typer.Option(help="Steps, for samplers that follow a schedule.")]
MaxNewTokens = Annotated[int | None, typer.Option(help="Length of the canvas after the prompt.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(help="Draw from the likeliest tokens with this mass.")]
TopK = Annotated[int | None, typer.Option(help="Draw from this many of the likeliest tokens.")]
TopNSigma = Annotated[
    float | None,
    typer.Option(help="Draw from tokens this many standard deviations of the logits below the best at most."),
]
GuidanceScale = Annotated[float, typer.Option(help="Classifier-free guidance; 1 is off.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the random draws.")]
Answers = Annotated[int, typer.Option("--num-return-sequences", "-n", help="Answers, each with its own draws.")]
Batch = Annotated[int, typer.Option(help="Prompts decoded together.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; by default the checkpoint's.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write what each step evaluated and made final: .html is a page to step through, .gif an animation, "
        ".json data for `paradec trace`.",
    ),
]
Live = Annotated[bool, typer.Option("--live", help="Show the tokens being filled in, on a terminal.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
AsList = Annotated[bool, typer.Option("--json", help="Print a JSON list.")]


# What they say ---------------------------------------------------------------------------------------------------


def read_text(argument: str) -> str:
    """The argument, or for "-" what standard input holds, without its last line's end.

    Raises:
        ValueError: standard input is closed, or no text.
    """
    ranks.check_prompt(argument)
    if argument != "-":
        return argument
    if sys.stdin is None:
        raise ValueError("standard input is closed; give a prompt")
    text = decoded(sys.stdin.buffer.read(), "standard input")
    if "\0" in text:
        raise ValueError(f"standard input is no text: it has a zero byte at position {text.index(chr(0))}")
    return text.replace("\r\n", "\n").rstrip("\n")


def check_readable(option: str, file: Path | None) -> None:
    """Raise ValueError unless there is a file to read, where one is given."""
    if file is None:
        return
    check_text(option, str(file))
    if not file.exists():
        raise ValueError(f"{option} {str(file)!r}: there is no such file")
    if file.is_dir():
        raise ValueError(f"{option} {str(file)!r} is a folder; give a file")
    if not os.access(file, os.R_OK):
        raise ValueError(f"cannot read {option} {str(file)!r}: permission denied")


def check_writable(option: str, file: Path | None) -> None:
    """Raise ValueError unless the file can be written, where there is one."""
    if file is None:
        return
    check_text(option, str(file))  # it is printed as well
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"cannot write {option} {str(file)!r}: not a file in an existing folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"cannot write {option} {str(file)!r}: permission denied")


def names(given: list[str] | None) -> list[str] | None:
    """Comma-separated names, in one option or several; commas in parentheses separate settings."""
    if given is None:
        return None
    return [name.strip() for text in given for name in re.split(r",(?![^(]*\))", text)]


def settings(pairs: Iterable[str] | None, option: str = "--set") -> dict[str, Any]:
    """Read `name=value` pairs.

    Raises:
        ValueError: no such pair, or a name that is given twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise ValueError(f"{option} takes NAME=VALUE, got {pair!r}")
        if name in found:
            raise ValueError(f"{option} gives {name!r} twice")
        found[name] = _value(text.strip())
    return found


def _value(text: str) -> Any:
    """A JSON or Python literal (0.9, true, None, [1, 2]), otherwise the text itself."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: brackets without end
            continue
    return text


def attention_of(name: str | None, pairs: list[str] | None) -> Any:
    """What `paradec.generate` takes as `attention`.

    Raises:
        ValueError: an unknown name, settings of dense attention, or settings that are wrong.
    """
    given = settings(pairs, "--attention-set")
    if name is not None:
        check_choice("attention", name, ["dense", *paradec.attention.names()])
    if name is None or name == "dense":
        if given:
            raise ValueError("--attention-set is for an attention with settings: give --attention sparsed")
        return name
    return paradec.attention.create(name, **given)


def given(context: typer.Context) -> set[str]:
    """The parameters of a command that are on its command line, by their names in Python."""
    # by name: typer has click's class, or its own copy of it
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def with_preset(request: dict[str, Any], preset: Path | None, there: set[str]) -> dict[str, Any]:
    """Arguments of a request: a preset's values take the place of defaults.

    Args:
        request: what the options say. there: the fields among them that were given.

    Raises:
        ValueError: no file that `Request.save` wrote.
    """
    if preset is None:
        return request
    from paradec.request import Request

    check_readable("--preset", preset)
    changes = Request.load(preset).changes()
    changes.pop("trace", None)  # `--trace` says where it goes
    return request | {name: value for name, value in changes.items() if name not in there}

"""Options that several commands have, declared once, and what becomes of the texts that are given for them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import Field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

import paradec
from paradec.cli import show
from paradec.core.checks import check_choice, check_text
from paradec.core.text_files import decoded
from paradec.request import FIELDS

# Declarations ----------------------------------------------------------------------------------------------------

Model = Annotated[str | None, typer.Option(help="A folder or a hub id; by default the small model inside the package.")]
Preset = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="A request that `paradec tune` or `Request.save` wrote; given options override it.",
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of the sampler; may be repeated.")
]
AttentionSet = Annotated[
    list[str] | None,
    typer.Option(
        "--attention-set",
        metavar="NAME=VALUE",
        help="A setting of the attention (select, skip, block_size, preset=short, ...); may be repeated.",
    ),
]
Batch = Annotated[int, typer.Option(help="Prompts decoded together.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16, ...; by default the checkpoint's.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Record what each step evaluated and made final: .html is a page to step through, .gif an animation, "
        ".json data for `paradec trace`.",
    ),
]
Live = Annotated[bool, typer.Option("--live", help="Show tokens on the terminal as they are decided.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
AsList = Annotated[bool, typer.Option("--json", help="Print a JSON list.")]


def _field_option(field: Field[Any]) -> tuple[Any, Any]:
    """Make an option and its default of a field of a request."""
    metadata = field.metadata
    names = ["--" + field.name.replace("_", "-"), metadata["short"]] if "short" in metadata else []
    option = typer.Option(*names, metavar=metadata.get("metavar"), help=metadata["help"])
    return Annotated[metadata["option"], option], metadata.get("option_default", field.default)


SHARED: dict[str, tuple[Any, Any]] = {
    name: _field_option(field) for name, field in FIELDS.items() if field.metadata["option"] is not None
} | {
    "model": (Model, None),
    "set_": (Set, None),
    "preset": (Preset, None),
    "attention_set": (AttentionSet, None),
    "batch": (Batch, 1),
    "dtype": (Dtype, None),
    "device": (Device, None),
    "trace": (TraceFile, None),
    "live": (Live, False),
    "as_json": (AsJson, False),
}
"""Parameters of commands, each with its default."""
FILE_AND_NAME = re.compile(r"([^(]+\.py:\w+)(\(.*\))?")
"""A sampler or a cache of one's own, on the command line, and its settings."""
Command = TypeVar("Command", bound=Callable[..., None])


def takes(names: str, **defaults: Any) -> Callable[[Command], Command]:
    """A decorator: a command gets the options `names` of `SHARED` by `**keywords`. In its help they come before those
    that it declares itself, but for those without a default. defaults: where they are others than in `SHARED`."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p.replace(kind=p.KEYWORD_ONLY) for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        shared = []
        for name in names.split():
            annotation, default = SHARED[name]
            default = defaults.get(name, default)
            shared.append(inspect.Parameter(name, own[0].KEYWORD_ONLY, default=default, annotation=annotation))
        needed = [parameter for parameter in own if parameter.default is parameter.empty]
        parameters = [*needed, *shared, *(parameter for parameter in own if parameter not in needed)]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def load(shared: dict[str, Any]) -> Any:
    """The model that `--model`, `--dtype` and `--device` say, which are taken out of `shared`."""
    show.quiet_loading()
    return paradec.load(shared.pop("model"), dtype=shared.pop("dtype"), device=shared.pop("device"))


def num_processes() -> int:
    """The number of processes that torchrun has started for this command; 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else 1


# What they say ---------------------------------------------------------------------------------------------------


def read_text(argument: str) -> str:
    """The argument, or for "-" what standard input holds, without its last line's end.

    Raises:
        ValueError: standard input is closed, or no text.
    """
    if argument != "-":
        return argument
    if num_processes() > 1:
        raise ValueError("several processes cannot all read standard input: give the prompt in quotes, or --in FILE")
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
    found: list[str] = []
    for text in given:
        found.append("")
        depth = 0
        for sign in text:
            depth += (sign in "([") - (sign in ")]")
            if sign == "," and depth <= 0:
                found.append("")
            else:
                found[-1] += sign
    return [name.strip() for name in found]


def sampler_names(given: list[str] | None) -> list[str] | None:
    """`names`, each by `own_name`."""
    found = names(given)
    return found if found is None else [own_name("--samplers", text, "sampler") for text in found]


def own_name(option: str, text: str, kind: str) -> str:
    """A name. FILE.py:NAME, with or without settings in parentheses, is a class, which is registered under its name.

    Args:
        kind: "sampler" or "cache".

    Raises:
        ValueError: no such file, or no class of this kind in it, or one whose name is taken.
    """
    split = FILE_AND_NAME.fullmatch(text)
    if split is None:
        return text
    from paradec.caches.base import Cache
    from paradec.core.protocol import Sampler

    base, registry = (Cache, paradec.caches.registry) if kind == "cache" else (Sampler, paradec.samplers.registry)
    cls = from_file(option, split[1])
    if not isinstance(cls, type) or not issubclass(cls, base):
        raise ValueError(f"{option} {text!r} must be a class of a {kind}, as docs/write_a_{kind}.md shows one")
    if cls.name not in registry or registry.get(cls.name) is not cls:
        registry.register(cls.name, cls)
    return cls.name + (split[2] or "")


def from_file(option: str, text: str) -> Any:
    """The function or class that FILE.py:NAME, or MODULE:NAME, names; modules of the working directory are found.

    Raises:
        ValueError: another form, no such file, one that fails, or no such name in it.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier() or not place:
        raise ValueError(f"{option} {text!r} must be FILE.py:NAME or MODULE:NAME")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = _module_of(option, text, place) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as error:
        raise ValueError(f"{option} {text!r} cannot be imported: {error}") from None
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"{option} {text!r}: {place!r} has no function or class {name!r}")
    return found


def _module_of(option: str, text: str, place: str) -> Any:
    """A file as a module, once."""
    if not os.path.isfile(place):
        raise ValueError(f"{option} {text!r}: {place!r} is no file")
    known = f"file {os.path.realpath(place)}"
    if known in sys.modules:
        return sys.modules[known]
    spec = importlib.util.spec_from_file_location(known, place)
    assert spec is not None and spec.loader is not None
    sys.modules[known] = module = importlib.util.module_from_spec(spec)  # where dataclasses look
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[known]
        if isinstance(error, Exception) and not isinstance(error, ImportError):
            raise ValueError(f"{option} {text!r}: {place!r} fails with {type(error).__name__}: {error}") from error
        raise
    return module


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

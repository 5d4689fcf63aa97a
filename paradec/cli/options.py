"""Options that several commands share, and conversion of their texts to values."""

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
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

import paradec
from paradec.cli import show
from paradec.core.checks import LARGEST_INT, LARGEST_INT64, check_choice, check_text
from paradec.core.component_text import split_file, split_outside
from paradec.core.text_files import decode_utf8
from paradec.core.text_files import read_text as text_of_file
from paradec.request import FIELDS

Names = list[str] | None
AsList = Annotated[bool, typer.Option("--json", help="Print a JSON list.")]
SAMPLERS = "Samplers, combinations and your own (FILE.py:CLASS), separated by commas; by default all masked ones."
Samplers = Annotated[Names, typer.Option(help=SAMPLERS)]
Seed = Annotated[int, typer.Option(min=0, max=LARGEST_INT64, help="Seed of the random draws.")]


def existing_file(help: str, *names: str, metavar: str = "FILE") -> Any:
    """Declare an option for an existing file."""
    return typer.Option(*names, metavar=metavar, exists=True, dir_okay=False, readable=True, help=help)


PRESET = "A request that `paradec tune` or `Request.save` wrote; given options override it."
ATTENTION = "A setting of the attention (select, skip, block_size, preset=short, ...); may be repeated."
TRACE = "Record the steps: .html is a page to step through, .gif an animation, .json data for `paradec trace`."
DRAFTER = (
    "For speculative: a smaller model of the same vocabulary, a drafter of --model (EAGLE, DFlash, DSpark), mtp (the "
    "model's own heads), prompt_lookup, or token_recycling (with --set rule=naive)."
)
BOUNDS: dict[str, Any] = {"min": 1, "max": LARGEST_INT}
SHARED: dict[str, tuple[Any, Any, Any]] = {
    "model": (str | None, typer.Option(help="A folder or a hub id; by default the small model in the package."), None),
    "set_": (Names, typer.Option("--set", metavar="NAME=VALUE", help="A sampler's setting; may be repeated."), None),
    "preset": (Path | None, existing_file(PRESET, metavar="FILE.json"), None),
    "attention_set": (Names, typer.Option("--attention-set", metavar="NAME=VALUE", help=ATTENTION), None),
    "drafter": (str | None, typer.Option(help=DRAFTER), None),
    "batch": (int, typer.Option(help="Prompts decoded together.", **BOUNDS), 1),
    "dtype": (str | None, typer.Option(help="float32, bfloat16, ...; by default the checkpoint's."), None),
    "quantization": (str | None, typer.Option(help="int8 (text models); int8(min_weights=1): all layers."), None),
    "device": (str | None, typer.Option(help="cpu, cuda, cuda:1, ..."), None),
    "tokenizer": (str | None, typer.Option(help="A folder or a hub id, if --model has no tokenizer."), None),
    "trace": (Path | None, typer.Option(metavar="FILE", help=TRACE), None),
    "live": (bool, typer.Option("--live", help="Show tokens on the terminal as they are decided."), False),
    "choice": (Names, typer.Option(metavar="TEXT", help="Answer with one of these texts; may be repeated."), None),
    "regex": (str | None, typer.Option(metavar="PATTERN", help="Answer with a text that matches."), None),
    "json_schema": (Path | None, existing_file("Answer with JSON of the schema in this file."), None),
    "after": (str | None, typer.Option(metavar="MARKER", help="Free text comes first, up to MARKER."), None),
    "thinking_budget": (int | None, typer.Option(min=0, help="Maximum tokens of free text, with --after."), None),
    "tasks": (Names, typer.Option(help="Tasks, separated by commas; by default all."), None),
    "limit": (int | None, typer.Option(min=1, help="Prompts of each task; by default all."), None),
    "out": (Path | None, typer.Option(metavar="FILE.json", help="Write each result when it is measured."), None),
    "plot": (Path | None, typer.Option(metavar="FILE.png", help="Draw accuracy over tokens per forward."), None),
    "resume": (bool, typer.Option("--resume", help="Continue from the results in --out."), False),
    "format_": (str | None, typer.Option("--format", help="Print the table as markdown, latex or csv."), None),
    "as_json": (bool, typer.Option("--json", help="Print one JSON object."), False),
}
"""Parameters of commands: type, declaration, default. Fields of `paradec.Request` are added below."""
for _name, _field in FIELDS.items():
    if (_option := _field.metadata)["option"] is not None:
        _names = ["--" + _name.replace("_", "-"), _option["short"]] if "short" in _option else []
        _bounds = BOUNDS if _name == "block_length" else {}
        _help, _shown = _option["help"], _option.get("show_default", True)
        _declared = typer.Option(*_names, metavar=_option.get("metavar"), help=_help, show_default=_shown, **_bounds)
        SHARED[_name] = (_option["option"], _declared, _option.get("option_default", _field.default))
SECTIONS = {
    "Model": "model tokenizer dtype quantization device",
    "Sampler": "sampler set_ preset drafter cache suffix attention attention_set steps samplers draft",
    "Blocks": "block_length blocks block_add block_full",
    "Answer": "max_new_tokens min_new_tokens ignore_eos eos_early_stop holes_eos_inf stop num_return_sequences raw "
    "system history hole prompt",
    "Drawing": "temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty guidance_scale "
    "seed",
    "Form": "choice regex json_schema after thinking_budget",
    "Input and output": "in_ lines out batch resume trace live as_json format_ plot tasks limit logprobs",
}
"""Sections of a command's help: names of parameters."""
SHELL_WORDS = {
    " <file>": "",
    " <path>": "",
    " <list[Path]>": "",
    "<list[str]>": "TEXT",
    "<str>": "TEXT",
    "<int range>": "N",
    "<int>": "N",
    "<float>": "NUMBER",
}


def in_shell_words(text: str) -> str:
    """Replace Python types in an option's help by words that shell users know."""
    for python, shell in SHELL_WORDS.items():
        text = text.replace(python, shell)
    return re.sub(rf"(\d+)<=x<=(?:{LARGEST_INT}|{LARGEST_INT64})", r"x>=\1", text)


Command = TypeVar("Command", bound=Callable[..., None])


def include(names: str, **defaults: Any) -> Callable[[Command], Command]:
    """Add the options `names` of `SHARED` to a command, which gets them by keyword. defaults: replace theirs."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        values, kind = signature.parameters.values(), inspect.Parameter.KEYWORD_ONLY
        parameters = [value.replace(kind=kind) for value in values if value.kind is not value.VAR_KEYWORD]
        shared = []
        for name in names.split():
            type_, declared, default = SHARED[name]
            annotation, default = Annotated[type_, declared], defaults.get(name, default)
            shared.append(inspect.Parameter(name, kind, default=default, annotation=annotation))
        required = [parameter for parameter in parameters if parameter.default is parameter.empty]
        parameters = [*required, *shared, *(parameter for parameter in parameters if parameter not in required)]
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return decorate


def load(shared: dict[str, Any]) -> Any:
    """Load a model; remove --model, --tokenizer, --dtype, --quantization and --device from `shared`."""
    show.quiet_loading()
    settings = {name: shared.pop(name, None) for name in ("tokenizer", "dtype", "quantization", "device")}
    return paradec.load(shared.pop("model"), **settings)


def num_processes() -> int:
    """Number of processes that torchrun started for this command; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else 1


def read_text(argument: str) -> str:
    """Return the argument, or for "-" the text of standard input without final line ends."""
    if argument != "-":
        return argument
    if num_processes() > 1:
        raise ValueError("several processes cannot all read standard input: give the prompt in quotes, or --in FILE")
    if sys.stdin is None:
        raise ValueError("standard input is closed; give a prompt")
    text = decode_utf8(sys.stdin.buffer.read(), "standard input")
    if "\0" in text:
        raise ValueError(f"standard input is not text: it has a zero byte at position {text.index(chr(0))}")
    return text.replace("\r\n", "\n").rstrip("\n")


def check_writable(option: str, file: Path | None) -> None:
    """Raise ValueError for a file that cannot be written; None is accepted."""
    if file is None:
        return
    check_text(option, str(file))  # the name is printed, too
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"cannot write {option} {str(file)!r}: not a file in an existing folder")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"cannot write {option} {str(file)!r}: permission denied")


def split_names(texts: list[str] | None) -> list[str] | None:
    """Split names at commas, but not inside parentheses."""
    return None if texts is None else [name.strip() for text in texts for name in split_outside(text, ",")]


def sampler_names(texts: list[str] | None) -> list[str] | None:
    """Split `--samplers`, and import the classes of files in it."""
    names = split_names(texts)
    return None if names is None else [import_classes("--samplers", text, "sampler") for text in names]


def import_classes(option: str, text: str, kind: str) -> str:
    """Register the classes of "FILE.py:CLASS" terms in a text, and return the text with their names instead. kind:
    "sampler" or "cache". Raises ValueError for other files and classes, and names that are taken."""
    from paradec.caches.base import Cache
    from paradec.core.protocol import Sampler

    base, registry = (Cache, paradec.caches.registry) if kind == "cache" else (Sampler, paradec.samplers.registry)
    terms = split_outside(text, "+")
    for index, term in enumerate(terms):
        if (file_and_class := split_file(term)) is None:
            continue
        cls = import_object(option, file_and_class[0])
        if not isinstance(cls, type) or not issubclass(cls, base):
            raise ValueError(f"{option} {term!r} must be a class of a {kind}; docs/write_a_{kind}.md shows one")
        if cls.name not in registry or registry.get(cls.name) is not cls:
            registry.register(cls.name, cls)
        terms[index] = cls.name + file_and_class[1]
    return "+".join(terms)


def import_object(option: str, text: str) -> Any:
    """Import the function or class FILE.py:NAME or MODULE:NAME; modules may be in the working directory. Raises
    ValueError for a text of another form, and for a file that is missing, raises, or has no such name."""
    file_name, _, name = text.rpartition(":")
    if not name.isidentifier() or not file_name:
        raise ValueError(f"{option} {text!r} must be FILE.py:NAME or MODULE:NAME")
    if file_name.endswith(".py") and not os.path.isfile(file_name):
        raise ValueError(f"{option} {text!r}: {file_name!r} is not a file")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = _import_file(file_name) if file_name.endswith(".py") else importlib.import_module(file_name)
    except ImportError as error:
        raise ValueError(f"{option} {text!r} cannot be imported: {error}") from None
    except Exception as error:
        raise ValueError(f"{option} {text!r}: {file_name!r} fails with {type(error).__name__}: {error}") from error
    value = getattr(module, name, None)
    if not callable(value):
        raise ValueError(f"{option} {text!r}: {file_name!r} has no function or class {name!r}")
    return value


FILE_MODULE = "file "
"""Prefix of the names of modules that `_import_file` makes."""


def _import_file(path: str) -> Any:
    """Import a file as a module, once."""
    name = f"{FILE_MODULE}{os.path.realpath(path)}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)  # `dataclass` looks it up there
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def read_settings(pairs: Iterable[str] | None, option: str = "--set") -> dict[str, Any]:
    """Read `name=value` pairs. Raises ValueError for other texts, and for a repeated name."""
    values: dict[str, Any] = {}
    for pair in pairs or ():
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name.isidentifier():
            raise ValueError(f"{option} takes NAME=VALUE, got {pair!r}")
        if name in values:
            raise ValueError(f"{option} gives {name!r} twice")
        values[name] = _parse_value(text.strip())
    return values


def _parse_value(text: str) -> Any:
    """Parse a JSON or Python literal (0.9, true, None, [1, 2]); other texts are returned unchanged."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: deeply nested brackets
            continue
    return text


def make_attention(name: str | None, pairs: list[str] | None) -> Any:
    """Make the argument `attention`. Raises ValueError for an unknown name or wrong settings."""
    values = read_settings(pairs, "--attention-set")
    if name is not None:
        check_choice("attention", name, ["dense", *paradec.attention.names()])
    if name is None or name == "dense":
        if values:
            raise ValueError("--attention-set is for an attention with settings: give --attention sparsed")
        return name
    return paradec.attention.create(name, **values)


def explicit_options(context: typer.Context) -> set[str]:
    """Return the names of the parameters that are on the command line."""
    # compare names, since typer's class is either click's or its own copy
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def make_constraint(shared: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of constraints from `shared`, and return the argument `constraint`; {} if none is given."""
    choices, pattern, schema = (shared.pop(name) for name in ("choice", "regex", "json_schema"))
    marker = {name: shared.pop(name) for name in ("after", "thinking_budget")}
    options = {"--choice": choices or None, "--regex": pattern, "--json-schema": schema}
    names = [name for name, value in options.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} both constrain the answer; give one of them")
    if not names and any(value is not None for value in marker.values()):
        raise ValueError("--after and --thinking-budget go with --choice, --regex or --json-schema")
    from paradec.constraints.values import Choice, JsonSchema, Regex

    if schema is not None:
        return {"constraint": JsonSchema(text_of_file(schema), **marker)}
    if pattern is not None:
        return {"constraint": Regex(pattern, **marker)}
    return {"constraint": Choice(tuple(choices), **marker)} if choices else {}

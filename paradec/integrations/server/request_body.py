"""Bodies of the endpoints: their fields, the arguments of `paradec.Request` in them, and their constraint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from openai.types.chat import ChatCompletionNamedToolChoiceParam
from pydantic import BaseModel, BeforeValidator, Field, Json, JsonValue

from paradec.batching.slots import REFUSED
from paradec.constraints.compiler import Compiler
from paradec.constraints.grammar import GrammarTexts
from paradec.constraints.values import Constraint, Grammar, ToolCalls, parse_constraint
from paradec.core.checks import check_names, short_repr, unknown_name
from paradec.core.component_text import parse_components
from paradec.integrations.server.limits import CLIENT_NAMES, ApiError
from paradec.request import FIELDS as REQUEST_FIELDS
from paradec.request import Request
from paradec.samplers.features.spans import automaton_of, reserved_tokens
from paradec.samplers.features.token_controls import CONTROLS

OWN = "paradec"  # the body's field for fields of `paradec.Request`, and `drafts` (OpenAI's clients: `extra_body`)
HIDDEN = (*REFUSED, "stop", "order", "compile", "rollout", "rng", "logprobs")  # not allowed in `OWN`
FIELDS = tuple(name for name in REQUEST_FIELDS if name not in HIDDEN)
SAMPLING = {  # fields of a body, with the field of `paradec.Request` that each sets
    CLIENT_NAMES.get(name, name): name
    for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_new_tokens", "stop_strings", *CONTROLS)
} | {"max_completion_tokens": "max_new_tokens"}
OFF: Any = {"top_k": (-1, 0), "min_p": (0,), "logit_bias": ({},), "bad_words": ([],)}  # values that mean null
INERT: dict[str, Any] = {  # fields without effect, and their only accepted value besides null; `...`: any value
    **{"best_of": 1, "modalities": ["text"], "skip_special_tokens": True, "verbosity": "medium", "suffix": ""},
    **{"echo": False, "user": ..., "metadata": ..., "store": ..., "service_tier": ..., "safety_identifier": ...},
    **{"stop_token_ids": [], "prompt_logprobs": None, "use_beam_search": False, "length_penalty": 1, "priority": 0},
    **{"include_stop_str_in_output": False, "early_stopping": False, "truncate_prompt_tokens": None, "audio": None},
    **{"prompt_cache_key": ..., "prompt_cache_retention": ..., "parallel_tool_calls": ...},
}
FORMATS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
MAX_ENTRIES, MAX_LENGTH = {"stop": 16, "bad_words": 256, "logit_bias": 1024}, 256


def _check_field(name: str, value: Any) -> None:
    """Raise ApiError for an unknown field of `OWN`, or a setting that is not a number: a text may name a file."""
    if name not in (*FIELDS, "drafts"):
        raise ApiError(unknown_name(f"field of {OWN}", name, (*FIELDS, "drafts")), 422, OWN)
    if name in ("drafts", "chat") and not isinstance(value, bool):
        raise ApiError(f"{name}={short_repr(value)} must be true or false", 422, OWN)
    if name not in ("sampler", "cache", "blocks"):
        return
    try:
        parts = [value] if isinstance(value, dict) else [part.settings for part in parse_components(name, str(value))]
    except ValueError:  # `Request` raises it later
        return
    for setting, entry in (pair for settings in parts for pair in settings.items()):
        if setting != name and not isinstance(entry, bool | int | float | None):
            raise ApiError(f"{name}: {setting}={short_repr(entry)} must be a number here, or in a preset", 422, OWN)


def _join_parts(value: Any) -> Any:
    if not isinstance(value, list):
        return "" if value is None else value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content part {short_repr(part)} must be of type text")
    return " ".join(part["text"] for part in value)


class Function(BaseModel, extra="allow", strict=True):
    """Field `function` of a tool or a tool call. All its fields are passed to the chat template."""

    __pydantic_extra__: dict[str, JsonValue]
    name: Annotated[str, Field(min_length=1)]
    description: JsonValue = None
    parameters: dict[str, JsonValue] | None = None
    arguments: Annotated[Json[dict[str, JsonValue]] | dict[str, JsonValue], BeforeValidator(lambda v: v or "{}")] = {}


class FunctionPart(BaseModel, extra="allow", strict=True):
    """A tool that the model may call, or a tool call of a message."""

    __pydantic_extra__: dict[str, JsonValue]
    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel, strict=True):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str, BeforeValidator(_join_parts)] = ""
    tool_calls: list[FunctionPart] | None = None
    tool_call_id: str | None = None


Object = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
Count = Annotated[int, Field(ge=0, le=20)]


class Body(BaseModel, extra="allow", strict=True):
    """Fields of chats and texts that are not in `SAMPLING`, `FORMATS` or `INERT`."""

    model: Any = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool | None] = {}
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    preset: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    paradec: Object = {}


class ChatBody(Body):
    """A body for /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[FunctionPart] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChatCompletionNamedToolChoiceParam | None = None
    chat_template_kwargs: Object = {}
    logprobs: bool | None = None
    top_logprobs: Count | None = None


class TextBody(Body):
    """A body for /v1/completions."""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(lambda v: v if isinstance(v, list) and not all(isinstance(part, int) for part in v) else [v]),
    ]
    echo: bool | None = None
    logprobs: Annotated[Count | None, BeforeValidator(lambda value: None if value is False else value)] = None


class DecisionBody(BaseModel, extra="forbid", strict=True):
    """A body for /v1/systemone; transformers checks the questions."""

    model: Any = None
    state: Any
    questions: Annotated[dict[str, dict[str, Any]], Field(min_length=1, max_length=64)]
    assets: dict[str, Any] = {}


def read_changes(body: Body, presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Read arguments of `paradec.Request` from a body and its preset. The body's constraint is left out
    (`read_constraint`). Raises ApiError, ValueError or TypeError for an unsupported field, value or preset."""
    known = (*type(body).model_fields, *SAMPLING, *FORMATS, *INERT)
    changes = {name: value for name, value in body.paradec.items() if name not in ("drafts", "chat", "constraint")}
    sources = dict.fromkeys(changes, OWN)  # by field of `paradec.Request`, the body's field that sets it
    for name, value in (body.model_extra or {}).items():
        if name not in known:
            hint = f'{name} goes into {OWN}, as in "{OWN}": {{"{name}": ...}}' if name in FIELDS else None
            raise ApiError(hint or unknown_name("field", name, {*known}), 422, short_repr(name)[1:-1])
        if INERT.get(name, ...) is not ... and value not in (None, INERT[name]):
            raise ApiError(f"{name}={short_repr(value)} is not supported; give {json.dumps(INERT[name])}", 422, name)
        if value is None or (field := SAMPLING.get(name)) is None:
            continue
        value = None if value in OFF.get(name, ()) else value
        if field in sources and (sources[field] == OWN or changes[field] != value):
            raise ApiError(f"{name} and {sources[field]} set the same field; give one", 400, name)
        changes[field], sources[field] = value, name
    if body.preset is not None and body.preset not in presets:
        allowed = ", ".join(presets) or "(none: this server has no --presets)"
        raise ApiError(f"preset={short_repr(body.preset)} must be one of {allowed}", 400, "preset")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise ApiError(f"top_logprobs={body.top_logprobs} needs logprobs=true", 422, "top_logprobs")
    for name, value in body.paradec.items():
        _check_field(name, value)
    if isinstance(body, ChatBody) and "chat" in body.paradec:
        raise ApiError("chat is for /v1/completions; leave it out", 422, OWN)
    if body.paradec.get("drafts") and not body.stream:
        raise ApiError("drafts=true needs stream=true", 400, OWN)
    stops = changes.get("stop_strings")
    if not isinstance(stops, str | list | None) or not all(isinstance(text, str) for text in stops or ()):
        raise ApiError(f"stop={short_repr(stops)} must be a text or a list of texts", 422, "stop")
    arguments = Request.from_dict(changes)
    for name, limit in MAX_ENTRIES.items():
        entries = arguments.get(SAMPLING[name]) or ()
        entries = [entries] if isinstance(entries, str) else entries
        if len(entries) > limit or any(len(str(entry)) > MAX_LENGTH for entry in entries):
            raise ApiError(f"{name} must have at most {limit} entries of at most {MAX_LENGTH} characters", 400, name)
    return {**(presets[body.preset] if body.preset else {}), **arguments}


def read_presets(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the files of `Request.save` in a folder, as fields by file name. Raises ValueError, OSError."""
    if not (files := sorted(folder.glob("*.json"))):
        raise ValueError(f"presets={str(folder)!r} must be a folder with .json files; Request.save writes one")
    return {file.stem: Request.merge_arguments({}, file) for file in files}


def read_constraint(
    body: Body, tools: list[Any], default: Any, model: Any, compiler: Compiler, after: str | None = None
) -> tuple[Any, Any]:
    """Build the constraint of an answer, and its automaton over the model's tokens; or return None and None.
    tools: the answer must call one of these. default: constraint of the preset or the server, if the body has none.
    after: text after which the constraint begins, unless the body gives another one. Raises ApiError."""
    formats: dict[str, Any] = {name: (body.model_extra or {}).get(name) for name in FORMATS}
    formats |= {OWN: body.paradec.get("constraint"), "tool_choice": tools or None}
    formats = {name: value for name, value in formats.items() if value not in (None, {"type": "text"})}
    if not (formats := formats or ({} if default is None else {"preset": default})):
        return None, None
    (name, value), *others = formats.items()
    if others:
        raise ApiError(f"{name} and {others[0][0]} both constrain the answer; give one", 400, others[0][0])
    facts, ends = model.facts, tuple(sorted(model.facts.eos_token_ids))
    try:
        data = value if name == "tool_choice" else _read_format(name, value)
        if after is not None and isinstance(data, Mapping) and {*data} & {"json_schema", "regex", "choice"}:
            data = {"after": after, **data}
        if name == "tool_choice":
            constraint = compiler.compile(ToolCalls.from_functions, [tool["function"] for tool in value], after)
        elif isinstance(data, Mapping) and {*data} & {"json_schema", "regex", "after"}:
            constraint = compiler.compile(parse_constraint, "constraint", data)
        elif not isinstance(constraint := parse_constraint("constraint", data), Constraint):
            raise ValueError(f"constraint={short_repr(value)} is for holes, and a prompt has none")
        if isinstance(constraint, Grammar) and facts.topology == "causal":
            return constraint, GrammarTexts(constraint.grammar, model.tokenizer, facts.vocab_size, facts.eos_token_ids)
        return constraint, automaton_of(model, constraint, ends, (), reserved_tokens(facts, True))
    except (ValueError, RecursionError, ModuleNotFoundError, TypeError, LookupError, AttributeError) as error:
        param, hint = ("tools", "; tool_choice='auto' does not need them") if name == "tool_choice" else (name, "")
        raise ApiError(f"{param}: {error}{hint}", 422, param) from error


def _read_format(name: str, value: Any) -> Any:
    """Convert a field's value to an argument of `parse_constraint`. Raises ValueError for a malformed value."""
    match name, value:
        case "paradec" | "preset", _:
            return value
        case "response_format", {"type": "json_schema", "json_schema": {"schema": schema, **fields}, **others}:
            check_names("field", others, ("type", "json_schema"))
            check_names("field of json_schema", fields, ("name", "description", "schema", "strict"))
            return {"json_schema": schema}
        case "response_format", {"type": "json_object", **others} if not others:
            return {"json_schema": {"type": "object"}}
        case "response_format", _:
            types = 'the type "text" or "json_object" alone, or "json_schema" with an object that has a "schema"'
            raise ValueError(f"{short_repr(value)} must have {types}")
    parts = {name.removeprefix("guided_"): value} if name.startswith("guided_") else value
    if parts == {"json_object": True}:
        return {"json_schema": {"type": "object"}}
    if not isinstance(parts, dict):
        raise ValueError(f"{short_repr(value)} must be an object")
    return {"json_schema" if kind == "json" else kind: argument for kind, argument in parts.items()}

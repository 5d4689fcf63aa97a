"""Bodies of the two endpoints: the fields of `paradec.Request` that they set, and the form of their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, StrictBool, StrictInt, StrictStr

from paradec.constraints.compiler import Compiler
from paradec.constraints.grammar import GrammarTexts
from paradec.constraints.values import Constraint, Grammar, ToolCalls, constraint_of
from paradec.core.checks import shown, unknown_name
from paradec.core.component_text import parse_components
from paradec.integrations.server.limits import ApiError, to_api_error
from paradec.request import Request
from paradec.samplers.features.spans import automaton_of, reserved_tokens

OWN = "paradec"  # the body's field with fields of `paradec.Request`, and `drafts`; `extra_body` of OpenAI's clients
FIELDS = (  # of `paradec.Request` that a body may set in `OWN`
    *("sampler", "cache", "suffix", "blocks", "block_length", "steps", "max_new_tokens", "temperature", "top_p"),
    *("top_k", "guidance_scale", "seed", "eos_early_stop", "logits_eos_inf", "holes_eos_inf"),
    *("confidence_eos_eot_inf", "suppress_tokens", "stop_strings", "constraint", "chat"),
)
SAMPLING = {  # fields of the body, by their names in `paradec.Request`, which checks them
    **{name: name for name in ("temperature", "top_p", "top_k", "seed")},
    **{"stop": "stop_strings", "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"},
}
FORMATS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
CONSTRAINTS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}
INERT: dict[str, Any] = {  # fields that are not supported, and the value besides null that changes nothing
    **{"best_of": 1, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0},
    **{"min_tokens": 0, "ignore_eos": False, "logit_bias": {}, "modalities": ["text"], "skip_special_tokens": True},
    **{"verbosity": "medium", "suffix": "", "echo": False},
}
IGNORED = (  # fields that change no answer
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "parallel_tool_calls",
)
MAX_STOPS, MAX_STOP_LENGTH, MAX_DEPTH = 16, 256, 64


def _check_depth(value: Any, levels: int = MAX_DEPTH) -> Any:
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if levels == 0:
            raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} levels deep")
        _check_depth(part, levels - 1)
    return value


def _read_arguments(value: Any) -> Any:
    try:
        return _check_depth(json.loads(value or "{}") if isinstance(value, str | None) else value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be read as JSON: {error}") from None


def _join_parts(value: Any) -> Any:
    if not isinstance(value, list):
        return "" if value is None else value
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content part {shown(part)} must be of type text")
    return " ".join(part["text"] for part in value)


def _list_prompts(value: Any) -> list[Any]:
    return value if isinstance(value, list) and not all(isinstance(part, int) for part in value) else [value]


class Function(BaseModel, extra="allow"):
    """`function` of a tool or of a call; all fields go to the chat template."""

    name: Annotated[StrictStr, Field(min_length=1)]
    description: Any = None
    parameters: dict[str, Any] | None = None
    arguments: Annotated[dict[str, Any], BeforeValidator(_read_arguments)] = {}


class FunctionPart(BaseModel, extra="allow"):
    """A tool that the model may call, or a call of one."""

    type: Literal["function"] = "function"
    function: Function


class Message(BaseModel):
    """A message of a chat."""

    role: StrictStr
    content: Annotated[StrictStr, BeforeValidator(_join_parts)] = ""
    tool_calls: list[FunctionPart] | None = None
    tool_call_id: StrictStr | None = None


class StreamOptions(BaseModel, extra="forbid"):
    """`stream_options` of a body."""

    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


Object = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]
Count = Annotated[StrictInt, Field(ge=0, le=20)]


class Body(BaseModel, extra="allow"):
    """The fields of both endpoints; `SAMPLING`, `FORMATS`, `INERT` and `IGNORED` are others."""

    model: Any = None
    stream: StrictBool | None = None
    stream_options: StreamOptions = StreamOptions()
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    preset: Any = None
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = None
    paradec: Object = {}


class ChatBody(Body):
    """A body for /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Annotated[FunctionPart, BeforeValidator(_check_depth)]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: Object = {}
    logprobs: StrictBool | None = None
    top_logprobs: Count | None = None


class TextBody(Body):
    """A body for /v1/completions."""

    prompt: Annotated[list[Any], BeforeValidator(_list_prompts)]
    echo: StrictBool | None = None
    logprobs: Annotated[Count | None, BeforeValidator(lambda value: None if value is False else value)] = None


def read_changes(body: Body, presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Read the fields of `paradec.Request` but the constraint. Those of the body have priority over a preset's.

    Raises ApiError, ValueError or TypeError for a field, a value or a preset that is not supported.
    """
    known = (*type(body).model_fields, *SAMPLING, *FORMATS, *INERT, *IGNORED)
    extra = body.model_extra or {}
    for name, value in extra.items():
        if name not in known:
            raise ApiError(unknown_name("field", name, {*known}), 422, shown(name)[1:-1])
        if name in INERT and value not in (None, INERT[name]):
            allowed = json.dumps(INERT[name])
            raise ApiError(f"{name}={shown(value)} is not supported; leave it out, or give {allowed}", 422, name)
    if body.preset is not None and (not isinstance(body.preset, str) or body.preset not in presets):
        allowed = f"one of {', '.join(sorted(presets))}" if presets else "left out: this server has none"
        raise ApiError(f"preset={shown(body.preset)} must be {allowed}", 400, "preset")
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        raise ApiError(f"top_logprobs={body.top_logprobs} needs logprobs=true", 422, "top_logprobs")
    own, sampling = _read_own(body), dict[str, Any]()
    for outer, inner in SAMPLING.items():
        value = extra.get(outer)
        if value is None or (outer == "top_k" and value in (-1, 0) and not isinstance(value, bool)):
            continue
        if inner in own or sampling.get(inner, value) != value:
            other = f"{OWN}.{inner}" if inner in own else "max_tokens"
            raise ApiError(f"{outer} and {other} say the same; give one", 400, outer)
        sampling[inner] = value
    stops = sampling.get("stop_strings", own.get("stop_strings"))
    stops = [stops] if isinstance(stops, str) else [] if stops is None else stops
    if not isinstance(stops, (list, tuple)) or not all(isinstance(text, str) for text in stops):
        raise ApiError(f"stop={shown(stops)} must be a text or a list of texts", 422, "stop")
    if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in stops):
        raise ApiError(f"stop must be at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters", 400, "stop")
    sampling = Request.from_dict(sampling)
    if isinstance(sampling.get("seed"), tuple):
        raise ApiError(f"seed={shown(extra['seed'])} must be an integer", 400, "seed")
    return {**(presets[body.preset] if body.preset else {}), **own, **sampling}


def _read_own(body: Body) -> dict[str, Any]:
    for name, value in body.paradec.items():
        if name not in (*FIELDS, "drafts"):
            raise ApiError(unknown_name(f"field of {OWN}", name, (*FIELDS, "drafts")), 422, OWN)
        if name in ("drafts", "chat") and not isinstance(value, bool):
            raise ApiError(f"{name}={shown(value)} must be true or false", 422, OWN)
        if name in ("sampler", "cache", "blocks"):
            _check_component(name, value)
    if "chat" in body.paradec and isinstance(body, ChatBody):
        raise ApiError("chat is for /v1/completions; messages are a chat", 422, OWN)
    if body.paradec.get("drafts") and not body.stream:
        raise ApiError("drafts=true needs stream=true", 400, OWN)
    others = ("drafts", "chat", "constraint")
    try:
        return Request.from_dict({name: value for name, value in body.paradec.items() if name not in others})
    except (ValueError, TypeError) as error:
        raise to_api_error(error, OWN) from error


def _check_component(name: str, value: Any) -> None:
    """Raise ApiError for a setting that is not a number: it may name a file."""
    if not isinstance(value, (str, Mapping, type(None))):
        raise ApiError(f"{name}={shown(value)} must be a name, or an object of it and its settings", 422, OWN)
    try:
        components = parse_components(name, value) if isinstance(value, str) else []
    except ValueError:  # `Request` raises it
        return
    for settings in [value] if isinstance(value, Mapping) else [component.settings for component in components]:
        for setting, entry in settings.items():
            if setting != name and not isinstance(entry, (bool, int, float, type(None))):
                reason = "must be a number here; others go into a preset"
                raise ApiError(f"{name}: {setting}={shown(entry)} {reason}", 422, OWN)


def read_presets(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Read the files NAME.json of a folder, which `Request.save` wrote, by name. Raises ValueError, OSError."""
    files = [] if folder is None else sorted(folder.glob("*.json"))
    if folder is not None and not files:
        raise ValueError(f"presets={str(folder)!r} is no folder, or holds no .json file; Request.save writes one")
    return {file.stem: Request.merge_arguments({}, file) for file in files}


def find_format(body: Body, calls: list[Any] | None) -> tuple[str, Any] | None:
    """Find the field that says the form of an answer, and its value. calls: of a required tool. Raises ApiError."""
    formats: dict[str, Any] = {name: (body.model_extra or {}).get(name) for name in FORMATS}
    formats |= {OWN: body.paradec.get("constraint"), "tool_choice": calls}
    formats = {name: value for name, value in formats.items() if value not in (None, {"type": "text"})}
    if len(formats) > 1:
        first, second, *_ = formats
        raise ApiError(f"{first} and {second} both say the form of an answer; give one", 400, second)
    return next(iter(formats.items()), None)


def read_constraint(name: str, value: Any, model: Any, compiler: Compiler) -> Constraint:
    """Build the constraint of a field and its automaton, which the batch then finds. Raises ApiError."""
    try:
        if name == "tool_choice":
            constraint = compiler.compile(ToolCalls.from_functions, [tool["function"] for tool in value])
        elif isinstance(data := _read_format(name, value), Mapping) and {*data} & {"json_schema", "regex"}:
            constraint = compiler.compile(constraint_of, "constraint", data)
        elif not isinstance(constraint := constraint_of("constraint", data), Constraint):
            raise ValueError(f"constraint={shown(value)} is for holes, and a prompt has none")
        _texts(constraint, model)
    except (ValueError, RecursionError, ModuleNotFoundError, TypeError, LookupError, AttributeError) as error:
        is_malformed = isinstance(error, (TypeError, LookupError, AttributeError))  # parts of a schema of wrong types
        reason = f"malformed ({type(error).__name__}: {error})" if is_malformed else str(error)
        param, hint = ("tools", "; tool_choice='auto' does not need them") if name == "tool_choice" else (name, "")
        raise ApiError(f"{param}: {reason}{hint}", 422, param) from error
    return constraint


def _read_format(name: str, value: Any) -> Any:
    """Convert to plain data of `paradec.Request`. Raises ValueError for another form."""
    if name == OWN:
        return value
    if name == "response_format":
        match value:
            case {"type": "json_object"}:
                return {"json_schema": {"type": "object"}}
            case {"type": "json_schema", "json_schema": {"schema": schema}}:
                return {"json_schema": schema}
        types = 'the type "text", "json_object" or "json_schema"; json_schema must be an object with a "schema"'
        raise ValueError(f"{shown(value)} must have {types}")
    kinds = ", ".join((*CONSTRAINTS, "json_object"))
    parts = {name.removeprefix("guided_"): value} if name.startswith("guided_") else value
    if not isinstance(parts, Mapping) or len(parts) != 1:
        raise ValueError(f"{shown(value)} must be an object with one of the keys {kinds}")
    ((kind, argument),) = parts.items()
    if kind == "json_object" and argument is True:
        return {"json_schema": {"type": "object"}}
    if kind not in CONSTRAINTS:
        raise ValueError(f"{kind}={shown(argument)} is not offered; give one of {kinds} with true")
    return {CONSTRAINTS[kind]: argument}


def check_room(constraint: Constraint, model: Any, new: int) -> None:
    """Raise ApiError where no text of a constraint fits `new` tokens; the shortest one of a grammar is not known."""
    if not isinstance(constraint, Grammar) and not _texts(constraint, model).reach(new)[0]:
        raise ApiError(f"max_tokens={new} is too few: no answer of this form is that short", 400, "max_tokens")


def is_complete(constraint: Constraint | None, model: Any, ids: list[int]) -> bool:
    """Whether an answer that `max_tokens` ended is a whole text of its constraint: automata close every text."""
    return _texts(constraint, model).accepts(ids) if isinstance(constraint, Grammar) else constraint is not None


def _texts(constraint: Constraint, model: Any) -> Any:
    facts = model.facts
    if isinstance(constraint, Grammar) and facts.topology == "causal":
        return GrammarTexts(constraint.grammar, model.tokenizer, facts.vocab_size, facts.eos_token_ids)
    return automaton_of(model, constraint, tuple(sorted(facts.eos_token_ids)), (), reserved_tokens(facts, True))

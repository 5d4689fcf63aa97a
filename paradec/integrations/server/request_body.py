"""Bodies of the two endpoints, and the fields of `paradec.Request` that they set."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from paradec.core.checks import LARGEST_INT64, check_int, shown
from paradec.core.component_text import parse_components
from paradec.core.registry import unknown
from paradec.integrations.server.errors import ApiError, to_api_error
from paradec.request import FIELDS as REQUEST_FIELDS
from paradec.request import Request

OWN = "paradec"
"""The body's field with fields of `paradec.Request`, and `drafts`; OpenAI's clients send it as `extra_body`."""
FIELDS = (
    *("sampler", "cache", "suffix", "blocks", "block_length", "steps", "max_new_tokens", "temperature", "top_p"),
    *("top_k", "guidance_scale", "seed", "eos_early_stop", "logits_eos_inf", "holes_eos_inf"),
    *("confidence_eos_eot_inf", "suppress_tokens", "stop_strings", "constraint", "chat"),
)
"""Fields of `paradec.Request` that a body may set in `OWN`."""
SAMPLING = {
    **{"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed", "stop": "stop_strings"},
    **{"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"},
}
"""Fields of the body, by their names in `paradec.Request`, which checks them."""
FORMATS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""Fields that say the form of an answer."""
IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    "parallel_tool_calls",
)
"""Fields of OpenAI's that do not change an answer."""
ONLY: dict[str, tuple[Any, ...]] = {
    **{"best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,)},
    **{"min_p": (0,), "min_tokens": (0,), "ignore_eos": (False,), "logit_bias": ({},), "modalities": (["text"],)},
    **{"skip_special_tokens": (True,), "verbosity": ("medium",), "suffix": ("",), "echo": (False,)},
}
"""Fields that are not supported, and the values besides null that change nothing."""
MAX_STOPS, MAX_STOP_LENGTH, MAX_DEPTH = 16, 256, 64


def _check_depth(value: Any) -> Any:
    def is_deeper(value: Any, levels: int) -> bool:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return bool(parts) and (levels == 0 or any(is_deeper(part, levels - 1) for part in parts))

    if is_deeper(value, MAX_DEPTH):
        raise ValueError(f"lists and objects are nested more than {MAX_DEPTH} levels deep")
    return value


def _read_arguments(value: Any) -> Any:
    try:
        return json.loads(value or "{}") if isinstance(value, str | None) else value
    except RecursionError:
        raise ValueError("cannot be read as JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"cannot be read as JSON: {error}") from None


def _join_parts(value: Any) -> Any:
    parts = value if isinstance(value, list) else []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"content part {shown(part)} must be of type text")
    return " ".join(part["text"] for part in parts) if isinstance(value, list) else "" if value is None else value


Object = Annotated[dict[str, Any], BeforeValidator(lambda value: {} if value is None else value)]


class Part(BaseModel):
    """A part of a body with fields that go to the chat template unchanged."""

    model_config = ConfigDict(extra="allow")


class CalledFunction(Part):
    """`function` of a call in a message."""

    name: StrictStr
    arguments: Annotated[dict[str, Any], AfterValidator(_check_depth), BeforeValidator(_read_arguments)] = {}


class MessageCall(Part):
    """A call in a message."""

    function: CalledFunction


class Message(BaseModel):
    """A message of a chat."""

    role: StrictStr
    content: Annotated[StrictStr, BeforeValidator(_join_parts)] = ""
    tool_calls: list[MessageCall] | None = None
    tool_call_id: StrictStr | None = None


class Function(Part):
    """`function` of a tool."""

    name: Annotated[StrictStr, Field(min_length=1)]
    description: Any = None
    parameters: dict[str, Any] | None = None


class Tool(Part):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class StreamOptions(BaseModel):
    """`stream_options` of a body."""

    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool | None = None
    include_obfuscation: StrictBool | None = None


class Body(BaseModel):
    """The fields of both endpoints; `SAMPLING`, `FORMATS`, `ONLY` and `IGNORED` are others."""

    model_config = ConfigDict(extra="allow")
    model: Any = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[StrictInt, Field(ge=1, le=128)] | None = None
    preset: Any = None
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=256)] | None = None
    paradec: Object = {}

    def field(self, name: str) -> Any:
        """A field that is checked elsewhere; None if it is not there."""
        return (self.model_extra or {}).get(name)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


Count = Annotated[StrictInt, Field(ge=0, le=20)]


class ChatBody(Body):
    """A body for /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Annotated[Tool, BeforeValidator(_check_depth)]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: Object = {}
    logprobs: StrictBool | None = None
    top_logprobs: Count | None = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens; None without log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TextBody(Body):
    """A body for /v1/completions."""

    prompt: Any
    echo: StrictBool = False
    logprobs: Annotated[Count | None, BeforeValidator(lambda value: None if value is False else value)] = None

    @property
    def num_logprobs(self) -> int | None:
        """The number of likeliest tokens; None without log-probabilities."""
        return self.logprobs

    @property
    def prompts(self) -> list[Any]:
        """The prompts, of which a list has one or several."""
        is_list = isinstance(self.prompt, list) and not all(isinstance(part, int) for part in self.prompt)
        return self.prompt if is_list else [self.prompt]


def read_changes(body: Body, presets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Read the fields of `paradec.Request`, but its constraint. Those of the body win over those of a preset.

    Raises:
        ApiError: an unknown field or preset, a value that is not supported, or two fields for the same.
    """
    for name, value in (body.model_extra or {}).items():
        known = {*type(body).model_fields, *SAMPLING, *FORMATS, *ONLY, *IGNORED}
        if name not in known:
            raise ApiError(unknown("field", name, known), 422, shown(name)[1:-1])
        if name in ONLY and value is not None and value not in ONLY[name]:
            allowed = " or ".join(map(json.dumps, ONLY[name]))
            raise ApiError(f"{name}={shown(value)} is not supported; leave it out, or give {allowed}", 422, name)
    changes: dict[str, Any] = {}
    if (preset := body.preset) is not None:
        if not isinstance(preset, str) or preset not in presets:
            allowed = f"one of {', '.join(sorted(presets))}" if presets else "left out: this server has none"
            raise ApiError(f"preset={shown(preset)} must be {allowed}", 400, "preset")
        changes |= presets[preset]
    own = {name: value for name, value in body.paradec.items() if name not in ("drafts", "constraint")}
    for name in body.paradec:
        if name not in (*FIELDS, "drafts"):
            raise ApiError(unknown(f"field of {OWN}", name, (*FIELDS, "drafts")), 422, OWN)
        if name in ("drafts", "chat") and not isinstance(body.paradec[name], bool):
            raise ApiError(f"{name}={shown(body.paradec[name])} must be true or false", 422, OWN)
    if body.paradec.get("drafts") and not body.stream:
        raise ApiError("drafts=true needs stream=true", 400, OWN)
    first_names = {name: f"{OWN}.{name}" for name in own}
    for outer, inner in SAMPLING.items():
        if (value := _read_sampling(body, outer)) is None:
            continue
        if inner in first_names and (inner in own or value != changes[inner]):
            raise ApiError(f"{outer} and {first_names[inner]} say the same; give one", 400, outer)
        first_names[inner], changes[inner] = outer, value
    _check_settings(own)
    try:
        changes |= Request.from_dict(own)
    except (ValueError, TypeError) as error:
        raise ApiError(str(error), 400, OWN) from error
    _check_stops(own.get("stop_strings"))
    changes.pop("chat", None)
    return changes


def _read_sampling(body: Body, name: str) -> Any:
    """A field of `SAMPLING`, checked under its own name; None if it is not there or changes nothing."""
    value = body.field(name)
    if value is None or (name == "top_k" and value in (-1, 0) and not isinstance(value, bool)):
        return None
    try:
        if name == "stop":
            _check_stops(value)
        elif name == "seed":
            check_int(name, value, low=0, high=LARGEST_INT64)
        REQUEST_FIELDS[SAMPLING[name]].metadata["check"](name, value)
    except (ValueError, TypeError) as error:
        raise to_api_error(error, name) from error
    return value


def _check_stops(stops: Any) -> None:
    texts = [stops] if isinstance(stops, str) else [] if stops is None else stops
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ApiError(f"stop={shown(stops)} must be a text or a list of texts", 422, "stop")
    if len(texts) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in texts):
        raise ApiError(f"stop must be at most {MAX_STOPS} texts of at most {MAX_STOP_LENGTH} characters", 400, "stop")


def _check_settings(own: Mapping[str, Any]) -> None:
    """Raise ApiError for a setting of a component that is not a number: it may name a file."""
    for name in ("sampler", "cache", "blocks"):
        component = own.get(name)
        if component is None:
            continue
        if not isinstance(component, (str, Mapping)):
            raise ApiError(f"{name}={shown(component)} must be a name, or an object of it and its settings", 422, OWN)
        for setting, value in _settings_of(component) if isinstance(component, str) else component.items():
            if setting != name and not isinstance(value, (bool, int, float, type(None))):
                message = f"{name}: {setting}={shown(value)} must be a number here; others go into a preset"
                raise ApiError(message, 422, OWN)


def _settings_of(text: str) -> Iterator[tuple[str, Any]]:
    """The settings in "credit(threshold=0.95)+localleap"; none of a text that `Request` refuses."""
    try:
        components = parse_components("sampler", text)
    except ValueError:
        return
    for component in components:
        yield from component.settings.items()


def read_presets(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Read the presets of a folder by name: every file NAME.json, which `Request.save` wrote.

    Raises:
        ValueError, OSError: no folder, no such file in it, or a file of another kind.
    """
    if folder is None:
        return {}
    if not folder.is_dir():
        raise ValueError(f"presets={str(folder)!r} is no folder")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"presets={str(folder)!r} holds no .json file; Request.save writes one")
    presets = {}
    for file in files:
        Request.load(file)  # its messages name the file
        presets[file.stem] = Request.merge_arguments({}, file)
    return presets

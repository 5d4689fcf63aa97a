"""A body of JSON becomes what the batch takes: changes of the request, and what the server itself does with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paradec.core.checks import shown
from paradec.core.component_text import parse_components
from paradec.core.registry import unknown
from paradec.request import Request

OWN = "paradec"
"""The body's field that holds fields of `paradec.Request`, and `drafts`; OpenAI's clients send it as `extra_body`."""
PRESET = "preset"
"""The body's field that names one of the server's presets."""
FIELDS = (
    *("sampler", "cache", "suffix", "blocks", "block_length", "steps", "max_new_tokens", "temperature", "top_p"),
    *("top_k", "guidance_scale", "seed", "eos_early_stop", "logits_eos_inf", "holes_eos_inf"),
    *("confidence_eos_eot_inf", "suppress_tokens", "stop_strings", "constraint", "chat"),
)
"""Fields of `paradec.Request` that a body may hold under `OWN`."""
SALT = "cache_salt"
"""The body's field that keeps keys and values apart, as vLLM names it."""
LONGEST_SALT = 256
SAMPLING = ("temperature", "top_p", "seed", "stop", "max_tokens", "max_completion_tokens")
"""What OpenAI's schema has of a request."""
NAMES = {"stop": "stop_strings", "max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens"}
"""What they are called here."""
PASSED_OVER = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "parallel_tool_calls",
)
"""Fields of OpenAI's schema that do not change an answer."""
ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),
}
"""Fields that change an answer in ways that are not offered, and the values (besides null) that change nothing."""
MOST_STOPS = 16
LONGEST_STOP = 256


class Refused(ValueError):
    """A body that cannot be served.

    `status` is the HTTP status, `param` the field, `retry_after` the seconds after which it may be served.
    """

    def __init__(self, message: str, status: int = 400, param: str | None = None, retry_after: int | None = None):
        super().__init__(message)
        self.status, self.param, self.retry_after = status, param, retry_after


@dataclass
class Asked:
    """What a body asks for. It goes through transformers' handlers in the place of their generation config."""

    changes: dict[str, Any] = field(default_factory=dict)
    """Fields of `paradec.Request`."""
    cache_salt: str | None = None
    """Only requests with an equal one share keys and values."""
    drafts: bool = False
    """Whether a stream has drafts among it, as comments."""
    count: int = 1
    """Answers to the one prompt."""
    scores: list[Any] | None = None
    """Of an answer with `logprobs`: its tokens (`scores.Score`), once it has ended."""
    max_new_tokens: int | None = None
    """What the handlers tell by whether an answer was cut off (`settle`); None before it has ended."""

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts at which an answer is cut off."""
        stops = self.changes.get("stop_strings")
        return () if stops is None else (stops,) if isinstance(stops, str) else tuple(stops)

    def each(self) -> list[Asked]:
        """One for each answer. With a seed each has its own, one larger than that of the answer before."""
        seed = self.changes.get("seed")
        seeds = [{} if not isinstance(seed, int) else {"seed": (seed + at) % 2**63} for at in range(self.count)]
        seeds[0] = {}
        return [replace(self, changes=self.changes | own, count=1) for own in seeds]

    def settle(self, finished: bool) -> None:
        """An answer has ended: by itself, or because it had no more room."""
        self.max_new_tokens = None if finished else 0


def check_fields(body: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    """Raise `Refused` for a field that means nothing here, or one with a value that is not offered.

    Args:
        fields: those of the endpoint, besides those that all have.
    """
    allowed = (*fields, *SAMPLING, *ONLY, *PASSED_OVER, "model", "stream", OWN, PRESET, SALT)
    for name, value in body.items():
        if name not in allowed:
            raise Refused(unknown("field", name, sorted(allowed)), 422, name)
        if name in ONLY and value is not None and value not in ONLY[name]:
            offered = " or ".join(json.dumps(only) for only in ONLY[name])
            raise Refused(f"{name}={shown(value)} is not offered; leave it out, or give {offered}", 422, name)
    salt = body.get(SALT)
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= LONGEST_SALT):
        raise Refused(f"{SALT}={shown(salt)} must be a text of 1 to {LONGEST_SALT} characters", 422, SALT)
    if not isinstance(body.get("stream") or False, bool):
        raise Refused(f"stream={shown(body['stream'])} must be true or false", 422, "stream")


def read(body: Mapping[str, Any], presets: Mapping[str, Mapping[str, Any]]) -> Asked:
    """What a body asks for, beside its prompt. A preset's fields are overruled by what is beside it.

    Raises:
        Refused: an unknown preset, a field twice, or one that may not come from a client.
    """
    asked = Asked(cache_salt=body.get(SALT))
    name = body.get(PRESET)
    if name is not None:
        if not isinstance(name, str) or name not in presets:
            known = f"one of {', '.join(sorted(presets))}" if presets else "left out: this server has none"
            raise Refused(f"preset={shown(name)} must be {known}", 400, PRESET)
        asked.changes |= presets[name]
    own = body.get(OWN)
    own = {} if own is None else own
    if not isinstance(own, Mapping):
        raise Refused(f"{OWN}={shown(own)} must be an object with fields of a request", 422, OWN)
    drafts = own.get("drafts", False)
    if not isinstance(drafts, bool):
        raise Refused(f"drafts={shown(drafts)} must be true or false", 422, OWN)
    asked.drafts = drafts
    if drafts and not body.get("stream"):
        raise Refused("drafts=true needs stream=true", 400, OWN)
    given: dict[str, str] = {}
    for outer in SAMPLING:
        if body.get(outer) is not None:
            inner = NAMES.get(outer, outer)
            if inner in given or inner in own:
                raise Refused(f"{outer} and {given.get(inner, inner)} say the same; give one", 400, outer)
            given[inner] = outer
            asked.changes[inner] = body[outer]
    for inner in own:
        if inner not in (*FIELDS, "drafts"):
            raise Refused(unknown(f"field of {OWN}", inner, sorted((*FIELDS, "drafts"))), 422, OWN)
    _check_plain(own)
    try:
        asked.changes |= Request.from_dict({name: value for name, value in own.items() if name != "drafts"})
    except (ValueError, TypeError) as error:
        raise Refused(str(error), 400, OWN) from error
    _check_stops(asked.changes.get("stop_strings"))
    return asked


def read_presets(folder: Path | None) -> dict[str, dict[str, Any]]:
    """The presets of a folder: every file NAME.json, which `Request.save` wrote.

    Raises:
        ValueError, OSError: no folder, none in it, or a file that holds something else.
    """
    if folder is None:
        return {}
    if not folder.is_dir():
        raise ValueError(f"presets={str(folder)!r} is no folder")
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"presets={str(folder)!r} holds no .json file; Request.save writes one")
    found = {}
    for file in files:
        Request.load(file)  # its messages name the file
        found[file.stem] = Request.merge_arguments({}, file)
    return found


def _check_plain(own: Mapping[str, Any]) -> None:
    """Settings of a sampler or a cache may name files; those a client may not choose."""
    for name in ("sampler", "cache", "blocks"):
        settings = own.get(name)
        if settings is None:
            continue
        if not isinstance(settings, (str, Mapping)):
            raise Refused(f"{name}={shown(settings)} must be a name, or an object of it and its settings", 422, OWN)
        for setting, value in _settings_in(settings) if isinstance(settings, str) else settings.items():
            if setting != name and not isinstance(value, (bool, int, float, type(None))):
                raise Refused(
                    f"{name}: {setting}={shown(value)} must be a number here; what else there is goes into a preset",
                    422,
                    OWN,
                )


def _settings_in(text: str) -> Iterator[tuple[str, Any]]:
    """The settings of a text, "credit(threshold=0.95)+localleap"; of one that cannot be read none, since `Request` says
    what is wrong with it."""
    try:
        components = parse_components("sampler", text)
    except ValueError:
        return
    for component in components:
        yield from component.settings.items()


def _check_stops(stops: Any) -> None:
    texts = [stops] if isinstance(stops, str) else [] if stops is None else stops
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise Refused(f"stop={shown(stops)} must be a text or a list of texts", 422, "stop")
    if len(texts) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in texts):
        raise Refused(f"stop must be at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters", 400, "stop")

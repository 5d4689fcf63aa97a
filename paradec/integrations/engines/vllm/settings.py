"""Settings of a request: `SamplingParams.extra_args["paradec"]`, over HTTP `vllm_xargs`.

They are a mapping of fields of `paradec.Request` that hosted rows support, or the same as JSON text, since `vllm_xargs`
has no mappings. "sampler" is a name, or a mapping of name and settings, as in presets. The additional name "template"
is for infilling. Defaults are set by the server: by `--hf-overrides '{"paradec": ...}'`, then by the environment
variable PARADEC_VLLM, in the same form.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paradec import samplers
from paradec.core.checks import LARGEST_INT64, check_int, short_repr, unknown_name
from paradec.core.protocol import Sampler
from paradec.integrations.engines.hosted import FIELDS
from paradec.request import Request

KEY = "paradec"
VARIABLE = "PARADEC_VLLM"
REPLACEMENTS = {"max_new_tokens": "max_tokens of the request", "stop": "a rule made in Python, with paradec.generate"}
"""Fields of `paradec.Request` that are not accepted here, and their replacements."""
NAMES = ("sampler", "template", *(name for name in FIELDS if name not in REPLACEMENTS))
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
LOGPROBS = ("logprobs", "prompt_logprobs", "logprob_token_ids")


@dataclass(frozen=True)
class Settings:
    """Settings of a request, as needed to open its row."""

    sampler: Sampler
    template: tuple[int, ...]
    """Ids with which the answer begins; masks among them are filled, other ids stay."""
    max_new_tokens: int
    """Number of masks after the template."""
    fields: dict[str, Any]
    """Fields of `paradec.Request`."""
    stop_ids: tuple[int, ...]
    """Ids that end the answer for vLLM."""


def settings_of(params: Any, defaults: Mapping[str, Any] | None = None, request_id: str = "") -> Settings:
    """Read the settings of a request.

    params: vLLM's `SamplingParams`. defaults: the server's defaults (`server_defaults`).
    request_id: seeds a request without a seed, equal in all processes.
    Raises ValueError, TypeError: an unknown name, or a value out of its range."""
    for name, neutral in PENALTIES.items():
        if getattr(params, name) != neutral:
            raise ValueError(f"{name}={getattr(params, name)} is not supported for diffusion models: leave it out")
    for name in LOGPROBS:
        if getattr(params, name, None) is not None:
            raise ValueError(f"{name}={short_repr(getattr(params, name))} is not supported here: leave it out")
    sampling: dict[str, Any] = {"top_p": params.top_p} if 0 < params.top_p < 1 else {}
    sampling |= {"top_k": params.top_k} if params.top_k > 0 else {}
    settings = dict(defaults or {}) | sampling | _mapping((params.extra_args or {}).get(KEY), f"extra_args[{KEY!r}]")
    template = _template(settings.pop("template", ()))
    max_tokens = params.max_tokens
    if max_tokens is not None and len(template) > max_tokens:
        raise ValueError(f"template has {len(template)} tokens, more than max_tokens={max_tokens}")
    sampler = settings.pop("sampler", "threshold")
    method: Any = samplers.registry.from_dict(sampler) if isinstance(sampler, Mapping) else samplers.create(sampler)
    if params.ignore_eos:
        settings["eos_early_stop"] = bool(params.stop_token_ids)
    request = Request(sampler=method, **settings)  # checks the settings
    if request.temperature > 0 and request.seed is None:
        settings["seed"] = int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:7], "big")
    check_int("seed", settings.get("seed"), low=0, high=LARGEST_INT64, none=True)
    model_end = None if params.ignore_eos else params.eos_token_id
    ends = {*(params.stop_token_ids or ()), *(() if model_end is None else (model_end,))}
    num_masks = 0 if max_tokens is None else max_tokens - len(template)
    return Settings(method, template, num_masks, settings, tuple(sorted(ends)))


def server_defaults(hf_config: Any = None) -> dict[str, Any]:
    """Read the server's default settings. Raises ValueError, TypeError: another form, or an unknown name."""
    defaults = _mapping(os.environ.get(VARIABLE) or None, VARIABLE)
    return defaults | _mapping(getattr(hf_config, KEY, None), f"hf_overrides[{KEY!r}]")


def _mapping(value: Any, place: str) -> dict[str, Any]:
    """Read settings from a mapping or JSON text. place: name of the source, for errors."""
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}={short_repr(value)} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise TypeError(f"{place}={short_repr(value)} must be a mapping, or JSON text of one")
    for name in value:
        if name in REPLACEMENTS:
            raise ValueError(f"{place}: {name} is not accepted here; use {REPLACEMENTS[name]}")
        if name not in NAMES:
            raise TypeError(f"{place}: {unknown_name('name', name, NAMES)}")
    return dict(value)


def _template(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise TypeError(f"template={short_repr(value)} must be token ids")
    ids = tuple(value)
    for entry in ids:
        check_int("template", entry, low=0)
    return ids

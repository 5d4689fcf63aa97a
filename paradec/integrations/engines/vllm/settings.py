"""Settings of a request: `SamplingParams.extra_args["paradec"]`, in HTTP requests `vllm_xargs`.

They are a mapping with keys in `NAMES`, mostly fields of `paradec.Request`. The mapping may be JSON text, because
`vllm_xargs` accepts no mappings. "sampler" is a name, or a mapping with the name and settings, as in presets.
"template" is not a field of `paradec.Request`: it lists the ids with which the answer begins, for infilling. Defaults
of the server have the same form: `--hf-overrides '{"paradec": ...}'` overrides the environment variable PARADEC_VLLM.
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
"""Fields of `paradec.Request` that a request to vLLM must not set, and their replacements."""
NAMES = ("sampler", "template", *(name for name in FIELDS if name not in REPLACEMENTS))
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
LOGPROBS = ("logprobs", "prompt_logprobs", "logprob_token_ids")


@dataclass(frozen=True)
class Settings:
    """Settings with which a request's hosted row is opened."""

    sampler: Sampler
    template: tuple[int, ...]
    """Ids with which the answer begins. Mask ids are filled, other ids stay."""
    max_new_tokens: int
    """Number of masks after the template."""
    fields: dict[str, Any]
    """Fields of `paradec.Request`."""
    stop_ids: tuple[int, ...]
    """Ids at which vLLM ends the answer."""


def settings_of(params: Any, defaults: Mapping[str, Any] | None = None, request_id: str = "") -> Settings:
    """Read the settings of a request.

    params: vLLM's `SamplingParams`. defaults: the server's defaults (`server_defaults`).
    request_id: if a request samples without a seed, its seed is derived from this id, the same in all processes.
    Raises ValueError, TypeError: an unknown name, or a value out of its range."""
    for name, neutral in PENALTIES.items():
        if getattr(params, name) != neutral:
            raise ValueError(f"{name}={getattr(params, name)} is not supported by this model: leave it out")
    for name in LOGPROBS:
        if getattr(params, name, None) is not None:
            raise ValueError(f"{name}={short_repr(getattr(params, name))} is not supported by this model: leave it out")
    sampling: dict[str, Any] = {"top_p": params.top_p} if 0 < params.top_p < 1 else {}
    sampling |= {"top_k": params.top_k} if params.top_k > 0 else {}
    settings = dict(defaults or {}) | sampling | _read((params.extra_args or {}).get(KEY), f"extra_args[{KEY!r}]")
    template = _check_template(settings.pop("template", ()))
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
    """Read the server's default settings. Raises ValueError, TypeError: no mapping, or an unknown name."""
    defaults = _read(os.environ.get(VARIABLE) or None, VARIABLE)
    return defaults | _read(getattr(hf_config, KEY, None), f"hf_overrides[{KEY!r}]")


def _read(value: Any, source: str) -> dict[str, Any]:
    """Read settings from a mapping or JSON text. source: where the value comes from, for error messages."""
    if value is None:
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"{source}={short_repr(value)} is not JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise TypeError(f"{source}={short_repr(value)} must be a mapping, or JSON text of one")
    for name in value:
        if name in REPLACEMENTS:
            raise ValueError(f"{source}: {name} is not accepted here; use {REPLACEMENTS[name]}")
        if name not in NAMES:
            raise TypeError(f"{source}: {unknown_name('name', name, NAMES)}")
    return dict(value)


def _check_template(value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise TypeError(f"template={short_repr(value)} must be token ids")
    ids = tuple(value)
    for entry in ids:
        check_int("template", entry, low=0)
    return ids

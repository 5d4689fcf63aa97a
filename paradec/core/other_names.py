"""Names that papers and other libraries use, for error messages that give the name in paradec."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from paradec.core.checks import plain_name, short_repr, unknown_name
from paradec.core.text_files import read_json

Make = TypeVar("Make", bound=Callable[..., Any])
COMPONENTS: Mapping[str, Mapping[str, str]] = {
    "sampler": {
        "creditdecoding": "credit",
        "fastdllm": "threshold",
        "confidence": "low_confidence",
        "confidencethreshold": "threshold",
        "dparallel": "entropy_threshold",
        "ebsampler": "entropy_bound",
        "coradiff": "persistence",
        "mcsjd": "scd",
        "haltonmaskgit": "halton",
        "adablockdllm": "adablock",
    },
    "cache": {
        "dkv": "dkv_decode",
        "dkvcache": "dkv_decode",
        "fastdllm": "dual",
        "fastdllmv2": "hierarchical",
        "d2cache": "d2",
        "d3llm": "delayed",
        "kvcache": "prefix",
    },
}
"""Samplers and caches by their other names, spelled as by `paradec.core.checks.plain_name`."""
PIPELINE_METHODS = {
    "fbcache": "first_block",
    "fbc": "first_block",
    "blockcache": "first_block",
    "firstblockcache": "first_block",
    "cachedit": "dbcache",
    "fora": "taylorseer(order=0)",
    "deepcache": "taylorseer(order=0)",
    "fastercache": "taylorseer(order=0)",
    "pyramidattentionbroadcast": "taylorseer(order=0)",
    "pab": "taylorseer(order=0)",
}
"""paradec's methods for diffusers pipelines, by the `plain_name` of other libraries' methods. For the last five, which
reuse features at some steps, paradec has only similar methods."""
BLOCK_COUNTS = re.compile(r"(?:dbcache_?)?f(\d+)b(\d+)", re.IGNORECASE)
"""Cache-dit's notation for the numbers of first and last blocks that DBCache evaluates: "F8B0"."""
PIPELINE_SETTINGS = {
    "cache_interval": ("interval",),
    "fresh_threshold": ("interval",),
    "max_order": ("order",),
    "n_derivatives": ("order",),
    "disable_cache_before_step": ("first_enhance",),
    "max_warmup_steps": ("first_enhance", "retention_steps"),
    "residual_diff_threshold": ("threshold",),
    "threshold": ("base_threshold", "residual_diff_threshold"),
    "rel_l1_thresh": ("threshold",),
}
"""Possible names in paradec for settings of pipeline methods, by the setting's name in other libraries."""
METHOD_OF_SETTING = {
    "residual_diff_threshold": "'dbcache', residual_diff_threshold=...",
    "rel_l1_thresh": "'teacache', threshold=...",
    "threshold": "'first_block', threshold=...) or another with a threshold: teacache, easycache, dicache, seacache, "
    "magcache (dbcache: residual_diff_threshold",
    "preset": "paradec.Request.load(FILE).sampler) for a saved request, or "
    "accelerate(pipe, paradec.samplers.create('taylorseer', preset='paper')",
}
"""Arguments of `paradec.accelerate` that set what the default method cannot set, by the setting's name."""
FORECAST_SETTINGS = ("max_memory", "where", "how", "order")
"""Settings of `paradec.Forecast` that a method given by name does not accept."""
METHOD_OF_RULE = {"accumulated_change": "teacache (accumulated_change)", "verification": "speca (verification)"}
"""Methods for pipelines under the names that users know, by `Rule.name`."""
SESSION_LOST = "detach that session first; if it is lost: {}._paradec_session.detach()"
PACKAGE_NAMES = {
    "fbcache": "paradec.FirstBlock",
    "taylorseercalibrator": "paradec.TaylorSeer",
    "enablecache": "paradec.accelerate(pipe, ...)",
    "applycacheonpipe": "paradec.accelerate(pipe, ...)",
}
"""What to write instead of attributes that other packages have, by `plain_name`."""
REQUEST_FIELDS = {
    "max_new_tokens": ("gen_length", "max_length", "max_tokens"),
    "guidance_scale": ("cfg", "cfg_scale", "negative_prompt_ids"),
    "block_length": ("block_size", "block_len"),
    "steps": ("diffusion_steps", "num_inference_steps"),
    "sampler": ("alg", "algorithm", "remasking"),
    "min_new_tokens": ("min_tokens",),
    "bad_words": ("bad_words_ids",),
    "num_return_sequences": ("num_samples", "n"),
}
"""Other names of a request's fields, by field."""
REQUEST_HINTS = {
    "do_sample": "temperature=0 takes the likeliest token, above 0 it draws",
    "use_cache": 'write cache="prefix"',
    "dual_cache": 'write cache="dual"',
    "if_cache_position": 'write cache="dual"',
    "mask_id": "the mask id is the checkpoint's; in Python, load(..., mask_token_id=...) sets it",
    "inputs": "write input_ids= or prompt=",
    "output_history": "write trace=True; output.trace.replay(n) returns the tokens after n steps",
    "return_dict_in_generate": "leave it out; generate always returns an Output with sequences and text",
    "generation_tokens_hook_func": "callback= is called after each step; a custom sampler (docs/write_a_sampler.md) "
    "changes tokens",
}
"""What to write instead of arguments of other libraries."""
CONSTRAINTS = {
    "json_schema": "paradec.JsonSchema(schema)",
    "choice": 'paradec.Choice(["yes", "no"])',
    "choices": 'paradec.Choice(["yes", "no"])',
    "regex": 'paradec.Regex("[0-9]+")',
    "grammar": "paradec.Grammar(text)",
    "response_format": "paradec.JsonSchema(schema), or a class of pydantic",
    "after": 'paradec.Choice(["yes", "no"], after=...): a constraint has the marker',
    "thinking_budget": 'paradec.Choice(["yes", "no"], after=..., thinking_budget=...)',
}
"""Constraint arguments of other libraries, and what to write in paradec."""
LOAD_ARGUMENTS = {
    "torch_dtype": "write dtype=",
    "trust_remote_code": "remote code is never executed; leave it out (docs/models.md has the formats)",
    "load_in_8bit": 'write quantization="int8"',
    "load_in_4bit": "write quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True)",
    "eos_token_id": "the end ids are the checkpoint's; set eos_token_id in its generation_config.json",
    "pad_token_id": "the padding id is the checkpoint's; set pad_token_id in its generation_config.json",
    "mask_id": "write mask_token_id=",
    "block_size": "write block_length=",
    "attention": "write attn_implementation=, or attention= in a request",
}
"""Arguments of other loaders, and what to pass to `paradec.load` instead."""


def describe_missing_attribute(name: str, names: Iterable[str]) -> str:
    """Advise what to write instead of a name that `paradec` does not have; "" if unknown. names: `paradec`'s names."""
    plain = plain_name(name)
    by_plain_name = PACKAGE_NAMES | {plain_name(known): f"paradec.{known}" for known in names}
    spellings = (plain, plain.removesuffix("config").removesuffix("cache"), plain.removesuffix("config"))
    replacement = next((by_plain_name[spelling] for spelling in spellings if spelling in by_plain_name), None)
    return f"; write {replacement}" if replacement else ""


def check_setting_names(
    method: str,
    names: Iterable[str],
    allowed: Collection[str],
    error: type[Exception] = TypeError,
    class_name: str = "",
) -> None:
    """Raise `error` for a setting that a method for pipelines does not have, with what to write instead. class_name:
    the method's class in `paradec`, if its name is not `method`."""
    for name in names:
        if name in allowed:
            continue
        paradec_name = next((known for known in PIPELINE_SETTINGS.get(name, ()) if known in allowed), None)
        counts = BLOCK_COUNTS.fullmatch(name) if "Fn_compute_blocks" in allowed else None
        if paradec_name is not None:
            hint = f"it is called {paradec_name!r} here"
        elif counts is not None:
            hint = f"write Fn_compute_blocks={counts[1]}, Bn_compute_blocks={counts[2]}"
        elif name in FORECAST_SETTINGS:
            hint = f"write accelerate(pipe, paradec.Forecast(when=paradec.{class_name or method}(...), {name}=...))"
        elif name in METHOD_OF_SETTING:
            hint = f"write accelerate(pipe, {METHOD_OF_SETTING[name]})"
        else:
            raise error(unknown_name(f"setting of {method}", name, allowed))
        raise error(f"{method} has no setting {name!r}; {hint}")


def with_checked_names(make: Make) -> Make:
    """Decorate a function that makes a method, so that the names of settings are checked (`check_setting_names`)."""

    @functools.wraps(make)
    def checked(*args: Any, **settings: Any) -> Any:
        check_setting_names(make.__name__, settings, inspect.signature(make).parameters)
        return make(*args, **settings)

    return checked  # type: ignore[return-value]


def check_method(value: Any) -> None:
    """Raise an error, with what to write instead, for a value that looks like a method for pipelines. ValueError:
    another library's name or config, or a file. TypeError: a class, a function, a request or a mapping."""
    if isinstance(value, type) or inspect.isfunction(value):
        raise TypeError(f"sampler={value.__name__} must be called: {value.__name__}(...)")
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.endswith(".json")):
        try:
            data = read_json(value)
        except FileNotFoundError:
            raise ValueError(
                f"sampler={str(value)!r} is not found; write paradec.Request.load(FILE).sampler for saved settings, or "
                "paradec.Forecast(FILE) for steps"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"sampler={str(value)!r} cannot be read: {error}") from None
        raise ValueError(f"sampler={str(value)!r} is a file; write {_call_for_data(data, repr(str(value)))}")
    if isinstance(value, Mapping):
        raise TypeError(f"sampler={short_repr(value)} is a mapping; write {_call_for_data(value)}")
    if type(value).__name__ == "Request":
        raise TypeError("sampler=Request(...) is a request; give its field: accelerate(pipe, request.sampler)")
    name = value.partition("(")[0].strip() if isinstance(value, str) else type(value).__name__
    plain = plain_name(name).removesuffix("config")
    if counts := BLOCK_COUNTS.fullmatch(plain):
        settings = f"Fn_compute_blocks={counts[1]}, Bn_compute_blocks={counts[2]}"
        raise ValueError(f"sampler={name!r} is called 'dbcache({settings})' here")
    if plain in PIPELINE_METHODS:
        method = PIPELINE_METHODS[plain]
        verb = "reuses features; the nearest is" if "(" in method else "is called"
        raise ValueError(f"sampler={name!r} {verb} {method!r} here")


def _call_for_data(data: Any, file: str = "") -> str:
    """Return the call that makes a sampler from the data of a request, a sampler or steps. file: the data's file."""
    if not isinstance(data, Mapping) or "sampler" not in data:
        return f"paradec.Forecast({file or 'when=...'})"
    if isinstance(data["sampler"], Mapping) or "draws" in data:  # a saved request
        return f"paradec.Request.load({file}).sampler" if file else "paradec.Request(**...).sampler"
    return f"paradec.Request(sampler={f'json.load(open({file}))' if file else '...'}).sampler"

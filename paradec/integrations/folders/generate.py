"""`model.generate(ids, custom_generate=<this folder or repository>, trust_remote_code=True)`: decode with paradec.

Accepts the arguments of `paradec.hf_generate` next to transformers' own: sampler, seed, preset, kv_cache, ...
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import GenerationMixin

try:
    import paradec
except ImportError as error:
    raise ImportError(
        "this folder decodes with the package parallel-decoding (its module is called paradec); install it first. "
        "The package paradec on PyPI is another project"
    ) from error

DECODING_ARGUMENTS = ("sampler", "preset", "prediction", "mask_token_id")
"""Arguments that choose the decoding. If none is given, a model without a mask token is decoded by "sjd" (lossless)."""


def generate(*args: Any, model: Any, **kwargs: Any) -> Any:
    """Decode with paradec. `model` is keyword-only, so positional ids also work in a model's repository."""
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    is_masked = getattr(model.config, "mask_token_id", None) is not None
    if not is_masked and not any(name in kwargs for name in DECODING_ARGUMENTS):
        kwargs["sampler"] = "sjd"
    bound = {name: kwargs.pop(name) for name in ("tokenizer", "streamer") if name in kwargs}
    method: Any = functools.partial(paradec.hf_generate, **bound) if bound else paradec.hf_generate
    return GenerationMixin.generate(model, *args, custom_generate=method, **kwargs)

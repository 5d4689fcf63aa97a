"""Schedulers for pipelines, from presets."""

from __future__ import annotations

from typing import Any

from paradec import samplers
from paradec.core.checks import shown
from paradec.core.protocol import plain
from paradec.request import Preset, Request
from paradec.samplers.masked.rules.combination import Combination
from paradec.schedulers.text import BlockScheduler, CombinationScheduler

CALL = {"max_new_tokens": "gen_length", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
"""Fields of a request that LLaDA2Pipeline's call takes, under its names."""
CONFIG = ("sampler", "block_length", "steps")


def from_preset(preset: Preset, **config: Any) -> BlockScheduler:
    """Make the scheduler for LLaDA2Pipeline that decodes as a preset says; `call_arguments` has the call's part of it.

    Args:
        preset: what `paradec tune` or `Request.save` wrote, or a `Request`. Its seed becomes the call's `generator`.
        config: further config keys, which win. A preset without `block_length` needs the model's own here.

    Raises:
        ValueError: a sampler without a scheduler, or a field that a pipeline cannot follow; the message names it.
        FileNotFoundError: no such file.
    """
    request = Request.from_arguments({}, preset)
    for name, value in request.changes().items():
        if name not in (*CONFIG, *CALL, "seed"):
            raise ValueError(f"{name}={shown(value)} of the preset has no place in a pipeline: use paradec.generate")
    method: Any = samplers.create(request.sampler) if isinstance(request.sampler, str) else request.sampler
    blocks = {} if request.block_length is None else {"block_length": request.block_length}
    config = blocks | _block_steps(request) | config
    if isinstance(method, Combination):
        return CombinationScheduler(**{"combination": request.to_dict()["sampler"], **config})
    for cls in BlockScheduler.__subclasses__():
        if cls.sampler_name == method.name:
            return cls(**{name: plain(getattr(method, name)) for name in cls.sampler_settings()} | config)
    raise ValueError(f"sampler {method.name!r} of the preset has no scheduler: use paradec.generate")


def call_arguments(preset: Preset) -> dict[str, Any]:
    """Map a preset to arguments of LLaDA2Pipeline's call. Raises: as `from_preset`, for the file and the steps."""
    request = Request.from_arguments({}, preset)
    return {CALL[name]: value for name, value in request.changes().items() if name in CALL} | _block_steps(request)


def _block_steps(request: Request) -> dict[str, int]:
    """Convert `steps` of a whole answer into a pipeline's, which are those of one block."""
    if request.steps is None:
        return {}
    if request.block_length is None or request.max_new_tokens is None:
        raise ValueError(f"steps={request.steps} of the preset needs block_length and max_new_tokens too")
    return {"num_inference_steps": max(1, request.steps // -(-request.max_new_tokens // request.block_length))}

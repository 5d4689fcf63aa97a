"""From a preset, which names a sampler and says how it decodes, to the scheduler that does the same in a pipeline."""

from __future__ import annotations

from typing import Any

from paradec import samplers
from paradec.core.checks import shown
from paradec.core.protocol import Sampler, plain
from paradec.request import Preset, Request
from paradec.samplers.masked.rules.combination import Combination
from paradec.schedulers.text import BlockScheduler, CombinationScheduler

CALLS = {
    "max_new_tokens": "gen_length",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "generator",
}
"""What a preset says and a pipeline's call decides, under its name there."""
OURS = ("sampler", "block_length", "steps")
"""What becomes the config."""


def from_preset(preset: Preset, **config: Any) -> BlockScheduler:
    """The scheduler for LLaDA2Pipeline that decodes as a preset says.

    >>> pipe.scheduler = paradec.schedulers.from_preset("preset.json")    # doctest: +SKIP

    The sampler with its settings, `block_length` and `steps` become the config. A pipeline evaluates the model without
    paradec's caches, and its caller says how long the answer is and how it is drawn: `call_arguments` has what the
    preset says of that. Where the preset leaves the blocks to the model, so must `block_length` here: the model's own.

    Args:
        preset: what `paradec tune` or `Request.save` wrote, or a `Request`.
        config: further config keys, which win.

    Raises:
        ValueError: a sampler that no scheduler carries, or a preset with a cache or another field that a pipeline
            cannot follow; the message names it. FileNotFoundError: no such file.
    """
    request = Request.of({}, preset)
    for name, value in request.changes().items():
        if name not in OURS and name not in CALLS:
            raise ValueError(f"{name}={shown(value)} of the preset has no place in a pipeline: use paradec.generate")
    method: Any = samplers.create(request.sampler) if isinstance(request.sampler, str) else request.sampler
    given: dict[str, Any] = {}
    if request.block_length is not None:
        given["block_length"] = request.block_length
    if request.steps is not None:
        given["num_inference_steps"] = _steps_of_a_block(request)
    if isinstance(method, Combination):
        text = _as_text(method)
        if samplers.create(text) != method:
            raise ValueError(f"sampler {shown(method)} of the preset cannot be said as text: use paradec.generate")
        return CombinationScheduler(**{**given, "combination": text, **config})
    for cls in BlockScheduler.__subclasses__():
        if cls.sampler_name == method.name:
            own = {name: plain(getattr(method, name)) for name in cls.sampler_settings()}
            return cls(**{**given, **own, **config})
    raise ValueError(f"sampler {method.name!r} of the preset has no scheduler: use paradec.generate")


def call_arguments(preset: Preset) -> dict[str, Any]:
    """What LLaDA2Pipeline's call must be given for a preset, where it says so: gen_length, num_inference_steps (the
    pipeline's own default would win over the config's), temperature, top_p and top_k.

    Raises: as `from_preset`, for the file and the steps.
    """
    request = Request.of({}, preset)
    changes = request.changes()
    found = {theirs: changes[name] for name, theirs in CALLS.items() if name in changes and name != "seed"}
    return found if request.steps is None else {**found, "num_inference_steps": _steps_of_a_block(request)}


def _steps_of_a_block(request: Request) -> int:
    """A request plans the steps of the whole answer, a pipeline those of a block. (Of an answer that begins with a
    block: one that begins within a block has one more of them.)"""
    if request.block_length is None or request.max_new_tokens is None:
        raise ValueError(
            f"steps={request.steps} of the preset is planned for a whole answer, a pipeline's for a block: the preset "
            "needs block_length and max_new_tokens too"
        )
    blocks = -(-request.max_new_tokens // request.block_length)
    return max(1, request.steps // blocks) if request.steps is not None else 1


def _as_text(method: Combination) -> str:
    """A combination as `paradec.samplers.create` takes it, settings in parentheses."""
    sign = {"union": "+", "intersection": "&"}[method.name]
    return ">>".join([*map(_member, method.stages), sign.join(map(_member, method.rules))])


def _member(rule: Sampler) -> str:
    default = samplers.create(rule.name)
    own = {name: getattr(rule, name) for name in rule.settings()}
    said = [f"{name}={plain(value)}" for name, value in own.items() if value != getattr(default, name)]
    return f"{rule.name}({', '.join(said)})" if said else rule.name

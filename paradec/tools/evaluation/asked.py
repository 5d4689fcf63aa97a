"""What an evaluation asks of a model: a caller's arguments, and those of a harness' task, as fields of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paradec import samplers
from paradec.core.checks import check_int, shown
from paradec.core.registry import unknown
from paradec.request import FIELDS, Preset, Request

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the answer's length in a task's generation_kwargs; the first that is there counts, as in the harness."""
SAMPLING = ("temperature", "top_p", "top_k", "constraint")
"""What a task may say of sampling, by the names of `paradec.Request`."""
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "use_cache": True, "num_return_sequences": 1}
"""What a task may say because it is what happens anyway."""


def asked(arguments: Mapping[str, Any], preset: Preset | None, seed: int) -> tuple[dict[str, Any], Request]:
    """What arguments and a preset say by field, and the request of it; what is no field is a setting of the sampler.

    Raises:
        TypeError: a name that is neither. ValueError: a value out of its range, or settings of a sampler with settings.
    """
    fields = {name: value for name, value in arguments.items() if name in FIELDS}
    settings = {name: value for name, value in arguments.items() if name not in FIELDS}
    said = Request.merge_arguments(fields, preset)
    if settings:
        sampler = said.get("sampler", "threshold")
        own = samplers.get(sampler).settings() if isinstance(sampler, str) and sampler in samplers.registry else ()
        for name, value in settings.items():
            if name not in own:
                raise TypeError(f"{name}={shown(value)}: " + unknown("argument", name, [*FIELDS, *own]))
        said["sampler"] = samplers.create(str(sampler), **settings)
    check_int("seed", seed, low=0, high=2**63 - 1)
    said.setdefault("seed", seed)
    return said, Request(**said)


def generation_fields(of_task: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fields of a request from a task's generation_kwargs, and its stop strings.

    Raises:
        ValueError: something that paradec does not do; the message names it.
    """
    given = dict(of_task)
    until = given.pop("until", None) or []
    until = [text for text in ([until] if isinstance(until, str) else until) if text]
    fields: dict[str, Any] = {}
    lengths = [given.pop(name) for name in LENGTHS if name in given]
    if lengths and lengths[0] is not None:
        fields["max_new_tokens"] = int(lengths[0])
    samples = given.pop("do_sample", None)
    for name in SAMPLING:
        if (value := given.pop(name, None)) is not None:
            fields[name] = value
    fields["temperature"] = fields.get("temperature", 1.0 if samples else 0.0) if samples is not False else 0.0
    for name, value in given.items():
        if name not in NEUTRAL or value != NEUTRAL[name]:
            raise ValueError(f"the task's generation_kwargs ask for {name}={shown(value)}, which paradec does not do")
    return fields, until


def cut(text: str, until: Sequence[str]) -> str:
    """A text before the first of the stop strings in it."""
    return text[: min((at for stop in until if (at := text.find(stop)) >= 0), default=len(text))]

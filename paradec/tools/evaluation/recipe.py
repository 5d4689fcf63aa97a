"""Recipes: all settings on which the score of an evaluation depends, in one YAML file.

    model: GSAI-ML/LLaDA-8B-Instruct
    dtype: bfloat16
    tasks: [gsm8k]
    shots: 5
    chat: true
    request: {sampler: threshold, cache: dual, max_new_tokens: 256, block_length: 32}
    published: {metric: exact_match, value: 78.5, source: "Fast-dLLM README"}

`paradec eval FILE.yaml` runs a recipe, and records package versions and the weights' commit. `recipes/` has recipes
with published settings.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paradec import samplers
from paradec.core.checks import check_bool, check_choice, check_int, check_number, short_repr, unknown_name
from paradec.core.text_files import read_text
from paradec.request import FIELDS, Preset, Request
from paradec.tools.evaluation.likelihood import METHODS, ORDERS

DTYPES = ("float32", "bfloat16", "float16", "float64")
CHOICES = ("score", "decode")
"""Methods for multiple-choice tasks."""
PUBLISHED = ("metric", "value", "source")
PATHS = ("preset", "include")
"""Fields with paths relative to the recipe's folder."""

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the answer's length in a task's generation_kwargs. If a task has several, the first in this order is used,
as in the harness."""
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "constraint", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "bad_words", "min_new_tokens", "ignore_eos"),
)
"""Arguments of a task that are passed to `paradec.Request`."""
NEUTRAL = {"num_beams": 1, "use_cache": True, "num_return_sequences": 1}
"""Task arguments that are allowed only with these values."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """An evaluation with lm-evaluation-harness. The constructor checks the fields without the model and the harness.

    Args:
        tasks: names of the harness' tasks or groups, or of packaged tasks ("paradec", "paradec_sort").
        model: a folder or a hub id; None is the packaged model.
        revision: branch, tag or commit of a hub id.
        dtype: dtype of the parameters; None is the checkpoint's.
        shots: number of examples before each prompt; None is the task's default.
        chat: whether to apply the tokenizer's chat template; None: if the tokenizer has a template.
        multiturn: whether each example is a turn of the chat.
        system: system prompt.
        request: fields of `Request.to_dict`, and settings of the sampler.
        preset: a file of `Request.save`; `request` overrides it.
        until: whether the tasks' stop strings end answers.
        likelihood, mc_num, mc_batch, order, check_greedy, choices: see `ParadecLM`.
        batch: number of rows decoded together.
        limit: maximum number of prompts of each task; None is all.
        seed: seed of paradec's and the harness' random numbers.
        include: a folder with further tasks.
        unsafe_code: whether tasks may run code that the model generates.
        versions: by package, the version that the recipe was written for; other installed versions give a warning.
        published: metric, value and source of a published score.
        about: description in one sentence.

    Raises:
        ValueError, TypeError: a field out of its range.
    """

    tasks: tuple[str, ...]
    model: str | None = None
    revision: str | None = None
    dtype: str | None = None
    shots: int | None = None
    chat: bool | None = None
    multiturn: bool = True
    system: str | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    until: bool = True
    likelihood: str | None = None
    mc_num: int = 128
    mc_batch: int = 16
    order: str = "left_to_right"
    check_greedy: bool = True
    choices: str = "score"
    batch: int = 1
    limit: int | None = None
    seed: int = 0
    include: str | None = None
    unsafe_code: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, Any] | None = None
    about: str = ""

    def __post_init__(self) -> None:
        tasks = (self.tasks,) if isinstance(self.tasks, str) else self.tasks
        if not isinstance(tasks, (list, tuple)) or not tasks or not all(isinstance(t, str) and t for t in tasks):
            raise ValueError(f"tasks={short_repr(self.tasks)} must be names of tasks, at least one")
        object.__setattr__(self, "tasks", tuple(tasks))
        for name in ("model", "revision", "system", "preset", "include"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"{name}={short_repr(value)} must be a text")
        for name in ("multiturn", "until", "check_greedy", "unsafe_code"):
            check_bool(name, getattr(self, name))
        if self.chat is not None:
            check_bool("chat", self.chat)
        if self.dtype is not None:
            check_choice("dtype", self.dtype, DTYPES)
        if self.likelihood is not None:
            check_choice("likelihood", self.likelihood, METHODS)
        check_choice("order", self.order, ORDERS)
        check_choice("choices", self.choices, CHOICES)
        for name, minimum in (("mc_num", 1), ("mc_batch", 1), ("batch", 1)):
            check_int(name, getattr(self, name), low=minimum)
        check_int("shots", self.shots, low=0, none=True)
        check_int("limit", self.limit, low=1, none=True)
        check_int("seed", self.seed, low=0, high=2**32 - 1)  # the limit of numpy
        for name in ("request", "versions"):
            if not isinstance(getattr(self, name), Mapping):
                raise ValueError(f"{name}={short_repr(getattr(self, name))} must be a mapping")
        if self.published is not None:
            if not isinstance(self.published, Mapping) or set(self.published) != {*PUBLISHED}:
                raise ValueError(f"published={short_repr(self.published)} must have exactly {', '.join(PUBLISHED)}")
            check_number("published value", self.published["value"])
        self.to_arguments()

    def to_arguments(self) -> dict[str, Any]:
        """Build the arguments of `ParadecLM` for decoding: fields of the request, settings of the sampler, the preset.
        Raises TypeError for a name that is neither a field nor a setting, ValueError for a wrong value."""
        fields = {name: value for name, value in self.request.items() if name in Request.__dataclass_fields__}
        arguments = {**self.request, **Request.from_dict(fields)}
        request_from_arguments(arguments, self.preset, self.seed)
        return arguments if self.preset is None else {**arguments, "preset": self.preset}

    def method(self) -> Any:
        """The sampler of the request or its preset."""
        arguments = self.to_arguments()
        _, request = request_from_arguments(arguments, arguments.pop("preset", None), self.seed)
        return samplers.create(request.sampler) if isinstance(request.sampler, str) else request.sampler

    def to_dict(self) -> dict[str, Any]:
        """Convert all fields to plain data."""
        return {**dataclasses.asdict(self), "tasks": list(self.tasks)}

    @classmethod
    def load(cls, file: str | os.PathLike[str]) -> Recipe:
        """Read a recipe file. Paths in it are relative to its folder. Raises ValueError for invalid YAML or fields (the
        message has the file's name), OSError for an unreadable file."""
        import yaml

        path = Path(file)
        try:
            data = yaml.safe_load(read_text(path))
        except (yaml.YAMLError, RecursionError) as error:
            raise ValueError(f"{str(file)!r} is not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{str(file)!r} contains {short_repr(data)}, not the fields of a recipe")
        names = [entry.name for entry in dataclasses.fields(cls)]
        try:
            for name in data:
                if name not in names:
                    raise ValueError(unknown_name("field", name, names))
            if "tasks" not in data:
                raise ValueError("it has no tasks")
            for name in PATHS:
                if isinstance(data.get(name), str):
                    data[name] = str(path.parent / data[name])
            return cls(**data)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{str(file)!r}: {error}") from None


def request_from_arguments(
    arguments: Mapping[str, Any], preset: Preset | None, seed: int
) -> tuple[dict[str, Any], Request]:
    """Merge arguments and a preset. Returns the fields of the request that are set, and the request. Arguments that are
    not fields are settings of the sampler. Raises TypeError for an unknown name, ValueError for a wrong value."""
    fields = {name: value for name, value in arguments.items() if name in FIELDS}
    settings = {name: value for name, value in arguments.items() if name not in FIELDS}
    request_fields = Request.merge_arguments(fields, preset)
    if settings:
        sampler = request_fields.get("sampler", "threshold")
        known_settings = (
            samplers.get(sampler).settings() if isinstance(sampler, str) and sampler in samplers.registry else ()
        )
        for name, value in settings.items():
            if name not in known_settings:
                raise TypeError(
                    f"{name}={short_repr(value)}: " + unknown_name("argument", name, [*FIELDS, *known_settings])
                )
        request_fields["sampler"] = samplers.create(str(sampler), **settings)
    check_int("seed", seed, low=0, high=2**63 - 1)
    request_fields.setdefault("seed", seed)
    return request_fields, Request(**request_fields)


def generation_fields(task_kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Convert a task's generation_kwargs to fields of a request, and stop strings. Raises ValueError for an argument
    that paradec does not support."""
    remaining = dict(task_kwargs)
    until = remaining.pop("until", None) or []
    until = [text for text in ([until] if isinstance(until, str) else until) if text]
    fields: dict[str, Any] = {}
    lengths = [remaining.pop(name) for name in LENGTHS if name in remaining]
    if lengths and lengths[0] is not None:
        fields["max_new_tokens"] = int(lengths[0])
    do_sample = remaining.pop("do_sample", None)
    for name in SAMPLING:
        if (value := remaining.pop(name, None)) is not None:
            fields[name] = value
    fields["temperature"] = fields.get("temperature", 1.0 if do_sample else 0.0) if do_sample is not False else 0.0
    for name, value in remaining.items():
        if name not in NEUTRAL or value != NEUTRAL[name]:
            raise ValueError(
                f"the task's generation_kwargs have {name}={short_repr(value)}, which paradec does not support"
            )
    return fields, until


def cut_at_stops(text: str, until: Sequence[str]) -> str:
    """Cut a text before the first stop string in it."""
    return text[: min((index for stop in until if (index := text.find(stop)) >= 0), default=len(text))]

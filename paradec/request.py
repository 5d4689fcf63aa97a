"""A request: everything that a caller may set beside the model and the prompt, as one frozen value.

Every entry point makes one: `generate`, `infill`, `generate_images`, `hf_generate`, the command line. A sampler's
`start` takes it. What is data in it can be saved, and given back as a preset.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from paradec.attention.sparsed import SparseD
from paradec.caches.base import Cache
from paradec.caches.kept import KeptPrefix
from paradec.caches.suffix import Suffix
from paradec.core.block_policies import POLICIES
from paradec.core.blocks import BlockPolicy
from paradec.core.checks import check_choice, shown
from paradec.core.protocol import Commit, Sampler, State, plain
from paradec.core.registry import Registry, unknown
from paradec.core.text_files import read_json, write_json
from paradec.core.version import DRAWS
from paradec.request_fields import FIELDS, LIVE, check_names

if TYPE_CHECKING:
    from paradec.constraints.values import Constraint
    from paradec.core.orders import Order

FILTERS = ("top_p", "top_k")
"""Fields that restrict what tokens are drawn from."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a caller may set for one request, whatever the sampler. Checked when made, as far as no model is needed.

    Args:
        sampler: a name (`paradec.samplers.names()`), several that are joined ("credit+localleap", see
            `paradec.samplers.create`), or a sampler made with settings.
        cache: a name (`paradec.caches.names()`), with settings in parentheses if need be
            ("dkv_decode(refresh_interval=4)"), or a cache; None recomputes everything at every step.
        prefix: the `prefix` of an earlier output, made with `keep_prefix`: what a row has in common with it is not
            evaluated again. Exact for block-causal models, approximate for others; `out.cost.reused_tokens` counts.
        keep_prefix: keep keys and values for the next turn, in `Output.prefix`.
        share_prefix: evaluate what all rows begin with once, and store it once; exact as for `prefix`.
        attention: "dense", "sparsed", or `paradec.SparseD(...)` with settings: long sequences attend to a part of
            themselves only (docs/attention.md); None is as the model was loaded. `Output.attention` has its cost.
        suffix: which masks after the open block are evaluated: a `paradec.Suffix`, a window (64: the nearest 64), or a
            text ("gaussian:256"); None evaluates all of them. For bidirectional models and answers of several blocks
            (docs/caches.md).
        blocks, block_length: how the answer is cut: a policy, the name of one ("fixed", "whole", "adaptive",
            "pipelined"; the length may go with it), or a fixed length; by default 32 for LLaDA, the whole canvas for
            Dream, the model's own blocks for block-causal models.
        steps: forwards planned per row, for samplers with a schedule, spread evenly over its blocks; None plans one
            token a step.
        max_new_tokens: answer length; by default the checkpoint's generation_config.json, else 128 (0 with masks).
        temperature: 0 takes the best token; above (1e-6 to 1e6), tokens are drawn from softmax(logits / temperature).
        top_p, top_k: restrict the draw to the nucleus of this mass, then to this many tokens.
        guidance_scale: s in uncond + s (cond - uncond), where uncond has the prompt masked; 1 is off (LLaDA's
            cfg_scale w is s - 1). Tokens that a branch excludes (-inf) have the formula's limit
            (`paradec.samplers.guidance.guided`).
        seed: an int, or one per prompt or row: a row's numbers depend on it, the prompt and the positions alone.
        generator: a torch.Generator instead of a seed.
        rng: "counter" (reproducible per row), or "reference" to draw from the generator as the public code does.
        eos_early_stop: end a row at its end token, once everything before it is decided.
        logits_eos_inf: never propose an end token.
        holes_eos_inf: never propose an end token in a hole, which is a mask that something given follows.
        confidence_eos_eot_inf: commit end tokens last (LLaDA's, which loses one of two ids at temperature > 0).
        suppress_tokens: ids that are never proposed, beside the mask id; by default those that the tokenizer has no
            text for. A sequence replaces them: () lets all be proposed.
        stop_strings: a text or several; a row ends at the token that completes one of them in its answer, once
            everything before is decided. The token is kept, as in transformers. Needs a tokenizer.
        stop: a stop rule or several, e.g. `paradec.Prophet()`; see `paradec.samplers.masked.stopping`.
        constraint: what answers must be: `paradec.Choice`, `Regex` or `JsonSchema`; for holes a list, None where one is
            free (docs/structured.md).
        order: on models of any order, which position comes when: "random" (from the row's key), "chain" (from left to
            right), the places (from 0) one after the other, a list of these for each row, or a value of
            `paradec.core.orders`. All places or all undecided ones, each once; what is given comes first. None is
            "random". For samplers of causal models without a drafter.
        num_return_sequences: answers per prompt, in neighbouring rows; each draws its own random numbers.
        chat: whether text becomes a user turn of the chat template; None does so when the tokenizer has one.
        streamer: transformers' streamer (`put`, `end`, and `put_draft` if it has that): see `paradec.api.streaming`.
        callback: `callback(state, commit)` after every step; returning True ends the decoding.
        trace: record every step in `Output.trace`.
        compile: on CUDA, take whole steps on the device and replay them as CUDA graphs
            (`paradec.samplers.masked.device.step`), which the model keeps until `clear_graphs(model)` of that module:
            the same tokens. What cannot be served so is decoded as usual, with a warning. Refused without CUDA.
        logprobs: keep each final token's log-probability, and those of so many likeliest tokens (0 for none), as the
            step that wrote it had them (`paradec.core.logprobs`): `Output.logprobs`, and the trace.
        rollout: keep every decision with its step and log-probability, for trainers: `Output.rollout`
            (docs/rollouts.md).
        progress: show tqdm's bar on standard error: tokens that are final, and forwards.

    Raises:
        ValueError, TypeError: an argument out of its range; the message names it.
    """

    sampler: str | Sampler = "threshold"
    cache: str | Cache | None = None
    prefix: KeptPrefix | None = None
    keep_prefix: bool = False
    share_prefix: bool = False
    attention: str | SparseD | None = None
    suffix: Suffix | int | str | None = None
    blocks: str | BlockPolicy | None = None
    block_length: int | None = None
    steps: int | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    guidance_scale: float = 1.0
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | None = None
    rng: str = "counter"
    eos_early_stop: bool = True
    logits_eos_inf: bool = False
    holes_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False
    suppress_tokens: Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    stop: Any = None
    constraint: Constraint | Sequence[Constraint | None] | None = None
    order: str | Sequence[int] | Sequence[Sequence[int]] | Order | None = None
    num_return_sequences: int = 1
    chat: bool | None = None
    streamer: Any = None
    callback: Callable[[State, Commit], bool | None] | None = None
    trace: bool = False
    compile: bool = False
    logprobs: int | None = None
    rollout: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        for name, default in DEFAULTS.items():
            value = getattr(self, name)
            if value is default:
                continue
            said = FIELDS[name]
            if said.registered and isinstance(value, str):
                Registry.by_kind[name].check(value)
            elif (kept := said.check(name, value)) is not None:
                object.__setattr__(self, name, kept)
        if self.seed is not None and self.generator is not None:
            raise ValueError("give seed or generator, not both")

    # ---- making one ---------------------------------------------------------------------------------------------

    @classmethod
    def of(
        cls,
        arguments: Mapping[str, Any],
        preset: Request | str | Path | Mapping[str, Any] | None = None,
        **defaults: Any,
    ) -> Request:
        """A request of named arguments, which win over a preset, which wins over `defaults`.

        Args:
            preset: a request, or what `save` wrote: a file of it, or the mapping in it.

        Raises:
            TypeError: a name that is no argument. Otherwise as for the class, and for `load`.
        """
        return cls(**{**defaults, **cls.said(arguments, preset)})

    @classmethod
    def said(
        cls, arguments: Mapping[str, Any], preset: Request | str | Path | Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """What named arguments and a preset say, by field; arguments win. Values of arguments are not checked yet.

        Raises: as `of`.
        """
        if not arguments.keys() <= FIELDS.keys():
            check_names(arguments)
        if preset is None:
            return dict(arguments)
        if isinstance(preset, Request):
            changes: Mapping[str, Any] = preset.changes()
        else:
            changes = cls.from_dict(preset) if isinstance(preset, Mapping) else cls._read(preset)
        return {**changes, **arguments}

    def changes(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        return {name: getattr(self, name) for name in FIELDS if not _same(getattr(self, name), DEFAULTS[name])}

    def sampling(self) -> dict[str, Any]:
        """The fields that a step reads: how tokens are drawn and rows end."""
        return {name: getattr(self, name) for name, said in FIELDS.items() if said.stepwise}

    def without_objects(self) -> Request:
        """The same without what belongs to this process alone: what a state keeps."""
        nothing: dict[str, Any] = dict.fromkeys(LIVE)
        return dataclasses.replace(self, **nothing)

    # ---- data ---------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, as plain data.

        Raises:
            ValueError: a field that holds an object which no file can hold; the message names it.
        """
        return {name: _as_data(name, value) for name, value in self.changes().items()}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments from plain data, as `to_dict` makes it.

        Raises:
            ValueError: no mapping, a name that is no field, or a value that no field can have.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"preset={shown(data)} must be a mapping of arguments, as Request.to_dict makes it")
        saved = [name for name in FIELDS if name not in LIVE]
        found = {name: value for name, value in data.items() if name != "draws"}  # which `save` adds
        for name in found:
            if name not in saved:
                raise ValueError(unknown("argument in a preset", name, saved))
        return {name: _from_data(name, value) for name, value in found.items()}

    def save(self, path: str | Path) -> None:
        """Write what differs from the defaults as JSON, for `load` and `preset=`; with a seed and a temperature also
        the version of the draws, "draws", by which another paradec tells that it draws other tokens.

        Raises:
            ValueError: as for `to_dict`; nothing is written then.
        """
        drawn = self.seed is not None and self.temperature > 0
        write_json(path, {**self.to_dict(), **({"draws": DRAWS} if drawn else {})})

    @classmethod
    def load(cls, path: str | Path) -> Request:
        """Read what `save` wrote. Warns (UserWarning) of a seed whose tokens another version of the draws drew.

        Raises:
            FileNotFoundError: no such file. ValueError: a file of another kind; the message says what is wrong.
        """
        return cls(**cls._read(path))

    @classmethod
    def _read(cls, path: str | Path) -> dict[str, Any]:
        if not isinstance(path, (str, Path)):
            raise ValueError(f"preset={shown(path)} must be a Request, or the path of a file that Request.save wrote")
        try:
            data = read_json(path)
        except FileNotFoundError:
            raise FileNotFoundError(f"preset={str(path)!r} is no file; Request.save writes one") from None
        except ValueError as error:
            raise ValueError(f"preset={error}") from None
        version = data.pop("draws", None) if isinstance(data, dict) else None
        try:
            found = cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"preset={str(path)!r}: {error}") from None
        if version not in (None, DRAWS) and found.get("temperature") and found.get("seed") is not None:
            was = f"version {shown(version)} of the draws"
            warnings.warn(f"preset={str(path)!r} was saved with {was}: its seed draws other tokens now", stacklevel=2)
        return found


Preset = Request | str | Path | Mapping[str, Any]
"""What a request can start from."""
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Request)}
"""Every field with its default."""


class Arguments(TypedDict, total=False):
    """The fields of `Request`, for type checkers: what an entry point takes by name."""

    sampler: str | Sampler
    cache: str | Cache | None
    prefix: KeptPrefix | None
    keep_prefix: bool
    share_prefix: bool
    attention: str | SparseD | None
    suffix: Suffix | int | str | None
    blocks: str | BlockPolicy | None
    block_length: int | None
    steps: int | None
    max_new_tokens: int | None
    temperature: float
    top_p: float | None
    top_k: int | None
    guidance_scale: float
    seed: int | Sequence[int] | None
    generator: torch.Generator | None
    rng: str
    eos_early_stop: bool
    logits_eos_inf: bool
    holes_eos_inf: bool
    confidence_eos_eot_inf: bool
    suppress_tokens: Sequence[int] | None
    stop_strings: str | Sequence[str] | None
    stop: Any
    constraint: Constraint | Sequence[Constraint | None] | None
    order: str | Sequence[int] | Sequence[Sequence[int]] | Order | None
    num_return_sequences: int
    chat: bool | None
    streamer: Any
    callback: Callable[[State, Commit], bool | None] | None
    trace: bool
    compile: bool
    logprobs: int | None
    rollout: bool
    progress: bool


def takes_arguments(
    *names: str, typed: Any = Arguments, defaults: Mapping[str, Any] = DEFAULTS
) -> Callable[[Any], Any]:
    """A decorator that lists a request's arguments in a function's signature, in the place of its `**arguments`; all of
    them by default. `help` and notebooks show them then, and transformers looks there. typed, defaults: their types and
    defaults, where an entry point has its own."""

    def decorate(function: Any) -> Any:
        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        there = {parameter.name for parameter in kept}
        hints = typed.__annotations__
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name])
            for name in names or hints
            if name not in there
        ]
        function.__signature__ = own.replace(parameters=[*kept, *added])
        return function

    return decorate


def request_for(sampler: Sampler, given: Request | None, arguments: Mapping[str, Any]) -> Request:
    """The request of a sampler's `start`: the one that was given, or one of arguments over the family's defaults.

    Raises:
        TypeError: both, or an unknown name. ValueError: an argument out of its range, or one that the family does not
            serve (`Sampler.unsupported`) and that is not at its default.
    """
    if given is None:
        given = Request.of(arguments, **sampler.request_defaults)
    elif not isinstance(given, Request):
        raise TypeError(f"request={shown(given)} must be a paradec.Request; other arguments go by name")
    elif arguments:
        raise TypeError(f"give a request or arguments, not both: {', '.join(arguments)}")
    for name in sampler.unsupported:
        value = getattr(given, name)
        if not _same(value, DEFAULTS[name]) and not (name == "attention" and value == "dense"):
            raise ValueError(f"{name}={shown(value)} has no meaning for sampler {sampler.name!r}: leave it out")
    return given


def seed_matters(method: Sampler, temperature: float, suffix: Suffix | int | str | None) -> bool:
    """Whether a seed may change what is decoded: tokens, the order of positions, drafts or the suffix are drawn."""
    ours = type(method).__module__.startswith("paradec.")  # others may draw positions without saying so
    kept = Suffix.of(suffix)
    return temperature != 0 or method.draws or not ours or (kept is not None and kept.density != "cut")


def warn_of_unused(request: Request, method: Sampler, said: Collection[str]) -> None:
    """Warn once of the fields `said` of a request that have no effect with its sampler, for the caller's caller."""
    if request.steps is not None and not method.uses_steps:
        warnings.warn(f"steps={request.steps} has no effect: sampler {method.name!r} has no schedule", stacklevel=4)
    if request.temperature != 0 or method.family not in ("masked", "draft_verify"):
        return
    idle = []
    needs = getattr(method, "needs", None)
    if needs is None or needs.score_from == "raw":
        idle = [name for name in FILTERS if getattr(request, name) not in (None, 1.0 if name == "top_p" else None)]
    if request.seed is not None and request.rng == "counter" and not seed_matters(method, 0, request.suffix):
        idle.append("seed")
    if named := [f"{name}={shown(getattr(request, name))}" for name in idle if name in said]:
        are = "has" if len(named) == 1 else "have"
        warnings.warn(f"{', '.join(named)} {are} no effect at temperature 0, which takes the best token", stacklevel=4)


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and not isinstance(value, Tensor) and value == default)


# ---- single arguments -----------------------------------------------------------------------------------------------


def stop_texts(value: str | Sequence[str] | None) -> tuple[str, ...]:
    """A request's stop strings as a tuple."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _as_data(name: str, value: Any) -> Any:
    """A field as JSON can hold it."""
    if name in LIVE:
        raise ValueError(f"{name}={shown(value)} is an object of this process and cannot be saved: leave it out")
    for other in ("drafter", "draft", "teacher") if name == "sampler" else ():
        if (model := getattr(value, other, None)) is not None and not hasattr(model, "to_dict"):  # no network
            raise ValueError(
                f"sampler={value.name!r} has a {other}, {shown(model)}, which cannot be saved: leave it out"
            )
    if name == "blocks" and type(value) in POLICIES.values():
        policy = next(key for key, kind in POLICIES.items() if kind is type(value))
        return {"blocks": policy} | {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    data = plain(value)
    try:
        json.dumps(data)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={shown(value)} is no data and cannot be saved: leave it out") from None
    return data


def _from_data(name: str, value: Any) -> Any:
    """Inverse of `_as_data`."""
    if name in Registry.by_kind and isinstance(value, Mapping):
        return Registry.by_kind[name].from_dict(value)
    if name == "blocks" and isinstance(value, Mapping):
        settings = {key: tuple(v) if isinstance(v, list) else v for key, v in value.items() if key != "blocks"}
        check_choice("blocks", value.get("blocks"), POLICIES)
        try:
            return POLICIES[value["blocks"]](**settings)
        except TypeError as error:
            raise ValueError(f"blocks={shown(dict(value))}: {error}") from None
    return value


def randomness(request: Request, rows: list[list[int]]) -> tuple[torch.Generator | None, list[int]]:
    """The generator of `rng="reference"`, and one seed per row.

    Raises:
        ValueError: seeds that are not one or one per row, or rows that one stream cannot serve.
    """
    seed, generator = request.seed, request.generator
    seeds: list[Any] = list(seed) if isinstance(seed, Sequence) else [seed] * len(rows)
    if len(seeds) != len(rows):
        raise ValueError(f"seed has {len(seeds)} entries for {len(rows)} rows; give one int, or one per row")
    if request.rng == "reference":
        if len({len(row) for row in rows}) != 1:
            raise ValueError("rng='reference' needs rows of one length: the references know no padding")
        if generator is None:
            if len(set(seeds)) != 1:
                raise ValueError("rng='reference' draws all rows from one stream; give one seed, not one per row")
            generator = torch.Generator()
            generator.manual_seed(torch.initial_seed() if seeds[0] is None else int(seeds[0]))
        return generator, [0] * len(rows)
    if seeds[0] is None:
        device = None if generator is None else generator.device
        drawn = torch.randint(2**63 - 1, (1,), generator=generator, device=device)
        seeds = [int(drawn)] * len(rows)
    return None, [int(entry) for entry in seeds]

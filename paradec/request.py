"""Requests: the arguments of all entry points as one frozen value. Importing this module imports no torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from paradec.core.checks import (
    check_bool,
    check_choice,
    check_int,
    check_number,
    check_temperature,
    short_repr,
    unknown_name,
)
from paradec.core.registry import Registry, import_lazily
from paradec.core.request_fields import (
    check_bias,
    check_callable,
    check_generator,
    check_integers,
    check_lazily,
    check_texts,
    check_words,
    field_data,
    read_number,
    unknown_argument_error,
)
from paradec.core.text_files import read_json, write_json
from paradec.core.version import DRAWS

if TYPE_CHECKING:
    import torch

    from paradec.arguments import Arguments as Arguments
    from paradec.attention.sparsed import SparseD
    from paradec.caches.base import Cache
    from paradec.caches.kept_prefix import KeptPrefix
    from paradec.caches.suffix import Suffix
    from paradec.constraints.values import Constraint
    from paradec.core.blocks import BlockPolicy
    from paradec.core.orders import Order
    from paradec.core.protocol import Commit, Sampler, State


def argument(default: Any, check: Any = None, option: Any = None, help: str = "", **metadata: Any) -> Any:
    """Declare a field of `Request`.

    check: called with the name and any value other than the default; raises ValueError or TypeError, and may return a
        converted value to store. None: the sampler checks the field.
    option, help: type and help text of the command-line option, if any.
    metadata: the option's `short`, `metavar`, `option_default`, `show_default`; `is_live`: cannot be saved."""
    return field(default=default, metadata={"check": check, "option": option, "help": help, **metadata})


def _check_component(name: str, value: Any) -> Any:
    """Check a sampler, a cache or an attention method; build it from the mapping of a saved request."""
    registry = Registry.by_kind[name]
    if isinstance(value, Mapping) and name in value:
        return registry.from_dict(value)
    hint = f"; call it: {value.__name__}()" if isinstance(value, type) else ""
    if name != "attention" and not hasattr(value, "kind") and (callable(value) or hasattr(value, "select")):
        hint = f"; docs/write_a_{name}.md shows how to write one"
    if isinstance(value, str) and name == "attention":
        check_choice(name, value, ["dense", *registry.names()])
    elif isinstance(value, str):
        registry.check(value)
    elif name == "sampler" and not isinstance(value, import_lazily("paradec.core.protocol:Sampler")):
        if isinstance(value, import_lazily("paradec.samplers.forecast.refresh:Rule")):
            hint = "; write paradec.Forecast(when=...)"
        raise TypeError(f"{name}={short_repr(value)} must be a name or made by paradec.samplers.create{hint}")
    elif name == "cache" and not isinstance(value, import_lazily("paradec.caches.base:Cache")):
        raise ValueError(
            f"{name}={short_repr(value)} must be one of {registry.names()} or made by paradec.caches.create{hint}"
        )
    return None


_count, _positive = partial(check_int, low=0), partial(check_int, low=1)
_seeds = partial(check_integers, can_be_single=True, high=2**63 - 1)
_share = partial(check_number, low=0, high=1, open_low=True)
_scale = partial(check_number, low=0, high=1e6)
_penalty = partial(read_number, low=-2, high=2)
_factor = partial(read_number, low=0, high=10, open_low=True)
_up_to_million = partial(check_int, low=1, high=1_000_000)


def _check_new_tokens(name: str, value: Any) -> None:
    check_int(name, value, low=0 if isinstance(value, int) and value == 0 else 1)  # 0 is for prompts with masks


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of one request. Checks that need the model are made when the request starts.

    Args:
        sampler: a name (`paradec.samplers.names()`), joined names ("credit+localleap"), or a sampler with settings.
        cache: a name (`paradec.caches.names()`), with settings in parentheses ("dkv_decode(refresh_interval=4)"), or a
            cache; None: masked samplers recompute everything at every step.
        prefix: `Output.prefix` of a request with `keep_prefix`. Leading tokens in common with it are not evaluated
            again (`out.cost.reused_tokens`). Exact for block-causal models, approximate for others.
        keep_prefix: keep keys and values for the next turn, in `Output.prefix`.
        share_prefix: evaluate and store the rows' common prefix once. Exact on the same models as `prefix`.
        attention: "dense", "sparsed", or `paradec.SparseD(...)`, for long sequences (docs/caches.md); None: the
            model's own. `Output.attention` reports its cost.
        suffix: which masks after the open block are evaluated: a `paradec.Suffix`, a window (64), or a text
            ("gaussian:256"); None: all. For bidirectional models and answers of several blocks (docs/caches.md).
        blocks: a block policy or its name ("fixed", "whole", "adaptive", "pipelined").
        block_length: by default 32 for LLaDA, the whole canvas for Dream, the model's own for block-causal models.
        steps: forwards per row for samplers with a schedule, divided among its blocks; None: one per token.
        max_new_tokens: answer length; by default from generation_config.json, else 128 (0 for prompts with masks).
        temperature: 0 takes the likeliest token; 1e-6 to 1e6 draws from softmax(logits / temperature).
        min_p, top_p, top_k: restrict the draw to tokens at least `min_p` times as likely as the best, then to the
            likeliest tokens of total probability `top_p`, then to the `top_k` likeliest.
        guidance_scale: s in uncond + s (cond - uncond), where uncond has the prompt masked; 1 is off (LLaDA's cfg_scale
            is s - 1). See `paradec.samplers.distributions.apply_guidance` for excluded tokens.
        seed: an int, or one per prompt or row. A row's draws depend only on its seed, prompt and positions.
        generator: a torch.Generator instead of a seed.
        rng: "counter" (reproducible per row), or "reference" to draw as the public code does.
        eos_early_stop: end a row at its end token, once everything before it is decided.
        logits_eos_inf: never propose an end token.
        holes_eos_inf: never propose an end token in a hole (a mask before other tokens of the prompt).
        confidence_eos_eot_inf: commit end tokens last. (LLaDA's code delays <|endoftext|> at temperature 0 only.)
        suppress_tokens: ids never proposed, besides the mask id; None: the ids that stand for no text.
        logit_bias: numbers to add to logits, by id: {id: number from -100 to 100}.
        bad_words: texts (with a tokenizer) or sequences of ids that an answer must not contain. Samplers that decide
            positions in any order accept words of one token only.
        min_new_tokens, ignore_eos: no end token in an answer's first `min_new_tokens` positions, or anywhere in it.
        repetition_penalty, presence_penalty, frequency_penalty: for tokens that are final when a step begins, in prompt
            and answer (repetition) or in the answer only (formulas: `paradec.samplers.features.token_controls`).
        stop_strings: one or several texts. A row ends once its answer contains one of them, and everything up to this
            text is decided. Needs a tokenizer.
        stop: one or several stop rules, such as `paradec.Prophet()` (`paradec.samplers.masked.blocks`).
        constraint: a `paradec.Choice`, `Regex`, `JsonSchema` or `Grammar` for answers. For a prompt with masks, a list
            with one entry per hole, None where anything is allowed (docs/structured.md).
        order: order in which any-order models without a drafter decide positions: "random" (the default; from the
            row's key), "chain" (left to right), a list of all positions or of all undecided ones (from 0), a list with
            one such list for each row, or an order of `paradec.core.orders`.
        num_return_sequences: answers per prompt, in neighbouring rows, each with its own draws.
        chat: whether text becomes a user turn of the chat template; None: if the tokenizer has a template.
        streamer: as in transformers: `put`, `end` and optionally `put_draft`; see `paradec.api.streaming`.
        callback: `callback(state, commit)` after every step; returning True ends the decoding.
        trace: record every step in `Output.trace`.
        compile: replay whole steps as CUDA graphs, with the same tokens (`paradec.samplers.masked.device.step`). The
            model keeps the graphs until `clear_graphs(model)`. ValueError without CUDA; warns if it has no effect.
        logprobs: record the log-probability of each final token and of this many likeliest alternatives (0: none) in
            `Output.logprobs` and the trace (`paradec.core.logprobs`).
        rollout: record every decision with its step and log-probability in `Output.rollout` (docs/rollouts.md).
        progress: show a tqdm bar of final tokens and forwards on standard error.

    Raises ValueError or TypeError for an argument out of its range; the message names it.
    """

    sampler: str | Sampler = argument(
        "threshold",
        _check_component,
        str,
        "A name that `paradec samplers` lists, with settings in parentheses, or a combination: 'credit+localleap' "
        "commits all tokens that one of the two would commit.",
        show_default="the model's, or threshold",
    )
    cache: str | Cache | None = argument(
        None,
        _check_component,
        str,
        "A name that `paradec caches` lists; settings go in parentheses: 'dkv_decode(refresh_interval=4)'.",
        option_default="none",
    )
    prefix: KeptPrefix | None = argument(None, is_live=True)
    keep_prefix: bool = argument(False, check_bool)
    share_prefix: bool = argument(False, check_bool)
    attention: str | SparseD | None = argument(
        None, _check_component, str | None, "dense, or sparsed for prompts from about 8000 tokens on."
    )
    suffix: Suffix | int | str | None = argument(
        None,
        lambda _, value: import_lazily("paradec.caches.suffix:Suffix").from_value(value),
        str | None,
        "Keep this many masks after the open block: 64, or gaussian:256 to thin them out.",
        metavar="WINDOW",
    )
    blocks: str | BlockPolicy | None = argument(None, check_lazily("paradec.samplers.masked.policies:parse_policy"))
    block_length: int | None = argument(None, _positive, int | None, "Tokens per block; by default the model's own.")
    steps: int | None = argument(None, _up_to_million, int | None, "Number of steps, for samplers with a schedule.")
    max_new_tokens: int | None = argument(None, _check_new_tokens, int | None, "Length of the canvas after the prompt.")
    temperature: float = argument(0.0, check_temperature, float, "0 takes the likeliest token.")
    top_p: float | None = argument(
        None, _share, float | None, "Draw from the likeliest tokens with this total probability."
    )
    top_k: int | None = argument(None, _positive, int | None, "Draw from this many of the likeliest tokens.")
    min_p: float | None = argument(
        None,
        partial(read_number, low=0, high=1, open_low=True),
        float | None,
        "Draw from tokens with at least this share of the best token's probability.",
    )
    guidance_scale: float = argument(1.0, _scale, float, "Classifier-free guidance; 1 is off.")
    seed: int | Sequence[int] | None = argument(None, _seeds, int | None, "Seed of the random draws.")
    generator: torch.Generator | None = argument(None, check_generator, is_live=True)
    rng: str = argument("counter", partial(check_choice, allowed=("counter", "reference")))
    eos_early_stop: bool = argument(True, check_bool, bool, "End a row when everything before an end token is final.")
    logits_eos_inf: bool = argument(False, check_bool)
    holes_eos_inf: bool = argument(
        False, check_bool, bool, "Write no end token into a hole: it would shorten the text there.", option_default=True
    )
    confidence_eos_eot_inf: bool = argument(False, check_bool)
    suppress_tokens: Sequence[int] | None = argument(None, check_integers)
    logit_bias: Mapping[int, float] | None = argument(None, check_bias)
    bad_words: Sequence[Any] | None = argument(None, check_words)
    min_new_tokens: int = argument(0, _count, int, "Tokens before an answer may end.")
    ignore_eos: bool = argument(False, check_bool, bool, "Never end an answer.")
    repetition_penalty: float = argument(1.0, _factor, float, "Above 1, tokens of prompt and answer are less likely.")
    presence_penalty: float = argument(0.0, _penalty, float, "Above 0, tokens of the answer are less likely.")
    frequency_penalty: float = argument(0.0, _penalty, float, "Above 0, tokens are less likely with each occurrence.")
    stop_strings: str | Sequence[str] | None = argument(None, check_texts)
    stop: Any = argument(None)
    constraint: Constraint | Sequence[Constraint | None] | None = argument(
        None, check_lazily("paradec.constraints.values:parse_constraint")
    )
    order: str | Sequence[int] | Sequence[Sequence[int]] | Order | None = argument(
        None, check_lazily("paradec.core.orders:check_request_order")
    )
    num_return_sequences: int = argument(
        1, _up_to_million, int, "Number of answers, each with its own draws.", short="-n"
    )
    chat: bool | None = argument(None, check_bool)
    streamer: Any = argument(None, is_live=True)
    callback: Callable[[State, Commit], bool | None] | None = argument(None, check_callable, is_live=True)
    trace: bool = argument(False, check_bool)
    compile: bool = argument(False, check_bool)
    logprobs: int | None = argument(
        None, _count, int | None, "Print the log-probability of each token, and of this many likely tokens."
    )
    rollout: bool = argument(False, check_bool)
    progress: bool = argument(False, check_bool)

    def __post_init__(self) -> None:
        for name, entry in FIELDS.items():
            value, check = getattr(self, name), entry.metadata["check"]
            if value is not entry.default and check is not None and (checked := check(name, value)) is not None:
                object.__setattr__(self, name, checked)
        if self.seed is not None and self.generator is not None:
            raise ValueError("give seed or generator, not both")

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], preset: Preset | None = None, **defaults: Any) -> Request:
        """Build a request: arguments override the preset, which overrides `defaults`. Raises TypeError for an unknown
        name, and the errors of the class and of `load`."""
        return cls(**{**defaults, **cls.merge_arguments(arguments, preset, defaults.get("sampler"))})

    @classmethod
    def merge_arguments(
        cls, arguments: Mapping[str, Any], preset: Preset | None = None, default_sampler: Any = None
    ) -> dict[str, Any]:
        """Merge unchecked arguments over a preset; return values by field. Raises as `from_arguments`."""
        check_names(arguments, sampler=arguments.get("sampler"), default_sampler=default_sampler)
        if preset is None:
            return dict(arguments)
        if isinstance(preset, Request):
            return {**preset.changes(), **arguments}
        saved = cls.from_dict(preset, arguments) if isinstance(preset, Mapping) else cls._read(preset, arguments)
        return {**saved, **arguments}

    def changes(self) -> dict[str, Any]:
        """Fields that differ from their defaults."""
        triples = ((name, getattr(self, name), default) for name, default in DEFAULTS.items())
        return {name: value for name, value, default in triples if type(value) is not type(default) or value != default}

    def sampling(self) -> dict[str, Any]:
        """Fields that a step reads."""
        names = (
            *("steps", "temperature", "top_p", "top_k", "min_p", "guidance_scale", "rng", "eos_early_stop"),
            *(
                "logits_eos_inf",
                "holes_eos_inf",
                "confidence_eos_eot_inf",
                "suppress_tokens",
                "logit_bias",
                "bad_words",
            ),
            *("min_new_tokens", "ignore_eos", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        )
        return {name: getattr(self, name) for name in names}

    @property
    def filters(self) -> tuple[float | None, int | None, float | None]:
        """`top_p`, `top_k` and `min_p`."""
        return self.top_p, self.top_k, self.min_p

    def without_objects(self) -> Request:
        """Copy the request with None in the fields `LIVE`."""
        stripped = copy.copy(self)  # skips the checks
        vars(stripped).update(dict.fromkeys(LIVE))
        return stripped

    def to_dict(self) -> dict[str, Any]:
        """`changes` as plain data. Raises ValueError for a field with an object that no file can hold."""
        return {name: field_data(name, value, name in LIVE) for name, value in self.changes().items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
        """Read arguments from data of `to_dict`. Raises ValueError for other data or unknown names, and the errors of
        the class. without: fields to leave out unread, because arguments override them."""
        if not isinstance(data, Mapping):
            raise ValueError(f"preset={short_repr(data)} must be a mapping of arguments, as Request.to_dict makes it")
        arguments = {name: value for name, value in data.items() if name != "draws"}  # `save` adds this name
        for name in arguments:
            if name not in FIELDS or name in LIVE:
                raise ValueError(unknown_name("argument in a preset", name, FIELDS.keys() - LIVE))
        arguments = {name: value for name, value in arguments.items() if name not in without}
        request = cls(**arguments)
        return {name: getattr(request, name) for name in arguments}

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as JSON, for `load` and `preset=`. If a seed draws tokens, the version of the draws is saved
        too. Raises ValueError as `to_dict`, before writing."""
        is_drawn = self.seed is not None and self.temperature > 0
        write_json(path, self.to_dict() | ({"draws": DRAWS} if is_drawn else {}))

    @classmethod
    def load(cls, path: str | Path, without: Collection[str] = ()) -> Request:
        """Read a file of `save`. Warns (UserWarning) if its seed was saved with another version of the draws. Raises
        FileNotFoundError, or ValueError for another file. without: fields to leave out unread."""
        return cls(**cls._read(path, without))

    @classmethod
    def _read(cls, path: str | Path, without: Collection[str]) -> dict[str, Any]:
        if not isinstance(path, (str, Path)):
            raise ValueError(
                f"preset={short_repr(path)} must be a Request, or the path of a file that Request.save wrote"
            )
        try:
            data = read_json(path)
            arguments = cls.from_dict(data, without)
        except FileNotFoundError:
            raise FileNotFoundError(f"preset={str(path)!r} does not exist; Request.save writes one") from None
        except ValueError as error:
            raise ValueError(f"preset={str(path)!r}: {error}") from None
        version = data.get("draws")
        if version not in (None, DRAWS) and data.get("temperature") and data.get("seed") is not None:
            saved = f"version {short_repr(version)} of the draws"
            warnings.warn(f"preset={str(path)!r} was saved with {saved}: its seed draws other tokens now", stacklevel=2)
        return arguments


NO_FILTERS = (None, None, None)
Preset = Request | str | Path | Mapping[str, Any]
"""Source of default arguments: a request, a file of `Request.save`, or data of `Request.to_dict`."""
FIELDS: Mapping[str, Field[Any]] = {entry.name: entry for entry in fields(Request)}
DEFAULTS: Mapping[str, Any] = {name: entry.default for name, entry in FIELDS.items()}
LIVE = tuple(name for name, entry in FIELDS.items() if "is_live" in entry.metadata)
"""Fields with objects of this process."""

if not TYPE_CHECKING:
    Arguments = TypedDict("Arguments", {name: entry.type for name, entry in FIELDS.items()}, total=False)


def request_for(sampler: Sampler, request: Request | None, arguments: Mapping[str, Any]) -> Request:
    """Return `request`, or build a request of `arguments` over the sampler's `request_defaults`. Raises TypeError if
    both are given or a name is unknown, ValueError for an argument out of its range or in `Sampler.unsupported`."""
    if request is None:
        request = Request.from_arguments(arguments, **sampler.request_defaults)
    elif not isinstance(request, Request):
        raise TypeError(f"request={short_repr(request)} must be a paradec.Request; other arguments go by name")
    elif arguments:
        raise TypeError(f"give a request or arguments, not both: {', '.join(arguments)}")
    for name, value in request.changes().items():
        if name in sampler.unsupported and not (name == "attention" and value == "dense"):
            is_ahead = name != "order" and getattr(getattr(sampler, "needs", None), "multi_step", False)
            why = ", which drafts several steps before their tokens are final" if is_ahead else ""
            raise ValueError(
                f"{name}={short_repr(value)} has no meaning for sampler {sampler.name!r}{why}: leave it out"
            )
    return request


def seed_matters(sampler: Sampler, temperature: float, suffix: Suffix | int | str | None) -> bool:
    """Whether a seed may change the result, because tokens, positions, drafts or suffix masks are drawn."""
    is_builtin = type(sampler).__module__.startswith("paradec.")  # a custom sampler may draw without declaring it
    suffix_masks = import_lazily("paradec.caches.suffix:Suffix").from_value(suffix)
    return (
        temperature != 0
        or sampler.draws
        or not is_builtin
        or (suffix_masks is not None and suffix_masks.density != "cut")
    )


def warn_of_unused(request: Request, sampler: Sampler, names: Collection[str]) -> None:
    """Warn if `steps` or fields in `names` have no effect. Warnings point at the caller of the entry point."""
    if request.steps is not None and not sampler.uses_steps:
        warnings.warn(f"steps={request.steps} has no effect: sampler {sampler.name!r} has no schedule", stacklevel=4)
    if request.temperature != 0 or sampler.family not in ("masked", "draft_verify"):
        return
    needs = getattr(sampler, "needs", None)
    filters = {"top_p": request.top_p not in (None, 1.0), "top_k": request.top_k is not None, "min_p": request.min_p}
    unused = [name for name, is_set in filters.items() if is_set and (needs is None or needs.score_from == "raw")]
    if request.seed is not None and request.rng == "counter" and not seed_matters(sampler, 0, request.suffix):
        unused.append("seed")
    if shown_fields := [f"{name}={short_repr(getattr(request, name))}" for name in unused if name in names]:
        verb = "has" if len(shown_fields) == 1 else "have"
        warnings.warn(
            f"{', '.join(shown_fields)} {verb} no effect at temperature 0, which takes the best token", stacklevel=4
        )


def check_names(
    names: Collection[str], allowed: Collection[str] = FIELDS, sampler: Any = None, default_sampler: Any = None
) -> None:
    """Raise TypeError for an unknown argument, with the closest name. sampler, default_sampler: the samplers of the
    request and of the model, whose settings the message may name."""
    for name in names:
        if name not in allowed:
            raise unknown_argument_error(name, allowed, sampler, default_sampler)

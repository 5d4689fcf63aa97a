"""What each field of `paradec.Request` says of itself: its check, who serves it, and its option on the command line.

Lists of fields elsewhere are made from this one: what a family of samplers refuses (`unsupported_by`), what an entry
point takes (`served_by`), and the parameters of commands. Importing it imports no torch: commands are listed without.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from paradec import attention as attentions
from paradec import caches
from paradec.core.checks import check_bool, check_choice, check_int, check_number, check_temperature, shown
from paradec.core.registry import Registry, unknown

MOST_STEPS = 1_000_000
LARGEST_GUIDANCE = 1e6
MOST_ANSWERS = 1_000_000
"""Rows that one prompt can become."""
ELSEWHERE = {
    "gen_length": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "cfg": "guidance_scale",
    "cfg_scale": "guidance_scale",
    "diffusion_steps": "steps",
    "num_inference_steps": "steps",
    "alg": "sampler",
    "algorithm": "sampler",
    "remasking": "sampler",
    "num_samples": "num_return_sequences",
    "n": "num_return_sequences",
    "negative_prompt_ids": "guidance_scale",
}
"""Names of other libraries, and what they are called here."""
PICTURES = "continuous distilled groups nar scales"


@dataclass(frozen=True, kw_only=True)
class Option:
    """A field as an option of commands."""

    help: str
    kind: Any = int | None
    """Its type on the command line."""
    default: Any = None
    names: tuple[str, ...] = ()
    """Where they are not made from the field's name."""
    metavar: str | None = None


def _anything(name: str, value: Any) -> None:
    """The check of what samplers check themselves."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """What a field says of itself. (`paradec.Request` has its type, its default and what it means.)"""

    check: Callable[[str, Any], Any] = _anything
    """Called with the name and a value other than the default: raises ValueError or TypeError; may return what is kept
    in the place of the value."""
    registered: bool = False
    """Whether the registry of the field's name says which texts are names."""
    served: str = ""
    """Who takes it, beside masked samplers, which take all but `order`: families of samplers ("draft_verify",
    "continuous", "distilled", "groups", "scales", and of "groups" apart: "nar") and entry points ("hf": `hf_generate`,
    "server", "engine": a row inside an engine, "tune")."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Who does not, and why or what to do instead: "renoising" (the family), "batch" (batches that are refilled)."""
    own: str = ""
    """"all" where rows of one batch may differ in it, "masked" where those of masked samplers may."""
    stepwise: bool = False
    """Whether a step reads it: it says how tokens are drawn, or how rows end."""
    live: bool = False
    """Whether it holds an object of this process: it is never saved, and a state does not keep it."""
    option: Option | None = None


# ---- checks that are no ranges --------------------------------------------------------------------------------------


def _sampler(name: str, value: Any) -> None:
    from paradec.core.protocol import Sampler

    if not isinstance(value, Sampler):
        raise TypeError(f"{name}={shown(value)} must be a name or made by paradec.samplers.create")


def _cache(name: str, value: Any) -> None:
    from paradec.caches.base import Cache

    if not isinstance(value, Cache):
        raise ValueError(f"{name}={shown(value)} must be one of {caches.names()} or made by paradec.caches.create")


def _attention(name: str, value: Any) -> None:
    if isinstance(value, str):
        check_choice(name, value, ["dense", *attentions.names()])


def _blocks(name: str, value: Any) -> None:
    from paradec.core.block_policies import POLICIES

    if isinstance(value, str):
        check_choice(name, value, POLICIES)


def _suffix(name: str, value: Any) -> Any:
    from paradec.caches.suffix import Suffix

    return Suffix.of(value)


def _callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name}={shown(value)} must be callable")


def _generator(name: str, value: Any) -> None:
    import torch

    if not isinstance(value, torch.Generator):
        raise ValueError(f"{name}={shown(value)} must be a torch.Generator")


def _listed(value: Any) -> Any:
    """An array or a tensor as lists."""
    import numpy as np
    from torch import Tensor

    return value.tolist() if isinstance(value, (Tensor, np.ndarray)) else value


def _ids(name: str, value: Any) -> tuple[Any, ...]:
    """A sequence of ids as a tuple. Whether they are in the vocabulary is checked with the model."""
    value = _listed(value)
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, Set)):
        raise ValueError(f"{name}={shown(value)} must be a sequence of token ids")
    for entry in value:
        check_int(name, entry, low=0)
    return tuple(value)


def _seeds(name: str, value: Any) -> Any:
    """An int, or a tuple of them. How many there must be is checked with the prompts."""
    value = _listed(value)
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    for entry in value if several else [value]:
        check_int(name, entry, low=0, high=2**63 - 1)
    return tuple(value) if several else value


def _texts(name: str, value: Any) -> Any:
    """A text as it is, a sequence of texts as a tuple."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name}={shown(value)} must be a text or a sequence of texts, none of them empty")
    return value if isinstance(value, str) else tuple(texts)


def _constraint(name: str, value: Any) -> Any:
    from paradec.constraints.values import constraint_of

    return constraint_of(name, value)


def _order(name: str, value: Any) -> Any:
    from paradec.core.orders import order_of

    return order_of(name, _listed(value))


# ---- the fields -----------------------------------------------------------------------------------------------------

_CANVAS = "a canvas has the length that the model was trained with"
_TOGETHER = "a prefix needs rows that begin together; use paradec.generate"
_ENDS = "draft_verify hf server engine tune"

FIELDS: Mapping[str, Field] = MappingProxyType({
    "sampler": Field(
        check=_sampler,
        registered=True,
        served=f"draft_verify {PICTURES} hf server",
        option=Option(
            kind=str,
            default="threshold",
            help="A name that `paradec samplers` lists, with settings in parentheses, or a combination: "
            "'credit+localleap' commits what either would.",
        ),
    ),
    "cache": Field(
        check=_cache,
        registered=True,
        served="hf server",
        refused={
            "renoising": "keys and values of final tokens are always kept, and those of an open canvas change at "
            "every step"
        },
        option=Option(
            kind=str,
            default="none",
            help="A name that `paradec caches` lists; settings go in parentheses: 'dkv_decode(refresh_interval=4)'.",
        ),
    ),
    "prefix": Field(live=True, refused={"batch": _TOGETHER}),
    "keep_prefix": Field(
        check=check_bool, refused={"batch": "keys and values of ended rows are not kept; use paradec.generate"}
    ),
    "share_prefix": Field(
        check=check_bool,
        refused={
            "batch": _TOGETHER,
            "renoising": "every row encodes its own prompt; prefix=... takes over what an earlier request encoded",
        },
    ),
    "attention": Field(
        check=_attention,
        served="hf tune",
        refused={
            "batch": "sparse attention keeps one pattern for all rows; use paradec.generate",
            "renoising": "sparse attention makes its lists of keys for one block of masks",
        },
        option=Option(kind=str | None, help="dense, or sparsed for prompts from about 8000 tokens on."),
    ),
    "suffix": Field(
        check=_suffix,
        served="hf server",
        refused={"renoising": "a canvas is evaluated whole, and nothing comes after it"},
        option=Option(
            kind=str | None,
            metavar="WINDOW",
            help="Leave out masks further after the open block: 64, or gaussian:256 to thin them out.",
        ),
    ),
    "blocks": Field(check=_blocks, served="hf server", refused={"renoising": _CANVAS}),
    "block_length": Field(
        check=partial(check_int, low=1),
        served="hf server engine",
        refused={"renoising": _CANVAS},
        option=Option(help="Tokens per block; by default the model's own."),
    ),
    "steps": Field(
        check=partial(check_int, low=1, high=MOST_STEPS),
        served="continuous distilled groups hf server engine",
        stepwise=True,
        option=Option(help="Number of steps, for samplers with a schedule."),
    ),
    "max_new_tokens": Field(
        check=partial(check_int, low=0),
        served="draft_verify server engine tune",
        own="all",
        option=Option(help="Length of the canvas after the prompt."),
    ),
    "temperature": Field(
        check=check_temperature,
        served="draft_verify distilled groups nar scales server engine tune",
        refused={"renoising": "the temperature falls over the steps: t_max and t_min are settings of the sampler"},
        stepwise=True,
        option=Option(kind=float, default=0.0, help="0 takes the likeliest token."),
    ),
    "top_p": Field(
        check=partial(check_number, low=0, high=1, open_low=True),
        served="draft_verify distilled groups nar scales server engine tune",
        stepwise=True,
        option=Option(kind=float | None, help="Draw from the likeliest tokens with this total probability."),
    ),
    "top_k": Field(
        check=partial(check_int, low=1),
        served="draft_verify distilled groups nar scales server engine tune",
        stepwise=True,
        option=Option(help="Draw from this many of the likeliest tokens."),
    ),
    "guidance_scale": Field(
        check=partial(check_number, low=0, high=LARGEST_GUIDANCE),
        served=f"draft_verify {PICTURES} server tune",
        refused={"renoising": "without a mask token there is no unconditional form of the prompt"},
        stepwise=True,
        option=Option(kind=float, default=1.0, help="Classifier-free guidance; 1 is off."),
    ),
    "seed": Field(
        check=_seeds,
        served=f"draft_verify {PICTURES} hf server engine",
        own="all",
        option=Option(help="Seed of the random draws."),
    ),
    "generator": Field(
        check=_generator,
        served=f"draft_verify {PICTURES}",
        live=True,
        refused={"batch": "give a seed: a row's draws do not depend on when it begins"},
    ),
    "rng": Field(check=partial(check_choice, allowed=("counter", "reference")), served="tune", stepwise=True),
    "eos_early_stop": Field(
        check=check_bool,
        served=_ENDS,
        stepwise=True,
        option=Option(kind=bool, default=True, help="End a row when everything before an end token is final."),
    ),
    "logits_eos_inf": Field(check=check_bool, served=_ENDS, stepwise=True),
    "holes_eos_inf": Field(
        check=check_bool,
        served=_ENDS,
        stepwise=True,
        option=Option(kind=bool, default=True, help="Fill holes without end tokens, which would shorten them."),
    ),
    "confidence_eos_eot_inf": Field(
        check=check_bool,
        served="hf server engine tune",
        stepwise=True,
        refused={"renoising": "a canvas closes as a whole, so that no token comes after the others"},
    ),
    "suppress_tokens": Field(check=_ids, served="draft_verify server engine tune", stepwise=True, own="masked"),
    "stop_strings": Field(check=_texts, served="draft_verify hf server tune", own="all"),
    "stop": Field(served="engine tune"),
    "constraint": Field(check=_constraint, served="draft_verify server"),
    "order": Field(check=_order, served="draft_verify"),
    "num_return_sequences": Field(
        check=partial(check_int, low=1, high=MOST_ANSWERS),
        served="draft_verify",
        refused={"batch": "give the prompt once for each answer"},
        option=Option(
            kind=int,
            default=1,
            names=("--num-return-sequences", "-n"),
            help="Number of answers, each with its own draws.",
        ),
    ),
    "chat": Field(check=check_bool, served="draft_verify nar server tune", own="all"),
    "streamer": Field(
        served="draft_verify hf",
        live=True,
        refused={"batch": "a streamer belongs to one prompt; give it with the prompt"},
    ),
    "callback": Field(
        check=_callable,
        served=f"draft_verify {PICTURES} hf",
        live=True,
        refused={"batch": "there is no state of a single request; give each prompt a streamer"},
    ),
    "trace": Field(
        check=check_bool,
        served=f"draft_verify {PICTURES}",
        refused={"batch": "a trace records the rows that it began with; use paradec.generate"},
    ),
    "compile": Field(
        check=check_bool,
        served="draft_verify tune",
        refused={"renoising": "the host decides when canvases have settled, and then opens and encodes others"},
    ),
    "logprobs": Field(check=partial(check_int, low=0), served="draft_verify"),
    "rollout": Field(
        check=check_bool,
        served="draft_verify",
        refused={"renoising": "a canvas closes with its likeliest tokens, which no step has drawn"},
    ),
    "progress": Field(
        check=check_bool,
        served=f"draft_verify {PICTURES} hf",
        refused={"batch": "count the outputs as they end"},
    ),
})  # fmt: skip
LIVE = tuple(name for name, said in FIELDS.items() if said.live)
"""Fields that hold objects of this process."""


def served_by(user: str) -> tuple[str, ...]:
    """The fields that a family or an entry point takes, by the names that `Field.served` has."""
    return tuple(name for name, said in FIELDS.items() if user in said.served.split())


def unsupported_by(family: str) -> tuple[str, ...]:
    """The others, for `Sampler.unsupported`."""
    return tuple(name for name, said in FIELDS.items() if family not in said.served.split())


def refused_by(user: str) -> dict[str, str]:
    """The fields that mean nothing to "renoising" or "batch", and why or what to do instead."""
    return {name: said.refused[user] for name, said in FIELDS.items() if user in said.refused}


# ---- names that are no fields ---------------------------------------------------------------------------------------


def check_names(given: Collection[str], allowed: Collection[str] = FIELDS) -> None:
    """Raise TypeError for a name that is no argument, with what was probably meant."""
    for name in given:
        if name in allowed:
            continue
        if ELSEWHERE.get(name) in allowed:
            # of text; the codes of image models add 1 or not
            value = f", and guidance_scale = {name} + 1" if "cfg" in name and "max_new_tokens" in allowed else ""
            raise TypeError(f"unknown argument: {name!r}; it is called {ELSEWHERE[name]!r} here{value}")
        if name == "do_sample":
            raise TypeError("unknown argument: 'do_sample'; temperature=0 takes the likeliest token, above 0 it draws")
        owner = _sampler_with(name)
        if owner is not None:
            raise TypeError(
                f"unknown argument: {name!r}; it is a setting of a sampler: sampler=paradec.samplers.create({owner!r}, "
                f"{name}=...)"
            )
        raise TypeError(unknown("argument", name, allowed))


def _sampler_with(setting: str) -> str | None:
    """A sampler that has a setting of this name; the one that is called so, if there is one."""
    samplers = Registry.by_kind["sampler"]
    for name in [setting, *samplers.names()]:
        if name in samplers and setting in samplers.get(name).settings():
            return name
    return None

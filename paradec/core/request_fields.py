"""Fields of a request: checks of their values, names that are no field, and values as data for JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence, Set
from typing import Any

from paradec.core.checks import check_int, shown
from paradec.core.registry import Registry, import_lazily, to_data, unknown_name

NAMES_ELSEWHERE = {
    "max_new_tokens": ("gen_length", "max_length", "max_tokens"),
    "guidance_scale": ("cfg", "cfg_scale", "negative_prompt_ids"),
    "steps": ("diffusion_steps", "num_inference_steps"),
    "sampler": ("alg", "algorithm", "remasking"),
    "num_return_sequences": ("num_samples", "n"),
}
"""Fields, and their names in other libraries."""


def check_lazily(target: str) -> Callable[[str, Any], Any]:
    """A check that another module makes, "module:function"."""
    return lambda name, value: import_lazily(target)(name, _to_lists(value))


def check_callable(name: str, value: Any) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name}={shown(value)} must be callable")


def check_generator(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a `torch.Generator`."""
    if not isinstance(value, import_lazily("torch:Generator")):
        raise ValueError(f"{name}={shown(value)} must be a torch.Generator")


def _to_lists(value: Any) -> Any:
    """Convert an array or a tensor to lists; others are unchanged."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_integers(name: str, value: Any, can_be_single: bool = False, **bounds: Any) -> Any:
    """Check token ids, or one seed or several; a sequence or an array becomes a tuple."""
    value = _to_lists(value)
    kinds = Sequence if can_be_single else (Sequence, Set)  # the order of seeds matters
    is_sequence = isinstance(value, kinds) and not isinstance(value, (str, bytes))
    if not is_sequence and not can_be_single:
        raise ValueError(f"{name}={shown(value)} must be a sequence of token ids")
    for number in value if is_sequence else [value]:
        check_int(name, number, low=0, **bounds)
    return tuple(value) if is_sequence else value


def check_texts(name: str, value: Any) -> str | tuple[str, ...]:
    """Check a text or several; a sequence becomes a tuple."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name}={shown(value)} must be a text or a sequence of texts, none of them empty")
    return value if isinstance(value, str) else tuple(texts)


def field_data(name: str, value: Any, is_live: bool) -> Any:
    """A field as JSON can hold it.

    Args:
        is_live: whether the field holds an object of this process.

    Raises:
        ValueError: a value that JSON cannot hold.
    """
    if is_live:
        raise ValueError(f"{name}={shown(value)} is an object of this process and cannot be saved: leave it out")
    for other in ("drafter", "draft", "teacher") if name == "sampler" else ():
        if (model := getattr(value, other, None)) is not None and not hasattr(model, "to_dict"):  # no network
            raise ValueError(
                f"sampler={value.name!r} has a {other}, {shown(model)}, which cannot be saved: leave it out"
            )
    if name == "blocks":
        return import_lazily("paradec.samplers.masked.policies:policy_data")(value)
    data = to_data(value)
    try:
        json.dumps(data)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={shown(value)} is no data and cannot be saved: leave it out") from None
    return data


def unknown_argument_error(name: str, allowed: Collection[str]) -> TypeError:
    """The error for a name that is none of the `allowed` arguments, with what was probably meant."""
    for ours, others in NAMES_ELSEWHERE.items():
        if name in others and ours in allowed:
            # of text; the codes of image models add 1 or not
            value = f", and {ours} = {name} + 1" if "cfg" in name and "max_new_tokens" in allowed else ""
            return TypeError(f"unknown argument: {name!r}; it is called {ours!r} here{value}")
    if name == "do_sample":
        return TypeError("unknown argument: 'do_sample'; temperature=0 takes the likeliest token, above 0 it draws")
    samplers = Registry.by_kind["sampler"]
    for sampler in [name, *samplers.names()]:  # the one that is called so first
        if sampler in samplers and name in samplers.get(sampler).settings():
            return TypeError(
                f"unknown argument: {name!r}; it is a setting of a sampler: "
                f"sampler=paradec.samplers.create({sampler!r}, {name}=...)"
            )
    return TypeError(unknown_name("argument", name, allowed))

"""Checks of a request's fields and names, and conversion to JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

from paradec.core.checks import check_int, check_number, short_repr, unknown_name
from paradec.core.other_names import CONSTRAINTS, REQUEST_FIELDS, REQUEST_HINTS
from paradec.core.registry import Registry, import_lazily, to_data


def check_lazily(target: str) -> Callable[[str, Any], Any]:
    """Make a check from "module:function", imported on first use."""
    return lambda name, value: import_lazily(target)(name, _to_lists(value))


def check_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name}={short_repr(value)} must be callable")


def check_generator(name: str, value: Any) -> None:
    if not isinstance(value, import_lazily("torch:Generator")):
        raise ValueError(f"{name}={short_repr(value)} must be a torch.Generator")


def _to_lists(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def check_integers(name: str, value: Any, can_be_single: bool = False, **bounds: Any) -> Any:
    """Check a sequence of token ids, or (`can_be_single`) one or several seeds; sequences become tuples."""
    value = _to_lists(value)
    kinds = Sequence if can_be_single else (Sequence, Set)  # the order of seeds matters
    is_sequence = isinstance(value, kinds) and not isinstance(value, (str, bytes))
    if not is_sequence and not can_be_single:
        raise ValueError(f"{name}={short_repr(value)} must be a sequence of token ids")
    for number in value if is_sequence else [value]:
        check_int(name, number, low=0, **bounds)
    return tuple(value) if is_sequence else value


def check_texts(name: str, value: Any) -> str | tuple[str, ...]:
    """Check one or several texts; sequences become tuples."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{name}={short_repr(value)} must be a text or a sequence of texts, none of them empty")
    return value if isinstance(value, str) else tuple(texts)


def read_number(name: str, value: Any, **bounds: Any) -> float:
    """Check a number as `check_number`, and convert it to float, so that 0 and 0.0 give equal requests."""
    check_number(name, value, **bounds)
    return float(value)


def check_bias(name: str, value: Any) -> dict[int, float]:
    """Check a mapping of ids to numbers. Keys may be texts of digits, as in JSON."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={short_repr(value)} must be a mapping of ids to numbers from -100 to 100")
    for number in value.values():
        check_number(name, number, low=-100, high=100)
    try:
        ids = [int(token) if isinstance(token, str) else token for token in value]
    except ValueError:
        raise ValueError(f"{name}={short_repr(value)} must have token ids as keys") from None
    return dict(zip(map(int, check_integers(name, ids)), map(float, value.values()), strict=True))


def check_words(name: str, value: Any) -> tuple[Any, ...]:
    """Check texts and sequences of ids, none of them empty."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name}={short_repr(value)} must be a sequence of texts or of sequences of ids")
    words = tuple(word if isinstance(word, str) else check_integers(name, word) for word in value)
    if not all(words):
        raise ValueError(f"{name}={short_repr(value)} has an empty word")
    return words


def field_data(name: str, value: Any, is_live: bool) -> Any:
    """Convert a field to JSON data. is_live: whether the field holds an object of this process. Raises ValueError for
    such objects, and for values that JSON cannot hold."""
    if is_live:
        raise ValueError(f"{name}={short_repr(value)} is an object of this process and cannot be saved: leave it out")
    for model_field in ("drafter", "draft", "teacher") if name == "sampler" else ():
        if (model := getattr(value, model_field, None)) is not None and not hasattr(model, "to_dict"):  # a network
            raise ValueError(
                f"sampler={value.name!r} has a {model_field}, {short_repr(model)}, which cannot be saved: leave it out"
            )
    if name == "blocks":
        return import_lazily("paradec.samplers.masked.policies:policy_to_data")(value)
    data = to_data(value)
    try:
        json.dumps(data)
    except (TypeError, ValueError):
        raise ValueError(f"{name}={short_repr(value)} is not JSON data and cannot be saved: leave it out") from None
    return data


def unknown_argument_error(
    name: str, allowed: Collection[str], sampler: Any = None, default_sampler: Any = None
) -> TypeError:
    """Make the error for a name that is not in `allowed`. sampler: the request's, as a text or an object."""
    if (hint := argument_hint(name, allowed, sampler, default_sampler)) is not None:
        return TypeError(f"unknown argument: {name!r}; {hint}")
    return TypeError(unknown_name("argument", name, allowed))


def argument_hint(name: str, allowed: Collection[str], sampler: Any = None, default_sampler: Any = None) -> str | None:
    """Advice for an argument of another library or of a sampler; None for other names. default_sampler: the model's."""
    for field, other_names in REQUEST_FIELDS.items():
        if name in other_names and field in allowed:
            # the public code of text models defines cfg_scale as s - 1; that of image models varies
            conversion = f", and {field} = {name} + 1" if "cfg" in name and "max_new_tokens" in allowed else ""
            return f"it is called {field!r} here{conversion}"
    if name in CONSTRAINTS and "constraint" in allowed:
        return f"write constraint={CONSTRAINTS[name]}"
    if name in REQUEST_HINTS and (name == "do_sample" or "max_new_tokens" in allowed):
        return REQUEST_HINTS[name]
    registry = Registry.by_kind["sampler"]
    owners = [key for key in registry.names() if name in registry.get(key).settings()]
    method = sampler.partition("(")[0].strip() if isinstance(sampler, str) else getattr(sampler, "name", None)
    if isinstance(method, str) and method in registry and owners and method not in owners:
        settings = ", ".join(registry.get(method).settings()) or "none"
        return f"settings of sampler {method!r}: {settings}; {name!r} is a setting of {', '.join(owners)}"
    for key in (method, default_sampler, name, *owners):  # a sampler called like the setting comes before other owners
        if key in owners:
            return f"it is a setting of a sampler: sampler=paradec.samplers.create({key!r}, {name}=...)"
    return None

"""Argument checks that name the argument, the value and what is allowed."""

from __future__ import annotations

import difflib
import importlib.util
import math
import numbers
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

MAX_LISTED = 24
"""Messages list up to this number of names. Of more names, they list the nearest ones, or all if none is near."""
NUM_NEAREST = 3
MODELS: Mapping[str, tuple[str, str]] = {
    "text": ("a language model (paradec.load, paradec.wrap)", "paradec.generate"),
    "canvas": ("a model of canvases of noise (DiffusionGemma)", "paradec.generate, sampler='diffusion_gemma'"),
    "codes": ("a masked transformer of codes", "paradec.generate"),
    "image": ("an autoregressive image model", "paradec.generate_images"),
    "masked image": ("a masked image model", "paradec.generate_images"),
    "grouped image": ("an LPD model", "paradec.generate_images"),
    "continuous image": ("a MAR model", "paradec.generate_images"),
    "neighbour image": ("a NAR model", "paradec.generate_images"),
    "distilled image": ("a distilled student", "paradec.generate_images"),
    "scale image": ("a VAR model", "paradec.generate_images"),
    "latent": ("a diffusion transformer (paradec.models.images.diffusion)", "a sampler of the forecast family"),
    "drafts": ("a drafter (paradec.load_drafter)", "the setting drafter of a sampler"),
}
"""Kinds of model (`model.makes`): their description and entry point. A callable with `facts` but without `makes` is a
language model."""


def check_model(user: str, model: Any, allowed: Sequence[str]) -> None:
    """Raise TypeError unless `model` is of a kind in `allowed` (keys of `MODELS`). The model's `check_use(user)`, if it
    has one, may raise too. user: the function or object that uses the model, for messages."""
    kind = None if isinstance(model, type) else getattr(model, "makes", None)
    if kind is None and not isinstance(model, type) and callable(model) and hasattr(model, "facts"):
        kind = "text"
    if kind in allowed:
        if hasattr(model, "check_use"):
            model.check_use(user)
        return
    kinds = [MODELS[name][0] if name in MODELS else f"a model that makes {name!r}" for name in allowed]
    raise wrong_model_error(user, model, " or ".join([", ".join(kinds[:-1]), kinds[-1]] if len(kinds) > 1 else kinds))


def wrong_model_error(user: str, model: Any, expected: str) -> TypeError:
    """Make the error for a `model` that `user` does not accept. expected: accepted models, in words."""
    kind = None if isinstance(model, type) else getattr(model, "makes", None)
    if isinstance(kind, str) and kind in MODELS:
        name = getattr(getattr(model, "facts", None), "name", type(model).__name__)
        description, entry_point = MODELS[kind]
        return TypeError(f"{user} takes {expected}; {name} is {description}: give it to {entry_point}")
    if hasattr(model, "scheduler") and callable(model):
        way = "call the pipeline itself, accelerated by paradec.accelerate(pipe, ...)"
        return TypeError(f"{user} takes {expected}, not a {type(model).__name__}; {way}")
    is_simple = model is None or isinstance(model, (str, int, float, type))
    return TypeError(f"{user} takes {expected}, not {short_repr(model) if is_simple else f'a {type(model).__name__}'}")


def short_repr(value: Any) -> str:
    """Represent a value in one line of at most 80 characters."""
    try:
        text = " ".join(repr(value).split())
    except (RecursionError, ValueError):  # nested too deeply, or an integer with more digits than Python prints
        text = f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= 80 else text[:77] + "..."


def plain_name(name: str) -> str:
    """A name in lower case without spaces, "_", "-" and ".", for comparisons."""
    return re.sub(r"[\s_.-]", "", name.lower())


def unknown_name(
    kind: str, name: object, allowed: Any, listing: str = "", other_names: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Write the message for a `name` that is not in `allowed`, with the closest names.

    listing: the call that lists all names. other_names: names in `allowed` by other names, spelled as `plain_name`."""
    names = sorted(allowed)
    text, quoted = str(name)[:80], short_repr(name)
    by_plain_name = {**other_names, **{plain_name(known): known for known in names}}
    exact_match = by_plain_name.get(plain_name(text))
    is_short = len(names) <= (NUM_NEAREST if listing else MAX_LISTED)
    nearest = difflib.get_close_matches(text, names, n=1 if is_short else NUM_NEAREST)
    nearest = nearest if exact_match is None else [exact_match]
    hint = f" (did you mean {' or '.join(map(repr, nearest))}?)" if nearest else ""
    if listing and not is_short:
        return f"unknown {kind}: {quoted}{hint}; {listing} lists all"
    if nearest and not is_short:
        return f"unknown {kind}: {quoted}{hint}"
    return f"unknown {kind}: {quoted}{hint}; allowed: {', '.join(names) or 'none'}"


def format_count(number: int, noun: str) -> str:
    """Format a count: "1 token", "2 tokens"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def throughput_unit(rows: int) -> str:
    """Name the unit of throughput: "tokens per forward", or "tokens per row call" for several rows."""
    return f"tokens per {'forward' if rows == 1 else 'row call'}"


LARGEST_INT = 2**31 - 1
"""Default bound of integers: sums and products of a few such integers fit into int64."""
LARGEST_INT64 = 2**63 - 1


def check_int(name: str, value: Any, low: int = -LARGEST_INT, high: int = LARGEST_INT, none: bool = False) -> None:
    """Raise ValueError unless `value` is an integer (no bool) in [low, high], or None if `none`."""
    if value is None and none:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not low <= int(value) <= high:
        raise ValueError(f"{name}={short_repr(value)} must be an integer from {low} to {high}")


def check_bytes(name: str, value: Any, low: int = 1) -> int | None:
    """Read a number of bytes from an int or a text: "2GB" (2 * 10^9), "512MiB" (512 * 2^20). None stays None."""
    units = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d+)?)\s*([KMG]i?B|)\s*", value, re.IGNORECASE)
        if match is None:
            raise ValueError(f'{name}={short_repr(value)} must be bytes, as a number or as text: "2GB", "512MiB"')
        value = int(float(match[1]) * units[match[2].upper()])
    check_int(name, value, low=low, high=LARGEST_INT64, none=True)
    return None if value is None else int(value)


def check_at_most(name: str, value: float, bound_name: str, bound: float) -> None:
    """Raise ValueError unless the setting `name` is at most the setting `bound_name`."""
    if value > bound:
        raise ValueError(f"{name}={short_repr(value)} must be at most {bound_name}={short_repr(bound)}")


def check_number(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, none: bool = False, open_low: bool = False
) -> None:
    """Raise ValueError unless `value` is a finite number in [low, high] (`open_low`: above low), or None if `none`."""
    if value is None and none:
        return
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and is_finite(value)
    if not is_number or not low <= float(value) <= high or (open_low and float(value) == low):
        raise ValueError(f"{name}={short_repr(value)} must be a number in {'(' if open_low else '['}{low:g}, {high:g}]")


def check_temperature(name: str, value: Any, none: bool = False) -> None:
    """Raise ValueError unless `value` is 0 (off) or in [1e-6, 1e6], where scaled logits stay in float32's range."""
    check_number(name, value, low=0, high=1e6, none=none)
    if value is not None and 0 < value < 1e-6:
        raise ValueError(f"{name}={short_repr(value)} must be 0 or a number in [1e-06, 1e+06]")


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise ValueError unless `value` is one of `allowed`."""
    choices = list(allowed)
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        message = f"{name}={short_repr(value)} must be one of {', '.join(map(repr, choices))}"
        raise ValueError(unknown_name(name, value, choices) if isinstance(value, str) else message)


def check_names(kind: str, names: Iterable[object], allowed: Collection[str]) -> None:
    """Raise ValueError for a name that is not in `allowed`. kind: noun for the names in the message."""
    for name in names:
        if name not in allowed:
            raise ValueError(unknown_name(kind, name, allowed))


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={short_repr(value)} must be True or False")


def check_divides(name: str, value: int, other: str, size: int) -> None:
    """Raise ValueError unless `value`, the setting `name`, divides `size`, the setting `other`."""
    if size % value:
        raise ValueError(f"{name}={value} must divide {other}={size}")


def check_type(name: str, value: Any, cls: type, reason: str = "") -> None:
    """Raise TypeError unless `value` is an instance of a class; `reason` ends the message."""
    if not isinstance(value, cls):
        raise TypeError(f"{name} must be a {cls.__name__}, not {type(value).__name__}{reason}")


def check_text(name: str, text: str) -> None:
    """Raise ValueError for text with surrogates, by which Python represents bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}={short_repr(text)} is not UTF-8 text") from None


def is_finite(value: Any) -> bool:
    """Whether a real number is finite and, if an integer, fits into int64."""
    if isinstance(value, numbers.Integral):
        return -(2**63) <= int(value) < 2**63
    return math.isfinite(value)


def check_packages(user: str, extra: str, names: Iterable[str]) -> None:
    """Raise ImportError for missing packages in `names`, with the command that installs paradec's `extra`."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        install = f"install paradec's extra {extra!r}, e.g. pip install -e '.[{extra}]'"
        raise ImportError(f"{user} needs {', '.join(missing)}: {install}")

"""adapter_config.json of a LoRA adapter in peft's format: every field checked, and what they say of each matrix.

peft matches the names of matrices with regular expressions of the config, by Python's `re`, whose time nothing bounds.
Here they are matched by `regex`, which stops when its time is over.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

from paradec.core.checks import is_finite, shown
from paradec.models.checkpoint import CheckpointError, fetch, read_json

CONFIG = "adapter_config.json"
ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    "fan_in_fan_out": (False, None),
    "layer_replication": (None, []),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Fields of adapter_config.json that change what is computed, and the values that are a plain product of two matrices.
(Other initialisations change the base's weights too.)"""
ALL = "all-linear"
"""What `target_modules` may say in place of names."""
LONGEST = 4096
"""Characters of a pattern."""
LARGEST = 1000
"""Product of a pattern's counts ("{2,5}" counts 5): `regex` writes repeated parts out."""
UNLIKE = re.compile(r"\{(?!\d+,?\d*\}|,\d+\})|\[\^?\[|\[:|--|&&|~~|\|\|")
"""What `regex` and `re` read differently: fuzzy matches, and sets of sets."""
SECONDS = 2.0
"""Processor time for the patterns of one config: those in use take milliseconds for a thousand names."""
ENDING = r"(.*\.)?({})$"
"""peft's frame of a pattern for how names end."""
LAYER = re.compile(r".*?\.[^.]*\.(?P<idx>\d+)\.")
"""Where the number of a layer is, unless `layers_pattern` says it."""
BEFORE_LAYER = r"(?:^|.*?\.){}\.(?P<idx>\d+)\."


class Product(NamedTuple):
    """What a config says of one matrix: the rank of its product, and what the product is multiplied with."""

    rank: int
    scale: float


@dataclass(frozen=True)
class Pattern:
    """A regular expression of a config, and the `field` that it is from."""

    source: str
    field: str
    text: str
    tried: Callable[..., Any]

    def match(self, name: str, end: float) -> Any:
        """The match or None, while the process has used less than `end` seconds of the processor.

        Raises:
            CheckpointError: it takes longer.
        """
        left = end - time.process_time()
        try:
            if left > 0:
                return self.tried(name, timeout=left)
        except TimeoutError:
            pass
        raise _wrong(
            self.source, self.field, self.text, f"a pattern that is matched in {SECONDS:g} s; give a list of names"
        )


@dataclass(frozen=True)
class AdapterConfig:
    """What is read of an adapter_config.json.

    Args:
        source: the folder or hub repository. rank, alpha: of all matrices but those of `ranks` and `alphas`.
        rslora: whether alpha is divided by the root of the rank.
        targets: the adapted matrices, by a pattern of whole names or by how names end; None: all that there are.
        excluded: what is none of them. layers: the only layers that are adapted, or None; `places`: patterns of what
            comes before their numbers.
    """

    source: str
    rank: int
    alpha: float
    rslora: bool
    targets: Pattern | frozenset[str] | None
    excluded: Pattern | frozenset[str]
    layers: frozenset[int] | None
    places: tuple[Pattern, ...]
    ranks: tuple[tuple[Pattern, int], ...]
    alphas: tuple[tuple[Pattern, float], ...]

    def products(self, names: Iterable[str]) -> dict[str, Product]:
        """Those of the matrices `names` that are adapted, as peft chooses them.

        Raises:
            CheckpointError: patterns that take too long.
        """
        end = time.process_time() + SECONDS
        found = {}
        for name in names:
            if self._adapts(name, end):
                rank = next((value for key, value in self.ranks if key.match(name, end)), self.rank)
                alpha = next((value for key, value in self.alphas if key.match(name, end)), self.alpha)
                found[name] = Product(rank, alpha / (math.sqrt(rank) if self.rslora else rank))
        return found

    def _adapts(self, name: str, end: float) -> bool:
        if _named(self.excluded, name, end) or (self.targets is not None and not _named(self.targets, name, end)):
            return False
        whole = isinstance(self.targets, frozenset) and name in self.targets  # which needs no layer
        if self.layers is None or whole:
            return True
        tried = (place.match(name, end) for place in self.places) if self.places else iter([LAYER.match(name)])
        place = next((one for one in tried if one), None)
        index = None if place is None else place.groupdict().get("idx")
        return index is not None and int(index) in self.layers


def read_config(source: str, revision: str | None = None, inside: str = "") -> AdapterConfig:
    """Read an adapter_config.json.

    Args:
        inside: the folder of the source that it is in.

    Raises:
        CheckpointError: none there, a field of a wrong type or out of its range, an adapter that is more than a product
            of two matrices, or a pattern that cannot be matched in bounded time.
    """
    file = os.path.join(inside, CONFIG)
    if fetch(source, file, revision) is None:
        raise CheckpointError(f"adapter={source!r} has no {CONFIG}")
    config = read_json(source, file, revision)
    for name, allowed in ONLY.items():
        value = config.get(name, allowed[0])
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            raise CheckpointError(
                f"{CONFIG} of {source!r}: {name}={shown(value)} is not supported; supported: "
                f"{', '.join(map(repr, allowed))}. Merge it with peft (merge_and_unload) and load what that saves"
            )
    rslora = config.get("use_rslora")
    if rslora is not None and not isinstance(rslora, bool):
        raise _wrong(source, "use_rslora", rslora, "true or false")
    end = time.process_time() + SECONDS
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets.lower() == ALL:
        targets = None
    by_pattern = isinstance(config.get("target_modules"), str)
    layers, places = config.get("layers_to_transform"), _texts(source, config, "layers_pattern")
    listed = layers if isinstance(layers, list) else [] if layers is None else [layers]
    if not all(type(index) is int for index in listed):
        raise _wrong(source, "layers_to_transform", layers, "an integer or a list of integers")
    for field in ("layers_to_transform", "layers_pattern"):
        if by_pattern and config.get(field) is not None:
            raise _wrong(source, field, config[field], "left out where target_modules is a text, as in peft")
    if places and layers is None:
        raise _wrong(source, "layers_pattern", config["layers_pattern"], "left out without layers_to_transform")
    return AdapterConfig(
        source=source,
        rank=_positive(source, "r", config.get("r"), int),
        alpha=_positive(source, "lora_alpha", config.get("lora_alpha"), float),
        rslora=bool(rslora),
        targets=None if targets is None else _chosen(source, config, "target_modules", end),
        excluded=_chosen(source, config, "exclude_modules", end),
        layers=frozenset(listed) or None,
        places=tuple(_pattern(source, "layers_pattern", text, end, BEFORE_LAYER, whole=False) for text in places),
        ranks=_by_pattern(source, config, "rank_pattern", int, end),
        alphas=_by_pattern(source, config, "alpha_pattern", float, end),
    )


def _wrong(source: str, field: str, value: Any, allowed: str) -> CheckpointError:
    return CheckpointError(f"{CONFIG} of {source!r}: {field}={shown(value)} must be {allowed}")


def _positive(source: str, field: str, value: Any, kind: type) -> Any:
    kinds = int if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not is_finite(value) or value <= 0:
        raise _wrong(source, field, value, f"{'an integer' if kind is int else 'a number'} above 0")
    return kind(value)


def _texts(source: str, config: Mapping[str, Any], field: str) -> list[str]:
    """A list of texts; a text alone is one of them, null is none."""
    value = config.get(field)
    texts = value if isinstance(value, list) else [value] if value else []
    if not all(isinstance(text, str) and text for text in texts) or not isinstance(value, (list, str, type(None))):
        raise _wrong(source, field, value, "a text or a list of texts")
    return texts


def _chosen(source: str, config: Mapping[str, Any], field: str, end: float) -> Pattern | frozenset[str]:
    """Matrices by a pattern of whole names, or by how names end."""
    value = config.get(field)
    texts = _texts(source, config, field)
    if not texts and field == "target_modules":
        raise _wrong(source, field, value, f"names of matrices, a pattern of names or {ALL!r}")
    return _pattern(source, field, value, end) if isinstance(value, str) and value else frozenset(texts)


def _by_pattern(
    source: str, config: Mapping[str, Any], field: str, kind: type, end: float
) -> tuple[tuple[Pattern, Any], ...]:
    """Patterns of how names end, and a number for each, in the file's order."""
    value = config.get(field)
    if value is not None and not isinstance(value, dict):
        raise _wrong(source, field, value, "an object of patterns and numbers")
    return tuple(
        (_pattern(source, field, text, end, ENDING), _positive(source, f"{field}[{shown(text)}]", number, kind))
        for text, number in (value or {}).items()
    )


def _pattern(source: str, field: str, text: str, end: float, frame: str = "{}", whole: bool = True) -> Pattern:
    """A pattern, in a frame that has {} for it, of whole names or of how they begin.

    Raises:
        CheckpointError: no regular expression, one that `regex` may read in another way, or one that is too large.
    """
    counts = [int(most or least or 0) for least, most in re.findall(r"\{(\d*),?(\d*)\}", text[:LONGEST])]
    if len(text) > LONGEST or math.prod(max(count, 1) for count in counts) > LARGEST or UNLIKE.search(text):
        allowed = f"of at most {LONGEST} characters, whose counts multiply to at most {LARGEST}, without sets in sets"
        raise _wrong(source, field, text, f"a pattern {allowed}; give a list of names")
    if time.process_time() > end:
        raise _wrong(source, field, text, f"among patterns that are read in {SECONDS:g} s")
    framed = frame.replace("{}", text)
    try:
        re.compile(framed)
        compiled = regex.compile(framed, regex.V0)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise _wrong(source, field, text, f"a regular expression: {error}") from None
    return Pattern(source, field, text, compiled.fullmatch if whole else compiled.match)


def _named(chosen: Pattern | frozenset[str], name: str, end: float) -> bool:
    """Whether a pattern or a list of names means a matrix."""
    if isinstance(chosen, Pattern):
        return chosen.match(name, end) is not None
    return name in chosen or any(name.endswith(f".{ending}") for ending in chosen)

"""Search space: samplers with their settings, caches that work with them, and block lengths.

The varied settings of a sampler are those in its `sweep`; they trade quality for speed. The range of a number covers
the default, presets and `sweep`, and is extended at both ends if the sampler accepts that. The first trials are the
hand-made settings: defaults and entries of `sweep`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paradec import caches, samplers
from paradec.caches.table import REFUSED, verdict
from paradec.core.checks import check_int
from paradec.core.registry import is_composed, to_data
from paradec.request import Request
from paradec.samplers.masked.start import choose_policy
from paradec.tools.evaluation.configuration import BASELINE, COMBINATIONS, Configuration

REFERENCE = "low_confidence"
"""LLaDA's sampler: one token per step, the most confident first."""
MIN_LOG_RATIO = 8
"""The scale of a number is logarithmic if the upper end of its range is at least this multiple of the lower end."""
BLOCKS = (16, 32, 64)
"""Block lengths for models without a default length."""


@dataclass(frozen=True)
class NumberDomain:
    """Domain of the numbers from `low` to `high`, rounded to three digits. whole: only integers. log: logarithmic."""

    low: float
    high: float
    whole: bool = False
    log: bool = False

    def suggest(self, trial: Any, name: str) -> float:
        """Let Optuna propose a value."""
        if self.whole:
            return int(trial.suggest_int(name, int(self.low), int(self.high), log=self.log))
        return min(self.high, max(self.low, round_digits(trial.suggest_float(name, self.low, self.high, log=self.log))))

    def to_data(self) -> list[Any]:
        return ["whole" if self.whole else "number", self.low, self.high, "log" if self.log else "even"]


@dataclass(frozen=True)
class ValueDomain:
    """Domain of a few values."""

    values: tuple[Any, ...]

    def suggest(self, trial: Any, name: str) -> Any:
        """Let Optuna propose a value. Optuna stores values as JSON text."""
        return json.loads(trial.suggest_categorical(name, [json.dumps(to_data(value)) for value in self.values]))

    def to_data(self) -> list[Any]:
        return ["one of", *(to_data(value) for value in self.values)]


@dataclass(frozen=True)
class Candidate:
    """One point of the space."""

    sampler: str
    """A registered name, or a combination as text."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the defaults. `steps` is a share of the undecided positions."""
    cache: str = "none"
    block_length: int | None = None
    """None is the default of the model or the sampler."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "changes", dict(sorted(self.changes.items())))

    @property
    def configuration(self) -> Configuration:
        return Configuration(self.sampler, self.changes)

    @property
    def name(self) -> str:
        """All settings as text in one line."""
        parts = [] if self.cache == "none" else [f"cache {self.cache}"]
        parts += [] if self.block_length is None else [f"blocks of {self.block_length}"]
        return ", ".join([self.configuration.name, *parts])

    def to_data(self) -> dict[str, Any]:
        changes = {name: to_data(value) for name, value in self.changes.items()}
        return {"sampler": self.sampler, "changes": changes, "cache": self.cache, "block_length": self.block_length}


@dataclass
class Space:
    """The search space: all settings that a trial may have."""

    settings: dict[str, dict[str, NumberDomain | ValueDomain]]
    """By sampler: the domains of its varied settings. "steps" is a share of the undecided positions."""
    starts: list[Candidate]
    """Hand-made settings, the first trials: those of the baseline, then the others by estimated cost."""
    caches: dict[str, tuple[str, ...]]
    """By sampler: the caches that work with it on this model."""
    block_lengths: tuple[int | None, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    """By sampler, or sampler and cache: the reason why it does not work with the model and prompts."""

    def to_data(self) -> dict[str, Any]:
        """Convert to JSON data, without `starts` and `left_out`."""
        return {
            "samplers": {
                name: {setting: domain.to_data() for setting, domain in settings.items()}
                for name, settings in self.settings.items()
            },
            "caches": {name: list(allowed) for name, allowed in self.caches.items()},
            "block_lengths": list(self.block_lengths),
        }

    def suggest(self, trial: Any) -> Candidate:
        """Build the candidate that Optuna proposes in a trial. Optuna gets no parameters that have only one value."""
        names = list(self.settings)
        sampler = names[0] if len(names) == 1 else trial.suggest_categorical("sampler", names)
        values = {
            setting: domain.suggest(trial, f"{sampler}.{setting}") for setting, domain in self.settings[sampler].items()
        }
        default = self.defaults(sampler)
        changes = {setting: value for setting, value in values.items() if value != to_data(default[setting])}
        cache, length = self.caches[sampler][0], self.block_lengths[0]
        if len(self.caches[sampler]) > 1:
            cache = trial.suggest_categorical(self._cache_name(sampler), list(self.caches[sampler]))
        if len(self.block_lengths) > 1:
            length = trial.suggest_categorical("block_length", list(self.block_lengths))
        return Candidate(sampler, changes, cache, length)

    def params(self, candidate: Candidate) -> dict[str, Any]:
        """Convert a candidate to Optuna's parameters: the inverse of `suggest`."""
        sampler = candidate.sampler
        values: dict[str, Any] = {} if len(self.settings) == 1 else {"sampler": sampler}
        default = self.defaults(sampler)
        for setting, domain in self.settings[sampler].items():
            value = candidate.changes.get(setting, default[setting])
            values[f"{sampler}.{setting}"] = json.dumps(to_data(value)) if isinstance(domain, ValueDomain) else value
        if len(self.caches[sampler]) > 1:
            values[self._cache_name(sampler)] = candidate.cache
        if len(self.block_lengths) > 1:
            values["block_length"] = candidate.block_length
        return values

    def _cache_name(self, sampler: str) -> str:
        """Return the name of the cache parameter. Samplers with equal caches share it, so Optuna learns from all."""
        return "cache: " + ", ".join(self.caches[sampler])

    @staticmethod
    def defaults(sampler: str) -> dict[str, Any]:
        """Return a sampler's default settings, and "steps": 1.0 (one step per position)."""
        settings = samplers.get(sampler).settings() if sampler in samplers.registry else {}
        return {**settings, "steps": 1.0}


def build_space(
    model: Any,
    prompts: Any,
    base: Mapping[str, Any],
    names: Iterable[str] | None,
    cache_names: Sequence[str],
    block_lengths: Sequence[int | None],
) -> Space:
    """Build the space of a model and its prompts.

    prompts: encoded prompts, with which each sampler is started as a check.
    base: arguments that all requests share.
    names: samplers, and combinations as text; None is all masked samplers and `COMBINATIONS` that work.
    Raises ValueError: an unknown name, a sampler of another family, a sampler in `names` that does not work with the
    model and prompts, or no sampler that works."""
    masked_names = [name for name in samplers.names() if samplers.get(name).family == "masked"]
    selected = [*masked_names, *COMBINATIONS] if names is None else list(dict.fromkeys(names))
    for length in block_lengths:
        check_int("blocks", length, low=1, none=True)
    space = Space({}, [], {}, tuple(block_lengths))
    for name in selected:
        is_combination = name not in samplers.registry and is_composed(name)
        cls = None if is_combination else samplers.get(name)
        if cls is not None and cls.family != "masked":
            raise ValueError(f"sampler {name!r} is of family {cls.family!r}; tune takes the 'masked' family")
        method = Configuration(name).make()
        try:
            _start(model, prompts, Request(**{**base, "sampler": method}))
        except ValueError as error:
            if names is not None:
                raise
            space.left_out[name] = str(error)
            continue
        allowed = _find_caches(space, model, prompts, base, name, method, cache_names)
        if not allowed:
            continue
        space.caches[name] = allowed
        space.settings[name] = {} if cls is None else domains(cls)
        sweep = () if cls is None else cls.sweep
        # the default of samplers with a schedule is one token per step, as slow as the reference: leave it out
        has_schedule = "steps" in space.settings[name]
        by_hand = [*([] if has_schedule and name != BASELINE else [{}]), *sweep]
        space.starts += [Candidate(name, changes, allowed[0], block_lengths[0]) for changes in by_hand]
    if not space.settings:
        why = "; ".join(f"{name}: {reason}" for name, reason in space.left_out.items())
        raise ValueError(f"no sampler works with {model.facts.name} and these prompts: {why}")
    # the baseline is first; the others are ordered by cost
    space.starts.sort(key=lambda start: (start.sampler != BASELINE, _expected_share(start)))
    return space


def _find_caches(
    space: Space, model: Any, prompts: Any, base: Mapping[str, Any], name: str, method: Any, names: Sequence[str]
) -> tuple[str, ...]:
    """Return the caches that work with a sampler; record the others in `space.left_out`."""
    allowed = []
    for cache_name in names:
        cache = caches.create(cache_name)
        cache_verdict = verdict(method, cache, model.facts, model.supports_store)
        why = cache_verdict.why if cache_verdict.status == REFUSED else ""
        if not why and cache.facts.uses_store:
            try:
                _start(model, prompts, Request(**{**base, "sampler": method, "cache": cache}))
            except ValueError as error:
                why = str(error)
        if why:
            space.left_out[f"{name} with {cache_name}"] = why
        else:
            allowed.append(cache_name)
    return tuple(allowed)


def _start(model: Any, prompts: Any, request: Any) -> None:
    """Check that a sampler starts, without decoding. Raises the errors of the sampler's `start`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings are advice for users of one setting
        with request.sampler.start(model, prompts, request).release_stores_on_exit():
            pass


def _expected_share(start: Candidate) -> float:
    """Estimate the number of forwards with a hand-made setting, as a share of the positions."""
    share = start.changes.get("steps")
    if share is not None:
        return float(share)
    return 1.0 if start.configuration.make().uses_steps else 0.1


def domains(cls: type[Any]) -> dict[str, NumberDomain | ValueDomain]:
    """Build the domains of the settings that a sampler's `sweep` changes."""
    default = Space.defaults(cls.name)
    values_of: dict[str, list[Any]] = {}
    for changes in cls.sweep:
        for setting, value in changes.items():
            values_of.setdefault(setting, [default[setting]]).append(value)
    for preset in getattr(cls, "presets", {}).values():
        for setting, value in preset.items():
            if setting in values_of:
                values_of[setting].append(value)
    return {setting: _build_domain(cls, setting, values) for setting, values in values_of.items()}


def _build_domain(cls: type[Any], setting: str, values: list[Any]) -> NumberDomain | ValueDomain:
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(numbers) < len([value for value in values if value is not None]) or len(set(numbers)) < 2:
        return ValueDomain(tuple({json.dumps(to_data(value), sort_keys=True): value for value in values}.values()))
    is_integer = all(isinstance(value, int) for value in numbers)
    low, high = min(numbers), max(numbers)
    log = low > 0 and high >= MIN_LOG_RATIO * low
    if setting == "steps":  # a share of the positions
        return NumberDomain(low / 2, 1.0, log=True)
    below, above = (low / 2, high * 2) if log else (low - (high - low) / 4, high + (high - low) / 4)
    if is_integer:
        below, above = min(low - 1, round(below)), max(high + 1, round(above))
    low = below if _accepts(cls, setting, below) else low
    high = above if _accepts(cls, setting, above) else high
    low, high = (int(low), int(high)) if is_integer else (round_digits(low), round_digits(high))
    return NumberDomain(low, high, is_integer, log and low > 0)


def _accepts(cls: type[Any], setting: str, value: float) -> bool:
    try:
        cls(**{setting: value})
    except ValueError:
        return False
    return True


def round_digits(value: float) -> float:
    """Round to three significant digits."""
    return float(f"{value:.3g}")


def default_block_lengths(model: Any, positions: int) -> tuple[int | None, ...]:
    """List block lengths to try: the model's default (None), half of it, twice it, and all positions; without a
    default, None and `BLOCKS`. For models that were trained with blocks, only None."""
    if model.facts.topology in ("block_causal", "causal_context"):
        return (None,)
    model_length = model.default_block_length
    lengths = BLOCKS if model_length is None else (model_length // 2, model_length * 2, positions)
    return (None, *(length for length in dict.fromkeys(lengths) if 1 < length <= positions and length != model_length))


def build_request(
    model: Any,
    candidate: Candidate,
    base: Mapping[str, Any],
    positions: int,
    answer_spans: Sequence[tuple[int, int]],
    holes: bool = False,
) -> Request:
    """Build the request of a candidate.

    positions: mean number of undecided positions per row.
    answer_spans: start and end of each row's answer. The number of steps is for the row with the most blocks.
    holes: whether prompts have masks.
    Raises ValueError: settings that do not work together."""
    configuration = candidate.configuration
    method = configuration.make()
    steps: dict[str, Any] = {}
    if "steps" in candidate.changes:
        policy = choose_policy(method, model, None, candidate.block_length, holes)
        blocks = max(policy.count(*span) or 1 for span in answer_spans)
        steps = configuration.request(positions, blocks)
    cache = None if candidate.cache == "none" else candidate.cache
    return Request(**{**base, "sampler": method, "cache": cache, "block_length": candidate.block_length, **steps})


def is_reference(request: Request, positions: int) -> bool:
    """Whether a request is the reference: one token per step in default blocks, without a cache."""
    method: Any = request.sampler
    return (
        method.name == REFERENCE
        and (request.steps is None or request.steps >= positions)
        and request.cache is None
        and request.block_length is None
    )

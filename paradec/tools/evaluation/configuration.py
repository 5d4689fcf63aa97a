"""Configurations of a comparison: a sampler with its defaults, or with changed settings."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paradec import samplers
from paradec.core.protocol import Sampler
from paradec.core.registry import is_composed, to_data
from paradec.request import Request

BASELINE = "threshold"
"""The sampler whose defaults are the baseline: confidence 0.9."""
STAGED = "union(rules=['localleap'], stages=['credit'])"
"""The logits stage of `credit`, followed by the rule of `localleap`."""
COMBINATIONS = ("credit+localleap", STAGED, "factor+localleap", "klass+persistence")
"""Combinations that are compared with the registered samplers: of a dozen, the three fastest ones and the most
accurate one on the packaged prompts."""


@dataclass(frozen=True)
class Configuration:
    """A sampler with changed settings, or with its defaults if `changes` is empty.

    `sampler` is a registered name or a combination, with or without settings ("credit+localleap", `STAGED`). `changes`
    are settings of the sampler and fields of the request, as in an entry of its `sweep`. `steps` may be a float: the
    number of steps as a share of the undecided positions.
    """

    sampler: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The sampler's name, with its changes in parentheses."""
        return f"{self.sampler}({self.setting})" if self.changes else self.sampler

    @property
    def setting(self) -> str:
        """The changes as text; "default" without changes."""
        return ", ".join(f"{name}={to_data(value)}" for name, value in self.changes.items()) or "default"

    def make(self) -> Sampler:
        """Create the sampler. Raises ValueError: the sampler or a setting is unknown, or a value out of its range."""
        settings = self._sampler_settings()
        return samplers.create(self.sampler, **{k: v for k, v in self.changes.items() if k in settings})

    def _sampler_settings(self) -> Collection[str]:
        return samplers.get(self.sampler).settings() if self.sampler in samplers.registry else ()

    def request(self, positions: int, blocks: int = 1) -> dict[str, Any]:
        """Build arguments for `generate`, for an answer with `positions` undecided positions in `blocks` blocks."""
        settings = self._sampler_settings()
        fields = {name: value for name, value in self.changes.items() if name not in settings}
        if isinstance(fields.get("steps"), float):
            fields["steps"] = max(1, round(fields["steps"] * positions / blocks)) * blocks
        return fields


def configurations(
    names: str | Iterable[str | Configuration] | None = None, defaults: bool = False
) -> list[Configuration]:
    """List the baseline, and each sampler with its defaults and with each entry of its `sweep`.

    names: names of samplers or combinations, and `Configuration`s; None is all masked samplers and `COMBINATIONS`.
    defaults: whether to leave out the entries of `sweep`.
    Raises ValueError: an unknown sampler, a sampler of another family, or a `sweep` with an unknown name."""
    if names is None:
        names = [name for name in samplers.names() if samplers.get(name).family == "masked"]
        names += COMBINATIONS
    entries = [names] if isinstance(names, str) else list(names)
    ready = [entry for entry in entries if isinstance(entry, Configuration)]
    sampler_names = dict.fromkeys(entry for entry in entries if not isinstance(entry, Configuration))
    candidates = [Configuration(BASELINE)]
    for name in sorted(sampler_names, key=lambda name: name != BASELINE):
        sweep: tuple[Mapping[str, Any], ...] = ()
        if name in samplers.registry or not is_composed(name):
            cls = samplers.get(name)
            if cls.family != "masked":
                raise ValueError(f"sampler {name!r} is of family {cls.family!r}; compare takes the 'masked' family")
            sweep = () if defaults else cls.sweep
        candidates += [Configuration(name, changes) for changes in ({}, *sweep)]
    result: list[Configuration] = []
    for configuration in (*candidates, *ready):
        configuration.make()
        Request(**configuration.request(1))
        if configuration not in result:
            result.append(configuration)
    return result

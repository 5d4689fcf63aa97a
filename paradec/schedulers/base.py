"""Base of the schedulers: a sampler whose settings are a diffusers config, and which steps when the pipeline calls."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import FrozenDict, register_to_config
from torch import Tensor

from paradec import samplers
from paradec.core.checks import check_choice, short_repr
from paradec.core.facts import ModelFacts
from paradec.core.query import Query, take_columns
from paradec.core.registry import to_data
from paradec.samplers.masked.loop import MaskedSampler
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import MaskedProposal

MODULE = "paradec.schedulers"
"""Module of every scheduler class, as pipelines write it into `model_index.json`."""


class PipelineModel:
    """Stand-in for the samplers' model: it returns the pipeline's logits, stored in `logits` [B, L, V]."""

    tokenizer = None
    kind = "host"
    pads = True
    supports_store = False
    supports_visibility = False
    default_max_new_tokens = 0
    default_block_length = None

    def __init__(self, facts: ModelFacts, device: torch.device):
        self.facts = facts
        self.device = device
        self.logits = torch.empty(0)

    def __call__(self, query: Query) -> Tensor:
        """Return a copy of the logits [R, W, V] at the query's R rows and W wanted columns."""
        rows = self.logits[torch.as_tensor(query.rows, device=self.logits.device)]
        return rows if query.wanted is None else take_columns(rows, query.wanted)


class SamplerScheduler(SchedulerMixin, ConfigMixin):
    """Base of the schedulers. A subclass `class X(Base, sampler="localleap")` has as config keys the sampler's settings
    and `family_settings`. Raises ValueError for an unknown key or a setting out of its range."""

    order = 1
    sampler_name: ClassVar[str]
    family_settings: ClassVar[Mapping[str, Any]] = {}
    """Config keys that are not settings of the sampler, with their defaults."""
    renamed_keys: ClassVar[Mapping[str, str]] = {}
    """By key of other schedulers' configs, the key with the same meaning in this class."""
    pipelines: ClassVar[str] = ""
    """Names of the supported pipelines, for messages."""
    run: object | None = None
    """A new object for each run, which identifies the run."""
    thread: int | None = None
    """Id of the thread of the current run."""
    _model: PipelineModel
    """The sampler's model; set while `_state` is."""

    def __init_subclass__(cls, sampler: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__module__ = MODULE
        if sampler is not None:
            cls.sampler_name = sampler
            cls.__init__ = _make_init({**cls.family_settings, **cls.sampler_settings()})  # type: ignore

    def _setup(self) -> None:
        """Initialise the attributes from the registered config."""
        self.timesteps: Tensor = torch.arange(0)
        self._state: MaskedState | None = None
        self._rows = torch.arange(0)
        """[R] int64: rows of the pipeline's batch that the state decodes."""
        self._last_tokens: Tensor | None = None
        """The tokens that the last step returned."""
        self._warned_arguments: set[str] = set()
        self.sampler = self.make_sampler()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for copies and pickles, without the run."""
        return {name: value for name, value in vars(self).items() if name not in ("run", "thread")}

    def _start_run(self) -> None:
        """Begin a run in this thread."""
        self.run, self.thread = object(), threading.get_ident()

    def _check_thread(self) -> None:
        """Raise RuntimeError if the current run belongs to another thread."""
        if self.thread not in (None, threading.get_ident()):
            raise RuntimeError(
                f"{type(self).__name__} has a run in another thread, and serves one run at a time. "
                "Use a second pipeline with a second scheduler"
            )

    @classmethod
    def sampler_settings(cls) -> dict[str, Any]:
        """Return the sampler's config keys, with its defaults."""
        return samplers.get(cls.sampler_name).settings()

    def make_sampler(self) -> MaskedSampler:
        config = self.config
        return samplers.create(self.sampler_name, **{name: config[name] for name in self.sampler_settings()})

    @property
    def config(self) -> Any:
        """The config. The AttributeError for a missing key lists the supported pipelines."""
        return _Config(self._internal_dict, type(self))

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Make the scheduler from another scheduler's config; `kwargs` have precedence. Values that are defaults of the
        other scheduler are not copied, so this sampler's defaults apply. Keys that only other schedulers have stay in
        the config without effect. Raises ValueError for a key that no scheduler has."""
        keys = set(inspect.signature(cls.__init__).parameters) - {"self"}
        for name in kwargs:
            check_choice(f"config key of {cls.__name__}", name, keys)
        if not isinstance(config, Mapping):
            return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)
        known_keys = keys | _foreign_keys(config.get("_class_name"))
        for name in config:
            if not name.startswith("_") and name not in known_keys:
                check_choice(f"config key of {cls.__name__}", name, keys)
        defaults = {**cls.family_settings, **cls.sampler_settings()}
        default_names = config.get("_use_default_values", ())
        settings: dict[str, Any] = {}
        for name, value in config.items():
            key = cls.renamed_keys.get(name, name)
            # None in another scheduler's config means "off" or "as in the call": take the default instead
            if name not in default_names and key in keys and not (value is None and defaults[key] is not None):
                settings.setdefault(key, value)
        scheduler = cls(**{**settings, **kwargs})
        foreign = {k: v for k, v in config.items() if k not in keys and not k.startswith("_")}
        scheduler.register_to_config(**foreign)
        return (scheduler, foreign) if return_unused_kwargs else scheduler

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        """Raise TypeError: only pipelines of continuous latents call this method."""
        raise TypeError(f"{type(self).__name__} decodes tokens, not latents; it works in {self.pipelines}")

    def _commit(self, sampler: MaskedSampler, state: MaskedState, logits: Tensor) -> tuple[MaskedProposal, Tensor]:
        """Take a step with the logits [B, L, V]. Returns the proposal, and the batch indices [R, 1] of its rows."""
        self._model.logits = logits[self._rows]
        proposal = sampler.step(self._model, state)
        sampler.commit(state, proposal)
        self._model.logits = torch.empty(0)
        return proposal, self._rows[torch.as_tensor(proposal.rows, device=self._rows.device)].unsqueeze(1)

    def _check_tokens(self, model_output: Any, sample: Any, shape: str, ndim: int) -> None:
        """Raise ValueError unless `sample` has `ndim` dimensions of int64, and `model_output` its logits."""
        if not isinstance(sample, Tensor) or sample.dtype != torch.int64 or sample.ndim != ndim:
            actual = f"{sample.dtype} {tuple(sample.shape)}" if isinstance(sample, Tensor) else type(sample).__name__
            raise ValueError(
                f"sample is {actual}; {type(self).__name__} takes int64 token ids {shape} and works in {self.pipelines}"
            )
        logits_shape = model_output.shape if isinstance(model_output, Tensor) else ()
        positions = logits_shape[:-1] if ndim == 2 else (*logits_shape[:1], *logits_shape[2:])
        if len(logits_shape) != ndim + 1 or positions != sample.shape:
            actual = str(tuple(logits_shape)) if logits_shape else type(model_output).__name__
            raise ValueError(
                f"model_output is {actual}; {type(self).__name__} takes the logits of sample {shape}, here "
                f"{tuple(sample.shape)}"
            )

    def _warn_ignored(self, defaults: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
        """Warn once for each call argument that differs from its default and from the config: it has no effect."""
        for name, value in arguments.items():
            config_value = self.config.get(name)
            if value in (None, defaults[name]) or value == config_value or name in self._warned_arguments:
                continue
            config_text = f"its config has {name}={short_repr(config_value)}"
            self._warn_call(name, value, config_text if name in self.config else "its rule has no such setting")

    def _warn_call(self, name: str, value: Any, reason: str) -> None:
        """Warn once that a call argument has no effect."""
        self._warned_arguments.add(name)
        warnings.warn(
            f"{name}={short_repr(value)} given to the pipeline has no effect with {type(self).__name__}: {reason}; "
            f"change settings with {type(self).__name__}.from_config(pipe.scheduler.config, ...)",
            stacklevel=4,
        )


class _Config(FrozenDict):
    """A config whose error for a missing key lists the supported pipelines."""

    def __init__(self, values: Mapping[str, Any], owner: type[SamplerScheduler]):
        object.__setattr__(self, "_owner", owner)
        super().__init__(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        owner = self.__dict__["_owner"]
        raise AttributeError(f"the config of {owner.__name__} has no {name!r}: it works in {owner.pipelines}")


def _make_init(settings: Mapping[str, Any]) -> Callable[..., None]:
    """Make an `__init__` that registers these settings; diffusers reads its signature."""

    def __init__(self: SamplerScheduler, **config: Any) -> None:
        for name in config:
            check_choice(f"config key of {type(self).__name__}", name, settings)
        self._setup()

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=to_data(default))
        for name, default in settings.items()
    ]
    __init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return register_to_config(__init__)


def _foreign_keys(name: Any) -> set[str]:
    """Return the config keys of paradec's schedulers, of diffusers' discrete schedulers, and of its class `name`."""
    import diffusers

    names = ["BlockRefinementScheduler", "EntropyBoundScheduler", "DiscreteDDIMScheduler", "AmusedScheduler", name]
    classes = [getattr(diffusers, n, None) for n in names if isinstance(n, str)]
    classes += [c for family in SamplerScheduler.__subclasses__() for c in family.__subclasses__()]
    return {key for c in classes if c is not None for key in inspect.signature(c.__init__).parameters}

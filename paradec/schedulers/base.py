"""What every scheduler here shares: a sampler, its settings as a diffusers config, and a model that the pipeline calls.

A scheduler holds no rule. It builds the sampler that its config names, keeps the sampler's state between calls, and
drives `step` and `commit` with a `Host` in the model's place.
"""

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
from paradec.core.checks import shown, unknown_name
from paradec.core.facts import ModelFacts
from paradec.core.query import Query, take_columns
from paradec.core.registry import to_data
from paradec.samplers.masked.loop import MaskedSampler
from paradec.samplers.masked.state import MaskedState
from paradec.samplers.masked.view import MaskedProposal

MODULE = "paradec.schedulers"
"""The module that pipelines write into `model_index.json`, wherever in this package a class is defined."""


class Host:
    """Takes the place of a model: the pipeline evaluated it, and what it answered is `logits` [B, L, V]."""

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
        """The logits [R, W, V] of the wanted columns, in a copy of their own."""
        rows = self.logits[torch.as_tensor(query.rows, device=self.logits.device)]
        return rows if query.wanted is None else take_columns(rows, query.wanted)


class SamplerScheduler(SchedulerMixin, ConfigMixin):
    """Base of the schedulers. `class X(Base, sampler="localleap")` gives X the sampler's settings as config keys, with
    their defaults, after those of the family.

    Raises, when made: ValueError, for an unknown config key or a setting out of its range.
    """

    order = 1
    sampler_name: ClassVar[str]
    family_settings: ClassVar[Mapping[str, Any]] = {}
    """Config keys beside the sampler's, with their defaults."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys of other schedulers' configs -> ours, where both mean the same."""
    pipelines: ClassVar[str] = ""
    """Where it can be used, for messages."""
    run: object | None = None
    """Another object in each run."""
    thread: int | None = None
    """In which `set_timesteps` was called for the present run."""
    _host: Host
    """Takes the place of the model, where there is a state."""

    def __init_subclass__(cls, sampler: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__module__ = MODULE
        if sampler is not None:
            cls.sampler_name = sampler
            cls.__init__ = _config_init({**cls.family_settings, **cls.sampler_settings()})  # type: ignore

    def _setup(self) -> None:
        """What `__init__` does once the config is registered."""
        self.timesteps: Tensor = torch.arange(0)
        self._state: MaskedState | None = None
        self._rows = torch.arange(0)
        """Rows of the pipeline's batch that the state has."""
        self._written: Tensor | None = None
        """The tokens as the last step left them."""
        self._ignored: set[str] = set()
        self.sampler = self.make_sampler()

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have: everything but whose run it is."""
        return {name: value for name, value in vars(self).items() if name not in ("run", "thread")}

    def _claim(self) -> None:
        """Begin a run."""
        self.run, self.thread = object(), threading.get_ident()

    def _check_thread(self) -> None:
        """Raise RuntimeError if the run is another thread's."""
        if self.thread not in (None, threading.get_ident()):
            raise RuntimeError(
                f"{type(self).__name__} is in the middle of a run in another thread; it serves one run at a time. "
                "Use a pipeline with a scheduler of its own"
            )

    @classmethod
    def sampler_settings(cls) -> dict[str, Any]:
        """Config keys that are the sampler's, with its defaults."""
        return samplers.get(cls.sampler_name).settings()

    def make_sampler(self) -> MaskedSampler:
        """The sampler of this config."""
        config = self.config
        return samplers.create(self.sampler_name, **{name: config[name] for name in self.sampler_settings()})

    @property
    def config(self) -> Any:
        """The config; a key that it lacks is an AttributeError that says which pipelines the scheduler is for."""
        return _Config(self._internal_dict, type(self))

    @classmethod
    def from_config(cls, config: Any = None, return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Make the scheduler from another one's config; `kwargs` win.

        Keys that the other one left at its defaults are not taken over: the paper's defaults hold. Keys that only other
        schedulers know are kept and come back when one of them is made from this config.

        Raises:
            ValueError: a key that no scheduler knows.
        """
        own = set(inspect.signature(cls.__init__).parameters) - {"self"}
        for name in kwargs:
            if name not in own:
                raise ValueError(unknown_name(f"config key of {cls.__name__}", name, own))
        if not isinstance(config, Mapping):
            return super().from_config(config, return_unused_kwargs=return_unused_kwargs, **kwargs)
        known = own | _keys_of_others(config.get("_class_name"))
        for name in config:
            if not name.startswith("_") and name not in known:
                raise ValueError(unknown_name(f"config key of {cls.__name__}", name, own))
        defaults = {**cls.family_settings, **cls.sampler_settings()}
        left = config.get("_use_default_values", ())
        given: dict[str, Any] = {}
        for name, value in config.items():
            ours = cls.renamed.get(name, name)
            # None is what others say for "off", or for "as the call has it"
            if name not in left and ours in own and not (value is None and defaults[ours] is not None):
                given.setdefault(ours, value)
        scheduler = cls(**{**given, **kwargs})
        others = {k: v for k, v in config.items() if k not in own and not k.startswith("_")}
        scheduler.register_to_config(**others)
        return (scheduler, others) if return_unused_kwargs else scheduler

    def scale_model_input(self, sample: Tensor, timestep: Any = None) -> Tensor:
        """Refuse: asked for by pipelines of continuous latents."""
        raise TypeError(f"{type(self).__name__} decodes tokens, not latents; it works in {self.pipelines}")

    def _commit(self, sampler: MaskedSampler, state: MaskedState, logits: Tensor) -> tuple[MaskedProposal, Tensor]:
        """One step and commit, with the pipeline's logits [B, L, V]: the proposal, and its rows' indices [R, 1]."""
        self._host.logits = logits[self._rows]
        proposal = sampler.step(self._host, state)
        sampler.commit(state, proposal)
        self._host.logits = torch.empty(0)
        return proposal, self._rows[torch.as_tensor(proposal.rows, device=self._rows.device)].unsqueeze(1)

    def _check_tokens(self, model_output: Any, sample: Any, shape: str, ndim: int) -> None:
        """Raise ValueError unless `sample` holds token ids of `ndim` dimensions and `model_output` their logits."""
        if not isinstance(sample, Tensor) or sample.dtype != torch.int64 or sample.ndim != ndim:
            got = f"{sample.dtype} {tuple(sample.shape)}" if isinstance(sample, Tensor) else type(sample).__name__
            raise ValueError(
                f"sample is {got}; {type(self).__name__} takes int64 token ids {shape} and works in {self.pipelines}"
            )
        if not isinstance(model_output, Tensor) or model_output.ndim != ndim + 1:
            got = str(tuple(model_output.shape)) if isinstance(model_output, Tensor) else type(model_output).__name__
            raise ValueError(f"model_output is {got}; {type(self).__name__} takes the logits of sample {shape}")

    def _warn_ignored(self, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Warn once per key about values that a pipeline's caller gave and that the config decides instead."""
        for name, value in given.items():
            own = self.config.get(name)
            if value in (None, defaults[name]) or value == own or name in self._ignored:
                continue
            has = f"its config has {name}={shown(own)}" if name in self.config else "its rule has no such setting"
            self._warn_call(name, value, has)

    def _warn_call(self, name: str, value: Any, why: str) -> None:
        """Say once that what a pipeline's caller gave has no effect."""
        self._ignored.add(name)
        warnings.warn(
            f"{name}={shown(value)} given to the pipeline has no effect with {type(self).__name__}: {why}; settings "
            f"are made with {type(self).__name__}.from_config(pipe.scheduler.config, ...)",
            stacklevel=4,
        )


class _Config(FrozenDict):
    """A config that says, where a pipeline asks for a key that it lacks, which pipelines the scheduler is for."""

    def __init__(self, values: Mapping[str, Any], owner: type[SamplerScheduler]):
        object.__setattr__(self, "_owner", owner)
        super().__init__(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        owner = self.__dict__["_owner"]
        raise AttributeError(f"the config of {owner.__name__} has no {name!r}: it works in {owner.pipelines}")


def _config_init(settings: Mapping[str, Any]) -> Callable[..., None]:
    """An `__init__` that takes these settings by keyword and registers them; diffusers reads them off its signature."""

    def __init__(self: SamplerScheduler, **given: Any) -> None:
        for name in given:
            if name not in settings:
                raise ValueError(unknown_name(f"config key of {type(self).__name__}", name, settings))
        self._setup()

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=to_data(default))
        for name, default in settings.items()
    ]
    __init__.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return register_to_config(__init__)


def _keys_of_others(name: Any) -> set[str]:
    """Config keys of all schedulers here, and of diffusers' discrete ones and the one called `name`."""
    import diffusers

    theirs = ["BlockRefinementScheduler", "EntropyBoundScheduler", "DiscreteDDIMScheduler", "AmusedScheduler", name]
    classes = [getattr(diffusers, n, None) for n in theirs if isinstance(n, str)]
    classes += [c for family in SamplerScheduler.__subclasses__() for c in family.__subclasses__()]
    return {key for c in classes if c is not None for key in inspect.signature(c.__init__).parameters}

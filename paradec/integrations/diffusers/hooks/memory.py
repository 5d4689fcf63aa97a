"""The memory of histories before a run, from a call on the meta device, and the choice that fits into `max_memory`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paradec.integrations.diffusers.hooks.blocks import find_latent
from paradec.integrations.diffusers.hooks.clock import Clock, Run
from paradec.integrations.diffusers.hooks.stack import StackHistory
from paradec.integrations.diffusers.hooks.transformer import Transformer
from paradec.samplers.forecast.forecast import Forecast
from paradec.samplers.forecast.refresh import Every, Probe, Verification
from paradec.samplers.forecast.targets import PLACES, Modules


@dataclass(frozen=True)
class Size:
    """Bytes of the histories of one call of a step."""

    slot: int  # of one tensor of each history
    rule: int = 0  # of the rule's memory

    def needed(self, settings: Forecast) -> int:
        """Bytes at the settings' order."""
        return self.slot * settings.forecaster.slots + self.rule


def estimate(transformer: nn.Module, settings: Forecast, *args: Any, **kwargs: Any) -> int:
    """Bytes of the histories of one call per step with these arguments; twice that with guidance in two calls.

    Raises:
        ValueError: as `paradec.accelerate`, or the transformer cannot be measured without running it.
    """
    return measure(transformer, settings, args, kwargs).needed(settings)


def choose_fitting(
    transformer: nn.Module,
    requested: Forecast,
    branches: int,
    args: tuple,
    kwargs: dict[str, Any],
    sizes: dict[str | Modules | None, Size],
) -> tuple[Forecast, str]:
    """The settings that fit into `asked.max_memory`, and a text of the bytes that they need and what was tried before.

    branches: calls of a step. args, kwargs: of one call. known: sizes of such a call by where; more are added.

    Raises:
        ValueError: nothing fits, or the transformer cannot be measured without running it.
    """
    assert requested.max_memory is not None
    attempts: list[str] = []
    candidates, max_order = [requested.where], requested.forecaster.order
    if requested.rule.where is None and not isinstance(requested.where, Modules):
        candidates = [*PLACES[PLACES.index(requested.where or "module") :]]
    for where in candidates:
        if where in ("stack", "output") and isinstance(requested.rule, Verification):
            continue
        settings = replace(requested, where=where)
        if where not in sizes:
            sizes[where] = measure(transformer, settings, args, kwargs)
        for order in range(max_order, min(max_order, 1) - 1, -1):
            candidate = replace(settings, order=order)
            needed = sizes[where].needed(candidate) * branches
            if needed <= requested.max_memory:
                return candidate, f"({needed / 1e6:.3g} MB for {branches} calls a step): {'; '.join(attempts)}"
            place = "modules" if isinstance(where, Modules) else where
            attempts.append(f"{place} at order {order} needs {needed / 1e6:.3g} MB")
    raise ValueError(f"max_memory={requested.max_memory}: nothing fits; {'; '.join(attempts)}")


class _FirstCall(Clock):
    """A clock for the first call of a run."""

    def locate_call(self, timestep: Any, context: str | None) -> Run | None:
        self.run.is_open = True
        return self.run


def measure(transformer: nn.Module, settings: Forecast, args: tuple, kwargs: dict[str, Any]) -> Size:
    """Bytes of the histories of one call with these arguments.

    Raises:
        ValueError: the transformer cannot be rebuilt from its configuration, or not be called without computing.
    """
    parameters = dict(transformer.named_parameters())
    model_class: Any = type(transformer)  # of diffusers, or there is no `from_config`
    where = "output" if settings.rule.from_input else settings.where
    filters = isinstance(settings.rule, Probe) and settings.rule.filters
    rule = settings.rule if isinstance(settings.rule, Probe) and not filters else Every()
    try:
        with torch.device("meta"):
            skeleton = model_class.from_config(transformer.config).eval()
        for name, parameter in skeleton.named_parameters():
            if name in parameters and parameters[name].is_floating_point():  # not where weights are quantized
                parameter.data = parameter.data.to(parameters[name].dtype)
        settings_without_bound = Forecast(when=rule, how=settings.how, where=where)
        inputs, named = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        owner = Transformer(type(transformer).__name__, skeleton, settings_without_bound, _FirstCall())
        with torch.no_grad():
            skeleton(*inputs, **named)
    except Exception as error:
        raise ValueError(
            f"max_memory: {type(transformer).__name__} cannot be measured without running it ({error}); choose where "
            "and order yourself, and leave max_memory out"
        ) from error
    stacks = [history for history in owner.histories.values() if isinstance(history, StackHistory)]
    rule_progress = sum(history.rule_progress.nbytes for history in stacks)
    return Size(owner.state.nbytes - rule_progress, find_latent(args, kwargs).nbytes if filters else rule_progress)

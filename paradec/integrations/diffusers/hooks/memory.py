"""The size of histories before a run, from a call on the meta device, and the choice that fits into `max_memory`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paradec.integrations.diffusers.hooks.blocks import find_latent
from paradec.integrations.diffusers.hooks.clock import Clock
from paradec.integrations.diffusers.hooks.stack import StackHistory
from paradec.integrations.diffusers.hooks.transformer import Transformer
from paradec.samplers.forecast.forecast import Forecast
from paradec.samplers.forecast.refresh import Every, Probe, Verification
from paradec.samplers.forecast.targets import PLACES, Modules


class Size(NamedTuple):
    """Bytes of the histories of one call of a step."""

    slot: int  # of one tensor of each history
    rule: int  # of the rule's memory

    def total(self, settings: Forecast) -> int:
        return self.slot * settings.forecaster.slots + self.rule


def estimate(transformer: nn.Module, settings: Forecast, *args: Any, **kwargs: Any) -> int:
    """Return the bytes of the histories of one call per step with these arguments; guidance in two calls doubles them.

    Raises ValueError as `paradec.accelerate`, or if the transformer cannot be measured without running it.
    """
    return measure(transformer, settings, args, kwargs).total(settings)


def choose_fitting(
    transformer: nn.Module,
    requested: Forecast,
    branches: int,
    args: tuple,
    kwargs: dict[str, Any],
    sizes: dict[str | Modules | None, Size],
) -> tuple[Forecast, str]:
    """Return settings that fit into `requested.max_memory`, and a text about the bytes. Raises ValueError without any.

    branches: calls of a step. args, kwargs: of one call. sizes: of such a call by `where`; missing ones are added.
    """
    assert requested.max_memory is not None
    attempts: list[str] = []
    places, max_order = [requested.where], requested.forecaster.order
    if requested.rule.where is None and not isinstance(requested.where, Modules):
        places = [*PLACES[PLACES.index(requested.where or "module") :]]
    if isinstance(requested.rule, Verification):
        places = [where for where in places if where not in ("stack", "output")]
    for where in places:
        if where not in sizes:
            sizes[where] = measure(transformer, replace(requested, where=where), args, kwargs)
        for order in range(max_order, min(max_order, 1) - 1, -1):
            candidate = replace(requested, where=where, order=order)
            needed = sizes[where].total(candidate) * branches
            if needed <= requested.max_memory:
                return candidate, f"({needed / 1e6:.3g} MB for {branches} calls a step): {'; '.join(attempts)}"
            name = "modules" if isinstance(where, Modules) else where
            attempts.append(f"{name} at order {order} needs {needed / 1e6:.3g} MB")
    raise ValueError(f"max_memory={requested.max_memory}: nothing fits; {'; '.join(attempts)}")


def measure(transformer: nn.Module, settings: Forecast, args: tuple, kwargs: dict[str, Any]) -> Size:
    """Measure the histories of one call. Raises ValueError if the transformer cannot be called without data."""
    parameters = dict(transformer.named_parameters())
    model_class: Any = type(transformer)  # of diffusers, or there is no `from_config`
    where = "output" if settings.rule.from_input else settings.where
    filters = settings.rule.filters
    rule = settings.rule if isinstance(settings.rule, Probe) and not filters else Every()
    clock = Clock()
    clock.run.is_open = clock.run.is_stepped = True
    try:
        with torch.device("meta"):
            skeleton = model_class.from_config(transformer.config).eval()
        for name, parameter in skeleton.named_parameters():
            if name in parameters and parameters[name].is_floating_point():  # not where weights are quantized
                parameter.data = parameter.data.to(parameters[name].dtype)
        inputs, named = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        owner = Transformer(model_class.__name__, skeleton, Forecast(rule, settings.how, where), clock)
        with torch.no_grad():
            skeleton(*inputs, **named)
    except Exception as error:
        raise ValueError(
            f"max_memory: {model_class.__name__} cannot be measured without running it ({error}); choose where "
            "and order yourself, and leave max_memory out"
        ) from error
    rule_bytes = sum(
        history.rule_progress.nbytes for history in owner.histories.values() if isinstance(history, StackHistory)
    )
    return Size(owner.state.nbytes - rule_bytes, find_latent(args, kwargs).nbytes if filters else rule_bytes)

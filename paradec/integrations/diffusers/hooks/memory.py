"""The size of histories before a run, from a call on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from paradec.core.checks import shown
from paradec.integrations.diffusers.hooks.blocks import find_latent
from paradec.integrations.diffusers.hooks.clock import Clock
from paradec.integrations.diffusers.hooks.stack import StackHistory
from paradec.integrations.diffusers.hooks.transformer import Transformer
from paradec.samplers.forecast.forecast import Forecast
from paradec.samplers.forecast.refresh import Every, Probe


def check_fitting(
    transformer: nn.Module, settings: Forecast, branches: int, args: tuple, kwargs: dict[str, Any]
) -> None:
    """Raise ValueError if the histories of `branches` such calls of a step exceed `settings.max_memory`."""
    needed = estimate(transformer, settings, *args, **kwargs) * branches
    if settings.max_memory is not None and needed > settings.max_memory:
        raise ValueError(
            f"max_memory={settings.max_memory}: where={shown(settings.where)} at order {settings.forecaster.order} "
            f"needs {needed / 1e6:.3g} MB for {branches} calls a step; where='block', 'stack' and 'output', and lower "
            "orders, need less"
        )


def estimate(transformer: nn.Module, settings: Forecast, /, *args: Any, **kwargs: Any) -> int:
    """Return the bytes of the histories of one call per step with these arguments; guidance in two calls doubles them.

    Raises ValueError as `paradec.accelerate`, or if the transformer cannot be measured without running it.
    """
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
    slot_bytes = owner.state.nbytes - rule_bytes
    if filters:
        rule_bytes = find_latent(args, kwargs).nbytes
    return slot_bytes * settings.forecaster.slots + rule_bytes

"""What histories will take, before a run: a skeleton of the transformer is called on the meta device, at no cost."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paradec.hooks.blocks import Place, matched, places
from paradec.samplers.forecast.taylorseer import TaylorSeer


def estimate(transformer: nn.Module, settings: TaylorSeer, *args: Any, **kwargs: Any) -> int:
    """Bytes that the histories of one call per step with these arguments will take, at the settings' target and order.

    Twice that where guidance makes two calls a step.

    Raises:
        ValueError: as `paradec.accelerate`, or the transformer cannot be measured without running it.
    """
    if settings.modules is not None:
        found = matched(transformer, settings.modules, settings.skip or ())
    else:
        found = places(transformer, settings.target or "module")
    return sizes(transformer, found, settings, args, kwargs) * settings.forecaster.slots


def sizes(
    transformer: nn.Module, places: list[Place], settings: TaylorSeer, args: tuple, kwargs: dict[str, Any]
) -> int:
    """Bytes of one tensor of each history, together, for one call with these arguments.

    Raises:
        ValueError: the transformer cannot be rebuilt from its configuration, or not be called without computing.
    """
    kept = {place.name for place in places if place.kind != "skip"}
    dtype = settings.forecaster.dtype
    found = 0

    def count(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal found
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                found += leaf.numel() * (dtype or leaf.dtype).itemsize

    own = dict(transformer.named_parameters())
    try:
        with torch.device("meta"):
            skeleton = type(transformer).from_config(transformer.config).eval()
        for name, parameter in skeleton.named_parameters():
            if name in own and own[name].is_floating_point():  # not where weights are quantized
                parameter.data = parameter.data.to(own[name].dtype)
        handles = [module.register_forward_hook(count) for name, module in skeleton.named_modules() if name in kept]
        given, named = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        with torch.no_grad():
            skeleton(*given, **named)
    except Exception as error:
        raise ValueError(
            f"max_memory: {type(transformer).__name__} cannot be measured without running it ({error}); choose target "
            "and order yourself, and leave max_memory out"
        ) from error
    assert handles
    return found

"""What histories will take, before a run, and what fits into `max_memory`.

A skeleton of the transformer is called on the meta device, at no cost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paradec.hooks.blocks import Place, hooked
from paradec.samplers.forecast.refresh import Verification
from paradec.samplers.forecast.taylorseer import TARGETS, TaylorSeer


def estimate(transformer: nn.Module, settings: TaylorSeer, *args: Any, **kwargs: Any) -> int:
    """Bytes that the histories of one call per step with these arguments will take, at the settings' target and order.

    Twice that where guidance makes two calls a step.

    Raises:
        ValueError: as `paradec.accelerate`, or the transformer cannot be measured without running it.
    """
    return sizes(transformer, hooked(transformer, settings), settings, args, kwargs) * settings.forecaster.slots


def fitting(
    transformer: nn.Module,
    asked: TaylorSeer,
    branches: int,
    args: tuple,
    kwargs: dict[str, Any],
    known: dict[str | None, int],
) -> tuple[TaylorSeer, int, list[str]]:
    """The settings that fit into `asked.max_memory`: those asked for, or a lower order, or a thriftier target.

    Args:
        branches: calls of a step, which have histories of their own.
        args, kwargs: of one call.
        known: `sizes` of such a call by target, as far as they were measured; more are added.

    Returns:
        The settings, the bytes that they need, and what was tried before.

    Raises:
        ValueError: nothing fits, or the transformer cannot be measured without running it.
    """
    assert asked.max_memory is not None
    tried: list[str] = []
    targets = TARGETS[TARGETS.index(asked.target or "module") :]
    for target in targets if asked.modules is None and asked.schedule is None else (None,):
        if target == "output" and isinstance(asked.refresh, Verification):
            continue
        chosen = asked if target is None else replace(asked, target=target)
        if target not in known:
            known[target] = sizes(transformer, hooked(transformer, chosen), chosen, args, kwargs)
        for order in range(asked.order, min(asked.order, 1) - 1, -1):
            candidate = replace(chosen, order=order)
            needed = known[target] * candidate.forecaster.slots * branches
            if needed <= asked.max_memory:
                return candidate, needed, tried
            tried.append(f"{target or 'modules'} at order {order} needs {megabytes(needed)}")
    raise ValueError(f"max_memory={asked.max_memory}: nothing fits; {'; '.join(tried)}")


def megabytes(count: int) -> str:
    """Bytes, for messages."""
    return f"{count / 1e6:.3g} MB"


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
    made: Any = type(transformer)  # of diffusers, or there is no `from_config`
    try:
        with torch.device("meta"):
            skeleton = made.from_config(transformer.config).eval()
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

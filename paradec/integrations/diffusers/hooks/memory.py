"""What histories will take, before a run, and what fits into `max_memory`.

A skeleton of the transformer is called on the meta device, at no cost.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paradec.integrations.diffusers.hooks.blocks import Place, hooked
from paradec.integrations.diffusers.hooks.stack import Kept, Stack
from paradec.integrations.diffusers.hooks.watched import latent_of
from paradec.samplers.forecast.bases import Basis
from paradec.samplers.forecast.refresh import RunProgress, Verification
from paradec.samplers.forecast.targets import TARGETS, Modules
from paradec.samplers.forecast.taylorseer import TaylorSeer


def estimate(transformer: nn.Module, settings: TaylorSeer, *args: Any, **kwargs: Any) -> int:
    """Bytes that the histories of one call per step with these arguments will take, at the settings' target and order.

    Twice that where guidance makes two calls a step.

    Raises:
        ValueError: as `paradec.accelerate`, or the transformer cannot be measured without running it.
    """
    size = sizes(transformer, hooked(transformer, settings), settings, args, kwargs)
    return size.needed(settings)


def fitting(
    transformer: nn.Module,
    asked: TaylorSeer,
    branches: int,
    args: tuple,
    kwargs: dict[str, Any],
    known: dict[str | Modules | None, Size],
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
    targets, most = [asked.target], asked.forecaster.order
    if asked.rule.target is None and not isinstance(asked.target, Modules):
        targets = [*TARGETS[TARGETS.index(asked.target or "module") :]]
    for target in targets:
        if target in ("stack", "output") and isinstance(asked.rule, Verification):
            continue
        chosen = replace(asked, target=target)
        if target not in known:
            known[target] = sizes(transformer, hooked(transformer, chosen), chosen, args, kwargs)
        for order in range(most, min(most, 1) - 1, -1):
            candidate = replace(chosen, order=order)
            needed = known[target].needed(candidate) * branches
            if needed <= asked.max_memory:
                return candidate, needed, tried
            what = "modules" if isinstance(target, Modules) else target
            tried.append(f"{what} at order {order} needs {megabytes(needed)}")
    raise ValueError(f"max_memory={asked.max_memory}: nothing fits; {'; '.join(tried)}")


def megabytes(count: int) -> str:
    """Bytes, for messages."""
    return f"{count / 1e6:.3g} MB"


@dataclass(frozen=True)
class Size:
    """What is kept of one call of a step."""

    slot: int
    """Bytes of one tensor of each history, together."""
    rule: int = 0
    """Bytes of what a rule keeps beside them."""

    def needed(self, settings: TaylorSeer) -> int:
        """Bytes at the settings' order."""
        return self.slot * settings.forecaster.slots + self.rule


@dataclass(eq=False)
class _Skeleton:
    """Replaces the transformer that a stack on a skeleton belongs to: everything is evaluated."""

    name: str
    settings: TaylorSeer
    basis: Basis
    course: RunProgress = field(default_factory=RunProgress)
    inside: int | None = field(default_factory=threading.get_ident)
    histories: dict[str, Kept] = field(default_factory=dict)
    evaluated: list[str] = field(default_factory=list)
    forecast: list[str] = field(default_factory=list)
    given: Tensor | None = None
    level: float = 0.5

    def decide(self, place: Place, args: tuple, kwargs: dict[str, Any]) -> bool:
        return True

    def decided(self, full: bool) -> None:
        return None


def sizes(
    transformer: nn.Module, places: list[Place], settings: TaylorSeer, args: tuple, kwargs: dict[str, Any]
) -> Size:
    """Bytes of what is kept of one call with these arguments.

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
        modules = dict(skeleton.named_modules())
        owner = _Skeleton(type(transformer).__name__, settings, settings.forecaster)
        stack = Stack(owner, places, modules) if places[0].kind == "stack" else None
        handles = [module.register_forward_hook(count) for name, module in modules.items() if name in kept]
        given, named = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        latent = latent_of(given, named)
        owner.given = latent[..., None] if latent.ndim == 3 else latent  # cells in a row: their number alone counts
        with torch.no_grad():
            skeleton(*given, **named)
        if stack is not None:
            stack.finish()
            rule = sum(walked.probed.nbytes for walked in owner.histories.values())
            return Size(sum(walked.nbytes for walked in owner.histories.values()) - rule, rule)
    except Exception as error:
        raise ValueError(
            f"max_memory: {type(transformer).__name__} cannot be measured without running it ({error}); choose target "
            "and order yourself, and leave max_memory out"
        ) from error
    assert handles
    return Size(found)

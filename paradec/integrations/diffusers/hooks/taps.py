"""A tap wraps one module and decides, call by call, whether it is evaluated, forecast, or left out."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paradec.integrations.diffusers.hooks.blocks import RETURNS, Place
from paradec.integrations.diffusers.hooks.stand_in import StandIn
from paradec.samplers.forecast.bases import Basis, History
from paradec.samplers.forecast.refresh import RunProgress, relative_error


class Owner(Protocol):
    """What a tap reads of the transformer that it belongs to, and where it says what it did."""

    basis: Basis
    course: RunProgress
    """Its `index` is the solver step."""
    inside: int | None
    """The thread in which the transformer is being called for its run; a module that is used by itself, or in a call
    that is no run's, is left alone."""
    histories: dict[str, Kept]
    evaluated: list[str]
    forecast: list[str]

    def again(self, name: str) -> str:
        """What tells this call of the module of that name from its other calls in the same forward."""
        ...

    def decide(self, place: Place, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the module is evaluated at this step."""
        ...


@dataclass
class Kept:
    """What a tap remembers of one branch: of every tensor that its module returned."""

    leaves: list[Any]
    """The output, flattened: None where there is a history, else the value itself (None, numbers)."""
    histories: list[History | None]
    spec: Any
    """How the output is put together again."""
    lone: bool = False
    """Whether the output is one tensor by itself, which has a history."""
    stand_in: Any = None
    """Of a skipped module: what it returns, once it was asked for."""

    @property
    def nbytes(self) -> int:
        """Bytes of all histories."""
        return sum(history.nbytes for history in self.histories if history is not None)


class Patch:
    """Comes between a module's `__call__` and all that it would do, and gives the place back.

    That is outside of `forward`, which accelerate and diffusers replace to move weights, and put back between runs; and
    outside of the code of a block that `torch.compile` compiled in place, which is called through another attribute.
    """

    def __init__(self, module: nn.Module, around: Callable[..., Any]):
        self.module = module
        self.slot = "_call_impl" if module._compiled_call_impl is None else "_compiled_call_impl"
        if hasattr(module, "_orig_mod"):  # what torch.compile returns hands other attributes on to what it compiled
            self.slot = "forward"
        self.inner = getattr(module, self.slot)
        self.active = True

        def patched(*args: Any, **kwargs: Any) -> Any:
            return around(*args, **kwargs) if self.active else self.inner(*args, **kwargs)

        self.patched = torch.compiler.disable(functools.wraps(self.inner)(patched))
        self.stand_in = StandIn(module, self.slot, self.patched)

    @property
    def overtaken(self) -> bool:
        """Whether the module was compiled with the patch inside."""
        return self.slot == "_call_impl" and self.module._compiled_call_impl is not None

    def remove(self) -> None:
        """Leave the module as it was; a patch that has another one on top stays and passes calls through."""
        self.active = False
        self.stand_in.remove()


class Tap:
    """One hooked module of a transformer."""

    def __init__(self, owner: Owner, place: Place, module: nn.Module, verified: bool = False):
        self.owner, self.place, self.module = owner, place, module
        self.verified = verified
        """Whether it is evaluated at forecast steps too, to measure the error."""
        self.parameters = parameters_of(module)
        self.patch = Patch(module, self.call) if place.name else None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the module's call."""
        assert self.patch is not None
        if self.owner.inside != threading.get_ident():  # used by itself
            return self.patch.inner(*args, **kwargs)
        return self.answer(self.patch.inner, args, kwargs)

    def answer(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The module's output: evaluated, forecast, or a stand-in."""
        owner, place = self.owner, self.place
        again = owner.again(place.name)
        kept = owner.histories.get(place.name + again)
        full = owner.decide(place, args, kwargs)
        replaced = kept if place.sink is None else owner.histories.get(place.sink + again)
        if full or kept is None or replaced is None or (self.verified and place.kind == "skip"):
            output = inner(*args, **kwargs)
            owner.histories[place.name + again] = self.keep(kept, output, args, kwargs)
            owner.evaluated.append(place.name)
            return output
        owner.forecast.append(place.name)
        if place.kind == "skip":
            if kept.stand_in is None:
                kept.stand_in = self.stand_in(kept)
            return kept.stand_in
        if kept.lone and not self.verified and place.kind == "forecast" and not owner.basis.rolls:
            history = kept.histories[0]
            assert history is not None
            value = owner.basis.forecast(history, owner.course.index)
            return value.clone() if any(value is tensor for tensor in history.tensors) else value
        bases = self.residual_bases(kept.leaves, kept.histories, args, kwargs)
        values, error = [], None
        real = tree_flatten(inner(*args, **kwargs))[0] if self.verified else None
        for i, (leaf, history) in enumerate(zip(kept.leaves, kept.histories, strict=True)):
            if history is not None:
                value = self.owner.basis.forecast(history, self.owner.course.index)
                kept.histories[i] = rolled = self.owner.basis.roll(history, value)
                base = bases[i]
                if real is not None and error is None:
                    error = relative_error(value, real[i] if base is None else real[i] - base)
                leaf = value if base is None else base + value
                if any(leaf is tensor for tensor in rolled.tensors):
                    leaf = leaf.clone()  # callers may write into what they were given
            values.append(leaf)
        if error is not None:
            self.owner.course.error = error
        return tree_unflatten(values, kept.spec)

    def keep(self, kept: Kept | None, output: Any, args: tuple, kwargs: dict[str, Any]) -> Kept:
        """What is remembered after an evaluation."""
        leaves, spec = tree_flatten(output)
        if self.place.kind == "skip":
            return Kept([_Shape.of(leaf) for leaf in leaves], [None] * len(leaves), spec)
        before = kept.histories if kept is not None and len(kept.histories) == len(leaves) else [None] * len(leaves)
        bases = self.residual_bases(leaves, leaves, args, kwargs)
        histories: list[History | None] = []
        for leaf, base, history in zip(leaves, bases, before, strict=True):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                value = leaf.detach().clone() if base is None else leaf.detach() - base.detach()
                histories.append(self.owner.basis.update(history, value, self.owner.course.index))
            else:
                histories.append(None)
        rest = [None if history is not None else leaf for leaf, history in zip(leaves, histories, strict=True)]
        return Kept(rest, histories, spec, lone=isinstance(output, Tensor) and histories[0] is not None)

    def residual_bases(
        self, leaves: list[Any], tensors: list[Any], args: tuple, kwargs: dict[str, Any]
    ) -> list[Tensor | None]:
        """The inputs that the outputs continue: what a residual is added to. None where an output continues none."""
        if self.place.kind != "residual":
            return [None] * len(leaves)
        streams = streams_of(self.parameters, args, kwargs)
        names = continued(self.module, streams, [_shape(tensor) for tensor in tensors])
        return [streams[name] if name else None for name in names]

    def stand_in(self, kept: Kept) -> Any:
        """What a skipped module returns: nothing at all where that does, else NaN, which would be noticed."""
        values = []
        for leaf in kept.leaves:
            if not isinstance(leaf, _Shape):
                values.append(leaf)
            elif self.place.narrow:
                values.append(torch.empty((*leaf.shape[:-1], 0), dtype=leaf.dtype, device=leaf.device))
            else:
                values.append(torch.full((), torch.nan, dtype=leaf.dtype, device=leaf.device).expand(leaf.shape))
        return tree_unflatten(values, kept.spec)

    def remove(self) -> None:
        """Take the tap off."""
        if self.patch is not None:
            self.patch.remove()


@dataclass(frozen=True)
class _Shape:
    """What a stand-in must look like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return cls(tuple(leaf.shape), leaf.dtype, leaf.device)
        return leaf


def parameters_of(module: nn.Module) -> list[str]:
    """Names of a module's arguments, in order."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def streams_of(parameters: list[str], args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """The inputs of a block that its outputs may continue, by their argument's name."""
    given = dict(zip(parameters, args)) | kwargs
    names = [name for name in given if isinstance(given[name], Tensor)]
    streams = [name for name in names if name in ("hidden_states", "encoder_hidden_states")] or names[:1]
    return {name: given[name] for name in streams}


def continued(
    module: nn.Module, streams: dict[str, Tensor], shapes: Sequence[tuple[int, ...] | None]
) -> list[str | None]:
    """The input that each output of a block continues, by name; None where an output continues none."""
    declared = RETURNS.get(type(module).__name__, tuple(streams))
    found: list[str | None] = []
    for i, shape in enumerate(shapes):
        fits = [name for name in streams if shape is not None and tuple(streams[name].shape) == shape]
        name = declared[i] if i < len(declared) and declared[i] in fits else fits[0] if len(fits) == 1 else None
        found.append(name)
    return found


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, History):
        return tuple(value.tensors[0].shape)
    return tuple(value.shape) if isinstance(value, Tensor) else None

"""A tap wraps one module and decides, call by call, whether it is evaluated, forecast, or left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paradec.integrations.diffusers.hooks.blocks import Place, continued, streams_of
from paradec.integrations.diffusers.hooks.hook import Hook
from paradec.samplers.forecast.bases import Basis, History
from paradec.samplers.forecast.refresh import RunProgress, relative_error


class Owner(Protocol):
    """What a tap reads of the transformer that it belongs to, and where it records what it did."""

    basis: Basis
    course: RunProgress
    """Its `index` is the solver step."""
    is_inside: bool
    """Whether the transformer is being called for its run; a module that is used by itself, or in a call that is no
    run's, is left alone."""
    histories: dict[str, ModuleHistory]
    evaluated: list[str]
    forecast: list[str]

    def call_index(self, name: str) -> str:
        """What tells this call of the module of that name from its other calls in the same forward."""
        ...

    def decide(self, place: Place, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the module is evaluated at this step."""
        ...


@dataclass
class ModuleHistory:
    """What a tap remembers of one branch: of every tensor that its module returned."""

    leaves: list[Any]
    """The output, flattened: None where there is a history, else the value itself (None, numbers)."""
    histories: list[History | None]
    spec: Any
    """How the output is put together again."""
    is_tensor: bool = False
    """Whether the output is one tensor by itself, which has a history."""
    stand_in: Any = None
    """Of a skipped module: what it returns, once it was asked for."""

    @property
    def nbytes(self) -> int:
        """Bytes of all histories."""
        return sum(history.nbytes for history in self.histories if history is not None)


class Tap:
    """One hooked module of a transformer; a verified one is evaluated at forecast steps too, to measure the error."""

    def __init__(self, owner: Owner, place: Place, module: nn.Module, verified: bool = False):
        self.owner, self.place, self.module, self.verified = owner, place, module, verified
        self.hook = Hook(module, self.call) if place.name else None

    def call(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replace the module's forward."""
        if not self.owner.is_inside:  # used by itself
            return inner(*args, **kwargs)
        return self.answer(inner, args, kwargs)

    def answer(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The module's output: evaluated, forecast, or a stand-in."""
        owner, place = self.owner, self.place
        call_index = owner.call_index(place.name)
        history = owner.histories.get(place.name + call_index)
        is_full = owner.decide(place, inner, args, kwargs)
        sink = history if place.sink is None else owner.histories.get(place.sink + call_index)
        if is_full or history is None or sink is None or (self.verified and place.kind == "skip"):
            output = inner(*args, **kwargs)
            owner.histories[place.name + call_index] = self._remember(history, output, args, kwargs)
            owner.evaluated.append(place.name)
            return output
        owner.forecast.append(place.name)
        if place.kind == "skip":
            if history.stand_in is None:
                history.stand_in = self._stand_in(history)
            return history.stand_in
        if history.is_tensor and not self.verified and place.kind == "forecast" and not owner.basis.rolls:
            tensor_history = history.histories[0]
            assert tensor_history is not None
            return _own(owner.basis.forecast(tensor_history, owner.course.index), tensor_history)
        return self._expand(history, inner, args, kwargs)

    def _expand(self, history: ModuleHistory, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The forecast of every tensor, put together; a verified module's error is measured."""
        basis, course = self.owner.basis, self.owner.course
        starts = self._residual_starts(history.leaves, history.histories, args, kwargs)
        values, error = [], None
        real = tree_flatten(inner(*args, **kwargs))[0] if self.verified else None
        for i, (leaf, before) in enumerate(zip(history.leaves, history.histories, strict=True)):
            if before is not None:
                value = basis.forecast(before, course.index)
                history.histories[i] = rolled = basis.roll(before, value)
                start = starts[i]
                if real is not None and error is None:
                    error = relative_error(value, real[i] if start is None else real[i] - start)
                leaf = _own(value if start is None else start + value, rolled)
            values.append(leaf)
        if error is not None:
            course.error = error
        return tree_unflatten(values, history.spec)

    def _remember(
        self, history: ModuleHistory | None, output: Any, args: tuple, kwargs: dict[str, Any]
    ) -> ModuleHistory:
        """What is remembered after an evaluation."""
        leaves, spec = tree_flatten(output)
        if self.place.kind == "skip":
            return ModuleHistory([_Shape.of(leaf) for leaf in leaves], [None] * len(leaves), spec)
        is_alike = history is not None and len(history.histories) == len(leaves)
        before = history.histories if history is not None and is_alike else [None] * len(leaves)
        starts = self._residual_starts(leaves, leaves, args, kwargs)
        histories: list[History | None] = []
        for leaf, start, previous in zip(leaves, starts, before, strict=True):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                value = leaf.detach().clone() if start is None else leaf.detach() - start.detach()
                histories.append(self.owner.basis.update(previous, value, self.owner.course.index))
            else:
                histories.append(None)
        constants = [None if kept is not None else leaf for leaf, kept in zip(leaves, histories, strict=True)]
        return ModuleHistory(constants, histories, spec, isinstance(output, Tensor) and histories[0] is not None)

    def _residual_starts(
        self, leaves: list[Any], tensors: list[Any], args: tuple, kwargs: dict[str, Any]
    ) -> list[Tensor | None]:
        """The inputs that the outputs continue: what a residual is added to. None where an output continues none."""
        if self.place.kind != "residual":
            return [None] * len(leaves)
        streams = streams_of(self.module, args, kwargs)
        names = continued(self.module, streams, [_shape(tensor) for tensor in tensors])
        return [streams[name] if name else None for name in names]

    def _stand_in(self, history: ModuleHistory) -> Any:
        """What a skipped module returns: nothing at all where that does, else NaN, which would be noticed."""
        values = []
        for leaf in history.leaves:
            if not isinstance(leaf, _Shape):
                values.append(leaf)
            elif self.place.narrow:
                values.append(torch.empty((*leaf.shape[:-1], 0), dtype=leaf.dtype, device=leaf.device))
            else:
                values.append(torch.full((), torch.nan, dtype=leaf.dtype, device=leaf.device).expand(leaf.shape))
        return tree_unflatten(values, history.spec)


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


def _own(value: Tensor, history: History) -> Tensor:
    """A value that callers may write into."""
    return value.clone() if any(value is tensor for tensor in history.tensors) else value


def _shape(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, History):
        return tuple(value.tensors[0].shape)
    return tuple(value.shape) if isinstance(value, Tensor) else None

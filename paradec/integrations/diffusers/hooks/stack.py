"""All blocks of a transformer as one stack, whose residual is forecast as a whole.

The first blocks (the rule's probe) and the last ones may be evaluated at every step. Of those between, all are
evaluated or none is: at a forecast step they hand on what they were given, and the last of them adds the forecast.
Where the streams change their shapes in between (text and image are joined, say), each segment has a residual of its
own.

A residual is taken from what the stack's first block is given to what its last one returns. So what a pipeline adds
between blocks (a control network's features) is part of it, and forecast with it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paradec.integrations.diffusers.hooks.blocks import Place
from paradec.integrations.diffusers.hooks.taps import Patch, continued, parameters_of, streams_of
from paradec.samplers.forecast.bases import Basis, History
from paradec.samplers.forecast.probes import Probe, ProbeState
from paradec.samplers.forecast.refresh import RunProgress
from paradec.samplers.forecast.taylorseer import TaylorSeer


class Owner(Protocol):
    """What a stack reads of the transformer that it belongs to, and where it says what it did."""

    name: str
    settings: TaylorSeer
    basis: Basis
    course: RunProgress
    given: Tensor | None
    """The latent that the transformer was given."""
    level: float
    """The step's noise level, for a rule that reads it."""
    inside: int | None
    histories: dict[str, Any]
    evaluated: list[str]
    forecast: list[str]

    def decide(self, place: Place, args: tuple, kwargs: dict[str, Any]) -> bool:
        """What the schedule says of this step."""
        ...

    def decided(self, full: bool) -> None:
        """What a rule has said of this call."""
        ...


@dataclass
class Form:
    """How what a block returns is put together: from a stream each, or as it was."""

    names: list[str | None]
    rest: list[Any]
    spec: Any

    def made(self, streams: dict[str, Tensor]) -> Any:
        """The block's output with these streams."""
        leaves = [rest if name is None else streams[name] for name, rest in zip(self.names, self.rest, strict=True)]
        return tree_unflatten(leaves, self.spec)


@dataclass(eq=False)
class Kept:
    """What is remembered of the stack in one call of a step."""

    probed: ProbeState = field(default_factory=ProbeState)
    forms: dict[int, Form] = field(default_factory=dict)
    """Of the blocks that were called when the stack was evaluated, by position."""
    ends: dict[int, int] = field(default_factory=dict)
    """The position at which each segment ends, by that at which it begins."""
    histories: dict[int, dict[str, History]] = field(default_factory=dict)
    """Residuals of each segment, by the position at which it ends, and stream."""

    @property
    def nbytes(self) -> int:
        """Bytes of all histories, and of what the rule keeps."""
        histories = [history for streams in self.histories.values() for history in streams.values()]
        return self.probed.nbytes + sum(history.nbytes for history in histories)


@dataclass(eq=False)
class Walk:
    """One call of the transformer."""

    kept: Kept
    entry: dict[str, Tensor]
    """What the first block was given."""
    probe: Tensor | None = None
    full: bool | None = None
    """Whether the blocks after the probe are evaluated; None until that was decided."""
    start: dict[str, Tensor] = field(default_factory=dict)
    """What the present segment's residual is added to."""
    begin: int = -1
    end: int = -1
    """Positions of the present segment's first and latest blocks; -1: none is open."""
    returned: dict[str, Tensor] = field(default_factory=dict)
    """What the latest evaluated block returned."""
    residual: Tensor | None = None
    """What the latest segment that was evaluated added to the stream that probes read."""


class Stack:
    """The taps on all blocks of a transformer, and the decision that they share.

    Args:
        owner: the transformer.
        places: all blocks, as `blocks.places` gives them.
        modules: those of the transformer by name.

    Raises:
        ValueError: a rule's first and last blocks are all that there are.
    """

    def __init__(self, owner: Owner, places: list[Place], modules: dict[str, nn.Module]):
        self.owner = owner
        rule = owner.settings.rule
        self.rule = rule if isinstance(rule, Probe) else None
        self.places, self.blocks = places, [modules[place.name] for place in places]
        head, tail = (self.rule.head, self.rule.tail) if self.rule is not None else (0, 0)
        self.first, self.last = head, len(places) - tail
        """Positions of the first block that may be forecast, and of the first one after these."""
        if self.first >= self.last:
            assert self.rule is not None
            raise ValueError(
                f"refresh={self.rule.name!r} always evaluates the first {head} and the last {tail} blocks; "
                f"{owner.name} has {len(places)}, so that none is left to skip"
            )
        self.position = -1
        """Of the block that was called last."""
        self.walk: Walk | None = None
        """The call of the transformer that is going on, once it has reached the first block."""
        self.taps = [StackTap(self, module) for module in {id(module): module for module in self.blocks}.values()]

    @property
    def forecasts(self) -> list[Place]:
        """The blocks that are left out at a forecast step."""
        return self.places[self.first : self.last]

    def begin(self) -> None:
        """A call of the transformer begins."""
        self.position, self.walk = -1, None

    def finish(self) -> None:
        """It ends, and its last segment with it."""
        if self.walk is None:
            return
        self._close(self.walk)
        if self.walk.full:
            kept = self.walk.kept
            kept.histories = {end: kept.histories[end] for end in kept.ends.values()}
        if self.walk.residual is not None and self.rule is not None:
            self.rule.evaluated(self.walk.kept.probed, self.walk.residual)
        self.walk = None

    def call(self, tap: StackTap, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replace a block's call."""
        position = self._find(tap.module)
        streams = streams_of(tap.parameters, args, kwargs)
        walk = self.walk
        if walk is None:
            entry = _copied(streams) if self.rule is not None else streams
            walk = self.walk = Walk(self.owner.histories.setdefault("stack", Kept()), entry)
        if not self.first <= position < self.last:
            if walk.full is not None:
                self._close(walk)
            output = tap.patch.inner(*args, **kwargs)
            if position == self.first - 1:
                walk.probe = self._parted(tap.module, streams, output)[1][_main(streams)]
            return output
        if walk.full is None:
            walk.full = self._decide(walk, self.places[position], args, kwargs)
        if walk.full:
            return self._evaluate(walk, position, tap, streams, args, kwargs)
        return self._forecast(walk, position, streams)

    def _find(self, module: nn.Module) -> int:
        """The position of a block that is called; others may be left out in between."""
        for position in range(self.position + 1, len(self.blocks)):
            if self.blocks[position] is module:
                self.position = position
                return position
        raise RuntimeError(
            f"{self.owner.name} calls its blocks in another order than it lists them, so that they are no stack; use "
            "target='block' or 'module'"
        )

    # ---- when -------------------------------------------------------------------------------------------------------

    def _decide(self, walk: Walk, place: Place, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether the blocks between the probe and the last ones are evaluated in this call."""
        owner, kept = self.owner, walk.kept
        fresh = not kept.ends
        if self.rule is None:
            full = owner.decide(place, args, kwargs) or fresh
        else:
            state, course = kept.probed, owner.course
            state.index, state.total, state.latent, state.level = course.index, course.total, owner.given, owner.level
            full = self.rule.is_full(state, walk.entry[_main(walk.entry)], walk.probe, fresh)
            state.finished(full)
            state.latent = None
            owner.decided(full)
        if full:
            kept.forms, kept.ends = {}, {}
        return full

    # ---- what -------------------------------------------------------------------------------------------------------

    def _start(self, walk: Walk, position: int, streams: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a segment's residual is added to: its first block's input, or the probe's if the rule says so."""
        whole = self.rule is not None and self.rule.whole and position == self.first
        # not where the probe has changed the shapes
        return walk.entry if whole and _shapes(walk.entry) == _shapes(streams) else _copied(streams)

    def _evaluate(
        self, walk: Walk, position: int, tap: StackTap, streams: dict[str, Tensor], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        if walk.begin >= 0 and _shapes(streams) != _shapes(walk.start):
            self._close(walk)
        if walk.begin < 0:
            walk.begin, walk.start = position, self._start(walk, position, streams)
        output = tap.patch.inner(*args, **kwargs)
        walk.kept.forms[position], walk.returned = self._parted(tap.module, streams, output)
        walk.end = position
        self.owner.evaluated.append(self.places[position].name)
        return output

    def _parted(self, module: nn.Module, streams: dict[str, Tensor], output: Any) -> tuple[Form, dict[str, Tensor]]:
        """How an output is put together, and its streams."""
        leaves, spec = tree_flatten(output)
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        names = continued(module, streams, shapes)
        for name, leaf in zip(names, leaves, strict=True):
            if name is None and isinstance(leaf, Tensor):
                raise RuntimeError(
                    f"{type(module).__name__} returns a tensor of shape {tuple(leaf.shape)} that continues none of its "
                    "inputs, so that its blocks are no stack; use target='block' or 'module'"
                )
        rest = [leaf if name is None else None for name, leaf in zip(names, leaves, strict=True)]
        found = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name is not None}
        return Form(names, rest, spec), found

    def _close(self, walk: Walk) -> None:
        """Remember the residual of the segment that was evaluated, if one is open."""
        if walk.begin < 0:
            return
        owner, kept = self.owner, walk.kept
        if walk.full:
            kept.ends[walk.begin] = walk.end
            before = kept.histories.get(walk.end, {})
            added = {name: leaf.detach() - walk.start[name].detach() for name, leaf in walk.returned.items()}
            kept.histories[walk.end] = {
                name: owner.basis.update(before.get(name), residual, owner.course.index)
                for name, residual in added.items()
            }
            walk.residual = added.get(_main(walk.start))
        else:
            raise RuntimeError(
                f"{self.owner.name} does not call block {self.places[walk.end].name}, which it called when it was "
                "evaluated; call session.reset() where the blocks that are called change"
            )
        walk.begin, walk.end, walk.returned = -1, -1, {}

    def _forecast(self, walk: Walk, position: int, streams: dict[str, Tensor]) -> Any:
        owner, kept = self.owner, walk.kept
        form = kept.forms.get(position)
        if form is None:
            raise RuntimeError(
                f"{owner.name} calls block {self.places[position].name}, which it left out when it was evaluated; "
                "call session.reset() where the blocks that are called change"
            )
        if position in kept.ends:
            walk.begin, walk.end = position, kept.ends[position]
            walk.start = self._start(walk, position, streams)
        owner.forecast.append(self.places[position].name)
        if position != walk.end:
            return form.made(streams)
        found = dict(streams)
        step = owner.course.index if self.rule is None else self.rule.forecast_at(kept.probed)
        for name, history in kept.histories[position].items():
            value = owner.basis.forecast(history, step)
            kept.histories[position][name] = owner.basis.roll(history, value)
            found[name] = walk.start[name] + value
        walk.begin, walk.end = -1, -1
        return form.made(found)


class StackTap:
    """One block of a stack."""

    def __init__(self, stack: Stack, module: nn.Module):
        self.stack, self.module = stack, module
        self.place = next(place for place, block in zip(stack.places, stack.blocks, strict=True) if block is module)
        self.parameters = parameters_of(module)
        self.patch = Patch(module, self.call)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the block's call."""
        if self.stack.owner.inside != threading.get_ident():  # used by itself
            return self.patch.inner(*args, **kwargs)
        return self.stack.call(self, args, kwargs)

    def remove(self) -> None:
        """Take the tap off."""
        self.patch.remove()


def _main(streams: dict[str, Tensor]) -> str:
    """The stream that a probe reads."""
    return "hidden_states" if "hidden_states" in streams else next(iter(streams))


def _copied(streams: dict[str, Tensor]) -> dict[str, Tensor]:
    """What blocks, and the transformer between them, may not write into."""
    return {name: tensor.clone() for name, tensor in streams.items()}


def _shapes(streams: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in streams.items()}

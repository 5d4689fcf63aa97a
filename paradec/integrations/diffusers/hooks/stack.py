"""Forecast of a transformer's blocks as one stack with one residual.

A rule evaluates some first blocks (its probe) and some last blocks at every step. At a forecast step the blocks in
between return their inputs; the last one adds the residual (output of the last minus input of the first). The stack is
cut into segments, each with its own residual, where a block's streams have other shapes, or where the next list of
blocks gets other tensors than the last block returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paradec.integrations.diffusers.hooks.blocks import Place, find_streams, main_stream_name, match_outputs
from paradec.integrations.diffusers.hooks.hook import Hook
from paradec.samplers.forecast.bases import History
from paradec.samplers.forecast.refresh import Probe, Rule, RunProgress

Build = Callable[[dict[str, Tensor]], Any]
"""Builds a block's output from streams by name; other values are those of the evaluated output."""


@dataclass(eq=False)
class StackHistory:
    """History of the stack in one branch. Positions count the calls of blocks."""

    rule_progress: RunProgress = field(default_factory=RunProgress)
    blocks: dict[int, tuple[Place, Build]] = field(default_factory=dict)  # of the latest evaluation
    ends: dict[int, int] = field(default_factory=dict)  # the last position of each segment, by its first
    histories: dict[int, dict[str, History]] = field(default_factory=dict)  # residuals by segment's end and stream

    def count_bytes(self, slots: int = 0) -> int:
        histories = [history for streams in self.histories.values() for history in streams.values()]
        return self.rule_progress.nbytes + sum(history.count_bytes(slots) for history in histories)


@dataclass(eq=False)
class StackCall:
    """State of one call of the transformer."""

    history: StackHistory
    entry: dict[str, Tensor]
    position: int = -1
    probe: Tensor | None = None
    full: bool | None = None  # whether the blocks after the probe are evaluated; None before the decision
    step: float = 0.0
    start: dict[str, Tensor] = field(default_factory=dict)  # input of the open segment
    begin: int = -1  # positions of the open segment's first and latest blocks; -1 without one
    end: int = -1
    place: Place | None = None  # the latest evaluated block, and its output
    returned: dict[str, Tensor] = field(default_factory=dict)
    residual: Tensor | None = None  # of the denoised stream, in the latest evaluated segment


class Stack:
    """Hooks on all blocks of a `Transformer` (owner). Raises ValueError for a rule that always evaluates all blocks."""

    def __init__(self, owner: Any, rule: Rule, places: list[Place], modules: dict[str, nn.Module]):
        self.owner = owner
        self.rule = rule if isinstance(rule, Probe) else None
        head, tail = (self.rule.head, self.rule.tail) if self.rule is not None else (0, 0)
        self.first, self.last = head, len(places) - tail
        if self.first >= self.last:
            raise ValueError(
                f"when={rule.name!r} always evaluates the first {head} and the last {tail} blocks; "
                f"{owner.name} has {len(places)}, so there is none to skip"
            )
        self.forecasts = places[self.first : self.last]
        self.walk: StackCall | None = None
        first = {id(modules[place.name]): place for place in reversed(places)}  # blocks may be shared
        blocks = [(modules[place.name], place) for place in reversed(first.values())]
        self.hooks = [Hook(block, partial(self._call, block, place)) for block, place in blocks]

    def finish(self) -> None:
        walk, self.walk = self.walk, None
        if walk is None:
            return
        self._close(walk)
        if walk.full:
            history = walk.history
            history.histories = {end: history.histories[end] for end in history.ends.values()}
        if walk.residual is not None and self.rule is not None:
            self.rule.observe_residual(walk.history.rule_progress, walk.residual)

    def _call(
        self, module: nn.Module, place: Place, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        if not self.owner.is_inside:  # called outside of the transformer
            return forward(*args, **kwargs)
        streams = find_streams(module, args, kwargs)
        walk = self.walk
        if walk is None:
            entry = _copies(streams) if self.rule is not None else streams
            walk = self.walk = StackCall(self.owner.histories.setdefault("stack", StackHistory()), entry)
        walk.position += 1
        if not self.first <= walk.position < self.last:
            if walk.full is not None:
                self._close(walk)
            output = forward(*args, **kwargs)
            if walk.position == self.first - 1:
                walk.probe = self._split(module, streams, output)[1][main_stream_name(streams)]
            return output
        if walk.full is None:
            walk.full = self._decide(walk, place, forward, args, kwargs)
        if not walk.full:
            return self._forecast(walk, place, streams)
        if walk.begin >= 0 and not _continues(walk, place, streams):
            self._close(walk)
        if walk.begin < 0:
            walk.begin, walk.start = walk.position, self._start(walk, streams)
        output = forward(*args, **kwargs)
        build, walk.returned = self._split(module, streams, output)
        walk.history.blocks[walk.position] = place, build
        walk.place, walk.end = place, walk.position
        self.owner.evaluated.append(place.name)
        return output

    def _decide(
        self, walk: StackCall, place: Place, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> bool:
        owner, history, rule = self.owner, walk.history, self.rule
        is_fresh = not history.ends
        if rule is None:
            full, walk.step = owner.decide(place, forward, args, kwargs) or is_fresh, owner.run_progress.index
        else:
            state, progress = history.rule_progress, owner.run_progress
            state.index, state.total, state.first = progress.index, progress.total, progress.first
            state.latent, state.level = owner.latent, owner.level
            entry = walk.entry[main_stream_name(walk.entry)]
            full = rule.is_full(state, entry, entry if walk.probe is None else walk.probe, is_fresh)
            owner.state.changes += [state.change] if state.change else []
            walk.step = progress.index if full else rule.forecast_at(state)
            state.finish_step(full)
            state.latent = None
            owner.state.decision = full or bool(owner.state.decision)  # over all calls of the step
        if full:
            history.blocks, history.ends = {}, {}
        return full

    def _start(self, walk: StackCall, streams: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the input of a segment's first block, or of the probe if a forecast replaces the probe too."""
        is_whole = self.rule is not None and self.rule.replaces_probe and walk.position == self.first
        # only if the probe keeps the shapes
        return walk.entry if is_whole and _shapes(walk.entry) == _shapes(streams) else _copies(streams)

    def _split(self, module: nn.Module, streams: dict[str, Tensor], output: Any) -> tuple[Build, dict[str, Tensor]]:
        leaves, spec = tree_flatten(output)
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        names = match_outputs(module, streams, shapes)
        for name, leaf in zip(names, leaves, strict=True):
            if name is None and isinstance(leaf, Tensor):
                alternative = "use where='block' or 'module'" if self.rule is None else "use a rule that counts steps"
                raise RuntimeError(
                    f"{type(module).__name__} returns a tensor of shape {tuple(leaf.shape)} that continues none of its "
                    f"inputs, so its blocks are not a stack; {alternative}"
                )
        constants = [leaf if name is None else None for name, leaf in zip(names, leaves, strict=True)]
        returned = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name is not None}

        def build(streams: dict[str, Tensor]) -> Any:
            pairs = zip(names, constants, strict=True)
            return tree_unflatten([constant if name is None else streams[name] for name, constant in pairs], spec)

        return build, returned

    def _close(self, walk: StackCall) -> None:
        """End the open segment, if any, and update its histories."""
        if walk.begin < 0:
            return
        owner, history = self.owner, walk.history
        if not walk.full:
            raise RuntimeError(
                f"{owner.name} does not call block {history.blocks[walk.end][0].name}, which it called when it was "
                "evaluated; call session.reset() where the blocks that are called change"
            )
        history.ends[walk.begin] = walk.end
        before = history.histories.get(walk.end, {})
        added = {name: leaf.detach() - walk.start[name].detach() for name, leaf in walk.returned.items()}
        history.histories[walk.end] = {
            name: owner.basis.update(before.get(name), residual, owner.run_progress.index)
            for name, residual in added.items()
        }
        if not before:
            history.histories[walk.end] = owner.check_memory(history.histories[walk.end])
        walk.residual = added.get(main_stream_name(walk.start))
        walk.begin, walk.end, walk.returned = -1, -1, {}

    def _forecast(self, walk: StackCall, place: Place, streams: dict[str, Tensor]) -> Any:
        owner, history, position = self.owner, walk.history, walk.position
        evaluated, build = history.blocks.get(position, (None, None))
        if build is None or evaluated is not place:
            raise RuntimeError(
                f"{owner.name} calls block {place.name}, but did not call it in the latest evaluation; call "
                "session.reset() when the called blocks change"
            )
        if position in history.ends:
            walk.begin, walk.end = position, history.ends[position]
            walk.start = self._start(walk, streams)
        owner.forecast.append(place.name)
        if position != walk.end:
            return build(streams)
        sums = dict(streams)
        for name, before in history.histories[position].items():
            value = owner.basis.forecast(before, walk.step)
            history.histories[position][name] = owner.basis.roll(before, value)
            sums[name] = walk.start[name] + value
        walk.begin, walk.end = -1, -1
        return build(sums)


def _continues(walk: StackCall, place: Place, streams: dict[str, Tensor]) -> bool:
    """Whether a block continues the segment: shapes are equal, and the first block of a list gets its tensors."""
    if _shapes(streams) != _shapes(walk.start):
        return False
    assert walk.place is not None
    is_same_list = walk.place.name.rpartition(".")[0] == place.name.rpartition(".")[0]
    return is_same_list or any(walk.returned.get(name) is tensor for name, tensor in streams.items())


def _copies(streams: dict[str, Tensor]) -> dict[str, Tensor]:
    # blocks, and the transformer between them, may write into the streams
    return {name: tensor.clone() for name, tensor in streams.items()}


def _shapes(streams: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in streams.items()}

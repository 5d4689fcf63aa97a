"""Forecast of a transformer's blocks as one stack with one residual.

A rule may evaluate some first blocks (its probe) and some last blocks at every step. At a forecast step the blocks in
between return their inputs, and the last of them also adds the residual (its output minus the input of the first).
Streams are the tensors that blocks update. The blocks are divided into segments with separate residuals where the
shapes of streams change, and between two lists of blocks if other code changes the streams there.
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
"""Function that builds a block's output from streams by name; other values come from the evaluated output."""


@dataclass(eq=False)
class StackHistory:
    """History of the stack in one branch. A position is the number of a block's call in a call of the transformer."""

    rule_progress: RunProgress = field(default_factory=RunProgress)
    blocks: dict[int, tuple[Place, Build]] = field(default_factory=dict)  # by position, of the latest evaluation
    ends: dict[int, int] = field(default_factory=dict)  # by first position of a segment, its last position
    histories: dict[int, dict[str, History]] = field(default_factory=dict)  # residuals, by last position and by stream

    def count_bytes(self, slots: int = 0) -> int:
        histories = [history for streams in self.histories.values() for history in streams.values()]
        return self.rule_progress.nbytes + sum(history.count_bytes(slots) for history in histories)


@dataclass(eq=False)
class StackCall:
    """State of one call of the transformer."""

    history: StackHistory
    entry: dict[str, Tensor]  # input of the first block
    position: int = -1
    probe: Tensor | None = None  # output of the probe's last block, denoised stream
    is_full: bool | None = None  # whether the blocks after the probe are evaluated; None before the decision
    step: float = 0.0  # the step for which residuals are forecast
    start: dict[str, Tensor] = field(default_factory=dict)  # input of the open segment
    begin: int = -1  # position of the open segment's first block; -1 if no segment is open
    end: int = -1  # position of its latest block in a full call, of its last block in a forecast
    place: Place | None = None  # the latest evaluated block
    returned: dict[str, Tensor] = field(default_factory=dict)  # the output of this block
    residual: Tensor | None = None  # residual of the denoised stream in the latest evaluated segment


class Stack:
    """Hooks on all blocks of a `Transformer` (owner). Raises ValueError if the rule leaves no block to forecast."""

    def __init__(self, owner: Any, rule: Rule, places: list[Place], modules: dict[str, nn.Module]):
        self.owner = owner
        self.rule = rule if isinstance(rule, Probe) else None
        head, tail = (self.rule.head, self.rule.tail) if self.rule is not None else (0, 0)
        self.places, self.start, self.stop = places, head, len(places) - tail
        if self.start >= self.stop:
            raise ValueError(
                f"when={rule.name!r} always evaluates the first {head} and the last {tail} blocks; "
                f"{owner.name} has {len(places)}, so there is none to skip"
            )
        self.forecast_places = places[self.start : self.stop]
        self.call: StackCall | None = None
        first_places = {id(modules[place.name]): place for place in reversed(places)}  # blocks may be shared
        blocks = [(modules[place.name], place) for place in reversed(first_places.values())]
        self.hooks = [Hook(block, partial(self._call, block, place)) for block, place in blocks]

    def finish(self) -> None:
        call, self.call = self.call, None
        if call is None:
            return
        self._close_segment(call)
        if call.is_full:
            history = call.history
            history.histories = {end: history.histories[end] for end in history.ends.values()}
        if call.residual is not None and self.rule is not None:
            self.rule.observe_residual(call.history.rule_progress, call.residual)

    def _call(
        self, module: nn.Module, place: Place, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        if not self.owner.is_inside:  # called outside of the transformer
            return forward(*args, **kwargs)
        streams = find_streams(module, args, kwargs)
        call = self.call
        if call is None:
            entry = _copy(streams) if self.rule is not None else streams
            call = self.call = StackCall(self.owner.histories.setdefault("stack", StackHistory()), entry)
        call.position += 1
        if not self.start <= call.position < self.stop:
            if call.is_full is not None:
                self._close_segment(call)
            output = forward(*args, **kwargs)
            if call.position == self.start - 1:
                call.probe = self._split(module, streams, output)[1][main_stream_name(streams)]
            return output
        if call.is_full is None:
            call.is_full = self._decide(call, place, forward, args, kwargs)
        if not call.is_full:
            return self._forecast(call, place, streams)
        if call.begin >= 0 and not _continues_segment(call, place, streams):
            self._close_segment(call)
        if call.begin < 0:
            call.begin, call.start = call.position, self._segment_input(call, streams)
        output = forward(*args, **kwargs)
        build, call.returned = self._split(module, streams, output)
        call.history.blocks[call.position] = place, build
        call.place, call.end = place, call.position
        self.owner.evaluated.append(place.name)
        return output

    def _decide(
        self, call: StackCall, place: Place, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> bool:
        owner, history, rule = self.owner, call.history, self.rule
        is_fresh = not history.ends
        if rule is None:
            is_full, call.step = owner.decide(place, forward, args, kwargs) or is_fresh, owner.run_progress.index
        else:
            state, progress = history.rule_progress, owner.run_progress
            state.index, state.total, state.first = progress.index, progress.total, progress.first
            state.latent, state.level = owner.latent, owner.level
            entry = call.entry[main_stream_name(call.entry)]
            is_full = rule.is_full(state, entry, entry if call.probe is None else call.probe, is_fresh)
            owner.state.changes += [state.change] if state.change else []
            call.step = progress.index if is_full else rule.forecast_at(state)
            state.finish_step(is_full)
            state.latent = None
            owner.state.decision = is_full or bool(owner.state.decision)  # over all calls of the step
        if is_full:
            history.blocks, history.ends = {}, {}
        return is_full

    def _segment_input(self, call: StackCall, streams: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a segment's input: the probe's, if the segment follows the probe and its forecast replaces both."""
        includes_probe = self.rule is not None and self.rule.replaces_probe and call.position == self.start
        # a residual needs equal shapes before and after the probe
        return call.entry if includes_probe and _shapes(call.entry) == _shapes(streams) else _copy(streams)

    def _split(self, module: nn.Module, streams: dict[str, Tensor], output: Any) -> tuple[Build, dict[str, Tensor]]:
        leaves, spec = tree_flatten(output)
        shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
        names = match_outputs(module, streams, shapes)
        for name, leaf in zip(names, leaves, strict=True):
            if name is None and isinstance(leaf, Tensor):
                alternative = "use where='block' or 'module'" if self.rule is None else "use a rule that counts steps"
                raise RuntimeError(
                    f"{type(module).__name__} returns a tensor of shape {tuple(leaf.shape)} that updates none of its "
                    f"inputs, so its blocks are not a stack; {alternative}"
                )
        constants = [leaf if name is None else None for name, leaf in zip(names, leaves, strict=True)]
        returned = {name: leaf for name, leaf in zip(names, leaves, strict=True) if name is not None}

        def build(streams: dict[str, Tensor]) -> Any:
            pairs = zip(names, constants, strict=True)
            return tree_unflatten([constant if name is None else streams[name] for name, constant in pairs], spec)

        return build, returned

    def _close_segment(self, call: StackCall) -> None:
        """End the open segment, if any, and update its histories. Raises RuntimeError in the middle of a forecast."""
        if call.begin < 0:
            return
        owner, history = self.owner, call.history
        if not call.is_full:
            raise RuntimeError(
                f"{owner.name} does not call block {history.blocks[call.end][0].name}, which it called when it was "
                "evaluated; call session.reset() when the called blocks change"
            )
        history.ends[call.begin] = call.end
        previous = history.histories.get(call.end, {})
        residuals = {name: leaf.detach() - call.start[name].detach() for name, leaf in call.returned.items()}
        history.histories[call.end] = {
            name: owner.basis.update(previous.get(name), residual, owner.run_progress.index)
            for name, residual in residuals.items()
        }
        if not previous:
            history.histories[call.end] = owner.check_memory(history.histories[call.end])
        call.residual = residuals.get(main_stream_name(call.start))
        call.begin, call.end, call.returned = -1, -1, {}

    def _forecast(self, call: StackCall, place: Place, streams: dict[str, Tensor]) -> Any:
        owner, history, position = self.owner, call.history, call.position
        evaluated, build = history.blocks.get(position, (None, None))
        if build is None or evaluated is not place:
            raise RuntimeError(
                f"{owner.name} calls block {place.name}, but did not call it in the latest evaluation; call "
                "session.reset() when the called blocks change"
            )
        if position in history.ends:
            call.begin, call.end = position, history.ends[position]
            call.start = self._segment_input(call, streams)
        owner.forecast.append(place.name)
        if position != call.end:
            return build(streams)
        sums = dict(streams)
        for name, previous in history.histories[position].items():
            value = owner.basis.forecast(previous, call.step)
            history.histories[position][name] = owner.basis.roll(previous, value)
            sums[name] = call.start[name] + value
        call.begin, call.end = -1, -1
        return build(sums)


def _continues_segment(call: StackCall, place: Place, streams: dict[str, Tensor]) -> bool:
    """Whether a block has input of the segment's shapes, and is in the latest block's list or reads its output."""
    if _shapes(streams) != _shapes(call.start):
        return False
    assert call.place is not None
    is_same_list = call.place.name.rpartition(".")[0] == place.name.rpartition(".")[0]
    return is_same_list or any(call.returned.get(name) is tensor for name, tensor in streams.items())


def _copy(streams: dict[str, Tensor]) -> dict[str, Tensor]:
    # blocks, and the transformer between them, may write into the streams
    return {name: tensor.clone() for name, tensor in streams.items()}


def _shapes(streams: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in streams.items()}

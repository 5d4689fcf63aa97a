"""Hook on one module that evaluates it, forecasts its output, or skips it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_flatten, tree_unflatten

from paradec.integrations.diffusers.hooks.blocks import ONE_TENSOR_TRANSFORMERS, Place, find_streams, match_outputs
from paradec.integrations.diffusers.hooks.hook import Hook
from paradec.samplers.forecast.bases import History
from paradec.samplers.forecast.refresh import relative_error


@dataclass
class ModuleHistory:
    """History of a module's output in one branch. The output is flattened by `tree_flatten`."""

    leaves: list[Any]  # leaves of the latest output; None for a leaf that has a history
    histories: list[History | None]  # one for each leaf
    spec: Any  # of `tree_unflatten`

    def count_bytes(self, slots: int = 0) -> int:
        return sum(history.count_bytes(slots) for history in self.histories if history is not None)


class Tap:
    """Hook on one module of a `Transformer` (owner). is_verified: whether to measure the error of its forecasts."""

    def __init__(self, owner: Any, place: Place, module: nn.Module, is_verified: bool = False):
        self.owner, self.place, self.module, self.is_verified = owner, place, module, is_verified
        self.hook = Hook(module, self.call) if place.name else None

    def call(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        owner, place = self.owner, self.place
        if not owner.is_inside:  # called outside of the transformer
            return forward(*args, **kwargs)
        call_suffix = owner.call_suffix(place.name)
        history = owner.histories.get(place.name + call_suffix)
        is_full = owner.decide(place, forward, args, kwargs)
        sink = history if place.sink is None else owner.histories.get(place.sink + call_suffix)
        if is_full or history is None or sink is None:
            output = forward(*args, **kwargs)
            owner.histories[place.name + call_suffix] = new = self._update_history(history, output, args, kwargs)
            if history is None:
                new.histories = owner.check_memory(new.histories)
            owner.evaluated.append(place.name)
            return output
        owner.forecast.append(place.name)
        if place.kind == "skip":
            return forward(*args, **kwargs) if self.is_verified else tree_unflatten(history.leaves, history.spec)
        basis, progress = owner.basis, owner.run_progress
        starts = self._residual_starts(history.histories, args, kwargs)
        values, error = [], None
        real = tree_flatten(forward(*args, **kwargs))[0] if self.is_verified else None
        for i, (leaf, before, start) in enumerate(zip(history.leaves, history.histories, starts, strict=True)):
            if before is not None:
                value = basis.forecast(before, progress.index)
                history.histories[i] = rolled = basis.roll(before, value)
                if real is not None and error is None:
                    error = relative_error(value, real[i] if start is None else real[i] - start)
                leaf = value if start is None else start + value
                if any(leaf is tensor for tensor in rolled.tensors):
                    leaf = leaf.clone()  # callers may write into the output
            values.append(leaf)
        if error is not None:
            progress.error = error
        return tree_unflatten(values, history.spec)

    def _update_history(
        self, history: ModuleHistory | None, output: Any, args: tuple, kwargs: dict[str, Any]
    ) -> ModuleHistory:
        leaves, spec = tree_flatten(output)
        histories: list[History | None] = [None] * len(leaves)
        if self.place.kind == "skip":
            return ModuleHistory([self._make_placeholder(leaf) for leaf in leaves], histories, spec)
        has_same_leaves = history is not None and len(history.histories) == len(leaves)
        before = history.histories if history is not None and has_same_leaves else histories.copy()
        for i, start in enumerate(self._residual_starts(leaves, args, kwargs)):
            leaf = leaves[i]
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                value = leaf.detach().clone() if start is None else leaf.detach() - start.detach()
                histories[i] = self.owner.basis.update(before[i], value, self.owner.run_progress.index)
                leaves[i] = None
        return ModuleHistory(leaves, histories, spec)

    def _residual_starts(self, values: list[Any], args: tuple, kwargs: dict[str, Any]) -> list[Tensor | None]:
        """Return for each output the input to which the module adds a residual; None if it adds none."""
        if self.place.kind != "residual":
            return [None] * len(values)
        tensors = [value.tensors[0] if isinstance(value, History) else value for value in values]
        shapes = [tuple(tensor.shape) if isinstance(tensor, Tensor) else None for tensor in tensors]
        streams = find_streams(self.module, args, kwargs)
        if type(self.module).__name__ in ONE_TENSOR_TRANSFORMERS and shapes[0] is not None:
            streams = {name: pad(tensor, (0, 0, shapes[0][1] - tensor.shape[1], 0)) for name, tensor in streams.items()}
        return [streams[name] if name else None for name in match_outputs(self.module, streams, shapes)]

    def _make_placeholder(self, leaf: Any) -> Any:
        """Build the placeholder for an output of a skipped module: with width 0 if `place.narrow`, else full of NaN."""
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if self.place.narrow:
            return leaf.new_empty((*leaf.shape[:-1], 0))
        return leaf.new_full((), torch.nan).expand(leaf.shape)

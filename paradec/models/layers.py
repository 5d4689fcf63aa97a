"""A decoder's layers, and a context that records their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def decoder_layers(model: Any) -> nn.ModuleList | None:
    """A model's layers in order; None if it has no `nn.ModuleList` of `num_hidden_layers` modules."""
    lists = (layers for layers in model.module.modules() if isinstance(layers, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == model.text_config.num_hidden_layers), None)


def require_decoder_layers(model: Any) -> nn.ModuleList:
    """As `decoder_layers`, but raise ValueError instead of returning None."""
    if (layers := decoder_layers(model)) is None:
        raise ValueError(f"{model.facts.name} has no list of decoder layers to read outputs from")
    return layers


class LayerOutputs:
    """A context that records outputs of a network's layers.

    layers: all n layers of the network, in order.
    indices: layers to read, from 0 to n. n - 1 is the last layer's output after the final norm, n before this norm."""

    def __init__(self, layers: nn.ModuleList, indices: Sequence[int]):
        self.layers, self.indices = layers, tuple(indices)
        self.outputs: dict[int, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> LayerOutputs:
        for index in self.indices:
            layer = self.layers[min(index, len(self.layers) - 1)]
            self._handles.append(layer.register_forward_hook(partial(self._record, index)))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, index: int, layer: nn.Module, args: Any, output: Any) -> None:
        self.outputs[index] = output[0] if isinstance(output, tuple) else output

    def concatenate(self, last: Tensor) -> Tensor:
        """Concatenate outputs in the order of `indices`: [R, Q, layers * D]. last: [R, Q, D]: hidden states after the
        final norm, which index n - 1 means, as in transformers."""
        parts = [last if index == len(self.layers) - 1 else self.outputs[index] for index in self.indices]
        return torch.cat([part.to(last.device) for part in parts], -1)

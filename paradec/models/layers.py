"""What some of a model's layers put out during one call, for drafters that read them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paradec.core.family_queries import CausalQuery


def decoder_layers(module: nn.Module, count: int | None) -> nn.ModuleList | None:
    """The layers that a network of `count` layers runs one after the other; None where no list of that length is
    found."""
    lists = (part for part in module.modules() if isinstance(part, nn.ModuleList))
    return next((part for part in lists if len(part) == count), None)


class LayerOutputs:
    """A context in which this thread's calls of a network leave the outputs of some layers. Nothing stays on the
    network after it, and other threads' calls are not looked at.

    Args:
        layers: all of the network's, in their order.
        wanted: which of them, from 0; as many as there are is the last one, before the final norm.
    """

    def __init__(self, layers: nn.ModuleList, wanted: Sequence[int]):
        self.layers, self.wanted = layers, tuple(wanted)
        self.found: dict[int, Tensor] = {}
        self._thread = threading.get_ident()
        self._handles: list[Any] = []

    def __enter__(self) -> LayerOutputs:
        for index in self.wanted:
            layer = self.layers[min(index, len(self.layers) - 1)]
            self._handles.append(layer.register_forward_hook(self._noting(index)))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _noting(self, index: int) -> Any:
        def note(layer: nn.Module, args: Any, output: Any) -> None:
            if threading.get_ident() == self._thread:
                self.found[index] = output[0] if isinstance(output, tuple) else output

        return note

    def side_by_side(self, last: Tensor) -> Tensor:
        """[R, Q, layers * D]: in the order of `wanted`. `last` [R, Q, D] are the hidden states after the final norm,
        which are used as the last layer's, as in transformers' `output_hidden_states`."""
        parts = [last if index == len(self.layers) - 1 else self.found[index] for index in self.wanted]
        return torch.cat([part.to(last.device) for part in parts], -1)


def answer_with_layers(model: Any, query: CausalQuery, store: Any) -> Tensor:
    """The model's answer to a query with `keep_layers`, whose `hidden` gets them side by side."""
    assert query.keep_layers is not None
    layers = decoder_layers(model.module, model.text_config.num_hidden_layers)
    if layers is None:
        raise ValueError(f"{model.facts.name} has no list of decoder layers, whose outputs are asked for")
    plain = query.but(keep_layers=None, keep_hidden=True)
    with LayerOutputs(layers, query.keep_layers) as outputs:
        logits: Tensor = model(plain, store)
    if plain.hidden is None:
        raise ValueError(f"{model.facts.name} left no hidden states in its query")
    query.hidden = outputs.side_by_side(plain.hidden)
    return logits

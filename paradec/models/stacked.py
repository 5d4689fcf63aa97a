"""Weights that a file has one by one and a module as one, or the other way round: experts, and LLaDA2's queries, keys
and values. Reading is transformers' part; here is how the module's become the file's again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"


@dataclass(frozen=True)
class StackedWeight:
    """One weight of a file, by what the module holds.

    Args:
        own: the module's names of the weights that it is made of, whose rows follow each other in it.
        index: what of them it is.
    """

    own: tuple[str, ...]
    index: tuple[Any, ...] = ()

    def of(self, tensors: Mapping[str, Tensor] | Fetched) -> Tensor:
        """The file's weight, of the module's own."""
        found = [tensors[name][self.index] if self.index else tensors[name] for name in self.own]
        return found[0] if len(found) == 1 else torch.cat(found)


def parts_of(state: Mapping[str, Tensor], fused: Mapping[str, tuple[str, ...]] | None) -> dict[str, StackedWeight]:
    """What a file holds of a module, under the module's names (but for what they do not name).

    Args:
        state: the module's `state_dict`; sizes are all that is looked at.
        fused: as in `paradec.models.family.Family`.
    """
    found: dict[str, StackedWeight] = {}
    for own, tensor in state.items():
        if own.endswith(GATE_UP):
            experts, inner = tensor.shape[0], tensor.shape[1] // 2
            place = own.removesuffix("gate_up_proj")
            for index in range(experts):
                found[f"{place}{index}.gate_proj.weight"] = StackedWeight((own,), (index, slice(0, inner)))
                found[f"{place}{index}.up_proj.weight"] = StackedWeight((own,), (index, slice(inner, None)))
        elif own.endswith(DOWN):
            place = own.removesuffix("down_proj")
            for index in range(tensor.shape[0]):
                found[f"{place}{index}.down_proj.weight"] = StackedWeight((own,), (index,))
        elif (whole := _whole(own, fused)) is not None:
            found[whole[0]] = StackedWeight(whole[1])
        else:
            found[own] = StackedWeight((own,))
    return found


def _whole(own: str, fused: Mapping[str, tuple[str, ...]] | None) -> tuple[str, tuple[str, ...]] | None:
    """The weight of the file that holds this one's rows, and all whose rows are in it."""
    for name, parts in (fused or {}).items():
        for part in parts:
            if own.endswith(f".{part}"):
                place = own.removesuffix(part)
                return place + name, tuple(place + other for other in parts)
    return None


class Fetched:
    """Tensors by name from a function that may read them from elsewhere, each kept until another one is asked for: the
    parts of one are asked for one after the other."""

    def __init__(self, fetch: Callable[[str], Tensor]):
        self._fetch = fetch
        self._name, self._tensor = "", torch.empty(0)

    def __getitem__(self, name: str) -> Tensor:
        if name != self._name:
            self._name, self._tensor = name, self._fetch(name)
        return self._tensor

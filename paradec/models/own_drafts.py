"""Models that draft for themselves: what a call needs that drafts a block of masks over the model's own causal store,
and the adapter that acts on such calls alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paradec.models.checkpoint import Stored, published_to_own
from paradec.models.lora import LoRA


@dataclass(frozen=True)
class OwnDrafts:
    """How a model that decodes token by token also fills blocks of masks.

    Args:
        mask_token_id: the id of a mask.
        block_length: the block that it was trained with, the last final token included.
        adapter: what is added to its matrices in such calls; None for models without.
    """

    mask_token_id: int
    block_length: int
    adapter: DraftAdapter | None = None


@dataclass(frozen=True)
class DraftAdapter:
    """Products B A of low rank that are added to linear layers while a call drafts, and never merged.

    Args:
        lora: as it was read.
        products: the module's names of the layers -> A [r, in], B [out, r] and what their product is multiplied with.
    """

    lora: LoRA
    products: Mapping[str, tuple[Tensor, Tensor, float]]

    @classmethod
    def of(cls, lora: LoRA, source: str, stored: Mapping[str, Stored], names: Mapping[str, str]) -> DraftAdapter:
        """The adapter for a checkpoint.

        Args:
            source, stored: its name, and what it holds. names: its name patterns -> the module's names.

        Raises:
            CheckpointError: an adapter of another checkpoint.
        """
        products = {}
        for name, scale in lora.scales(source, stored).items():
            own = published_to_own(f"{name}.weight", names).removesuffix(".weight")
            products[own] = (*lora.pairs[name], scale)
        return cls(lora, products)

    @contextmanager
    def on(self, module: nn.Module) -> Iterator[None]:
        """Add the products to what the layers make of calls of this thread; other threads' calls go on without."""
        thread = threading.get_ident()
        with ExitStack() as hooks:
            for name, product in self.products.items():
                handle = module.get_submodule(name).register_forward_hook(_adding(thread, *product))
                hooks.callback(handle.remove)
            yield


def _adding(thread: int, down: Tensor, up: Tensor, scale: float) -> Any:
    """A forward hook that adds a product to what a linear layer made."""

    def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if threading.get_ident() != thread:
            return None
        into, out = (part.to(output.device, output.dtype) for part in (down, up))
        return output + scale * torch.nn.functional.linear(torch.nn.functional.linear(inputs[0], into), out)

    return add

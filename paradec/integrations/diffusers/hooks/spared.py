"""What a call of a transformer need not compute, beside the modules that are forecast. No value of the output changes.

- `Idle`: a module that feeds nothing but modules that are forecast in this call. A single NaN that broadcasts
  replaces its output, so that what comes between (modulation, casts) takes one row instead of all.
- `Once`: an embedding that is asked for again with the same tensors in the same call, at evaluated steps too.

What feeds what cannot be read off a module tree: there is a table of diffusers' blocks here, and all others are called
in full. Should a stand-in reach the output nevertheless, it is NaN.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paradec.integrations.diffusers.hooks.blocks import Place
from paradec.integrations.diffusers.hooks.taps import Patch

Feeds = dict[str, tuple[str, ...]]
ADALN: Feeds = {"norm1.norm": ("attn",), "norm2": ("ff",)}
CONTEXT: Feeds = {"norm1_context.norm": ("attn",), "norm2_context": ("ff_context",)}
SINGLE: Feeds = {"norm.norm": ("proj_out",)}
FEEDS: dict[str, Feeds] = {
    "BasicTransformerBlock, ada_norm_zero": {"norm1.norm": ("attn1",), "norm2": ("attn2",), "norm3": ("ff",)},
    "BasicTransformerBlock, ada_norm_single": {"norm1": ("attn1",), "norm2": ("ff",)},
    "BasicTransformerBlock, layer_norm": {"norm1": ("attn1",), "norm2": ("attn2",), "norm3": ("ff",)},
    "FluxTransformerBlock": ADALN | CONTEXT,
    "FluxSingleTransformerBlock": SINGLE,
    "JointTransformerBlock": ADALN | CONTEXT | {"norm1.norm": ("attn", "attn2")},
    "WanTransformerBlock": {"norm1": ("attn1",), "norm2": ("attn2",), "norm3": ("ffn",)},
    "HunyuanVideoTransformerBlock": ADALN | CONTEXT,
    "HunyuanVideoSingleTransformerBlock": SINGLE,
    "QwenImageTransformerBlock": {
        "img_norm1": ("attn",),
        "txt_norm1": ("attn",),
        "img_norm2": ("img_mlp",),
        "txt_norm2": ("txt_mlp",),
    },
}
"""Norms of a block by its class (and `norm_type`), and the branches that each of them alone feeds. Their names are
within the block; branches that a block does not have are passed over."""

ROTARY = {
    "FluxTransformer2DModel": "pos_embed",
    "WanTransformer3DModel": "rope",
    "HunyuanVideoTransformer3DModel": "rope",
}
"""Rotary embeddings of a transformer, by its class: all attention modules of its blocks need them, and nothing else."""

EMBEDDINGS = ("CombinedTimestepLabelEmbeddings", "Timesteps")
"""Classes of embeddings that every block of a DiT has for itself, and the first one for the output too."""


class Caller(Protocol):
    """What is read here of the transformer that is being called."""

    inside: int | None
    """The thread in which it is being called for its run."""
    computed: dict[Any, tuple[Any, Any]]
    """What `Once` has seen in this call."""

    def again(self, name: str) -> str:
        """What tells this call of the module of that name from its other calls in the same forward."""
        ...

    def rests(self, sinks: Sequence[str], again: str) -> bool:
        """Whether all these modules will be forecast in this call."""
        ...


@dataclass(frozen=True)
class Feeder:
    """A module that feeds only modules that are hooked: its name, theirs, and its block's ("" outside of blocks)."""

    name: str
    sinks: tuple[str, ...]
    block: str = ""


def feeders(transformer: nn.Module, places: Sequence[Place], verified: str | None, whole: bool) -> Iterator[Feeder]:
    """The modules that feed nothing but these places, as far as the table knows.

    Args:
        verified: name of the block that is evaluated at forecast steps too; None: there is none.
        whole: whether the places are all branches of all blocks.
    """
    modules = dict(transformer.named_modules())
    forecast = {place.name for place in places if place.kind == "forecast"}
    for name in dict.fromkeys(place.block for place in places if place.kind == "forecast"):
        block = modules.get(name)
        if name == verified or block is None:
            continue
        for norm, branches in FEEDS.get(_kind(block), {}).items():
            sinks = tuple(f"{name}.{branch}" for branch in branches if getattr(block, branch, None) is not None)
            if f"{name}.{norm}" in modules and sinks and forecast.issuperset(sinks):
                yield Feeder(f"{name}.{norm}", sinks, name)
    rotary = ROTARY.get(type(transformer).__name__)
    if whole and verified is None and rotary is not None and rotary in modules:
        yield Feeder(rotary, tuple(place.name for place in places if place.kind == "forecast"))


def _kind(block: nn.Module) -> str:
    kind = type(block).__name__
    return f"{kind}, {block.norm_type}" if hasattr(block, "norm_type") else kind


class Idle:
    """Wraps a feeder, and leaves it out where all that it feeds is forecast."""

    def __init__(self, owner: Caller, feeder: Feeder, module: nn.Module, block: nn.Module | None):
        self.owner, self.name, self.sinks, self.block = owner, feeder.name, feeder.sinks, block
        self.found: Any = None
        """The stand-in for what it returned, and that output's device. Its type does not matter: nothing reads it."""
        self.patch = Patch(module, self.call)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the module's call."""
        owner = self.owner
        if owner.inside != threading.get_ident():
            return self.patch.inner(*args, **kwargs)
        rests = owner.rests(self.sinks, owner.again(self.name))
        # a feed-forward that is called in chunks counts its rows
        if rests and self.found is not None and getattr(self.block, "_chunk_size", None) is None:
            return self.found[0]
        output = self.patch.inner(*args, **kwargs)
        leaf = output if isinstance(output, Tensor) else tree_leaves(output)[0]
        if self.found is None or self.found[1] != leaf.device:
            self.found = (_stand_in(output), leaf.device)
        return output


class Once:
    """Wraps an embedding, and returns what it, or one with the same settings and no weights, returned before in this
    call of the transformer for the same tensors."""

    def __init__(self, owner: Caller, module: nn.Module):
        self.owner, self.module = owner, module
        plain = not list(module.parameters()) and not list(module.buffers()) and not list(module.children())
        settings = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        settings.pop("training", None)
        self.key: Any = (type(module), *sorted(settings.items())) if plain else id(module)
        self.patch = Patch(module, self.call)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Replace the module's call."""
        owner = self.owner
        own = self.module.training or self.module._forward_hooks or self.module._forward_pre_hooks
        if own or owner.inside != threading.get_ident():  # labels drop out in training, and hooks change what returns
            return self.patch.inner(*args, **kwargs)
        # tensors by identity: they are kept, so that no other one can take an id in this call
        key = (self.key, *map(id, args), *((name, id(value)) for name, value in kwargs.items()))
        known = owner.computed.get(key)
        if known is None:
            known = owner.computed[key] = ((args, kwargs), self.patch.inner(*args, **kwargs))
        return known[1]


def embeddings(transformer: nn.Module) -> list[nn.Module]:
    """The modules that are worth wrapping in `Once`."""
    if type(transformer).__name__ != "DiTTransformer2DModel":
        return []
    return [module for module in transformer.modules() if type(module).__name__ in EMBEDDINGS]


@torch.inference_mode(False)  # for the next runs too, which may have gradients
def _stand_in(output: Any) -> Any:
    """A NaN that broadcasts, in the place of every tensor."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        return torch.full((1,) * leaf.ndim, torch.nan, dtype=leaf.dtype, device=leaf.device)

    return tree_map(one, output)

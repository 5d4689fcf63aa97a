"""Modules that feed nothing but modules that are forecast in a call, and are left out then.

What feeds what cannot be read off a module tree: there is a table of diffusers' blocks here, and all others are called
in full. A single NaN that broadcasts replaces their output, so that what comes between (modulation, casts) takes one
row instead of all, and would show if it reached the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from paradec.integrations.diffusers.hooks.blocks import Place
from paradec.integrations.diffusers.hooks.hook import Hook

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


class Caller(Protocol):
    """What is read here of the transformer that is being called."""

    is_inside: bool

    def call_index(self, name: str) -> str:
        """What tells this call of the module of that name from its other calls in the same forward."""
        ...

    def is_forecast(self, names: Sequence[str], call_index: str) -> bool:
        """Whether all these modules will be forecast in this call."""
        ...


@dataclass(frozen=True)
class Feeder:
    """A module that feeds only modules that are hooked: its name, theirs, and its block's ("" outside of blocks)."""

    name: str
    sinks: tuple[str, ...]
    block: str = ""


def feeders(
    transformer: nn.Module, places: Sequence[Place], verified: str | None, is_complete: bool
) -> Iterator[Feeder]:
    """The modules that feed nothing but these places, as far as the table knows.

    Args:
        verified: name of the block that is evaluated at forecast steps too; None: there is none.
        is_complete: whether the places are all branches of all blocks.
    """
    modules = dict(transformer.named_modules())
    forecast = [place.name for place in places if place.kind == "forecast"]
    for name in dict.fromkeys(place.block for place in places if place.kind == "forecast"):
        block = modules.get(name)
        if name == verified or block is None:
            continue
        kind = type(block).__name__ + (f", {block.norm_type}" if hasattr(block, "norm_type") else "")
        for norm, branches in FEEDS.get(kind, {}).items():
            sinks = tuple(f"{name}.{branch}" for branch in branches if getattr(block, branch, None) is not None)
            if f"{name}.{norm}" in modules and sinks and set(forecast).issuperset(sinks):
                yield Feeder(f"{name}.{norm}", sinks, name)
    rotary = ROTARY.get(type(transformer).__name__)
    if is_complete and verified is None and rotary is not None and rotary in modules:
        yield Feeder(rotary, tuple(forecast))


class FeederTap:
    """Leaves a feeder out where all that it feeds is forecast."""

    def __init__(self, owner: Caller, feeder: Feeder, modules: dict[str, nn.Module]):
        self.owner, self.feeder = owner, feeder
        self.block = modules[feeder.block] if feeder.block else None
        self.stand_in: tuple[Any, torch.device] | None = None
        """In the place of what it returned, and that output's device. Its type does not matter: nothing reads it."""
        self.hook = Hook(modules[feeder.name], self.call)

    def call(self, inner: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Replace the module's forward."""
        owner, feeder = self.owner, self.feeder
        if not owner.is_inside:
            return inner(*args, **kwargs)
        is_idle = owner.is_forecast(feeder.sinks, owner.call_index(feeder.name))
        # a feed-forward that is called in chunks counts its rows
        if is_idle and self.stand_in is not None and getattr(self.block, "_chunk_size", None) is None:
            return self.stand_in[0]
        output = inner(*args, **kwargs)
        device = tree_leaves(output)[0].device
        if self.stand_in is None or self.stand_in[1] != device:
            self.stand_in = (_nan_like(output), device)
        return output


@torch.inference_mode(False)  # for the next runs too, which may have gradients
def _nan_like(output: Any) -> Any:
    """A NaN that broadcasts, in the place of every tensor."""

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        return torch.full((1,) * leaf.ndim, torch.nan, dtype=leaf.dtype, device=leaf.device)

    return tree_map(replace, output)

"""Search for a transformer's residual blocks, and for their attention and feed-forward modules (branches), by name.

A block is an entry of a `ModuleList` that is a child of the transformer and has an entry with a branch.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Kind = Literal["forecast", "residual", "stack", "skip", "output"]


@dataclass(frozen=True)
class Place:
    """A module to hook."""

    name: str  # path in the transformer; "" is the transformer
    kind: Kind  # "residual": output - input is forecast; "stack": of all blocks together; "skip": placeholder as output
    block: str  # path of its block
    sink: str | None = None  # the forecast module that reads a skipped module's output, if known
    narrow: bool = False  # whether a skipped module's placeholder may have width 0


ATTENTION = re.compile(r"(\w+_)?(attn|attention|mhba)\d*(_\w+)?")
FEED_FORWARD = re.compile(r"(\w+_)?(ff|ffn|mlp|moe|feed_?forward|transition)\d*(_\w+)?")
# modules that are not branches: norms, modulations and parts of a branch
NON_BRANCH_NAMES = re.compile(r"(\w+_)?(\w*norm|ln|proj|act|mod|gate|scale|shift|lora|adaln)(_\w+|\d*)", re.IGNORECASE)
# children of single-stream blocks (FLUX): proj_out mixes the outputs of the other two; it is forecast, they are skipped
FUSED = ("attn", "proj_mlp", "proj_out")

# single-stream blocks that only concatenate the outputs of skipped modules: a placeholder may have width 0
NARROW = re.compile(r"(Flux|HunyuanVideo(TokenReplace)?|HunyuanImage|Chroma)SingleTransformerBlock")

# lists of blocks that process texts or a control video, not the denoised stream
SIDE = re.compile(r"(text|txt|context|caption|siglip|vace)(_\w+)?")
STREAMS = ("hidden_states", "encoder_hidden_states")  # streams are the arguments that blocks update
MAIN = ("hidden_states", "gen_seq", "visual_embed", "vis", "x")  # names of the argument with the denoised stream
# classes of blocks that return the text's tensor before the image's
TEXT_FIRST_BLOCKS = re.compile(
    r"(Flux2?(Single)?|Flux3Single|QwenImage|(AuraFlow)?Joint|Bria(Single|Fibo)?|Chroma|(LongCat|Ovis)Image(Single)?)"
    r"TransformerBlock"
)
OUTPUT_STREAMS = {
    "BriaFibo2TransformerBlock": ("x",),
    "Cosmos3VLTextMoTDecoderLayer": ("und_seq", "gen_seq"),
    "Kandinsky6FusedTransformerDecoderBlock": ("vis", "aud"),
    "LTX2VideoTransformerBlock": ("hidden_states", "audio_hidden_states"),
}
"""By class: the argument that each output of a block updates. Default: `STREAMS`, reversed for `TEXT_FIRST_BLOCKS`."""
ONE_TENSOR_TRANSFORMERS = ("QwenImage21Transformer2DModel",)  # they return text and latent in one tensor, text first
CHANNEL_AXES = {"CogVideoX": 2, "ConsisID": 2, "Kandinsky": 4}  # axis of latents, by prefix of the class; default 1


def bind_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(_parameters(type(module).forward), args)) | kwargs


@functools.lru_cache(maxsize=256)
def _parameters(forward: Any) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


def stream_arguments(module: nn.Module) -> tuple[str, ...]:
    """Return the name of the argument that each output of a block updates."""
    name = type(module).__name__
    return STREAMS[::-1] if TEXT_FIRST_BLOCKS.fullmatch(name) else OUTPUT_STREAMS.get(name, STREAMS)


def find_streams(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the inputs of a block that its outputs may update, by argument."""
    arguments = bind_arguments(module, args, kwargs)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    names = [name for name in stream_arguments(module) if name in tensors]
    return {name: tensors[name] for name in names or list(tensors)[:1]}


def match_outputs(
    module: nn.Module, streams: dict[str, Tensor], shapes: Sequence[tuple[int, ...] | None]
) -> list[str | None]:
    """Return the name of the input of equal shape that each output of a block updates; None if that is unknown."""
    declared = stream_arguments(module)
    names: list[str | None] = []
    for i, shape in enumerate(shapes):
        equal = [name for name in streams if shape is not None and tuple(streams[name].shape) == shape]
        name = declared[i] if i < len(declared) and declared[i] in equal else equal[0] if len(equal) == 1 else None
        names.append(name)
    return names


def main_stream_name(streams: dict[str, Tensor]) -> str:
    return next((name for name in MAIN if name in streams), next(iter(streams)))


def find_main_stream(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Find the denoised stream among the arguments of a block, or of a module in a block."""
    arguments = bind_arguments(module, args, kwargs)
    return find_latent((), {name: arguments[name] for name in (*MAIN, *arguments) if name in arguments})


def find_latent(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Find `hidden_states`, or the first floating tensor with two or more axes. Raises ValueError if there is none."""
    latent = kwargs.get("hidden_states")
    if not is_feature(latent):
        latent = next((leaf for leaf in tree_leaves((args, kwargs)) if is_feature(leaf)), None)
    if not isinstance(latent, Tensor):
        raise ValueError("a transformer was called without a latent: no argument is a floating tensor with two axes")
    return latent


def order_axes(transformer: nn.Module, latent: Tensor) -> Tensor:
    """Move the channels of an unpacked latent: [B, C, ...]. Conditions among Kandinsky's channels are removed."""
    name, config = type(transformer).__name__, getattr(transformer, "config", {})
    if name.startswith("Kandinsky"):
        latent = latent[..., : config["in_visual_dim"]]
    return latent.movedim(next((axis for prefix, axis in CHANNEL_AXES.items() if name.startswith(prefix)), 1), 1)


def is_feature(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim > 1


def find_blocks(transformer: nn.Module, main_only: bool = False) -> dict[str, nn.Module]:
    """Return the blocks by name, in the order of the module tree. main_only: only blocks of the denoised stream."""
    blocks: dict[str, nn.Module] = {}
    for list_name, child in transformer.named_children():
        if isinstance(child, nn.ModuleList) and not (main_only and SIDE.fullmatch(list_name)):
            entries = {f"{list_name}.{i}": block for i, block in enumerate(child)}
            if any(find_branches(block) for block in entries.values()):
                blocks |= entries
    return blocks


def find_branches(block: nn.Module, prefix: str = "") -> dict[str, str]:
    """Return the role of each branch: "attention", "feed_forward", "fused" (both), or "feeder" of a fused branch."""
    children = dict(block.named_children())
    if all(name in children for name in FUSED):
        return {prefix + "attn": "feeder", prefix + "proj_mlp": "feeder", prefix + "proj_out": "fused"}
    roles: dict[str, str] = {}
    for name in children:
        for pattern, role in ((ATTENTION, "attention"), (FEED_FORWARD, "feed_forward")):
            if pattern.fullmatch(name) and not NON_BRANCH_NAMES.fullmatch(name):
                roles.setdefault(prefix + name, role)
    if not roles and len(children) == 1:  # the only child is the actual block
        (name,) = children
        return find_branches(children[name], f"{prefix}{name}.")
    return roles


def find_places(transformer: nn.Module, where: str, main_only: bool = False) -> list[Place]:
    """Return the modules to hook for a `where` that is a name, in the order of the module tree.

    main_only: only modules of the denoised stream; "stack" implies it. Raises ValueError if branches are unknown.
    """
    if where == "output":
        return [Place("", "output", "")]
    blocks = find_blocks(transformer, main_only or where == "stack")
    class_name = type(transformer).__name__
    if not blocks:
        raise ValueError(
            f"where={where!r}: {class_name} has no list of blocks with attention or feed-forward modules; it has "
            f"{', '.join(name for name, _ in transformer.named_children())}. Use where='output', or where=[...] for "
            "modules by name"
        )
    if where in ("block", "stack"):
        return [Place(name, "residual" if where == "block" else "stack", name) for name in blocks]
    places = []
    for name, block in blocks.items():
        roles = find_branches(block, f"{name}.")
        if not roles:
            raise ValueError(
                f"where='module': block {name} ({type(block).__name__}) of {class_name} has no attention or feed-"
                "forward module with a known name; use where='block', or where=[...] for modules by name"
            )
        sink = next((branch for branch, role in roles.items() if role == "fused"), None)
        for branch, role in roles.items():
            if role == "feeder":
                places.append(Place(branch, "skip", name, sink, NARROW.fullmatch(type(block).__name__) is not None))
            else:
                places.append(Place(branch, "forecast", name))
    return places


def match_patterns(transformer: nn.Module, modules: tuple[str, ...], skip: tuple[str, ...]) -> list[Place]:
    """Return the modules to hook, by regular expressions for their names.

    Raises ValueError if a pattern matches nothing, a module matches both `modules` and `skip`, a match is inside
    another match, or a skipped module comes after the last forecast.
    """
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # they have no forward
    names = [name for name, module in transformer.named_modules() if name and not isinstance(module, containers)]
    kinds: dict[str, Kind] = {}
    for setting, pattern in [("modules", pattern) for pattern in modules] + [("skip", pattern) for pattern in skip]:
        kind: Kind = "forecast" if setting == "modules" else "skip"
        matching = [name for name in names if re.fullmatch(pattern, name)]
        if not matching:
            branch_names = [
                branch
                for name, block in find_blocks(transformer).items()
                for branch in find_branches(block, f"{name}.")
            ]
            raise ValueError(
                f"{setting}: pattern {pattern!r} matches no module of {type(transformer).__name__}; "
                f"names look like {', '.join((branch_names or names)[:6])}; TaylorSeer(interval=5) needs no patterns"
            )
        for name in matching:
            if kinds.setdefault(name, kind) != kind:
                raise ValueError(f"modules and skip both match {name!r}; a module is forecast or skipped")
    matches = [name for name in names if name in kinds]
    for name in matches:
        parents = [name[:i] for i, letter in enumerate(name) if letter == "." and name[:i] in kinds]
        if parents:
            raise ValueError(f"modules or skip match {name!r} and {parents[0]!r}, which contains it; leave one out")
    last_forecast = max(index for index, name in enumerate(matches) if kinds[name] == "forecast")
    unused = matches[last_forecast + 1 :]
    if unused:
        raise ValueError(
            f"skip: no forecast comes after {', '.join(unused)}, so their placeholders would reach the output; "
            f"the last forecast is {matches[last_forecast]!r}. Add one to modules=..., or do not skip them"
        )
    return [Place(name, kinds[name], ".".join(name.split(".")[:2])) for name in matches]

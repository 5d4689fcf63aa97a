"""Transformers with random weights that forecast in turns: what `pictures.py` and the scripts of each peer share."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import common
import diffusers
import torch
from common import Contestant
from diffusers import DiTTransformer2DModel, FluxTransformer2DModel
from provenance import COMMIT
from torch import Tensor, nn

import paradec

MODELS = ("DiT", "FLUX")
STEPS = 24
SCHEDULE = {"interval": 5, "order": 1, "first_enhance": 3}
"""diffusers'."""
FULL_STEPS = (0, 1, 2, 4, 9, 14, 19)
TARGETS = ("stack", "output")
"""Of ours beside "module", which forecasts what diffusers' hook does."""
SIZES: dict[str, dict[str, dict[str, int]]] = {
    "tiny": {
        "DiT": {"layers": 4, "width": 48, "side": 8, "batch": 2},
        "FLUX": {"layers": 2, "singles": 3, "width": 48, "side": 8, "text": 16, "batch": 1},
    },
    "deep": {  # as many blocks as DiT-XL and FLUX.1 have, with next to nothing in them
        "DiT": {"layers": 28, "width": 48, "side": 8, "batch": 2},
        "FLUX": {"layers": 19, "singles": 38, "width": 48, "side": 8, "text": 16, "batch": 1},
    },
    "wide": {
        "DiT": {"layers": 4, "width": 256, "side": 8, "batch": 2},
        "FLUX": {"layers": 2, "singles": 3, "width": 256, "side": 8, "text": 16, "batch": 1},
    },
    "medium": {
        "DiT": {"layers": 12, "width": 256, "side": 16, "batch": 2},
        "FLUX": {"layers": 4, "singles": 8, "width": 256, "side": 16, "text": 64, "batch": 1},
    },
}
"""`side` squared is the number of positions."""

Attach = Callable[[nn.Module, str], contextlib.AbstractContextManager[Callable[[], Any]]]
"""Accelerates a transformer (of this model) until it is left; calls what it gives at the start of every run."""


def build(model: str, size: dict[str, int]) -> nn.Module:
    """A transformer with random weights, all of them in use."""
    torch.manual_seed(0)
    width = size["width"]
    if model == "DiT":
        heads = {"num_attention_heads": 4, "attention_head_dim": width // 4, "num_layers": size["layers"]}
        made: Any = DiTTransformer2DModel(
            **heads, sample_size=2 * size["side"], in_channels=4, out_channels=4, num_embeds_ada_norm=1000
        )
    else:
        heads = {"num_attention_heads": 2, "attention_head_dim": width // 2, "num_layers": size["layers"]}
        text = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
        made = FluxTransformer2DModel(
            **heads,
            **text,
            num_single_layers=size["singles"],
            axes_dims_rope=(width // 2 - 16, 8, 8),
            patch_size=1,
            in_channels=16,
        )
    for parameter in made.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    module: nn.Module = made.eval().requires_grad_(False)
    return module


def inputs(model: str, size: dict[str, int]) -> dict[str, Tensor]:
    """The arguments of a call but for the timestep."""
    draw = torch.Generator().manual_seed(1)
    batch, side = size["batch"], size["side"]
    if model == "DiT":
        labels = torch.arange(1, batch + 1)
        return {"hidden_states": torch.randn(batch, 4, 2 * side, 2 * side, generator=draw), "class_labels": labels}
    axis = torch.arange(float(side))
    return {
        "hidden_states": torch.randn(batch, side * side, 16, generator=draw),
        "encoder_hidden_states": torch.randn(batch, size["text"], 32, generator=draw),
        "pooled_projections": torch.randn(batch, 32, generator=draw),
        "img_ids": torch.cartesian_prod(torch.zeros(1), axis, axis),
        "txt_ids": torch.zeros(size["text"], 3),
    }


@torch.no_grad()
def denoise(model: str, module: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """The latent after Euler steps from time 1 to 0."""
    latent = given["hidden_states"]
    for i in range(STEPS):
        time = torch.full((len(latent),), (STEPS - i) / STEPS)
        time = (1000 * time).long() if model == "DiT" else time
        output = module(**given | {"hidden_states": latent}, timestep=time, return_dict=False)[0]
        latent = latent - output / STEPS
    return latent


@contextlib.contextmanager
def plainly(module: nn.Module, model: str) -> Any:
    """All steps are evaluated."""
    yield lambda: None


def ours(**settings: Any) -> Attach:
    """paradec's session."""

    @contextlib.contextmanager
    def attach(module: nn.Module, model: str) -> Any:
        rule = paradec.Every(SCHEDULE["interval"], SCHEDULE["first_enhance"], "diffusers")
        sampler = paradec.Forecast(when=rule, order=SCHEDULE["order"], **settings)
        session = paradec.accelerate(module, sampler)
        yield session.reset
        session.detach()

    return attach


def contestant(
    stack: contextlib.ExitStack, name: str, attach: Attach, model: str, size: dict[str, int], version: str
) -> Contestant:
    """A method on a transformer of its own, attached until `stack` is closed."""
    module, given = build(model, size), inputs(model, size)
    start = stack.enter_context(attach(module, model))

    def run() -> Tensor:
        start()
        return denoise(model, module, given)

    return Contestant(name, run, version)


def race(
    peers: dict[str, tuple[Attach, str]], models: Sequence[str], sizes: Sequence[str], turns: int
) -> dict[str, Any]:
    """Let the peers, the plain transformer and paradec take turns, on every model in every size.

    Args:
        peers: how each is attached, and its version, by name.
    """
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    racing_ones = {"plain": (plainly, diffusers.__version__), **peers, "paradec": (ours(), COMMIT)}
    racing_ones |= {f"paradec, {target}": (ours(where=target), COMMIT) for target in TARGETS}
    found: dict[str, Any] = {}
    for size in sizes:
        for model in models:
            shape = SIZES[size][model]
            with contextlib.ExitStack() as stack:
                racing = [
                    contestant(stack, name, attach, model, shape, version)
                    for name, (attach, version) in racing_ones.items()
                ]
                common.alternate(racing, turns)
            aims = {"paradec": "diffusers"} if model == "DiT" else {}
            entry = common.report(racing, ["plain", *peers], aims)
            found[f"{model}, {size}"] = {"shape": shape, "contestants": entry}
            print(common.show(f"{model}, {size}", entry, [*peers]), flush=True)
    return found


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What the scripts of this kind are told."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--sizes", nargs="+", default=["tiny", "wide"], choices=list(SIZES))
    parser.add_argument("--turns", type=int, default=7, help="default: %(default)s")
    return parser

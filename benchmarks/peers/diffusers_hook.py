"""diffusers' own TaylorSeer hook (`TaylorSeerCacheConfig`), attached to the branches that ours forecasts.

    python benchmarks/peers/diffusers_hook.py [--sizes tiny wide] [--models DiT FLUX]

Prints what `pictures.py` measures of it alone; nothing is written.
"""

from __future__ import annotations

import contextlib
from typing import Any

import diffusers
import torch
from diffusers import TaylorSeerCacheConfig
from diffusers.hooks import HookRegistry, apply_taylorseer_cache
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from forecasting import SCHEDULE, Attach, arguments, race
from torch import nn

BRANCHES = {
    "DiT": [r"transformer_blocks\.\d+\.(attn1|ff)"],
    # no module is a single block's sum: its matrix of both is forecast, and what feeds it still computed
    "FLUX": [r"transformer_blocks\.\d+\.(attn|ff|ff_context)", r"single_transformer_blocks\.\d+\.(attn|proj_out)"],
    "Wan": [r"blocks\.\d+\.(attn1|attn2|ffn)"],
}
BRANCHES["digits"] = BRANCHES["DiT"]


@contextlib.contextmanager
def attach(module: nn.Module, model: str, **changes: Any) -> Any:
    """With the context that its pipelines would set; `changes` of the settings."""
    settings = {
        "cache_interval": SCHEDULE["interval"],
        "disable_cache_before_step": SCHEDULE["first_enhance"],
        "max_order": SCHEDULE["order"],
        "taylor_factors_dtype": torch.float32,
        "cache_identifiers": BRANCHES[model],
    }
    config = TaylorSeerCacheConfig(**settings | changes)
    apply_taylorseer_cache(module, config)
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.invalidate_child_registries_cache()

    def start() -> None:
        registry.reset_stateful_hooks()
        _set_cache_context(module, CacheContext("all"))

    yield start
    registry.remove_hook("taylorseer_cache", recurse=True)


def peers() -> dict[str, tuple[Attach, str]]:
    """For `forecasting.race`."""
    return {"diffusers": (attach, diffusers.__version__)}


if __name__ == "__main__":
    args = arguments(__doc__).parse_args()
    race(peers(), args.models, args.sizes, args.turns)

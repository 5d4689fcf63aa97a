"""What a forecast step leaves out beside the forecast modules: nothing of the output may change by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_pipelines import MODELS, denoise, model
from torch import Tensor, nn

from paradec import Forecast, accelerate

FULL = [0, 1, 4]
SPARED = {"DiT": 2, "FLUX": 4, "SD3": 4, "PixArt": 2, "Sana": 0, "Wan": 3, "HunyuanVideo": 4, "QwenImage": 4}
"""Norms of a (two-stream) block that a forecast step leaves out."""


def both(module: nn.Module, inputs: dict[str, Any], settings: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """The latents as they are, and where nothing is spared."""
    with accelerate(module, Forecast(**settings)):
        first = denoise(module, inputs, 6, **options)
    with accelerate(module, Forecast(**settings)) as session:
        for tap in session.transformers[0].feeders:
            tap.hook.remove()
        return first, denoise(module, inputs, 6, **options)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes_and_norms_rest(name: str) -> None:
    module, inputs = model(name)
    first, second = both(module, inputs, {"when": FULL, "order": 1})
    assert torch.equal(first, second)
    with accelerate(module, Forecast(when=FULL, order=1)) as session:
        taps = session.transformers[0].feeders
        norms = [tap.block for tap in taps if tap.block is not None]
        assert max(map(norms.count, norms), default=0) == SPARED[name]
        assert sum(tap.block is None for tap in taps) == (name in ("FLUX", "Wan", "HunyuanVideo"))
        calls = dict.fromkeys([tap.feeder.name for tap in taps], 0)
        for tap in taps:

            def forward(
                *args: Any, name: str = tap.feeder.name, own: Any = tap.hook.fn_ref.original_forward, **kwargs: Any
            ) -> Any:
                calls[name] += 1
                return own(*args, **kwargs)

            tap.hook.fn_ref.original_forward = forward
        assert torch.equal(denoise(module, inputs, 6), first)
    assert set(calls.values()) <= {len(FULL)}, calls


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["DiT", "FLUX", "SD3"])
@pytest.mark.parametrize(
    "settings",
    [
        {"when": "verification"},
        {"when": {"when": "accumulated_change", "threshold": 0.3}},
        {"when": FULL, "how": "foca"},
        {"when": FULL, "how": "taylor(order=3, dtype=bfloat16)"},
        {"when": FULL, "where": "block"},
    ],
)
def test_rules_and_bases(name: str, settings: dict[str, Any]) -> None:
    module, inputs = model(name)
    first, second = both(module, inputs, settings)
    assert torch.equal(first, second)


def test_two_calls_a_step() -> None:
    module, inputs = model("FLUX")
    first, second = both(module, inputs, {"when": FULL}, calls=2)
    assert torch.equal(first, second)


def test_chunks_of_a_feed_forward() -> None:
    """A feed-forward that is called in chunks needs an input of full length, also while it is forecast."""
    module, inputs = model("DiT")
    for block in module.transformer_blocks:
        block.set_chunk_feed_forward(4, 1)
    first, second = both(module, inputs, {"when": FULL})
    assert torch.equal(first, second)

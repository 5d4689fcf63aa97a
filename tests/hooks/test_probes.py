"""Rules that decide inside a call, over all blocks as one stack: FBCache, DBCache, MagCache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig
from diffusers.hooks.mag_cache import nearest_interp
from test_accelerate import attributes
from tiny_pipelines import MODELS, denoise, flux_pipeline, model, run_flux, run_wan, wan_pipeline
from torch import Tensor

from paradec import TaylorSeer, accelerate
from paradec.hooks import magcache
from paradec.hooks.memory import estimate
from paradec.samplers.forecast.magcache import MagRatios
from paradec.samplers.forecast.rules import FirstBlock, MagCache

RATIOS = (1.0, 1.06, 0.97, 1.03, 0.99, 1.02, 0.96, 1.08, 1.01, 0.95)
PIPELINES: dict[str, tuple[Callable[[], Any], Callable[..., Tensor]]] = {
    "flux": (flux_pipeline, run_flux),
    "wan": (wan_pipeline, run_wan),
}


@pytest.fixture(scope="module")
def flux() -> Any:
    return flux_pipeline()


@pytest.fixture(scope="module")
def wan() -> Any:
    return wan_pipeline()


def kinds(session: Any) -> str:
    """The latest run's calls: "F" where the stack was evaluated, "." where it was forecast."""
    return "".join(".F"[call.evaluated > 0] for call in session.report().calls)


# ---- beside diffusers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("name", PIPELINES)
def test_first_block_equals_diffusers(name: str, threshold: float, request: Any) -> None:
    """Bit for bit, with guidance in two calls (Wan) and two kinds of blocks (FLUX)."""
    pipe, run = request.getfixturevalue(name), PIPELINES[name][1]
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=threshold))
    theirs = run(pipe)
    pipe.transformer.disable_cache()
    with accelerate(pipe, FirstBlock(threshold)) as session:
        assert torch.equal(run(pipe), theirs)
    assert ("." in kinds(session)) == (threshold > 0), kinds(session)
    if threshold == 0:
        assert torch.equal(run(pipe), theirs)


@pytest.mark.parametrize(("most", "kept"), [(3, 0.2), (2, 0.0)])
@pytest.mark.parametrize("name", PIPELINES)
def test_magcache_equals_diffusers(name: str, most: int, kept: float, request: Any) -> None:
    pipe, run = request.getfixturevalue(name), PIPELINES[name][1]
    settings = {"threshold": 0.2, "max_skip_steps": most, "retention_ratio": kept}
    pipe.transformer.enable_cache(MagCacheConfig(mag_ratios=list(RATIOS), num_inference_steps=8, **settings))
    theirs = run(pipe, 8)
    pipe.transformer.disable_cache()
    with accelerate(pipe, MagCache(RATIOS, **settings)) as session:
        assert torch.equal(run(pipe, 8), theirs)
    assert "." in kinds(session)


def test_calibration_equals_diffusers(flux: Any, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """What diffusers prints, ours returns; the pipeline stays as it was."""
    before = attributes(flux.transformer)
    found = magcache.calibrate(flux, lambda: run_flux(flux, 6))
    assert attributes(flux.transformer) == before
    flux.transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=6))
    run_flux(flux, 6)
    flux.transformer.disable_cache()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[1.0")]
    assert found.values == pytest.approx(json.loads(said[0]), rel=1e-5)
    assert found.values[0] == 1 and len(set(found.values)) > 3
    found.save(tmp_path / "ratios.json")
    assert MagRatios.load(tmp_path / "ratios.json") == found
    assert MagCache(tmp_path / "ratios.json") == MagCache(found) == MagCache(torch.tensor(found.values).double())


@pytest.mark.parametrize("length", [1, 2, 5, 10, 28])
def test_ratios_of_other_lengths_are_those_of_diffusers(length: int) -> None:
    source = torch.linspace(1, 2, length, dtype=torch.float64)
    for steps in range(1, 60):
        assert MagRatios(tuple(source.tolist())).at(steps) == tuple(nearest_interp(source, steps).tolist())


# ---- every class of transformer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_transformers(name: str) -> None:
    """Threshold 0 is the plain model; what blocks add by themselves is what the stack adds; nothing is left behind."""
    module, inputs = model(name)
    before, plain = attributes(module), denoise(module, inputs, 5)
    with accelerate(module, FirstBlock(0)):
        assert torch.equal(denoise(module, inputs, 5), plain)
    ends, took = {}, {}
    for target in ("block", "stack"):
        with accelerate(module, TaylorSeer(interval=3, target=target)) as session:
            ends[target] = denoise(module, inputs, 6)
        took[target] = session.report().bytes
        assert kinds(session) == "F..F.."
    # the same sum, added in another order, and fewer histories
    torch.testing.assert_close(ends["stack"], ends["block"], rtol=1e-4, atol=1e-4)
    assert not torch.equal(ends["stack"], denoise(module, inputs, 6)) and took["stack"] < took["block"]
    # what was said about the memory beforehand is what it took: with a probe's residual, and at order 1
    time = torch.full((len(inputs["hidden_states"]),), 500)
    for refresh in (None, FirstBlock(0)):
        sampler = TaylorSeer(interval=1, refresh=refresh, basis="taylor", target="stack")
        with accelerate(module, sampler) as session:
            denoise(module, inputs, 2)
        assert estimate(module, sampler, **inputs, timestep=time) == session.report().bytes
    assert attributes(module) == before

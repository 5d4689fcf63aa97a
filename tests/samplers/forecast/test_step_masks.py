"""cache-dit's named step masks: beside masks that cache-dit 1.5.3 made, in runs, and what is refused."""

from pathlib import Path

import pytest
import torch
from pipelines import dit_pipeline, flux_pipeline, run_flux
from recorded import golden, is_packaged, read_head, read_json, replay

from paradec import Forecast, accelerate
from paradec.samplers.forecast.step_schedule import MASKS, step_mask

FILES = [path for path in sorted(golden("diffusion").glob("*.json")) if "masks" in read_head(path)]
"""By name and number of steps: 1 where a step is evaluated."""


@pytest.mark.parametrize(("path", "name"), [(path, name) for path in FILES for name in read_head(path)["masks"]])
def test_equals_cache_dit(path: Path, name: str) -> None:
    masks = read_json(path)["masks"]
    if is_packaged("diffusion"):
        assert set(masks) == set(MASKS) and len(masks[name]) == 22
    for steps in masks[name]:
        with replay(f"{path.stem}, {name}, {steps} steps"):
            flags = masks[name][steps]
            assert step_mask(name, int(steps)) == tuple(i for i, flag in enumerate(flags) if flag == "1")


def test_a_mask_is_a_schedule() -> None:
    """Of every length that has one: from the first step to the last; and sparser by the name."""
    for steps in (4, 6, *range(8, 120)):
        made = {name: step_mask(name, steps) for name in MASKS}
        for found in made.values():
            assert found[0] == 0 and found[-1] == steps - 1 and list(found) == sorted(set(found))
            assert Forecast(when=found).when.steps == found
        counts = [len(made[name]) for name in ("slow", "medium", "fast", "ultra")]
        assert counts == sorted(counts, reverse=True)


def test_in_a_pipeline() -> None:
    pipe = flux_pipeline()
    with accelerate(pipe, Forecast(when="fast")) as session:
        for steps in (9, 16):
            named = run_flux(pipe, steps)
            assert tuple(session.report().full_steps) == step_mask("fast", steps)
        with pytest.raises(ValueError, match="when='fast': there is no mask for 5 steps"):
            run_flux(pipe, 5)
        assert torch.equal(run_flux(pipe, 16), named)
    with accelerate(pipe, Forecast(when=step_mask("fast", 16))):
        assert torch.equal(run_flux(pipe, 16), named)


def test_what_is_refused() -> None:
    for wrong in ("fastest", "", "Slow"):
        with pytest.raises(ValueError, match=f"when.*{wrong}"):
            Forecast(when=wrong)
    for steps in (0, -1, 2.5, True, None):
        with pytest.raises(ValueError, match="steps="):
            step_mask("slow", steps)
    for steps in (1, 2, 3, 5, 7):
        with pytest.raises(ValueError, match=f"no mask for {steps} steps"):
            step_mask("slow", steps)
    module = dit_pipeline().transformer
    calls = []
    module.transformer_blocks[0].register_forward_hook(lambda *call: calls.append(1))
    with accelerate(module, Forecast(when="slow")), pytest.raises(ValueError, match=r"step_mask\('slow', "):
        module(torch.zeros(1, 4, 8, 8), torch.tensor([5]), class_labels=torch.tensor([1]))
    assert not calls

"""Presets after diffusers' LLaDA2Pipeline: the tokens of `generate(preset=)`, and what no pipeline can follow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import BlockRefinementScheduler, LLaDA2Pipeline
from pipelines import BLOCK, BlockCausal, run_text
from small_models import MASK, tiny

import paradec
from paradec import samplers, schedulers
from paradec.models.adapter import Model


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny(2, "block_causal")


@pytest.mark.parametrize(
    "sampler",
    [
        samplers.create("threshold", threshold=0.4),
        samplers.create("hierarchy", threshold=0.6, low_threshold=0.2),
        samplers.create("credit(threshold=0.5)+localleap"),
        samplers.Union(rules=("localleap",), stages=("credit",)),
        samplers.Intersection(rules=("threshold", "entropy_threshold")),
        "factor",
    ],
    ids=str,
)
def test_a_pipeline_decodes_as_generate_does(model: Model, sampler: Any, tmp_path: Path) -> None:
    paradec.Request(sampler=sampler, block_length=BLOCK, max_new_tokens=8).save(tmp_path / "p.json")
    ids = torch.randint(0, 30, (2, 8), generator=torch.Generator().manual_seed(2))
    pipe = LLaDA2Pipeline(BlockCausal(model), BlockRefinementScheduler(block_length=BLOCK))
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = schedulers.from_preset(tmp_path / "p.json")
    called = schedulers.call_arguments(tmp_path / "p.json")
    assert called == {"gen_length": 8}
    expected = paradec.generate(model, input_ids=ids, preset=tmp_path / "p.json", eos_early_stop=False)
    assert torch.equal(run_text(pipe, ids, **called), expected.new_tokens)
    assert pipe.model.calls == expected.nfe


def test_steps_are_a_block_s(model: Model) -> None:
    preset = paradec.Request(sampler="low_confidence", block_length=BLOCK, max_new_tokens=8, steps=4, temperature=0.5)
    called = schedulers.call_arguments(preset)
    assert called == {"gen_length": 8, "temperature": 0.5, "num_inference_steps": 2}
    made = schedulers.from_preset(preset)
    assert isinstance(made, schedulers.LowConfidenceScheduler) and made.config.num_inference_steps == 2
    assert schedulers.from_preset(preset, block_length=2).config.block_length == 2
    ids = torch.randint(0, MASK - 1, (1, 8), generator=torch.Generator().manual_seed(2))
    pipe = LLaDA2Pipeline(BlockCausal(model), made)
    pipe.set_progress_bar_config(disable=True)
    greedy = {**called, "temperature": 0.0}
    expected = paradec.generate(model, input_ids=ids, preset=preset, temperature=0.0, eos_early_stop=False)
    assert torch.equal(run_text(pipe, ids, **greedy), expected.new_tokens) and pipe.model.calls == 4


def test_a_seed_is_a_generator(model: Model) -> None:
    preset = paradec.Request(sampler="threshold", block_length=BLOCK, max_new_tokens=8, temperature=0.8, seed=3)
    pipe = LLaDA2Pipeline(BlockCausal(model), schedulers.from_preset(preset))
    pipe.set_progress_bar_config(disable=True)
    ids = torch.randint(0, MASK - 1, (2, 8), generator=torch.Generator().manual_seed(2))
    first, again = (run_text(pipe, ids, **schedulers.call_arguments(preset)) for _ in range(2))
    called = {**schedulers.call_arguments(preset), "generator": torch.Generator().manual_seed(3)}
    assert torch.equal(first, again) and torch.equal(first, run_text(pipe, ids, **called))
    with pytest.raises(ValueError, match="seed of the preset=.1, 2."):
        schedulers.call_arguments(paradec.Request(seed=(1, 2)))


@pytest.mark.parametrize(
    ("preset", "word"),
    [
        ({"cache": "dual"}, "cache='dual' of the preset has no place"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
        ({"sampler": "wino"}, "'wino' of the preset has no scheduler"),
        ({"sampler": "freedave"}, "'freedave'"),
        ({"steps": 4, "sampler": "low_confidence"}, "steps=4 of the preset"),
        ({"steps": 10, "block_length": 4, "max_new_tokens": 12}, "steps=10 must be a multiple .* blocks .3"),
        ({"smapler": "x"}, "did you mean 'sampler'"),
    ],
)
def test_what_no_pipeline_follows(preset: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        schedulers.from_preset(preset)

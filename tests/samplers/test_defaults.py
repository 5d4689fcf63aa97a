"""Defaults follow the papers, or their public code if a paper states none.

A changed default must also be changed in docs/tables/settings.csv (samplers, caches, presets) or here (the others)."""

import dataclasses
from typing import Any

import pytest
from places import ROOT, load_script

import paradec
from paradec import caches, samplers
from paradec.models.adapter import Model
from paradec.models.text import diffusion_gemma

VALUES: dict[str, dict[str, Any]] = {
    "AdaptiveBlocks": {
        "delimiter_threshold": 0.3, "delimiters": ("\n",), "delimiter_match": "exact", "window": 0.25, "length": 32,
        "min_length": 1, "model_block": None, "model_align": "absolute",
    },
    "SparseD": {
        "select": 0.3, "skip": 0.2, "block_size": 128, "dense_steps": None, "refresh_pattern_every": None,
        "selection": "isolated", "backend": "auto",
    },
    "Prophet": {"gaps": (7.5, 5.0, 2.5), "stages": (0.33, 0.67), "answer": None},
}  # fmt: skip


def test_samplers_caches_and_presets() -> None:
    """In settings.csv a window of None means 16, as in SJD's scripts; a canvas sampler's None is the model's value."""
    tables = load_script("benchmarks/tables.py")
    published = (ROOT / "docs" / "tables" / "settings.csv").read_text(encoding="utf-8")
    assert tables.to_csv(tables.settings_table()).splitlines() == published.splitlines()
    for cls in (registry.get(name) for registry in (samplers, caches) for name in registry.names()):
        assert cls.settings() == {field.name: field.default for field in dataclasses.fields(cls)}


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str) -> None:
    fields = dataclasses.fields(getattr(paradec, name))
    assert {field.name: field.default for field in fields} == VALUES[name]


def test_block_lengths_of_checkpoints_that_state_no_block_length(llada: Model, dream: Model) -> None:
    assert llada.default_block_length == 32
    assert dream.default_block_length is None


def test_canvases_follow_transformers_where_the_checkpoint_says_nothing() -> None:
    assert dict(diffusion_gemma.DEFAULTS) == {
        "entropy_bound": 0.1, "max_denoising_steps": 48, "t_min": 0.4, "t_max": 0.8, "stability_threshold": 1,
        "confidence_threshold": 0.005,
    }  # fmt: skip
    assert diffusion_gemma.DEFAULT_NEW_TOKENS == 256

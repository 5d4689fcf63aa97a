"""The recipe's section of the GPU benchmark: without weights a line, with the packaged model rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import load_script

gpu_recipe = load_script("benchmarks/gpu_recipe.py")
timing = load_script("benchmarks/timing.py")

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def no_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *at: None if name == "lm_eval" else find(name, *at))


def test_without_weights_nothing_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_recipe.paradec, "load", lambda *_, **__: pytest.fail("loaded"))
    recipe = gpu_recipe.DEFAULT.read_text().replace("GSAI-ML/LLaDA-8B-Instruct", "nobody/nothing")
    found = run(tmp_path, recipe, gpu_recipe.Scale())
    assert found["rows"] == [] and found["problems"] == []
    assert (
        "no weights of nobody/nothing on this disk" in found["skipped"][0] and "recipe: no" in capsys.readouterr().out
    )


def test_the_packaged_model_stands_in(tmp_path: Path) -> None:
    found = run(tmp_path, gpu_recipe.DEFAULT.read_text(), gpu_recipe.DRY)
    assert found["problems"] == [] and "not installed" in found["skipped"][0]
    recipe, slow = found["rows"]
    assert recipe["asked"] == slow["asked"] == 4 and recipe["right"] == slow["right"] == 4
    assert slow["forwards_per_answer"] == 24 > 6 * recipe["forwards_per_answer"]
    assert found["recipe"]["request"]["cache"] == "prefix"


def run(folder: Path, text: str, scale: Any) -> dict[str, Any]:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return gpu_recipe.run(timing.Section(float("inf")), CPU, scale, file)
